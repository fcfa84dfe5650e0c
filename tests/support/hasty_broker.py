"""A broker that is broken on purpose.

Its shards confirm at once and write to disk what a second has gathered.

`python -m tests.support.hasty_broker FLAGS` takes the flags of `python -m shardmq.supervisor
FLAGS`. If the crash tests do not catch it, they are no crash tests.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time

from shardmq.combined.__main__ import main as combined_main
from shardmq.shardd import server, shard
from shardmq.shardd.__main__ import main as shard_main
from shardmq.shardd.peers import Outgoing
from shardmq.shardd.shard import Shard
from shardmq.shardd.stores import SyncJob
from shardmq.shardd.syncs import Syncs
from shardmq.supervisor.__main__ import main as supervisor_main
from shardmq.supervisor.config import Settings
from shardmq.supervisor.plan import ChildPlan, Listening, children


class HastyShard(Shard):
    def turn_end(self, now: int) -> list[Outgoing]:
        for peer in self.peers.values():
            for held in peer.held:
                held.sync = 0
        return super().turn_end(now)


class HastySyncs(Syncs):
    """The syncs of a shard that does not wait for them: there is one each second."""

    _next_s = 0.0

    @property
    def may_begin(self) -> bool:
        return super().may_begin and time.monotonic() >= self._next_s

    def begin(self) -> SyncJob | None:
        job = super().begin()
        self._next_s = time.monotonic() + 1
        return job


def plan(
    settings: Settings, cores: int, runtime_dir: str, boot: str, listening: Listening
) -> list[ChildPlan]:
    made = children(settings, cores, runtime_dir, boot, listening)
    return [
        dataclasses.replace(each, module=__spec__.name) if each.kind == "shard" else each
        for each in made
    ]


if __name__ == "__main__":
    if sys.argv[-1].startswith("fd:"):  # settings come by a descriptor: this is a child
        server.Shard = HastyShard  # type: ignore[attr-defined]
        shard.Syncs = HastySyncs  # type: ignore[attr-defined]
        section = json.loads(os.pread(int(sys.argv[-1].removeprefix("fd:")), 1 << 20, 0))
        sys.exit(combined_main() if "front_door" in section else shard_main())
    sys.exit(supervisor_main(planner=plan))
