"""Stream exchanges: which shard queues an exchange shall have, and the changes that lead there. Pure.

Made by the exchange's own arguments (`x-shards`, `x-super-stream`), else by the policy that applies to it
(`shards-per-node`, or `stream-definition` that names a parameter). What is said nowhere is looked for in the parameters
of component `stream`, then here. A shard queue says of itself whose part it is (`changes.ShardOf`), so the set outlives
restarts and changes of what asked for it.

New bindings come before old ones go, and a queue that is too much stays in the set, unbound, until it is empty: at no
moment does a message find no shard, and none is out of reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from shardmq.broker.controller.policies import MERGED, SHARDS, STREAM
from shardmq.broker.controller.resharding import cuts
from shardmq.broker.model import checks
from shardmq.broker.model.arguments import (
    AT_DEADLINE,
    AT_DEADLINE_ARGUMENT,
    DEADLINE,
    DEADLINE_ARGUMENT,
    DEFINITION,
    KEY_ARGUMENT,
    NUMBER,
    NUMBER_ARGUMENT,
    SHARD_ARGUMENTS,
    SHARD_KEY,
    SUPER_STREAM,
    WHEN_GONE,
    WHEN_GONE_ARGUMENT,
    at_deadline_fault,
    deadline_fault,
    when_gone_fault,
)
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import (
    ACTIVE,
    CLOSED,
    CLOSING,
    DRAINING,
    KEPT,
    OPEN,
    SETTLING,
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangePut,
    QueuePut,
    ShardOf,
)
from shardmq.broker.model.checks import PRECONDITION_FAILED, Refusal
from shardmq.broker.model.values import shards_fault
from shardmq.broker.routing.delaying import inner_type
from shardmq.broker.routing.placement import place
from shardmq.broker.routing.spreading import weight_fault

NODE = "shardmq@localhost"  # this host's name, here and in the HTTP API
DEFAULT_SHARDS = 1
DEFAULT_STREAM_KEY = "10000"
DEFAULT_WEIGHT = (
    "1"  # where an exchange that spreads by weight is to be bound with a key that is none
)

# Never made a stream exchange by a policy: every queue is bound to the one, the other is fed by the broker itself.
NEVER: Final = frozenset(("", "amq.rabbitmq.trace"))

# Types that give each message to one queue. Others are what their users want now and then, and often a mistake.
SPREADING: Final = frozenset(("x-consistent-hash", "x-modulus-hash", "x-random"))

# What becomes of shard queues whose exchange is none any more. MERGE: one stays, bound, and gives what is new when the
# others have given what they had.
DRAIN, MERGE, KEEP, DELETE = "drain", "merge", "keep", "delete"


class Wanted(NamedTuple):
    """What an exchange is to be: `prefix` tells by the queues' names in which way it was made."""

    prefix: str
    number: int
    key: str
    arguments: dict[str, Any]  # of its queues
    is_set: bool = False  # the number, by a parameter of its own

    def name(self, exchange: str, index: int) -> str:
        return f"{self.prefix}: {exchange} - {NODE} - {index}"


class Reshaped(NamedTuple):
    """The changes in order. `created`: queues among them that are new; `dropped`: those to be deleted as they are."""

    changes: list[AnyChange]
    created: list[QueuePut]
    dropped: list[QueuePut]
    notes: list[str]  # what an operator should know
    told: list[QueuePut]  # queues among them that their shards must hear of


# -- what is wanted ---------------------------------------------------------------------------------------


def wanted(catalog: Catalog, vhost: Vhost, exchange: ExchangePut, shards: int) -> Wanted | None:
    """None: it is no stream exchange. `shards`: how many shard processes there are."""
    want = by_arguments(catalog, exchange, shards) or _by_policy(catalog, vhost, exchange, shards)
    said = catalog.parameters.get((vhost.name, SHARDS, exchange.name))
    if said is None:
        return want
    if want is None and said.value.get(MERGED):
        want = as_it_was(vhost, exchange.name)
    if want is None:
        return None
    number = said.value[NUMBER]
    return set_to(want, number, shards)


def set_to(want: Wanted, number: int | str, shards: int) -> Wanted:
    """Another number, or "auto"."""
    return want._replace(number=shards if number == "auto" else int(number), is_set=True)


def as_it_was(vhost: Vhost, exchange: str) -> Wanted | None:
    """By the shard queues it has, one of them; None: it has none."""
    for queue in vhost.parts(exchange):
        if queue.part is not None and queue.part.state == ACTIVE:
            prefix = queue.name.partition(":")[0]
            return Wanted(prefix, 1, queue.part.key, dict(queue.arguments), is_set=True)
    return None


def _wanted(exchange: ExchangePut, prefix: str, number: Any, key: Any, shards: int) -> Wanted:
    of_queues = exchange.arguments.get(SHARD_ARGUMENTS)
    if shards_fault(NUMBER, number):  # of a file that was edited by hand
        number = DEFAULT_SHARDS
    if not isinstance(key, str) or weight_fault(exchange.type, key) is not None:
        key = DEFAULT_WEIGHT
    count = shards if number == "auto" else number
    return Wanted(prefix, count, key, of_queues if isinstance(of_queues, dict) else {})


def by_arguments(catalog: Catalog, exchange: ExchangePut, shards: int) -> Wanted | None:
    arguments = exchange.arguments
    streams, number = arguments.get(SUPER_STREAM, False), arguments.get(NUMBER_ARGUMENT)
    if streams is False and number is None:
        return None
    if number is None:
        number = "auto" if streams is True else streams
    prefix = "sharding" if streams is False else "stream"
    key = arguments.get(
        KEY_ARGUMENT, "" if streams is False else _global(catalog, exchange.vhost, SHARD_KEY)
    )
    return _wanted(exchange, prefix, number, key, shards)


def _by_policy(catalog: Catalog, vhost: Vhost, exchange: ExchangePut, shards: int) -> Wanted | None:
    if exchange.name in NEVER:
        return None
    definition = vhost.policies_of(exchange).definition
    if NUMBER in definition:
        return _wanted(
            exchange, "sharding", definition[NUMBER], definition.get(SHARD_KEY, ""), shards
        )
    if DEFINITION not in definition:
        return None
    put = catalog.parameters.get((vhost.name, DEFINITION, str(definition[DEFINITION])))
    said: Mapping[str, Any] = put.value if put is not None and isinstance(put.value, dict) else {}
    number = said[NUMBER] if NUMBER in said else _global(catalog, vhost.name, NUMBER)
    key = said[SHARD_KEY] if SHARD_KEY in said else _global(catalog, vhost.name, SHARD_KEY)
    return _wanted(exchange, "stream", number, key, shards)


def _global(catalog: Catalog, vhost: str, name: str) -> Any:
    """Of a stream definition, what it leaves open."""
    put = catalog.parameters.get((vhost, STREAM, name))
    if put is not None:
        return put.value
    return DEFAULT_SHARDS if name == NUMBER else DEFAULT_STREAM_KEY


def when_gone(arguments: Mapping[str, Any], definition: Mapping[str, Any]) -> str:
    """What becomes of the shard queues: by the exchange's arguments, or by its policy."""
    said = arguments.get(WHEN_GONE_ARGUMENT, definition.get(WHEN_GONE, DRAIN))
    return DRAIN if when_gone_fault(said) else str(said)


def deadline(vhost: Vhost, exchange: str) -> tuple[int | None, str]:
    """How long a change of the number waits for what is not settled, ms (None: for ever), and what becomes of the order
    then: by the exchange's arguments, or by its policy."""
    put = vhost.exchanges.get(exchange)
    if put is None:
        return None, ""
    definition = vhost.policies_of(put).definition
    wait_ms = put.arguments.get(DEADLINE_ARGUMENT, definition.get(DEADLINE))
    choice = put.arguments.get(AT_DEADLINE_ARGUMENT, definition.get(AT_DEADLINE, ""))
    return (None if deadline_fault(wait_ms) else wait_ms), (
        "" if at_deadline_fault(choice) else choice
    )


def check_arguments(put: ExchangePut) -> None:
    """Of an exchange that is declared. Raises Refusal, 406."""
    arguments, fault = put.arguments, ""
    if NUMBER_ARGUMENT in arguments:
        fault = shards_fault(NUMBER_ARGUMENT, arguments[NUMBER_ARGUMENT])
    if not fault and not isinstance(arguments.get(SUPER_STREAM, True), bool):
        fault = shards_fault(SUPER_STREAM, arguments[SUPER_STREAM])
    if not fault and not isinstance(arguments.get(KEY_ARGUMENT, ""), str):
        fault = f"{KEY_ARGUMENT} should be a string, actually was {checks.erlang_term(arguments[KEY_ARGUMENT])}"
    if not fault and WHEN_GONE_ARGUMENT in arguments:
        wrong = when_gone_fault(arguments[WHEN_GONE_ARGUMENT])
        fault = (
            wrong
            and f"{WHEN_GONE_ARGUMENT}: {checks.erlang_term(arguments[WHEN_GONE_ARGUMENT])} {wrong}"
        )
    for name, check in (
        (DEADLINE_ARGUMENT, deadline_fault),
        (AT_DEADLINE_ARGUMENT, at_deadline_fault),
    ):
        if not fault and name in arguments and (wrong := check(arguments[name])):
            fault = f"{name}: {checks.erlang_term(arguments[name])} {wrong}"
    of_queues = arguments.get(SHARD_ARGUMENTS, {})
    if not fault and not isinstance(of_queues, dict):
        fault = f"{SHARD_ARGUMENTS} should be a table, actually was {checks.erlang_term(of_queues)}"
    if fault:
        raise Refusal(PRECONDITION_FAILED, fault)
    checks.check_queue_arguments(put.vhost, put.name, of_queues)
    checks.check_queue_type(put.vhost, put.name, put.durable, False, False, of_queues)


def check_names(want: Wanted, exchange: str) -> None:
    """Raises Refusal when the longest of the names is too long for a queue."""
    checks.check_new_name("queue", want.name(exchange, want.number - 1))


# -- how to get there -------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A queue that the exchange is to have; None: to be made."""

    name: str
    place: int  # in the set
    queue: QueuePut | None


class Reshaping:
    """One exchange on its way from the shard queues it has to those it is to have.

    Where keys are to stay in order it takes steps, each when the one before is in force: queues that gain keys keep
    back what arrives (they are made, or told so: CLOSING; resharding.py says when it is so: CLOSED); then the bindings
    change (SETTLING); then, when the queues that lose keys have settled what they had, what was kept back is let go.
    The next change waits for that.
    """

    def __init__(
        self,
        vhost: Vhost,
        exchange: ExchangePut,
        want: Wanted,
        shards: int,
        leaving: Container[int] = (),
        in_steps: bool = True,
    ) -> None:
        """`leaving`: queues that may be gone at their shards already; they are made anew when that is known."""
        self._leaving = leaving
        self._vhost, self._exchange, self._want, self._shards = vhost, exchange, want, shards
        self._first = place(vhost.name, exchange.name, shards)
        self._parts = {queue.name: queue for queue in vhost.parts(exchange.name)}
        self._done = Reshaped([], [], [], [], [])
        self._bound = {queue.name for queue in self._parts.values() if is_bound(vhost, queue)}
        ordered = keeps_order(vhost, exchange, want.is_set)
        self._in_steps = ordered and (
            in_steps or any(held_of(queue) for queue in self._parts.values())
        )
        self._indexes = range(want.number)

    def run(self, new_queue_id: Callable[[], int], room: int) -> Reshaped:
        """`room`: how many queues more the vhost may have."""
        self._indexes = self.indexes(room)
        self._names = [self._want.name(self._exchange.name, index) for index in self._indexes]
        kept = (self._parts[name].shard for name in self._names if name in self._parts)
        self._load = Counter(kept)  # of this exchange's queues, by shard
        targets = self._targets(room)
        gate = self._gate({target.name for target in targets}) if self._in_steps else set[str]()
        if gate and any(held_of(queue) == SETTLING for queue in self._parts.values()):
            self._note("its shard queues change again when the change before is through")
            return self._done
        if all(name in self._parts and held_of(self._parts[name]) == CLOSED for name in gate):
            self._change(targets, gate, new_queue_id)
        else:
            self._close(targets, gate, new_queue_id)
        return self._done

    def indexes(self, room: int) -> range:
        """Those of the queues it is to have: from 0 on. Where another number moves keys between queues that stay, and
        is set, all of them are others then: no queue has both keys that leave and keys to keep back."""
        number = self._want.number
        mine = {index for index, queue in self._numbered() if queue.name in self._bound}
        there = range(min(mine, default=0), min(mine, default=0) + number)
        if mine == set(there):
            return there
        if not mine or not self._want.is_set or not moves_all(self._exchange):
            return range(number)
        if not self._in_steps or room < number:
            if self._in_steps:
                self._in_steps = False
                self._note(
                    f"the vhost has no room for {number} more queues: keys that move may overtake what is there"
                )
            first = max(0, max(mine) + 1 - number)
            return range(first, first + number)
        coming = {
            index
            for index, queue in self._numbered()
            if queue.name not in self._bound and held_of(queue)
        }
        taken = mine | {index for index, queue in self._numbered() if queue.id in self._leaving}
        firsts = (min(coming, default=0), *range(max(taken) + 2))
        return next(
            block for block in (range(at, at + number) for at in firsts) if taken.isdisjoint(block)
        )

    def _numbered(self) -> Iterator[tuple[int, QueuePut]]:
        """The parts that have a name which it would give them now."""
        for queue in self._parts.values():
            if queue.part is not None and queue.name == self._want.name(
                self._exchange.name, queue.part.index
            ):
                yield queue.part.index, queue

    def _targets(self, room: int) -> list[Target]:
        targets = []
        new = 0
        for index, name in zip(self._indexes, self._names, strict=True):
            queue = self._vhost.queues.get(name)
            if queue is None and new >= room:
                self._note(f"'{name}' is not made: the vhost has as many queues as it may")
            elif queue is not None and queue.id in self._leaving:
                self._note(f"'{name}' was found empty and is just going; then it is made anew")
            elif queue is not None and queue.owner:
                self._note(f"'{name}' belongs to a connection and cannot be a shard")
            else:
                targets.append(Target(name, index, queue))
                new += queue is None
        return targets

    def _gate(self, names: set[str]) -> set[str]:
        """Queues that must keep back what arrives before the bindings change."""
        coming, going = names - self._bound, self._bound - names
        if not self._bound or not (coming or going):
            return set()
        return names if going else coming

    def _close(
        self, targets: list[Target], gate: set[str], new_queue_id: Callable[[], int]
    ) -> None:
        """Nothing is bound or unbound yet."""
        for name, index, queue in targets:
            held = max(held_of(queue), CLOSING) if queue is not None else CLOSING
            if queue is not None and name in self._bound:
                self._put(queue, with_held(queue, held if name in gate else OPEN))
            else:
                self._put_queue(name, index, queue, new_queue_id, held)
        self._drain({target.name for target in targets} | self._bound)

    def _change(
        self, targets: list[Target], gate: set[str], new_queue_id: Callable[[], int]
    ) -> None:
        bound = []
        for name, index, queue in targets:
            settles = name in gate or (queue is not None and held_of(queue) == SETTLING)
            bound.append(
                self._put_queue(name, index, queue, new_queue_id, SETTLING if settles else OPEN)
            )
        self._done.changes.extend(filter(None, (self._bind(queue) for queue in bound)))
        if self._done.created and self._exchange.type not in SPREADING:
            self._note(
                f"of type {self._exchange.type} it does not spread its messages: each of its {len(bound)} shard queues "
                f"gets all that a queue bound with '{self._want.key}' gets"
            )
        wanted = set(self._names)
        for queue in self._parts.values():
            old = queue.part
            if (
                old is not None
                and old.state == ACTIVE
                and (queue.name not in wanted or old.key != self._want.key)
            ):
                self._done.changes.extend(unbound(self._vhost, queue))
        self._drain(wanted)

    def _drain(self, stay: set[str]) -> None:
        for queue in self._parts.values():
            if queue.part is not None and queue.part.state == ACTIVE and queue.name not in stay:
                self._put(queue, opened(in_state(queue, DRAINING)))
                self._note(f"'{queue.name}' is one too many and goes when it is empty")

    def _put(self, old: QueuePut, new: QueuePut) -> QueuePut:
        if held_of(new) and not held_of(old):
            new = cuts.begun(new, self._parts.values())
        if new != old:
            self._done.changes.append(new)
        if bool(held_of(new)) != bool(held_of(old)):
            self._done.told.append(new)
        return new

    def _put_queue(
        self,
        name: str,
        index: int,
        queue: QueuePut | None,
        new_queue_id: Callable[[], int],
        held: int,
    ) -> QueuePut:
        had = queue.part.cuts if queue is not None and queue.part is not None else ()
        part = ShardOf(self._exchange.name, index, self._want.key, held=held, cuts=had)
        if queue is not None:
            return self._put(queue, msgspec.structs.replace(queue, part=part))
        shard, id = self._place(index), new_queue_id()
        durable, arguments = self._exchange.durable, self._want.arguments
        put = QueuePut(self._vhost.name, name, id, shard, durable, arguments=arguments, part=part)
        self._done.changes.append(put)
        self._done.created.append(put)
        return put

    def _place(self, index: int) -> int:
        """Where fewest are; of equals the next in turn, from a shard that another exchange does not begin with."""
        first = self._first + index
        shard = min(
            range(self._shards),
            key=lambda shard: (self._load[shard], (shard - first) % self._shards),
        )
        self._load[shard] += 1
        return shard

    def _bind(self, queue: QueuePut) -> BindingPut | None:
        put = BindingPut(self._vhost.name, self._exchange.name, "queue", queue.name, self._want.key)
        return None if self._vhost.has_binding(put) else put

    def _note(self, text: str) -> None:
        self._done.notes.append(
            f"exchange '{self._exchange.name}' in vhost '{self._vhost.name}': {text}"
        )


def released(vhost: Vhost, exchange: str, choice: str) -> Reshaped:
    """The exchange is no stream exchange any more, or gone. Of `choice`s only `delete` loses messages."""
    if choice == MERGE:  # nothing would come to the one
        choice = DRAIN
    done = Reshaped([], [], [], [], [])
    queues = [
        queue
        for queue in vhost.parts(exchange)
        if queue.part is not None and queue.part.state == ACTIVE
    ]
    for queue in queues:
        done.changes.extend(unbound(vhost, queue))
        if choice == DELETE:
            done.dropped.append(queue)
            continue
        put = opened(in_state(queue, KEPT if choice == KEEP else DRAINING))
        done.changes.append(put)
        if held_of(queue) and not held_of(put):
            done.told.append(put)
    fates = {DELETE: "are deleted", KEEP: "stay", DRAIN: "go as soon as they are empty"}
    if queues:
        done.notes.append(
            f"exchange '{exchange}' in vhost '{vhost.name}' is no stream exchange any more: "
            f"its {len(queues)} shard queues ('{queues[0].name}' ...) {fates[choice]}"
        )
    return done


# -- changes in steps ---------------------------------------------------------------------------------------


def keeps_order(vhost: Vhost, exchange: ExchangePut, is_set: bool = True) -> bool:
    """Whether keys stay in order when queues come or go. They do where keys move only to queues that come and from
    queues that go: no queue then has both keys that leave and keys to keep back. Of modulus hash that is so where all
    queues are others, which is done when the number is set, and not when a policy says another: that adds queues."""
    spreads = inner_type(exchange.type, exchange.arguments)
    if spreads == "x-consistent-hash" and exchange.arguments.get("x-algorithm") != "jump":
        return True
    alone = vhost.count_from(exchange.name) == own_bindings(vhost, exchange.name)
    return alone and (spreads == "x-consistent-hash" or (is_set and spreads == "x-modulus-hash"))


def moves_all(exchange: ExchangePut) -> bool:
    """Whether another number of queues moves keys between those that stay, too."""
    return inner_type(exchange.type, exchange.arguments) == "x-modulus-hash"


def is_bound(vhost: Vhost, queue: QueuePut) -> bool:
    return queue.part is not None and queue.part.state == ACTIVE and bool(unbound(vhost, queue))


def held_of(queue: QueuePut) -> int:
    return queue.part.held if queue.part is not None else OPEN


def with_held(queue: QueuePut, held: int) -> QueuePut:
    assert queue.part is not None
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, held=held))


def opened(queue: QueuePut) -> QueuePut:
    """Of a queue that goes before its keys came; one that has some keeps them back until it is their turn."""
    return with_held(queue, OPEN) if held_of(queue) in (CLOSING, CLOSED) else queue


def unbound(vhost: Vhost, queue: QueuePut) -> list[AnyChange]:
    """Without the binding that made it a shard; others, made by hand, are not ours."""
    assert queue.part is not None
    gone = BindingDelete(vhost.name, queue.part.exchange, "queue", queue.name, queue.part.key)
    return [gone] if vhost.has_binding(gone) else []


def in_state(queue: QueuePut, state: str) -> QueuePut:
    assert queue.part is not None
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, state=state))


def own_bindings(vhost: Vhost, exchange: str) -> int:
    """How many of the bindings from an exchange are those of its shard queues: nobody's but the broker's."""
    return sum(1 for queue in vhost.parts(exchange) if unbound(vhost, queue))


def draining(queues: Iterable[QueuePut]) -> list[QueuePut]:
    return [queue for queue in queues if queue.part is not None and queue.part.state == DRAINING]
