"""Readers of streams from the client's side to the log, with lists in place of sockets.

The decisions are the broker's own: a front door's (consumers, grants, links), the controller's
(groups), the shards'. What a client got, settled and gave back is written down beside them in
`Ledger`, which knows no position and no grant.
"""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from pamqp import commands

from shardmq.broker.controller.groups import groups as controller_groups
from shardmq.broker.controller.groups.groups import GroupOrder, Groups, VirtualQueueName
from shardmq.broker.front_door.connection.channel import Channel
from shardmq.broker.front_door.consume.consumers import Assignment, GroupConsumer
from shardmq.broker.front_door.consume.consuming import Consuming, check_consume
from shardmq.broker.front_door.links import shard_links
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import (
    Answer,
    AssignmentGivenUp,
    AssignmentName,
    AssignmentOrder,
    ConsumerJoin,
    ConsumerLeave,
    ConsumeTerms,
)
from shardmq.shardd.shard import Shard
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.lane import joined
from tests.support.dict_store import DictHome

NAME = VirtualQueueName("/", "streams")
MESSAGE = struct.pack("<II", 0, 2) + b"\0\0\0\0"
TURNS_MAX = 20_000
DOOR = 5  # its incarnation
STREAM = {"x-queue-type": "stream"}


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time stands still until it is set."""

    now = 1.0

    def time(self) -> float:
        return self.now

    def passes(self, times: int = 1) -> None:
        for _ in range(times):
            self.call_soon(self.stop)
            self.run_forever()

    def act(self, what: Callable[[], None]) -> None:
        """As if the loop did it."""
        asyncio._set_running_loop(self)
        try:
            what()
        finally:
            asyncio._set_running_loop(None)


class Troubles(logging.Handler):
    """What the front door logs as an error of its own, to be raised by the test."""

    def __init__(self, loop: Clock) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []
        loop.set_exception_handler(
            lambda loop, what: self.found.append(what.get("exception") or Exception(what))
        )

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(error or AssertionError(record.getMessage()))


class Pipe:
    """A socket of the front door: what it sends to one shard."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def send(self, message: bytes, flags: int = 0) -> None:
        self.sent.append(message)

    def close(self, linger: int = 0) -> None:
        self.sent.clear()


class Links(ShardLinks):
    def begin(self, loop: Clock) -> None:
        self.use_loop(loop)
        # All goes the long way.
        self.inbox.open_lane = lambda link, what: None  # type: ignore[method-assign]
        for at, link in enumerate(self.links):
            link.away_since = 0.0
            self.join(at)

    def join(self, shard: int) -> None:
        self.links[shard].join(self.endpoint)

    def end(self, shard: int) -> None:
        link = self.links[shard]
        link.away_since, link.has_last_words = 0.0, True
        link.ended(link.epoch)

    def close(self) -> None:
        self.inbox.close()
        self._context.term()


class Got(NamedTuple):
    """A delivery.

    `name` is the tag of its consumer, or its group. `who` is the number of the consumer, `part`
    that of its assignment at the shard.
    """

    tag: int
    queue: int
    name: str
    offset: int
    epoch: int
    who: int
    part: int


class Ledger:
    """What clients know. `got` and `uncommitted` are by client and channel."""

    def __init__(self) -> None:
        # offsets, by stream and name
        self.settled: dict[tuple[int, str], set[int]] = defaultdict(set)
        self.got: dict[tuple[int, int], dict[int, Got]] = defaultdict(dict)  # by tag
        self.uncommitted: dict[tuple[int, int], list[tuple[str, list[Got]]]] = defaultdict(list)

    def settle(self, kind: str, taken: list[Got]) -> None:
        for each in taken:
            if kind != "requeue":
                self.settled[each.queue, each.name].add(each.offset)

    def held(self) -> Iterator[Got]:
        """Return what is not settled; in a transaction, not committed."""
        for got in self.got.values():
            yield from got.values()
        for settles in self.uncommitted.values():
            for _, taken in settles:
                yield from taken

    def lowest(self, queue: int, name: str) -> int:
        """Return the lowest offset that nobody of that name has settled."""
        settled = self.settled[queue, name]
        return next(offset for offset in range(len(settled) + 1) if offset not in settled)


class World:
    def __init__(self, shards: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop = Clock()
        self.homes = [DictHome() for _ in range(shards)]
        self.heard: list[deque[bytes]] = [deque() for _ in range(shards)]  # from the shards
        self.shards: list[Shard | None] = [None] * shards
        self.epochs = [0] * shards
        config: Any = SimpleNamespace(
            door=0,
            shards=range(shards),
            runtime_dir="nowhere",
            bodies_bytes=0,
            session_keys=None,
            node_timeout_s=60.0,
        )
        with mock.patch.object(shard_links, "_socket", lambda context, kind: Pipe()):
            # It hears what is looked at here.
            self.links = Links(config, DOOR, self)  # type: ignore[arg-type]
        controller: Any = SimpleNamespace(ask=self.ask, say=self.said)
        self.consuming = Consuming(self.links, controller, SimpleNamespace(now=0.0))
        self.groups = Groups(lambda many: 0)
        self.groups.begin()
        self.orders: deque[GroupOrder] = deque()
        self.catalog: Any = SimpleNamespace(
            queue_by_id=lambda id: self.queue(id - 1) if 0 < id <= shards else None
        )
        self.channels: dict[tuple[int, int], Channel] = {}
        self.clients: dict[int, Any] = {}
        self.prefetches: dict[int, int] = {}  # by virtual consumer or consumer
        self.ledger = Ledger()
        self.tasks: list[tuple[tuple[int, int], asyncio.Task[Any]]] = []
        self.deaths = 0
        self.troubles = Troubles(self.loop)
        logging.getLogger("shardmq.broker").addHandler(self.troubles)
        asyncio.set_event_loop(self.loop)
        self.links.begin(self.loop)
        for at in range(shards):
            self.start(at)
        self.rest()

    # -- processes ---------------------------------------------------------------------------------

    @staticmethod
    def queue(at: int) -> QueuePut:
        return QueuePut("/", f"stream {at}", at + 1, at, durable=True, arguments=STREAM)

    def start(self, at: int) -> None:
        """Start a new process of that shard."""
        self.epochs[at] += 1
        # As a StoreHome.
        shard = self.shards[at] = Shard(at, self.epochs[at], 1, self.homes[at])  # type: ignore[arg-type]
        shard.receive(envelope.control(wire.CONTROLLER, 3, 0, at, wire.Join("controller")), 1000)
        spec = wire.QueueSpec(at + 1, "/", f"stream {at}", True, arguments=STREAM)
        assign = wire.Assign([spec])
        shard.receive(envelope.control(wire.CONTROLLER, 3, self.epochs[at], at, assign), 1000)
        self.links.join(at)

    def kill(self, at: int) -> None:
        """Kill the shard.

        Messages that it sent may be received or not; messages on their way to it are lost.
        """
        if self.shards[at] is None:
            return
        self.deaths += 1
        self.shards[at] = None
        if self.random.random() < 0.5:
            self.door_turn(at, 1 << 30)
        self.heard[at].clear()
        self.links.links[at].socket.sent.clear()  # type: ignore[attr-defined] # a Pipe
        home = self.homes[at]
        self.homes[at] = DictHome(home.files.restarted(power_cut=False))
        self.loop.act(lambda: self.links.end(at))
        self.passes()

    def shard_turn(self, at: int, most: int) -> None:
        # A Pipe.
        shard, sent = self.shards[at], self.links.links[at].socket.sent  # type: ignore[attr-defined]
        if shard is None:
            sent.clear()
            return
        for _ in range(min(most, len(sent))):
            shard.receive(sent.popleft(), 1000)
        shard.syncs.want()
        sync = shard.syncs.begin()
        if sync is not None:
            sync.run()
            shard.syncs.end()
        for outgoing in shard.turn_end(1000):
            if outgoing.endpoint != "controller":
                self.heard[at].append(bytes(joined(outgoing.message)))

    def door_turn(self, at: int, most: int) -> None:
        heard = self.heard[at]
        for _ in range(min(most, len(heard))):
            message = heard.popleft()
            self.loop.act(lambda: self.links.inbox.take_by_zmq(message))  # noqa: B023 # at once
        self.passes()

    def passes(self) -> None:
        """Run the loop of the front door, and carry out the orders of the controller."""
        self.loop.passes(3)
        while self.orders:
            order = self.orders.popleft()
            said = AssignmentOrder(
                order.kind,
                order.consumer.number,
                AssignmentName(*order.assignment),
                *order.bounds,
                order.fresh,
            )
            # At once.
            self.loop.act(lambda: self.consuming.groups.obey([said], self.catalog))  # noqa: B023
            self.loop.passes(3)
        self.links.flush()
        if self.troubles.found:
            raise self.troubles.found[0]
        for who, task in [each for each in self.tasks if each[1].done()]:
            self.tasks.remove((who, task))
            task.result()

    def rest(self) -> None:
        """Until nobody has anything to say; shards that are away stay so."""
        quiet = 0
        for _ in range(TURNS_MAX):
            self.loop.now += 0.05  # whoever waits a moment has waited
            for at in range(len(self.shards)):
                self.shard_turn(at, 1 << 30)
                self.door_turn(at, 1 << 30)
            # Pipes.
            pipes = [link.socket.sent for link in self.links.links]  # type: ignore[attr-defined]
            works = any(shard is not None and shard.has_work for shard in self.shards)
            quiet = 0 if works or any(pipes) or any(self.heard) or any(self.orders) else quiet + 1
            if quiet > 50:  # longer than a handover waits
                return
        raise AssertionError("they never come to rest")

    # -- what links tell ---------------------------------------------------------------------------

    def delivery(self, at: int, section: Any) -> None:
        number, count, blob = section[2], section[5], section[6]
        consumer = self.consuming.consumers.get(number)
        if consumer is not None:
            key = next(
                key
                for key, channel in self.channels.items()
                if channel.consuming is consumer.channel
            )
            tag, epoch = consumer.channel.next_tag, self.links.links[at].epoch
            name = consumer.group.terms.group if consumer.group is not None else consumer.tag
            for i, offset in enumerate(array("Q", bytes(blob[: 8 * count]))):
                got = Got(tag + i, at + 1, name, offset, epoch, self.who(consumer), consumer.number)
                self.ledger.got[key][tag + i] = got
        self.consuming.deliveries.deliver(at, section)
        if consumer is not None:
            self.check_limit(consumer)

    @staticmethod
    def who(consumer: Any) -> int:
        return int(consumer.number if consumer.group is None else consumer.group.number)

    def check_limit(self, consumer: Any) -> None:
        """Check that a consumer has no more than its prefetch.

        Messages of dead shards do not count.
        """
        number = self.who(consumer)
        assert self.outstanding(number) <= self.prefetches[number], (
            "more unacknowledged than the prefetch"
        )

    def outstanding(self, number: int) -> int:
        """Count the deliveries that this consumer has not settled.

        Deliveries that have gone back by themselves do not count: those of a dead process of a
        shard, and those of an assignment that was given to another consumer.
        """
        return sum(
            got.who == number
            and got.part in self.consuming.consumers
            and got.epoch == self.epochs[got.queue - 1]
            and self.shards[got.queue - 1] is not None
            for got in self.ledger.held()
        )

    def away(self, shard: int) -> None:
        self.consuming.away(shard)

    def restarted(self, shard: int) -> None:
        self.consuming.restarted(shard, self.consuming.cancelled)

    def told(self, shard: int, what: wire.Control) -> None:
        if isinstance(what, wire.CreditReport):
            self.consuming.crediting.report(shard, what)
        elif isinstance(what, wire.MarkReached):
            self.consuming.groups.passed(what.consumer, what.offset)

    def publish_room(self, shard: int) -> None: ...
    def receiving(self) -> None: ...
    def received(self) -> None: ...
    def own_deliveries(self) -> None: ...

    # -- the controller ----------------------------------------------------------------------------

    def said(self, what: Any) -> None:
        if isinstance(what, ConsumerLeave):
            self.orders += self.groups.leave(controller_groups.GroupConsumer(0, DOOR, what.number))
        elif isinstance(what, AssignmentGivenUp):
            self.orders += self.groups.gave_up(
                controller_groups.GroupConsumer(0, DOOR, what.number),
                controller_groups.Assignment(*_assignment(what.assignment)),
            )

    def ask(self, asked: ConsumerJoin, owner: str, user: str) -> asyncio.Future[Answer]:
        said = asked.terms
        terms = ConsumeTerms(
            said.group, said.assignment, said.exclusive, said.priority, said.affinity
        )
        queues = range(1, len(self.shards) + 1)
        self.orders += self.groups.join(
            controller_groups.GroupConsumer(0, DOOR, asked.number), NAME, terms, queues
        )
        answer: asyncio.Future[Answer] = self.loop.create_future()
        answer.set_result(Answer(1))
        return answer

    # -- clients -----------------------------------------------------------------------------------

    def channel(self, client: int, number: int, prefetch: int) -> Channel:
        """Return the open channel of that number; open it when there is none."""
        key = (client, number)
        found = self.channels.get(key)
        if found is None:
            if client not in self.clients:
                self.clients[client] = SimpleNamespace(
                    id=client,
                    session=SimpleNamespace(
                        owner=f"client {client}", user="guest", vhost="/", frame_bytes_max=131072
                    ),
                    answer=lambda channel, reply: None,
                    write_delivery=lambda data, shard, size: None,
                )
            found = self.channels[key] = Channel(self.clients[client], number)
            found.consuming.prefetch = prefetch
        return found

    def run(self, key: tuple[int, int], work: Coroutine[Any, Any, Any]) -> None:
        """Run what a client asked for.

        What it asks for next on the same channel comes behind the answer.
        """
        self.tasks.append((key, self.loop.create_task(work)))
        self.passes()

    def busy(self, key: tuple[int, int]) -> bool:
        return any(who == key for who, _ in self.tasks)

    def consume(
        self, key: tuple[int, int], queue: str, tag: str, prefetch: int, **arguments: Any
    ) -> None:
        channel = self.channel(*key, prefetch)
        if tag in channel.consuming.consumers or self.busy(key):
            return
        channel.consuming.prefetch = prefetch
        method = commands.Basic.Consume(queue=queue, consumer_tag=tag, arguments=arguments)
        before = self.consuming._attaching._last_number
        check_consume(channel.consuming, method, 0)
        if queue == NAME.exchange:
            shards = tuple(self.queue(at) for at in range(len(self.shards)))
            self.run(key, self.consuming.consume_shards(channel.consuming, method, queue, shards))
        else:
            one = self.queue(int(queue.split()[1]))
            self.run(key, self.consuming.consume(channel.consuming, method, one))
        self.prefetches[before + 1] = prefetch

    def cancel(self, key: tuple[int, int], tag: str) -> None:
        channel = self.channels.get(key)
        if channel is not None and not self.busy(key) and tag in channel.consuming.consumers:
            self.run(key, self.consuming.cancel(channel.consuming, tag))

    def select(self, key: tuple[int, int]) -> None:
        channel = self.channels.get(key)
        if channel is not None and not self.busy(key):
            channel.select_transaction()

    def settle(self, key: tuple[int, int], kind: str, choose: Any, multiple: bool = False) -> None:
        """`choose`: a tag of those that are outstanding, ascending."""
        channel, got = self.channels.get(key), self.ledger.got[key]
        if channel is None or not got or self.busy(key):
            return
        tag = choose(sorted(got))
        tags = [each for each in sorted(got) if each <= tag] if multiple else [tag]
        taken = [got.pop(each) for each in tags]
        if channel.transaction is not None:
            self.ledger.uncommitted[key].append((kind, taken))
        else:
            self.ledger.settle(kind, taken)
        number = {"ack": wire.ACK, "reject": wire.REJECT, "requeue": wire.REQUEUE}[kind]
        self.loop.act(
            lambda: self.consuming.acks.settle(channel.consuming, [(number, tag, tag, multiple)])
        )
        self.passes()

    def recover(self, key: tuple[int, int]) -> None:
        channel = self.channels.get(key)
        if channel is not None and not self.busy(key):
            self.ledger.got[key].clear()
            self.loop.act(lambda: self.consuming.acks.recover(channel.consuming))
            self.passes()

    def end_transaction(self, key: tuple[int, int], commit: bool) -> None:
        channel = self.channels.get(key)
        if channel is None or channel.transaction is None or self.busy(key):
            return
        said = self.ledger.uncommitted.pop(key, [])
        if commit:
            for kind, taken in said:
                self.ledger.settle(kind, taken)
            settles = channel.transaction.take().settles
            self.loop.act(
                lambda: (
                    [self.consuming.acks.settle_runs(*each, at_once=True) for each in settles]
                    and None
                )  # type: ignore[func-returns-value]
            )
        else:
            channel.consuming.put_back(channel.transaction.drop())
            self.ledger.got[key] |= {each.tag: each for _, taken in said for each in taken}
        self.passes()

    def close(self, key: tuple[int, int]) -> None:
        """Close the channel."""
        channel = self.channels.get(key)
        if channel is None:
            return
        channel.is_open = False
        del self.channels[key]
        self.ledger.got.pop(key, None)
        self.ledger.uncommitted.pop(key, None)
        self.loop.act(lambda: self.consuming.release(channel.consuming) and None)
        self.passes()

    def publish(self, at: int, count: int) -> None:
        shard = self.shards[at]
        if shard is None or 0 not in shard.peers or not count:
            return
        peer = shard.peers[0]
        packer = codec.Packer(1)
        for _ in range(count):
            packer.add_stored(0, [at + 1], MESSAGE, 9, 1, 0, 1000, 0xFFFFFFFF, 0xFF, False, False)
        data = packer.take(0, 0, DOOR, self.epochs[at], peer.next_batch or 1, False)
        assert data is not None
        shard.receive(data, 1000)

    # -- what must be true -------------------------------------------------------------------------

    def end_of_log(self, at: int) -> int:
        shard = self.shards[at]
        assert shard is not None
        return shard.streams.queues[at + 1].log.stream.committed_offset

    def position(self, at: int, name: str) -> int | None:
        shard = self.shards[at]
        if shard is None:
            return None
        found: int | None = shard.streams.queues[at + 1].log.stream.positions.get(name.encode())
        return found

    def check_positions(self, names: list[str]) -> None:
        """None is beyond what nobody of that name has settled."""
        for at in range(len(self.shards)):
            for name in names:
                position = self.position(at, name)
                lowest = self.ledger.lowest(at + 1, name)
                assert position is None or position <= lowest, (
                    f"stream {at}, {name}: at {position}, not {lowest}"
                )

    def check_full(self) -> None:
        """At rest: who has room has all there is, wherever it is."""
        for channel in self.channels.values():
            for consumer in channel.consuming.consumers.values():
                parts: list[Any] = [consumer]
                if isinstance(consumer, GroupConsumer):
                    parts = list(consumer.assignments.values())
                whole = consumer.number
                if any(isinstance(part, Assignment) and not part.wanted for part in parts):
                    continue  # a shard moves
                waits = [part.shard for part in parts if self.has_for(part)]
                if waits:
                    assert self.outstanding(whole) == self.prefetches[whole], (
                        f"{self.outstanding(whole)} of {self.prefetches[whole]}, while shards "
                        f"{waits} have some"
                    )

    def has_for(self, part: Any) -> bool:
        shard = self.shards[part.shard]
        reader = (
            shard.peers[0].holders.get(part.number)
            if shard is not None and 0 in shard.peers
            else None
        )
        # A reader.
        return reader is not None and not reader.detached and reader.queue.has_for(reader)  # type: ignore[union-attr,arg-type]

    def end(self) -> None:
        logging.getLogger("shardmq.broker").removeHandler(self.troubles)
        for _, task in self.tasks:
            task.cancel()
        self.loop.passes(5)
        self.links.close()
        asyncio.set_event_loop(None)
        self.loop.close()


def _assignment(said: AssignmentName) -> tuple[int, int]:
    return said.queue, said.place
