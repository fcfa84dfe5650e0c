"""A link of exchanges keeps a queue, an internal exchange and bindings at its upstream.

```
   upstream exchange --- bindings ---> internal exchange "QUEUE A" ---> QUEUE ---> the link
                                                         (or "QUEUE B")
```

Each try makes the bindings anew, to an internal exchange of its own, because nobody knows which of
the old ones are still wanted. The old internal exchange is deleted when the new one has all
bindings, so none is missing in between. A message that both would take comes once.

All is done on a connection of its own: on that of the consumer, answers would wait behind messages
while the link does not read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from pamqp import commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.errors import ChannelClosed, ConnectionClosed, LinkFailed
from shardmq.broker.amqp.methods import Long, encode_method, unchecked
from shardmq.broker.amqp.spec import FRAME_OVERHEAD_BYTES
from shardmq.broker.model.federation import INTERNAL_PURPOSE, ExchangeLink
from shardmq.broker.model.upstream_bindings import Binding, Place, at_upstream
from shardmq.broker.model.values import NAME_BYTES_MAX

UPSTREAM_TYPE: Final = "x-federation-upstream"
# Codes by which brokers refuse an exchange type that they do not know: RabbitMQ's is the first.
UNKNOWN_TYPE: Final = (503, 540, 406)
AT_A_TIME: Final = 100  # bindings, of which the last one is answered
SUFFIXES: Final = "AB"

log = logging.getLogger("bridges")


class Upstream:
    """The queue, the internal exchange and the bindings of one try of a link.

    Args:
        link: The link.
        cluster: The name of this broker.
        connection: A connection to the upstream for this alone.
        again: Opens another such connection.
    """

    def __init__(
        self,
        link: ExchangeLink,
        cluster: str,
        connection: Connection,
        again: Callable[[], Awaitable[Connection]],
    ) -> None:
        self.connection = connection
        self.name = connection.cluster_name, connection.uri.vhost
        self.queue = link.upstream_queue(cluster, connection.uri.vhost)
        self._link, self._cluster, self._again = link, cluster, again
        self._suffix = ""  # of the internal exchange in use
        self._bound: set[Binding] = set()  # those that lead to it
        self._unfit = 0  # bindings that could not be sent since `follow` began

    async def prepare(self, bindings: list[Binding]) -> None:
        """Declare and bind what the link needs. Raises LinkFailed."""
        link = self._link
        if len(self._exchange(SUFFIXES[0]).encode()) > NAME_BYTES_MAX:
            raise LinkFailed(
                f"the names of the exchanges and of this broker are too long together: "
                f"the internal exchange would have more than {NAME_BYTES_MAX} bytes"
            )
        await self._ensure_exchange()
        await self._declare_queue()
        found = [each for each in SUFFIXES if await self._exists(self._exchange(each))]
        if len(found) == 2:
            # A try ended in between, and one of the two may lack bindings. One gets all of them,
            # and may keep some that are not wanted. Then the other one begins anew.
            await self._use(found[0], bindings)
            await self._delete(found[1])
            found = found[:1]
        new = "B" if found == ["A"] else "A"
        await self._declare(new)
        await self._use(new, bindings)
        for old in found:
            await self._delete(old)
        log.info("queue '%s' of link %s has %d bindings", self.queue, link.id, len(self._bound))

    async def follow(self, bindings: list[Binding]) -> None:
        """Bind what is new and unbind what is gone. Raises LinkFailed."""
        wanted = await self._at_upstream(bindings)
        self._unfit = 0
        await self._send([self._bind(each) for each in sorted(wanted - self._bound, key=_order)])
        await self._send([self._unbind(each) for each in sorted(self._bound - wanted, key=_order)])
        self._bound = wanted
        if self._unfit:
            log.warning("link %s: %d bindings fit into no frame", self._link.id, self._unfit)

    async def check(self) -> None:
        """Raise LinkFailed if an exchange is gone, which somebody must have deleted."""
        for name in (self._exchange(self._suffix), self._link.upstream_exchange):
            if not await self._exists(name):
                raise LinkFailed(f"the exchange '{name}' is gone")

    async def clean_up(self) -> None:
        """Delete the queue and the internal exchange. Raises LinkFailed."""
        delete = unchecked(commands.Queue.Delete, queue=self.queue)
        await self.connection.call_or_reopen(delete, commands.Queue.DeleteOk)
        for suffix in SUFFIXES:
            await self._delete(suffix)

    # -- steps -------------------------------------------------------------------------------------

    def _exchange(self, suffix: str) -> str:
        return f"{self.queue} {suffix}"

    async def _ensure_exchange(self) -> None:
        link = self._link
        if await self._exists(link.upstream_exchange):
            return
        declare = unchecked(
            commands.Exchange.Declare,
            exchange=link.upstream_exchange,
            exchange_type=link.exchange_type,
            durable=link.durable,
            auto_delete=link.auto_delete,
            arguments=link.arguments,
        )
        await self.connection.call(declare, commands.Exchange.DeclareOk)

    async def _declare_queue(self) -> None:
        link = self._link
        arguments = {
            "x-expires": link.expires,
            "x-message-ttl": link.message_ttl,
            "x-queue-type": link.queue_type,
            INTERNAL_PURPOSE: "federation",
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        # Not passively first: a queue with other arguments is the reason of a failure.
        declare = unchecked(commands.Queue.Declare, queue=self.queue, durable=True, arguments=given)
        await self.connection.call(declare, commands.Queue.DeclareOk)

    async def _exists(self, exchange: str) -> bool:
        passive = unchecked(commands.Exchange.Declare, exchange=exchange, passive=True)
        answer = await self.connection.call_or_reopen(passive, commands.Exchange.DeclareOk)
        return answer is not None

    async def _declare(self, suffix: str) -> None:
        """Declare an internal exchange, as a fanout exchange if the upstream lacks the type."""
        arguments: dict[str, Any] = {
            "x-max-hops": Long(self._link.max_hops),
            "x-downstream-name": self._cluster,
            "x-downstream-vhost": self._link.vhost,
        }
        try:
            await self._declare_as(suffix, UPSTREAM_TYPE, arguments)
        except ChannelClosed as closed:
            if closed.code not in UNKNOWN_TYPE:
                raise
            self.connection.send(commands.Channel.CloseOk())
            await self.connection.open_channel()
        except ConnectionClosed as closed:
            if closed.code not in UNKNOWN_TYPE:
                raise
            self.connection = await self._again()
        else:
            return
        await self._declare_as(suffix, "fanout", {})

    async def _declare_as(self, suffix: str, type: str, arguments: dict[str, Any]) -> None:
        declare = unchecked(
            commands.Exchange.Declare,
            exchange=self._exchange(suffix),
            exchange_type=type,
            durable=True,
            auto_delete=True,
            internal=True,
            arguments=arguments,
        )
        await self.connection.call(declare, commands.Exchange.DeclareOk)

    async def _use(self, suffix: str, bindings: list[Binding]) -> None:
        """Lead messages through an internal exchange, which exists, from now on."""
        bind = unchecked(commands.Queue.Bind, queue=self.queue, exchange=self._exchange(suffix))
        await self.connection.call(bind, commands.Queue.BindOk)
        self._suffix, self._bound = suffix, set()
        await self.follow(bindings)

    async def _delete(self, suffix: str) -> None:
        delete = unchecked(commands.Exchange.Delete, exchange=self._exchange(suffix))
        await self.connection.call_or_reopen(delete, commands.Exchange.DeleteOk)

    # -- bindings ----------------------------------------------------------------------------------

    async def _at_upstream(self, bindings: list[Binding]) -> set[Binding]:
        """Return what is to be bound, and let others have the processor meanwhile."""
        link, found = self._link, set[Binding]()
        here = Place(self._cluster, link.vhost, link.exchange, self._suffix)
        for start in range(0, len(bindings), AT_A_TIME):
            part = bindings[start : start + AT_A_TIME]
            found.update(at_upstream(part, here, self.name, link.max_hops))
            await asyncio.sleep(0)
        return found

    def _bind(self, binding: Binding) -> commands.Exchange.Bind:
        return unchecked(
            commands.Exchange.Bind,
            destination=self._exchange(self._suffix),
            source=self._link.upstream_exchange,
            routing_key=binding.key,
            nowait=True,
            arguments=binding.arguments,
        )

    def _unbind(self, binding: Binding) -> commands.Exchange.Unbind:
        return unchecked(
            commands.Exchange.Unbind,
            destination=self._exchange(self._suffix),
            source=self._link.upstream_exchange,
            routing_key=binding.key,
            nowait=True,
            arguments=binding.arguments,
        )

    async def _send(
        self, methods: list[commands.Exchange.Bind] | list[commands.Exchange.Unbind]
    ) -> None:
        """Send methods; the last one of each `AT_A_TIME` is answered, which says all were done."""
        for start in range(0, len(methods), AT_A_TIME):
            part = [each for each in methods[start : start + AT_A_TIME] if self._fits(each)]
            if not part:
                continue
            for method in part[:-1]:
                self.connection.send(method)
            last = part[-1]
            last.nowait = False
            is_bind = isinstance(last, commands.Exchange.Bind)
            await self.connection.call(
                last, commands.Exchange.BindOk if is_bind else commands.Exchange.UnbindOk
            )

    def _fits(self, method: commands.Exchange.Bind | commands.Exchange.Unbind) -> bool:
        """Return whether a method fits into a frame; the arguments of a binding may be large."""
        size = len(encode_method(method)) + FRAME_OVERHEAD_BYTES
        if size <= self.connection.frame_bytes_max:
            return True
        self._unfit += 1
        return False


def _order(binding: Binding) -> tuple[str, bytes]:
    return binding.key, binding.arguments
