"""The exchange type `x-federation-upstream`, which a downstream broker declares at its upstream.

Federation of exchanges in RabbitMQ binds such an exchange to the upstream exchange, and the queue
of the link to it. It routes like a fanout exchange, but holds back messages that the downstream
would drop: those that have come through as many brokers as `x-max-hops` says, or through the
downstream itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from shardmq.broker.routing.matching import NOTHING, Arguments, Fanout, Headers, Message, Target

FEDERATION_UPSTREAM: Final = "x-federation-upstream"
MAX_HOPS: Final = "x-max-hops"
DOWNSTREAM_NAME: Final = "x-downstream-name"
DOWNSTREAM_VHOST: Final = "x-downstream-vhost"
RECEIVED_FROM: Final = "x-received-from"


def exchange_fault(type: str, arguments: Arguments) -> str:
    """Return why there can be no such exchange, in RabbitMQ's words, or ""."""
    if type != FEDERATION_UPSTREAM:
        return ""
    if MAX_HOPS not in arguments:
        return f"Argument {MAX_HOPS} missing"
    hops = arguments[MAX_HOPS]
    is_number = isinstance(hops, int) and not isinstance(hops, bool)
    return "" if is_number else f"Argument {MAX_HOPS} must be of type long"


class FederationUpstream(Fanout):
    """Routes to all destinations, or to none if the headers say that a message has come too far."""

    by_key = False

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        super().__init__(arguments)
        self._max_hops = arguments.get(MAX_HOPS)
        self._name = arguments.get(DOWNSTREAM_NAME)
        self._vhost = arguments.get(DOWNSTREAM_VHOST)

    def match(self, message: Message) -> Collection[Target]:
        return super().match(message) if self._forwards(message.headers) else ()

    def _forwards(self, headers: Headers) -> bool:
        been = headers.get(RECEIVED_FROM)
        if not isinstance(been, list):
            return True
        if isinstance(self._max_hops, int) and len(been) >= self._max_hops:
            return False
        return not any(self._is_downstream(entry) for entry in been)

    def _is_downstream(self, entry: Any) -> bool:
        return (
            isinstance(entry, dict)
            and self._name is not None
            and entry.get("cluster-name") == self._name
            and entry.get("vhost") == self._vhost
        )
