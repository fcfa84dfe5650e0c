"""The plan of a migration: what is taken over, and what behaves differently, from definitions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmq.supervisor.cli import migration_plan as plans
from shardmq.supervisor.cli.migration_plan import (
    DIFFERS,
    HINDERS,
    KNOWN,
    LEFT,
    TAKEN,
    Brokers,
    Plan,
    plan,
)
from shardmq.supervisor.cli.migration_rules import Queue

OF_RABBITMQ = Path(__file__).parents[1] / "definitions" / "rabbitmq_definitions.json"
TYPES = frozenset({"direct", "fanout", "topic", "headers", "x-delayed-message"})
GUEST = {"users": [{"name": "guest", "password_hash": "AAAA", "tags": ["administrator"]}]}
RIGHTS = {"vhost": "/", "user": "guest", "configure": ".*", "write": ".*", "read": ".*"}
READER: dict[str, Any] = {**GUEST, "vhosts": [{"name": "/"}], "permissions": [RIGHTS]}


def made(
    old: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    queues: list[Any] | None = None,
    **overview: Any,
) -> Plan:
    return plan(Brokers({**READER, **old}, own or {}, queues or [], overview, TYPES, "guest"))


def said(found: Plan, kind: str) -> set[tuple[str, str]]:
    """Return the verdicts and reasons of a kind."""
    return {(each.verdict, each.why) for each in found.findings if each.kind == kind}


def queue(name: str = "q", **more: Any) -> dict[str, Any]:
    return {"vhost": "/", "name": name, "durable": True, "auto_delete": False, **more}


@pytest.mark.parametrize(
    ("row", "verdict", "word", "comes"),
    [
        (queue(), TAKEN, "", True),
        (queue(durable=False), TAKEN, "", True),
        (queue(exclusive=True), LEFT, "exclusive", False),
        (queue(exclusive=True), LEFT, "federate the exchange until then", False),
        (queue(auto_delete=True), LEFT, "its last consumer", False),
        (queue(auto_delete=True), LEFT, "federate the exchange until then", False),
        (queue("amq.gen-x"), LEFT, "has chosen its name", False),
        (queue("amq.gen-x"), LEFT, "federate the exchange until then", False),
        (queue(arguments={"x-internal-purpose": "federation"}), LEFT, "plugin", False),
        (queue(arguments={"x-queue-type": "classic"}), TAKEN, "", True),
        (queue(arguments={"x-queue-type": "quorum"}), DIFFERS, "cluster.replicas", True),
        (queue(type="quorum"), DIFFERS, "cluster.replicas", True),
        (queue(arguments={"x-queue-type": "stream"}), DIFFERS, "do not come", False),
        (queue(arguments={"x-message-ttl": 9}), DIFFERS, "begins anew", True),
        (queue(arguments={"x-message-ttl": 9}), DIFFERS, "move the consumers first", True),
        (queue(arguments={"x-expires": 9}), DIFFERS, "deleted here", True),
        (queue(arguments={"x-expires": 9}), DIFFERS, "move the consumers first", True),
        (queue(arguments={"x-max-length": 9}), DIFFERS, "limit of length", True),
        (queue(arguments={"x-max-length-bytes": 9}), DIFFERS, "limit of length", True),
        (queue(arguments={"x-max-priority": 9}), DIFFERS, "within a priority", True),
        (queue(arguments={"x-single-active-consumer": True}), DIFFERS, "one active", True),
        (queue(arguments={"x-dead-letter-exchange": ""}), DIFFERS, "dead-lettered", True),
        (queue(arguments={"x-delivery-limit": 3}), DIFFERS, "counted anew", True),
        (queue(arguments={"x-queue-mode": "lazy"}), DIFFERS, "x-queue-mode has no effect", True),
    ],
)
def test_kinds_of_queues(row: dict[str, Any], verdict: str, word: str, comes: bool) -> None:
    found = made({"queues": [row]})
    assert any(each == verdict and word in why for each, why in said(found, "queue")), found
    assert found.queues == ([Queue("/", row["name"])] if comes else [])
    assert (found.document["queues"] == [row]) == (verdict != LEFT)
    assert not found.is_hindered


@pytest.mark.parametrize(
    ("kind", "row", "verdict", "word", "is_imported"),
    [
        ("users", {"name": "a", "password_hash": ""}, TAKEN, "", True),
        ("users", {"name": "a", "password_hash": "A", "hashing_algorithm": "SHA512"}, TAKEN, "", 1),
        ("users", {"name": "a", "password_hash": "A", "hashing_algorithm": "Bcrypt"}, LEFT,
         "Bcrypt", False),
        ("policies", {"definition": {"max-length": 1}}, DIFFERS, "limit of length", True),
        ("policies", {"definition": {"ha-mode": "all"}}, DIFFERS, "ha-mode has no effect", True),
        ("policies", {"definition": {"made-up": 1}}, DIFFERS, "made-up has no effect", True),
        ("policies", {"definition": {"federation-upstream": "u"}}, DIFFERS, "upstream", True),
        ("parameters", {"component": "shovel"}, LEFT, "both brokers", False),
        ("parameters", {"component": "federation-upstream"}, LEFT, "both brokers", False),
        ("parameters", {"component": "federation-upstream-set"}, LEFT, "both brokers", False),
        ("parameters", {"component": "vhost-limits", "value": {}}, DIFFERS, "bridges count", True),
        ("parameters", {"component": "operator_policy",
                        "value": {"definition": {"message-ttl": 1}}}, DIFFERS, "anew", True),
        ("parameters", {"component": "other"}, TAKEN, "", True),
        ("global_parameters", {"name": "mqtt_default_vhosts"}, LEFT, "no MQTT", False),
        ("global_parameters", {"name": "mine"}, TAKEN, "", True),
        ("exchanges", {"type": "topic"}, TAKEN, "", True),
        ("exchanges", {"type": "x-rtopic"}, HINDERS, "no type x-rtopic", False),
        ("exchanges", {"type": "x-delayed-message"}, DIFFERS, "when they are due", True),
        ("exchanges", {"type": "fanout", "arguments": {"x-odd": 1}}, DIFFERS, "x-odd", True),
        ("vhosts", {"name": "shop"}, TAKEN, "", True),
    ],
)  # fmt: skip
def test_kinds_of_definitions(
    kind: str, row: dict[str, Any], verdict: str, word: str, is_imported: bool
) -> None:
    if kind not in ("users", "vhosts", "global_parameters"):
        row = {"vhost": "/", "name": "n", **row}
    found = made({kind: [row]})
    assert any(each.verdict == verdict and word in each.why for each in found.findings), found
    assert (row in found.document[kind]) == bool(is_imported)
    assert found.is_hindered == (verdict == HINDERS)


def test_what_is_here_stays() -> None:
    old = json.loads(OF_RABBITMQ.read_text())
    own = {**old, "queues": [{**row, "durable": not row["durable"]} for row in old["queues"]]}
    found = plan(Brokers(old, own, [], {}, TYPES, "guest"))
    assert not any(found.document.values())
    assert (KNOWN, "it is declared otherwise here, and stays so") in said(found, "queue")


def test_queues_that_are_here_already_are_paused_and_resumed() -> None:
    stream = queue("s", type="stream")
    found = made({"queues": [queue("a"), queue("b"), stream]}, {"queues": [queue("a"), stream]})
    paused = [each.things for each in found.findings if each.why == plans.PAUSES]
    assert paused == [["/: a"]]


def test_definitions_of_a_rabbitmq_come_whole() -> None:
    old = json.loads(OF_RABBITMQ.read_text())
    found = plan(Brokers(old, READER, [], {}, TYPES | {"x-consistent-hash"}, "guest"))
    for kind in ("policies", "exchanges", "parameters", "topic_permissions"):
        assert found.document[kind] == old[kind], kind
    assert [row["name"] for row in found.document["users"]] == ["nopass", "md5", "sha512", "olga"]
    assert [row["name"] for row in found.document["vhosts"]] == ["orders"]
    assert {row["name"] for row in found.document["global_parameters"]} == {"a_list", "a_string"}
    assert all(not row["auto_delete"] for row in found.document["queues"])
    gone = {row["name"] for row in old["queues"] if row["auto_delete"]}
    assert found.document["bindings"] == [
        row for row in old["bindings"] if row["destination"] not in gone
    ]


def test_who_may_not_read_a_queue_cannot_move_it() -> None:
    rights = [{**RIGHTS, "read": "^a"}]
    found = made({"queues": [queue("a"), queue("b")], "permissions": rights})
    assert [(each.verdict, each.things) for each in found.findings if "may not" in each.why] == [
        (HINDERS, ["/: b"])
    ]
    assert found.unreadable == {Queue("/", "b")}
    assert made({"queues": [queue()], "permissions": []}).is_hindered
    # A user whom another source of logins knows has rights that are not in definitions.
    assert not made({"queues": [queue()], "permissions": [], "users": []}).is_hindered


def test_bindings_need_both_ends() -> None:
    def bound(source: str, destination: str, kind: str = "queue") -> dict[str, Any]:
        ends = {"source": source, "destination": destination, "destination_type": kind}
        return {"vhost": "/", **ends, "routing_key": "k", "arguments": {}}

    kept = [bound("x", "q"), bound("amq.topic", "q"), bound("x", "amq.fanout", "exchange")]
    lost = [bound("odd", "q"), bound("x", "amq.gen-1"), bound("x", "odd", "exchange")]
    exchanges = [
        {"vhost": "/", "name": "x", "type": "topic"},
        {"vhost": "/", "name": "odd", "type": "x-odd"},
    ]
    document = {"queues": [queue("q"), queue("amq.gen-1")], "exchanges": exchanges}
    found = made({**document, "bindings": [*kept, *lost]})
    assert found.document["bindings"] == kept


def test_one_vhost_moves_alone() -> None:
    old = json.loads(OF_RABBITMQ.read_text())
    found = plans.of_vhost(old, "orders")
    assert {row["vhost"] for row in found["queues"]} == {"orders"}
    assert [row["name"] for row in found["vhosts"]] == ["orders"]
    assert {row["name"] for row in found["users"]} == {"md5", "guest", "olga"}
    assert "global_parameters" not in found
    assert plans.of_vhost(old, "") == old


def test_exclusive_queues_and_other_protocols_are_found() -> None:
    rows = [queue("a"), queue("s", type="stream"), queue("b")]
    listeners = [{"protocol": "amqp", "port": 1}, {"protocol": "mqtt", "port": 2}]
    exclusive = queue("e", exclusive=True)
    found = made({"queues": rows}, queues=[*rows, exclusive], listeners=listeners)
    assert found.queues == [Queue("/", "a"), Queue("/", "b")]
    assert any("exclusive" in why for _, why in said(found, "queue"))
    assert said(found, "clients") == {
        (LEFT, "MQTT is not spoken here: such clients cannot move"),
        (DIFFERS, plans.RPC),
    }


@pytest.mark.parametrize(
    ("overview", "product"),
    [
        ({"product_name": "RabbitMQ", "product_version": "3.10.8"}, "RabbitMQ 3.10.8"),
        ({"rabbitmq_version": "3.8.0"}, "RabbitMQ 3.8.0"),
        ({"lavinmq_version": "2.1", "rabbitmq_version": "3.8"}, "LavinMQ 2.1"),
        ({"product_name": "shardmq", "product_version": "0.1"}, "shardmq 0.1"),
    ],
)
def test_products(overview: dict[str, Any], product: str) -> None:
    assert plans.product_of(overview) == product
