"""A supervisor over fake children: python -m tests.supervisor.fake_broker JOURNAL [flags]."""

from __future__ import annotations

import sys

from shardmq.supervisor.__main__ import main
from shardmq.supervisor.config import Settings
from shardmq.supervisor.plan import ChildPlan, Listening, children

JOURNAL = sys.argv[1]


def plans(
    settings: Settings, cores: int, runtime_dir: str, boot: str, at: Listening
) -> list[ChildPlan]:
    return [fake(plan) for plan in children(settings, cores, runtime_dir, boot, at)]


def fake(plan: ChildPlan) -> ChildPlan:
    section = {"name": plan.name, "journal": JOURNAL, "does": "well"}
    return ChildPlan(plan.kind, plan.index, "tests.supervisor.fake_child", section, plan.fds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], plans))
