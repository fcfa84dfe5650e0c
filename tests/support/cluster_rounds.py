"""Rounds of faults over the nodes of a cluster under one load, with one ledger over all of them.

What is done, where and for how long comes from the seed; what the processes were doing does not.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support import lossy_disk, moved_clock
from tests.support.cluster_faults import BACK_S, ETCD, KINDS, SETTLING_S, Cluster, Fault, Faults
from tests.support.cluster_load import (
    DEAD,
    DYING,
    FANOUT,
    SHARED,
    SPREAD,
    STREAM,
    Definer,
    Rejecter,
    SpreadConsumer,
    SpreadPublisher,
    StreamReader,
    Tuner,
    ask,
    declare_all,
    queue_names,
)
from tests.support.etcd import RealEtcd
from tests.support.kill_load import Consumer, ConsumerClient, Lost, Publisher, Worker
from tests.support.kill_rounds import QUIET_S, SETTINGS
from tests.support.ledger import Ledger
from tests.support.lossy_disk import LossyDisk
from tests.support.moved_clock import MovedClock
from tests.support.namespaces import Loopback, Namespaces, Network, why_impossible
from tests.support.real_broker import Address, RealBroker, wait_until
from tests.support.real_cluster import RealCluster, node_name, wait_for_nodes

NODES: Final = 3
DISK_MIB: Final = 192
# A full disk is told some seconds later, and small segments leave room to tell it.
DISK_SETTINGS: Final = f"""
[shards]
segment_bytes = {4 << 20}
disk_free_min_bytes = {24 << 20}
"""
REST_EACH: Final = 10
REST_S: Final = 0.3  # of each publisher now and then: the faults are to be met, not the load
TWO_AT_ONCE: Final = 0.3  # of the rounds, where the second draw touches other things
LASTS_S: Final = (0.5, 2.0, 5.0, 8.0, 12.0, 20.0)
BETWEEN_S: Final = (0.3, 0.6, 1.0, 2.0, 4.0)


@contextlib.contextmanager
def started(
    directory: Path,
    harms_network: bool = True,
    harms_hosts: bool = True,
    replicas: int = 1,
    etcd_members: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Start three nodes of one shard each.

    A line says what cannot be harmed here.

    Args:
        directory: Has the data directories.
        harms_network: Whether the nodes are to be in namespaces.
        harms_hosts: Whether each node is to have a disk and a clock of its own.
        replicas: On how many nodes the messages of a shard are.
        etcd_members: The number of the members of etcd.
        environment: Variables that each node has besides.
    """
    names = [node_name(index) for index in range(NODES)]
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS + DISK_SETTINGS)
    with contextlib.ExitStack() as stack:
        network: Network
        why = why_impossible() if harms_network else "not asked for"
        if why:
            print(f"{why}: nodes at 127.0.0.2 to .4, and no harm to the network")
            network = Loopback([*names, ETCD], why)
        else:
            network = stack.enter_context(Namespaces([*names, ETCD]))
        disks: dict[str, LossyDisk] = {}
        clocks: dict[str, MovedClock] = {}
        if harms_hosts and not (why := lossy_disk.why_impossible()):
            disks = {
                name: stack.enter_context(LossyDisk(directory / name, mib=DISK_MIB))
                for name in names
            }
        elif harms_hosts:
            print(why)
        if harms_hosts and not (why := moved_clock.why_impossible()):
            clocks = {name: MovedClock(directory, name) for name in names}
        elif harms_hosts:
            print(why)
        (directory / ETCD).mkdir()
        etcd = stack.enter_context(
            RealEtcd(
                directory / ETCD,
                members=etcd_members,
                host=network.address(ETCD),
                prefix=network.command(ETCD),
            )
        )
        nodes = stack.enter_context(
            RealCluster(
                directory,
                etcd,
                NODES,
                replicas=replicas,
                together=replicas > 1,
                environment=environment,
                by_node={name: clock.environment for name, clock in clocks.items()},
                network=network,
                more=("--config", str(settings)),
            )
        )
        wait_for_nodes(nodes.nodes[0], NODES)
        if replicas > 1:
            nodes.wait_for_copies()
        yield Cluster(nodes, etcd, network, disks, clocks)
        # Where one is away, the last syncs of others would wait for it.
        if all(node.process.poll() is None for node in nodes.nodes):
            for node in nodes.nodes:
                node.stop()


class Load:
    """All clients, and the queues they use."""

    def __init__(
        self, cluster: Cluster, ledger: Ledger, seed: str, quiet_s: float, has_copies: bool
    ) -> None:
        self.cluster, self.ledger, self.quiet_s = cluster, ledger, quiet_s
        nodes = cluster.nodes
        queues = queue_names(NODES)
        self.queues = (*queues, SHARED, DYING, DEAD)
        declare_all(nodes[0], queues)
        everywhere = ats = tuple(node.at for node in nodes)
        a, b, c = ((at, ledger, seed) for at in ats)
        publishers: list[Worker] = [
            Publisher("p-fanout", *a, FANOUT, "", (*queues, SHARED), window_max=50, rest_s=REST_S),
            SpreadPublisher("p-spread", *b, SPREAD, "", (SPREAD,), window_max=50, rest_s=REST_S),
            Publisher("p-stream", *c, "", STREAM, (STREAM,), window_max=50, rest_s=REST_S),
            Publisher("p-dying", *b, "", DYING, (DEAD,), window_max=50, rest_s=REST_S),
        ]
        if has_copies:  # at the leaders of their queues, which might confirm alone
            led = [each.leader for _, each in sorted(cluster.cluster.copies().items())]
            ats = tuple(cluster.cluster.named(leader).at for leader in led)
            publishers += [
                Publisher(f"p-{queue}", at, ledger, seed, "", queue, (queue,), window_max=50,
                          rest_s=REST_S)
                for at, queue in zip(ats, queues, strict=True)
            ]  # fmt: skip
        self.consumers: list[Consumer] = [
            Consumer("c-0", *b, queues[0]),
            Consumer("c-1", *b, queues[1]),
            Consumer("c-2", *a, queues[2], away_s=3.0),
            Consumer("c-shared-0", *a, SHARED, gives_back=0.1),
            Consumer("c-shared-1", *c, SHARED, away_s=2.0),
            SpreadConsumer("c-spread", *c, SPREAD),
            StreamReader("c-stream", *a, STREAM),
            Consumer("c-dead", *c, DEAD),
            Rejecter("c-dying", *a, DYING),
        ]
        ledger.may_fall(SHARED)
        ledger.may_repeat(DEAD)
        self.definers = [Definer(f"d-{at}", everywhere, ledger, seed) for at in range(2)]
        self.tuner = Tuner("tuner", nodes, ledger, seed)
        self.pausing: list[Worker] = [*publishers, *self.definers, self.tuner]
        self.workers: list[Worker] = [*self.consumers, *self.pausing]
        for worker in self.workers:
            worker.elsewhere = everywhere
            worker.start()

    def rest(self, lives: list[RealBroker]) -> None:
        """Stop publishing, wait until all messages are acknowledged, and check the result.

        lives: the nodes that are there; the others are away.
        """
        for worker in self.pausing:
            worker.pause()
        for consumer in self.consumers:
            consumer.hurry = True
        self._until(lambda: all(worker.idle.is_set() for worker in self.pausing), "answers")
        with contextlib.suppress(AssertionError):  # the check says what is missing
            self._until(lambda: not self.ledger.missing(), "all confirmed messages")
        self.ledger.check_all()
        at = lives[0].at
        self._until(lambda: not self._depths(at), "empty queues")
        self._check_definitions(lives)
        for consumer in self.consumers:
            consumer.hurry = False
        for worker in self.pausing:
            worker.resume()

    def _depths(self, at: Address) -> dict[str, int]:
        """Return the ready messages of the queues that are not empty.

        A node that has just come back may count as down for a moment.
        """
        client = ConsumerClient(at)
        try:
            depths = {queue: client.look(queue) for queue in self.queues}
        except Lost as lost:
            return {str(lost): 1}
        finally:
            client.close()
        return {queue: depth for queue, depth in depths.items() if depth}

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        arrived, since = 0, time.monotonic()
        while not happened():
            self.ledger.check()
            now = time.monotonic()
            if (arrived_now := self.ledger.deliveries) != arrived:
                arrived, since = arrived_now, now
            if now - since > self.quiet_s:
                raise AssertionError(f"waited {self.quiet_s:g} s for {what}: {self.state()}")
            time.sleep(0.05)

    def state(self) -> str:
        busy = [worker.name for worker in self.pausing if not worker.idle.is_set()]
        with contextlib.suppress(Lost, OSError):
            return f"not idle {busy}, not empty {self._depths(self.cluster.nodes[0].at)}"
        return f"not idle {busy}"

    def _check_definitions(self, lives: list[RealBroker]) -> None:
        """Check that all nodes have what was answered, and say the same."""
        there = {name for definer in self.definers for name in definer.there}
        gone = {name for definer in self.definers for name in definer.gone}
        listings = []
        for node in lives:
            names: set[str] = set()
            for kind in ("exchanges", "queues"):
                names |= {row["name"] for row in ask(node, f"{kind}?columns=name")}
            lost, risen = there - names, gone & names
            who = node.data_dir.name
            assert not lost, f"{who}: what was declared is not there: {sorted(lost)[:5]}"
            assert not risen, f"{who}: what was deleted is there: {sorted(risen)[:5]}"
            listings.append(names)
            self.tuner.check(node)
        assert all(names == listings[0] for names in listings), "nodes list different things"

    def stop(self) -> None:
        for worker in self.workers:
            worker.going = False
        for worker in self.workers:
            worker.stop()


class ClusterRounds:
    """Rounds of faults.

    Args:
        cluster: A cluster that `started` has started.
        seed: The seed.
        kinds: Names of KINDS, with weights.
        quiet_s: What has not come for so long never comes.
        has_copies: Whether messages have copies on other nodes. Then all that was confirmed is
            delivered while a node is away, too.
        plan: The kinds of the first rounds.
        lasts_s: How long a fault lasts at most, one of these.
        between_s: How long it is until the next one at most, one of these.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        kinds: Mapping[str, int] = KINDS,
        quiet_s: float = QUIET_S,
        has_copies: bool = False,
        plan: Sequence[str] = (),
        lasts_s: Sequence[float] = LASTS_S,
        between_s: Sequence[float] = BETWEEN_S,
    ) -> None:
        self.cluster, self.seed, self.has_copies = cluster, seed, has_copies
        self.plan, self.between_s = plan, between_s
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.faults = Faults(cluster, self.ledger, self.random, kinds, has_copies, lasts_s)
        self.done: list[str] = []
        self.load = Load(cluster, self.ledger, str(seed), quiet_s, has_copies)

    def run(self, rounds: int, rest_each: int = REST_EACH) -> dict[str, int]:
        """Run the rounds; return the counts of the ledger.

        With copies, one node is away when that is over.

        An AssertionError has all that explains it.
        """
        try:
            for number in range(1, rounds + 1):
                self._wait(self.random.choice(self.between_s))
                faults = self._drawn(number)
                self._say(" and ".join(fault.said for fault in faults))
                self.faults.carry_out(faults)
                self.ledger.check()
                if number % rest_each == 0 or number == rounds:
                    self._rest(is_last=number == rounds)
            changes = sum(definer.changes for definer in self.load.definers)
            return {**self.ledger.counts(), "changes": changes, "values": self.load.tuner.value}
        except AssertionError as error:
            done = "\n".join(self.done[-20:])
            told = f"seed {self.seed}, round {len(self.done)}\n{error}\n\n{self.ledger.counts()}"
            raise AssertionError(f"{told}\n{done}\n\n{self.cluster.log_tails()}") from error
        finally:
            self.load.stop()

    def _drawn(self, number: int) -> list[Fault]:
        if number <= len(self.plan):
            return [self.faults.draw(self.plan[number - 1])]
        fault = self.faults.draw()
        beside = self.faults.draw_beside(fault) if self.random.random() < TWO_AT_ONCE else None
        return [fault] if beside is None else [fault, beside]

    def _rest(self, is_last: bool) -> None:
        nodes = list(self.cluster.nodes)
        if not self.has_copies:
            self.load.rest(nodes)
            return
        lost = self.random.choice(nodes)
        # After two cuts a node may be the only one that has all, and then nobody takes over.
        wait_until(lambda: self.cluster.cluster.can_lose(lost), "another node in sync", BACK_S)
        self._say(f"rest without {lost.data_dir.name}")
        self.ledger.unrest_begins(time.monotonic())
        self.faults.kill_node(lost)
        self.load.rest(self.cluster.cluster.others(lost))
        if not is_last:
            lost.restart()
            self.ledger.unrest_ends(time.monotonic() + SETTLING_S)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds * self.random.uniform(0.5, 1.0))

    def _say(self, what: str) -> None:
        self.done.append(f"{time.strftime('%H:%M:%S')} {what}")
        print(self.done[-1], self.ledger.counts(), flush=True)
