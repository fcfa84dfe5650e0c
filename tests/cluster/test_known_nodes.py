"""The copies of what etcd has that a controller and a shard keep, without an etcd."""

from __future__ import annotations

import pytest

from shardmq.broker.controller.nodes.nodes import Nodes
from shardmq.cluster.membership import members_key
from shardmq.cluster.pairs import Changes, Listing, Pair
from shardmq.cluster.records import KeyNames, Node, encoded

KEYS = KeyNames("tea")
# Of no use at any key: empty, Latin-1, nested too deeply, another type, and no JSON.
BAD_VALUES = [b"", b'{"name":"caf\xe9"}', b'{"x":' + b"[" * 100_000, b"[]", b"{"]


def node(number: int) -> Node:
    return Node(number, f"n{number}", "127.0.0.1", {"cluster": 1000 + number}, "1", 1, 1)


def pair(key: str, value: bytes, revision: int = 2) -> Pair:
    return Pair(key, value, revision, revision)


class Watching:
    """An etcd that says these news, and a controller that looks at all nodes after each."""

    def __init__(self, *news: Listing | Changes) -> None:
        self._news = news
        self.seen: list[list[str]] = []
        self.nodes = Nodes(self, KEYS, self.look)  # type: ignore[arg-type]

    async def watch(self, prefix: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
        for each in self._news:
            yield each

    def look(self) -> None:
        self.seen.append([each.name for each in self.nodes.nodes.values()])
        self.nodes.address("nobody")
        self.nodes.shards()
        self.nodes.known()


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize(
    "key",
    [KEYS.node(9), f"{members_key(KEYS)}9", KEYS.shard(9), KEYS.copies_of(9), KEYS.controller],
)
async def test_a_bad_value_does_not_end_a_controller(key: str, value: bytes) -> None:
    good = pair(KEYS.node(1), encoded(node(1)))
    watching = Watching(
        Listing((good, pair(key, value)), 3), Changes((pair(key, value, 4), good), 4)
    )
    await watching.nodes.run()
    assert len(watching.seen) == 2


async def test_a_node_without_a_port_for_nodes_is_not_reached() -> None:
    lone = Node(1, "lone", "127.0.0.1", {"amqp": 5672}, "1", 1, 1)
    watching = Watching(Listing((pair(KEYS.node(1), encoded(lone)),), 3))
    await watching.nodes.run()
    assert watching.nodes.address("lone") is None
