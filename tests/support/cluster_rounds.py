"""Rounds of faults over the nodes of a cluster under one load, with one ledger over all of them.

What is done, where and for how long comes from the seed; what the processes were doing does not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

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
from tests.support.namespaces import Loopback, Namespaces, Network, why_impossible
from tests.support.real_broker import Address, RealBroker, wait_until
from tests.support.real_cluster import RealCluster, node_name, wait_for_nodes
from tests.support.small_disk import small_disk, take_all_bytes

NODES: Final = 3
ETCD: Final = "etcd"
FULL: Final = node_name(NODES - 1)  # the node whose disk may be full
DISK_MIB: Final = 192
# A full disk is told some seconds later, and small segments leave room to tell it.
DISK_SETTINGS: Final = f"""
[shards]
segment_bytes = {4 << 20}
disk_free_min_bytes = {24 << 20}
"""
BACK_S: Final = 120.0
# A session whose ends hear nothing of each other ends after 10 s. A connection that was cut for
# some seconds may be silent for as long again, until TCP repeats what was lost.
SETTLING_S: Final = 25.0
REST_EACH: Final = 10
REST_S: Final = 0.3  # of each publisher now and then: the faults are to be met, not the load
# How often, of a hundred.
KINDS: Final = {
    "kill process": 20, "kill node": 14, "stop process": 10, "stop node": 10, "cut nodes": 12,
    "cut one way": 8, "cut etcd": 6, "isolate": 4, "slow": 6, "full disk": 4, "kill etcd": 4,
    "stop etcd": 2,
}  # fmt: skip
NEEDS_NETWORK: Final = {"cut nodes", "cut one way", "cut etcd", "isolate", "slow"}
PROCESSES: Final = ("controller", "shard", "front-door")
LASTS_S: Final = (0.5, 2.0, 5.0, 8.0, 12.0, 20.0)
BETWEEN_S: Final = (0.3, 0.6, 1.0, 2.0, 4.0)


class Cluster:
    """The nodes, their etcd, and the network between them."""

    def __init__(self, nodes: RealCluster, etcd: RealEtcd, network: Network, disk: Path) -> None:
        self.nodes = nodes.nodes
        self.cluster = nodes
        self.etcd = etcd
        self.network = network
        self.disk = disk  # the file system of the node FULL

    def log_tails(self) -> str:
        return "\n".join(f"-- {node.data_dir.name}\n{node.log_tail()}" for node in self.nodes)


@contextlib.contextmanager
def started(
    directory: Path,
    harms_network: bool = True,
    fills_disk: bool = True,
    replicas: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Start three nodes of one shard each, in namespaces if that is possible here.

    Args:
        directory: Has the data directories.
        harms_network: Whether the nodes are to be in namespaces.
        fills_disk: Whether the node FULL is to have a small disk.
        replicas: On how many nodes the messages of a shard are.
        environment: Variables that each node has besides.
    """
    hosts = [*(node_name(index) for index in range(NODES)), ETCD]
    why = why_impossible() if harms_network else "not asked for"
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS + DISK_SETTINGS)
    with contextlib.ExitStack() as stack:
        network: Network
        if why:
            print(f"{why}: nodes at 127.0.0.2 to .4, and no harm to the network")
            network = Loopback(hosts, why)
        else:
            network = stack.enter_context(Namespaces(hosts))
        disk = directory / FULL
        if fills_disk:
            stack.enter_context(small_disk(disk, mib=DISK_MIB))
        (directory / ETCD).mkdir()
        etcd = stack.enter_context(
            RealEtcd(directory / ETCD, host=network.address(ETCD), prefix=network.command(ETCD))
        )
        nodes = stack.enter_context(
            RealCluster(
                directory,
                etcd,
                NODES,
                replicas=replicas,
                together=replicas > 1,
                environment=environment,
                network=network,
                more=("--config", str(settings)),
            )
        )
        wait_for_nodes(nodes.nodes[0], NODES)
        if replicas > 1:
            nodes.wait_for_copies()
        yield Cluster(nodes, etcd, network, disk)
        # Where one is away, the last syncs of others would wait for it.
        if all(node.process.poll() is None for node in nodes.nodes):
            for node in nodes.nodes:
                node.stop()


def numbers_of(node: RealBroker, kind: str) -> list[int]:
    """Return the numbers of the processes of a kind; shards have numbers of the cluster."""
    return sorted(
        {int(each["index"]) for each in node.status()["children"] if each["kind"] == kind}
    )


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
        kinds: dict[str, int] | None = None,
        quiet_s: float = QUIET_S,
        has_copies: bool = False,
        plan: Sequence[str] = (),
        lasts_s: Sequence[float] = LASTS_S,
        between_s: Sequence[float] = BETWEEN_S,
    ) -> None:
        self.cluster, self.seed, self.has_copies = cluster, seed, has_copies
        self.plan, self.lasts_s, self.between_s = plan, lasts_s, between_s
        self.random = random.Random(seed)
        known = KINDS if kinds is None else kinds
        if cluster.network.why_whole:
            known = {kind: weight for kind, weight in known.items() if kind not in NEEDS_NETWORK}
        self.kinds = known
        self.ledger = Ledger()
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
                (kind,) = self.random.choices(list(self.kinds), self.kinds.values())
                self._harm(self.plan[number - 1] if number <= len(self.plan) else kind)
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

    def _rest(self, is_last: bool) -> None:
        nodes = list(self.cluster.nodes)
        if not self.has_copies:
            self.load.rest(nodes)
            return
        lost = self.random.choice(nodes)
        # After two cuts a node may be the only one that has all, and then nobody takes over.
        wait_until(lambda: self.cluster.cluster.can_lose(lost), "another node in sync", BACK_S)
        self._say(f"rest without {lost.data_dir.name}")
        self._kill_node(lost)
        self.load.rest(self.cluster.cluster.others(lost))
        if not is_last:
            self._restart(lost)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds * self.random.uniform(0.5, 1.0))

    def _say(self, what: str) -> None:
        self.done.append(f"{time.strftime('%H:%M:%S')} {what}")
        print(self.done[-1], self.ledger.counts(), flush=True)

    # -- faults ------------------------------------------------------------------------------------

    def _harm(self, kind: str) -> None:
        node, other = self.random.sample(self.cluster.nodes, 2)
        process = self.random.choice(PROCESSES)
        lasts_s = self.random.choice(self.lasts_s) * self.random.uniform(0.7, 1)
        name, at_other = node.data_dir.name, other.data_dir.name
        match kind:
            case "kill process":
                self._say(f"kill {process} of {name}")
                self._kill_process(node, process)
            case "kill node":
                away_s = min(lasts_s, 8.0)
                self._say(f"kill {name} for {away_s:.1f} s")
                self._kill_node(node)
                time.sleep(away_s)
                self._restart(node)
            case "stop process":
                self._say(f"stop {process} of {name} for {lasts_s:.1f} s")
                self._stop([node.pid(process, self._number_of(node, process))], lasts_s)
            case "stop node":
                self._say(f"stop {name} for {lasts_s:.1f} s")
                pids = [int(child["pid"]) for child in node.status()["children"]]
                self._stop([node.process.pid, *pids], lasts_s)
            case "cut nodes":
                self._cut({(name, at_other), (at_other, name)}, lasts_s)
            case "cut one way":
                self._cut({(name, at_other)}, lasts_s)
            case "cut etcd":
                self._cut({(name, ETCD), (ETCD, name)}, lasts_s)
            case "isolate":
                others = [ETCD, *(each.data_dir.name for each in self.cluster.nodes)]
                self._cut(
                    {
                        way
                        for each in others
                        if each != name
                        for way in ((name, each), (each, name))
                    },
                    lasts_s,
                )
            case "slow":
                self._slow(name, at_other, lasts_s)
            case "full disk":
                self._fill_disk(min(lasts_s, 12.0))
            case "kill etcd":
                self._say(f"kill etcd for {lasts_s:.1f} s")
                self.cluster.etcd.only.kill()
                time.sleep(lasts_s)
                self.cluster.etcd.only.start()
            case "stop etcd":
                self._say(f"stop etcd for {lasts_s:.1f} s")
                self.cluster.etcd.only.send(signal.SIGSTOP)
                time.sleep(lasts_s)
                self.cluster.etcd.only.send(signal.SIGCONT)

    @contextlib.contextmanager
    def _unrest(self) -> Iterator[None]:
        self.ledger.unrest_begins(time.monotonic())
        if self.has_copies:
            # Another node may lead a shard soon, without the acks of the last second.
            self.ledger.was_killed(time.monotonic(), shards=True)
        try:
            yield
        finally:
            self.ledger.unrest_ends(time.monotonic() + SETTLING_S)

    def _number_of(self, node: RealBroker, kind: str) -> int:
        """Return the number of a process of a kind; a node with copies has several shards."""
        numbers = numbers_of(node, kind)
        return numbers[0] if len(numbers) == 1 else self.random.choice(numbers)

    def _kill_process(self, node: RealBroker, kind: str) -> None:
        number = self._number_of(node, kind)
        pid = node.pid(kind, number)
        with self._unrest():
            self.ledger.was_killed(time.monotonic(), shards=kind == "shard")
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: node.is_replaced(kind, number, pid), f"{kind} to come back", BACK_S)

    def _kill_node(self, node: RealBroker) -> None:
        self.ledger.unrest_begins(time.monotonic())
        self.ledger.was_killed(time.monotonic(), shards=True)
        node.kill_all()
        self.ledger.was_killed(time.monotonic(), shards=True)

    def _restart(self, node: RealBroker) -> None:
        node.restart()
        self.ledger.unrest_ends(time.monotonic() + SETTLING_S)

    def _stop(self, pids: list[int], lasts_s: float) -> None:
        """Stop processes and let them go on. Whoever watches over them may have ended them."""
        with self._unrest():
            self.ledger.was_killed(time.monotonic(), shards=True)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        if pid:
                            os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(lasts_s)
            self.ledger.was_killed(time.monotonic(), shards=True)

    def _cut(self, ways: set[tuple[str, str]], lasts_s: float) -> None:
        network = self.cluster.network
        assert isinstance(network, Namespaces)
        self._say(f"cut {' '.join(f'{a}>{b}' for a, b in sorted(ways))} for {lasts_s:.1f} s")
        with self._unrest():
            network.cut(ways)
            time.sleep(lasts_s)
            network.heal()

    def _slow(self, name: str, other: str, lasts_s: float) -> None:
        network = self.cluster.network
        assert isinstance(network, Namespaces)
        self._say(f"100 ms and 5 % loss at {name} and {other} for {lasts_s:.1f} s")
        with self._unrest():
            network.lose(5, [name, other])
            network.delay(100, name)
            time.sleep(lasts_s)
            network.heal()

    def _fill_disk(self, lasts_s: float) -> None:
        self._say(f"fill the disk of {FULL} for {lasts_s:.1f} s")
        with self._unrest():
            # The process of a shard may end when it cannot write.
            self.ledger.was_killed(time.monotonic(), shards=True)
            free = take_all_bytes(self.cluster.disk)
            time.sleep(lasts_s)
            free()
            self.ledger.was_killed(time.monotonic(), shards=True)
