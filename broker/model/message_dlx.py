"""Dead-letter headers that a publisher gives to a single message.

The header `x-dead-letter-exchange` names the exchange that the message goes to when it dies, also
where its queue names none or another. The header `x-dead-letter-routing-key` is the routing key of
the dead letter, whatever the queue says. A value that is no string, or is longer than a name may
be, counts as not given. The dead letter has these headers no more.

The keys in a header `BCC` route the dead letter as they routed the message, and no consumer sees
them: a message in a queue keeps the header, and the header is taken off when the message is
delivered. The marks of a record tell its queues that some of its messages have such headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardmq.shardd.wire import codec

EXCHANGE: Final = "x-dead-letter-exchange"
ROUTING_KEY: Final = "x-dead-letter-routing-key"
BCC: Final = "BCC"
NAME_BYTES_MAX = 255


def exchange_of(headers: Mapping[str, Any]) -> str | None:
    """Return the exchange that the message goes to when it dies, or None."""
    return _name_in(headers, EXCHANGE)


def key_of(headers: Mapping[str, Any]) -> str | None:
    """Return the routing key that the message has when it dies, or None."""
    return _name_in(headers, ROUTING_KEY)


def _name_in(headers: Mapping[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) and len(value.encode()) <= NAME_BYTES_MAX else None


def marks_of(headers: Mapping[str, Any], *, keeps_bcc: bool) -> int:
    """Return the marks of the record of a message; `keeps_bcc`: the stored headers have BCC."""
    own = 0 if exchange_of(headers) is None else codec.OWN_LETTERS
    return own | (codec.HAS_BCC if keeps_bcc and BCC in headers else 0)
