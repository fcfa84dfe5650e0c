"""Leads go back to the homes of their shards: all of them, and one after the other."""

from __future__ import annotations

import itertools
import random

import pytest

from shardmq.cluster.giving_back import CALM_S, EACH_S, WAIT_S_MAX, GivingBack, Led

AFTER_S = 20.0
LOOK_S = 0.5


class Leaders:
    """The leaders of all shards, with one rule each; a clock of its own."""

    def __init__(self, shards: dict[int, Led], after_s: float = AFTER_S) -> None:
        self.shards = shards
        self.now = 100.0
        self.stuck: set[int] = set()  # whose hand-overs do not succeed
        self.given: list[tuple[float, int]] = []
        self.tried: list[tuple[float, int]] = []
        self.rules = {
            shard: GivingBack(led.leader, shard, after_s) for shard, led in shards.items()
        }
        self.tell()

    def tell(self) -> None:
        for rule in self.rules.values():
            rule.look(self.shards, self.now)

    def change(self, shard: int, **what: object) -> None:
        # Of the fields.
        self.shards = self.shards | {shard: self.shards[shard]._replace(**what)}  # type: ignore[arg-type]
        self.tell()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            for shard, rule in self.rules.items():
                heir = rule.heir(self.now)
                if heir:
                    assert heir == self.shards[shard].home
                    assert heir in self.shards[shard].in_sync
                    self.tried.append((self.now, shard))
                    if shard not in self.stuck:
                        self.given.append((self.now, shard))
                        self.change(shard, leader=heir)


def away(home: str = "a", leader: str = "b", in_sync: tuple[str, ...] = ("a", "b")) -> Led:
    return Led(home, leader, in_sync)


def test_leads_go_back_one_after_the_other_when_their_homes_have_been_in_sync() -> None:
    leaders = Leaders(
        {shard: away(leader="bc"[shard % 2], in_sync=("a", "b", "c")) for shard in range(8)}
    )
    leaders.run(AFTER_S - LOOK_S)
    assert leaders.given == []
    leaders.run(8 * EACH_S + 2 * LOOK_S)
    assert [shard for _, shard in leaders.given] == list(range(8))
    times = [at for at, _ in leaders.given]
    assert all(later - at >= EACH_S for at, later in itertools.pairwise(times))


def test_a_lead_stays_where_the_home_cannot_lead() -> None:
    leaders = Leaders(
        {
            0: away(home=""),  # not alive
            1: away(in_sync=("b", "c")),  # not in sync
            2: away(leader="a"),  # leads already
        }
    )
    leaders.run(10 * AFTER_S)
    assert leaders.given == []
    leaders.change(0, home="a")
    leaders.run(AFTER_S + 2 * EACH_S)
    assert [shard for _, shard in leaders.given] == [0]


def test_a_home_that_falls_behind_waits_anew() -> None:
    leaders = Leaders({0: away()})
    leaders.run(AFTER_S - 1)
    leaders.change(0, in_sync=("b",))
    leaders.change(0, in_sync=("a", "b"))
    leaders.run(AFTER_S - 1)
    assert leaders.given == []
    leaders.run(2 * EACH_S)
    assert [shard for _, shard in leaders.given] == [0]


def test_a_hand_over_that_does_not_succeed_holds_up_no_other_one() -> None:
    leaders = Leaders({shard: away() for shard in range(3)})
    leaders.stuck = {0}
    leaders.run(AFTER_S + 6 * EACH_S)
    assert [shard for _, shard in leaders.given] == [1, 2]


def test_without_a_time_no_lead_goes_back() -> None:
    leaders = Leaders({0: away()}, after_s=0)
    leaders.run(1000)
    assert leaders.given == []


def waits_of_a_home(leads_s: list[float], *, forgets: bool = False) -> list[float]:
    """Return how long a home waits for the lead each time, if its leads last so long."""
    leaders = Leaders({0: away()})
    waits = []
    for lead_s in leads_s:
        since = leaders.now
        while not leaders.given:
            leaders.run(LOOK_S)
        waits.append(leaders.given.pop()[0] - since)
        # The process that has handed over ends, and the next one begins.
        known = 0 if forgets else leaders.rules[0].lost
        leaders.rules[0] = GivingBack("b", 0, AFTER_S, known)
        leaders.tell()
        leaders.run(lead_s)
        leaders.change(0, leader="b", in_sync=("b",), home="")
        leaders.run(LOOK_S)
        leaders.change(0, in_sync=("a", "b"), home="a")
    return waits


def test_a_home_that_loses_the_lead_soon_waits_twice_as_long_each_time_up_to_a_bound() -> None:
    waits = waits_of_a_home([5.0] * 12)
    expected = [min(AFTER_S * 2**times, WAIT_S_MAX) for times in range(12)]
    assert waits == pytest.approx(expected, abs=EACH_S + 2 * LOOK_S)
    assert waits[-1] == pytest.approx(WAIT_S_MAX, abs=EACH_S + 2 * LOOK_S)


def test_a_home_that_has_led_for_long_gets_the_lead_back_after_the_usual_time() -> None:
    waits = waits_of_a_home([5.0, 5.0, CALM_S + 1, 5.0])
    expected = [AFTER_S, 2 * AFTER_S, 4 * AFTER_S, AFTER_S]
    assert waits == pytest.approx(expected, abs=EACH_S + 2 * LOOK_S)


def test_a_count_that_is_not_passed_on_does_not_grow() -> None:
    """The next process of the node that gave the lead away would swing as fast as the first."""
    waits = waits_of_a_home([5.0] * 4, forgets=True)
    assert max(waits) < 2 * AFTER_S + EACH_S + 2 * LOOK_S


@pytest.mark.parametrize("leader", ["a", "b", "c"])
def test_another_home_begins_with_no_lost_leads(leader: str) -> None:
    """The new home may lead already, and nobody knows since when."""
    rule = GivingBack("b", 0, AFTER_S, lost=5)
    rule.look({0: away(leader=leader)}, 0.0)
    rule.look({0: away(leader=leader, home="")}, 1.0)
    assert rule.lost == 5, "the home is only away"
    rule.look({0: away(leader=leader, home="c")}, 2.0)
    assert rule.lost == 0
    rule.look({0: away(leader="b", home="c")}, 3.0)
    assert rule.lost == 0
    rule.look({0: away(leader="c", home="c")}, 4.0)
    rule.look({0: away(leader="b", home="c")}, 5.0)
    assert rule.lost == 1


def test_an_hour_is_no_bound_for_those_who_ask_for_more() -> None:
    rule = GivingBack("b", 0, 2 * WAIT_S_MAX, lost=1000)
    assert rule.wait_s == 2 * WAIT_S_MAX


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_before_all_leads_go_back_and_never_two_at_once(seed: int) -> None:
    rng = random.Random(seed)
    nodes = "abcd"
    leaders = Leaders(
        {
            shard: away(rng.choice(nodes), rng.choice(nodes), tuple(nodes))
            for shard in range(rng.randint(1, 12))
        }
    )
    homes = {shard: led.home for shard, led in leaders.shards.items()}
    for _ in range(rng.randint(0, 30)):
        shard = rng.choice(list(leaders.shards))
        match rng.randrange(3):
            case 0:
                leaders.change(shard, home=rng.choice(["", homes[shard]]))
            case 1:
                leader = rng.choice(leaders.shards[shard].in_sync or [homes[shard]])
                leaders.rules[shard] = GivingBack(leader, shard, AFTER_S)
                leaders.change(shard, leader=leader)
            case 2:
                leader = leaders.shards[shard].leader
                leaders.change(shard, in_sync=rng.choice([(leader,), tuple(nodes)]))
        leaders.run(rng.choice([1, 5, 30]))
    for shard, home in homes.items():
        leaders.change(shard, home=home, in_sync=tuple(nodes))
    leaders.run(AFTER_S + (len(homes) + 1) * EACH_S + 5)
    assert {shard: led.leader for shard, led in leaders.shards.items()} == homes
    times = [at for at, _ in leaders.given]
    assert all(later - at >= EACH_S for at, later in itertools.pairwise(times))
