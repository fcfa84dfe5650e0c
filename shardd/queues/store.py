"""Define what a queue needs of the store of its messages. shardd.store implements it."""

from __future__ import annotations

from array import array
from typing import Final, Protocol

from shardmq.shardd.lending import LentMessages
from shardmq.shardd.queues.state import total

# The most entries that are handed out or let go in one step.
STEP_MESSAGES: Final = 8192
# The most bytes that are read at once only to learn message sizes.
SIZES_BYTES: Final = 256 << 10


class Arrival(Protocol):
    """Messages that reached one queue, in publish order.

    `facts`, `indexes` and `times` have one item for each message, or are None.
    """

    @property
    def queue_id(self) -> int: ...
    @property
    def entries(self) -> array[int]: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def facts(self) -> array[int] | None: ...
    @property
    def indexes(self) -> array[int] | None: ...
    @property
    def times(self) -> array[int] | None: ...
    @property
    def marks(self) -> int: ...
    @property
    def kinds(self) -> int: ...


class Store(Protocol):
    """The store that holds the messages of queues."""

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]: ...
    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes | memoryview | LentMessages, array[int]]:
        """Read as `read` does, or return what is good until messages are appended.

        This is a view, or messages whose bodies front doors have lent. If `whole` is False, the
        answer may end sooner.
        """

    def peek(self, entry: int, bytes_max: int) -> bytes: ...
    def came_at(self, entry: int) -> int | None: ...
    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None: ...
    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]: ...
    def times_returned(self, queue_id: int, entry: int) -> int: ...
    def drop_queue(self, queue_id: int, entries: array[int]) -> None: ...


def sizes_of(store: Store, entries: array[int]) -> array[int]:
    """Return the body bytes of each message."""
    sizes = array("I")
    while len(sizes) < len(entries):
        sizes += store.read(entries[len(sizes) : len(sizes) + STEP_MESSAGES], SIZES_BYTES)[1]
    return sizes


def bytes_of(store: Store, entries: array[int]) -> int:
    """Return the sum of the body bytes of the messages."""
    return total(sizes_of(store, entries))
