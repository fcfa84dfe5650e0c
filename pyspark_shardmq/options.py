"""Options of the reader and the writer: their names, defaults and checks.

An option has the name that Spark's Kafka source gives it, where there is one (`subscribe`,
`startingOffsets`, `maxOffsetsPerTrigger` ...). An unknown option is an error: a misspelt
`maxOffsetPerTrigger` must not silently mean "no limit". Spark passes all options as text and does
not distinguish upper and lower case. Nothing here uses Spark, the network or a clock.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

EARLIEST, LATEST = -2, -1  # in place of an offset, as in Kafka's options

NAMED_OFFSETS = {"earliest": EARLIEST, "first": EARLIEST, "latest": LATEST, "next": LATEST}
GROUP_BYTES_MAX = 255  # the broker accepts no longer name
DURATION = re.compile(r"(\d+)\s*(ms|s|m|h)")
DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

# Offsets (or times) by queue and shard. A single number holds for all shards.
Offsets = int | Mapping[str, Mapping[int, int]]


class OptionError(ValueError):
    """An option is unknown, missing, or not of the form it must have."""


@dataclass(frozen=True)
class Connection:
    """The addresses of the broker's HTTP API and the login for it.

    The password is not in `repr`, so that it is not in logs either.
    """

    urls: tuple[str, ...]
    vhost: str
    user: str
    password: str = field(repr=False)
    retries: int
    retry_wait_ms: int
    timeout_ms: int


@dataclass(frozen=True)
class ReadOptions:
    """The checked options of a batch or stream that is read; README's table says what they mean."""

    connection: Connection
    subscribe: tuple[str, ...]
    subscribe_pattern: str | None
    assign: Mapping[str, tuple[int, ...]] | None
    starting: Offsets | None
    starting_times_ms: Offsets | None
    starting_time_strategy: str
    ending: Offsets | None
    ending_times_ms: Offsets | None
    rows_per_trigger_max: int | None
    bytes_per_trigger_max: int | None
    rows_per_trigger_min: int | None
    trigger_delay_max_ms: int
    partitions_min: int | None
    rows_per_partition_max: int | None
    fail_on_data_loss: bool
    columns: tuple[str, ...] | None
    include_headers: bool
    include_properties: bool
    row_format: str
    filter_routing_key: str | None
    poll_timeout_ms: int
    archive_path: str | None
    push_filters: bool
    group_name: str | None


@dataclass(frozen=True)
class WriteOptions:
    """The checked options of a writer; README's table says what they mean."""

    connection: Connection
    exchange: str | None
    routing_key: str | None
    mandatory: bool
    delivery: str
    producer: str | None
    batch_rows: int
    rows_per_second: int | None
    metrics_path: str | None


# -- parsers of single options: they raise ValueError ----------------------------------------------


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text.strip()) or int(text) < least:
            raise ValueError(f"must be an integer of at least {least}")
        return int(text)

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text.lower()

    return parse


def _duration_ms(text: str) -> int:
    found = DURATION.fullmatch(text.strip())
    if not found:
        raise ValueError("must be a number with ms, s, m or h behind it, such as 15m")
    return int(found[1]) * DURATION_MS[found[2]]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("must name at least one queue")
    return names


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise ValueError("must be a JSON object that names at least one queue")
    return found


def _assignment(text: str) -> dict[str, tuple[int, ...]]:
    found = _object(text)
    for shards in found.values():
        if (
            not isinstance(shards, list)
            or not shards
            or not all(type(s) is int and s >= 0 for s in shards)
        ):
            raise ValueError('must be of the form {"orders":[0,2]}')
    return {queue: tuple(sorted(set(shards))) for queue, shards in found.items()}


def _by_shard(text: str, least: int) -> dict[str, dict[int, int]]:
    found = _object(text)
    for shards in found.values():
        right = isinstance(shards, dict) and all(
            key.isdecimal() and type(value) is int and value >= least
            for key, value in shards.items()
        )
        if not right:
            raise ValueError('must be of the form {"orders":{"0":23,"1":40}}')
    return {
        queue: {int(shard): value for shard, value in shards.items()}
        for queue, shards in found.items()
    }


def _offsets(text: str) -> Offsets:
    if text.lower() in NAMED_OFFSETS:
        return NAMED_OFFSETS[text.lower()]
    try:
        return _by_shard(text, EARLIEST)
    except ValueError as error:
        raise ValueError(f"must be earliest, latest or JSON: {error}") from None


def _times_by_shard(text: str) -> Offsets:
    return _by_shard(text, 0)


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("must name at least one column")
    return names


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be http://host:port, several with commas between them")
        if parts.username or parts.password:
            raise ValueError("must not hold a password: use shardmq.user and shardmq.passwordFile")
    if not urls:
        raise ValueError("must name at least one address")
    return urls


def _group(text: str) -> str:
    if not 1 <= len(text.encode()) <= GROUP_BYTES_MAX:
        raise ValueError(f"must have 1 to {GROUP_BYTES_MAX} bytes")
    return text


def _text(text: str) -> str:
    return text


# Each option's parser and default. A default of None means that the option is not given.
CONNECTION: dict[str, tuple[Callable[[str], Any], Any]] = {
    "shardmq.url": (_urls, ("http://127.0.0.1:15672",)),
    "shardmq.vhost": (_text, "/"),
    "shardmq.user": (_text, None),
    "shardmq.password": (_text, None),
    "shardmq.passwordFile": (_text, None),
    "fetchOffset.numRetries": (_at_least(0), 10),
    "fetchOffset.retryIntervalMs": (_at_least(1), 200),
    "requestTimeoutMs": (_at_least(100), 60_000),
}
READ: dict[str, tuple[Callable[[str], Any], Any]] = {
    **CONNECTION,
    "path": (_names, None),  # the argument of .load("orders")
    "subscribe": (_names, None),
    "subscribePattern": (_pattern, None),
    "assign": (_assignment, None),
    "startingOffsets": (_offsets, None),
    "startingTimestamp": (_at_least(0), None),
    "startingOffsetsByTimestamp": (_times_by_shard, None),
    "startingOffsetsByTimestampStrategy": (_one_of("error", "latest"), "error"),
    "endingOffsets": (_offsets, None),
    "endingTimestamp": (_at_least(0), None),
    "endingOffsetsByTimestamp": (_times_by_shard, None),
    "maxOffsetsPerTrigger": (_at_least(1), None),
    "maxBytesPerTrigger": (_at_least(1), None),
    "minOffsetsPerTrigger": (_at_least(1), None),
    "maxTriggerDelay": (_duration_ms, 15 * 60_000),
    "minPartitions": (_at_least(1), None),
    "maxRecordsPerPartition": (_at_least(1), None),
    "failOnDataLoss": (_boolean, True),
    "columns": (_columns, None),
    "includeHeaders": (_boolean, False),
    "includeProperties": (_boolean, False),
    "rowFormat": (_one_of("amqp", "kafka"), "amqp"),
    "filter.routingKey": (_text, None),
    "pollTimeoutMs": (_at_least(0), 500),
    "archivePath": (_text, None),
    "pushFilters": (_boolean, False),
    "groupName": (_group, None),
    "transport": (_one_of("http"), "http"),
}
WRITE: dict[str, tuple[Callable[[str], Any], Any]] = {
    **CONNECTION,
    "exchange": (_text, None),
    "routingKey": (_text, None),
    "mandatory": (_boolean, True),
    "delivery": (_one_of("idempotent", "atleastonce"), "idempotent"),
    "producerName": (_text, None),
    "publishBatchRows": (_at_least(1), 10_000),
    "confirmTimeoutMs": (_at_least(100), None),
    "rowsPerSecondPerTask": (_at_least(1), None),
    "metricsPath": (_text, None),
}
# Spark passes these options of its own to every writer.
IGNORED = {"checkpointlocation", "queryname"}


def _parse(
    known: dict[str, tuple[Callable[[str], Any], Any]], given: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the value of every known option, and the names of those that were given."""
    by_lower = {name.lower(): name for name in known}
    values = {name: default for name, (_, default) in known.items()}
    said: set[str] = set()
    for key, text in given.items():
        if key.lower() in IGNORED:
            continue
        name = by_lower.get(key.lower())
        if name is None:
            raise OptionError(_unknown(key, by_lower))
        try:
            values[name] = known[name][0](str(text))
        except ValueError as error:
            raise OptionError(
                f"option {name}={'***' if 'password' in name else text!r}: {error}"
            ) from None
        said.add(name)
    return values, said


def _unknown(key: str, by_lower: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key.lower(), by_lower, 1)
    hint = f"; did you mean {by_lower[near[0]]}?" if near else ""
    return f"unknown option {key!r}{hint} (known: {', '.join(sorted(by_lower.values()))})"


def _at_most_one(said: set[str], *names: str) -> str | None:
    given = [name for name in names if name in said]
    if len(given) > 1:
        raise OptionError(f"give only one of {' and '.join(given)}")
    return given[0] if given else None


def _connection(
    values: Mapping[str, Any],
    said: set[str],
    environment: Mapping[str, str],
    timeout: str = "requestTimeoutMs",
) -> Connection:
    """Return the connection; `timeout` names the option for its timeout, where that is given."""
    _at_most_one(said, "shardmq.password", "shardmq.passwordFile")
    password = values["shardmq.password"]
    if path := values["shardmq.passwordFile"]:
        try:
            with open(path, encoding="utf-8") as file:
                password = file.read().strip()
        except OSError as error:
            raise OptionError(f"option shardmq.passwordFile: {error}") from None
    return Connection(
        values["shardmq.url"],
        values["shardmq.vhost"],
        values["shardmq.user"] or environment.get("SHARDMQ_USER", "guest"),
        password if password is not None else environment.get("SHARDMQ_PASSWORD", "guest"),
        values["fetchOffset.numRetries"],
        values["fetchOffset.retryIntervalMs"],
        values[timeout if timeout in said else "requestTimeoutMs"],
    )


def read_options(
    given: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> ReadOptions:
    """Return the reader's options, checked; raise OptionError, which names the option.

    environment: where SHARDMQ_USER and SHARDMQ_PASSWORD are looked up, by default `os.environ`.
    """
    values, said = _parse(READ, given)
    which = _at_most_one(said, "path", "subscribe", "subscribePattern", "assign")
    if which is None:
        raise OptionError("say what to read: subscribe, subscribePattern, assign, or load(NAME)")
    start = _at_most_one(said, "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
    end = _at_most_one(said, "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
    _at_most_one(said, "maxOffsetsPerTrigger", "maxBytesPerTrigger")
    _at_most_one(said, "columns", "rowFormat")
    _check_needed(said, values)
    _check_limits(values)
    return ReadOptions(
        connection=_connection(values, said, os.environ if environment is None else environment),
        subscribe=values["subscribe"] or values["path"] or (),
        subscribe_pattern=values["subscribePattern"],
        assign=values["assign"],
        starting=values["startingOffsets"],
        starting_times_ms=values[start] if start and start != "startingOffsets" else None,
        starting_time_strategy=values["startingOffsetsByTimestampStrategy"],
        ending=values["endingOffsets"],
        ending_times_ms=values[end] if end and end != "endingOffsets" else None,
        rows_per_trigger_max=values["maxOffsetsPerTrigger"],
        bytes_per_trigger_max=values["maxBytesPerTrigger"],
        rows_per_trigger_min=values["minOffsetsPerTrigger"],
        trigger_delay_max_ms=values["maxTriggerDelay"],
        partitions_min=values["minPartitions"],
        rows_per_partition_max=values["maxRecordsPerPartition"],
        fail_on_data_loss=values["failOnDataLoss"],
        columns=values["columns"],
        include_headers=values["includeHeaders"],
        include_properties=values["includeProperties"],
        row_format=values["rowFormat"],
        filter_routing_key=values["filter.routingKey"],
        poll_timeout_ms=values["pollTimeoutMs"],
        archive_path=values["archivePath"],
        push_filters=values["pushFilters"],
        group_name=values["groupName"],
    )


def _check_needed(said: set[str], values: Mapping[str, Any]) -> None:
    """Refuse options that have no effect without another option, or beside another one."""
    by_time = {"startingTimestamp", "startingOffsetsByTimestamp"}
    if "startingOffsetsByTimestampStrategy" in said and not said & by_time:
        raise OptionError(
            f"startingOffsetsByTimestampStrategy goes with {' or '.join(sorted(by_time))}"
        )
    if "maxTriggerDelay" in said and "minOffsetsPerTrigger" not in said:
        raise OptionError("maxTriggerDelay goes with minOffsetsPerTrigger")
    for option in ("includeHeaders", "includeProperties"):
        if values[option] and "columns" in said:
            raise OptionError(
                f"give only one of columns and {option}: columns may name headers and properties"
            )
    if values["includeProperties"] and values["rowFormat"] == "kafka":
        raise OptionError("includeProperties: rows of rowFormat=kafka have no properties")


def _check_limits(values: Mapping[str, Any]) -> None:
    least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
    if least and most and least > most:
        raise OptionError(f"minOffsetsPerTrigger={least} is more than maxOffsetsPerTrigger={most}")
    starting = values["startingOffsets"]
    if (
        values["endingOffsets"] == EARLIEST
        or EARLIEST in _by_place(values["endingOffsets"]).values()
    ):
        raise OptionError("endingOffsets=earliest would read nothing")
    _check_order(values, "startingOffsets", "endingOffsets")
    _check_order(values, "startingTimestamp", "endingTimestamp")
    _check_order(values, "startingOffsetsByTimestamp", "endingOffsetsByTimestamp")
    if isinstance(starting, dict) and values["assign"]:
        more = set(starting) - set(values["assign"])
        if more:
            raise OptionError(f"startingOffsets names {', '.join(sorted(more))}, assign does not")


def _by_place(said: Offsets | None) -> dict[tuple[str, int], int]:
    """Return the values that are given for single shards, without one that holds for all shards."""
    if not isinstance(said, Mapping):
        return {}
    return {
        (queue, shard): value for queue, shards in said.items() for shard, value in shards.items()
    }


def _check_order(values: Mapping[str, Any], start: str, end: str) -> None:
    """Refuse an end below its start, where both are numbers.

    EARLIEST and LATEST (-2, -1) cannot be compared before the broker is asked.
    """
    if type(values[start]) is int and type(values[end]) is int and 0 <= values[end] < values[start]:
        raise OptionError(f"{end}={values[end]} is before {start}={values[start]}")
    begins = _by_place(values[start])
    for (queue, shard), last in _by_place(values[end]).items():
        if 0 <= last < begins.get((queue, shard), last):
            raise OptionError(
                f"{end} of {queue}/{shard} is {last}, before {start}, "
                f"which is {begins[queue, shard]}"
            )


def for_batch(options: ReadOptions) -> ReadOptions:
    """Return the options; raise OptionError for an option that only streams have."""
    if options.starting == LATEST or LATEST in _by_place(options.starting).values():
        raise OptionError("startingOffsets=latest reads nothing in a batch")
    for name, value in [
        ("maxOffsetsPerTrigger", options.rows_per_trigger_max),
        ("maxBytesPerTrigger", options.bytes_per_trigger_max),
        ("minOffsetsPerTrigger", options.rows_per_trigger_min),
        ("groupName", options.group_name),
    ]:
        if value is not None:
            raise OptionError(f"{name} is for streaming reads")
    return options


def for_stream(options: ReadOptions) -> ReadOptions:
    """Return the options; raise OptionError for an option that only batches have."""
    if options.ending is not None or options.ending_times_ms is not None:
        raise OptionError("endingOffsets and endingTimestamp are for batch reads")
    if options.push_filters:
        raise OptionError("pushFilters is for batch reads: Spark hands a stream no filters")
    return options


def for_stream_writer(options: WriteOptions) -> WriteOptions:
    """Return the options; raise OptionError for an option that only batches have."""
    if options.producer is not None:
        raise OptionError(
            "producerName is for batch writes: a query's epochs begin at 0 again with each new "
            "checkpoint, and under an old name its rows would pass for known ones; "
            "a query has a name of its own"
        )
    return options


def write_options(
    given: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> WriteOptions:
    """Return the writer's options, checked; raise OptionError, which names the option."""
    values, said = _parse({**WRITE, "path": (_text, None)}, given)
    _at_most_one(said, "path", "exchange")
    if "producerName" in said and values["delivery"] != "idempotent":
        raise OptionError("producerName does nothing with delivery=atLeastOnce")
    return WriteOptions(
        connection=_connection(
            values,
            said,
            os.environ if environment is None else environment,
            timeout="confirmTimeoutMs",
        ),
        exchange=values["exchange"] if "exchange" in said else values["path"],
        routing_key=values["routingKey"],
        mandatory=values["mandatory"],
        delivery=values["delivery"],
        producer=values["producerName"],
        batch_rows=values["publishBatchRows"],
        rows_per_second=values["rowsPerSecondPerTask"],
        metrics_path=values["metricsPath"],
    )
