"""An operator may let a copy lead that lacks something, and only where nobody else can."""

from __future__ import annotations

import pytest

from shardmq.cluster.rules import Held, Position, Record
from shardmq.cluster.unclean import CopyState, NotElected, elected, has_kept, loss
from tests.cluster.simulation import play
from tests.cluster.test_simulation import seeds_of
from tests.cluster.unclean_world import BROKEN, RefusedWorld, UncleanWorld

SCHEDULES = 60
TORTURE_SCHEDULES = 50_000
BROKEN_SCHEDULES = 3000  # about one in a hundred convicts

RECORD = Record(5, "a", 1, "s", {"a": "copy-a", "b": "copy-b"})
LOST = CopyState(9, Held())


def state(name: str = "c", **held: object) -> CopyState:
    kept = {"store": "s", "copy": f"copy-{name}", "is_whole": True, "term": 4} | held
    return CopyState(7, Held(**kept), Position(5, 12))  # type: ignore[arg-type] # of the fields


def test_a_copy_outside_of_the_set_leads_alone_in_a_higher_term() -> None:
    for alive, states in (
        ("c", {"c": state()}),
        ("abc", {"a": LOST, "b": state("b", copy="newer", is_whole=False), "c": state()}),
    ):
        assert elected(RECORD, "c", states, alive) == Record(6, "c", 7, "s", {"c": "copy-c"})


def test_the_term_is_above_all_that_any_copy_has_heard_of() -> None:
    states = {"c": state(), "d": state("d", term=8)}
    assert elected(RECORD, "c", states, "cd").term == 9
    states = {"c": state(), "d": state("d", promised=10)}
    assert elected(RECORD, "c", states, "cd").term == 11


@pytest.mark.parametrize(
    ("states", "alive", "why"),
    [
        ({"a": state("a"), "c": state()}, "ac", "a is in sync and alive: it leads, or will"),
        ({"c": state()}, "ac", "a is in sync and alive, and does not say"),
        ({"b": state("b"), "c": state()}, "c", "b is in sync"),  # its lease has just ended
        ({}, "c", "c does not answer"),
        ({"c": LOST}, "c", "is of no use"),
        ({"c": state(is_whole=False)}, "c", "is of no use"),
        ({"c": state(store="t")}, "c", "is of no use"),
    ],
)
def test_a_copy_is_not_elected_while_a_better_one_may_lead_or_if_it_cannot(
    states: dict[str, CopyState], alive: str, why: str
) -> None:
    with pytest.raises(NotElected, match=why):
        elected(RECORD, "c", states, alive)


def test_a_member_with_its_copy_needs_no_election() -> None:
    with pytest.raises(NotElected, match="b is in sync"):
        elected(RECORD, "b", {"b": state("b")}, "b")


@pytest.mark.parametrize(
    ("copy", "others", "said"),
    [
        (None, {}, "nobody knows where the copy of c ends"),
        (Position(3, 12), {}, "led in later terms, up to term 5"),
        (Position(5, 12), {"d": (Position(6, 1), None)}, "up to term 6"),
        (Position(5, 12), {"d": (Position(5, 20), None)}, "8 operations"),
        (Position(5, 12), {"d": (None, Position(5, 15))}, "3 operations"),
        (Position(5, 12), {"d": (None, Position(4, 99))}, "what only a and b had"),
    ],
)
def test_the_operator_hears_how_much_may_be_lost(
    copy: Position | None,
    others: dict[str, tuple[Position | None, Position | None]],
    said: str,
) -> None:
    states = {name: CopyState(1, state(name).held, *known) for name, known in others.items()}
    states["c"] = CopyState(7, state().held, copy)
    text = loss(RECORD, "c", states)
    assert said in text
    assert "Stop shardmq on a and b first" in text


def test_a_copy_that_has_changed_since_the_look_is_not_elected() -> None:
    record = elected(RECORD, "c", {"c": state()}, "c")
    assert has_kept(record, state(term=6))
    assert not has_kept(record, state(is_whole=False))
    assert not has_kept(record, state(copy="newer"))
    assert not has_kept(record, CopyState(8, state().held)), "another process"


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(SCHEDULES, id="usual"),
        pytest.param(
            TORTURE_SCHEDULES,
            id="torture",
            marks=[pytest.mark.torture, pytest.mark.timeout(3 * 3600)],
        ),
    ],
)
def test_behind_an_election_nothing_more_is_lost_and_one_node_leads(
    pytestconfig: pytest.Config, count: int
) -> None:
    seeds = seeds_of(pytestconfig, count)
    print(f"schedules from seed {seeds.start}")
    elections = 0
    broken = []
    for seed in seeds:
        world = UncleanWorld(seed)
        broken.append(play(seed, lambda _, world=world: world))  # type: ignore[misc,arg-type]
        elections += world.elected
    assert [text for text in broken if text] == []
    assert elections > count / 5, "copies are elected in many of the schedules"


def test_a_copy_that_was_not_elected_after_its_promise_follows_again(
    pytestconfig: pytest.Config,
) -> None:
    refused, broken = 0, []
    for seed in seeds_of(pytestconfig, SCHEDULES):
        world = RefusedWorld(seed)
        broken.append(play(seed, lambda _, world=world: world))  # type: ignore[misc,arg-type]
        refused += world.refused
    assert [text for text in broken if text] == []
    assert refused > SCHEDULES / 20, "copies promise in some of the schedules"


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_elections_that_are_broken_in_one_point_are_convicted(
    pytestconfig: pytest.Config, kind: type[UncleanWorld]
) -> None:
    assert any(play(seed, kind) for seed in seeds_of(pytestconfig, BROKEN_SCHEDULES))
