"""The rules of copies: who leads, what is confirmed, who may take over.

Several nodes hold copies of one store. One of them leads: it numbers the operations that change its
files, without a gap within its *term*, and the others follow: they apply the operations in order
and answer each sync when their own is done. `Leader` and `Follower` decide what happens. They do no
I/O and read no clock: each input returns effects, which somebody else carries out in their order.

One *record* outside of the nodes says the term, the leader and the *in-sync set*. It is changed by
compare-and-swap on its revision only. What follows from that:

- A sync is confirmed when the leader and each member of the in-sync set have done it. While the
  outcome of a compare-and-swap is unknown, each member of each set that may be in the record has
  to answer.
- So each member has all that was confirmed, and any member may take over: it proposes a record
  with a higher term. A leader that has been replaced cannot confirm any more, because the new
  leader, or a member that has heard of the higher term, does not answer it; and it cannot take
  them out of the set, because the revision of the record is another one.
- A copy that is made like the leader's by a comparison is in no usable state meanwhile. So it
  leaves the set first, by the record, and comes back under a new name.

A *copy* is what lies on the disk of one node since its last comparison. The in-sync set has the
name of the copy beside each node: a node that has lost its disk, or has an old one, is no member.
A *life* is one process of a node, by a number that rises. A *session* is one connection; its number
is never used again.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

SESSIONS_MAX: Final = 1 << 24  # of one life
HEIR_LAG_S_MAX: Final = 0.5  # of a node that gets the lead in order
UNNAMED_STORE: Final = "before"  # of files that were there before their node had copies


class RecordError(ValueError):
    """A record that must not be."""


class Position(NamedTuple):
    """The place of an operation: the term of the leader that numbered it, and its number from 1."""

    term: int
    number: int


class Record(msgspec.Struct, frozen=True):
    """The knowledge that lies outside of the nodes. `in_sync` has the names of copies by node.

    Raises RecordError when the leader is not in the set.
    """

    term: int
    leader: str
    life: int
    store: str
    in_sync: dict[str, str]

    def __post_init__(self) -> None:
        if self.leader not in self.in_sync:
            raise RecordError(f"the in-sync set {sorted(self.in_sync)} lacks {self.leader}")


class Held(msgspec.Struct, frozen=True):
    """The knowledge of a node about its copy; it is on stable storage beside the copy.

    store: of which store it is a copy, "" if of none.
    copy: its name, new after each comparison.
    is_whole: a comparison is over, so the files can be used.
    is_founding: this node made the store, and has not seen it in the record yet.
    term: the highest in which the node has listened to a leader.
    promised: no leader of a lower term is listened to, because this copy was to be elected. The
        election may have failed, so this says nothing about who leads.
    """

    store: str = ""
    copy: str = ""
    is_whole: bool = False
    is_founding: bool = False
    term: int = 0
    promised: int = 0


class Settings(msgspec.Struct, frozen=True):
    """The times that the rules wait, in seconds.

    lag_s: after so long without an answer a member is taken out of the in-sync set.
    heartbeat_s: between two pings of the leader; far below `lag_s`.
    retry_s: until a read or a takeover is tried again.
    restart_wait_s: a member that does not know its position leaves the takeover so long to others.
    disk_stall_s: a leader whose own sync takes longer gives its place away.
    min_in_sync: with fewer nodes in the set, the leader included, nothing is confirmed; 0: half of
        the nodes that have a copy or are to have one, rounded up.
    """

    lag_s: float = 5.0
    heartbeat_s: float = 1.0
    retry_s: float = 0.5
    restart_wait_s: float = 1.0
    disk_stall_s: float = 10.0
    min_in_sync: int = 1


def heartbeat_s_of(lag_s: float) -> float:
    """Return how often a leader pings, in seconds: several times before a silence of `lag_s`."""
    return min(1.0, lag_s / 5)


# -- messages --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """A follower begins a session. `position` is None if its process has not applied anything.

    methods: those by which the leader may compress. The rules do not look at them; an older release
        ignores them, and its own hello has none.
    """

    session: int
    node: str
    life: int
    held: Held
    position: Position | None
    term: int
    methods: list[str] = []


class Ack(msgspec.Struct, tag="ack", array_like=True, frozen=True):
    """The follower has all operations up to `number`, synced; -1 if it cannot say. Answers Ping."""

    session: int
    term: int
    number: int


class Refusal(msgspec.Struct, tag="refusal", array_like=True, frozen=True):
    """The follower has heard of a higher term."""

    session: int
    term: int


class Leaving(msgspec.Struct, tag="leaving", array_like=True, frozen=True):
    """The follower ends in order, so that nothing has to wait for it.

    A leader of an older release closes the connection, and waits as for a follower that dies.
    """

    session: int
    term: int


class Continue(msgspec.Struct, tag="continue", array_like=True, frozen=True):
    """The operations after the follower's position come next. The term began after `base`."""

    session: int
    term: int
    base: Position | None


class Compare(msgspec.Struct, tag="compare", array_like=True, frozen=True):
    """The follower has to make its files like the leader's; its copy has this name then."""

    session: int
    term: int
    store: str
    copy: str


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """The leader is there. Members may forget the operations up to `confirmed`."""

    session: int
    term: int
    confirmed: int


FromFollower = Hello | Ack | Refusal | Leaving
FromLeader = Continue | Compare | Ping


# -- effects ---------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send a message to a node, in its session."""

    node: str
    message: FromFollower | FromLeader


class Propose(NamedTuple):
    """Put the record if the present one has this revision (0: there is none); then `swapped`."""

    record: Record
    revision: int


class Read(NamedTuple):
    """Read the record, not from a cache; then `recorded`."""


class Confirm(NamedTuple):
    """All syncs up to this number are done on every copy that counts."""

    number: int


class StepDown(NamedTuple):
    """Lead no more: confirm nothing, and end this process."""

    why: str


class Lead(NamedTuple):
    """Lead from now on: a `Leader` takes the place of the `Follower`.

    The files are synced first. `base` is the position up to which they are applied, if it is known.
    """

    record: Record
    revision: int
    base: Position | None


class Stream(NamedTuple):
    """Send the operations after this position, and all that come, in this session."""

    node: str
    session: int
    after: Position


class Snapshot(NamedTuple):
    """Send what the files are now, in this session, then the operations from there on."""

    node: str
    session: int


class Cut(NamedTuple):
    """Close the connection to a node."""

    node: str
    why: str


class Keep(NamedTuple):
    """Put this on stable storage, before the next effect."""

    held: Held


class Begin(NamedTuple):
    """Begin a comparison; with `aside`, put the files of another store into a folder so called."""

    aside: str


Effect = Send | Propose | Read | Confirm | StepDown | Lead | Stream | Snapshot | Cut | Keep | Begin
Effects = list[Effect]


class Swap(enum.Enum):
    """The outcome of a compare-and-swap that gave no revision."""

    REFUSED = 1  # the record has another revision
    UNKNOWN = 2  # no answer in time: it may take effect, even later


# -- the leader ------------------------------------------------------------------------------------


class PeerState(enum.Enum):
    WAITING = 1  # has to be compared, and is still in the in-sync set
    COMPARING = 2
    STREAMING = 3


class Peer:
    """A follower that is connected, as its leader sees it."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.node = hello.node
        self.life = hello.life
        self.session = hello.session
        self.copy = hello.held.copy
        self.state = PeerState.WAITING
        self.acked = -1
        self.heard_at = now
        self.is_joining = False  # no member yet, but nothing is confirmed without it


class Wait(enum.Enum):
    """A sync that is not confirmed waits for this."""

    OWN_DISK = 1
    MORE_MEMBERS = 2  # the in-sync set is too small
    MEMBERS = 3  # one of the in-sync set has not answered
    ENDED_MEMBERS = 4  # all others of the in-sync set have ended in order, and nobody follows


class Leader:
    """The rules of a node that leads in one term, until it steps down.

    record, revision: as far as this node knows them.
    base: up to where the copy was applied when the term began, if that is known.
    answered: up to this number no sync, of now or later, waits for another node.
    """

    def __init__(
        self,
        node: str,
        life: int,
        record: Record,
        revision: int,
        base: Position | None,
        settings: Settings,
        now: float,
    ) -> None:
        self.node = node
        self.life = life
        self.record = record
        self.revision = revision
        self.base = base
        self.term: Final = record.term
        self.peers: dict[str, Peer] = {}
        self.confirmed = 0
        self.has_stepped_down = False
        self._settings = settings
        self._confirmed_before = 0
        self._syncs: deque[tuple[int, float]] = deque()  # begun, and not confirmed
        self._local: dict[int, float] = {}  # own syncs under way, with their beginning
        self._last_sync = 0
        self._absent_since = dict.fromkeys(record.in_sync, now)
        self._proposed: Record | None = None  # its outcome is awaited
        self._possible: list[Record] = []  # may be in the record or come there
        self._reads_since: float | None = None  # no proposal before the record is read again
        self._pinged_at = self._ticked_at = now
        self._hands_over_to = ""
        self._late: set[str] = set()  # members who have to leave
        self._ended: set[str] = set()  # nodes whose process has ended in order, and is not back
        self._copies = 1  # nodes that have a copy or are to have one
        self._min_in_sync = settings.min_in_sync
        self.answered = self._answered()

    # -- inputs ------------------------------------------------------------------------------------

    def sync_begun(self, number: int, now: float) -> None:
        """Note that an operation is a sync, before it is sent and before the own sync begins."""
        self._syncs.append((number, now))
        self._local[number] = now
        self._last_sync = number

    def sync_done(self, number: int) -> Effects:
        """Take the end of an own sync. Nothing else than a confirm becomes possible by it."""
        del self._local[number]
        return [] if self.has_stepped_down else self._confirm()

    def greeted(self, hello: Hello, oldest: Position, last: int, now: float) -> Effects:
        """Take the beginning of a session.

        oldest: the operations after this position can still be sent.
        last: the number of the last operation.
        """
        if hello.term > self.term:
            return self._step_down(f"{hello.node} knows of term {hello.term}")
        known = self.peers.get(hello.node)
        if known is not None and known.session >= hello.session:
            return []
        peer = self.peers[hello.node] = Peer(hello, now)
        self._ended.discard(hello.node)
        effects: Effects = []
        if self._may_continue(hello, oldest, last):
            peer.state = PeerState.STREAMING
            assert hello.position is not None
            effects += [
                Send(peer.node, Continue(peer.session, self.term, self.base)),
                Stream(peer.node, peer.session, hello.position),
            ]
        return effects + self._act(now)

    def heard(self, node: str, message: Ack | Refusal | Leaving, now: float) -> Effects:
        peer = self.peers.get(node)
        if peer is None or peer.session != message.session:
            return []
        if message.term > self.term:
            return self._step_down(f"{node} knows of term {message.term}")
        if isinstance(message, Refusal) or message.term != self.term:
            return []
        if isinstance(message, Leaving):
            self._forget(peer)
            self._ended.add(node)
            late = self._late | {node} & self.members()
            left = min(len(each.in_sync.keys() - late) for each in (self.record, *self._possible))
            # With too few left nothing is confirmed, and it may be back soon. When all nodes end,
            # those that are left may lead at the next start, so half of the copies stay.
            if left >= max(self._min_in_sync, (self._copies + 1) // 2):
                self._late = late
            return self._act(now)
        peer.heard_at = now
        peer.acked = max(peer.acked, message.number)
        if (
            node in self.record.in_sync
            and peer.state is PeerState.STREAMING
            and not (self._hands_over_to or self._possible or self._proposed)
            and self._reads_since is None
            and not self.has_stepped_down
        ):
            # As nearly always, this makes nothing possible but a confirm: it is not the answer of
            # an heir, nor of a node that joins, and `tick` looks at what becomes late.
            self.answered = self._answered()
            return self._confirm()
        if peer.state is PeerState.COMPARING and peer.acked >= 0:
            peer.state = PeerState.STREAMING
        return self._act(now)

    def disconnected(self, node: str, session: int, now: float) -> Effects:
        peer = self.peers.get(node)
        if peer is not None and peer.session == session:
            self._forget(peer)
        return self._act(now)

    def swapped(self, outcome: int | Swap, now: float) -> Effects:
        """Take the outcome of the last proposal: the new revision, or why there is none."""
        proposed, self._proposed = self._proposed, None
        if isinstance(outcome, int):
            return self.recorded(proposed, outcome, now)
        if outcome is Swap.REFUSED and proposed in self._possible:
            self._possible.remove(proposed)
        self._reads_since = now
        return [Read()]

    def recorded(self, record: Record | None, revision: int, now: float) -> Effects:
        """Take the record as it was read, or came by itself; an older one is ignored.

        revision: of the record; without one, of the whole store when it was read.
        """
        if revision < self.revision:
            return []
        if record is None:
            return self._step_down("the record is gone")
        if (record.term, record.leader, record.life) != (self.term, self.node, self.life):
            return self._step_down(f"{record.leader} leads in term {record.term}")
        if revision > self.revision:
            self._adopt(record, revision, now)
        self._reads_since = None
        return self._act(now)

    def copies_are(self, count: int, now: float, min_in_sync: int | None = None) -> Effects:
        """Take how many nodes have a copy or are to have one, this one included.

        min_in_sync: that of the shard; None: that of the settings.
        """
        self._copies = count
        self._min_in_sync = self._settings.min_in_sync if min_in_sync is None else min_in_sync
        return self._act(now)

    def hand_over(self, node: str, now: float) -> Effects:
        """Give the lead to a member of the in-sync set, as soon as it has all there is.

        If this member has left, or is not connected, another one gets the lead. The caller begins
        no operation any more. The end of this is a StepDown, unless another call with "" takes it
        back before.
        """
        self._hands_over_to = node
        return self._act(now)

    def tick(self, now: float) -> Effects:
        """Look at the time; at least once in each heartbeat."""
        effects: Effects = []
        pause_s = now - self._ticked_at
        if pause_s > 3 * self._settings.heartbeat_s:
            # Nobody is blamed for a time in which this process did not run itself.
            for peer in self.peers.values():
                peer.heard_at = min(now, peer.heard_at + pause_s)
            self._absent_since = {
                node: min(now, since + pause_s) for node, since in self._absent_since.items()
            }
            self._local = {number: min(now, at + pause_s) for number, at in self._local.items()}
            self._syncs = deque((number, min(now, at + pause_s)) for number, at in self._syncs)
        self._ticked_at = now
        if now - self._pinged_at >= self._settings.heartbeat_s:
            self._pinged_at = now
            effects += [
                Send(peer.node, Ping(peer.session, self.term, self.confirmed))
                for peer in self.peers.values()
            ]
        if self._reads_since is not None and now - self._reads_since >= self._settings.retry_s:
            self._reads_since = now
            effects.append(Read())
        for peer in list(self.peers.values()):
            if self._is_late(peer, now):
                self._forget(peer)
                self._late |= {peer.node} & self.record.in_sync.keys()
                effects.append(Cut(peer.node, f"no answer for {self._settings.lag_s:g} s"))
        return effects + self._act(now)

    # -- decisions ---------------------------------------------------------------------------------

    def members(self) -> set[str]:
        """Return the nodes that are, or may be, in the in-sync set of the record, but this one."""
        nodes = set(self.record.in_sync)
        for record in self._possible:
            nodes.update(record.in_sync)
        nodes.discard(self.node)
        return nodes

    def waits_for(self) -> Wait | None:
        """Return what the oldest sync that is not confirmed waits for; None if there is none."""
        if not self._syncs:
            return None
        if min(self._local, default=self._last_sync + 1) <= self._syncs[0][0]:
            return Wait.OWN_DISK
        members = self.members()
        # A node that follows, and is no member yet, may become one, and lead next.
        if members and members <= self._ended and not self.peers:
            return Wait.ENDED_MEMBERS
        return Wait.MEMBERS if self.are_enough() else Wait.MORE_MEMBERS

    def lag_s(self, node: str, now: float) -> float:
        """Return for how long the oldest sync waits for this node."""
        acked = self.peers[node].acked if node in self.peers else -1
        for number, begun in self._syncs:
            if number > acked:
                return now - begun
        return 0.0

    def _act(self, now: float) -> Effects:
        """Do what has become possible: compare, propose, confirm."""
        if self.has_stepped_down:
            return []
        effects = [*self._compare(), *self._propose(now)]
        self.answered = self._answered()
        return effects + self._confirm()

    def _may_continue(self, hello: Hello, oldest: Position, last: int) -> bool:
        """Return whether the copy of a follower was the leader's at some moment that is known.

        A position behind the end of the base has operations that this leader never had.
        """
        position, held = hello.position, hello.held
        if position is None or not held.is_whole or held.store != self.record.store:
            return False
        if any(
            record.in_sync.get(hello.node, held.copy) != held.copy
            for record in (self.record, *self._possible)
        ):
            return False
        if position < oldest:
            return False
        return self._is_own(position, last)

    def _is_own(self, position: Position, last: int) -> bool:
        if position.term == self.term:
            return position.number <= last
        return self.base is not None and (
            position.term == self.base.term and position.number <= self.base.number
        )

    def _compare(self) -> Effects:
        """Begin the comparison with those who are not in the set, by what is known for sure."""
        effects: Effects = []
        members = self.members()
        for peer in self.peers.values():
            if peer.state is PeerState.WAITING and peer.node not in members:
                peer.state = PeerState.COMPARING
                peer.copy = f"{peer.node}-{self.term}-{peer.life}-{peer.session}"
                effects += [
                    Send(
                        peer.node,
                        Compare(peer.session, self.term, self.record.store, peer.copy),
                    ),
                    Snapshot(peer.node, peer.session),
                ]
        return effects

    def _propose(self, now: float) -> Effects:
        """Propose the next record, if it has to change and no other proposal is under way."""
        if self._proposed is not None or self._reads_since is not None:
            return []
        record = self._successor(now)
        if record is None:
            in_sync = {
                node: copy
                for node, copy in self.record.in_sync.items()
                if not self._is_to_leave(node, now)
            }
            in_sync |= {
                peer.node: peer.copy
                for peer in self.peers.values()
                if peer.node not in self.record.in_sync and self._may_join(peer)
            }
            if in_sync == self.record.in_sync and not self._possible:
                return []
            # An unchanged record gets another revision, so that older proposals fail for sure.
            record = msgspec.structs.replace(self.record, in_sync=in_sync)
        self._proposed = record
        self._possible.append(record)
        return [Propose(record, self.revision)]

    def _successor(self, now: float) -> Record | None:
        """Return a record in which another node leads, if this one has to give its place away.

        This node leaves the set: its process ends, and the heir must not wait for the next one. If
        the heir could confirm nothing without it, it stays, and may lead at the next start.
        """
        stalled = any(now - begun > self._settings.disk_stall_s for begun in self._local.values())
        if not stalled and not self._hands_over_to:
            return None
        fit = [
            peer
            for peer in self.peers.values()
            if peer.node in self.record.in_sync and peer.state is PeerState.STREAMING
        ]
        if not stalled:
            named = [peer for peer in fit if peer.node == self._hands_over_to]
            fit = [peer for peer in named or fit if peer.acked >= self._last_sync]
        if not fit:
            return None
        heir = max(fit, key=lambda peer: (peer.acked, peer.node))
        in_sync = dict(self.record.in_sync)
        if stalled or self.are_enough(without=1):
            del in_sync[self.node]
        return Record(self.term + 1, heir.node, heir.life, self.record.store, in_sync)

    def _is_to_leave(self, node: str, now: float) -> bool:
        if node == self.node:
            return False
        if node in self._late:
            return True
        peer = self.peers.get(node)
        if peer is None:
            return now - self._absent_since.get(node, now) > self._settings.lag_s
        return peer.state is PeerState.WAITING

    def _is_late(self, peer: Peer, now: float) -> bool:
        """Return whether a follower is silent, or holds confirms up, for too long."""
        counts = peer.is_joining or peer.node in self.members()
        return now - peer.heard_at > self._settings.lag_s or (
            counts
            and peer.state is PeerState.STREAMING
            and self.lag_s(peer.node, now) > self._settings.lag_s
        )

    def _may_join(self, peer: Peer) -> bool:
        """Return whether a follower has all that was confirmed, so that it may be a member.

        A follower that is one confirm behind holds the next ones up, so that it gets there.
        """
        if peer.state is not PeerState.STREAMING or peer.acked < 0:
            return False
        if peer.acked >= self.confirmed:
            return True
        peer.is_joining = peer.is_joining or peer.acked >= self._confirmed_before
        return False

    def _answered(self) -> int:
        nodes = self.members()
        for peer in self.peers.values():
            if peer.is_joining:
                nodes.add(peer.node)
        return min(self._numbers(nodes), default=sys.maxsize)

    def _confirm(self) -> Effects:
        if not self._syncs or self._syncs[0][0] > self.answered:
            return []
        own = min(self._local, default=self._last_sync + 1) - 1
        done = min(own, self.answered)
        if self._syncs[0][0] > done or not self.are_enough():
            return []
        number = self.confirmed
        while self._syncs and self._syncs[0][0] <= done:
            number, _ = self._syncs.popleft()
        self._confirmed_before, self.confirmed = self.confirmed, number
        return [Confirm(number)]

    def are_enough(self, without: int = 0) -> bool:
        """Return whether there are as many members as a confirm needs, when so many are away."""
        smallest = len(self.record.in_sync)
        for record in self._possible:
            smallest = min(smallest, len(record.in_sync))
        return smallest - without >= (self._min_in_sync or (self._copies + 1) // 2)

    def _numbers(self, nodes: Iterable[str]) -> Iterable[int]:
        for node in nodes:
            peer = self.peers.get(node)
            is_counted = peer is not None and peer.state is PeerState.STREAMING
            yield peer.acked if peer is not None and is_counted else -1

    # -- what changes ------------------------------------------------------------------------------

    def _adopt(self, record: Record, revision: int, now: float) -> None:
        for node in record.in_sync.keys() - self.record.in_sync.keys():
            self._absent_since[node] = now
            if node in self.peers:
                self.peers[node].is_joining = False
        self.record, self.revision = record, revision
        self._late &= record.in_sync.keys()
        # Each proposal so far compares with an older revision: it is in this record, or fails.
        self._possible.clear()

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer.node]
        self._absent_since[peer.node] = peer.heard_at

    def _step_down(self, why: str) -> Effects:
        if self.has_stepped_down:
            return []
        self.has_stepped_down = True
        return [StepDown(why)]


def keeps_up(leader: Leader, node: str, now: float) -> bool:
    """Return whether a node is a member of the in-sync set that can lead at once."""
    peer = leader.peers.get(node)
    return (
        peer is not None
        and node in leader.record.in_sync
        and peer.state is PeerState.STREAMING
        and leader.lag_s(node, now) < HEIR_LAG_S_MAX
    )


def may_leave(leader: Leader, heir: str, now: float) -> bool:
    """Return whether a member can lead at once, and confirm before this node is in sync again."""
    late = [node for node in leader.members() if not keeps_up(leader, node, now)]
    return keeps_up(leader, heir, now) and leader.are_enough(without=1 + len(late))


# -- the follower, who may take over ---------------------------------------------------------------


class Follower:
    """The rules of a node that does not lead, until it leads.

    held: what lies on its disk.
    founds: the name of a new store, if this node may make the first record; else "".
    """

    def __init__(
        self, node: str, life: int, held: Held, settings: Settings, founds: str = ""
    ) -> None:
        self.node = node
        self.life = life
        self.held = held
        self.position: Position | None = None
        self.record: Record | None = None
        self.revision = -1  # nothing was read yet
        self.leads = False
        self.confirmed: Position | None = None  # what this process has heard of last
        self._settings = settings
        self._founds = founds
        self._session = life * SESSIONS_MAX
        self._peer = ""  # the node of the session
        self._is_greeted = False
        self._base: Position | None = None
        self._synced = -1
        self._whole_at = 0
        self._heard_at = 0.0
        self._gone_at: float | None = None  # since when the leader of the record counts as gone
        self._proposed: Record | None = None

    @property
    def leader(self) -> str:
        """Return the node to connect to: "" if there is none, or while this node stands.

        The leader of a term below the one promised is connected to, too: it hears of the term and
        steps down, and the next one leads in a higher term. Else a copy whose election has failed
        would never follow again.
        """
        record = self.record
        if record is None or self._proposed is not None or record.term < self.held.term:
            return ""
        return "" if record.leader == self.node else record.leader

    @property
    def is_member(self) -> bool:
        """Return whether this copy is in the in-sync set, so that the node may take over."""
        record, held = self.record, self.held
        return (
            record is not None
            and held.is_whole
            and record.store == held.store
            and record.in_sync.get(self.node) == held.copy
        )

    # -- inputs ------------------------------------------------------------------------------------

    def recorded(self, record: Record | None, revision: int, now: float) -> Effects:
        """Take the record as it was read, or came by itself; an older one is ignored.

        revision: of the record; without one, of the whole store when it was read.
        """
        if self.leads or revision < self.revision:
            return []
        before, self.record, self.revision = self.record, record, revision
        effects: Effects = []
        if record is None:
            self._gone_at = now if self._gone_at is None else self._gone_at
            return effects
        if before is None or (before.term, before.leader, before.life) != (
            record.term,
            record.leader,
            record.life,
        ):
            self._gone_at = None
            effects += self._end_session("another leader")
        if self.held.is_founding and record.store == self.held.store:
            effects += self._keep(is_founding=False)
        if record.leader == self.node:
            if record.life == self.life and self.is_member:
                return effects + self._lead(record, revision)
            self._gone_at = now if self._gone_at is None else self._gone_at
        return effects

    def leader_gone(self, term: int, now: float) -> None:
        """Take a sign that nobody leads in this term: a lease that ended, or the node says so.

        The sign need not be right: what follows is decided by compare-and-swap.
        """
        if self.record is not None and self.record.term == term and self._gone_at is None:
            self._gone_at = now

    def connected(self, now: float) -> Effects:
        """Begin a session, because there is a connection to `leader`."""
        if self.leads or not self.leader:
            return []
        self._session += 1
        self._peer, self._is_greeted, self._heard_at = self.leader, False, now
        hello = Hello(
            self._session, self.node, self.life, self.held, self.position, self._known_term()
        )
        return [Send(self._peer, hello)]

    def disconnected(self) -> None:
        self._peer, self._is_greeted = "", False

    def heard(self, message: FromLeader, now: float) -> Effects:
        if not self._is_heard(message.session):
            return []
        if not self._accepts(message.term):
            refusal = Send(self._peer, Refusal(message.session, self._known_term()))
            return [refusal, *self._end_session("an older term")]
        match message:
            case Ping():
                if not self._is_greeted:
                    return []
                self._heard_at = now
                self.confirmed = Position(message.term, message.confirmed)
                return self._ack()
            case Continue():
                if self._is_greeted:
                    return []
                self._greet(now)
                self._base = message.base
                effects = self._keep(term=message.term)
                if self.position is not None and self.position.term != message.term:
                    self._synced = -1  # counts operations of the former term
                return effects + self._ack()
            case Compare():
                if self._is_greeted:
                    return []
                self._greet(now)
                self.position, self._synced = None, -1
                store = self.held.store
                is_same = store == message.store
                aside = "" if is_same else f"{store or UNNAMED_STORE}-{self.life}"
                # The other store is named until its files are aside: who dies between must do it.
                given_up = self._keep(is_whole=False, is_founding=False)
                is_another = self._keep(store=message.store, copy=message.copy, term=message.term)
                return [*given_up, Begin(aside), *is_another]

    def is_comparing(self, session: int) -> bool:
        """Return whether the leader may change files of the copy by what it sends of its own."""
        is_begun = self._is_greeted and not self.held.is_whole and self.position is None
        return is_begun and self._is_heard(session)

    def compared(self, session: int, at: Position, whole_at: int) -> bool:
        """Take the end of a comparison, which was begun at `at`; return whether it counts.

        The files can be used when the operation `whole_at` is applied.
        """
        if not self.is_comparing(session):
            return False
        self.position, self._whole_at = at, whole_at
        return True

    def operations(self, session: int, at: Position, count: int, now: float) -> int | Effects:
        """Return how many of these operations are known already and must be skipped.

        at: the position of the first of them.
        Where operations are missing before them, the return value ends the session.
        """
        if not self._is_heard(session) or not self._is_greeted:
            return count
        self._heard_at = now
        position = self.position
        if position is None:
            return self._end_session("operations before the end of the comparison")
        if at.term < position.term:
            return count
        if at.term > position.term:
            if at.number == 1 and position == self._base:
                return 0
            return self._end_session(f"{at} does not follow {position}")
        known = position.number + 1 - at.number
        if known < 0:
            return self._end_session(f"operations are missing between {position} and {at}")
        return min(known, count)

    def applied(self, position: Position) -> Effects:
        """Take that all operations up to there are applied."""
        if self.position is not None and position.term != self.position.term:
            self._synced = -1
        self.position = position
        return []

    def was_busy(self, now: float) -> None:
        """Take that this node could hear nobody until now: the leader is not silent for that."""
        self._heard_at = max(self._heard_at, now)

    def synced(self, copy: str, position: Position, *, is_of_all: bool = False) -> Effects:
        """Take that all syncs of this copy up to there are done. The caller tells them in order.

        is_of_all: All files were synced. What a comparison brought is on stable storage only then,
            so until the copy is whole no other sync counts.
        """
        if self.leads or copy != self.held.copy:
            return []
        if self.position is None or position.term != self.position.term:
            return []
        effects: Effects = []
        if not self.held.is_whole:
            if not is_of_all or position.number < self._whole_at:
                return []
            effects += self._keep(is_whole=True)
        self._synced = max(self._synced, position.number)
        return effects + self._ack()

    def failed(self, why: str) -> Effects:
        """Take that an operation could not be applied, so that the position is not known."""
        self.position, self._synced = None, -1
        return self._end_session(why)

    def leave(self) -> Effects:
        """Tell the leader that this process ends. The caller does not connect any more."""
        if not self._peer:
            return []
        leaving = Send(self._peer, Leaving(self._session, self._known_term()))
        return [leaving, *self._end_session("this process ends")]

    def promise(self, term: int) -> Effects:
        """Listen to no leader of a lower term any more, because this copy is to be elected.

        Else what a leader had sent before it died could tear the copy that leads next.
        """
        if self.leads:
            return []
        kept = self._keep(promised=max(self.held.promised, term))
        return [*self._end_session("an election"), *kept]

    def swapped(self, outcome: int | Swap, now: float) -> Effects:
        """Take the outcome of the proposal to lead."""
        proposed, self._proposed = self._proposed, None
        if isinstance(outcome, int):
            return self.recorded(proposed, outcome, now)
        if self._gone_at is not None:
            self._gone_at = now + self._settings.retry_s
        return [Read()]

    def tick(self, now: float) -> Effects:
        """Look at the time; at least once in each heartbeat."""
        if self.leads or self._proposed is not None:
            return []
        if self._peer and now - self._heard_at > self._settings.lag_s:
            return self._end_session("the leader is silent")
        if self._gone_at is None or self.revision < 0:
            return []
        if self.record is None:
            return self._found() if now >= self._gone_at else []
        wait_s = 0.0 if self.position is not None else self._settings.restart_wait_s
        if now < self._gone_at + wait_s or not self.is_member:
            return []
        return self._stand(self.record)

    # -- decisions ---------------------------------------------------------------------------------

    def _is_heard(self, session: int) -> bool:
        """Return whether a message counts: not of an older session, and not while this stands."""
        return (
            self._peer != ""
            and session == self._session
            and self._proposed is None
            and not self.leads
        )

    def _accepts(self, term: int) -> bool:
        return term >= self._known_term()

    def _known_term(self) -> int:
        term = 0 if self.record is None else self.record.term
        return max(self.held.term, self.held.promised, term)

    def _stand(self, record: Record) -> Effects:
        """Propose to lead with the members that there are, but without the one that led."""
        in_sync = {node: copy for node, copy in record.in_sync.items() if node != record.leader}
        in_sync[self.node] = self.held.copy
        effects = self._end_session("this node stands")
        term = self._known_term() + 1
        self._proposed = Record(term, self.node, self.life, record.store, in_sync)
        return [*effects, Propose(self._proposed, self.revision)]

    def _found(self) -> Effects:
        """Propose the first record, unless this copy is of a store that was there before."""
        if not self.held.is_founding:
            if not self._founds or self.held.store:
                return []
            copy = f"{self.node}-{self.life}-{self._founds}"
            effects = self._keep(store=self._founds, copy=copy, is_whole=True, is_founding=True)
        else:
            effects = []
        held = self.held
        self._proposed = Record(1, self.node, self.life, held.store, {self.node: held.copy})
        return [*effects, Propose(self._proposed, 0)]

    def _lead(self, record: Record, revision: int) -> Effects:
        self.leads = True
        effects = self._end_session("this node leads") + self._keep(term=record.term)
        return [*effects, Lead(record, revision, self.position)]

    def _ack(self) -> Effects:
        term = self.held.term
        is_of_term = self.position is not None and self.position.term == term
        number = self._synced if is_of_term and self.held.is_whole else -1
        if not self._is_greeted:
            return []
        return [Send(self._peer, Ack(self._session, term, number))]

    # -- what changes ------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        self._is_greeted, self._heard_at, self._gone_at = True, now, None

    def _keep(self, **changes: str | bool | int) -> Effects:
        held = msgspec.structs.replace(self.held, **changes)
        if held == self.held:
            return []
        self.held = held
        return [Keep(held)]

    def _end_session(self, why: str) -> Effects:
        if not self._peer:
            return []
        peer = self._peer
        self.disconnected()
        return [Cut(peer, why)]
