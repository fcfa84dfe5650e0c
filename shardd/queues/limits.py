"""Read the limits of a queue from its arguments: TTL, length, bytes, idleness and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardmq.shardd.queues.resting import REST_MS_MAX, Retry

PRIORITY_MAX = 255
# The reasons for which a message is let go.
EXPIRED = "expired"
MAXLEN = "maxlen"
REJECTED = "rejected"
DELIVERY_LIMIT = "delivery_limit"
REFUSED = "refused"  # The message was refused at its publish, so it does not die later.
DUE = "delayed"  # The message has waited long enough at its delaying exchange.
# The argument of a queue that keeps messages for a delaying exchange: the name of the exchange.
DELAYS_FOR = "x-delays-for"


class DeadLetters(NamedTuple):
    """The exchange to which messages are published again that a queue lets go.

    If `routing_key` is None, messages keep the keys they came with. `insist` (at-least-once): a
    message that the only queue there refuses is offered again; otherwise it is dropped.
    """

    exchange: str
    routing_key: str | None = None
    insist: bool = False


class Limits(NamedTuple):
    """The arguments of a queue that bound it. None means not bounded."""

    message_ttl: int | None = None
    expires: int | None = None
    max_length: int | None = None
    max_bytes: int | None = None
    reject_publish: bool = False
    max_priority: int = 0
    delivery_limit: int | None = None
    single_active: bool = False
    dead_letters: DeadLetters | None = None
    refused_die: bool = False  # refused publishes are dead-lettered too
    delays: bool = False  # nobody consumes; messages wait until they are due
    # A message that a consumer has not settled after this many ms is requeued.
    consumer_timeout: int | None = None
    paused: bool = False  # no message is handed out
    # After the consumer timeout the channel is closed, instead of requeueing the message.
    timeout_closes: bool = False
    retry: Retry | None = None  # messages that come back rest first
    held: bool = False  # messages that arrive from now on are kept back, see held_back.py
    # The messages go to the life of the queue on another shard. None is handed out or expires here.
    leaving: bool = False

    @property
    def bounded(self) -> bool:
        return self.max_length is not None or self.max_bytes is not None

    def excess(self, length: int) -> int:
        """Return how many messages there are above the limit of length."""
        return max(0, length - self.max_length) if self.max_length is not None else 0

    def too_big(self, ready_bytes: int) -> bool:
        return self.max_bytes is not None and ready_bytes > self.max_bytes


UNLIMITED = Limits()


def limits_of(arguments: Mapping[str, Any]) -> Limits:
    """Return the limits in the arguments of a queue.

    The controller has checked the values. A value that is not a number counts as not given.
    """
    if not arguments:
        return UNLIMITED
    if isinstance(exchange := arguments.get(DELAYS_FOR), str):
        return Limits(delays=True, dead_letters=DeadLetters(exchange))
    priority = _number(arguments, "x-max-priority") or 0
    overflow = str(arguments.get("x-overflow", ""))
    return Limits(
        message_ttl=_number(arguments, "x-message-ttl"),
        expires=_number(arguments, "x-expires"),
        max_length=_number(arguments, "x-max-length"),
        max_bytes=_number(arguments, "x-max-length-bytes"),
        reject_publish=overflow.startswith("reject-publish"),
        max_priority=min(priority, PRIORITY_MAX),
        delivery_limit=_number(arguments, "x-delivery-limit"),
        single_active=arguments.get("x-single-active-consumer") is True,
        dead_letters=_dead_letters(arguments),
        consumer_timeout=_number(arguments, "x-consumer-timeout") or None,
        refused_die=overflow == "reject-publish-dlx",
        retry=_retry(arguments),
    )


def _dead_letters(arguments: Mapping[str, Any]) -> DeadLetters | None:
    exchange = arguments.get("x-dead-letter-exchange")
    if not isinstance(exchange, str):
        return None
    key = arguments.get("x-dead-letter-routing-key")
    insist = arguments.get("x-dead-letter-strategy") == "at-least-once"
    return DeadLetters(exchange, key if isinstance(key, str) else None, insist)


def _retry(arguments: Mapping[str, Any]) -> Retry | None:
    """Return how long returned messages rest, None if they do not rest.

    The types all, failed and returned are not told apart: every message that comes back rests.
    """
    least = _number(arguments, "x-delayed-retry-min")
    if not least or arguments.get("x-delayed-retry-type") == "disabled":
        return None
    most = _number(arguments, "x-delayed-retry-max") or REST_MS_MAX
    return Retry(
        min(least, REST_MS_MAX), most, _number(arguments, "x-delayed-retry-multiplier") or None
    )


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(value)
