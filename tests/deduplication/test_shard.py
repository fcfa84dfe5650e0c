"""One shard tells the front doors which message is the first of its id.

That message stays the first until it is known not to be stored.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.dedup_ids import DedupIds
from shardmq.shardd.wire import messages as m

SIZE = 4
QUEUE, EXCHANGE = 7, "//x"


class FakePeer:
    def __init__(self) -> None:
        self.stored: list[int] = []
        self.lost: list[int] = []

    def tell(self, what: m.DedupOutcome) -> None:
        self.stored += what.stored
        self.lost += what.lost


class Doors:
    """Two front doors and the shard they ask."""

    def __init__(self) -> None:
        self.dedup = DedupIds()
        self.peers: Any = {0: FakePeer(), 1: FakePeer()}
        self.next = 1

    def ask(
        self, door: int, *ids: bytes, now: int = 0, ttl_ms: int = 0, thing: int | str = QUEUE
    ) -> list[int]:
        question = m.DedupAsk(1, self.next, [(thing, SIZE)], [(0, id, ttl_ms) for id in ids])
        self.next += len(ids)
        return list(self.dedup.ask(door, question, now))

    def became(self, door: int, stored: list[int], lost: list[int]) -> None:
        self.dedup.became(door, m.DedupOutcome(stored, lost), self.peers)


def test_the_first_of_an_id_is_the_first_for_all_front_doors() -> None:
    doors = Doors()
    assert doors.ask(0, b"a", b"b", b"a") == [m.FIRST, m.FIRST, m.FOLLOWS]
    assert doors.ask(1, b"b", b"c") == [m.FOLLOWS, m.FIRST]
    doors.became(0, [1], [2])
    assert (doors.peers[0].stored, doors.peers[1].lost) == ([3], [4])
    assert doors.ask(1, b"a", b"b") == [m.STORED_BEFORE, m.FIRST]


def test_things_have_ids_of_their_own_and_lose_them_when_they_are_deleted() -> None:
    doors = Doors()
    assert doors.ask(0, b"a") == doors.ask(0, b"a", thing=EXCHANGE) == [m.FIRST]
    doors.became(0, [1, 2], [])
    doors.dedup.forget(QUEUE)
    assert doors.ask(1, b"a") == [m.FIRST]
    assert doors.ask(1, b"a", thing=EXCHANGE) == [m.STORED_BEFORE]


def test_what_a_front_door_had_that_died_may_come_again_and_who_followed_hears_so() -> None:
    doors = Doors()
    doors.ask(0, b"a")
    assert doors.ask(1, b"a", b"b") == [m.FOLLOWS, m.FIRST]
    assert doors.ask(0, b"b") == [m.FOLLOWS]
    doors.dedup.peer_gone(0, doors.peers)
    assert doors.peers[1].lost == [2]
    assert doors.ask(1, b"a") == [m.FIRST]
    doors.became(1, [3], [])
    assert doors.peers[0].stored == []  # the next process under that number did not ask


def test_one_that_fell_out_of_what_is_remembered_is_still_followed_to_its_end() -> None:
    doors = Doors()
    assert doors.ask(0, b"a") == [m.FIRST]
    assert doors.ask(1, b"a") == [m.FOLLOWS]
    doors.ask(0, *(b"%d" % n for n in range(SIZE)))
    assert doors.dedup.count(QUEUE) == SIZE
    doors.became(0, [1], [])
    assert doors.peers[1].stored == [2]
    assert doors.ask(1, b"a") == [m.FIRST]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30))
def test_it_tells_what_a_list_tells(seed: int) -> None:
    pick = random.Random(seed)
    doors = Doors()
    known: list[list[Any]] = []  # id, until or 0, (door, number) or None when it is stored
    firsts: list[tuple[int, int]] = []
    followers: dict[tuple[int, int], list[tuple[int, int]]] = {}
    told: dict[int, tuple[list[int], list[int]]] = {0: ([], []), 1: ([], [])}
    now = 0
    for _ in range(60):
        now += pick.randrange(3)
        if firsts and pick.random() < 0.4:
            who = firsts.pop(pick.randrange(len(firsts)))
            stored = pick.random() < 0.6
            doors.became(who[0], [who[1]] if stored else [], [] if stored else [who[1]])
            for entry in [each for each in known if each[2] == who]:
                if stored:
                    entry[2] = None
                else:
                    known.remove(entry)
            for door, number in followers.pop(who):
                told[door][not stored].append(number)
            continue
        door, id, ttl_ms = (
            pick.randrange(2),
            pick.choice([b"a", b"b", b"c", b"d", b"e", b"f"]),
            pick.choice([0, 4]),
        )
        number = doors.next
        entry = next(
            (each for each in known if each[0] == id and (not each[1] or now < each[1])), None
        )
        if entry is None:
            known = [each for each in known if each[0] != id][-(SIZE - 1) :]
            known.append([id, now + ttl_ms if ttl_ms else 0, (door, number)])
            firsts.append((door, number))
            followers[door, number] = []
            expected = m.FIRST
        elif entry[2] is None:
            expected = m.STORED_BEFORE
        else:
            followers[entry[2]].append((door, number))
            expected = m.FOLLOWS
        assert doors.ask(door, id, now=now, ttl_ms=ttl_ms) == [expected]
        assert doors.dedup.count(QUEUE) == len(known) <= SIZE
    assert {number: (peer.stored, peer.lost) for number, peer in doors.peers.items()} == told
