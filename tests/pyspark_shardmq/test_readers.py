"""The readers, called as Spark calls them but without a JVM, read all rows or raise an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_shardmq.offsets import DataLoss, Position, decode, encode
from pyspark_shardmq.options import OptionError, read_options

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

if TYPE_CHECKING:
    from tests.support.fake_streams import FakeStreams

FIRST_MS = 1_700_000_000_000  # when row 0 of the fake was stored; each row is a millisecond later


def values(reader: Any, tasks: Iterable[Any]) -> list[int]:
    """Return the bodies of all rows, which are numbers."""
    batches = [batch for task in tasks for batch in reader.read(task)]
    return sorted(int(value) for batch in batches for value in batch["value"].to_pylist())


def batch(url: str, **options: object) -> list[int]:
    from pyspark_shardmq.source import ShardmqReader

    given = {"shardmq.url": url, **{name: str(value) for name, value in options.items()}}
    reader = ShardmqReader(read_options(given))
    return values(reader, reader.partitions())


class Stream:
    """A query with Trigger.AvailableNow, which runs epochs until there are no new rows."""

    def __init__(self, url: str, **options: object) -> None:
        self._given = {
            "shardmq.url": url,
            "pollTimeoutMs": "0",
            **{n: str(value) for n, value in options.items()},
        }
        self.checkpoint: dict[str, Any] | None = None

    def run(self) -> list[int]:
        from pyspark_shardmq.source import ShardmqStreamReader

        reader = ShardmqStreamReader(read_options(self._given))
        found: list[int] = []
        try:
            if self.checkpoint is None:
                self.checkpoint = reader.initialOffset()
            reader.prepareForTriggerAvailableNow()
            while (
                end := reader.latestOffset(self.checkpoint, reader.getDefaultReadLimit())
            ) != self.checkpoint:
                found += values(reader, reader.partitions(self.checkpoint, end))
                self.checkpoint = end
        finally:
            reader.stop()
        return sorted(found)


@pytest.fixture
def archived(tmp_path: Path, streams: FakeStreams) -> Callable[[str], str]:
    """Archive all rows of the shards of a stream as the job does, and return the path."""

    def archive(name: str) -> str:
        import pyarrow.parquet as pq

        from pyspark_shardmq.archive import Archive, facts, pieces_of
        from pyspark_shardmq.schema import COLUMNS, arrow_schema

        made = Archive(tmp_path / "cold")
        directory = made.new_directory(0)
        directory.mkdir(parents=True)
        end = {
            (name, i): Position(shard.id, shard.next)
            for i, shard in enumerate(streams.streams[name])
        }
        for i, shard in enumerate(streams.streams[name]):
            rows = [
                {"queue": name, "shard": i, "offset": n, **row}
                for n, row in enumerate(shard.rows, shard.first)
            ]
            table = pa.Table.from_pylist(rows, schema=arrow_schema(list(COLUMNS)))
            pq.write_table(table, directory / f"part-{i}.parquet")
        names = [f"data/{directory.name}/{file.name}" for file in directory.glob("*.parquet")]
        made.commit(0, pieces_of(facts(made, names), None, end))
        return str(made.path)

    return archive


@pytest.fixture
def cold(streams: FakeStreams, archived: Callable[[str], str]) -> str:
    """Archive 400 rows of two shards, let each log lose its first 170 rows, and add 50 rows."""
    streams.declare("orders", 2)
    streams.append("orders", 400)
    path = archived("orders")
    streams.append("orders", 50)
    for shard in streams.streams["orders"]:
        shard.truncate(170)
    return path


# -- the archive -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ({}, 0),
        ({"startingOffsets": "earliest"}, 0),
        ({"startingOffsets": '{"orders":{"0":-2,"1":-2}}'}, 0),
        ({"startingOffsets": '{"orders":{"0":50,"1":50}}'}, 100),
        ({"startingTimestamp": FIRST_MS}, 0),
        ({"startingTimestamp": FIRST_MS + 123}, 123),
        ({"startingTimestamp": FIRST_MS + 345}, 345),
        (
            {
                "startingOffsetsByTimestamp": json.dumps(
                    {"orders": {"0": FIRST_MS + 50, "1": FIRST_MS + 50}}
                )
            },
            50,
        ),
    ],
)
def test_a_batch_begins_in_the_archive_however_its_start_is_said(
    url: str, cold: str, start: dict[str, object], first: int
) -> None:
    assert batch(url, subscribe="orders", archivePath=cold, **start) == list(range(first, 450))


def test_a_batch_may_end_in_the_archive(url: str, cold: str) -> None:
    options = {"subscribe": "orders", "archivePath": cold}
    assert batch(url, **options, endingTimestamp=FIRST_MS + 99) == list(range(99))
    assert batch(url, **options, endingOffsets='{"orders":{"0":5,"1":5}}') == list(range(10))


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ({"startingOffsets": "earliest"}, 0),
        ({"startingOffsets": '{"orders":{"0":-2,"1":-2}}'}, 0),
        ({"startingTimestamp": FIRST_MS + 123}, 123),
        ({"startingOffsets": "latest"}, 450),
        ({}, 450),
    ],
)
@pytest.mark.parametrize("limit", [{}, {"maxOffsetsPerTrigger": 70}, {"maxBytesPerTrigger": 8_000}])
def test_a_stream_begins_in_the_archive_and_goes_on_in_the_log(
    url: str,
    streams: FakeStreams,
    cold: str,
    start: dict[str, object],
    first: int,
    limit: dict[str, object],
) -> None:
    query = Stream(url, subscribe="orders", archivePath=cold, **start, **limit)
    assert query.run() == list(range(first, 450))
    streams.append("orders", 30)
    assert query.run() == list(range(450, 480))


def test_what_is_neither_in_the_log_nor_in_the_archive_is_an_error(
    url: str, streams: FakeStreams, cold: str
) -> None:
    for shard in streams.streams["orders"]:
        shard.truncate(210)
    with pytest.raises(
        DataLoss, match=r"orders/0: offsets 200 to 209 are neither in the log nor in archive"
    ):
        batch(url, subscribe="orders", archivePath=cold)
    kept = batch(url, subscribe="orders", archivePath=cold, failOnDataLoss="false")
    assert kept == [*range(400), *range(420, 450)]


@pytest.mark.parametrize("read", [batch, lambda url, **options: Stream(url, **options).run()])
@pytest.mark.parametrize("start", ["earliest", '{"orders":{"0":5}}'])
def test_an_archive_that_is_not_there_is_an_error_that_names_it(
    url: str, streams: FakeStreams, tmp_path: Path, read: Callable[..., list[int]], start: str
) -> None:
    streams.declare("orders", 1)
    streams.append("orders", 10)
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(OptionError, match=f"there is no archive at {missing} "):
            read(url, subscribe="orders", startingOffsets=start, archivePath=missing)


def test_archived_rows_of_a_shard_that_went_are_read_too(
    url: str, streams: FakeStreams, cold: str
) -> None:
    """Check that a batch and a new stream read all of them, and a running stream reads the rest."""
    running = Stream(
        url,
        subscribe="orders",
        archivePath=cold,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=100,
    )
    shards = streams.streams["orders"]
    running.checkpoint = encode(
        {("orders", i): Position(shard.id, 10) for i, shard in enumerate(shards)}
    )
    shards[1].truncate(shards[1].next)
    streams.shrink("orders", 1)
    streams.ended.clear()
    there = [*range(400), *range(400, 450, 2)]
    assert batch(url, subscribe="orders", archivePath=cold) == there
    assert (
        Stream(url, subscribe="orders", archivePath=cold, startingOffsets="earliest").run() == there
    )
    assert running.run() == there[20:]
    assert running.checkpoint is not None and set(decode(running.checkpoint)) == {("orders", 0)}


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [batch, lambda url, **options: Stream(url, **options).run()])
def test_a_pattern_reads_an_exchange_or_its_shards_and_each_row_once(
    url: str, streams: FakeStreams, read: Callable[..., list[int]]
) -> None:
    streams.declare_exchange("orders", 3)
    streams.append("orders", 90)
    assert read(url, subscribePattern=".*orders.*", startingOffsets="earliest") == list(range(90))
    assert read(url, subscribePattern="orders", startingOffsets="earliest") == list(range(90))
    shards = {"startingOffsets": "earliest", "subscribePattern": "sharding: orders - ."}
    assert read(url, **shards) == list(range(90))
    shards["subscribePattern"] = "sharding: orders - [02]"
    assert read(url, **shards) == [n for n in range(90) if n % 3 != 1]


def test_a_shard_beside_its_exchange_is_refused(url: str, streams: FakeStreams) -> None:
    streams.declare_exchange("orders", 2)
    with pytest.raises(
        OptionError, match="sharding: orders - 1 is a shard of orders, which is read too"
    ):
        batch(url, subscribe="orders,sharding: orders - 1")


def test_a_pattern_without_a_match_is_an_error_in_a_batch(url: str, streams: FakeStreams) -> None:
    streams.declare("orders", 1)
    with pytest.raises(OptionError, match=r"subscribePattern none\.\*: no stream has such a name"):
        batch(url, subscribePattern="none.*")


# -- fewer shards ----------------------------------------------------------------------------------


def test_a_query_goes_on_when_shards_go_that_it_had_read(url: str, streams: FakeStreams) -> None:
    """Check this also when another stream has the number of a removed shard."""
    streams.declare("orders", 3)
    streams.append("orders", 300)
    query = Stream(url, subscribe="orders", startingOffsets="earliest")
    assert query.run() == list(range(300))
    for shard in streams.streams["orders"][1:]:
        shard.truncate(shard.next)
    streams.shrink("orders", 1)
    streams.append("orders", 5)
    assert len(query.run()) == 5
    query.checkpoint = encode(
        {
            **decode(query.checkpoint or {}),
            ("orders", 1): Position(streams.ended["orders"][0]["id"], 100),
        }
    )
    streams.streams["orders"] += streams.declare("more", 1)
    streams.append("more", 4)
    assert query.run() == list(range(4))


def test_rows_of_a_shard_that_went_and_were_not_read_are_an_error_that_names_them(
    url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 100)
    query = Stream(url, subscribe="orders", startingOffsets="earliest")
    query.run()
    streams.append("orders", 20)
    streams.streams["orders"][1].truncate(60)
    streams.shrink("orders", 1)
    with pytest.raises(
        DataLoss, match="orders/1 does not exist any more; offsets 50 to 59 of it were not read"
    ):
        query.run()
    allowed = Stream(url, subscribe="orders", failOnDataLoss="false")
    allowed.checkpoint = query.checkpoint
    assert allowed.run() == list(range(100, 120, 2))


def test_a_shard_that_goes_between_plan_and_scan_is_a_loss_that_may_be_allowed(
    url: str, streams: FakeStreams
) -> None:
    from pyspark_shardmq.source import ShardmqReader

    for allowed in ("true", "false"):
        streams.declare("orders", 2)
        streams.append("orders", 20)
        reader = ShardmqReader(
            read_options({"shardmq.url": url, "subscribe": "orders", "failOnDataLoss": allowed}),
        )
        tasks = reader.partitions()
        streams.shrink("orders", 1)
        if allowed == "true":
            with pytest.raises(DataLoss, match="orders/1 is gone before offsets 0 to 9 were read"):
                values(reader, tasks)
        else:
            assert values(reader, tasks) == list(range(0, 20, 2))


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"filter.routingKey": "#"}, {"columns": "value"}])
@pytest.mark.parametrize("cut_off", [0, 2])
def test_rows_that_the_broker_cannot_read_are_a_loss_that_may_be_allowed(
    url: str,
    streams: FakeStreams,
    cut_off: int,
    more: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Check this also if an answer is cut off behind the gaps, since only its end names them."""
    streams.declare("orders", 2)
    streams.append("orders", 6000)
    streams.damaged = [(100, 110), (2990, 2995)]
    streams.faults["/1/arrow"] = cut_off
    with pytest.raises(
        DataLoss, match="orders/[01] has lost offsets 100 to 109, 2990 to 2994 to damage"
    ):
        batch(url, subscribe="orders", **more)
    streams.faults["/1/arrow"] = cut_off
    capfd.readouterr()
    found = batch(url, subscribe="orders", failOnDataLoss="false", **more)
    left = [n for n in range(3000) if not (100 <= n < 110 or 2990 <= n < 2995)]
    assert sorted(found) == sorted(2 * n + shard for n in left for shard in range(2))
    assert capfd.readouterr().err.splitlines() == [
        f"shardmq: orders/{shard} has lost offsets 100 to 109, 2990 to 2994 to damage in the "
        "broker's files"
        for shard in range(2)
    ]


def test_a_stream_goes_on_behind_damage_where_that_is_allowed(
    url: str, streams: FakeStreams
) -> None:
    streams.declare("orders")
    streams.append("orders", 10)
    query = Stream(url, subscribe="orders", startingOffsets="earliest")
    assert query.run() == list(range(10))
    streams.append("orders", 10)
    streams.damaged = [(8, 12)]
    with pytest.raises(DataLoss, match="orders/0 has lost offsets 10 to 11 to damage"):
        query.run()
    allowed = Stream(url, subscribe="orders", failOnDataLoss="false")
    allowed.checkpoint = query.checkpoint
    assert allowed.run() == list(range(12, 20))


def test_damage_is_a_loss_beside_an_archive_too(url: str, streams: FakeStreams, cold: str) -> None:
    streams.damaged = [(220, 222)]
    with pytest.raises(DataLoss, match="orders/0 has lost offsets 220 to 221 to damage"):
        batch(url, subscribe="orders", archivePath=cold)
    kept = batch(url, subscribe="orders", archivePath=cold, failOnDataLoss="false")
    assert kept == [n for n in range(450) if n not in range(440, 444)]


# -- ends and starts -------------------------------------------------------------------------------


def test_an_end_before_its_start_is_an_error_that_names_the_shard(
    url: str, streams: FakeStreams
) -> None:
    streams.declare("orders", 2)
    streams.append("orders", 100)
    with pytest.raises(OptionError, match="orders/1 is to be read from offset 50 to before 7"):
        batch(
            url,
            subscribe="orders",
            startingTimestamp=FIRST_MS + 100,
            startingOffsetsByTimestampStrategy="latest",
            endingOffsets='{"orders":{"0":-1,"1":7}}',
        )


def test_an_end_that_retention_has_passed_is_a_loss(url: str, streams: FakeStreams) -> None:
    streams.declare("orders", 1)
    streams.append("orders", 100)
    streams.streams["orders"][0].truncate(50)
    end = {"subscribe": "orders", "endingOffsets": '{"orders":{"0":20}}'}
    with pytest.raises(
        DataLoss, match="orders/0 has lost the offsets before 20 to retention; it begins at 50"
    ):
        batch(url, **end)
    assert batch(url, **end, failOnDataLoss="false") == []


def test_times_for_shards_that_are_not_there_are_refused(url: str, streams: FakeStreams) -> None:
    streams.declare("orders", 1)
    for option in ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp"):
        with pytest.raises(OptionError, match=f"{option} names orders/3: no such queue or shard"):
            batch(url, subscribe="orders", **{option: '{"orders":{"3":5}}'})


@pytest.mark.parametrize(
    "why", ["there is no vhost 'x'", "there is no queue 'x'", "queue 'x' is of type classic"]
)
def test_why_a_name_is_of_no_stream_is_what_the_broker_says(
    url: str, streams: FakeStreams, why: str
) -> None:
    from pyspark_shardmq.fetch import BrokerError

    streams.wrong["x"] = why
    with pytest.raises(BrokerError, match=why):
        batch(url, subscribe="x")
    assert len(streams.requests) == 1
