"""Every batch is confirmed or lost, and every request is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shardmq.broker.front_door.hot_state import DELIVERY_CREDIT_BYTES
from shardmq.broker.front_door.links import shard_links
from shardmq.broker.front_door.links.shard_link import PUBLISH_WINDOW_BYTES
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.shardd.wire import codec, envelope, lane
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import TARGETS, Routes
from shardmq.shardd.wire.session import SessionKeys
from tests.reference import wire as reference
from tests.support.fake_shard import FakeShard

LINE = b"\0\x01q\0"


class Heard:
    """What the links tell their front door."""

    def __init__(self) -> None:
        self.deliveries: list[tuple[int, tuple[Any, ...]]] = []
        self.restarts: list[int] = []
        self.outlives = 0
        self.aways: list[int] = []
        self.told_what: list[tuple[int, wire.Control]] = []
        self.room: list[int] = []
        self.known_before: list[tuple[int, int, int, int, bool]] = []
        self.something = asyncio.Event()

    def delivery(
        self, shard: int, section: tuple[int, int, int, int, bool, int, memoryview, int]
    ) -> None:
        self.deliveries.append((shard, (*section[:6], bytes(section[6]))))

    def away(self, shard: int) -> None:
        self.aways.append(shard)
        self.something.set()

    def restarted(self, shard: int) -> None:
        self.restarts.append(shard)

    def told(self, shard: int, what: wire.Control) -> None:
        self.told_what.append((shard, what))

    def outlived(self) -> None:
        self.outlives += 1

    def receiving(self) -> None: ...

    def publish_room(self, shard: int) -> None:
        self.room.append(shard)

    def known(self, connection: int, channel: int, first: int, last: int, altered: bool) -> None:
        self.known_before.append((connection, channel, first, last, altered))

    def own_deliveries(self) -> None: ...

    def received(self) -> None:
        self.something.set()

    async def until(self, found: Any) -> None:
        async with asyncio.timeout(60):
            while not found():
                self.something.clear()
                await self.something.wait()


class Waits:
    """Stands for publishes that wait for their batch."""

    in_sequence = False

    def __init__(self) -> None:
        self.log: list[Any] = []

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        self.log.append((connection, channel, first, last))

    def confirmed(self) -> None:
        self.log.append("confirmed")

    def lost(self) -> None:
        self.log.append("lost")


class Pair:
    def __init__(self, links: ShardLinks, heard: Heard, shards: list[FakeShard]) -> None:
        self.links, self.heard, self.shards = links, heard, shards
        self.routes = Routes()
        self.routes.learn(LINE, TARGETS, [(0, [7])], True)

    async def restart(self) -> None:
        """Shard 0 dies and comes back; the front door keeps saying where it is."""
        before = self.heard.restarts.count(0)
        restarting = asyncio.create_task(self.shards[0].restart())
        while not restarting.done():
            self.links.tick()
            await asyncio.wait([restarting], timeout=0.01)
        restarting.result()
        await self.heard.until(lambda: self.heard.restarts.count(0) > before)

    def gather(self, count: int = 1, size: int = 1) -> Waits:
        fact = reference.Facts(1, b"", b"q", 0, b"\0\0", (b"x" * size,), 0xFFFFFFFF, 2, 0xFF, 0)
        buffer, table = reference.read_of([fact] * count)
        assert self.links.packer.pack(self.routes, buffer, table, 0, 5, 1, 0) == (
            count,
            codec.DONE,
        )
        waits = Waits()
        self.links.wait_for(self.links.packer.take_touched(), waits)
        return waits

    def publish(self, count: int = 1, size: int = 1) -> Waits:
        waits = self.gather(count, size)
        self.links.flush()
        return waits


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    runtime = tmp_path / "run"
    runtime.mkdir()
    shards = [FakeShard(runtime, number) for number in range(2)]
    heard = Heard()
    config = BrokerConfig(runtime_dir=str(runtime), door=0, shards=[0, 1], listen_fds=[], boot="b")
    links = ShardLinks(config, 99, heard)
    links.tick()  # its front door may still wait for the catalog
    starting = asyncio.create_task(links.start())
    for shard in shards:
        await shard.greet()
    await asyncio.wait_for(starting, 60)
    await heard.until(lambda: len(heard.room) == len(shards))
    heard.room.clear()
    yield Pair(links, heard, shards)
    links.stop()
    for shard in shards:
        shard.close()


async def test_a_batch_is_confirmed_when_its_shard_says_so(pair: Pair) -> None:
    first, second = pair.publish(), pair.publish()
    head, message = await pair.shards[0].receive()
    assert (head.kind, codec.read_publish(message).batch) == (wire.PUBLISH, 1)
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 1))
    await pair.heard.until(lambda: first.log)
    assert (first.log, second.log) == (["confirmed"], [])


async def test_a_shard_of_another_wire_version_is_told_of_by_name_and_not_listened_to(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def hello(peer: int, incarnation: int, epoch: int, shard: int) -> bytes:
        message = bytearray(
            envelope.control(peer, incarnation, epoch + 1, shard, wire.Hello(1, True))
        )
        message[1] = wire.WIRE_VERSION + 1
        return bytes(message)

    epoch, waits = pair.links.links[0].epoch, pair.publish()
    await pair.shards[0].send(hello)
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 1))
    await pair.heard.until(lambda: waits.log)
    assert (pair.links.links[0].epoch, waits.log) == (epoch, ["confirmed"])
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "shardmq.broker.front_door.links.shard_inbox"
    ]
    versions = (
        f"is of wire version {wire.WIRE_VERSION + 1}, this process speaks {wire.WIRE_VERSION}"
    )
    about = f"a message between front door 0 and shard 0 {versions}: restart all of one release"
    assert said == [f"from a shard: {about}"]


async def test_a_small_batch_may_wait_until_it_is_no_longer_small_or_something_leaves_anyway(
    pair: Pair,
) -> None:
    least = 2000
    pair.gather(1)
    assert pair.links.flush(least)
    pair.gather(1, 3000)
    assert not pair.links.flush(least)
    pair.gather(1)
    assert pair.links.flush(least)
    pair.links.settle(0, pair.shards[0].epoch, 1, 0, 1, 1)
    assert not pair.links.flush(least)
    batches = []
    while len(batches) < 2:
        head, message = await pair.shards[0].receive()
        if head.kind == wire.PUBLISH:
            batches.append(codec.read_publish(message).messages)
    assert batches == [2, 1]


async def test_batches_of_several_shards_wait_for_more_each(pair: Pair) -> None:
    alone, shared = 2000, 4000
    pair.gather(1, 3000)
    assert not pair.links.flush(alone, shared)
    pair.routes.clear()
    pair.routes.learn(LINE, TARGETS, [(0, [7]), (1, [8])], True)
    pair.gather(1, 3000)
    assert pair.links.flush(alone, shared)
    pair.gather(1, 3000)
    assert not pair.links.flush(alone, shared)
    for shard, sent in ((0, [1, 2]), (1, [2])):
        heads = [await pair.shards[shard].receive() for _ in sent]
        assert [codec.read_publish(message).messages for _, message in heads] == sent


async def test_what_a_shard_says_is_heard_while_passes_keep_their_distance(
    pair: Pair, tmp_path: Path
) -> None:
    with lane.listen(tmp_path / "run", 0) as listener:
        await pair.restart()
        accepted = lane.accept(listener)
    assert accepted is not None
    _, shared = accepted
    by_zmq: list[bytes] = []
    shard = lane.Lane(shared, pair.shards[0].who, by_zmq.append, at_shard=True)
    pair.links.inbox.hear_for(0.001)  # that it is there
    waits = pair.publish()
    messages: list[envelope.Message] = []
    while not messages:  # the words that what follows comes through the ring, and then that
        head, _ = await pair.shards[0].receive()
        messages = shard.came_by_zmq(head.kind) or shard.take(lane.ALL)
    assert codec.read_publish(messages[0]).batch == 1
    shard.send(envelope.control(*pair.shards[0].who, wire.Cancelled(1)))
    await pair.shards[0].send(lambda *_: by_zmq.pop())
    await pair.heard.until(lambda: pair.heard.told_what)
    shard.send(envelope.confirmed(*pair.shards[0].who, 1))
    pair.links.inbox.hear_for(0.001)
    assert waits.log == ["confirmed"]
    shard.close()


async def test_refused_messages_are_named_before_the_batch_is_confirmed(pair: Pair) -> None:
    waits = pair.publish(3)
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 1, [(5, 1, 2, 2)]))
    await pair.heard.until(lambda: len(waits.log) > 1)
    assert waits.log == [(5, 1, 2, 2), "confirmed"]


async def test_known_messages_are_told_and_refused_to_nobody(pair: Pair) -> None:
    waits = pair.publish(4)
    told = [(5, 1, 4, 4), (5, 1 | wire.KNOWN, 1, 2), (5, 1 | wire.ALTERED, 3, 3)]
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 1, told))
    await pair.heard.until(lambda: len(waits.log) > 1)
    assert waits.log == [(5, 1, 4, 4), "confirmed"]
    assert pair.heard.known_before == [(5, 1, 1, 2, False), (5, 1, 3, 3, True)]


@pytest.mark.row("K14")
async def test_while_a_disk_does_not_answer_who_waits_for_a_confirm_is_told_no(pair: Pair) -> None:
    before = pair.publish()
    pair.links.set_stalled(0, True)
    during = pair.publish()
    pair.links.tick()
    assert (before.log, during.log) == (["lost"], ["lost"])
    pair.links.set_stalled(0, False)
    after = pair.publish()
    pair.links.tick()
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 3))
    await pair.heard.until(lambda: after.log)
    assert (before.log, during.log, after.log) == (["lost"], ["lost"], ["confirmed"])


async def test_what_a_killed_shard_did_not_confirm_is_lost_and_said_so(pair: Pair) -> None:
    sent = pair.publish()
    await pair.restart()
    await pair.heard.until(lambda: sent.log)
    assert sent.log == ["lost"]
    assert pair.heard.restarts.count(0) == 2  # the first Hello counts
    again = pair.publish()
    head, _ = await pair.shards[0].receive()
    while head.epoch != pair.shards[0].epoch:  # what was on its way to the old process is stale
        head, _ = await pair.shards[0].receive()
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 2))
    await pair.heard.until(lambda: again.log)
    assert again.log == ["confirmed"]


async def test_a_shard_that_is_gone_is_said_to_be_away_when_its_last_words_are_heard(
    pair: Pair,
) -> None:
    await pair.shards[1].say(wire.Cancelled(1))
    pair.shards[1].close()
    await pair.heard.until(lambda: pair.heard.aways)
    assert pair.heard.aways == [1] and pair.heard.told_what == [(1, wire.Cancelled(1))]


async def test_a_confirm_of_an_older_epoch_confirms_nothing(pair: Pair) -> None:
    old = pair.shards[0].who
    await pair.restart()
    waits = pair.publish()
    await pair.shards[0].send(lambda *_: envelope.confirmed(*old, 1))
    await pair.shards[0].say(wire.Cancelled(1))
    await pair.heard.until(lambda: pair.heard.told_what)
    assert waits.log == []


async def test_a_request_outlives_the_shard_that_was_asked(pair: Pair) -> None:
    asked = asyncio.create_task(pair.links.count(QueuePut("/", "q", 7, 0)))
    what = await pair.shards[0].receive_control()
    assert isinstance(what, wire.Count) and what.queue == 7
    await pair.restart()
    again = await pair.shards[0].receive_control()
    assert again == what
    await pair.shards[0].say(wire.Done(what.request, 3, 2))
    assert await asked == (3, 2)


async def test_what_is_asked_again_is_as_things_are_then(pair: Pair) -> None:
    queues = [7]
    pair.links.ask(0, lambda request: wire.Count(request, queues[-1]))
    before = await pair.shards[0].receive_control()
    queues.append(8)
    await pair.restart()
    again = await pair.shards[0].receive_control()
    assert isinstance(before, wire.Count) and again == wire.Count(before.request, 8)


async def test_an_attach_of_a_consumer_that_is_attached_again_is_not_repeated(pair: Pair) -> None:
    def attach(request: int) -> wire.Attach:
        return wire.Attach(request, 7, 1, 1, 1, "tag", False, False, 0, 0, resumed=True)

    pair.links.ask(0, attach)
    await pair.shards[0].receive_control()
    await pair.restart()
    pair.links.tell(0, wire.SetBounds(1, None, 1))
    assert isinstance(await pair.shards[0].receive_control(), wire.SetBounds)


async def test_a_refusal_is_an_error_with_its_code(pair: Pair) -> None:
    asked = pair.links.ask(1, lambda request: wire.Purge(request, 9))
    what = await pair.shards[1].receive_control()
    assert isinstance(what, wire.Purge)
    await pair.shards[1].say(wire.Refused(what.request, 404, "gone"))
    with pytest.raises(ShardRefused) as refused:
        await asked
    assert refused.value.code == 404


async def test_a_shard_that_is_behind_stops_who_feeds_it_until_it_has_caught_up(pair: Pair) -> None:
    pair.heard.room.clear()
    pair.publish(size=PUBLISH_WINDOW_BYTES)
    assert pair.links.crowded(0b11) == [0]
    _, message = await pair.shards[0].receive()
    await pair.shards[0].send(lambda *who: envelope.credit(*who, [(0, len(message))]))
    await pair.heard.until(lambda: pair.heard.room)
    assert not pair.links.crowded(0b11)


async def test_references_to_many_queues_count_as_bytes_do(pair: Pair) -> None:
    pair.heard.room.clear()
    packer, stored = pair.links.packer, bytes(8) + b"\0\1q"
    packer.add_stored(
        0,
        list(range(PUBLISH_WINDOW_BYTES // 32)),
        stored,
        5,
        1,
        0,
        0,
        0xFFFFFFFF,
        0xFF,
        False,
        False,
        9,
    )
    weight = packer.weight(0)
    assert packer.pending(0) - weight < PUBLISH_WINDOW_BYTES < weight
    assert pair.links.crowded(0b11) == [0]
    pair.links.flush()
    assert pair.links.crowded(0b11) == [0]
    _, message = await pair.shards[0].receive()
    assert codec.read_publish(message).weight == len(message) + weight
    await pair.shards[0].send(lambda *who: envelope.credit(*who, [(0, len(message) + weight)]))
    await pair.heard.until(lambda: pair.heard.room)
    assert pair.links.links[0].in_flight == 0


async def test_settles_and_batches_of_one_pass_arrive_in_order(pair: Pair) -> None:
    pair.links.settle(0, pair.shards[0].epoch, 4, wire.ACK, 1, 3)
    pair.publish()
    pair.links.tell(0, wire.Release(1, [4]))
    kinds = [(await pair.shards[0].receive())[0].kind for _ in range(3)]
    assert kinds == [wire.SETTLE, wire.PUBLISH, wire.CONTROL]


async def test_settles_of_an_older_epoch_are_forgotten(pair: Pair) -> None:
    old = pair.shards[0].epoch
    await pair.restart()
    pair.links.settle(0, old, 4, wire.ACK, 1, 3)
    pair.links.flush()
    pair.links.tell(0, wire.Release(1, [4]))
    assert isinstance(await pair.shards[0].receive_control(), wire.Release)


async def test_acks_that_wait_go_with_what_is_told_next_or_by_themselves_soon(pair: Pair) -> None:
    epoch = pair.shards[0].epoch
    pair.links.ack(0, epoch, 4, 1, 3, 100)
    pair.links.flush()
    pair.links.ack(0, epoch, 4, 4, 5, 100)
    pair.links.tell(0, wire.Release(1, [4]))
    head, message = await pair.shards[0].receive()
    assert head.kind == wire.SETTLE and envelope.read_settles(message) == [(4, wire.ACK, 1, 5)]
    assert isinstance(await pair.shards[0].receive_control(), wire.Release)
    pair.links.ack(0, epoch, 4, 6, 6, 100)
    async with asyncio.timeout(60):
        head, message = await pair.shards[0].receive()
    assert head.kind == wire.SETTLE and envelope.read_settles(message) == [(4, wire.ACK, 6, 6)]


async def test_credit_for_deliveries_is_given_in_steps(pair: Pair) -> None:
    epoch = pair.shards[0].epoch
    pair.links.credit(0, epoch, 5, DELIVERY_CREDIT_BYTES - 1)
    pair.links.flush()
    pair.links.credit(0, epoch, 5, 1)
    pair.links.flush()
    head, message = await pair.shards[0].receive()
    assert head.kind == wire.CREDIT
    assert envelope.read_credit(message) == [(5, DELIVERY_CREDIT_BYTES)]


async def test_a_message_that_cannot_be_read_does_not_make_it_deaf(pair: Pair) -> None:
    waits = pair.publish()
    await pair.shards[0].send(lambda *who: envelope.header(wire.DELIVER, *who) + b"\xff" * 40)
    await pair.shards[0].send(lambda *who: envelope.confirmed(*who, 1))
    await pair.heard.until(lambda: waits.log)
    assert waits.log == ["confirmed"]


async def test_a_batch_never_mixes_vhosts(pair: Pair) -> None:
    fact = reference.Facts(1, b"", b"q", 0, b"\0\0", (b"x",), 0xFFFFFFFF, 0, 0xFF, 0)
    buffer, table = reference.read_of([fact])
    for vhost in ("a", "a", "b", "a"):
        pair.links.use_vhost(vhost)
        pair.links.packer.pack(pair.routes, buffer, table, 0, 5, 0, 0)
    pair.links.flush()
    counts = [codec.read_publish((await pair.shards[0].receive())[1]).messages for _ in range(3)]
    assert counts == [2, 1, 1]


class Session:
    """A session to a shard of another node, in place of a Dialer."""

    made: list[Session]

    def __init__(self, context: Any, address: str, keys: Any, first: int, **calls: Any) -> None:
        self.address, self.incarnation, self.is_closed = address, first, False
        self.sent: list[wire.Control | int] = []
        self._said: list[bytes] = []
        self._began, self._speaks, self.ended = calls["began"], calls["speaks"], calls["ended"]
        self.who = 0, first, 5 + len(self.made), 0
        self.made.append(self)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began()

    def send(self, message: bytes) -> None:
        kind = envelope.read(message).kind
        self.sent.append(envelope.read_control(message) if kind == wire.CONTROL else kind)

    def say(self, message: bytes | wire.Control) -> None:
        is_whole = isinstance(message, bytes)
        self._said.append(message if is_whole else bytes(envelope.control(*self.who, message)))
        self._speaks()

    def take(self) -> bytes | None:
        return self._said.pop(0) if self._said else None

    def close(self, linger_ms: int = 0) -> None:
        self.is_closed = True


@pytest.fixture
async def moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Yield links to a shard at tcp://first of another node, which is there."""
    monkeypatch.setattr(Session, "made", [], raising=False)
    monkeypatch.setattr(shard_links, "Dialer", Session)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    config = BrokerConfig(
        runtime_dir=str(tmp_path), door=0, shards=[], listen_fds=[], boot="b",
        session_keys=SessionKeys(public, secret, 10.0), node_timeout_s=6.0,
    )  # fmt: skip
    heard = Heard()
    links = ShardLinks(config, 99, heard)
    starting = asyncio.create_task(links.start())
    await asyncio.sleep(0)
    links.learn(0, "tcp://first")
    Session.made[0].say(wire.Hello(1, True))
    await starting
    yield Pair(links, heard, [])
    if not links._context.closed:
        links.stop()


async def test_a_shard_that_is_handed_over_is_heard_until_its_session_ends(moving: Pair) -> None:
    links, [first] = moving.links, Session.made
    sent, unsent, asked = moving.publish(), moving.publish(), Waits()
    links.tell(0, links.links[0].settled_waits.ask([7], asked))
    first.say(wire.Hello(1, False, leaving=True))
    said = list(first.sent)
    assert said[-1] == wire.Paused()
    for address in ("tcp://second", "tcp://third", "tcp://third"):
        links.learn(0, address, "c")
    later = moving.publish()
    counted = links.ask(0, lambda number: wire.Count(number, 7))
    assert first.sent == said and not links.is_up(0), "it is asked nothing more"
    first.say(envelope.confirmed(*first.who, 1))
    first.say(wire.SettledSynced(1, True))
    assert (sent.log, asked.log, unsent.log) == (["confirmed"], ["confirmed"], [])
    assert (Session.made, moving.heard.aways) == ([first], [])
    first.ended()
    assert first.is_closed and moving.heard.aways == [0]
    assert (sent.log, unsent.log, later.log) == (["confirmed"], ["lost"], [])
    [_, third] = Session.made
    third.say(wire.Hello(2, True))
    links.flush()
    third.say(envelope.confirmed(*third.who, 3))
    assert (third.address, later.log) == ("tcp://third", ["confirmed"])
    assert [what for what in third.sent if isinstance(what, wire.Count)] == [wire.Count(1, 7)]
    third.say(wire.Done(1, 3, 2))
    assert await counted == wire.Done(1, 3, 2)


async def test_a_former_leader_that_does_not_end_is_heard_for_a_bounded_time(
    moving: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "HANDED_OVER_S_MAX", 0.0)
    [first], waits = Session.made, moving.publish()
    first.say(wire.Hello(1, False, leaving=True))
    moving.links.learn(0, "tcp://second")
    await moving.heard.until(lambda: waits.log)
    assert (waits.log, first.is_closed, len(Session.made)) == (["lost"], True, 2)
    first.say(envelope.confirmed(*first.who, 1))
    assert waits.log == ["lost"]


async def test_a_shard_that_moves_twice_is_waited_for_anew(
    moving: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "HANDED_OVER_S_MAX", 0.0)
    [first] = Session.made
    first.say(wire.Hello(1, False, leaving=True))
    moving.links.learn(0, "tcp://second")
    first.ended()
    monkeypatch.setattr(shard_links, "HANDED_OVER_S_MAX", 60.0)
    [_, second] = Session.made
    second.say(wire.Hello(2, True))
    waits = moving.publish()
    second.say(wire.Hello(2, False, leaving=True))
    moving.links.learn(0, "tcp://third")
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.0, later.set_result, None)
    await later  # the wait for the first would have been over
    second.say(envelope.confirmed(*second.who, 1))
    assert (waits.log, Session.made) == (["confirmed"], [first, second])
    second.ended()
    assert Session.made[2].address == "tcp://third"


async def test_a_shard_that_was_lost_with_a_forgotten_node_is_waited_for_no_more(
    moving: Pair,
) -> None:
    """Nothing that waits for all shards would end else, such as a change of the shard queues."""
    links, [session], waits = moving.links, Session.made, moving.publish()
    links.of_cluster = []
    links.tick()
    assert links.known == [links.links[0]], "its process still runs, cut off from etcd"
    session.ended()
    links.of_cluster = [0]
    links.tick()
    unsent, fence = moving.publish(), asyncio.create_task(links.fence())
    await asyncio.sleep(0)
    assert not session.is_closed and not fence.done(), "its node may come back"
    links.of_cluster = [1]
    links.tick()
    assert session.is_closed and links.known == []
    assert (waits.log, unsent.log) == (["lost"], ["lost"])
    await asyncio.wait_for(fence, 60)
    links.tick()
    links.learn(0, "tcp://reused")
    assert [each.address for each in Session.made] == ["tcp://first", "tcp://reused"]


async def test_a_shard_that_was_not_handed_over_is_asked_at_its_next_place_at_once(
    moving: Pair,
) -> None:
    """A process that stands still might answer later what was true before."""
    [first], waits = Session.made, moving.publish()
    moving.links.learn(0, "tcp://second")
    assert (waits.log, first.is_closed, len(Session.made)) == (["lost"], True, 2)


@pytest.mark.parametrize("news", ["it stays", "it is gone", "the front door stops"])
async def test_a_shard_is_not_reached_at_a_next_place_that_is_old_news(
    moving: Pair, monkeypatch: pytest.MonkeyPatch, news: str
) -> None:
    monkeypatch.setattr(shard_links, "HANDED_OVER_S_MAX", 0.0)
    [first] = Session.made
    first.say(wire.Hello(1, False, leaving=True))
    moving.links.learn(0, "tcp://second")
    if news == "it stays":
        moving.links.learn(0, "tcp://first")
    elif news == "it is gone":
        moving.links.of_cluster = []
        moving.links.tick()
    else:
        moving.links.stop()
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.0, later.set_result, None)
    await later
    assert Session.made == [first] and first.is_closed == (news != "it stays")


@pytest.fixture
async def moving_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Pair, list[Waits]]]:
    """Yield links to a shard of this node, which has two publishes of these, and hands over."""
    monkeypatch.setattr(Session, "made", [], raising=False)
    monkeypatch.setattr(shard_links, "Dialer", Session)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    config = BrokerConfig(
        runtime_dir=str(tmp_path), door=0, shards=[0], listen_fds=[], boot="b",
        session_keys=SessionKeys(public, secret, 10.0), node_timeout_s=6.0,
    )  # fmt: skip
    shard, heard = FakeShard(tmp_path, 0), Heard()
    links = ShardLinks(config, 99, heard)
    pair = Pair(links, heard, [shard])
    starting = asyncio.create_task(links.start())
    await shard.greet()
    await asyncio.wait_for(starting, 60)
    waits = [pair.publish() for _ in range(2)]
    await shard.say(wire.Hello(1, False, leaving=True))
    heads = [(await shard.receive())[0].kind for _ in range(3)]
    assert heads == [wire.PUBLISH, wire.PUBLISH, wire.CONTROL]
    links.learn(0, "tcp://second")
    assert Session.made == []
    yield pair, waits
    links.stop()


async def test_a_shard_of_this_node_that_is_handed_over_is_heard_until_it_has_ended(
    moving_from_here: tuple[Pair, list[Waits]],
) -> None:
    pair, [first, second] = moving_from_here
    [shard] = pair.shards
    await shard.send(lambda *who: envelope.confirmed(*who, 1))
    shard.close()
    await pair.heard.until(lambda: Session.made)
    assert (first.log, second.log) == (["confirmed"], ["lost"])


async def test_a_shard_of_this_node_that_is_forgotten_leaves_nothing_open(
    moving_from_here: tuple[Pair, list[Waits]],
) -> None:
    """The front door could not end else."""
    pair, [first, second] = moving_from_here
    pair.links._forget(pair.links.links[0])
    assert (first.log, second.log) == (["lost"], ["lost"])
    assert pair.links.links[0].socket is None
    pair.shards[0].close()
