"""Test which exchanges there are, and which queues each type chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic, Channel, Confirm, Exchange, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, method, publish, with_properties
from tests.support.real_broker import RealBroker

Arguments = dict[str, Any]


@pytest.fixture
def exchanges(client: RawClient) -> Iterator[list[str]]:
    """Names of exchanges that go with the test."""
    made: list[str] = []
    yield made
    # whatever the test left of the others
    client.ask(3, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    client.ask(3, Channel.Open(), Channel.OpenOk)
    for exchange in made:
        client.ask(3, Exchange.Delete(exchange=exchange), Exchange.DeleteOk)


def declare(client: RawClient, exchanges: list[str], name: str, type: str, **how: Any) -> str:
    client.ask(1, Exchange.Declare(exchange=name, exchange_type=type, **how), Exchange.DeclareOk)
    exchanges.append(name)
    return name


def queue(
    client: RawClient, name: str, *bindings: tuple[str, str] | tuple[str, str, Arguments]
) -> str:
    """Declare an exclusive queue of this connection, bound by (exchange, key, arguments)."""
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    for exchange, key, *arguments in bindings:
        bind = Queue.Bind(
            queue=name,
            exchange=exchange,
            routing_key=key,
            arguments=arguments[0] if arguments else None,
        )
        client.ask(1, bind, Queue.BindOk)
    return name


def counts(client: RawClient, *queues: str) -> list[int]:
    asked = (Queue.Declare(queue=name, passive=True) for name in queues)
    return [client.ask(1, what, Queue.DeclareOk).message_count for what in asked]


# -- what is there from the start ------------------------------------------------------------------

PREDECLARED = {
    "": ("direct", False),
    "amq.direct": ("direct", False),
    "amq.fanout": ("fanout", False),
    "amq.headers": ("headers", False),
    "amq.match": ("headers", False),
    "amq.topic": ("topic", False),
    "amq.rabbitmq.trace": ("topic", True),
}


@pytest.mark.row("B1.1", "B1.20")
def test_a_new_vhost_has_the_predeclared_exchanges(api: Api, name: str) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={})
    rows = api(f"/api/exchanges/{name}")
    assert {row["name"]: (row["type"], row["internal"]) for row in rows} == PREDECLARED
    assert all(row["durable"] and not row["auto_delete"] and row["vhost"] == name for row in rows)
    api(f"/api/vhosts/{name}", method="DELETE")


@pytest.mark.row("B1.1")
def test_the_default_exchange_has_every_queue_by_its_name_and_no_other(
    client: RawClient, name: str
) -> None:
    queue(client, name)
    client.send(publish(1, "", name, b"x") + publish(1, "", f"{name}.", b"y"))
    assert counts(client, name) == [1]


@pytest.mark.row("B1.20")
def test_the_default_exchange_is_called_amq_default_in_a_path(
    client: RawClient, api: Api, exchanges: list[str], name: str
) -> None:
    assert api("/api/exchanges/%2F/amq.default")["name"] == ""
    declare(client, exchanges, name, "direct", internal=True)
    assert api(f"/api/exchanges/%2F/{name}")["internal"] is True
    assert name in [row["name"] for row in api("/api/exchanges/%2F")]


# -- the four types of the protocol ----------------------------------------------------------------


@pytest.mark.row("B1.2")
def test_direct_means_the_exact_key_and_one_copy_for_each_queue(
    client: RawClient, exchanges: list[str], name: str
) -> None:
    declare(client, exchanges, name, "direct")
    one = queue(client, f"{name}-1", (name, "k"), (name, "k2"))
    two = queue(client, f"{name}-2", (name, "k"))
    for key in ("k", "k2", "K", "k.", ""):
        client.send(publish(1, name, key, b"x"))
    assert counts(client, one, two) == [2, 1]


@pytest.mark.row("B1.3")
def test_fanout_looks_at_nothing(client: RawClient, exchanges: list[str], name: str) -> None:
    declare(client, exchanges, name, "fanout")
    one = queue(client, f"{name}-1", (name, "k"), (name, "other"))
    two = queue(client, f"{name}-2", (name, "", {"x-match": "all", "a": 1}))
    client.send(
        publish(1, name, "any", b"x") + with_properties(1, name, "", b"y", headers={"a": 2})
    )
    assert counts(client, one, two) == [2, 2]


LONG = "a." * 127 + "b"  # 255 bytes, 128 words
TOPICS = [
    ("a.b.c", ["a.b.c"], ["a.b", "a.b.c.d", "a.b.C"]),
    ("a.*.c", ["a.b.c", "a..c"], ["a.c", "a.b.b.c"]),
    ("a.#", ["a", "a.b", "a.b.c", "a."], ["b.a", "ab"]),
    ("#.c", ["c", "a.c", "a.b.c"], ["c.a"]),
    ("a.#.c", ["a.c", "a.b.b.c"], ["a", "c"]),
    ("*", ["a"], ["", "a.b"]),  # an empty key has no word
    ("#", ["", "a", "a.b.c", LONG], []),
    ("#.*", ["a", "a.b"], []),
    ("*.#.*", ["a.b", "a.b.c"], ["a"]),
    ("a.b*", ["a.b*"], ["a.bc"]),
    (LONG, [LONG], [LONG[:-1] + "c"]),
    ("#." + LONG[2:], [LONG], ["a"]),
]


@pytest.mark.row("B1.4")
@pytest.mark.parametrize(
    ("pattern", "matching", "others"), TOPICS, ids=[pattern[:12] for pattern, *_ in TOPICS]
)
def test_topic_patterns_match_words(
    client: RawClient,
    exchanges: list[str],
    name: str,
    pattern: str,
    matching: list[str],
    others: list[str],
) -> None:
    declare(client, exchanges, name, "topic")
    queue(client, name, (name, pattern))
    client.send(b"".join(publish(1, name, key, key.encode()) for key in [*others, *matching]))
    found = []
    for _ in matching:
        client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
        found.append(client.content().decode())
    assert found == matching
    assert counts(client, name) == [0]


HEADERS: list[tuple[str, Arguments, Arguments, bool]] = [
    ("all is meant", {"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}, True),
    ("one is missing", {"a": 1, "b": "x"}, {"a": 1}, False),
    ("one differs", {"x-match": "all", "a": 1, "b": "x"}, {"a": 1, "b": "y"}, False),
    ("any", {"x-match": "any", "a": 1, "b": "x"}, {"b": "x"}, True),
    ("none of any", {"x-match": "any", "a": 1, "b": "x"}, {"b": "y"}, False),
    ("any of none", {"x-match": "any"}, {"a": 1}, False),
    ("all of none", {"x-match": "all"}, {}, True),
    ("x- is passed over", {"x-match": "all", "x-a": 1, "b": 1}, {"b": 1}, True),
    ("x- does not do", {"x-match": "any", "x-a": 1}, {"x-a": 1}, False),
    ("x- counts", {"x-match": "all-with-x", "x-a": 1, "b": 1}, {"b": 1}, False),
    ("x- fits", {"x-match": "any-with-x", "x-a": 1, "b": 1}, {"x-a": 1}, True),
    ("void wants presence", {"a": None}, {"a": 7}, True),
    ("void wants presence, absent", {"a": None}, {"b": 7}, False),
    ("types count", {"a": 1}, {"a": True}, False),
]


@pytest.mark.row("B1.5")
@pytest.mark.parametrize(
    ("arguments", "headers", "matches"), [pytest.param(*case, id=what) for what, *case in HEADERS]
)
def test_a_headers_binding_matches_by_its_arguments(
    client: RawClient,
    exchanges: list[str],
    name: str,
    arguments: Arguments,
    headers: Arguments,
    matches: bool,
) -> None:
    declare(client, exchanges, name, "headers")
    queue(client, name, (name, "not looked at", arguments))
    client.send(with_properties(1, name, "k", b"x", headers=headers))
    assert counts(client, name) == [int(matches)]


@pytest.mark.row("B1.5")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("some", 'value <<"some">>; expected all, any, all-with-x, or any-with-x'),
        (1, "type signedint (value 1); expected longstr"),
    ],
)
def test_an_x_match_that_is_none_is_refused(
    client: RawClient, exchanges: list[str], name: str, value: Any, text: str
) -> None:
    declare(client, exchanges, name, "headers")
    queue(client, name)
    client.send(
        method(
            1, Queue.Bind(queue=name, exchange=name, routing_key="", arguments={"x-match": value})
        )
    )
    client.expect_channel_close(1, 406, f"PRECONDITION_FAILED - Invalid x-match field {text}")


# -- one queue of several --------------------------------------------------------------------------

MESSAGES = 600
# what each of four gets at the least: 150 are expected, 75 are seven sigma away
MANY = MESSAGES // 4 // 2


@pytest.mark.row("B1.7", "B1.8")
@pytest.mark.parametrize("type", ["x-random", "x-local-random"])
def test_chance_gives_each_message_to_one_queue_whatever_its_key(
    client: RawClient, exchanges: list[str], name: str, type: str
) -> None:
    declare(client, exchanges, name, type)
    queues = [queue(client, f"{name}-{number}", (name, "")) for number in range(4)]
    client.send(b"".join(publish(1, name, "same", b"x") for _ in range(MESSAGES)))
    found = counts(client, *queues)
    assert sum(found) == MESSAGES and min(found) > MANY, found


@pytest.mark.row("B1.8")
def test_a_binding_of_a_local_random_exchange_has_no_key(
    client: RawClient, exchanges: list[str], name: str
) -> None:
    declare(client, exchanges, name, "x-local-random")
    queue(client, name)
    client.send(method(1, Queue.Bind(queue=name, exchange=name, routing_key="k")))
    client.expect_channel_close(
        1, 406, "PRECONDITION_FAILED - Non empty binding 'k' key not permitted"
    )


@pytest.mark.row("B1.9")
def test_the_modulus_of_a_key_depends_on_the_names_of_the_queues_alone(
    client: RawClient, exchanges: list[str], name: str
) -> None:
    queues = [queue(client, f"{name}-{number}") for number in range(4)]
    found = []
    for exchange, order in ((f"{name}-a", queues), (f"{name}-b", queues[::-1])):
        declare(client, exchanges, exchange, "x-modulus-hash")
        for number, one in enumerate(order):
            client.ask(
                1, Queue.Bind(queue=one, exchange=exchange, routing_key=f"{number}"), Queue.BindOk
            )
        client.send(
            b"".join(publish(1, exchange, f"key {number}", b"x") for number in range(MESSAGES))
        )
        found.append(counts(client, *queues))
        for one in queues:
            client.ask(1, Queue.Purge(queue=one), Queue.PurgeOk)
    assert found[0] == found[1]
    assert sum(found[0]) == MESSAGES and min(found[0]) > MANY, found


@pytest.mark.row("B1.12")
@pytest.mark.parametrize("type", ["x-event", "x-jms-topic"])
def test_a_type_of_a_plugin_that_is_not_there_is_unknown(
    client: RawClient, name: str, type: str
) -> None:
    client.send(method(1, Exchange.Declare(exchange=name, exchange_type=type)))
    client.expect_close(503, f"COMMAND_INVALID - unknown exchange type '{type}'")


@pytest.mark.row("B1.12", "J12")
def test_what_a_federating_broker_declares_here_holds_back_what_came_from_it(
    client: RawClient, exchanges: list[str], name: str
) -> None:
    arguments = {"x-max-hops": 2, "x-downstream-name": "down", "x-downstream-vhost": "/"}
    declare(client, exchanges, name, "topic")
    declare(
        client, exchanges, f"{name} A", "x-federation-upstream", internal=True, arguments=arguments
    )
    bind = Exchange.Bind(destination=f"{name} A", source=name, routing_key="k.*")
    client.ask(1, bind, Exchange.BindOk)
    queue(client, name, (f"{name} A", ""))
    own, other = ({"cluster-name": of, "vhost": "/", "exchange": name} for of in ("down", "other"))
    for been in ([], [other], [own], [other, other]):
        headers = {"x-received-from": been} if been else {"a": 1}
        client.send(with_properties(1, name, "k.x", b"x", headers=headers))
    assert counts(client, name) == [2]
    wrong = Exchange.Declare(exchange=f"{name} B", exchange_type="x-federation-upstream")
    client.send(method(1, wrong))
    closed = client.expect(Channel.Close)
    assert closed.reply_text == "PRECONDITION_FAILED - Argument x-max-hops missing"


# -- attributes and bindings -----------------------------------------------------------------------


@pytest.mark.row("B1.17")
def test_bindings_that_differ_in_arguments_are_two_and_deliver_one(
    client: RawClient, api: Api, exchanges: list[str], name: str
) -> None:
    declare(client, exchanges, name, "direct")
    queue(client, name, (name, "k"), (name, "k", {"a": 1, "b": 2}), (name, "k", {"b": 2, "a": 1}))
    rows = api(f"/api/exchanges/%2F/{name}/bindings/source")
    assert [row["arguments"] for row in rows if row["arguments"]] == [{"a": 1, "b": 2}]
    assert len({row["properties_key"] for row in rows}) == len(rows) == 2
    client.send(publish(1, name, "k", b"x"))
    assert counts(client, name) == [1]


@pytest.mark.row("B1.18")
def test_a_message_visits_each_exchange_of_a_circle_once(
    client: RawClient, exchanges: list[str], name: str
) -> None:
    circle = [declare(client, exchanges, f"{name}-{number}", "fanout") for number in range(3)]
    queues = []
    for number, exchange in enumerate(circle):
        client.ask(
            1, Exchange.Bind(destination=exchange, source=circle[number - 1]), Exchange.BindOk
        )
        client.ask(1, Exchange.Bind(destination=exchange, source=exchange), Exchange.BindOk)
        queues.append(queue(client, f"{name}-{number}", (exchange, "")))
    client.ask(2, Confirm.Select(), Confirm.SelectOk)
    client.send(publish(2, circle[1], "k", b"x"))
    client.expect(Basic.Ack)
    assert counts(client, *queues) == [1, 1, 1]


def _bound(broker: RealBroker, name: str) -> None:
    """Declare "d", "t", "i" and "a" followed by `name`, each bound to the durable queue `name`.

    The letters stand for durable, transient, internal and auto-delete. The letter is the key of the
    binding.
    """
    with RawClient(broker.port) as made:
        client = made.shake_hands(channels=1)
        client.ask(1, Queue.Declare(queue=name, durable=True), Queue.DeclareOk)
        for kind, how in KINDS.items():
            declared = Exchange.Declare(exchange=kind + name, exchange_type="direct", **how)
            client.ask(1, declared, Exchange.DeclareOk)
            client.ask(
                1, Queue.Bind(queue=name, exchange=kind + name, routing_key=kind), Queue.BindOk
            )


KINDS: dict[str, dict[str, bool]] = {
    "d": {"durable": True},
    "t": {"durable": False},
    "i": {"durable": True, "internal": True},
    "a": {"durable": True, "auto_delete": True},
}


@pytest.mark.broker
@pytest.mark.row("B1.16")
def test_a_restart_leaves_durable_exchanges_and_the_bindings_between_durable_things(
    tmp_path: Path, name: str
) -> None:
    broker = RealBroker(tmp_path / "data", shards=1)
    try:
        _bound(broker, name)
        broker.stop()
        broker.restart()
        with RawClient(broker.port) as made:
            client = made.shake_hands(channels=2)
            for kind, how in KINDS.items():
                declared = Exchange.Declare(exchange=kind + name, exchange_type="direct", **how)
                client.ask(1, declared, Exchange.DeclareOk)
            client.send(b"".join(publish(1, kind + name, kind, kind.encode()) for kind in "dta"))
            assert counts(client, name) == [2]  # by "t" it is bound no more
            client.ask(
                1, Exchange.Bind(destination="i" + name, source="amq.fanout"), Exchange.BindOk
            )
            client.send(publish(1, "amq.fanout", "i", b"by way of an internal exchange"))
            assert counts(client, name) == [3]
            client.ask(
                1, Queue.Unbind(queue=name, exchange="a" + name, routing_key="a"), Queue.UnbindOk
            )
            client.send(method(2, Exchange.Declare(exchange="a" + name, passive=True)))
            client.expect_channel_close(2, 404, "NOT_FOUND")
        broker.stop()
    finally:
        broker.clean_up()
