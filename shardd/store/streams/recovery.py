"""Recover the segments of a stream from its files when the stream is opened.

A segment with an index is complete, because an index is written only when the whole segment is on
stable storage. The other segments, a few at the end of the stream, are scanned.

Each chunk has a mark: the number of bytes of its file that were on stable storage when the chunk
was appended. All bytes below the highest mark of a file must be there. When a chunk of a later
segment has a mark, the whole file must be there, because marks come from finished syncs and a sync
covers all segments.

- A chunk that is missing behind these bytes was torn off by a power cut. The stream ends before the
  first such chunk: nothing behind it was ever confirmed.
- A chunk that is missing within these bytes is damage. It is reported, and its offsets are not used
  again.

After an unclean end no later mark confirms the chunks of the very last sync. These chunks count as
torn when they are bad.

All recovered segments are sealed, except an empty one at the end. New chunks go to a new segment,
so that no position in a file is used twice.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.files import Files, is_full, read_file, read_head, write_file
from shardmq.shardd.store.format.chunk import Scanner
from shardmq.shardd.store.streams.reading import OFFSET_MAX, scan
from shardmq.shardd.store.streams.segment import (
    HEADER_BYTES,
    INDEX_HEADER,
    MESSAGE_BYTES_MIN,
    StreamSegment,
    decode_header,
    decode_index,
    encode_index,
    file_name,
    parse_name,
)

# Positions of fields in the header of an index.
INDEX_SALT, INDEX_END = 4, 7


@dataclass(slots=True)
class Found:
    """The result of a recovery. `segments` are in the order of their offsets."""

    segments: list[StreamSegment] = field(default_factory=list)
    next_offset: int = 0
    damage: list[Damage] = field(default_factory=list)


@dataclass(slots=True)
class Scanned:
    """A segment that was scanned, and what the scanner found.

    `covered`: the whole segment was on stable storage, because it has an index or because of an
    index or a mark in a later segment.
    """

    segment: StreamSegment
    scanner: Scanner
    size: int
    last: bool
    covered: bool


def recover(files: Files, directory: str, *, sync: bool, repair: bool = True) -> Found:
    """Recover the segments of the stream in a directory, and repair its files.

    Without `repair` no file is changed. Damage is returned, not raised.
    """
    names = [parsed for parsed in map(parse_name, files.list(directory)) if parsed]
    indexed = {first for kind, first in names if kind == "index"}
    found = Found()
    # Files whose headers cannot be read: the new name of each, or "" to remove the file.
    useless: dict[str, str] = {}
    for first in sorted(first for kind, first in names if kind == "log"):
        segment = _load_header(files, directory, first, found, useless)
        if segment is not None:
            segment.has_index = first in indexed
            found.segments.append(segment)
    there = [first for kind, first in names if kind in ("log", "lost")]
    gone = _missing(files, directory, sorted(indexed), sorted(there))
    _link(found.segments)
    uncertain = _without_index(files, directory, found.segments)
    lost = [first for kind, first in names if kind == "lost" or useless.get(file_name(kind, first))]
    # A missing segment that has an index was on stable storage: what follows it is not torn.
    known = lost + [one.offsets[0] for one in gone if one.offsets and one.offsets[0] in indexed]
    useless |= dict.fromkeys(_settle_ends(uncertain, found, known), "")
    found.next_offset = found.segments[-1].end if found.segments else 0
    for first in lost:
        if first >= found.next_offset:
            kind = "lost" if ("lost", first) in names else "log"
            end = _end_of_lost(files, f"{directory}/{file_name(kind, first)}", first)
            found.next_offset = max(found.next_offset, end)
    found.damage += gone
    for _, end in (one.offsets for one in gone if one.offsets):
        found.next_offset = max(found.next_offset, end)  # no offset means two messages
    # Repair only now that every header was understood: files of a later version stay as they are.
    if repair:
        kept = {segment.first for segment in found.segments} | {
            one.offsets[0] for one in gone if one.offsets
        }
        _put_away(files, directory, useless, indexed - kept, sync)
        for one in uncertain:
            if one.segment in found.segments:
                _make_whole(files, one, sync)
    return found


def _missing(files: Files, directory: str, indexed: list[int], there: list[int]) -> list[Damage]:
    """Return damage for each segment whose file is missing although nothing has deleted it.

    `indexed` and `there` are first offsets, ascending: of the indexes, and of the segments that
    are present. Retention deletes only the oldest segments, so the segment of an index is missing
    if it should be behind a present segment, or if no segment is present. An index also tells where
    the next segment begins, which shows that the next one is missing.
    """
    found: list[Damage] = []
    for first in indexed:
        at = bisect_right(there, first)
        following = there[at] if at < len(there) else None
        is_lost = first not in there and (at > 0 or not there)
        if following is None and not is_lost:
            continue  # the newest segment
        if not is_lost and _end_said(files, directory, first) == following:
            continue
        end = _end_by_index(files, directory, first)
        if end is None:
            continue
        name = file_name("log", first if is_lost else end)
        if is_lost:
            found.append(
                Damage(name, "missing", 0, 0, (first, following if following is not None else end))
            )
        elif (
            following is not None
            and first in there  # else it was deleted, and what followed it may have been, too
            and end < following
            and end not in indexed
            and _ends_at(files, directory, first, end)
        ):
            found.append(Damage(name, "missing", 0, 0, (end, following)))
    return found


def _ends_at(files: Files, directory: str, first: int, end: int) -> bool:
    """Return whether the chunks of a segment end at `end`, too: an index may be untrue."""
    path = f"{directory}/{file_name('log', first)}"
    handle = files.open(path, read_only=True)
    try:
        segment = decode_header(read_head(files, handle, HEADER_BYTES), path)
        return (
            segment is not None
            and scan(files, handle, segment, files.size(handle), OFFSET_MAX).offset == end
        )
    finally:
        files.close(handle)


def _end_said(files: Files, directory: str, first: int) -> int | None:
    """Return the end offset of a segment from the header of its index, without a check.

    Return None when the index is too short.
    """
    handle = files.open(f"{directory}/{file_name('index', first)}", read_only=True)
    try:
        head = read_head(files, handle, INDEX_HEADER.size)
    finally:
        files.close(handle)
    return int(INDEX_HEADER.unpack(head)[INDEX_END]) if len(head) == INDEX_HEADER.size else None


def _end_by_index(files: Files, directory: str, first: int) -> int | None:
    """Return the end offset of a segment from its index, or None when the index is not valid."""
    data = read_file(files, f"{directory}/{file_name('index', first)}")
    if len(data) < INDEX_HEADER.size:
        return None
    segment = StreamSegment(first, INDEX_HEADER.unpack_from(data)[INDEX_SALT], "")
    return segment.end if decode_index(data, segment, OFFSET_MAX) else None


def _load_header(
    files: Files, directory: str, first: int, found: Found, useless: dict[str, str]
) -> StreamSegment | None:
    """Return the segment that the header of a file describes, or None.

    The file is added to `useless` if it has no valid header. When nothing of it has reached the
    disk, it is to be removed; otherwise it is to be renamed to lost.N and kept.
    """
    name = file_name("log", first)
    handle = files.open(f"{directory}/{name}", read_only=True)
    try:
        size = files.size(handle)
        head = read_head(files, handle, 2 * HEADER_BYTES)
    finally:
        files.close(handle)
    segment = decode_header(head[:HEADER_BYTES], f"{directory}/{name}")
    if segment is not None and segment.first == first:
        segment.used = segment.flushed = segment.synced = segment.allocated = size
        return segment
    # The file of an empty stream ends with its header; a new file has preallocated space behind it.
    told = any(head[HEADER_BYTES:]) or (size == HEADER_BYTES and any(head))
    useless[name] = file_name("lost", first) if told else ""
    if any(head):
        found.damage.append(
            Damage(name, "header" if told else "torn", 0, size if told else HEADER_BYTES)
        )
    return None


def _end_of_lost(files: Files, path: str, first: int) -> int:
    """Return an offset above those of all messages that an unreadable file can have held."""
    handle = files.open(path, read_only=True)
    try:
        return first + files.size(handle) // MESSAGE_BYTES_MIN
    finally:
        files.close(handle)


def _link(segments: list[StreamSegment]) -> None:
    """Set the end and the timestamps of each segment from the header of the next one."""
    for segment, following in itertools.pairwise(segments):
        segment.end = following.first
        segment.newest, segment.timestamp = following.newest_before, following.previous


def _without_index(files: Files, directory: str, segments: list[StreamSegment]) -> list[Scanned]:
    """Scan the segments without an index; return them in order.

    The newest index is read, as it tells where its segment ends. If it is not valid, its segment is
    scanned too. Older indexes are not read: their segments end where the next one begins.
    """
    uncertain: list[Scanned] = []
    covered = indexed = False
    for segment in reversed(segments):
        name = f"{directory}/{file_name('index', segment.first)}"
        if segment.has_index and (
            indexed or decode_index(read_file(files, name), segment, segment.used)
        ):
            indexed = True
            continue
        last, size = segment is segments[-1], segment.used
        covered = covered or indexed or segment.has_index
        handle = files.open(segment.path, read_only=True)
        try:
            scanner = scan(files, handle, segment, size, OFFSET_MAX if last else segment.end)
        finally:
            files.close(handle)
        uncertain.append(Scanned(segment, scanner, size, last, covered))
        indexed = indexed or segment.has_index
        covered = covered or scanner.mark > 0
    return uncertain[::-1]


def _settle_ends(uncertain: list[Scanned], found: Found, lost: list[int]) -> list[str]:
    """Set the end of each scanned segment; end the stream at the first torn one.

    `lost` holds the first offsets of files that are unreadable or missing. Return the names of the
    files behind the end of the stream.
    """
    for one in uncertain:
        segment, scanner = one.segment, one.scanner
        at = found.segments.index(segment)
        before = found.segments[at - 1].end if at else segment.first
        if (
            not one.covered
            and before != segment.first
            and not any(before <= first < segment.first for first in lost)
        ):
            return _end_with(found, at)  # a whole segment is missing
        dirt = min(max(scanner.dirt, scanner.end), one.size)
        torn = (
            []
            if one.covered
            else [i for i, hole in enumerate(scanner.holes) if hole[0] >= scanner.mark]
        )
        if torn:
            scanner.cut(torn[0])
        name = file_name("log", segment.first)
        found.damage += [Damage(name, "corrupt", start, stop) for start, stop, _ in scanner.holes]
        if dirt > scanner.end:
            found.damage.append(
                Damage(name, "corrupt" if one.covered else "torn", scanner.end, dirt)
            )
        if one.last or not one.covered or dirt == scanner.end:
            segment.end = scanner.offset
        _take_in(segment, scanner)
        if torn:
            return _end_with(found, at + 1)
    return []


def _take_in(segment: StreamSegment, scanner: Scanner) -> None:
    segment.used = segment.flushed = segment.synced = scanner.end
    segment.entries = scanner.index()
    segment.newest = scanner.newest
    segment.timestamp = scanner.timestamp if segment.entries else segment.previous
    segment.last_chunk = scanner.last_chunk
    segment.holes = {start: stop for start, stop, _ in scanner.holes}


def _end_with(found: Found, count: int) -> list[str]:
    """Keep the first `count` segments and report the others as torn.

    Return the names of the files of the others.
    """
    gone = found.segments[count:]
    del found.segments[count:]
    names = [file_name("log", segment.first) for segment in gone]
    found.damage = [one for one in found.damage if one.file not in names]
    found.damage += [
        Damage(name, "torn", 0, segment.used) for name, segment in zip(names, gone, strict=True)
    ]
    return names


def _put_away(
    files: Files, directory: str, useless: dict[str, str], indexes: set[int], sync: bool
) -> None:
    # From the end of the stream, so that a power cut in between leaves no gap that looks like loss.
    for name, kept_as in sorted(useless.items(), reverse=True):
        if kept_as:
            files.rename(f"{directory}/{name}", f"{directory}/{kept_as}")
        else:
            files.remove(f"{directory}/{name}")
    for first in indexes:
        files.remove(f"{directory}/{file_name('index', first)}")
    if sync and useless:
        files.sync_directory(directory)


def _make_whole(files: Files, one: Scanned, sync: bool) -> None:
    """Truncate the file behind the last chunk, sync it, and write the index of the segment."""
    segment = one.segment
    handle = files.open(segment.path)
    try:
        if one.size > segment.used:
            files.truncate(handle, segment.used)
        segment.allocated = segment.used
        if sync:
            files.sync(handle)
    finally:
        files.close(handle)
    write_index(files, segment)


def write_index(files: Files, segment: StreamSegment) -> None:
    """Write the index of a sealed segment that is on stable storage as a whole.

    On a full disk the segment goes without an index.
    """
    # The next chunk goes to a new file of the same name, which is not complete before its own sync.
    if segment.used == HEADER_BYTES:
        return
    directory, _, _ = segment.path.rpartition("/")
    try:
        segment.has_index = True
        write_file(files, f"{directory}/{file_name('index', segment.first)}", encode_index(segment))
    except OSError as error:
        if not is_full(error):
            raise
