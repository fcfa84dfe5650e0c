"""All connections of a front door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardmq.broker.front_door.connection.connection import ClientConnection
from shardmq.broker.front_door.connection.output import Stream
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import TlsPeer


class Connections:
    """The connections of one front door, by number."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.by_number: dict[int, ClientConnection] = {}
        self._last_number = 0

    def enter(
        self, sock: Stream, peer: Peer, tls: TlsPeer | None = None, *, trusted: bool = False
    ) -> None:
        """Begin a connection on a socket, as ClientConnection does."""
        self._last_number += 1
        number = self._last_number
        self.by_number[number] = ClientConnection(
            self._services, self, sock, peer, number, tls, trusted=trusted
        )

    def forget(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self.by_number.pop(connection.id, None)
        self._services.shards.forget(connection.id)
        self._services.loop.forget(connection.socket)

    def all(self) -> list[ClientConnection]:
        """Return all connections, in a list of its own: what is done with one may end it."""
        return list(self.by_number.values())

    def of_owner(self, owner: str) -> list[ClientConnection]:
        return [each for each in self.by_number.values() if each.session.owner == owner]

    def connected(self) -> int:
        """Return how many clients have an open connection; the controller's do not count."""
        return sum(1 for _ in self._shown())

    def _shown(self) -> Iterator[ClientConnection]:
        for each in self.by_number.values():
            if each.session.is_open and not each.session.trusted:
                yield each

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the counters of connections and of channels, as DoorReport wants them."""
        connections, channels = [], []
        for each in self._shown():
            connections.append(each.report())
            owner = each.session.owner
            channels += [one.report(owner) for one in each.channels.all(each)]
        return connections, channels

    def counters(self) -> dict[str, float]:
        """Return how many connections, channels and publishing channels there are."""
        shown = list(self._shown())
        channels = [one for each in shown for one in each.channels.all(each)]
        return {
            "connections": len(shown),
            "channels": len(channels),
            "publishers": sum(channel.published > 0 for channel in channels),
        }

    def tell_channel_counts(self) -> None:
        """Tell the controller of channels, where a limit asks how many there are."""
        for each in self.by_number.values():
            each.channels.limits_changed(each)

    def alarm_changed(self) -> None:
        for each in self.all():
            each.alarm_changed()

    def tick(self, now: float) -> None:
        """Send heartbeats and drop clients that fell silent, about once a second."""
        for each in self.all():
            if each.session.is_open:
                each.socket.tick(now, each.session.heartbeat_s)
