"""Who publishes, as publishing sees it: a client, its channel, what a transaction keeps and waits for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.message import Message
from shardmq.broker.front_door.publish.scope import Scope
from shardmq.shardd.wire.messages import SOME

if TYPE_CHECKING:
    from shardmq.broker.front_door.publish.transactions import Transaction

# Names of the queues a message goes to; those where exchanges keep it are the last.
Targets = tuple[str, ...]
# A message that a transaction keeps, or that a shard has to be asked about first.
Held = tuple[Message, Targets]


class Committed:
    """A transaction's publishes on their way to stable storage."""

    in_sequence = (
        False  # the commit is answered: who hears that it failed has sent nothing behind it
    )

    def __init__(self, connection: int, channel: int) -> None:
        self.connection = connection
        self.channel = channel
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.shards = 1  # batches to wait for, and the commit itself while it is being packed
        self._stored = True

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        """No room on the shard's disk, if it is this channel that is named: with 0, for want of a confirm number."""
        if (connection, channel & ~SOME, first) == (self.connection, self.channel, 0):
            self._stored = False

    def confirmed(self) -> None:
        self.shards -= 1
        if not self.shards and not self.future.done():
            self.future.set_result(self._stored)

    def lost(self) -> None:
        self._stored = False
        self.confirmed()


class PublishingChannel(Protocol):
    """What publishing needs of a channel."""

    number: int
    published: int
    confirms: Confirms | None
    transaction: Transaction[Held, Any] | None

    @property
    def reply_to(self) -> str:
        """The queue for direct replies to this channel, "" without one."""


class Publisher(Protocol):
    """What publishing needs of a client."""

    id: int
    scope: Scope | None

    @property
    def user(self) -> str: ...
    @property
    def vhost(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def frame_bytes_max(self) -> int: ...
    def publishing_channel(self, number: int) -> PublishingChannel | None:
        """None when the channel is closing: its publishes are dropped."""

    def begin_slice(self) -> None:
        """Begin a time slice of what a task does for this client."""

    def slice_is_over(self) -> bool: ...
    async def next_slice(self) -> None:
        """Let others have their turn; then a new slice has begun."""

    def write(self, data: bytes) -> None: ...
    def fail(self, error: ChannelException | ConnectionException, channel: int) -> None: ...
    def feeds(self, shards: int) -> None:
        """Bit mask of shards this client just published to."""
