"""A link of federated exchanges: messages that bindings here want come from an upstream exchange.

```
   upstream exchange --> internal exchange --> queue --> link --> the exchange here --> queues
            ^                                             |
            +------- bindings of the exchange here -------+
```

The queue at the upstream keeps messages while the link is down, and while this broker is. It is
deleted when the link is not asked for any more, or goes to another place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from pamqp import commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.destinations import AmqpDestination
from shardmq.bridges.editing import forwarded_by
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.pump import CONFIRM_S_MAX, FLUSH_S_AT_STOP, Mode, Pump
from shardmq.bridges.relay import Relay
from shardmq.bridges.tries import DELAY_S_MIN, Tries
from shardmq.bridges.upstream import Upstream
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.federation import ExchangeLink
from shardmq.broker.model.upstream_bindings import BINDINGS_MAX, Binding
from shardmq.broker.shared.bridging import Bindings, BridgeState, Order, key_of

CHECK_S: Final = 90.0  # the internal exchange is looked for so often, as in RabbitMQ
CLEAN_UP_S_MAX: Final = 8.0
TOO_MANY: Final = f"the exchange has more than {BINDINGS_MAX} bindings, or very large ones"

log = logging.getLogger("bridges")


class ExchangeLinkRunner:
    """Runs one link until it is cancelled. The arguments are those of `ShovelRunner`.

    leaves: set before the link is cancelled for good: what it has at the upstream is deleted.
    """

    def __init__(
        self,
        order: Order,
        cluster: str,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        confirm_s_max: float = CONFIRM_S_MAX,
    ) -> None:
        link = order.bridge
        assert isinstance(link, ExchangeLink)
        self.order, self.cluster = order, cluster
        self.state = BridgeState(key=key_of(link), life=order.life)
        self.leaves = False
        self._link = link
        self._confirm_s_max = confirm_s_max
        self._bindings: list[Binding] | None = []
        self._is_told = asyncio.Event()  # the controller has told the bindings
        self._news = asyncio.Event()
        self._pump: Pump | None = None
        name = f"Federation link (upstream: {link.upstream}, policy: {link.policy})"
        delay_s = max(link.reconnect_delay_s, DELAY_S_MIN)
        self._tries = Tries(self.state, name, link.vhost, delay_s, doors, tell, True)
        self._tries.is_hopeless = bool(link.twin) or self._is_own_loop()

    async def run(self) -> None:
        await self._tries.run(self._run_once, self._useless)

    def is_of(self, told: Bindings) -> bool:
        """Return whether bindings are those of the exchange of this link."""
        return (told.vhost, told.exchange) == (self._link.vhost, self._link.exchange)

    def has_heir(self, links: Mapping[tuple[str, str], list[ExchangeLink]]) -> bool:
        """Return whether one of the links that are to run goes on with the queue at the upstream.

        They are given by the vhost and the name of the exchange here. The upstream may have got
        another name, so a link of another key may be the one.
        """
        link = self._link
        here = links.get((link.vhost, link.exchange), ())
        return any(each.keeps_queue_of(link) for each in here)

    def bind(self, bindings: list[Binding] | None) -> None:
        """Take the bindings of the exchange here; None if there are too many of them."""
        self._bindings = bindings
        self._is_told.set()
        self._news.set()

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        if self._pump is not None:
            self._pump.count()

    def _useless(self) -> None:
        self._tries.at["src"] += 1

    def _is_own_loop(self) -> bool:
        """Return whether the upstream exchange is the very exchange that is federated."""
        link = self._link
        if link.exchange != link.upstream_exchange:
            return False
        uris = [amqp_uri.parse(uri, link.vhost) for uri in link.uris]
        return any(uri.is_here and uri.vhost == link.vhost for uri in uris)

    # -- one try -----------------------------------------------------------------------------------

    async def _run_once(self) -> None:
        """Connect and move messages. Raises LinkFailed at the end."""
        link = self._link
        if self._is_own_loop():
            raise LinkFailed("the upstream exchange is the federated exchange itself")
        if link.twin:
            raise LinkFailed(
                f"upstream '{link.twin}' leads to the same exchange of the same broker, and runs"
            )
        opened: list[Connection] = []
        upstream: Upstream | None = None

        async def open_for_commands() -> Connection:
            opened.append(await self._tries.open(opened[1].uri))
            return opened[-1]

        try:
            here = f"amqp:///{quote(link.vhost, safe='')}"
            opened.append(await self._tries.open_any("dest", [here]))
            destination = AmqpDestination(opened[0])
            if link.ack_mode == "on-confirm":
                await destination.confirm()
            frame_bytes_max = opened[0].frame_bytes_max
            source = await self._tries.open_any("src", link.uris, frame_bytes_max, link.vhost)
            opened.append(source)
            upstream = Upstream(link, self.cluster, await open_for_commands(), open_for_commands)
            await self._move(source, upstream, destination)
        finally:
            self._pump, self.state.pulls = None, False
            if self.leaves and link.cleans_up and upstream is not None:
                await self._clean_up(upstream)
            for each in reversed(opened):
                each.close()

    async def _move(
        self, source: Connection, upstream: Upstream, destination: AmqpDestination
    ) -> None:
        link = self._link
        pump = self._pump = Pump(
            source, destination, self.state, self._settled, self._confirm_s_max
        )
        pump.watch_ends()
        await self._is_told.wait()
        self._news.clear()
        await upstream.prepare(self._wanted())
        upstream.connection.on_failed = lambda error: pump.end(LinkFailed(f"source: {error}"))
        mode = Mode(confirms=link.ack_mode == "on-confirm", acks=link.ack_mode != "no-ack")
        edit = forwarded_by(
            link,
            self.state.src_uri,
            self.cluster,
            upstream.name,
            source.frame_bytes_max,
            self._tries.say_once,
        )
        pump.start(
            Relay(
                link.exchange.encode(),
                None,
                False,  # what no binding wants any more is dropped, as a publish here would be
                edit,
                source.frame_bytes_max,
                may_drop=True,
            ),
            mode,
        )
        if mode.acks and link.prefetch:
            qos = commands.Basic.Qos(prefetch_count=link.prefetch)
            await source.call(qos, commands.Basic.QosOk)
        consume = unchecked(
            commands.Basic.Consume,
            queue=upstream.queue,
            consumer_tag=link.consumer_tag,
            no_ack=not mode.acks,
        )
        await source.call(consume, commands.Basic.ConsumeOk)
        self.state.src_queue, self.state.pulls = upstream.queue, True
        self._tries.running()
        following = asyncio.create_task(self._follow(upstream, pump))
        try:
            await pump.run()
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following  # its method is written, or is not
            pump.stop()
            if unread := await pump.flush(FLUSH_S_AT_STOP):
                log.warning("link %s in vhost '%s' ends: %s", link.id, link.vhost, unread)

    def _settled(self, messages: int, refused: int) -> bool:
        self._tries.settled(messages, refused)
        return False

    async def _follow(self, upstream: Upstream, pump: Pump) -> None:
        """Bind and unbind at the upstream as it is done here."""
        try:
            while True:
                try:
                    async with asyncio.timeout(CHECK_S):
                        await self._news.wait()
                except TimeoutError:
                    await upstream.check()
                    continue
                self._news.clear()
                await upstream.follow(self._wanted())
        except LinkFailed as failed:
            pump.end(LinkFailed(f"source: {failed}"))
        except Exception as failed:
            log.exception("link %s in vhost '%s'", self._link.id, self._link.vhost)
            pump.end(LinkFailed(f"internal error: {type(failed).__name__}"))

    def _wanted(self) -> list[Binding]:
        if self._bindings is None:
            raise LinkFailed(TOO_MANY)
        return self._bindings

    async def _clean_up(self, upstream: Upstream) -> None:
        """Delete what the link has at the upstream, if the upstream answers in time."""
        try:
            async with asyncio.timeout(CLEAN_UP_S_MAX):
                await upstream.clean_up()
        except (LinkFailed, TimeoutError) as error:
            why = str(error) or f"no answer within {CLEAN_UP_S_MAX:g} s"
            log.warning(
                "link %s in vhost '%s': queue '%s' stays at the upstream: %s",
                self._link.id, self._link.vhost, upstream.queue, why,
            )  # fmt: skip
