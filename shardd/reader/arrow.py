"""Columns of a stream as Arrow record batches, and those as an IPC stream. pyarrow is needed from here on only, to
say the schema.

The schema is a promise to whoever reads (drawn in broker/README.md): types, order and nullability are what Spark makes
of the same columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from shardd.reader.ipc import ALIGNMENT, END, BatchHead
from shardd.store import columns as c
from shardd.store.columns import Columns, Memory

BITS = {
    "offset": c.OFFSET,
    "timestamp": c.TIMESTAMP,
    "exchange": c.EXCHANGE,
    "routing_key": c.ROUTING_KEY,
    "value": c.VALUE,
    "headers": c.HEADERS,
    "properties": c.PROPERTIES,
}
_TIME = pa.timestamp("us", "UTC")
_NUMBERS = {"delivery_mode": pa.int32(), "priority": pa.int32(), "timestamp": _TIME}
_HEADER = pa.struct([("key", pa.string()), ("type", pa.string()), ("value", pa.binary())])
_PROPERTIES = pa.struct([(name, _NUMBERS.get(name, pa.string())) for name in c.PROPERTY_COLUMNS])
TYPES: dict[str, Any] = {
    "queue": pa.string(),
    "shard": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "exchange": pa.string(),
    "routing_key": pa.string(),
    "value": pa.binary(),
    "headers": pa.list_(pa.field("element", _HEADER)),
    "properties": _PROPERTIES,
}
PADDING = tuple(bytes(size) for size in range(ALIGNMENT))


def schema_of(names: Sequence[str]) -> Any:
    return pa.schema([(name, TYPES[name]) for name in names])


def bits_of(names: Sequence[str]) -> int:
    return sum(BITS.get(name, 0) for name in names)


class Encoder:
    """Batches of one answer, as pieces of an IPC stream to be sent one behind the other."""

    def __init__(self, names: Sequence[str], queue: str, shard: int) -> None:
        self.schema = schema_of(names)
        self._names = names
        self._queue, self._shard = _Repeated(queue.encode()), _Repeated(shard.to_bytes(4, "little"))
        self._head: BatchHead | None = None

    def begin(self) -> bytes:
        """What comes before the first batch."""
        return bytes(self.schema.serialize())

    def encode(self, columns: Columns) -> list[bytes | memoryview | Memory]:
        """The columns' own memory among them: good until that is cleared."""
        batch = _Batch(columns.rows)
        for name in self._names:
            self._add(batch, name, columns)
        if self._head is None:
            self._head = BatchHead(len(batch.nodes) // 2, len(batch.buffers) // 2)
        batch.pieces[0] = self._head.encode(batch.rows, batch.nodes, batch.buffers, batch.body_bytes)
        return batch.pieces

    def end(self) -> bytes:
        return END

    def _add(self, batch: _Batch, name: str, columns: Columns) -> None:
        rows = columns.rows
        match name:
            case "queue":
                batch.add(rows, 0, None, *self._queue.text(rows))
            case "shard":
                batch.add(rows, 0, None, self._shard.number(rows))
            case "offset":
                batch.add(rows, 0, None, *columns.offset_buffers())
            case "timestamp":
                batch.add(rows, 0, None, *columns.timestamp_buffers())
            case "headers":
                nulls, bits, ends, entries, *parts = columns.header_buffers()
                batch.add(rows, nulls, bits, ends)
                batch.add(entries, 0, None)
                for part in parts:
                    batch.add(entries, 0, None, *part)
            case "properties":
                batch.add(rows, 0, None)
                for nulls, bits, *buffers in columns.property_buffers():
                    batch.add(rows, nulls, bits, *buffers)
            case _:
                batch.add(rows, 0, None, *columns.text_buffers(BITS[name]))


class _Batch:
    """A batch while its arrays are added to it, parents first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.nodes: list[int] = []
        self.buffers: list[int] = []
        self.pieces: list[bytes | memoryview | Memory] = [b""]  # the first is for the head
        self.body_bytes = 0

    def add(self, rows: int, nulls: int, bits: Memory | None, *buffers: memoryview | Memory) -> None:
        self.nodes += (rows, nulls)
        for buffer in (bits if nulls else None, *buffers):
            size = 0 if buffer is None else len(buffer)
            self.buffers += (self.body_bytes, size)
            if buffer is not None and size:
                self.pieces.append(buffer)
                rest = -size % ALIGNMENT
                if rest:
                    self.pieces.append(PADDING[rest])
                self.body_bytes += size + rest


class _Repeated:
    """A column that says the same in each row: made for the largest batch so far, of which others are the beginning."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._rows = -1
        self._ends = self._data = b""

    def number(self, rows: int) -> memoryview:
        return self.text(rows)[1]

    def text(self, rows: int) -> tuple[memoryview, memoryview]:
        """(ends, data)"""
        size = len(self._value)
        if rows > self._rows:
            self._rows, self._data = rows, self._value * rows
            ends = array("i", range(0, size * rows + 1, size)) if size else array("i", bytes(4 * (rows + 1)))
            self._ends = ends.tobytes()
        return memoryview(self._ends)[: 4 * (rows + 1)], memoryview(self._data)[: size * rows]
