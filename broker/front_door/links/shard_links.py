"""The front door's links to the shards: batches out, deliveries and confirms in, restarts noticed.

The links only carry: publish/ and consume/ say what a message means. One PUSH socket per shard and
a lane (lane.py) to each process of a shard send; shard_inbox.py receives. Nothing blocks. What is
packed during one pass of the event loop leaves at its end, as at most one PUBLISH, one SETTLE and
one CREDIT per shard.

A shard's end shows as the end of its connection. What the shard had not confirmed is reported lost
at once. Publishes then wait in the packer, and the clients that send them are not read; publishes
that want a confirm wait AWAY_S_MAX at most. The next process of the shard says Hello with a new
epoch; then consumers are attached and requests asked again.

In a cluster the front door learns while it runs where each shard is led. It reaches those of other
nodes by sessions (shardd/wire/session.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from shardmq.broker.front_door.consume.settling import ACKS_WAIT_S, Due
from shardmq.broker.front_door.hot_state import LinksState
from shardmq.broker.front_door.links.shard_inbox import ShardInbox
from shardmq.broker.front_door.links.shard_link import (
    DOWN_MARGIN_S,
    HANDED_OVER_S_MAX,
    BatchSizes,
    Events,
    ShardLink,
    Unconfirmed,
)
from shardmq.broker.front_door.links.shard_requests import Make, ShardRequests
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut, lives
from shardmq.broker.shared.config import BrokerConfig
from shardmq.cluster.records import SHARDS_MAX
from shardmq.shardd.wire import codec, envelope, session
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.dialer import Dialer
from shardmq.shardd.wire.lane import Offer, body_memory
from shardmq.shardd.wire.local_lane import LocalLane
from shardmq.shardd.wire.shared_memory import BodyMemory

log = logging.getLogger("shardmq.broker.front_door.links.shard_links")

# The address of a shard that this node leads.
HERE = ""
RECONNECT_MS = 10
# How often a Join goes to shards that are there.
JOIN_ALL_S = 2.0
FENCE_LOOK_S = 0.05
# What is unsent when the process ends may take this long.
LINGER_MS = 500


def _bodies(size: int, shards: int) -> BodyMemory | None:
    try:
        return body_memory(size, shards) if size else None
    except OSError as error:
        log.warning("no memory for large bodies, they are copied: %s", error)
        return None


class ShardLinks(LinksState):
    """The links to all shards.

    `incarnation` is the number of this process. `packer` holds the publishes of this pass, all of
    the virtual host `vhost`. `links` is indexed by shard, and `known` has those that there are:
    the shards of this node, and those of other nodes that the front door has learnt of.
    `of_cluster` has the numbers of all shards of the cluster in order, if they are known, also of
    those that nobody leads. Other shards were lost with a node that the cluster has forgotten; they
    are waited for no more when their processes are gone, too. `due` says which shards are to be
    told something else at the end of the pass. `local` is the lane to the shard of this process,
    whose number is `local_shard`.
    """

    def __init__(
        self,
        config: BrokerConfig,
        incarnation: int,
        events: Events,
        local: LocalLane | None = None,
        local_shard: int = -1,
    ) -> None:
        self.incarnation = incarnation
        self._keys = config.session_keys
        shards = len(config.shards) if self._keys is None else SHARDS_MAX
        self.packer = codec.Packer(shards)
        self.bodies = _bodies(config.bodies_bytes, shards)
        if self.bodies is not None:
            self.packer.lend_from(self.bodies)
        self.vhost = ""
        self._peer = config.door
        self._events = events
        self._runtime_dir = config.runtime_dir
        self.endpoint = f"ipc://{config.runtime_dir}/door-{config.door}-{incarnation}.sock"
        self._context = zmq.Context()
        self._sizes = BatchSizes()
        self.due = Due()
        # The shards of this node end with a boot, and know the monotonic clock.
        here = incarnation if self._keys is None else wire.incarnation_at(time.monotonic_ns())
        ways: dict[int, zmq.Socket[bytes] | LocalLane] = {
            shard: _socket(self._context, zmq.PUSH)
            if local is None or shard != local_shard
            else local
            for shard in config.shards
        }
        self.links: list[ShardLink] = [
            ShardLink(
                shard,
                ways.get(shard),
                peer=config.door,
                process=incarnation,
                incarnation=here if shard in ways else incarnation,
                packer=self.packer,
                sizes=self._sizes,
                due=self.due,
                events=events,
                on_control=self._on_control,
                on_ended=self._move,
                bodies=self.bodies,
                down_s=config.node_timeout_s + DOWN_MARGIN_S,
            )
            for shard in range(shards)
        ]
        self.known = [self.links[shard] for shard in config.shards]
        self.of_cluster: Sequence[int] | None = None
        self._incarnation_here = here
        self.inbox = ShardInbox(
            _socket(self._context, zmq.PULL),
            self.links,
            config.runtime_dir,
            events,
            self.bodies,
        )
        self._requests = ShardRequests(self.links)
        self.on_acks_waited: Callable[[], None] = lambda: None
        self._joined_all = 0.0  # loop time
        self._set_aside = 0  # bit mask of the shards that may have batches set aside
        # By shard, its next address, while the last words of its process are waited for.
        self._moves: dict[int, str] = {}
        self._one_up: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- start, stop ------------------------------------------------------------------------------

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = self.inbox.loop = self._requests.loop = loop

    async def start(self) -> None:
        """Connect, and return when the first shard has said Hello.

        Other shards may still recover: what is for them waits.
        """
        loop = asyncio.get_running_loop()
        self.use_loop(loop)
        self._one_up = loop.create_future()
        self.inbox.bind(self.endpoint)
        for link in self.links:
            if link.away_since is not None:  # from now on it is waited for
                link.away_since = loop.time()
        for link in self.known:
            link.connect(loop, f"ipc://{self._runtime_dir}/shard-{link.shard}.sock")
            link.join(self.endpoint)
        await self._one_up

    def learn(self, shard: int, address: str, node: str = "") -> None:
        """Reach a shard at this address from now on: tcp://HOST:PORT of another node, or HERE.

        `node` is the name of another node.

        If another node leads a shard now, that is another process of the shard. Publishes that wait
        for the shard stay. A process that hands the shard over is sent nothing more, and what it
        has confirmed may still be on its way: it is heard until its session ends.
        """
        link = self.links[shard]
        link.node = node
        if link not in self.known:
            self.known.append(link)
        elif address == (HERE if link.dialer is None else link.dialer.address):
            self._moves.pop(shard, None)
            return
        way, is_waited_for = link.dialer or link.socket, shard in self._moves

        def waited() -> None:
            if way is (link.dialer or link.socket):  # else it has moved, and may move again
                self._move(link)

        self._moves[shard] = address
        if not link.has_last_words or self._loop is None:
            self._move(link)
        elif not is_waited_for:
            self._loop.call_later(HANDED_OVER_S_MAX, waited)

    def _move(self, link: ShardLink) -> None:
        """Take the process of a shard for gone, and reach the shard at its next address, if any."""
        address = self._moves.pop(link.shard, None)
        if address is None:
            return
        self.inbox.close_lane(link)
        link.move(self._loop)
        if address == HERE:
            link.socket = _socket(self._context, zmq.PUSH)
            link.incarnation = self._incarnation_here
        else:
            assert self._keys is not None, "only a cluster has other nodes"
            assert not link.is_local, f"shard {link.shard} is of this process"
            link.dialer = Dialer(
                self._context,
                address,
                self._keys,
                max(session.first_incarnation(), link.incarnation + 1),
                began=link.session_began,
                speaks=partial(self.inbox.hear_session, link),
                ended=link.session_ended,
            )
        if self._one_up is not None and self._loop is not None:
            link.connect(self._loop, f"ipc://{self._runtime_dir}/shard-{link.shard}.sock")
            link.join(self.endpoint)

    def _forget(self, link: ShardLink) -> None:
        """Take a shard for gone, for good or until it is learnt of again."""
        self._moves.pop(link.shard, None)
        self.known.remove(link)
        self.inbox.close_lane(link)
        link.leave(self._loop)

    def stop(self) -> None:
        self._moves.clear()
        self.inbox.stop_receiving()
        self.flush()
        self.inbox.close()
        for link in self.known:
            link.close(self._loop, LINGER_MS)
        self._context.term()
        if self.bodies is not None:
            os.close(self.bodies.fd)

    def tick(self) -> None:
        """Say Join again: a shard that restarted does not know where its front doors are.

        The end of a shard shows, so those that are there hear it seldom: it wakes four threads.
        """
        if self._loop is None:
            return  # not started: the catalog is waited for
        now = self._loop.time()
        if self.bodies is not None:
            self.bodies.trim()
        is_for_all = now - self._joined_all >= JOIN_ALL_S
        if is_for_all:
            self._joined_all = now
        # In a cluster there is a link for each shard that there may be, and most are never used.
        looked_at = self._set_aside | self.packer.waiting()
        for link in list(self.known):
            if not (link.up or self.of_cluster is None or link.shard in self.of_cluster):
                log.info("shard %d is not one of the cluster any more", link.shard)
                self._forget(link)
                continue
            looked_at |= 1 << link.shard
            if is_for_all or not link.up:
                link.join(self.endpoint)
        self._set_aside = 0
        for shard in _in_mask(looked_at):
            self.links[shard].tick(now)
            if self.links[shard].aside:
                self._set_aside |= 1 << shard
        if self._keys is not None:
            self._requests.give_up(now)

    # -- questions and answers --------------------------------------------------------------------

    def tell(self, shard: int, what: wire.Message) -> None:
        """Send a control message behind everything that was packed before it."""
        self.links[shard].tell(what)

    def ask(self, shard: int, make: Make) -> asyncio.Future[wire.Control]:
        """Ask a shard, as ShardRequests does."""
        return self._requests.ask(shard, make)

    def unless_away(
        self, shard: int, answer: asyncio.Future[wire.Control]
    ) -> asyncio.Future[wire.Control]:
        """Return a future of the answer, or of an empty Done while a shard elsewhere is away."""
        return self._requests.unless_away(shard, answer)

    def went_away(self, shard: int) -> None:
        """Let nobody wait for a shard that has gone, who need not."""
        self._requests.away(shard)

    async def ask_in_epoch(self, shard: int, make: Make) -> tuple[int, wire.Control]:
        """Ask a shard; return the answer behind the epoch that gave it."""
        return await self._requests.ask_in_epoch(shard, make)

    def is_up(self, shard: int) -> bool:
        return self.links[shard].up

    async def count(self, queue: QueuePut) -> tuple[int, int]:
        """Return the ready messages and consumers of a queue; none of a queue that just went."""
        return await self.count_if_there(queue) or (0, 0)

    async def count_if_there(self, queue: QueuePut) -> tuple[int, int] | None:
        """Return the same, but None of a queue that just went or is about to go.

        Raises Refusal while the node of the queue is down, as the others here do.
        """
        done = await self._requests.ask_about(queue, wire.Count)
        return None if done is None else (done.messages, done.consumers)

    async def purge(self, queue: QueuePut) -> int:
        """Return how many messages went. Raises Refusal where the disk is too full: they stay."""
        gone = 0
        for life in lives(queue):
            done = await self._requests.ask_about(life, wire.Purge)
            gone += 0 if done is None else done.messages
        return gone

    async def fence(self) -> None:
        """Wait until each shard has taken in what was packed for it, or lost it with its process.

        What is packed for a shard that is away leaves when the shard is back, so that is waited
        for.
        """
        for link in list(self.known):
            while not link.up and link in self.known:
                await asyncio.sleep(FENCE_LOOK_S)
            if not link.up:
                continue  # forgotten
            # An empty Release says nothing, and is answered in its turn.
            await self.ask(link.shard, lambda request: wire.Release(request, []))

    # -- settles and credit for deliveries --------------------------------------------------------

    def settle(
        self, shard: int, epoch: int, consumer: int, kind: int, first: int, last: int
    ) -> None:
        """Settle a range of delivery numbers.

        Numbers of an older epoch are forgotten, because that shard has requeued the messages.
        """
        link = self.links[shard]
        if link.epoch == epoch:
            link.settles.add(consumer, kind, first, last)

    def ack(
        self,
        shard: int,
        epoch: int,
        consumer: int,
        first: int,
        last: int,
        together: int,
    ) -> None:
        """Settle a range with acks that may wait a moment for more, up to `together`."""
        link = self.links[shard]
        if link.epoch == epoch:
            link.settles.ack(consumer, first, last, together)
            if not link.settles.due:
                self.wait_for_acks()

    def allot(self, shard: int, allotment: int, allowed: int, mode: int) -> None:
        """Tell a shard how much credit an allotment has."""
        self.links[shard].settles.allot(allotment, allowed, mode)

    def wait_for_acks(self) -> None:
        """Call `on_acks_waited` when acks have waited long enough for each other."""

        def waited() -> None:
            self.due.acks_wait = False
            self.on_acks_waited()
            for link in self.known:
                if link.settles:
                    if link.settles.may_wait_on():
                        self.wait_for_acks()
                    else:
                        link.flush()

        if not self.due.acks_wait and self._loop is not None:
            self.due.acks_wait = True
            self._loop.call_later(ACKS_WAIT_S, waited)

    def credit(self, shard: int, epoch: int, connection: int, count: int) -> None:
        """Note that `count` bytes of deliveries that came in `epoch` were written to the client."""
        self.links[shard].credit(epoch, connection, count)

    def forget(self, connection: int) -> None:
        """Forget the credit of a client that is gone."""
        for link in self.known:
            link.credits.pop(connection, None)

    # -- publishes --------------------------------------------------------------------------------

    def use_vhost(self, vhost: str) -> None:
        """Let what is packed next belong to `vhost`.

        A batch goes to one store, so batches of another virtual host end before.
        """
        if vhost != self.vhost:
            self.vhost = vhost
            packed = self.packer.waiting()
            for shard in _in_mask(packed):
                self.links[shard].end_batch()
            self._set_aside |= packed

    def wait_for(self, shards: int, waiting: Unconfirmed) -> None:
        """Tell `waiting` when the batches for these shards (bit mask) are stored, once for each."""
        shard = 0
        while shards:
            if shards & 1:
                self.links[shard].packing.append(waiting)
            shards >>= 1
            shard += 1

    def set_stalled(self, shard: int, stalled: bool) -> None:
        """Note whether the disk of a shard answers, and the nodes that are to have its messages.

        While they do not, publishes that want a confirm are nacked at each tick: nobody knows how
        long that takes.
        """
        link = self.links[shard]
        if stalled and not link.stalled:
            log.warning(
                "shard %d cannot make messages durable: publishes that want a confirm are nacked",
                shard,
            )
        link.stalled = stalled

    def numbers(self) -> dict[str, float]:
        """Return the sizes of batches, and the state of each link under names with its shard."""
        told = self._sizes.report()
        told["lent_bytes"] = self.bodies.held_bytes if self.bodies is not None else 0
        for link in self.known:
            lane = link.lane
            told[f"publish_window_bytes.{link.shard}"] = link.in_flight
            told[f"ring_bytes.{link.shard}"] = lane.waiting_bytes() if lane is not None else 0
            told[f"ring_full.{link.shard}"] = link.rings_full + (
                lane.times_full if lane is not None else 0
            )
        return told

    # -- control messages of the shards -----------------------------------------------------------

    def _on_control(self, link: ShardLink, message: envelope.Message) -> None:
        what, epoch = envelope.read_control(message), envelope.read(message).epoch
        if isinstance(what, wire.Hello):
            if what.ready and epoch != link.epoch:
                self._begin(link, epoch, what.pid)
            elif what.leaving and epoch == link.epoch and self._loop is not None:
                link.pause(self._loop.time())
        elif isinstance(what, wire.Outdated):
            if link.dialer is not None:
                link.dialer.outdated(what.lowest)
        elif isinstance(what, wire.TakenForGone):
            if what.process == self.incarnation:
                self._events.outlived()
        elif epoch == link.epoch and isinstance(what, wire.SettledSynced):
            link.settled_waits.answered(what)
        elif epoch == link.epoch:
            request = getattr(what, "request", None)
            if request is None:
                self._events.told(link.shard, what)
            else:
                self._requests.answered(link, request, what)

    def _begin(self, link: ShardLink, epoch: int, pid: int) -> None:
        """Start with a new process of a shard."""
        link.begin(epoch, pid)
        link.join(self.endpoint)
        if link.is_local:
            link.may_lend(True)
        elif link.dialer is None:
            self.inbox.close_lane(link)
            self.inbox.open_lane(link, Offer(self._peer, link.incarnation, epoch, self.endpoint))
        link.send_aside()
        self._requests.ask_again(link)
        self._events.restarted(link.shard)
        self._events.publish_room(link.shard)
        if self._one_up is not None and not self._one_up.done():
            self._one_up.set_result(None)


def _in_mask(shards: int) -> list[int]:
    """Return the numbers of the shards in a bit mask."""
    return [shard for shard in range(shards.bit_length()) if shards >> shard & 1]


async def count_if_up(links: ShardLinks, queue: QueuePut) -> tuple[int, int]:
    """Return the ready messages and consumers of a queue; none while its node is down."""
    try:
        return await links.count(queue)
    except checks.Refusal:
        return 0, 0


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # Bounded by credit, not by count: a full pipe here would mean a message neither sent nor kept.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    return socket
