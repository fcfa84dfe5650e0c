"""A cluster with copies keeps its promises through some rounds of faults, with one ledger over all.

`make torture` plays many more rounds, of all kinds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.cluster_faults import Cluster
from tests.support.cluster_rounds import ClusterRounds, started

pytestmark = [pytest.mark.broker, pytest.mark.crash, pytest.mark.timeout(600)]

REPLICAS: Final = 3
# A node that is cut off from all others and from etcd, for longer than its lease; then a connection
# of which one end hears nothing. At the end a node dies, and all that was confirmed is delivered
# without it.
PLAN: Final = ("isolate", "cut one way")
WITHOUT_NETWORK: Final = ("stop node", "kill node")
LASTS_S: Final = (5.0,)
BETWEEN_S: Final = (0.5, 1.0)
# Python runs a module of this name at each start, if it finds one.
PATCH_NAME: Final = "sitecustomize.py"
CANARY_QUIET_S: Final = 15.0  # what is missing there never comes
CANARY_LASTS_S: Final = (8.0,)
# Longer than an ack may need to be on disk.
CANARY_BETWEEN_S: Final = (14.0,)


class Canary(NamedTuple):
    """A way to break nodes on purpose, and the faults that show it."""

    name: str
    patch: str
    plan: tuple[str, ...]
    harms_hosts: bool = False


CANARIES: Final = (
    Canary(
        "confirms before its followers have synced",
        """
from shardmq.cluster.rules import Leader

Leader._numbers = lambda self, nodes: ()
""",
        ("isolate", "cut one way"),
    ),
    Canary(
        "leaves members out without etcd",
        """
from shardmq.cluster.rules import Leader

def members(self):
    proposed = self._possible[-1] if self._possible else self.record
    return set(proposed.in_sync) - {self.node}

Leader.members = members
Leader.are_enough = lambda self, without=0: True
""",
        ("isolate", "isolate", "isolate"),
    ),
    Canary(
        "ships no acks",
        """
from shardmq.cluster.operations import Kind
from shardmq.cluster.replicated_files import ReplicatedFiles

append = ReplicatedFiles._append

def append_others(self, operation):
    is_of_acks = operation.kind is Kind.WRITE and "acks" in operation.path
    return 0 if is_of_acks else append(self, operation)

ReplicatedFiles._append = append_others
""",
        ("kill node", "kill node", "kill node"),
    ),
    Canary(
        "syncs nothing",
        """
import os

os.fdatasync = lambda handle: None
""",
        ("cut power",),
        harms_hosts=True,
    ),
)


def play(cluster: Cluster, seed: int) -> dict[str, int]:
    plan = WITHOUT_NETWORK if cluster.network.why_whole else PLAN
    rounds = ClusterRounds(
        cluster,
        seed,
        has_copies=True,
        plan=plan,
        lasts_s=LASTS_S,
        between_s=BETWEEN_S,
    )
    return rounds.run(len(plan))


def test_a_cluster_keeps_its_promises_through_some_rounds_of_faults(
    tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str
) -> None:
    with started(tmp_path, harms_hosts=False, replicas=REPLICAS) as cluster:
        counts = play(cluster, request.config.option.seed)
        print(counts)
    assert counts["confirmed"] > 100 and counts["deaths"] > len(PLAN)


@pytest.mark.torture
@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.name.replace(" ", "_"))
def test_a_cluster_that_is_broken_on_purpose_is_caught(
    canary: Canary, tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str
) -> None:
    """The ledger sees lost messages, or acknowledged ones that come again, whichever is first."""
    (tmp_path / PATCH_NAME).write_text(canary.patch)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    broken = started(
        tmp_path,
        harms_hosts=canary.harms_hosts,
        replicas=REPLICAS,
        environment={"PYTHONPATH": path},
    )
    with pytest.raises(AssertionError, match="seed [0-9]+, round") as caught, broken as cluster:
        ClusterRounds(
            cluster,
            request.config.option.seed,
            has_copies=True,
            plan=canary.plan,
            lasts_s=CANARY_LASTS_S,
            between_s=CANARY_BETWEEN_S,
            quiet_s=CANARY_QUIET_S,
        ).run(len(canary.plan))
    print(str(caught.value).splitlines()[1])
