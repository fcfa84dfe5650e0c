"""Leads an exchange from the shard queues it has to those it is to have, as changes of the catalog.

New bindings come before old ones go, and a queue that is one too many stays in the set, unbound,
until it is empty. So a message finds a shard at every moment, and none is out of reach.

Where keys are to stay in order the changes come in steps (`states.py`), and each step waits until
the one before is in force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from itertools import count
from typing import NamedTuple

import msgspec

from shardmq.broker.controller.resharding import cuts
from shardmq.broker.controller.resharding.shard_sets import (
    DELETE,
    DRAIN,
    KEEP,
    MERGE,
    SPREADING,
    Wanted,
    is_bound,
    keeps_order,
    own_binding,
)
from shardmq.broker.controller.resharding.states import (
    HOLDS,
    Event,
    after,
    hold_of,
    is_under_way,
    queues_in,
)
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import (
    ACTIVE,
    CLOSED,
    DRAINING,
    KEPT,
    SETTLING,
    AnyChange,
    BindingPut,
    ExchangePut,
    QueuePut,
    ShardOf,
)
from shardmq.broker.model.copies import asked
from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.placement import Places, place


class Reshaped(NamedTuple):
    """The changes, in order, and what else follows from them.

    created: the queues among the changes that are new.
    dropped: queues to be deleted with what is in them.
    notes: sentences for the log.
    told: queues among the changes that their shards must be told of.
    """

    changes: list[AnyChange]
    created: list[QueuePut]
    dropped: list[QueuePut]
    notes: list[str]
    told: list[QueuePut]


class TargetQueue(NamedTuple):
    """A queue that the exchange is to have.

    shards: a new queue is placed on one of these.
    queue: None if the queue must be made.
    """

    name: str
    position: int
    shards: tuple[int, ...]
    queue: QueuePut | None


class Reshaping:
    """The changes from the shard queues that an exchange has to those that it should have."""

    def __init__(
        self,
        vhost: Vhost,
        exchange: ExchangePut,
        want: Wanted,
        places: Places,
        leaving: Container[int] = (),
        in_steps: bool = True,
    ) -> None:
        """Prepare the changes; the catalog is only read.

        leaving: ids of queues that their shards may have deleted already. A queue of the set that
            is among them is made anew once that is known.
        in_steps: false where a shard queue was deleted, and nothing of it can be waited for.
        """
        self._leaving = leaving
        self._vhost, self._exchange, self._want = vhost, exchange, want
        self._places = places
        self._parts = {queue.name: queue for queue in vhost.parts(exchange.name)}
        self._done = Reshaped([], [], [], [], [])
        self._bound = {queue.name for queue in self._parts.values() if is_bound(vhost, queue)}
        self._in_steps = keeps_order(vhost, exchange, want.is_set) and (
            in_steps or is_under_way(self._parts.values())
        )

    def run(self, new_queue_id: Callable[[], int], room: int) -> Reshaped:
        """Return the changes of the next step; the vhost may have `room` more queues."""
        wanted = self.targets(room)
        names = {target.name for target in wanted}
        later = self._going_later(names)
        if names != self._bound and self._waits_for_node():
            wanted = [target for target in wanted if target.name in self._bound]
            later = self._bound - names
        wanted += self._still_bound(later)
        self._names = [target.name for target in wanted]
        kept = (self._parts[name].shard for name in self._names if name in self._parts)
        self._load = Counter(kept)  # how many queues of this exchange each shard has
        targets = self._possible(wanted, room)
        gaining = self._gaining_keys({target.name for target in targets})
        if gaining and queues_in(SETTLING, self._parts.values()):
            self._note("its shard queues change again when the change before is through")
        elif all(name in self._parts and hold_of(self._parts[name]) == CLOSED for name in gaining):
            self._rebind(targets, gaining, new_queue_id)
        else:
            self._hold_back(targets, gaining, new_queue_id)
        return self._done

    def targets(self, room: int) -> list[TargetQueue]:
        """Return the queues that the exchange is to have."""
        if self._want.nodes:
            return self._at_nodes()
        shards = self._places.shards
        return [
            self._target(self._want.name(self._exchange.name, index), index, shards)
            for index in self._indexes(room)
        ]

    def _at_nodes(self) -> list[TargetQueue]:
        """Return the queues of a set with a number for each node.

        A node that is down keeps its queues and gets no new ones. Indexes in the catalog are those
        of the whole set, in the order in which the queues were made.
        """
        free = count()
        taken = {queue.part.index for queue in self._parts.values() if queue.part is not None}
        found = []
        for node, number, shards in self._want.nodes:
            for index in range(number):
                name = self._want.name(self._exchange.name, index, node)
                queue = self._parts.get(name)
                if queue is not None and queue.part is not None:
                    position = queue.part.index
                else:
                    position = next(each for each in free if each not in taken)
                if shards or name in self._bound:
                    found.append(self._target(name, position, shards))
        return found

    def _target(self, name: str, position: int, shards: tuple[int, ...]) -> TargetQueue:
        return TargetQueue(name, position, shards, self._vhost.queues.get(name))

    def _indexes(self, room: int) -> range:
        """Return the indexes of the queues of a set with one number for all nodes together.

        They begin with 0, with an exception: modulus hash moves keys between all queues when the
        number changes. Where the number is set, such an exchange gets all new queues, so that no
        queue both loses keys and holds some back.
        """
        number = self._want.number
        mine = {index for index, queue in self._numbered() if queue.name in self._bound}
        there = range(min(mine, default=0), min(mine, default=0) + number)
        if mine == set(there):
            return there
        is_modulus = inner_type(self._exchange.type, self._exchange.arguments) == "x-modulus-hash"
        if not mine or not self._want.is_set or not is_modulus:
            return range(number)
        if not self._in_steps or room < number:
            if self._in_steps:
                self._in_steps = False
                self._note(
                    f"the vhost has no room for {number} more queues: "
                    "keys that move may overtake what is there"
                )
            first = max(0, max(mine) + 1 - number)
            return range(first, first + number)
        coming = {
            index
            for index, queue in self._numbered()
            if queue.name not in self._bound and hold_of(queue)
        }
        taken = mine | {index for index, queue in self._numbered() if queue.id in self._leaving}
        firsts = (min(coming, default=0), *range(max(taken) + 2))
        return next(
            block for block in (range(at, at + number) for at in firsts) if taken.isdisjoint(block)
        )

    def _numbered(self) -> Iterator[tuple[int, QueuePut]]:
        """Yield the shard queues, with their indexes, whose names fit to what is wanted now."""
        for queue in self._parts.values():
            if queue.part is not None and queue.name == self._want.name(
                self._exchange.name, queue.part.index
            ):
                yield queue.part.index, queue

    def _possible(self, wanted: list[TargetQueue], room: int) -> list[TargetQueue]:
        """Return those of the queues that can be had now."""
        targets = []
        new = 0
        for target in wanted:
            name, queue = target.name, target.queue
            if queue is None and new >= room:
                self._note(f"'{name}' is not made: the vhost has as many queues as it may")
            elif queue is not None and queue.id in self._leaving:
                self._note(f"'{name}' was found empty and is just going; then it is made anew")
            elif queue is not None and queue.owner:
                self._note(f"'{name}' belongs to a connection and cannot be a shard")
            else:
                targets.append(target)
                new += queue is None
        return targets

    def _waits_for_node(self) -> bool:
        """Return whether a change in steps has to wait for a node that is down.

        Queues would hold back what arrives until the shards of that node have answered.
        """
        used = {queue.shard for queue in self._parts.values() if queue.name in self._bound}
        if not self._in_steps or used.isdisjoint(self._places.away):
            return False
        if not is_under_way(self._parts.values()):
            self._note("its shard queues change when the nodes that have some are back")
        return True

    def _going_later(self, names: set[str]) -> set[str]:
        """Return queues that are to go when those that come have got their keys.

        If some queues came and others went in one step, a queue that stays would both gain and
        lose keys. It could not hold back what arrives and be waited for at the same time.
        """
        coming, going = names - self._bound, self._bound - names
        return going if self._in_steps and coming and names & self._bound else set()

    def _still_bound(self, names: set[str]) -> list[TargetQueue]:
        """Return queues that are bound and not wanted, as queues that the exchange is to have."""
        return [
            self._target(queue.name, queue.part.index, ())
            for queue in self._parts.values()
            if queue.part is not None and queue.name in names
        ]

    def _gaining_keys(self, names: set[str]) -> set[str]:
        """Return which queues must hold back what arrives before the bindings change."""
        coming, going = names - self._bound, self._bound - names
        if not self._in_steps or not self._bound or not (coming or going):
            return set()
        return names if going else coming

    def _hold_back(
        self, targets: list[TargetQueue], gaining: set[str], new_queue_id: Callable[[], int]
    ) -> None:
        """Make the queues that come, and have all that gain keys hold back what arrives."""
        for target in targets:
            event = Event.HOLD_BACK if target.name in gaining else Event.CALL_OFF
            if target.queue is not None and target.name in self._bound:
                self._put(target.queue, after(target.queue, event))
            else:
                self._put_target(target, event, new_queue_id)
        self._drain({target.name for target in targets} | self._bound)

    def _rebind(
        self, targets: list[TargetQueue], gaining: set[str], new_queue_id: Callable[[], int]
    ) -> None:
        """Bind the queues that the exchange is to have, then unbind the others."""
        queues = [
            self._put_target(
                target,
                Event.REBIND if target.name in gaining else Event.CALL_OFF,
                new_queue_id,
            )
            for target in targets
        ]
        for queue in queues:
            ends = (self._vhost.name, self._exchange.name, "queue", queue.name, self._want.key)
            if not self._vhost.has_binding(put := BindingPut(*ends)):
                self._done.changes.append(put)
        if self._done.created and self._exchange.type not in SPREADING:
            self._note(
                f"of type {self._exchange.type} it does not spread its messages: each of its "
                f"{len(queues)} shard queues gets all that a queue bound with "
                f"'{self._want.key}' gets"
            )
        names = set(self._names)
        for queue in self._parts.values():
            old = queue.part
            if (
                old is not None
                and old.state == ACTIVE
                and (queue.name not in names or old.key != self._want.key)
            ):
                self._done.changes.extend(own_binding(self._vhost, queue))
        self._drain(names)

    def _drain(self, stay: set[str]) -> None:
        for queue in self._parts.values():
            if queue.part is not None and queue.part.state == ACTIVE and queue.name not in stay:
                self._put(queue, after(_in_state(queue, DRAINING), Event.CALL_OFF))
                self._note(f"'{queue.name}' is one too many and goes when it is empty")

    def _put(self, old: QueuePut, new: QueuePut) -> QueuePut:
        if hold_of(new) and not hold_of(old):
            new = cuts.begun(new, self._parts.values())
        if new != old:
            self._done.changes.append(new)
        if bool(hold_of(new)) != bool(hold_of(old)):
            self._done.told.append(new)
        return new

    def _put_target(
        self, target: TargetQueue, event: Event, new_queue_id: Callable[[], int]
    ) -> QueuePut:
        """Make the queue, or make it an active shard, and apply the event to it."""
        queue, old = target.queue, hold_of(target.queue)
        held, had = HOLDS.get((old, event), old), cuts.cuts_of(queue) if queue is not None else ()
        part = ShardOf(self._exchange.name, target.position, self._want.key, held=held, cuts=had)
        if queue is not None:
            return self._put(queue, msgspec.structs.replace(queue, part=part))
        put = QueuePut(
            self._vhost.name,
            target.name,
            shard=self._place(target),
            id=new_queue_id(),
            durable=self._exchange.durable,
            arguments=self._want.arguments,
            part=part,
        )
        self._done.changes.append(put)
        self._done.created.append(put)
        return put

    def _place(self, target: TargetQueue) -> int:
        """Return the shard for a new queue, one that has the fewest queues of this exchange.

        Among equals it is the next in turn, beginning with a shard that depends on the exchange.
        Only those shards count that suit the queue best by their copies.
        """
        shards, replicas = target.shards, self._places.replicas
        if replicas.in_sets:
            arguments, exchange = self._want.arguments, self._exchange.name
            asks = asked(self._vhost, target.name, arguments, replicas.others, exchange)
            shards = replicas.nearest(asks, shards)
        first = place(self._vhost.name, self._exchange.name, len(shards)) + target.position
        at = min(
            range(len(shards)),
            key=lambda at: (self._load[shards[at]], (at - first) % len(shards)),
        )
        self._load[shards[at]] += 1
        return shards[at]

    def _note(self, text: str) -> None:
        self._done.notes.append(
            f"exchange '{self._exchange.name}' in vhost '{self._vhost.name}': {text}"
        )


def released(vhost: Vhost, exchange: str, choice: str) -> Reshaped:
    """Return the changes when an exchange is gone, or is no stream exchange any more.

    `choice` says what becomes of its shard queues. Only DELETE loses messages.
    """
    if choice == MERGE:  # nothing would come to the queue that stays
        choice = DRAIN
    done = Reshaped([], [], [], [], [])
    queues = [
        queue
        for queue in vhost.parts(exchange)
        if queue.part is not None and queue.part.state == ACTIVE
    ]
    for queue in queues:
        done.changes.extend(own_binding(vhost, queue))
        if choice == DELETE:
            done.dropped.append(queue)
            continue
        put = after(_in_state(queue, KEPT if choice == KEEP else DRAINING), Event.CALL_OFF)
        done.changes.append(put)
        if hold_of(queue) and not hold_of(put):
            done.told.append(put)
    fates = {DELETE: "are deleted", KEEP: "stay", DRAIN: "go as soon as they are empty"}
    if queues:
        done.notes.append(
            f"exchange '{exchange}' in vhost '{vhost.name}' is no stream exchange any more: "
            f"its {len(queues)} shard queues ('{queues[0].name}' ...) {fates[choice]}"
        )
    return done


def _in_state(queue: QueuePut, state: str) -> QueuePut:
    assert queue.part is not None
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, state=state))
