"""An OpenTelemetry collector gets the spans of messages that take part in a trace."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.support.collector import Collector
from tests.support.real_broker import RealBroker, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

Channel = pika.adapters.blocking_connection.BlockingChannel
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.broker


@contextlib.contextmanager
def traced(
    directory: Path, url: str, *, ratio: float = 0.0, front_doors: int = 1, **more: str
) -> Iterator[RealBroker]:
    environment = {
        "SHARDMQ_TRACING_ENABLED": "true",
        "SHARDMQ_TRACING_ENDPOINT": url,
        "SHARDMQ_TRACING_SAMPLE_RATIO": str(ratio),
        **more,
    }
    broker = RealBroker(directory / "data", front_doors=front_doors, environment=environment)
    try:
        yield broker
        broker.stop()
        assert "Traceback" not in broker.log_path.read_text()
    finally:
        broker.clean_up()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module", params=[1, 0], ids=["front-door", "combined"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RealBroker]:
    made = tmp_path_factory.mktemp("traced")
    secret = made / "headers"
    secret.write_text("authorization=Bearer%20s3cret\n")
    with traced(
        made,
        collector.url,
        front_doors=request.param,
        SHARDMQ_TRACING_HEADERS_FILE=str(secret),
        SHARDMQ_TRACING_SERVICE_NAME="broker-1",
    ) as broker:
        yield broker


@pytest.fixture
def channel(broker: RealBroker) -> Iterator[Channel]:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        yield connection.channel()


def context(flags: str = "01") -> tuple[str, str, dict[str, Any]]:
    """Return the ids of a new trace and of the client's span, and the headers that say so."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-{flags}", "tracestate": "v=1"}


def properties(headers: dict[str, Any]) -> pika.BasicProperties:
    return pika.BasicProperties(headers=headers, delivery_mode=2, message_id="m-1")


def take(channel: Channel, queue: str) -> tuple[dict[str, Any], bytes]:
    """Consume one message."""
    for given, said, body in channel.consume(queue, inactivity_timeout=60):
        assert given is not None
        channel.basic_ack(given.delivery_tag)
        channel.cancel()
        return said.headers, body
    raise AssertionError("no message")


OF_A_PUBLISH = ["publish amq.topic", "route amq.topic", "store amq.topic"]


def test_a_trace_goes_from_the_publisher_through_the_broker(
    collector: Collector, channel: Channel, name: str
) -> None:
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, "amq.topic", f"{name}.*")
    channel.confirm_delivery()
    trace, client, headers = context()
    before = time.time_ns()
    channel.basic_publish("amq.topic", f"{name}.a", b"body", properties(headers))
    assert take(channel, name) == (headers, b"body")
    spans = collector.wait_for(trace, [*OF_A_PUBLISH, f"deliver {name}"])
    publish, route, store, deliver = (spans[each] for each in [*OF_A_PUBLISH, f"deliver {name}"])
    assert (publish.parent, deliver.parent) == (client, client)
    assert (route.parent, store.parent) == (publish.id, publish.id)
    kinds = [span.kind for span in (publish, route, store, deliver)]
    assert kinds == ["consumer", "internal", "internal", "producer"]
    assert {span.state for span in spans.values()} == {"v=1"}
    assert before <= publish.started_ns <= route.started_ns <= route.ended_ns <= store.started_ns
    assert store.ended_ns <= publish.ended_ns <= time.time_ns()
    assert (
        publish.attributes.items()
        >= {
            "messaging.system": "rabbitmq",
            "messaging.destination.name": "amq.topic",
            "messaging.rabbitmq.destination.routing_key": f"{name}.a",
            "messaging.message.id": "m-1",
            "messaging.message.body.size": 4,
            "messaging.operation.name": "publish",
        }.items()
    )
    assert deliver.attributes["messaging.destination.name"] == name
    assert not any(span.error for span in spans.values())
    assert collector.resources[-1]["service.name"] == "broker-1"
    assert collector.headers[-1]["authorization"] == "Bearer s3cret"


def test_small_and_large_messages_by_get_and_in_transactions(
    collector: Collector, channel: Channel, name: str
) -> None:
    channel.queue_declare(name, durable=True)
    small, large, held = context(), context(), context()
    channel.basic_publish("", name, b"x", properties(small[2]))
    channel.basic_publish("", name, bytes(200_000), properties(large[2]))
    channel.tx_select()
    channel.basic_publish("", name, b"y", properties(held[2]))
    channel.tx_commit()
    got = [channel.basic_get(name, auto_ack=True)[1:] for _ in range(2)]
    channel.tx_commit()
    assert [said.headers for said, _ in got] == [small[2], large[2]]
    assert take(channel, name) == (held[2], b"y")
    channel.tx_commit()
    plain = ["publish amq.default", "route amq.default", f"deliver {name}"]
    collector.wait_for(small[0], plain)
    spans = collector.wait_for(large[0], plain)
    assert spans[f"deliver {name}"].attributes["messaging.message.body.size"] == 200_000
    collector.wait_for(held[0], [*plain, "store amq.default"])


def test_a_large_message_whose_body_is_lent_is_delivered_with_a_span(
    collector: Collector, channel: Channel, name: str
) -> None:
    channel.queue_declare(name)
    trace, _, headers = context()
    channel.basic_publish("", name, bytes(100_000), properties(headers))
    said, body = take(channel, name)
    assert (said, len(body)) == (headers, 100_000)
    collector.wait_for(trace, ["publish amq.default", "route amq.default", f"deliver {name}"])


def test_who_is_not_sampled_makes_no_span(
    collector: Collector, channel: Channel, name: str
) -> None:
    channel.queue_declare(name)
    unsampled, sampled = context("00"), context()
    channel.basic_publish("", name, b"0", properties(unsampled[2]))
    channel.basic_publish("", name, b"1")
    channel.basic_publish("", name, b"2", properties(sampled[2]))
    got = [channel.basic_get(name, auto_ack=True) for _ in range(3)]
    assert [body for _, _, body in got] == [b"0", b"1", b"2"]
    assert got[0][1].headers == unsampled[2] and got[1][1].headers is None
    collector.wait_for(sampled[0], ["publish amq.default", "route amq.default", f"deliver {name}"])
    assert not collector.of(unsampled[0])


def test_dead_letters_and_streams_stay_in_the_trace(
    collector: Collector, channel: Channel, name: str
) -> None:
    channel.queue_declare(f"{name}-dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    channel.queue_declare(name, durable=True, arguments={**arguments, "x-message-ttl": 1})
    stream = {"x-queue-type": "stream"}
    channel.queue_declare(f"{name}-log", durable=True, arguments=stream)
    letter, record = context(), context()
    channel.basic_publish("", name, b"x", properties(letter[2]))
    channel.basic_publish("", f"{name}-log", b"y", properties(record[2]))
    said, _ = take(channel, f"{name}-dead")
    assert said["traceparent"] == letter[2]["traceparent"]
    plain = ["publish amq.default", "route amq.default"]
    spans = collector.wait_for(letter[0], [*plain, f"deliver {name}-dead"])
    assert spans[f"deliver {name}-dead"].parent == letter[1]
    channel.basic_qos(prefetch_count=10)
    for given, _, _ in channel.consume(
        f"{name}-log", arguments={"x-stream-offset": "first"}, inactivity_timeout=60
    ):
        channel.basic_ack(given.delivery_tag)
        break
    channel.cancel()
    collector.wait_for(record[0], [*plain, f"deliver {name}-log"])


def test_the_example_of_the_page_shows_what_the_page_says(
    tmp_path: Path, collector: Collector
) -> None:
    page = (ROOT / "deploy" / "TRACING.md").read_text()
    example = page[page.index("    shardctl create_queue") :].partition("\n\n")[0]
    command = f"{sys.executable} -m shardmq.supervisor.cli"
    with traced(tmp_path, collector.url) as broker:
        script = example.replace("shardctl ", f"{command} ")
        environment = {**os.environ, "SHARDMQ_URL": f"http://{broker.http}"}
        done = subprocess.run(
            script, shell=True, env=environment, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "latte"), done.stderr
        said = re.search("has the spans (.*?`)\\.", page, re.DOTALL)
        assert said is not None
        *names, trace = re.findall("`(.*?)`", said[1])
        collector.wait_for(trace, names)


def test_messages_without_a_context_begin_traces_by_chance(
    tmp_path: Path, collector: Collector, name: str
) -> None:
    ratio, count = 0.2, 1000
    with traced(tmp_path, collector.url, ratio=ratio) as broker:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.queue_declare(name)
            for number in range(count):
                channel.basic_publish("", name, b"%d" % number)
            wait_until(
                lambda: channel.queue_declare(name, passive=True).method.message_count == count,
                "all messages",
            )
            got = [channel.basic_get(name, auto_ack=True) for _ in range(count)]
    assert [body for _, _, body in got] == [b"%d" % number for number in range(count)]
    begun = [said.headers["traceparent"] for _, said, _ in got if said.headers]
    assert abs(len(begun) - ratio * count) <= 5 * (count * ratio * (1 - ratio)) ** 0.5
    for said in begun:  # the broker has stopped: everything was sent before
        _, trace, span, _ = said.split("-")
        names = {each.name: each for each in collector.of(trace)}
        assert set(names) == {"publish amq.default", "route amq.default", f"deliver {name}"}
        publish, deliver = names["publish amq.default"], names[f"deliver {name}"]
        assert (publish.id, publish.parent, deliver.parent) == (span, "", span)


# -- collectors that are away or do harm -----------------------------------------------------------


def never_answers(request: BaseHTTPRequestHandler) -> None:
    time.sleep(3600)


def answers_without_end(request: BaseHTTPRequestHandler) -> None:
    request.send_response(500)
    request.end_headers()
    with contextlib.suppress(OSError):
        while True:
            request.wfile.write(bytes(1 << 20))


def refuses(request: BaseHTTPRequestHandler) -> None:
    request.send_response(400)
    request.send_header("Content-Length", "0")
    request.end_headers()


def metric(broker: RealBroker, name: str) -> float:
    with urllib.request.urlopen(f"http://{broker.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


# The SDK waits so many seconds for a collector.
PATIENCE = {"OTEL_EXPORTER_OTLP_TIMEOUT": "2"}


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "harm", [
        pytest.param(None, marks=pytest.mark.torture), never_answers, answers_without_end,
        pytest.param(refuses, marks=pytest.mark.torture),
    ],
)  # fmt: skip
def test_a_collector_that_fails_costs_spans_only(tmp_path: Path, harm: Any, name: str) -> None:
    """Messages go on, spans are counted, memory does not grow, and the broker stops in time."""
    collector = Collector(harm)
    if harm is None:
        collector.stop()  # nobody listens
    count = 1000
    try:
        with traced(tmp_path, collector.url, ratio=1.0, **PATIENCE) as broker:
            memory = resident_bytes(broker.pid("controller"))
            with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
                channel = connection.channel()
                channel.queue_declare(name)
                for number in range(count):
                    channel.basic_publish("", name, b"%d" % number)
                got = channel.consume(name, auto_ack=True, inactivity_timeout=60)
                assert [next(got)[2] for _ in range(count)] == [b"%d" % n for n in range(count)]
            # Who refuses does so for all of them; who does not answer is waited for each time.
            least = 3 * count if harm in (refuses, answers_without_end) else 1
            wait_until(
                lambda: metric(broker, "shardmq_tracing_spans_dropped_total") >= least,
                "dropped spans",
            )
            assert metric(broker, "shardmq_tracing_spans_exported_total") == 0
            assert resident_bytes(broker.pid("controller")) < memory + (100 << 20)
            begun = time.monotonic()
        assert time.monotonic() - begun < 30
    finally:
        if harm is not None:
            collector.stop()


@pytest.mark.crash
def test_a_shard_that_dies_shows_in_the_trace(
    tmp_path: Path, collector: Collector, name: str
) -> None:
    with traced(tmp_path, collector.url) as broker:
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            channel = connection.channel()
            channel.queue_declare(name, durable=True)
            channel.confirm_delivery()
            pids = [broker.pid("shard", number) for number in (0, 1)]

            def end_shards() -> None:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)

            for pid in pids:  # the message is under way to its shard when that dies
                os.kill(pid, signal.SIGSTOP)
            trace, _, headers = context()
            threading.Timer(0.5, end_shards).start()
            with pytest.raises(pika.exceptions.NackError):
                channel.basic_publish("", name, b"x", properties(headers))
            spans = collector.wait_for(
                trace, ["publish amq.default", "route amq.default", "store amq.default"]
            )
            wait_until(
                lambda: all(broker.is_replaced("shard", n, pid) for n, pid in enumerate(pids)),
                "the shards to come back",
            )
        assert [spans[each].error for each in sorted(spans)] == [
            "the shard was lost",
            "",
            "the shard was lost",
        ]
