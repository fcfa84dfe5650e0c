"""Columns of a stream as Arrow record batches, and those as an IPC stream. pyarrow is needed from here on only.

The schema is a promise to whoever reads (drawn in broker/README.md): types, order and nullability are what Spark makes
of the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from shardd.store import columns as c
from shardd.store.columns import Columns

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


def schema_of(names: Sequence[str]) -> Any:
    return pa.schema([(name, TYPES[name]) for name in names])


def bits_of(names: Sequence[str]) -> int:
    return sum(BITS.get(name, 0) for name in names)


class Encoder:
    """Batches of one answer, as pieces of an IPC stream to be sent one behind the other."""

    def __init__(self, names: Sequence[str], queue: str, shard: int) -> None:
        self.schema = schema_of(names)
        self._names = names
        self._queue, self._shard = queue, shard
        self._sink = _Pieces()
        self._writer = pa.ipc.new_stream(self._sink.file, self.schema)

    def begin(self) -> bytes:
        """What comes before the first batch."""
        return b"".join(self._sink.take())

    def encode(self, columns: Columns) -> list[memoryview]:
        """Views of the columns' memory among them: to be let go of before that is cleared."""
        arrays = [self._array(name, columns) for name in self._names]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        return self._sink.take()

    def end(self) -> bytes:
        self._writer.close()
        return b"".join(self._sink.take())

    def _array(self, name: str, columns: Columns) -> Any:
        rows, kind = columns.rows, TYPES[name]
        match name:
            case "queue":
                return pa.repeat(pa.scalar(self._queue, kind), rows)
            case "shard":
                return pa.repeat(pa.scalar(self._shard, kind), rows)
            case "offset":
                return _array(kind, rows, None, columns.offset_buffers())
            case "timestamp":
                return _array(kind, rows, None, columns.timestamp_buffers())
            case "headers":
                return _headers(columns)
            case "properties":
                children = [
                    _array(kind.field(i).type, rows, bits, buffers, nulls)
                    for i, (nulls, bits, *buffers) in enumerate(columns.property_buffers())
                ]
                return pa.Array.from_buffers(kind, rows, [None], 0, children=children)
            case _:
                return _array(kind, rows, None, columns.text_buffers(BITS[name]))


def _array(kind: Any, rows: int, bits: Any, buffers: Sequence[Any], nulls: int = 0) -> Any:
    valid = pa.py_buffer(bits) if nulls else None
    return pa.Array.from_buffers(kind, rows, [valid, *map(pa.py_buffer, buffers)], nulls)


def _headers(columns: Columns) -> Any:
    nulls, bits, ends, entries, *parts = columns.header_buffers()
    kinds = [_HEADER.field(i).type for i in range(3)]
    children = [_array(kind, entries, None, part) for kind, part in zip(kinds, parts, strict=True)]
    pairs = pa.Array.from_buffers(_HEADER, entries, [None], 0, children=children)
    valid = pa.py_buffer(bits) if nulls else None
    return pa.Array.from_buffers(TYPES["headers"], columns.rows, [valid, pa.py_buffer(ends)], nulls, children=[pairs])


class _Pieces:
    """A file that keeps what is written to it as it is, uncopied."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[memoryview] = []
        self.file = pa.PythonFile(self, mode="w")

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._pieces.append(view)
        return view.nbytes

    def take(self) -> list[memoryview]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True
