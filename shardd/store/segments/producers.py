"""Keep the highest sequence of each producer, beyond the life of the segments that hold it.

The file is drawn in format/producers_file.py.

The records IN_SEQUENCE are the truth: a sequence is taken as stored when its record is found. A
sealed segment is *covered* when the file has the highest sequence of each of its producers. Until
then the segment is neither removed, nor merged, nor given an index, so a recovery scans it. The
block that covers segments is written in a sync after the segments themselves: the file never
speaks of a message that a power cut took and that nobody has settled.

Each segment names the last segment before it that was written and has records IN_SEQUENCE, with
the end of that segment. Where that segment or a part of it is missing, a power cut came before the
sync, and nothing behind it was confirmed. The sequences behind it are not taken as stored,
because messages with lower sequences may be lost, and would look like repetitions when they are
sent again. At worst an unconfirmed message is stored twice; none is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardmq.shardd.store.files import Files
from shardmq.shardd.store.format.producers_file import Cover, ProducersFile
from shardmq.shardd.store.format.segment_file import NO_CHAIN
from shardmq.shardd.store.format.sequences import Screened
from shardmq.shardd.store.segments.segment import Segment

# Producers that one store remembers, counted once for each queue. When there are more, the half
# that was heard longest ago is forgotten.
PRODUCERS_MAX = 1 << 20
# Sealed segments that may wait to be covered while nobody asks for a sync.
UNCOVERED_MAX = 16
EVERYWHERE = 1 << 62

# The room of a queue that rejects messages beyond its limits: messages that count, the most that
# may, bytes that count, the most that may.
Room = tuple[int, int | None, int, int | None]


class Producers:
    """The producers of one store: their table, its file, and the segments not covered yet."""

    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.file = ProducersFile(files, directory, sync)
        self.table = self.file.table
        self.uncovered: dict[Segment, None] = {}  # sealed segments, some of them dead
        self._covering: list[Segment] = []  # the segments of the cover that runs
        self._forgotten: set[int] = set()  # ids of queues that are gone
        self._seen: dict[int, int] = {}  # where the scanned segments end, by number
        self._trusting = True

    @property
    def covered(self) -> int:
        """The highest number of a segment whose sequences are in the file."""
        return self.file.covered

    # -- a batch -----------------------------------------------------------------------------------

    def screen(
        self, records: bytes | bytearray | memoryview, rooms: Mapping[int, Room]
    ) -> Screened:
        if len(self.table) >= PRODUCERS_MAX:
            self.table.sweep(self.table.heard_before(2), None, self._forgotten)
        return self.table.screen(records, rooms)

    def appended(self, segment: Segment) -> None:
        """Note that records IN_SEQUENCE were appended to the segment."""
        segment.in_sequence = True

    def sealed(self, segment: Segment) -> None:
        if segment.in_sequence:
            self.uncovered[segment] = None

    def chain_before(self, segment: Segment) -> tuple[int, int]:
        """Return the chain for the header of a segment that is about to be written.

        The chain is the number and the end of the last written segment before it that is not
        covered. A segment that was never written is left out: all its messages are settled, so none
        can be missing.
        """
        known = (*self.uncovered, *self._covering)
        written = [
            (one.number, one.flushed)
            for one in known
            if one.flushed and one.number < segment.number
        ]
        return max(written, default=NO_CHAIN)

    def has(self, queue_id: int) -> bool:
        """Return whether there are producers of a queue."""
        return len(self.table) > 0 and self.table.has_queue(queue_id)

    def forget_queue(self, queue_id: int) -> None:
        """Forget the producers of a queue with the next sweep."""
        if len(self.table):
            self._forgotten.add(queue_id)

    def sweep(self, heard_before_ms: int) -> int:
        """Forget producers that were last heard before this time; return how many."""
        forgotten, self._forgotten = self._forgotten, set()
        return self.table.sweep(heard_before_ms, None, forgotten)

    # -- cover -------------------------------------------------------------------------------------

    def begin(self) -> Cover | None:
        """Return the cover of all sealed segments, or None when all are covered.

        The caller runs the cover after a sync of all that was written, then calls `end`.
        """
        if not self.uncovered:
            return None
        segments = self._covering = list(self.uncovered)
        self.uncovered = {}
        return self.file.begin(max(self.covered, *(segment.number for segment in segments)))

    def end(self, cover: Cover) -> list[Segment]:
        """End a cover after its `run`; return the segments that may go now."""
        segments, self._covering = self._covering, []
        if not self.file.end(cover):
            self.uncovered = dict.fromkeys([*segments, *self.uncovered])
            return []
        for segment in segments:
            segment.in_sequence = False
        return segments

    # -- recovery ----------------------------------------------------------------------------------

    def found(
        self, segment: Segment, data: bytearray, abstracts: bytes, holes: list[tuple[int, int]]
    ) -> bool:
        """Take the sequences of a scanned segment; segments come in the order of their numbers.

        Returns whether the segment has sequences that are not in the file.
        """
        if segment.number <= self.covered:
            return False
        before, end = segment.chain
        if before > self.covered and self._seen.get(before, 0) < end:
            self._trusting = False
        until = 0 if not self._trusting else holes[0][0] if holes else EVERYWHERE
        if self.table.gather(data, abstracts, until):
            self.appended(segment)
            self.sealed(segment)
        self._seen[segment.number] = segment.used
        return segment.in_sequence

    def damaged(self, segment: Segment) -> None:
        """Note that something is missing in a segment."""
        if segment.number > self.covered:
            self._trusting = False

    def recovered(self, queue_ids: Collection[int]) -> None:
        """Keep the producers of these queues only, after all segments were found."""
        self.table.sweep(0, frozenset(queue_ids))
        self._seen.clear()
