"""A locator places a new queue at its client's node, or where the fewest queues are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.requests import SuperStreamDeclare
from shardmq.broker.model.changes import DRAINED_NODES, ParameterPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import NodeShards, place
from shardmq.broker.shared.control import QueueDeclare, QueueRemove
from shardmq.cluster.records import DOORS_PER_NODE
from tests.stream_exchanges.test_shard_sets import World

NEW, OLD = "x-queue-leader-locator", "x-queue-master-locator"
NODES = [NodeShards(number, f"n{number}", (2 * number, 2 * number + 1)) for number in range(3)]


class Cluster(World):
    """The controller's decisions in a cluster of three nodes with two shards each."""

    def __init__(self) -> None:
        super().__init__(nodes=NODES)

    def declare_queue(
        self,
        name: str,
        client_at: int | None,
        asked_at: str = "",
        exclusive: bool = False,
        **arguments: Any,
    ) -> int:
        """Declare a queue and return the number of its node."""
        owner = "" if client_at is None else f"{client_at * DOORS_PER_NODE + 1}.5.7"
        named = {key.replace("_", "-"): value for key, value in arguments.items()}
        ask = QueueDeclare("/", name, True, False, exclusive, named)
        self._apply(self.decisions.decide(ask, owner, asked_at).changes)
        return self.vhost.queues[name].shard // 2

    def set_policy(self, **definition: Any) -> None:
        self.policy(pattern="^", **definition)


@pytest.mark.row("C1.14", "K9")
@pytest.mark.parametrize("name", [NEW, OLD])
def test_client_local_is_the_node_whose_front_door_was_asked(name: str) -> None:
    cluster = Cluster()
    for at in range(3):
        for queue in range(8):
            found = cluster.declare_queue(f"{at}-{queue}", at, **{name: "client-local"})
            assert found == at
    assert len({queue.shard for queue in cluster.vhost.queues.values()}) == 6


@pytest.mark.parametrize("arguments", [{}, {NEW: "balanced"}, {OLD: "random"}])
def test_an_exclusive_queue_is_at_the_node_of_its_connection(arguments: dict[str, Any]) -> None:
    cluster = Cluster()
    for at in range(3):
        for queue in range(8):
            name = f"{at}-{queue}"
            assert cluster.declare_queue(name, at, exclusive=True, **arguments) == at
    cluster.ask(ParameterPut("", DRAINED_NODES, "n1", True))
    assert {cluster.declare_queue(f"q{n}", 1, exclusive=True) for n in range(30)} == {0, 2}


@pytest.mark.row("C1.14", "K9")
def test_over_http_client_local_is_the_node_that_was_asked() -> None:
    cluster = Cluster()
    for at in range(3):
        assert cluster.declare_queue(f"q{at}", None, f"n{at}", **{NEW: "client-local"}) == at


def test_the_partitions_of_a_super_stream_have_locators_too() -> None:
    cluster = Cluster()
    arguments = {"x-queue-type": "stream", NEW: "client-local"}
    ask = SuperStreamDeclare("/", "s", ["a", "b", "c"], arguments)
    cluster._apply(cluster.decisions.decide(ask, "", "n2").changes)
    assert {queue.shard // 2 for queue in cluster.vhost.queues.values()} == {2}


@pytest.mark.row("C1.14", "K9", "C3.2")
@pytest.mark.parametrize(
    ("arguments", "definition", "found"),
    [
        ({}, {}, "name"),
        ({NEW: "client-local"}, {}, "near"),
        ({NEW: "balanced"}, {}, "fewest"),
        ({NEW: "random"}, {}, "fewest"),
        ({NEW: "least-leaders"}, {}, "fewest"),
        ({OLD: "min-masters"}, {}, "fewest"),
        ({OLD: "random"}, {}, "name"),
        ({}, {"queue-leader-locator": "client-local"}, "near"),
        ({}, {"queue-master-locator": "client-local"}, "near"),
        ({}, {"queue-master-locator": "min-masters"}, "fewest"),
        ({NEW: "balanced"}, {"queue-leader-locator": "client-local"}, "fewest"),
        ({OLD: "random"}, {"queue-master-locator": "client-local"}, "name"),
        ({OLD: "client-local"}, {"queue-leader-locator": "balanced"}, "fewest"),
    ],
)
def test_the_argument_counts_before_the_policy_and_the_newer_name_before_the_older(
    arguments: dict[str, Any], definition: dict[str, Any], found: str
) -> None:
    cluster = Cluster()
    for queue in range(6):  # nodes 0 and 1 have three queues each
        cluster.declare_queue(f"there-{queue}", queue % 2, **{NEW: "client-local"})
    if definition:
        cluster.set_policy(**definition)
    # By its name the queue would be at node 0, and its client is at node 1.
    name = next(f"q{n}" for n in range(100) if place("/", f"q{n}", 6) // 2 == 0)
    at = cluster.declare_queue(name, 1, **arguments)
    assert at == {"name": 0, "near": 1, "fewest": 2}[found]


@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("zz", "invalid_queue_locator_arg"),
        (3, "{unacceptable_type,signedint}"),
        (True, "{unacceptable_type,bool}"),
    ],
)
def test_a_wrong_locator_is_refused_in_rabbitmqs_words(name: str, value: Any, wrong: str) -> None:
    with pytest.raises(Refusal) as refused:
        Cluster().declare_queue("q", 0, **{name: value})
    assert (refused.value.code, refused.value.text) == (
        406, f"invalid arg '{name}' for queue 'q' in vhost '/': {wrong}"
    )  # fmt: skip


def test_a_client_of_a_node_that_is_drained_gets_a_queue_elsewhere() -> None:
    cluster = Cluster()
    cluster.ask(ParameterPut("", DRAINED_NODES, "n1", True))
    found = {cluster.declare_queue(f"q{n}", 1, **{NEW: "client-local"}) for n in range(30)}
    assert found == {0, 2}
    assert {cluster.declare_queue(f"r{n}", 1, **{NEW: "balanced"}) for n in range(30)} == {0, 2}


@given(
    st.lists(
        st.tuples(st.sampled_from(["balanced", "name", "remove"]), st.integers(0, 30)), max_size=40
    )
)
def test_after_any_history_balanced_is_the_shard_with_fewest_queues_of_such_a_node(
    steps: list[tuple[str, int]],
) -> None:
    cluster = Cluster()
    for at, (what, number) in enumerate(steps):
        before = Counter(queue.shard for queue in cluster.vhost.queues.values())
        if what == "remove":
            for name in [*cluster.vhost.queues][number : number + 1]:
                cluster.ask(QueueRemove("/", name, if_unused=False, if_empty=False))
            continue
        cluster.declare_queue(f"q{at}", 0, **({NEW: "balanced"} if what == "balanced" else {}))
        if what == "balanced":
            shard = cluster.vhost.queues[f"q{at}"].shard
            loads = [sum(before[each] for each in node.shards) for node in NODES]
            assert loads[shard // 2] == min(loads)
            assert before[shard] == min(before[each] for each in NODES[shard // 2].shards)
