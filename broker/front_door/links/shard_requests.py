"""Questions that a front door asks shards, until they are answered.

A request outlives a restart of its shard: it is made anew for the next process, as things are then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shardmq.broker.front_door.links.shard_link import ShardLink, is_down
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import messages as wire

# Makes the message of a request from the number of the request.
Make = Callable[[int], wire.Message]


class ShardRefused(Exception):
    """The shard answered Refused."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class ShardDown(Exception):
    """The node of the shard has been away for too long.

    If the question `was_sent`, the shard may have done what it asks for.
    """

    def __init__(self, was_sent: bool = False) -> None:
        super().__init__()
        self.was_sent = was_sent


class _Open:
    """A request that is not answered; `was_sent` to a process of the shard, or not yet."""

    __slots__ = ("future", "make", "shard", "was_sent")

    def __init__(
        self, shard: int, make: Make, future: asyncio.Future[wire.Control], was_sent: bool
    ) -> None:
        self.shard, self.make, self.future, self.was_sent = shard, make, future, was_sent


# What a client asks about a queue, and is refused while the node of the queue is down. A consumer
# that the client has already waits for the node, and so does one of a virtual queue.
REFUSED_IF_DOWN = (wire.Count, wire.Purge, wire.Get, wire.Attach, wire.AttachReader)


class ShardRequests:
    """The unanswered requests to all shards. `loop` is set before the first request."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, links: list[ShardLink]) -> None:
        self._links = links
        self._open: dict[int, _Open] = {}
        self._last = 0
        # Futures of those who do not wait for a shard that is away, by shard.
        self._impatient: dict[int, set[asyncio.Future[wire.Control]]] = {}
        # Epochs of answers to basic.get, until the caller of `ask_in_epoch` runs.
        self._answered_in: dict[int, int] = {}

    def ask(self, shard: int, make: Make) -> asyncio.Future[wire.Control]:
        """Ask a shard; return a future of the answer, which raises ShardRefused.

        A question of REFUSED_IF_DOWN raises ShardDown when the node of the shard stays away.
        """
        self._last = request = self._last + 1
        future: asyncio.Future[wire.Control] = self.loop.create_future()
        is_up = self._links[shard].up
        self._open[request] = _Open(shard, make, future, is_up)
        if is_up:
            self._links[shard].tell(make(request))
        return future

    def give_up(self, now: float) -> None:
        """Refuse what clients ask about the queues of shards that are down."""
        for request, asked in list(self._open.items()):
            if is_down(self._links[asked.shard], now) and _is_refused_if_down(asked.make(request)):
                del self._open[request]
                if not asked.future.done():
                    asked.future.set_exception(ShardDown(asked.was_sent))

    def unless_away(
        self, shard: int, answer: asyncio.Future[wire.Control]
    ) -> asyncio.Future[wire.Control]:
        """Return a future of the answer, or of an empty Done while the shard is away.

        The shard of another node may be away for long, and a client that ends a consumer there must
        not wait for it. A shard of this node is waited for, because its process comes back soon.
        """
        link = self._links[shard]
        if not link.is_elsewhere or answer.done():
            return answer
        found: asyncio.Future[wire.Control] = self.loop.create_future()
        if not link.up:
            found.set_result(wire.Done(0))
            return found
        waiting = self._impatient.setdefault(shard, set())
        waiting.add(found)

        def answered(answer: asyncio.Future[wire.Control]) -> None:
            waiting.discard(found)
            if found.done():
                return
            if answer.cancelled():
                found.cancel()
            elif (error := answer.exception()) is not None:
                found.set_exception(error)
            else:
                found.set_result(answer.result())

        answer.add_done_callback(answered)
        return found

    def away(self, shard: int) -> None:
        """Answer those who do not wait for a shard that has gone."""
        for found in self._impatient.pop(shard, ()):
            if not found.done():
                found.set_result(wire.Done(0))

    async def ask_in_epoch(self, shard: int, make: Make) -> tuple[int, wire.Control]:
        """Ask a shard; return the answer behind the epoch that gave it.

        That epoch may be over by the time the caller runs.
        """
        future = self.ask(shard, make)
        request = self._last
        try:
            answer = await future
            return self._answered_in[request], answer
        finally:
            self._answered_in.pop(request, None)

    async def ask_about(
        self, queue: QueuePut, message: type[wire.Count | wire.Purge]
    ) -> wire.Done | None:
        """Ask the shard of a queue; return None if the queue just went.

        Raises Refusal if the disk of the shard is too full, or if its node is down.
        """
        try:
            done = await self.ask(queue.shard, lambda request: message(request, queue.id))
        except ShardDown:
            raise checks.home_is_down(queue, self._links[queue.shard].node) from None
        except ShardRefused as refused:
            if refused.code == checks.NO_ROOM:
                raise checks.not_purged(queue, refused.text) from None
            return None
        assert isinstance(done, wire.Done)
        return done

    def answered(self, link: ShardLink, request: int, what: wire.Control) -> None:
        """Hand an answer to who asked, if somebody still waits for it."""
        asked = self._open.pop(request, None)
        if asked is None or asked.future.done():
            return
        future = asked.future
        if isinstance(what, wire.Got):
            self._answered_in[request] = link.epoch
        if isinstance(what, wire.Refused):
            future.set_exception(ShardRefused(what.code, what.text))
        else:
            future.set_result(what)

    def ask_again(self, link: ShardLink) -> None:
        """Ask the new process of a shard what the old one did not answer, in the same order.

        The order counts: a Release behind an Attach still undoes it. Consumers that are attached
        again are left out, because Events.restarted names those that are still wanted. So is what a
        client asked that has left: a message got for nobody would be lost.
        """
        for request, asked in list(self._open.items()):
            if asked.shard != link.shard:
                continue
            what = asked.make(request)
            unwanted = asked.future.done() and isinstance(
                what, (wire.Attach, wire.Get, wire.Reserve)
            )
            if unwanted or (isinstance(what, wire.Attach) and what.resumed):
                del self._open[request]
            else:
                asked.was_sent = True
                link.send(link.control(what))


def _is_refused_if_down(what: wire.Message) -> bool:
    return type(what) in REFUSED_IF_DOWN and not (isinstance(what, wire.Attach) and what.resumed)
