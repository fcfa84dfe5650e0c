"""Deduplicate messages of exchanges and queues that take each message once, over all front doors.

Where there are several front doors, a front door asks before it publishes. One shard remembers the
ids of one exchange or queue, in memory, as long as its process lives. The first message with an id
is *pending* until its front door says whether the message was stored. Later messages with that id
follow the first, and their front doors are told what became of it. A first message that was not
stored is forgotten.

This file knows no clock, no AMQP, and no meaning of an id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from shardmq.shardd.peers import Peer
from shardmq.shardd.wire import messages as m

Thing = int | str  # id of a queue, or vhost/name of an exchange


class _Pending:
    """The first message with its id, on its way to its queues."""

    __slots__ = ("expires_at", "followers", "id", "thing")

    def __init__(self, thing: Thing, id: bytes, expires_at: int) -> None:
        self.thing = thing
        self.id = id
        self.expires_at = expires_at
        self.followers: list[tuple[int, int]] = []  # peer, number


class DedupIds:
    """The ids that one shard remembers.

    Times are in ms, and 0 is never. Each question says how many ids of an exchange or queue are
    remembered; the oldest are forgotten first.
    """

    def __init__(self) -> None:
        # By id of a message. An int means that the message is stored, and until when its id is
        # known.
        self._seen: dict[Thing, OrderedDict[bytes, _Pending | int]] = {}
        self._pending: dict[tuple[int, int], _Pending] = {}  # by peer and number

    def count(self, thing: Thing) -> int:
        return len(self._seen.get(thing, ()))

    def ask(self, peer: int, question: m.DedupAsk, now: int) -> bytes:
        """Return m.FIRST, m.STORED_BEFORE or m.FOLLOWS for each of the ids, in their order."""
        verdicts = bytearray()
        for number, (at, id, ttl_ms) in enumerate(question.ids, question.first):
            thing, size = question.things[at]
            seen = self._seen.setdefault(thing, OrderedDict())
            verdicts.append(
                self._verdict(seen, thing, id, (peer, number), now + ttl_ms if ttl_ms else 0, now)
            )
            while len(seen) > size:
                seen.popitem(last=False)
        return bytes(verdicts)

    def _verdict(
        self,
        seen: OrderedDict[bytes, _Pending | int],
        thing: Thing,
        id: bytes,
        who: tuple[int, int],
        expires_at: int,
        now: int,
    ) -> int:
        known = seen.get(id)
        if known is not None:
            until = known.expires_at if isinstance(known, _Pending) else known
            if not until or now < until:
                if isinstance(known, int):
                    return m.STORED_BEFORE
                known.followers.append(who)
                return m.FOLLOWS
            del seen[id]
        seen[id] = self._pending[who] = _Pending(thing, id, expires_at)
        return m.FIRST

    def became(self, peer: int, what: m.DedupOutcome, peers: Mapping[int, Peer]) -> None:
        """Take in from a front door what became of its first messages, and tell the followers."""
        followers: dict[int, tuple[list[int], list[int]]] = {}
        self._end(((peer, number) for number in what.stored), 0, followers)
        self._end(((peer, number) for number in what.lost), 1, followers)
        _tell(followers, peers)

    def peer_gone(self, peer: int, peers: Mapping[int, Peer]) -> None:
        """End the pending messages of a front door that is gone, as lost.

        Nobody knows what became of them. The front door follows no other message any more.
        """
        for pending in self._pending.values():
            pending.followers = [each for each in pending.followers if each[0] != peer]
        followers: dict[int, tuple[list[int], list[int]]] = {}
        self._end([who for who in self._pending if who[0] == peer], 1, followers)
        _tell(followers, peers)

    def _end(
        self,
        whose: Iterable[tuple[int, int]],
        is_lost: int,
        followers: dict[int, tuple[list[int], list[int]]],
    ) -> None:
        for who in whose:
            pending = self._pending.pop(who, None)
            if pending is None:  # asked in a former life of this shard
                continue
            seen = self._seen.get(pending.thing)
            if seen is not None and seen.get(pending.id) is pending:
                if is_lost:
                    del seen[pending.id]
                else:
                    seen[pending.id] = pending.expires_at
            for peer, number in pending.followers:
                followers.setdefault(peer, ([], []))[is_lost].append(number)

    def forget(self, thing: Thing) -> None:
        """Forget the ids of an exchange or queue that is deleted."""
        self._seen.pop(thing, None)


def _tell(followers: Mapping[int, tuple[list[int], list[int]]], peers: Mapping[int, Peer]) -> None:
    for number, (stored, lost) in followers.items():
        peer = peers.get(number)
        if peer is not None:
            peer.tell(m.DedupOutcome(stored, lost))
