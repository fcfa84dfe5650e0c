"""A link of federated queues: it takes messages of an upstream queue while consumers here wait.

```
                  the queue here is empty and has consumers
     +--------+ ------------------------------------------> +--------+
     | paused |                                             | pulls  |  a consumer of priority -1
     +--------+ <------------------------------------------ +--------+  at the upstream queue
                  the queue has messages, or no consumers
```

The controller says which queues are empty and have consumers. The link itself looks again after
each `prefetch-count` messages, because many come before the controller looks the next time. What
the upstream has sent before it reads that the consumer is cancelled is moved all the same, as in
RabbitMQ.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pamqp import commands

from shardmq.bridges.connection import COMMANDS, Connection
from shardmq.bridges.destinations import AmqpDestination, ensure_queue
from shardmq.bridges.editing import received_from
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.link import Ends, LinkTries
from shardmq.bridges.pump import CONFIRM_S_MAX, Pump
from shardmq.bridges.relay import Relay
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model.federation import QueueLink
from shardmq.broker.model.shovels import PREFETCH
from shardmq.broker.shared.bridging import Order

PRIORITY: Final = -1
# A queue that has messages, though consumers are there, is looked at again so soon.
FULL_S: Final = 0.05
NEEDED: Final = "consumer_priorities"

log = logging.getLogger("bridges")


class QueueLinkRunner:
    """Runs one link until it is cancelled. The arguments are those of `ShovelRunner`."""

    def __init__(
        self,
        order: Order,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        confirm_s_max: float = CONFIRM_S_MAX,
    ) -> None:
        link = order.bridge
        assert isinstance(link, QueueLink)
        self.order = order
        self._link = link
        ends = Ends("queue", link.queue, link.upstream_queue)
        self._common = LinkTries(order, link.source, ends, doors, tell, confirm_s_max)
        self.state = self._common.state
        self._pulls = False  # the controller says so
        self._since = 0  # messages that are settled since the queue here was looked at
        self._news = asyncio.Event()

    async def run(self) -> None:
        await self._common.run(self._run_once)

    def pull(self, pulls: bool) -> None:
        """Take messages from now on, or no more."""
        if pulls != self._pulls:
            self._pulls = pulls
            self._news.set()

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        self._common.update()

    async def _run_once(self) -> None:
        """Connect and move messages. Raises LinkFailed at the end."""
        try:
            upstream, destination = await self._common.open()
            await destination.connection.open_channel(COMMANDS)
            await self._move(upstream, destination)
        finally:
            self._common.close()

    async def _move(self, upstream: Connection, destination: AmqpDestination) -> None:
        link = self._link
        if NEEDED not in upstream.capabilities:
            raise LinkFailed("upstream_lacks_consumer_priorities")
        pump = self._common.pump(upstream, destination, self._settled)
        await ensure_queue(
            upstream, link.upstream_queue, link.arguments, False, link.durable, link.auto_delete
        )
        frame_bytes_max = upstream.frame_bytes_max
        edit = received_from(link, self.state.src_uri, frame_bytes_max, self._common.tries.say_once)
        relay = Relay(
            link.queue.encode() if link.is_virtual else b"",
            None if link.is_virtual else link.queue.encode(),
            True,  # mandatory: a queue that is gone is told of, and ends the try
            edit,
            frame_bytes_max,
            with_names=True,
        )
        await self._common.start(pump, relay, upstream)
        self.state.src_queue = link.upstream_queue
        self._common.tries.running()
        following = asyncio.create_task(self._follow(upstream, destination.connection, pump))
        try:
            await pump.run()
        finally:
            following.cancel()
            await self._common.stop(pump)

    def _settled(self, messages: int, refused: int) -> bool:
        self._common.tries.settled(messages, refused)
        self._since += messages
        if self._since >= (self._link.source.prefetch or PREFETCH):
            self._news.set()
        return False

    # -- when messages are taken -------------------------------------------------------------------

    async def _follow(self, upstream: Connection, downstream: Connection, pump: Pump) -> None:
        """Consume at the upstream while messages are to be taken."""
        try:
            consumes = False
            while True:
                self._news.clear()
                pulls = self._pulls
                if downstream.blocked:  # it takes no messages, and may answer nothing
                    pulls = pulls and consumes
                elif pulls:
                    self._since = 0
                    pulls = await self._is_empty(downstream)
                if pulls != consumes:
                    consumes = pulls
                    self._consume(upstream, consumes)
                try:
                    async with asyncio.timeout(FULL_S if self._pulls and not pulls else None):
                        await self._news.wait()
                except TimeoutError:
                    pass
        except LinkFailed as failed:
            pump.end(LinkFailed(f"destination: {failed}"))
        except Exception as failed:
            log.exception("link %s in vhost '%s'", self._link.id, self._link.vhost)
            pump.end(LinkFailed(f"internal error: {type(failed).__name__}"))

    async def _is_empty(self, downstream: Connection) -> bool:
        """Return whether no message is ready in the queue here."""
        passive = unchecked(commands.Queue.Declare, queue=self._link.queue, passive=True)
        found = await downstream.call(passive, commands.Queue.DeclareOk, COMMANDS)
        return not found.message_count

    def _consume(self, upstream: Connection, consumes: bool) -> None:
        """Begin or cancel the consumer, without an answer, which might come behind messages."""
        link = self._link
        if consumes:
            method: commands.Basic.Consume | commands.Basic.Cancel = unchecked(
                commands.Basic.Consume,
                queue=link.upstream_queue,
                consumer_tag=link.source.consumer_tag,
                no_ack=link.source.ack_mode == "no-ack",
                nowait=True,
                arguments={"x-priority": PRIORITY},
            )
        else:
            method = unchecked(
                commands.Basic.Cancel, consumer_tag=link.source.consumer_tag, nowait=True
            )
        upstream.send(method)
        self.state.pulls = consumes
        self._common.tries.tell()
