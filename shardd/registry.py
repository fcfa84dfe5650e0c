"""Keep the stores of a shard's vhosts, its queues and streams, and its peers.

The other objects of a shard (serving.py, consumer_requests.py, membership.py, queue_requests.py,
syncs.py, shard.py) share one registry. The registry answers requests that make and delete queues
and vhosts. This file knows no socket and no clock.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from shardmq.shardd.dead_letters import DeadLetters
from shardmq.shardd.dedup_ids import DedupIds
from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import (
    Consumer,
    Counters,
    Kind,
    Limits,
    Queue,
    Roster,
    StreamQueue,
    is_stream,
    limits_of,
)
from shardmq.shardd.reservations import Reservations
from shardmq.shardd.stores import Store, StoreHome, Sync, counters_of
from shardmq.shardd.streams import Streams
from shardmq.shardd.upkeep import Upkeep
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m


class Registry:
    """The state of one shard.

    Its collections stay the same objects, so that other objects may hold them.

    `consumer_timeout` is in ms, for queues that set none; None lets consumers take for ever. With
    `timeout_closes`, a consumer that is too slow loses its channel.
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        home: StoreHome,
        consumer_timeout: int | None,
        timeout_closes: bool,
    ) -> None:
        self.number: Final = number
        self.epoch: Final = epoch
        self.home: Final = home
        self.ready = False  # all queues are known, and their stores are recovered
        self.alarm = ""
        self.stores: Final[dict[str, Store]] = {}
        self.dropped: Final[dict[str, Store]] = {}  # of deleted vhosts, while a job still uses them
        self.upkeep: Final = Upkeep()
        self.queues: Final = Roster()
        self.streams: Final = Streams(home)
        self.peers: Final[dict[int, Peer]] = {}
        # By the first bytes of their messages.
        self.senders: Final[dict[envelope.Message, Peer]] = {}
        self.dead_letters: Final = DeadLetters()
        self.dedup: Final = DedupIds()
        self.reservations: Final = Reservations()
        # Queues that may have something to hand out, in order.
        self.dirty: Final[dict[Queue, None]] = {}
        self.dirty_stores: Final[set[Store]] = set()
        self.timers: Final[list[tuple[int, int]]] = []  # a heap of (due in ms, queue id)
        # By queue id, the time in ms when the queue must be served.
        self.timer_of: Final[dict[int, int]] = {}
        self.used: Final[set[int]] = set()  # auto-delete queues that have had a consumer
        # By id of an auto-delete queue, the front doors whose sessions have ended and that may come
        # back with consumers of the queue. By front door, its process.
        self.expected: Final[dict[int, dict[int, int]]] = {}
        self.gone: Final = Counters()  # the counters of deleted queues
        # By name, the counters of stores whose files are deleted.
        self.gone_stores: Final[Counter[str]] = Counter()
        self.sync: Sync[Store | StreamQueue] | None = None  # the sync of messages that is under way
        self._consumer_timeout = consumer_timeout
        self._timeout_closes = timeout_closes

    def wake(self, queue: Queue) -> None:
        """Serve the queue in this pass."""
        self.dirty[queue] = None

    def store_changed(self, queue: Queue) -> None:
        """Sync the store of the queue sooner or later.

        The caller has settled messages of the queue.
        """
        # Queues were made with our Store.
        self.dirty_stores.add(queue.store)  # type: ignore[arg-type]

    def note_time(self, now: int) -> None:
        """Note that all messages of the stores came until `now`, in ms since the epoch.

        Without such notes nobody could tell the age of a message.
        """
        for store in self.stores.values():
            store.note_time(now)

    # -- who is told -------------------------------------------------------------------------------

    def tell_controller(self, what: m.Control) -> None:
        controller = self.peers.get(m.CONTROLLER)
        if controller is not None:
            controller.tell(what)

    def set_alarm(self, reason: str) -> None:
        """Tell all peers why publishes must be held back, if the reason has changed.

        An empty reason means that publishes may go on.
        """
        if reason != self.alarm:
            self.alarm = reason
            for peer in self.peers.values():
                peer.tell(m.Alarm(reason))

    # -- at the start ------------------------------------------------------------------------------

    def forget_queues(self) -> None:
        """Forget all queues before the shard is ready.

        A new controller names them again.
        """
        self.queues.clear()
        self.dirty.clear()
        self.timer_of.clear()
        self.stores.clear()
        self.streams.close()

    def take_assigned(self, specs: Sequence[m.QueueSpec], now: int) -> None:
        """Make queues before their stores are recovered.

        The stores are recovered when all queues are known.
        """
        for spec in specs:
            if spec.vhost not in self.stores:
                self.stores[spec.vhost] = self.home.open(spec.vhost)
        self.create(specs, now)

    def recover(self, now: int) -> None:
        """Recover all stores, and give each queue the messages that it still has."""
        self.home.keep_only(self.stores.keys())
        for vhost, store in self.stores.items():
            self._recover(vhost, store, now)
            self.streams.keep_only(vhost, store)
        self.ready = True

    def _recover(self, vhost: str, store: Store, now: int) -> None:
        """Recover one store. A queue that is not durable comes back empty."""
        durable = self.queues.lasting(store)
        timed = [queue_id for queue_id, limits in durable.items() if limits.message_ttl is not None]
        found = dict(store.recover(durable.keys(), timed, partial(self.home.progress, vhost)))
        self.home.recovered(vhost, store)
        while found:  # each array is freed as soon as its queue has it
            queue_id, arrival = found.popitem()
            queue = self.queues[queue_id]
            queue.restore(arrival, now)
            self.dirty[queue] = None

    # -- what exists -------------------------------------------------------------------------------

    def on_create(self, peer: Peer, create: m.CreateQueues, now: int) -> None:
        self.create(create.queues, now)
        peer.tell(m.Done(create.request))

    def create(self, specs: Sequence[m.QueueSpec], now: int) -> None:
        """Make these queues, or update the arguments of queues that exist."""
        for spec in specs:
            if is_stream(spec.arguments):
                stream = self.streams.put(spec, self._store(spec.vhost), now)
                self.queues.adopt(stream)
                self.dirty[stream] = None
                continue
            limits = self._limits(spec)
            kind = Kind(self._store(spec.vhost), limits, spec.durable, spec.auto_delete)
            queue = self.queues.put(spec.id, kind, now)
            if queue is not None:
                queue.auto_delete = spec.auto_delete
                self.dirty[queue] = None
            if kind.limits.dead_letters is not None:
                self.dead_letters.know(spec.id, sys.intern(spec.vhost), spec.name)

    def _limits(self, spec: m.QueueSpec) -> Limits:
        limits = limits_of(spec.arguments)
        if spec.leaving:
            return Limits(
                dead_letters=limits.dead_letters,
                delivery_limit=limits.delivery_limit,
                paused=True,
                leaving=True,
            )
        if spec.paused or spec.held:
            limits = limits._replace(paused=spec.paused, held=spec.held)
        if self._consumer_timeout and "x-consumer-timeout" not in spec.arguments:
            limits = limits._replace(consumer_timeout=self._consumer_timeout)
        if self._timeout_closes and limits.consumer_timeout is not None:
            limits = limits._replace(timeout_closes=True)
        return limits

    def _store(self, vhost: str) -> Store:
        store = self.stores.get(vhost)
        if store is None:
            # The store is empty, and a job still uses its files.
            store = self.dropped.pop(vhost, None)
            if store is None:
                store = self.home.open(vhost)
                store.recover([])
            self.stores[vhost] = store
        return store

    def on_delete(self, peer: Peer, delete: m.DeleteQueue, now: int) -> None:
        queue = self.queues.get(delete.queue)
        if queue is None:
            peer.tell(m.Done(delete.request))
        elif delete.if_unused and queue.consumers:
            peer.tell(m.Refused(delete.request, 406, "in use"))
        elif delete.if_empty and queue.backlog.ready_count + queue.backlog.kept_back:
            peer.tell(m.Refused(delete.request, 406, "not empty"))
        else:
            peer.tell(m.Done(delete.request, messages=self._drop(queue)))

    def _drop(self, queue: Queue) -> int:
        """Delete a queue and cancel its consumers; return how many messages were ready."""
        for each in self.peers.values():
            for number, holder in list(each.holders.items()):
                if isinstance(holder, Consumer) and holder.queue is queue:
                    del each.holders[number]
                    if not holder.detached:
                        holder.detached = True
                        holder.window.consumers -= 1
                        # Deliveries of this pass would meet no consumer at the front door, and
                        # their credit would stay used up there.
                        each.tell(m.Cancelled(number), after_deliveries=True)
                    each.forget_window(holder.connection)
            for window in each.windows.values():
                window.forget(queue)
        self.queues.pop(queue.id)
        self.dirty.pop(queue, None)
        self.timer_of.pop(queue.id, None)
        self.used.discard(queue.id)
        self.expected.pop(queue.id, None)
        if queue.backlog.departures is not None and queue.backlog.departures.waits:
            self.have_died(queue)
        self.dead_letters.forget(queue)
        self.dedup.forget(queue.id)
        self.gone.add(queue.counters)
        count = queue.drop()
        self.streams.dropped(queue)
        return count

    def have_died(self, queue: Queue) -> None:
        """Note that messages of the queue wait to be dead-lettered."""
        if not self.dead_letters.knows(queue.id):
            vhost = next(
                (vhost for vhost, store in self.stores.items() if store is queue.store), None
            )
            if vhost is None:
                return  # the vhost is about to be deleted, with all its messages
            self.dead_letters.know(queue.id, vhost, queue.id)
        self.dead_letters.have_come(queue)

    def on_drop_vhost(self, peer: Peer, drop: m.DropVhost, now: int) -> None:
        """Delete a vhost. Its files are removed when no sync or merge uses them."""
        store = self.stores.pop(drop.vhost, None)
        for queue_id in self.queues.of(store) if store is not None else ():
            queue = self.queues.pop(queue_id)
            if queue is not None:
                self._drop(queue)
        self.dead_letters.forget_vhost(drop.vhost)
        if store is None:
            if drop.vhost not in self.dropped:
                self.home.remove(drop.vhost)
        else:
            self.dirty_stores.discard(store)
            self.dropped[drop.vhost] = store
            self.delete_dropped()
        peer.tell(m.Done(drop.request))

    def delete_dropped(self) -> None:
        """Delete the files of deleted vhosts, unless a sync or a merge uses them."""
        syncing = [store for store, _ in self.sync.jobs] if self.sync else []
        for vhost, store in list(self.dropped.items()):
            if store not in syncing and store is not self.upkeep.store:
                del self.dropped[vhost]
                self.gone_stores.update(counters_of(store))
                store.delete_all()

    def on_list(self, peer: Peer, asked: m.ListQueues, now: int) -> None:
        peer.tell(m.QueueIds(asked.request, self.queues.ids()))
