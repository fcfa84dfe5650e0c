"""A shovel: it moves messages from a queue or an exchange to a destination (`tries.py`, `pump.py`).

A message leaves the source when the destination has confirmed it (`on-confirm`). If anything ends a
try, the connections end, and the source requeues what it has no ack for. So a message may be moved
twice, but none is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from pamqp import commands

from shardmq.bridges.connection import FRAME_BYTES_MAX, Connection
from shardmq.bridges.destinations import (
    AmqpDestination,
    Destination,
    HttpDestination,
    ensure_queue,
)
from shardmq.bridges.editing import editor
from shardmq.bridges.errors import LinkFailed, PeerSilent, Unread
from shardmq.bridges.pump import CONFIRM_S_MAX, FLUSH_S_AT_STOP, FLUSH_S_MAX, Mode, Pump
from shardmq.bridges.relay import Relay
from shardmq.bridges.tries import Tries
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.shovels import WHOLE_QUEUE, Shovel
from shardmq.broker.shared.bridging import RUNNING, BridgeState, Order, key_of

CONSUMER_TAG: Final = "shovel"

log = logging.getLogger("bridges")


class ShovelRunner:
    """Runs one shovel until it is cancelled or done.

    Args:
        order: What is to run.
        cluster: The name of this broker.
        doors: Returns the sockets of the front doors of this host, the one to use first.
        tell: Called after each change of `state.state`.
    """

    def __init__(
        self,
        order: Order,
        cluster: str,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        confirm_s_max: float = CONFIRM_S_MAX,
    ) -> None:
        shovel = order.bridge
        assert isinstance(shovel, Shovel)
        self.order = order
        self.state = BridgeState(key=key_of(shovel), life=order.life)
        self._shovel = shovel
        self._cluster = cluster
        self._confirm_s_max = confirm_s_max
        self._left: int | None = None  # messages until the end; None: not known, or no end
        self._held = 0  # messages that a silent source may hold for an old connection
        self._pump: Pump | None = None
        delay_s, name = shovel.reconnect_delay_s, f"Shovel {shovel.name}"
        self._tries = Tries(self.state, name, shovel.vhost, delay_s, doors, tell)
        self._tries.is_hopeless = self._is_own_loop()

    async def run(self) -> None:
        """Move messages until there is no more to do."""
        await self._tries.run(self._run_once, self._useless)

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        if self._pump is not None:
            self._pump.count()

    def _useless(self) -> None:
        """Let other URIs come first in the next try."""
        self._tries.at["src"] += 1
        self._tries.at["dest"] += not self._shovel.is_http  # which has gone on already

    def _is_own_loop(self) -> bool:
        """Return whether the destination is the very queue that is the source."""
        shovel = self._shovel
        if shovel.is_http or not shovel.src_queue or shovel.src_queue != shovel.dest_queue:
            return False

        def places(uris: list[str]) -> set[tuple[str, int, str]]:
            parsed = map(amqp_uri.parse, uris)
            return {(uri.host, uri.port if uri.host else 0, uri.vhost) for uri in parsed}

        return bool(places(shovel.src_uris) & places(shovel.dest_uris))

    # -- one try -----------------------------------------------------------------------------------

    async def _run_once(self) -> None:
        """Connect and move messages. Returns when all is moved, raises LinkFailed otherwise."""
        if self._is_own_loop():
            raise LinkFailed("the destination is the queue that is the source")
        opened: list[Connection | Destination] = []
        try:
            destination, frame_bytes_max = await self._open_destination(opened)
            source = await self._tries.open_any("src", self._shovel.src_uris, frame_bytes_max)
            opened.append(source)
            try:
                await self._move(source, destination)
            except Exception:
                if self._shovel.delete_after == WHOLE_QUEUE:
                    # The next try counts what is in the queue: all must be back there before.
                    await source.finish(FLUSH_S_AT_STOP)
                    if self.state.state == RUNNING and isinstance(source.failure, PeerSilent):
                        self._held = self._left or 0
                raise
        finally:
            self._pump = None
            for each in reversed(opened):
                each.close()

    async def _open_destination(
        self, opened: list[Connection | Destination]
    ) -> tuple[Destination, int]:
        shovel = self._shovel
        if shovel.is_http:
            at = self._tries.at["dest"] % len(shovel.dest_uris)
            self._tries.at["dest"] = at + 1
            url = shovel.dest_uris[at]
            self.state.dest_uri = amqp_uri.without_credentials(url)
            address = shovel.dest_address
            url = f"{url.rstrip('/')}/{address.lstrip('/')}" if address else url
            http = HttpDestination(url, shovel)
            opened.append(http)
            return http, FRAME_BYTES_MAX
        connection = await self._tries.open_any("dest", shovel.dest_uris)
        opened.append(connection)
        amqp = AmqpDestination(connection)
        await amqp.prepare(shovel)
        return amqp, connection.frame_bytes_max

    async def _move(self, source: Connection, destination: Destination) -> None:
        shovel = self._shovel
        pump = self._pump = Pump(source, destination, self.state, self.settled, self._confirm_s_max)
        pump.watch_ends()
        queue, messages = await self._declare(source)
        self.begin(messages, queue)
        left = self._left
        if left is not None and left <= 0:
            return
        limit = -1 if left is None else left
        confirms = shovel.ack_mode == "on-confirm"
        mode = Mode(confirms, shovel.ack_mode != "no-ack" or left is not None, shovel.is_http)
        exchange = key = None
        if not shovel.is_http:
            exchange = None if shovel.dest_exchange is None else shovel.dest_exchange.encode()
            key = None if shovel.dest_key is None else shovel.dest_key.encode()
        mandatory = bool(shovel.dest_queue) and confirms
        edit = self._editing(destination)
        pump.start(
            Relay(exchange, key, mandatory, edit, source.frame_bytes_max, limit), mode, limit
        )
        if mode.acks and shovel.prefetch:
            prefetch = shovel.prefetch if left is None else min(shovel.prefetch, left)
            qos = commands.Basic.Qos(prefetch_count=prefetch)
            await source.call(qos, commands.Basic.QosOk)
        await source.call(
            unchecked(
                commands.Basic.Consume,
                queue=queue,
                consumer_tag=CONSUMER_TAG,
                no_ack=not mode.acks,
                arguments=shovel.src_consumer_args,
            ),
            commands.Basic.ConsumeOk,
        )
        flush_s = FLUSH_S_MAX
        try:
            await pump.run()
        except asyncio.CancelledError:
            flush_s = FLUSH_S_AT_STOP
            raise
        finally:
            pump.stop()
            unread = await pump.flush(flush_s)
            if unread:
                log.warning("Shovel %s in vhost '%s' ends: %s", shovel.name, shovel.vhost, unread)
        if unread:
            raise Unread(unread)

    async def _declare(self, source: Connection) -> tuple[str, int]:
        """Return the source's queue and the number of its messages."""
        shovel = self._shovel
        if not shovel.src_exchange:
            queue = shovel.src_queue
            arguments, predeclared = shovel.src_queue_args, shovel.src_predeclared
            return queue, await ensure_queue(source, queue, arguments, predeclared)
        declare = commands.Queue.Declare(exclusive=True, arguments=shovel.src_queue_args)
        made = await source.call(declare, commands.Queue.DeclareOk)
        queue = str(made.queue)
        bind = unchecked(
            commands.Queue.Bind,
            queue=queue,
            exchange=shovel.src_exchange,
            routing_key=shovel.src_exchange_key,
        )
        await source.call(bind, commands.Queue.BindOk)
        return queue, 0

    def _editing(self, destination: Destination) -> Any:
        own = isinstance(destination, AmqpDestination) and destination.connection.is_own
        return editor(
            self._shovel, self.state.src_uri, self.state.dest_uri, self._cluster, time.time, own
        )

    # -- what is counted ---------------------------------------------------------------------------

    @property
    def left(self) -> int | None:
        return self._left

    def begin(self, messages: int, queue: str) -> None:
        """Note that the shovel runs, from a queue of that length.

        A whole queue is counted anew in each try, as in RabbitMQ: others may have taken messages
        away. But a source that fell silent may still hold messages for the old connection, and they
        are not in the count, so what was left counts after that. A given number of messages is one
        number for all tries.
        """
        after = self._shovel.delete_after
        if after == WHOLE_QUEUE:
            self._left, self._held = max(messages, self._held), 0
        elif self._left is None and after != -1:
            self._left = after
        self.state.src_queue = queue
        self._tries.running()

    def settled(self, messages: int, refused: int) -> bool:
        """Count messages that are settled, and return whether they were the last ones.

        Refused ones count for `src-delete-after` too, as in RabbitMQ.
        """
        self._tries.settled(messages, refused)
        if self._left is not None:
            self._left -= messages
        return self._left is not None and self._left <= 0
