"""Bindings that are in force at the only front door before the controller has decided on them.

A bind-ok promises that what is published from then on is routed by the binding. If there is only
one front door, nobody else routes, and what need not outlive the broker need not wait for the disk.
So the binding is put in force here, the client is answered, and the controller is told in the same
pass. The request has left this process before the answer does. It goes by a pipe (binds_pipe.py),
which the controller reads now and then, and before all else that it hears of this front door.

A client that binds one key after the other has each binding put in force for itself. Such binds are
a run (bind_runs.pxi), whose bindings are collected, and put into the copy of the catalog together
as soon as somebody looks at the copy. What was looked up in the copy before is forgotten when the
first of them is collected.

Bindings that outlive the broker are put in force in the same way, but the client is answered only
when the controller says that they are recorded (`waits` of a run). If it refuses them, the client
hears that as of any bind. The controller reads a second pipe for them, at once.

The controller decides as always, and its order is the one that counts. If a queue or exchange goes
at the same time, the bind came before that. The controller answers such a request before it hands
out the changes of the same batch. So the requests that are unanswered when changes come were
decided behind these changes, and their bindings are put in force again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardmq.broker.front_door.hot_state import UNANSWERED_MAX, BindRun, BindRuns
from shardmq.broker.front_door.links.catalog_requests import (
    INTERNAL_ERROR,
    CatalogRequests,
    RunWaits,
)
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, BindingDelete, BindingPut
from shardmq.broker.shared.control import Answer, BindMany

log = logging.getLogger(__name__)

QUEUES_MAX = 100_000  # queues that are known to be at their shards
# Bindings that are answered and wait until somebody looks at the copy of the catalog.
ANSWERED_FIRST_MAX = 1024


class BindsAhead:
    """The binds of one front door that are unanswered by the controller and answered here."""

    def __init__(
        self,
        runs: BindRuns,
        requests: CatalogRequests,
        catalog: Callable[[], Catalog],
        changed: Callable[[list[AnyChange]], None],
    ) -> None:
        """Begin with none.

        `catalog` returns the copy of the catalog. Whoever reads the copy calls `put_in` before.
        `changed` hears what is put in force there, or taken back.
        """
        self._runs = runs
        self._requests = requests
        self._catalog = catalog
        self._changed = changed
        runs.first = lambda run: changed([*_puts(run.vhost, run.ends[-1:])])
        requests.answered_ahead = self._answered
        # Ids of queues that are at their shards: a declare or bind of theirs was answered.
        self._there: set[int] = set()
        # Vhost, exchange, queue and keys of bindings that the controller has, and that were not put
        # into the copy of the catalog before the answer.
        self._answered_first: list[tuple[str, str, str, list[str]]] = []
        self._answered_first_count = 0
        # Bindings that the controller is not known to have, each by the run that has put the
        # binding in force. If the bind is refused, these are taken back and no older ones.
        self._new: dict[_Binding, BindRun] = {}

    @property
    def epoch(self) -> int:
        """Return the number for which that holds what was judged of binds (`may_bind`)."""
        return self._runs.epoch

    @property
    def collected(self) -> list[BindRun]:
        """Return runs with bindings that are not in the copy of the catalog yet."""
        return self._runs.collected

    def queue_is_there(self, vhost: str, name: str) -> None:
        """Note that a queue is at its shard."""
        queue = self._catalog().queue(vhost, name)
        if queue is not None and queue.id not in self._there:
            if len(self._there) >= QUEUES_MAX:
                self._there.clear()
                self._runs.epoch += 1
            self._there.add(queue.id)

    def may_bind(self, vhost_name: str, source: str, name: str) -> bool:
        """Return whether binds between these two may be put in force before the controller decides.

        The caller knows that the controller will not refuse them by what is known here. The queue
        may not be at its shard yet; then they may not. The answer holds until `epoch` changes.
        """
        vhost = self._catalog().vhost(vhost_name)
        if vhost is None:
            return False
        return (
            source in vhost.exchanges
            and (queue := vhost.queues.get(name)) is not None
            and queue.id in self._there
        )

    def outlive(self, vhost_name: str, source: str, name: str) -> bool:
        """Return whether bindings between these two outlive the broker.

        A client is answered only when such a binding is recorded. The answer holds until `epoch`
        changes.
        """
        exchange = self._catalog().exchange(vhost_name, source)
        queue = self._catalog().queue(vhost_name, name)
        return (
            exchange is not None
            and queue is not None
            and exchange.durable
            and queue.durable
            and not queue.owner
        )

    def bind(
        self,
        vhost_name: str,
        ends: list[tuple[str, str, str]],
        owner: str,
        user: str,
        waits: RunWaits | None = None,
    ) -> BindRun | None:
        """Put binds between one exchange and one queue in force, and tell the controller.

        The caller knows that `may_bind` holds. `waits` hears when they are recorded; without it
        nobody waits for that. Return the run that they begin. Return None, and do nothing, if too
        much is unanswered, or the controller does not read.
        """
        if not self._requests.sends_at_once or self._runs.unanswered >= UNANSWERED_MAX:
            return None
        request = BindMany(vhost_name, ends, True, waits is not None)
        return self._requests.add_ahead(request, owner, user, waits)

    def put_in(self) -> None:
        """Put what is collected into the copy of the catalog."""
        if self._answered_first:
            for vhost_name, source, queue, keys in self._answered_first:
                if (vhost := self._catalog().vhost(vhost_name)) is not None:
                    vhost.bind_queue(source, queue, keys)
            self._forget_answered_first()
        collected, self._runs.collected = self._runs.collected, []
        for run in collected:
            run.is_collected = False
            self._put(run, run.put_in)

    def _forget_answered_first(self) -> None:
        self._answered_first.clear()
        self._answered_first_count = 0

    def _answered(self, run: BindRun, count: int, bound: int, answer: Answer) -> None:
        """Forget the first binds of a run, which the controller has decided on.

        `bound` of them are done. What it has refused is taken back. What nobody has looked for yet
        goes on waiting for that.
        """
        if (
            not answer.code
            and not run.put_in
            and run.is_collected
            and self._answered_first_count + count <= ANSWERED_FIRST_MAX
        ):
            keys = [key for _, _, key in run.answered(count)]
            self._answered_first_count += count
            self._answered_first.append((run.vhost, run.source, run.queue, keys))
            return
        self.put_in()
        vhost, new = run.vhost, self._new
        ends = run.answered(count)
        for end in ends[:bound]:
            new.pop((vhost, *end), None)  # a client may name a binding twice
        if not answer.code:
            return
        ends = [end for end in ends if new.get((vhost, *end)) is run]
        for end in ends:
            new.pop((vhost, *end), None)
        if answer.code == INTERNAL_ERROR and run.waits is None:
            # A fault of ours, and the client was promised the bindings.
            log.error("a bind is in force that the controller may not know: %s", answer.text)
            return
        run.end()
        of_vhost = self._catalog().vhost(vhost)
        if of_vhost is not None:
            puts = [put for put in _puts(vhost, ends) if of_vhost.has_binding(put)]
            gone = [
                BindingDelete(p.vhost, p.source, p.kind, p.destination, p.routing_key) for p in puts
            ]
            for each in gone:
                of_vhost.delete_binding(each)
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
            self._runs.epoch += 1
            self._forget_answered_first()
            self._new.clear()
            return
        if any(type(change) is not BindingPut for change in changes):
            self._runs.epoch += 1
        if self._new:
            for change in changes:
                if type(change) is BindingPut and change.kind == "queue" and not change.arguments:
                    binding = change.vhost, change.source, change.destination, change.routing_key
                    self._new.pop(binding, None)

    def put_again(self) -> None:
        """Put in force again what changes of before may have taken along."""
        self._runs.collected = []
        for run in self._requests.runs():
            run.is_collected = False
            if new := self._put(run, 0):
                self._changed([*_puts(run.vhost, new)])

    def _put(self, run: BindRun, first: int) -> list[tuple[str, str, str]]:
        """Put bindings of a run from the `first` on in force, and return those that were not."""
        vhost = self._catalog().vhost(run.vhost)
        ends = run.ends[first:]
        run.put_in = first + len(ends)
        if vhost is None:
            return []
        keys = vhost.bind_queue(run.source, run.queue, [key for _, _, key in ends])
        new = [(run.source, run.queue, key) for key in keys]
        self._new.update(((run.vhost, *end), run) for end in new)
        return new


# vhost, exchange, queue, routing key
_Binding = tuple[str, str, str, str]


def _puts(vhost: str, ends: list[tuple[str, str, str]]) -> list[BindingPut]:
    return [BindingPut(vhost, source, "queue", name, key) for source, name, key in ends]
