"""A session is one connection: each has an epoch, and the newest one counts."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmq.broker.controller.peers import shard_links
from shardmq.broker.controller.peers.shard_links import ShardLinks as ShardLinksOfController
from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.front_door.links import shard_link
from shardmq.broker.front_door.links.shard_links import ShardLinks, count_if_up
from shardmq.broker.front_door.links.shard_requests import ShardDown
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.cluster.versions import Range
from shardmq.shardd import links as shardd_links
from shardmq.shardd.shard import Shard
from shardmq.shardd.wire import dialer
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.session import first_incarnation
from shardmq.shardd.wire.spin import Spin
from tests.links.test_shard_links import Heard, Pair
from tests.support.dict_store import DictHome
from tests.support.real_broker import wait_until
from tests.support.remote_shard import NUMBER, RemotePeer, RemoteShard, new_keys

DOOR = 7
SESSIONS = 30
PATIENCE_S = 30
NODE_TIMEOUT_S = 6
READ = wire.ReadFrom("first")


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[RemoteShard]:
    made = RemoteShard(tmp_path, new_keys(silent_s=2.0))
    try:
        yield made
        made.close()
        assert "Traceback" not in made.log()
    finally:
        made.process.kill()


@pytest.fixture
def controller(shard: RemoteShard) -> Iterator[RemotePeer]:
    made = shard.controller()
    yield made
    made.close()


@pytest.mark.broker
def test_each_session_has_an_epoch_of_its_own(shard: RemoteShard, controller: RemotePeer) -> None:
    epochs = [controller.epoch]
    for _ in range(SESSIONS):
        door = RemotePeer(shard, number=DOOR)
        assert isinstance(door.join(), wire.Hello)
        epochs.append(door.epoch)
        door.close()
    assert len(set(epochs)) == len(epochs) and all(0 < epoch < 1 << 31 for epoch in epochs)
    wait_until(lambda: controller.stats()["sessions"] == 1, "the shard to miss the sessions")


@pytest.mark.broker
def test_a_newer_session_ends_what_an_older_one_may_say(
    shard: RemoteShard, controller: RemotePeer
) -> None:
    older, newer = RemotePeer(shard, number=DOOR), RemotePeer(shard, number=DOOR)
    assert isinstance(older.join(), wire.Hello) and isinstance(newer.join(), wire.Hello)
    older.tell(wire.Count(1, 0))
    newer.tell(wire.Count(2, 0))
    assert isinstance(said := newer.hear(), (wire.Refused, wire.Done)) and said.request == 2
    assert older.hear(300) is None
    refused = older.join()
    assert refused == wire.Outdated(newer.incarnation + 1)
    older.close()
    newer.tell(wire.Count(3, 0))  # the end of the older one is not the end of the newer
    assert newer.hear() is not None
    newer.close()


@pytest.mark.broker
def test_a_clock_that_was_set_back_is_answered_with_the_lowest_incarnation(
    shard: RemoteShard, controller: RemotePeer
) -> None:
    before = RemotePeer(shard, number=DOOR)
    assert isinstance(before.join(), wire.Hello)
    before.close()
    yesterday = first_incarnation() - 24 * 3600 * 10
    early = RemotePeer(shard, number=DOOR, incarnation=yesterday)
    refused = early.join()
    assert isinstance(refused, wire.Outdated)
    early.close()
    late = RemotePeer(shard, number=DOOR, incarnation=refused.lowest)
    assert isinstance(late.join(process=yesterday), wire.Hello)
    late.close()


@pytest.mark.broker
def test_a_process_that_the_controller_takes_for_gone_stays_out_and_is_told(
    shard: RemoteShard, controller: RemotePeer
) -> None:
    process = first_incarnation()
    door = RemotePeer(shard, number=DOOR)
    assert isinstance(door.join(process=process), wire.Hello)
    controller.tell(wire.FrontDoorGone(DOOR, process - 1))  # an older process
    door.tell(wire.Count(1, 0))
    assert door.hear() is not None
    controller.tell(wire.FrontDoorGone(DOOR, process))
    assert door.hear() == wire.TakenForGone(process)
    door.tell(wire.Count(2, 0))
    assert door.hear(300) is None
    again = RemotePeer(shard, number=DOOR)
    assert again.join(process=process) == wire.TakenForGone(process)
    next_one = RemotePeer(shard, number=DOOR)
    assert isinstance(next_one.join(process=process + 1), wire.Hello)
    for each in (door, again, next_one):
        each.close()


@pytest.mark.broker
def test_the_controller_of_the_higher_term_counts_whatever_its_incarnation(
    shard: RemoteShard, controller: RemotePeer
) -> None:
    leads = RemotePeer(shard, incarnation=controller.incarnation - 1000)
    assert isinstance(leads.join(term=2), wire.Hello)
    controller.tell(wire.Stats(1))
    assert controller.hear(300) is None
    deposed = RemotePeer(shard)
    deposed.tell(wire.Join("", term=1))
    assert deposed.hear(300) is None
    assert leads.stats()["sessions"] >= 1
    for each in (leads, deposed):
        each.close()


@pytest.mark.broker
def test_a_shard_misses_a_peer_that_is_silent(shard: RemoteShard, controller: RemotePeer) -> None:
    """The peer is behind something that passes nothing on any more."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        port = between.getsockname()[1]
        stops = threading.Event()

        def pass_on() -> None:
            came, _ = between.accept()
            goes = socket.create_connection(("127.0.0.3", shard.port))
            poll = select.poll()
            other = {came.fileno(): goes, goes.fileno(): came}
            for each in (came, goes):
                poll.register(each, select.POLLIN)
            while not stops.is_set():
                for fd, _ in poll.poll(20):
                    other[fd].sendall((came if fd == came.fileno() else goes).recv(1 << 16))
            gone.wait(PATIENCE_S)
            came.close()
            goes.close()

        gone = threading.Event()
        passing = threading.Thread(target=pass_on)
        passing.start()
        door = RemotePeer(shard, number=DOOR, address=f"tcp://127.0.0.1:{port}")
        assert isinstance(door.join(), wire.Hello)
        stops.set()
        since = time.monotonic()
        assert door.hear() is None
        wait_until(lambda: controller.stats()["sessions"] == 1, "the shard to miss the peer")
        assert time.monotonic() - since < 10 * shard.keys.silent_s
        gone.set()
        passing.join()
        door.close()


@pytest.mark.parametrize("way", ["its own thread", "another thread"])
def test_a_peer_hears_of_a_stall_while_the_loop_of_the_shard_hangs(
    tmp_path: Path, way: str
) -> None:
    keys = new_keys()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        shard = Shard(NUMBER, 7, 1, DictHome())
        links = shardd_links.Links(str(tmp_path), shard, Spin(0), listener.fileno(), keys)
        at = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        reached: Any = SimpleNamespace(keys=keys, address=at)
        peer = RemotePeer(reached)
        peer.tell(wire.Join(""))
        until = time.monotonic() + PATIENCE_S
        while not shard.peers and time.monotonic() < until:
            for fd, _ in links.wait(100) or ():
                links.hear(fd, 0)
            links.receive(0)
        links.send(shard.turn_end(0))
        assert isinstance(peer.hear(), wire.Hello)
        if way == "another thread":
            thread = threading.Thread(target=links.alarm_from_thread, args=(wire.DISK_STALLED,))
            thread.start()
            thread.join()
        else:
            links.alarm_from_thread(wire.DISK_STALLED)
        assert peer.hear() == wire.Alarm(wire.DISK_STALLED)
        peer.close()
        links.close()


class NoQueues:
    """The authority of a cluster without queues."""

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return []

    def queue_gone(self, id: int, reason: str) -> None: ...


@pytest.mark.broker
async def test_a_new_leader_may_ask_a_shard_whose_node_it_has_never_met(
    tmp_path: Path, shard: RemoteShard
) -> None:
    """Nothing fails because the node is down, and an answer comes when the node is back."""
    links = ShardLinksOfController(1, 5, [], shard.keys, term=2)
    links.handler = NoQueues()
    await links.start(tmp_path)
    queue = QueuePut("/", "q", 1, NUMBER)
    assert not links.is_away(NUMBER), "another node may be about to lead it"
    links._shard(NUMBER).gone_at -= shard_links.AWAY_MARGIN_S
    assert links.is_away(NUMBER) and not links.epoch(NUMBER) and not links.used(NUMBER)
    assert await links.messages([queue]) == {}
    with pytest.raises(ShardSilent):
        await links.request(NUMBER, lambda n: wire.Count(n, 0), 0.01)
    asked = links.request(NUMBER, lambda n: wire.Count(n, 0), PATIENCE_S)
    links.learn(NUMBER, shard.address)
    assert not links.is_away(NUMBER), "a shard that was just learnt of may be on its way"
    assert isinstance(await asked, wire.Refused)
    await links.stop()


class Links:
    """The links of a front door that learns of the shard while it runs."""

    def __init__(self, directory: Path, shard: RemoteShard) -> None:
        config = BrokerConfig(
            runtime_dir=str(directory), door=DOOR, shards=[], listen_fds=[], boot="b",
            session_keys=shard.keys, node_timeout_s=NODE_TIMEOUT_S,
        )  # fmt: skip
        self.heard = Heard()
        self.links = ShardLinks(config, first_incarnation(), self.heard)
        self.pair: Any = Pair(self.links, self.heard, [])
        self.pair.routes.learn(b"\0\x01q\0", 0, [(NUMBER, [7])], True)

    async def up(self) -> None:
        restarts = len(self.heard.restarts)
        await self.heard.until(lambda: len(self.heard.restarts) > restarts)


@pytest.mark.broker
async def test_a_front_door_learns_of_a_shard_and_forgets_it(
    tmp_path: Path, shard: RemoteShard, controller: RemotePeer
) -> None:
    made = Links(tmp_path, shard)
    links, link = made.links, made.links.links[NUMBER]
    starting = asyncio.create_task(links.start())
    await asyncio.sleep(0)
    links.learn(NUMBER, shard.address)
    await asyncio.wait_for(starting, PATIENCE_S)
    assert link.up and links.known == [link]
    answer = await asyncio.wait_for(links.ask(NUMBER, lambda n: wire.Release(n, [])), PATIENCE_S)
    assert isinstance(answer, wire.Done)
    epoch, incarnation = link.epoch, link.incarnation
    links.learn(NUMBER, shard.address)  # news that is none
    assert link.up and link.epoch == epoch
    links._forget(link)
    assert not link.up and made.heard.aways == [NUMBER] and links.known == []
    links.learn(NUMBER, shard.address)
    await made.up()
    assert link.epoch != epoch and link.incarnation > incarnation
    links.stop()


@pytest.mark.broker
@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_front_door_that_counts_as_gone_hears_so_whoever_leads_by_then(
    tmp_path: Path, shard: RemoteShard, controller: RemotePeer, is_cut_off: bool
) -> None:
    """The leader that took it for gone may not be there any more when it comes back."""
    made = Links(tmp_path, shard)
    made.links.learn(NUMBER, shard.address)
    await asyncio.wait_for(made.links.start(), PATIENCE_S)
    process = made.links.incarnation
    controller.tell(wire.FrontDoorGone(DOOR, process - 1))  # an older process
    controller.stats()  # behind it
    asked = made.links.ask(NUMBER, lambda n: wire.Release(n, []))
    assert isinstance(await asyncio.wait_for(asked, PATIENCE_S), wire.Done)
    assert not made.heard.outlives
    if is_cut_off:
        made.links._forget(made.links.links[NUMBER])
    controller.tell(wire.FrontDoorGone(DOOR, process))
    if is_cut_off:
        controller.stats()
        made.links.learn(NUMBER, shard.address)
    await made.heard.until(lambda: made.heard.outlives)
    made.links.stop()


@pytest.mark.broker
async def test_an_outdated_front_door_takes_a_higher_incarnation(
    tmp_path: Path, shard: RemoteShard, controller: RemotePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = RemotePeer(shard, number=DOOR, incarnation=first_incarnation() + 10_000_000)
    assert isinstance(ahead.join(), wire.Hello)
    made = Links(tmp_path, shard)
    made.links.learn(NUMBER, shard.address)
    await asyncio.wait_for(made.links.start(), PATIENCE_S)
    assert made.links.links[NUMBER].incarnation == ahead.incarnation + 1
    made.links.stop()
    ahead.close()


@pytest.mark.broker
async def test_a_shard_that_nobody_listens_for_is_dialled_until_somebody_does(
    tmp_path: Path, shard: RemoteShard, controller: RemotePeer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Links(tmp_path, shard)
    made.links.learn(NUMBER, f"tcp://127.0.0.1:{port}")
    starting = asyncio.create_task(made.links.start())
    await asyncio.sleep(0.5)
    assert not starting.done()
    made.links.learn(NUMBER, shard.address)  # the shard is at another address now
    await asyncio.wait_for(starting, PATIENCE_S)
    assert made.links.links[NUMBER].up
    made.links.stop()


async def test_publishes_for_a_shard_that_is_not_known_are_lost_and_not_kept(
    tmp_path: Path,
) -> None:
    shard: Any = SimpleNamespace(keys=new_keys())
    made = Links(tmp_path, shard)
    made.links.use_loop(asyncio.get_running_loop())
    waits = made.pair.publish()
    assert waits.log == []
    made.links.tick()
    assert waits.log == ["lost"] and made.links.packer.messages(NUMBER) == 0
    made.links.stop()


async def test_a_batch_that_was_set_aside_for_a_shard_that_is_not_known_is_lost(
    tmp_path: Path,
) -> None:
    made = Links(tmp_path, SimpleNamespace(keys=new_keys()))  # type: ignore[arg-type]
    made.links.use_loop(asyncio.get_running_loop())
    made.links.tick()
    waits = made.pair.gather()
    made.links.use_vhost("another")
    assert not made.links.packer.waiting() and waits.log == []
    made.links.tick()
    assert waits.log == ["lost"]
    made.links.stop()


async def test_shards_that_are_not_known_cost_nothing_at_each_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Links(tmp_path, SimpleNamespace(keys=new_keys()))  # type: ignore[arg-type]
    links, joined = made.links, list[int]()
    links.use_loop(asyncio.get_running_loop())
    for link in links.links:
        for called in ("join", "tick"):
            monkeypatch.setattr(link, called, lambda _, shard=link.shard: joined.append(shard))
    links.tick()
    assert joined == [link.shard for link in links.known]
    links.stop()


async def test_what_clients_ask_about_a_queue_of_a_node_that_is_down_is_refused(
    tmp_path: Path,
) -> None:
    """Within a bound, and with the name of the node if the front door has heard of it."""
    shard: Any = SimpleNamespace(keys=new_keys())
    made, queue = Links(tmp_path, shard), QueuePut("/", "q", 1, NUMBER)
    links = made.links
    assert links.links[NUMBER].down_s == NODE_TIMEOUT_S + shard_link.DOWN_MARGIN_S
    links.links[NUMBER].down_s = 0.3
    links.use_loop(asyncio.get_running_loop())
    never_met = asyncio.create_task(links.count_if_there(queue))
    await asyncio.sleep(0)
    links.tick()
    with pytest.raises(checks.Refusal, match="home node of durable queue 'q'"):
        await never_met
    assert shard_link.is_down(links.links[NUMBER], asyncio.get_running_loop().time())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    links.inbox.bind(links.endpoint)
    links._one_up = asyncio.get_running_loop().create_future()
    links.learn(NUMBER, f"tcp://127.0.0.1:{port}", "shardmq@b")
    asked = [
        asyncio.create_task(links.count_if_there(queue)),
        asyncio.create_task(links.purge(queue)),
        asyncio.ensure_future(links.ask(NUMBER, lambda n: wire.Get(n, 1, 0, 1, 1, True))),
        asyncio.ensure_future(links.ask(NUMBER, attaching(wire.Attach))),
        asyncio.ensure_future(links.ask(NUMBER, attaching(wire.AttachReader, read=READ))),
    ]
    waiting = [
        links.ask(NUMBER, attaching(wire.Attach, resumed=True)),
        links.ask(NUMBER, attaching(wire.AttachPart, group=1)),
    ]
    release = asyncio.ensure_future(links.ask(NUMBER, lambda n: wire.Release(n, [])))
    await asyncio.sleep(0)
    links.tick()
    assert not shard_link.is_down(
        links.links[NUMBER], asyncio.get_running_loop().time()
    ) and not any(each.done() for each in asked), "it may come"
    while not shard_link.is_down(links.links[NUMBER], asyncio.get_running_loop().time()):
        await asyncio.sleep(0.01)
    links.tick()
    await asyncio.wait(asked, timeout=PATIENCE_S)
    assert all(each.done() for each in asked)
    refusals = [each.exception() for each in asked]
    text = "home node 'shardmq@b' of durable queue 'q' in vhost '/' is down or inaccessible"
    assert [getattr(each, "text", "") for each in refusals] == [text, text, "", "", ""]
    assert all(isinstance(each, ShardDown) for each in refusals[2:]) and not release.done()
    assert not any(each.done() for each in waiting), "consumers that are there wait for the node"
    assert await asyncio.wait_for(asyncio.shield(_ticked(links, queue)), 30) == (0, 0)
    release.cancel()
    links.stop()


def attaching(kind: type[wire.Attach], **other: Any) -> Any:
    """Return what makes the request of a consumer, by the number of the request."""
    fields: dict[str, Any] = {
        "queue": 1, "consumer": 2, "connection": 1, "channel": 1, "tag": "t", "no_ack": False,
        "exclusive": False, "priority": 0, "prefetch": 0, "limited": False, "resumed": False,
    } | other  # fmt: skip
    return lambda request: kind(request=request, **fields)


async def _ticked(links: ShardLinks, queue: QueuePut) -> tuple[int, int]:
    counting = asyncio.create_task(count_if_up(links, queue))
    await asyncio.sleep(0)
    links.tick()
    return await counting


async def test_a_front_door_that_has_just_started_waits_for_shards_that_it_never_met(
    tmp_path: Path,
) -> None:
    """Another node may be about to lead them."""
    made = Links(tmp_path, SimpleNamespace(keys=new_keys()))  # type: ignore[arg-type]
    links, link = made.links, made.links.links[0]  # where the routes of the pair lead
    starting = asyncio.create_task(links.start())
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time()
    assert not shard_link.is_down(link, now + link.down_s - 1)
    waits = made.pair.gather()
    links.tick()
    assert waits.log == []
    assert shard_link.is_down(link, now + link.down_s + 1)
    link.away_since = now - shard_link.AWAY_S_MAX - 1
    links.tick()
    assert waits.log == ["lost"]
    starting.cancel()
    links.stop()


async def test_publishes_that_nobody_confirms_do_not_wait_for_a_node_that_is_down(
    tmp_path: Path,
) -> None:
    shard: Any = SimpleNamespace(keys=new_keys())
    made = Links(tmp_path, shard)
    made.links.use_loop(asyncio.get_running_loop())
    link = made.links.links[0]  # where the routes of the pair lead
    for is_down in (False, True):
        link.down_s = 0.0 if is_down else float("inf")
        made.pair.gather()
        link.packing.clear()  # no confirm is wanted
        link.end_batch()
        made.pair.gather()
        link.packing.clear()
        assert link.in_flight and made.links.packer.messages(0)
        made.heard.room.clear()
        made.links.tick()
        assert bool(link.in_flight) is not is_down
        assert bool(made.links.packer.messages(0)) is not is_down
        assert made.heard.room == [0] * is_down, "clients are read again"
    made.links.stop()


THIS, NEXT = wire.WIRE_VERSION, wire.WIRE_VERSION + 1


@pytest.mark.broker
@pytest.mark.parametrize(
    ("door_most", "shard_most"), [(NEXT, THIS), (THIS, NEXT), (NEXT, NEXT)], ids=str
)
async def test_two_releases_speak_the_highest_version_that_both_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door_most: int, shard_most: int
) -> None:
    shard = RemoteShard(tmp_path, new_keys(), (THIS, shard_most))
    controller = shard.controller()
    monkeypatch.setattr(dialer, "WIRE", Range(THIS, door_most))
    made = Links(tmp_path, shard)
    made.links.learn(NUMBER, shard.address)
    await asyncio.wait_for(made.links.start(), PATIENCE_S)
    assert made.links.links[NUMBER].up
    asked = made.links.ask(NUMBER, lambda n: wire.Release(n, []))
    assert isinstance(await asyncio.wait_for(asked, PATIENCE_S), wire.Done)
    link = made.links.links[NUMBER].dialer
    assert link is not None
    assert link._version == min(door_most, shard_most)
    made.links.stop()
    controller.close()
    shard.close()
    assert " ERROR " not in shard.log()  # nobody has to do anything
