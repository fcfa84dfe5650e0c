"""What stands before the buffers of a record batch in an Arrow IPC stream. Pure: numbers in, bytes out.

A message is `u32 0xFFFFFFFF | i32 bytes of metadata | metadata | body`; the metadata is a flatbuffer (Message.fbs of
the Arrow columnar format, 1.0 and later). For batches of one schema all of it but the numbers stays the same, so it is
laid out once, here by its offsets:

      0  u32 16: Message                            36  u16[5]: RecordBatch has a length, nodes and buffers
      4  u16[6]: which fields Message has, where    48  i32 12 | u32 16: nodes | i64 rows | u32: buffers
     16  i32 12 | u32 28: its header                68  u32 count | per node i64 rows, i64 nulls
     24  i64 bytes of the body                          u32 0 | u32 count | per buffer i64 offset, i64 bytes
     32  i16 4: V5 | u8 3: a RecordBatch | u8 0

Buffers begin at multiples of ALIGNMENT in the body.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

ALIGNMENT = 8
CONTINUED = 0xFFFFFFFF
# Behind the last batch.
END = struct.pack("<Ii", CONTINUED, 0)
_FIXED_BYTES = 80  # of the metadata, without nodes and buffers


class BatchHead:
    """Of the batches of one schema, which have so many nodes and buffers."""

    def __init__(self, nodes: int, buffers: int) -> None:
        self._head = struct.Struct(f"<Ii I6H iIqhBx 5H2x iIqI I{2 * nodes}q 4xI{2 * buffers}q")
        self._before = (
            CONTINUED,
            _FIXED_BYTES + 16 * (nodes + buffers),
            *(16, 12, 20, 16, 18, 4, 8),
            *(12, 28),
        )
        self._between = (4, 3, *(10, 20, 8, 4, 16), *(12, 16))
        self._buffers_at = 12 + 16 * nodes
        self._nodes, self._buffers = nodes, buffers

    def encode(self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_bytes: int) -> bytes:
        """`nodes`: rows and nulls of each array, parents first; `buffers`: offset in the body and bytes of each."""
        return self._head.pack(
            *self._before, body_bytes, *self._between, rows, self._buffers_at, self._nodes, *nodes,
            self._buffers, *buffers,
        )  # fmt: skip
