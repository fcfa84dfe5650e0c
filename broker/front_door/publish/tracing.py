"""The firehose: copies of what clients publish and get go to amq.rabbitmq.trace.

A copy has the message's body; its routing key is publish.EXCHANGE or deliver.QUEUE, its headers say
what the message was and whose. It goes where the bindings of that exchange lead, nobody waits for
it, and a crash may lose it. Whoever traces is told which shards got copies: the client on whose
behalf they were made is not read while those have too much.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from typing import Any

from shardmq.broker.amqp import ConnectionException, contents, properties
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.stored_runs import NO_TTL, pack
from shardmq.broker.front_door.publish.targets import by_shard, existing, is_shut
from shardmq.broker.front_door.session import Session
from shardmq.broker.model.permissions import shown_user
from shardmq.broker.routing import Message, delaying, hidden, route_message
from shardmq.broker.shared.cluster_name import cluster_name

TRACE_EXCHANGE = "amq.rabbitmq.trace"
ROUTING_KEY_BYTES_MAX = 255


class Tracing:
    """Makes copies for the vhosts that are traced."""

    def __init__(self, source: CatalogLink, links: ShardLinks) -> None:
        self._source = source
        self._links = links
        self.vhosts: frozenset[str] = frozenset()  # names of vhosts that are traced

    def catalog_changed(self) -> Tracing | None:
        """Return this object, or None when no vhost is traced any more."""
        self.vhosts = frozenset(
            vhost.name for vhost in self._source.catalog.vhosts.values() if vhost.put.is_traced
        )
        return self if self.vhosts else None

    def published(
        self, session: Session, channel: int, stored: bytes, keys: list[str], queues: Iterable[str]
    ) -> int:
        """Copy a publish that was routed to `queues`.

        Return a bit mask of the shards that got copies.
        """
        if session.vhost not in self.vhosts:
            return 0
        exchange, _, props, body = contents.read_stored(stored)
        headers = self._headers(session, channel, exchange, keys, props)
        headers["routed_queues"] = [name for name in queues if not hidden.is_of_exchange(name)]
        return self._send(session, f"publish.{exchange.decode(errors='replace')}", headers, body)

    def delivered(
        self,
        session: Session,
        channel: int,
        queue: str,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> int:
        """Copy stored messages that go to a client.

        Return a bit mask of the shards that got copies.

        The copies themselves are not copied.
        """
        if session.vhost not in self.vhosts:
            return 0
        fed = 0
        for names, props, body in contents.split(blob, count):
            exchange, key = names[1 : names[0] + 1], names[names[0] + 2 :]
            if exchange != TRACE_EXCHANGE.encode():
                headers = self._headers(
                    session, channel, exchange, [key.decode(errors="replace")], props
                )
                headers["redelivered"] = int(redelivered)
                fed |= self._send(session, f"deliver.{queue}", headers, body)
        return fed

    def _headers(
        self, session: Session, channel: int, exchange: bytes, keys: list[str], props: bytes
    ) -> dict[str, Any]:
        return {
            "exchange_name": exchange.decode(errors="replace"),
            "routing_keys": list(keys),
            "properties": _properties(props),
            "node": cluster_name(self._source.catalog),
            "vhost": session.vhost,
            "connection": session.name,
            "channel": channel,
            "user": shown_user(session.user),
        }

    def _send(self, session: Session, key: str, headers: dict[str, Any], body: bytes) -> int:
        vhost = self._source.catalog.vhost(session.vhost)
        if vhost is None:
            return 0
        key_bytes = key.encode()[:ROUTING_KEY_BYTES_MAX]
        key = key_bytes.decode(errors="ignore")
        names = route_message(vhost.table, TRACE_EXCHANGE, Message(key, headers)).queues
        queues = existing(vhost, names)
        groups = by_shard([queue for queue in queues if not is_shut(queue)])
        if not groups:
            return 0
        stored = properties.stored_with(TRACE_EXCHANGE.encode(), key.encode(), headers, body)
        now_ms, priority = time.time_ns() // 1_000_000, delaying.NO_PRIORITY
        rest = stored, session.id, 0, 0, now_ms, NO_TTL, priority, False, False, 1, False, 0
        return pack(self._links, session.vhost, [(shard, ids, *rest) for shard, ids, _ in groups])


def _properties(props: bytes) -> dict[str, Any]:
    """Return the properties that are set; none if they are broken, which nobody has checked."""
    try:
        read = properties.read(props)
    except ConnectionException:
        return {}
    said = {
        name: value
        for name, _ in properties.PROPERTIES
        if (value := getattr(read, name)) is not None
    }
    if read.timestamp is not None:
        try:
            said["timestamp"] = datetime.datetime.fromtimestamp(read.timestamp, datetime.UTC)
        except (ValueError, OverflowError, OSError):
            said["timestamp"] = read.timestamp & 0x7FFFFFFFFFFFFFFF  # no time of this calendar
    return said
