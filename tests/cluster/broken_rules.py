"""Rules that are broken on purpose, each in one point. The simulation must convict every one."""

from __future__ import annotations

import sys
from typing import Any

from shardmq.cluster import rules
from shardmq.cluster.rules import (
    Ack,
    Effects,
    Follower,
    Leader,
    Leaving,
    Peer,
    PeerState,
    Position,
    Record,
    Refusal,
    Send,
)
from tests.cluster.simulation import Node, Operation, World


class AnswersBeforeItsSync(Follower):
    def applied(self, position: Position) -> Effects:
        effects = super().applied(position)
        return effects + self.synced(self.held.copy, position)


class WholeByAnySync(Follower):
    """Takes the sync of one file for one of all files, behind a comparison."""

    def synced(self, copy: str, position: Position, *, is_of_all: bool = False) -> Effects:
        return super().synced(copy, position, is_of_all=True)


class ListensToAnyTerm(Follower):
    @property
    def leader(self) -> str:
        record = self.record
        stands = record is None or self._proposed is not None or record.leader == self.node
        return "" if stands or record is None else record.leader

    def _accepts(self, term: int) -> bool:
        return True

    def _known_term(self) -> int:
        return self.record.term if self.record is not None else 0


class ShrinksByItself(Leader):
    """Leaves members out as soon as it has proposed so."""

    def members(self) -> set[str]:
        proposed = self._possible[-1] if self._possible else self.record
        return set(proposed.in_sync) - {self.node}


class LetsGoByItself(Leader):
    """Confirms without a member that ends in order before etcd has agreed."""

    gone: frozenset[str] = frozenset()

    def heard(self, node: str, message: Ack | Refusal | Leaving, now: float) -> Effects:
        peer = self.peers.get(node)
        if isinstance(message, Leaving) and peer is not None and peer.session == message.session:
            self.gone |= {node}
        return super().heard(node, message, now)

    def members(self) -> set[str]:
        return super().members() - self.gone

    def _adopt(self, record: Record, revision: int, now: float) -> None:
        super()._adopt(record, revision, now)
        self.gone &= record.in_sync.keys()


class TakesLeavingForAnAnswer(Leader):
    """Counts a member that ends in order as one that has all, until etcd has agreed."""

    _is_leaving = False

    def heard(self, node: str, message: Ack | Refusal | Leaving, now: float) -> Effects:
        self._is_leaving = isinstance(message, Leaving)
        effects = super().heard(node, message, now)
        self._is_leaving = False
        return effects

    def _forget(self, peer: Peer) -> None:
        if self._is_leaving:
            peer.state, peer.acked = PeerState.STREAMING, self._last_sync
        else:
            super()._forget(peer)


class TakesTails(Leader):
    """Lets a follower go on that has operations which this leader never had."""

    def _is_own(self, position: Position, last: int) -> bool:
        return position.term < self.term or position.number <= last


class FollowsAnyTerm(Follower):
    """Takes the first operation of a term wherever the term before it ended."""

    def operations(self, session: int, at: Position, count: int, now: float) -> int | Effects:
        if self.position is not None and at.term > self.position.term and at.number == 1:
            return 0 if self._is_heard(session) and self._is_greeted else count
        return super().operations(session, at, count, now)


class MergesTails(World):
    leader = TakesTails
    follower = FollowsAnyTerm


class KeepsItsTail(Follower):
    """A node that led goes on with its files as they are, as if it had followed to the end."""

    def connected(self, now: float) -> Effects:
        effects = super().connected(now)
        record = self.record
        if self.position is None and record is not None and self.held.is_whole and effects:
            return [
                Send(each.node, rules.msgspec.structs.replace(each.message, position=self._tail()))
                for each in effects
                if isinstance(each, Send)
            ]
        return effects

    def _tail(self) -> Position:
        self.position = Position(self.held.term, 1)
        return self.position


class StandsOutsideTheSet(Follower):
    @property
    def is_member(self) -> bool:
        return self.record is not None and self.held.is_whole


class StandsByNodeName(Follower):
    """Does not look which copy is in the set, so a lost or old disk counts as the member's."""

    @property
    def is_member(self) -> bool:
        return self.record is not None and self.node in self.record.in_sync


class TrustsItsLease(Leader):
    """Confirms what is on its own disk, as long as nobody told it that its lease is over."""

    def _answered(self) -> int:
        return sys.maxsize


class TakesOverByTheClock(Follower):
    """Leads as soon as the leader's lease is over, without asking for the record."""

    def _stand(self, record: Record) -> Effects:
        proposed = super()._stand(record)[-1]
        assert isinstance(proposed, rules.Propose)
        self._proposed = None
        return self._lead(proposed.record, self.revision)


class TrustsTheClock(Follower):
    """Takes a record for an old one if the process that leads began earlier, by its clock."""

    def recorded(self, record: Record | None, revision: int, now: float) -> Effects:
        before, is_older = self.record, False
        if before is not None and record is not None:
            is_older = before.leader == record.leader and record.life < before.life
        return [] if is_older else super().recorded(record, revision, now)


class ToleratesGaps(Follower):
    """Answers a sync although operations before it never came."""

    def operations(self, session: int, at: Position, count: int, now: float) -> int | Effects:
        position = self.position
        if position is not None and position.term == at.term and at.number > position.number:
            return 0 if self._is_heard(session) and self._is_greeted else count
        return super().operations(session, at, count, now)


class JoinsBehind(Leader):
    """Puts a follower into the set that still lacks the last confirmed sync."""

    def _may_join(self, peer: Peer) -> bool:
        return (
            peer.state is PeerState.STREAMING
            and peer.acked >= 0
            and (peer.acked >= self._confirmed_before)
        )


class TakesInWhileItWrites(Leader):
    """Puts a follower into the set only while a sync waits to be confirmed."""

    def _may_join(self, peer: Peer) -> bool:
        return super()._may_join(peer) and bool(self._syncs)


class CountsByTheSettings(Leader):
    """Takes the numbers of the settings for a shard that has its own."""

    def copies_are(self, count: int, now: float, min_in_sync: int | None = None) -> Effects:
        return super().copies_are(count, now)


class ForgetsItsProposal(Leader):
    """Counts a new member only when it has heard that the record has it."""

    def members(self) -> set[str]:
        return set(self.record.in_sync) - {self.node}


class ComparesMembers(Leader):
    """Begins a comparison while the node is still in the set."""

    def _compare(self) -> Effects:
        for peer in self.peers.values():
            if peer.state is PeerState.WAITING:
                self.record = rules.msgspec.structs.replace(
                    self.record,
                    in_sync={
                        node: copy
                        for node, copy in self.record.in_sync.items()
                        if node != peer.node
                    },
                )
        return super()._compare()


class WritesThatAreNotSent(World):
    """Some kind of change is done on the own disk only."""

    def send_operations(self, node: Node, to: str, session: int, found: list[Operation]) -> None:
        sent = [each for each in found if each.is_sync or each.content % 5]
        super().send_operations(node, to, session, sent)


def world_of(kind: type[Leader] | type[Follower] | type[World]) -> type[World]:
    if issubclass(kind, World):
        return kind
    part = "leader" if issubclass(kind, Leader) else "follower"
    return type(kind.__name__, (World,), {part: kind})


BROKEN: tuple[Any, ...] = (
    AnswersBeforeItsSync,
    WholeByAnySync,
    ListensToAnyTerm,
    ShrinksByItself,
    LetsGoByItself,
    TakesLeavingForAnAnswer,
    MergesTails,
    KeepsItsTail,
    StandsOutsideTheSet,
    StandsByNodeName,
    TrustsItsLease,
    TakesOverByTheClock,
    TrustsTheClock,
    ToleratesGaps,
    JoinsBehind,
    TakesInWhileItWrites,
    CountsByTheSettings,
    ForgetsItsProposal,
    ComparesMembers,
    WritesThatAreNotSent,
)
