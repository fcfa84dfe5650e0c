"""Queues that exchanges keep messages in. Clients can neither see nor name them. Pure.

Such a queue is made with its exchange and goes with it. No binding leads to it, no policy applies
to it, no limit counts it, and it is in no listing and no export.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

DELAYED: Final = "amq.delayed."  # messages that are not due (delaying.py)
PERSISTENT: Final = "amq.persistent."  # messages for bindings to come (keeping.py)
PREFIXES: Final = (DELAYED, PERSISTENT)
NAME_BYTES_MAX = 255


def queue_name(prefix: str, exchange: str) -> str:
    name = prefix + exchange
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return prefix + blake2b(exchange.encode(), digest_size=20).hexdigest()


def is_of_exchange(queue: str) -> bool:
    return queue.startswith(PREFIXES)
