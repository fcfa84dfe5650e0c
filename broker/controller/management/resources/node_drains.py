"""/api/nodes/NODE/drain, /api/nodes/NODE/forget, /api/cluster/rebalance: queues change their nodes.

Without a cluster there is one node, which has nowhere to move its queues to.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.broker.controller.cluster_view import KnownNode
from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route, check
from shardmq.broker.controller.moving.relocating import Relocating
from shardmq.broker.controller.moving.spread import Planned
from shardmq.broker.controller.requests import Forget
from shardmq.broker.model.changes import DRAINED_NODES, ParameterDelete, ParameterPut
from shardmq.cluster.membership import NoPlace
from shardmq.cluster.pairs import EtcdAway, EtcdRefused
from shardmq.cluster.records import BadRecord


def _node(call: Call) -> KnownNode:
    name = call.part("node")
    nodes = call.context.cluster.nodes
    node = next((each for each in nodes if name in (each.name, each.name.partition("@")[2])), None)
    if node is None:
        raise not_found()
    return node


def _relocating(call: Call) -> Relocating:
    found = call.context.relocating
    if found is None:
        raise bad_request("queues are not moved here")
    return found


async def drained(call: Call) -> dict[str, Any]:
    """Show how many queues a node still has, and which of them stay there and why.

    `held_up` has those whose moves do not go on, or do not come nearer to their ends.
    """
    node = _node(call)
    relocating = _relocating(call)
    queues, moves = relocating.on_node(node), call.context.moves
    return {
        "node": node.name,
        "being_drained": node.name in call.catalog.drained_nodes,
        "queues": len(queues),
        "moving": sum(queue.moving is not None for queue in queues),
        "left_behind": [
            {"vhost": each.queue.vhost, "name": each.queue.name, "why": each.why}
            for each in relocating.left_behind(queues)
        ],
        "held_up": [
            {"vhost": queue.vhost, "name": queue.name, "why": progress.waits_for}
            for queue in queues
            if (progress := moves.get((queue.vhost, queue.name))) and progress.waits_for
        ],
    }


async def drain(call: Call) -> None:
    """Move the queues of a node to the others, and place no new ones on it."""
    node = _node(call)
    others = (each for each in call.context.cluster.nodes if each.name != node.name)
    drained_ones = call.catalog.drained_nodes
    if not any(each.is_alive and each.shards and each.name not in drained_ones for each in others):
        raise bad_request(f"'{node.name}' cannot be drained: no other node takes queues")
    await call.ask(ParameterPut("", DRAINED_NODES, node.name, True))


async def cancel(call: Call) -> None:
    """End the drain of a node: it takes queues again. Those that have moved stay where they are."""
    node = _node(call)
    if node.name in call.catalog.drained_nodes:
        await call.ask(ParameterDelete("", DRAINED_NODES, node.name))


class RebalanceBody(msgspec.Struct):
    """With `dry_run`, the moves are shown and not begun."""

    dry_run: bool = False


def _shown(planned: Planned, call: Call) -> dict[str, Any]:
    queue, of_shard = planned.queue, call.context.cluster.of_shard
    return {
        "vhost": queue.vhost,
        "name": queue.name,
        "from_shard": queue.shard,
        "from_node": of_shard(queue.shard),
        "to_shard": planned.to,
        "to_node": of_shard(planned.to),
    }


async def rebalance(call: Call) -> list[dict[str, Any]]:
    """Move the fewest queues that even out their numbers on the shards; show these moves."""
    body = await call.body(RebalanceBody)
    relocating = _relocating(call)
    planned = relocating.plan() if body.dry_run else relocating.rebalance()
    return [_shown(each, call) for each in planned]


async def rebalance_as_rabbitmq(call: Call) -> None:
    """Move queues in a cluster, as /api/cluster/rebalance does; do nothing on one host."""
    if call.context.cluster.is_cluster:
        _relocating(call).rebalance()


class ForgetBody(msgspec.Struct):
    """`lose` says that the queues on the node may be lost."""

    lose: bool = False


async def forget(call: Call) -> dict[str, Any]:
    """Take a node that is gone for good out of the cluster; show what is lost, and what goes on."""
    node, body = _node(call), await call.body(ForgetBody)
    if node.is_alive:
        raise bad_request(f"'{node.name}' cannot be forgotten: it is alive")
    if call.context.forget_node is None:
        raise bad_request("there is no cluster")
    said = f"'{node.name}' is not forgotten"
    try:
        # This reads from etcd that the node does not live, right before its queues are lost.
        found = await call.context.forget_node(node.number)
        queues = _relocating(call).on_shards(found.lost)
        if queues and not body.lose:
            shards = ", ".join(map(str, found.lost))
            lying = "1 queue lies" if len(queues) == 1 else f"{len(queues)} queues lie"
            raise bad_request(
                f"'{node.name}' cannot be forgotten: {lying}, with all messages, on shards of "
                f"which no other node has all ({shards}); they are lost with the option to lose "
                "them"
            )
        if found.lost:
            check(await call.authority.ask(Forget(frozenset(found.lost))))
            if queues:
                said = "its queues are lost already; the node is not forgotten: ask again"
        await call.context.forget_node(node.number, found.lost)
    except (NoPlace, BadRecord, EtcdAway, EtcdRefused) as error:
        if isinstance(error, EtcdAway) and error.unknown:
            said = said.replace("is not forgotten", "may be forgotten or not")
        raise bad_request(f"{said} ({error})") from None
    if node.name in call.catalog.drained_nodes:
        await call.ask(ParameterDelete("", DRAINED_NODES, node.name))
    lost = sum(queue.moving is None for queue in queues)
    names = {each.number: each.name for each in call.context.cluster.nodes}
    return {
        "node": node.name,
        "queues_lost": lost,
        "queues_kept": len(queues) - lost,
        "shards_lost": found.lost,
        "new_homes": {str(shard): names.get(home, "") for shard, home in found.homes.items()},
    }


DRAIN = "/api/nodes/{node}/drain"

ROUTES = [
    Route("GET", DRAIN, drained, "monitoring"),
    Route("PUT", DRAIN, drain, "administrator"),
    Route("DELETE", DRAIN, cancel, "administrator"),
    Route("POST", "/api/nodes/{node}/forget", forget, "administrator", body=ForgetBody),
    Route("POST", "/api/cluster/rebalance", rebalance, "administrator", body=RebalanceBody),
    Route("POST", "/api/rebalance/queues", rebalance_as_rabbitmq, "administrator"),
]
