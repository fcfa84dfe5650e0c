"""Metrics of single queues, connections, channels, exchanges and vhosts, in RabbitMQ's families.

There may be 100,000 objects. `/metrics/detailed` shows what its query selects
(`detailed_query.py`), `/metrics/per-object` shows PER_OBJECT_FAMILIES; both are written in slices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import node_metrics
from shardmq.broker.controller.management.metrics.detailed_query import Selection
from shardmq.broker.controller.management.metrics.message_stats import (
    CHANNEL_COUNTERS,
    QUEUE_COUNTERS,
)
from shardmq.broker.controller.management.metrics.stats import Stats, behind, details
from shardmq.broker.controller.management.resources import login_attempts, processes
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.matching import MATCHED_ROWS, BoundedSearch
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import is_hidden_queue

SLICE_ROWS = 60  # take 25 us, or twice as long the first time
PART_BYTES = 64 << 10  # yielded at a time
# The second word of names.
DETAILED = "detailed_"
PER_OBJECT = ""
CLUSTER = "cluster_"  # of metrics that all nodes of a cluster would show alike
# The escapes of the exposition format, and of % in a format string.
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\"", "%": "%%"})
_SPECIAL: Final = frozenset('\\\n"%')


# The values of the labels of an object, and what its metrics are made of.
Row = tuple[tuple[str, ...], Any]
Objects = Callable[[Context, Stats, list[Vhost]], Iterable[Row]]  # of some vhosts
Read = Callable[[Any], float]
# Metrics by name: the help, and the name of the value in the object or a function of the object.
# Names of counters end in _total.
Metrics = Mapping[str, tuple[str, str | Read]]


class Family(NamedTuple):
    labels: tuple[str, ...]
    objects: Objects
    read: Callable[[str], Read]  # makes a function of the object out of the name of a value
    section: str  # instead of DETAILED or PER_OBJECT, if there is one
    rank: Read | None  # `top` picks the objects with the highest figures; None: all are shown
    metrics: Metrics


class _Block(NamedTuple):
    """Some objects of a family, with their labels.

    `text` has a line for each object: a newline, the labels, and `%s` for the value. Newlines in
    labels are escaped, so the name of a metric can be put behind each newline.
    """

    text: str
    objects: list[Any]

    def of(self, name: str, value: Callable[[Any], float]) -> bytes:
        lines = self.text.replace("\n", "\n" + name) % tuple(map(value, self.objects))
        return f"{lines[1:]}\n".encode()


async def lines(
    context: Context, stats: Stats, selected: Selection, section: str, work: SlicedWork
) -> AsyncIterator[bytes]:
    """Yield the exposition text of the selected families. `section`: DETAILED or PER_OBJECT."""
    vhosts = [
        vhost
        for vhost in list(context.catalog.vhosts.values())
        if selected.vhosts is None or vhost.name in selected.vhosts
    ]
    pattern = selected.pattern()
    search = BoundedSearch(pattern, "queue") if pattern is not None else None
    of_objects: Objects | None = None
    blocks: list[_Block] = []
    for family in map(FAMILIES.__getitem__, selected.families):
        # Families with the same objects have the same labels: a block is used again.
        if family.objects is not of_objects:
            of_objects, blocks = family.objects, []
            rows = iter(of_objects(context, stats, vhosts))
            async for part in _picked(family, rows, selected.top, search, work):
                blocks.append(_block(family.labels, part))
        for name, (text, value) in family.metrics.items():
            full = f"{selected.prefix}_{family.section or section}{name}"
            kind = "counter" if full.endswith("_total") else "gauge"
            read = family.read(value) if isinstance(value, str) else value
            parts = [f"# HELP {full} {text}\n# TYPE {full} {kind}\n".encode()]
            size = 0
            for block in blocks:
                parts.append(block.of(full, read))
                size += len(parts[-1])
                if size >= PART_BYTES:
                    yield b"".join(parts)
                    parts, size = [], 0
                await work.yield_to_others()
            yield b"".join(parts)


async def _picked(
    family: Family,
    rows: Iterator[Row],
    top: int | None,
    search: BoundedSearch | None,
    work: SlicedWork,
) -> AsyncIterator[list[Row]]:
    """Yield the rows of a family that are selected, in slices that are not empty.

    With `top` the highest rank comes first.
    """
    if "queue" not in family.labels:
        search = None
    rank = family.rank if top is not None else None
    # A heap of the rows with the highest figures so far. Of equal ones the first row is kept.
    best: list[tuple[float, int, Row]] = []
    order = itertools.count(0, -1)
    while part := list(itertools.islice(rows, MATCHED_ROWS if search else SLICE_ROWS)):
        if search is not None:
            at = family.labels.index("queue")
            part = [row for row in part if search(row[0][at])]
        if rank is not None and top is not None:
            for row in part:
                entry = rank(row[1]), next(order), row
                if len(best) < top:
                    heapq.heappush(best, entry)
                elif entry > best[0]:
                    heapq.heapreplace(best, entry)
        elif part:
            yield part
        await work.yield_to_others()
    best.sort(reverse=True)
    for start in range(0, len(best), SLICE_ROWS):
        yield [row for _, _, row in best[start : start + SLICE_ROWS]]
        await work.yield_to_others()


def _block(names: tuple[str, ...], rows: list[Row]) -> _Block:
    row = "\n{" + ",".join([f'{name}="%s"' for name in names]) + "} %%s"
    values = [values for values, _ in rows]
    if not _SPECIAL.isdisjoint(itertools.chain.from_iterable(map("".join, values))):
        values = [tuple([value.translate(_ESCAPES) for value in each]) for each in values]
    return _Block("".join([row % each for each in values]), [obj for _, obj in rows])


# -- objects ---------------------------------------------------------------------------------------


def _queues(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for queue in list(vhost.queues.values()):
            known = stats.queue(queue)
            if known is not None and not is_hidden_queue(queue.name):
                yield (vhost.name, queue.name), known


def _stream_groups(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for queue in list(vhost.queues.values()):
            stream = stats.streams.get(queue.id)
            for name, offset in stream.positions.items() if stream is not None else ():
                # `stream` is not None here.
                yield (vhost.name, queue.name, name), behind(stream, offset)  # type: ignore[arg-type]


def _exchanges(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for exchange in list(vhost.exchanges.values()):
            yield (
                (vhost.name, exchange.name, exchange.type),
                len(vhost.bindings_from(exchange.name)),
            )


def _connections(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for info in context.presence.connections():
        report = stats.clients.connections.get(info.owner)
        if report is not None and info.vhost in names:
            yield (info.vhost, info.name), report


def _channels(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for report in stats.clients.channels.values():
        info = context.presence.connection(report["owner"])
        if info is not None and info.vhost in names:
            yield (info.vhost, channel_name(info, report["number"])), report


def churn(context: Context, stats: Stats) -> dict[str, float]:
    """Return how many connections, channels and queues were opened and closed, or made and deleted.

    Channels count since each front door was started, the others since the controller was.
    """
    connections, channels = len(context.presence.connections()), stats.counters.get("channels", 0)
    channels_opened = stats.counters.get("channels_opened", 0)
    return {
        "connections_opened": context.presence.opened,
        "connections_closed": context.presence.opened - connections,
        "channels_opened": channels_opened,
        "channels_closed": max(0, channels_opened - channels),
        **context.authority.queue_churn(),
    }


_CHURN: Final = {"connections": "connection", "channels": "channel", "queues": "queue"}


def churn_rates(context: Context, stats: Stats) -> dict[str, Any]:
    """Return `churn` with rates under the names of RabbitMQ's HTTP API, as connection_created."""
    values = churn(context, stats)
    rates = context.churn_rates.of(values)
    shown: dict[str, Any] = {}
    for name, value in values.items():
        what, _, end = name.partition("_")
        said = f"{_CHURN[what]}_{end.replace('opened', 'created')}"
        shown |= {said: int(value)} | details(said, rates.get(name))
    return shown


def _reported(name: str) -> Read:
    return lambda report: float(report.get(name) or 0)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _known(name: str) -> Read:
    return lambda values: values.get(name, math.nan)


# Families of metrics, by kind of object.
_QUEUES: Final[Mapping[str, Metrics]] = {
    "queue_coarse_metrics": {
        "queue_messages_ready": ("Messages ready", "ready"),
        "queue_messages_unacked": ("Messages delivered and not acknowledged", "unacked"),
        "queue_messages": ("Messages ready and unacknowledged", lambda q: q.ready + q.unacked),
    },
    "queue_consumer_count": {"queue_consumers": ("Consumers", "consumers")},
    "queue_metrics": {
        "queue_messages_bytes": (
            "Bytes of its messages",
            lambda q: q.ready_bytes + q.unacked_bytes,
        ),
        "queue_messages_ready_bytes": ("Bytes of those ready", "ready_bytes"),
        "queue_messages_unacked_bytes": ("Bytes of those unacknowledged", "unacked_bytes"),
        "queue_messages_published_total": ("Messages that came", "published"),
        "queue_messages_persistent": (
            "Persistent messages; NaN where many messages are and many are not",
            lambda q: _number(q.persistent),
        ),
        "queue_messages_persistent_bytes": (
            "Bytes of those persistent",
            lambda q: _number(q.persistent_bytes),
        ),
        "queue_messages_ram": ("Messages kept in memory alone", lambda q: 0),
        "queue_messages_ram_bytes": ("Bytes of those kept in memory alone", lambda q: 0),
        "queue_head_message_timestamp": (
            "Timestamp of the first message; NaN without one",
            lambda q: _number(q.head_timestamp),
        ),
        "queue_oldest_message_age_seconds": (
            "Age of the message that came first",
            lambda q: (q.oldest_ms or 0) / 1000,
        ),
        "queue_consumer_utilisation": (
            "Share of time in which consumers could take each message at once",
            "utilisation",
        ),
        "queue_consumer_capacity": ("The same", "utilisation"),
    },
    "queue_delivery_metrics": {
        f"queue_{name}_total": (text, QUEUE_COUNTERS[counter])
        for name, counter, text in (
            ("get_ack", "get", "Messages fetched by basic.get, to be acknowledged"),
            ("get", "get_no_ack", "Messages fetched by basic.get, not to be acknowledged"),
            ("messages_delivered_ack", "deliver", "Messages given to consumers that acknowledge"),
            (
                "messages_delivered",
                "deliver_no_ack",
                "Messages given to consumers that do not acknowledge",
            ),
            ("messages_redelivered", "redeliver", "Messages given again"),
            ("messages_acked", "ack", "Messages acknowledged"),
            ("get_empty", "get_empty", "Times that basic.get found nothing"),
        )
    },
}
_GROUPS: Final[Mapping[str, Metrics]] = {
    "stream_group_metrics": {
        "stream_group_offset_lag": (
            "Messages that those reading under that name have before them",
            float,
        ),
    },
}
_CONNECTIONS: Final[Mapping[str, Metrics]] = {
    "connection_coarse_metrics": {
        "connection_incoming_bytes_total": ("Bytes read", "recv_oct"),
        "connection_outgoing_bytes_total": ("Bytes written", "send_oct"),
    },
    "connection_metrics": {
        "connection_channels": ("Channels", "channels"),
        "connection_pending_bytes": ("Bytes the client has not taken", "send_pend"),
        "connection_incoming_packets_total": ("Reads of its socket", "recv_cnt"),
        "connection_outgoing_packets_total": ("Writes to its socket", "send_cnt"),
    },
}
_CHANNELS: Final[Mapping[str, Metrics]] = {
    "channel_metrics": {
        "channel_consumers": ("Consumers", "consumer_count"),
        "channel_messages_unacked": ("Deliveries not acknowledged", "messages_unacknowledged"),
        "channel_messages_unconfirmed": ("Publishes not confirmed", "messages_unconfirmed"),
        "channel_messages_uncommitted": ("Publishes not committed", "messages_uncommitted"),
        "channel_acks_uncommitted": ("Acknowledgements not committed", "acks_uncommitted"),
        "channel_prefetch": (
            "Limit of unacknowledged messages of new consumers",
            "prefetch_count",
        ),
        "channel_prefetch_global": ("Limit of all together", "global_prefetch_count"),
    },
    "channel_exchange_metrics": {
        f"channel_messages_{name}_total": (text, CHANNEL_COUNTERS[counter])
        for name, counter, text in (
            ("published", "publish", "Messages published"),
            ("confirmed", "confirm", "Messages published and confirmed"),
            ("unroutable_returned", "return_unroutable", "Unroutable messages returned"),
            ("unroutable_dropped", "drop_unroutable", "Unroutable messages dropped"),
        )
    },
    "channel_queue_metrics": {
        f"channel_{name}_total": (text, CHANNEL_COUNTERS[counter])
        for name, counter, text in (
            ("get_ack", "get", "Messages fetched by basic.get, to be acknowledged"),
            ("get", "get_no_ack", "Messages fetched by basic.get, not to be acknowledged"),
            ("messages_delivered_ack", "deliver", "Messages given to consumers that acknowledge"),
            (
                "messages_delivered",
                "deliver_no_ack",
                "Messages given to consumers that do not acknowledge",
            ),
            ("messages_redelivered", "redeliver", "Messages given again"),
            ("messages_acked", "ack", "Messages acknowledged"),
            ("get_empty", "get_empty", "Times that basic.get found nothing"),
        )
    },
}
_EXCHANGES: Final[Mapping[str, Metrics]] = {
    "exchange_bindings": {"exchange_bindings": ("Bindings from it", int)},
    "exchange_names": {"exchange_name": ("1", lambda bindings: 1)},
}
_VHOSTS: Final[Mapping[str, Metrics]] = {
    "vhost_status": {"vhost_status": ("1: it is served", lambda name: 1)},
}
_NODE: Final[Mapping[str, Metrics]] = {
    family: {name: (text, name) for name, text in names.items()}
    for family, names in node_metrics.FAMILIES.items()
}
_LOGINS: Final[Mapping[str, Metrics]] = {
    "auth_attempt_metrics": {
        "auth_attempts_total": ("Logins", sum),
        "auth_attempts_succeeded_total": ("Logins that succeeded", itemgetter(0)),
        "auth_attempts_failed_total": ("Logins that failed", itemgetter(1)),
    },
}
_CHURNED: Final[Mapping[str, Metrics]] = {
    "connection_churn_metrics": {
        f"{what}_{end}_total": (f"{what.capitalize()} {end}", f"{what}_{end}")
        for what, ends in (
            ("connections", ("opened", "closed")),
            ("channels", ("opened", "closed")),
            ("queues", ("declared", "created", "deleted")),
        )
        for end in ends
    },
}
_KINDS: Final[tuple[tuple[Any, ...], ...]] = (
    # labels, objects, how values are read, section, rank, families
    (("vhost", "queue"), _queues, attrgetter, "", lambda q: q.ready + q.unacked, _QUEUES),
    (("vhost", "queue", "group"), _stream_groups, attrgetter, "", float, _GROUPS),
    (
        ("vhost", "connection"),
        _connections,
        _reported,
        "",
        lambda report: (report.get("recv_oct") or 0) + (report.get("send_oct") or 0),
        _CONNECTIONS,
    ),
    (
        ("vhost", "channel"),
        _channels,
        _reported,
        "",
        lambda report: (report.get("published") or 0) + (report.get("delivered") or 0),
        _CHANNELS,
    ),
    (("vhost", "exchange", "type"), _exchanges, attrgetter, CLUSTER, float, _EXCHANGES),
    (
        ("vhost",),
        lambda _, __, vhosts: (((v.name,), v) for v in vhosts),
        attrgetter,
        CLUSTER,
        lambda vhost: len(vhost.queues),
        _VHOSTS,
    ),
    (
        (),
        lambda c, s, _: [((), node_metrics.values(c, s, processes.rows(c)))],
        _known,
        "",
        None,
        _NODE,
    ),
    (
        ("protocol",),
        lambda c, s, _: [((name,), counts) for name, counts in login_attempts.logins(c, s).items()],
        attrgetter,
        "",
        None,
        _LOGINS,
    ),
    ((), lambda context, stats, _: [((), churn(context, stats))], _reported, "", None, _CHURNED),
)
FAMILIES: Final[dict[str, Family]] = {
    name: Family(labels, objects, read, section, rank, metrics)
    for labels, objects, read, section, rank, families in _KINDS
    for name, metrics in families.items()
}
PER_OBJECT_FAMILIES: Final = (
    "queue_coarse_metrics", "queue_consumer_count", "queue_metrics", "queue_delivery_metrics",
    "connection_coarse_metrics", "connection_metrics", "channel_metrics",
    "channel_exchange_metrics", "channel_queue_metrics",
)  # fmt: skip
