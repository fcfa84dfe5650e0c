"""A queue is placed on a shard with about as many copies as it asks for, if there is one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.cluster_view import KnownNode
from shardmq.broker.controller.decisions.moves import unfit
from shardmq.broker.controller.moving.relocating import Relocating
from shardmq.broker.controller.moving.spread import Planned, evened_out, spread
from shardmq.broker.controller.requests import Forget, Move, MoveOn
from shardmq.broker.model.changes import BEGUN, DRAINED_NODES, ParameterPut, QueuePut, VhostPut
from shardmq.broker.model.copies import asked_by
from shardmq.broker.routing.placement import NodeShards, place
from shardmq.broker.shared.control import ExchangeDeclare, QueueDeclare
from shardmq.cluster.records import DOORS_PER_NODE
from shardmq.cluster.replicas import REPLICAS_MAX, Replicas, ReplicasOfShards
from tests.stream_exchanges.test_shard_sets import World

# Each node has four shards: one copy, two, the broker's three, and five.
KINDS = (Replicas(1), Replicas(2), Replicas(3), Replicas(5, 4))
DEFAULT = KINDS[2]
NODES = [NodeShards(n, f"n{n}", tuple(range(4 * n, 4 * n + 4))) for n in range(3)]
IN_SETS = {4 * n + at: KINDS[at] for n in range(3) for at in (0, 1, 3)}
SIZE, CLUSTER_SIZE = "x-quorum-initial-group-size", "x-initial-cluster-size"


class Cluster(World):
    """The controller's decisions in a cluster of three nodes with sets of shards."""

    def __init__(self, in_sets: dict[int, Replicas] | None = None) -> None:
        super().__init__(nodes=NODES)
        self.has(IN_SETS if in_sets is None else in_sets)

    def has(self, in_sets: dict[int, Replicas]) -> None:
        self.placement.has_copies(ReplicasOfShards(in_sets, DEFAULT))

    def declared(self, name: str, at: int = 0, exclusive: bool = False, **more: Any) -> QueuePut:
        arguments = {key.replace("_", "-"): value for key, value in more.items()}
        ask = QueueDeclare("/", name, True, False, exclusive, arguments)
        self._apply(self.decisions.decide(ask, f"{at * DOORS_PER_NODE + 1}.5.7", "").changes)
        return self.vhost.queues[name]

    def copies_of(self, queue: QueuePut) -> Replicas:
        return self.placement.replicas.of(queue.shard)

    def set_vhost(self, replicas: int = 0, min_in_sync: int = 0) -> None:
        self._apply([VhostPut("/", replicas=replicas, min_in_sync=min_in_sync)])

    def set_policy(self, name: str = "p", **definition: Any) -> None:
        named = {key.replace("_", "-"): value for key, value in definition.items()}
        value = {"pattern": "^", "definition": named, "apply-to": "queues"}
        self._apply([ParameterPut("/", "policy", name, value)])


@pytest.mark.row("C1.14", "K9")
@pytest.mark.parametrize(
    ("arguments", "policy", "vhost", "found"),
    [
        ({}, {}, {}, 3),
        ({SIZE: 1}, {}, {}, 1),
        ({SIZE: 2}, {}, {}, 2),
        ({SIZE: 4}, {}, {}, 5),
        ({SIZE: 9}, {}, {}, 5),
        ({CLUSTER_SIZE: 2}, {}, {}, 2),
        ({SIZE: 2, CLUSTER_SIZE: 5}, {}, {}, 2),
        ({CLUSTER_SIZE: 2, "x-queue-type": "stream"}, {}, {}, 2),
        ({}, {"replicas": 2}, {}, 2),
        ({}, {"initial_cluster_size": 2}, {}, 2),
        ({}, {"initial_cluster_size": 0}, {}, 3),
        ({}, {"replicas": 2, "initial_cluster_size": 5}, {}, 2),
        ({}, {"replicas": "2"}, {"replicas": 1}, 1),
        ({SIZE: 5}, {"replicas": 2}, {"replicas": 1}, 5),
        ({}, {"replicas": 2}, {"replicas": 1}, 2),
        ({}, {}, {"replicas": 1}, 1),
        ({}, {"min_in_sync": 4}, {}, 5),
        ({}, {}, {"min_in_sync": 3}, 5),
        ({}, {"min_in_sync": 3}, {"min_in_sync": 1}, 5),
        ({}, {"min_in_sync": 2}, {"min_in_sync": 3}, 3),
        ({SIZE: 2}, {"min_in_sync": 3}, {}, 3),  # both of two, so the shard with 2/1 is too weak
        ({"x-queue-type": "quorum"}, {}, {}, 3),
        ({"x-queue-type": "quorum"}, {}, {"replicas": 1}, 1),
    ],
)
def test_who_says_how_many_copies(
    arguments: dict[str, Any], policy: dict[str, Any], vhost: dict[str, int], found: int
) -> None:
    cluster = Cluster()
    cluster.set_vhost(**vhost)
    if policy:
        cluster.set_policy(**policy)
    assert cluster.copies_of(cluster.declared("q", **arguments)).count == found


def test_a_quorum_queue_has_copies_where_the_broker_has_none_in_general() -> None:
    cluster = Cluster()
    cluster.placement.has_copies(ReplicasOfShards({1: Replicas(3), 6: Replicas(2)}, Replicas(1)))
    assert cluster.declared("q", x_queue_type="quorum").shard == 1
    assert cluster.declared("two", x_queue_type="quorum", **{SIZE: 2}).shard == 6
    assert cluster.copies_of(cluster.declared("plain")).count == 1


def test_without_sets_names_choose_as_ever_whatever_is_asked_for() -> None:
    cluster = Cluster({})
    for number in range(40):
        name = f"q{number}"
        found = cluster.declared(name, **{SIZE: 1 + number % 9})
        assert found.shard == place("/", name, 12)


NUMBERS = st.integers(1, REPLICAS_MAX).flatmap(
    lambda count: st.integers(0, count).map(lambda least: Replicas(count, least))
)
LOCATORS = st.sampled_from([None, "client-local", "balanced"])


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(0, 11), NUMBERS, max_size=8),
    st.frozensets(st.sampled_from(["n0", "n1", "n2"]), max_size=2),
    st.lists(
        st.tuples(st.none() | st.integers(1, 9), LOCATORS, st.integers(0, 2), st.booleans()),
        max_size=12,
    ),
    st.integers(0, 7),
)
def test_no_queue_has_fewer_copies_than_asked_for_if_a_shard_has_enough(
    in_sets: dict[int, Replicas],
    drained: frozenset[str],
    declares: list[tuple[int | None, str | None, int, bool]],
    of_vhost: int,
) -> None:
    cluster = Cluster(in_sets)
    cluster.set_vhost(of_vhost)
    for node in drained:
        cluster.ask(ParameterPut("", DRAINED_NODES, node, True))
    usable = [s for node in NODES if node.name not in drained for s in node.shards]
    numbers = cluster.placement.replicas
    shards_before: dict[str, int] = {}
    for index, (size, locator, at, exclusive) in enumerate(declares):
        arguments: dict[str, Any] = {} if size is None else {SIZE: size}
        if locator is not None:
            arguments["x-queue-leader-locator"] = locator
        queue = cluster.declared(f"q{index}", at, exclusive, **arguments)
        assert queue.shard in usable
        near = [shard for shard in usable if shard // 4 == at]
        there = Counter(shards_before.values())
        shards_before[queue.name] = queue.shard
        if exclusive:
            assert not near or queue.shard in near
            continue
        wanted = min(REPLICAS_MAX, size or of_vhost or DEFAULT.count)
        assert asked_by(queue, cluster.vhost, DEFAULT).count == wanted
        has = numbers.of(queue.shard)
        enough = [numbers.of(s).count for s in usable if numbers.of(s).count >= wanted]
        if in_sets:
            most = max(numbers.of(s).count for s in usable)
            assert has.count >= wanted if enough else has.count == most
        # The locator and the name choose among the shards of the same kind.
        alike = [
            s for s in usable if not in_sets or _kind(numbers, s) == _kind(numbers, queue.shard)
        ]
        if locator == "client-local":
            alike = [s for s in alike if s in near] or alike
        if locator != "balanced":
            assert queue.shard == alike[place("/", queue.name, len(alike))]
        else:
            by_node = Counter({s // 4: 0 for s in alike})
            for shard in alike:
                by_node[shard // 4] += there[shard]
            assert by_node[queue.shard // 4] == min(by_node.values())
            level = [there[s] for s in alike if s // 4 == queue.shard // 4]
            assert there[queue.shard] == min(level)
    cluster.has({0: Replicas(7)})
    cluster.set_vhost(1)
    assert {name: queue.shard for name, queue in cluster.vhost.queues.items()} == shards_before


def _kind(numbers: ReplicasOfShards, shard: int) -> tuple[int, int]:
    return numbers.of(shard).count, numbers.of(shard).least


# -- exchanges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_the_policy_of_an_exchange_is_for_its_shard_queues(replicas: int) -> None:
    cluster = Cluster()
    cluster.ask(ExchangeDeclare("/", "e", "x-consistent-hash", True, False, False, {}))
    cluster.policy(
        pattern="^e$", **{"shards-per-node": 2, "routing-key": "1", "replicas": replicas}
    )
    queues = cluster.vhost.parts("e")
    assert len(queues) == 6
    wanted = Replicas(replicas).count if replicas < 4 else 5
    assert {cluster.copies_of(queue).count for queue in queues} == {wanted}
    assert Counter(queue.shard // 4 for queue in queues) == {0: 2, 1: 2, 2: 2}
    assert {asked_by(queue, cluster.vhost, DEFAULT).count for queue in queues} == {replicas}


def test_the_arguments_of_shard_queues_count_before_the_policies() -> None:
    cluster = Cluster()
    cluster.set_policy(replicas=1)
    arguments = {"x-shards": 6, "x-shard-arguments": {SIZE: 2}}
    cluster.ask(ExchangeDeclare("/", "e", "x-consistent-hash", True, False, False, arguments))
    shards = [queue.shard for queue in cluster.vhost.parts("e")]
    assert sorted(shards) == [1, 1, 5, 5, 9, 9]


def test_messages_that_an_exchange_delays_have_the_copies_of_its_policy() -> None:
    cluster = Cluster()
    cluster.ask(ExchangeDeclare("/", "e", "direct", True, False, False, {}))
    cluster.policy(pattern="^e$", **{"delayed-message": True, "replicas": 2})
    (queue,) = cluster.vhost.hidden_queues_of("e")
    assert cluster.copies_of(queue).count == 2


# -- moves -----------------------------------------------------------------------------------------


def test_a_queue_that_loses_its_new_place_gets_another_one_that_suits_it() -> None:
    cluster = Cluster()
    queue = cluster.declared("q", **{SIZE: 2})
    to = next(shard for shard in (1, 5, 9) if shard != queue.shard)
    cluster.ask(Move("/", "q", to))
    moving = cluster.vhost.queues["q"].moving
    assert moving is not None
    cluster.ask(MoveOn("/", "q", moving.id, BEGUN))
    assert cluster.vhost.queues["q"].shard == to
    cluster.ask(Forget(frozenset((to,))))
    found = cluster.vhost.queues["q"]
    assert found.moving is not None and cluster.copies_of(found).count == 2


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 3]), st.booleans()), max_size=40)
)
def test_rebalancing_brings_queues_to_shards_that_suit_them_and_evens_those_out(
    rows: list[tuple[int, int, bool]],
) -> None:
    kinds = {1: (0, 1), 2: (2, 3, 4), 3: (5,)}
    asks = {f"q{at}": kinds[kind] for at, (_, kind, _) in enumerate(rows)}
    queues = [
        QueuePut(
            "/", f"q{at}", at + 1, shard, arguments={"x-queue-type": "stream"} if stays else {}
        )
        for at, (shard, _, stays) in enumerate(rows)
    ]
    planned = spread(queues, range(6), lambda queue: asks[queue.name])
    to = {each.queue.name: each.to for each in planned}
    assert len(to) == len(planned)
    after = {queue.name: to.get(queue.name, queue.shard) for queue in queues}
    for queue in queues:
        if unfit(queue):
            assert queue.name not in to
        else:
            assert after[queue.name] in asks[queue.name]
    for kind in kinds.values():
        there = [queue for queue in queues if after[queue.name] in kind]
        counts = Counter(dict.fromkeys(kind, 0)) + Counter(after[queue.name] for queue in there)
        stay = Counter(after[queue.name] for queue in there if unfit(queue))
        if not stay:
            assert max(counts[s] for s in kind) - min(counts[s] for s in kind) <= 1
        assert evened_out([q for q in there if q.name not in to], []) == []


async def test_drains_and_rebalancings_keep_to_shards_that_suit_a_queue() -> None:
    cluster = Cluster()
    for number in range(30):
        cluster.declared(f"q{number}", **({SIZE: number % 3} if number % 3 else {}))
    view: Any = SimpleNamespace(nodes=[KnownNode(n.number, n.name, n.shards, True) for n in NODES])
    authority: Any = SimpleNamespace(
        places=cluster.placement.without(frozenset()),
        asked=lambda queue: asked_by(queue, cluster.vhost, DEFAULT),
    )
    no_shards: Any = None
    relocating = Relocating(cluster.catalog, authority, no_shards, view)

    def carry_out(planned: Planned) -> None:
        assert not unfit(planned.queue)
        cluster._apply([msgspec.structs.replace(planned.queue, shard=planned.to)])

    cluster.ask(ParameterPut("", DRAINED_NODES, "n1", True))
    authority.places = cluster.placement.without({"n1"})
    left = sum(queue.shard // 4 == 1 for queue in cluster.vhost.queues.values())
    for _ in range(left):
        planned = relocating._of_drained(of_streams=False)
        assert planned is not None and planned.to // 4 != 1
        assert cluster.copies_of(planned.queue) == cluster.placement.replicas.of(planned.to)
        carry_out(planned)
    assert left and relocating._of_drained(of_streams=False) is None
    cluster.set_policy(replicas=5)
    for planned in relocating.plan():
        carry_out(planned)
    for queue in cluster.vhost.queues.values():
        wanted = queue.arguments.get(SIZE, 5)
        assert queue.shard // 4 != 1 and cluster.copies_of(queue).count == wanted
