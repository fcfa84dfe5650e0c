"""Requests to the authority that the controller itself makes.

They follow from what links report, from the steps of a reshard, and from calls of operators. The
requests of clients come from front doors (`shared/control.py`) and wait in the same inbox.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardmq.broker.model.arguments import SUPER_STREAM
from shardmq.broker.shared.control import Bind, ExchangeDeclare, QueueDeclare

PARTITION_ORDER = "x-stream-partition-order"
MOVED = 0


@dataclass(slots=True)
class Removal:
    """Delete queues: no client asks for it, but their shard or the end of their connection.

    at_shard: their shard was asked first, and has deleted them with `messages` messages.
    """

    queues: list[int]
    at_shard: bool = False
    messages: int = 0


@dataclass(slots=True)
class Pause:
    """Have a queue give no messages, or give them again."""

    vhost: str
    name: str
    paused: bool


@dataclass(slots=True)
class Move:
    """Begin to move a queue to a shard."""

    vhost: str
    name: str
    shard: int


@dataclass(slots=True)
class MoveOn:
    """Take the next step of the move of a queue, or tell the shards again of the present one.

    id: the other life of the queue; with another one, the move is over and nothing is changed.
    step: one of those of `Moving`, or MOVED, which ends the move.
    """

    vhost: str
    name: str
    id: int
    step: int


@dataclass(slots=True)
class Forget:
    """Forget all that lies on these shards, whose node is gone for good."""

    shards: frozenset[int]


@dataclass(slots=True)
class OwnerGone:
    """Delete the exclusive queues of a connection that has ended."""

    connection: str


@dataclass(slots=True)
class Drained:
    """Delete a draining shard queue that was found empty, if its shard finds it empty too."""

    queue: int
    if_unused: ClassVar = False
    if_empty: ClassVar = True


@dataclass(slots=True)
class Restore:
    """Give one exchange the shard queues that it is to have.

    This comes behind a Drained, which may have crossed another change, and at steps of a reshard.
    """

    vhost: str
    exchange: str


@dataclass(slots=True)
class NodesChanged:
    """Give all stream exchanges the shard queues that they are to have with the present nodes."""


@dataclass(slots=True)
class CutOff:
    """Put cuts into streams of one exchange that are about to gain keys; offsets by queue id."""

    vhost: str
    exchange: str
    number: int
    offsets: dict[int, int]


@dataclass(slots=True)
class Closed:
    """Note that shard queues of one exchange hold back what arrives, as their shards have said."""

    vhost: str
    exchange: str
    queues: frozenset[int]


@dataclass(slots=True)
class Settled:
    """Let go what the shard queues of one exchange have held back.

    What was to come before it is settled, or is not waited for. `offsets` holds the cuts of streams
    that may have lost keys, by queue id.
    """

    vhost: str
    exchange: str
    offsets: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class SuperStreamDeclare:
    """Make an exchange and a stream NAME-KEY for each binding key; all of them or none.

    `arguments` are those of each stream.
    """

    vhost: str
    name: str
    keys: list[str]
    arguments: dict[str, Any]

    def parts(self) -> tuple[ExchangeDeclare, list[QueueDeclare], list[Bind]]:
        """Return the requests that would make the same objects one by one."""
        vhost, name, marked = self.vhost, self.name, {SUPER_STREAM: True}
        exchange = ExchangeDeclare(vhost, name, "direct", True, False, False, marked)
        streams = [f"{name}-{key}" for key in self.keys]
        return (
            exchange,
            [QueueDeclare(vhost, each, True, False, False, self.arguments) for each in streams],
            [
                Bind(vhost, name, "queue", each, key, {PARTITION_ORDER: order})
                for order, (key, each) in enumerate(zip(self.keys, streams, strict=True))
            ],
        )
