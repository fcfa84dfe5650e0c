"""How many connections, channels and queues there may be, of the broker, vhosts and users, and how many there are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from shardmq.broker.controller.management.call import Context
from shardmq.broker.controller.policies import USER_LIMITS, VHOST_LIMITS

NEAR_PART: Final = 0.9
SHOWN_MAX: Final = 1_000  # limits among the metrics, and near ones among the warnings
BROKER, VHOST, USER = "broker", "vhost", "user"
WHOSE: Final = {BROKER: "", VHOST: " in vhost '{}'", USER: " of user '{}'"}


class Limit(NamedTuple):
    """`kind`: connections, channels or queues; `name`: of the vhost or user. `most` is at least 0."""

    of: str
    name: str
    kind: str
    used: int
    most: int

    def __str__(self) -> str:
        return f"{self.used} {self.kind} of {self.most} allowed{WHOSE[self.of].format(self.name)}"


def limits(context: Context) -> Iterator[Limit]:
    """Those that are set; what has no limit is not among them."""
    connections, catalog = context.presence.connections(), context.catalog
    if most := context.presence.connections_max:
        yield Limit(BROKER, "", "connections", len(connections), most)
    if most := context.presence.channels_max:
        yield Limit(BROKER, "", "channels", sum(info.channels for info in connections), most)
    of_vhost, of_user = (
        Counter(info.vhost for info in connections),
        Counter(info.user for info in connections),
    )
    channels: Counter[str] = Counter()
    for info in connections:
        channels[info.user] += info.channels
    for (vhost, component, name), _ in catalog.parameters.items():
        if component == VHOST_LIMITS and (there := catalog.vhost(vhost)) is not None:
            used = {
                "connections": of_vhost[vhost],
                "queues": len(there.queues) - there.hidden_queues,
            }
            whose = (VHOST, vhost)
        elif component == USER_LIMITS and not vhost:
            used, whose = {"connections": of_user[name], "channels": channels[name]}, (USER, name)
        else:
            continue
        for kind, count in used.items():
            set_to = catalog.limit(vhost, component, name, f"max-{kind}")
            if set_to is not None:
                yield Limit(*whose, kind, count, set_to)


def near(context: Context) -> list[str]:
    """Before clients are refused. A limit of 0 is meant to refuse them."""
    close = (str(one) for one in limits(context) if 0 < one.most * NEAR_PART <= one.used)
    return [*itertools.islice(close, SHOWN_MAX)]


def metrics(context: Context) -> Iterator[Metric]:
    labels = ["of", "name", "kind"]
    most = GaugeMetricFamily("shardmq_limit", "How many there may be", labels=labels)
    used = GaugeMetricFamily(
        "shardmq_limit_used", "How many there are of what is limited", labels=labels
    )
    for one in itertools.islice(limits(context), SHOWN_MAX):
        most.add_metric([one.of, one.name, one.kind], one.most)
        used.add_metric([one.of, one.name, one.kind], one.used)
    yield from (most, used)
