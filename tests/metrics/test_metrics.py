"""Metrics have what RabbitMQ's dashboards ask for, in Prometheus' text.

They are few unless more are asked for.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pika
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from shardmq.broker.controller.management.metrics import object_metrics, shard_numbers
from shardmq.broker.controller.management.metrics.object_metrics import FAMILIES
from shardmq.shardd.wire import messages as wire
from tests.http_api import conftest
from tests.http_api.conftest import CONNECTION, Api
from tests.http_api.test_api import make
from tests.support.real_broker import RealBroker

api = conftest.api

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana-dashboard.json"
METRIC = re.compile(r"\b(?:rabbitmq|shardmq)_(?!(?:cluster|node)\b)\w+")
# What the panels of RabbitMQ-Overview ask for and this fixture, without memory limits and disks,
# has.
OVERVIEW = [
    "build_info", "identity_info", "channels", "channels_closed_total", "channels_opened_total",
    "connections", "connections_closed_total", "connections_opened_total", "erlang_uptime_seconds",
    "global_consumers", "global_publishers", "queue_messages_ready", "queue_messages_unacked",
    "queues", "queues_created_total", "queues_declared_total", "queues_deleted_total",
    *(f"global_messages_{what}_total" for what in (
        "received", "received_confirm", "routed", "unroutable_dropped", "unroutable_returned",
        "confirmed", "delivered", "delivered_consume_manual_ack", "delivered_consume_auto_ack",
        "delivered_get_manual_ack", "delivered_get_auto_ack", "get_empty", "redelivered",
        "acknowledged",
    )),
]  # fmt: skip


OF_A_NODE = (
    "process_open_fds", "process_max_fds", "process_resident_memory_bytes",
    "resident_memory_limit_bytes", "disk_space_available_bytes", "disk_space_available_limit_bytes",
    "erlang_uptime_seconds",
    "stream_consumer_max_offset_lag",
)  # fmt: skip


async def scrape(api: Api, path: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    status, text = await api.call("GET", path)
    assert status == 200
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    assert sorted(found) == sorted(
        {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    )
    return found


@pytest.fixture
async def made(api: Api) -> Api:
    await make(api)
    api.login = None  # none is needed
    return api


@pytest.mark.row("M1.2", "M1.3", "M1.4", "M1.6", "M1.7", "M1.10")
async def test_the_overview_dashboard_finds_its_metrics(made: Api) -> None:
    found = await scrape(made, "/metrics")
    assert [name for name in OVERVIEW if f"rabbitmq_{name}" not in found] == []
    ((labels, value),) = found["rabbitmq_identity_info"]
    assert (value, labels["rabbitmq_endpoint"]) == (1, "aggregated")
    assert labels.keys() == {
        "rabbitmq_node",
        "rabbitmq_cluster",
        "rabbitmq_cluster_permanent_id",
        "rabbitmq_endpoint",
    }
    assert found["rabbitmq_queue_messages_ready"] == [({}, 6.0)]
    assert found["rabbitmq_global_messages_received_total"] == [({"protocol": "amqp091"}, 7.0)]
    assert found["rabbitmq_global_messages_routed_total"] == [({"protocol": "amqp091"}, 10.0)]
    assert found["rabbitmq_queues_created_total"] == found["rabbitmq_queues"] == [({}, 2.0)]
    assert found["rabbitmq_channels_closed_total"] == [({}, 2.0)]
    assert ({"process": "shard-0", "shard": "0"}, 2.0) in found["shardmq_restarts_total"]


async def test_messages_in_streams_can_be_told_from_those_that_wait_for_a_consumer(
    made: Api,
) -> None:
    queue = made.context.catalog.vhosts["/"].queues["q"]
    made.shards.streams = [wire.StreamStats(queue.id, 0, 3, 1, 0)]
    found = await scrape(made, "/metrics")
    assert found["shardmq_stream_messages"] == [({}, 3.0)]
    assert found["rabbitmq_queue_messages_ready"] == [({}, 6.0)]


@pytest.mark.row("M1.8")
async def test_how_large_messages_are_has_fixed_classes(made: Api) -> None:
    found = await scrape(made, "/metrics")
    buckets = {labels["le"]: value for labels, value in found["rabbitmq_message_size_bytes_bucket"]}
    assert (buckets["64"], buckets["128"], buckets["1.34218e+08"], buckets["+Inf"]) == (2, 6, 6, 7)
    assert found["rabbitmq_message_size_bytes_count"] == [({}, 7.0)]
    assert found["rabbitmq_message_size_bytes_sum"] == [({}, 1e9)]


@pytest.mark.row("M1.16")
async def test_more_queues_are_no_more_series_unless_they_are_asked_for(made: Api) -> None:
    before = {name: len(samples) for name, samples in (await scrape(made, "/metrics")).items()}
    made.login = ("guest", "guest")
    for number in range(50):
        await made.call("PUT", f"/api/queues/%2F/more-{number}", {})
    assert {
        name: len(samples) for name, samples in (await scrape(made, "/metrics")).items()
    } == before
    assert len((await scrape(made, "/metrics/per-object"))["rabbitmq_queue_messages_ready"]) == 52


@pytest.mark.row("M1.1", "M1.13")
async def test_each_object_has_what_the_sums_are_made_of(
    made: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_metrics, "SLICE_ROWS", 1)
    sums, found = await scrape(made, "/metrics"), await scrape(made, "/metrics/per-object")
    for name in (
        "queue_messages_ready",
        "queue_messages_unacked",
        "queue_messages",
        "queue_messages_bytes",
    ):
        assert (
            sum(value for _, value in found[f"rabbitmq_{name}"]) == sums[f"rabbitmq_{name}"][0][1]
        )
    assert ({"vhost": "/", "queue": "r/s"}, 3.0) in found["rabbitmq_queue_messages_ready"]
    assert found["rabbitmq_connection_channels"] == [
        ({"vhost": "/", "connection": CONNECTION}, 1.0)
    ]
    channel = {"vhost": "/", "channel": f"{CONNECTION} (1)"}
    assert found["rabbitmq_consumer_prefetch"] == [(channel, 10.0)]
    for name in ("channel_prefetch", "channel_prefetch_global"):  # the second name until 0.2
        assert found[f"rabbitmq_{name}"] == [(channel, 0.0)], "no limit of all consumers together"


@given(
    st.lists(
        st.tuples(
            st.text(st.sampled_from('aé%s\\\n"{}\0'), max_size=5),
            st.sampled_from([None, 0, 7, 10**20]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.booleans(),
)
def test_each_object_has_its_line_also_where_all_values_are_the_same(
    rows: list[tuple[str, int | None]], as_float: bool
) -> None:
    def read(value: int | None) -> float | None:
        return value / 4 if as_float and value is not None else value

    def line(name: str, queue: str, value: int | None) -> str:
        label = queue.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        shown = read(value)
        return f'\n{name}{{vhost="/",queue="{label}"}} {"nan" if shown is None else shown}'

    block = object_metrics._block(
        ("vhost", "queue"), [(("/", name), value) for name, value in rows]
    )
    for name in ("a", "b"):
        expected = "".join(line(name, queue, value) for queue, value in rows)
        assert block.of(name.encode(), read) == expected.encode()


@pytest.mark.row("M1.12")
async def test_families_come_by_name_and_vhost(made: Api) -> None:
    made.login = ("guest", "guest")
    await made.call("PUT", "/api/vhosts/v", {})
    await made.call("PUT", "/api/queues/v/q", {})
    path = "/metrics/detailed?family=queue_coarse_metrics&family=exchange_bindings"
    found = await scrape(made, path)
    kinds = {f"detailed_queue_messages{which}" for which in ("", "_ready", "_unacked")} | {
        "cluster_exchange_bindings"
    }
    assert found.keys() == {f"rabbitmq_{kind}" for kind in kinds | {"identity_info", "build_info"}}
    assert {labels["vhost"] for labels, _ in found["rabbitmq_detailed_queue_messages"]} == {
        "/",
        "v",
    }
    assert ({"vhost": "/", "exchange": "e", "type": "topic"}, 2.0) in found[
        "rabbitmq_cluster_exchange_bindings"
    ]
    found = await scrape(made, f"{path}&vhost=v")
    assert [labels for labels, _ in found["rabbitmq_detailed_queue_messages"]] == [
        {"vhost": "v", "queue": "q"}
    ]
    assert (await scrape(made, "/metrics/detailed?family=exchange_bindings&vhost=x")).keys() == {
        "rabbitmq_identity_info", "rabbitmq_build_info",
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_text_prometheus_reads_whatever_the_names(
    made: Api, family: str
) -> None:
    names = ['a"b', "back\\slash", "new\nline", "{x=1}", "ü 漢", "\\n", "100%", "%s"]
    made.login = ("guest", "guest")
    for name in names:
        assert (await made.call("PUT", f"/api/queues/%2F/{quote(name, safe='')}", {}))[0] == 201, (
            name
        )
    found = await scrape(made, f"/metrics/detailed?family={family}")
    shown: list[Any] = [labels for samples in found.values() for labels, _ in samples]
    if family in ("stream_group_metrics", "stream_consumer_metrics", "exchange_metrics"):
        # nobody reads a stream or publishes here
        assert len(found) == 2
        return
    if "queue" in FAMILIES[family].labels:
        assert {labels["queue"] for labels in shown if "queue" in labels} >= {
            name.replace("\n", "") for name in names
        }
    assert len(found) == 2 + len(FAMILIES[family].metrics)


@pytest.mark.broker
@pytest.mark.row("M1.5")
def test_the_dashboard_asks_only_for_what_a_broker_has(tmp_path: Path) -> None:
    asked = {name for line in _expressions() for name in METRIC.findall(line)}
    assert len(asked) > 30
    broker = RealBroker(tmp_path / "data", shards=1)
    try:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            # so that there is a store
            channel.basic_publish("", "q", b"", pika.BasicProperties(delivery_mode=2))
        with urllib.request.urlopen(f"http://{broker.metrics}/metrics") as answer:
            text = answer.read().decode()
        broker.stop()
    finally:
        broker.clean_up()
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    # a histogram's samples have names of their own
    there |= {line.partition("{")[0] for line in text.splitlines()}
    assert asked - there == set()
    assert {f"rabbitmq_{name}" for name in OF_A_NODE} - there == set()
    _check_sizes(text, published=1)
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {
        name.removeprefix(shard_numbers.PREFIX)
        for name in types
        if name.startswith(shard_numbers.PREFIX)
    } - OF_SESSIONS == {
        *(f"{name}_total" for name in shard_numbers.COUNTERS),
        *shard_numbers.COUNTERS,
        *shard_numbers.GAUGES,
        "alarm",
        "warnings",
    }
    _check_kinds(text)


# Shards have these where other nodes reach them, as in runs with SHARDMQ_TEST_REMOTE.
OF_SESSIONS = {"sessions", "session_messages_dropped", "session_handshakes_failed"}

# These names had no `_total` in 0.1, and are shown beside the new ones until 0.2.
OLD_NAMES = [f"shardmq_shard_{name}" for name in (
    "appended_bytes", "appended_messages", "cpu_seconds", "gone_acked", "gone_delivered",
    "gone_got", "gone_published", "gone_redelivered", "gone_repeated", "merge_bytes",
    "merged_segments", "ring_full", "sync_seconds", "syncs", "written_bytes",
)]  # fmt: skip


async def test_what_copies_cost_is_a_counter_without_an_old_name(made: Api) -> None:
    sent = dict.fromkeys(shard_numbers.REPLICA_COUNTERS, 3.0)
    made.shards.process = {0: sent, 1: {}}  # the second one has no copies
    found = await scrape(made, "/metrics")
    for name in ("shardmq_replica_sent_bytes", "shardmq_replica_plain_bytes"):
        assert found[f"{name}_total"] == [({"process": "shard-0", "shard": "0"}, 3.0)]
        assert name not in found


async def test_counters_of_shards_have_their_old_names_for_one_version(made: Api) -> None:
    assert [shard_numbers.PREFIX + name for name in shard_numbers.COUNTERS] == OLD_NAMES
    made.shards.process = {
        0: dict.fromkeys(shard_numbers.COUNTERS, 3.0) | {"segments": 4.0},
        1: {"segments": 5.0, "later": 6.0},
    }
    _, text = await made.call("GET", "/metrics")
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    found = await scrape(made, "/metrics")
    for name in OLD_NAMES:
        assert (types[f"{name}_total"], types[name]) == ("counter", "gauge")
        assert f"# HELP {name} Until 0.2, see " in text
        assert (
            found[f"{name}_total"] == found[name] == [({"process": "shard-0", "shard": "0"}, 3.0)]
        )
    assert [value for _, value in found["shardmq_shard_segments"]] == [4.0, 5.0]
    assert types["shardmq_shard_later"] == "gauge", "a number of a shard of another release"


@pytest.mark.parametrize("path", ["/metrics", "/metrics/per-object", "/metrics/detailed?"])
async def test_promtool_and_the_parser_find_counters_and_gauges_by_their_names(
    made: Api, path: str
) -> None:
    made.shards.process[0] = dict.fromkeys((*shard_numbers.COUNTERS, *shard_numbers.GAUGES), 1.0)
    if path.endswith("?"):
        path += "&".join(f"family={family}" for family in FAMILIES)
    status, text = await made.call("GET", path)
    assert status == 200
    _check_kinds(text)
    if shutil.which("promtool"):
        command = ["promtool", "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _check_kinds(text: str) -> None:
    """Names end in `_total` if, and only if, the metric is a counter."""
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), (name, kind)
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert sorted(helped) == sorted(types), "each name is there once"


def _check_sizes(text: str, published: int) -> None:
    """Each message was in a batch, and what was confirmed was synced."""
    values = {
        (sample.name, sample.labels.get("process", ""), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "histogram"
    }
    for where, process in (("", "shard-0"), ("door_", "front-doors")):
        assert values[f"shardmq_{where}batch_messages_sum", process, None] == published
        batches = values[f"shardmq_{where}batch_messages_count", process, None]
        assert values[f"shardmq_{where}batch_messages_bucket", process, "+Inf"] == batches > 0
        assert values[f"shardmq_{where}batch_bytes_count", process, None] == batches
        # a header alone has more
        assert values[f"shardmq_{where}batch_bytes_bucket", process, "64"] == 0
    assert values["rabbitmq_message_size_bytes_bucket", "", "64"] == published
    syncs = values["shardmq_sync_duration_seconds_count", "shard-0", None]
    assert syncs > 0
    assert values["shardmq_sync_duration_seconds_sum", "shard-0", None] < 60 * syncs


def test_each_series_on_the_dashboard_is_of_the_cluster_that_was_chosen(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    joined = re.compile(r"rabbitmq_identity_info{rabbitmq_cluster=\"\$cluster\"}")
    # A quotient may be joined as a whole; a sum has no label to join by any more.
    parts = [part for text in expressions for part in re.split(r"(?=\bsum\b)", text) if part]
    outer = re.compile(r"histogram_quantile\([\d., ]*")
    assert [part for part in parts if not outer.fullmatch(part) and not joined.search(part)] == []
    if shutil.which("promtool"):
        known = {"$__rate_interval": "1m", "$__range": "1h", "$cluster": "c"}
        rules = []
        for text in expressions:
            for name, value in known.items():
                text = text.replace(name, value)
            rules.append({"record": "checked", "expr": text, "labels": {"at": str(len(rules))}})
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
        command = ["promtool", "check", "rules", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (alerts,) = yaml.safe_load(DASHBOARD.with_name("alerts.yaml").read_text())["groups"]
    return [
        *(target["expr"] for panel in panels for target in panel["targets"]),
        # tests/metrics/test_nodes_of_a_cluster.py has the metrics that only a cluster has.
        *(rule["expr"] for rule in alerts["rules"] if "shardmq_cluster" not in rule["expr"]),
    ]
