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
from functools import partial
from typing import Final

from pamqp import commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.destinations import AmqpDestination
from shardmq.bridges.editing import forwarded_by
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.link import Ends, LinkTries
from shardmq.bridges.pump import CONFIRM_S_MAX, Pump
from shardmq.bridges.relay import Relay
from shardmq.bridges.upstream import Upstream
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.model.federation import ExchangeLink
from shardmq.broker.model.upstream_bindings import BINDINGS_MAX, Binding
from shardmq.broker.shared.bridging import Bindings, Order

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
        self.leaves = False
        self._link = link
        ends = Ends("exchange", link.exchange, link.upstream_exchange)
        self._common = LinkTries(order, link.source, ends, doors, tell, confirm_s_max)
        self._common.tries.is_hopeless |= bool(link.twin)
        self.state = self._common.state
        self._bindings: list[Binding] | None = []
        self._is_told = asyncio.Event()  # the controller has told the bindings
        self._news = asyncio.Event()

    async def run(self) -> None:
        await self._common.run(self._run_once)

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
        self._common.update()

    # -- one try -----------------------------------------------------------------------------------

    async def _run_once(self) -> None:
        """Connect and move messages. Raises LinkFailed at the end."""
        link = self._link
        if link.twin:
            raise LinkFailed(
                f"upstream '{link.twin}' leads to the same exchange of the same broker, and runs"
            )
        upstream: Upstream | None = None
        try:
            source, destination = await self._common.open()
            again = partial(self._common.open_another, source)
            upstream = Upstream(link, self.cluster, await again(), again)
            await self._move(source, upstream, destination)
        finally:
            if self.leaves and link.cleans_up and upstream is not None:
                await self._clean_up(upstream)
            self._common.close()

    async def _move(
        self, source: Connection, upstream: Upstream, destination: AmqpDestination
    ) -> None:
        link = self._link
        pump = self._common.pump(source, destination, self._settled)
        await self._is_told.wait()
        self._news.clear()
        await upstream.prepare(self._wanted())
        upstream.connection.on_failed = lambda error: pump.end(LinkFailed(f"source: {error}"))
        edit = forwarded_by(
            link,
            self.state.src_uri,
            self.cluster,
            upstream.name,
            source.frame_bytes_max,
            self._common.tries.say_once,
        )
        relay = Relay(
            link.exchange.encode(),
            None,
            False,  # what no binding wants any more is dropped, as a publish here would be
            edit,
            source.frame_bytes_max,
            may_drop=True,
        )
        await self._common.start(pump, relay, source)
        consume = unchecked(
            commands.Basic.Consume,
            queue=upstream.queue,
            consumer_tag=link.source.consumer_tag,
            no_ack=link.source.ack_mode == "no-ack",
        )
        await source.call(consume, commands.Basic.ConsumeOk)
        self.state.src_queue, self.state.pulls = upstream.queue, True
        self._common.tries.running()
        following = asyncio.create_task(self._follow(upstream, pump))
        try:
            await pump.run()
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following  # its method is written, or is not
            await self._common.stop(pump)

    def _settled(self, messages: int, refused: int) -> bool:
        self._common.tries.settled(messages, refused)
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
