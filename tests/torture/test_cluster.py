"""A cluster keeps its promises through many rounds of faults of nodes, etcd and the network.

One ledger covers all rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_rounds import ClusterRounds, started

pytestmark = [pytest.mark.torture, pytest.mark.timeout(4 * 3600), pytest.mark.broker]

ETCD_MEMBERS = 3


@pytest.mark.parametrize(
    "replicas", [pytest.param(1, id="without_copies"), pytest.param(3, id="with_copies")]
)
def test_every_promise_of_a_cluster_holds_through_rounds_of_faults(
    tmp_path: Path, request: pytest.FixtureRequest, etcd_program: str, replicas: int
) -> None:
    seed, rounds = request.config.option.seed, request.config.option.rounds
    print(f"to do the same: make torture ARGS='--seed {seed} --rounds {rounds} -k of_a_cluster'")
    with started(tmp_path, replicas=replicas, etcd_members=ETCD_MEMBERS) as cluster:
        print(ClusterRounds(cluster, seed, has_copies=replicas > 1).run(rounds))
