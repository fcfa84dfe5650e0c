"""Lay out the bytes before the buffers of a record batch in an Arrow IPC stream.

A message is `u32 0xFFFFFFFF | i32 bytes of metadata | metadata | body`. The metadata is a
flatbuffer (Message.fbs of the Arrow columnar format, 1.0 and later). For batches of one schema all
metadata except the numbers stays the same, so the metadata is laid out once. These are its offsets:

     0  u32 16: Message
     4  u16[6]: which fields Message has, where
    16  i32 12 | u32 28: its header
    24  i64 bytes of the body
    32  i16 4: V5 | u8 3: a RecordBatch | u8 0
    36  u16[5]: RecordBatch has a length, nodes and buffers
    48  i32 12 | u32 16: nodes | i64 rows | u32: buffers
    68  u32 count | per node i64 rows, i64 nulls
        u32 0 | u32 count | per buffer i64 offset, i64 bytes

Buffers begin at multiples of 8 in the body.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

CONTINUED = 0xFFFFFFFF
# The bytes that end a stream, behind the last batch.
END = struct.pack("<Ii", CONTINUED, 0)
_PREFIX = struct.Struct("<Ii")
# The metadata up to its first node.
_FIXED = struct.Struct("<I6H iIqhBx 5H2x iIqI I")


class BatchHead(NamedTuple):
    """The head of the batches of one schema, and where the numbers go in it, as i64."""

    data: bytes
    body_bytes_at: int
    rows_at: int
    nodes_at: int  # rows and nulls of each array, parents first
    buffers_at: int  # offset in the body and size in bytes of each buffer


def batch_head(nodes: int, buffers: int) -> BatchHead:
    fixed = _FIXED.pack(
        *(16, 12, 20, 16, 18, 4, 8),
        *(12, 28, 0, 4, 3),
        *(10, 20, 8, 4, 16),
        *(12, 16, 0, 12 + 16 * nodes),
        nodes,
    )
    metadata = fixed + bytes(16 * nodes) + struct.pack("<4xI", buffers) + bytes(16 * buffers)
    prefix = _PREFIX.pack(CONTINUED, len(metadata))
    nodes_at = len(prefix) + len(fixed)
    return BatchHead(prefix + metadata, 32, 64, nodes_at, nodes_at + 16 * nodes + 8)
