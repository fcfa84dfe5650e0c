"""Describe one segment: its bytes in memory and on disk, its counters, where its messages went.

The store decides which segment is written to, and when a segment may go. The bytes of its files
are drawn in format/segment_file.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmq.shardd.store.files import Files
from shardmq.shardd.store.format import record
from shardmq.shardd.store.format.record import LentBodies, moved_entries
from shardmq.shardd.store.format.segment_file import (
    END_BYTES,
    HEADER_BYTES,
    INDEX_SHARE_MAX,
    NO_CHAIN,
    encode_header,
    encode_index,
)
from shardmq.shardd.store.open_segment import SegmentState


@dataclass(slots=True)
class Moves:
    """The new places of a merged segment's messages, as pairs of entries in ascending order.

    `known` holds the entries as queues keep them, `placed` the same entries as they are on disk.
    """

    known: array[int] = field(default_factory=lambda: array("Q"))
    placed: array[int] = field(default_factory=lambda: array("Q"))

    def find(self, entries: array[int], start: int, stop: int) -> array[int]:
        return moved_entries(self.known, self.placed, entries, start, stop)

    def add(self, known: array[int], placed: array[int]) -> None:
        self.known += known
        self.placed += placed


class Segment(SegmentState):
    """One segment of a store.

    `used` is the position of the next record. `flushed` is the position up to which the file has
    the records. `references` counts the (message, queue) pairs ever appended, `live` those that a
    queue still needs. `dead_until` is a position below which no message is needed.
    """

    __slots__ = (
        "acks_end", "after", "before", "chain", "checked", "first", "handle", "has_index", "index",
        "lent", "measured_bytes", "measured_live", "numbers", "path", "recovered", "stays",
        "unnamed",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        salt: int,
        capacity: int,
        path: str,
        handle: int | None,
        buffer: bytearray | None = None,
        *,
        used: int = HEADER_BYTES,
        flushed: int = 0,
        records: int = 0,
        messages: int = 0,
        references: int = 0,
        live: int = 0,
        sealed: bool = False,
        first: int = 0,
        chain: tuple[int, int] = NO_CHAIN,
        moves: Moves | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.salt = salt
        self.capacity = capacity
        self.path = path  # path of the file, which has the name of a spare until its first flush
        self.handle = handle
        self.buffer = buffer
        # Abstracts of the records in the buffer, as long as there is a buffer.
        self.abstracts = None
        self.used = used
        self.flushed = flushed
        self.unnamed = False  # the file has records, but still has the name of a spare
        self.records = records
        self.messages = messages
        self.references = references
        self.live = live
        self.sealed = sealed
        self.settled = bytearray()  # pairs not written yet
        # Settled pairs that no recovery asks for, but that merging needs.
        self.forgotten = bytearray()
        self.dead_until = 0
        self.acks_end = 0  # size of the acks file, 0: there is none
        self.index: bytes | None = None  # made, and waits for the sync of the segment
        self.has_index = False
        self.first = first  # the first number that this segment replaces, 0: it replaces none
        # The number and the end of the segment before it with records IN_SEQUENCE, as in the
        # header.
        self.chain = chain
        self.in_sequence = False  # it has records IN_SEQUENCE that are not covered yet
        # From the entries that queues keep to those on disk, if this process merged the segment.
        self.moves = moves
        # The segment numbers in the entries that queues keep, if the segment has moves.
        self.numbers = list(numbers)
        # Position up to which the records of the file were checked when they were read back.
        self.checked = HEADER_BYTES
        self.recovered = False  # some references may belong to queues that are long gone
        self.merging = False  # a ReclaimJob uses the segment
        self.stays = False  # it cannot be read, or is not as expected: it is not merged
        # This many live references took `measured_bytes` when the segment was read.
        self.measured_live = 0
        self.measured_bytes = 0
        # Bodies that front doors have lent are held until the buffer gets them or has other bytes
        # in their place: bytes of settled messages are written, too.
        self.lent = LentBodies()
        self.lends = False  # there are some
        self.before: Segment | None = None  # the neighbours in publish order
        self.after: Segment | None = None

    def room(self) -> int:
        return self.capacity - self.used - END_BYTES

    @property
    def is_needless(self) -> bool:
        """True when nothing of the segment is on disk, and no message of it is needed."""
        return self.live == 0 and self.flushed == 0 and not self.in_sequence

    def replaces(self, other: Segment) -> bool:
        """Return whether this merged segment has the place of the other one."""
        return self.first <= other.number < self.number

    @property
    def awaits_cover(self) -> bool:
        """True when the file may not go before the file of producers covers it."""
        return self.in_sequence and self.flushed > 0

    def live_bytes(self) -> int:
        """Return an estimate of the bytes that queues still need.

        The store keeps no size of each message, only how many messages are left.
        """
        if self.measured_live:
            return self.measured_bytes * self.live // self.measured_live
        return (self.used - HEADER_BYTES) * self.live // self.references if self.references else 0

    def add(self, size: int, counts: tuple[int, int, int]) -> None:
        records, messages, references = counts
        self.used += size
        self.records += records
        self.messages += messages
        self.references += references
        self.live += references

    def collect_abstracts(self) -> None:
        """Collect the abstracts of the records appended from now on, for the index."""
        self.abstracts = record.Abstracts(self.used, self.capacity, INDEX_SHARE_MAX)

    def fill_lent(self) -> None:
        """Copy the bodies that are lent into the buffer."""
        if self.lends:
            assert self.buffer is not None
            self.lent.fill(self.buffer, self.salt)
            self.lends = False

    def take_buffer(self) -> bytearray | None:
        """Return the buffer for use by another segment; this segment has none any more."""
        if self.lends:
            self.lent.let_go()
            self.lends = False
        buffer, self.buffer, self.abstracts = self.buffer, None, None
        return buffer

    def write_out(self, files: Files) -> None:
        """Write to the file the bytes of the buffer that the file does not have."""
        assert self.buffer is not None and self.handle is not None
        self.fill_lent()
        stop = self.used + END_BYTES
        self.buffer[self.used : stop] = bytes(END_BYTES)
        if self.flushed == 0:
            self.buffer[:HEADER_BYTES] = encode_header(
                self.number, self.salt, self.capacity, chain=self.chain
            )
        with memoryview(self.buffer) as view, view[self.flushed : stop] as part:
            files.write(self.handle, part, self.flushed)
        self.flushed = self.used

    def index_is_worth_it(self) -> bool:
        share = 20 * self.records + 4 * self.references + 8 * self.messages
        return share * INDEX_SHARE_MAX <= self.used

    def make_index(self) -> bytes | None:
        """Return the bytes of the index file, or None when an index would not pay."""
        assert self.buffer is not None
        if not self.index_is_worth_it():
            return None
        abstracts = self.abstracts.until(self.used) if self.abstracts is not None else None
        if abstracts is None:
            # They were not collected, or were given up when small messages came before large ones.
            abstracts, end, holes = record.scan(self.buffer, HEADER_BYTES, self.used, self.salt)
            assert end == self.used and not holes, "the write buffer of a segment is damaged"
        return encode_index(self.number, self.salt, self.used, abstracts)
