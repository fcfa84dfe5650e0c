"""Upstreams and sets are checked with RabbitMQ's words, and policies ask for links of them."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from msgspec.structs import replace

from shardmq.broker.model import federation
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, ParameterPut, QueuePut, ShardOf, VhostPut
from shardmq.broker.model.federation import (
    UPSTREAM,
    UPSTREAM_PATTERN,
    UPSTREAM_SET,
    ExchangeLink,
)

GOOD = {"uri": "amqp://h"}
HISTORIES = 300
PREDECLARED = ("direct", "fanout", "topic", "headers", "match")


@pytest.mark.row("J10")
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (3, "u should be a table, actually was 3"),
        ({}, 'Key "uri" not found in u'),
        (GOOD, ""),
        ({"uri": ["amqp://a", "amqps://b:1/v"]}, ""),
        ({"uri": "http://u:secret@h"}, '"http://h" not a valid URI: unexpected scheme'),
        (GOOD | {"upstream": "x"}, 'Unrecognised terms [{<<"upstream">>,<<"x">>}] in u'),
        (GOOD | {"ack-mode": "x"},
         "ack-mode should be one of [no-ack,on-publish,on-confirm], actually was x"),
        (GOOD | {"prefetch-count": "1"},
         'prefetch-count should be a number, actually was <<"1">>'),
        (GOOD | {"prefetch-count": 1e400}, "prefetch-count should be a number"),
        (GOOD | {"prefetch-count": 70_000}, "prefetch-count should be from 0 to 65535"),
        (GOOD | {"max-hops": -1}, "max-hops should be from 0 to 1000"),
        (GOOD | {"expires": 0}, "expires should be from 1 to"),
        (GOOD | {"message-ttl": 0}, ""),
        (GOOD | {"reconnect-delay": True}, "reconnect-delay should be a number"),
        (GOOD | {"trust-user-id": 1}, "trust-user-id should be boolean, actually was 1"),
        (GOOD | {"queue-type": "stream"}, "queue-type should be one of [classic,quorum]"),
        (GOOD | {"resource-cleanup-mode": "x"}, "should be one of [default,never]"),
        (GOOD | {"channel-use-mode": "x"}, "should be one of [multiple,single]"),
        (GOOD | {"queue": 5}, "queue should be binary, actually was 5"),
        (GOOD | {"consumer-tag": "t" * 256}, "consumer-tag has at most 255 bytes"),
    ],
)  # fmt: skip
def test_faults_of_an_upstream_have_rabbitmqs_words(value: Any, fault: str) -> None:
    found = list(federation.faults(UPSTREAM, "u", value))
    assert (not found) if not fault else any(fault in each for each in found), found
    assert "secret" not in str(found)


@pytest.mark.row("J10")
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({}, "s should be list, actually was "),
        ([], ""),
        ([{"upstream": "a"}, {"upstream": "b", "queue": "q", "max-hops": 2}], ""),
        ([{"upstream": "a"}, {}], 'Key "upstream" not found in s'),
        (["a"], 's should be a table, actually was <<"a">>'),
        ([{"upstream": "a", "x": 1}], 'Unrecognised terms [{<<"x">>,1}] in s'),
        ([{"upstream": "a"}] * 1001, "s has at most 1000 elements"),
    ],
)
def test_faults_of_a_set_have_rabbitmqs_words(value: Any, fault: str) -> None:
    found = list(federation.faults(UPSTREAM_SET, "s", value))
    assert (not found) if not fault else any(fault in each for each in found), found


@pytest.mark.row("J10")
def test_a_policy_has_one_key_of_federation_and_its_pattern_is_an_expression() -> None:
    assert list(federation.policy_faults({UPSTREAM: "a", "max-length": 1})) == []
    assert list(federation.policy_faults({UPSTREAM_PATTERN: "^a"})) == []
    assert list(federation.policy_faults({UPSTREAM: "a", UPSTREAM_SET: "b"})) == [
        "cannot specify federation-upstream, federation-upstream-set or "
        "federation-upstream-pattern together"
    ]
    [fault] = federation.policy_faults({UPSTREAM_PATTERN: "("})
    assert fault.startswith("could not compile pattern ( to a regular expression. Error: ")


def catalog_of(*changes: Any) -> Catalog:
    catalog = Catalog()
    for change in (VhostPut("/"), VhostPut("v"), *changes):
        catalog.apply(change)
    return catalog


def policy(vhost: str, name: str, pattern: str, definition: dict[str, Any], **more: Any) -> Any:
    value = {"pattern": pattern, "definition": definition, **more}
    return ParameterPut(vhost, "policy", name, value)


@pytest.mark.row("J10", "J11")
def test_a_link_has_the_defaults_and_what_a_set_says_wins() -> None:
    given = {"uri": "amqp://a", "prefetch-count": 7, "ack-mode": "no-ack"}
    catalog = catalog_of(
        ParameterPut("/", UPSTREAM, "u", given),
        ParameterPut("/", UPSTREAM_SET, "s", [{"upstream": "u", "prefetch-count": 3.0}]),
        policy("/", "p", "^q$", {UPSTREAM_SET: "s"}),
        QueuePut("/", "q", 1, 0, durable=False, arguments={"x-max-length": 5}),
    )
    [link] = federation.links(catalog)
    assert link.source == federation.Source(
        upstream="u", policy="p", uris=["amqp://a"], consumer_tag="federation-link-u", prefetch=3,
        reconnect_delay_s=5.0, ack_mode="no-ack",
    )  # fmt: skip
    assert link.upstream_queue == "q"
    assert (link.durable, link.auto_delete, link.arguments) == (False, False, {"x-max-length": 5})
    assert re.fullmatch("[0-9a-f]{8}", link.id)


@pytest.mark.row("J11")
@pytest.mark.parametrize(
    "queue",
    [
        QueuePut("/", "q", 1, 0, arguments={"x-queue-type": "stream"}),
        QueuePut("/", "q", 1, 0, arguments={"x-internal-purpose": "federation"}),
        QueuePut("/", "q", 1, 0, owner="1.2.3"),
        QueuePut("/", "q", 1, 0, part=ShardOf("e", 0)),
        QueuePut("/", "amq.rabbitmq.reply-to.x", 1, 0),
    ],
)
def test_some_queues_are_never_federated(queue: QueuePut) -> None:
    meant = policy("/", "p", "", {UPSTREAM_SET: "all"}, **{"apply-to": "queues"})
    made = ParameterPut("/", UPSTREAM, "u", GOOD), meant
    assert federation.links(catalog_of(*made, queue)) == []
    assert len(federation.links(catalog_of(*made, queue, QueuePut("/", "other", 2, 0)))) == 1


@pytest.mark.row("J11")
def test_a_virtual_queue_is_federated_as_one_queue_unless_it_is_of_streams() -> None:
    shard_arguments = {"x-max-length": 5}
    exchange = ExchangePut(
        "/", "e", "x-modulus-hash", arguments={"x-shard-arguments": shard_arguments}
    )
    made = (
        ParameterPut("/", UPSTREAM, "u", GOOD),
        policy("/", "p", "^e", {UPSTREAM: "u"}, **{"apply-to": "classic_queues"}),
        exchange,
    )
    parts = [
        QueuePut("/", f"e-{n}", n, 0, arguments=shard_arguments, part=ShardOf("e", n - 1))
        for n in (1, 2)
    ]
    [link] = federation.links(catalog_of(*made, *parts))
    assert (link.queue, link.is_virtual, link.arguments) == ("e", True, shard_arguments)
    plain = QueuePut("/", "e", 9, 0)  # of which consumers see nothing
    assert federation.links(catalog_of(*made, *parts, plain)) == [link]
    assert federation.virtual_queue(catalog_of(plain).vhosts["/"], "e") is None
    stream = QueuePut("/", "e-3", 3, 0, arguments={"x-queue-type": "stream"}, part=ShardOf("e", 2))
    assert federation.links(catalog_of(*made, *parts, stream)) == []
    assert federation.links(catalog_of(*made)) == []


def test_parameters_that_nothing_checked_make_no_link() -> None:
    for value in (3, {}, {"uri": "x"}, {"uri": "amqp://", "max-hops": "x"}):
        made = ParameterPut("/", UPSTREAM, "u", value), QueuePut("/", "q", 1, 0)
        for meant in ({UPSTREAM: "u"}, {UPSTREAM_SET: "all"}, {UPSTREAM_PATTERN: "("}):
            assert federation.links(catalog_of(*made, policy("/", "p", "", meant))) == []
    nowhere = ParameterPut("", UPSTREAM, "u", GOOD), policy("", "p", "", {UPSTREAM: "u"})
    assert federation.links(catalog_of(*nowhere, QueuePut("/", "q", 1, 0))) == []


def ends(link: federation.Link) -> tuple[str, str, str, str]:
    if isinstance(link, federation.QueueLink):
        return "queue", link.queue, link.source.upstream, link.upstream_queue
    return "exchange", link.exchange, link.source.upstream, link.upstream_exchange


@pytest.mark.row("J12")
def test_a_link_of_an_exchange_has_the_defaults_and_what_a_set_says_wins() -> None:
    given = {"uri": "amqp://a", "max-hops": 2, "expires": 5000, "exchange": "there"}
    own = {"upstream": "u", "max-hops": 3.0, "message-ttl": 0, "resource-cleanup-mode": "never"}
    catalog = catalog_of(
        ParameterPut("/", UPSTREAM, "u", given),
        ParameterPut("/", UPSTREAM, "v", GOOD),
        ParameterPut("/", UPSTREAM_SET, "s", [own, {"upstream": "v"}]),
        policy("/", "p", "^e$", {UPSTREAM_SET: "s"}, **{"apply-to": "exchanges"}),
        ExchangePut("/", "e", "topic", durable=False, arguments={"a": 1}),
    )
    link, other = federation.links(catalog)
    assert isinstance(link, ExchangeLink) and isinstance(other, ExchangeLink)
    assert (link.exchange_type, link.durable, link.auto_delete, link.arguments) == (
        "topic", False, False, {"a": 1},
    )  # fmt: skip
    assert (link.max_hops, link.expires, link.message_ttl, link.cleans_up) == (3, 5000, 0, False)
    assert (other.max_hops, other.expires, other.message_ttl, other.cleans_up) == (
        1, None, None, True,
    )  # fmt: skip
    source = other.source
    assert (source.prefetch, source.ack_mode, other.queue_type) == (1000, "on-confirm", "classic")
    assert other.keeps_queue_of(
        replace(other, max_hops=5, source=replace(source, prefetch=1, policy="q"))
    )
    for more in (
        *({"source": replace(source, uris=[f"amqp://{each}"])} for each in ("b", "h/v", "h:1")),
        {"expires": 1}, {"upstream_exchange": "f"}, {"twin": "u"}, {"vhost": "v"},
    ):  # fmt: skip
        assert not replace(other, **more).keeps_queue_of(other), more


@pytest.mark.row("J12")
@pytest.mark.parametrize(
    "uris",
    [
        ["amqp://u:other@h:5672"],
        ["amqp://h?heartbeat=5"],
        ["amqp://first", "amqp://u:p@h"],
        ["amqp://u:p@h", "amqp://second"],
    ],
)
def test_a_link_keeps_its_queue_while_one_uri_leads_to_the_same_place(uris: list[str]) -> None:
    catalog = catalog_of(
        ParameterPut("/", UPSTREAM, "u", GOOD | {"uri": ["amqp://u:p@h", "amqp://u:p@i"]}),
        policy("/", "p", "^e$", {UPSTREAM: "u"}),
        ExchangePut("/", "e", "topic"),
    )
    [link] = federation.links(catalog)
    assert isinstance(link, ExchangeLink)
    here = link.source.uris
    for before, after in ((here, uris), (uris, here), (here, here[::-1])):
        one, other = (
            replace(link, source=replace(link.source, uris=each)) for each in (before, after)
        )
        assert other.keeps_queue_of(one)


@pytest.mark.row("J12")
def test_of_two_links_with_the_same_ends_the_second_one_has_the_first_as_its_twin() -> None:
    def twins(**uris: Any) -> dict[str, str]:
        """Return the twin of the link of each upstream that is given with its URI."""
        catalog = catalog_of(
            *(ParameterPut("/", UPSTREAM, name, {"uri": uri}) for name, uri in uris.items()),
            policy("/", "p", "^e$", {UPSTREAM_SET: "all"}),
            ExchangePut("/", "e", "topic"),
            QueuePut("/", "e", 1, 0),
        )
        found = federation.links(catalog)
        assert len(found) == 2 * len(uris)
        return {each.source.upstream: each.twin for each in found if isinstance(each, ExchangeLink)}

    assert twins(a="amqp://h", b="amqp://i") == {"a": "", "b": ""}
    assert twins(a="amqp://h", b="amqp://h/v", c="amqp://h:1") == {"a": "", "b": "", "c": ""}
    assert twins(a=["amqp://h", "amqp://i"], b=["amqp://j", "amqp://u:p@i"], c="amqp://j") == {
        "a": "", "b": "a", "c": "",
    }  # fmt: skip
    assert twins(a="amqp://h", b="amqp://h:5672/%2f?heartbeat=1") == {"a": "", "b": "a"}


@pytest.mark.row("J12")
@pytest.mark.parametrize(
    ("exchange", "upstream_exchange", "upstream_vhost", "name"),
    [
        ("e", "e", "/", "federation: e -> cluster"),
        ("e", "f", "/", "federation: f -> cluster:e"),
        ("e", "e", "v", "federation: e -> cluster:/:e"),
    ],
)
def test_the_queue_at_the_upstream_is_named_by_what_differs(
    exchange: str, upstream_exchange: str, upstream_vhost: str, name: str
) -> None:
    catalog = catalog_of(
        ParameterPut("/", UPSTREAM, "u", GOOD | {"exchange": upstream_exchange}),
        policy("/", "p", "^e$", {UPSTREAM: "u"}),
        ExchangePut("/", exchange, "topic"),
    )
    [link] = federation.links(catalog)
    assert isinstance(link, ExchangeLink)
    assert link.upstream_queue("cluster", upstream_vhost) == name


@pytest.mark.row("J12")
def test_some_exchanges_are_never_federated() -> None:
    made = ParameterPut("/", UPSTREAM, "u", GOOD), policy("/", "p", "", {UPSTREAM_SET: "all"})
    found = federation.links(
        catalog_of(
            *made,
            ExchangePut("/", "internal", "topic", internal=True),
            ExchangePut("/", "e", "x-modulus-hash"),
            QueuePut("/", "e-0", 1, 0, part=ShardOf("e", 0)),
        )
    )
    names = {each.exchange for each in found if isinstance(each, ExchangeLink)}
    assert names == {"amq.direct", "amq.fanout", "amq.topic", "amq.headers", "amq.match"}


@pytest.mark.row("J10", "J11", "J12", "J13")
def test_links_of_any_catalog_are_those_of_a_slow_model(pytestconfig: pytest.Config) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        names, changes = ["a", "ab", "b"], []
        upstreams: dict[tuple[str, str], str] = {}
        sets: dict[tuple[str, str], list[dict[str, Any]]] = {}
        policies: dict[str, tuple[str, dict[str, Any]]] = {}
        things: set[tuple[str, str, str]] = set()  # vhost, kind and name
        for number in range(chance.randrange(12)):
            vhost, name = chance.choice(["/", "v"]), chance.choice(names)
            match chance.randrange(5):
                case 0:
                    upstreams[vhost, name] = f"amqp://h{number}"
                    value = {"uri": upstreams[vhost, name]}
                    changes.append(ParameterPut(vhost, UPSTREAM, name, value))
                case 1:
                    own = [
                        {}, {"queue": "other"}, {"exchange": "other"}, {"uri": "amqp://set"},
                    ]  # fmt: skip
                    sets[vhost, name] = [
                        {"upstream": chance.choice(names), **chance.choice(own)}
                        for _ in range(chance.randrange(3))
                    ]
                    changes.append(ParameterPut(vhost, UPSTREAM_SET, name, sets[vhost, name]))
                case 2:
                    meant = chance.choice(
                        [{UPSTREAM: name}, {UPSTREAM_SET: name}, {UPSTREAM_SET: "all"},
                         {UPSTREAM_PATTERN: "^a"}, {"max-length": 1}]
                    )  # fmt: skip
                    policies[vhost] = name, meant
                    changes.append(policy(vhost, "p", name, meant))
                case 3:
                    things.add((vhost, "queue", name))
                    changes.append(QueuePut(vhost, name, number + 1, 0))
                case 4:
                    things.add((vhost, "exchange", name))
                    changes.append(ExchangePut(vhost, name, "topic"))
        expected = set()
        things |= {(vhost, "exchange", f"amq.{name}") for vhost in "/v" for name in PREDECLARED}
        for vhost, kind, thing in things:
            pattern, meant = policies.get(vhost, ("x", {}))
            if pattern not in thing:
                continue
            here = [name for of, name in upstreams if of == vhost]
            elements: list[dict[str, Any]] = [{"upstream": name} for name in here]
            if UPSTREAM in meant:
                elements = [{"upstream": meant[UPSTREAM]}]
            elif meant.get(UPSTREAM_SET, "all") != "all":
                elements = sets.get((vhost, meant[UPSTREAM_SET]), [])
            elif UPSTREAM_PATTERN in meant:
                elements = [each for each in elements if each["upstream"].startswith("a")]
            elif "max-length" in meant:
                elements = []
            pairs = set()
            for element in elements:
                name, of_upstream = element["upstream"], element.get(kind, thing)
                if name in here and (name, of_upstream) not in pairs:
                    pairs.add((name, of_upstream))
                    uri = element.get("uri", upstreams[vhost, name])
                    expected.add((vhost, kind, thing, name, of_upstream, uri))
        found = federation.links(catalog_of(*changes))
        seen = {(x.vhost, *ends(x), x.source.uris[0]) for x in found}
        assert seen == expected and len(found) == len(expected), history
        assert len({link.id for link in found}) == len(found)
