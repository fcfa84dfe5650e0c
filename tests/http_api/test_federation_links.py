"""The rows of /api/federation-links have the channel that a link publishes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ParameterPut, QueuePut, VhostPut
from shardmq.broker.model.federation import UPSTREAM, UPSTREAM_SET, Link
from shardmq.broker.model.federation import links as links_of
from shardmq.broker.shared.bridging import RUNNING, STARTING, BridgeState, key_of
from tests.http_api.conftest import CONNECTION, Api


def links() -> list[Link]:
    """Return the links of two federated queues."""
    catalog = Catalog()
    policy = {"pattern": "", "definition": {UPSTREAM_SET: "all"}, "apply-to": "queues"}
    catalog.apply(VhostPut("/"))
    catalog.apply(ParameterPut("/", "policy", "p", policy))
    catalog.apply(ParameterPut("/", UPSTREAM, "u", {"uri": "amqp://h"}))
    for id, name in enumerate("ab", 1):
        catalog.apply(QueuePut("/", name, id, 0))
    return links_of(catalog)


async def test_a_link_that_runs_shows_its_channel_as_the_listing_of_channels_does(api: Api) -> None:
    [channel] = await api.get("/api/channels")

    async def shown(first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
        states = [
            (link, BridgeState(key=key_of(link), life=0, **fields))
            for link, fields in zip(links(), (first, second), strict=True)
        ]
        object.__setattr__(api.context, "bridges", SimpleNamespace(links=lambda: states))
        found = await api.get("/api/federation-links")
        assert await api.get("/api/federation-links/%2F") == found
        return [row.get("local_channel") for row in found]

    own = {"state": RUNNING, "local_connection": CONNECTION}
    assert await shown(own, {"state": STARTING}) == [channel, None]
    assert await shown({"state": RUNNING}, own) == [None, channel]
    # One that the listing does not have yet is missing, and nothing else.
    assert await shown({"state": RUNNING, "local_connection": "new"}, own) == [None, channel]
    asked = len(api.shards.asked)
    api.clock.ahead_s += 60
    assert await shown({"state": STARTING}, {"state": STARTING}) == [None, None]
    assert len(api.shards.asked) == asked, "no numbers are collected for links that do not run"
