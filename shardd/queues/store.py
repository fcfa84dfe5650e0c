"""Define what a queue needs of the store its messages lie in; shardd.store meets it."""

from __future__ import annotations

from array import array
from typing import Protocol


class Arrival(Protocol):
    """Messages that reached one queue, in publish order; what stands beside them has one item for each."""

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


class Store(Protocol):
    """Where messages lie."""

    def read(self, entries: array[int], bytes_max: int) -> tuple[bytes, array[int]]: ...
    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes | memoryview, array[int]]:
        """As read(); a view is good until messages are appended. Not `whole`: it may end sooner."""

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None: ...
    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]: ...
    def times_returned(self, queue_id: int, entry: int) -> int: ...
    def drop_queue(self, queue_id: int, entries: array[int]) -> None: ...
