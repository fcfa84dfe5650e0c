"""The arguments of basic.consume: which values they may have, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.consume.refusals import CONSUME, refused_consume
from shardmq.broker.model import checks
from shardmq.broker.shared.control import ConsumeTerms

# What a consumer holds of a shard that moves may take this long to be settled. A rebalance is over
# within a second.
HANDOVER_S: Final = 0.7
HANDOVER_MS_MAX: Final = 3_600_000
ASSIGNMENTS: Final = ("group", "random", "least")

Arguments = Mapping[str, Any]


def priority_of(arguments: Arguments, queue: str, vhost: str) -> int:
    try:
        checks.check_consume_arguments(vhost, queue, arguments)
    except checks.Refusal as refusal:
        raise refused_consume(refusal) from None
    value = arguments.get("x-priority", 0)
    return value if isinstance(value, int) else 0


def affinity_of(arguments: Arguments, queue: str, vhost: str) -> bool:
    """Return whether messages of one key go to one consumer while it has one of that key."""
    value = arguments.get("x-key-affinity", False)
    if not isinstance(value, bool):
        raise invalid("x-key-affinity", queue, vhost, "unacceptable_type")
    return value


def handover_s_of(arguments: Arguments, queue: str, vhost: str) -> float:
    """Return how long unsettled deliveries of a shard that moves are waited for, in seconds."""
    value = arguments.get("x-handover-timeout", int(HANDOVER_S * 1000))
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("x-handover-timeout", queue, vhost, checks.not_integer(value))
    if not 0 <= value <= HANDOVER_MS_MAX:
        raise invalid("x-handover-timeout", queue, vhost, f"not within 0 and {HANDOVER_MS_MAX} ms")
    return value / 1000


def terms_of(
    arguments: Arguments,
    queue: str,
    vhost: str,
    *,
    exclusive: bool,
    owner: str,
    channel: int,
    tag: str,
) -> ConsumeTerms:
    """Return what a consumer of the virtual queue tells the controller.

    Raises ChannelException for a value that an argument may not have.
    """

    def checked(name: str, kind: type, default: Any) -> Any:
        value = arguments.get(name, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            said = f"{{unacceptable_type,{checks.type_name(value)}}}"
            raise invalid(name, queue, vhost, checks.not_integer(value) if kind is int else said)
        return value

    assignment = checked("x-shard-assignment", str, "group")
    if assignment not in ASSIGNMENTS:
        raise invalid("x-shard-assignment", queue, vhost, "none of " + ", ".join(ASSIGNMENTS))
    return ConsumeTerms(
        group=checked("x-group", str, ""),
        assignment=assignment,
        exclusive=exclusive,
        priority=checked("x-priority", int, 0),
        affinity=affinity_of(arguments, queue, vhost),
        owner=owner,
        channel=channel,
        tag=tag,
    )


def invalid(argument: str, queue: str, vhost: str, why: str) -> ChannelException:
    """Return what ends the channel for a value that the argument may not have."""
    text = f"invalid arg '{argument}' for queue '{queue}' in vhost '{vhost}': {why}"
    return ChannelException(406, text, *CONSUME)
