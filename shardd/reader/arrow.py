"""Turn columns of a stream into arrays of Arrow. pyarrow is imported here to build the schema.

The schema is a promise to whoever reads (drawn in broker/ARROW.md): types, order and nullability
are those that Spark gives the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from shardmq.shardd.store.format import columns as c
from shardmq.shardd.store.format.columns import Arrays, Columns

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


def empty_batch(schema: Any, metadata: dict[str, str]) -> bytes:
    """Return the bytes of a batch without rows in an IPC stream of that schema."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        batch = pa.RecordBatch.from_arrays(
            [pa.array([], field.type) for field in schema], schema=schema
        )
        writer.write_batch(batch, custom_metadata=metadata)
        end = sink.tell()
    return bytes(sink.getvalue()[schema.serialize().size : end])


def bits_of(names: Sequence[str]) -> int:
    return sum(BITS.get(name, 0) for name in names)


def arrays_of(names: Sequence[str], columns: Columns, queue: str, shard: int) -> Arrays:
    """Return the arrays of batches with these columns.

    `queue` and `shard` are the values of the columns of these names, in each row.
    """
    arrays = columns.arrays()
    for name in names:
        match name:
            case "queue":
                arrays.repeat(queue.encode(), True)
            case "shard":
                arrays.repeat(shard.to_bytes(4, "little"), False)
            case _:
                columns.lay_out(BITS[name], arrays)
    return arrays
