"""/metrics/detailed shows the objects that its query selects, and says what is wrong with it."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest

from shardmq.broker.controller.management.metrics import object_metrics
from shardmq.broker.controller.management.metrics.detailed_query import (
    FAMILIES_ELSEWHERE,
    REGEX_CHARS_MAX,
    REGEX_MEM_BYTES_MAX,
    TOP_MAX,
)
from shardmq.broker.controller.management.metrics.object_metrics import FAMILIES
from shardmq.broker.model import patterns
from shardmq.shardd.wire import messages as wire
from tests.http_api import conftest
from tests.http_api.conftest import Api
from tests.metrics.test_metrics import scrape

api = conftest.api

READY = "rabbitmq_detailed_queue_messages_ready"
PATH = "/metrics/detailed?family=queue_coarse_metrics"
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
        (f"queue={'a' * (REGEX_CHARS_MAX + 1)}", "queue: more than 1000 characters"),
        ("queue=((a{100}){100}){100}", "queue: not a regular expression of RE2: "),
        ("queue=(a{500}){2}[^b]{900}", "queue: not a regular expression of RE2: pattern too large"),
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


def test_no_pattern_takes_long_for_a_name() -> None:
    names = ["ab" * 126 + "c"] * 20
    for times in (5, 20, 50, 100, 200, 300, 500):
        pattern = patterns.compiled_by_re2(f"(a|b)*a(a|b){{{times}}}$", REGEX_MEM_BYTES_MAX)
        begun = time.process_time()
        for name in names:
            pattern.search(name)
        assert (time.process_time() - begun) / len(names) < 0.01  # it takes less than 0.001
