"""/api/exchanges/VHOST/NAME/shards: the shard queues of a stream exchange, and resharding.

GET shows the progress of a change of their number, PUT changes the number, and POST to .../plan
says what a change would do.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.broker.controller.groups.groups import VirtualQueue, VirtualQueueName
from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import Call, Route, existing
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.policies import SHARDS
from shardmq.broker.controller.resharding import shard_sets
from shardmq.broker.controller.resharding.reshaping import Reshaping
from shardmq.broker.controller.resharding.reshard_progress import step_of
from shardmq.broker.controller.resharding.states import HOLD_NAMES, queues_losing_keys
from shardmq.broker.model.arguments import NUMBER
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import ACTIVE, ExchangePut, ParameterPut, QueuePut
from shardmq.broker.model.values import SHARDS_PER_EXCHANGE_MAX, shards_fault


class NumberBody(msgspec.Struct):
    """The number of shard queues: a whole number, or "auto"."""

    number: Any = None


async def status(call: Call) -> dict[str, Any]:
    """Show the shard queues of an exchange, and the steps of a change of their number."""
    vhost, exchange = _stream_exchange(call)
    parts = vhost.parts(exchange.name)
    change = call.context.resharding.get((vhost.name, exchange.name))
    left = change.left(queues_losing_keys(parts)) if change is not None else {}
    waiting = await call.context.shards.messages(parts)
    deadline_ms, choice = shard_sets.deadline(vhost, exchange.name)
    return {
        "exchange": exchange.name,
        "vhost": vhost.name,
        "keeps_order": shard_sets.keeps_order(vhost, exchange),
        "step": step_of(parts, change),
        "to_settle": sum(count for count in left.values() if count is not None),
        "to_settle_at_first": change.total if change is not None else 0,
        "unknown": sum(count is None for count in left.values()),
        "deadline_ms": deadline_ms,
        "at_deadline": choice or "wait",
        "queues": [
            _shown(vhost, queue, waiting.get(queue.id), left.get(queue.name))
            | {"node": call.context.cluster.of_shard(queue.shard)}
            for queue in parts
        ],
        "groups": _crossing(
            call.context.groups.queues.get(VirtualQueueName(vhost.name, exchange.name)), parts
        ),
    }


def _crossing(virtual: VirtualQueue | None, parts: list[QueuePut]) -> list[dict[str, Any]]:
    """Return the groups of a stream that have not passed all cuts of resharding.

    `waits_for`: the shard queues that the group must read and settle up to the next cut; None while
    the group passes the cut.
    """
    names = {queue.id: queue.name for queue in parts}
    found = []
    for name, group in virtual.groups.items() if virtual is not None else ():
        if open := group.open():
            waits_for = group.crossing.waits_for(open[0], group.shards)
            queues = (
                None if waits_for is None else sorted(names[id] for id in waits_for if id in names)
            )
            found.append({"group": name, "changes": len(open), "waits_for": queues})
    return found


async def plan(call: Call) -> dict[str, Any]:
    """Show what a change of the number of shard queues would do; nothing is changed."""
    vhost, exchange = _stream_exchange(call)
    number = _number(await call.body(NumberBody))
    places = call.authority.places
    want = shard_sets.wanted(call.catalog, vhost, exchange, places)
    assert want is not None
    want = shard_sets.set_to(want, number, places)
    most = call.catalog.vhost_limit(vhost.name, "max-queues")
    there = len(vhost.queues) - vhost.hidden_queues
    room = SHARDS_PER_EXCHANGE_MAX if most is None else max(0, most - there)
    reshaping = Reshaping(vhost, exchange, want, places)
    names = {target.name for target in reshaping.targets(room)}
    parts = [
        queue
        for queue in vhost.parts(exchange.name)
        if queue.part is not None and queue.part.state == ACTIVE
    ]
    waiting = await call.context.shards.messages(vhost.parts(exchange.name))
    now = {queue.name for queue in parts}
    coming, going = sorted(names - now), sorted(now - names)
    losing = [queue for queue in parts if queue.name in going] if going else parts
    if not coming and not going:
        losing = []
    # The share of all keys that go to another queue, if all shards have the same weight.
    share = 0.0
    is_spread = exchange.type in shard_sets.SPREADING
    if is_spread and now and want.number and not len(now) == want.number == len(now & names):
        share = 1.0 - len(now & names) / max(len(now), want.number)
    return {
        "exchange": exchange.name,
        "vhost": vhost.name,
        "keeps_order": shard_sets.keeps_order(vhost, exchange),
        "shards": len(now),
        "new_shards": want.number,
        "coming": coming,
        "going": going,
        "share_moving": share,
        "to_settle": sum(waiting.get(queue.id, 0) for queue in losing),
    }


async def change(call: Call) -> None:
    """Change the number of shard queues of an exchange."""
    vhost, exchange = _stream_exchange(call)
    said = call.catalog.parameters.get((vhost.name, SHARDS, exchange.name))
    put = {**(said.value if said is not None else {}), NUMBER: _number(await call.body(NumberBody))}
    await call.ask(ParameterPut(vhost.name, SHARDS, exchange.name, put))


def _number(body: NumberBody) -> Any:
    if fault := shards_fault("number", body.number):
        raise bad_request(fault)
    return body.number


def _stream_exchange(call: Call) -> tuple[Vhost, ExchangePut]:
    vhost, name = call.vhost(), exchange_name(call.part("exchange"))
    exchange = existing(vhost.exchanges.get(name))
    if shard_sets.wanted(call.catalog, vhost, exchange, call.authority.places) is None:
        raise bad_request(f"exchange '{name}' is no stream exchange")
    return vhost, exchange


def _shown(vhost: Vhost, queue: QueuePut, messages: int | None, left: int | None) -> dict[str, Any]:
    assert queue.part is not None
    return {
        "name": queue.name,
        "index": queue.part.index,
        "shard": queue.shard,
        "state": queue.part.state,
        "bound": shard_sets.is_bound(vhost, queue),
        "held": HOLD_NAMES[queue.part.held],
        "messages": messages,
        "to_settle": left,
    }


ROUTES = [
    Route("GET", "/api/exchanges/{vhost}/{exchange}/shards", status),
    Route("PUT", "/api/exchanges/{vhost}/{exchange}/shards", change, "policymaker"),
    Route("POST", "/api/exchanges/{vhost}/{exchange}/shards/plan", plan),
]
