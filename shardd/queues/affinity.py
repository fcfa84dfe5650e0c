"""Key affinity: messages of one routing key go to one consumer while it has an unsettled one of that key.

A queue keeps this while a consumer that asked for it (`x-key-affinity`) is attached; then it holds for all of its
consumers, and messages are dealt one by one. A message whose key is with a consumer that has no room, or that was
cancelled and has not settled, waits, and so do all behind it of that key; others pass it, as far as LOOK_MESSAGES and
LOOK_BYTES reach. What basic.get takes does not count.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from shardmq.shardd.queues.consumers import Consumer, Window
from shardmq.shardd.queues.entry import PLACE
from shardmq.shardd.queues.store import Store

# From the head of the queue: how far one looks for a message that may go.
LOOK_MESSAGES = 512
LOOK_BYTES = 256 << 10
# At first only so many beyond what there is room for: one that settles its messages singly is not to cost a long look.
LOOK_FIRST = 16

_SIZES = Struct(
    "<IIB"
)  # of a stored message: body bytes, property bytes, bytes of the exchange's name that follows


class Stored(NamedTuple):
    """Where a stored message lies in what the store gave, and its routing key."""

    start: int
    end: int
    key: bytes


def stored(blob: bytes) -> Iterator[Stored]:
    """u32 body bytes, u32 property bytes, u8 n, exchange[n], u8 m, routing key[m], properties, body; back to back."""
    at = 0
    while at < len(blob):
        body_bytes, property_bytes, name_bytes = _SIZES.unpack_from(blob, at)
        key = at + _SIZES.size + name_bytes + 1
        key_end = key + blob[key - 1]
        end = key_end + property_bytes + body_bytes
        yield Stored(at, end, blob[key:key_end])
        at = end


class Keys:
    """Which consumer holds unsettled messages of which key."""

    def __init__(self) -> None:
        self._holders: dict[
            bytes, tuple[Consumer, set[int]]
        ] = {}  # and the places of those messages
        self._key_at: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._key_at)

    def holder(self, key: bytes) -> Consumer | None:
        found = self._holders.get(key)
        return None if found is None else found[0]

    def take(self, consumer: Consumer, entries: array[int], keys: Iterable[bytes]) -> None:
        """The first consumer of a key has it until all of its messages are back."""
        for entry, key in zip(entries, keys, strict=True):
            place = entry & PLACE
            self._key_at[place] = key
            self._holders.setdefault(key, (consumer, set()))[1].add(place)

    def take_held(self, consumer: Consumer, store: Store) -> None:
        """What it was given before anybody asked for affinity."""
        held = consumer.unacked.held()
        while held:
            blob, sizes = store.read(held[:LOOK_MESSAGES], LOOK_BYTES)
            self.take(consumer, held[: len(sizes)], [message.key for message in stored(blob)])
            held = held[len(sizes) :]

    def back(self, entries: array[int]) -> None:
        """Settled or requeued."""
        for entry in entries:
            place = entry & PLACE
            key = self._key_at.pop(place, None)
            if key is not None:
                places = self._holders[key][1]
                places.discard(place)
                if not places:
                    del self._holders[key]


class Dealt(NamedTuple):
    """Of the messages looked at, by ordinal: to whom which go."""

    parts: dict[Consumer, list[int]]
    last: Consumer | None  # whose turn it was


def deal(
    messages: Sequence[Stored],
    takers: Sequence[Consumer],
    keys: Keys,
    bytes_max: int,
) -> Dealt:
    """`takers`: those with room whose turn it is first, for keys that nobody has."""
    parts: dict[Consumer, list[int]] = {}
    room = {taker: taker.room() for taker in takers}
    windows: dict[Window, int] = {
        taker.window: min(taker.window.room, bytes_max) for taker in takers
    }
    turn = list(takers)
    owner: dict[bytes, Consumer] = {}  # of keys that this deal gives out
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
        owner[message.key] = consumer  # also of one without acks: each gets its share in one piece
        parts.setdefault(consumer, []).append(at)
    return Dealt(parts, last)


class Looked:
    """Messages from the head of the queue: entries, and what the store has of them."""

    def __init__(self, entries: array[int], blob: bytes, sizes: array[int]) -> None:
        self.entries, self._blob, self._sizes = entries, blob, sizes
        self.messages = list(stored(blob))

    def __len__(self) -> int:
        return len(self.entries)

    def left(self, dealt: Dealt) -> array[int]:
        """Those that stay, in order."""
        left = set(range(len(self))).difference(*dealt.parts.values())
        return array("Q", [self.entries[at] for at in sorted(left)])

    def keys(self, run: Iterable[int]) -> list[bytes]:
        return [self.messages[at].key for at in run]

    def pieces(self, run: Sequence[int]) -> tuple[array[int], array[int], bytes]:
        """Entries, sizes and stored messages of some of them."""
        blob = b"".join([self._blob[self.messages[at].start : self.messages[at].end] for at in run])
        return (
            array("Q", [self.entries[at] for at in run]),
            array("I", [self._sizes[at] for at in run]),
            blob,
        )


def looked_at(
    look: Callable[[int], tuple[array[int], bytes, array[int]]],
    takers: Sequence[Consumer],
    keys: Keys,
    bytes_max: int,
) -> tuple[Looked, Dealt]:
    """A short look; a long one if it finds only messages that wait. `look(most)`: entries from the queue's head, their
    stored messages, their sizes."""
    most = min(
        LOOK_MESSAGES, LOOK_FIRST + sum(min(taker.room(), LOOK_MESSAGES) for taker in takers)
    )
    while True:
        looked = Looked(*look(most))
        dealt = deal(looked.messages, takers, keys, bytes_max)
        if dealt.parts or most == LOOK_MESSAGES or len(looked) < most:
            return looked, dealt
        most = LOOK_MESSAGES


def alike(looked: Looked, part: Iterable[int], mark: Callable[[int], int]) -> Iterator[list[int]]:
    """Runs that are all redelivered or all not, where that is counted as often."""
    run: list[int] = []
    for at in part:
        if run and mark(looked.entries[at]) != mark(looked.entries[run[0]]):
            yield run
            run = []
        run.append(at)
    yield run
