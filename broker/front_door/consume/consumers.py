"""What the front door knows of one consumer: `Consumer` is one of one shard's queue, `Virtual` one of a virtual queue,
which has a `Part`, itself such a consumer, at each shard queue it owns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from shardmq.broker.shared.control import Answer, ConsumeTerms, SeatName
from shardmq.broker.shared.reading import Reading
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.messages import ReadFrom

if TYPE_CHECKING:
    from shardmq.broker.front_door.connection.channel import Channel
    from shardmq.broker.front_door.connection.client import Client


# Of a reader: the offset from which on it gets nothing, and the one below which all settled is to be told; or None.
Bounds = tuple[int | None, int | None]
FREE: Final[Bounds] = (None, None)


class Consumer:
    """One consumer of one channel. `number`: used once in this front door's life."""

    __slots__ = (
        "affinity", "announced", "attached", "attaching", "auto_delete", "channel", "client", "exclusive", "granted",
        "lent", "no_ack", "nowait", "number", "prefetch", "priority", "queue_id", "queue_name", "reading", "shard",
        "tag", "tag_bytes", "whole",
    )  # fmt: skip

    def __init__(self, client: Client, channel: Channel, number: int, tag: str) -> None:
        self.client = client
        self.channel = channel
        self.number = number
        self.tag = tag
        self.tag_bytes = tag.encode()
        self.whole: Virtual | None = None  # whose part it is
        self.attached = False  # to be attached again when its shard restarts
        self.attaching: asyncio.Future[wire.Control] | None = None
        self.announced = False
        self.auto_delete = False  # its queue
        self.nowait = False
        self.granted = 0  # outstanding grants; of a lent prefetch, all of it
        self.lent = False  # it shares a limit by a prefetch of its own, which is lent to it
        self.queue_id = 0
        self.queue_name = ""
        self.shard = 0
        self.affinity = False  # messages of one key to one consumer
        self.no_ack = False
        self.exclusive = False
        self.priority = 0
        self.prefetch = 0
        self.reading: Reading | None = None  # of a stream


class Virtual:
    """One consumer of a virtual queue, as its client sees it. `limit`: its prefetch, of all parts together."""

    def __init__(self, client: Client, channel: Channel, number: int, tag: str) -> None:
        self.client = client
        self.channel = channel
        self.number = number
        self.tag = tag
        self.exchange = ""
        self.terms = ConsumeTerms("", "", False, 0, False, "", 0, "")
        self.handover_s = 0.0  # how long what it holds of a shard that moves is waited for
        self.read_from: ReadFrom | None = None  # its shards are streams
        self.joining: asyncio.Future[Answer] | None = None
        self.announced = False
        self.nowait = False
        self.no_ack = False
        self.left = False  # cancelled, or its channel is gone
        self.parts: dict[SeatName, Part] = {}
        self.limit = 0
        self.outstanding = 0  # deliveries that are not settled
        self.granted = 0  # deliveries let through but not yet here; of lent prefetches, their sum
        # Shards that were lent some, each with the part by which it is; first who had a turn longest ago.
        self.turns: dict[int, Part | None] = {}
        self.turn_ends = 0.0  # of the last one; loop time
        self.turn_is_over = True  # and what it had beyond its share was recalled

    @property
    def is_member(self) -> bool:
        """Whether the controller has let it in."""
        joining = self.joining
        return (
            joining is not None
            and joining.done()
            and not joining.cancelled()
            and not joining.result().code
        )


class Part(Consumer):
    """A virtual consumer's share of one shard queue."""

    __slots__ = (
        "bounds",
        "held",
        "leaving",
        "lost",
        "lowered",
        "recalled",
        "seat",
        "settled",
        "wanted",
    )

    def __init__(self, whole: Virtual, number: int, seat: SeatName) -> None:
        super().__init__(whole.client, whole.channel, number, whole.tag)
        self.whole: Virtual = whole
        self.seat = seat
        self.bounds: Bounds = FREE  # of a stream
        self.announced = whole.announced
        self.no_ack = whole.no_ack
        self.priority = whole.terms.priority
        self.affinity = whole.terms.affinity
        self.prefetch = whole.limit
        self.wanted = True  # to be attached
        self.recalled: int | None = (
            None  # what it may keep of its lent prefetch while others want some
        )
        self.lowered = 0  # by so much, in turns of others, since its lent prefetch began anew
        self.leaving = False  # on its way to give the seat up
        self.held = 0  # deliveries that are not settled; in a transaction, not committed
        self.lost = 0  # of those, by a process of its shard that is gone: they come again, and use nothing it is lent
        self.settled = asyncio.Event()  # it holds nothing, while it is leaving

    @property
    def takes_turns(self) -> bool:
        """With parts at other shards, in using what its virtual consumer may have."""
        return self.lent and self.wanted and self.attached and not self.affinity
