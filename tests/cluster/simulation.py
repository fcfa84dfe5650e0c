"""Play schedules of faults on the rules of copies, with a clock of their own.

A schedule is a random history of three nodes (sometimes two or five) and of the record outside of
them. Messages are late, doubled, or lost with all that follows them in their session, at once or a
moment later; links are cut both ways or one way; nodes are killed, lose their power, stop and go
on, lose their disk or come back with an old one; disks hang; clocks are set; the record's store is
late or away, and a compare-and-swap takes effect after its sender has given up; leases end at any
moment. The seed says all of it.

The content of a copy is the list of the operations that made it. `World.broken` is raised when

- a sync is confirmed that is not what was confirmed before at the same place (two leaders);
- a sync is confirmed with fewer nodes in sync than its shard asks for, by the numbers of the
  settings or those of a set of shards, which may change;
- a member of the in-sync set lacks something that was confirmed, on stable storage;
- the copy of a follower is no first part of its leader's;
- nothing is confirmed, or a node is not in sync, a while after all faults are over. In some
  schedules nobody writes anything then, so that a node must come in sync without.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shardmq.cluster import rules
from shardmq.cluster.rules import (
    Effects,
    Follower,
    Held,
    Leader,
    Position,
    Record,
    Settings,
    Swap,
    Wait,
)

SETTINGS = Settings(
    lag_s=0.8, heartbeat_s=0.25, retry_s=0.2, restart_wait_s=0.3, disk_stall_s=1.2, min_in_sync=1
)
LEASE_S = 0.7
ETCD_TIMEOUT_S = 0.5
FAULTS_S = 4.5  # how long faults begin
ALL_OVER_S = 6.0  # when they are over
LAST_WORD_S = 8.8  # when one more operation is written, which must be confirmed
END_S = 12.0  # a lead that began late has time to take the others into the set
LOST_S = 0.5  # what follows a message that was lost is heard so long, at most
TAIL_MAX = 40
A_DAY = 4 * 24 * 3600  # in numbers of processes, which count quarters of a second


class Broken(Exception):
    """A promise is broken."""


class Operation(NamedTuple):
    at: Position
    content: int
    is_sync: bool


class Disk:
    def __init__(self) -> None:
        self.log: list[int] | None = []  # None in a comparison: of no use
        self.synced = 0
        self.has_pieces = False  # what a comparison brought, and no sync of all files yet
        self.held = Held()

    def copied(self) -> Disk:
        other = Disk()
        other.log, other.synced, other.has_pieces, other.held = (
            None if self.log is None else list(self.log),
            self.synced,
            self.has_pieces,
            self.held,
        )
        return other


class Wire:
    """One session between a follower and its leader, with a queue each way."""

    def __init__(self, follower: str, leader: str, session: int) -> None:
        self.follower = follower
        self.leader = leader
        self.session = session
        self.broken: set[str] = set()  # to whom nothing arrives any more
        self.last_at = {follower: 0.0, leader: 0.0}


class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.disk = Disk()
        self.old_disks: list[Disk] = []
        self.life = 0
        self.clock = 0  # how far its clock was set, in the numbers of processes
        self.process = 0  # the number of the present one, by that clock
        self.role: Follower | Leader | None = None
        self.is_frozen = False
        self.late: list[Callable[[], None]] = []  # what waits until it goes on
        self.no_etcd = False
        self.reads_old_until = 0.0  # from a member of etcd that is behind
        self.old_record: tuple[Record | None, int] = (None, 0)
        self.away_since: float | None = None  # for its lease
        self.disk_hangs_until = 0.0
        self.synced_until = 0.0  # when the syncs end that it has begun as a follower
        self.whole_at: int | None = None  # where its copy is whole, after a comparison
        self.wire: Wire | None = None  # as a follower
        self.wires: dict[str, Wire] = {}  # as a leader, by follower
        self.streams: dict[str, int] = {}  # session by follower
        self.tail: list[Operation] = []
        self.base_length = 0
        self.number = 0
        self.min_in_sync = 1  # that this node was told, as a leader


class World:
    """One schedule. Broken variants replace `leader` and `follower`, or a method."""

    leader: type[Leader] = Leader
    follower: type[Follower] = Follower

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        names = "abcde"[: self.random.choice([2, 3, 3, 3, 3, 5])]
        self.nodes = {name: Node(name) for name in names}
        self.settings = SETTINGS
        if len(names) > 2 and self.random.random() < 0.4:
            self.settings = rules.msgspec.structs.replace(SETTINGS, min_in_sync=2)
        # Of the set that the shard is in; None: it is in none.
        self.own_min = self.random.choice([None, None, None, *range(1, len(names) + 1)])
        self.record: Record | None = None
        self.revision = 0
        self.in_flight: list[rules.Propose] = []
        self.records: list[tuple[Record | None, int]] = [(None, 0)]
        self.etcd_away = False
        self.etcd_slow_until = 0.0
        self.no_way: set[tuple[str, str]] = set()
        self.loss = self.random.choice([0.0, 0.0, 0.005, 0.03])
        self.doubles = self.random.choice([0.0, 0.02, 0.1])
        self.pace = self.random.choice([0.1, 0.4, 0.7, 0.7])  # how often a leader writes
        self.is_quiet = self.random.random() < 0.3  # nothing is written after the faults
        self.confirmed: list[int] = []
        self.histories: dict[int, tuple[int, list[int]]] = {}  # by term: length of base, content
        self.content = 0
        self.last_words: dict[str, int] = {}
        self.trace: list[str] | None = None

    # -- the clock ---------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, act))

    def after(self, least: float, most: float, act: Callable[[], None]) -> None:
        self.at(self.now + least + (most - least) * self.random.random(), act)

    def in_life(self, node: Node, act: Callable[[], None]) -> Callable[[], None]:
        """Return `act`, done only by the present process, and not while it is stopped."""
        life = node.life

        def run() -> None:
            if node.life != life:
                return
            if node.is_frozen:
                node.late.append(run)
            else:
                act()

        return run

    def run(self) -> None:
        """Play the schedule. Raises Broken."""
        for node in self.nodes.values():
            self.after(0.0, 0.1, lambda node=node: self.start(node))  # type: ignore[misc]
        for _ in range(self.random.randint(2, 9)):
            self.at(0.3 + (FAULTS_S - 0.3) * self.random.random(), self.fault)
        if self.random.random() < 0.25:  # in its place among the other faults it is too rare
            self.after(0.7, 2.0, lambda: self.fault_old_leader(self.pick()))
        self.at(ALL_OVER_S, self.all_over)
        if not self.is_quiet:
            self.at(LAST_WORD_S, self.last_word)
        while self.events and self.now < END_S:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.judge_end()

    def say(self, *words: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:7.3f} " + " ".join(map(str, words)))

    # -- processes ---------------------------------------------------------------------------------

    def start(self, node: Node) -> None:
        if node.role is not None:
            return
        node.life += 1
        node.is_frozen, node.away_since = False, None
        node.wire, node.wires, node.streams, node.tail = None, {}, {}, []
        node.synced_until, node.whole_at = 0.0, None
        founds = f"store-{node.name}{node.life}"
        if node.disk.held == Held() and self.record is not None:
            founds = ""  # a node that comes later waits for the record
        node.process = 2 * A_DAY + node.clock + node.life
        node.role = self.follower(node.name, node.process, node.disk.held, self.settings, founds)
        self.say(node.name, "starts", node.process, node.disk.held)
        self.read(node)
        self.tick(node)

    def end(self, node: Node, *, power: bool = False) -> None:
        if power and node.disk.log is not None:
            keep = self.random.randint(
                min(node.disk.synced, len(node.disk.log)), len(node.disk.log)
            )
            del node.disk.log[keep:]
        node.role, node.life, node.is_frozen, node.late = None, node.life + 1, False, []
        node.away_since = self.now if node.away_since is None else node.away_since
        for wire in (node.wire, *node.wires.values()):
            if wire is not None:
                self.hang_up(node, wire)

    def hang_up(self, node: Node, wire: Wire) -> None:
        """Close one end; the other one notices behind what was sent, unless the way is cut."""
        other = self.nodes[wire.leader if node.name == wire.follower else wire.follower]
        wire.broken.add(node.name)
        if (node.name, other.name) in self.no_way or other.name in wire.broken:
            return
        notices = max(wire.last_at[other.name], self.now + 0.001 + 0.019 * self.random.random())
        self.at(notices, self.in_life(other, lambda: self.hung_up(other, wire)))

    def hung_up(self, node: Node, wire: Wire) -> None:
        wire.broken.add(node.name)
        if isinstance(node.role, Leader):
            if node.wires.get(wire.follower) is wire:
                del node.wires[wire.follower]
            self.act(node, node.role.disconnected(wire.follower, wire.session, self.now))
        elif isinstance(node.role, Follower) and node.wire is wire:
            node.wire = None
            node.role.disconnected()

    def tick(self, node: Node) -> None:
        role = node.role
        if role is None:
            return
        self.at(
            self.now + SETTINGS.heartbeat_s * (0.8 + 0.3 * self.random.random()),
            self.in_life(node, lambda: self.tick(node)),
        )
        if self.random.random() < 0.25:
            self.read(node)  # as a watch that is begun again does
        if isinstance(role, Leader):
            self.act(node, role.tick(self.now))
            if self.random.random() < self.pace and node.role is role:
                self.write(node)
            return
        if role.record is not None:
            leader = self.nodes[role.record.leader]
            ended = leader.away_since is not None and self.now - leader.away_since > LEASE_S
            if ended and not (node.no_etcd or self.etcd_away):
                role.leader_gone(role.record.term, self.now)
        self.act(node, role.tick(self.now))
        if node.wire is None and node.role is role and role.leader:
            self.connect(node, role)

    def connect(self, node: Node, role: Follower) -> None:
        other = self.nodes[role.leader]
        ways = {(node.name, other.name), (other.name, node.name)}
        if other.role is None or other.is_frozen or ways & self.no_way:
            return
        if not isinstance(other.role, Leader):
            if role.record is not None and other.process != role.record.life:
                role.leader_gone(role.record.term, self.now)  # it says so
            return
        hello = role.connected(self.now)
        assert isinstance(hello[0], rules.Send)
        node.wire = Wire(node.name, other.name, hello[0].message.session)
        self.act(node, hello)

    # -- messages ----------------------------------------------------------------------------------

    def transmit(self, wire: Wire, to: str, act: Callable[[Node], None]) -> None:
        """Have `act` done with the node at the other end, later, in order; perhaps twice."""
        node = self.nodes[to]
        sender = wire.leader if to == wire.follower else wire.follower
        if to in wire.broken:
            return
        if self.random.random() < self.loss:
            self.lose(wire, to, alone=self.random.random() < 0.5)
            return
        if (sender, to) in self.no_way:
            wire.broken.add(to)
            return
        delay = 0.001 + 0.03 * self.random.random()
        if self.random.random() < 0.02 and self.now < ALL_OVER_S:
            delay += self.random.random()
        when = wire.last_at[to] = max(wire.last_at[to] + 1e-6, self.now + delay)

        def arrives() -> None:
            if node.is_frozen:
                node.late.append(arrives)
            elif node.role is not None:
                act(node)

        self.at(when, arrives)
        if self.random.random() < self.doubles:
            self.at(when + 2 * self.random.random() ** 2, arrives)

    def lose(self, wire: Wire, to: str, *, alone: bool) -> None:
        """Lose a message with all that follows, or `alone`: some of what follows is still heard.

        No stream leaves a gap, but the rules do not rely on that. A session that has one ends all
        the same, as that of a leader whose work for a follower has failed: the follower does not
        see the gap before the next operation, and nobody may write any.
        """
        if alone:
            self.after(0.0, LOST_S, lambda: wire.broken.add(to))
        else:
            wire.broken.add(to)

    def send(self, node: Node, to: str, message: Any) -> None:
        if isinstance(message, rules.FromFollower):
            wire = node.wire
            if wire is None or wire.session != message.session:
                return

            def act(leader: Node) -> None:
                if isinstance(leader.role, Leader):
                    self.heard(leader, wire, message)

            self.transmit(wire, to, act)
            return
        found = node.wires.get(to)
        if found is not None and found.session == message.session:
            self.transmit(found, to, lambda follower: self.heard_from_leader(follower, message))

    def heard(self, node: Node, wire: Wire, message: Any) -> None:
        role = node.role
        assert isinstance(role, Leader)
        if isinstance(message, rules.Hello):
            known = node.wires.get(wire.follower)
            if known is not None and known.session >= wire.session:
                return
            node.wires[wire.follower] = wire
            node.streams.pop(wire.follower, None)
            first = node.tail[0].at if node.tail else Position(role.term, 1)
            oldest = Position(first.term, first.number - 1)
            self.act(node, role.greeted(message, oldest, node.number, self.now))
        else:
            self.act(node, role.heard(wire.follower, message, self.now))

    def heard_from_leader(self, node: Node, message: Any) -> None:
        if isinstance(node.role, Follower):
            self.act(node, node.role.heard(message, self.now))

    def send_operations(self, node: Node, to: str, session: int, found: list[Operation]) -> None:
        wire = node.wires.get(to)
        if wire is None or wire.session != session or not found:
            return
        term = node.role.term if isinstance(node.role, Leader) else 0

        def act(follower: Node) -> None:
            runs: dict[int, list[Operation]] = {}
            for operation in found:
                runs.setdefault(operation.at.term, []).append(operation)
            for run in runs.values():
                self.take_operations(follower, session, run)

        assert term
        self.transmit(wire, to, act)

    def take_operations(self, node: Node, session: int, run: list[Operation]) -> None:
        role = node.role
        if not isinstance(role, Follower):
            return
        known = role.operations(session, run[0].at, len(run), self.now)
        if not isinstance(known, int):
            self.act(node, known)
            return
        for operation in run[known:]:
            assert node.disk.log is not None
            node.disk.log.append(operation.content)
            node.tail.append(operation)
            self.act(node, role.applied(operation.at))
            if operation.is_sync:
                self.sync(node, role.held.copy, operation.at)
        del node.tail[:-TAIL_MAX]
        self.become_whole(node, role)

    def become_whole(self, node: Node, role: Follower) -> None:
        """Sync all files when the copy has all that its comparison may have brought."""
        at = role.position
        if node.whole_at is not None and at is not None and at.number >= node.whole_at:
            node.whole_at = None
            self.sync(node, role.held.copy, at, is_of_all=True)

    def sync(self, node: Node, copy: str, at: Position, *, is_of_all: bool = False) -> None:
        """Sync as a follower, which does one thing after the other with its disk."""
        disk = node.disk
        assert disk.log is not None
        length = len(disk.log)

        def done() -> None:
            if not isinstance(node.role, Follower) or node.disk is not disk:
                return
            if disk.held.copy == copy:
                disk.has_pieces = disk.has_pieces and not is_of_all
                if not disk.has_pieces:
                    disk.synced = max(disk.synced, length)
                self.check_prefix(node, at, length)
                self.act(node, node.role.synced(copy, at, is_of_all=is_of_all))

        takes_s = 0.3 * self.random.random() if is_of_all else 0.0
        node.synced_until = max(node.synced_until, self.disk_time(node) + takes_s)
        self.at(node.synced_until, self.in_life(node, done))

    def disk_time(self, node: Node) -> float:
        return max(self.now, node.disk_hangs_until) + 0.002 + 0.02 * self.random.random()

    # -- leading -----------------------------------------------------------------------------------

    def write(self, node: Node) -> None:
        for _ in range(self.random.randint(0, 2)):
            self.append(node, is_sync=False)
        self.append(node, is_sync=True)

    def append(self, node: Node, *, is_sync: bool) -> None:
        role, disk = node.role, node.disk
        assert isinstance(role, Leader) and disk.log is not None
        node.number += 1
        self.content += 1
        disk.log.append(self.content)
        self.histories[role.term][1].append(self.content)
        number, length = node.number, len(disk.log)
        operation = Operation(Position(role.term, number), self.content, is_sync)
        node.tail.append(operation)
        if is_sync:
            role.sync_begun(number, self.now)

            def done() -> None:
                if node.role is role:
                    disk.synced = max(disk.synced, length)
                    self.act(node, role.sync_done(number))

            self.at(self.disk_time(node), self.in_life(node, done))
        for follower, session in list(node.streams.items()):
            self.send_operations(node, follower, session, [operation])

    def lead(self, node: Node, lead: rules.Lead) -> None:
        disk = node.disk
        assert disk.log is not None
        disk.synced, disk.has_pieces = len(disk.log), False
        node.base_length = len(disk.log)
        node.number = 0
        if node.wire is not None:
            self.hang_up(node, node.wire)
            node.wire = None
        if lead.base is None:
            node.tail = []
        self.histories[lead.record.term] = len(disk.log), list(disk.log)
        self.say(node.name, "leads", lead)
        node.role = self.leader(
            node.name, node.process, lead.record, lead.revision, lead.base, self.settings, self.now
        )
        self.tell_numbers(node)
        self.append(node, is_sync=True)
        if self.now >= LAST_WORD_S:  # after a lease that ended, a late member may take over
            self.last_words[node.name] = self.content

    def tell_numbers(self, node: Node) -> None:
        """Tell a leader the numbers of the shard, as etcd has them now."""
        if isinstance(node.role, Leader):
            own = self.own_min
            node.min_in_sync = self.settings.min_in_sync if own is None else own
            self.act(node, node.role.copies_are(len(self.nodes), self.now, own))

    def snapshot(self, node: Node, to: str, session: int) -> None:
        """Send what the files are now, piece by piece, and then the operations since."""
        role, disk, wire = node.role, node.disk, node.wires.get(to)
        if wire is None or wire.session != session:
            return
        assert isinstance(role, Leader) and disk.log is not None
        at, content = Position(role.term, node.number), list(disk.log)

        def sent() -> None:
            if node.wires.get(to) is not wire:
                return
            whole_at = node.number

            def act(follower: Node) -> None:
                self.compared(follower, session, at, content, whole_at)

            self.transmit(wire, to, act)
            node.streams[to] = session
            since = [operation for operation in node.tail if operation.at > at]
            self.send_operations(node, to, session, since)

        takes_s = self.random.choice([0.0, 0.0, 0.3, 0.6]) * self.random.random()
        self.at(self.now + takes_s, self.in_life(node, sent))

    def compared(
        self, node: Node, session: int, at: Position, content: list[int], whole_at: int
    ) -> None:
        """End a comparison that was begun at `at`; a later change may be in any of its pieces."""
        role = node.role
        if isinstance(role, Follower) and role.compared(session, at, whole_at):
            node.disk.log, node.disk.synced, node.tail = list(content), 0, []
            node.disk.has_pieces, node.whole_at = True, whole_at
            self.become_whole(node, role)

    # -- effects -----------------------------------------------------------------------------------

    def act(self, node: Node, effects: Effects) -> None:
        for effect in effects:
            if self.trace is not None and not isinstance(effect, rules.Send):
                self.say(node.name, effect)
            match effect:
                case rules.Send():
                    self.send(node, effect.node, effect.message)
                case rules.Confirm():
                    self.check_confirm(node, effect.number)
                case rules.Propose():
                    self.propose(node, effect)
                case rules.Read():
                    self.read(node)
                case rules.Stream():
                    found = [one for one in node.tail if one.at > effect.after]
                    node.streams[effect.node] = effect.session
                    self.send_operations(node, effect.node, effect.session, found)
                case rules.Snapshot():
                    self.snapshot(node, effect.node, effect.session)
                case rules.Cut():
                    self.cut(node, effect.node)
                case rules.Keep():
                    self.check_keep(node, effect.held)
                    if node.disk.log is not None and effect.held.copy != node.disk.held.copy:
                        node.old_disks = [node.disk.copied(), *node.old_disks[:2]]
                    node.disk.held = effect.held
                case rules.Begin():
                    node.disk.log, node.disk.synced, node.tail = None, 0, []
                    node.whole_at = None
                case rules.Lead():
                    self.lead(node, effect)
                case rules.StepDown():
                    self.end(node)
                    self.after(0.05, 0.3, lambda: self.start(node))
                    return

    def cut(self, node: Node, other: str) -> None:
        if isinstance(node.role, Leader):
            wire = node.wires.pop(other, None)
            node.streams.pop(other, None)
        else:
            wire, node.wire = node.wire, None
        if wire is not None:
            self.hang_up(node, wire)

    # -- the record --------------------------------------------------------------------------------

    def etcd_delay(self) -> float:
        if self.now < self.etcd_slow_until:
            return 1.5 * self.random.random()
        return 0.002 + 0.03 * self.random.random()

    def propose(self, node: Node, effect: rules.Propose) -> None:
        is_away = node.no_etcd or self.etcd_away
        role, answered = node.role, False

        def answer(outcome: int | Swap) -> None:
            nonlocal answered
            if not answered and role is not None and node.role is role:
                answered = True
                self.act(node, role.swapped(outcome, self.now))

        def apply() -> None:
            self.in_flight.remove(effect)
            outcome: int | Swap = Swap.REFUSED
            if effect.revision == self.revision:
                outcome = self.revision + 1
                self.put(effect.record)
            back = self.in_life(node, lambda: answer(outcome))
            if not node.no_etcd and self.random.random() > 0.02:
                self.at(self.now + self.etcd_delay(), back)

        self.at(self.now + ETCD_TIMEOUT_S, self.in_life(node, lambda: answer(Swap.UNKNOWN)))
        if not is_away or self.random.random() < 0.3:
            self.in_flight.append(effect)
            self.at(self.now + self.etcd_delay() + 2 * is_away * self.random.random(), apply)

    def put(self, record: Record) -> None:
        self.record, self.revision = record, self.revision + 1
        self.records.append((record, self.revision))
        self.say("etcd has", self.revision, record)
        self.check_members()
        for node in self.nodes.values():
            delay = self.etcd_delay() + (self.random.random() < 0.1) * 2 * self.random.random()
            self.at(self.now + delay, self.told(node, record, self.revision))

    def told(self, node: Node, record: Record | None, revision: int) -> Callable[[], None]:
        def tell() -> None:
            if self.now < node.reads_old_until and revision > node.old_record[1]:
                return
            if node.role is not None and not node.no_etcd and not self.etcd_away:
                self.act(node, node.role.recorded(record, revision, self.now))

        return self.in_life(node, tell)

    def read(self, node: Node) -> None:
        if node.no_etcd or self.etcd_away:
            return
        found = (self.record, self.revision)
        if self.now < node.reads_old_until:
            found = node.old_record
        self.at(self.now + self.etcd_delay(), self.told(node, *found))

    # -- faults ------------------------------------------------------------------------------------

    def pick(self) -> Node:
        leaders = [node for node in self.nodes.values() if isinstance(node.role, Leader)]
        if leaders and self.random.random() < 0.5:
            return self.random.choice(leaders)
        return self.random.choice(list(self.nodes.values()))

    def fault(self) -> None:
        node = self.pick()
        kind = self.random.choice(FAULTS)
        self.say("fault:", kind, node.name)
        getattr(self, f"fault_{kind}")(node)

    def fault_kill(self, node: Node) -> None:
        self.end(node)
        self.after(0.01, 2.0, lambda: self.start(node))

    def fault_power(self, node: Node) -> None:
        self.end(node, power=True)
        self.after(0.1, 2.5, lambda: self.start(node))

    def fault_power_of_all(self, node: Node) -> None:
        for each in self.nodes.values():
            self.fault_power(each)

    def fault_clock(self, node: Node) -> None:
        """Set the clock of a host, by a day at most. Its next process may have a lower number."""
        node.clock = self.random.randint(-A_DAY, A_DAY)
        if self.random.random() < 0.5:
            self.fault_kill(node)

    def fault_numbers(self, node: Node) -> None:
        """Put the shard into another set, or into none; the leader hears of it."""
        self.own_min = self.random.choice([None, *range(1, len(self.nodes) + 1)])
        for each in self.nodes.values():
            self.after(0.0, 0.5, self.in_life(each, partial(self.tell_numbers, each)))

    def fault_stop(self, node: Node) -> None:
        if node.role is None or node.is_frozen:
            return
        node.is_frozen, node.away_since = True, self.now
        life = node.life

        def go_on() -> None:
            if node.life == life and node.is_frozen:
                node.is_frozen, node.away_since = False, None
                late, node.late = node.late, []
                for act in late:
                    act()

        self.after(0.1, 3.0, go_on)

    def fault_cut(self, node: Node) -> None:
        others = [name for name in self.nodes if name != node.name]
        other = self.random.choice(others)
        ways = {(node.name, other), (other, node.name)}
        if self.random.random() < 0.5:
            ways = {self.random.choice(sorted(ways))}
        if self.random.random() < 0.3:
            ways = {way for name in others for way in ((node.name, name), (name, node.name))}
        self.no_way |= ways
        self.after(0.1, 3.0, lambda: self.no_way.difference_update(ways))

    def fault_no_etcd(self, node: Node, most_s: float = 3.0) -> None:
        if node.no_etcd:
            return
        node.no_etcd = True
        node.away_since = self.now if node.away_since is None else node.away_since
        life = node.life

        def over() -> None:
            node.no_etcd = False
            if node.life == life and not node.is_frozen:
                node.away_since = None

        self.after(most_s - 2.9, most_s, over)

    def fault_isolated(self, node: Node) -> None:
        self.fault_no_etcd(node)
        ways = {
            way
            for name in self.nodes
            if name != node.name
            for way in ((node.name, name), (name, node.name))
        }
        self.no_way |= ways
        self.after(0.5, 3.0, lambda: self.no_way.difference_update(ways))

    def fault_etcd_away(self, node: Node) -> None:
        self.etcd_away = True
        self.after(0.1, 2.5, lambda: setattr(self, "etcd_away", False))

    def fault_etcd_slow(self, node: Node) -> None:
        self.etcd_slow_until = self.now + 0.5 + 2 * self.random.random()

    def fault_reads_old(self, node: Node) -> None:
        back = min(self.random.choice([1, 1, 2, 3]), len(self.records))
        node.old_record = self.records[-back]
        node.reads_old_until = self.now + 2 * self.random.random()

    def fault_old_leader(self, node: Node) -> None:
        """Keep the news of another leader from a leader, and from a node that has heard it.

        The old leader has taken that node out of the set before. The node comes back twice. The
        second time it is in the set of the new leader, and has a record in which the old one leads.
        """
        others = [each for each in self.nodes.values() if not isinstance(each.role, Leader)]
        if len(self.nodes) < 3 or self.now > 2.5:
            return
        if len(others) != len(self.nodes) - 1:
            self.after(0.2, 0.4, lambda: self.fault_old_leader(node))
            return
        (leader,) = [each for each in self.nodes.values() if each not in others]
        other, role = self.random.choice(others), leader.role
        self.end(other)

        def cut_off() -> None:
            record, revision = self.record, self.revision
            assert record is not None
            is_out = other.name not in record.in_sync and len(record.in_sync) > 1
            if leader.role is not role or (not is_out and self.now > FAULTS_S - 1):
                self.start(other)
                return
            if not is_out:
                self.after(0.05, 0.1, cut_off)
                return
            self.fault_no_etcd(leader, 5.0)

            def again() -> None:
                self.end(other)
                other.old_record, other.reads_old_until = (record, revision), self.now + 2.0
                self.start(other)

            def look() -> None:
                present = self.record
                assert present is not None
                if present.term > record.term and other.name in present.in_sync:
                    self.after(0.0, 0.2, again)
                elif self.now < FAULTS_S:
                    self.after(0.05, 0.1, look)

            self.after(0.8, 1.0, lambda: self.start(other))
            self.after(1.0, 1.2, look)

        self.after(0.8, 1.0, cut_off)

    def fault_lease(self, node: Node) -> None:
        """End a lease although its node is well; everybody sees it at another moment."""
        record = self.record
        if record is None:
            return
        for each in self.nodes.values():
            if self.random.random() < 0.7:

                def see(each: Node = each) -> None:
                    if isinstance(each.role, Follower):
                        each.role.leader_gone(record.term, self.now)

                self.after(0.0, 0.3, self.in_life(each, see))

    def fault_disk_hangs(self, node: Node) -> None:
        node.disk_hangs_until = self.now + 3 * self.random.random()

    def fault_disk_lost(self, node: Node) -> None:
        """Bring the host back with an empty disk, or an old one of it."""
        possible = [proposal.record for proposal in self.in_flight]
        for record in [*possible, self.record]:
            if record is not None and not any(
                self.holds(self.nodes[name], copy) and not self.may_leave(self.nodes[name])
                for name, copy in record.in_sync.items()
                if name != node.name
            ):
                return  # the last member must not lose its disk
        self.end(node, power=True)
        held = node.disk.held
        old = [disk for disk in node.old_disks if disk.held.copy != held.copy]
        lost = self.random.choice(old) if old and self.random.random() < 0.6 else Disk()
        node.disk = lost.copied()
        self.after(0.1, 2.0, lambda: self.start(node))

    def may_leave(self, node: Node) -> bool:
        """Return whether a leader may be about to give its place to a member that it thinks well.

        It leaves the set with that. If the heir has just lost its disk, nobody is left.
        """
        role = node.role
        if not isinstance(role, Leader):
            return False
        return node.disk_hangs_until > self.now or bool(role._hands_over_to)

    def fault_hand_over(self, node: Node) -> None:
        if isinstance(node.role, Leader) and not node.is_frozen:
            heir = self.random.choice([name for name in self.nodes if name != node.name])
            if not self.holds(self.nodes[heir], node.role.record.in_sync.get(heir, "")):
                return  # it has lost its disk, and the leader may not know it yet
            self.act(node, node.role.hand_over(heir, self.now))

            def take_back() -> None:
                if isinstance(node.role, Leader):
                    self.act(node, node.role.hand_over("", self.now))

            self.after(0.2, 2.0, self.in_life(node, take_back))

    def fault_leave(self, node: Node) -> None:
        """End a follower in order. It comes back soon."""
        if isinstance(node.role, Follower) and not node.is_frozen:
            self.act(node, node.role.leave())
            self.after(0.0, 0.1, self.in_life(node, lambda: self.fault_kill(node)))

    def fault_end_of_all(self, node: Node) -> None:
        """End all nodes in order at nearly the same time. They come back soon."""
        until = self.now + 1.0
        for each in self.nodes.values():
            self.after(0.0, 0.3, self.in_life(each, partial(self.end_in_order, each, until)))

    def end_in_order(self, node: Node, until: float) -> None:
        """End a node; one that leads waits for its last syncs until then, or for nobody any more.

        What it has not confirmed then is not confirmed.
        """
        if isinstance(node.role, Follower):
            self.fault_leave(node)
        elif isinstance(node.role, Leader):
            ends = self.now >= until or node.role.waits_for() in (None, Wait.ENDED_MEMBERS)
            if ends:
                self.fault_kill(node)
            else:
                again = self.in_life(node, partial(self.end_in_order, node, until))
                self.after(0.02, 0.1, again)

    def all_over(self) -> None:
        self.say("all faults are over")
        self.no_way.clear()
        self.etcd_away, self.etcd_slow_until, self.loss = False, 0.0, 0.0
        if self.is_quiet:
            self.pace = 0.0
        for node in self.nodes.values():
            node.no_etcd, node.disk_hangs_until, node.reads_old_until = False, 0.0, 0.0
            if node.is_frozen:
                node.is_frozen = False
                late, node.late = node.late, []
                for act in late:
                    act()
            if node.role is None:
                self.start(node)
            node.away_since = None
            self.read(node)

    def last_word(self) -> None:
        for node in self.nodes.values():
            if isinstance(node.role, Leader):
                self.append(node, is_sync=True)
                self.last_words[node.name] = self.content

    # -- judging -----------------------------------------------------------------------------------

    def holds(self, node: Node, copy: str) -> bool:
        return node.disk.held.copy == copy and node.disk.held.is_whole

    def check_confirm(self, node: Node, number: int) -> None:
        log = node.disk.log
        assert log is not None
        prefix = log[: node.base_length + number]
        role, record = node.role, self.record
        is_of_leader = isinstance(role, Leader) and record is not None and record.term == role.term
        if is_of_leader and len(record.in_sync) < node.min_in_sync:
            raise Broken(f"{node.name} confirms {number}: too few are in sync")
        known = min(len(prefix), len(self.confirmed))
        if prefix[:known] != self.confirmed[:known]:
            raise Broken(f"{node.name} confirms {number}: two leaders have the same place")
        if known == len(self.confirmed):
            self.confirmed = prefix
        self.check_members()

    def check_members(self) -> None:
        if self.record is None:
            return
        for name, copy in self.record.in_sync.items():
            node = self.nodes[name]
            if node.disk.held.copy == copy:
                log = node.disk.log
                if not node.disk.held.is_whole:
                    raise Broken(f"{name} is in sync, and its copy is not whole")
                if log is None or log[: node.disk.synced][: len(self.confirmed)] != self.confirmed:
                    raise Broken(f"{name} is in sync, and lacks what was confirmed")

    def check_keep(self, node: Node, held: Held) -> None:
        if self.record is None or held.copy == node.disk.held.copy:
            return
        if self.record.in_sync.get(node.name) == node.disk.held.copy:
            raise Broken(f"{node.name} gives its copy up, and is in sync")

    def check_prefix(self, node: Node, at: Position, length: int) -> None:
        begun, content = self.histories[at.term]
        log = node.disk.log
        assert log is not None
        if length != begun + at.number or log[:length] != content[:length]:
            raise Broken(f"the copy of {node.name} is no first part of its leader's")

    def judge_end(self) -> None:
        leaders = [node for node in self.nodes.values() if isinstance(node.role, Leader)]
        if len(leaders) != 1:
            raise Broken(f"{len(leaders)} nodes lead at the end")
        last_word = self.last_words.get(leaders[0].name)
        if not self.is_quiet and last_word not in self.confirmed[-40:]:
            raise Broken("nothing is confirmed at the end")
        assert self.record is not None
        if self.record.in_sync.keys() != self.nodes.keys():
            raise Broken(f"only {sorted(self.record.in_sync)} are in sync at the end")


FAULTS = tuple(name.removeprefix("fault_") for name in vars(World) if name.startswith("fault_"))


def play(seed: int, world: type[World] = World) -> str:
    """Play one schedule; return what broke, or ""."""
    try:
        world(seed).run()
    except (Broken, AssertionError, KeyError, rules.RecordError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""
