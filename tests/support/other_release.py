"""A node of a cluster whose release understands other versions than this one.

`python -m tests.support.other_release` takes the flags of `python -m shardmq.supervisor`. VARIABLE
has the ranges of versions as JSON, by kind, such as {"wire": [2, 3]}. They must contain the present
versions, which its processes go on to speak with each other, or be refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys

from shardmq.cluster import versions

VARIABLE = "SHARDMQ_TEST_VERSIONS"
MODULES = {
    "shard": "shardmq.shardd",
    "front-door": "shardmq.broker.front_door",
    "controller": "shardmq.broker.controller",
}


def main() -> None:
    # The modules that read the ranges are imported behind this.
    for kind, found in json.loads(os.environ[VARIABLE]).items():
        setattr(versions, kind.upper(), versions.Range(*found))
    if "--config" not in sys.argv or not sys.argv[-1].startswith(("fd:", "{")):
        _supervise()
    given = sys.argv[-1]
    if given.startswith("fd:"):
        given = os.pread(int(given.removeprefix("fd:")), 1 << 20, 0).decode()
    section = json.loads(given)
    kind = "shard" if "shard" in section else "front-door" if "door" in section else "controller"
    runpy.run_module(MODULES[kind], run_name="__main__", alter_sys=True)


def _supervise() -> None:
    from typing import Any

    from shardmq.supervisor.__main__ import main as supervisor_main
    from shardmq.supervisor.plan import ChildPlan, children

    def plan(*about: Any) -> list[ChildPlan]:
        return [
            dataclasses.replace(each, module=__spec__.name)
            if each.module in MODULES.values()
            else each
            for each in children(*about)
        ]

    sys.exit(supervisor_main(planner=plan))


if __name__ == "__main__":
    main()
