"""Queues that belong to an exchange, which keeps messages there: nobody else's to see or to name. Pure.

They are made with the exchange, last as long as it does, and go with it; no exchange leads to them, no policy is about
them, no limit counts them, they are in no listing and no export.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

DELAYED: Final = "amq.delayed."  # what is not due (delaying.py)
PERSISTENT: Final = "amq.persistent."  # what bindings to come may have (keeping.py)
PREFIXES: Final = (DELAYED, PERSISTENT)
NAME_BYTES_MAX = 255


def queue_name(prefix: str, exchange: str) -> str:
    name = prefix + exchange
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return prefix + blake2b(exchange.encode(), digest_size=20).hexdigest()


def is_of_exchange(queue: str) -> bool:
    return queue.startswith(PREFIXES)
