"""What a message says itself of what becomes of it when it dies.

The header `x-dead-letter-exchange` names the exchange it goes to then, also where its queue has none or another;
`x-dead-letter-routing-key` the key it goes by, whatever the queue says. Values that are no strings, or longer than
a name may be, say nothing. The
copy at the exchange has these headers no more. Keys in a header `BCC` count for the dead letter as they did for the
message, and nobody sees them: while it lies in a queue it keeps that header, which is taken off when it is handed
out. Where some of a record's messages have the one or the other its queues are told so by its marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardmq.shardd.wire import packer

EXCHANGE: Final = "x-dead-letter-exchange"
ROUTING_KEY: Final = "x-dead-letter-routing-key"
BCC: Final = "BCC"
NAME_BYTES_MAX = 255


def exchange_of(headers: Mapping[str, Any]) -> str | None:
    return _name_in(headers, EXCHANGE)


def key_of(headers: Mapping[str, Any]) -> str | None:
    return _name_in(headers, ROUTING_KEY)


def _name_in(headers: Mapping[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) and len(value.encode()) <= NAME_BYTES_MAX else None


def marks_of(headers: Mapping[str, Any], *, keeps_bcc: bool) -> int:
    """Of the record of a message with these headers. `keeps_bcc`: BCC is among what is stored."""
    own = 0 if exchange_of(headers) is None else packer.OWN_LETTERS
    return own | (packer.HAS_BCC if keeps_bcc and BCC in headers else 0)
