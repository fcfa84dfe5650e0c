"""The nodes of the broker, as the HTTP API, the page and the metrics show them.

Without a cluster there is one node, which has the name NODE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from shardmq.broker.controller.node_facts import NodeFacts
from shardmq.broker.controller.resharding.shard_sets import NODE
from shardmq.broker.controller.peers.presence import door_of
from shardmq.broker.shared.control import node_of

# The facts of a node that are older are not shown: the node is cut off, or about to be missed.
FACTS_S_MAX: Final = 5.0


class KnownNode(NamedTuple):
    """A node: its number, its name, its shards, and whether it is alive."""

    number: int
    name: str
    shards: tuple[int, ...]
    is_alive: bool
