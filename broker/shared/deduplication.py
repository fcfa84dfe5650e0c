"""Messages that come a second time to an exchange or queue that wants each once: told apart by a header, remembered in
memory.

One with the argument `x-message-deduplication` true lets the first message of each id pass and drops the
others, which are confirmed all the same. The id is the header `x-deduplication-header`, or the one that the argument
of this name says; a message without it passes. The last `x-cache-size` ids are remembered, each for `x-cache-ttl` ms
(the message's own header of that name wins), as long as the process lives that remembers: the front door, if there is
one (`Seen`), or a shard, if there are several (once.py). A message whose first copy was not stored after all is
forgotten, so that it can be published again. Knows no clock and no socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from shardmq.broker.model.values import DEDUPLICATION_CACHE_MAX

WANTED: Final = "x-message-deduplication"
HEADER: Final = "x-deduplication-header"
SIZE: Final = "x-cache-size"
TTL: Final = "x-cache-ttl"
SIZE_DEFAULT = 128
# Longer ids are remembered by a digest of them.
ID_CHARS_MAX = 64

Id = tuple[str, str | bytes]


class Rule(NamedTuple):
    header: str
    size: int
    ttl_ms: int | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Rule | None:
        """None: each message may come as often as it is published. What is no number counts as not given."""
        if arguments.get(WANTED) is not True:
            return None
        header, size, ttl_ms = arguments.get(HEADER), arguments.get(SIZE), arguments.get(TTL)
        return cls(
            header if isinstance(header, str) and header else HEADER,
            min(size, DEDUPLICATION_CACHE_MAX) if type(size) is int and size > 0 else SIZE_DEFAULT,
            ttl_ms if type(ttl_ms) is int and ttl_ms > 0 else None,
        )

    def id_of(self, headers: Mapping[str, Any]) -> Id | None:
        """1 and "1" are two ids."""
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
        own = headers.get(TTL)
        return own if type(own) is int and own > 0 else self.ttl_ms


class Follower(Protocol):
    """Waits for what becomes of the first copy."""

    def confirmed(self) -> None: ...
    def lost(self) -> None: ...


class Copy:
    """The first of its id, on its way to `shards` shards; the others are answered as it is. It waits for batches as
    those do who want a confirm."""

    __slots__ = ("_channel", "_connection", "_failed", "_followers", "_seq", "shards")
    in_sequence = False  # the confirms of the channel answer for that

    def __init__(self) -> None:
        self._connection = self._channel = self._seq = 0
        self._failed = False
        self._followers: list[Follower] = []
        self.shards = 1  # and the caller, while it packs

    def published(self, connection: int, channel: int, seq: int) -> None:
        """`seq`: its confirm number, 0 without one."""
        self._connection, self._channel, self._seq = connection, channel, seq

    def follow(self, follower: Follower) -> None:
        """Somebody published it again: told what becomes of it."""
        if self.shards:
            self._followers.append(follower)
        elif self._failed:
            follower.lost()
        else:
            follower.confirmed()

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        if (connection, channel) == (self._connection, self._channel) and (
            first <= self._seq <= last or not first
        ):
            self._failed = True

    def lost(self) -> None:
        self._failed = True
        self.confirmed()

    def confirmed(self) -> None:
        self.shards -= 1
        if self.shards:
            return
        self._ended(stored=not self._failed)
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.lost() if self._failed else follower.confirmed()

    def _ended(self, *, stored: bool) -> None:
        """Before the followers are told."""


class _First(Copy):
    """As its front door remembers it."""

    __slots__ = ("_id", "_seen", "expires_at")

    def __init__(self, seen: Seen, id: Id, expires_at: int | None) -> None:
        super().__init__()
        self._seen = seen
        self._id = id
        self.expires_at = expires_at

    def _ended(self, *, stored: bool) -> None:
        if not stored:
            self._seen.forget(self._id, self)


class Seen:
    """The ids of one exchange or queue, oldest first."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.duplicates = 0
        self._copies: OrderedDict[Id, _First] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def look(self, headers: Mapping[str, Any], now: int) -> tuple[Copy | None, bool]:
        """The copy that counts for a message with these headers (None: it has no id), and whether it is another one."""
        id = self.rule.id_of(headers)
        if id is None:
            return None, False
        known = self._copies.get(id)
        if known is not None and (known.expires_at is None or now < known.expires_at):
            self.duplicates += 1
            return known, True
        ttl_ms = self.rule.ttl_of(headers)
        self._copies.pop(id, None)
        copy = self._copies[id] = _First(self, id, None if ttl_ms is None else now + ttl_ms)
        if len(self._copies) > self.rule.size:
            self._copies.popitem(last=False)
        return copy, False

    def forget(self, id: Id, copy: Copy) -> None:
        if self._copies.get(id) is copy:
            del self._copies[id]
