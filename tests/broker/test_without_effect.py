"""What is accepted and does nothing is said by name, and what does something is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmq.broker.controller import policies, without_effect
from shardmq.broker.controller.without_effect import sentences
from shardmq.broker.model.arguments import AT_DEADLINE, DEADLINE, DEFINITION, NUMBER, TABLE, WHEN_GONE
from shardmq.broker.model.changes import ParameterPut, VhostPut
from shardmq.broker.shared.control import QueueDeclare

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
    for path in (str(found.relative_to(SOURCE)) for found in (SOURCE / folder).rglob("*.py*"))
    if path.endswith((".py", ".pyx")) and path not in TABLES
}
# Read under another spelling than in quotes with x-.
READ_OTHERWISE = {
    "alternate-exchange", "delayed-message", "hash-header", "x-queue-type", "routing-key", "queue-type",
    NUMBER, DEFINITION, WHEN_GONE, DEADLINE, AT_DEADLINE,
}  # fmt: skip


def has_reader(argument: str) -> bool:
    return any(f'"{argument}"' in text for text in ACTING.values())


@pytest.mark.parametrize("name", sorted(TABLE.queue))
def test_an_argument_of_a_queue_acts_or_is_said_to_have_no_effect(name: str) -> None:
    if name in READ_OTHERWISE:
        return
    assert has_reader(name) != bool(TABLE.queue[name].no_effect)


@pytest.mark.parametrize("name", sorted(TABLE.keys))
def test_a_key_of_a_policy_acts_or_is_said_to_have_no_effect(name: str) -> None:
    if name in READ_OTHERWISE:
        return
    assert has_reader(f"x-{name}") != (name in TABLE.keys_without_effect)


def test_each_component_that_nobody_reads_is_said_to_have_no_effect() -> None:
    assert set(without_effect.PARAMETERS) == policies.FREE_COMPONENTS - {policies.STREAM}


def test_the_sentence_names_what_and_where_and_why() -> None:
    asks = [
        ParameterPut("/", "shovel", "move", {}),
        ParameterPut("v", "policy", "mirrored", {"pattern": "", "definition": {"ha-mode": "all", "max-length": 5}}),
        QueueDeclare("/", "q", True, False, False, {"x-queue-type": "quorum", "x-max-length": 5}),
        VhostPut("v", default_queue_type="quorum"),
    ]
    assert sentences(asks) == [
        "default queue type quorum of vhost 'v' is kept without effect: the queue is durable and on this host alone: "
        "it has no replicas",
        "parameter shovel of 'move' in vhost '/' is kept without effect: there are no shovels: no message is moved",
        "policy key ha-mode of policy 'mirrored' in vhost 'v' is kept without effect: there is one host: queues have "
        "no replicas and no leader to place",
        "queue type quorum of queue 'q' in vhost '/' is kept without effect: the queue is durable and on this host "
        "alone: it has no replicas",
    ]


def test_a_long_list_gives_one_sentence_for_each_row() -> None:
    asks = [QueueDeclare("/", f"q{number}", True, False, False, {"x-queue-mode": "lazy"}) for number in range(1000)]
    [said] = sentences(asks)
    assert said.startswith("argument x-queue-mode of queue 'q0' in vhost '/' and 999 more is kept without effect")


def test_what_acts_is_not_warned_of() -> None:
    acting = {name: 5 for name, row in TABLE.queue.items() if not row.no_effect}
    assert sentences([QueueDeclare("/", "q", True, False, False, acting | {"x-queue-type": "stream"})]) == []
