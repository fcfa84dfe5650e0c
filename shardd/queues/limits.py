"""TTL, length, bytes, idleness: who must go, and when. Pure: the time is an argument, in ms since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardmq.shardd.queues.resting import REST_MS_MAX, Retry

PRIORITY_MAX = 255
# Why a message was let go.
EXPIRED = "expired"
MAXLEN = "maxlen"
REJECTED = "rejected"
DELIVERY_LIMIT = "delivery_limit"
REFUSED = "refused"  # at its publish: nothing that dies later
DUE = "delayed"  # it has waited long enough at the exchange that delays it
# Argument of a queue that keeps messages for an exchange until they are due: the exchange's name.
DELAYS_FOR = "x-delays-for"


class DeadLetters(NamedTuple):
    """Where what a queue lets go is published again. `routing_key` None: with the keys it came with. `insist`: what the
    only queue there refuses is offered to it again (at-least-once), else it is dropped."""

    exchange: str
    routing_key: str | None = None
    insist: bool = False


class Limits(NamedTuple):
    """A queue's arguments, as far as they bound it; None: not bounded."""

    message_ttl: int | None = None
    expires: int | None = None
    max_length: int | None = None
    max_bytes: int | None = None
    reject_publish: bool = False
    max_priority: int = 0
    delivery_limit: int | None = None
    single_active: bool = False
    dead_letters: DeadLetters | None = None
    refused_die: bool = False  # publishes that are refused are dead-lettered too
    delays: bool = False  # not a queue for anybody: messages wait in it until they are due
    consumer_timeout: int | None = (
        None  # ms after which what a consumer does not settle is requeued
    )
    paused: bool = False  # nothing is handed out
    timeout_closes: bool = (
        False  # who holds something for longer loses its channel, not that message
    )
    retry: Retry | None = None  # what comes back rests first
    held: bool = False  # what arrives from now on is kept back, see behind.py

    @property
    def bounded(self) -> bool:
        return self.max_length is not None or self.max_bytes is not None

    def excess(self, length: int) -> int:
        """Messages too many, by their count."""
        return max(0, length - self.max_length) if self.max_length is not None else 0

    def too_big(self, ready_bytes: int) -> bool:
        return self.max_bytes is not None and ready_bytes > self.max_bytes


UNLIMITED = Limits()


def limits_of(arguments: Mapping[str, Any]) -> Limits:
    """Values were checked by the controller; what is not a number counts as not given."""
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
    """Of the types (all, failed, returned) none is told from the others: whatever comes back rests."""
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
