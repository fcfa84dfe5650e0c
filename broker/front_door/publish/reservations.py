"""Room for a transaction at the queues that may refuse it, before anything of it leaves.

Queues with a length limit and `x-overflow` reject-publish refuse what does not fit. Each shard that
has such queues among the targets is asked first; only when all of them have set room aside the
transaction is published, and its queues then take all of it. So it is refused as a whole, over any
number of shards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from shardmq.broker.amqp import ChannelException, contents
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.front_door.publish.message import Message
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import taking
from shardmq.shardd.wire import messages as wire

COMMIT = (90, 20)
PRECONDITION_FAILED = 406
# A transaction is refused when a shard does not answer for this time.
RESERVE_S_MAX = 10.0

# By shard: for each queue that may refuse, its id and the body bytes of its messages.
Needs = dict[int, dict[int, list[int]]]


class Reservation:
    """Room that is set aside at these shards, until `end`."""

    def __init__(self, links: ShardLinks, number: int, shards: Iterable[int]) -> None:
        self._links = links
        self._number = number
        self._shards = tuple(shards)

    def redeem(self) -> None:
        """Publish some of the transaction next, and nothing else before `rest` or `end`."""
        for shard in self._shards:
            self._links.tell(shard, wire.Redeem(self._number))

    def rest(self) -> None:
        """Keep the reservation from what is published next, which is not of the transaction."""
        for shard in self._shards:
            self._links.tell(shard, wire.Redeem(0))

    def end(self) -> None:
        """Free what was not used. Further calls do nothing."""
        shards, self._shards = self._shards, ()
        for shard in shards:
            self._links.tell(shard, wire.Unreserve(self._number))


class Reservations:
    """All reservations of this front door."""

    def __init__(self, links: ShardLinks, wait_s_max: float = RESERVE_S_MAX) -> None:
        self._links = links
        self._wait_s_max = wait_s_max
        self._numbers = itertools.count(1)

    async def reserve(self, needs: Needs) -> Reservation:
        """Set room aside at all shards; raise ChannelException when some queue has none."""
        reservation = Reservation(self._links, number := next(self._numbers), needs)
        asked: list[asyncio.Future[wire.Control]] = []
        try:
            asked += [self._ask(shard, number, queues) for shard, queues in needs.items()]
            await asyncio.wait_for(asyncio.gather(*asked), self._wait_s_max)
        except ShardRefused:
            raise refused("a queue is full") from None
        except TimeoutError:
            raise refused(f"a shard has not answered for {self._wait_s_max:g} s") from None
        else:
            kept, reservation = reservation, Reservation(self._links, number, ())
            return kept
        finally:
            # Else the next process of a shard that is away would be asked, and nobody would end
            # that reservation.
            for each in asked:
                each.cancel()
            reservation.end()

    def _ask(
        self, shard: int, number: int, queues: Mapping[int, list[int]]
    ) -> asyncio.Future[wire.Control]:
        return self._links.ask(
            shard, lambda request: wire.Reserve(request, number, list(queues.items()))
        )


def refused(why: str) -> ChannelException:
    """Return the answer to a commit of which nothing was done."""
    return ChannelException(
        PRECONDITION_FAILED, f"{why}: nothing of the transaction was done", *COMMIT
    )


def needs_of(vhost: Vhost, held: Iterable[tuple[Message, tuple[str, ...]]]) -> Needs:
    """Return what a transaction needs of the queues that may refuse some of it."""
    found: Needs = {}
    may_refuse: dict[str, bool] = {}
    for message, targets in held:
        size = -1
        for name in targets:
            if name not in may_refuse:
                queue = vhost.queues.get(name)
                may_refuse[name] = queue is not None and _may_refuse(vhost.queue_arguments(queue))
            if may_refuse[name]:
                if size < 0:
                    size = len(contents.read_stored(message.stored)[3])
                queue = taking(vhost.queues[name])
                found.setdefault(queue.shard, {}).setdefault(queue.id, []).append(size)
    return found


def _may_refuse(arguments: Mapping[str, Any]) -> bool:
    is_bounded = "x-max-length" in arguments or "x-max-length-bytes" in arguments
    return is_bounded and str(arguments.get("x-overflow", "")).startswith("reject-publish")
