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

from shardmq.combined.__main__ import main as combined_main
from shardmq.shardd import server
from shardmq.shardd.__main__ import main as shard_main
from shardmq.shardd.peers import Peer
from shardmq.shardd.shard import Shard
from shardmq.supervisor.__main__ import main as supervisor_main
from shardmq.supervisor.config import Settings
from shardmq.supervisor.plan import ChildPlan, Listening, children


class HastyShard(Shard):
    def _on_publish(self, peer: Peer, message: bytes, now: int) -> None:
        super()._on_publish(peer, message, now)
        for held in peer.held:
            held.sync = 0
        self.syncs.wanted = False


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
        server.Shard = HastyShard  # type: ignore[misc]
        section = json.loads(os.pread(int(sys.argv[-1].removeprefix("fd:")), 1 << 20, 0))
        sys.exit(combined_main() if "front_door" in section else shard_main())
    sys.exit(supervisor_main(planner=plan))
