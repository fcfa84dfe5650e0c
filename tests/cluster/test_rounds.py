"""A cluster with copies keeps its promises through some rounds of faults, with one ledger over all.

`make torture` plays many more rounds, of all kinds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from tests.support.cluster_rounds import Cluster, ClusterRounds, started

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
CONFIRMS_ALONE: Final = """
from shardmq.cluster.rules import Leader

Leader._numbers = lambda self, nodes: ()
"""
CANARY_QUIET_S: Final = 15.0  # what is missing there never comes


def play(cluster: Cluster, seed: int, **more: float) -> dict[str, int]:
    plan = WITHOUT_NETWORK if cluster.network.why_whole else PLAN
    rounds = ClusterRounds(
        cluster,
        seed,
        has_copies=True,
        plan=plan,
        lasts_s=LASTS_S,
        between_s=BETWEEN_S,
        **more,
    )
    return rounds.run(len(plan))


def test_a_cluster_keeps_its_promises_through_some_rounds_of_faults(
    tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str
) -> None:
    with started(tmp_path, fills_disk=False, replicas=REPLICAS) as cluster:
        counts = play(cluster, request.config.option.seed)
        print(counts)
    assert counts["confirmed"] > 100 and counts["deaths"] > len(PLAN)


@pytest.mark.torture
def test_leaders_that_confirm_before_their_followers_are_caught(
    tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str
) -> None:
    """Messages or definitions that a node has confirmed alone are gone, whichever is seen first."""
    (tmp_path / PATCH_NAME).write_text(CONFIRMS_ALONE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    broken = started(
        tmp_path, fills_disk=False, replicas=REPLICAS, environment={"PYTHONPATH": path}
    )
    with pytest.raises(AssertionError, match="seed [0-9]+, round"), broken as cluster:
        play(cluster, request.config.option.seed, quiet_s=CANARY_QUIET_S)
