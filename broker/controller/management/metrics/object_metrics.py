"""Metrics of single queues, connections, channels, exchanges and vhosts, in RabbitMQ's families.

There may be 100,000 objects. `/metrics/detailed` shows what its query selects
(`detailed_query.py`), `/metrics/per-object` shows PER_OBJECT_FAMILIES; both are written in slices.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.management.metrics import churn, node_metrics
from shardmq.broker.controller.management.metrics.detailed_query import Selection
from shardmq.broker.controller.management.metrics.message_stats import (
    CHANNEL_COUNTERS,
    QUEUE_COUNTERS,
)
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.stats import Stats, behind, lag
from shardmq.broker.controller.management.resources import login_attempts
from shardmq.broker.controller.management.resources.connections import channel_name
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.matching import MATCHED_ROWS, BoundedSearch
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.checks import is_hidden_queue

SLICE_ROWS = 80  # take 5 to 40 us, the first time 65
PART_BYTES = 48 << 10  # yielded at a time; with one slice more this is still one compressed piece
# The second word of names.
DETAILED = "detailed_"
PER_OBJECT = ""
CLUSTER = "cluster_"  # of metrics that all nodes of a cluster would show alike
# The escapes of the exposition format, and of % in a format string.
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\"", "%": "%%"})
_SPECIAL: Final = re.compile(r'[\\\n"%]')


# The values of the labels of an object, and what its metrics are made of.
Row = tuple[tuple[str, ...], Any]
Objects = Callable[[Part, Stats, list[Vhost]], Iterable[Row]]  # of some vhosts
Read = Callable[[Any], float | None]  # None is shown as NaN
Rank = Callable[[Any], float]
# Metrics by name: the help, and the name of the value in the object or a function of the object.
# Names of counters end in _total.
Metrics = Mapping[str, tuple[str, str | Read]]


class Family(NamedTuple):
    labels: tuple[str, ...]
    objects: Objects
    read: Callable[[str], Read]  # makes a function of the object out of the name of a value
    section: str  # instead of DETAILED or PER_OBJECT, if there is one
    rank: Rank | None  # `top` picks the objects with the highest figures; None: all are shown
    metrics: Metrics


class _Block:
    """Some objects of a family, with their labels."""

    def __init__(self, labels: str, objects: list[Any]) -> None:
        """Begin with no lines made.

        `labels` has a line for each object: a newline, the labels, and `%s` for the value. Newlines
        in labels are escaped, so the name of a metric can be put behind each newline.
        """
        self._labels = labels
        self._objects = objects
        # A value, and the lines in which all objects have this value.
        self._alike = ("", b"")

    def of(self, name: bytes, value: Read) -> bytes:
        """Return a newline and a line for each object, without a newline at the end."""
        values = tuple(map(value, self._objects))
        first = values[0]
        # Most metrics of most queues are 0. All values of a metric are int, or all are float.
        if values.count(first) == len(values):
            text = "nan" if first is None else str(first)
            if text != self._alike[0]:
                self._alike = text, (self._labels % ((text,) * len(values))).encode()
            lines = self._alike[1]
        else:
            if None in values:
                values = tuple([math.nan if value is None else value for value in values])
            lines = (self._labels % values).encode()
        return lines.replace(b"\n", b"\n" + name)


async def lines(
    part: Part, stats: Stats, selected: Selection, section: str, work: SlicedWork
) -> AsyncIterator[bytes]:
    """Yield the exposition text of the selected families.

    `stats`: the numbers of the part. `section`: DETAILED or PER_OBJECT.
    """
    vhosts = [
        vhost
        for vhost in list(part.context.catalog.vhosts.values())
        if selected.vhosts is None or vhost.name in selected.vhosts
    ]
    pattern = selected.pattern()
    search = BoundedSearch(pattern, "queue") if pattern is not None else None
    made_of: tuple[Objects, tuple[str, ...]] | None = None
    blocks: list[_Block] = []
    written: set[str] = set()
    for family in map(FAMILIES.__getitem__, selected.families):
        # A block is used again for families with the same objects and labels.
        if (family.objects, family.labels) != made_of:
            made_of, blocks = (family.objects, family.labels), []
            rows = iter(family.objects(part, stats, vhosts))
            async for picked in _picked(family, rows, selected.top, search, work):
                blocks.append(_block(family.labels, picked))
        for name, (text, value) in family.metrics.items():
            full = f"{selected.prefix}_{family.section or section}{name}"
            if full in written:  # Prometheus refuses a metric that comes twice
                continue
            written.add(full)
            kind = "counter" if full.endswith("_total") else "gauge"
            read = family.read(value) if isinstance(value, str) else value
            parts = [f"# HELP {full} {text}\n# TYPE {full} {kind}".encode()]
            size, name_bytes = 0, full.encode()
            for block in blocks:
                parts.append(block.of(name_bytes, read))
                size += len(parts[-1])
                if size >= PART_BYTES:
                    yield b"".join(parts)
                    parts, size = [], 0
                await work.yield_to_others()
            parts.append(b"\n")
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
    if _SPECIAL.search("".join(itertools.chain.from_iterable(values))) is not None:
        values = [tuple([value.translate(_ESCAPES) for value in each]) for each in values]
    return _Block("".join([row % each for each in values]), [obj for _, obj in rows])


# -- objects ---------------------------------------------------------------------------------------


def _queues(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for queue in list(vhost.queues.values()):
            known = stats.queue(queue)
            if known is not None and not is_hidden_queue(queue.name):
                yield (vhost.name, queue.name), known


def _stream_groups(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for queue in list(vhost.queues.values()):
            stream = stats.streams.get(queue.id)
            if stream is not None:
                for name, offset in stream.positions.items():
                    yield (vhost.name, queue.name, name), behind(stream, offset)


def _stream_lags(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    """Yield the lag of the slowest consumer of each stream that has consumers."""
    worst: dict[int, int] = {}
    for reader in stats.readers.values():
        worst[reader.queue] = max(worst.get(reader.queue, 0), lag(stats, reader))
    for vhost in vhosts:
        for queue in list(vhost.queues.values()):
            if queue.id in worst:
                yield (vhost.name, queue.name), worst[queue.id]


def _exchanges(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    for vhost in vhosts:
        for exchange in list(vhost.exchanges.values()):
            yield (
                (vhost.name, exchange.name, exchange.type),
                len(vhost.bindings_from(exchange.name)),
            )


def _published_exchanges(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    """Yield how many messages were published to each exchange that has seen any."""
    by_vhost = {vhost.name: vhost for vhost in vhosts}
    for (name, exchange), (published, _) in stats.clients.exchanges.items():
        if name in by_vhost and exchange in by_vhost[name].exchanges:
            yield (name, exchange), published


def _connections(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for info in part.connections():
        report = stats.clients.connections.get(info.owner)
        if report is not None and info.vhost in names:
            yield (info.vhost, info.name), report


def _channels(part: Part, stats: Stats, vhosts: list[Vhost]) -> Iterable[Row]:
    names = {vhost.name for vhost in vhosts}
    for report in stats.clients.channels.values():
        info = part.context.presence.connection(report["owner"])
        if info is not None and info.vhost in names:
            yield (info.vhost, channel_name(info, report["number"])), report


def _reported(name: str) -> Read:
    return lambda report: float(report.get(name) or 0)


def _known(name: str) -> Read:
    return lambda values: values.get(name)


# Metrics that are in two families.
_QUEUE_CONSUMERS: Final[Metrics] = {"queue_consumers": ("Consumers of a queue", "consumers")}
# Name, counter and text of what queues give, which is counted by queue and by channel.
_GIVEN: Final = (
    ("get_ack", "get", "Messages fetched by basic.get, to be acknowledged"),
    ("get", "get_no_ack", "Messages fetched by basic.get, not to be acknowledged"),
    ("messages_delivered_ack", "deliver", "Messages given to consumers that acknowledge"),
    ("messages_delivered", "deliver_no_ack", "Messages given to consumers that do not acknowledge"),
    ("messages_redelivered", "redeliver", "Messages given again"),
    ("messages_acked", "ack", "Messages acknowledged"),
    ("get_empty", "get_empty", "Times that basic.get found nothing"),
)
_QUEUE_PUBLISHED: Final[Metrics] = {
    "queue_messages_published_total": ("Messages put into a queue", "published")
}
# Families of metrics, by kind of object.
_QUEUES: Final[Mapping[str, Metrics]] = {
    "queue_coarse_metrics": {
        "queue_messages_ready": ("Messages ready", "ready"),
        "queue_messages_unacked": ("Messages delivered and not acknowledged", "unacked"),
        "queue_messages": ("Messages ready and unacknowledged", lambda q: q.ready + q.unacked),
    },
    "queue_consumer_count": _QUEUE_CONSUMERS,
    "queue_metrics": {
        **_QUEUE_CONSUMERS,
        "queue_messages_bytes": (
            "Bytes of messages ready and unacknowledged",
            lambda q: q.ready_bytes + q.unacked_bytes,
        ),
        "queue_messages_ready_bytes": ("Bytes of messages ready", "ready_bytes"),
        "queue_messages_unacked_bytes": ("Bytes of messages unacknowledged", "unacked_bytes"),
        **_QUEUE_PUBLISHED,  # in RabbitMQ only in channel_queue_exchange_metrics
        "queue_messages_persistent": (
            "Persistent messages; NaN where many messages are and many are not",
            "persistent",
        ),
        "queue_messages_persistent_bytes": (
            "Bytes of persistent messages; NaN likewise",
            "persistent_bytes",
        ),
        "queue_messages_ram": ("Messages kept in memory alone", lambda q: 0),
        "queue_messages_ram_bytes": ("Bytes of messages kept in memory alone", lambda q: 0),
        "queue_head_message_timestamp": (
            "Timestamp of the first message; NaN without one",
            "head_timestamp",
        ),
        "queue_oldest_message_age_seconds": (
            "Age of the message that came first",
            lambda q: (q.oldest_ms or 0) / 1000,
        ),
        "queue_consumer_utilisation": (
            "Share of time in which consumers could take each message at once",
            "utilisation",
        ),
        "queue_consumer_capacity": ("The same as queue_consumer_utilisation", "utilisation"),
    },
    "queue_delivery_metrics": {
        f"queue_{name}_total": (text, QUEUE_COUNTERS[counter]) for name, counter, text in _GIVEN
    },
}
# RabbitMQ counts by channel, queue and exchange; here a shard counts by queue.
_QUEUES_ALONE: Final[Mapping[str, Metrics]] = {"channel_queue_exchange_metrics": _QUEUE_PUBLISHED}
_GROUPS: Final[Mapping[str, Metrics]] = {
    "stream_group_metrics": {
        "stream_group_offset_lag": (
            "Messages of a stream that the consumers of a name have not read",
            float,
        ),
    },
}
_READERS: Final[Mapping[str, Metrics]] = {
    "stream_consumer_metrics": {
        "stream_consumer_max_offset_lag": (
            "Messages of a stream that its slowest consumer has not read",
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
        "consumer_prefetch": (
            "Limit of unacknowledged messages for each new consumer of a channel",
            "prefetch_count",
        ),
        "channel_prefetch": (
            "Limit of unacknowledged messages for all consumers of a channel together",
            "global_prefetch_count",
        ),
        "channel_prefetch_global": ("Until 0.2, see channel_prefetch", "global_prefetch_count"),
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
        f"channel_{name}_total": (text, CHANNEL_COUNTERS[counter]) for name, counter, text in _GIVEN
    },
}
_EXCHANGES: Final[Mapping[str, Metrics]] = {
    "exchange_bindings": {"exchange_bindings": ("Bindings from an exchange", int)},
    "exchange_names": {"exchange_name": ("1 for each exchange", lambda bindings: 1)},
}
_PUBLISHED: Final[Mapping[str, Metrics]] = {
    "exchange_metrics": {
        "exchange_messages_published_total": ("Messages published to an exchange", float)
    },
}
_VHOSTS: Final[Mapping[str, Metrics]] = {
    "vhost_status": {"vhost_status": ("1 for each vhost, as all are served", lambda vhost: 1)},
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


def _families(
    by_name: Mapping[str, Metrics],
    *,
    labels: tuple[str, ...],
    objects: Objects,
    read: Callable[[str], Read] = attrgetter,
    section: str = "",
    rank: Rank | None = None,
) -> dict[str, Family]:
    """Return families of the same objects, by name; the arguments are the fields of Family."""
    return {
        name: Family(
            labels=labels, objects=objects, read=read, section=section, rank=rank, metrics=metrics
        )
        for name, metrics in by_name.items()
    }


FAMILIES: Final[dict[str, Family]] = {
    **_families(
        _QUEUES, labels=("vhost", "queue"), objects=_queues, rank=lambda q: q.ready + q.unacked
    ),
    **_families(
        _QUEUES_ALONE,
        labels=("queue_vhost", "queue"),
        objects=_queues,
        rank=attrgetter("published"),
    ),
    **_families(_GROUPS, labels=("vhost", "queue", "group"), objects=_stream_groups, rank=float),
    **_families(_READERS, labels=("vhost", "queue"), objects=_stream_lags, rank=float),
    **_families(
        _CONNECTIONS,
        labels=("vhost", "connection"),
        objects=_connections,
        read=_reported,
        rank=lambda report: (report.get("recv_oct") or 0) + (report.get("send_oct") or 0),
    ),
    **_families(
        _CHANNELS,
        labels=("vhost", "channel"),
        objects=_channels,
        read=_reported,
        rank=lambda report: (report.get("published") or 0) + (report.get("delivered") or 0),
    ),
    **_families(
        _EXCHANGES,
        labels=("vhost", "exchange", "type"),
        objects=_exchanges,
        section=CLUSTER,
        rank=float,
    ),
    **_families(_PUBLISHED, labels=("vhost", "exchange"), objects=_published_exchanges, rank=float),
    **_families(
        _VHOSTS,
        labels=("vhost",),
        objects=lambda _, __, vhosts: (((v.name,), v) for v in vhosts),
        section=CLUSTER,
        rank=lambda vhost: len(vhost.queues),
    ),
    **_families(
        _NODE,
        labels=(),
        objects=lambda part, s, _: [((), node_metrics.values(part, s, part.rows()))],
        read=_known,
    ),
    **_families(
        _LOGINS,
        labels=("protocol",),
        objects=lambda part, s, _: [
            ((name,), counts) for name, counts in login_attempts.logins(part, s).items()
        ],
    ),
    **_families(
        _CHURNED,
        labels=(),
        objects=lambda part, stats, _: [((), churn.counts(part, stats))],
        read=_reported,
    ),
}
PER_OBJECT_FAMILIES: Final = (
    "queue_coarse_metrics", "queue_consumer_count", "queue_metrics", "queue_delivery_metrics",
    "connection_coarse_metrics", "connection_metrics", "channel_metrics",
    "channel_exchange_metrics", "channel_queue_metrics",
)  # fmt: skip
