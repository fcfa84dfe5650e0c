"""How far each producer has come in a stream.

    producers    as beside a store (drawn in producers.py), but that a block covers the messages below an offset

Chunks of messages IN_SEQUENCE are the truth: a sequence is taken as stored when its chunk is found. The file is there
before the first of them is written, and it is written on when COVER_BYTES have come since it last was, before a segment
goes that it does not cover, and at a clean stop: so recovery looks only at chunks behind what it covers, and at none of
a stream that nobody has written to in sequence. It is written in a sync after the chunks it speaks of. A power cut
takes the end of a stream, so whatever is found was sent before what is missing. Only what comes before the first
segment may be missing too, when that was never synced either: then the log begins behind what is covered, nothing in it
was ever confirmed, and no sequence is taken as stored. At worst an unconfirmed message is stored twice, none is lost.
"""

from __future__ import annotations

from shardmq.shardd.store import producers
from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.files import Files
from shardmq.shardd.store.producers import Cover
from shardmq.shardd.store.sequences import Screened, Sequences

# What recovery looks at, at most, with what one sync takes.
COVER_BYTES = 64 << 20
# Producers remembered by one stream; of more, the half last heard longest ago is forgotten.
PRODUCERS_MAX = 1 << 16


class StreamProducers:
    def __init__(self, files: Files, directory: str, sync: bool) -> None:
        self.files = files
        self.directory = directory
        self.sync = sync
        self.table = Sequences()
        self.in_use = False  # the file is there
        self.covered_to = 0  # offset: the file tells of all that comes before it
        self.uncovered_bytes = 0  # have come since it was written
        self._end = 0  # of the file; 0: it is to be written anew
        self._whole_bytes = 0  # when it last was

    @property
    def is_due(self) -> bool:
        return self.uncovered_bytes >= COVER_BYTES

    # -- a batch ---------------------------------------------------------------------------------------

    def screen(self, records: memoryview, queue_id: int, committed_offset: int) -> Screened:
        """What of the records that name the queue is new to it; the others are left out. Raises DiskFull or OSError
        when there can be no file."""
        if not self.in_use:
            # What is not on stable storage may go, and its offsets be used again.
            self._begin(committed_offset)
        if len(self.table) >= PRODUCERS_MAX:
            self.table.sweep(self.table.heard_before(2))
        return self.table.screen(records, {}, queue_id)

    def _begin(self, committed_offset: int) -> None:
        cover = self.cover(committed_offset)
        cover.run()
        self.covered(cover)
        if cover.full:
            raise DiskFull(f"no room for {producers.NAME} in {self.directory}")
        self.in_use = True

    def appended(self, size: int) -> None:
        if self.in_use:
            self.uncovered_bytes += size

    # -- cover -----------------------------------------------------------------------------------------

    def cover(self, next_offset: int) -> Cover:
        """To be run when all below `next_offset` is on stable storage, then `covered`; nothing may be screened that
        comes before it."""
        anew = not self._end or self._end > max(producers.REWRITE_BYTES, 2 * self._whole_bytes)
        block = producers.encode_block(self.table.take_changes(anew), next_offset)
        self.uncovered_bytes = 0
        return Cover(
            self.files, self.directory, self.sync, block, 0 if anew else self._end, next_offset, []
        )

    def covered(self, cover: Cover) -> None:
        if cover.full:  # half of it may be there, and what changed is told only by all of it
            self._end = 0
            self.uncovered_bytes += COVER_BYTES
            return
        self.covered_to = cover.covered
        self._end = (cover.at or producers.HEADER.size) + len(cover.block)
        if not cover.at:
            self._whole_bytes = self._end

    # -- recovery --------------------------------------------------------------------------------------

    def recover(self) -> int | None:
        """The offset from which on chunks are to be looked at; None: nobody has written in sequence."""
        if producers.NAME not in self.files.list(self.directory):
            return None
        self.in_use = True
        blocks, _ = producers.decode(
            producers.read(self.files, f"{self.directory}/{producers.NAME}")
        )
        for places, _ in blocks:
            self.table.add(places)
        self.covered_to = max((covered for _, covered in blocks), default=0)
        return self.covered_to

    def found(self, window: bytearray, position: int) -> None:
        """A good chunk that holds messages behind that offset."""
        self.table.gather_chunk(window, position)
        self.uncovered_bytes += int.from_bytes(window[position : position + 4], "little")
