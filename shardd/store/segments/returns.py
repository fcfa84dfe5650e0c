"""Count how often messages were returned to their queues, for queues with a delivery limit.

The counts are kept in a file beside the segments.

    returns    0  "SHMQRETN" | u32 FORMAT | u32 crc32c of nothing, begun from FORMAT
              16  blocks: u32 crc32c of the rest of the block | u32 count
                  | (u64 entry, u32 queue id, u32 times)[count]

Each flush appends a block. The last count of an entry is valid. Recovery ignores the counts of
settled messages, and they are left out when the file is next written anew. The entries are those
on disk: where segments were merged, the new ones. A lost block means that a message may be
returned more often than allowed, never that one is lost.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping

from shardmq.shardd.store.errors import refuse_newer
from shardmq.shardd.store.files import Files, is_full, read_file, replace_file, sync_file
from shardmq.shardd.store.format import record

FORMAT = 1
MAGIC = b"SHMQRETN"
NAME = "returns"
HEADER = struct.Struct("<8sII")
BLOCK = struct.Struct("<II")
ITEM = struct.Struct("<QII")
FLAGS = 15
TIMES_MAX = 0xFFFFFFFF
# The file is written anew when it is larger than this, and than twice what is needed of it.
REWRITE_BYTES = 256 << 10

Placed = Callable[["array[int]"], "array[int]"]


class Returns:
    """The counts by queue id and entry (without flags)."""

    def __init__(self) -> None:
        self.times: dict[int, dict[int, int]] = {}
        self._changed: dict[tuple[int, int], None] = {}
        self._end = 0  # end of the file
        self._anew = False

    def count(self, queue_id: int, entries: array[int]) -> list[int]:
        """Count one more return of each of these messages; return their counts."""
        times = self.times.setdefault(queue_id, {})
        found = []
        for entry in entries:
            place = entry & ~FLAGS
            now = times[place] = min(times.get(place, 0) + 1, TIMES_MAX)
            self._changed[queue_id, place] = None
            found.append(now)
        return found

    def put(self, queue_id: int, entries: array[int], times: Iterable[int]) -> None:
        """Take the counts of messages that came from another shard."""
        known = self.times.setdefault(queue_id, {})
        for entry, count in zip(entries, times, strict=True):
            known[entry & ~FLAGS] = count
            self._changed[queue_id, entry & ~FLAGS] = None

    def of(self, queue_id: int, entry: int) -> int:
        times = self.times.get(queue_id)
        return times.get(entry & ~FLAGS, 0) if times else 0

    def forget(self, queue_id: int, entries: Iterable[int]) -> None:
        times = self.times.get(queue_id)
        if times is None:
            return
        for entry in entries:
            times.pop(entry & ~FLAGS, None)
            self._changed.pop((queue_id, entry & ~FLAGS), None)
        if not times:
            del self.times[queue_id]

    def places_changed(self) -> None:
        """Note that segments were merged, so the entries in the file are no longer valid."""
        self._anew = bool(self.times)

    # -- on disk -----------------------------------------------------------------------------------

    def recover(self, said: Mapping[tuple[int, int], int], live: Mapping[int, array[int]]) -> None:
        """Take from the file the counts of messages that queues still have.

        The file is written anew with the next write, because its entries may be used again for
        other messages.
        """
        self._anew = bool(said)
        for queue_id in {queue_id for queue_id, _ in said}:
            there = {entry & ~FLAGS for entry in live.get(queue_id, ())}
            times = {
                place: n
                for (queue, place), n in said.items()
                if queue == queue_id and place in there
            }
            if times:
                self.times[queue_id] = times

    def write(self, files: Files, directory: str, placed: Placed) -> None:
        """Write the changed counts, or all of them. On a full disk the counts wait."""
        if not (self._anew or self._changed):
            return
        try:
            total = sum(map(len, self.times.values()))
            if self._anew or self._end > max(REWRITE_BYTES, 2 * (HEADER.size + total * ITEM.size)):
                self._write_all(files, directory, placed)
            elif self._changed:
                self._append(files, directory, placed)
        except OSError as error:
            if not is_full(error):
                raise

    def _append(self, files: Files, directory: str, placed: Placed) -> None:
        head = b"" if self._end else encode_header()
        data = head + self._block(list(self._changed), placed)
        handle = files.open(f"{directory}/{NAME}", create=True)
        try:
            files.write(handle, data, self._end)
        finally:
            files.close(handle)
        self._end += len(data)
        self._changed.clear()

    def _write_all(self, files: Files, directory: str, placed: Placed) -> None:
        keys = [(queue_id, place) for queue_id, times in self.times.items() for place in times]
        data = encode_header() + (self._block(keys, placed) if keys else b"")
        path = f"{directory}/{NAME}"
        replace_file(files, path, f"{path}.new", data, sync=False)
        self._end = len(data)
        self._anew = False
        self._changed.clear()

    def make_last(self, files: Files, directory: str) -> None:
        """Sync the file at a clean stop.

        Counts may be lost while the store lives, but not at a clean stop.
        """
        if self._end:
            sync_file(files, f"{directory}/{NAME}")

    def _block(self, keys: list[tuple[int, int]], placed: Placed) -> bytes:
        places = placed(array("Q", [place for _, place in keys]))
        items = [
            ITEM.pack(on_disk, queue_id, self.times[queue_id][place])
            for (queue_id, place), on_disk in zip(keys, places, strict=True)
        ]
        rest = struct.pack("<I", len(items)) + b"".join(items)
        return struct.pack("<I", record.crc32c(rest)) + rest


def read(files: Files, directory: str) -> dict[tuple[int, int], int]:
    """Return the counts in the file, by queue id and entry. Raises FormatTooNew."""
    return decode(read_file(files, f"{directory}/{NAME}"))


def encode_header() -> bytes:
    return HEADER.pack(MAGIC, FORMAT, record.crc32c(b"", FORMAT))


def decode(data: bytes) -> dict[tuple[int, int], int]:
    """Return {(queue id, entry): times} from the blocks up to the first bad one."""
    if len(data) < HEADER.size:
        return {}
    magic, version, crc = HEADER.unpack_from(data)
    if magic != MAGIC or crc != record.crc32c(b"", version):
        return {}
    refuse_newer(NAME, version, FORMAT)
    found: dict[tuple[int, int], int] = {}
    at = HEADER.size
    while at + BLOCK.size <= len(data):
        crc, count = BLOCK.unpack_from(data, at)
        stop = at + BLOCK.size + count * ITEM.size
        if stop > len(data) or record.crc32c(memoryview(data)[at + 4 : stop]) != crc:
            break
        for entry, queue_id, times in ITEM.iter_unpack(data[at + BLOCK.size : stop]):
            found[queue_id, entry] = times
        at = stop
    return found
