"""The readers that Spark calls: a task reads a range of offsets of one shard.

In a streaming query one task reads the ranges of several shards, where these have few rows. The
driver asks the broker which rows there are; the tasks fetch the rows over HTTP. Where to begin, how
many rows one trigger gets and which rows are lost is decided by functions of `offsets`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pyspark_shardmq import offsets, schema
from pyspark_shardmq.archive import Archive
from pyspark_shardmq.fetch import Broker, BrokerError, Damaged, RowsExpired, StreamGone
from pyspark_shardmq.offsets import Place, Positions, Range, ShardState
from pyspark_shardmq.options import (
    EARLIEST,
    LATEST,
    Offsets,
    OptionError,
    ReadOptions,
    for_batch,
    for_stream,
)
from pyspark_shardmq.pushdown import Pushed, push

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

ROWS_SAMPLED = 256  # so many rows are read to learn the average size of a row
# In a stream, one task reads several shards that have at most so many rows together. A small epoch
# takes about as long as its tasks take to start.
TASK_ROWS_MIN = 1000


@dataclass
class Task(InputPartition):
    """The ranges that one task reads, in order.

    Spark 4.3 does not let a partition of a Python data source name the hosts that it prefers, so a
    task may run far from the node that has its rows.
    """

    ranges: tuple[Range, ...]

    def __init__(self, *ranges: Range) -> None:
        super().__init__(None)
        self.ranges = ranges


# -- on the driver ---------------------------------------------------------------------------------


def subscribed(broker: Broker, options: ReadOptions) -> list[str]:
    """Return the names of the queues and exchanges that the options ask for, sorted."""
    if options.subscribe_pattern is not None:
        return offsets.matching(options.subscribe_pattern, broker.names())
    return sorted(options.assign or set(options.subscribe))


@dataclass(frozen=True)
class ReadableShards:
    """The shards that a query reads, at one moment.

    shards: the rows in the log of each shard. ended: by id, where the streams ended that are no
    shards of their exchange any more. names: the queues and exchanges of which all shards are read,
    so none with the option assign. archive: where rows are that are older than the log, if the
    option archivePath is given.
    """

    shards: list[ShardState]
    ended: dict[str, int]
    names: tuple[str, ...]
    archive: Archive | None

    def with_archive(self) -> list[ShardState]:
        """Return the shards with the rows of both the log and the archive."""
        return (
            self.shards
            if self.archive is None
            else self.archive.extended_back(self.shards, self.names)
        )

    def still_to_read(self, begun: Positions) -> tuple[list[ShardState], dict[str, int]]:
        """Return the shards for a query at these positions, and where removed streams ended.

        The archive is opened only where a row that is not in the log may be needed. A shard that
        only the archive has is returned while the query has not read all of its archived rows.
        After that the shard counts as ended there.
        """
        live = {state.place: state for state in self.shards}
        logged = all(
            place in live and position.next >= live[place].first
            for place, position in begun.items()
        )
        if self.archive is None or (logged and live.keys() <= begun.keys()):
            return self.shards, self.ended
        shards, ended = [], dict(self.ended)
        for state in self.with_archive():
            at = begun.get(state.place)
            if state.place in live or (
                at is not None and at.id == state.id and at.next < state.next
            ):
                shards.append(state)
            elif at is not None and at == offsets.Position(state.id, state.next):
                ended.setdefault(state.id, state.next)
        return shards, ended


def inspect(
    broker: Broker, options: ReadOptions, seen: Mapping[Place, int] | None = None, wait_ms: int = 0
) -> ReadableShards:
    """Ask the broker for the shards that the options name.

    With `seen` (the next offset by place) and `wait_ms`, the broker waits so long for new rows if
    exactly one name is read and all its shards. Raises OptionError where options do not fit what is
    there.
    """
    archive = None if options.archive_path is None else Archive(options.archive_path)
    if archive is not None:
        archive.check()
    names = subscribed(broker, options)
    found: list[ShardState] = []
    ended: dict[str, int] = {}
    for name in names:
        after = {shard: n for (queue, shard), n in (seen or {}).items() if queue == name}
        wanted = None if options.assign is None else options.assign[name]
        patience = wait_ms if len(names) == 1 and wanted is None else 0
        all_shards, gone, queues = broker.inspect(name, after or None, patience)
        if twice := sorted((queues - {name}) & set(names)):
            raise OptionError(
                f"{twice[0]} is a shard of {name}, which is read too: its rows would come twice"
            )
        if wanted is not None and (missing := set(wanted) - {state.shard for state in all_shards}):
            raise OptionError(
                f"assign names shard {sorted(missing)[0]} of {name}: it has {len(all_shards)}"
            )
        found += [state for state in all_shards if wanted is None or state.shard in wanted]
        ended |= gone
    return ReadableShards(found, ended, tuple(names) if options.assign is None else (), archive)


def by_time(
    broker: Broker,
    times_ms: Offsets,
    default: int,
    there: ReadableShards,
    states: list[ShardState],
    strategy: str,
    option: str,
) -> Positions:
    """Return the position of the first row of each shard that is not older than its time.

    The row may be in the log or in the archive. times_ms: one time, or times by queue and shard.
    there, states: the shards without and with the archive. The other arguments are those of
    `offsets.at_times`.
    """
    asked = {}
    logs = {state.place: state for state in there.shards}
    for state in there.shards:
        time_ms = (
            times_ms.get(state.queue, {}).get(state.shard)
            if isinstance(times_ms, Mapping)
            else times_ms
        )
        if time_ms is not None and (state.queue, time_ms) not in asked:
            asked[state.queue, time_ms] = broker.offsets_at(state.queue, time_ms)
    found: dict[Place, int | None] = {}
    for state in states:
        time_ms = (
            times_ms.get(state.queue, {}).get(state.shard)
            if isinstance(times_ms, Mapping)
            else times_ms
        )
        log = logs.get(state.place)
        offset, begin = (state.next, state.next) if log is None else (log.next, log.first)
        if time_ms is not None and log is not None:
            offset = asked[state.queue, time_ms].get(state.shard, log.next)
        if (
            time_ms is not None
            and there.archive is not None
            and offset in (begin, state.next)
            and begin > state.first
        ):
            archived = there.archive.find(state.place, state.id, time_ms, begin)
            offset = offset if archived is None else archived
        found[state.place] = offset if offset < state.next else None
    return offsets.at_times(times_ms, default, states, found, strategy, option)


def starting(
    broker: Broker,
    options: ReadOptions,
    there: ReadableShards,
    states: list[ShardState],
    default: int,
) -> Positions:
    """Return where the query begins; `default` holds for shards that no option names."""
    if options.starting_times_ms is not None:
        times, strategy = options.starting_times_ms, options.starting_time_strategy
        return by_time(
            broker, times, default, there, states, strategy, "startingOffsetsByTimestamp"
        )
    return offsets.resolve(options.starting, default, states, "startingOffsets")


def ending(
    broker: Broker, options: ReadOptions, there: ReadableShards, states: list[ShardState]
) -> Positions:
    """Return where a batch ends."""
    if options.ending_times_ms is not None:
        times = options.ending_times_ms
        return by_time(broker, times, LATEST, there, states, "latest", "endingOffsetsByTimestamp")
    return offsets.resolve(options.ending, LATEST, states, "endingOffsets")


# -- in a task -------------------------------------------------------------------------------------


def rows(
    options: ReadOptions, ranges: Iterable[Range], filters: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the ranges, from the log or the archive, with the columns asked for.

    filters: conditions of the broker's kind besides the option filter.routingKey.
    """
    names = schema.columns(options)
    wanted = schema.arrow_schema(names)
    broker = Broker(options.connection)
    try:
        for one in ranges:
            for batch in from_log_or_archive(
                broker, options, one, names, _filters(options, filters)
            ):
                conformed = schema.conform(batch, wanted)
                yield (
                    schema.as_kafka(conformed, options.include_headers)
                    if options.row_format == "kafka"
                    else conformed
                )
    finally:
        broker.close()


def _filters(options: ReadOptions, more: Sequence[str]) -> list[str]:
    topic = options.filter_routing_key
    return [*([f"routing_key:{topic}"] if topic is not None else []), *more]


def from_log_or_archive(
    broker: Broker, options: ReadOptions, one: Range, names: list[str], filters: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range; those that are not in the log any more come from the archive."""
    if options.archive_path is None:
        yield from broker.scan(one, names, filters, options.fail_on_data_loss)
        return
    at = one.start
    archive = Archive(options.archive_path)
    try:
        for batch in broker.scan(
            one, [*names, "offset"] if "offset" not in names else names, filters
        ):
            at = batch.column(batch.schema.get_field_index("offset"))[-1].as_py() + 1
            yield batch
    except RowsExpired as gone:
        # Retention may remove rows between the plan and the scan, or during the scan.
        cold = replace(one, start=at, end=min(gone.first, one.end))
        hot = replace(one, start=max(at, gone.first))
        yield from archive.scan(cold, names, filters, options.fail_on_data_loss)
        if hot.start < hot.end:
            yield from from_log_or_archive(broker, options, hot, names, filters)
    except Damaged as loss:
        if options.fail_on_data_loss:
            raise
        print(f"shardmq: {loss}", file=sys.stderr)
    except StreamGone:
        # The shard was removed from its exchange; the archive may have its rows.
        yield from archive.scan(replace(one, start=at), names, filters, options.fail_on_data_loss)


# -- a batch ---------------------------------------------------------------------------------------


class ShardmqReader(DataSourceReader):
    """The reader of a batch."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = for_batch(options)
        self._pushed = Pushed()
        schema.ddl(options)

    def partitions(self) -> Sequence[InputPartition]:
        options, broker = self._options, Broker(self._options.connection)
        try:
            there = inspect(broker, options)
            if not there.names and options.assign is None:
                raise OptionError(
                    f"subscribePattern {options.subscribe_pattern}: no stream has such a name"
                )
            states = there.with_archive()
            asked = starting(broker, options, there, states, EARLIEST)
            end = ending(broker, options, there, states)
        finally:
            broker.close()
        _refuse_beyond(states, end)
        end = offsets.ordered(asked, end, states, options.fail_on_data_loss)
        start, _ = offsets.checked(asked, states, options.fail_on_data_loss)
        start, end = self._pushed.narrow(start, end)
        found = offsets.ranges(start, end, options.partitions_min, options.rows_per_partition_max)
        return [Task(one) for one in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        if not isinstance(partition, Task):
            return iter(())  # without partitions Spark makes one of its own, which has no rows
        return rows(self._options, partition.ranges, self._pushed.filters)


class PushingReader(ShardmqReader):
    """The reader of a batch that takes over filters, used only with pushFilters=true.

    Spark refuses such a reader unless spark.sql.python.filterPushdown.enabled is set.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._pushed, rest = push(filters, self._options)
        return rest


def _refuse_beyond(there: Iterable[ShardState], end: Positions) -> None:
    for state in there:
        if end[state.place].next > state.next:
            raise OptionError(
                f"endingOffsets: {state.queue}/{state.shard} has offsets up to {state.next - 1}, "
                f"{end[state.place].next} was asked for"
            )


# -- a stream --------------------------------------------------------------------------------------


class ShardmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query.

    Spark keeps one reader in a process beside the driver for the life of the query. The tasks get
    copies, without the connection to the broker.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = for_stream(options)
        # Where the streams ended when a Trigger.AvailableNow began; None for other triggers.
        self._target: Positions | None = None
        self._latest: Positions | None = None
        # The positions that were last reported under groupName.
        self._reported: Positions | None = None
        # The monotonic time in seconds since when rows wait for minOffsetsPerTrigger.
        self._since: float | None = None
        self._broker: Broker | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_broker": None}

    def _driver(self) -> Broker:
        if self._broker is None:
            self._broker = Broker(self._options.connection)
        return self._broker

    def initialOffset(self) -> dict[str, Any]:
        there = inspect(self._driver(), self._options)
        return offsets.encode(
            starting(self._driver(), self._options, there, there.with_archive(), LATEST)
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_per_trigger_max is not None:
            return ReadMaxRows(self._options.rows_per_trigger_max)
        if self._options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        there = inspect(self._driver(), self._options).with_archive()
        self._target = {state.place: offsets.Position(state.id, state.next) for state in there}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begun = offsets.decode(start)
        self._report(begun)
        wait_ms = 0 if self._target is not None else self._options.poll_timeout_ms
        options = self._options
        found = inspect(
            self._driver(), options, {p: position.next for p, position in begun.items()}, wait_ms
        )
        there, ended = found.still_to_read(begun)
        at, losses = offsets.checked(begun, there, options.fail_on_data_loss, ended)
        for loss in losses:
            print(f"shardmq: {loss}", file=sys.stderr)
        self._latest = {state.place: offsets.Position(state.id, state.next) for state in there}
        end = (
            self._latest
            if self._target is None
            else {**at, **offsets.at_most(self._latest, self._target)}
        )
        if self._is_too_little(at, end):
            return start
        return offsets.encode(self._admitted(at, end, limit, there))

    def _admitted(
        self, at: Positions, end: Positions, limit: ReadLimit, there: list[ShardState]
    ) -> Positions:
        if isinstance(limit, ReadMaxRows):
            return offsets.admit_rows(at, end, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            sized = [replace(state, row_bytes=self._row_bytes(state, at)) for state in there]
            return offsets.admit_bytes(at, end, limit.max_bytes, sized)
        return end

    def _row_bytes(self, state: ShardState, at: Positions) -> float:
        """Return the average size of the shard's next rows in bytes, 0 where there are none."""
        begin = max(at[state.place].next, state.first)
        sample = Range(
            state.queue, state.shard, state.id, begin, min(begin + ROWS_SAMPLED, state.next)
        )
        options = replace(self._options, fail_on_data_loss=False)
        batches = list(
            from_log_or_archive(self._driver(), options, sample, schema.columns(options), [])
        )
        count = sum(batch.num_rows for batch in batches)
        return sum(batch.nbytes for batch in batches) / count if count else 0.0

    def _is_too_little(self, at: Positions, end: Positions) -> bool:
        """Return true while fewer rows than minOffsetsPerTrigger wait, up to maxTriggerDelay."""
        least = self._options.rows_per_trigger_min
        waiting = sum(offsets.lag(at, end).values())
        if least is None or self._target is not None or waiting >= least or not waiting:
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < self._options.trigger_delay_max_ms / 1000:
            return True
        self._since = None
        return False

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._latest is None else offsets.encode(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options = self._options
        begun, until = offsets.decode(start), offsets.decode(end)
        # A stream that was made anew is read from its beginning. latestOffset has decided that this
        # is allowed.
        begun = {
            place: position
            for place, position in begun.items()
            if _same(position, until.get(place))
        }
        found = offsets.ranges(begun, until, options.partitions_min, options.rows_per_partition_max)
        if options.partitions_min is not None or options.rows_per_partition_max is not None:
            return [Task(one) for one in found]
        return [Task(*some) for some in offsets.grouped(found, TASK_ROWS_MIN)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return rows(self._options, partition.ranges) if isinstance(partition, Task) else iter(())

    def _report(self, begun: Positions) -> None:
        """Report the positions to the broker under groupName, for operators to see.

        The rows before the positions are finished: Spark asks for the next rows when the last epoch
        is in its checkpoint. Spark's `commit` would be too late, since it comes with the next rows
        and so never for the last ones. The query goes on from its checkpoint alone, so a report
        that fails does not stop it; the next report makes up for it.
        """
        group = self._options.group_name
        if group is None or begun == self._reported:
            return
        by_name: dict[str, dict[int, offsets.Position]] = {}
        for (name, shard), position in begun.items():
            by_name.setdefault(name, {})[shard] = position
        try:
            for name, positions in by_name.items():
                self._driver().report_position(name, group, positions)
        except BrokerError as trouble:
            print(f"shardmq: progress of {group} was not reported: {trouble}", file=sys.stderr)
        else:
            self._reported = begun

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.close()


def _same(position: offsets.Position, other: offsets.Position | None) -> bool:
    return other is not None and position.id == other.id
