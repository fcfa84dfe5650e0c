"""A queue moves between two shards. Processes die, and requests are lost or come twice.

The move, its decisions, the definitions, the shards and their stores are the real ones. The
controller, the front door, a publisher, a consumer and a client that declares and deletes other
queues are played: one thing happens at a time, in an order that the seed chooses. The publisher
numbers its messages. Whatever happens, the numbers that the consumer sees for the first time
ascend, what comes twice is marked, what was confirmed comes, and the shard that the front door asks
about the queue knows the queue. What was acknowledged comes again only if a shard died after its
publish (or a task of a mover failed); the death of a controller or a lost request is no reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.moving import mover, stream_copy
from shardmq.broker.controller.moving.mover import MoveProgress, QueueName
from shardmq.broker.controller.peers.shard_links import ShardSilent
from shardmq.broker.controller.requests import Move, MoveOn
from shardmq.broker.controller.shard_orders import ShardOrders
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.front_door.publish.targets import is_shut
from shardmq.broker.model.changes import CALLED_OFF, AnyChange, QueuePut, VhostPut, taking
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import Answer, QueueDeclare, QueueRemove
from shardmq.shardd import moves, stream_moves
from shardmq.shardd.shard import Shard
from shardmq.shardd.store.errors import DiskFull
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.stores import StoreHome
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.reference.record import encode_message, split_messages
from tests.support.dict_store import NoStreams
from tests.support.faulty_files import FaultyFiles

NAME = QueueName("/", "q")
OTHERS_MAX = 4  # queues beside it that are there at a time
UNHEARD_DEATHS = 0.4  # how often a shard dies before the front door has heard of a decision
RESTARTS = 0.3  # how often the controller ends, of the moments at which a move may begin or go on
SEGMENT_BYTES = 4096
DOOR = 0
CONNECTION, CHANNEL = 9, 1
NO_TTL = 0xFFFFFFFF
MESSAGES_MAX = 250
# Nothing goes wrong any more after so many requests of one move, so that each move ends.
REQUESTS_MAX = 150
PREFETCH = 7
BODY_AT = 13  # in a stored message: 8 bytes of lengths, 3 of names, 2 of properties


class PromiseBroken(AssertionError):
    """What the world is played for."""


def number_in(stored: bytes) -> int:
    """Return the number of a message of the publisher."""
    body = stored[BODY_AT:]
    return int(body[: len(body) // 8])


class Home(NoStreams):
    def __init__(self, files: FaultyFiles) -> None:
        self.files = files

    def open(self, vhost: str) -> SegmentStore:
        return SegmentStore("d", files=self.files, segment_bytes=SEGMENT_BYTES, spare_segments=1)

    def remove(self, vhost: str) -> None: ...
    def keep_only(self, vhosts: object) -> None: ...
    def recovered(self, vhost: str, store: object) -> None: ...
    def progress(self, vhost: str, done: int, total: int, messages: int) -> None: ...


class ShardLife:
    """One shard: the process that runs now, and the files that outlive it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.files = FaultyFiles(world.random.randrange(1 << 30))
        self.epoch = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.shard = Shard(
            self.number,
            self.epoch,
            1,
            self.world.home(self.files),
            no_room=(DiskFull,),  # type: ignore[arg-type]
        )
        self.batch = 0
        self.unconfirmed: dict[int, int] = {}  # message by batch
        self.replies: dict[int, Any] = {}
        self.held: list[tuple[int, int, int]] = []  # consumer, delivery number, message
        for peer in (m.CONTROLLER, DOOR):
            self.tell(m.Join(f"peer-{peer}"), peer, epoch=0)
        self.tell(m.Assign(self.world.orders.queues_of(self.number)), m.CONTROLLER)
        self.turn()
        self.world.attach_again(self)

    def crash(self) -> None:
        """Lose the power, or end in order."""
        self.world.reasons += 1
        if self.world.random.random() < 0.3:
            self.sync()
            self.shard.close()
            self.files = self.files.restarted(power_cut=False)
        else:
            self.files = self.files.restarted(power_cut=self.world.random.random() < 0.7)
        self.start()

    def tell(self, what: Any, peer: int = DOOR, epoch: int | None = None) -> None:
        data = envelope.control(peer, 1, self.epoch if epoch is None else epoch, self.number, what)
        self.shard.receive(data, self.world.now)

    def publish(self, queue_id: int, message: int) -> None:
        self.batch += 1
        packer = codec.Packer(2)
        stored = encode_message(str(message).encode() * 8, b"", b"q")
        packer.add_stored(
            self.number, [queue_id], stored, CONNECTION, CHANNEL, self.batch,
            self.world.now, NO_TTL, 0xFF, True, True,
        )  # fmt: skip
        data = packer.take(self.number, DOOR, 1, self.epoch, self.batch)
        assert data is not None
        self.unconfirmed[self.batch] = message
        self.shard.receive(data, self.world.now)

    def turn(self) -> None:
        for out in self.shard.turn_end(self.world.now):
            self._hear(joined(out.message))

    def _hear(self, message: bytes) -> None:
        kind = envelope.read(message).kind
        if kind == m.CONFIRMED:
            last, refused = envelope.read_confirmed(message)
            for batch in [batch for batch in self.unconfirmed if batch <= last]:
                number = self.unconfirmed.pop(batch)
                if not refused:
                    self.world.confirmed.add(number)
        elif kind == m.DELIVER:
            for section in codec.read_deliveries(message):
                _, _, consumer, first, redelivered, count, blob = section[:7]
                seen = self.world.delivered(self, count, bytes(blob), redelivered)
                self.held += [(consumer, first + at, each) for at, each in enumerate(seen)]
        elif kind == m.CONTROL:
            what = envelope.read_control(message)
            if (request := getattr(what, "request", None)) is not None:
                self.replies[request] = what

    def sync(self) -> None:
        self.turn()
        if not self.world.may_sync(self):
            return
        if (sync := self.shard.syncs.begin()) is not None:
            sync.run()
            self.shard.syncs.end()
        self.turn()

    def sync_settled(self) -> None:
        self.shard.syncs.want()
        self.sync()
        if (sync := self.shard.syncs.begin_settled()) is not None:
            sync.run()
            self.shard.syncs.end_settled()

    def reclaim(self) -> None:
        if (step := self.shard.syncs.begin_reclaim(self.world.now)) is not None:
            step.run()
            self.shard.syncs.end_reclaim(self.world.now)

    def settle(self, count: int, kind: int = m.ACK) -> None:
        some, self.held = self.held[:count], self.held[count:]
        told = [(consumer, kind, number, number) for consumer, number, _ in some]
        if kind == m.ACK:
            for consumer, _, message in some:
                queue = self.shard.registry.queues.get(self.world.queue_of[consumer])
                # A queue that leaves may have taken the message back already.
                if queue is not None and not queue.backlog.limits.leaving:
                    self.world.acknowledged.add(message)
        if told:
            self.shard.receive(
                envelope.settles(DOOR, 1, self.epoch, self.number, told), self.world.now
            )


class World:
    """The queue, which has these `arguments`, its shards, and who uses it.

    `faults` is the share of requests that go wrong. `definitions` is the kind of the definitions.
    `calls_off` is how often a move is called off, of the moments at which an operator looks at it.
    """

    arguments: Mapping[str, Any] = {}
    calls_off = 0.2

    def __init__(
        self,
        seed: int,
        faults: float = 0.1,
        kills: float = 0.02,
        definitions: type[Definitions] = Definitions,
    ) -> None:
        self.random = random.Random(seed)
        self.faults, self.kills = faults, kills
        self.now = 1_000_000
        self.controller_files = FaultyFiles(self.random.randrange(1 << 30))
        self._kind = definitions
        self.others: list[str] = []
        self.last_other = 0
        self._start_controller()
        new_id = self.definitions.new_queue_id()
        self._change([VhostPut("/"), QueuePut("/", "q", new_id, 0, arguments=dict(self.arguments))])
        self.view = self._queue()  # the queue as the front door knows it
        self.consumer = self.last_consumer = 0
        self.outbox: list[tuple[int, int, int]] = []  # shard, queue id, message
        self.last = 0
        self.confirmed: set[int] = set()
        self.first_seen: list[int] = []
        self.seen_ever: set[int] = set()
        self.queue_of: dict[int, int] = {}  # by consumer
        self.acknowledged: set[int] = set()
        self.reasons = 0  # to deliver again what was acknowledged
        self.reasons_before = [0]  # by message, at its publish
        self.shards: list[ShardLife] = []
        self.request_number = 0
        self.trouble = 0
        self.deadlines: list[asyncio.Timeout] = []  # of publishers that wait
        self._is_asking = False  # a decision is being carried out: the next one comes behind it
        for number in range(2):
            self.shards.append(ShardLife(self, number))
        self._attach()

    def home(self, files: FaultyFiles) -> StoreHome:
        return Home(files)

    def may_sync(self, shard: ShardLife) -> bool:
        """Return whether the disk of a shard answers now."""
        return True

    def delivered(
        self, shard: ShardLife, count: int, blob: bytes, redelivered: bool
    ) -> Sequence[int]:
        """Note a delivery; return what stands for each of its messages."""
        numbers = [number_in(each) for each in split_messages(blob)]
        for number in numbers:
            self.seen(number, redelivered)
        return numbers

    def _queue(self) -> QueuePut:
        queue = self.catalog.queue(*NAME)
        assert queue is not None
        return queue

    # -- what is promised ------------------------------------------------------------------------

    def seen(self, message: int, redelivered: bool) -> None:
        if message in self.seen_ever:
            if not redelivered:
                raise PromiseBroken(f"{message} comes twice, and is not marked")
            if message in self.acknowledged and self.reasons == self.reasons_before[message]:
                raise PromiseBroken(f"{message} comes again after its ack, and no shard has died")
            return
        self.seen_ever.add(message)
        if self.first_seen and message < self.first_seen[-1]:
            raise PromiseBroken(f"{message} comes behind {self.first_seen[-1]}")
        self.first_seen.append(message)

    def check_all(self) -> None:
        """Let the consumer have all there is, and look for what is missing."""
        self.kills = self.faults = 0.0
        for _ in range(3):
            self._deliver_outbox(len(self.outbox))
            for shard in self.shards:
                shard.sync()
        for _ in range(10_000):
            held = sum(len(shard.held) for shard in self.shards)
            for shard in self.shards:
                shard.settle(len(shard.held))
                shard.turn()
            if not held and not any(shard.held for shard in self.shards):
                break
        self.check_missing()

    def check_missing(self) -> None:
        missing = self.confirmed - self.seen_ever
        if missing:
            raise PromiseBroken(f"never came: {sorted(missing)[:10]}")

    # -- the front door --------------------------------------------------------------------------

    def publish(self) -> None:
        if is_shut(self.view):
            return
        if self.last > MESSAGES_MAX:
            return
        to = taking(self.view)
        for _ in range(self.random.choice((1, 1, 3, 10))):
            self.last += 1
            self.reasons_before.append(self.reasons)
            self.outbox.append((to.shard, to.id, self.last))

    def _deliver_outbox(self, count: int) -> None:
        """Let batches arrive: those for one shard stay in order."""
        for _ in range(min(count, len(self.outbox))):
            shard = self.random.choice([each[0] for each in self.outbox])
            at = next(i for i, each in enumerate(self.outbox) if each[0] == shard)
            _, queue_id, message = self.outbox.pop(at)
            self.shards[shard].publish(queue_id, message)

    def _attach(self) -> None:
        self.last_consumer += 1
        self.consumer = self.last_consumer
        self.queue_of[self.consumer] = self.view.id
        self._send_attach(self.shards[self.view.shard])

    def _send_attach(self, shard: ShardLife) -> None:
        shard.tell(
            m.Attach(
                0, self.view.id, self.consumer, CONNECTION, CHANNEL, "tag", False, False, 0,
                PREFETCH, resumed=True,
            )
        )  # fmt: skip

    def attach_again(self, shard: ShardLife) -> None:
        if self.consumer and self.view.shard == shard.number:
            self._send_attach(shard)

    def apply(self) -> None:
        """Let the front door know what is in force."""
        old, self.view = self.view, self._queue()
        if self.view.id != old.id:
            self.shards[old.shard].tell(m.Detach(0, self.consumer))
            self._attach()

    async def fence(self) -> bool:
        self.happen()
        if self.random.random() < self.faults:
            return False
        self._deliver_outbox(len(self.outbox))
        return True

    # -- what happens meanwhile ------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def deadline(self, seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as deadline:
            self.deadlines.append(deadline)
            try:
                yield
            finally:
                self.deadlines.remove(deadline)

    def pass_deadlines(self) -> None:
        for deadline in self.deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

    def happen(self) -> None:
        if self.random.random() < self.faults / 10:
            self.pass_deadlines()
        for _ in range(self.random.randrange(6)):
            self.now += self.random.randrange(50)
            shard = self.random.choice(self.shards)
            if self.random.random() < self.kills:
                shard.crash()
            else:
                self.random.choice(
                    (
                        self.publish,
                        lambda: self._deliver_outbox(self.random.randrange(8)),
                        shard.turn,
                        shard.sync,
                        lambda shard=shard: shard.settle(self.random.randrange(6)),  # type: ignore[misc]
                        lambda shard=shard: shard.settle(1, m.REQUEUE),  # type: ignore[misc]
                        shard.sync_settled,
                        shard.reclaim,
                        self.count,
                        self.churn,
                        self.call_off,
                    )
                )()

    def call_off(self) -> None:
        """Let an operator call the move off, if that is possible."""
        moving = self._queue().moving
        if moving is not None and not self._is_asking and self.random.random() < self.calls_off:
            self._ask(MoveOn(*NAME, moving.id, CALLED_OFF))

    def count(self) -> None:
        """Let the front door ask about the queue, where it consumes and where it publishes.

        A shard finds the queue by its id, whatever it is asked: to count, to get. While publishers
        wait, the front door uses the old place no more, and the shard there may have forgotten it:
        the controller that has decided the end of the move assigns it to no new process.
        """
        for life in [self.view] if is_shut(self.view) else [self.view, taking(self.view)]:
            self.request_number += 1
            shard, number = self.shards[life.shard], self.request_number
            shard.tell(m.Count(number, life.id))
            shard.turn()
            if isinstance(shard.replies.pop(number), m.Refused):
                raise PromiseBroken(f"shard {shard.number} does not know the queue")

    # -- the controller --------------------------------------------------------------------------

    def _start_controller(self) -> None:
        self.definitions = self._kind(Path("definitions"), "boot", self.controller_files)
        self.catalog = self.definitions.load()
        new_id = self.definitions.new_queue_id
        self.decisions = Decisions(self.catalog, new_id, str, Placement([0, 1]))
        self.orders = ShardOrders(self.catalog, mock.Mock(), mock.Mock(), mock.Mock())

    def restart_controller(self) -> None:
        """End the controller. The next one brings the shards and the front door in line."""
        self.controller_files = self.controller_files.restarted(power_cut=False)
        self._start_controller()
        for shard in self.shards:
            specs = self.orders.queues_of(shard.number)
            shard.tell(m.CreateQueues(0, specs), m.CONTROLLER)
            for stray in set(shard.shard.registry.queues.ids()) - {spec.id for spec in specs}:
                shard.tell(m.DeleteQueue(0, stray), m.CONTROLLER)
        self.apply()

    def _change(self, changes: list[AnyChange]) -> None:
        """Log changes, and apply them to the catalog."""
        for change in changes:
            self.definitions.add(change, self.catalog)
            self.catalog.apply(change)
        self.definitions.flush()
        if (sync := self.definitions.sync_job(self.catalog)) is not None:
            sync()

    def churn(self) -> None:
        """Declare another queue, or delete one."""
        request: QueueDeclare | QueueRemove
        if len(self.others) < OTHERS_MAX and self.random.random() < 0.5:
            self.last_other += 1
            self.others.append(f"other-{self.last_other}")
            request = QueueDeclare("/", self.others[-1], True, False, False, {})
        elif self.others:
            gone = self.others.pop(self.random.randrange(len(self.others)))
            request = QueueRemove("/", gone, False, False)
        else:
            return
        decision = self.decisions.decide(request, "")
        self._change(decision.changes)
        for queue in decision.create:
            self._tell_of(queue)
        for queue in decision.drop:
            self.shards[queue.shard].tell(m.DeleteQueue(0, queue.id), m.CONTROLLER)

    def _tell_of(self, queue: QueuePut) -> None:
        spec = self.orders._spec(queue)
        self.shards[queue.shard].tell(m.CreateQueues(0, [spec]), m.CONTROLLER)

    def request(
        self, number: int, make: Callable[[int], m.Message], wait_s: float = 0
    ) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._request(number, make))

    async def _request(self, number: int, make: Callable[[int], m.Message]) -> Any:
        self.happen()
        self.request_number += 1
        request = self.request_number
        message = make(request)
        pick, shard = self.random, self.shards[number]
        self.trouble -= 1
        if not self.trouble:
            self.kills = self.faults = 0.0
        if pick.random() < self.faults:
            raise ShardSilent("the request is lost")
        shard.tell(message, m.CONTROLLER)
        if pick.random() < self.faults:
            shard.tell(message, m.CONTROLLER)  # by another session
        if pick.random() < self.faults:
            shard.sync()
            raise ShardSilent("the answer is late")
        while True:
            self.happen()
            shard.sync()
            if request in shard.replies:
                return shard.replies.pop(request)
            # A new process of the shard is asked again.
            shard.tell(message, m.CONTROLLER)

    async def ask(self, request: Any) -> Answer:
        self.happen()
        return self._ask(request)

    def _ask(self, request: Any) -> Answer:
        """Decide a request of the move, and carry the decision out, as much else happens."""
        try:
            decision = self.decisions.decide(request, "")
        except Refusal as refusal:
            return Answer(0, refusal.code, refusal.text)
        self._is_asking = True
        self._change(decision.changes)
        for queue in decision.create:
            self.happen()
            self._tell_of(queue)
        self.happen()
        if self.kills and self.random.random() < UNHEARD_DEATHS:
            self.random.choice(self.shards).crash()
            self.count()
        self.apply()
        self._is_asking = False
        self.happen()
        for queue in decision.drop:
            self.shards[queue.shard].tell(m.DeleteQueue(0, queue.id), m.CONTROLLER)
        return Answer(0)

    def make(self, is_own: bool, kind: type[mover._Move]) -> mover._Move:
        links, doors = mock.Mock(), mock.Mock()
        links.request, doors.fence = self.request, self.fence
        links.shards = [mock.Mock(used=set()), mock.Mock(used=set())]
        authority = mock.Mock(ask=self.ask)
        return kind(
            self.catalog, authority, links, doors, NAME, MoveProgress(), is_own,
            asyncio.Semaphore(1),
        )  # fmt: skip

    async def move(self, kind: type[mover._Move] = mover._Move) -> None:
        """Move the queue to the other shard; the controller may die on the way, too."""
        for _ in range(20):
            self.happen()
        self.trouble = REQUESTS_MAX
        await self.ask(Move("/", "q", 1 - self._queue().shard))
        while self._queue().moving is not None:
            if self.kills and self.random.random() < RESTARTS:
                self.restart_controller()
                self.happen()
            is_own = self.random.random() < 0.3
            self.reasons += is_own and self.kills > 0
            task = asyncio.ensure_future(self.make(is_own, kind).run())
            for _ in range(self.random.randrange(10, 300)):
                if task.done():
                    break
                await asyncio.sleep(0)
            if self.kills and not task.done():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.apply()


def play(
    seed: int,
    kind: type[mover._Move] = mover._Move,
    *,
    kills: float = 0.02,
    definitions: type[Definitions] = Definitions,
    of: type[World] = World,
) -> World:
    """Move a queue twice under a load, and check all that is promised. Raises PromiseBroken."""
    pick, of_streams = random.Random(seed), random.Random(seed)

    async def run() -> World:
        world = of(seed, pick.choice((0.0, 0.05, 0.2)), kills, definitions)
        clockless.timeout = world.deadline
        for _ in range(2):
            await world.move(kind)
        world.check_all()
        return world

    async def no_sleep(seconds: float) -> None:
        await real_sleep(0)

    real_sleep = asyncio.sleep
    clockless = _Clockless(no_sleep)
    with (
        mock.patch.object(mover, "HANDOVER_S", 0.0),
        mock.patch.object(mover, "SHRINK_S", 0.0),
        mock.patch.object(mover, "SHUT_MESSAGES", pick.choice((2, 20))),
        mock.patch.object(moves, "BATCH_MESSAGES", pick.choice((1, 4, 50))),
        mock.patch.object(moves, "BATCH_BYTES", pick.choice((100, 4000))),
        mock.patch.object(mover, "HOLD_BYTES", of_streams.choice((100, 2000))),
        mock.patch.object(mover, "FREE_TIMES", 0),
        mock.patch.object(stream_moves, "BATCH_BYTES", of_streams.choice((100, 1000, 4000))),
        # With 0, publishers wait when little is left; otherwise after one batch.
        mock.patch.object(mover, "HOLD_BYTES_MAX", of_streams.choice((0, mover.HOLD_BYTES_MAX))),
        mock.patch.object(mover, "asyncio", clockless),
        mock.patch.object(stream_copy, "asyncio", clockless),
    ):
        return asyncio.run(run())


class _Clockless:
    """asyncio, but nothing sleeps, and the world says when a deadline has passed."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep
        self.timeout: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)
