"""Say whether messages that are plain go the short ways of a shard and of a front door.

`SHARDMQ_FASTPATH=0` in the environment of a process switches its short way off: to compare both
ways, and to rule the short way out where something is wrong.
"""

from __future__ import annotations

import os


def are_on() -> bool:
    return os.environ.get("SHARDMQ_FASTPATH") != "0"
