"""Tell a shard about damage in a stream that the reader has met.

The reader tells the shard the place. The shard looks there itself, counts the damage and logs it.

    RUNTIME_DIR/gaps-N    records: u64 queue id | u64 the first offset that is lost

The reader appends a record with one call. Shard N takes the whole file away each second. A record
that is lost, or that cannot be written, costs only time, because the next scan that meets the
damage writes it again. So the file is never synced. A file that nobody takes away because the shard
is down stays small.
"""

from __future__ import annotations

import os
import struct
from collections import deque

RECORD = struct.Struct("<QQ")
# The places that wait for a shard in the file, and as many in the memory of the shard.
WAITING_MAX = 4096
# The places that the shard looks at in one second: each may cost a read of the disk.
AT_ONCE = 4


def path_of(runtime_dir: str, shard: int) -> str:
    return f"{runtime_dir}/gaps-{shard}"


def tell(path: str, queue: int, offsets: list[int]) -> None:
    """Append records for these offsets of a stream, as far as there is room. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        room = WAITING_MAX - os.fstat(descriptor).st_size // RECORD.size
        os.write(
            descriptor, b"".join(RECORD.pack(queue, offset) for offset in offsets[: max(room, 0)])
        )
    finally:
        os.close(descriptor)


class Gaps:
    """The side of the file that the shard reads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: deque[tuple[int, int]] = deque()

    def due(self) -> list[tuple[int, int]]:
        """Return (queue id, offset) of a few places that the reader told. Raises OSError.

        The shard calls this each second.
        """
        if not self._waiting:
            self._waiting.extend(self._take())
        return [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE))]

    def _take(self) -> list[tuple[int, int]]:
        """Return all places that the reader told since the last call, each place once."""
        taken = f"{self._path}.taken"
        try:
            os.rename(self._path, taken)
        except FileNotFoundError:
            return []
        try:
            with open(taken, "rb") as file:
                data = file.read(WAITING_MAX * RECORD.size)
        finally:
            os.unlink(taken)
        whole = len(data) - len(data) % RECORD.size
        return list(dict.fromkeys(RECORD.iter_unpack(data[:whole])))
