"""The limits of connections, channels and queues that are set, and how much of them is used."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.policies import USER_LIMITS, VHOST_LIMITS

NEAR_PART: Final = 0.9  # of a limit: from here on there is a warning
SHOWN_MAX: Final = 1_000  # limits in the metrics, and warnings
BROKER, VHOST, USER = "broker", "vhost", "user"
WHOSE: Final = {BROKER: "", VHOST: " in vhost '{}'", USER: " of user '{}'"}


class SetLimit(NamedTuple):
    """A limit that is set, and how many things count against it."""

    of: str  # BROKER, VHOST or USER
    name: str  # of the vhost or user
    kind: str  # connections, channels or queues
    used: int
    most: int

    def __str__(self) -> str:
        return f"{self.used} {self.kind} of {self.most} allowed{WHOSE[self.of].format(self.name)}"


def limits(context: Context) -> Iterator[SetLimit]:
    connections, catalog = context.presence.connections(), context.catalog
    if most := context.presence.connections_max:
        yield SetLimit(BROKER, "", "connections", len(connections), most)
    if most := context.presence.channels_max:
        yield SetLimit(BROKER, "", "channels", sum(info.channels for info in connections), most)
    of_vhost, of_user = (
        Counter(info.vhost for info in connections),
        Counter(info.user for info in connections),
    )
    channels: Counter[str] = Counter()
    for info in connections:
        channels[info.user] += info.channels
    for (vhost, component, name), _ in catalog.parameters.items():
        if component == VHOST_LIMITS and (limited := catalog.vhost(vhost)) is not None:
            used = {
                "connections": of_vhost[vhost],
                "queues": len(limited.queues) - limited.hidden_queues,
            }
            whose = (VHOST, vhost)
        elif component == USER_LIMITS and not vhost:
            used, whose = {"connections": of_user[name], "channels": channels[name]}, (USER, name)
        else:
            continue
        for kind, count in used.items():
            set_to = catalog.limit(vhost, component, name, f"max-{kind}")
            if set_to is not None:
                yield SetLimit(*whose, kind, count, set_to)


def near(context: Context) -> list[str]:
    """Return a warning for each limit that is nearly used up, but not for limits of 0."""
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
