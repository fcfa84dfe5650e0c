"""What publishing has learnt for one user in one vhost: it holds until the catalog changes.

Beside the compiled routes (a line each), for lines that are new: exchanges that decide by the routing key and alone,
and where the queues they choose lie. So a key that was never seen costs one match, not a way through the catalog.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import delaying
from shardmq.broker.routing.matching import Matcher, Message
from shardmq.broker.routing.spreading import Spread
from shardmq.shardd.wire.routes import Published, Routes

# Combinations of queues remembered; past it the memory is emptied.
PLACES_MAX = 4096

Places = list[tuple[int, list[int]]]


class Alone(NamedTuple):
    """An exchange that leads to queues only, by the key only; nothing else is to be looked at. `is_topic`: of which a
    user may have to have a right to the key."""

    name: str
    matcher: Matcher
    is_topic: bool

    @classmethod
    def of(cls, vhost: Vhost, name: str) -> Alone | None:
        """`name`: of an exchange there is."""
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
        """In an order that depends only on their names."""
        found = [name for _, name in self.matcher.match(Message(key))]
        return tuple(sorted(found)) if len(found) > 1 else tuple(found)


class Scope:
    """Routes learnt for one user in one vhost."""

    def __init__(self, vhost: str, user: str, published: Published | None = None) -> None:
        self.vhost = vhost
        self.user = user
        self.routes = Routes(random.getrandbits(64), published)
        self.exchanges: dict[bytes, Alone] = {}  # to which the user may publish
        # Queue ids by shard, and whether one of them is durable; None: each message is to be decided about.
        self.places: dict[tuple[str, ...], tuple[Places, bool] | None] = {}

    def forget(self) -> None:
        self.routes.clear()
        self.exchanges.clear()
        self.places.clear()
