"""Routes learnt for one user in one vhost. They hold until the catalog changes.

Compiled code finds the queues of a message by its *line* (exchange, routing key and flags) in
`RouteCache.routes`. A line that is new there is looked up in the catalog once (`learn`). An
exchange that decides by the routing key, and leads to queues only, is remembered besides, with the
places of the queues it chooses: a key that was never seen then costs one match, not a way through
the catalog.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakValueDictionary

from shardmq.broker.front_door.publish import access
from shardmq.broker.front_door.publish.dedup_service import rule_of
from shardmq.broker.front_door.publish.exchange_counts import ExchangeCounts
from shardmq.broker.front_door.publish.message import MANDATORY, exchange_and_key
from shardmq.broker.front_door.publish.targets import QueueShut, by_shard, existing
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.routing import (
    delaying,
    goes_always_alike,
    goes_by_key,
    route,
    spread_of,
)
from shardmq.broker.routing.matching import Matcher, Message
from shardmq.broker.routing.spreading import Spread
from shardmq.shardd.wire import codec

# Combinations of queues remembered; past it the memory is emptied.
PLACES_MAX = 4096

SPREAD = {
    "rendezvous": codec.RENDEZVOUS,
    "jump": codec.JUMP,
    "modulus": codec.MODULUS,
    "chance": codec.CHANCE,
}

# Queue ids by shard, and whether one of the queues is durable.
Places = tuple[list[tuple[int, list[int]]], bool]


class KeyExchange(NamedTuple):
    """An exchange that leads to queues only, and decides by the routing key only.

    `is_topic` says that a user may need a right to the key.
    """

    name: str
    matcher: Matcher
    is_topic: bool

    @classmethod
    def of(cls, vhost: Vhost, name: str) -> KeyExchange | None:
        """Return the exchange, which exists; None when it looks at more than the key."""
        here = vhost.table.exchange(name)
        matcher, attributes = here.matcher, here.attributes
        if not matcher.by_key or isinstance(matcher, Spread):
            return None
        if here.destination_exchanges or here.keeps or attributes.alternate is not None:
            return None
        return cls(
            name, matcher, delaying.inner_type(attributes.type, attributes.arguments) == "topic"
        )

    def queues(self, key: str) -> tuple[str, ...]:
        """Return the names of the queues, in an order that depends only on their names."""
        found = [name for _, name in self.matcher.match(Message(key))]
        return tuple(sorted(found)) if len(found) > 1 else tuple(found)


class RouteCache:
    """Routes learnt for one user in one vhost."""

    def __init__(self, vhost: str, user: str, counts: codec.Published | None = None) -> None:
        """Begin empty. `counts` of the vhost's exchanges are shared with its other users."""
        self.vhost = vhost
        self.user = user
        self.routes = codec.Routes(random.getrandbits(64), counts)
        self._exchanges: dict[bytes, KeyExchange] = {}  # to which the user may publish
        # None: a queue among them drops duplicates, so each message is decided about alone.
        self._places: dict[tuple[str, ...], Places | None] = {}

    def forget(self) -> None:
        """Forget all routes, because the catalog has changed."""
        self.routes.clear()
        self._exchanges.clear()
        self._places.clear()

    def learn(self, line: bytes, catalog: Catalog, reply_queues: Collection[int]) -> None:
        """Look up the line's exchange and key, once per version of the catalog.

        `reply_queues` are the ids of the queues whose direct reply-to consumer is at this front
        door. Raises what the publisher did wrong, as ChannelException or ConnectionException.
        """
        try:
            self._learn(line, catalog, reply_queues)
        except QueueShut:
            self.routes.learn(line, codec.CALLER, [], False)

    def _learn(self, line: bytes, catalog: Catalog, reply_queues: Collection[int]) -> None:
        known = self._exchanges.get(line[1 : line[0] + 1])
        if known is not None:
            self._learn_key(known, line, catalog, reply_queues)
            return
        exchange, key = exchange_and_key(line)
        access.check_exchange(catalog, self.user, self.vhost, exchange, (key,))
        vhost = access.vhost_of(catalog, self.vhost)
        if vhost.put.is_traced or rule_of(vhost.exchanges[exchange]) is not None:
            self.routes.learn(line, codec.CALLER, [], False)
            return
        if self._learn_spread(vhost, exchange) or self._learn_alike(vhost, exchange):
            return
        if not goes_by_key(vhost.table, exchange):
            self.routes.learn(line, codec.CALLER, [], False)
            return
        key_exchange = KeyExchange.of(vhost, exchange)
        if key_exchange is not None:
            self._exchanges[exchange.encode()] = key_exchange
            self._learn_key(key_exchange, line, catalog, reply_queues)
            return
        routed = route(vhost.table, exchange, key, None)
        reach = len(routed.queues)
        is_returned = routed.kept and not reach and line[-1] & MANDATORY
        if is_returned or _drops_duplicates(vhost, routed.queues):
            self.routes.learn(line, codec.CALLER, [], False)
            return
        places, durable = _places_of(vhost, (*routed.queues, *routed.kept))
        self.routes.learn(line, codec.TARGETS if places else codec.NOWHERE, places, durable, reach)

    def _learn_key(
        self, exchange: KeyExchange, line: bytes, catalog: Catalog, reply_queues: Collection[int]
    ) -> None:
        key = line[line[0] + 2 : -1].decode("utf-8", "replace")
        if exchange.is_topic and catalog.permissions.has_topic(self.user, self.vhost):
            access.check_keys(catalog, self.user, self.vhost, exchange.name, (key,))
        names = exchange.queues(key)
        if reply_queues and names and checks.is_reply_queue(names[0]):
            vhost = access.vhost_of(catalog, self.vhost)
            if vhost.queues[names[0]].id in reply_queues:
                self.routes.learn(line, codec.HERE, *_places_of(vhost, names), len(names))
                return
        try:
            places = self._places[names]
        except KeyError:
            if len(self._places) >= PLACES_MAX:
                self._places.clear()
            vhost = access.vhost_of(catalog, self.vhost)
            places = None if _drops_duplicates(vhost, names) else _places_of(vhost, names)
            self._places[names] = places
        if places is None:
            self.routes.learn(line, codec.CALLER, [], False)
        else:
            kind = codec.TARGETS if names else codec.NOWHERE
            self.routes.learn(line, kind, *places, len(names))

    def _learn_spread(self, vhost: Vhost, exchange: str) -> bool:
        """Learn an exchange that chooses one queue for each key, once for all keys.

        Return False for any other.
        """
        spread = spread_of(vhost.table, exchange)
        if spread is None:
            return False
        members = []
        for target, weight, seed in spread.destinations:
            queue = vhost.queues[target.name]
            if rule_of(queue) is not None or queue.moving is not None:
                return False
            members.append((weight, seed, queue.shard, queue.id, queue.durable))
        return self.routes.learn_spread(exchange.encode(), SPREAD[spread.how], members)

    def _learn_alike(self, vhost: Vhost, exchange: str) -> bool:
        """Learn an exchange that sends all messages to the same queues, once for all keys."""
        if not goes_always_alike(vhost.table, exchange):
            return False
        routed = route(vhost.table, exchange, "", None)
        if (routed.kept and not routed.queues) or _drops_duplicates(vhost, routed.queues):
            return False
        places, durable = _places_of(vhost, (*routed.queues, *routed.kept))
        kind = codec.TARGETS if places else codec.NOWHERE
        return self.routes.learn_exchange(
            exchange.encode(), kind, places, durable, len(routed.queues)
        )


class RouteCaches:
    """The route caches of all users that are connected, and what came to exchanges."""

    def __init__(self) -> None:
        self.exchange_counts = ExchangeCounts()
        # A cache lives as long as some connection holds it.
        self._caches: WeakValueDictionary[tuple[str, str], RouteCache] = WeakValueDictionary()

    def of(self, vhost: str, user: str) -> RouteCache:
        """Return the cache that all connections of this user to this vhost share."""
        cache = self._caches.get((vhost, user))
        if cache is None:
            cache = RouteCache(vhost, user, self.exchange_counts.of(vhost))
            self._caches[vhost, user] = cache
        return cache

    def catalog_changed(self, catalog: Catalog, something_went: bool) -> None:
        """Have every route looked up anew.

        `something_went` is False when all changes only added things.
        """
        for reference in self._caches.valuerefs():
            if (cache := reference()) is not None:
                cache.forget()
        if something_went:
            self.exchange_counts.forget(
                catalog, lambda vhost: any(of == vhost for of, _ in self._caches)
            )


def _drops_duplicates(vhost: Vhost, names: tuple[str, ...]) -> bool:
    return any(rule_of(vhost.queues[name]) for name in names)


def _places_of(vhost: Vhost, names: tuple[str, ...]) -> Places:
    groups = by_shard(existing(vhost, names))
    return [(group.shard, group.queue_ids) for group in groups], any(
        group.durable for group in groups
    )
