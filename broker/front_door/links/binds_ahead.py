"""Bindings that are in force at the only front door before the controller has decided on them.

A bind-ok promises that what is published from then on is routed by the binding. If there is only
one front door, nobody else routes, and what need not outlive the broker need not wait for the disk.
So the binding is put in force here, the client is answered, and the controller is told in the same
pass. The request has left this process before the answer does. It goes by a pipe (binds_pipe.py),
which the controller reads now and then, and before all else that it hears of this front door.

A client that binds one key after the other has each binding put in force for itself. So the
bindings are collected, and put into the copy of the catalog together as soon as somebody looks at
the copy. What was looked up in the copy before is forgotten when the first of them is collected.

The controller decides as always, and its order is the one that counts. If a queue or exchange goes
at the same time, the bind came before that. The controller answers such a request before it hands
out the changes of the same batch. So the requests that are unanswered when changes come were
decided behind these changes, and their bindings are put in force again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import groupby

from shardmq.broker.front_door.links.catalog_requests import INTERNAL_ERROR, CatalogRequests, Reply
from shardmq.broker.model.catalog import BindingKey, Catalog, Vhost, binding_key
from shardmq.broker.model.changes import AnyChange, BindingDelete, BindingPut
from shardmq.broker.shared.control import BindMany

log = logging.getLogger(__name__)

QUEUES_MAX = 100_000  # queues that are known to be at their shards


class BindsAhead:
    """The binds of one front door that are unanswered by the controller and answered here."""

    def __init__(
        self,
        requests: CatalogRequests,
        catalog: Callable[[], Catalog],
        changed: Callable[[list[AnyChange]], None],
    ) -> None:
        """Begin with none.

        `catalog` returns the copy of the catalog. Whoever reads the copy calls `put_in` before.
        `changed` hears what is put in force there, or taken back.
        """
        self._requests = requests
        self._catalog = catalog
        self._changed = changed
        # Ids of queues that are at their shards: a declare or bind of theirs was answered.
        self._there: set[int] = set()
        self._unanswered: dict[Reply, _Binds] = {}
        # The last of them, which are not in the copy of the catalog yet. There are at most as many
        # as requests may be on their way.
        self.collected: dict[Reply, _Binds] = {}
        # What was judged of an exchange, a queue and the rights of a user holds for this number.
        self.epoch = 0
        # Bindings that the controller is not known to have, each by the request that has put the
        # binding in force. If the request is refused, these are taken back and no older ones.
        self._new: dict[_Key, Reply] = {}

    def queue_is_there(self, vhost: str, name: str) -> None:
        """Note that a queue is at its shard."""
        queue = self._catalog().queue(vhost, name)
        if queue is not None and queue.id not in self._there:
            if len(self._there) >= QUEUES_MAX:
                self._there.clear()
                self.epoch += 1
            self._there.add(queue.id)

    def may_bind(self, vhost_name: str, source: str, name: str) -> bool:
        """Return whether binds between these two need not wait for the controller.

        The caller knows that the controller will not refuse them by what is known here. They have
        to wait if the bindings outlive the broker, or if the queue may not be at its shard yet.
        The answer holds until `epoch` changes.
        """
        vhost = self._catalog().vhost(vhost_name)
        if vhost is None:
            return False
        exchange, queue = vhost.exchanges.get(source), vhost.queues.get(name)
        return (
            exchange is not None
            and queue is not None
            and not (exchange.durable and queue.durable and not queue.owner)
            and queue.id in self._there
        )

    def bind(
        self, vhost_name: str, ends: list[tuple[str, str, str]], owner: str, user: str
    ) -> bool:
        """Put binds between one exchange and one queue in force, and tell the controller.

        The caller knows that `may_bind` holds. Return False, and do nothing, if too much is
        unanswered, or the controller does not read.
        """
        answer, request = Reply(), BindMany(vhost_name, ends, True)
        if not (
            self._requests.sends_at_once and self._requests.add_ahead(request, owner, user, answer)
        ):
            return False
        binds = _Binds(vhost_name, ends)
        answer.add_done_callback(self._answered)
        if not self.collected:
            self._changed([*binds.puts()[:1]])
        self.collected[answer] = self._unanswered[answer] = binds
        return True

    def put_in(self) -> None:
        """Put what is collected into the copy of the catalog."""
        if not self.collected:
            return
        collected, self.collected = self.collected, {}
        for name, run in groupby(collected.items(), lambda each: each[1].vhost):
            if (vhost := self._catalog().vhost(name)) is not None:
                self._put(vhost, [(answer, put) for answer, each in run for put in each.puts()])

    def _answered(self, answer: Reply) -> None:
        """Forget a request that the controller has decided on, and take back what it refused."""
        self.put_in()
        puts, result = self._unanswered.pop(answer).puts(), answer.result()
        puts = [put for put in puts if self._new.get(_key(put)) is answer]
        for put in puts:
            self._new.pop(_key(put), None)  # a client may name a binding twice
        if not result.code:
            return
        if result.code == INTERNAL_ERROR:  # a fault of ours; the client was promised the bindings
            log.error("a bind is in force that the controller may not know: %s", result.text)
            return
        vhost = self._catalog().vhost(puts[0].vhost) if puts else None
        if vhost is not None:
            gone = [
                BindingDelete(p.vhost, p.source, p.kind, p.destination, p.routing_key)
                for p in puts
                if vhost.has_binding(p)
            ]
            for each in gone:
                vhost.delete_binding(each)
            self._changed([*gone])
            self.put_again()  # another request may be for the same binding

    def has_all(self, changes: list[AnyChange]) -> bool:
        """Return whether the changes are nothing but bindings that are in force here."""
        self.put_in()
        catalog = self._catalog()
        return all(
            type(change) is BindingPut
            and (vhost := catalog.vhost(change.vhost)) is not None
            and vhost.has_binding(change)
            for change in changes
        )

    def decided(self, changes: list[AnyChange] | None) -> None:
        """Note that the controller has the bindings of these changes, or of a whole catalog.

        They are in the copy of the catalog, or about to be. What was collected before the changes
        is in the copy. A whole catalog has nothing of it, and the caller then puts in force again
        what is unanswered.
        """
        if changes is None:
            self.epoch += 1
            self._new.clear()
            self.collected = {}
            return
        if any(type(change) is not BindingPut for change in changes):
            self.epoch += 1
        if self._new:
            for change in changes:
                if type(change) is BindingPut:
                    self._new.pop(_key(change), None)

    def put_again(self) -> None:
        """Put in force again what changes of before may have taken along."""
        catalog = self._catalog()
        for answer, binds in self._unanswered.items():
            if (vhost := catalog.vhost(binds.vhost)) is not None:
                new = self._put(vhost, [(answer, put) for put in binds.puts()])
                if new:
                    self._changed([*new])

    def _put(self, vhost: Vhost, puts: list[tuple[Reply, BindingPut]]) -> list[BindingPut]:
        """Put bindings in force that are not yet, each for the request with its answer.

        Return these.
        """
        new = [each for each in puts if not vhost.has_binding(each[1])]
        vhost.put_bindings([put for _, put in new])
        self._new.update((_key(put), answer) for answer, put in new)
        return [put for _, put in new]


class _Binds:
    """Binds between one exchange and one queue: (source, queue, routing key) of each."""

    __slots__ = ("_ends", "_puts", "vhost")

    def __init__(self, vhost: str, ends: list[tuple[str, str, str]]) -> None:
        self.vhost, self._ends = vhost, ends
        self._puts: list[BindingPut] = []

    def puts(self) -> list[BindingPut]:
        """Return the bindings, which are made when they are first asked for."""
        if not self._puts:
            vhost = self.vhost
            self._puts = [
                BindingPut(vhost, source, "queue", name, key) for source, name, key in self._ends
            ]
        return self._puts


_Key = tuple[str, BindingKey]


def _key(put: BindingPut) -> _Key:
    return put.vhost, binding_key(put)
