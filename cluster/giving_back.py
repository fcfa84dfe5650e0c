"""The rule by which leads of shards go back to the homes of the shards, without I/O.

After a node was away, other nodes lead its shards. When its copies are in sync again, they give the
leads back: each leader by itself, and one after the other in the whole cluster. For that, each
leader looks at the records of all shards. It begins when its shard has waited long enough, and no
lead has changed for EACH_S; the shards behind the first one wait for longer, in the order of their
numbers. So a hand-over that does not succeed holds up no other one.

A home may lose the lead again and again, because its disk stalls only while it leads, for example.
So a home that loses the lead within CALM_S waits for twice as long as the last time, up to
WAIT_S_MAX. Each node counts such leads by itself.

Two leaders that see the records at different moments may hand over at once. This does no harm: the
records decide.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

EACH_S: Final = 3.0
CALM_S: Final = 600.0  # a home that has led for so long waits no longer than usual the next time
WAIT_S_MAX: Final = 3600.0  # for a home that loses the lead each time; more if `after_s` is more
DOUBLINGS_MAX: Final = 20  # of `after_s`


class Led(NamedTuple):
    """A shard: the names of its home, its leader and the nodes in its in-sync set.

    home: "" if the home is not alive.
    """

    home: str
    leader: str
    in_sync: Collection[str]


class GivingBack:
    """The rule for one shard, at the node that leads it.

    after_s: a home that is in sync gets the lead back after so many seconds; 0: never.
    lost: how many leads of the home in a row have ended within CALM_S. A new process begins with
        what the one before has counted, and a new home with none.
    """

    def __init__(self, node: str, shard: int, after_s: float, lost: int = 0) -> None:
        self.lost = lost
        self._node = node
        self._shard = shard
        self._after_s = after_s
        self._leaders: dict[int, str] | None = None  # None: nothing was seen yet
        self._changed_at = 0.0
        self._ready_since: dict[int, float] = {}  # of shards whose home could lead
        self._homes: dict[int, str] = {}
        self._home = ""  # of this shard, also while it is not alive
        self._home_leads_since: float | None = None

    def look(self, shards: Mapping[int, Led], now: float) -> None:
        """Take what is known of all shards with copies."""
        leaders = {shard: led.leader for shard, led in shards.items()}
        if leaders != self._leaders:
            self._leaders, self._changed_at = leaders, now
        self._homes = {shard: led.home for shard, led in shards.items()}
        if (own := shards.get(self._shard)) is not None:
            self._look_at_home(own, now)
        ready = [
            shard
            for shard, led in shards.items()
            if led.home and led.home != led.leader and led.home in led.in_sync
        ]
        self._ready_since = {shard: self._ready_since.get(shard, now) for shard in ready}

    def heir(self, now: float) -> str:
        """Return the node that gets the lead of this shard now; "" if nobody does."""
        waited = sorted(
            shard
            for shard, since in self._ready_since.items()
            if now - since >= (self.wait_s if shard == self._shard else self._after_s)
        )
        if not self._after_s or self._shard not in waited or self._leaders is None:
            return ""
        if self._leaders[self._shard] != self._node:
            return ""
        turn = waited.index(self._shard) + 1
        return self._homes[self._shard] if now - self._changed_at >= turn * EACH_S else ""

    @property
    def wait_s(self) -> float:
        """Return for how long the home must have been in sync to get the lead of this shard."""
        wait_s: float = self._after_s * 2 ** min(self.lost, DOUBLINGS_MAX)
        return min(wait_s, max(self._after_s, WAIT_S_MAX))

    def _look_at_home(self, own: Led, now: float) -> None:
        """Count how many leads of the home in a row were short."""
        if own.home and self._home and own.home != self._home:
            self.lost = 0
            # If the new home leads already, nobody has seen when it began: it has led for long.
            self._home_leads_since = -math.inf if own.leader == own.home else None
        self._home = own.home or self._home
        if own.leader == self._home:
            if self._home_leads_since is None:
                self._home_leads_since = now
        elif self._home_leads_since is not None:
            is_short = now - self._home_leads_since < CALM_S
            self.lost = self.lost + 1 if is_short else 0
            self._home_leads_since = None
