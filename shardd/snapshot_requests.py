"""Keep the request for a snapshot until it is answered; there is one at a time.

This file knows no socket and no clock. snapshotting.py carries the request out.
"""

from __future__ import annotations

from shardmq.shardd.peers import Peer
from shardmq.shardd.wire import messages as m


class SnapshotRequests:
    """The request of a shard for a snapshot: who asks, and for what; None if nobody does."""

    def __init__(self) -> None:
        self.asked: tuple[Peer, m.Snapshot] | None = None

    def on_snapshot(self, peer: Peer, asked: m.Snapshot, now: int) -> None:
        if self.asked is not None and self.asked[1].directory == asked.directory:
            self.asked = peer, asked  # asked again by a connection that was cut off meanwhile
        elif self.asked is not None:
            peer.tell(m.Refused(asked.request, 406, "another snapshot is being made"))
        else:
            self.asked = peer, asked
