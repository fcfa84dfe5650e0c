"""Bindings of federated exchanges go upstream as RabbitMQ's links send them, one by one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from shardmq.broker.amqp.methods import decode_table, encode_table
from shardmq.broker.model import upstream_bindings
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    BindingDelete,
    BindingPut,
    ExchangePut,
    QueueDelete,
    QueuePut,
    VhostPut,
)
from shardmq.broker.model.upstream_bindings import Binding, Place, Wanted, at_upstream

HISTORIES = 200
HERE = Place("here", "v", "x", "B")
UPSTREAM = ("up", "/")
OWN = {"cluster-name": "here", "vhost": "v", "exchange": "v:x B"}


def came(*names: str, hops: int) -> dict[str, Any]:
    """Return the arguments of a binding that came through brokers of these names."""
    entries = [{"cluster-name": name, "vhost": "/", "exchange": "/:x A"} for name in names]
    entries[0]["hops"] = hops  # type: ignore[assignment]
    return {"x-bound-from": entries}


def upstream_arguments(arguments: dict[str, Any], max_hops: int = 1, **more: Any) -> Any:
    """Return what a binding with these arguments has at the upstream; None if it is not there."""
    given = [Binding("k", encode_table(arguments))]
    [*found] = at_upstream(given, HERE, more.get("upstream", UPSTREAM), max_hops)
    return decode_table(found[0].arguments) if found else None


@pytest.mark.row("J12")
@pytest.mark.parametrize(
    ("arguments", "max_hops", "hops"),
    [
        ({}, 1, 1),
        ({}, 3, 3),
        ({}, 0, None),
        (came("c", hops=1), 1, None),
        (came("c", hops=2), 1, 1),
        (came("c", hops=5), 2, 2),
        (came("c", hops=2), 5, 1),
        (came("c", "up", hops=5), 5, None),  # it has been there
        ({"x-bound-from": "no list"}, 5, None),
        ({"x-bound-from": []}, 5, None),
        ({"x-bound-from": [3]}, 5, None),
        ({"x-bound-from": [{}]}, 5, None),
        ({"x-bound-from": [{"hops": "2"}]}, 5, None),
    ],
)
def test_a_binding_passes_as_many_links_as_messages_would(
    arguments: dict[str, Any], max_hops: int, hops: int | None
) -> None:
    found = upstream_arguments({"a": 1, **arguments}, max_hops)
    if hops is None:
        assert found is None
    else:
        before = arguments.get("x-bound-from", [])
        assert found == {"a": 1, "x-bound-from": [OWN | {"hops": hops}, *before]}


@pytest.mark.row("J12")
def test_an_upstream_without_a_name_and_another_vhost_of_it_have_not_been_seen() -> None:
    arguments = came("up", hops=5)
    assert upstream_arguments(arguments) is None
    assert upstream_arguments(arguments, upstream=("up", "other")) is not None
    assert upstream_arguments(came("c", hops=5), upstream=(None, "/")) is not None


class OneByOne:
    """What RabbitMQ's link has bound at the upstream: it hears of bindings one after the other."""

    def __init__(self, max_hops: int) -> None:
        self.max_hops = max_hops
        self.bound: list[tuple[str, dict[str, Any]]] = []
        self.destinations: list[tuple[str, dict[str, Any], set[str]]] = []

    def hear(self, is_new: bool, key: str, arguments: dict[str, Any], destination: str) -> None:
        before = arguments.get("x-bound-from")
        if before is None:
            entry = next((e for e in self.destinations if e[:2] == (key, arguments)), None)
            if is_new and entry is not None:
                entry[2].add(destination)
                return
            if is_new:
                self.destinations.append((key, arguments, {destination}))
            else:
                assert entry is not None
                entry[2].discard(destination)
                if entry[2]:
                    return
                self.destinations.remove(entry)
            hops = self.max_hops
        elif any((e["cluster-name"], e["vhost"]) == UPSTREAM for e in before):
            hops = 0
        else:
            hops = min(before[0]["hops"] - 1, self.max_hops)
        if hops == 0:
            return
        sent = {**arguments, "x-bound-from": [OWN | {"hops": hops}, *(before or [])]}
        if is_new and (key, sent) not in self.bound:
            self.bound.append((key, sent))
        elif not is_new:
            self.bound.remove((key, sent))


@pytest.mark.row("J12")
def test_any_history_of_bindings_is_at_the_upstream_what_rabbitmq_would_have_bound(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        catalog = Catalog(routes=False)
        catalog.apply_all([VhostPut("v"), ExchangePut("v", "x", "topic")])
        catalog.apply_all([QueuePut("v", name, id, 0) for id, name in enumerate("abc", 1)])
        # An internal exchange has a binding that came from its broker, and no other broker has it.
        catalog.apply_all([ExchangePut("v", f"from {name}", "fanout") for name in ("c1", "up")])
        model = OneByOne(chance.randrange(4))
        vhost = catalog.vhosts["v"]
        for step in range(chance.randrange(25)):
            known = list(vhost.bindings_from("x"))
            if known and chance.random() < 0.4:
                gone = chance.choice(known)
                catalog.apply(
                    BindingDelete("v", "x", gone.kind, gone.destination, gone.routing_key,
                                  gone.arguments)
                )  # fmt: skip
                model.hear(False, gone.routing_key, gone.arguments, gone.destination)
            elif chance.random() < 0.1 and "a" in vhost.queues:
                for gone in list(vhost.bindings_to("queue", "a")):
                    model.hear(False, gone.routing_key, gone.arguments, "a")
                catalog.apply(QueueDelete("v", "a"))
            else:
                key, arguments = chance.choice(["k", "l.*"]), chance.choice([{}, {"a": 1, "b": 2}])
                kind, name = "queue", chance.choice("abc")
                if chance.random() < 0.4:
                    kind, name = "exchange", chance.choice(["from c1", "from up"])
                    arguments = arguments | came(name[5:], hops=chance.randrange(1, 4))
                put = BindingPut("v", "x", kind, name, key, arguments)
                if not vhost.has_binding(put):
                    catalog.apply(put)
                    if vhost.has_binding(put):
                        model.hear(True, key, arguments, name)
            bindings = wanted(vhost.bindings_from("x"))
            assert bindings is not None
            found = list(at_upstream(bindings, HERE, UPSTREAM, model.max_hops))
            shown = [(each.key, decode_table(each.arguments)) for each in found]
            for each in model.bound:
                assert each in shown, (history, step)
            assert len(shown) == len(model.bound), (history, step)


def wanted(puts: Iterable[BindingPut]) -> list[Binding] | None:
    """Return what is wanted, read in parts of three; None if there are too many."""
    found, left = Wanted(), iter(puts)
    while part := list(islice(left, 3)):
        if not found.add(part):
            return None
    made = list(found.in_order())
    assert made == sorted(set(made), key=lambda each: (each.key, each.arguments))
    return made


@pytest.mark.row("J12")
def test_too_many_bindings_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def puts(count: int, size: int = 1) -> list[BindingPut]:
        return [BindingPut("v", "x", "queue", "q", "k" * size, {"n": n}) for n in range(count)]

    monkeypatch.setattr(upstream_bindings, "BINDINGS_MAX", 10)
    monkeypatch.setattr(upstream_bindings, "BYTES_MAX", 1000)
    assert len(wanted(puts(10)) or []) == 10
    assert wanted(puts(11)) is None
    assert wanted(puts(5, 250)) is None
    unwritable = [BindingPut("v", "x", "queue", "q", "k", {"n": 1 << 70}), *puts(2)]
    assert len(wanted(unwritable) or []) == 2
    order = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    same = [BindingPut("v", "x", "queue", name, "k", given) for name in "ab" for given in order]
    assert len(wanted(same) or []) == 1
