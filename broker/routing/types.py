"""The exchange types, by name: the one place to make another known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shardmq.broker.routing.delaying import DELAYED_TYPE, Delayed, inner_type
from shardmq.broker.routing.federated import FEDERATION_UPSTREAM, FederationUpstream
from shardmq.broker.routing.keeping import RECENT_HISTORY
from shardmq.broker.routing.matching import (
    Arguments,
    Direct,
    Fanout,
    HeadersExchange,
    Matcher,
    RecentHistory,
    Topic,
)
from shardmq.broker.routing.spreading import Chance, ConsistentHash, ModulusHash

TYPES: Final[dict[str, Callable[[Arguments], Matcher]]] = {
    "direct": Direct,
    "fanout": Fanout,
    "topic": Topic,
    "headers": HeadersExchange,
    "x-consistent-hash": ConsistentHash,
    "x-modulus-hash": ModulusHash,
    "x-local-random": Chance,
    "x-random": Chance,
    DELAYED_TYPE: lambda arguments: TYPES[inner_type(DELAYED_TYPE, arguments)](arguments),
    RECENT_HISTORY: RecentHistory,
    FEDERATION_UPSTREAM: FederationUpstream,
}


def matcher_of(type: str, arguments: Arguments, delays: str) -> Matcher:
    """Return a matcher without bindings for an exchange.

    `delays` is the queue where messages wait, or "" if the exchange does not delay messages.
    """
    inner = TYPES[type](arguments)
    return Delayed(delays, inner) if delays else inner
