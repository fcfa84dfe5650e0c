"""Virtual queues: which consumer reads which shard of a stream exchange.

A *member* is one consumer of a virtual queue. Members that name the same group share its shards,
and each shard has one holder. Only the members with the highest priority in the group get shards,
and their numbers of shards differ by one at most; members with lower priority stand by. A change
moves as few shards as this allows.

A shard moves in two steps, so that messages of one key never overtake each other. Its holder is
told to give it up (TAKE). The next member is told to have it (GIVE) when the holder has said that
it gave the shard up: its consumer there is stopped, and what it held is settled or requeued. So
`assigned` (who is to have a shard) is balanced at once, and `held` (who has it) follows.

If members ask for key affinity, and there are more of them than shards, several members share a
shard. Such a shard has several *seats*, and the shard queue itself keeps each key with one member.

If the shards are streams and their number has changed, the holder of a seat may be bound to stop at
an offset until the group has crossed the change (`cuts.py`).

Nothing here sends anything: each method returns orders, which `memberships.py` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from shardmq.broker.controller.resharding.cuts import FREE, Bounds, Crossing, Move

GROUP, RANDOM, LEAST = "group", "random", "least"

GIVE, TAKE, BOUND, CLOSE = "give", "take", "bound", "close"


class Member(NamedTuple):
    """A consumer. Its front door uses each `number` once in the life of its process."""

    door: int
    incarnation: int
    number: int


class Name(NamedTuple):
    vhost: str
    exchange: str


class Terms(NamedTuple):
    """The wishes of a member; the connection (`owner`), channel and tag are for listings."""

    group: str = ""
    assignment: str = GROUP
    exclusive: bool = False
    priority: int = 0
    affinity: bool = False
    owner: str = ""
    channel: int = 0
    tag: str = ""


class Seat(NamedTuple):
    """A place for a consumer at a shard queue, which is named by its id.

    Places other than 0 are for consumers with key affinity.
    """

    queue: int
    place: int = 0


class Order(NamedTuple):
    """An order to the front door of `member`.

    kind: GIVE or TAKE a seat, BOUND how far it is read, or CLOSE because the virtual queue is gone.
    bounds: with GIVE and BOUND.
    fresh: with GIVE, the shard came when the group was there already.
    """

    kind: str
    member: Member
    seat: Seat = Seat(0)
    bounds: Bounds = FREE
    fresh: bool = False


class InUse(Exception):
    """A consumer is, or asks to be, the only one."""


class Group:
    """The members of one group of one virtual queue.

    begun: until then nothing is given or taken.
    moves: the changes of the number of shards, if those are streams.
    members: in the order of arrival.
    """

    def __init__(
        self, shards: Sequence[int], begun: bool = True, moves: tuple[Move, ...] = ()
    ) -> None:
        self.shards = tuple(shards)
        self.begun = begun
        self.moves = moves
        self.crossing = Crossing()
        self.members: dict[Member, Terms] = {}
        self.assigned: dict[Seat, Member] = {}
        self.held: dict[Seat, Member] = {}
        self._asked_back: set[Seat] = set()
        self._fresh: set[int] = set()  # shards that came when the group had members
        self._bounds: dict[Seat, Bounds] = {}  # what the holders were told

    def join(self, member: Member, terms: Terms) -> list[Order]:
        self.members.setdefault(member, terms)
        return self.plan()

    def restore(self, member: Member, terms: Terms | None, held: Iterable[Seat]) -> list[Order]:
        """Take a member and its seats as its front door reports them after a start.

        `terms` is None for a member that has left and has not given up its seats yet.
        """
        if terms is not None:
            self.members[member] = terms
        orders = []
        for seat in held:
            if self.held.setdefault(seat, member) != member:
                orders.append(Order(TAKE, member, seat))  # its front door has reported too late
            elif terms is not None:
                self.assigned.setdefault(seat, member)
        return orders + self.plan()

    def leave(self, member: Member) -> list[Order]:
        """End a membership; the seats stay until they are given up or others need them."""
        return self.plan() if self.members.pop(member, None) is not None else []

    def gave_up(self, member: Member, seat: Seat) -> list[Order]:
        if self.held.get(seat) != member:
            return []
        self._let_go(seat)
        return self.plan()

    def _let_go(self, seat: Seat) -> None:
        del self.held[seat]
        self._asked_back.discard(seat)
        self._bounds.pop(seat, None)

    def gone(self, member: Member) -> list[Order]:
        """End a membership and take all its seats as given up."""
        self.members.pop(member, None)
        for seat in [seat for seat, holder in self.held.items() if holder == member]:
            self._let_go(seat)
        return self.plan()

    def reshard(self, shards: Sequence[int]) -> list[Order]:
        if self.members:
            self._fresh |= set(shards).difference(self.shards)
        self.shards = tuple(shards)
        return self.plan()

    def cross(self, moves: tuple[Move, ...]) -> list[Order]:
        """Take the changes of the number of shards that there are now."""
        self.moves = moves
        self.crossing.open(moves, self.shards)  # forgets changes that are not there any more
        return self._bound()

    def passed(self, member: Member, seat: Seat, offset: int) -> list[Order]:
        """Note that a member has settled all below this offset of the stream at its seat."""
        if self.held.get(seat) != member:
            return []
        self.crossing.passed(seat.queue, offset)
        return self._bound()

    def open(self) -> list[Move]:
        """Return the changes that the group has not crossed."""
        return self.crossing.open(self.moves, self.shards) if self.moves else []

    def give_up(self, numbers: Iterable[int]) -> list[Order]:
        self.crossing.given_up.update(numbers)
        return self._bound()

    @property
    def is_empty(self) -> bool:
        return not self.members and not self.held

    def active(self) -> list[Member]:
        """Return the members that are to have shards, by arrival; the others stand by."""
        highest = max((terms.priority for terms in self.members.values()), default=0)
        return [member for member, terms in self.members.items() if terms.priority == highest]

    def plan(self) -> list[Order]:
        """Assign all seats anew, and return the orders that can be given now."""
        if not self.begun:
            return []
        active = self.active()
        seats = [Seat(queue) for queue in self.shards]
        if seats and all(self.members[member].affinity for member in active):
            for more in range(len(active) - len(seats)):
                row, at = divmod(more, len(self.shards))
                seats.append(Seat(self.shards[at], row + 1))
        self.assigned = assign(seats, active, self.assigned)
        orders = []
        for seat, holder in self.held.items():
            wanted = self.assigned.get(seat)
            # A member that has left keeps a seat that nobody else is to have: then what it has not
            # settled need not be delivered again.
            stays = wanted == holder or (wanted is None and seat in seats)
            if not stays and seat not in self._asked_back:
                self._asked_back.add(seat)
                orders.append(Order(TAKE, holder, seat))
        for seat, member in self.assigned.items():
            if seat not in self.held:
                self.held[seat] = member
                self._bounds[seat] = self.crossing.bounds(self.open(), seat.queue)
                orders.append(
                    Order(GIVE, member, seat, self._bounds[seat], seat.queue in self._fresh)
                )
        return orders + self._bound()

    def _bound(self) -> list[Order]:
        """Return orders for holders whose bounds have changed or are not known since a start."""
        if not self.moves or not self.begun:
            return []
        open, orders = self.open(), []
        for seat, holder in self.held.items():
            bounds = self.crossing.bounds(open, seat.queue)
            if self._bounds.get(seat) != bounds:
                self._bounds[seat] = bounds
                orders.append(Order(BOUND, holder, seat, bounds))
        return orders


def assign(
    seats: Sequence[Seat], members: Sequence[Member], before: dict[Seat, Member]
) -> dict[Seat, Member]:
    """Assign a member to each seat; without members no seat is assigned.

    The numbers of seats differ by one at most, and as few seats as this allows get another member
    than `before`.
    """
    if not members:
        return {}
    own: dict[Member, list[Seat]] = {member: [] for member in members}
    free: list[Seat] = []
    for seat in seats:
        own.get(before.get(seat, _NOBODY), free).append(seat)
    fewest, more = divmod(len(seats), len(members))
    # The larger shares go to the members with most seats: each of them keeps one that would move.
    by_load = sorted(members, key=lambda member: -len(own[member]))
    shares = {member: fewest + (at < more) for at, member in enumerate(by_load)}
    for member, mine in own.items():
        free += mine[shares[member] :]
        del mine[shares[member] :]
    free.reverse()
    for member, mine in own.items():
        while len(mine) < shares[member]:
            mine.append(free.pop())
    return {seat: member for member, mine in own.items() for seat in mine}


_NOBODY = Member(-1, 0, 0)


class VirtualQueue:
    """All consumers of one virtual queue.

    groups: by name.
    fixed: the consumers that have one shard for good.
    """

    def __init__(self, shards: Sequence[int], begun: bool, moves: tuple[Move, ...] = ()) -> None:
        self.shards = tuple(shards)
        self.begun = begun
        self.moves = moves
        self.groups: dict[str, Group] = {}
        self.fixed: dict[Member, tuple[Terms, Seat]] = {}

    def terms(self) -> dict[Member, Terms]:
        found = {member: terms for member, (terms, _) in self.fixed.items()}
        for group in self.groups.values():
            found |= group.members
        return found

    def held(self) -> int:
        """Return how many consumers the shard queues have by this virtual queue."""
        return len(self.fixed) + sum(len(group.held) for group in self.groups.values())

    def loads(self) -> dict[int, int]:
        """Return the number of consumers of each shard, by the id of its queue."""
        loads = dict.fromkeys(self.shards, 0)
        seats = [seat for _, seat in self.fixed.values()]
        for group in self.groups.values():
            seats += group.assigned
        for seat in seats:
            if seat.queue in loads:
                loads[seat.queue] += 1
        return loads

    def fix(self, member: Member, terms: Terms, choose: Callable[[int], int]) -> Seat:
        """Give a consumer one shard for good: a random one, or the first with fewest consumers."""
        if terms.assignment == RANDOM:
            queue = self.shards[choose(len(self.shards))]
        else:
            loads = self.loads()
            queue = min(self.shards, key=loads.__getitem__)
        seat = Seat(queue)
        self.fixed[member] = (terms, seat)
        return seat

    def group(self, name: str) -> Group:
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(self.shards, self.begun, self.moves)
        return found

    @property
    def is_empty(self) -> bool:
        return not self.fixed and all(group.is_empty for group in self.groups.values())


class Groups:
    """All virtual queues that have consumers.

    Until `begin` nothing is given or taken: after a start, front doors first say who holds what.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        """Prepare; `choose(n)` returns one of 0 to n - 1."""
        self._choose = choose
        self._begun = False
        self.queues: dict[Name, VirtualQueue] = {}
        self._names: dict[Member, Name] = {}

    def begin(self) -> list[Order]:
        """Begin to assign shards: all front doors have said what their consumers hold."""
        self._begun = True
        orders = []
        for queue in self.queues.values():
            queue.begun = True
            for group in queue.groups.values():
                group.begun = True
                orders += group.plan()
        return orders

    def names(self) -> list[Name]:
        return list(self.queues)

    def join(
        self,
        member: Member,
        name: Name,
        terms: Terms,
        shards: Sequence[int],
        moves: tuple[Move, ...] = (),
    ) -> list[Order]:
        """Take a new consumer. Raises InUse.

        A front door that has not heard the answer asks again for the same member.
        """
        queue = self._queue(name, shards, moves)
        known = queue.terms()
        if member in known:
            return []
        if any(each.exclusive for each in known.values()) or (terms.exclusive and known):
            self._tidy(name)
            raise InUse
        self._names[member] = name
        if terms.assignment != GROUP:
            return [Order(GIVE, member, queue.fix(member, terms, self._choose))]
        return queue.group(terms.group).join(member, terms)

    def restore(
        self,
        member: Member,
        name: Name,
        terms: Terms,
        left: bool,
        held: Iterable[Seat],
        shards: Sequence[int],
        moves: tuple[Move, ...] = (),
    ) -> list[Order]:
        """Take a consumer as its front door reports it after a start.

        If the virtual queue has no shards any more, its consumers are closed.
        """
        self._names[member] = name
        orders = self._restored(self._queue(name, shards, moves), member, terms, left, list(held))
        return orders if shards else orders + self.reshard(name, shards)

    def _restored(
        self, queue: VirtualQueue, member: Member, terms: Terms, left: bool, held: list[Seat]
    ) -> list[Order]:
        if terms.assignment == GROUP:
            return queue.group(terms.group).restore(member, None if left else terms, held)
        if held and not left:
            queue.fixed[member] = (terms, held[0])
        elif not left and queue.shards:
            return [Order(GIVE, member, queue.fix(member, terms, self._choose))]
        return []

    def leave(self, member: Member) -> list[Order]:
        return self._of(member, lambda group: group.leave(member))

    def gave_up(self, member: Member, seat: Seat) -> list[Order]:
        return self._of(member, lambda group: group.gave_up(member, seat), stays=True)

    def passed(self, member: Member, seat: Seat, offset: int) -> list[Order]:
        return self._of(member, lambda group: group.passed(member, seat, offset), stays=True)

    def cross(self, name: Name, moves: tuple[Move, ...]) -> list[Order]:
        """Take the changes of the number of shards that there are now."""
        queue = self.queues.get(name)
        if queue is None or queue.moves == moves:
            return []
        queue.moves = moves
        return [order for group in queue.groups.values() for order in group.cross(moves)]

    def overdue(self, name: Name, now: float, wait_ms: int) -> tuple[list[str], list[Order]]:
        """Have groups give up the order over changes they have waited for longer than `wait_ms`.

        Returns their names, and the orders.
        """
        given_up, orders = [], []
        for key, group in self.queues[name].groups.items():
            if numbers := group.crossing.overdue(group.open(), now, wait_ms):
                given_up.append(key)
                orders += group.give_up(numbers)
        return given_up, orders

    def gone(self, members: Iterable[Member]) -> list[Order]:
        """End memberships, and take all their seats as given up."""
        orders: list[Order] = []
        for member in members:
            orders += self._of(member, partial(Group.gone, member=member))
        return orders

    def of_door(self, door: int) -> list[Member]:
        return [member for member in self._names if member.door == door]

    def reshard(self, name: Name, shards: Sequence[int]) -> list[Order]:
        """Take the ids of the shard queues that there are now.

        Without any there is no virtual queue, and its consumers are closed.
        """
        queue = self.queues.get(name)
        if queue is None or (queue.shards == tuple(shards) and shards):
            return []
        queue.shards = tuple(shards)
        if not shards:
            members = list(queue.terms())
            del self.queues[name]
            for member in [member for member, known in self._names.items() if known == name]:
                del self._names[member]
            return [Order(CLOSE, member) for member in members]
        stranded = [member for member, (_, seat) in queue.fixed.items() if seat.queue not in shards]
        for member in stranded:
            del queue.fixed[member], self._names[member]
        orders = [Order(CLOSE, member) for member in stranded]
        for group in queue.groups.values():
            orders += group.reshard(shards)
        return orders

    # -- helpers

    def _queue(self, name: Name, shards: Sequence[int], moves: tuple[Move, ...]) -> VirtualQueue:
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = VirtualQueue(shards, self._begun, moves)
        return found

    def _of(
        self, member: Member, act: Callable[[Group], list[Order]], stays: bool = False
    ) -> list[Order]:
        """Call `act` with the groups of the member's virtual queue, and forget what is empty.

        `stays` is false when the member leaves: then it loses the shard that it had for good.
        """
        name = self._names.get(member)
        if name is None:
            return []
        queue = self.queues[name]
        if not stays:
            queue.fixed.pop(member, None)
        orders: list[Order] = []
        for group in queue.groups.values():
            orders += act(group)
        if member not in queue.fixed and not any(
            member in group.members or member in group.held.values()
            for group in queue.groups.values()
        ):
            self._names.pop(member, None)
        self._tidy(name)
        return orders

    def _tidy(self, name: Name) -> None:
        queue = self.queues[name]
        queue.groups = {key: group for key, group in queue.groups.items() if not group.is_empty}
        if queue.is_empty:
            del self.queues[name]
