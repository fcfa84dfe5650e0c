"""Copies of what clients publish and are given, to amq.rabbitmq.trace, where a vhost's tracing is on: the firehose.

A copy has the message's body; its routing key is publish.EXCHANGE or deliver.QUEUE, its headers say what the message
was and whose. It goes where the bindings of that exchange lead, nobody waits for it, and a crash may lose it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from typing import Any, Protocol

from shardmq.broker.amqp import ConnectionException, contents, properties
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.routing import Message, hidden, route_message
from shardmq.broker.shared.cluster_name import cluster_name

TRACE_EXCHANGE = "amq.rabbitmq.trace"
ROUTING_KEY_BYTES_MAX = 255
NO_TTL = 0xFFFFFFFF
NO_PRIORITY = 0xFF


class Holder(Protocol):
    """The copy of the catalog that is in force."""

    catalog: Catalog


class Client(Protocol):
    """Whose message it is."""

    id: int

    @property
    def user(self) -> str: ...
    @property
    def vhost(self) -> str: ...
    @property
    def name(self) -> str: ...
    def feeds(self, shards: int) -> None:
        """Bit mask of shards that got something on its behalf: it is not read while they have too much."""


class Tracing:
    def __init__(self, holder: Holder, links: ShardLinks) -> None:
        self._holder = holder
        self._links = links
        self.vhosts: frozenset[str] = frozenset()  # whose tracing is on

    def catalog_changed(self) -> Tracing | None:
        """Itself, while there is anything to trace."""
        self.vhosts = frozenset(
            vhost.name for vhost in self._holder.catalog.vhosts.values() if vhost.put.is_traced
        )
        return self if self.vhosts else None

    def published(
        self, client: Client, channel: int, stored: bytes, keys: list[str], queues: Iterable[str]
    ) -> None:
        """A publish, when it was routed to `queues`."""
        if client.vhost not in self.vhosts:
            return
        exchange, _, props, body = contents.read_stored(stored)
        headers = self._headers(client, channel, exchange, keys, props)
        headers["routed_queues"] = [name for name in queues if not hidden.is_of_exchange(name)]
        self._send(client, f"publish.{exchange.decode(errors='replace')}", headers, body)

    def delivered(
        self,
        client: Client,
        channel: int,
        queue: str,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        """Stored messages that go to a consumer, or to who asked for one; copies themselves are not copied."""
        if client.vhost not in self.vhosts:
            return
        for names, props, body in contents.split(blob, count):
            exchange, key = names[1 : names[0] + 1], names[names[0] + 2 :]
            if exchange != TRACE_EXCHANGE.encode():
                headers = self._headers(
                    client, channel, exchange, [key.decode(errors="replace")], props
                )
                headers["redelivered"] = int(redelivered)
                self._send(client, f"deliver.{queue}", headers, body)

    def _headers(
        self, client: Client, channel: int, exchange: bytes, keys: list[str], props: bytes
    ) -> dict[str, Any]:
        return {
            "exchange_name": exchange.decode(errors="replace"),
            "routing_keys": list(keys),
            "properties": _said(props),
            "node": cluster_name(self._holder.catalog),
            "vhost": client.vhost,
            "connection": client.name,
            "channel": channel,
            "user": client.user,
        }

    def _send(self, client: Client, key: str, headers: dict[str, Any], body: bytes) -> None:
        vhost = self._holder.catalog.vhost(client.vhost)
        if vhost is None:
            return
        key_bytes = key.encode()[:ROUTING_KEY_BYTES_MAX]
        key = key_bytes.decode(errors="ignore")
        by_shard: dict[int, list[int]] = {}
        for name in route_message(vhost.table, TRACE_EXCHANGE, Message(key, headers)).queues:
            queue = vhost.queues[name]
            by_shard.setdefault(queue.shard, []).append(queue.id)
        if not by_shard:
            return
        stored = properties.stored_with(TRACE_EXCHANGE.encode(), key.encode(), headers, body)
        self._links.use_vhost(client.vhost)
        now_ms = time.time_ns() // 1_000_000
        for shard, ids in by_shard.items():
            self._links.packer.add_stored(
                shard, ids, stored, client.id, 0, 0, now_ms, NO_TTL, NO_PRIORITY, False, False
            )
        client.feeds(self._links.packer.take_touched())


def _said(props: bytes) -> dict[str, Any]:
    """The properties that are there, as a table; none if they are broken: what is in a table nobody looked at yet."""
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
