"""The rule by which an exchange or queue drops messages that come a second time.

An exchange or queue with the argument `x-message-deduplication` true lets the first message of each
id pass and drops the others, which are confirmed all the same. The id is the header
`x-deduplication-header`, or the header that the argument of this name says; a message without an id
passes. The last `x-cache-size` ids are remembered, each for `x-cache-ttl` ms (a header of that name
in the message wins). Shards remember them in memory (shardd/dedup_ids.py). A message whose first
copy was not stored after all is forgotten, so that it can be published again.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from shardmq.broker.model.values import DEDUPLICATION_CACHE_MAX

WANTED: Final = "x-message-deduplication"
HEADER: Final = "x-deduplication-header"
SIZE: Final = "x-cache-size"
TTL: Final = "x-cache-ttl"
SIZE_DEFAULT = 128
# A digest stands for a longer id.
ID_CHARS_MAX = 64

# The name of the value's type, and the value.
Id = tuple[str, str | bytes]


class DedupRule(NamedTuple):
    """The header that holds an id, how many ids are remembered and for how long."""

    header: str
    size: int
    ttl_ms: int | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> DedupRule | None:
        """Return the rule that the arguments ask for, None if duplicates are taken.

        A value of the wrong type counts as not given.
        """
        if arguments.get(WANTED) is not True:
            return None
        header, size, ttl_ms = arguments.get(HEADER), arguments.get(SIZE), arguments.get(TTL)
        return cls(
            header if isinstance(header, str) and header else HEADER,
            min(size, DEDUPLICATION_CACHE_MAX) if type(size) is int and size > 0 else SIZE_DEFAULT,
            ttl_ms if type(ttl_ms) is int and ttl_ms > 0 else None,
        )

    def id_of(self, headers: Mapping[str, Any]) -> Id | None:
        """Return the id in these headers, None without one. 1 and "1" are two ids."""
        value = headers.get(self.header)
        if value is None:
            return None
        text = value if isinstance(value, str) else repr(value)
        short = (
            text
            if len(text) <= ID_CHARS_MAX
            else blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
        )
        return type(value).__name__, short

    def ttl_of(self, headers: Mapping[str, Any]) -> int | None:
        """Return for how many ms the id of such a message is remembered, None for ever."""
        own = headers.get(TTL)
        return own if type(own) is int and own > 0 else self.ttl_ms
