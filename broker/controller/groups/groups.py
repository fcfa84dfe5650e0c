"""Virtual queues: which consumer reads which shard of a stream exchange.

Consumers of a virtual queue that name the same group share its shards, and each shard has one
holder. Only the consumers with the highest priority in the group get shards, and their numbers of
shards differ by one at most; consumers with lower priority stand by. A change moves as few shards
as this allows. Where there is a choice, a consumer gets shards of the node that it is connected to.

A shard moves in two steps, so that messages of one key never overtake each other. Its holder is
told to give it up (TAKE). The next consumer is told to have it (GIVE) when the holder has said that
it gave the shard up: its consumer there is stopped, and what it held is settled or requeued. So
`assigned` (who is to have a shard) is balanced at once, and `held` (who has it) follows.

If consumers ask for key affinity, and there are more of them than shards, several consumers share a
shard. Such a shard has several assignments, and the shard queue itself keeps each key with one
consumer.

If the shards are streams and their number has changed, the holder of an assignment may be bound to
stop at an offset until the group has crossed the change (`cuts.py`).

Nothing here sends anything: each method returns orders, which `memberships.py` sends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from shardmq.broker.controller.resharding.cuts import FREE, Bounds, Crossing, Move
from shardmq.broker.shared.control import ConsumeTerms, node_of

GROUP, RANDOM, LEAST = "group", "random", "least"

GIVE, TAKE, BOUND, CLOSE = "give", "take", "bound", "close"


class GroupConsumer(NamedTuple):
    """A consumer of a virtual queue.

    Its front door uses each `number` once in the life of its process.
    """

    door: int
    incarnation: int
    number: int


class VirtualQueueName(NamedTuple):
    vhost: str
    exchange: str


class Assignment(NamedTuple):
    """A place for a consumer at a shard queue, which is named by its id.

    Places other than 0 are for consumers with key affinity.
    """

    queue: int
    place: int = 0


class GroupOrder(NamedTuple):
    """An order to the front door of `consumer`.

    kind: GIVE or TAKE an assignment, BOUND how far it is read, or CLOSE because the virtual queue
    is gone.
    bounds: with GIVE and BOUND.
    fresh: with GIVE, the shard came when the group was there already.
    """

    kind: str
    consumer: GroupConsumer
    assignment: Assignment = Assignment(0)
    bounds: Bounds = FREE
    fresh: bool = False


class InUse(Exception):
    """A consumer is, or asks to be, the only one."""


# Returns the number of the node that has a shard queue, by the queue's id.
NodeOf = Callable[[int], int]


def one_node(queue: int) -> int:
    """Return the number of the node of every queue where there is no cluster."""
    return 0


class Group:
    """The consumers of one group of one virtual queue.

    begun: until then nothing is given or taken.
    moves: the changes of the number of shards, if those are streams.
    consumers: in the order of arrival.
    """

    def __init__(
        self,
        shards: Sequence[int],
        begun: bool = True,
        moves: tuple[Move, ...] = (),
        node_of_queue: NodeOf = one_node,
    ) -> None:
        self.shards = tuple(shards)
        self._node_of_queue = node_of_queue
        self.begun = begun
        self.moves = moves
        self.crossing = Crossing()
        self.consumers: dict[GroupConsumer, ConsumeTerms] = {}
        self.assigned: dict[Assignment, GroupConsumer] = {}
        self.held: dict[Assignment, GroupConsumer] = {}
        self._asked_back: set[Assignment] = set()
        self._fresh: set[int] = set()  # shards that came when the group had consumers
        self._bounds: dict[Assignment, Bounds] = {}  # what the holders were told

    def join(self, consumer: GroupConsumer, terms: ConsumeTerms) -> list[GroupOrder]:
        self.consumers.setdefault(consumer, terms)
        return self.plan()

    def restore(
        self, consumer: GroupConsumer, terms: ConsumeTerms | None, held: Iterable[Assignment]
    ) -> list[GroupOrder]:
        """Take a consumer and its assignments as its front door reports them after a start.

        `terms` is None for a consumer that has left and has not given up its assignments yet.
        """
        if terms is not None:
            self.consumers[consumer] = terms
        orders = []
        for assignment in held:
            if self.held.setdefault(assignment, consumer) != consumer:
                # Its front door has reported too late.
                orders.append(GroupOrder(TAKE, consumer, assignment))
            elif terms is not None:
                self.assigned.setdefault(assignment, consumer)
        return orders + self.plan()

    def leave(self, consumer: GroupConsumer) -> list[GroupOrder]:
        """End a membership; the assignments stay until they are given up or others need them."""
        return self.plan() if self.consumers.pop(consumer, None) is not None else []

    def gave_up(self, consumer: GroupConsumer, assignment: Assignment) -> list[GroupOrder]:
        if self.held.get(assignment) != consumer:
            return []
        self._let_go(assignment)
        return self.plan()

    def _let_go(self, assignment: Assignment) -> None:
        del self.held[assignment]
        self._asked_back.discard(assignment)
        self._bounds.pop(assignment, None)

    def gone(self, consumer: GroupConsumer) -> list[GroupOrder]:
        """End a membership and take all its assignments as given up."""
        self.consumers.pop(consumer, None)
        for assignment in [
            assignment for assignment, holder in self.held.items() if holder == consumer
        ]:
            self._let_go(assignment)
        return self.plan()

    def reshard(self, shards: Sequence[int]) -> list[GroupOrder]:
        if self.consumers:
            self._fresh |= set(shards).difference(self.shards)
        self.shards = tuple(shards)
        return self.plan()

    def cross(self, moves: tuple[Move, ...]) -> list[GroupOrder]:
        """Take the changes of the number of shards that there are now."""
        self.moves = moves
        self.crossing.open(moves, self.shards)  # forgets changes that are not there any more
        return self._bound()

    def passed(
        self, consumer: GroupConsumer, assignment: Assignment, offset: int
    ) -> list[GroupOrder]:
        """Note that a consumer has settled all below this offset of a stream."""
        if self.held.get(assignment) != consumer:
            return []
        self.crossing.passed(assignment.queue, offset)
        return self._bound()

    def open(self) -> list[Move]:
        """Return the changes that the group has not crossed."""
        return self.crossing.open(self.moves, self.shards) if self.moves else []

    def give_up(self, numbers: Iterable[int]) -> list[GroupOrder]:
        self.crossing.given_up.update(numbers)
        return self._bound()

    @property
    def is_empty(self) -> bool:
        return not self.consumers and not self.held

    def active(self) -> list[GroupConsumer]:
        """Return the consumers that are to have shards, by arrival; the others stand by."""
        highest = max((terms.priority for terms in self.consumers.values()), default=0)
        return [consumer for consumer, terms in self.consumers.items() if terms.priority == highest]

    def plan(self) -> list[GroupOrder]:
        """Decide anew who is to have what, and return the orders that can be given now."""
        if not self.begun:
            return []
        active = self.active()
        assignments = [Assignment(queue) for queue in self.shards]
        if assignments and all(self.consumers[consumer].affinity for consumer in active):
            for more in range(len(active) - len(assignments)):
                row, at = divmod(more, len(self.shards))
                assignments.append(Assignment(self.shards[at], row + 1))
        self.assigned = assign(assignments, active, self.assigned, self._node_of_queue)
        orders = []
        for assignment, holder in self.held.items():
            wanted = self.assigned.get(assignment)
            # A consumer that has left keeps an assignment that nobody else is to have: then what it
            # has not settled need not be delivered again.
            stays = wanted == holder or (wanted is None and assignment in assignments)
            if not stays and assignment not in self._asked_back:
                self._asked_back.add(assignment)
                orders.append(GroupOrder(TAKE, holder, assignment))
        for assignment, consumer in self.assigned.items():
            if assignment not in self.held:
                self.held[assignment] = consumer
                self._bounds[assignment] = self.crossing.bounds(self.open(), assignment.queue)
                orders.append(
                    GroupOrder(
                        GIVE,
                        consumer,
                        assignment,
                        self._bounds[assignment],
                        assignment.queue in self._fresh,
                    )
                )
        return orders + self._bound()

    def _bound(self) -> list[GroupOrder]:
        """Return orders for holders whose bounds have changed or are not known since a start."""
        if not self.moves or not self.begun:
            return []
        open, orders = self.open(), []
        for assignment, holder in self.held.items():
            bounds = self.crossing.bounds(open, assignment.queue)
            if self._bounds.get(assignment) != bounds:
                self._bounds[assignment] = bounds
                orders.append(GroupOrder(BOUND, holder, assignment, bounds))
        return orders


def assign(
    assignments: Sequence[Assignment],
    consumers: Sequence[GroupConsumer],
    before: dict[Assignment, GroupConsumer],
    node_of_queue: NodeOf = one_node,
) -> dict[Assignment, GroupConsumer]:
    """Return who is to have each assignment; nobody, without consumers.

    The numbers of assignments differ by one at most, and as few assignments as this allows get
    another consumer than `before`. Where that leaves a choice, consumers get assignments of the
    node that they are connected to.
    """
    if not consumers:
        return {}
    own: dict[GroupConsumer, list[Assignment]] = {consumer: [] for consumer in consumers}
    free: list[Assignment] = []
    for assignment in assignments:
        own.get(before.get(assignment, _NOBODY), free).append(assignment)
    node = {assignment: node_of_queue(assignment.queue) for assignment in assignments}
    near = Counter(node.values())  # how many assignments each node has
    fewest, more = divmod(len(assignments), len(consumers))
    # The larger shares go to the consumers with most assignments: each keeps one that would move.
    by_load = sorted(
        consumers, key=lambda consumer: (-len(own[consumer]), -near[node_of(consumer.door)])
    )
    shares = {consumer: fewest + (at < more) for at, consumer in enumerate(by_load)}
    # How many more assignments the consumers at each node are to have.
    wanted: Counter[int] = Counter()
    for consumer, mine in own.items():
        wanted[node_of(consumer.door)] += max(0, shares[consumer] - len(mine))
    for consumer, mine in own.items():
        if len(mine) > shares[consumer]:
            here = node_of(consumer.door)
            # Kept are those of its node, then those that no consumer of their node is to get.
            mine.sort(key=lambda each: (node[each] != here, wanted[node[each]] > 0))
            free += mine[shares[consumer] :]
            del mine[shares[consumer] :]
    free_at: dict[int, deque[Assignment]] = {}
    for assignment in free:
        free_at.setdefault(node[assignment], deque()).append(assignment)
    for consumer, mine in own.items():
        at_node = free_at.get(node_of(consumer.door), deque())
        while at_node and len(mine) < shares[consumer]:
            mine.append(at_node.popleft())
    elsewhere = deque(assignment for there in free_at.values() for assignment in there)
    for consumer, mine in own.items():
        while len(mine) < shares[consumer]:
            mine.append(elsewhere.popleft())
    return {assignment: consumer for consumer, mine in own.items() for assignment in mine}


_NOBODY = GroupConsumer(-1, 0, 0)


class VirtualQueue:
    """All consumers of one virtual queue.

    groups: by name.
    fixed: the consumers that have one shard for good.
    """

    def __init__(
        self,
        shards: Sequence[int],
        begun: bool,
        moves: tuple[Move, ...] = (),
        node_of_queue: NodeOf = one_node,
    ) -> None:
        self.shards = tuple(shards)
        self.begun = begun
        self.moves = moves
        self._node_of_queue = node_of_queue
        self.groups: dict[str, Group] = {}
        self.fixed: dict[GroupConsumer, tuple[ConsumeTerms, Assignment]] = {}

    def terms(self) -> dict[GroupConsumer, ConsumeTerms]:
        found = {consumer: terms for consumer, (terms, _) in self.fixed.items()}
        for group in self.groups.values():
            found |= group.consumers
        return found

    def held(self) -> int:
        """Return how many consumers the shard queues have by this virtual queue."""
        return len(self.fixed) + sum(len(group.held) for group in self.groups.values())

    def loads(self) -> dict[int, int]:
        """Return the number of consumers of each shard, by the id of its queue."""
        loads = dict.fromkeys(self.shards, 0)
        assignments = [assignment for _, assignment in self.fixed.values()]
        for group in self.groups.values():
            assignments += group.assigned
        for assignment in assignments:
            if assignment.queue in loads:
                loads[assignment.queue] += 1
        return loads

    def fix(
        self, consumer: GroupConsumer, terms: ConsumeTerms, choose: Callable[[int], int]
    ) -> Assignment:
        """Give a consumer one shard for good: a random one, or the first with fewest consumers.

        Of several with the fewest it is one of the consumer's node, if there is one.
        """
        if terms.assignment == RANDOM:
            queue = self.shards[choose(len(self.shards))]
        else:
            loads = self.loads()
            node = node_of(consumer.door)
            queue = min(self.shards, key=lambda id: (loads[id], self._node_of_queue(id) != node))
        assignment = Assignment(queue)
        self.fixed[consumer] = (terms, assignment)
        return assignment

    def group(self, name: str) -> Group:
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(
                self.shards, self.begun, self.moves, self._node_of_queue
            )
        return found

    @property
    def is_empty(self) -> bool:
        return not self.fixed and all(group.is_empty for group in self.groups.values())


class Groups:
    """All virtual queues that have consumers.

    Until `begin` nothing is given or taken: after a start, front doors first say who holds what.
    """

    def __init__(self, choose: Callable[[int], int], node_of_queue: NodeOf = one_node) -> None:
        """Prepare; `choose(n)` returns one of 0 to n - 1."""
        self._choose = choose
        self._node_of_queue = node_of_queue
        self._begun = False
        self.queues: dict[VirtualQueueName, VirtualQueue] = {}
        self._names: dict[GroupConsumer, VirtualQueueName] = {}

    def begin(self) -> list[GroupOrder]:
        """Begin to assign shards: all front doors have said what their consumers hold."""
        self._begun = True
        orders = []
        for queue in self.queues.values():
            queue.begun = True
            for group in queue.groups.values():
                group.begun = True
                orders += group.plan()
        return orders

    def names(self) -> list[VirtualQueueName]:
        return list(self.queues)

    def join(
        self,
        consumer: GroupConsumer,
        name: VirtualQueueName,
        terms: ConsumeTerms,
        shards: Sequence[int],
        moves: tuple[Move, ...] = (),
    ) -> list[GroupOrder]:
        """Take a new consumer. Raises InUse.

        A front door that has not heard the answer asks again for the same consumer.
        """
        queue = self._queue(name, shards, moves)
        known = queue.terms()
        if consumer in known:
            return []
        if any(each.exclusive for each in known.values()) or (terms.exclusive and known):
            self._tidy(name)
            raise InUse
        self._names[consumer] = name
        if terms.assignment != GROUP:
            return [GroupOrder(GIVE, consumer, queue.fix(consumer, terms, self._choose))]
        return queue.group(terms.group).join(consumer, terms)

    def restore(
        self,
        consumer: GroupConsumer,
        name: VirtualQueueName,
        terms: ConsumeTerms,
        left: bool,
        held: Iterable[Assignment],
        shards: Sequence[int],
        moves: tuple[Move, ...] = (),
    ) -> list[GroupOrder]:
        """Take a consumer as its front door reports it after a start.

        If the virtual queue has no shards any more, its consumers are closed.
        """
        self._names[consumer] = name
        orders = self._restored(self._queue(name, shards, moves), consumer, terms, left, list(held))
        return orders if shards else orders + self.reshard(name, shards)

    def _restored(
        self,
        queue: VirtualQueue,
        consumer: GroupConsumer,
        terms: ConsumeTerms,
        left: bool,
        held: list[Assignment],
    ) -> list[GroupOrder]:
        if terms.assignment == GROUP:
            return queue.group(terms.group).restore(consumer, None if left else terms, held)
        if held and not left:
            queue.fixed[consumer] = (terms, held[0])
        elif not left and queue.shards:
            return [GroupOrder(GIVE, consumer, queue.fix(consumer, terms, self._choose))]
        return []

    def leave(self, consumer: GroupConsumer) -> list[GroupOrder]:
        return self._of(consumer, lambda group: group.leave(consumer))

    def gave_up(self, consumer: GroupConsumer, assignment: Assignment) -> list[GroupOrder]:
        return self._of(consumer, lambda group: group.gave_up(consumer, assignment), stays=True)

    def passed(
        self, consumer: GroupConsumer, assignment: Assignment, offset: int
    ) -> list[GroupOrder]:
        return self._of(
            consumer, lambda group: group.passed(consumer, assignment, offset), stays=True
        )

    def cross(self, name: VirtualQueueName, moves: tuple[Move, ...]) -> list[GroupOrder]:
        """Take the changes of the number of shards that there are now."""
        queue = self.queues.get(name)
        if queue is None or queue.moves == moves:
            return []
        queue.moves = moves
        return [order for group in queue.groups.values() for order in group.cross(moves)]

    def overdue(
        self, name: VirtualQueueName, now: float, wait_ms: int
    ) -> tuple[list[str], list[GroupOrder]]:
        """Have groups give up the order over changes they have waited for longer than `wait_ms`.

        Returns their names, and the orders.
        """
        given_up, orders = [], []
        for key, group in self.queues[name].groups.items():
            if numbers := group.crossing.overdue(group.open(), now, wait_ms):
                given_up.append(key)
                orders += group.give_up(numbers)
        return given_up, orders

    def gone(self, consumers: Iterable[GroupConsumer]) -> list[GroupOrder]:
        """End memberships, and take all their assignments as given up."""
        orders: list[GroupOrder] = []
        for consumer in consumers:
            orders += self._of(consumer, partial(Group.gone, consumer=consumer))
        return orders

    def of_door(self, door: int) -> list[GroupConsumer]:
        return [consumer for consumer in self._names if consumer.door == door]

    def reshard(self, name: VirtualQueueName, shards: Sequence[int]) -> list[GroupOrder]:
        """Take the ids of the shard queues that there are now.

        Without any there is no virtual queue, and its consumers are closed.
        """
        queue = self.queues.get(name)
        if queue is None or (queue.shards == tuple(shards) and shards):
            return []
        queue.shards = tuple(shards)
        if not shards:
            consumers = list(queue.terms())
            del self.queues[name]
            for consumer in [consumer for consumer, known in self._names.items() if known == name]:
                del self._names[consumer]
            return [GroupOrder(CLOSE, consumer) for consumer in consumers]
        stranded = [
            consumer
            for consumer, (_, assignment) in queue.fixed.items()
            if assignment.queue not in shards
        ]
        for consumer in stranded:
            del queue.fixed[consumer], self._names[consumer]
        orders = [GroupOrder(CLOSE, consumer) for consumer in stranded]
        for group in queue.groups.values():
            orders += group.reshard(shards)
        return orders

    # -- helpers

    def _queue(
        self, name: VirtualQueueName, shards: Sequence[int], moves: tuple[Move, ...]
    ) -> VirtualQueue:
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = VirtualQueue(
                shards, self._begun, moves, self._node_of_queue
            )
        return found

    def _of(
        self, consumer: GroupConsumer, act: Callable[[Group], list[GroupOrder]], stays: bool = False
    ) -> list[GroupOrder]:
        """Call `act` with the groups of the consumer's virtual queue, and forget what is empty.

        `stays` is false when the consumer leaves: then it loses the shard that it had for good.
        """
        name = self._names.get(consumer)
        if name is None:
            return []
        queue = self.queues[name]
        if not stays:
            queue.fixed.pop(consumer, None)
        orders: list[GroupOrder] = []
        for group in queue.groups.values():
            orders += act(group)
        if consumer not in queue.fixed and not any(
            consumer in group.consumers or consumer in group.held.values()
            for group in queue.groups.values()
        ):
            self._names.pop(consumer, None)
        self._tidy(name)
        return orders

    def _tidy(self, name: VirtualQueueName) -> None:
        queue = self.queues[name]
        queue.groups = {key: group for key, group in queue.groups.items() if not group.is_empty}
        if queue.is_empty:
            del self.queues[name]
