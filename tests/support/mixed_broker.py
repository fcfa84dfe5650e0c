"""A broker whose processes may speak another wire version.

An upgrade that did not restart all of them leaves a broker like this.
`python -m tests.support.mixed_broker` takes the flags of `python -m shardmq.supervisor`. Processes
of the kind that the file at VARIABLE names, started while it does, speak the next version.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path

from shardmq.cluster import versions
from shardmq.shardd.wire import messages
from shardmq.supervisor.plan import ChildPlan

VARIABLE = "SHARDMQ_TEST_NEXT_VERSION"
MODULES = {
    "shard": "shardmq.shardd",
    "front-door": "shardmq.broker.front_door",
    "controller": "shardmq.broker.controller",
}


def main() -> None:
    # settings come by a descriptor: else this is the supervisor
    if not sys.argv[-1].startswith("fd:"):
        _supervise()
    section = json.loads(os.pread(int(sys.argv[-1].removeprefix("fd:")), 1 << 20, 0))
    kind = "shard" if "shard" in section else "front-door" if "door" in section else "controller"
    if kind in Path(os.environ[VARIABLE]).read_text().split():
        messages.WIRE_VERSION += 1  # type: ignore[misc]
        only = versions.Range(messages.WIRE_VERSION, messages.WIRE_VERSION)
        versions.WIRE = only  # type: ignore[misc]
    runpy.run_module(MODULES[kind], run_name="__main__", alter_sys=True)


def _supervise() -> None:
    from shardmq.supervisor.__main__ import main as supervisor_main
    from shardmq.supervisor.config import Settings
    from shardmq.supervisor.plan import Listening, children

    def plan(
        settings: Settings, cores: int, runtime_dir: str, boot: str, listening: Listening
    ) -> list[ChildPlan]:
        made = children(settings, cores, runtime_dir, boot, listening)
        return [
            dataclasses.replace(each, module=__spec__.name)
            if each.module in MODULES.values()
            else each
            for each in made
        ]

    sys.exit(supervisor_main(planner=plan))


if __name__ == "__main__":
    main()
