"""Publish Spark's rows with confirms, each row once however often Spark repeats a task or an epoch.

Each task is a producer of its own. The query and the partition make the producer's id; the epoch
and the row make the sequence number, which rises from row to row and from epoch to epoch. A row
that is published again has the same number, and queues that have the row drop it. This holds while
a repeated task gives the same rows in the same order. Where a shuffle may change the order, sort
within partitions before the sink.
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

# A sequence number is a signed 64-bit number: 2**23 epochs of 2**40 rows a partition.
EPOCH_BITS = 23
ROW_BITS = 40
BODY_BYTES_MAX = 32 << 20  # the most bytes of a batch as Arrow; the broker takes twice that
COLUMNS = {"value", "routing_key", "exchange", "headers", "properties"}
PRODUCER_HEADERS = ("x-producer-id", "x-sequence")


@dataclass
class Written(WriterCommitMessage):
    """The number of rows that a task has published.

    known: how many of the rows a queue already had of the same producer; None where the rows have
    no producer, since the broker cannot tell then.
    """

    rows: int
    known: int | None = None


def report(
    options: WriteOptions, messages: Sequence[WriterCommitMessage | None], epoch: int | None = None
) -> None:
    """Report on the driver how many rows were stored and how many the broker had before.

    This adds a line of JSON to the file of the option metricsPath, and writes a line to standard
    error where the broker had rows before. epoch: of a stream, None for a batch.
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
            f"the sink does not know what to do with column {', '.join(more)}: "
            f"select only {', '.join(sorted(COLUMNS))}"
        )


def check_exchange(options: WriteOptions, names: Sequence[str]) -> None:
    if options.exchange is None and "exchange" not in names:
        raise OptionError("say where to publish: option exchange, or a column `exchange`")


def first_sequence(epoch: int) -> int:
    """Return the sequence number of an epoch's first row; raise OptionError if epochs ran out."""
    if not 0 <= epoch < 1 << EPOCH_BITS:
        raise OptionError(
            f"epoch {epoch}: sequence numbers hold {1 << EPOCH_BITS} epochs; begin a new checkpoint"
        )
    return epoch << ROW_BITS


def publish(
    options: WriteOptions, batches: Iterator[pa.RecordBatch], producer: str | None, sequence: int
) -> Written:
    """Publish all rows in order; each request is confirmed before the next one is sent.

    producer: None for rows without sequence numbers. sequence: the number of the first row.
    """
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
    """Divide a batch into slices of at most `rows_max` rows and about BODY_BYTES_MAX bytes.

    A slice has at least one row, however large the row is.
    """
    size = max(1, batch.nbytes // max(1, batch.num_rows))
    step = max(1, min(rows_max, BODY_BYTES_MAX // size))
    for start in range(0, batch.num_rows, step):
        piece = batch.slice(start, step)
        if piece.nbytes > BODY_BYTES_MAX and piece.num_rows > 1:
            yield from pieces(piece, piece.num_rows // 2)
        else:
            yield piece


def wire_form(batch: pa.RecordBatch, numbered: bool) -> pa.RecordBatch:
    """Return the batch with the types that the broker expects; raise OptionError for null values.

    Rows that get sequence numbers (`numbered`) lose the headers in which another producer, whose
    messages they were, had put its own id and number.
    """
    import pyarrow as pa

    names, arrays = batch.schema.names, list(batch.columns)
    wanted = []
    for i, name in enumerate(names):
        kind = pa.binary() if name == "value" else schema.arrow_type(schema.COLUMNS[name])
        arrays[i] = (
            _without_producer(arrays[i].cast(kind))
            if name == "headers" and numbered
            else arrays[i].cast(kind)
        )
        wanted.append(pa.field(name, kind))
    value = arrays[names.index("value")]
    if value.null_count:
        raise OptionError(
            f"{value.null_count} of {len(value)} rows have no value: "
            "a message has a body, if an empty one"
        )
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(wanted))


def _without_producer(headers: pa.ListArray) -> pa.ListArray:
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
    """The writer of a batch.

    Spark makes the writer once for a job and copies it to the tasks, so repeated tasks of a job
    without a producerName have the same producer.
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
        """Report the numbers; all rows were confirmed before."""
        report(self._options, messages)


class ShardmqStreamWriter(DataSourceStreamArrowWriter):
    """The writer of a streaming query."""

    def __init__(self, options: WriteOptions, names: Sequence[str]) -> None:
        check_columns(names)
        check_exchange(options, names)
        self._options = for_stream_writer(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        # Spark does not pass the query and the epoch to the writer. Its own state store reads these
        # properties too.
        context = _context()
        query, epoch = (
            context.getLocalProperty(key)
            for key in ("sql.streaming.queryId", "streaming.sql.batchId")
        )
        if query is None or epoch is None:
            raise OptionError(
                "this Spark does not tell tasks their query and epoch; "
                "delivery=atLeastOnce needs neither"
            )
        named = _named(self._options, f"spark-{query}", context.partitionId())
        return publish(self._options, iterator, named, first_sequence(int(epoch)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report the numbers of the epoch; all rows were confirmed before."""
        report(self._options, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: rows that are published stay, and the repeated epoch has the same numbers."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "writers write in tasks"
    return context


def _named(options: WriteOptions, producer: str, partition: int) -> str | None:
    return f"{producer}/{partition}" if options.delivery == "idempotent" else None
