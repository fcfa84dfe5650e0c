"""Metrics of single queues, connections, channels, exchanges and vhosts, in RabbitMQ's families.

There may be 100,000 objects. `/metrics/detailed?family=...&vhost=...` shows some families,
`/metrics/per-object` shows PER_OBJECT_FAMILIES; both are written in slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.metrics import node_metrics
from shardmq.broker.controller.management.metrics.message_stats import QUEUE_COUNTERS
from shardmq.broker.controller.management.metrics.stats import Stats, behind, details
from shardmq.broker.controller.management.resources import login_attempts, processes
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import is_hidden_queue

SLICE_ROWS = 60  # take 25 us, or twice as long the first time
PART_BYTES = 64 << 10  # yielded at a time
DETAILED = "rabbitmq_detailed_"
PER_OBJECT = "rabbitmq_"
CLUSTER = "rabbitmq_cluster_"  # of metrics that all nodes of a cluster would show alike
# The escapes of the exposition format, and of % in a format string.
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\"", "%": "%%"})
_SPECIAL: Final = frozenset('\\\n"%')


# The values of the labels of an object, and what its metrics are made of.
Row = tuple[tuple[str, ...], Any]
Objects = Callable[[Context, Stats, list[Vhost]], Iterable[Row]]  # of some vhosts


class Metric(NamedTuple):
    name: str  # without its prefix; counters end in _total
    what: str
    value: Callable[[Any], float]


class Family(NamedTuple):
    labels: tuple[str, ...]
    objects: Objects
    metrics: tuple[Metric, ...]
    prefix: str = ""  # instead of DETAILED or PER_OBJECT


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
    context: Context,
    stats: Stats,
    families: Iterable[str],
    vhosts: AbstractSet[str] | None,
    prefix: str,
    work: SlicedWork,
) -> AsyncIterator[bytes]:
    """Yield the exposition text of these families in these vhosts, or with None in all vhosts.

    Unknown families are ignored.
    """
    selected = [
        vhost
        for vhost in list(context.catalog.vhosts.values())
        if vhosts is None or vhost.name in vhosts
    ]
    of_objects: Objects | None = None
    blocks: list[_Block] = []
    for family in (FAMILIES[name] for name in dict.fromkeys(families) if name in FAMILIES):
        # Families with the same objects have the same labels: a block is used again.
        if family.objects is not of_objects:
            of_objects, blocks = family.objects, []
            rows = iter(of_objects(context, stats, selected))
            while part := list(itertools.islice(rows, SLICE_ROWS)):
                blocks.append(_block(family.labels, part))
                await work.yield_to_others()
        for metric in family.metrics:
            full = (family.prefix or prefix) + metric.name
            kind = "counter" if full.endswith("_total") else "gauge"
            parts = [f"# HELP {full} {metric.what}\n# TYPE {full} {kind}\n".encode()]
            size = 0
            for block in blocks:
                parts.append(block.of(full, metric.value))
                size += len(parts[-1])
                if size >= PART_BYTES:
                    yield b"".join(parts)
                    parts, size = [], 0
                await work.yield_to_others()
            yield b"".join(parts)


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


def _vhosts(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    return (((vhost.name,), 1) for vhost in vhosts)


def _connections(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for info in context.presence.connections():
        report = stats.connections.get(info.owner)
        if report is not None and info.vhost in names:
            yield (info.vhost, info.name), report


def _channels(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for report in stats.channels:
        info = context.presence.connection(report["owner"])
        if info is not None and info.vhost in names:
            yield (info.vhost, channel_name(info, report["number"])), report


def _node(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    return (
        ((), values) for values in [node_metrics.values(context, stats, processes.rows(context))]
    )


def _attempts(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    return (
        ((protocol,), counts) for protocol, counts in login_attempts.logins(context, stats).items()
    )


def _churn(context: Context, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    return (((), values) for values in [churn(context, stats)])


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


def _of(key: str) -> Callable[[dict[str, Any]], float]:
    return lambda report: float(report.get(key) or 0)


def _known(key: str) -> Callable[[dict[str, float]], float]:
    return lambda values: values.get(key, math.nan)


_QUEUE = ("vhost", "queue")
_CONNECTION = ("vhost", "connection")
_CHANNEL = ("vhost", "channel")
_EXCHANGE = ("vhost", "exchange", "type")

FAMILIES: Final[dict[str, Family]] = {
    "queue_coarse_metrics": Family(
        _QUEUE,
        _queues,
        (
            Metric("queue_messages_ready", "Messages ready", attrgetter("ready")),
            Metric(
                "queue_messages_unacked",
                "Messages delivered and not acknowledged",
                attrgetter("unacked"),
            ),
            Metric(
                "queue_messages", "Messages ready and unacknowledged", lambda q: q.ready + q.unacked
            ),
        ),
    ),
    "queue_consumer_count": Family(
        _QUEUE, _queues, (Metric("queue_consumers", "Consumers", attrgetter("consumers")),)
    ),
    "queue_metrics": Family(
        _QUEUE,
        _queues,
        (
            Metric(
                "queue_messages_bytes",
                "Bytes of its messages",
                lambda q: q.ready_bytes + q.unacked_bytes,
            ),
            Metric("queue_messages_ready_bytes", "Bytes of those ready", attrgetter("ready_bytes")),
            Metric(
                "queue_messages_unacked_bytes",
                "Bytes of those unacknowledged",
                attrgetter("unacked_bytes"),
            ),
            Metric("queue_messages_published_total", "Messages that came", attrgetter("published")),
        ),
    ),
    "queue_delivery_metrics": Family(
        _QUEUE,
        _queues,
        (
            *(
                Metric(f"queue_{name}_total", text, QUEUE_COUNTERS[counter])
                for name, text, counter in (
                    ("get_ack", "Messages fetched by basic.get, to be acknowledged", "get"),
                    ("get", "Messages fetched by basic.get, not to be acknowledged", "get_no_ack"),
                    (
                        "messages_delivered_ack",
                        "Messages given to consumers that acknowledge",
                        "deliver",
                    ),
                    (
                        "messages_delivered",
                        "Messages given to consumers that do not acknowledge",
                        "deliver_no_ack",
                    ),
                    ("messages_redelivered", "Messages given again", "redeliver"),
                    ("messages_acked", "Messages acknowledged", "ack"),
                    ("get_empty", "Times that basic.get found nothing", "get_empty"),
                )
            ),
        ),
    ),
    "stream_group_metrics": Family(
        ("vhost", "queue", "group"),
        _stream_groups,
        (
            Metric(
                "stream_group_offset_lag",
                "Messages that those reading under that name have before them",
                float,
            ),
        ),
    ),
    "connection_coarse_metrics": Family(
        _CONNECTION,
        _connections,
        (
            Metric("connection_incoming_bytes_total", "Bytes read", _of("recv_oct")),
            Metric("connection_outgoing_bytes_total", "Bytes written", _of("send_oct")),
        ),
    ),
    "connection_metrics": Family(
        _CONNECTION,
        _connections,
        (
            Metric("connection_channels", "Channels", _of("channels")),
            Metric("connection_pending_bytes", "Bytes the client has not taken", _of("send_pend")),
        ),
    ),
    "channel_metrics": Family(
        _CHANNEL,
        _channels,
        (
            Metric("channel_consumers", "Consumers", _of("consumer_count")),
            Metric(
                "channel_messages_unacked",
                "Deliveries not acknowledged",
                _of("messages_unacknowledged"),
            ),
            Metric(
                "channel_messages_unconfirmed",
                "Publishes not confirmed",
                _of("messages_unconfirmed"),
            ),
            Metric(
                "channel_messages_uncommitted",
                "Publishes not committed",
                _of("messages_uncommitted"),
            ),
            Metric(
                "channel_acks_uncommitted",
                "Acknowledgements not committed",
                _of("acks_uncommitted"),
            ),
            Metric(
                "channel_prefetch",
                "Limit of unacknowledged messages of new consumers",
                _of("prefetch_count"),
            ),
            Metric(
                "channel_prefetch_global", "Limit of all together", _of("global_prefetch_count")
            ),
        ),
    ),
    "exchange_bindings": Family(
        _EXCHANGE,
        _exchanges,
        (Metric("exchange_bindings", "Bindings from it", lambda bindings: bindings),),
        CLUSTER,
    ),
    "exchange_names": Family(
        _EXCHANGE, _exchanges, (Metric("exchange_name", "1", lambda bindings: 1),), CLUSTER
    ),
    "vhost_status": Family(
        ("vhost",), _vhosts, (Metric("vhost_status", "1: it is served", lambda one: one),), CLUSTER
    ),
    **{
        family: Family(
            (), _node, tuple(Metric(name, what, _known(name)) for name, what in names.items())
        )
        for family, names in node_metrics.FAMILIES.items()
    },
    "auth_attempt_metrics": Family(
        ("protocol",),
        _attempts,
        (
            Metric("auth_attempts_total", "Logins", sum),
            Metric(
                "auth_attempts_succeeded_total", "Logins that succeeded", lambda counts: counts[0]
            ),
            Metric("auth_attempts_failed_total", "Logins that failed", lambda counts: counts[1]),
        ),
    ),
    "connection_churn_metrics": Family(
        (),
        _churn,
        tuple(
            Metric(f"{what}_{end}_total", f"{what.capitalize()} {end}", _of(f"{what}_{end}"))
            for what, ends in (
                ("connections", ("opened", "closed")),
                ("channels", ("opened", "closed")),
                ("queues", ("declared", "created", "deleted")),
            )
            for end in ends
        ),
    ),
}
PER_OBJECT_FAMILIES: Final = (
    "queue_coarse_metrics", "queue_consumer_count", "queue_metrics", "queue_delivery_metrics",
    "connection_coarse_metrics", "connection_metrics", "channel_metrics",
)  # fmt: skip
