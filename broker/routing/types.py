"""The exchange types, by name: the one place to make another known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from broker.routing.keeping import RECENT_HISTORY, RecentHistory
from broker.routing.matching import Arguments, Direct, Fanout, HeadersExchange, Matcher, Topic
from broker.routing.spreading import Chance, ConsistentHash, ModulusHash

TYPES: Final[dict[str, Callable[[Arguments], Matcher]]] = {
    "direct": Direct,
    "fanout": Fanout,
    "topic": Topic,
    "headers": HeadersExchange,
    "x-consistent-hash": ConsistentHash,
    "x-modulus-hash": ModulusHash,
    "x-random": Chance,
    RECENT_HISTORY: RecentHistory,
}
