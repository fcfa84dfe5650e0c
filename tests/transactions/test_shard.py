"""Test room set aside for a transaction: all of it comes in, or none.

Others publish and take messages meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.shardd.queues import Queue
from shardmq.shardd.shard import Shard
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.shard.test_shard import read
from tests.support.dict_store import DictHome

EPOCH, NOW = 7, 1000
COUNTED, WEIGHED, OPEN = 1, 2, 3
REFUSE = {"x-overflow": "reject-publish"}
MESSAGES_MAX, BYTES_MAX = 4, 40
SPECS = [
    m.QueueSpec(COUNTED, "/", "counted", True, arguments={"x-max-length": MESSAGES_MAX} | REFUSE),
    m.QueueSpec(
        WEIGHED, "/", "weighed", True, arguments={"x-max-length-bytes": BYTES_MAX} | REFUSE
    ),
    m.QueueSpec(OPEN, "/", "open", True),
]
DOORS = (0, 1)

Sizes = tuple[tuple[int, int], ...]  # queue, body bytes

publishes = st.lists(
    st.tuples(st.sampled_from((COUNTED, WEIGHED, OPEN)), st.integers(0, 20)), max_size=6
).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from(DOORS), publishes),
        st.tuples(
            st.sampled_from(("commit", "give up")), st.sampled_from(DOORS), st.integers(0, 3)
        ),
        st.tuples(st.just("publish"), st.sampled_from(DOORS), publishes),
        st.tuples(st.just("get"), st.sampled_from((COUNTED, WEIGHED, OPEN)), st.just(0)),
        st.tuples(st.just("door dies"), st.sampled_from(DOORS), st.just(0)),
        st.tuples(st.just("policy"), st.just(COUNTED), st.booleans()),
    ),
    max_size=40,
)


class Doors:
    """Front doors at one shard, whose syncs end at once."""

    def __init__(self) -> None:
        self.shard = Shard(0, EPOCH, 1, DictHome())
        self.incarnations = dict.fromkeys((m.CONTROLLER, *DOORS), 5)
        self.batch = dict.fromkeys(DOORS, 0)
        self.join(m.CONTROLLER)
        self.tell(m.CONTROLLER, m.Assign(SPECS))
        for door in DOORS:
            self.join(door)
        self.heard(0)

    def join(self, peer: int) -> None:
        self.shard.receive(
            envelope.control(peer, self.incarnations[peer], 0, 0, m.Join(f"peer-{peer}")), NOW
        )

    def bound(self, queue: int, is_bounded: bool) -> None:
        """Bound the queue by a policy, or end the bound. Front doors may not know of it yet."""
        spec = next(spec for spec in SPECS if spec.id == queue)
        arguments = spec.arguments if is_bounded else {}
        self.tell(
            m.CONTROLLER,
            m.CreateQueues(70, [m.QueueSpec(queue, "/", spec.name, True, arguments=arguments)]),
        )
        self.heard(m.CONTROLLER)

    def die(self, door: int) -> None:
        self.tell(m.CONTROLLER, m.FrontDoorGone(door, self.incarnations[door]))
        self.incarnations[door] += 1
        self.batch[door] = 0
        self.join(door)
        self.heard(door)

    def tell(self, peer: int, what: Any) -> None:
        self.shard.receive(envelope.control(peer, self.incarnations[peer], EPOCH, 0, what), NOW)

    def publish(self, door: int, messages: Sizes, numbered: bool) -> set[int]:
        """Publish with confirms, or without them as a transaction does.

        Return the ordinals of refused messages.
        """
        packer = codec.Packer(1)
        for i, (queue, size) in enumerate(messages):
            stored = struct.pack("<II", size, 0) + b"\0\1q" + b"x" * size
            packer.add_stored(
                0,
                [queue],
                stored,
                9,
                1,
                i + 1 if numbered else 0,
                NOW,
                0xFFFFFFFF,
                0xFF,
                True,
                True,
            )
        data = packer.take(0, door, self.incarnations[door], EPOCH, self.batch[door] + 1)
        if data is None:
            return set()
        self.batch[door] += 1
        self.shard.receive(data, NOW)
        refused: set[int] = set()
        for said in self.heard(door):
            if said[0] == "confirmed":
                for _, _, first, last in said[2]:
                    refused.update(range(first, last + 1))
        return refused

    def heard(self, door: int) -> list[Any]:
        sync = self.shard.syncs.begin()
        if sync is not None:
            sync.run()
            self.shard.syncs.end()
        said = [
            read(joined(o.message))
            for o in self.shard.turn_end(NOW)
            if o.endpoint == f"peer-{door}"
        ]
        return [each if isinstance(each, tuple) else ("control", each) for each in said]

    def answer(self, door: int, what: Any) -> Any:
        self.tell(door, what)
        return next(
            each[1]
            for each in self.heard(door)
            if getattr(each[1], "request", None) == what.request
        )


class Model:
    """What is in each queue, and what is set aside there, by front door and number."""

    def __init__(self) -> None:
        self.bodies: dict[int, list[int]] = {COUNTED: [], WEIGHED: [], OPEN: []}
        self.reserved: dict[tuple[int, int], Sizes] = {}
        self.is_bounded = True  # the queue that counts

    def has_room(self, queue: int, size: int, more: Sequence[tuple[int, int]] = ()) -> bool:
        aside = [s for sizes in (*self.reserved.values(), more) for q, s in sizes if q == queue]
        if queue == COUNTED and not self.is_bounded:
            return True
        if queue == COUNTED:
            return len(self.bodies[queue]) + len(aside) + 1 <= MESSAGES_MAX
        taken = sum(self.bodies[queue]) + sum(aside)
        return queue == OPEN or taken + size <= BYTES_MAX

    def fits(self, messages: Sizes) -> bool:
        bounded = [each for each in messages if each[0] != OPEN]
        return all(self.has_room(q, size, bounded[:i]) for i, (q, size) in enumerate(bounded))


def wanted(messages: Sizes) -> list[tuple[int, list[int]]]:
    found: dict[int, list[int]] = {}
    for queue, size in messages:
        if queue != OPEN:
            found.setdefault(queue, []).append(size)
    return list(found.items())


def reserved_in(queue: Queue) -> tuple[int, int]:
    admission = queue.admission()
    return admission.messages, admission.body_bytes


@settings(max_examples=300, deadline=None)
@given(steps)
def test_a_transaction_comes_in_whole_or_not_at_all(history: list[tuple[str, int, Any]]) -> None:
    doors, model, number = Doors(), Model(), 0
    for step, who, what in history:
        mine = [key for key in model.reserved if key[0] == who]
        match step:
            case "reserve":
                number += 1
                answer = doors.answer(who, m.Reserve(100 + number, number, wanted(what)))
                assert isinstance(answer, m.Done) == model.fits(what)
                if model.fits(what):
                    model.reserved[who, number] = what
            case "commit" if what < len(mine):
                messages = model.reserved.pop(mine[what])
                doors.tell(who, m.Redeem(mine[what][1]))
                assert doors.publish(who, messages, numbered=False) == set()
                doors.tell(who, m.Unreserve(mine[what][1]))
                for queue, size in messages:
                    model.bodies[queue].append(size)
            case "give up" if what < len(mine):
                del model.reserved[mine[what]]
                doors.tell(who, m.Unreserve(mine[what][1]))
            case "publish":
                turned_away = set()
                for i, (queue, size) in enumerate(what):
                    if model.has_room(queue, size):
                        model.bodies[queue].append(size)
                    else:
                        turned_away.add(i + 1)
                assert doors.publish(who, what, numbered=True) == turned_away
            case "get":
                got = doors.answer(0, m.Get(99, who, 0, 9, 1, True))
                assert bool(got.message) == bool(model.bodies[who])
                del model.bodies[who][:1]
            case "policy":
                model.is_bounded = what
                doors.bound(who, what)
            case "door dies":
                doors.die(who)
                for key in mine:
                    del model.reserved[key]
    for queue, bodies in model.bodies.items():
        assert doors.answer(0, m.Count(98, queue)).messages == len(bodies)
    for peer, each in model.reserved:
        doors.tell(peer, m.Unreserve(each))
    assert not doors.shard.reservations
    for spec in SPECS:
        assert reserved_in(doors.shard.queues[spec.id]) == (0, 0)


def test_a_transaction_that_reserved_nothing_hears_what_was_refused() -> None:
    """It has no confirm numbers: 0 stands for it."""
    doors = Doors()
    messages = ((COUNTED, 1),) * (MESSAGES_MAX + 2)
    assert doors.publish(0, messages, numbered=False) == {0}


def test_room_that_was_set_aside_outlives_the_consumer_it_was_found_with() -> None:
    doors = Doors()
    messages = ((COUNTED, 1),) * (MESSAGES_MAX + 2)
    doors.tell(
        0,
        m.Attach(
            50, COUNTED, 1, 9, 1, "tag", no_ack=False, exclusive=False, priority=0, prefetch=2
        ),
    )
    assert isinstance(doors.answer(0, m.Reserve(60, 1, wanted(messages))), m.Done)
    doors.tell(0, m.Release(51, [1]))
    doors.tell(0, m.Redeem(1))
    assert doors.publish(0, messages, numbered=False) == set()
    doors.tell(0, m.Unreserve(1))
    assert doors.answer(0, m.Count(98, COUNTED)).messages == len(messages)


def test_a_queue_that_may_refuse_nothing_any_more_takes_a_transaction_as_any_publish() -> None:
    """The queue remembers nothing of the messages.

    None of the room is left when the transaction has come.
    """
    doors = Doors()
    messages = ((COUNTED, 1),) * MESSAGES_MAX
    assert isinstance(doors.answer(0, m.Reserve(60, 1, wanted(messages))), m.Done)
    doors.bound(COUNTED, False)
    queue = doors.shard.queues[COUNTED]
    doors.tell(0, m.Redeem(1))
    assert doors.publish(0, messages * 3, numbered=False) == set()
    assert queue.backlog.facts is None and queue.is_asleep
    doors.tell(0, m.Unreserve(1))
    assert reserved_in(queue) == (0, 0)
    assert doors.answer(0, m.Count(98, COUNTED)).messages == 3 * MESSAGES_MAX


def test_room_set_aside_in_a_queue_that_refuses_nothing_holds_when_a_policy_bounds_it() -> None:
    doors = Doors()
    messages = ((COUNTED, 1),) * MESSAGES_MAX
    doors.bound(COUNTED, False)
    assert isinstance(doors.answer(0, m.Reserve(60, 1, wanted(messages))), m.Done)
    doors.bound(COUNTED, True)
    assert doors.publish(1, ((COUNTED, 1),), numbered=True) == {1}, "all its room is set aside"
    doors.tell(0, m.Redeem(1))
    assert doors.publish(0, messages, numbered=False) == set()
    doors.tell(0, m.Unreserve(1))
    assert reserved_in(doors.shard.queues[COUNTED]) == (0, 0)
    assert doors.answer(0, m.Count(98, COUNTED)).messages == MESSAGES_MAX
