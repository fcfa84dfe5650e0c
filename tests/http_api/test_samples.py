"""A broker samples what is busy or looked at, and rows show samples as RabbitMQ does.

`recordings/samples-rabbitmq-3.10.8.json` has what RabbitMQ answered to the same queries: how many
samples each field has, and what it did with odd parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from shardmq.broker.controller.management.metrics import past, sampling, time_range
from shardmq.broker.controller.management.metrics.past import BROKER, QUEUE, THE_ONLY, VHOST
from shardmq.broker.controller.management.metrics.sampling import Sampler
from shardmq.broker.controller.management.metrics.stats_collector import StatsCollector
from shardmq.broker.shared.control import DoorReport
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import CONNECTION, OWNER, Api, ReportingDoors

RECORDED: Final = json.loads(
    (Path(__file__).parent / "recordings" / "samples-rabbitmq-3.10.8.json").read_text()
)
NAME: Final = quote(CONNECTION, safe="")
PATHS: Final = {
    "overview": "overview",
    "queues": "queues",
    "queues page": "queues?page=1",
    "queues/VHOST/NAME": "queues/%2F/q",
    "exchanges": "exchanges",
    "exchanges/VHOST/NAME": "exchanges/%2F/e",
    "connections": "connections",
    "connections/NAME": f"connections/{NAME}",
    "channels": "channels",
    "channels/NAME publisher": f"channels/{NAME}%20(1)",
    "channels/NAME consumer": f"channels/{NAME}%20(1)",
    "nodes": "nodes",
    "nodes/NAME": "nodes/shardmq@localhost",
    "vhosts": "vhosts",
    "vhosts/NAME": "vhosts/%2F",
}
# Fields that RabbitMQ has and that are not counted here; tests/http_api/test_beside_rabbitmq.py has
# the list of all keys.
NOT_HERE: Final = {
    "queues": {"reductions"},
    "connections": {"reductions"},
    "channels": {"reductions"},
    "overview": {"message_stats.disk_reads", "message_stats.disk_writes"},
    "nodes": {
        "channel_closed", "channel_created", "connection_closed", "connection_created",
        "context_switches", "gc_bytes_reclaimed", "gc_num", "io_read_avg_time", "io_read_bytes",
        "io_read_count", "io_reopen_count", "io_seek_avg_time", "io_seek_count",
        "io_sync_avg_time", "io_write_avg_time", "io_write_bytes", "io_write_count",
        "mnesia_disk_tx_count", "mnesia_ram_tx_count", "msg_store_read_count",
        "msg_store_write_count", "queue_created", "queue_declared", "queue_deleted",
        "queue_index_read_count", "queue_index_write_count", "disk_free",
    },
    "vhosts": {
        "message_stats.deliver", "message_stats.deliver_no_ack", "message_stats.drop_unroutable",
        "message_stats.get", "message_stats.get_empty", "message_stats.get_no_ack",
        "message_stats.redeliver", "message_stats.return_unroutable",
    },
}  # fmt: skip


class BusyDoors(ReportingDoors):
    """A front door whose clients send and receive."""

    counted = 0
    silent = False

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        if self.silent:
            return []
        (said,) = await super().reports(totals_only)
        if totals_only:
            return [said]
        connections = [{**said.connections[0], "recv_oct": self.counted, "send_oct": self.counted}]
        channels = [{**said.channels[0], "published": self.counted}]
        exchanges = [("/", "e", self.counted, self.counted)]
        return [DoorReport(1, connections, channels, said.counters, exchanges=exchanges)]


async def pass_time(api: Api, samples: int, every_s: float = 5.0) -> None:
    """Sample so many times; the last sample is of now."""
    sampler = Sampler(api.context)
    api.context.stats.noted[:] = [sampler.take]
    for number in reversed(range(samples)):
        api.clock.ahead_s = -every_s * number
        api.shards.published += 10
        if isinstance(api.doors, BusyDoors):
            api.doors.counted += 50
        await api.context.stats.sample()


@pytest.fixture
async def busy(api: Api) -> Api:
    doors = BusyDoors()
    api.doors = doors
    api.context.stats._doors = doors  # type: ignore[assignment]
    await api.call("PUT", "/api/queues/%2F/q", {})
    await api.call("PUT", "/api/exchanges/%2F/e", {})
    await pass_time(api, 20)
    return api


def found_details(row: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in row.items():
        if name.endswith("_details") and isinstance(value, dict) and "rate" in value:
            yield path + name, value
        elif isinstance(value, dict):
            yield from found_details(value, f"{path}{name}.")


@pytest.mark.row("G4.2", "G4.7")
@pytest.mark.parametrize("where", PATHS)
async def test_samples_are_where_rabbitmq_has_them(busy: Api, where: str) -> None:
    path = PATHS[where]
    found = await busy.get(f"/api/{path}{'&' if '?' in path else '?'}{RECORDED['query']}")
    if "page" in where:
        found = found["items"]
    if isinstance(found, list):
        found = max(found, key=lambda row: len([*found_details(row)]))
    shown = dict(found_details(found))
    absent = NOT_HERE.get(where.partition("/")[0].partition(" ")[0], set())
    wanted = {
        name: count
        for name, count in RECORDED["shapes"][where].items()
        if name.removesuffix("_details") not in absent
    }
    assert wanted.keys() <= shown.keys(), wanted.keys() - shown.keys()
    for name, count in wanted.items():
        details = shown[name]
        assert sorted(details) == RECORDED["keys"], name
        assert len(details["samples"]) == count, name
        assert all(sorted(one) == ["sample", "timestamp"] for one in details["samples"])
        times = [one["timestamp"] for one in details["samples"]]
        assert times == sorted(times, reverse=True)
        assert {type(one["sample"]) for one in details["samples"]} == {int}


# What RabbitMQ ignores and is refused here: a misspelt number.
REFUSED_HERE: Final = {
    "lengths_age=abc&lengths_incr=5",
    "lengths_age=60.5&lengths_incr=5",
    "lengths_age=1e3&lengths_incr=5",
}
KEPT_LESS: Final = "lengths_age=604800&lengths_incr=3600"  # a week, of which 10 minutes are kept


@pytest.mark.parametrize("query", RECORDED["parameters"])
async def test_odd_parameters_are_taken_as_by_rabbitmq(busy: Api, query: str) -> None:
    theirs = RECORDED["parameters"][query]
    status, found = await busy.call("GET", f"/api/queues/%2F/q?{query}")
    if query in REFUSED_HERE:
        assert (status, found["reason"]) == (400, "lengths_age: not a whole number of seconds")
        assert theirs["status"] == 200
        return
    assert status == theirs["status"]
    if status == 400:
        assert found == {"error": "bad_request", "reason": theirs["reason"]}
        return
    details = found["messages_details"]
    if theirs["samples"] is None:
        assert [*details] == ["rate"]
    elif query != KEPT_LESS:
        assert sorted(details) == theirs["keys"]
        kept = 20 * 5 - 7  # seconds, about
        assert len(details["samples"]) >= min(theirs["samples"], kept)
        assert len(details["samples"]) <= theirs["samples"]
    else:
        assert len(details["samples"]) <= 1


@pytest.mark.parametrize("path", [*PATHS.values(), "shards/load"])
async def test_every_call_with_samples_refuses_bad_ranges(busy: Api, path: str) -> None:
    separator = "&" if "?" in path else "?"
    status, found = await busy.call("GET", f"/api/{path}{separator}lengths_age=1&lengths_incr=0")
    assert (status, found["reason"]) == (400, "Invalid range parameters: age 1, incr 0")


async def test_a_list_with_too_many_samples_is_refused(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_range, "ANSWER_SAMPLES_MAX", 20)
    for path in ("queues", "queues?page=1", "queues/%2F", "channels", "shards/load"):
        query = "lengths_age=60&lengths_incr=1&msg_rates_age=60&msg_rates_incr=1"
        separator = "&" if "?" in path else "?"
        status, found = await busy.call("GET", f"/api/{path}{separator}{query}")
        assert (status, "too many for one answer" in found["reason"]) == (400, True), path
    assert (await busy.call("GET", "/api/queues?page=1"))[0] == 200


async def test_other_calls_ignore_ranges_as_in_rabbitmq(busy: Api) -> None:
    for path in ("bindings", "users", "consumers"):
        assert (await busy.call("GET", f"/api/{path}?lengths_age=1&lengths_incr=0"))[0] == 200


async def test_samples_follow_the_counters(busy: Api) -> None:
    ask = "msg_rates_age=60&msg_rates_incr=5&data_rates_age=60&data_rates_incr=5"
    queue = await busy.get(f"/api/queues/%2F/q?{ask}")
    details = queue["message_stats"]["publish_details"]
    assert details["avg_rate"] == pytest.approx(2.0, rel=0.2)
    assert details["rate"] == pytest.approx(2.0, rel=0.3)
    assert details["samples"][0]["sample"] <= queue["message_stats"]["publish"]
    connection = await busy.get(f"/api/connections/{NAME}?{ask}")
    assert connection["recv_oct_details"]["avg_rate"] == pytest.approx(10.0, rel=0.2)


async def test_a_queue_that_was_never_sampled_has_the_last_two_looks(api: Api) -> None:
    await api.call("PUT", "/api/queues/%2F/q", {})
    api.clock.ahead_s = -10.0
    await api.context.stats.sample()  # nothing takes samples of it
    api.clock.ahead_s, api.shards.published = -5.0, 55
    ask = "msg_rates_age=60&msg_rates_incr=1"
    details = (await api.get(f"/api/queues/%2F/q?{ask}"))["message_stats"]["publish_details"]
    assert details["rate"] == pytest.approx(10.0, rel=0.1)
    assert 8 <= len(details["samples"]) <= 11
    assert details["samples"][0]["sample"] == 55


async def test_samples_do_not_stay_in_the_rows_of_queues_that_do_nothing(api: Api) -> None:
    await api.call("PUT", "/api/queues/%2F/q", {})
    api.clock.ahead_s = -10.0
    await api.context.stats.sample()
    api.clock.ahead_s = -5.0
    asked = await api.get("/api/queues/%2F/q?msg_rates_age=60&msg_rates_incr=1")
    assert "samples" in asked["message_stats"]["ack_details"]
    assert (await api.get("/api/queues/%2F/q"))["message_stats"]["ack_details"] == {"rate": 0.0}


async def test_a_silent_front_door_makes_no_false_rates(busy: Api) -> None:
    """The counters of the front door are missing once and come back: nothing was published."""
    doors = busy.doors
    assert isinstance(doors, BusyDoors)
    before = len(busy.context.past.points(BROKER, THE_ONLY).times)
    shown = []
    for number, silent in enumerate((True, False, False), 1):
        doors.silent = silent
        busy.clock.ahead_s = 5.0 * number
        await busy.context.stats.sample()
        busy.clock.ahead_s += 2.0
        shown.append(await busy.get("/api/overview"))
        shown.append(await busy.get("/api/exchanges/%2F/e"))
    assert len(busy.context.past.points(BROKER, THE_ONLY).times) == before + 2
    rates = [
        details["rate"]
        for row in shown
        for name, details in found_details(row)
        if name.startswith("message_stats")
    ]
    assert rates and set(rates) == {0.0}


async def test_a_silent_shard_makes_no_dent_in_the_totals(busy: Api) -> None:
    points = busy.context.past.points(BROKER, THE_ONLY)
    busy.shards.silent = True
    busy.clock.ahead_s = 5.0
    await busy.context.stats.sample()
    assert busy.context.past.points(BROKER, THE_ONLY) == points
    busy.shards.silent = False
    busy.clock.ahead_s = 10.0
    await busy.context.stats.sample()
    after = busy.context.past.points(BROKER, THE_ONLY)
    assert len(after.times) == len(points.times) + 1
    assert after.columns[0][-1] == points.columns[0][-1]


async def test_the_busiest_queues_are_sampled_and_those_somebody_looked_at(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "QUEUE", QUEUE._replace(busiest=2, most=4))
    busy.context.past.forget()
    for number in range(10):
        await busy.call("PUT", f"/api/queues/%2F/q{number}", {})
    ids = {name: q.id for name, q in busy.context.catalog.vhosts["/"].queues.items()}
    reply, busiest = busy.shards.stats, {ids["q3"], ids["q7"]}

    def stats(shard: int, asked: wire.Stats) -> Any:
        """Return the same report, but count something for two queues alone."""
        answer = reply(shard, asked)
        queues = [
            wire.QueueStats(one.id, 3, 1, 1, 30, 10, one.published if one.id in busiest else 5)
            for one in answer.result().queues
        ]
        again = type(answer)(loop=answer.get_loop())
        again.set_result(wire.StatsReply(1, queues, [], {}, answer.result().rest))
        return again

    monkeypatch.setattr(busy.shards, "stats", stats)
    await busy.get("/api/queues/%2F/q5")
    for number in range(1, 4):
        busy.clock.ahead_s = 5.0 * number
        busy.shards.published += 10
        await busy.context.stats.sample()
    sampled = {key for key, series in busy.context.past.sampled(QUEUE)}
    assert sampled >= busiest | {ids["q5"]} and len(sampled) <= 6
    assert len(busy.context.past.points(QUEUE, ids["q5"]).times) == 3


async def test_a_broker_where_nothing_is_counted_is_not_looked_through(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await busy.context.stats.sample()
    looked: list[Any] = []
    monkeypatch.setattr(sampling, "_depth", lambda *args: looked.append(args))
    busy.clock.ahead_s = 5.0
    await busy.context.stats.sample()
    assert looked == []
    points = busy.context.past.points(VHOST, "/")
    assert points.times[-1] > points.times[-2] and points.columns[0][-1] == points.columns[0][-2]


async def test_a_reset_drops_the_samples(busy: Api) -> None:
    assert (await busy.call("DELETE", "/api/reset"))[0] == 204
    assert all(busy.context.past.sampled(kind) == [] for kind in past.KINDS)


async def test_the_first_look_at_clients_after_a_sample_has_rates_of_a_whole_interval(
    api: Api,
) -> None:
    """A look right after a sample must not divide by the few milliseconds since the sample."""
    doors, clock = BusyDoors(), api.clock
    clock.ahead_s = -100.0
    collector = StatsCollector(api.shards, doors, clock)  # type: ignore[arg-type]
    for _ in range(3):
        doors.counted += 500
        clock.ahead_s += 5.0
        await collector.sample()
    clock.ahead_s += 0.01
    doors.counted += 1
    stats = await collector.now()
    rate = stats.rate_of_client(
        stats.clients.connections[OWNER]["recv_oct"],
        stats.clients_before.connections[OWNER]["recv_oct"],
    )
    assert rate == pytest.approx(100.0, rel=0.1)
