"""What is accepted and does nothing is said by name, and what does something is not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller import policies, without_effect
from shardmq.broker.controller.without_effect import LINE_S, LINES_MAX, EffectWarnings, sentences
from shardmq.broker.model.arguments import (
    AT_DEADLINE,
    DEADLINE,
    DEFINITION,
    MIN_IN_SYNC,
    NO_REPLICAS,
    NUMBER,
    REPLICAS,
    TABLE,
    WHEN_GONE,
)
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, ParameterPut, QueuePut, ShardOf, VhostPut
from shardmq.broker.model.federation import POLICY_KEYS
from shardmq.broker.shared.control import ExchangeDeclare, QueueDeclare
from shardmq.cluster.replicas import Replicas
from tests.topology.test_authority import World, world

__all__ = ["world"]  # a fixture

SOURCE = Path(__file__).resolve().parents[2]
# Where names are checked and listed; whoever acts on one reads it elsewhere.
TABLES = (
    "broker/model/arguments.py",
    "broker/controller/policies.py",
    "broker/controller/without_effect.py",
)
# Names that a policy merges into the argument `x-` + name, or that are read themselves.
ACTING = {
    path: (SOURCE / path).read_text()
    for folder in ("broker", "shardd")
    for path in (str(found.relative_to(SOURCE)) for found in (SOURCE / folder).rglob("*.p[xy]*"))
    if path.endswith((".py", ".pyx", ".pxi")) and path not in TABLES
}
# Read under another spelling than in quotes with x-.
READ_OTHERWISE = {
    "alternate-exchange", "delayed-message", "hash-header", "x-queue-type", "routing-key",
    "queue-type", REPLICAS, MIN_IN_SYNC, NUMBER, DEFINITION, WHEN_GONE, DEADLINE, AT_DEADLINE,
    *POLICY_KEYS,
}  # fmt: skip

ACTS_OR_NOT = (
    "Some file of broker or shardd must name the argument in quotes (limits_of in "
    "shardd/queues/limits.py), or its row in broker/model/arguments.py says in `no_effect` why "
    "nothing does; not both. READ_OTHERWISE has other spellings."
)

COPIES = "no shard of this broker has copies on other nodes"


def has_reader(argument: str) -> bool:
    return any(f'"{argument}"' in text for text in ACTING.values())


@pytest.mark.parametrize("name", sorted(TABLE.queue))
def test_an_argument_of_a_queue_acts_or_is_said_to_have_no_effect(name: str) -> None:
    if name in READ_OTHERWISE:
        return
    assert has_reader(name) != bool(TABLE.queue[name].no_effect), ACTS_OR_NOT


@pytest.mark.parametrize("name", sorted(TABLE.keys))
def test_a_key_of_a_policy_acts_or_is_said_to_have_no_effect(name: str) -> None:
    if name in READ_OTHERWISE:
        return
    assert has_reader(f"x-{name}") != (name in TABLE.keys_without_effect), ACTS_OR_NOT


def test_each_component_that_nobody_reads_is_said_to_have_no_effect() -> None:
    assert set(without_effect.PARAMETERS) == policies.FREE_COMPONENTS - {policies.STREAM}


def test_the_sentence_names_what_and_where_and_why() -> None:
    asks = [
        ParameterPut("/", "federation-upstream", "move", {"uri": "amqp://", "bind-nowait": True}),
        ParameterPut("/", "federation-upstream-set", "set", [{"upstream": "move"}]),
        ParameterPut("/", "federation", "local-username", "u"),
        ParameterPut(
            "/",
            "policy",
            "queues",
            {"pattern": "", "definition": {"federation-upstream": "u"}, "apply-to": "queues"},
        ),
        ParameterPut(
            "/", "policy", "all", {"pattern": "", "definition": {"federation-upstream-set": "all"}}
        ),
        ParameterPut(
            "v",
            "policy",
            "streams",
            {"pattern": "", "definition": {"federation-upstream": "u"}, "apply-to": "streams"},
        ),
        ParameterPut(
            "v",
            "policy",
            "mirrored",
            {"pattern": "", "definition": {"ha-mode": "all", "max-length": 5}},
        ),
        QueueDeclare("/", "q", True, False, False, {"x-queue-type": "quorum", "x-max-length": 5}),
        VhostPut("v", default_queue_type="quorum"),
    ]
    assert sentences(asks) == [
        "default queue type quorum of vhost 'v' is kept without effect: " + COPIES,
        "key bind-nowait of federation-upstream 'move' in vhost '/' is kept without effect: "
        "a link has one answer for each hundred bindings",
        "parameter federation of 'local-username' in vhost '/' is kept without effect: nothing "
        "reads it: each upstream is a parameter federation-upstream",
        "policy key federation-upstream of policy 'streams' in vhost 'v' is kept without effect: "
        "streams are not federated",
        "policy key ha-mode of policy 'mirrored' in vhost 'v' is kept without effect: "
        + NO_REPLICAS,
        "queue type quorum of queue 'q' in vhost '/' is kept without effect: " + COPIES,
    ]


def test_a_long_list_gives_one_sentence_for_each_row() -> None:
    asks = [
        QueueDeclare("/", f"q{number}", True, False, False, {"x-queue-mode": "lazy"})
        for number in range(1000)
    ]
    [said] = sentences(asks)
    assert said.startswith(
        "argument x-queue-mode of queue 'q0' in vhost '/' and 999 more is kept without effect"
    )


def test_what_exists_is_summed_up_whatever_way_it_came_and_shard_queues_are_left_out() -> None:
    catalog = Catalog()
    quorum = {"x-queue-type": "quorum"}
    part = ShardOf("e", 0)
    for change in (
        VhostPut("/", default_queue_type="quorum"),
        QueuePut("/", "q", 1, 0, arguments=quorum),
        QueuePut("/", "e-0", 2, 0, arguments=quorum, part=part),
        ExchangePut("/", "e", "x-random", arguments={"x-shards": 1, "x-shard-arguments": quorum}),
        ParameterPut("/", "federation", "s", {}),
    ):
        catalog.apply(change)
    summary = without_effect.Summary()
    for thing in without_effect.things(catalog):
        summary.add(thing)
    assert [text.partition(" is kept")[0] for text in summary.sentences()] == [
        "default queue type quorum of vhost '/'",
        "parameter federation of 's' in vhost '/'",
        "queue type quorum of exchange 'e' in vhost '/' and 1 more",
    ]


def test_a_flood_of_requests_does_not_fill_the_log_and_what_was_left_out_is_counted() -> None:
    lines, asks = (
        EffectWarnings(),
        [
            QueueDeclare("/", f"q{i}", True, False, False, {"x-queue-mode": "lazy"})
            for i in range(500)
        ],
    )
    said = [line for ask in asks for line in lines.of([ask], 0.0)]
    assert len(said) == LINES_MAX and "'q99'" in said[-1]
    left_out, sentence = lines.of(asks[:1], LINE_S)
    assert left_out == "400 warnings of what is kept without effect were left out"
    assert sentence.startswith("argument x-queue-mode of queue 'q0'")
    assert lines.of(asks[:1], 1000.0) == [sentence]


def test_names_that_anybody_makes_up_give_no_more_sentences() -> None:
    [said] = sentences([ParameterPut("/", policies.STREAM, f"made-up-{i}", 1) for i in range(50)])
    assert said == (
        "parameter stream of 'made-up-0' in vhost '/' and 49 more is kept without effect: "
        "nothing reads it"
    )


DECLARED: list[tuple[Any, str]] = [
    (QueueDeclare("/", "q", True, False, False, {"x-queue-type": "quorum"}),
     "queue type quorum of queue 'q'"),
    (QueueDeclare("/", "q", False, True, True, {"x-queue-mode": "lazy"}),
     "argument x-queue-mode of queue 'q'"),
    (
        ExchangeDeclare("/", "e", "x-random", True, False, False,
                        {"x-shards": 1, "x-shard-arguments": {"x-queue-type": "quorum"}}),
        "queue type quorum of exchange 'e'",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "said"), DECLARED)
async def test_a_declare_of_a_client_that_makes_something_is_logged_and_a_repeated_one_is_not(
    world: World, caplog: pytest.LogCaptureFixture, ask: Any, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (await world.ask(ask)).code == 0
    assert [record.getMessage().partition(" in vhost")[0] for record in caplog.records] == [said]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert (await world.ask(ask)).code == 0
        assert (
            await world.ask(msgspec.structs.replace(ask, auto_delete=not ask.auto_delete))
        ).code == 406
    assert caplog.records == []


async def test_a_queue_that_the_server_names_is_logged_by_that_name(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = await world.ask(QueueDeclare("/", "", False, True, True, {"x-queue-mode": "lazy"}))
    [record] = caplog.records
    assert (
        f"of queue '{answer.result['name']}' in vhost '/' is kept without effect"
        in record.getMessage()
    )


def test_what_acts_is_not_warned_of() -> None:
    acting = {name: 5 for name, row in TABLE.queue.items() if not row.no_effect}
    ask = QueueDeclare("/", "q", True, False, False, acting | {"x-queue-type": "stream"})
    assert sentences([ask], Replicas(5)) == []
    quorum = QueueDeclare("/", "q", True, False, False, {"x-queue-type": "quorum"})
    vhost = VhostPut("v", default_queue_type="quorum", replicas=2, min_in_sync=2)
    assert sentences([quorum, vhost], Replicas(2, 2)) == []


def test_more_copies_than_any_shard_has_are_named() -> None:
    sized = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 5}
    definition = {"replicas": 3, "min-in-sync": 3, "initial-cluster-size": 7}
    asks = [
        QueueDeclare("/", "q", True, False, False, sized),
        ExchangeDeclare("/", "e", "x-random", True, False, False,
                        {"x-shards": 1, "x-shard-arguments": {"x-initial-cluster-size": 4}}),
        ParameterPut("/", "policy", "p", {"pattern": "", "definition": definition}),
        VhostPut("v", replicas=4, min_in_sync=3),
    ]  # fmt: skip
    more = "copies are asked for, and no shard has more than 3"
    in_sync = "3 nodes in sync for a confirm are asked for, and no shard has more than 2"
    assert sentences(asks, Replicas(3)) == [
        f"argument x-initial-cluster-size of exchange 'e' in vhost '/' is kept without effect: 4 "
        f"{more}",
        f"argument x-quorum-initial-group-size of queue 'q' in vhost '/' is kept without effect: 5 "
        f"{more}",
        "policy key initial-cluster-size of policy 'p' in vhost '/' is kept without effect: 7 "
        f"{more}",
        f"policy key min-in-sync of policy 'p' in vhost '/' is kept without effect: {in_sync}",
        f"setting min_in_sync of vhost 'v' is kept without effect: {in_sync}",
        f"setting replicas of vhost 'v' is kept without effect: 4 {more}",
    ]
    alone = sentences([QueueDeclare("/", "q", True, False, False, {"x-initial-cluster-size": 1})])
    assert alone == []
