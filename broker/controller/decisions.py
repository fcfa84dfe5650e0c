"""What becomes of a request: refused, or the changes that carry it out and what is left to do at the shards.

Pure: looks at the catalog, changes nothing, waits for nothing. `authority` makes the changes and does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import msgspec

from shardmq.broker.controller import policies
from shardmq.broker.controller.requests import (
    Closed,
    CutOff,
    Drained,
    OwnerGone,
    Pause,
    Removal,
    Restore,
    Settled,
)
from shardmq.broker.controller.resharding import cuts, shard_sets
from shardmq.broker.model import checks, patterns, tables
from shardmq.broker.model.arguments import DEFINITION, NUMBER, QUEUE_TYPES
from shardmq.broker.model.catalog import BindingKey, Catalog, Vhost
from shardmq.broker.model.changes import (
    ACTIVE,
    CLOSED,
    CLOSING,
    DRAINING,
    OPEN,
    SETTLING,
    AnyChange,
    BindingDelete,
    BindingPut,
    Cut,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    QueueDelete,
    QueuePut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.policies import (
    COMPONENTS,
    EXCHANGE,
    NO_POLICIES,
    Policies,
    exchange_arguments,
)
from shardmq.broker.routing import delaying, hidden, keeping
from shardmq.broker.shared.control import (
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)

# A queue or exchange with more bindings loses them one by one first: front doors take changes in slices, with messages
# between them, but one change is one step, however much goes with it.
BINDINGS_AT_ONCE_MAX = 500

# Changes that stream exchanges may have to follow.
RESHAPING: Final = frozenset((ExchangePut, ExchangeDelete, ParameterPut, ParameterDelete))
SHARDING_COMPONENTS: Final = COMPONENTS | {policies.STREAM, DEFINITION, policies.SHARDS}

NOT_FOUND = 404
BAD_REQUEST = 400
PRECONDITION_FAILED = 412  # HTTP's
PARAMETER_KEY_BYTES_MAX = 65_535  # AMQP has nothing to say about them


@dataclass(slots=True)
class Decision:
    """The changes, in order, and beside them: what the shards are asked, once or before the answer."""

    changes: list[AnyChange] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    create: list[QueuePut] = field(
        default_factory=list
    )  # at their shards, at once; or told to them anew
    count: QueuePut | None = None  # ask its shard for messages and consumers
    uses: list[QueuePut] = field(
        default_factory=list
    )  # must exist at their shards before the answer
    first: QueuePut | None = None  # the shard decides whether it may go; then a Removal
    drop: list[QueuePut] = field(
        default_factory=list
    )  # at their shards, once no front door knows them
    bereft: set[tuple[str, str]] = field(
        default_factory=set
    )  # stream exchanges, with vhost, that lose a shard by it
    follow: set[tuple[str, str]] = field(
        default_factory=set
    )  # stream exchanges, with vhost, that take their next step
    drop_vhost: str = ""
    policies_of: str = (
        ""  # the vhost whose policies change: queues with other effective arguments are told so
    )
    close_vhost: str = ""
    close_user: str = ""
    refused: Refusal | None = None  # of many, after those that `result` says are done
    notes: list[str] = field(default_factory=list)  # for the log


class Decisions:
    """Each request to its decision. `new_queue_id`, `new_name`, `place` are what decides beside the catalog, and how
    many `shards` there are."""

    def __init__(
        self,
        catalog: Catalog,
        new_queue_id: Callable[[], int],
        new_name: Callable[[], str],
        place: Callable[[str, str], int],
        shards: int = 1,
        leaving: Container[int] = (),
    ) -> None:
        """`leaving`: queues whose shard has been asked whether they may go, and has not answered."""
        self._catalog = catalog
        self._new_queue_id = new_queue_id
        self._new_name = new_name
        self._place = place
        self._shards = shards
        self._leaving = leaving

    def decide(self, request: Any, owner: str) -> Decision:
        """Raises Refusal."""
        _check_values(request)
        return self._without_hidden_queues(_DECIDE[type(request)](self, request, owner))

    # -- exchanges -----------------------------------------------------------------------------------

    def _declare_exchange(self, ask: ExchangeDeclare, owner: str) -> Decision:
        name = checks.clean_name(ask.name)
        checks.check_not_default(name)
        current = self._vhost(ask.vhost).exchanges.get(name)
        if current is not None:
            checks.check_same_exchange(
                current, ask.type, ask.durable, ask.auto_delete, ask.internal, ask.arguments
            )
            return Decision(uses=self._vhost(ask.vhost).hidden_queues_of(name))
        checks.check_new_exchange(ask.vhost, name, ask.type, ask.arguments)
        put = ExchangePut(
            ask.vhost, name, ask.type, ask.durable, ask.auto_delete, ask.internal, ask.arguments
        )
        if ask.arguments:
            self._check_shard_set(self._vhost(ask.vhost), put)
        queues = self._hidden_queues(self._vhost(ask.vhost), put)
        return Decision([*queues, put], create=queues)

    def _hidden_queues(self, vhost: Vhost, exchange: ExchangePut) -> list[QueuePut]:
        """Those of a new exchange."""
        found = [self._delay_queue(exchange)] if vhost.delays(exchange) else []
        type = delaying.inner_type(exchange.type, exchange.arguments)
        if keeping.keeps(type, exchange.arguments):
            arguments = keeping.queue_arguments(type, exchange.arguments)
            found.append(self._hidden_queue(exchange, keeping.queue_name(exchange.name), arguments))
        return found

    def _delay_queue(self, exchange: ExchangePut) -> QueuePut:
        arguments = {checks.DELAYS_FOR: exchange.name}
        return self._hidden_queue(exchange, delaying.queue_name(exchange.name), arguments)

    def _hidden_queue(
        self, exchange: ExchangePut, name: str, arguments: dict[str, Any]
    ) -> QueuePut:
        """Where it keeps messages, lasting as the exchange itself."""
        id, shard = self._new_queue_id(), self._place(exchange.vhost, name)
        return QueuePut(exchange.vhost, name, id, shard, exchange.durable, arguments=arguments)

    def _without_hidden_queues(self, decision: Decision) -> Decision:
        """What an exchange keeps goes with it."""
        for gone in [change for change in decision.changes if isinstance(change, ExchangeDelete)]:
            vhost = self._catalog.vhosts.get(gone.vhost)
            for queue in vhost.hidden_queues_of(gone.name) if vhost is not None else ():
                decision.changes.append(QueueDelete(gone.vhost, queue.name))
                decision.drop = [*decision.drop, queue]
        return decision

    def _check_shard_set(self, vhost: Vhost, put: ExchangePut) -> None:
        """What its arguments ask for must be possible. What only a policy asks for is never the client's fault."""
        shard_sets.check_arguments(put)
        want = shard_sets.by_arguments(self._catalog, put, self._shards)
        if want is None:
            return
        shard_sets.check_names(want, put.name)
        new = sum(want.name(put.name, index) not in vhost.queues for index in range(want.number))
        self._check_queue_limit(vhost, new)

    def _remove_exchange(self, ask: ExchangeRemove, owner: str) -> Decision:
        vhost = self._vhost(ask.vhost)
        used = ask.if_unused and vhost.count_from(ask.name) > shard_sets.own_bindings(
            vhost, ask.name
        )
        checks.check_exchange_delete(ask.vhost, ask.name, used, ask.if_unused)
        if ask.name not in vhost.exchanges:
            return Decision()
        decision = Decision()
        definition = vhost.policies_of(vhost.exchanges[ask.name]).definition
        choice = shard_sets.when_gone(vhost.exchanges[ask.name].arguments, definition)
        self._release(decision, vhost, ask.name, choice)
        lost = vhost.bindings_to("exchange", ask.name)
        decision.changes += unbound_first([*vhost.bindings_from(ask.name), *lost])
        decision.changes += [
            ExchangeDelete(ask.vhost, ask.name),
            *unbound_exchanges(vhost, lost, {ask.name}),
        ]
        if (ask.vhost, policies.SHARDS, ask.name) in self._catalog.parameters:
            decision.changes.append(ParameterDelete(ask.vhost, policies.SHARDS, ask.name))
        return decision

    # -- bindings ------------------------------------------------------------------------------------

    def _bind(self, ask: Bind, owner: str) -> Decision:
        vhost = self._vhost(ask.vhost)
        queue = self._check_bind(vhost, ask, owner)
        put = BindingPut(
            ask.vhost, ask.source, ask.kind, ask.destination, ask.routing_key, ask.arguments
        )
        return Decision(
            [] if vhost.has_binding(put) else [put], uses=[] if queue is None else [queue]
        )

    def _check_bind(self, vhost: Vhost, ask: Bind, owner: str) -> QueuePut | None:
        """Its queue."""
        queue = self._check_ends(vhost, ask, owner)
        source = vhost.exchanges[ask.source]
        type = delaying.inner_type(source.type, source.arguments)
        checks.check_binding(type, ask.routing_key, ask.arguments)
        checks.check_keeping_bind(type, source.arguments, ask.kind, ask.arguments)
        return queue

    def _bind_many(self, ask: BindMany, owner: str) -> Decision:
        """As one by one, up to the first that is refused. Of those between the same two only the first is looked at in
        all respects, if any key will do."""
        vhost, decision = self._vhost(ask.vhost), Decision()
        new: dict[BindingKey, BindingPut] = {}
        done = 0
        try:
            for (source, destination), run in groupby(ask.binds, itemgetter(0, 1)):
                known, queue, any_key = vhost.bindings_by_key(source), None, False
                for _, _, key in run:
                    if not any_key:
                        bind = Bind(ask.vhost, source, "queue", destination, key, {})
                        queue, any_key = (
                            self._check_bind(vhost, bind, owner),
                            _takes_any_key(vhost, source),
                        )
                    identity = (source, "queue", destination, key, b"")
                    if identity not in known:
                        new[identity] = BindingPut(ask.vhost, source, "queue", destination, key)
                    done += 1
                decision.uses += [] if queue is None else [queue]
        except Refusal as refusal:
            decision.refused, decision.result = refusal, {"done": done}
        decision.changes.extend(new.values())
        return decision

    def _unbind(self, ask: Unbind, owner: str) -> Decision:
        """What is not there, binding or end, is unbound already."""
        vhost = self._vhost(ask.vhost)
        checks.check_not_default(ask.source)
        queue = vhost.queues.get(ask.destination) if ask.kind == "queue" else None
        if queue is not None:
            checks.check_owner(queue, owner)
        gone = BindingDelete(
            ask.vhost, ask.source, ask.kind, ask.destination, ask.routing_key, ask.arguments
        )
        if not vhost.has_binding(gone):
            return Decision()
        lost = [
            BindingPut(
                ask.vhost, ask.source, ask.kind, ask.destination, ask.routing_key, ask.arguments
            )
        ]
        return Decision([gone, *unbound_exchanges(vhost, lost, set())])

    def _check_ends(self, vhost: Vhost, ask: Bind, owner: str) -> QueuePut | None:
        checks.check_not_default(ask.source)
        if ask.source not in vhost.exchanges:
            raise checks.no_exchange(vhost.name, ask.source)
        if ask.kind == "exchange":
            checks.check_not_default(ask.destination)
            if ask.destination not in vhost.exchanges:
                raise checks.no_exchange(vhost.name, ask.destination)
            return None
        queue = vhost.queues.get(ask.destination)
        if queue is None or hidden.is_of_exchange(queue.name):
            raise checks.no_queue(vhost.name, ask.destination)
        checks.check_owner(queue, owner)
        return queue

    # -- queues --------------------------------------------------------------------------------------

    def _declare_queue(self, ask: QueueDeclare, owner: str) -> Decision:
        vhost = self._vhost(ask.vhost)
        name = checks.clean_name(ask.name)
        current = vhost.queues.get(name)
        durable = (
            ask.durable and not ask.exclusive
        )  # it goes with its connection: asked for or not, as in RabbitMQ
        arguments = with_type(ask, vhost.put.default_queue_type, current)
        if current is not None and not hidden.is_of_exchange(name):
            checks.check_same_queue(
                current, durable, ask.auto_delete, owner, ask.exclusive, arguments
            )
            return Decision(result=_counted(name), count=current)
        # Front doors ask for such a name on their own account only, and always for one of their connections.
        is_reply_queue = checks.is_reply_queue(name) and ask.exclusive and owner != ""
        if not name:
            checks.check_nameless(arguments)
            name = checks.with_prefix(self._new_name(), arguments)
        elif not is_reply_queue:
            checks.check_new_name("queue", name)
        checks.check_queue_arguments(ask.vhost, name, arguments)
        checks.check_queue_type(
            ask.vhost, name, ask.durable, ask.auto_delete, ask.exclusive, arguments
        )
        if not is_reply_queue:
            self._check_queue_limit(vhost)
        put = QueuePut(
            ask.vhost,
            name,
            self._new_queue_id(),
            self._place(ask.vhost, name),
            durable,
            ask.auto_delete,
            owner if ask.exclusive else "",
            arguments,
        )
        return Decision([put], result=_counted(name), create=[put])

    def _check_queue_limit(self, vhost: Vhost, new: int = 1) -> None:
        most = self._catalog.vhost_limit(vhost.name, "max-queues")
        if most is not None and new > 0 and most < len(vhost.queues) - vhost.hidden_queues + new:
            raise Refusal(
                checks.PRECONDITION_FAILED,
                f"queue limit in vhost '{vhost.name}' ({most}) is reached",
            )

    def _remove_queue(self, ask: QueueRemove, owner: str) -> Decision:
        queue = self._vhost(ask.vhost).queues.get(ask.name)
        if queue is None or hidden.is_of_exchange(queue.name):
            return Decision(result={"messages": 0})
        checks.check_owner(queue, owner)
        if ask.if_unused or ask.if_empty:
            return Decision(first=queue)
        return self.remove([queue])

    def _pause(self, ask: Pause, owner: str) -> Decision:
        queue = self._vhost(ask.vhost).queues.get(ask.name)
        if queue is None:
            raise checks.no_queue(ask.vhost, ask.name)
        checks.check_owner(queue, owner)
        if queue.arguments.get("x-queue-type") == "stream":
            raise Refusal(
                BAD_REQUEST,
                f"queue '{ask.name}' in vhost '{ask.vhost}' is a stream: it cannot be paused",
            )
        if queue.paused == ask.paused:
            return Decision(uses=[queue])
        put = msgspec.structs.replace(queue, paused=ask.paused)
        return Decision([put], create=[put])

    def _removal(self, ask: Removal, owner: str) -> Decision:
        queues = [
            queue for queue in map(self._catalog.queue_by_id, ask.queues) if queue is not None
        ]
        decision = self.remove(queues)
        if ask.at_shard:
            decision.drop = []
            decision.result = {"messages": ask.messages}
        return decision

    def _drained(self, ask: Drained, owner: str) -> Decision:
        queue = self._catalog.queue_by_id(ask.queue)
        still = queue is not None and queue.part is not None and queue.part.state == DRAINING
        return Decision(first=queue) if still else Decision()

    def _restore(self, ask: Restore, owner: str) -> Decision:
        decision = Decision()
        vhost = self._catalog.vhosts.get(ask.vhost)
        if vhost is not None:
            self._reshape(decision, vhost, ask.exchange, NO_POLICIES)
        return decision

    def _closed(self, ask: Closed, owner: str) -> Decision:
        held = [
            queue
            for queue in self._parts(ask)
            if shard_sets.held_of(queue) == CLOSING and queue.id in ask.queues
        ]
        changes: list[AnyChange] = [shard_sets.with_held(queue, CLOSED) for queue in held]
        return Decision(changes, follow={(ask.vhost, ask.exchange)})

    def _settled(self, ask: Settled, owner: str) -> Decision:
        parts = self._parts(ask)
        held = [queue for queue in parts if shard_sets.held_of(queue) == SETTLING]
        open = [shard_sets.with_held(queue, OPEN) for queue in held]
        number = cuts.number_under_way(parts)
        lost = [] if number is None else _cut(parts, number, ask.offsets, gains=False)
        return Decision([*lost, *open], create=open, follow={(ask.vhost, ask.exchange)})

    def _cut_off(self, ask: CutOff, owner: str) -> Decision:
        return Decision([*_cut(self._parts(ask), ask.number, ask.offsets, gains=True)])

    def _parts(self, ask: Closed | CutOff | Settled) -> list[QueuePut]:
        vhost = self._catalog.vhosts.get(ask.vhost)
        return vhost.parts(ask.exchange) if vhost is not None else []

    def _owner_gone(self, ask: OwnerGone, owner: str) -> Decision:
        return self.remove(self._catalog.queues_of(ask.connection))

    def remove(self, queues: list[QueuePut]) -> Decision:
        decision = Decision(result={"messages": 0}, drop=queues)
        for vhost_name in dict.fromkeys(queue.vhost for queue in queues):
            vhost = self._catalog.vhosts[vhost_name]
            names = [queue.name for queue in queues if queue.vhost == vhost_name]
            parts = [
                queue.part
                for queue in queues
                if queue.vhost == vhost_name and queue.part is not None
            ]
            decision.bereft |= {
                (vhost_name, part.exchange) for part in parts if part.state == ACTIVE
            }
            for name in names:
                decision.changes += unbound_first(vhost.bindings_to("queue", name))
                decision.changes.append(QueueDelete(vhost_name, name))
            lost = [binding for name in names for binding in vhost.bindings_to("queue", name)]
            decision.changes.extend(unbound_exchanges(vhost, lost, set()))
        return decision

    # -- stream exchanges ----------------------------------------------------------------------------

    def reshape(self, decided: Decision, before: Policies) -> Decision:
        """What stream exchanges need after these changes, which are in the catalog already. `before`: the policies of
        the vhost whose policies they change."""
        decision = Decision()
        for vhost_name, exchange in sorted(decided.bereft):
            if (left := self._catalog.vhosts.get(vhost_name)) is not None:
                self._reshape(decision, left, exchange, before, in_steps=False)
        for vhost_name, exchange in sorted(decided.follow):
            if (there := self._catalog.vhosts.get(vhost_name)) is not None:
                self._reshape(decision, there, exchange, before)
        for change in decided.changes:
            vhost = self._catalog.vhosts.get(getattr(change, "vhost", ""))
            if vhost is None:
                continue
            match change:
                case ExchangePut():
                    self._reshape(decision, vhost, change.name, before)
                case ExchangeDelete():
                    self._release(decision, vhost, change.name, shard_sets.DRAIN)
                case ParameterPut() | ParameterDelete() if change.component in SHARDING_COMPONENTS:
                    for exchange in [*vhost.exchanges]:
                        self._reshape(decision, vhost, exchange, before)
        return self._without_hidden_queues(decision)

    def restore(self) -> Decision:
        """At the start: shard queues that are missing, and those whose exchange is none any more."""
        decision = Decision()
        for vhost in self._catalog.vhosts.values():
            for exchange in dict.fromkeys([*vhost.exchanges, *vhost.part_exchanges()]):
                self._reshape(decision, vhost, exchange, NO_POLICIES)
        return decision

    def _reshape(
        self, decision: Decision, vhost: Vhost, name: str, before: Policies, in_steps: bool = True
    ) -> None:
        exchange = vhost.exchanges.get(name)
        want = (
            shard_sets.wanted(self._catalog, vhost, exchange, self._shards)
            if exchange is not None
            else None
        )
        if exchange is None or want is None:
            if not vhost.parts(name):
                return
            arguments = exchange.arguments if exchange is not None else {}
            choice = shard_sets.when_gone(arguments, before.of(EXCHANGE, name).definition)
            want = shard_sets.as_it_was(vhost, name) if choice == shard_sets.MERGE else None
            if exchange is None or want is None:
                self._release(decision, vhost, name, choice)
                return
            # Kept in the catalog: what asked for it is gone at the next step.
            said = {NUMBER: 1, policies.MERGED: True}
            decision.changes.append(ParameterPut(vhost.name, policies.SHARDS, name, said))
            decision.notes.append(
                f"exchange '{name}' in vhost '{vhost.name}': its shard queues drain into one"
            )
        most = self._catalog.vhost_limit(vhost.name, "max-queues")
        new = sum(
            put.vhost == vhost.name and put.name not in vhost.queues for put in decision.create
        )
        there = len(vhost.queues) - vhost.hidden_queues + new
        room = want.number if most is None else max(0, most - there)
        reshaping = shard_sets.Reshaping(
            vhost, exchange, want, self._shards, self._leaving, in_steps
        )
        done = reshaping.run(self._new_queue_id, room)
        decision.changes += done.changes
        decision.create += done.created + done.told
        decision.notes += done.notes

    def _release(self, decision: Decision, vhost: Vhost, exchange: str, choice: str) -> None:
        done = shard_sets.released(vhost, exchange, choice)
        removal = self.remove(done.dropped)
        decision.changes += done.changes + removal.changes
        decision.drop += removal.drop
        decision.create += done.told
        decision.notes += done.notes

    # -- vhosts, users, parameters ---------------------------------------------------------------------

    def _put(self, change: AnyChange, owner: str) -> Decision:
        return Decision([change])

    def _put_vhost(self, change: VhostPut, owner: str) -> Decision:
        if not change.name or len(change.name.encode()) > checks.NAME_BYTES_MAX:
            raise Refusal(BAD_REQUEST, f"a vhost's name has 1 to {checks.NAME_BYTES_MAX} bytes")
        if change.default_queue_type not in ("", *QUEUE_TYPES):
            raise Refusal(
                BAD_REQUEST, f"unsupported default queue type '{change.default_queue_type}'"
            )
        return Decision([change])

    def _delete_vhost(self, change: VhostDelete, owner: str) -> Decision:
        found = self._catalog.vhosts.get(change.name)
        if found is None:
            raise Refusal(NOT_FOUND, f"vhost '{change.name}' not found")
        if found.put.is_protected:
            text = f"Refusing to delete virtual host '{change.name}' because it is protected from deletion"
            raise Refusal(PRECONDITION_FAILED, text)
        return Decision([change], drop_vhost=change.name, close_vhost=change.name)

    def _delete_user(self, change: UserDelete, owner: str) -> Decision:
        if change.name not in self._catalog.users:
            raise Refusal(NOT_FOUND, f"user '{change.name}' not found")
        return Decision([change], close_user=change.name)

    def _put_permission(self, change: PermissionPut, owner: str) -> Decision:
        if change.vhost not in self._catalog.vhosts:
            raise Refusal(BAD_REQUEST, f"vhost '{change.vhost}' not found")
        if change.user not in self._catalog.users:
            raise Refusal(BAD_REQUEST, f"user '{change.user}' not found")
        check_regexes(change.configure, change.write, change.read)
        return Decision([change])

    def _put_topic_permission(self, change: TopicPermissionPut, owner: str) -> Decision:
        if change.vhost not in self._catalog.vhosts or change.user not in self._catalog.users:
            raise Refusal(BAD_REQUEST, "vhost_or_user_not_found")
        check_regexes(change.write, change.read)
        return Decision([change])

    def _delete_topic_permission(self, change: TopicPermissionDelete, owner: str) -> Decision:
        if not self._catalog.has_topic_permissions(change.user, change.vhost):
            raise Refusal(
                NOT_FOUND, f"no topic permissions of user '{change.user}' in vhost '{change.vhost}'"
            )
        return Decision([change])

    def _delete_permission(self, change: PermissionDelete, owner: str) -> Decision:
        if not self._catalog.may_enter(change.user, change.vhost):
            raise Refusal(
                NOT_FOUND, f"no permissions of user '{change.user}' in vhost '{change.vhost}'"
            )
        return Decision([change])

    def _put_parameter(self, change: ParameterPut, owner: str) -> Decision:
        if change.vhost and change.vhost not in self._catalog.vhosts:
            raise Refusal(NOT_FOUND, f"vhost '{change.vhost}' not found")
        if change.component == policies.USER_LIMITS and change.name not in self._catalog.users:
            raise Refusal(BAD_REQUEST, f"no such user: {change.name}")
        policies.check_parameter(change.vhost, change.component, change.name, change.value)
        return (
            self._policy_changed(change) if change.component in COMPONENTS else Decision([change])
        )

    def _policy_changed(self, change: ParameterPut | ParameterDelete) -> Decision:
        """Exchanges that delay messages from now on get a place to keep them first."""
        vhost = self._vhost(change.vhost)
        kept = [put for (of, *_), put in self._catalog.parameters.items() if of == change.vhost]
        said = (change.component, change.name)
        puts = [put for put in kept if (put.component, put.name) != said]
        new = Policies([*puts, change] if isinstance(change, ParameterPut) else puts)
        queues = [
            self._delay_queue(exchange)
            for exchange in vhost.exchanges.values()
            if exchange.name
            and delays_under(new, exchange)
            and vhost.delay_queue(exchange.name) is None
        ]
        return Decision([*queues, change], create=queues, policies_of=change.vhost)

    def _delete_parameter(self, change: ParameterDelete, owner: str) -> Decision:
        if (change.vhost, change.component, change.name) not in self._catalog.parameters:
            raise Refusal(NOT_FOUND, "Parameter does not exist")
        return (
            self._policy_changed(change) if change.component in COMPONENTS else Decision([change])
        )

    def _vhost(self, name: str) -> Vhost:
        vhost = self._catalog.vhosts.get(name)
        if vhost is None:
            raise Refusal(checks.NOT_ALLOWED, f"vhost {name} not found")
        return vhost


def delays_under(policies: Policies, exchange: ExchangePut) -> bool:
    """Whether the exchange keeps messages until they are due when these are in force."""
    definition = policies.of(EXCHANGE, exchange.name).definition
    return delaying.is_delayed(exchange.type, exchange_arguments(exchange.arguments, definition))


def unbound_first(bindings: Collection[BindingPut]) -> list[AnyChange]:
    """Of a thing that is deleted."""
    if len(bindings) <= BINDINGS_AT_ONCE_MAX:
        return []
    return [
        BindingDelete(b.vhost, b.source, b.kind, b.destination, b.routing_key, b.arguments)
        for b in bindings
    ]


def unbound_exchanges(vhost: Vhost, lost: Iterable[BindingPut], dead: set[str]) -> list[AnyChange]:
    """The auto-delete exchanges that go when these bindings go, and those that go with them.

    Such an exchange goes when its last binding *from* it goes. `dead`: exchanges that are going anyway.
    """
    gone: dict[str, int] = {}
    changes: list[AnyChange] = []
    todo = list(lost)
    for binding in todo:  # grows while it runs
        source = binding.source
        if source in dead:
            continue
        gone[source] = gone.get(source, 0) + 1
        if vhost.exchanges[source].auto_delete and gone[source] == vhost.count_from(source):
            dead.add(source)
            changes.append(ExchangeDelete(vhost.name, source))
            todo.extend(vhost.bindings_to("exchange", source))
    return changes


def with_type(ask: QueueDeclare, default: str, current: QueuePut | None) -> dict[str, Any]:
    """The arguments of a declare, with the type its vhost gives to a queue that is of none and could be of that one.

    A queue that was there before its vhost had a default, or is of it, may be declared again without a type.
    """
    arguments = ask.arguments
    if default in ("", "classic") or "x-queue-type" in arguments:
        return arguments
    if current is not None:
        kind = current.arguments.get("x-queue-type")
        return arguments if kind != default else {**arguments, "x-queue-type": kind}
    if not ask.name or checks.unfit_for_type(default, ask.durable, ask.auto_delete, ask.exclusive):
        return arguments
    return {**arguments, "x-queue-type": default}


def _cut(
    parts: list[QueuePut], number: int, offsets: dict[int, int], gains: bool
) -> list[QueuePut]:
    """Those of them that get a cut, with it."""
    return [
        cuts.with_cut(queue, Cut(number, offsets[queue.id], gains))
        for queue in parts
        if queue.id in offsets and queue.part is not None
    ]


def check_regexes(*regexes: str) -> None:
    for regex in regexes:
        try:
            patterns.compiled(regex)
        except patterns.BadPattern as error:
            raise Refusal(BAD_REQUEST, f"invalid regexp '{regex}': {error}") from None


def _counted(name: str) -> dict[str, Any]:
    return {"name": name, "messages": 0, "consumers": 0}


_DECIDE: Final[dict[type, Callable[[Decisions, Any, str], Decision]]] = {
    ExchangeDeclare: Decisions._declare_exchange,
    ExchangeRemove: Decisions._remove_exchange,
    QueueDeclare: Decisions._declare_queue,
    QueueRemove: Decisions._remove_queue,
    Bind: Decisions._bind,
    BindMany: Decisions._bind_many,
    Unbind: Decisions._unbind,
    Removal: Decisions._removal,
    Pause: Decisions._pause,
    Drained: Decisions._drained,
    Restore: Decisions._restore,
    CutOff: Decisions._cut_off,
    Closed: Decisions._closed,
    Settled: Decisions._settled,
    OwnerGone: Decisions._owner_gone,
    VhostPut: Decisions._put_vhost,
    VhostDelete: Decisions._delete_vhost,
    UserPut: Decisions._put,
    UserDelete: Decisions._delete_user,
    PermissionPut: Decisions._put_permission,
    PermissionDelete: Decisions._delete_permission,
    TopicPermissionPut: Decisions._put_topic_permission,
    TopicPermissionDelete: Decisions._delete_topic_permission,
    ParameterPut: Decisions._put_parameter,
    ParameterDelete: Decisions._delete_parameter,
}


def _takes_any_key(vhost: Vhost, source: str) -> bool:
    exchange = vhost.exchanges[source]
    return checks.takes_any_binding(delaying.inner_type(exchange.type, exchange.arguments), {})


def _check_key(key: str) -> None:
    if len(key) > tables.KEY_BYTES_MAX // 4 and len(key.encode()) > tables.KEY_BYTES_MAX:
        raise Refusal(
            checks.PRECONDITION_FAILED, f"a routing key of more than {tables.KEY_BYTES_MAX} bytes"
        )


def _check_values(request: Any) -> None:
    """Before anything else: what cannot be kept would end whoever tries, at each start anew."""
    if isinstance(request, BindMany):
        for _, _, key in request.binds:
            _check_key(key)
        return
    _check_key(getattr(request, "routing_key", ""))
    if arguments := getattr(request, "arguments", None):
        fault = tables.fault_in(arguments)
    elif isinstance(request, ParameterPut):  # kept as JSON, but as integers of 64 bits too
        fault = tables.fault_in(request.value, key_bytes_max=PARAMETER_KEY_BYTES_MAX)
    else:
        return
    if fault:
        raise Refusal(checks.PRECONDITION_FAILED, f"invalid arguments: {fault}")
