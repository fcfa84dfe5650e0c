"""The model of what copies cost over a link holds for links that are made slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from clusters import SENT_BYTES, STORED, numbers, prefix_at
from copying import Copying, rate
from generator import Target, build_generator, measure

from tests.support import namespaces
from tests.support.etcd import RealEtcd
from tests.support.namespaces import Namespaces
from tests.support.real_broker import RealBroker
from tests.support.real_cluster import RealCluster, wait_for_nodes

pytestmark = [pytest.mark.torture, pytest.mark.broker, pytest.mark.timeout(600)]
HOSTS = ("node-0", "node-1")
ETCD = "etcd"
WINDOW = 1_000
SECONDS = 5
LOAD = (
    "--seconds", str(SECONDS), "--warmup", "1", "--body", "16", "--batch", "64K", "--no-consume",
    "--persistent", "--durable", "--confirms", str(WINDOW),
)  # fmt: skip
WITHOUT_LIMIT = 1e12
# The machine has other work, and a sender does not fill a link at once.
OFF_MAX = 2.0


@pytest.fixture
def network() -> Iterator[Namespaces]:
    if why := namespaces.why_impossible():
        pytest.skip(why)
    with Namespaces((*HOSTS, ETCD)) as made:
        yield made


def test_confirms_over_slow_links_come_as_fast_as_the_model_says(
    network: Namespaces, tmp_path: Path
) -> None:
    RealBroker.may_start = True
    build_generator()
    (tmp_path / ETCD).mkdir()
    with (
        RealEtcd(tmp_path / ETCD, host=network.address(ETCD), prefix=network.command(ETCD)) as etcd,
        RealCluster(tmp_path, etcd, nodes=2, replicas=2, network=network) as cluster,
    ):
        node = cluster.nodes[0]
        wait_for_nodes(node, len(HOSTS))
        cluster.wait_for_copies()
        target = Target(
            "node", node.url, options=(f"--prefix={prefix_at(0, of=len(HOSTS))}",),
            sent=partial(numbers, node.metrics, SENT_BYTES, STORED),
        )  # fmt: skip
        plain = measure(target, list(LOAD), SECONDS)
        measured = Copying(plain["published_per_s"], plain["wire_bytes"])
        for round_trip_ms, mbits_per_s in ((20, 0), (100, 0), (20, 10)):
            network.heal()
            for host in HOSTS:
                network.delay(round_trip_ms // 2, host)
            if mbits_per_s:
                network.limit(mbits_per_s, HOSTS[1])
            time.sleep(1)
            bits_per_s = mbits_per_s * 1e6 or WITHOUT_LIMIT
            said = rate(measured, WINDOW, round_trip_ms / 1000, bits_per_s)
            found = measure(target, list(LOAD), SECONDS)["published_per_s"]
            print(f"{round_trip_ms} ms, {mbits_per_s} Mbit/s: {found:,.0f}/s, model {said:,.0f}/s")
            assert said / OFF_MAX < found < said * OFF_MAX
