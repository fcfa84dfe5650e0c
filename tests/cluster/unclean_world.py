"""Schedules in which all in-sync members lose their disks, and an operator elects another copy.

What was confirmed and is not on this copy is given up with the election, also if its leader stood
still and confirms it later. Everything else holds as in all schedules: one leader, each copy a
first part of its leader's, nothing more is lost.
"""

from __future__ import annotations

from functools import partial

from shardmq.cluster import unclean
from shardmq.cluster.rules import Follower, Leader, Record
from tests.cluster.simulation import Broken, Disk, Node, World

OPERATOR_S = 0.3  # between two looks of the operator


class UncleanWorld(World):
    """A schedule with a loss of all in-sync copies, where there is another one that is whole."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.elected = 0
        self.elected_term = 0
        self.lengths: dict[int, int] = {}  # of what leaders had written at the election, by term

    def run(self) -> None:
        self.at(0.8 + self.random.random(), self.cut_one_off)
        super().run()

    def cut_one_off(self) -> None:
        """Cut a follower off until it is out of the in-sync set, then lose all that is in it."""
        record = self.record
        if record is None or len(record.in_sync) < 2:
            return
        other = self.random.choice(sorted(record.in_sync.keys() - {record.leader}))
        ways = {
            way for name in self.nodes if name != other for way in ((other, name), (name, other))
        }
        self.no_way |= ways
        if self.random.random() < 0.7:  # it is compared when it is back
            self.end(self.nodes[other])
            self.after(0.1, 0.9, lambda: self.start(self.nodes[other]))
        lost_at = self.now + 1.2 + 1.3 * self.random.random()
        # A leader that dies may have begun to compare the copy.
        back_at = lost_at + self.random.uniform(-0.4, 0.0)
        self.at(back_at, lambda: self.no_way.difference_update(ways))
        self.at(lost_at, self.lose_all_in_sync)

    def lose_all_in_sync(self) -> None:
        records = [proposal.record for proposal in self.in_flight]
        if self.record is not None:
            records.append(self.record)
        lost = {
            name
            for record in records
            for name, copy in record.in_sync.items()
            if self.holds(self.nodes[name], copy)
        }
        left = self.nodes.keys() - lost
        if self.record is None or not any(self.is_fit(name, self.record) for name in left):
            return
        self.say("all in-sync copies are lost:", sorted(lost))
        for name in lost:
            node = self.nodes[name]
            self.end(node, power=True)
            node.disk = Disk()
            self.after(0.1, 1.0, lambda node=node: self.start(node))  # type: ignore[misc]
        self.after(0.0, OPERATOR_S / 6, self.operate)

    def is_fit(self, name: str, record: Record) -> bool:
        held = self.nodes[name].disk.held
        return held.is_whole and held.store == record.store

    def operate(self) -> None:
        """Look at the copies of the nodes that answer, and elect one of them, if that may be."""
        record = self.record
        assert record is not None
        states = {
            name: self.state_of(node.role, node.life)
            for name, node in self.nodes.items()
            if isinstance(node.role, Follower) and not node.is_frozen
        }
        alive = self.alive()
        for node in sorted(states, key=lambda _: self.random.random()):
            try:
                chosen = self.elect(record, node, states, alive)
            except unclean.NotElected as why:
                self.say("not elected:", why)
                continue
            self.say("the operator elects", chosen, unclean.loss(record, node, states))
            life = self.nodes[node].life
            self.after(0.0, OPERATOR_S, partial(self.promise, chosen, life, self.revision))
            return
        if not self.is_led(record):
            self.operate_again()

    def alive(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.role is not None]

    def operate_again(self) -> None:
        self.after(OPERATOR_S / 2, OPERATOR_S, self.operate)

    def promise(self, chosen: Record, life: int, revision: int) -> None:
        """Have the copy promise the term, then put the record."""
        node = self.nodes[chosen.leader]
        role = node.role
        if node.life != life or node.is_frozen or not isinstance(role, Follower):
            return self.operate_again()
        self.act(node, role.promise(chosen.term))
        if unclean.has_kept(chosen, self.state_of(role, life)):
            self.after(0.0, OPERATOR_S, lambda: self.put_if_same(chosen, revision))
        else:
            self.operate_again()

    def put_if_same(self, chosen: Record, revision: int) -> None:
        if self.revision != revision:
            return self.operate_again()
        disk = self.nodes[chosen.leader].disk
        log = [] if disk.log is None else disk.log[: disk.synced]  # a power cut may take the rest
        kept = next(
            (at for at, one in enumerate(self.confirmed) if log[at : at + 1] != [one]),
            len(self.confirmed),
        )
        del self.confirmed[kept:]
        self.elected += 1
        self.elected_term = chosen.term
        self.lengths = {term: len(content) for term, (_, content) in self.histories.items()}
        self.put(chosen)

    def check_confirm(self, node: Node, number: int) -> None:
        """Check a confirm. What a leader of an older term confirms after the election is given up.

        It may confirm what its members had answered before they lost their disks. Only if it needs
        no other member, because it is cut off from etcd, may it confirm what it has written since.
        """
        role = node.role
        if not isinstance(role, Leader) or role.term >= self.elected_term:
            super().check_confirm(node, number)
        elif role.members() and node.base_length + number > self.lengths.get(role.term, 0):
            raise Broken(f"{node.name} confirms {number}, which no member can have")

    def judge_end(self) -> None:
        """Judge, unless the last whole copy was being compared when its leader died."""
        record = self.record
        if record is not None and any(self.is_fit(name, record) for name in self.nodes):
            super().judge_end()

    def elect(
        self, record: Record, node: str, states: dict[str, unclean.CopyState], alive: list[str]
    ) -> Record:
        return unclean.elected(record, node, states, alive)

    def state_of(self, role: Follower, life: int) -> unclean.CopyState:
        return unclean.CopyState(life, role.held, role.position, role.confirmed)

    def is_led(self, record: Record) -> bool:
        role = self.nodes[record.leader].role
        return role is not None and not isinstance(role, Follower)


class RefusedWorld(UncleanWorld):
    """A schedule in which a leader has only lost its lease, and has it again before the election.

    So the copy has promised a term in which it does not lead, and nobody asks for it again.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.refused = 0

    def lose_all_in_sync(self) -> None:
        if self.record is None:
            return
        for name in self.record.in_sync.keys() - {self.record.leader}:
            node = self.nodes[name]
            self.end(node)
            self.after(0.5, 1.0, lambda node=node: self.start(node))  # type: ignore[misc]
        self.after(0.0, OPERATOR_S / 6, self.operate)

    def alive(self) -> list[str]:
        leader = None if self.record is None else self.record.leader
        return [name for name in super().alive() if name != leader]

    def operate_again(self) -> None: ...

    def put_if_same(self, chosen: Record, revision: int) -> None:
        self.refused += 1

    def judge_end(self) -> None:
        World.judge_end(self)


class KeepsTheTerm(UncleanWorld):
    """An election in the term of the record: those who followed before cannot tell the leaders."""

    def elect(
        self, record: Record, node: str, states: dict[str, unclean.CopyState], alive: list[str]
    ) -> Record:
        chosen = super().elect(record, node, states, alive)
        return unclean.msgspec.structs.replace(chosen, term=record.term)


class ElectsAnyCopy(UncleanWorld):
    """An election that does not look whether the copy is whole, or of this store."""

    def elect(
        self, record: Record, node: str, states: dict[str, unclean.CopyState], alive: list[str]
    ) -> Record:
        state = states[node]
        return Record(record.term + 1, node, state.life, record.store, {node: state.held.copy})


BROKEN = (KeepsTheTerm, ElectsAnyCopy)
