"""Faults of the nodes of a cluster, of their disks, clocks and etcd, and of the network.

Everything about a fault comes from the random numbers: what, where and for how long.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from tests.support.etcd import RealEtcd
from tests.support.ledger import Ledger
from tests.support.lossy_disk import LossyDisk
from tests.support.moved_clock import MovedClock
from tests.support.namespaces import Namespaces, Network
from tests.support.real_broker import RealBroker, wait_until
from tests.support.real_cluster import RealCluster
from tests.support.small_disk import take_all_bytes

ETCD: Final = "etcd"
BACK_S: Final = 120.0
# A session whose ends hear nothing of each other ends after 10 s. A connection that was cut for
# some seconds may be silent for as long again, until TCP repeats what was lost.
SETTLING_S: Final = 25.0
# How often, of a hundred.
KINDS: Final = {
    "kill process": 16, "kill node": 12, "stop process": 8, "stop node": 8, "cut nodes": 10,
    "cut one way": 8, "cut etcd": 6, "isolate": 4, "slow": 6, "full disk": 4, "slow disk": 3,
    "kill etcd": 3, "kill etcd member": 3, "stop etcd": 2, "move clock": 3, "cut power of node": 2,
    "cut power": 2,
}  # fmt: skip
OF_NETWORK: Final = {"cut nodes", "cut one way", "cut etcd", "isolate", "slow"}
OF_ETCD: Final = {"kill etcd", "kill etcd member", "stop etcd"}
OF_DISKS: Final = {"full disk", "slow disk", "cut power of node", "cut power"}
OF_CLOCKS: Final = {"move clock"}
OF_ALL: Final = {"cut power"}  # no node is left for another fault
PROCESSES: Final = ("controller", "shard", "front-door")
AWAY_S_MAX: Final = 8.0
FULL_S_MAX: Final = 12.0
CLOCK_MOVES_S: Final = 3600
FROZEN_S: Final = 0.4  # of each half second: what a slow disk needs for a sync


class Fault(NamedTuple):
    """A fault with its line for the log; `touches` names what no other may touch meanwhile."""

    said: str
    act: Callable[[], None]
    touches: frozenset[str]


class Cluster:
    """The nodes, their etcd, the network between them, and their disks and clocks by name."""

    def __init__(
        self,
        nodes: RealCluster,
        etcd: RealEtcd,
        network: Network,
        disks: Mapping[str, LossyDisk],
        clocks: Mapping[str, MovedClock],
    ) -> None:
        self.nodes = nodes.nodes
        self.cluster = nodes
        self.etcd = etcd
        self.network = network
        self.disks = disks
        self.clocks = clocks

    def possible(self, kinds: Mapping[str, int]) -> dict[str, int]:
        """Return the kinds of faults that can be had here, with their weights."""
        impossible: set[str] = set()
        if self.network.why_whole:
            impossible |= OF_NETWORK
        if not self.disks:
            impossible |= OF_DISKS
        if not self.clocks:
            impossible |= OF_CLOCKS
        if len(self.etcd.members) == 1:
            impossible |= {"kill etcd member"}
        return {kind: weight for kind, weight in kinds.items() if kind not in impossible}

    def log_tails(self) -> str:
        return "\n".join(f"-- {node.data_dir.name}\n{node.log_tail()}" for node in self.nodes)


def numbers_of(node: RealBroker, kind: str) -> list[int]:
    """Return the numbers of the processes of a kind; shards have numbers of the cluster."""
    return sorted(
        {int(each["index"]) for each in node.status()["children"] if each["kind"] == kind}
    )


class Faults:
    """Draws faults, and carries them out.

    Args:
        cluster: What is harmed.
        ledger: Is told what was done.
        chance: The random numbers.
        kinds: Names of KINDS, with weights.
        has_copies: Whether messages have copies on other nodes.
        lasts_s: How long a fault lasts at most, one of these.
    """

    def __init__(
        self,
        cluster: Cluster,
        ledger: Ledger,
        chance: random.Random,
        kinds: Mapping[str, int],
        has_copies: bool,
        lasts_s: Sequence[float],
    ) -> None:
        self._cluster, self._ledger, self._random = cluster, ledger, chance
        self._kinds, self._has_copies = cluster.possible(kinds), has_copies
        self._lasts_s = lasts_s

    # -- drawing -----------------------------------------------------------------------------------

    def draw(self, kind: str = "") -> Fault:
        """Return a fault of this kind, or of any."""
        if not kind:
            (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
        node, other = self._random.sample(self._cluster.nodes, 2)
        process = self._random.choice(PROCESSES)
        lasts_s = self._random.choice(self._lasts_s) * self._random.uniform(0.7, 1)
        return self._made(kind, node, other, process, lasts_s)

    def draw_beside(self, fault: Fault) -> Fault | None:
        """Return a fault that touches nothing that this one touches, if the first draw is such."""
        other = self.draw()
        return None if other.touches & fault.touches else other

    def _made(
        self, kind: str, node: RealBroker, other: RealBroker, process: str, lasts_s: float
    ) -> Fault:
        name, at_other = node.data_dir.name, other.data_dir.name
        act: Callable[[], None]
        took = f"for {lasts_s:.1f} s"
        match kind:
            case "kill process":
                said, act = f"kill {process} of {name}", partial(self._kill_process, node, process)
            case "kill node":
                away_s = min(lasts_s, AWAY_S_MAX)
                said = f"kill {name} for {away_s:.1f} s"
                act = partial(self._kill_for, node, away_s)
            case "stop process":
                said = f"stop {process} of {name} {took}"
                act = partial(self._stop_process, node, process, lasts_s)
            case "stop node":
                said, act = f"stop {name} {took}", partial(self._stop_node, node, lasts_s)
            case "cut nodes":
                return self._cut({(name, at_other), (at_other, name)}, lasts_s)
            case "cut one way":
                return self._cut({(name, at_other)}, lasts_s)
            case "cut etcd":
                return self._cut({(name, ETCD), (ETCD, name)}, lasts_s)
            case "isolate":
                others = {ETCD, *(each.data_dir.name for each in self._cluster.nodes)} - {name}
                ways = {way for each in others for way in ((name, each), (each, name))}
                return self._cut(ways, lasts_s)
            case "slow":
                said = f"100 ms and 5 % loss at {name} and {at_other} {took}"
                act = partial(self._slow, name, at_other, lasts_s)
            case "full disk":
                full_s = min(lasts_s, FULL_S_MAX)
                said = f"fill the disk of {name} for {full_s:.1f} s"
                act = partial(self._fill_disk, name, full_s)
            case "slow disk":
                said = f"slow the disk of {name} {took}"
                act = partial(self._slow_disk, name, lasts_s)
            case "kill etcd":
                said, act = f"kill etcd {took}", partial(self._kill_etcd, lasts_s)
            case "kill etcd member":
                member = self._random.choice(self._cluster.etcd.members)
                said = f"kill member {member.name} of etcd {took}"
                act = partial(self._kill_etcd, lasts_s, only=member.name)
            case "stop etcd":
                said, act = f"stop etcd {took}", partial(self._stop_etcd, lasts_s)
            case "move clock":
                seconds = self._random.choice((-CLOCK_MOVES_S, CLOCK_MOVES_S))
                said = f"move the clock of {name} by {seconds} s {took}"
                act = partial(self._move_clock, name, seconds, lasts_s)
            case "cut power of node":
                said, act = f"cut the power of {name}", partial(self._cut_power, [node])
            case "cut power":
                said, act = "cut the power of all", partial(self._cut_power, self._cluster.nodes)
            case _:
                raise ValueError(kind)
        return Fault(said, act, self._touched(kind, name))

    def _touched(self, kind: str, name: str) -> frozenset[str]:
        if kind in OF_ALL:
            return frozenset(
                {"network", ETCD, *(each.data_dir.name for each in self._cluster.nodes)}
            )
        if kind in OF_NETWORK:
            return frozenset({"network"})  # one heals all
        return frozenset({ETCD if kind in OF_ETCD else name})

    # -- carrying out ------------------------------------------------------------------------------

    def carry_out(self, faults: Sequence[Fault]) -> None:
        """Do all of this at once, and return when the last one is over."""
        with self._unrest(), ThreadPoolExecutor(len(faults)) as doing:
            for done in [doing.submit(fault.act) for fault in faults]:
                done.result()

    @contextlib.contextmanager
    def _unrest(self) -> Iterator[None]:
        self._ledger.unrest_begins(time.monotonic())
        if self._has_copies:
            # Another node may lead a shard soon, without the acks of the last second.
            self._ledger.was_killed(time.monotonic(), shards=True)
        try:
            yield
        finally:
            self._ledger.unrest_ends(time.monotonic() + SETTLING_S)

    def kill_node(self, node: RealBroker) -> None:
        """Kill a node. It stays away."""
        self._ledger.was_killed(time.monotonic(), shards=True)
        node.kill_all()
        self._ledger.was_killed(time.monotonic(), shards=True)

    def _kill_for(self, node: RealBroker, away_s: float) -> None:
        self.kill_node(node)
        time.sleep(away_s)
        node.restart()

    def _number_of(self, node: RealBroker, kind: str) -> int:
        """Return the number of a process of a kind; a node with copies has several shards."""
        numbers = numbers_of(node, kind)
        return numbers[0] if len(numbers) == 1 else self._random.choice(numbers)

    def _kill_process(self, node: RealBroker, kind: str) -> None:
        number = self._number_of(node, kind)
        pid = node.pid(kind, number)
        self._ledger.was_killed(time.monotonic(), shards=kind == "shard")
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: node.is_replaced(kind, number, pid), f"{kind} to come back", BACK_S)

    def _stop_process(self, node: RealBroker, kind: str, lasts_s: float) -> None:
        self._stop([node.pid(kind, self._number_of(node, kind))], lasts_s)

    def _stop_node(self, node: RealBroker, lasts_s: float) -> None:
        self._stop(_processes(node), lasts_s)

    def _stop(self, pids: list[int], lasts_s: float) -> None:
        """Stop processes and let them go on. Whoever watches over them may have ended them."""
        self._ledger.was_killed(time.monotonic(), shards=True)
        _signal(pids, signal.SIGSTOP)
        time.sleep(lasts_s)
        _signal(pids, signal.SIGCONT)
        self._ledger.was_killed(time.monotonic(), shards=True)

    def _cut(self, ways: set[tuple[str, str]], lasts_s: float) -> Fault:
        network = self._cluster.network
        assert isinstance(network, Namespaces)

        def cut() -> None:
            network.cut(ways)
            time.sleep(lasts_s)
            network.heal()

        said = f"cut {' '.join(f'{a}>{b}' for a, b in sorted(ways))} for {lasts_s:.1f} s"
        return Fault(said, cut, frozenset({"network"}))

    def _slow(self, name: str, other: str, lasts_s: float) -> None:
        network = self._cluster.network
        assert isinstance(network, Namespaces)
        network.lose(5, [name, other])
        network.delay(100, name)
        time.sleep(lasts_s)
        network.heal()

    def _kill_etcd(self, lasts_s: float, only: str = "") -> None:
        members = [each for each in self._cluster.etcd.members if only in ("", each.name)]
        for member in members:
            member.kill()
        time.sleep(lasts_s)
        for member in members:
            member.spawn()
        for member in members:
            member.wait_until_ready()

    def _stop_etcd(self, lasts_s: float) -> None:
        for member in self._cluster.etcd.members:
            member.send(signal.SIGSTOP)
        time.sleep(lasts_s)
        for member in self._cluster.etcd.members:
            member.send(signal.SIGCONT)

    def _move_clock(self, name: str, seconds: int, lasts_s: float) -> None:
        self._cluster.clocks[name].move(seconds)
        time.sleep(lasts_s)
        self._cluster.clocks[name].move(0)

    def _fill_disk(self, name: str, lasts_s: float) -> None:
        # The process of a shard may end when it cannot write.
        self._ledger.was_killed(time.monotonic(), shards=True)
        free = take_all_bytes(self._cluster.disks[name].directory)
        time.sleep(lasts_s)
        free()
        self._ledger.was_killed(time.monotonic(), shards=True)

    def _slow_disk(self, name: str, lasts_s: float) -> None:
        disk, until = self._cluster.disks[name], time.monotonic() + lasts_s
        self._ledger.was_killed(time.monotonic(), shards=True)
        while time.monotonic() < until:
            disk.freeze()
            time.sleep(FROZEN_S)
            disk.thaw()
            time.sleep(0.5 - FROZEN_S)
        self._ledger.was_killed(time.monotonic(), shards=True)

    def _cut_power(self, nodes: Sequence[RealBroker]) -> None:
        """Lose all that is not on the disks of these nodes, and start them again.

        Where all are lost, etcd ends with them; its disk keeps everything.
        """
        etcd = self._cluster.etcd if len(nodes) == len(self._cluster.nodes) else None
        _signal([pid for node in nodes for pid in _processes(node)], signal.SIGSTOP)
        self._ledger.was_killed(time.monotonic(), shards=True)
        for node in nodes:
            node.kill_all()
        if etcd:
            etcd.kill()
        for node in nodes:
            self._cluster.disks[node.data_dir.name].fail_power()
        self._ledger.was_killed(time.monotonic(), shards=True)
        if etcd:
            self._kill_etcd(0)
        with ThreadPoolExecutor(len(nodes)) as starting:  # one may wait for another
            list(starting.map(RealBroker.restart, nodes))


def _processes(node: RealBroker) -> list[int]:
    return [node.process.pid, *(int(child["pid"]) for child in node.status()["children"])]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, number)
