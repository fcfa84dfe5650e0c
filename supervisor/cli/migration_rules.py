"""Decides for each queue which way its messages go while applications move to this broker. Pure.

```
   AT_OLD --------> COMING --------> HERE        a bridge takes all messages of the old queue
      |  \\                                       from COMING on, and stays until `migrate finish`
      |   '-------> HELD
      v              consumers are here, older messages are there, and newer ones have come here
    QUIET            nobody uses the queue at the old broker
```

The queue here is paused in AT_OLD and HELD: it takes messages and gives none. So no consumer gets a
message that was published here before those that still wait at the old broker.

Who consumed a message at the old broker may hold it after it has ended its consumer, and may give
it back. The numbers of such messages are some seconds old. So a queue stays paused until it could
be resumed for longer than that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

AT_OLD, HELD, COMING, HERE, QUIET = "at-old", "held", "coming", "here", "quiet"
STATES: Final = (AT_OLD, HELD, COMING, HERE, QUIET)

PREFIX: Final = "migration-"  # of the names of all that a migration makes
NAME_BYTES_MAX: Final = 200
RECONNECT_DELAY_S: Final = 1
PREFETCH: Final = 1000
PRIORITY: Final = -1  # consumers that come back to the old broker get messages first
# Numbers that a broker lists are so old at the most: RabbitMQ collects them every 5 s.
LISTED_S: Final = 5.0
# States of queues whose node at the old broker does not run: nobody can declare them.
DOWN: Final = ("down", "stopped", "crashed")


class Queue(NamedTuple):
    vhost: str
    name: str


class Seen(NamedTuple):
    """What is seen of a queue at both brokers.

    ready: messages that are ready at the old broker.
    unacked: messages there that a consumer or the bridge has and has not acknowledged.
    old_consumers: consumers there, without the bridge.
    is_published: whether messages are published to it there.
    here: messages in the queue of this broker.
    consumers: consumers here.
    has_bridge: whether there is a bridge for the queue.
    is_paused: whether the queue here is paused.
    is_unknown: whether the old broker has the queue and does not say what is in it.
    is_settled: whether the queue could be resumed for longer than listed numbers may be old.
    is_expiring: whether the queue here, or a message that waits in it, expires after some time.
    """

    ready: int = 0
    unacked: int = 0
    old_consumers: int = 0
    is_published: bool = False
    here: int = 0
    consumers: int = 0
    has_bridge: bool = False
    is_paused: bool = False
    is_unknown: bool = False
    is_settled: bool = False
    is_expiring: bool = False

    @property
    def at_old(self) -> int:
        return self.ready + self.unacked


class Step(NamedTuple):
    """The state of a queue, and whether it is to have a bridge and to be paused here."""

    state: str
    has_bridge: bool = False
    is_paused: bool = False


def seen_of(
    row: Mapping[str, Any] | None,
    counts: tuple[int, int] | None,
    here: Mapping[str, Any],
    bridge: Mapping[str, Any] | None,
) -> Seen:
    """Return what is seen of a queue.

    Args:
        row: The row of the queue as the old broker lists it, None if it lists none.
        counts: The messages that are ready at the old broker and the consumers there, if asked for.
        here: The row of the queue as this broker lists it.
        bridge: The state of its bridge, None if there is no bridge.
    """
    if row is None:
        row = {"messages_ready": 0, "messages_unacknowledged": 0, "consumers": 0}
    if counts is None and has_counts(row):
        counts = row["messages_ready"], row["consumers"]
    unacked = row.get("messages_unacknowledged")
    ready, consumers = counts or (0, 0)
    rate = ((row.get("message_stats") or {}).get("publish_details") or {}).get("rate")
    return Seen(
        ready=ready,
        unacked=max(int(unacked or 0), int((bridge or {}).get("pending") or 0)),
        old_consumers=max(0, consumers - (bridge is not None)),
        is_published=bool(rate),
        here=int(here.get("messages") or 0),
        consumers=int(here.get("consumers") or 0),
        has_bridge=bridge is not None,
        is_paused=here.get("state") == "paused",
        is_expiring=_is_expiring(here),
        is_unknown=row.get("state") in DOWN or counts is None or unacked is None,
    )


def _is_expiring(here: Mapping[str, Any]) -> bool:
    given, policy = here.get("arguments") or {}, here.get("effective_policy_definition") or {}
    return any(f"x-{key}" in given or key in policy for key in ("message-ttl", "expires"))


def has_counts(row: Mapping[str, Any]) -> bool:
    """Return whether the row of a queue says how many messages are ready, and the consumers."""
    return row.get("messages_ready") is not None and row.get("consumers") is not None


def step(seen: Seen, any_order: bool = False, is_finishing: bool = False) -> Step:
    """Return the state of a queue, and what is to be there.

    Args:
        seen: The queue at both brokers.
        any_order: Whether older messages may come behind newer ones that are here already.
        is_finishing: Whether messages come also if there are no consumers here, and at once.
    """
    found = _due(seen, any_order, is_finishing)
    is_early = seen.is_paused and not found.is_paused and not seen.has_bridge
    if is_early and not (seen.is_settled or is_finishing):
        return Step(AT_OLD, is_paused=True)
    return found


def settling_since(
    seen: Seen, since_s: float | None, now_s: float, any_order: bool = False
) -> float | None:
    """Return since when a paused queue could be resumed, None if it is to stay paused.

    Args:
        seen: The queue at both brokers.
        since_s: What this function returned at the last look.
        now_s: When the look began, on the same clock.
        any_order: Whether older messages may come behind newer ones that are here already.
    """
    if not seen.is_paused or _due(seen, any_order).is_paused:
        return None
    return now_s if since_s is None else since_s


def _due(seen: Seen, any_order: bool, is_finishing: bool = False) -> Step:
    """Return what is to be there if no number is old."""
    if seen.is_unknown:
        return Step(AT_OLD, seen.has_bridge, seen.is_paused)
    is_used = bool(seen.at_old or seen.is_published)
    if seen.has_bridge:
        return Step(COMING if is_used else HERE, has_bridge=True)
    is_free = not (seen.old_consumers or seen.unacked)
    if (seen.consumers and (is_free or not is_used)) or (is_finishing and seen.ready and is_free):
        if seen.ready and seen.here and not any_order:
            return Step(HELD, is_paused=True)
        return Step(COMING if is_used else HERE, has_bridge=True)
    if is_used or seen.old_consumers:
        return Step(AT_OLD, is_paused=True)
    return Step(QUIET)


def hint(seen: Seen, state: str) -> str:
    """Return what may be done for a queue now, "" if there is nothing to do."""
    if seen.is_unknown:
        return "wait until the old broker says how many messages the queue has"
    if state == AT_OLD:
        if seen.consumers and not seen.old_consumers and seen.unacked:
            return "consumers here wait until all messages are acknowledged at the old broker"
        if seen.consumers and not seen.old_consumers:
            return f"migrate start resumes the queue here {LISTED_S:.0f} s after the last message"
        if seen.consumers and seen.old_consumers:
            return "consumers here wait until the last one has left the old broker"
        if not seen.at_old and not seen.is_published:
            return "its consumers may move"
        if seen.here:
            return "its consumers may move when at_old is 0"
        if seen.is_expiring:
            return "its consumers may move, before its publishers: messages expire while they wait"
        return "its publishers may move; or its consumers, before its publishers"
    if state == HELD:
        return "start a consumer at the old broker until at_old is 0, or use --any-order"
    if state == COMING and seen.ready:
        return "its publishers may move when the bridge has caught up"
    if state == COMING and (seen.unacked or seen.is_published):
        return "stop its publishers, and start them here when at_old is 0"
    return "its publishers may move" if state in (COMING, HERE) else ""


def is_over(seen: Seen) -> bool:
    """Return whether nothing is left of a queue at the old broker, and nobody uses it there."""
    return not (seen.at_old or seen.old_consumers or seen.is_published or seen.is_unknown)


def bridge_name(queue: str) -> str:
    """Return the name of the shovel for a queue, which is the same each time."""
    name = PREFIX + queue
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return PREFIX + hashlib.sha256(queue.encode()).hexdigest()


def bridge(queue: Queue, old_uri: str) -> dict[str, Any]:
    """Return the parameter of the shovel that takes the messages of a queue.

    A message leaves the old broker when this one has it on the disk.

    Args:
        queue: The queue, which has the same name at both brokers.
        old_uri: The URI of the old broker with the vhost of the queue.
    """
    return {
        "src-protocol": "amqp091",
        "src-uri": old_uri,
        "src-queue": queue.name,
        "src-predeclared": True,
        "src-prefetch-count": PREFETCH,
        "src-consumer-args": {"x-priority": PRIORITY},
        "src-delete-after": "never",
        "dest-protocol": "amqp091",
        "dest-uri": f"amqp:///{quote(queue.vhost, safe='')}",
        "dest-queue": queue.name,
        "dest-predeclared": True,
        "ack-mode": "on-confirm",
        "reconnect-delay": RECONNECT_DELAY_S,
    }


def bridges_in(parameters: Iterable[Mapping[str, Any]]) -> dict[Queue, dict[str, Any]]:
    """Return the queues that have a bridge, with its value, from the parameters of shovels."""
    found: dict[Queue, dict[str, Any]] = {}
    for row in parameters:
        name, value = row.get("name"), row.get("value")
        queue = value.get("src-queue") if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(queue, str) and name == bridge_name(queue):
            found[Queue(str(row.get("vhost")), queue)] = value
    return found
