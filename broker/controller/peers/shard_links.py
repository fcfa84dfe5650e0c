"""The links to shards: ZeroMQ messages out and in, and requests that outlive a shard's restart.

There is one PULL socket for the news of all shards, and one PUSH socket to each shard. A shard that
starts says Hello(ready=False) and is given all its queues (Assign). A shard that was there before
this controller says Hello(ready=True) and is brought in line with the catalog. A request is sent
when its shard is ready, and again to each new process of the shard, until it is answered or its
time is up. So a shard may get every request twice.

Shards of other nodes are learnt of at run time and reached by sessions (shardd/wire/session.py).
The end of a session is the end of the shard's process to the controller, which joins anew.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.dialer import Dialer
from shardmq.shardd.wire.recent import RecentKeys
from shardmq.shardd.wire.session import SessionKeys, first_incarnation

ANSWER_S_MAX = 15.0  # how long a shard may take to recover before declares on it fail
STATS_S_MAX = 2.0
# A shard of another node is waited for as long as other nodes take to lead it, if they have copies:
# `cluster.node_timeout_s` and so much longer. Then its queues are refused at once.
# The next leader may have to recover first, so the wait begins anew when the address changes; so
# many times, if the address changes without end.
AWAY_MARGIN_S = 2.0
LEADERS_WAITED_FOR_MAX = 4
JOIN_AGAIN_S = 1.0
ASSIGN_PART_QUEUES = 4096
# Front doors attach their consumers to a new process of a shard as soon as they hear of it. A queue
# without consumers has lost them when this long has passed and each front door has heard of it.
ABANDONED_S = 5.0
WAITING_MAX = 100_000  # requests that one shard has not answered
RECEIVE_BURST = 64  # messages handled before other events of the loop
# The address of a shard that this node leads.
HERE = ""
# zmq's own constants are enums, and each `&` with an enum costs as much as a call.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)

log = logging.getLogger(__name__)


class ShardSilent(Exception):
    """A shard did not answer in time."""


class Handler(Protocol):
    """The authority, as the links call it."""

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]: ...

    def queue_gone(self, id: int, reason: str) -> None: ...


class _Waiting:
    """A request that its shard has not answered."""

    __slots__ = ("message", "reply", "timer")

    def __init__(self, message: Any, reply: Future[Any], timer: asyncio.TimerHandle) -> None:
        self.message, self.reply, self.timer = message, reply, timer


class Shard:
    """The state of one shard, as far as the controller knows.

    `incarnation` is that by which the shard knows the controller. `way` leads to the shard; None:
    the controller knows nothing but the number.
    """

    def __init__(self, number: int, incarnation: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.way: zmq.Socket[bytes] | Dialer | None = None
        self.epoch = 0
        self.pid = 0
        self.ready = False
        # Loop time of the end of the last session, or of when the controller learnt where the shard
        # is now or began.
        self.gone_at = 0.0
        self.leaders_waited_for = 0  # since the shard was ready last
        self.alarm = ""
        self.waiting: dict[int, _Waiting] = {}
        # Auto-delete queues that have had a consumer, in any process of the shard.
        self.used: set[int] = set()

    def forget_if_cancelled(self, number: int, reply: Future[Any]) -> None:
        """Do not ask the next process for what nobody waits for any more."""
        if reply.cancelled() and (waiting := self.waiting.pop(number, None)) is not None:
            waiting.timer.cancel()


async def _no_doors() -> bool:
    return True


class ShardLinks:
    """The links to all shards.

    There are `count` shards at first, which are numbered from 0 on; `local` are those of this node,
    None for all. In a cluster, `keys` let the controller in at shards of other nodes, `term` is
    that in which this controller leads, and others take over from a node after `node_timeout_s`.
    Set `handler` before `start`; `fence` is that of the links to the front doors.
    """

    def __init__(
        self,
        count: int,
        incarnation: int,
        local: Sequence[int] | None = None,
        keys: SessionKeys | None = None,
        term: int = 0,
        node_timeout_s: float = 0.0,
    ) -> None:
        self._away_s_max = node_timeout_s + AWAY_MARGIN_S
        self._answer_s_max = ANSWER_S_MAX + node_timeout_s
        self.handler: Handler | None = None
        self.fence: Callable[[], Awaitable[bool]] = _no_doors
        self.shards = [Shard(number, incarnation) for number in range(count)]
        self._local = range(count) if local is None else local
        self._incarnation = incarnation
        self._keys, self._term = keys, term
        self._endpoint = ""
        self._number = 0
        self._context = zmq.Context()
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._loop: asyncio.AbstractEventLoop | None = None  # None while it does not listen
        self._began_at = 0.0
        self._joiner: asyncio.TimerHandle | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._refused = RecentKeys()  # number and epoch of shards of another wire version

    async def start(self, runtime_dir: Path) -> None:
        self._endpoint = f"ipc://{runtime_dir}/controller.sock"
        # What may pile up is bounded by WAITING_MAX and by what shards say unasked.
        self._inbox.set_hwm(0)
        self._inbox.bind(self._endpoint)
        self._runtime_dir = runtime_dir
        for number in self._local:
            self.shards[number].way = self._way_here(number)
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        for shard in self.shards:
            shard.gone_at = self._began_at
        self._loop.add_reader(self._inbox.fileno(), self._heard)
        self._heard()
        self._join_unknown()

    @property
    def count(self) -> int:
        """Return how many shards there are, as far as the controller knows."""
        return len(self.shards)

    def _way_here(self, number: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(f"ipc://{self._runtime_dir}/shard-{number}.sock")
        return socket

    def learn(self, number: int, address: str) -> None:
        """Reach a shard at this address from now on: tcp://HOST:PORT of another node, or HERE.

        Call it behind `start`.
        """
        assert self._keys is not None, "only a cluster has other nodes"
        shard = self._shard(number)
        if shard.way is not None:
            if address == (shard.way.address if isinstance(shard.way, Dialer) else HERE):
                return
            self.forget_shard(number)
        if address == HERE:
            shard.way, shard.incarnation = self._way_here(number), self._incarnation
            self._send(shard, self._join())
            return
        shard.way = Dialer(
            self._context,
            address,
            self._keys,
            max(first_incarnation(), shard.incarnation + 1),
            began=partial(self._session_began, shard),
            speaks=partial(self._heard_session, shard),
            ended=partial(self._session_ended, shard),
        )
        loop = asyncio.get_running_loop()
        if shard.leaders_waited_for < LEADERS_WAITED_FOR_MAX:  # as if the shard restarted
            shard.gone_at = loop.time()
            shard.leaders_waited_for += 1
        shard.way.start(loop)

    def _shard(self, number: int) -> Shard:
        """Return the state of a shard.

        A new leader has queues of shards that it has not learnt of while their node is down.
        """
        while len(self.shards) <= number:
            self.shards.append(Shard(len(self.shards), self._incarnation))
            self.shards[-1].gone_at = self._began_at
        return self.shards[number]

    def forget_shard(self, number: int) -> None:
        """Take a shard for gone, for good or until it is learnt of again."""
        shard = self.shards[number]
        if shard.way is not None:
            shard.way.close()
            shard.way = None
            self._session_ended(shard)

    def _session_began(self, shard: Shard) -> None:
        assert isinstance(shard.way, Dialer)
        shard.incarnation = shard.way.incarnation
        self._send(shard, self._join())

    def _session_ended(self, shard: Shard) -> None:
        if shard.ready:
            log.warning("shard %d is gone", shard.number)
            shard.gone_at = asyncio.get_running_loop().time()
        shard.ready = False

    def _heard_session(self, shard: Shard) -> None:
        """Take messages of a shard of another node, and come back for the rest."""
        for _ in range(RECEIVE_BURST):
            message = shard.way.take() if isinstance(shard.way, Dialer) else None
            if message is None:
                return
            self._take(message)
        assert self._loop is not None
        self._loop.call_soon(self._heard_session, shard)

    def _join(self) -> wire.Join:
        return wire.Join(self._endpoint, term=self._term)

    async def stop(self) -> None:
        if self._joiner is not None:
            self._joiner.cancel()
        for task in self._watching:
            task.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._inbox.fileno())
            self._loop = None
        for shard in self.shards:
            for waiting in shard.waiting.values():
                waiting.timer.cancel()
            if shard.way is not None:
                shard.way.close()
        self._inbox.close()
        self._context.term()

    # -- requests ------------------------------------------------------------------------------

    def request(
        self, shard: int, message: Callable[[int], wire.Message], wait_s: float = 0.0
    ) -> Future[Any]:
        """Send the message made with the request's number, and return its answer to come.

        The answer is Done, Refused, StatsReply, QueueIds, UnsettledCount, Letters or Attached. It
        raises ShardSilent when none comes within `wait_s`; 0: the time in which a shard recovers,
        if need be at another node.
        """
        wait_s = wait_s or self._answer_s_max
        to, loop = self._shard(shard), asyncio.get_running_loop()
        reply: Future[Any] = loop.create_future()
        if len(to.waiting) >= WAITING_MAX:
            reply.set_exception(ShardSilent(f"shard {shard} has {WAITING_MAX} requests to answer"))
            return reply
        self._number += 1
        number = self._number
        timer = loop.call_later(wait_s, self._give_up, to, number, wait_s)
        waiting = to.waiting[number] = _Waiting(message(number), reply, timer)
        reply.add_done_callback(partial(to.forget_if_cancelled, number))
        if to.ready:
            self._send(to, waiting.message)
        return reply

    async def messages(self, queues: Iterable[QueuePut]) -> dict[int, int]:
        """Return how many messages queues have, ready and held by consumers, by queue id.

        Queues whose shard does not answer within STATS_S_MAX are left out.
        """
        parts: dict[tuple[int, int], list[int]] = {}
        for number, queue in enumerate(queues):
            if self._shard(queue.shard).ready:
                parts.setdefault((queue.shard, number // wire.STATS_QUEUES_MAX), []).append(
                    queue.id
                )
        asked = [
            (ids, self.request(shard, partial(wire.Stats, queues=ids), STATS_S_MAX))
            for (shard, _), ids in parts.items()
        ]
        await asyncio.gather(*(reply for _, reply in asked), return_exceptions=True)
        found: dict[int, int] = {}
        for ids, reply in asked:
            if reply.exception() is None:
                found |= dict.fromkeys(ids, 0)  # shards do not report queues that are not used
                found |= {each.id: each.ready + each.unacked for each in reply.result().queues}
        return found

    def door_gone(self, door: int, incarnation: int) -> None:
        """Have shards put back in order what the front door's consumers held."""
        for shard in self.shards:
            if shard.ready:
                self._send(shard, wire.FrontDoorGone(door, incarnation))

    def _give_up(self, shard: Shard, number: int, wait_s: float) -> None:
        waiting = shard.waiting.pop(number, None)
        if waiting is not None and not waiting.reply.done():
            waiting.reply.set_exception(
                ShardSilent(f"shard {shard.number} did not answer within {wait_s:g} s")
            )

    def _send(self, shard: Shard, message: Any) -> None:
        data = envelope.control(
            wire.CONTROLLER, shard.incarnation, shard.epoch, shard.number, message
        )
        if isinstance(shard.way, Dialer):
            shard.way.send(data)
        elif shard.way is not None:
            shard.way.send(data, AT_ONCE)

    def is_away(self, shard: int) -> bool:
        """Return whether the node of a shard has been away for longer than a restart takes."""
        found = self._shard(shard)
        if found.ready or isinstance(found.way, zmq.Socket):
            return False
        return asyncio.get_running_loop().time() - found.gone_at > self._away_s_max

    def epoch(self, shard: int) -> int:
        """Return the number of the shard's life: each process of the shard has another one."""
        return self._shard(shard).epoch

    def used(self, shard: int) -> set[int]:
        """Return the ids of auto-delete queues that have had a consumer at a shard."""
        return self._shard(shard).used

    # -- news of shards ------------------------------------------------------------------------

    def _join_unknown(self) -> None:
        """Send Join until each shard has said Hello: it may not have been there for the first."""
        for shard in self.shards:
            if shard.epoch == 0 and not isinstance(shard.way, Dialer):  # a session joins once
                self._send(shard, self._join())
        self._joiner = asyncio.get_running_loop().call_later(JOIN_AGAIN_S, self._join_unknown)

    def _heard(self) -> None:
        """Take all messages that are there, or plan to be called again.

        The descriptor of a ZeroMQ socket tells of a change only once.
        """
        if self._loop is None:
            return
        for _ in range(RECEIVE_BURST):
            # To ask is cheaper than to be told by an exception.
            # This option is an int.
            if not self._inbox.get(zmq.EVENTS) & READABLE:  # type: ignore[operator]
                return
            self._take(self._inbox.recv(AT_ONCE))
        self._loop.call_soon(self._heard)

    def _take(self, message: bytes) -> None:
        try:
            self._receive(message)
        except envelope.OtherVersion as error:
            self._refuse(error)
        except envelope.WireError as error:
            log.error("from a shard: %s", error)
        except Exception:  # one bad message must not make this process deaf to all shards
            log.exception("a message of a shard cannot be handled")

    def _refuse(self, error: envelope.OtherVersion) -> None:
        """Note that the process of a shard speaks another wire version, and answer it once.

        The shard drops the answer and logs why.
        """
        head = error.head
        if head.shard < len(self.shards) and self._refused.add((head.shard, head.epoch)):
            log.error("from a shard: %s", error)
            shard = self.shards[head.shard]
            shard.ready = False
            shard.alarm = f"speaks wire version {error.version}, the controller {wire.WIRE_VERSION}"
            self._send(shard, self._join())

    def _receive(self, data: bytes) -> None:
        head = envelope.read(data)
        if head.kind != wire.CONTROL or head.shard >= len(self.shards):
            return
        shard, message = self.shards[head.shard], envelope.read_control(data)
        if shard.way is None:
            return  # not learnt of yet: the shard answers the first Join by another Hello
        if isinstance(shard.way, Dialer) and head.incarnation != shard.incarnation:
            return  # of an earlier session, or not by a session
        if isinstance(message, wire.Hello):
            self._hello(shard, head.epoch, message)
            return
        if isinstance(message, wire.Outdated) and isinstance(shard.way, Dialer):
            shard.way.outdated(message.lowest)
            return
        if head.epoch != shard.epoch or head.incarnation != shard.incarnation:
            return  # from a former process of the shard, or to a former controller
        assert self.handler is not None
        match message:
            case (
                wire.Done()
                | wire.Refused()
                | wire.StatsReply()
                | wire.QueueIds()
                | wire.Attached()
                | wire.UnsettledCount()
                | wire.Letters()
                | wire.LastLetters()
                | wire.Chunks()
                | wire.Places()
                | wire.StreamInspected()
            ):
                waiting = shard.waiting.pop(message.request, None)
                if waiting is not None:
                    waiting.timer.cancel()
                    if isinstance(waiting.message, wire.DeleteQueue) and isinstance(
                        message, wire.Done
                    ):
                        shard.used.discard(waiting.message.queue)
                    if not waiting.reply.done():
                        waiting.reply.set_result(message)
            case wire.AutoDeleted():
                self.handler.queue_gone(message.queue, message.reason)
            case wire.FirstConsumer():
                shard.used.add(message.queue)
            case wire.Alarm():
                shard.alarm = message.reason

    def _hello(self, shard: Shard, epoch: int, hello: wire.Hello) -> None:
        assert self.handler is not None
        new = epoch != shard.epoch
        if new:
            shard.epoch, shard.pid, shard.ready, shard.alarm = epoch, hello.pid, False, ""
            if not isinstance(shard.way, Dialer):
                self._send(shard, self._join())
            if not hello.ready:
                log.info("shard %d (pid %d) starts", shard.number, hello.pid)
                self._assign(shard, self.handler.queues_of_shard(shard.number))
        if hello.ready and not shard.ready:
            shard.ready, shard.leaders_waited_for = True, 0
            log.info("shard %d (pid %d) is ready", shard.number, hello.pid)
            if new:
                self._reconcile(shard)
            task = asyncio.create_task(self._watch_for_abandoned(shard, epoch))
            self._watching.add(task)
            task.add_done_callback(self._watching.discard)
            for waiting in shard.waiting.values():
                self._send(shard, waiting.message)

    def _assign(self, shard: Shard, queues: list[wire.QueueSpec]) -> None:
        last = max(0, len(queues) - 1) // ASSIGN_PART_QUEUES * ASSIGN_PART_QUEUES
        for start in range(0, last, ASSIGN_PART_QUEUES):
            part = queues[start : start + ASSIGN_PART_QUEUES]
            self._send(shard, wire.Assign(part, last=False))
        rest = queues[last:]
        used = {queue.id for queue in queues if queue.auto_delete} & shard.used
        self._send(shard, wire.Assign(rest, used=sorted(used)))

    async def _watch_for_abandoned(self, shard: Shard, epoch: int) -> None:
        """Wait until front doors have attached their consumers to a new process of a shard."""
        arrived = False
        while not arrived:
            await asyncio.sleep(ABANDONED_S)
            if shard.epoch != epoch:
                return
            # Two fences: a front door that gets the first before it hears of the new process
            # answers when it does, and attaches its consumers then.
            arrived = not shard.used or (await self.fence() and await self.fence())
        self._let_abandoned_go(shard, epoch)

    def _let_abandoned_go(self, shard: Shard, epoch: int) -> None:
        """Delete auto-delete queues whose last consumer left while their shard was away.

        The consumer may also have died with its front door. The new process of the shard takes such
        a queue for one that never had a consumer. So a consumer of ours comes and leaves.
        """
        if shard.epoch != epoch or self.handler is None:
            return
        known = {spec.id for spec in self.handler.queues_of_shard(shard.number) if spec.auto_delete}
        shard.used &= known
        for queue in shard.used:
            self._number += 1
            numbers = [self._number]
            for ask in (
                partial(visit, queue=queue, consumer=self._number),
                partial(wire.Release, consumers=numbers),
            ):
                self.request(shard.number, ask).add_done_callback(_log_failure)

    def _reconcile(self, shard: Shard) -> None:
        """Bring a shard that ran before this controller in line with the catalog.

        It may have missed the last changes of the controller before.
        """
        assert self.handler is not None
        specs = self.handler.queues_of_shard(shard.number)
        newest = max((spec.id for spec in specs), default=0)
        known = {spec.id for spec in specs}
        if specs:
            self.request(shard.number, lambda n: wire.CreateQueues(n, specs)).add_done_callback(
                _log_failure
            )

        def drop_strays(reply: Future[Any]) -> None:
            if reply.exception() is not None or not isinstance(reply.result(), wire.QueueIds):
                _log_failure(reply)
                return
            for id in reply.result().ids:
                # Ids rise: a queue beyond the newest was made after the question.
                if id not in known and id < newest:
                    self.request(
                        shard.number, partial(wire.DeleteQueue, queue=id)
                    ).add_done_callback(_log_failure)

        self.request(shard.number, wire.ListQueues).add_done_callback(drop_strays)


def visit(request: int, *, queue: int, consumer: int) -> wire.Attach:
    """Return the attach of a consumer that takes no messages: it may have none."""
    return wire.Attach(
        request=request,
        queue=queue,
        consumer=consumer,
        connection=0,
        channel=0,
        tag="",
        no_ack=False,
        exclusive=False,
        priority=0,
        prefetch=0,
        limited=True,
        resumed=True,
    )


def _log_failure(reply: Future[Any]) -> None:
    if reply.exception() is not None:
        log.error("%s", reply.exception())
