"""Every shard has one owner, and loads differ by one at most.

As few shards as possible move.
"""

from __future__ import annotations

from itertools import combinations
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
    Groups,
    InUse,
    Member,
    Name,
    Order,
    Seat,
    Terms,
    assign,
)

NAME = Name("/", "orders")


def member(number: int) -> Member:
    return Member(number % 3, 1, number)


class Act(NamedTuple):
    """`what` happens to `who`; `at` chooses among what there is."""

    what: str
    who: int
    at: int


class FrontDoors:
    """Front doors that follow orders in order for each member, at any time.

    They give up a shard when they are told.
    """

    def __init__(self) -> None:
        self.has: dict[Seat, Member] = {}
        self.giving_up: list[tuple[Member, Seat]] = []
        self.on_their_way: dict[Member, list[Order]] = {}

    def send(self, orders: list[Order]) -> None:
        for order in orders:
            self.on_their_way.setdefault(order.member, []).append(order)

    def receive(self, who: Member) -> None:
        for order in self.on_their_way.pop(who, []):
            if order.kind == GIVE:
                assert order.seat not in self.has, f"{order} while {self.has[order.seat]} has it"
                self.has[order.seat] = order.member
            elif order.kind == TAKE:
                assert self.has.get(order.seat) == order.member, f"{order}, who does not have it"
                assert (order.member, order.seat) not in self.giving_up, f"{order} twice"
                self.giving_up.append((order.member, order.seat))

    def die(self, who: Member) -> None:
        self.on_their_way.pop(who, None)
        self.has = {seat: owner for seat, owner in self.has.items() if owner != who}
        self.giving_up = [(owner, seat) for owner, seat in self.giving_up if owner != who]


class History:
    def __init__(self, shards: int, affinity: bool) -> None:
        self.groups = Groups(lambda n: 0)
        self.groups.begin()
        self.doors = FrontDoors()
        self.shards = list(range(1, shards + 1))
        self.next_shard = shards + 1
        self.affinity = affinity
        self.members: dict[Member, Terms] = {}
        self.left: set[Member] = set()

    def play(self, act: Act) -> None:
        getattr(self, act.what)(member(act.who), act.at)

    def join(self, who: Member, at: int) -> None:
        if who in self.members or who in self.left:
            return
        terms = Terms(priority=at % 2, affinity=self.affinity)
        self.doors.send(self.groups.join(who, NAME, terms, self.shards))
        self.members[who] = terms

    def leave(self, who: Member, at: int) -> None:
        if self.members.pop(who, None) is not None:
            self.left.add(who)
            self.doors.send(self.groups.leave(who))
            if at % 2:  # nothing unacknowledged: it gives up by itself
                self.doors.receive(who)
                for seat in [seat for seat, owner in self.doors.has.items() if owner == who]:
                    self._give_up(who, seat)

    def die(self, who: Member, at: int) -> None:
        self.members.pop(who, None)
        self.left.discard(who)
        self.doors.die(who)
        self.doors.send(self.groups.gone([who]))

    def receive(self, who: Member, at: int) -> None:
        self.doors.receive(who)

    def settle(self, who: Member, at: int) -> None:
        if self.doors.giving_up:
            self._give_up(*self.doors.giving_up[at % len(self.doors.giving_up)])

    def _give_up(self, who: Member, seat: Seat) -> None:
        if (who, seat) in self.doors.giving_up:
            self.doors.giving_up.remove((who, seat))
        del self.doors.has[seat]
        self.doors.send(self.groups.gave_up(who, seat))

    def grow(self, who: Member, at: int) -> None:
        self.shards.append(self.next_shard)
        self.next_shard += 1
        self.doors.send(self.groups.reshard(NAME, self.shards))

    def shrink(self, who: Member, at: int) -> None:
        if len(self.shards) > 1:
            self.shards.pop(at % len(self.shards))
            self.doors.send(self.groups.reshard(NAME, self.shards))

    def come_to_rest(self) -> None:
        while self.doors.on_their_way or self.doors.giving_up:
            for who in list(self.doors.on_their_way):
                self.doors.receive(who)
            if self.doors.giving_up:
                self._give_up(*self.doors.giving_up[0])

    def active(self) -> list[Member]:
        highest = max(terms.priority for terms in self.members.values())
        return [who for who, terms in self.members.items() if terms.priority == highest]


ACTS = ["join", "join", "leave", "die", "receive", "receive", "settle", "settle", "grow", "shrink"]


def histories() -> st.SearchStrategy[list[Act]]:
    return st.lists(st.builds(Act, st.sampled_from(ACTS), st.integers(0, 9), st.integers(0, 30)), max_size=60)


@given(st.integers(1, 12), st.booleans(), histories())
def test_never_two_owners_and_at_rest_every_shard_has_one_and_loads_differ_by_one(
    shards: int, affinity: bool, acts: list[Act]
) -> None:
    history = History(shards, affinity)
    for act in acts:
        history.play(act)
    history.come_to_rest()
    if not history.members:
        return
    active = history.active()
    loads = dict.fromkeys(active, 0)
    for owner in history.doors.has.values():
        loads[owner] += 1
    assert {seat.queue for seat in history.doors.has} == set(history.shards)
    assert max(loads.values()) - min(loads.values()) <= 1
    if affinity and len(active) >= len(history.shards):
        seats = [sum(seat.queue == queue for seat in history.doors.has) for queue in history.shards]
        assert sum(seats) == len(active) and max(seats) - min(seats) <= 1
    else:
        assert len(history.doors.has) == len(history.shards)


@given(st.integers(1, 12), histories())
def test_of_those_who_are_gone_nothing_is_kept(shards: int, acts: list[Act]) -> None:
    history = History(shards, affinity=False)
    for act in acts:
        history.play(act)
    for who in [*history.members, *history.left]:
        history.die(who, 0)
    assert not history.groups.queues and not history.groups._names


def fewest_moves(seats: list[Seat], members: list[Member], before: dict[Seat, Member]) -> int:
    """By trying every choice of who has one more than the others."""
    fewest, more = divmod(len(seats), len(members))
    now = {each: sum(before.get(seat) == each for seat in seats) for each in members}
    return min(
        len(seats) - sum(min(now[each], fewest + (each in larger)) for each in members)
        for larger in combinations(members, more)
    )


@given(st.data(), st.integers(1, 10), st.integers(1, 6))
def test_as_few_shards_as_possible_move(data: st.DataObject, shards: int, count: int) -> None:
    seats, members = [Seat(queue) for queue in range(shards)], [member(number) for number in range(count)]
    owners = st.sampled_from([*members, member(99)])
    before = data.draw(st.dictionaries(st.sampled_from(seats), owners))
    after = assign(seats, members, before)
    loads = [sum(owner == each for owner in after.values()) for each in members]
    assert set(after) == set(seats) and max(loads) - min(loads) <= 1
    assert sum(after[seat] != before.get(seat) for seat in seats) == fewest_moves(seats, members, before)


def test_a_shard_is_given_only_when_its_holder_gave_it_up() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = member(1), member(2)
    assert groups.join(one, NAME, Terms(), [7, 8]) == [Order(GIVE, one, Seat(7)), Order(GIVE, one, Seat(8))]
    assert groups.join(two, NAME, Terms(), [7, 8]) == [Order(TAKE, one, Seat(8))]
    assert groups.gave_up(one, Seat(8)) == [Order(GIVE, two, Seat(8))]
    assert groups.gave_up(one, Seat(8)) == []


def test_who_leaves_keeps_what_it_has_not_settled_until_somebody_wants_it() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = member(1), member(2)
    groups.join(one, NAME, Terms(), [7])
    assert groups.leave(one) == []
    assert groups.join(two, NAME, Terms(), [7]) == [Order(TAKE, one, Seat(7))]
    assert groups.gave_up(one, Seat(7)) == [Order(GIVE, two, Seat(7))]


def test_lower_priorities_stand_by() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    high, low = member(1), member(2)
    groups.join(high, NAME, Terms(priority=5), [7, 8])
    assert groups.join(low, NAME, Terms(), [7, 8]) == []
    assert groups.gone([high]) == [Order(GIVE, low, Seat(7)), Order(GIVE, low, Seat(8))]


def test_groups_share_nothing() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    one, two = member(1), member(2)
    groups.join(one, NAME, Terms(group="a"), [7])
    assert groups.join(two, NAME, Terms(group="b"), [7]) == [Order(GIVE, two, Seat(7))]


@pytest.mark.row("E2.6", "E2.7")
def test_least_goes_to_the_shard_with_fewest_consumers_however_fast_they_come() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    seats = [groups.join(member(n), NAME, Terms(assignment=LEAST), [5, 6, 7])[0].seat for n in range(4)]
    assert seats == [Seat(5), Seat(6), Seat(7), Seat(5)]
    groups.gone([member(1)])
    assert groups.join(member(9), NAME, Terms(assignment=LEAST), [5, 6, 7]) == [Order(GIVE, member(9), Seat(6))]


def test_random_is_one_shard_for_good() -> None:
    groups = Groups(lambda n: n - 1)
    groups.begin()
    assert groups.join(member(1), NAME, Terms(assignment=RANDOM), [5, 6]) == [Order(GIVE, member(1), Seat(6))]
    assert groups.join(member(2), NAME, Terms(assignment=RANDOM), [5, 6]) == [Order(GIVE, member(2), Seat(6))]
    assert groups.reshard(NAME, [5]) == [Order(CLOSE, member(1)), Order(CLOSE, member(2))]


def test_exclusive_is_alone() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    groups.join(member(1), NAME, Terms(exclusive=True), [5])
    for terms in (Terms(), Terms(group="other"), Terms(assignment=LEAST), Terms(exclusive=True)):
        with pytest.raises(InUse):
            groups.join(member(2), NAME, terms, [5])
    groups.gone([member(1)])
    groups.join(member(2), NAME, Terms(), [5])
    with pytest.raises(InUse):
        groups.join(member(3), NAME, Terms(exclusive=True), [5])


def test_without_shards_all_consumers_are_closed() -> None:
    groups = Groups(lambda n: 0)
    groups.begin()
    groups.join(member(1), NAME, Terms(), [5, 6])
    groups.join(member(2), NAME, Terms(group="other"), [5, 6])
    groups.join(member(3), NAME, Terms(assignment=LEAST), [5, 6])
    orders = groups.reshard(NAME, [])
    assert {(order.kind, order.member) for order in orders} == {(CLOSE, member(n)) for n in (1, 2, 3)}
    assert not groups.queues and groups.gave_up(member(1), Seat(5)) == []


@given(st.integers(1, 8), histories())
def test_a_new_controller_takes_over_what_is_held_and_moves_no_more_than_it_must(shards: int, acts: list[Act]) -> None:
    history = History(shards, affinity=False)
    for act in acts:
        history.play(act)
    history.come_to_rest()
    new = Groups(lambda n: 0)
    for who in [*history.members, *history.left]:
        held = [seat for seat, owner in history.doors.has.items() if owner == who]
        terms = history.members.get(who, Terms())
        assert new.restore(who, NAME, terms, who in history.left, held, history.shards) == []
    orders = new.begin()
    assert orders == [] or not history.members
    history.groups = new
    history.join(member(11), 1)
    history.come_to_rest()
    assert {seat.queue for seat in history.doors.has} == set(history.shards)
