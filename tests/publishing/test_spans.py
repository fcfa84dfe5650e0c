"""Which messages take part in a trace, and which spans a front door makes of them."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.amqp import Publishes, contents, frames, properties
from shardmq.broker.front_door.publish.spans import NEVER, SPANS_MAX, Spans, context_in
from shardmq.broker.shared.control import Span
from tests.publishing.test_publish import A, B, Door
from tests.support.fake_publishing import events_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SESSION: Any = SimpleNamespace(vhost="/", peer_host="10.0.0.1")
USER_ID_FLAG = struct.Struct("<38xB")
READ_NS = struct.Struct("<40xQ")


def with_context(said: Any, **more: Any) -> dict[str, Any]:
    return {"headers": {"traceparent": said, **more}}


class Traced(Door):
    """A front door that makes spans, and keeps those that it would send."""

    def __init__(self, ratio: float = 0.0, seed: int = 1) -> None:
        self.sent: list[Span] = []
        self.spans = Spans(ratio, self._take, lambda *_: None, random.Random(seed))
        super().__init__(spans=self.spans)
        self.client.peer_host = "10.0.0.1"  # type: ignore[attr-defined]

    def _take(self, spans: list[Span]) -> bool:
        self.sent += spans
        return True

    def made(self) -> list[Span]:
        self.spans.flush()
        sent, self.sent = self.sent, []
        return sent


# -- contexts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [SAMPLED, SAMPLED.encode(), f"cc-{TRACE}-{PARENT}-01-more"])
def test_a_context_is_a_string_or_bytes_of_any_version(said: Any) -> None:
    found = context_in({"traceparent": said, "tracestate": b"a=1,b=2"})
    assert found is not None and found.is_sampled
    assert (found.trace_id.hex(), found.span_id.hex(), found.state) == (TRACE, PARENT, "a=1,b=2")


@pytest.mark.parametrize(
    "said",
    [
        None, 7, "", SAMPLED[:-1], SAMPLED + "-more", SAMPLED.upper(), SAMPLED + "\n",
        f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        SAMPLED.encode() + b"\xff",
    ],
)  # fmt: skip
def test_what_is_no_context_counts_as_none(said: Any) -> None:
    assert context_in({"traceparent": said}) is None


def test_a_state_that_is_too_long_is_left_out() -> None:
    found = context_in({"traceparent": SAMPLED, "tracestate": "a=" + "x" * 600})
    assert found is not None and found.state == ""


# -- which messages --------------------------------------------------------------------------------


def test_only_messages_of_sampled_traces_leave_the_usual_way() -> None:
    """Their neighbours are packed as without tracing, and everything stays in order."""
    (event,) = events_of(
        [
            (1, A, {}, False),
            (1, A, with_context(SAMPLED), False),
            (1, A, with_context(UNSAMPLED), False),
            (1, A, with_context(bytearray(SAMPLED.encode())), False),
            (1, A, {"headers": {"other": SAMPLED}}, False),
        ]
    )
    door = Traced()
    door.client.publish(event)
    rows = [event.table[at * 48 : at * 48 + 48] for at in range(event.count)]
    flags = [bool(USER_ID_FLAG.unpack_from(row)[0] & frames.HAS_USER_ID) for row in rows]
    marked = [bool(READ_NS.unpack_from(row)[0]) for row in rows]
    assert flags == marked
    assert marked == [False, True, False, True, False]
    stored = [contents.read_stored(each[2])[3] for each in door.links.stored()]
    assert stored == [b"0", b"1", b"2", b"3", b"4"]
    assert Counter(span.name for span in door.made()) == {
        "publish amq.default": 2,
        "route amq.default": 2,
    }


def test_headers_with_a_context_are_stored_as_they_came() -> None:
    door = Traced(ratio=1.0)
    for said in (SAMPLED, bytearray(SAMPLED.encode()), UNSAMPLED, "broken"):
        headers = {"traceparent": said, "tracestate": "v=1", "n": 1}
        door.publish((1, A, {"headers": headers}, False))
        ((_, _, stored),) = door.links.stored()
        assert properties.read(contents.read_stored(stored)[2]).headers == headers


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.5, 1.0])
def test_so_many_messages_without_a_context_begin_a_trace(ratio: float) -> None:
    door, count = Traced(ratio, seed=7), 5000
    events: list[Publishes] = []
    for _ in range(count // 50):
        events += events_of([(1, A, {}, False)] * 49 + [(1, A, with_context(UNSAMPLED), False)])
    for event in events:
        door.client.publish(event)
    made = [span for span in door.made() if span.name.startswith("publish")]
    wanted = ratio * count * 49 / 50
    assert abs(len(made) - wanted) <= 4 * (wanted * (1 - ratio)) ** 0.5
    assert all(not span.parent_id for span in made)
    assert len({span.trace_id for span in made}) == len(made)
    begun = [
        headers["traceparent"]
        for _, _, stored in door.links.stored()
        if (headers := properties.read(contents.read_stored(stored)[2]).headers)
        and headers["traceparent"] != UNSAMPLED
    ]
    assert begun == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in made]


def test_a_ratio_that_is_tiny_never_overflows() -> None:
    spans = Spans(1e-300, lambda spans: True, lambda *_: None)
    assert spans.until_chosen == NEVER
    spans.mark(Publishes(b"", b"", 0), 1)
    assert spans.until_chosen == NEVER


# -- spans of publishes ----------------------------------------------------------------------------


def test_the_span_of_a_publish_is_a_child_of_the_clients_and_the_parent_of_the_others() -> None:
    door = Traced()
    fan = ("direct", "k1")  # to a at shard 0, and b at shard 1
    door.publish((2, fan, {**with_context(SAMPLED, tracestate="v=1"), "message_id": "m"}, False))
    watching = [each for each in door.links.waiting if hasattr(each, "_shard")]
    watching[0].confirmed()
    assert not door.made()
    watching[1].confirmed()
    route, first, second, publish = door.made()
    names = [span.name for span in (route, first, second, publish)]
    assert names == ["route direct", "store direct", "store direct", "publish direct"]
    assert {first.attributes["shardmq.shard"], second.attributes["shardmq.shard"]} == {0, 1}
    assert publish.parent_id.hex() == PARENT
    assert {route.parent_id, first.parent_id, second.parent_id} == {publish.span_id}
    assert (publish.kind, first.kind, publish.state) == ("consumer", "internal", "v=1")
    assert {first.trace_id.hex(), publish.trace_id.hex()} == {TRACE}
    assert publish.started_ns <= first.started_ns <= first.ended_ns <= publish.ended_ns
    assert not publish.error and not first.error
    assert (
        publish.attributes.items()
        >= {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "publish",
            "messaging.destination.name": "direct",
            "messaging.rabbitmq.destination.routing_key": "k1",
            "messaging.message.id": "m",
            "shardmq.vhost": "/",
            "network.peer.address": "10.0.0.1",
        }.items()
    )


def test_nobody_waits_for_a_publish_without_confirms() -> None:
    """A shard would have to sync sooner."""
    door = Traced()
    door.publish((1, A, with_context(SAMPLED), False))
    assert not door.links.waiting
    assert [span.name for span in door.made()] == ["route amq.default", "publish amq.default"]


@pytest.mark.parametrize("what", ["lost", "refuse", "another"])
def test_what_was_lost_or_refused_is_an_error(what: str) -> None:
    door = Traced()
    door.publish((2, A, with_context(SAMPLED), False), (2, B, {}, False))
    (watching,) = [each for each in door.links.waiting if hasattr(each, "_shard")]
    if what == "lost":
        watching.lost()
    else:
        first = 1 if what == "refuse" else 2
        watching.refuse(door.client.id, 2, first, first)
        watching.confirmed()
    store, publish = (span for span in door.made() if not span.name.startswith("route"))
    wanted = {"lost": "the shard was lost", "refuse": "refused", "another": ""}[what]
    assert (store.error, publish.error) == (wanted, wanted)


def test_a_publish_that_is_refused_says_why() -> None:
    door = Traced()
    door.publish((1, ("gone", ""), with_context(SAMPLED), False))
    (publish,) = door.made()
    assert publish.name == "publish gone" and "no exchange 'gone'" in publish.error


def test_a_returned_message_has_the_headers_that_it_came_with() -> None:
    door = Traced(ratio=1.0)
    door.publish((1, ("", "nobody"), {}, True))
    assert b"NO_ROUTE" in door.client.said[0] and b"traceparent" not in door.client.said[0]


def test_a_publish_in_sequence_is_stored_as_it_came() -> None:
    """Or a repetition would look like another message."""
    door = Traced(ratio=1.0)
    headers = {"x-producer-id": "p", "x-sequence": 1}
    door.publish((2, A, {"headers": headers}, False))
    ((_, _, stored),) = door.links.stored()
    assert properties.read(contents.read_stored(stored)[2]).headers == headers


# -- deliveries, and the way to the controller -----------------------------------------------------


def test_deliveries_of_sampled_traces_are_children_of_the_context() -> None:
    door = Traced()
    blob = b"".join(
        properties.stored_with(b"x", b"k", headers, b"body")
        for headers in ({"traceparent": SAMPLED}, {}, {"traceparent": UNSAMPLED})
    )
    heads = [properties.stored_with(b"x", b"k", {"traceparent": SAMPLED}, b"body")[:-4]]
    door.spans.delivered(SESSION, "q", 5, 3, memoryview(blob))
    door.spans.delivered(SESSION, "q", 5, 1, heads)
    first, second = door.made()
    for span in (first, second):
        assert (span.name, span.kind, span.started_ns) == ("deliver q", "producer", 5)
        assert (span.trace_id.hex(), span.parent_id.hex()) == (TRACE, PARENT)
        assert span.attributes["messaging.destination.name"] == "q"
        assert span.attributes["messaging.message.body.size"] == 4


def test_a_body_that_looks_like_a_context_is_none() -> None:
    door = Traced()
    body = b"\x0btraceparentS\0\0\0\x37" + SAMPLED.encode()
    door.spans.delivered(SESSION, "q", 5, 1, properties.stored_with(b"", b"q", {}, body))
    assert not door.made()


def test_spans_wait_for_each_other_and_are_dropped_if_nobody_takes_them() -> None:
    said: list[int] = []
    timers: list[Any] = []
    answers = iter([True, False])

    def say(spans: list[Span]) -> bool:
        said.append(len(spans))
        return next(answers)

    spans = Spans(0.0, say, lambda _, then: timers.append(then))
    span = SPAN
    spans.add(span)
    spans.add(span)
    assert len(timers) == 1 and not said
    timers.pop()()
    assert said == [2] and spans.dropped == 0
    for _ in range(SPANS_MAX):
        spans.add(span)
    assert said == [2, SPANS_MAX] and spans.dropped == SPANS_MAX


SPAN = Span("publish x", "consumer", b"\1" * 16, b"\2" * 8, b"", "", 1, 2, {}, "")


# -- broken ones are caught ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead", "check"),
    [
        (
            "context_in",
            lambda headers: None,
            test_the_span_of_a_publish_is_a_child_of_the_clients_and_the_parent_of_the_others,
        ),
        (
            "context_in",
            lambda headers: (found := context_in(headers)) and found._replace(span_id=bytes(8)),
            test_deliveries_of_sampled_traces_are_children_of_the_context,
        ),
        (
            "Spans._gap",
            lambda spans: 20,
            partial(test_so_many_messages_without_a_context_begin_a_trace, 0.03),
        ),
    ],
)
def test_spans_that_are_broken_are_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, instead: Any, check: Callable[[], None]
) -> None:
    monkeypatch.setattr(f"shardmq.broker.front_door.publish.spans.{name}", instead)
    with pytest.raises(AssertionError):
        check()
