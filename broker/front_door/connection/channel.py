"""One channel: what the front door knows of it, and its basic.*, confirm.*, tx.* and flow methods.

A handler does its work at once, or gives a coroutine: then what follows on the channel waits for its end (client.py).
exchange.* and queue.* are in topology/methods.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from pamqp import base, commands

from shardmq.broker.amqp import Binds, ChannelException, ConnectionException
from shardmq.broker.front_door.consume.consumers import Consumer, Virtual
from shardmq.broker.front_door.consume.unacked import Run, Unacked
from shardmq.broker.front_door.publish import transactions
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.publisher import Held
from shardmq.broker.front_door.publish.transactions import Transaction
from shardmq.broker.front_door.topology.pipeline import Pipeline

if TYPE_CHECKING:
    from shardmq.broker.front_door.connection.client import Client

TX_COMMIT = 20
TX_ROLLBACK = 30

# A topology method, or what to do; the coroutine ends when what follows may begin.
Work = base.Frame | Binds | Callable[[], Coroutine[None, None, None] | None]
Handler = Callable[["Client", "Channel", Any], Coroutine[None, None, None] | None]


class Channel:
    """What the front door knows of one channel."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_open = True
        self.published = 0  # messages, also those that reached no queue
        self.prefetch = 0  # for new consumers
        self.limit = 0  # of the whole channel
        self.outstanding = (
            0  # deliveries to consumers that are not settled; in a transaction, not committed
        )
        self.granted = 0  # deliveries let through but not yet here, of a channel with a limit
        self.last_queue = ""
        self.replies: Consumer | None = None  # of direct reply-to
        self.next_tag = 1
        # Deliveries that nobody settles, and basic.get; all others were delivered to consumers that acknowledge.
        self.delivered_auto = self.got_auto = self.got_manual = self.got_empty = 0
        self.unacked = Unacked()
        self.consumers: dict[str, Consumer | Virtual] = {}
        self.virtuals: dict[int, Virtual] = {}  # cancelled ones too, while they hold something
        self.wanting: dict[Consumer, None] = {}  # those that asked for grants, longest first
        self.cancelled: list[Consumer] = []
        self.getters: dict[int, Consumer] = {}
        self.confirms: Confirms | None = None
        self.transaction: Transaction[Held, tuple[int, list[Run]]] | None = None
        self.work: deque[Work] = deque()
        self.running = False  # some of its work waits for an answer
        self.pipeline: Pipeline | None = None

    def unsettled(self) -> Iterator[Run]:
        """Return the deliveries whose settles no shard was told of.

        Those of a transaction are among them: a rollback makes them outstanding again.
        """
        yield from self.unacked.runs()
        if self.transaction is not None:
            for _, runs in self.transaction.settles:
                yield from runs

    def first_unsettled(self, consumer: Consumer, epoch: int) -> int | None:
        """Return the lowest number of the consumer's unsettled deliveries in that epoch of its shard."""
        own = (
            run.first_number
            for run in self.unsettled()
            if run.consumer is consumer and run.epoch == epoch
        )
        return min(own, default=None)

    def report(self, owner: str) -> dict[str, object]:
        """Counters of the channel, for listings."""
        confirms = self.confirms
        return {
            "owner": owner,
            "number": self.number,
            "prefetch_count": self.prefetch,
            "global_prefetch_count": self.limit,
            "messages_unacknowledged": self.unacked.count,
            "consumer_count": len(self.consumers),
            "confirm": confirms is not None,
            "transactional": self.transaction is not None,
            "messages_unconfirmed": sum(w.last - w.first + 1 for w in confirms.waiting)
            if confirms
            else 0,
            "messages_uncommitted": self.transaction.publish_count if self.transaction else 0,
            "acks_uncommitted": self.transaction.settle_count if self.transaction else 0,
            "published": self.published,
            "delivered": self.next_tag - 1,
            "delivered_auto": self.delivered_auto,
            "delivered_manual": self.next_tag
            - 1
            - self.delivered_auto
            - self.got_auto
            - self.got_manual,
            "got_auto": self.got_auto,
            "got_manual": self.got_manual,
            "got_empty": self.got_empty,
        }

    @property
    def reply_to(self) -> str:
        """What amq.rabbitmq.reply-to means in what this channel publishes; "" while nobody waits for replies."""
        return self.replies.queue_name if self.replies is not None else ""

    @property
    def busy(self) -> bool:
        return self.running or (self.pipeline is not None and self.pipeline.busy)


def _qos(client: Client, channel: Channel, method: commands.Basic.Qos) -> None:
    if method.prefetch_size:
        raise ConnectionException(540, f"prefetch_size!=0 ({method.prefetch_size})", 60, 10)
    if method.global_:
        client.door.consuming.limit(channel, method.prefetch_count)
    else:
        channel.prefetch = method.prefetch_count
    client.send(channel.number, commands.Basic.QosOk())


def _consume(
    client: Client, channel: Channel, method: commands.Basic.Consume
) -> Coroutine[None, None, None]:
    return client.door.consuming.consume(client, channel, method)


def _cancel(
    client: Client, channel: Channel, method: commands.Basic.Cancel
) -> Coroutine[None, None, None]:
    return client.door.consuming.cancel(client, channel, method)


def _get(
    client: Client, channel: Channel, method: commands.Basic.Get
) -> Coroutine[None, None, None]:
    return client.door.consuming.get(client, channel, method)


def _recover(client: Client, channel: Channel, method: commands.Basic.Recover) -> None:
    if not method.requeue:
        raise ConnectionException(540, "requeue=false", 60, 110)
    client.door.consuming.recover(channel)
    if isinstance(method, commands.Basic.Recover):
        client.send(channel.number, commands.Basic.RecoverOk())


def _confirm_select(client: Client, channel: Channel, method: commands.Confirm.Select) -> None:
    transactions.check_confirm_select(channel.transaction)
    if channel.confirms is None:
        channel.confirms = client.door.publishing.confirms(client, channel.number)
    if not method.nowait:
        client.send(channel.number, commands.Confirm.SelectOk())


def _flow(client: Client, channel: Channel, method: commands.Channel.Flow) -> None:
    if not method.active:
        raise ConnectionException(540, "active=false", 20, 20)
    client.send(channel.number, commands.Channel.FlowOk(True))


def _tx_select(client: Client, channel: Channel, method: commands.Tx.Select) -> None:
    channel.transaction = transactions.select(
        channel.transaction, confirming=channel.confirms is not None
    )
    client.send(channel.number, commands.Tx.SelectOk())


async def _tx_commit(client: Client, channel: Channel, method: commands.Tx.Commit) -> None:
    """Publish, then settle; answer when every shard has the publishes on stable storage.

    Nothing is done where a queue refuses: the deliveries that were to be acknowledged are unacknowledged again. The
    transaction holds its settles until its publishes have left. A stream reader that is attached again meanwhile (its
    shard has started anew) begins at the first delivery whose settle no shard was told of. A client that leaves during
    a commit has all its publishes stored, and may have settled nothing.
    """
    transaction = transactions.opened(channel.transaction, TX_COMMIT)
    publishing = client.door.publishing
    reservation = None
    try:
        reservation = await publishing.reserve(client, transaction.publishes)
        asked = await publishing.ask_once(client, transaction.publishes)
    except BaseException as error:
        if reservation is not None:
            reservation.end()
        if isinstance(error, ChannelException):
            _put_back(channel, transaction.drop())
        raise
    stored = await publishing.commit(client, channel, transaction.publishes, asked, reservation)
    held = transaction.take()
    for kind, runs in held.settles:
        client.door.consuming.settle_runs(kind, runs, at_once=True)
    client.door.schedule_end_of_pass()
    if not await stored:
        raise ChannelException(406, "partial tx completion", 90, TX_COMMIT)
    if channel.is_open:
        client.send(channel.number, commands.Tx.CommitOk())


def _tx_rollback(client: Client, channel: Channel, method: commands.Tx.Rollback) -> None:
    _put_back(channel, transactions.opened(channel.transaction, TX_ROLLBACK).drop())
    client.send(channel.number, commands.Tx.RollbackOk())


def _put_back(channel: Channel, settles: list[tuple[int, list[Run]]]) -> None:
    """The deliveries of these settles are unacknowledged again."""
    for _, runs in settles:
        for run in runs:
            channel.unacked.put_back(run)


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
