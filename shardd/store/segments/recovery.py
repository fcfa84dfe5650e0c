"""Recover a store from its files: find its segments and the entries that are not settled.

This file decides nothing about queues. Every segment found is sealed: new records go to a new
segment, so a position is never used twice. Damage is reported as `Damage`, never hidden; the good
records beside it stay usable.

    state    0  "SHMQSTAT" | u32 FORMAT | u32 crc32c of [16, end)
            16  u64 number of the next segment
            24  per queue with redelivered messages: u32 queue id | u32 count | u64 entry[count]
                with queue id 0, which no queue has: the numbers of the segments there are

Only a clean stop writes the state file, and the next start removes it. Without the state file
every message may have been delivered before, and its entry carries the flag REDELIVERED.
"""

from __future__ import annotations

import errno
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.files import (
    Files,
    is_full,
    is_missing,
    read_file,
    read_head,
    remove_files,
    write_file,
)
from shardmq.shardd.store.format import acks, record
from shardmq.shardd.store.format import manifest as manifests
from shardmq.shardd.store.format.producers_file import NAME as PRODUCERS
from shardmq.shardd.store.format.segment_file import (
    FORMAT,
    HEADER_BYTES,
    INDEX_SHARE_MAX,
    NO_CHAIN,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    file_name,
    parse_name,
    salt_told,
)
from shardmq.shardd.store.segments.producers import Producers
from shardmq.shardd.store.segments.reclaim import Reclaimer
from shardmq.shardd.store.segments.segment import Segment

STATE_MAGIC = b"SHMQSTAT"
KINDS = ("msgs", "index", "acks", "spare", "lost", "damaged")
# Damaged bytes that one recovery copies aside. Beyond this, damage is only reported.
DAMAGED_BYTES_MAX = 64 << 20
REDELIVERED = 1
# This id stands in the state file where other parts have the id of a queue.
SEGMENTS_ID = 0
# A disk with unreadable places is read in blocks of this size.
BLOCK_BYTES = 4096

# Arguments: bytes of message files read so far, bytes of all message files, and messages found so
# far, settled ones too.
Progress = Callable[[int, int, int], None]


@dataclass(slots=True)
class Found:
    segments: list[Segment]
    arrivals: list[record.Arrival]
    next_number: int
    damage: list[Damage]
    clean: bool


@dataclass(slots=True)
class State:
    next_number: int
    marks: dict[int, array[int]]
    segments: array[int]  # numbers of the segments that were there


@dataclass(slots=True)
class Loaded:
    segment: Segment
    abstracts: bytes
    damage: list[Damage] = field(default_factory=list)


def recover(
    files: Files,
    directory: str,
    reclaimer: Reclaimer,
    queue_ids: Collection[int],
    timed: Collection[int],
    sync: bool,
    progress: Progress | None,
    producers: Producers | None = None,
    note: Callable[[int, int], None] | None = None,
) -> Found:
    """Return what the files of a store have.

    `note` is called as `Ages.note`, for the times at which messages came.
    """
    names = [
        parsed for parsed in map(parse_name, files.list(directory)) if parsed and parsed[0] in KINDS
    ]
    state = read_state(files, directory)
    reader = Reader(files, directory, sync, producers)
    manifest = reclaimer.manifest
    listed = set(manifest.read(read_file(files, f"{directory}/{manifests.NAME}")))
    unread = producers.file.recover() if producers is not None else None
    numbers = reader.take_away_merged(sorted(number for kind, number in names if kind == "msgs"))
    collector = record.Collector(queue_ids, frozenset(timed), note)
    found = Found(
        [],
        [],
        max([number + 1 for kind, number in names if kind != "spare"] + [1]),
        [],
        state is not None,
    )
    if state is not None:
        found.next_number = max(found.next_number, state.next_number)
        listed.update(state.segments)
    found.next_number = max([found.next_number, *(number + 1 for number in listed)])
    if unread is not None:
        found.damage.append(Damage(PRODUCERS, "torn", *unread))
    bytes_total, bytes_done, messages = sum(reader.sizes[number] for number in numbers), 0, 0
    for number in numbers:
        loaded = reader.load(number)
        found.damage += loaded.damage if loaded else []
        if producers is not None and loaded is not None and loaded.damage:
            producers.damaged(loaded.segment)
        if loaded is not None and loaded.segment.capacity:
            pairs = reader.load_acks(loaded.segment)
            fresh = state is not None and number < state.next_number
            segment, flags = loaded.segment, 0 if fresh else REDELIVERED
            segment.records, segment.messages, segment.references, segment.live = collector.add(
                loaded.abstracts, number, pairs, flags
            )
            found.segments.append(segment)
            messages += segment.messages
        bytes_done += reader.sizes[number]
        if progress is not None:
            progress(bytes_done, bytes_total, messages)
    reader.release()
    found.damage += missing(listed, names, found.segments, reclaimer)
    # The state file stays until every segment was understood: a program that is too old must not
    # make the stop count as unclean.
    remove_state(files, directory)
    found.arrivals = collector.take()
    if producers is not None:
        producers.recovered(queue_ids)
        found.next_number = max(found.next_number, producers.covered + 1)
    mark(found.arrivals, state)
    for kind, number in names:
        path = f"{directory}/{file_name(kind, number)}"
        if kind in ("index", "acks") and number not in numbers and number != manifests.NUMBER:
            files.remove(path)
        elif kind == "spare":
            found.next_number = max(found.next_number, reclaimer.adopt(number) + 1)
    if sync:
        manifest.recovered([segment.number for segment in found.segments], clean=state is not None)
    else:
        manifest.remove()  # without syncs nobody could keep the list true
    if reclaimer.spares:
        manifest.sync()
        files.sync_directory(directory)
        for spare in reclaimer.spares:
            spare.lasting = True
    return found


def missing(
    listed: Collection[int],
    names: Collection[tuple[str, int]],
    segments: Collection[Segment],
    reclaimer: Reclaimer,
) -> list[Damage]:
    """Return as damage the listed segments that are gone and that nobody has removed.

    Segments are listed by the last clean stop and by the manifest. After a power cut the manifest
    may list segments that were removed. The files of these segments, or of the merged segment that
    replaced them, are still there.
    """
    gone = set(listed) - {number for kind, number in names if kind in ("msgs", "lost")}
    if not gone:
        return []
    told = [reclaimer.numbers_of(number) for kind, number in names if kind == "spare"]
    told += [(segment.first, segment.number) for segment in segments if segment.first]
    for first, last in told:
        gone -= {number for number in gone if first <= number <= last}
    return [Damage(file_name("msgs", number), "missing", 0, 0) for number in sorted(gone)]


def mark(arrivals: list[record.Arrival], state: State | None) -> None:
    for arrival in arrivals if state is not None and state.marks else ():
        marks = state.marks.get(arrival.queue_id) if state is not None else None
        if marks is not None:
            record.mark_redelivered(arrival.entries, marks)


class Reader:
    """Loads one segment after another into one large buffer."""

    def __init__(
        self, files: Files, directory: str, sync: bool, producers: Producers | None = None
    ) -> None:
        self.files = files
        self.directory = directory
        self.sync = sync
        self.producers = producers  # to be told of the sequences that are found
        self.buffer = bytearray()
        self.damaged_room = DAMAGED_BYTES_MAX
        # Sizes of the message files whose headers were read, by number.
        self.sizes: dict[int, int] = {}

    def release(self) -> None:
        self.buffer = bytearray()

    def take_away_merged(self, numbers: list[int], *, repair: bool = True) -> list[int]:
        """Return the numbers without the segments that a merged segment has replaced.

        A power cut has left those segments. With `repair` their message files are removed here;
        their companions are removed later, with those of all segments that are not there.
        """
        replaced: set[int] = set()
        for at, number in enumerate(numbers):
            header = self._header(number)
            if header is not None and header[0] == number and header[3]:
                replaced.update(numbers[bisect_left(numbers, header[3]) : at])
        for number in sorted(replaced) if repair else ():
            self.files.remove(f"{self.directory}/{file_name('msgs', number)}")
        return [number for number in numbers if number not in replaced]

    def _header(self, number: int) -> tuple[int, int, int, int, tuple[int, int]] | None:
        handle = self.files.open(f"{self.directory}/{file_name('msgs', number)}", read_only=True)
        try:
            self.sizes[number] = self.files.size(handle)
            return decode_header(read_head(self.files, handle, HEADER_BYTES))
        finally:
            self.files.close(handle)

    def load(self, number: int, *, repair: bool = True, index: bool = True) -> Loaded | None:
        """Return the segment with its abstracts, from its index if the index is good.

        Returns None when nothing of the file's present use has reached the disk. A segment whose
        header is damaged is returned with a capacity of 0.
        """
        name = file_name("msgs", number)
        path = f"{self.directory}/{name}"
        handle = self.files.open(path, read_only=not repair)
        try:
            size = self.files.size(handle)
            head = read_head(self.files, handle, HEADER_BYTES)
            header = decode_header(head)
            damage: list[Damage] = []
            if header is None and any(head) and (salt := self._salt_told(number)) is not None:
                header = (number, salt, size, 0, NO_CHAIN)
                damage = [Damage(name, "mendable", 0, HEADER_BYTES)]
                if repair:
                    self.files.write(handle, encode_header(number, salt, size), 0)
            if header is None or header[0] != number:
                return self._without_header(name, header is not None or not any(head), size, repair)
            segment = Segment(
                number,
                header[1],
                header[2],
                path,
                None,
                sealed=True,
                first=header[3],
                chain=header[4],
            )
            loaded = self._from_index(segment, size) if index else None
            loaded = loaded or self._from_scan(segment, handle, size, repair)
            loaded.damage = damage + loaded.damage
            return loaded
        finally:
            self.files.close(handle)

    def load_acks(self, segment: Segment, *, repair: bool = True) -> bytes:
        path = f"{self.directory}/{file_name('acks', segment.number)}"
        data = read_file(self.files, path)
        pairs, segment.acks_end = acks.decode(data, segment.number, segment.salt)
        if repair and segment.acks_end < len(data):
            # Good blocks may follow a torn one. They must not come back to life behind the new
            # blocks that are written over the torn one.
            handle = self.files.open(path)
            self.files.truncate(handle, segment.acks_end)
            self.files.close(handle)
        if repair and data and segment.acks_end == 0:
            self.files.remove(path)
        return pairs

    def _salt_told(self, number: int) -> int | None:
        return salt_told(
            read_file(self.files, f"{self.directory}/{file_name('index', number)}"), number
        )

    def read_acks(self, number: int, salt: int) -> bytes:
        """Return the settled pairs of a segment, as far as the blocks of the acks file are good."""
        return acks.decode(
            read_file(self.files, f"{self.directory}/{file_name('acks', number)}"), number, salt
        )[0]

    def read_index(self, segment: Segment) -> tuple[int, bytes] | None:
        """Return (end of the last record, abstracts), or None when there is no good index."""
        data = read_file(self.files, f"{self.directory}/{file_name('index', segment.number)}")
        return decode_index(data, segment.number, segment.salt)

    def read_records(self, handle: int, start: int, stop: int, salt: int) -> tuple[bytes, bool]:
        """Read the bytes from `start` to `stop` into the same place of the buffer.

        Returns the abstracts of the good records, and whether there is nothing but good records.
        """
        if len(self.buffer) < stop:
            self.buffer += bytes(stop - len(self.buffer))
        with memoryview(self.buffer) as view, view[start:stop] as part:
            got = self.files.read_into(handle, part, start)
        abstracts, end, holes = record.scan(self.buffer, start, start + got, salt)
        return abstracts, end == stop and not holes

    def _without_header(
        self, name: str, never_written: bool, size: int, repair: bool
    ) -> Loaded | None:
        path = f"{self.directory}/{name}"
        number = int(name.rpartition(".")[2])
        if never_written:
            if repair:
                self.files.remove(path)
                self._remove_companions(number)
            return None
        if repair:
            self.files.rename(path, f"{self.directory}/{file_name('lost', number)}")
            self._remove_companions(number)
        return Loaded(Segment(number, 0, 0, path, None), b"", [Damage(name, "header", 0, size)])

    def _remove_companions(self, number: int) -> None:
        for kind in ("index", "acks"):
            try:
                self.files.remove(f"{self.directory}/{file_name(kind, number)}")
            except OSError as error:
                if not is_missing(error):
                    raise

    def _from_index(self, segment: Segment, size: int) -> Loaded | None:
        data = read_file(self.files, f"{self.directory}/{file_name('index', segment.number)}")
        segment.has_index = bool(data)
        index = decode_index(data, segment.number, segment.salt)
        if index is None or index[0] > size:
            return None
        segment.used = segment.flushed = index[0]
        return Loaded(segment, index[1])

    def _from_scan(self, segment: Segment, handle: int, size: int, repair: bool) -> Loaded:
        if len(self.buffer) < size:
            self.buffer = bytearray(size)
        unreadable: list[tuple[int, int]] = []
        with memoryview(self.buffer) as view, view[:size] as part:
            try:
                size = self.files.read_into(handle, part, 0)
            except OSError as error:
                # A start must not count messages as lost that a better cable may bring back. A tool
                # that only reads wants the rest.
                if repair or error.errno != errno.EIO:
                    raise OSError(
                        error.errno, f"{error.strerror}: reading {segment.path}"
                    ) from error
                unreadable = self._read_in_blocks(handle, part)
        abstracts, end, holes = record.scan(self.buffer, HEADER_BYTES, size, segment.salt)
        segment.used = segment.flushed = segment.checked = end
        name = file_name("msgs", segment.number)
        damage = [Damage(name, "unreadable", start, stop) for start, stop in unreadable]
        damage += [Damage(name, "corrupt", start, stop) for start, stop in holes]
        torn = record.torn_bytes(self.buffer, end, size)
        if torn:
            damage.append(Damage(name, "torn", end, end + torn))
        if self.producers is not None and self.producers.found(
            segment, self.buffer, abstracts, holes
        ):
            if self.sync:
                self.files.sync(handle)  # what counts as stored must last
        elif repair and self.sync and not damage:
            self._write_index(segment, handle, abstracts)
        if repair and holes:
            self._keep_aside(segment, holes)
        return Loaded(segment, abstracts, damage)

    def _read_in_blocks(self, handle: int, target: memoryview) -> list[tuple[int, int]]:
        """Read block by block, with zeros for blocks that cannot be read.

        Returns the unreadable ranges as (from, to).
        """
        missing: list[tuple[int, int]] = []
        for start in range(0, len(target), BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, len(target))
            try:
                self.files.read_into(handle, target[start:stop], start)
            except OSError:
                target[start:stop] = bytes(stop - start)
                if missing and missing[-1][1] == start:
                    start = missing.pop()[0]
                missing.append((start, stop))
        return missing

    def _keep_aside(self, segment: Segment, holes: list[tuple[int, int]]) -> None:
        """Copy damaged bytes to damaged.N, since the segment's file goes when it is settled.

        The copy has the header and the bad bytes at their old positions, and holes elsewhere. No
        program reads the copy.
        """
        self.damaged_room -= sum(stop - start for start, stop in holes)
        if self.damaged_room < 0:
            return
        try:
            handle = self.files.open(
                f"{self.directory}/{file_name('damaged', segment.number)}", create=True
            )
            try:
                for start, stop in [(0, HEADER_BYTES), *holes]:
                    self.files.write(handle, bytes(self.buffer[start:stop]), start)
                if self.sync:
                    self.files.sync(handle)
            finally:
                self.files.close(handle)
        except OSError as error:
            if not is_full(error):
                raise

    def _write_index(self, segment: Segment, handle: int, abstracts: bytes) -> None:
        """Write an index, so that the next start need not scan the segment again.

        The segment is synced first, because its bytes may be in the page cache only.
        """
        if len(abstracts) * INDEX_SHARE_MAX > segment.used:
            return
        self.files.sync(handle)
        data = encode_index(segment.number, segment.salt, segment.used, abstracts)
        segment.has_index = True
        try:
            write_file(self.files, f"{self.directory}/{file_name('index', segment.number)}", data)
        except OSError as error:
            if not is_full(error):
                raise


# -- the state file --------------------------------------------------------------------------------


def write_state(
    files: Files,
    directory: str,
    next_number: int,
    live: Mapping[int, array[int]],
    segments: Collection[int] = (),
) -> None:
    """Write the state file, which says that the stop was clean.

    On a full disk no state file is written: after the next start all messages left count as
    delivered before.
    """
    parts = [struct.pack("<Q", next_number)]
    if segments:
        parts.append(
            struct.pack("<II", SEGMENTS_ID, len(segments)) + array("Q", sorted(segments)).tobytes()
        )
    for queue_id, entries in live.items():
        marks = array("Q", sorted(record.redelivered(entries)))
        if marks:
            parts.append(struct.pack("<II", queue_id, len(marks)) + marks.tobytes())
    rest = b"".join(parts)
    head = struct.pack("<8sII", STATE_MAGIC, FORMAT, record.crc32c(rest, FORMAT))
    try:
        write_file(files, f"{directory}/state.new", head + rest, sync=True)
    except OSError as error:
        if not is_full(error):
            raise
        remove_files(files, [f"{directory}/state.new"])
        return
    files.rename(f"{directory}/state.new", f"{directory}/state")
    files.sync_directory(directory)


def read_state(files: Files, directory: str) -> State | None:
    """Return the state, or None when the last stop was not clean."""
    data = read_file(files, f"{directory}/state")
    if len(data) < 24:
        return None
    magic, version, crc = struct.unpack_from("<8sII", data)
    if magic != STATE_MAGIC or crc != record.crc32c(memoryview(data)[16:], version):
        return None
    refuse_newer("state", version)
    state = State(struct.unpack_from("<Q", data, 16)[0], {}, array("Q"))
    at = 24
    while at < len(data):
        queue_id, count = struct.unpack_from("<II", data, at)
        state.marks[queue_id] = array("Q", data[at + 8 : at + 8 + 8 * count])
        at += 8 + 8 * count
    state.segments = state.marks.pop(SEGMENTS_ID, state.segments)
    return state


def remove_state(files: Files, directory: str) -> None:
    """Remove the state file: from now on a power cut counts as an unclean stop."""
    removed = False
    for name in ("state", "state.new"):
        try:
            files.remove(f"{directory}/{name}")
            removed = True
        except OSError as error:
            if not is_missing(error):
                raise
    if removed:
        files.sync_directory(directory)


def is_ours(name: str) -> bool:
    parsed = parse_name(name)
    return parsed is not None and parsed[0] in KINDS
