"""All connections of a front door."""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

from shardmq.broker.amqp import answers, start_frame, tune_frame
from shardmq.broker.front_door.connection.connection import NOBODY_NEW, ClientConnection
from shardmq.broker.front_door.connection.output import Stream
from shardmq.broker.front_door.connection.socket import PAUSE_SLICE
from shardmq.broker.front_door.proxy import IPV4_AS_IPV6, Peer
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Newcomer, TlsPeer
from shardmq.broker.front_door.short_way import SOON_S, Anteroom
from shardmq.broker.front_door.vhost_counts import VhostCounts
from shardmq.broker.shared.logins import MECHANISMS

log = logging.getLogger(__name__)

KEY_BYTES = 32


class Connections:
    """The connections of one front door, by number.

    Where the short way is on, connections begin as newcomers in the anteroom. Whoever looks at all
    connections has newcomers become connections first.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.by_number: dict[int, ClientConnection] = {}
        self._last_number = 0
        self.anteroom: Anteroom | None = None
        self._settles = False  # a look at newcomers is planned
        if services.short_way is not None:
            key = secrets.token_bytes(KEY_BYTES)
            self.anteroom = Anteroom(
                services.lessons,
                digest=lambda data: hashlib.blake2b(data, key=key, digest_size=KEY_BYTES).digest(),
                start=lambda: start_frame(services.server_properties, MECHANISMS),
                meet=self._meet,
                ended=self._newcomer_ended,
                **answers(),
            )
            self.offer()

    def renew(self) -> None:
        """Meet all newcomers, and forget earlier logins: what they depend on is about to change."""
        try:
            self._meet_newcomers()
        finally:
            self._services.lessons.clear()

    def _meet_newcomers(self) -> None:
        if self.anteroom is not None:
            self.anteroom.meet_all()

    def offer(self) -> None:
        """Offer newcomers the limits of the settings."""
        config = self._services.config
        if self.anteroom is not None:
            tune = tune_frame(config.channels_max, config.frame_bytes_max, config.heartbeat_s)
            self.anteroom.offer(tune, config.channels_max, config.frame_bytes_max)

    def newcomers_ready(self) -> None:
        """Accept newcomers, answer them, and see that they do not stay."""
        assert self.anteroom is not None
        self.anteroom.ready()
        if not self._settles and self.anteroom:
            self._settles = True
            self._services.loop.aio.call_later(SOON_S, self._settle)

    def _settle(self) -> None:
        assert self.anteroom is not None
        again_s = SOON_S  # also behind an error of ours
        try:
            again_s = self.anteroom.settle()
        finally:
            self._settles = again_s > 0
            if again_s:
                self._services.loop.aio.call_later(again_s, self._settle)

    def _meet(
        self,
        fd: int,
        host: str,
        port: int,
        said: bytes,
        sent: int,
        reads: int,
        writes: int,
        rest: bytes,
        *newcomer: Any,
    ) -> None:
        """Make a connection of a newcomer, as Anteroom says."""
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        peer, loop = Peer(host.removeprefix(IPV4_AS_IPV6), port), self._services.loop
        loop.begin_pass()
        facts = Newcomer(*newcomer)
        entered = self.enter(sock, peer, newcomer=facts)
        client = entered.socket
        client.received_bytes += len(said)
        client.reads = reads
        if facts.open is not None:
            client.output.was_sent(client.output.pending)  # its open-ok
            client.output.written = sent
        elif said:
            client.amqp.receive_data(said)
            entered.handle_events()
            while client.paused & PAUSE_SLICE and not client.lost:
                entered.handle_events()
            if not client.output.was_sent(sent):
                log.warning("%s: the login is not what it was", client.name)
                entered.disconnect()
        client.output.writes = writes
        if rest and not client.lost:
            loop.read_buffer[: len(rest)] = rest
            client.came(len(rest))

    def _newcomer_ended(self, logged_in: bool, was_open: bool, channels: int) -> None:
        """Count what a newcomer did that has ended."""
        counts = self._services.counts
        counts.logins_succeeded += logged_in
        counts.channels_opened += channels
        if was_open:
            self._services.catalog_link.connection_passed()

    def enter(
        self,
        sock: Stream,
        peer: Peer,
        tls: TlsPeer | None = None,
        *,
        trusted: bool = False,
        newcomer: Newcomer = NOBODY_NEW,
    ) -> ClientConnection:
        """Begin a connection on a socket, as ClientConnection does."""
        self._last_number += 1
        number = self._last_number
        entered = self.by_number[number] = ClientConnection(
            self._services,
            self,
            sock,
            peer,
            number,
            tls,
            trusted=trusted,
            newcomer=newcomer,
        )
        return entered

    def forget(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self.by_number.pop(connection.id, None)
        session, socket = connection.session, connection.socket
        if session.vhost and not session.is_hidden:
            self._services.vhost_counts.add_connection(
                session.vhost, socket.received_bytes, socket.output.written
            )
        self._services.shards.forget(connection.id)
        self._services.loop.forget(connection.socket)

    def all(self) -> list[ClientConnection]:
        """Return all connections, in a list of its own: what is done with one may end it."""
        self._meet_newcomers()
        return list(self.by_number.values())

    def of_owner(self, owner: str) -> list[ClientConnection]:
        return [each for each in self.by_number.values() if each.session.owner == owner]

    def connected(self) -> int:
        """Return how many clients have an open connection; this broker's own do not count."""
        return sum(not each.session.trusted for each in self._shown())

    def _shown(self) -> Iterator[ClientConnection]:
        self._meet_newcomers()
        for each in self.by_number.values():
            if each.session.is_open and not each.session.is_hidden:
                yield each

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the counters of connections and of channels, as DoorReport wants them."""
        connections, channels, now_ms = [], [], time.time_ns() // 1_000_000
        for each in self._shown():
            connections.append(each.report())
            owner = each.session.owner
            channels += [one.report(owner, now_ms) for one in each.channels.all(each)]
        return connections, channels

    def of_vhosts(self) -> dict[str, dict[str, int]]:
        """Return the counters of vhosts, as DoorReport wants them.

        What is published by HTTP counts as a message, and not as bytes of a connection.
        """
        counts = VhostCounts(self._services.vhost_counts)
        for each in self.all():
            session, socket = each.session, each.socket
            if not session.vhost:
                continue
            if not session.is_hidden:
                counts.add_connection(session.vhost, socket.received_bytes, socket.output.written)
            for channel in each.channels.by_number.values():
                if channel.published or channel.has_consumed:
                    counts.add_channel(session.vhost, channel.counted())
        return counts.report()

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
        for each in list(self.by_number.values()):
            if each.session.is_open:
                each.socket.tick(now, each.session.heartbeat_s)
