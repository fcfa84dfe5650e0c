"""Survivors of neighbouring segments in which little is left, together in one: what is copied, and in which order of
steps a power cut finds every message exactly once. When and with which of its segments is the store's to say.

Entries that queues hold stay as they are: `Moves` finds where their messages lie now. The next recovery gives new ones.

The merged file is written and synced under a spare's name, takes the name of the last segment it replaces, and only
when that lasts the others go. Its header says from which number on it replaces, so that what a power cut left of them
is not taken for messages a second time. Neighbours only: publish order is the order of entries.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardd.store.files import Files
from shardd.store.inspection import Contents, Message, encode, groups, open_contents
from shardd.store.segment import END_BYTES, HEADER_BYTES, Segment, encode_header

FLAGS = 15
RECORD_HEADER_BYTES = 28
# One call reads no more than this, or two segments.
READ_BYTES_MAX = 8 << 20
SEGMENTS_MAX = 64
# Quarters of a usual segment: what is left in one worth merging, and in what comes of it. The gap is why no message is
# copied more than a few times.
LEFT_QUARTERS_MAX = 1
MERGED_QUARTERS_MAX = 3


@dataclass(slots=True)
class Moves:
    """Where messages went: entries as queues know them, in order, and as they are on disk."""

    known: array[int] = field(default_factory=lambda: array("Q"))
    placed: array[int] = field(default_factory=lambda: array("Q"))

    def find(self, entries: Iterable[int]) -> array[int]:
        return array("Q", [self._find(entry & ~FLAGS) | entry & FLAGS for entry in entries])

    def _find(self, entry: int) -> int:
        at = bisect_left(self.known, entry)
        # Another message in its place would be worse than none.
        assert at < len(self.known) and self.known[at] == entry, "not an entry of a merged segment"
        return self.placed[at]


@dataclass(slots=True)
class Merged:
    """The new segment's bytes, and of each source in turn the old and new entries of its survivors."""

    data: bytearray
    moves: list[Moves]
    records: int = 0
    messages: int = 0
    references: int = 0


def choose(segments: Iterable[Segment], segment_bytes: int) -> list[Segment]:
    """Of segments in order, those that can be read and are nobody else's, a run worth merging; or none."""
    run: list[Segment] = []
    read = live = 0
    for segment in segments:
        alive = segment.live_bytes()
        little = alive * 4 <= segment_bytes * LEFT_QUARTERS_MAX and segment.capacity <= segment_bytes
        fits = len(run) < 2 or (read + segment.used <= READ_BYTES_MAX and len(run) < SEGMENTS_MAX)
        fits = fits and (live + alive) * 4 <= segment_bytes * MERGED_QUARTERS_MAX
        if little and not segment.stays and fits:
            run.append(segment)
            read += segment.used
            live += alive
        elif len(run) > 1:
            break
        else:
            run, read, live = ([segment], segment.used, alive) if little and not segment.stays else ([], 0, 0)
    return run if len(run) > 1 else []


def merge(files: Files, directory: str, sources: list[Segment], salt: int, bytes_max: int) -> Merged | None:
    """None: it does not fit in `bytes_max`, or one cannot be read whole and is left alone; that one `stays`."""
    merged = Merged(bytearray(HEADER_BYTES), [])
    for segment in sources:
        try:
            one = open_contents(files, directory, segment.number)
        except OSError:
            one = None
        if one is None or one.damage or one.segment.used != segment.used:
            segment.stays = True
            return None
        one.settled.update(array("Q", bytes(segment.settled)))
        _add(merged, one, sources[-1].number, salt)
        if len(merged.data) + END_BYTES > bytes_max:
            segment.stays = True
            return None
    merged.data += bytes(END_BYTES)
    head = encode_header(sources[-1].number, salt, len(merged.data), sources[0].first or sources[0].number)
    merged.data[:HEADER_BYTES] = head
    return merged


def _add(merged: Merged, one: Contents, number: int, salt: int) -> None:
    moves = Moves()
    for group in groups(one.survivors()):
        _add_record(merged, group, moves, number, salt)
    merged.moves.append(moves)


def _add_record(merged: Merged, group: list[Message], moves: Moves, number: int, salt: int) -> None:
    record = bytearray(encode(group))
    record[4:8] = (int.from_bytes(record[4:8], "little") ^ salt).to_bytes(4, "little")
    position = len(merged.data) + RECORD_HEADER_BYTES + 4 * len(group[0].live)
    for message in group:
        moves.known.append(message.segment << 32 | message.position << 4)
        moves.placed.append(number << 32 | position << 4)
        position += len(message.stored)
    merged.data += record
    merged.records += 1
    merged.messages += len(group)
    merged.references += len(group) * len(group[0].live)


def moves_of(sources: list[Segment], merged: Merged) -> Moves:
    """From what queues know: of a source that was itself merged, they know entries of before."""
    moves = Moves()
    for segment, ours in zip(sources, merged.moves, strict=True):
        if segment.moves is None:
            moves.known += ours.known
            moves.placed += ours.placed
            continue
        there = set(ours.known)
        for known, placed in zip(segment.moves.known, segment.moves.placed, strict=True):
            if placed in there:
                moves.known.append(known)
                moves.placed.extend(ours.find([placed]))
    return moves


def replace(files: Files, directory: str, path: str, merged: Merged, last: Segment, sync: bool) -> int:
    """The file of `last` is the merged one from here on; the handle of it."""
    handle = files.open(path, create=True)
    try:
        files.allocate(handle, len(merged.data))
        files.write(handle, merged.data, 0)
        if sync:
            files.sync(handle)
    except OSError:
        files.close(handle)
        files.remove(path)
        raise
    files.rename(path, last.path)
    if sync:
        files.sync_directory(directory)
    return handle
