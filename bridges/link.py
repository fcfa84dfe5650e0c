"""Links of queues and of exchanges share this: their tries, and the connections to both ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import quote

from pamqp import commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.destinations import AmqpDestination
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.pump import FLUSH_S_AT_STOP, Mode, Pump
from shardmq.bridges.relay import Relay
from shardmq.bridges.tries import DELAY_S_MIN, Tries
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.federation import Source
from shardmq.broker.shared.bridging import BridgeState, Order, key_of


class Ends(NamedTuple):
    """The two things that a link connects.

    kind: "queue" or "exchange".
    here: the name of what is federated.
    there: the name of what is at the upstream.
    """

    kind: str
    here: str
    there: str


class LinkTries:
    """The tries of one link, and the connections and the pump of the one that runs.

    Args:
        order: What is to run.
        source: Where its messages come from.
        ends: What it connects.
        doors: Returns the sockets of the front doors of this host, the one to use first.
        tell: Called after each change of `state.state`.
        confirm_s_max: The seconds for which this broker may confirm nothing.
    """

    def __init__(
        self,
        order: Order,
        source: Source,
        ends: Ends,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        confirm_s_max: float,
    ) -> None:
        self.state = BridgeState(key=key_of(order.bridge), life=order.life)
        self._source, self._ends, self._vhost = source, ends, order.bridge.vhost
        self._confirm_s_max = confirm_s_max
        self._opened: list[Connection] = []
        self._pump: Pump | None = None
        name = f"Federation link (upstream: {source.upstream}, policy: {source.policy})"
        delay_s = max(source.reconnect_delay_s, DELAY_S_MIN)
        self.tries = Tries(self.state, name, self._vhost, delay_s, doors, tell, True)
        self.tries.is_hopeless = self._is_own_loop()

    async def run(self, once: Callable[[], Awaitable[None]]) -> None:
        """Call `once`, which connects and moves messages, until no other try makes sense."""
        await self.tries.run(once, self._useless)

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        if self._pump is not None:
            self._pump.count()

    # -- one try -----------------------------------------------------------------------------------

    async def open(self) -> tuple[Connection, AmqpDestination]:
        """Connect to this broker, and then to the upstream. Raises LinkFailed."""
        if self._is_own_loop():
            kind = self._ends.kind
            raise LinkFailed(f"the upstream {kind} is the federated {kind} itself")
        here = await self.tries.open_any("dest", [f"amqp:///{quote(self._vhost, safe='')}"])
        self._opened.append(here)
        self.state.local_connection = here.listed_as
        destination = AmqpDestination(here)
        if self._source.ack_mode == "on-confirm":
            await destination.confirm()
        uris, frame_bytes_max = self._source.uris, here.frame_bytes_max
        upstream = await self.tries.open_any("src", uris, frame_bytes_max, self._vhost)
        self._opened.append(upstream)
        return upstream, destination

    async def open_another(self, upstream: Connection) -> Connection:
        """Connect to the same upstream once more. Raises LinkFailed."""
        another = await self.tries.open(upstream.uri)
        self._opened.append(another)
        return another

    def pump(
        self,
        upstream: Connection,
        destination: AmqpDestination,
        settled: Callable[[int, int], bool],
    ) -> Pump:
        """Return the pump of this try, which watches both ends. `start` lets it take messages."""
        self._pump = Pump(upstream, destination, self.state, settled, self._confirm_s_max)
        self._pump.watch_ends()
        return self._pump

    async def start(self, pump: Pump, relay: Relay, upstream: Connection) -> None:
        """Let the pump take what a consumer at the upstream will get. Raises LinkFailed."""
        ack_mode, prefetch = self._source.ack_mode, self._source.prefetch
        mode = Mode(confirms=ack_mode == "on-confirm", acks=ack_mode != "no-ack")
        pump.start(relay, mode)
        if mode.acks and prefetch:
            qos = commands.Basic.Qos(prefetch_count=prefetch)
            await upstream.call(qos, commands.Basic.QosOk)

    async def stop(self, pump: Pump) -> None:
        """Read the upstream no further, and wait until this broker has what has left it."""
        pump.stop()
        if unread := await pump.flush(FLUSH_S_AT_STOP):
            self.tries.warn(f"it ends: {unread}")

    def close(self) -> None:
        """End all connections of this try."""
        self._pump, self.state.pulls, self.state.local_connection = None, False, ""
        opened, self._opened = self._opened, []
        for each in reversed(opened):
            each.close()

    # -- decisions ---------------------------------------------------------------------------------

    def _useless(self) -> None:
        """Let another URI come first in the next try."""
        self.tries.at["src"] += 1

    def _is_own_loop(self) -> bool:
        """Return whether what is at the upstream is the very thing that is federated."""
        if self._ends.here != self._ends.there:
            return False
        uris = [amqp_uri.parse(uri, self._vhost) for uri in self._source.uris]
        return any(uri.is_here and uri.vhost == self._vhost for uri in uris)
