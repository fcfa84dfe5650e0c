"""Virtual queues, the front door's side: a consumer of one has a part at each shard queue that the controller gives it.

The controller decides who has which shard (`controller/groups`); here seats are taken up and given up as it says. How
a shard moves, so that messages of one key are never handled by two at once and never overtake each other:

1. the part that has it is detached: it gets no more;
2. what it holds is waited for, `handover_s` at the most (HANDOVER_S, or the consumer's `x-handover-timeout`);
3. what it still holds then is requeued, in place and redelivered; an ack that comes later is no error, and no ack;
4. the controller hears of it, and gives the shard to the next.

A part whose client cancelled stops at 1 and keeps what it holds; it goes on when that is settled, or when another
consumer is to have the shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from pamqp import commands

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.consume.consumers import Consumer, Part, Virtual
from shardmq.broker.front_door.consume.grants import Grants
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.model import checks
from shardmq.broker.shared.control import (
    ConsumerHere,
    ConsumerJoin,
    ConsumerLeave,
    ConsumeTerms,
    ControlMessage,
    SeatGivenUp,
    SeatOrder,
    SeatPassed,
)
from shardmq.broker.shared.reading import Reading
from shardmq.shardd.wire import messages as wire

if TYPE_CHECKING:
    from shardmq.broker.front_door.connection.channel import Channel
    from shardmq.broker.model.catalog import Catalog
    from shardmq.broker.model.changes import QueuePut

log = logging.getLogger("shardmq.broker.front_door.consume.virtual")

CONSUME = (60, 20)
# What a consumer holds of a shard that moves may take this long; a rebalance is over within a second.
HANDOVER_S: Final = 0.7
HANDOVER_MS_MAX: Final = 3_600_000
# A shard queue may be made but not known to its shard yet, or in exclusive use by somebody who consumes it by its name.
ATTACH_AGAIN_S: Final = 0.05
ATTACH_AGAIN_S_MAX: Final = 0.5
ASSIGNMENTS: Final = ("group", "random", "least")
GIVE, TAKE, BOUND, CLOSE = "give", "take", "bound", "close"


class Attaching(Protocol):
    """Consumers of one shard queue: broker/front_door/consume/consuming.py."""

    consumers: dict[int, Consumer]

    def next_number(self) -> int: ...
    def attach(self, consumer: Consumer, resumed: bool) -> asyncio.Future[wire.Control]: ...
    @staticmethod
    def attached(consumer: Consumer, answer: wire.Control) -> None: ...


class VirtualConsuming:
    """All consumers of virtual queues at this front door. `say`: to the controller, while it is there."""

    def __init__(
        self,
        links: ShardLinks,
        consuming: Attaching,
        grants: Grants,
        say: Callable[[ControlMessage], None],
    ) -> None:
        self._links = links
        self._consuming = consuming
        self._grants = grants
        self._say = say
        self._all: dict[int, Virtual] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- what clients ask ----------------------------------------------------------------------------------

    async def consume(self, whole: Virtual, method: commands.Basic.Consume) -> None:
        client, channel, arguments = whole.client, whole.channel, method.arguments or {}
        whole.nowait, whole.no_ack = bool(method.nowait), bool(method.no_ack)
        whole.limit = 0 if whole.no_ack else channel.prefetch
        whole.terms = terms_of(whole, arguments, bool(method.exclusive))
        whole.handover_s = handover_of(arguments, whole.exchange, client.vhost)
        if whole.read_from is not None:
            _read_streams(whole, whole.read_from)
        channel.consumers[whole.tag] = whole
        channel.virtuals[whole.number] = whole
        self._all[whole.number] = whole
        asked = ConsumerJoin(client.vhost, whole.exchange, whole.number, whole.terms)
        whole.joining = client.catalog_link.ask(asked, client.owner, client.user)
        answer = await whole.joining
        if answer.code:
            whole.left = True
            self._forget(whole)
            raise ChannelException(answer.code, answer.text, *CONSUME)
        if not whole.left:
            self.announce(whole)

    @staticmethod
    def announce(whole: Virtual) -> None:
        """consume-ok, before all else of this consumer."""
        if not whole.announced:
            whole.announced = True
            for part in whole.parts.values():
                part.announced = True
            if not whole.nowait:
                whole.client.send(whole.channel.number, commands.Basic.ConsumeOk(whole.tag))

    async def cancel(self, whole: Virtual) -> None:
        """By its client; returns behind the last delivery. What it holds it may settle still."""
        self._say(ConsumerLeave(whole.number))
        await self._end(whole)

    async def _end(self, whole: Virtual) -> None:
        whole.left = True
        parts = list(whole.parts.values())
        await asyncio.gather(*(self._stop(part) for part in parts))
        for part in parts:
            if not part.held:
                self._hand_over_soon(part)
        self._forget(whole)

    def release(self, channel: Channel) -> list[Part]:
        """The channel is gone: the caller releases these at their shards, and says `released`."""
        parts: list[Part] = []
        for whole in list(channel.virtuals.values()):
            if not whole.left:
                whole.left = True
                self._say(ConsumerLeave(whole.number))
            for part in whole.parts.values():
                part.wanted = part.attached = False
                part.settled.set()  # nobody settles any more: what waits for it need not
                parts.append(part)
            self._forget(whole)
        return parts

    def released(self, parts: Iterable[Part]) -> None:
        for part in parts:
            self._gave_up(part)

    @staticmethod
    def delivered(part: Consumer, count: int) -> None:
        assert isinstance(part, Part)
        part.held += count
        part.whole.outstanding += count

    def settled(self, part: Consumer, count: int, epoch: int) -> None:
        """`epoch`: of the process that they came from."""
        assert isinstance(part, Part)
        part.whole.outstanding -= count
        part.held -= count
        if part.lost and (epoch != self._links.links[part.shard].epoch or part.lost > part.held):
            part.lost -= min(count, part.lost)
        elif not part.wanted:
            self._grants.settled(part, count)
        if part.held <= 0:
            if part.leaving:
                part.settled.set()
            elif part.whole.left and not part.wanted:
                self._hand_over_soon(part)

    # -- what the controller and the shards say ------------------------------------------------------------

    def here(self) -> list[ConsumerHere]:
        """All that are members, for a controller that does not know them."""
        return [
            ConsumerHere(
                each.number,
                each.client.vhost,
                each.exchange,
                each.terms,
                each.left,
                list(each.parts),
            )
            for each in self._all.values()
            if each.is_member
        ]

    def obey(self, orders: Iterable[SeatOrder], catalog: Catalog) -> None:
        for order in orders:
            whole = self._all.get(order.number)
            if order.kind == GIVE:
                queue = catalog.queue_by_id(order.seat.queue)
                if whole is None or whole.left or queue is None:
                    self._say(SeatGivenUp(order.number, order.seat))
                else:
                    self._take_up(whole, order, queue)
            elif order.kind == TAKE:
                part = whole.parts.get(order.seat) if whole is not None else None
                if part is None:
                    self._say(SeatGivenUp(order.number, order.seat))
                else:
                    self._hand_over_soon(part)
            elif order.kind == BOUND:
                if whole is not None and order.seat in whole.parts:
                    self._bound(whole.parts[order.seat], order)
            elif whole is not None and not whole.left:
                self._close(whole)

    def gone(self, part: Consumer) -> None:
        """Its shard says that the queue is no more."""
        assert isinstance(part, Part)
        part.wanted = part.attached = False
        self._grants.gone(part)
        self._gave_up(part)

    def _bound(self, part: Part, order: SeatOrder) -> None:
        part.bounds = (order.stop, order.mark)
        self._links.tell(part.shard, wire.Bound(part.number, *part.bounds))

    def passed(self, number: int, offset: int) -> None:
        """Consumer `number` of a shard queue has come to its mark."""
        part = self._consuming.consumers.get(number)
        if isinstance(part, Part):
            self._say(SeatPassed(part.whole.number, part.seat, offset))

    def _take_up(self, whole: Virtual, order: SeatOrder, queue: QueuePut) -> None:
        seat = order.seat
        if seat in whole.parts:
            return
        part = whole.parts[seat] = Part(whole, self._consuming.next_number(), seat)
        part.queue_id, part.queue_name, part.shard = queue.id, queue.name, queue.shard
        part.auto_delete = queue.auto_delete
        part.bounds = (order.stop, order.mark)
        if whole.read_from is not None:
            asked = whole.read_from
            part.reading = Reading(
                msgspec.structs.replace(asked, start="first") if order.fresh else asked
            )
        self._consuming.consumers[part.number] = part
        self._start(self._attach(part))

    def _close(self, whole: Virtual) -> None:
        """The virtual queue is gone."""
        self.announce(whole)
        if whole.channel.consumers.get(whole.tag) is whole:
            del whole.channel.consumers[whole.tag]
            whole.client.notify_cancel(whole.channel.number, whole.tag)
        self._start(self._end(whole))

    # -- a part's life -------------------------------------------------------------------------------------

    async def _attach(self, part: Part) -> None:
        wait_s = ATTACH_AGAIN_S
        while part.wanted:
            bounds = part.bounds
            try:
                self._consuming.attached(part, await self._consuming.attach(part, resumed=False))
            except ShardRefused as refused:
                log.info("queue '%s': %s; trying again", part.queue_name, refused)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, ATTACH_AGAIN_S_MAX)
            else:
                part.attached = part.wanted
                if (
                    part.bounds != bounds
                ):  # which its shard may not have heard of: it may be another life of it
                    self._links.tell(part.shard, wire.Bound(part.number, *part.bounds))
                return

    async def _stop(self, part: Part) -> None:
        """Returns behind its last delivery."""
        part.wanted = part.attached = False
        await self._links.ask(part.shard, lambda request: wire.Detach(request, part.number))
        self._grants.stopped(part)

    def _hand_over_soon(self, part: Part) -> None:
        if not part.leaving:
            part.leaving = True
            self._start(self._hand_over(part))

    async def _hand_over(self, part: Part) -> None:
        await self._stop(part)
        if part.held > 0:
            try:
                await asyncio.wait_for(part.settled.wait(), part.whole.handover_s)
            except TimeoutError:
                log.info(
                    "queue '%s' moves on: %d deliveries are requeued", part.queue_name, part.held
                )
        await self._links.ask(part.shard, lambda request: wire.Release(request, [part.number]))
        self._gave_up(part)

    def _gave_up(self, part: Part) -> None:
        whole = part.whole
        if whole.parts.get(part.seat) is part:
            del whole.parts[part.seat]
            self._grants.drop(part)
            self._grants.share(part.channel)
            self._consuming.consumers.pop(part.number, None)
            self._say(SeatGivenUp(whole.number, part.seat))
            self._forget(whole)

    def _forget(self, whole: Virtual) -> None:
        """When nothing of it is left."""
        if whole.left and not whole.parts:
            self._all.pop(whole.number, None)
            whole.channel.virtuals.pop(whole.number, None)
        if whole.left and whole.channel.consumers.get(whole.tag) is whole:
            del whole.channel.consumers[whole.tag]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a consumer of a virtual queue: internal error", exc_info=error)


# -- arguments of consume ------------------------------------------------------------------------------------


def terms_of(whole: Virtual, arguments: Mapping[str, Any], exclusive: bool) -> ConsumeTerms:
    """Raises ChannelException for what is none of the values an argument may have."""
    queue, vhost = whole.exchange, whole.client.vhost

    def checked(name: str, kind: type, default: Any) -> Any:
        value = arguments.get(name, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            said = (
                checks.not_integer(value)
                if kind is int
                else f"{{unacceptable_type,{checks.type_name(value)}}}"
            )
            raise invalid(name, queue, vhost, said)
        return value

    assignment = checked("x-shard-assignment", str, "group")
    if assignment not in ASSIGNMENTS:
        raise invalid("x-shard-assignment", queue, vhost, "none of " + ", ".join(ASSIGNMENTS))
    return ConsumeTerms(
        group=checked("x-group", str, ""),
        assignment=assignment,
        exclusive=exclusive,
        priority=checked("x-priority", int, 0),
        affinity=affinity_of(arguments, queue, vhost),
        owner=whole.client.owner,
        channel=whole.channel.number,
        tag=whole.tag,
    )


def _read_streams(whole: Virtual, asked: wire.ReadFrom) -> None:
    """The shards are streams: who names a group shares them with it, and the group's position in each is kept under its
    name; who names none reads all of them."""
    if whole.terms.group:
        whole.read_from = msgspec.structs.replace(asked, name=whole.terms.group)
    else:
        alone = f"{whole.client.owner} {whole.number}"
        whole.terms = msgspec.structs.replace(whole.terms, group=alone)


def affinity_of(arguments: Mapping[str, Any], queue: str, vhost: str) -> bool:
    """Of any queue: whether messages of one key are to go to one consumer while it has one of that key."""
    value = arguments.get("x-key-affinity", False)
    if not isinstance(value, bool):
        raise invalid("x-key-affinity", queue, vhost, "unacceptable_type")
    return value


def handover_of(arguments: Mapping[str, Any], queue: str, vhost: str) -> float:
    """Seconds."""
    value = arguments.get("x-handover-timeout", int(HANDOVER_S * 1000))
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("x-handover-timeout", queue, vhost, checks.not_integer(value))
    if not 0 <= value <= HANDOVER_MS_MAX:
        raise invalid("x-handover-timeout", queue, vhost, f"not within 0 and {HANDOVER_MS_MAX} ms")
    return value / 1000


def invalid(argument: str, queue: str, vhost: str, why: str) -> ChannelException:
    return ChannelException(
        406, f"invalid arg '{argument}' for queue '{queue}' in vhost '{vhost}': {why}", *CONSUME
    )
