"""/metrics/detailed shows the objects that its query selects, and says what is wrong with it."""

from __future__ import annotations

import contextlib
import time
from urllib.parse import quote

import pytest

from shardmq.broker.controller.management.metrics import object_metrics
from shardmq.broker.controller.management.metrics.detailed_query import (
    FAMILIES_ELSEWHERE,
    REGEX_CHARS_MAX,
    REGEX_MEM_BYTES_MAX,
    TOP_MAX,
    Selection,
)
from shardmq.broker.controller.management.metrics.object_metrics import FAMILIES
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import reader_key
from shardmq.broker.controller.management.responses import matching
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.model import patterns
from shardmq.shardd.wire import messages as wire
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.metrics.test_metrics import scrape

api = conftest.api

READY = "rabbitmq_detailed_queue_messages_ready"
PATH = "/metrics/detailed?family=queue_coarse_metrics"
PUBLISHED = "/metrics/detailed?family=channel_queue_exchange_metrics"
STREAM = {"arguments": {"x-queue-type": "stream"}}
# Each takes 0.3 to 3 ms for a name of 237 characters, if it may have much memory.
SLOW = ["(.{1,60}){4}b", "(a?){60}a{60}b", "[^x]{1,200}b"]
NAMES = [f"{kind}.{number}" for kind in ("order", "mail") for number in range(5)]


@pytest.fixture
async def made(api: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    """Ten queues, of which the queue with the id N has N messages ready."""
    for name in NAMES:
        assert (await api.call("PUT", f"/api/queues/%2F/{name}", {}))[0] == 201
    monkeypatch.setattr(
        wire, "QueueStats", lambda id, ready, *more, real=wire.QueueStats: real(id, id, *more)
    )
    monkeypatch.setattr(object_metrics, "SLICE_ROWS", 3)
    monkeypatch.setattr(object_metrics, "MATCHED_ROWS", 2)
    api.login = None
    return api


async def shown(api: Api, query: str) -> list[str]:
    found = (await scrape(api, f"{PATH}&{query}")).get(READY, [])
    return [labels["queue"] for labels, _ in found]


@pytest.mark.row("M1.12")
async def test_queues_come_by_a_pattern_of_re2(made: Api) -> None:
    assert await shown(made, "") == NAMES
    assert await shown(made, "queue=der") == NAMES[:5]
    assert await shown(made, f"queue={quote('^(order|mail)[.][12]$')}") == [
        "order.1", "order.2", "mail.1", "mail.2",
    ]  # fmt: skip
    assert await shown(made, "queue=Order") == [], "case matters"
    found = await scrape(made, f"{PATH}&family=exchange_names&queue=^$")
    assert READY not in found and found["rabbitmq_cluster_exchange_name"]


async def test_top_shows_the_queues_with_most_messages(made: Api) -> None:
    ids = {queue.name: queue.id for queue in made.context.catalog.vhosts["/"].queues.values()}
    by_depth = sorted(NAMES, key=ids.__getitem__, reverse=True)
    for top in (1, 4, 9):
        assert await shown(made, f"top={top}") == by_depth[:top]
    assert await shown(made, f"top={TOP_MAX}") == by_depth
    of_mail = [name for name in by_depth if "mail" in name]
    assert await shown(made, "queue=^mail&top=2") == of_mail[:2]


async def test_every_kind_of_object_has_a_figure_or_is_few(made: Api) -> None:
    for name, family in FAMILIES.items():
        found = await scrape(made, f"/metrics/detailed?family={name}&top=1")
        if family.rank is not None:
            assert all(len(samples) == 1 for samples in found.values())
        else:
            assert not {"vhost", "queue"} & {*family.labels}


@pytest.mark.row("M1.1")
async def test_all_names_begin_with_the_prefix_that_is_asked_for(made: Api) -> None:
    found = await scrape(made, f"{PATH}&family=vhost_status&prefix=lavinmq&top=1")
    assert found.keys() == {
        "lavinmq_identity_info", "lavinmq_build_info", "lavinmq_detailed_queue_messages",
        "lavinmq_detailed_queue_messages_ready", "lavinmq_detailed_queue_messages_unacked",
        "lavinmq_cluster_vhost_status",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (
            "family=queue_coarse_metric",
            "there is no queue_coarse_metric; did you mean queue_coarse_metrics? known are ",
        ),
        ("family=queue_metrics&family=zzz", "family: there is no zzz; known are auth_attempt_"),
        ("family=", "family: there is no ; known are "),
        ("family=queue_colour_bits", "family: there is no queue_colour_bits; known are "),
        (f"family={'queue_metrics' * 9}", f"{'queue_metrics' * 7}queue_met; known are "),
        (
            "familie=queue_metrics",
            "familie: there is no such parameter; family, vhost, queue, top, prefix are known",
        ),
        ("top=0", "top: not a number from 1 to 1000"),
        ("top=1001", "top: not a number from 1 to 1000"),
        ("top=1e3", "top: not a number from 1 to 1000"),
        ("top=1&top=2", "top: is there twice"),
        ("queue=a&queue=b", "queue: is there twice"),
        ("queue=(", "queue: not a regular expression of RE2: missing ): ("),
        ("queue=(?=a)", "queue: not a regular expression of RE2: invalid perl operator: (?="),
        (f"queue={'a' * (REGEX_CHARS_MAX + 1)}", "queue: more than 100 characters"),
        ("queue=((a{100}){100}){100}", "queue: not a regular expression of RE2: "),
        ("queue=(a{500}){2}[^b]{900}", "queue: not a regular expression of RE2: pattern too large"),
        *[
            (f"queue={quote(slow)}", "queue: not a regular expression of RE2: pattern too large")
            for slow in SLOW
        ],
        ("prefix=", "prefix: not the beginning of a metric's name"),
        ("prefix=1a", "prefix: not the beginning of a metric's name"),
        ("prefix=a%0Ab", "prefix: not the beginning of a metric's name"),
        (f"prefix={'a' * 21}", "prefix: not the beginning of a metric's name, of at most 20 "),
    ],
)  # fmt: skip
async def test_a_query_that_selects_nothing_known_is_refused(
    made: Api, query: str, reason: str
) -> None:
    status, found = await made.call("GET", f"/metrics/detailed?{query}")
    assert (status, found["error"]) == (400, "bad_request")
    assert reason in found["reason"]


async def test_families_that_only_other_brokers_have_are_no_mistake(made: Api) -> None:
    assert not FAMILIES.keys() & {*FAMILIES_ELSEWHERE}, "take it out, it is here now"
    found = await scrape(made, f"/metrics/detailed?family={'&family='.join(FAMILIES_ELSEWHERE)}")
    assert found.keys() == {"rabbitmq_identity_info", "rabbitmq_build_info"}


@pytest.mark.row("M1.12")
async def test_families_hold_the_metrics_that_rabbitmq_has_in_them(made: Api) -> None:
    context = made.context
    made.login = ("guest", "guest")
    assert (await made.call("PUT", "/api/queues/%2F/s", STREAM))[0] == 201
    made.login = None
    stream = context.catalog.vhosts["/"].queues["s"]
    stats = await context.stats.now()
    stats.clients.exchanges["/", ""] = (7, 6)
    stats.clients.exchanges["/", "deleted"] = (5, 5)
    stats.streams[stream.id] = wire.StreamStats(stream.id, 2, 12, 1, 100)
    for number, offset in enumerate((9, 4, 11)):
        reader = wire.ReaderStats(stream.id, 0, number, 1, "tag", offset)
        stats.readers[reader_key(reader)] = reader
    selected = Selection(("exchange_metrics", "stream_consumer_metrics"))
    part = Part(context, context.cluster.own)
    parts = object_metrics.lines(part, stats, selected, object_metrics.DETAILED, SlicedWork())
    text = b"".join([part async for part in parts]).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'rabbitmq_detailed_exchange_messages_published_total{vhost="/",exchange=""} 7.0',
        'rabbitmq_detailed_stream_consumer_max_offset_lag{vhost="/",queue="s"} 8.0',
    ]
    found = await scrape(made, f"{PUBLISHED}&queue=order.1")
    labels = {"queue_vhost": "/", "queue": "order.1"}
    assert found["rabbitmq_detailed_queue_messages_published_total"] == [(labels, 5.0)]
    found = await scrape(made, "/metrics/detailed?family=queue_metrics&queue=order.1")
    assert found["rabbitmq_detailed_queue_consumers"]


async def test_a_metric_of_two_families_comes_once(made: Api) -> None:
    path = f"{PUBLISHED}&family=queue_metrics&family=queue_consumer_count"
    _, text = await made.call("GET", path)
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    _, text = await made.call("GET", "/metrics/per-object")
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_no_pattern_takes_long_for_a_name() -> None:
    names = ["ab" * 126 + "c"] * 20
    times = (2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 200, 300, 500)
    slow = [f"(a|b)*a(a|b){{{each}}}$" for each in times]
    slow += [f"(a?){{{each}}}a{{{each}}}b" for each in times]
    slow += [f"(.{{1,{each}}}){{2}}b" for each in times]
    compiled = 0
    for text in slow:
        with contextlib.suppress(patterns.BadPattern):
            pattern = patterns.compiled_by_re2(text, REGEX_MEM_BYTES_MAX)
            compiled += 1
            begun = time.thread_time()
            for name in names:
                pattern.search(name)
            # Usually below 0.0001 s; a search that tries every way would not end at all.
            assert (time.thread_time() - begun) / len(names) < 0.02, text
    assert compiled > 10


@pytest.mark.parametrize(
    "text",
    [
        "^orders", "^(order|mail)[.][12]$", "^(team-a|team-b)[.]orders[.][0-9]+$",
        "orders.*-(dlq|retry)$", "[a-z]{2,10}[.][0-9]{4}-[0-9]{2}-[0-9]{2}", "(?i)-(eu|us)-prod$",
        r"[\w.-]+\.dlq", "^amq.gen-.{22}$", "^(?:a1|b2|c3|d4|e5|f6|g7|h8|i9|j10|k11|l12)[.]x$",
    ],
)  # fmt: skip
def test_what_operators_write_is_not_too_large(text: str) -> None:
    patterns.compiled_by_re2(text, REGEX_MEM_BYTES_MAX)


async def test_matching_ends_when_its_time_is_used_up(
    made: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MATCH_S_MAX", 0.0)
    status, found = await made.call("GET", f"{PATH}&queue=a")
    assert (status, found["error"]) == (400, "bad_request")
    assert found["reason"].startswith("queue: matching takes more than 0 s")
    assert await shown(made, "") == NAMES
