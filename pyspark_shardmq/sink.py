"""Rows published by Spark, with confirms, each once in each queue however often Spark repeats a task or an epoch.

Each task is a producer of its own to the broker: (query, partition) names it, (epoch, row) is its sequence number,
which rises from row to row and from epoch to epoch. What is repeated has the same numbers and is dropped by the
queues that have it. That holds while a repeated task gives the same rows in the same order; where a shuffle may order
them otherwise, sort within partitions before the sink.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from pyspark_shardmq import schema
from pyspark_shardmq.fetch import Broker
from pyspark_shardmq.options import OptionError, WriteOptions, for_stream_writer

if TYPE_CHECKING:
    import pyarrow as pa

EPOCH_BITS = 23  # sequence numbers are signed 64-bit: 2**23 epochs of 2**40 rows a partition
ROW_BITS = 40
BODY_BYTES_MAX = 32 << 20  # of a batch as Arrow; the broker takes twice that
COLUMNS = {"value", "routing_key", "exchange", "headers", "properties"}
PRODUCER_HEADERS = ("x-producer-id", "x-sequence")


@dataclass
class Written(WriterCommitMessage):
    """What a task has published; `known`: rows that a queue had before, of the same producer. None where rows have no
    producer, so that nobody knows.
    """

    rows: int
    known: int | None = None


def report(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], epoch: int | None = None
) -> None:
    """Say on the driver what was stored and what the broker knew before: one line of JSON in the file of metricsPath,
    and a line on standard error where rows were known.
    """
    written = [message for message in messages if isinstance(message, Written)]
    rows = sum(one.rows for one in written)
    said: dict[str, int | None] = {} if epoch is None else {"epoch": epoch}
    if any(one.known is None for one in written):
        said |= {"rows": rows, "stored": None, "known": None}
    else:
        known = sum(one.known or 0 for one in written)
        said |= {"rows": rows, "stored": rows - known, "known": known}
        if known:
            print(
                f"shardmq: {known} of {rows} rows were known before, {rows - known} are stored",
                file=sys.stderr,
            )
    if options.metrics_path is not None:
        with open(options.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


def check_columns(names: Sequence[str]) -> None:
    if "value" not in names:
        raise OptionError(
            f"the sink needs a column `value` (binary or string), not only {', '.join(names)}"
        )
    if more := [name for name in names if name not in COLUMNS]:
        raise OptionError(
            f"the sink does not know what to do with column {', '.join(more)}: select only {', '.join(sorted(COLUMNS))}"
        )


def check_exchange(options: WriteOptions, names: Sequence[str]) -> None:
    if options.exchange is None and "exchange" not in names:
        raise OptionError("say where to publish: option exchange, or a column `exchange`")


def first_sequence(epoch: int) -> int:
    if not 0 <= epoch < 1 << EPOCH_BITS:
        raise OptionError(
            f"epoch {epoch}: sequence numbers hold {1 << EPOCH_BITS} epochs; begin a new checkpoint"
        )
    return epoch << ROW_BITS


def publish(
    options: WriteOptions, batches: Iterator[pa.RecordBatch], producer: str | None, sequence: int
) -> Written:
    """All rows, in order, each batch confirmed before the next is sent."""
    broker, count, begun = Broker(options.connection), 0, time.monotonic()
    known: int | None = None if producer is None else 0
    try:
        for batch in batches:
            for piece in pieces(wire_form(batch, producer is not None), options.batch_rows):
                published = broker.publish(
                    options.exchange or "",
                    piece,
                    routing_key=options.routing_key,
                    mandatory=options.mandatory,
                    producer=producer,
                    sequence=sequence + count,
                )
                count += published.rows
                known = (
                    None if known is None or published.known is None else known + published.known
                )
                if options.rows_per_second is not None:
                    time.sleep(max(0.0, begun + count / options.rows_per_second - time.monotonic()))
    finally:
        broker.close()
    return Written(count, known)


def pieces(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Slices of at most `rows_max` rows and about BODY_BYTES_MAX, one row at least."""
    size = max(1, batch.nbytes // max(1, batch.num_rows))
    step = max(1, min(rows_max, BODY_BYTES_MAX // size))
    for start in range(0, batch.num_rows, step):
        piece = batch.slice(start, step)
        if piece.nbytes > BODY_BYTES_MAX and piece.num_rows > 1:
            yield from pieces(piece, piece.num_rows // 2)
        else:
            yield piece


def wire_form(batch: pa.RecordBatch, numbered: bool) -> pa.RecordBatch:
    """The batch in the broker's column types. Of a `numbered` one the headers lose what another producer said of its
    place.
    """
    import pyarrow as pa

    names, arrays = batch.schema.names, list(batch.columns)
    wanted = []
    for i, name in enumerate(names):
        kind = pa.binary() if name == "value" else schema.arrow_type(schema.COLUMNS[name])
        arrays[i] = (
            _without_place(arrays[i].cast(kind))
            if name == "headers" and numbered
            else arrays[i].cast(kind)
        )
        wanted.append(pa.field(name, kind))
    value = arrays[names.index("value")]
    if value.null_count:
        raise OptionError(
            f"{value.null_count} of {len(value)} rows have no value: a message has a body, if an empty one"
        )
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(wanted))


def _without_place(headers: pa.ListArray) -> pa.ListArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.any(pc.is_in(headers.flatten().field("key"), pa.array(PRODUCER_HEADERS))).as_py():
        return headers
    kept = [
        None if row is None else [entry for entry in row if entry["key"] not in PRODUCER_HEADERS]
        for row in headers.to_pylist()
    ]
    return pa.array(kept, headers.type)


class ShardmqWriter(DataSourceArrowWriter):
    """Made once for a job and copied to its tasks: without a name of its own the producer is one of this job, whose
    tasks may be repeated.
    """

    def __init__(self, options: WriteOptions, names: Sequence[str], overwrite: bool) -> None:
        check_columns(names)
        check_exchange(options, names)
        if overwrite:
            raise OptionError('a broker has nothing to overwrite: mode("append")')
        self._options = options
        self._producer = options.producer or f"spark-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        partition = _context().partitionId()
        return publish(self._options, iterator, _named(self._options, self._producer, partition), 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All rows are confirmed already."""
        report(self._options, messages)


class ShardmqStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, names: Sequence[str]) -> None:
        check_columns(names)
        check_exchange(options, names)
        self._options = for_stream_writer(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        # Spark hands neither to the writer; both are what its own state store goes by.
        context = _context()
        query, epoch = (
            context.getLocalProperty(key)
            for key in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        if query is None or epoch is None:
            raise OptionError(
                "this Spark does not tell tasks their query and epoch; delivery=atLeastOnce needs neither"
            )
        named = _named(self._options, f"spark-{query}", context.partitionId())
        return publish(self._options, iterator, named, first_sequence(int(epoch)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All rows are confirmed already."""
        report(self._options, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """What is published stays; the epoch is repeated and its numbers with it."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "writers write in tasks"
    return context


def _named(options: WriteOptions, producer: str, partition: int) -> str | None:
    return f"{producer}/{partition}" if options.delivery == "idempotent" else None
