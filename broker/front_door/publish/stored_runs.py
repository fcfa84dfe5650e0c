"""Messages that no client publishes, ready for the batch of a shard: dead letters, copies, traces.

Who decides about such messages returns runs of them. `pack` puts the runs into the batches.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.shardd.wire.envelope import Buffer

NO_TTL = 0xFFFFFFFF
PERSISTENT = 2  # the delivery mode


# Neighbours of one shard that are stored alike, as the arguments of Packer.add_stored: shard, queue
# ids, stored messages back to back, the connection and channel that stand for the run when a shard
# refuses some of it, the confirm number of the first message (0 without any), time in ms, ttl in
# ms, priority, whether they are persistent, whether they wait for the disk, how many they are,
# whether they are in sequence, marks. A plain tuple, because there may be a run for each message.
StoredRun = tuple[int, list[int], Buffer, int, int, int, int, int, int, bool, bool, int, bool, int]


def pack(links: ShardLinks, vhost: str, runs: Iterable[StoredRun]) -> int:
    """Pack runs of a virtual host. Return a bit mask of the shards that got some."""
    links.use_vhost(vhost)
    for run in runs:
        links.packer.add_stored(*run)
    return links.packer.take_touched()
