"""Every shard has one owner, and loads differ by one at most.

As few shards as possible move.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.groups.groups import (
    CLOSE,
    GIVE,
    LEAST,
    RANDOM,
    TAKE,
    Assignment,
    GroupConsumer,
    GroupOrder,
    Groups,
    InUse,
    VirtualQueueName,
    assign,
)
from shardmq.broker.shared.control import ConsumeTerms, node_of
from shardmq.cluster.records import DOORS_PER_NODE

NAME = VirtualQueueName("/", "orders")


def consumer(number: int) -> GroupConsumer:
    return GroupConsumer(number % 3, 1, number)


class Act(NamedTuple):
    """`what` happens to `who`; `at` chooses among what there is."""

    what: str
    who: int
    at: int


class FrontDoors:
    """Front doors that follow orders in order for each consumer, at any time.

    They give up a shard when they are told.
    """

    def __init__(self) -> None:
        self.has: dict[Assignment, GroupConsumer] = {}
        self.giving_up: list[tuple[GroupConsumer, Assignment]] = []
        self.on_their_way: dict[GroupConsumer, list[GroupOrder]] = {}

    def send(self, orders: list[GroupOrder]) -> None:
        for order in orders:
            self.on_their_way.setdefault(order.consumer, []).append(order)

    def receive(self, who: GroupConsumer) -> None:
        for order in self.on_their_way.pop(who, []):
            if order.kind == GIVE:
                assert order.assignment not in self.has, (
                    f"{order} while {self.has[order.assignment]} has it"
                )
                self.has[order.assignment] = order.consumer
            elif order.kind == TAKE:
                assert self.has.get(order.assignment) == order.consumer, (
                    f"{order}, who does not have it"
                )
                assert (order.consumer, order.assignment) not in self.giving_up, f"{order} twice"
                self.giving_up.append((order.consumer, order.assignment))

    def die(self, who: GroupConsumer) -> None:
        self.on_their_way.pop(who, None)
        self.has = {assignment: owner for assignment, owner in self.has.items() if owner != who}
        self.giving_up = [
            (owner, assignment) for owner, assignment in self.giving_up if owner != who
        ]


class History:
    def __init__(self, shards: int, affinity: bool) -> None:
        self.groups = Groups(lambda n: 0)
        self.groups.begin()
        self.doors = FrontDoors()
        self.shards = list(range(1, shards + 1))
        self.next_shard = shards + 1
        self.affinity = affinity
        self.consumers: dict[GroupConsumer, ConsumeTerms] = {}
        self.left: set[GroupConsumer] = set()

    def play(self, act: Act) -> None:
        getattr(self, act.what)(consumer(act.who), act.at)

    def join(self, who: GroupConsumer, at: int) -> None:
        if who in self.consumers or who in self.left:
            return
        terms = ConsumeTerms(priority=at % 2, affinity=self.affinity)
        self.doors.send(self.groups.join(who, NAME, terms, self.shards))
        self.consumers[who] = terms

    def leave(self, who: GroupConsumer, at: int) -> None:
        if self.consumers.pop(who, None) is not None:
            self.left.add(who)
            self.doors.send(self.groups.leave(who))
            if at % 2:  # nothing unacknowledged: it gives up by itself
                self.doors.receive(who)
                for assignment in [
                    assignment for assignment, owner in self.doors.has.items() if owner == who
                ]:
                    self._give_up(who, assignment)

    def die(self, who: GroupConsumer, at: int) -> None:
        self.consumers.pop(who, None)
        self.left.discard(who)
        self.doors.die(who)
        self.doors.send(self.groups.gone([who]))

    def receive(self, who: GroupConsumer, at: int) -> None:
        self.doors.receive(who)

    def settle(self, who: GroupConsumer, at: int) -> None:
        if self.doors.giving_up:
            self._give_up(*self.doors.giving_up[at % len(self.doors.giving_up)])

    def _give_up(self, who: GroupConsumer, assignment: Assignment) -> None:
        if (who, assignment) in self.doors.giving_up:
            self.doors.giving_up.remove((who, assignment))
        del self.doors.has[assignment]
        self.doors.send(self.groups.gave_up(who, assignment))

    def grow(self, who: GroupConsumer, at: int) -> None:
        self.shards.append(self.next_shard)
        self.next_shard += 1
        self.doors.send(self.groups.reshard(NAME, self.shards))

    def shrink(self, who: GroupConsumer, at: int) -> None:
        if len(self.shards) > 1:
            self.shards.pop(at % len(self.shards))
            self.doors.send(self.groups.reshard(NAME, self.shards))

    def come_to_rest(self) -> None:
        while self.doors.on_their_way or self.doors.giving_up:
            for who in list(self.doors.on_their_way):
                self.doors.receive(who)
            if self.doors.giving_up:
                self._give_up(*self.doors.giving_up[0])

    def active(self) -> list[GroupConsumer]:
        highest = max(terms.priority for terms in self.consumers.values())
        return [who for who, terms in self.consumers.items() if terms.priority == highest]


ACTS = ["join", "join", "leave", "die", "receive", "receive", "settle", "settle", "grow", "shrink"]


def histories() -> st.SearchStrategy[list[Act]]:
    return st.lists(
        st.builds(Act, st.sampled_from(ACTS), st.integers(0, 9), st.integers(0, 30)), max_size=60
    )


@given(st.integers(1, 12), st.booleans(), histories())
def test_never_two_owners_and_at_rest_every_shard_has_one_and_loads_differ_by_one(
    shards: int, affinity: bool, acts: list[Act]
) -> None:
    history = History(shards, affinity)
    for act in acts:
        history.play(act)
    history.come_to_rest()
    if not history.consumers:
        return
    active = history.active()
    loads = dict.fromkeys(active, 0)
    for owner in history.doors.has.values():
        loads[owner] += 1
    assert {assignment.queue for assignment in history.doors.has} == set(history.shards)
    assert max(loads.values()) - min(loads.values()) <= 1
    if affinity and len(active) >= len(history.shards):
        assignments = [
            sum(assignment.queue == queue for assignment in history.doors.has)
            for queue in history.shards
        ]
        assert sum(assignments) == len(active) and max(assignments) - min(assignments) <= 1
    else:
        assert len(history.doors.has) == len(history.shards)


@given(st.integers(1, 12), histories())
def test_of_those_who_are_gone_nothing_is_kept(shards: int, acts: list[Act]) -> None:
    history = History(shards, affinity=False)
    for act in acts:
        history.play(act)
    for who in [*history.consumers, *history.left]:
        history.die(who, 0)
    assert not history.groups.queues and not history.groups._names


def fewest_moves(
    assignments: list[Assignment],
    consumers: list[GroupConsumer],
    before: dict[Assignment, GroupConsumer],
) -> int:
    """Try every choice of who has one more than the others."""
    fewest, more = divmod(len(assignments), len(consumers))
    now = {
        each: sum(before.get(assignment) == each for assignment in assignments)
        for each in consumers
    }
    return min(
        len(assignments) - sum(min(now[each], fewest + (each in larger)) for each in consumers)
        for larger in combinations(consumers, more)
    )


@given(st.data(), st.integers(1, 10), st.integers(1, 6))
def test_as_few_shards_as_possible_move(data: st.DataObject, shards: int, count: int) -> None:
    assignments, consumers = (
        [Assignment(queue) for queue in range(shards)],
        [consumer(number) for number in range(count)],
    )
    owners = st.sampled_from([*consumers, consumer(99)])
    before = data.draw(st.dictionaries(st.sampled_from(assignments), owners))
    after = assign(assignments, consumers, before)
    loads = [sum(owner == each for owner in after.values()) for each in consumers]
    assert set(after) == set(assignments) and max(loads) - min(loads) <= 1
    assert sum(
        after[assignment] != before.get(assignment) for assignment in assignments
    ) == fewest_moves(assignments, consumers, before)


def near_pairs(owners: dict[Assignment, GroupConsumer], node: dict[int, int]) -> int:
    return sum(node_of(owner.door) == node[each.queue] for each, owner in owners.items())


@pytest.mark.row("E2.6", "E1.8")
@given(st.data(), st.integers(1, 5), st.integers(1, 3))
def test_consumers_get_shards_of_their_node_where_no_more_shards_move(
    data: st.DataObject, shards: int, count: int
) -> None:
    nodes = st.integers(0, 2)
    node = {queue: data.draw(nodes) for queue in range(shards)}
    assignments = [Assignment(queue) for queue in range(shards)]
    consumers = [
        GroupConsumer(DOORS_PER_NODE * data.draw(nodes), 1, number) for number in range(count)
    ]
    owners = st.sampled_from([*consumers, consumer(99)])
    before = data.draw(st.dictionaries(st.sampled_from(assignments), owners))
    after = assign(assignments, consumers, before, node.__getitem__)
    loads = [sum(owner == each for owner in after.values()) for each in consumers]
    assert set(after) == set(assignments) and max(loads) - min(loads) <= 1
    moved = sum(after[each] != before.get(each) for each in assignments)
    fewest = fewest_moves(assignments, consumers, before)
    assert moved == fewest
    best = max(
        near_pairs(tried, node)
        for chosen in product(consumers, repeat=shards)
        for tried in [dict(zip(assignments, chosen, strict=True))]
        if max(counts := [chosen.count(each) for each in consumers]) - min(counts) <= 1
        and sum(tried[each] != before.get(each) for each in assignments) == fewest
    )
    # Which consumers get one more than the others is not tried out, so one may be missed.
    assert near_pairs(after, node) >= best - 1


@pytest.mark.row("E2.6", "E1.8")
def test_consumers_that_come_one_by_one_end_up_with_the_shards_of_their_nodes() -> None:
    node = {queue: queue // 2 for queue in range(6)}
    groups = Groups(lambda n: 0, node.__getitem__)
    groups.begin()
    doors = FrontDoors()
    for number in (2, 0, 1):
        who = GroupConsumer(DOORS_PER_NODE * number, 1, number)
        doors.send(groups.join(who, NAME, ConsumeTerms(), range(6)))
        while doors.on_their_way or doors.giving_up:
            for each in [*doors.on_their_way]:
                doors.receive(each)
            for owner, assignment in doors.giving_up:
                del doors.has[assignment]
                doors.send(groups.gave_up(owner, assignment))
            doors.giving_up.clear()
    assert near_pairs(doors.has, node) == 6


def test_a_consumer_with_one_shard_for_good_gets_one_of_its_node_among_those_with_fewest() -> None:
    groups = Groups(lambda n: 0, {7: 0, 8: 1}.__getitem__)
    groups.begin()
    terms = ConsumeTerms(assignment=LEAST)
    at_one = [GroupConsumer(DOORS_PER_NODE, 1, number) for number in range(2)]
    given = [groups.join(each, NAME, terms, [7, 8])[0].assignment.queue for each in at_one]
    assert given == [8, 7]


def test_a_shard_is_given_only_when_its_holder_gave_it_up() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = consumer(1), consumer(2)
    assert groups.join(one, NAME, ConsumeTerms(), [7, 8]) == [
        GroupOrder(GIVE, one, Assignment(7)),
        GroupOrder(GIVE, one, Assignment(8)),
    ]
    assert groups.join(two, NAME, ConsumeTerms(), [7, 8]) == [GroupOrder(TAKE, one, Assignment(8))]
    assert groups.gave_up(one, Assignment(8)) == [GroupOrder(GIVE, two, Assignment(8))]
    assert groups.gave_up(one, Assignment(8)) == []


def test_who_leaves_keeps_what_it_has_not_settled_until_somebody_wants_it() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = consumer(1), consumer(2)
    groups.join(one, NAME, ConsumeTerms(), [7])
    assert groups.leave(one) == []
    assert groups.join(two, NAME, ConsumeTerms(), [7]) == [GroupOrder(TAKE, one, Assignment(7))]
    assert groups.gave_up(one, Assignment(7)) == [GroupOrder(GIVE, two, Assignment(7))]


def test_lower_priorities_stand_by() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    high, low = consumer(1), consumer(2)
    groups.join(high, NAME, ConsumeTerms(priority=5), [7, 8])
    assert groups.join(low, NAME, ConsumeTerms(), [7, 8]) == []
    assert groups.gone([high]) == [
        GroupOrder(GIVE, low, Assignment(7)),
        GroupOrder(GIVE, low, Assignment(8)),
    ]


def test_groups_share_nothing() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = consumer(1), consumer(2)
    groups.join(one, NAME, ConsumeTerms(group="a"), [7])
    assert groups.join(two, NAME, ConsumeTerms(group="b"), [7]) == [
        GroupOrder(GIVE, two, Assignment(7))
    ]


@pytest.mark.row("E2.6", "E2.7")
def test_least_goes_to_the_shard_with_fewest_consumers_however_fast_they_come() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    assignments = [
        groups.join(consumer(n), NAME, ConsumeTerms(assignment=LEAST), [5, 6, 7])[0].assignment
        for n in range(4)
    ]
    assert assignments == [Assignment(5), Assignment(6), Assignment(7), Assignment(5)]
    groups.gone([consumer(1)])
    assert groups.join(consumer(9), NAME, ConsumeTerms(assignment=LEAST), [5, 6, 7]) == [
        GroupOrder(GIVE, consumer(9), Assignment(6))
    ]


def test_random_is_one_shard_for_good() -> None:
    groups = Groups(lambda n: n - 1)
    groups.begin()
    assert groups.join(consumer(1), NAME, ConsumeTerms(assignment=RANDOM), [5, 6]) == [
        GroupOrder(GIVE, consumer(1), Assignment(6))
    ]
    assert groups.join(consumer(2), NAME, ConsumeTerms(assignment=RANDOM), [5, 6]) == [
        GroupOrder(GIVE, consumer(2), Assignment(6))
    ]
    assert groups.reshard(NAME, [5]) == [
        GroupOrder(CLOSE, consumer(1)),
        GroupOrder(CLOSE, consumer(2)),
    ]


def test_exclusive_is_alone() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    groups.join(consumer(1), NAME, ConsumeTerms(exclusive=True), [5])
    for terms in (
        ConsumeTerms(),
        ConsumeTerms(group="other"),
        ConsumeTerms(assignment=LEAST),
        ConsumeTerms(exclusive=True),
    ):
        with pytest.raises(InUse):
            groups.join(consumer(2), NAME, terms, [5])
    groups.gone([consumer(1)])
    groups.join(consumer(2), NAME, ConsumeTerms(), [5])
    with pytest.raises(InUse):
        groups.join(consumer(3), NAME, ConsumeTerms(exclusive=True), [5])


def test_without_shards_all_consumers_are_closed() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    groups.join(consumer(1), NAME, ConsumeTerms(), [5, 6])
    groups.join(consumer(2), NAME, ConsumeTerms(group="other"), [5, 6])
    groups.join(consumer(3), NAME, ConsumeTerms(assignment=LEAST), [5, 6])
    orders = groups.reshard(NAME, [])
    assert {(order.kind, order.consumer) for order in orders} == {
        (CLOSE, consumer(n)) for n in (1, 2, 3)
    }
    assert not groups.queues and groups.gave_up(consumer(1), Assignment(5)) == []


@given(st.integers(1, 8), histories())
def test_a_new_controller_takes_over_what_is_held_and_moves_no_more_than_it_must(
    shards: int, acts: list[Act]
) -> None:
    history = History(shards, affinity=False)
    for act in acts:
        history.play(act)
    history.come_to_rest()
    new = Groups(lambda n: 0)
    for who in [*history.consumers, *history.left]:
        held = [assignment for assignment, owner in history.doors.has.items() if owner == who]
        terms = history.consumers.get(who, ConsumeTerms())
        assert new.restore(who, NAME, terms, who in history.left, held, history.shards) == []
    orders = new.begin()
    assert orders == [] or not history.consumers
    history.groups = new
    history.join(consumer(11), 1)
    history.come_to_rest()
    assert {assignment.queue for assignment in history.doors.has} == set(history.shards)
