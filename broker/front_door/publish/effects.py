"""A channel as publishing sees it, and the effects that publishing asks a connection to carry out.

Publishing decides and packs; it writes to no socket and closes no channel. What is to be done comes
back as a `Published`, and one place per connection carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from shardmq.broker.amqp import ChannelException, ConnectionException, Publishes
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.message import Message
from shardmq.broker.front_door.publish.replies import Reply
from shardmq.broker.front_door.publish.transactions import Transaction

T = TypeVar("T")
AmqpError = ChannelException | ConnectionException


class Decided(NamedTuple):
    """A message that was decided about alone, and the names of the queues it goes to.

    Streams in which exchanges keep their messages are the last of the names.
    """

    message: Message
    queues: tuple[str, ...]


class PublishingChannel(Protocol):
    """A channel as publishing sees it."""

    number: int
    published: int
    returned: int
    unroutable_dropped: int
    confirms: Confirms | None
    transaction: Transaction[Decided, Any] | None

    @property
    def is_open(self) -> bool:
        """Return False when the channel is closing: its publishes are dropped."""

    @property
    def reply_to(self) -> str:
        """Return the queue for direct replies to this channel, "" without one."""


class Published:
    """The effects of a call of publishing. The connection carries them out in this order.

    An event of plain publishes has nothing but `fed`: its other attributes stay those of the class,
    so that nothing is made for them.
    """

    # Bit mask of the shards that got bytes. While one of them has too much the client is not read.
    fed = 0
    # Frames for the publisher: basic.return, and the acks that belong before it.
    frames: Sequence[bytes] = ()
    # Direct replies to consumers of this front door.
    replies: Sequence[Reply] = ()
    # What the publisher did wrong, by the number of the channel that ends. A ConnectionException
    # ends the connection, and nothing behind that message was looked at.
    failed: Mapping[int, AmqpError] = MappingProxyType({})
    # Publishes by channel number that have to wait for the answer of a shard, before whatever the
    # channel sends later (Publishing.publish_deferred).
    deferred: Sequence[tuple[int, Publishes]] = ()

    # There is nothing but `fed`.
    is_plain = True

    def write(self, frames: bytes) -> None:
        self.is_plain = False
        self.frames = _appended(self.frames, frames)

    def reply(self, reply: Reply) -> None:
        self.is_plain = False
        self.replies = _appended(self.replies, reply)

    def fail(self, number: int, error: AmqpError) -> None:
        self.is_plain = False
        failed = self.failed if isinstance(self.failed, dict) else {}
        # Its traceback would hold the frame of the publish, and so the memory of its body.
        failed[number] = error.with_traceback(None)
        self.failed = failed

    def defer(self, number: int, event: Publishes) -> None:
        self.is_plain = False
        self.deferred = _appended(self.deferred, (number, event))


def _appended(items: Sequence[T], item: T) -> Sequence[T]:
    """Return the list `items` with one item more; () becomes a list."""
    found = items if isinstance(items, list) else []
    found.append(item)
    return found


class SlicedTask(Protocol):
    """A connection, as a task sees it that publishes much, one time slice after the other."""

    def begin_slice(self) -> None: ...
    def slice_is_over(self) -> bool: ...
    async def next_slice(self) -> None:
        """Let other clients have their slices, then begin the next slice of this one."""

    def carry_out(self, published: Published) -> None:
        """Do what publishing asks for, but for what is deferred: a task has nothing deferred."""
