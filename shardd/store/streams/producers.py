"""Keep the last sequence of each producer of a stream, for deduplication.

    producers    the same format as beside a store (format/producers_file.py), but a block covers
                 the messages below an offset

The chunks with messages IN_SEQUENCE are authoritative: a sequence counts as stored when its chunk
is found. The file only saves recovery from reading old chunks. The file is created before the first
such chunk. A block is added to it, or the file is rewritten:

- when COVER_BYTES have been appended since the last block,
- before a segment is deleted that the file does not cover, and
- at a clean stop.

Recovery therefore reads only the chunks that the file does not cover, and no chunk of a stream
without the file.

A block is written by a sync, after the chunks that it covers. A power cut removes the end of a
stream, so every message that is found was sent before the missing ones. There is one exception: the
messages before the first segment may be missing as well when that segment was never synced. In this
case the log begins behind the covered offset, no message in it was ever confirmed, and no sequence
counts as stored. The worst case is an unconfirmed message that is stored twice; no message is lost.
"""

from __future__ import annotations

from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.files import Files
from shardmq.shardd.store.format.producers_file import NAME, Cover, ProducersFile
from shardmq.shardd.store.format.sequences import Screened

# Recovery reads at most so many bytes of chunks, plus those of one sync.
COVER_BYTES = 64 << 20
# A stream with so many producers forgets the half that was heard longest ago.
PRODUCERS_MAX = 1 << 16


class StreamProducers:
    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.file = ProducersFile(files, directory, sync)
        self.table = self.file.table
        self.in_use = False  # the file exists
        self.uncovered_bytes = 0  # bytes appended since the last block was written

    @property
    def covered_to(self) -> int:
        """The offset below which the file covers all messages."""
        return self.file.covered

    @property
    def is_due(self) -> bool:
        return self.uncovered_bytes >= COVER_BYTES

    # -- a batch -----------------------------------------------------------------------------------

    def screen(self, records: memoryview, queue_id: int, committed_offset: int) -> Screened:
        """Return the messages of the records that the queue does not have yet.

        Records that do not name the queue are left out. Raises DiskFull or OSError when the
        producers file cannot be created.
        """
        self.prepare(committed_offset)
        return self.table.screen(records, {}, queue_id)

    def prepare(self, committed_offset: int) -> None:
        """Make the file, if there is none, and room in the table; before messages are appended.

        Raises DiskFull or OSError when the file cannot be created.
        """
        if not self.in_use:
            # Messages that are not committed can be lost, and their offsets be used again.
            self._begin(committed_offset)
        self._make_room()

    def add(self, places: bytes) -> None:
        """Know how far producers have come elsewhere; the next sync writes this to the file.

        The file is made then, if there is none, so `prepare` must not be called during that sync.
        """
        self._make_room()
        self.table.add(places)
        self.uncovered_bytes = max(self.uncovered_bytes, COVER_BYTES)

    def _make_room(self) -> None:
        if len(self.table) >= PRODUCERS_MAX:
            self.table.sweep(self.table.heard_before(2))

    def _begin(self, committed_offset: int) -> None:
        cover = self.cover(committed_offset)
        cover.run()
        self.covered(cover)
        if cover.full:
            raise DiskFull(f"no room for {NAME} in {self.file.directory}")

    def appended(self, size: int) -> None:
        if self.in_use:
            self.uncovered_bytes += size

    # -- cover -------------------------------------------------------------------------------------

    def cover(self, next_offset: int) -> Cover:
        """Return the job that writes a block for the messages below `next_offset`.

        The caller runs the job when all these messages are on stable storage, and then calls
        `covered`. The table must not yet hold sequences of messages at or behind `next_offset`.
        """
        self.uncovered_bytes = 0
        return self.file.begin(next_offset)

    def covered(self, cover: Cover) -> None:
        if self.file.end(cover):
            self.in_use = True
        else:
            self.uncovered_bytes += COVER_BYTES

    # -- recovery ----------------------------------------------------------------------------------

    def recover(self) -> int | None:
        """Read the file; return the offset below which it covers all messages.

        The caller passes the chunks behind that offset to `found`. Return None when there is no
        file: no producer has written to the stream in sequence.
        """
        if NAME not in self.file.files.list(self.file.directory):
            return None
        self.in_use = True
        self.file.recover()
        return self.covered_to

    def found(self, window: bytearray, position: int) -> None:
        """Add the sequences of an intact chunk with messages that the file does not cover."""
        self.table.gather_chunk(window, position)
        self.uncovered_bytes += int.from_bytes(window[position : position + 4], "little")
