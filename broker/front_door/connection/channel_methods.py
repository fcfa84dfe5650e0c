"""The basic.*, confirm.*, tx.* and flow methods of a channel.

A handler does its work at once and returns the reply, or gives a coroutine that does: then what
follows on the channel waits for its end (work_queue.py). It raises what the client did wrong.
exchange.* and queue.* methods are handled in topology/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from pamqp import base, commands

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.connection.channel import Channel, Outcome, Reply
from shardmq.broker.front_door.connection.output import Output
from shardmq.broker.front_door.consume.acks import kept_by
from shardmq.broker.front_door.consume.consuming import check_consume
from shardmq.broker.front_door.consume.refusals import CONSUME, GET
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.commit import SETTLED_S_MAX, Committed
from shardmq.broker.front_door.publish.confirms import Answered
from shardmq.broker.front_door.publish.effects import SlicedTask
from shardmq.broker.front_door.publish.reservations import refused
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology import methods, queues, reply_queue
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut

TX_COMMIT = 20
TX_ROLLBACK = 30


class Caller(SlicedTask, Answered, Protocol):
    """The connection whose channel it is."""

    session: Session
    services: Services

    @property
    def gets(self) -> asyncio.Semaphore:
        """Return the bound of messages that the client is being got (basic.get) at once."""

    @property
    def output(self) -> Output: ...


Handler = Callable[[Caller, Channel, Any], Outcome]


# -- basic ---------------------------------------------------------------------------------------


def _qos(caller: Caller, channel: Channel, method: commands.Basic.Qos) -> Reply:
    if method.prefetch_size:
        raise ConnectionException(540, f"prefetch_size!=0 ({method.prefetch_size})", 60, 10)
    if method.global_:
        caller.services.consuming.limit(channel.consuming, method.prefetch_count)
    else:
        channel.consuming.prefetch = method.prefetch_count
    return commands.Basic.QosOk()


async def _consume(caller: Caller, channel: Channel, method: commands.Basic.Consume) -> Reply:
    consuming = caller.services.consuming
    check_consume(channel.consuming, method, caller.services.config.channel_consumers_max)
    if shards := _readable_shards(caller, channel, method.queue, CONSUME):
        name = _queue_name(channel, method.queue)
        return await consuming.consume_shards(channel.consuming, method, name, shards)
    if method.queue == checks.REPLY_TO:
        queue = await _reply_queue(caller, channel)
    else:
        queue = await _readable_queue(caller, channel, method.queue, CONSUME)
    if queue is None:
        return None
    return await consuming.consume(channel.consuming, method, queue)


async def _cancel(caller: Caller, channel: Channel, method: commands.Basic.Cancel) -> Reply:
    tag = method.consumer_tag or ""
    deleted = await caller.services.consuming.cancel(channel.consuming, tag)
    if deleted:
        # Behind cancel-ok the queue is gone: a declare of its name makes another.
        await caller.services.catalog_link.removed(deleted)
    if method.nowait or not channel.is_open:
        return None
    return commands.Basic.CancelOk(method.consumer_tag)


async def _get(caller: Caller, channel: Channel, method: commands.Basic.Get) -> Reply:
    async with caller.gets:
        await caller.output.room()
        if not channel.is_open:
            return None
        gets, no_ack = caller.services.consuming.gets, bool(method.no_ack)
        if shards := _readable_shards(caller, channel, method.queue, GET):
            name = _queue_name(channel, method.queue)
            return await gets.get_of_shards(channel.consuming, name, shards, no_ack)
        queue = await _readable_queue(caller, channel, method.queue, GET)
        if queue is None:
            return None
        return await gets.get(channel.consuming, queue, no_ack)


def _recover(caller: Caller, channel: Channel, method: commands.Basic.Recover) -> Reply:
    if not method.requeue:
        raise ConnectionException(540, "requeue=false", 60, 110)
    caller.services.consuming.acks.recover(channel.consuming)
    return commands.Basic.RecoverOk() if isinstance(method, commands.Basic.Recover) else None


def _queue_name(channel: Channel, name: str) -> str:
    """Return the name that a consume or get means; "" means the queue declared last."""
    return checks.clean_name(name or channel.last_queue)


async def _readable_queue(
    caller: Caller, channel: Channel, name: str, method: tuple[int, int]
) -> QueuePut | None:
    """Return the queue of a consume or get, if it is there and this user may read it.

    There is none if the channel was closed meanwhile.
    """
    session, services = caller.session, caller.services
    name = _queue_name(channel, name)
    try:
        try:
            return queues.readable_queue(session, services.catalog, name)
        except checks.Refusal as refusal:
            is_unknown = refusal.code == queues.NOT_FOUND and services.steps.in_cluster
            is_locked = refusal.code == checks.RESOURCE_LOCKED and queues.is_far(
                session, services.catalog, name
            )
            if not (is_unknown or is_locked):
                raise
        await services.steps.run(methods.catalog_in_step(session, name), session)
        if not channel.is_open:
            return None
        return queues.readable_queue(session, services.catalog, name)
    except checks.Refusal as refusal:
        raise methods.failure_of(method, refusal) from None


def _readable_shards(
    caller: Caller, channel: Channel, name: str, method: tuple[int, int]
) -> tuple[QueuePut, ...]:
    """Return the shards of a virtual queue, if this user may read it; none for other queues."""
    try:
        return queues.readable_shards(
            caller.session, caller.services.catalog, _queue_name(channel, name)
        )
    except checks.Refusal as refusal:
        raise ChannelException(refusal.code, refusal.text, *method) from None


async def _reply_queue(caller: Caller, channel: Channel) -> QueuePut | None:
    """Return a new queue for replies to the channel, None if it was closed meanwhile."""
    session, steps = caller.session, caller.services.steps
    try:
        queue = await steps.run(reply_queue.open_reply_queue(session), session)
        if channel.is_open:
            return queue
        await steps.run(reply_queue.close_reply_queue(session, queue.name), session)
    except checks.Refusal as refusal:
        raise methods.failure(commands.Basic.Consume, refusal) from None
    return None


# -- confirm, flow -------------------------------------------------------------------------------


def _confirm_select(caller: Caller, channel: Channel, method: commands.Confirm.Select) -> Reply:
    transactions.check_confirm_select(channel.transaction)
    if channel.confirms is None:
        channel.confirms = caller.services.publishing.confirms(caller, channel.number)
    return None if method.nowait else commands.Confirm.SelectOk()


def _flow(caller: Caller, channel: Channel, method: commands.Channel.Flow) -> Reply:
    if not method.active:
        raise ConnectionException(540, "active=false", 20, 20)
    return commands.Channel.FlowOk(True)


# -- tx ------------------------------------------------------------------------------------------


def _tx_select(caller: Caller, channel: Channel, method: commands.Tx.Select) -> Reply:
    channel.select_transaction()
    return commands.Tx.SelectOk()


async def _tx_commit(caller: Caller, channel: Channel, method: commands.Tx.Commit) -> Reply:
    """Publish, then settle; answer when every shard has all of it on stable storage.

    Nothing is done where a queue refuses, or where a delivery to be acknowledged has gone back to
    its queue: the deliveries are unacknowledged again. The transaction holds its settles until its
    publishes have left. A stream reader that is attached again meanwhile (its shard has started
    anew) begins at the first delivery whose settle no shard was told of. A client that leaves
    during a commit has all its publishes stored, and may have settled nothing.
    """
    transaction = transactions.opened(channel.transaction, TX_COMMIT)
    publishing = caller.services.publishing
    acks, reservation = caller.services.consuming.acks, None
    kept = kept_by(transaction.settles, caller.services.catalog)
    try:
        if not acks.are_outstanding(kept):
            raise refused("a shard has requeued what was delivered")
        reservation = await publishing.reserve(caller.session, transaction.publishes)
        answers = await publishing.ask_duplicates(caller.session, transaction.publishes, caller)
    except BaseException as error:
        if reservation is not None:
            reservation.end()
        if isinstance(error, ChannelException):
            channel.consuming.put_back(transaction.drop())
        raise
    stored = await publishing.commit(
        caller.session, channel, transaction.publishes, answers, reservation, caller
    )
    held = transaction.take()
    for kind, runs in held.settles:
        acks.settle_runs(kind, runs, at_once=True)
    settled = Committed(caller.session.id, channel.number, shards=len(kept))
    acks.make_last(kept, settled)
    settled.confirmed()
    caller.services.loop.schedule_end_of_pass()
    is_stored = await stored
    if not (await settled.within(SETTLED_S_MAX) and is_stored):
        raise ChannelException(406, "partial tx completion", 90, TX_COMMIT)
    return commands.Tx.CommitOk() if channel.is_open else None


def _tx_rollback(caller: Caller, channel: Channel, method: commands.Tx.Rollback) -> Reply:
    channel.consuming.put_back(transactions.opened(channel.transaction, TX_ROLLBACK).drop())
    return commands.Tx.RollbackOk()


HANDLERS: Final[dict[type[base.Frame], Handler]] = {
    commands.Basic.Qos: _qos,
    commands.Basic.Consume: _consume,
    commands.Basic.Cancel: _cancel,
    commands.Basic.Get: _get,
    commands.Basic.Recover: _recover,
    commands.Basic.RecoverAsync: _recover,
    commands.Tx.Select: _tx_select,
    commands.Tx.Commit: _tx_commit,
    commands.Tx.Rollback: _tx_rollback,
    commands.Confirm.Select: _confirm_select,
    commands.Channel.Flow: _flow,
}
