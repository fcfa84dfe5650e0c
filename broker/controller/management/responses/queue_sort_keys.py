"""Sort keys of queues, column by column, without rows: a page of 100,000 queues makes 100 rows.

Numbers are those collected last (`StatsCollector.lately`). A queue whose numbers are not known
comes before those with 0.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics.message_stats import QUEUE_COUNTERS
from shardmq.broker.controller.management.metrics.stats import Stats
from shardmq.broker.controller.management.responses.listing import Keys
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.policies import NOTHING, Applied
from shardmq.shardd.wire.messages import QueueStats

UNKNOWN: Final = -1.0
ENTRY_BYTES: Final = 8  # of memory for a waiting message

Number = Callable[[QueueStats], float]


def _known(number: int | None) -> float:
    return UNKNOWN if number is None else number


NUMBERS: Final[dict[str, Number]] = {
    "messages": lambda q: q.ready + q.unacked,
    "messages_ready": attrgetter("ready"),
    "messages_unacknowledged": attrgetter("unacked"),
    "consumers": attrgetter("consumers"),
    "memory": lambda q: ENTRY_BYTES * (q.ready + q.unacked),
    "message_bytes": lambda q: q.ready_bytes + q.unacked_bytes,
    "message_bytes_ready": attrgetter("ready_bytes"),
    "message_bytes_unacknowledged": attrgetter("unacked_bytes"),
    "messages_persistent": lambda q: _known(q.persistent),
    "message_bytes_persistent": lambda q: _known(q.persistent_bytes),
    "messages_ram": lambda q: 0,
    "message_bytes_ram": lambda q: 0,
    "head_message_timestamp": lambda q: _known(q.head_timestamp),
    "oldest_message_age": lambda q: _known(q.oldest_ms),
    "idle_since": lambda q: _known(q.used_at),
    "consumer_utilisation": attrgetter("utilisation"),
    "consumer_capacity": attrgetter("utilisation"),
}
# A message that is read stays in its stream, so `ready` counts all messages.
STREAM_NUMBERS: Final[dict[str, Number]] = {
    **NUMBERS,
    "messages": attrgetter("ready"),
    "message_bytes": attrgetter("ready_bytes"),
    "memory": lambda q: 0,
}
TEXTS: Final[dict[str, Callable[[QueuePut], Any]]] = {
    "type": lambda q: str(q.arguments.get("x-queue-type", "classic")),
    "arguments": lambda q: str(q.arguments),
    "exclusive": lambda q: bool(q.owner),
}
# The columns that are the node of the shard.
NODES: Final = frozenset(("node", "leader"))
POLICIES: Final[dict[str, Callable[[Applied], str]]] = {
    "policy": lambda applied: applied.policy or "",
    "operator_policy": lambda applied: applied.operator_policy or "",
    "effective_policy_definition": lambda applied: str(applied.definition),
}


async def keys(context: Context, column: str) -> Keys[QueuePut] | None:
    """Return what computes the sort keys of this column, or None if only rows have its values."""
    if column in TEXTS:
        text = TEXTS[column]
        return lambda part: [text(queue) for queue in part]
    if column in NODES:
        node = context.cluster.of_shard
        return lambda part: [node(queue.shard) for queue in part]
    if column in ("members", "online"):
        view = context.cluster
        names = view.in_sync_of if column == "members" else view.online_of
        return lambda part: [str(list(names(queue.shard))) for queue in part]
    if column in POLICIES:
        return _policies(context, POLICIES[column])
    if column == "state":
        return _states(await context.stats.lately())
    if column in NUMBERS:
        stats = await context.stats.lately()
        return _numbers(stats, NUMBERS[column], STREAM_NUMBERS[column])
    first, _, counter = column.partition(".")
    if first == "message_stats":
        return _counters(await context.stats.lately(), counter)
    return None


def _policies(context: Context, text: Callable[[Applied], str]) -> Keys[QueuePut]:
    vhosts = context.catalog.vhosts

    def of(vhost: Vhost | None, queue: QueuePut) -> str:
        return text(vhost.policies_of(queue) if vhost is not None else NOTHING)

    return lambda part: [of(vhosts.get(queue.vhost), queue) for queue in part]


def _states(stats: Stats) -> Keys[QueuePut]:
    known, shards = stats.queues, stats.shards

    def state(queue: QueuePut) -> str:
        if queue.id not in known and queue.shard not in shards:
            return "down"
        return "paused" if queue.paused else "running"

    return lambda part: [state(queue) for queue in part]


def _numbers(stats: Stats, number: Number, of_stream: Number) -> Keys[QueuePut]:
    known, streams, unused = stats.queues, stats.streams, _unused(stats)

    def of(queue: QueuePut) -> float:
        found = known.get(queue.id)
        if found is None:
            return unused(queue)
        return of_stream(found) if queue.id in streams else number(found)

    return lambda part: [of(queue) for queue in part]


def _counters(stats: Stats, column: str) -> Keys[QueuePut] | None:
    """Sort by a counter, `publish`, or by its rate, `publish_details.rate`.

    Rates are those between the last two times that everything was collected.
    """
    name, _, detail = column.partition("_details")
    count = QUEUE_COUNTERS.get(name)
    if count is None or detail not in ("", ".rate"):
        return None
    known, unused = stats.queues, _unused(stats)
    is_rate = bool(detail)

    def of(queue: QueuePut) -> float:
        found = known.get(queue.id)
        if found is None:
            return unused(queue)
        if is_rate:
            earlier = stats.earlier(found)
            rate = None if earlier is None else stats.rate(count(found), count(earlier))
            return UNKNOWN if rate is None else rate
        return count(found)

    return lambda part: [of(queue) for queue in part]


def _unused(stats: Stats) -> Callable[[QueuePut], float]:
    """Return the number of a queue that its shard did not name: 0, unless the shard was silent."""
    return lambda queue: 0.0 if queue.shard in stats.shards else UNKNOWN
