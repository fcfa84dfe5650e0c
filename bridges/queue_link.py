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
from urllib.parse import quote

from pamqp import commands

from shardmq.bridges.connection import COMMANDS, Connection
from shardmq.bridges.destinations import AmqpDestination, ensure_queue
from shardmq.bridges.editing import received_from
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.pump import CONFIRM_S_MAX, FLUSH_S_AT_STOP, Mode, Pump
from shardmq.bridges.relay import Relay
from shardmq.bridges.tries import DELAY_S_MIN, Tries
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.federation import QueueLink
from shardmq.broker.model.shovels import PREFETCH
from shardmq.broker.shared.bridging import BridgeState, Order, key_of

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
        self.state = BridgeState(key=key_of(link), life=order.life)
        self._link = link
        self._confirm_s_max = confirm_s_max
        self._pulls = False  # the controller says so
        self._pump: Pump | None = None
        self._since = 0  # messages that are settled since the queue here was looked at
        self._news = asyncio.Event()
        name = f"Federation link (upstream: {link.upstream}, policy: {link.policy})"
        delay_s = max(link.reconnect_delay_s, DELAY_S_MIN)
        self._tries = Tries(self.state, name, link.vhost, delay_s, doors, tell, True)
        self._tries.is_hopeless = self._is_own_loop()

    async def run(self) -> None:
        await self._tries.run(self._run_once, self._useless)

    def pull(self, pulls: bool) -> None:
        """Take messages from now on, or no more."""
        if pulls != self._pulls:
            self._pulls = pulls
            self._news.set()

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        if self._pump is not None:
            self._pump.count()

    def _useless(self) -> None:
        self._tries.at["src"] += 1

    def _is_own_loop(self) -> bool:
        """Return whether the upstream queue is the very queue that is federated."""
        link = self._link
        if link.queue != link.upstream_queue:
            return False
        uris = [amqp_uri.parse(uri, link.vhost) for uri in link.uris]
        return any(uri.is_here and uri.vhost == link.vhost for uri in uris)

    async def _run_once(self) -> None:
        """Connect and move messages. Raises LinkFailed at the end."""
        link = self._link
        if self._is_own_loop():
            raise LinkFailed("the upstream queue is the federated queue itself")
        opened: list[Connection] = []
        try:
            here = f"amqp:///{quote(link.vhost, safe='')}"
            downstream = await self._tries.open_any("dest", [here])
            opened.append(downstream)
            destination = AmqpDestination(downstream)
            if link.ack_mode == "on-confirm":
                await destination.confirm()
            await downstream.open_channel(COMMANDS)
            frame_bytes_max = downstream.frame_bytes_max
            upstream = await self._tries.open_any("src", link.uris, frame_bytes_max, link.vhost)
            opened.append(upstream)
            await self._move(upstream, destination)
        finally:
            self._pump, self.state.pulls = None, False
            for each in reversed(opened):
                each.close()

    async def _move(self, upstream: Connection, destination: AmqpDestination) -> None:
        link = self._link
        if NEEDED not in upstream.capabilities:
            raise LinkFailed("upstream_lacks_consumer_priorities")
        pump = self._pump = Pump(
            upstream, destination, self.state, self._settled, self._confirm_s_max
        )
        pump.watch_ends()
        await ensure_queue(
            upstream, link.upstream_queue, link.arguments, False, link.durable, link.auto_delete
        )
        mode = Mode(confirms=link.ack_mode == "on-confirm", acks=link.ack_mode != "no-ack")
        frame_bytes_max = upstream.frame_bytes_max
        edit = received_from(link, self.state.src_uri, frame_bytes_max, self._tries.say_once)
        pump.start(
            Relay(
                link.queue.encode() if link.is_virtual else b"",
                None if link.is_virtual else link.queue.encode(),
                True,  # mandatory: a queue that is gone is told of, and ends the try
                edit,
                frame_bytes_max,
                with_names=True,
            ),
            mode,
        )
        if mode.acks and link.prefetch:
            qos = commands.Basic.Qos(prefetch_count=link.prefetch)
            await upstream.call(qos, commands.Basic.QosOk)
        self.state.src_queue = link.upstream_queue
        self._tries.running()
        following = asyncio.create_task(self._follow(upstream, destination.connection, pump))
        try:
            await pump.run()
        finally:
            following.cancel()
            pump.stop()
            if unread := await pump.flush(FLUSH_S_AT_STOP):
                log.warning("link %s in vhost '%s' ends: %s", link.id, link.vhost, unread)

    def _settled(self, messages: int, refused: int) -> bool:
        self._tries.settled(messages, refused)
        self._since += messages
        if self._since >= (self._link.prefetch or PREFETCH):
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
                consumer_tag=link.consumer_tag,
                no_ack=link.ack_mode == "no-ack",
                nowait=True,
                arguments={"x-priority": PRIORITY},
            )
        else:
            method = unchecked(commands.Basic.Cancel, consumer_tag=link.consumer_tag, nowait=True)
        upstream.send(method)
        self.state.pulls = consumes
        self._tries.tell()
