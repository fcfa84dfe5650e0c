"""Each rule of copies by itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardmq.cluster.rules import (
    Ack,
    Begin,
    Compare,
    Confirm,
    Continue,
    Cut,
    Effect,
    Follower,
    Held,
    Hello,
    Keep,
    Lead,
    Leader,
    Leaving,
    PeerState,
    Position,
    Propose,
    Read,
    Record,
    RecordError,
    Refusal,
    Send,
    Settings,
    Snapshot,
    StepDown,
    Stream,
    Swap,
    Wait,
    keeps_up,
    may_leave,
)

SETTINGS = Settings()
HELD_B = Held("s", "copy-b", True, False, 3)


def record(*in_sync: str, term: int = 3, leader: str = "a", life: int = 1) -> Record:
    return Record(term, leader, life, "s", {node: f"copy-{node}" for node in in_sync})


def leading(*in_sync: str, settings: Settings = SETTINGS) -> Leader:
    return Leader("a", 1, record(*in_sync), 10, Position(2, 7), settings, 0.0)


def ticked(leader: Leader, since: float, until: float) -> list[Effect]:
    """Let the time pass; return what the leader does at the end of it."""
    effects: list[Effect] = []
    while since < until:
        since = min(until, since + SETTINGS.heartbeat_s)
        effects += [each for each in leader.tick(since) if not isinstance(each, Send)]
    return effects


def hello(
    node: str = "b",
    position: Position | None = Position(2, 7),
    held: Held = HELD_B,
    session: int = 1,
) -> Hello:
    return Hello(session, node, 1, held, position, 3)


def following(held: Held = HELD_B, revision: int = 10) -> Follower:
    follower = Follower("b", 1, held, SETTINGS)
    follower.recorded(record("a", "b"), revision, 0.0)
    return follower


def test_a_set_that_lacks_its_leader_is_refused() -> None:
    with pytest.raises(RecordError, match="lacks a"):
        record("b", "c")


@pytest.mark.row("K3")
def test_a_sync_is_confirmed_when_all_members_and_the_leader_have_done_it() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_begun(3, 0.1)
    assert leader.heard("b", Ack(1, 3, 3), 0.2) == []
    assert leader.sync_done(3) == []
    assert leader.sync_done(1) == [Confirm(3)]


def test_with_too_few_members_nothing_is_confirmed() -> None:
    leader = leading("a", settings=Settings(min_in_sync=2))
    leader.sync_begun(1, 0.0)
    assert leader.sync_done(1) == []


def test_half_of_the_copies_are_enough_unless_a_setting_says_otherwise() -> None:
    leader = leading("a", settings=Settings(min_in_sync=0))
    leader.sync_begun(1, 0.0)
    assert leader.sync_done(1) == [Confirm(1)]
    assert leader.copies_are(2, 0.2) == []
    leader.sync_begun(2, 0.3)
    assert leader.sync_done(2) == [Confirm(2)]
    assert leader.copies_are(3, 0.5) == []
    leader.sync_begun(3, 0.6)
    assert leader.sync_done(3) == []
    assert leader.copies_are(2, 0.8) == [Confirm(3)]


def test_the_numbers_of_the_shard_count_before_those_of_the_settings() -> None:
    leader = leading("a", settings=Settings(min_in_sync=1))
    assert leader.copies_are(3, 0.1, 2) == []
    leader.sync_begun(1, 0.2)
    assert leader.sync_done(1) == []
    assert leader.copies_are(3, 0.4, 0) == [], "half of the copies are two"
    assert leader.copies_are(3, 0.5) == [Confirm(1)]


@pytest.mark.row("K3", "K4")
def test_a_silent_member_is_left_out_when_the_record_says_so_and_not_before() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    cut, propose = ticked(leader, 0.0, 5.1)
    assert isinstance(cut, Cut) and propose == Propose(record("a"), 10)
    assert leader.swapped(Swap.UNKNOWN, 6.0) == [Read()]
    assert leader.recorded(record("a"), 11, 6.1) == [Confirm(1)]


@pytest.mark.row("K14")
def test_a_member_whose_disk_hangs_leaves_although_it_answers_pings() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    assert ticked(leader, 0.0, 4.9) == []
    leader.heard("b", Ack(1, 3, 0), 5.0)
    assert Propose(record("a"), 10) in ticked(leader, 5.0, 5.1)
    assert leader.greeted(hello(session=2, position=Position(3, 1)), Position(2, 0), 1, 5.2)
    leader.swapped(11, 5.3)
    assert "b" not in leader.record.in_sync


def test_nothing_waits_for_members_that_end_in_order_if_enough_are_left() -> None:
    leader = leading("a", "b", "c", settings=Settings(min_in_sync=2))
    for node in "bc":
        held = Held("s", f"copy-{node}", True, False, 3)
        leader.greeted(hello(node, held=held), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    assert leader.heard("b", Leaving(2, 3), 0.1) == [], "of another session"
    assert leader.heard("b", Leaving(1, 3), 0.1) == [Propose(record("a", "c"), 10)]
    assert leader.heard("c", Ack(1, 3, 1), 0.2) == [], "b is a member until etcd has agreed"
    assert leader.swapped(11, 0.3) == [Confirm(1)]
    assert leader.heard("c", Leaving(1, 3), 0.4) == [], "too few would be left"
    assert ticked(leader, 0.4, 5.1) == []
    assert ticked(leader, 5.1, 5.4) == [Propose(record("a"), 11)]


def test_of_two_members_that_end_at_once_one_stays_if_enough_are_to_be_left() -> None:
    leader = leading("a", "b", "c", settings=Settings(min_in_sync=2))
    for node in "bc":
        held = Held("s", f"copy-{node}", True, False, 3)
        leader.greeted(hello(node, held=held), Position(2, 0), 0, 0.0)
    assert leader.heard("b", Leaving(1, 3), 0.1) == [Propose(record("a", "c"), 10)]
    assert leader.heard("c", Leaving(1, 3), 0.1) == []
    assert leader.swapped(Swap.REFUSED, 0.2) == [Read()]
    assert leader.recorded(leader.record, 10, 0.3) == [Propose(record("a", "c"), 10)]


@pytest.mark.parametrize(
    ("in_sync", "copies", "may"),
    [
        pytest.param("abc", 3, True, id="two of three are left"),
        pytest.param("ab", 3, False, id="one of three would be left"),
        pytest.param("ab", 2, True, id="one of two is left"),
        pytest.param("abc", 5, False, id="two of five would be left"),
    ],
)
def test_half_of_the_copies_stay_when_nodes_end_in_order(
    in_sync: str, copies: int, *, may: bool
) -> None:
    leader = leading(*in_sync, settings=Settings(min_in_sync=1))
    leader.copies_are(copies, 0.0)
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    left = record(*in_sync.replace("b", ""))
    assert leader.heard("b", Leaving(1, 3), 0.1) == ([Propose(left, 10)] if may else [])


def test_a_follower_that_ends_while_it_is_put_into_the_set_is_taken_out_again() -> None:
    leader = leading("a", "b", settings=Settings(min_in_sync=2))
    leader.copies_are(3, 0.0)
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    held = Held("s", "copy-c", True, False, 3)
    joined = Propose(record("a", "b", "c"), 10)
    assert joined not in leader.greeted(hello("c", held=held), Position(2, 0), 0, 0.0)
    assert joined in leader.heard("c", Ack(1, 3, 0), 0.1)
    assert leader.heard("c", Leaving(1, 3), 0.2) == []
    assert leader.swapped(11, 0.3) == [Propose(record("a", "b"), 11)]


def test_a_leader_knows_when_all_that_it_waits_for_have_ended_in_order() -> None:
    leader = leading("a", "b", "c", settings=Settings(min_in_sync=2))
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    assert leader.waits_for() is Wait.MEMBERS, "they may come"
    for node in "bc":
        held = Held("s", f"copy-{node}", True, False, 3)
        leader.greeted(hello(node, held=held), Position(2, 0), 0, 0.0)
    leader.heard("b", Leaving(1, 3), 0.1)
    leader.swapped(11, 0.2)
    leader.disconnected("c", 1, 0.3)
    assert leader.waits_for() is Wait.MEMBERS, "c has not said that it ends"
    leader.greeted(hello("c", session=2), Position(2, 0), 0, 0.4)
    leader.heard("c", Leaving(2, 3), 0.5)
    leader.disconnected("c", 2, 0.5)
    assert leader.waits_for() is Wait.ENDED_MEMBERS
    leader.sync_begun(2, 0.6)
    assert leader.waits_for() is Wait.ENDED_MEMBERS, "it waits for the oldest"
    leader.greeted(hello("c", session=3), Position(2, 0), 0, 0.6)
    assert leader.waits_for() is not Wait.ENDED_MEMBERS, "c is back"


def test_a_leader_whose_members_have_ended_waits_for_a_node_that_may_become_one() -> None:
    leader = leading("a", "b", settings=Settings(min_in_sync=2))
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    leader.greeted(hello("b"), Position(2, 0), 0, 0.0)
    leader.heard("b", Leaving(1, 3), 0.1)
    leader.disconnected("b", 1, 0.1)
    assert leader.waits_for() is Wait.ENDED_MEMBERS
    leader.greeted(hello("c", None, session=2), Position(2, 0), 0, 0.2)
    assert leader.peers["c"].state is PeerState.COMPARING
    assert leader.waits_for() is Wait.MEMBERS, "c can be the heir, if b is taken out"
    leader.heard("c", Leaving(2, 3), 0.3)
    assert leader.waits_for() is Wait.ENDED_MEMBERS


def test_a_follower_that_ends_says_so_once() -> None:
    follower = following(Held("s", "copy-b", True, False, 3))
    assert follower.leave() == [], "there is no session"
    (sent,) = follower.connected(0.0)
    assert isinstance(sent, Send)
    leaving, cut = follower.leave()
    assert leaving == Send("a", Leaving(sent.message.session, 3)) and isinstance(cut, Cut)
    assert follower.leave() == []


def test_a_follower_joins_when_it_has_all_that_was_confirmed() -> None:
    leader = leading("a")
    held = Held("s", "copy-c", True)
    leader.greeted(hello("c", held=held), Position(2, 0), 0, 0.0)
    for number in (1, 2, 3):
        leader.sync_begun(number, 0.0)
        assert leader.sync_done(number) == [Confirm(number)]
    assert leader.heard("c", Ack(1, 3, 1), 0.1) == [], "two confirms behind"
    assert leader.heard("c", Ack(1, 3, 2), 0.2) == [], "one behind: from now on it is waited for"
    leader.sync_begun(4, 0.3)
    assert leader.sync_done(4) == []
    proposed = Propose(record("a", "c"), 10)
    assert leader.heard("c", Ack(1, 3, 3), 0.4) == [proposed]
    assert leader.swapped(11, 0.5) == []
    assert leader.heard("c", Ack(1, 3, 4), 0.6) == [Confirm(4)]


def test_a_copy_that_this_leader_cannot_know_is_compared_and_out_of_the_set_before() -> None:
    for position in (None, Position(2, 8), Position(1, 3)):
        leader = leading("a", "b")
        effects = leader.greeted(hello(position=position), Position(2, 0), 0, 0.0)
        assert effects == [Propose(record("a"), 10)]
        copy = "b-3-1-1"
        assert leader.swapped(11, 0.1) == [
            Send("b", Compare(1, 3, "s", copy)), Snapshot("b", 1)
        ]  # fmt: skip


def test_a_follower_goes_on_where_it_was() -> None:
    leader = leading("a", "b")
    assert leader.greeted(hello(), Position(2, 0), 0, 0.0) == [
        Send("b", Continue(1, 3, Position(2, 7))),
        Stream("b", 1, Position(2, 7)),
    ]


def test_a_follower_that_is_too_far_behind_is_compared() -> None:
    leader = leading("a")
    effects = leader.greeted(hello(position=Position(2, 3)), Position(2, 4), 0, 0.0)
    assert Snapshot("b", 1) in effects


def test_a_leader_ends_when_it_hears_of_a_higher_term() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    (effect,) = leader.heard("b", Refusal(1, 4), 0.1)
    assert isinstance(effect, StepDown)
    assert leading("a", "b").recorded(record("b", term=4, leader="b"), 11, 0.1) == [
        StepDown("b leads in term 4")
    ]


@pytest.mark.row("K14")
def test_a_leader_whose_disk_hangs_gives_its_place_to_a_member() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    for second in range(10):
        assert ticked(leader, second, second + 1) == []
        leader.heard("b", Ack(1, 3, 1), second + 1)
    assert Propose(record("b", term=4, leader="b"), 10) in ticked(leader, 10.0, 10.1)


def test_a_leader_that_was_stopped_itself_blames_no_follower() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    assert [type(effect) for effect in leader.tick(60.0)] == [Send]
    assert leader.sync_done(1) == []
    assert leader.heard("b", Ack(1, 3, 1), 60.1) == [Confirm(1)]


def test_a_hand_over_waits_until_the_heir_has_all() -> None:
    leader = leading("a", "b")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    assert leader.hand_over("b", 0.1) == []
    heir = record("b", term=4, leader="b")  # it must not wait for the next process of this node
    assert leader.heard("b", Ack(1, 3, 1), 0.2) == [Propose(heir, 10), Confirm(1)]
    assert leader.swapped(11, 0.3) == [StepDown("b leads in term 4")]


@pytest.mark.parametrize("end", ["it has left", "its connection has ended"])
def test_an_heir_that_is_not_there_any_more_is_not_waited_for(end: str) -> None:
    leader = leading("a", "b", "c")
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.greeted(hello("c", held=replace(HELD_B, copy="copy-c")), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    leader.heard("c", Ack(1, 3, 1), 0.1)
    assert leader.hand_over("b", 0.1) == [], "as long as it is there, it may only be slow"
    [proposed] = (
        leader.heard("b", Leaving(1, 3), 0.2)
        if end == "it has left"
        else leader.disconnected("b", 1, 0.2)
    )
    assert isinstance(proposed, Propose)
    assert (proposed.record.term, proposed.record.leader) == (4, "c")


def test_another_heir_than_the_one_that_was_named_must_have_all_as_well() -> None:
    leader = leading("a", "b", "c")
    leader.greeted(hello("c", held=replace(HELD_B, copy="copy-c")), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    assert leader.hand_over("b", 0.1) == [], "b is not connected, and c does not have all"
    [proposed, *_] = leader.heard("c", Ack(1, 3, 1), 0.2)
    assert isinstance(proposed, Propose)
    assert proposed.record.leader == "c"


def test_a_leader_stays_in_the_set_if_its_heir_could_confirm_nothing_without_it() -> None:
    leader = leading("a", "b", settings=Settings(min_in_sync=2))
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.heard("b", Ack(1, 3, 0), 0.1)
    heir = record("a", "b", term=4, leader="b")
    assert leader.hand_over("b", 0.2) == [Propose(heir, 10)]


def test_a_leader_says_what_a_confirm_waits_for() -> None:
    leader = leading("a", "b", settings=Settings(min_in_sync=2))
    assert leader.waits_for() is None
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    assert leader.waits_for() is Wait.OWN_DISK
    leader.sync_done(1)
    assert leader.waits_for() is Wait.MEMBERS
    leader.recorded(record("a"), 11, 0.2)
    assert leader.waits_for() is Wait.MORE_MEMBERS
    leader.recorded(record("a", "b"), 12, 0.3)
    assert leader.heard("b", Ack(1, 3, 1), 0.4) == [Confirm(1)]
    assert leader.waits_for() is None


def test_the_lead_may_go_to_a_member_that_keeps_up() -> None:
    leader = leading("a", "b")
    assert not keeps_up(leader, "b", 0.0), "not connected"
    leader.greeted(hello(), Position(2, 0), 0, 0.0)
    assert keeps_up(leader, "b", 0.0)
    assert not keeps_up(leader, "c", 0.0), "no member"
    leader.sync_begun(1, 0.0)
    assert keeps_up(leader, "b", 0.1)
    assert not keeps_up(leader, "b", 0.6), "late"
    leader.heard("b", Ack(1, 3, 1), 0.6)
    assert keeps_up(leader, "b", 0.6)


@pytest.mark.parametrize(
    ("in_sync", "copies", "min_in_sync", "may"),
    [
        ("ab", 2, 0, True),
        ("ab", 3, 0, False),  # b alone would confirm nothing
        ("abc", 3, 0, True),
        ("abc", 3, 3, False),
        ("abc", 5, 0, False),
        ("abcd", 5, 0, True),
        ("ab", 2, 2, False),
    ],
)
def test_a_lead_is_given_back_only_if_the_next_leader_can_confirm(
    in_sync: str, copies: int, min_in_sync: int, *, may: bool
) -> None:
    leader = leading(*in_sync, settings=Settings(min_in_sync=min_in_sync))
    leader.copies_are(copies, 0.0)
    for node in in_sync[1:]:
        held = Held("s", f"copy-{node}", True, False, 3)
        leader.greeted(hello(node, held=held), Position(2, 0), 0, 0.0)
    assert may_leave(leader, "b", 0.0) == may
    assert not may_leave(leader, "x", 0.0), "no member"


def test_a_member_that_is_late_or_about_to_leave_does_not_count_for_a_hand_over() -> None:
    leader = leading("a", "b", "c", settings=Settings(min_in_sync=2))
    for node in "bc":
        held = Held("s", f"copy-{node}", True, False, 3)
        leader.greeted(hello(node, held=held), Position(2, 0), 0, 0.0)
    leader.sync_begun(1, 0.0)
    leader.sync_done(1)
    leader.heard("b", Ack(1, 3, 1), 0.1)
    assert may_leave(leader, "b", 0.1)
    assert not may_leave(leader, "b", 0.6), "c is late"
    leader.heard("c", Ack(1, 3, 1), 0.7)
    assert may_leave(leader, "b", 0.7)
    leader.disconnected("c", 1, 0.8)
    assert not may_leave(leader, "b", 0.8), "c is gone"
    for second in range(1, 5):
        assert ticked(leader, second - 0.2, second + 0.8) == []
        leader.heard("b", Ack(1, 3, 1), second + 0.8)
    assert ticked(leader, 4.8, 5.8) == [Propose(record("a", "b"), 10)]
    leader.greeted(hello("c", held=held, session=2), Position(2, 0), 1, 5.9)
    assert not may_leave(leader, "b", 5.9), "c is being taken out"


def test_a_leader_is_not_silent_for_the_time_that_the_disk_of_its_follower_takes() -> None:
    for is_busy in (False, True):
        follower = following(Held("s", "copy-b", True, False, 3))
        follower.connected(0.0)
        follower.heard(Continue(follower._session, 3, None), 0.1)
        if is_busy:
            follower.was_busy(6.0)
        assert follower.tick(6.1) == ([] if is_busy else [Cut("a", "the leader is silent")])


def test_a_follower_refuses_an_older_term() -> None:
    follower = following(Held("s", "copy-b", True, False, 3))
    assert follower.connected(0.0) == [
        Send("a", Hello(1 << 24 | 1, "b", 1, follower.held, None, 3))
    ]
    refusal, cut = follower.heard(Continue(1 << 24 | 1, 2, None), 0.1)
    assert refusal == Send("a", Refusal(1 << 24 | 1, 3)) and isinstance(cut, Cut)


def test_a_member_takes_over_by_the_record_and_leaves_the_old_leader_out() -> None:
    follower = following()
    follower.leader_gone(3, 1.0)
    assert follower.tick(1.0) == [], "it has just started: others know where they are"
    proposed = record("b", term=4, leader="b")
    assert follower.tick(2.1) == [Propose(proposed, 10)]
    assert follower.leader == ""
    assert follower.swapped(11, 2.2)[-1] == Lead(proposed, 11, None)


def test_who_loses_the_race_follows_the_winner() -> None:
    follower = following()
    follower.leader_gone(3, 1.0)
    follower.tick(2.1)
    assert follower.swapped(Swap.REFUSED, 2.2) == [Read()]
    follower.recorded(record("b", "c", term=4, leader="c"), 11, 2.3)
    assert follower.leader == "c"
    assert follower.tick(9.0) == []


def test_a_late_success_makes_a_leader_of_who_had_given_up() -> None:
    follower = following()
    follower.leader_gone(3, 1.0)
    (propose,) = follower.tick(2.1)
    assert isinstance(propose, Propose)
    follower.swapped(Swap.UNKNOWN, 4.0)
    assert follower.leader == "a"
    assert follower.recorded(propose.record, 11, 5.0)[-1] == Lead(propose.record, 11, None)


@pytest.mark.row("K4")
@pytest.mark.parametrize(
    "held",
    [Held(), Held("s", "copy-b", False), Held("s", "older-b", True), Held("t", "copy-b", True)],
)
def test_a_copy_that_is_lost_torn_old_or_of_another_store_takes_nothing_over(held: Held) -> None:
    follower = following(held)
    follower.leader_gone(3, 1.0)
    assert follower.tick(9.0) == []


def test_a_leader_that_starts_again_is_no_leader_and_stands_again() -> None:
    follower = Follower("a", 2, Held("s", "copy-a", True, False, 3), SETTINGS)
    follower.recorded(record("a", "b"), 10, 0.0)
    assert follower.leader == ""
    again = record("a", "b", term=4, life=2)
    assert follower.tick(1.1) == [Propose(again, 10)]


def test_a_copy_that_is_about_to_be_elected_hears_no_leader_of_a_lower_term() -> None:
    follower = following()
    follower.position = Position(3, 5)
    (send,) = follower.connected(0.0)
    session = send.message.session  # type: ignore[union-attr]
    cut, keep = follower.promise(4)
    assert isinstance(cut, Cut) and keep == Keep(Held("s", "copy-b", True, False, 3, promised=4))
    assert follower.heard(Compare(session, 3, "s", "copy-new"), 0.1) == []
    assert follower.operations(session, Position(3, 6), 2, 0.1) == 2, "all are skipped"
    assert follower.held.is_whole and follower.position == Position(3, 5)
    (send,) = follower.connected(0.1)
    assert send.message.term == 4, "the leader hears of the term"  # type: ignore[union-attr]
    (refusal, _) = follower.heard(Continue(session + 1, 3, None), 0.1)
    assert isinstance(refusal.message, Refusal)  # type: ignore[union-attr]
    chosen = Record(4, "b", 1, "s", {"b": "copy-b"})
    *_, lead = follower.recorded(chosen, 11, 0.2)
    assert lead == Lead(chosen, 11, Position(3, 5))
    assert follower.promise(5) == [], "it leads"


def test_operations_that_came_before_are_skipped_and_a_gap_ends_the_session() -> None:
    follower = following()
    follower.position = Position(3, 5)
    session = (1 << 24) + 1
    follower.connected(0.0)
    follower.heard(Continue(session, 3, None), 0.0)
    assert follower.operations(session, Position(3, 4), 5, 0.1) == 2
    assert follower.operations(session, Position(3, 6), 5, 0.1) == 0
    (cut,) = follower.operations(session, Position(3, 7), 1, 0.1)  # type: ignore[misc]
    assert isinstance(cut, Cut)


def test_only_a_node_without_a_store_makes_the_first_record() -> None:
    fresh = Follower("a", 1, Held(), SETTINGS, "new")
    fresh.recorded(None, 5, 0.0)
    _, propose = fresh.tick(0.1)
    assert isinstance(propose, Propose) and propose.record.store == "new"
    used = Follower("a", 1, Held("s", "copy-a", True, False, 3), SETTINGS, "new")
    used.recorded(None, 5, 0.0)
    assert used.tick(0.1) == []
    barred = Follower("a", 1, Held(), SETTINGS)
    barred.recorded(None, 5, 0.0)
    assert barred.tick(0.1) == barred.tick(1e6) == []


def compared(held: Held = HELD_B) -> tuple[Follower, list[Effect]]:
    """Return a follower whose comparison has ended at the tenth operation, whole at the twelfth."""
    follower = following(held)
    follower.connected(0.0)
    effects = follower.heard(Compare(follower._session, 3, "s", "copy-new"), 0.1)
    assert follower.compared(follower._session, Position(3, 10), 12)
    follower.applied(Position(3, 14))
    return follower, effects


def test_a_copy_is_whole_only_behind_a_sync_of_all_its_files() -> None:
    follower, _ = compared()
    assert follower.synced("copy-new", Position(3, 14)) == []
    assert not follower.held.is_whole
    keep, ack = follower.synced("copy-new", Position(3, 14), is_of_all=True)
    assert keep == Keep(Held("s", "copy-new", True, False, 3))
    assert isinstance(ack, Send) and ack.message == Ack(follower._session, 3, 14)
    follower, _ = compared()
    follower.applied(Position(3, 11))
    assert follower.synced("copy-new", Position(3, 11), is_of_all=True) == []


def test_another_store_is_named_until_its_files_are_aside() -> None:
    old = Held("old", "copy-old", True, False, 2)
    _, effects = compared(old)
    begin = effects.index(Begin("old-1"))
    given_up, is_another = effects[:begin], effects[begin + 1 :]
    assert given_up == [Keep(Held("old", "copy-old", False, False, 2))]
    assert is_another == [Keep(Held("s", "copy-new", False, False, 3))]
