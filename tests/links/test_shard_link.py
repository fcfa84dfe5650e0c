"""Test a link to a shard without a socket: messages sent, lost and heard, and requests."""

from __future__ import annotations

import asyncio
import mmap
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.front_door.consume.settling import Due
from shardmq.broker.front_door.links.shard_inbox import ShardInbox
from shardmq.broker.front_door.links.shard_link import (
    AWAY_S_MAX,
    LEADERS_WAITED_FOR_MAX,
    BatchSizes,
    ShardLink,
    is_down,
)
from shardmq.broker.front_door.links.shard_requests import ShardDown, ShardRefused, ShardRequests
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import codec, envelope, lane
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import TARGETS, Routes
from tests.reference import wire as reference
from tests.support.lanes import shared_by_two

LINE = b"\0\x01q\0"
PEER, INCARNATION, SHARD = 1, 99, 0


class Wire:
    """The socket of a link: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, flags: int = 0) -> None:
        self.sent.append(message)

    def taken(self) -> list[bytes]:
        sent, self.sent = self.sent, []
        return sent


class Waits:
    def __init__(self, in_sequence: bool = False) -> None:
        self.in_sequence = in_sequence
        self.log: list[Any] = []

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        self.log.append((connection, channel, first, last))

    def confirmed(self) -> None:
        self.log.append("confirmed")

    def lost(self) -> None:
        self.log.append("lost")


class Scene:
    """A link whose front door writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.controls: list[wire.Control] = []
        self.packer = codec.Packer(1)
        self.wire: Any = Wire()
        self.due = Due()
        self.link = ShardLink(
            SHARD,
            self.wire,
            peer=PEER,
            incarnation=INCARNATION,
            packer=self.packer,
            sizes=BatchSizes(),
            due=self.due,
            events=self,  # type: ignore[arg-type] # hears by __getattr__
            on_control=lambda _, message: self.controls.append(envelope.read_control(message)),
            on_ended=lambda _: None,
        )
        self.routes = Routes()
        self.routes.learn(LINE, TARGETS, [(SHARD, [7])], True)

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.heard.append((name, *what))

    def names(self) -> list[str]:
        heard, self.heard = self.heard, []
        return [name for name, *_ in heard]

    def publish(self, waits: Waits | None = None) -> None:
        fact = reference.Facts(1, b"", b"q", 0, b"\0\0", (b"x",), 0xFFFFFFFF, 2, 0xFF, 0)
        buffer, table = reference.read_of([fact])
        assert self.packer.pack(self.routes, buffer, table, 0, 5, 1, 0) == (1, codec.DONE)
        self.packer.take_touched()
        if waits is not None:
            self.link.packing.append(waits)

    def batches(self) -> list[int]:
        """Return the numbers of the batches that were sent since the last call."""
        return [
            codec.read_publish(message).batch
            for message in self.wire.taken()
            if envelope.read(message).kind == wire.PUBLISH
        ]

    def say(self, message: bytes) -> None:
        self.link.by_header[message[: wire.HEADER_BYTES]](message)

    def who(self) -> tuple[int, int, int, int]:
        return PEER, INCARNATION, self.link.epoch, SHARD

    def leave(self, now: float = 0.0) -> None:
        self.link.away_since, self.link.has_last_words = now, True
        self.link.ended(self.link.epoch)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.link.begin(1, 123)
    return scene


def test_a_batch_is_confirmed_once_and_its_refusals_are_named_before(scene: Scene) -> None:
    first, second = Waits(), Waits()
    scene.publish(first)
    scene.link.flush()
    scene.publish(second)
    scene.link.flush()
    assert scene.batches() == [1, 2]
    scene.say(envelope.confirmed(*scene.who(), 1, [(5, 1, 3, 4)]))
    assert (first.log, second.log) == ([(5, 1, 3, 4), "confirmed"], [])
    scene.say(envelope.confirmed(*scene.who(), 2))
    assert second.log == ["confirmed"]


def test_repeated_publishes_are_told_to_the_front_door(scene: Scene) -> None:
    waits = Waits()
    scene.publish(waits)
    scene.link.flush()
    told = [(5, 1 | wire.KNOWN, 3, 4), (5, 2 | wire.KNOWN | wire.ALTERED, 6, 6)]
    scene.say(envelope.confirmed(*scene.who(), 1, told))
    assert scene.heard == [("known", 5, 1, 3, 4, False), ("known", 5, 2, 6, 6, True)]
    assert waits.log == ["confirmed"]


def test_what_a_shard_that_ends_has_not_confirmed_is_lost_and_what_is_packed_waits(
    scene: Scene,
) -> None:
    sent, packed = Waits(), Waits()
    scene.publish(sent)
    scene.link.flush()
    scene.publish(packed)
    scene.leave()
    assert (sent.log, packed.log) == (["lost"], [])
    assert scene.names() == ["away", "received"]
    scene.link.flush()
    assert scene.batches() == [1]
    scene.link.begin(2, 124)
    scene.link.flush()
    assert scene.batches() == [2]
    scene.say(envelope.confirmed(*scene.who(), 2))
    assert packed.log == ["confirmed"]


def test_what_a_shard_that_is_handed_over_was_sent_is_confirmed_and_the_rest_waits(
    scene: Scene,
) -> None:
    sent, packed, later = Waits(), Waits(), Waits()
    scene.publish(sent)
    scene.link.flush()
    scene.publish(packed)
    scene.link.pause(10.0)
    scene.publish(later)
    scene.link.flush()
    *batches, last = scene.wire.taken()
    assert [codec.read_publish(message).batch for message in batches] == [1, 2]
    assert envelope.read_control(last) == wire.Paused()
    scene.say(envelope.confirmed(*scene.who(), 2))
    assert (sent.log, packed.log, later.log) == (["confirmed"], ["confirmed"], [])
    assert scene.names() == []
    scene.link.socket = None
    loop = SimpleNamespace(time=lambda: 10.1)
    scene.link.move(loop)  # type: ignore[arg-type] # as much of a loop as it needs
    assert scene.names() == ["away", "received"]
    assert scene.link.away_since == 10.0
    scene.link.socket = scene.wire
    scene.link.begin(2, 124)
    scene.link.flush()
    assert scene.batches() == [3]
    scene.say(envelope.confirmed(*scene.who(), 3))
    assert later.log == ["confirmed"]


def test_a_shard_that_is_not_handed_over_in_time_has_publishes_nacked(scene: Scene) -> None:
    waits = Waits()
    scene.link.pause(10.0)
    scene.publish(waits)
    scene.link.tick(10.0 + AWAY_S_MAX)
    assert waits.log == []
    scene.link.tick(10.1 + AWAY_S_MAX)
    assert waits.log == ["lost"]


def test_a_lost_sequence_takes_what_is_packed_behind_it(scene: Scene) -> None:
    sent, packed = Waits(in_sequence=True), Waits()
    scene.publish(sent)
    scene.link.flush()
    scene.publish(packed)
    scene.leave()
    assert (sent.log, packed.log) == (["lost"], ["lost"])
    assert not scene.packer.messages(SHARD)


def test_the_end_of_an_older_process_is_no_news(scene: Scene) -> None:
    waits = Waits()
    scene.publish(waits)
    scene.link.flush()
    scene.link.ended(0)
    assert (waits.log, scene.heard) == ([], [])


def test_a_batch_set_aside_goes_to_the_next_process(scene: Scene) -> None:
    waits = Waits()
    scene.leave()
    scene.publish(waits)
    scene.link.end_batch()
    assert scene.batches() == [] and scene.link.in_flight > 0
    scene.link.begin(2, 124)
    scene.link.send_aside()
    assert scene.batches() == [1]
    scene.say(envelope.confirmed(*scene.who(), 1))
    assert waits.log == ["confirmed"]


def test_who_waits_for_a_shard_that_stays_away_is_told_after_a_while(scene: Scene) -> None:
    aside, packed = Waits(), Waits()
    scene.leave(10.0)
    scene.publish(aside)
    scene.link.end_batch()
    scene.publish(packed)
    scene.names()
    scene.link.tick(10.0 + AWAY_S_MAX)
    assert (aside.log, packed.log, scene.names()) == ([], [], [])
    scene.link.tick(10.1 + AWAY_S_MAX)
    assert (aside.log, packed.log) == (["lost"], ["lost"])
    assert (scene.names(), scene.link.in_flight) == (["publish_room", "received"], 0)
    scene.publish()  # nobody waits for it: it stays
    scene.link.tick(20.0 + AWAY_S_MAX)
    assert scene.packer.messages(SHARD) == 1


def test_each_next_leader_of_a_shard_is_waited_for_but_not_without_end(scene: Scene) -> None:
    link, now = scene.link, 100.0
    link.socket, link.down_s = None, 8.0
    loop: Any = SimpleNamespace(time=lambda: now)

    def learn() -> None:
        link.move(loop)
        dialer: Any = SimpleNamespace(start=lambda loop: None, close=lambda linger_ms: None)
        link.dialer = dialer
        link.connect(loop, "")

    for epoch in (2, 3):
        scene.leave(now)
        now += link.down_s + 1
        for _ in range(LEADERS_WAITED_FOR_MAX):
            assert is_down(link, now)
            learn()
            assert not is_down(link, now + link.down_s), "the node may have to recover the shard"
            now += link.down_s + 1
        learn()
        assert is_down(link, now), "the address changes for ever"
        link.begin(epoch, 124)
        assert not is_down(link, now)


def test_a_disk_that_does_not_answer_is_not_waited_for(scene: Scene) -> None:
    waits = Waits()
    scene.publish(waits)
    scene.link.flush()
    scene.link.tick(0.0)
    assert waits.log == []
    scene.link.stalled = True
    scene.link.tick(0.0)
    assert (waits.log, scene.names()) == (["lost"], ["received"])


@pytest.mark.parametrize("end", ["leaves", "is followed", "hangs"])
def test_who_waits_for_acks_is_told_when_no_answer_comes(scene: Scene, end: str) -> None:
    waits, late = Waits(), Waits()
    asked = scene.link.settled_waits.ask([7], waits)
    scene.link.tell(asked)
    assert waits.log == []
    if end == "leaves":
        scene.leave()
    elif end == "is followed":
        scene.link.begin(2, 124)
    else:
        scene.link.stalled = True
        scene.link.tick(0.0)
    assert waits.log == ["lost"]
    assert scene.link.settled_waits.ask([7], late).number != asked.number
    scene.link.settled_waits.answered(wire.SettledSynced(asked.number, True))
    assert (waits.log, late.log) == (["lost"], [])


def test_the_window_opens_when_the_shard_gives_credit(scene: Scene) -> None:
    scene.publish()
    scene.link.flush()
    weight = scene.link.in_flight
    assert weight > 0
    scene.say(envelope.credit(*scene.who(), [(0, weight)]))
    assert (scene.link.in_flight, scene.heard) == (0, [("publish_room", SHARD)])


def test_settles_and_credit_go_with_the_batch_and_not_to_a_shard_that_is_away(scene: Scene) -> None:
    def wait() -> None:
        scene.link.settles.add(3, wire.ACK, 1, 2)
        scene.link.credits[5], scene.link.credit_due = 10, True

    wait()
    scene.publish()
    scene.link.flush()
    kinds = [wire.SETTLE, wire.PUBLISH, wire.CREDIT]
    assert [envelope.read(message).kind for message in scene.wire.taken()] == kinds
    scene.leave()
    wait()
    scene.link.flush()
    assert scene.wire.sent == [] and not scene.link.settles and not scene.link.credits


# -- requests -------------------------------------------------------------------------------------


def requests_of(scene: Scene) -> ShardRequests:
    requests = ShardRequests([scene.link])
    requests.loop = asyncio.get_running_loop()
    return requests


def test_who_is_refused_knows_whether_the_shard_was_asked(scene: Scene) -> None:
    async def play() -> None:
        requests = requests_of(scene)
        sent = requests.ask(SHARD, lambda request: wire.Count(request, 7))
        scene.link.socket = None  # the shard is another node's
        scene.leave(10.0)
        unsent = requests.ask(SHARD, lambda request: wire.Count(request, 7))
        requests.give_up(10.1)
        for asked, was_sent in ((sent, True), (unsent, False)):
            error = asked.exception()
            assert isinstance(error, ShardDown) and error.was_sent == was_sent
        again = requests.ask(SHARD, lambda request: wire.Count(request, 7))
        scene.link.begin(2, 124)
        requests.ask_again(scene.link)
        scene.leave(20.0)
        requests.give_up(20.1)
        assert again.exception().was_sent  # type: ignore[union-attr]

    asyncio.run(play())


def said(scene: Scene) -> list[wire.Control]:
    return [envelope.read_control(message) for message in scene.wire.taken()]


def test_a_request_waits_for_its_shard_and_is_made_anew_for_the_next_process(scene: Scene) -> None:
    async def play() -> None:
        requests = requests_of(scene)
        scene.leave()
        queues = [7]
        answer = requests.ask(SHARD, lambda request: wire.Purge(request, queues[0]))
        assert said(scene) == []
        queues[0] = 8
        scene.link.begin(2, 124)
        requests.ask_again(scene.link)
        assert said(scene) == [wire.Purge(1, 8)]
        requests.answered(scene.link, 1, wire.Done(1, 4, 0))
        assert await answer == wire.Done(1, 4, 0)
        requests.answered(scene.link, 1, wire.Done(1, 4, 0))  # nobody asks any more

    asyncio.run(play())


def test_who_ends_a_consumer_waits_for_a_shard_of_this_node_but_not_for_one_elsewhere(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        requests = requests_of(scene)

        def release() -> tuple[asyncio.Future[wire.Control], asyncio.Future[wire.Control]]:
            answer = requests.ask(SHARD, lambda request: wire.Release(request, [1]))
            return answer, requests.unless_away(SHARD, answer)

        here, waiting = release()
        requests.away(SHARD)
        assert waiting is here and not here.done()
        monkeypatch.setattr(ShardLink, "is_elsewhere", True)
        answer, waiting = release()
        requests.answered(scene.link, 2, wire.Done(2, 5))
        assert await waiting == wire.Done(2, 5)
        answer, waiting = release()
        refused, refusing = release()
        requests.answered(scene.link, 4, wire.Refused(4, 404, "gone"))
        with pytest.raises(ShardRefused):
            await refusing
        assert refused.done() and not waiting.done()
        requests.away(SHARD)
        assert await waiting == wire.Done(0) and not answer.done()
        scene.leave()
        later, waiting = release()
        assert await waiting == wire.Done(0)
        scene.link.begin(2, 124)
        said(scene)
        requests.ask_again(scene.link)  # its new process does it, for an auto-delete queue
        assert said(scene) == [wire.Release(n, [1]) for n in (1, 3, 5)]
        requests.answered(scene.link, 5, wire.Done(5))
        assert await later == wire.Done(5)

    asyncio.run(play())


def test_what_nobody_waits_for_or_is_attached_again_is_not_asked_again(scene: Scene) -> None:
    async def play() -> None:
        requests = requests_of(scene)
        gone = requests.ask(SHARD, lambda request: wire.Get(request, 7, 0, 5, 1, True))
        requests.ask(SHARD, lambda request: wire.Release(request, []))
        gone.cancel()
        said(scene)
        requests.ask_again(scene.link)
        assert said(scene) == [wire.Release(2, [])]

    asyncio.run(play())


def test_a_refusal_is_raised_and_a_queue_that_went_is_none(scene: Scene) -> None:
    async def play() -> None:
        requests, queue = requests_of(scene), QueuePut("/", "q", 7, SHARD)
        asked = requests.ask(SHARD, lambda request: wire.Release(request, []))
        requests.answered(scene.link, 1, wire.Refused(1, 404, "gone"))
        with pytest.raises(ShardRefused, match="gone"):
            await asked
        counting = asyncio.create_task(requests.ask_about(queue, wire.Count))
        await asyncio.sleep(0)
        requests.answered(scene.link, 2, wire.Refused(2, 404, "gone"))
        assert await counting is None
        purging = asyncio.create_task(requests.ask_about(queue, wire.Purge))
        await asyncio.sleep(0)
        requests.answered(scene.link, 3, wire.Refused(3, checks.NO_ROOM, "full"))
        with pytest.raises(checks.Refusal, match="full"):
            await purging

    asyncio.run(play())


# -- the inbox ------------------------------------------------------------------------------------


class FakeLane:
    """A ring that holds messages, which come before what comes by ZeroMQ."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages, self.log = messages, list[str]()

    def came_by_zmq(self, kind: int) -> list[bytes]:
        return self.take(0)

    def take(self, most: int, taker: object = None) -> list[bytes]:
        taken, self.messages = self.messages, []
        return taken

    def let_go(self) -> None:
        self.log.append("let go")

    def sleep(self) -> bool:
        return True


def test_messages_are_handled_in_the_order_they_were_sent_and_a_bad_one_harms_no_other(
    scene: Scene,
) -> None:
    inbox = ShardInbox(SimpleNamespace(), [scene.link], "nowhere", scene)  # type: ignore[arg-type]
    first, second = (envelope.control(*scene.who(), wire.Cancelled(number)) for number in (1, 2))
    damaged = first[: wire.HEADER_BYTES] + b"\xff"
    lane: Any = FakeLane([first, damaged])
    scene.link.lane = lane
    inbox.take_by_zmq(second)
    assert scene.controls == [wire.Cancelled(1), wire.Cancelled(2)]
    assert (scene.names(), lane.log) == (["own_deliveries"], ["let go"])
    inbox.take_by_zmq(b"garbage")
    inbox.take_by_zmq(envelope.control(PEER, INCARNATION + 1, 1, SHARD, wire.Cancelled(3)))
    lane.messages = [first]
    inbox.take_by_zmq(envelope.header(wire.RING, *scene.who()))
    assert scene.controls == [wire.Cancelled(1), wire.Cancelled(2), wire.Cancelled(1)]
    assert scene.names() == ["own_deliveries", "receiving", "received", "own_deliveries"]


def test_what_a_shard_that_is_gone_wrote_into_the_ring_is_read_when_the_word_for_it_comes_by_zmq(
    scene: Scene,
) -> None:
    inbox = ShardInbox(SimpleNamespace(), [scene.link], "nowhere", scene)  # type: ignore[arg-type]
    shared, others = shared_by_two(mmap.mmap(-1, lane.MEMORY_BYTES))
    by_zmq = list[bytes]()
    ours = scene.link.lane = lane.Lane(shared, scene.who(), by_zmq.append, at_shard=False)
    inbox._lanes[ours.bell] = scene.link
    shards = lane.Lane(others, scene.who(), by_zmq.append, at_shard=True)
    shards.send(envelope.control(*scene.who(), wire.Cancelled(1)))
    large = wire.Cancelled(2)
    shards.send(envelope.control(*scene.who(), large) + bytes(lane.RING_BYTES))
    shards.close()
    inbox._rung(scene.link, ours)
    inbox._end(scene.link, ours)
    assert scene.link.lane is None
    assert scene.controls == []
    resumed, last = by_zmq
    inbox.take_by_zmq(resumed)
    inbox.take_by_zmq(last[: len(envelope.control(*scene.who(), large))])
    assert scene.controls == [wire.Cancelled(1), large]


def test_of_an_older_process_only_control_messages_are_read(scene: Scene) -> None:
    inbox = ShardInbox(SimpleNamespace(), [scene.link], "nowhere", scene)  # type: ignore[arg-type]
    waits = Waits()
    scene.publish(waits)
    scene.link.flush()
    older = PEER, INCARNATION, 0, SHARD
    inbox.take_by_zmq(envelope.confirmed(*older, 1))
    inbox.take_by_zmq(envelope.control(*older, wire.Cancelled(1)))  # its reader looks at the epoch
    assert (waits.log, scene.controls) == ([], [wire.Cancelled(1)])
