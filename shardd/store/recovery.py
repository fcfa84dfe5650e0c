"""From files back to segments and live entries: what a store finds when it starts. Decides nothing about queues.

Every segment found is sealed: new records go to a new one, so a position is never used twice. What is damaged is told
in `Damage`, never hidden; the good records beside it stay usable.

    state    0  "SHMQSTAT" | u32 FORMAT | u32 crc32c of [16, end)
            16  u64 number of the next segment
            24  per queue with redelivered messages: u32 queue id | u32 count | u64 entry[count]
                with queue id 0, which no queue has: the numbers of the segments there are

The state file is written by a clean stop alone and removed at the next start: without it everything may have been
delivered before, and carries the flag.
"""

from __future__ import annotations

import errno
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from shardmq.shardd.store import acks, record, scanning
from shardmq.shardd.store import manifest as manifests
from shardmq.shardd.store.files import Files, is_full, is_missing, remove_files
from shardmq.shardd.store.producers import NAME as PRODUCERS
from shardmq.shardd.store.producers import Producers
from shardmq.shardd.store.reclaim import Reclaimer
from shardmq.shardd.store.segment import (
    FORMAT,
    HEADER_BYTES,
    INDEX_SHARE_MAX,
    NO_CHAIN,
    Segment,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    file_name,
    parse_name,
    refuse_newer,
    salt_told,
)

STATE_MAGIC = b"SHMQSTAT"
KINDS = ("msgs", "index", "acks", "spare", "lost", "damaged")
# Of damaged bytes, copied aside in one recovery; beyond, they are only told.
DAMAGED_BYTES_MAX = 64 << 20
REDELIVERED = 1
# In the place of a queue's id in the state file.
SEGMENTS_ID = 0
# What a disk that cannot read somewhere is asked for at a time.
BLOCK_BYTES = 4096

# Bytes of message files gone through, of how many; messages found in them so far, settled ones too.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Damage:
    """`what`: torn (the end of a segment cut off), corrupt (bad bytes between good records, kept in damaged.N), header
    (no good record can be told; the file is kept as lost.N), mendable (a header that the index can tell: no loss),
    unreadable (the disk does not give these bytes; for those who only look, a start fails), missing (the whole file).
    `offsets`: of a stream, the first that is lost and the one behind the last, as far as they are known."""

    file: str
    what: str
    start: int
    stop: int
    offsets: tuple[int, int] | None = field(default=None, compare=False)


# What costs messages that were stored.
LOSSES = frozenset(("corrupt", "header", "missing"))


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
) -> Found:
    names = [
        parsed for parsed in map(parse_name, files.list(directory)) if parsed and parsed[0] in KINDS
    ]
    state = read_state(files, directory)
    reader = Reader(files, directory, sync, producers)
    manifest = reclaimer.manifest
    listed = set(manifest.read(reader.read_whole(f"{directory}/{manifests.NAME}")))
    unread = producers.recover() if producers is not None else None
    numbers = reader.take_away_merged(sorted(number for kind, number in names if kind == "msgs"))
    collector = scanning.Collector(queue_ids, frozenset(timed))
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
            count_in(collector, loaded, pairs, 0 if fresh else REDELIVERED)
            found.segments.append(loaded.segment)
            messages += loaded.segment.messages
        bytes_done += reader.sizes[number]
        if progress is not None:
            progress(bytes_done, bytes_total, messages)
    reader.release()
    found.damage += missing(listed, names, found.segments, reclaimer)
    # Not before every segment was understood: a program that is too old must not cost the clean stop.
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
        manifest.remove()  # without syncs nobody could keep it true
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
    """Return those of the segments listed, by the last clean stop or the manifest, that nobody has removed and that are
    gone. After a power cut the manifest may list some that were removed: their files, or what they were merged into,
    are still there."""
    gone = set(listed) - {number for kind, number in names if kind in ("msgs", "lost")}
    if not gone:
        return []
    told = [reclaimer.numbers_of(number) for kind, number in names if kind == "spare"]
    told += [(segment.first, segment.number) for segment in segments if segment.first]
    for first, last in told:
        gone -= {number for number in gone if first <= number <= last}
    return [Damage(file_name("msgs", number), "missing", 0, 0) for number in sorted(gone)]


def count_in(collector: scanning.Collector, loaded: Loaded, pairs: bytes, flags: int) -> None:
    segment = loaded.segment
    counts = collector.add(loaded.abstracts, segment.number, pairs, flags)
    segment.records, segment.messages, segment.references, segment.live = counts


def mark(arrivals: list[record.Arrival], state: State | None) -> None:
    for arrival in arrivals if state is not None and state.marks else ():
        marks = state.marks.get(arrival.queue_id) if state is not None else None
        if marks is not None:
            record.mark_redelivered(arrival.entries, marks)


class Reader:
    """Loads one segment after another; the big buffer is used again."""

    def __init__(
        self, files: Files, directory: str, sync: bool, producers: Producers | None = None
    ) -> None:
        self.files = files
        self.directory = directory
        self.sync = sync
        self.producers = producers  # to hear of the sequences found
        self.buffer = bytearray()
        self.damaged_room = DAMAGED_BYTES_MAX
        self.sizes: dict[int, int] = {}  # of the message files whose headers were looked at

    def release(self) -> None:
        self.buffer = bytearray()

    def read_whole(self, path: str) -> bytes:
        """b"" when there is no such file."""
        try:
            handle = self.files.open(path, read_only=True)
        except OSError as error:
            if is_missing(error):
                return b""
            raise
        try:
            data = bytearray(self.files.size(handle))
            with memoryview(data) as view:
                got = self.files.read_into(handle, view, 0)
            return bytes(data[:got])
        finally:
            self.files.close(handle)

    def take_away_merged(self, numbers: list[int], *, repair: bool = True) -> list[int]:
        """Segments that are there, without those whose survivors are in a merged one too: a power cut left them. Their
        companions go with those of all segments that are not there."""
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
            head = bytearray(HEADER_BYTES)
            with memoryview(head) as view:
                return decode_header(head[: self.files.read_into(handle, view, 0)])
        finally:
            self.files.close(handle)

    def load(self, number: int, *, repair: bool = True, index: bool = True) -> Loaded | None:
        """The segment with its abstracts, from the index if there is a good one. None: the file's present life never
        reached the disk, it holds nothing. A segment with capacity 0: its header is damaged."""
        name = file_name("msgs", number)
        path = f"{self.directory}/{name}"
        handle = self.files.open(path, read_only=not repair)
        try:
            size = self.files.size(handle)
            head = bytearray(min(HEADER_BYTES, size))
            with memoryview(head) as view:
                self.files.read_into(handle, view, 0)
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
        data = self.read_whole(path)
        pairs, segment.acks_end = acks.decode(data, segment.number, segment.salt)
        if repair and segment.acks_end < len(data):
            # Blocks behind a torn one must not come back to life behind what is written over it.
            handle = self.files.open(path)
            self.files.truncate(handle, segment.acks_end)
            self.files.close(handle)
        if repair and data and segment.acks_end == 0:
            self.files.remove(path)
        return pairs

    def _salt_told(self, number: int) -> int | None:
        return salt_told(self.read_whole(f"{self.directory}/{file_name('index', number)}"), number)

    def read_acks(self, number: int, salt: int) -> bytes:
        """The pairs as far as they are good."""
        return acks.decode(
            self.read_whole(f"{self.directory}/{file_name('acks', number)}"), number, salt
        )[0]

    def read_index(self, segment: Segment) -> tuple[int, bytes] | None:
        """(end of the last record, abstracts), None when there is no good one."""
        data = self.read_whole(f"{self.directory}/{file_name('index', segment.number)}")
        return decode_index(data, segment.number, segment.salt)

    def read_records(self, handle: int, start: int, stop: int, salt: int) -> tuple[bytes, bool]:
        """Abstracts of the good records from `start` to `stop`, whose bytes come to the same place in the buffer; and
        whether there is nothing but good records."""
        if len(self.buffer) < stop:
            self.buffer += bytes(stop - len(self.buffer))
        with memoryview(self.buffer) as view, view[start:stop] as part:
            got = self.files.read_into(handle, part, start)
        abstracts, end, holes = scanning.scan(self.buffer, start, start + got, salt)
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
        data = self.read_whole(f"{self.directory}/{file_name('index', segment.number)}")
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
                # A start must not take for lost what a better cable may bring back; who only looks wants the rest.
                if repair or error.errno != errno.EIO:
                    raise OSError(
                        error.errno, f"{error.strerror}: reading {segment.path}"
                    ) from error
                unreadable = self._read_in_blocks(handle, part)
        abstracts, end, holes = scanning.scan(self.buffer, HEADER_BYTES, size, segment.salt)
        segment.used = segment.flushed = segment.checked = end
        name = file_name("msgs", segment.number)
        damage = [Damage(name, "unreadable", start, stop) for start, stop in unreadable]
        damage += [Damage(name, "corrupt", start, stop) for start, stop in holes]
        torn = scanning.torn_bytes(self.buffer, end, size)
        if torn:
            damage.append(Damage(name, "torn", end, end + torn))
        if self.producers is not None and self.producers.found(
            segment, self.buffer, abstracts, holes
        ):
            if self.sync:
                self.files.sync(handle)  # what is said to be stored must last
        elif repair and self.sync and not damage:
            self._write_index(segment, handle, abstracts)
        if repair and holes:
            self._keep_aside(segment, holes)
        return Loaded(segment, abstracts, damage)

    def _read_in_blocks(self, handle: int, target: memoryview) -> list[tuple[int, int]]:
        """What the disk gives; zeros elsewhere: (from, to) of that."""
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
        """The segment's file goes when its good messages are settled. What was damaged stays in damaged.N: header and
        bad bytes at the places they had, holes elsewhere. Nobody reads it but people."""
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
        """So that the next start need not scan it again. The bytes may still be in the page cache alone: sync first."""
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


def write_file(files: Files, path: str, data: bytes, *, sync: bool = False) -> None:
    handle = files.open(path, create=True)
    try:
        files.truncate(handle, 0)
        files.write(handle, data, 0)
        if sync:
            files.sync(handle)
    finally:
        files.close(handle)


# -- the state file --------------------------------------------------------------------------------


def write_state(
    files: Files,
    directory: str,
    next_number: int,
    live: Mapping[int, array[int]],
    segments: Collection[int] = (),
) -> None:
    """Say that the stop is clean. A disk without room for that costs the marks alone: after the next start all that is
    left counts as delivered before."""
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
    """None: the last stop was not clean."""
    data = Reader(files, directory, False).read_whole(f"{directory}/state")
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
    """From here on the store is not cleanly stopped, even if power fails at once."""
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
