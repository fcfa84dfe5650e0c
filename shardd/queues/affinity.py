"""Give messages of one routing key to the consumer that holds unsettled messages of this key.

A queue keeps this state while a consumer that asked for key affinity (`x-key-affinity`) is
attached. Affinity then holds for all consumers of the queue, and messages are dealt one by one. A
message waits while its key is with a consumer that has no room, or that was cancelled and has not
settled. All later messages of that key wait too. Messages of other keys pass them, as far as
LOOK_MESSAGES and LOOK_BYTES reach. Messages that basic.get takes do not count.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from shardmq.shardd.queues.consumers import Consumer
from shardmq.shardd.queues.entry import PLACE
from shardmq.shardd.queues.state import Window
from shardmq.shardd.queues.store import Store

# How many messages and bytes, from the head of the queue, are searched for a message that may go.
LOOK_MESSAGES = 512
LOOK_BYTES = 256 << 10
# The first search goes this many messages beyond the free room. A consumer that settles its
# messages one by one must not cause a long search each time.
LOOK_FIRST = 16

# The head of a stored message: body bytes, property bytes, bytes of the exchange name that follows.
_SIZES = Struct("<IIB")


class Stored(NamedTuple):
    """The range of a stored message in the bytes that the store returned, and its routing key."""

    start: int
    end: int
    key: bytes


def stored(blob: bytes) -> Iterator[Stored]:
    """Yield the messages that lie back to back in `blob`.

    u32 body bytes, u32 property bytes, u8 n, exchange[n], u8 m, routing key[m], properties, body
    """
    at = 0
    while at < len(blob):
        body_bytes, property_bytes, name_bytes = _SIZES.unpack_from(blob, at)
        key = at + _SIZES.size + name_bytes + 1
        key_end = key + blob[key - 1]
        end = key_end + property_bytes + body_bytes
        yield Stored(at, end, blob[key:key_end])
        at = end


class Keys:
    """The consumer that holds unsettled messages of each key."""

    def __init__(self) -> None:
        # By key: the consumer, and the places of the unsettled messages that it holds.
        self._holders: dict[bytes, tuple[Consumer, set[int]]] = {}
        self._key_at: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._key_at)

    def holder(self, key: bytes) -> Consumer | None:
        found = self._holders.get(key)
        return None if found is None else found[0]

    def take(self, consumer: Consumer, entries: array[int], keys: Iterable[bytes]) -> None:
        """Note that a consumer got these messages.

        The first consumer of a key keeps the key until all messages of the key are settled or
        requeued.
        """
        for entry, key in zip(entries, keys, strict=True):
            place = entry & PLACE
            self._key_at[place] = key
            self._holders.setdefault(key, (consumer, set()))[1].add(place)

    def take_held(self, consumer: Consumer, store: Store) -> None:
        """Note the messages that the consumer held before any consumer asked for affinity."""
        held = consumer.unacked.held()
        while held:
            blob, sizes = store.read(held[:LOOK_MESSAGES], LOOK_BYTES)
            self.take(consumer, held[: len(sizes)], [message.key for message in stored(blob)])
            held = held[len(sizes) :]

    def back(self, entries: array[int]) -> None:
        """Note that these messages were settled or requeued."""
        for entry in entries:
            place = entry & PLACE
            key = self._key_at.pop(place, None)
            if key is not None:
                places = self._holders[key][1]
                places.discard(place)
                if not places:
                    del self._holders[key]


class Deal(NamedTuple):
    """The result of a deal: the ordinals of the messages that each consumer gets."""

    parts: dict[Consumer, list[int]]
    # The last consumer that got a new key, None if no key was new.
    last: Consumer | None


def deal(
    messages: Sequence[Stored],
    takers: Sequence[Consumer],
    keys: Keys,
    bytes_max: int,
) -> Deal:
    """Choose a consumer for each message.

    `takers` are the consumers with room, in round-robin order. A key that no consumer has goes to
    the next taker. `bytes_max` bounds the bytes of each delivery window.
    """
    parts: dict[Consumer, list[int]] = {}
    room = {taker: taker.room() for taker in takers}
    windows: dict[Window, int] = {
        taker.window: min(taker.window.room, bytes_max) for taker in takers
    }
    turn = list(takers)
    owner: dict[bytes, Consumer] = {}  # the consumers of the keys that this deal gives out
    waiting: set[bytes] = set()
    last = None
    for at, message in enumerate(messages):
        if message.key in waiting:
            continue
        consumer = owner.get(message.key) or keys.holder(message.key)
        if consumer is None:
            turn = [each for each in turn if room[each] > 0 and windows[each.window] > 0]
            if not turn:
                waiting.add(message.key)
                continue
            consumer = last = turn.pop(0)
            turn.append(consumer)
        if consumer not in room:
            room[consumer] = 0 if consumer.detached else consumer.room()
            windows.setdefault(consumer.window, min(consumer.window.room, bytes_max))
        if room[consumer] <= 0 or windows[consumer.window] <= 0:
            waiting.add(message.key)
            continue
        room[consumer] -= 1
        windows[consumer.window] -= message.end - message.start
        # Within a deal a consumer without acks keeps its keys too, so that each consumer gets its
        # share in one piece.
        owner[message.key] = consumer
        parts.setdefault(consumer, []).append(at)
    return Deal(parts, last)


class HeadMessages:
    """Messages from the head of the queue: their entries, their sizes and their stored bytes."""

    def __init__(self, entries: array[int], blob: bytes, sizes: array[int]) -> None:
        self.entries, self._blob, self._sizes = entries, blob, sizes
        self.messages = list(stored(blob))

    def __len__(self) -> int:
        return len(self.entries)

    def left(self, dealt: Deal) -> array[int]:
        """Return the entries of the messages that stay in the queue, in order."""
        left = set(range(len(self))).difference(*dealt.parts.values())
        return array("Q", [self.entries[at] for at in sorted(left)])

    def keys(self, run: Iterable[int]) -> list[bytes]:
        return [self.messages[at].key for at in run]

    def pieces(self, run: Sequence[int]) -> tuple[array[int], array[int], bytes]:
        """Return the entries, the sizes and the stored bytes of messages.

        `run` has the ordinals of the messages.
        """
        blob = b"".join([self._blob[self.messages[at].start : self.messages[at].end] for at in run])
        return (
            array("Q", [self.entries[at] for at in run]),
            array("I", [self._sizes[at] for at in run]),
            blob,
        )


def deal_from_head(
    peek: Callable[[int], tuple[array[int], bytes, array[int]]],
    takers: Sequence[Consumer],
    keys: Keys,
    bytes_max: int,
) -> tuple[HeadMessages, Deal]:
    """Deal messages from the head of the queue; search further if the first messages must all wait.

    `peek(most)` returns the entries at the head of the queue, their stored bytes and their sizes.
    """
    most = min(
        LOOK_MESSAGES, LOOK_FIRST + sum(min(taker.room(), LOOK_MESSAGES) for taker in takers)
    )
    while True:
        head = HeadMessages(*peek(most))
        dealt = deal(head.messages, takers, keys, bytes_max)
        if dealt.parts or most == LOOK_MESSAGES or len(head) < most:
            return head, dealt
        most = LOOK_MESSAGES


def alike(
    head: HeadMessages, part: Iterable[int], mark: Callable[[int], int]
) -> Iterator[list[int]]:
    """Divide `part` into runs of neighbours with the same mark.

    A mark is 0 for messages that are not redelivered. In a queue that counts returns it tells how
    often the message came back.
    """
    run: list[int] = []
    for at in part:
        if run and mark(head.entries[at]) != mark(head.entries[run[0]]):
            yield run
            run = []
        run.append(at)
    yield run
