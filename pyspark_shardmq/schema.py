"""A message as a row: the columns with their types in Spark and in Arrow.

The base columns are, in this order: the place of the message (`queue`, `shard`, `offset`), the time
when it was stored (`timestamp`, UTC, microseconds), how it was published (`exchange`,
`routing_key`), and its body (`value`). `headers` keep the AMQP table without loss: each entry has
its key, the letter of its type as RabbitMQ uses them (S, l, t, F ...), and its encoded bytes.

Functions import pyarrow themselves, because Spark imports this module at every look-up of a data
source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark_shardmq.options import OptionError, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

HEADERS = "array<struct<key:string,type:string,value:binary>>"
PROPERTIES = (
    "struct<content_type:string,content_encoding:string,delivery_mode:int,priority:int,"
    "correlation_id:string,reply_to:string,expiration:string,message_id:string,"
    "timestamp:timestamp,type:string,user_id:string,app_id:string>"
)
BASE = {
    "queue": "string",
    "shard": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "exchange": "string",
    "routing_key": "string",
    "value": "binary",
}
COLUMNS = {**BASE, "headers": HEADERS, "properties": PROPERTIES}

# Each column of rowFormat=kafka: its type, and the column that it is made of.
KAFKA = {
    "key": ("binary", "routing_key"),
    "value": ("binary", "value"),
    "topic": ("string", "queue"),
    "partition": ("int", "shard"),
    "offset": ("bigint", "offset"),
    "timestamp": ("timestamp", "timestamp"),
    "timestampType": ("int", None),
    "headers": ("array<struct<key:string,value:binary>>", "headers"),
}
KAFKA_LOG_APPEND_TIME = 1  # a timestampType: the time of storing, not that of the producer


def columns(options: ReadOptions) -> list[str]:
    """Return the columns to ask the broker for, in the order that the rows have."""
    if options.row_format == "kafka":
        names = ["queue", "shard", "offset", "timestamp", "routing_key", "value"]
        return names + (["headers"] if options.include_headers else [])
    if options.columns is not None:
        unknown = [name for name in options.columns if name not in COLUMNS]
        if unknown:
            raise OptionError(
                f"option columns: no column {', '.join(unknown)} (there are {', '.join(COLUMNS)})"
            )
        return list(dict.fromkeys(options.columns))
    more = [("headers", options.include_headers), ("properties", options.include_properties)]
    return [*BASE, *(name for name, wanted in more if wanted)]


def ddl(options: ReadOptions) -> str:
    """Return the schema of the rows as Spark's DDL."""
    if options.row_format == "kafka":
        kinds = {
            name: kind
            for name, (kind, _) in KAFKA.items()
            if name != "headers" or options.include_headers
        }
    else:
        kinds = {name: COLUMNS[name] for name in columns(options)}
    return ", ".join(f"`{name}` {kind}" for name, kind in kinds.items())


# -- Arrow -----------------------------------------------------------------------------------------


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of these columns, which is also what Spark makes of `ddl`."""
    import pyarrow as pa

    return pa.schema([(name, arrow_type(COLUMNS[name])) for name in names])


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a type in Spark's DDL, as far as the tables above use it."""
    import pyarrow as pa

    plain = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
    }
    if kind.startswith("array<"):
        return pa.list_(pa.field("element", arrow_type(kind[6:-1])))
    if kind.startswith("struct<"):
        fields = (field.split(":", 1) for field in kind[7:-1].split(","))
        return pa.struct([(name, plain[inner]) for name, inner in fields])
    return plain[kind]


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the same rows with exactly these columns and types.

    Each batch needs this, because Spark compares the types of a task's first batch only.
    """
    if batch.schema.equals(schema):
        return batch
    import pyarrow as pa

    found = (
        pa.Table.from_batches([batch])
        .select(schema.names)
        .cast(schema)
        .combine_chunks()
        .to_batches()
    )
    return found[0] if found else pa.RecordBatch.from_pylist([], schema=schema)


def as_kafka(batch: pa.RecordBatch, with_headers: bool) -> pa.RecordBatch:
    """Return the rows with the columns of rowFormat=kafka."""
    import pyarrow as pa

    arrays, fields = [], []
    for name, (kind, source) in KAFKA.items():
        if name == "headers" and not with_headers:
            continue
        if source is None:
            array = pa.repeat(pa.scalar(KAFKA_LOG_APPEND_TIME, pa.int32()), batch.num_rows)
        elif name == "headers":
            array = _untyped(batch.column(batch.schema.get_field_index("headers")))
        else:
            array = batch.column(batch.schema.get_field_index(source)).cast(arrow_type(kind))
        arrays.append(array)
        fields.append(pa.field(name, arrow_type(kind)))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _untyped(headers: pa.ListArray) -> pa.ListArray:
    """Return the headers without the letters of their types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    entries = headers.values
    kept = pa.StructArray.from_arrays(
        [entries.field("key"), entries.field("value")], ["key", "value"]
    )
    target = arrow_type(KAFKA["headers"][0])
    return pa.ListArray.from_arrays(headers.offsets, kept, type=target, mask=pc.is_null(headers))
