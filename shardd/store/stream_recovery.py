"""From files back to segments: what a stream finds when it starts.

A segment that has an index is whole: it was written when all of it was on stable storage. The others, few and at the
end, are scanned. What they must hold is what some chunk's mark calls lasting, in its own file or, when any chunk of a
later segment has a mark, all of it: marks are made of ended syncs, and a sync covers all segments. The first chunk that
is missing behind that was torn off by a power cut: the stream ends there, whatever lies behind it was never confirmed.
A chunk missing before is damage: it is told and its offsets are not used again. After an end without a clean stop the
chunks of the very last sync have no later mark to speak for them and count as torn when they are bad.

Every segment found is sealed, but for an empty one: new chunks go to a new one, so a position is never used twice.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field

from shardmq.shardd.store.chunk import Scanner
from shardmq.shardd.store.files import Files, is_full
from shardmq.shardd.store.recovery import Damage, Reader, write_file
from shardmq.shardd.store.stream_reading import OFFSET_MAX, scan
from shardmq.shardd.store.stream_segment import (
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

# Of the fields of an index's header.
INDEX_SALT, INDEX_END = 4, 7


@dataclass(slots=True)
class Found:
    segments: list[StreamSegment] = field(default_factory=list)  # in order of their offsets
    next_offset: int = 0
    damage: list[Damage] = field(default_factory=list)


@dataclass(slots=True)
class Scanned:
    segment: StreamSegment
    scanner: Scanner
    size: int
    last: bool
    covered: bool  # all of it was on stable storage: it had an index, or a later segment shows it


def recover(files: Files, directory: str, *, sync: bool, repair: bool = True) -> Found:
    """Without `repair` no file is changed."""
    names = [parsed for parsed in map(parse_name, files.list(directory)) if parsed]
    indexed = {first for kind, first in names if kind == "index"}
    found = Found()
    useless: dict[
        str, str
    ] = {}  # what to do with files of which nothing can be told: new name, or none
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
    # What has an index was on stable storage: that it is gone does not make what follows torn.
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
    # Not before every header was understood: what a later version wrote stays as it is.
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
    """Segments that are gone though none has let them go. An index says where the next segment begins; only the oldest
    segments are let go of, so an index that is not older than what is left has lost its segment."""
    found: list[Damage] = []
    for first in indexed:
        at = bisect_right(there, first)
        following = there[at] if at < len(there) else None
        is_lost = first not in there and (at > 0 or not there)
        if following is None and not is_lost:
            continue  # the newest
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
            and end < following
            and end not in indexed
            and _ends_at(files, directory, first, end)
        ):
            found.append(Damage(name, "missing", 0, 0, (end, following)))
    return found


def _ends_at(files: Files, directory: str, first: int, end: int) -> bool:
    """Whether the segment's own chunks say that, too: what an index says may be untrue."""
    path = f"{directory}/{file_name('log', first)}"
    handle = files.open(path, read_only=True)
    try:
        head = bytearray(HEADER_BYTES)
        with memoryview(head) as view:
            segment = decode_header(head[: files.read_into(handle, view, 0)], path)
        return (
            segment is not None
            and scan(files, handle, segment, files.size(handle), OFFSET_MAX).offset == end
        )
    finally:
        files.close(handle)


def _end_said(files: Files, directory: str, first: int) -> int | None:
    """The offset behind the last message of the segment, as the head of its index says; not checked."""
    handle = files.open(f"{directory}/{file_name('index', first)}", read_only=True)
    try:
        head = bytearray(INDEX_HEADER.size)
        with memoryview(head) as view:
            got = files.read_into(handle, view, 0)
    finally:
        files.close(handle)
    return int(INDEX_HEADER.unpack(head)[INDEX_END]) if got == INDEX_HEADER.size else None


def _end_by_index(files: Files, directory: str, first: int) -> int | None:
    """The same, checked; None when there is no good index."""
    data = Reader(files, directory, False).read_whole(f"{directory}/{file_name('index', first)}")
    if len(data) < INDEX_HEADER.size:
        return None
    segment = StreamSegment(first, INDEX_HEADER.unpack_from(data)[INDEX_SALT], "")
    return segment.end if decode_index(data, segment, OFFSET_MAX) else None


def _load_header(
    files: Files, directory: str, first: int, found: Found, useless: dict[str, str]
) -> StreamSegment | None:
    """None: nothing of it reached the disk, or nothing of it can be told: then it is kept as lost.N."""
    name = file_name("log", first)
    handle = files.open(f"{directory}/{name}", read_only=True)
    try:
        size = files.size(handle)
        head = bytearray(min(2 * HEADER_BYTES, size))
        with memoryview(head) as view:
            files.read_into(handle, view, 0)
    finally:
        files.close(handle)
    segment = decode_header(head[:HEADER_BYTES], f"{directory}/{name}")
    if segment is not None and segment.first == first:
        segment.used = segment.flushed = segment.synced = segment.allocated = size
        return segment
    # The file of an empty stream ends with its header, a new one has room behind it.
    told = any(head[HEADER_BYTES:]) or (size == HEADER_BYTES and any(head))
    useless[name] = file_name("lost", first) if told else ""
    if any(head):
        found.damage.append(
            Damage(name, "header" if told else "torn", 0, size if told else HEADER_BYTES)
        )
    return None


def _end_of_lost(files: Files, path: str, first: int) -> int:
    """An offset that no message in a file of which nothing can be told ever had."""
    handle = files.open(path, read_only=True)
    try:
        return first + files.size(handle) // MESSAGE_BYTES_MIN
    finally:
        files.close(handle)


def _link(segments: list[StreamSegment]) -> None:
    """What the header of a segment says of the one before."""
    for segment, following in itertools.pairwise(segments):
        segment.end = following.first
        segment.newest, segment.timestamp = following.newest_before, following.previous


def _without_index(files: Files, directory: str, segments: list[StreamSegment]) -> list[Scanned]:
    """Those that must be scanned, in order. The newest index is read: nobody else knows where its segment ends."""
    uncertain: list[Scanned] = []
    reader = Reader(files, directory, False)
    covered = indexed = False
    for segment in reversed(segments):
        if segment.has_index and (indexed or _read_index(reader, segment)):
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


def _read_index(reader: Reader, segment: StreamSegment) -> bool:
    path = f"{reader.directory}/{file_name('index', segment.first)}"
    return decode_index(reader.read_whole(path), segment, segment.used)


def _settle_ends(uncertain: list[Scanned], found: Found, lost: list[int]) -> list[str]:
    """Where each of them ends, and with a torn one the stream: names of the files behind that. `lost`: first offsets of
    files of which nothing can be told, or that are gone."""
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
    """The stream has so many segments. Names of the others, the last first."""
    gone = found.segments[count:]
    del found.segments[count:]
    names = [file_name("log", segment.first) for segment in gone]
    found.damage = [one for one in found.damage if one.file not in names]
    found.damage += [
        Damage(name, "torn", 0, segment.used) for name, segment in zip(names, gone, strict=True)
    ]
    return names[::-1]


def _put_away(
    files: Files, directory: str, useless: dict[str, str], indexes: set[int], sync: bool
) -> None:
    for name, kept_as in useless.items():
        if kept_as:
            files.rename(f"{directory}/{name}", f"{directory}/{kept_as}")
        else:
            files.remove(f"{directory}/{name}")
    for first in indexes:
        files.remove(f"{directory}/{file_name('index', first)}")
    if sync and useless:
        files.sync_directory(directory)


def _make_whole(files: Files, one: Scanned, sync: bool) -> None:
    """Cut off what is no chunk, make the rest last, and leave an index."""
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
    """Of a sealed segment all of which is on stable storage. A full disk can do without."""
    if segment.used == HEADER_BYTES:
        return  # the next chunk goes to a new file of the same name, which is not whole until its own sync
    directory, _, _ = segment.path.rpartition("/")
    try:
        segment.has_index = True
        write_file(files, f"{directory}/{file_name('index', segment.first)}", encode_index(segment))
    except OSError as error:
        if not is_full(error):
            raise
