"""Batches of requests meet their queues; confirms are held until the batch is on stable storage.

Publish path, 3 of 5. Before: broker/publishing.py. After: shardd/queues/queue.py.

Knows no socket and no clock: `receive` takes a message in, `turn_end` says what to send. Syncs are begun here and run
by the caller, one at a time; a batch is confirmed by a sync that began after its append, and never before an earlier
batch.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from shardd import stats
from shardd.dead_letters import DeadLetters
from shardd.peers import Outgoing, Peer, refused_runs
from shardd.queues import (
    Arrival,
    Consumer,
    Counters,
    Getter,
    Kind,
    Limits,
    Queue,
    Reader,
    Roster,
    StreamQueue,
    is_stream,
    limits_of,
)
from shardd.queues import Store as QueueStore
from shardd.streams import Home as StreamHome
from shardd.streams import Streams
from shardd.upkeep import Step, Upkeep
from shardd.wire import codec, envelope
from shardd.wire import messages as m
from shardd.wire.histogram import Histogram

# Deliveries of one queue before the next has its turn, and of all queues before messages are received again.
QUEUE_PASS_BYTES = 256 << 10
DELIVERY_TURN_BYTES = 1 << 20
# Timers looked at in one turn.
TIMERS_PER_TURN = 1000

_may_refuse = attrgetter("may_refuse")

# Of one store: bytes of message files gone through, of how many; messages found in them so far.
Progress = Callable[[int, int, int], None]


class NoRoom(Exception):
    """The store's disk is full: nothing of the batch was taken; reading and settling go on."""


class SyncJob(Protocol):
    def run(self) -> None: ...


class Store(QueueStore, Protocol):
    """What a shard needs of a store; `append` raises NoRoom (or what `Shard.no_room` names) when the disk is full."""

    def recover(
        self, queue_ids: Collection[int], timed: Collection[int] = (), progress: Progress | None = None
    ) -> Mapping[int, Arrival]: ...
    def append(
        self, records: bytes | bytearray | memoryview, *, indexes: bool = False, in_sequence: bool = False
    ) -> Sequence[Arrival]: ...
    def screen(self, records: memoryview, rooms: Mapping[int, tuple[int, int | None, int, int | None]]) -> Screened:
        """What of records IN_SEQUENCE is to be appended."""

    def unscreen(self) -> None:
        """It was not."""

    def forget_producers(self, heard_before: int) -> int: ...
    def begin_sync(self) -> Any: ...
    def finish_sync(self, job: Any) -> None: ...
    @property
    def written_bytes(self) -> int: ...
    def begin_reclaim(self) -> Any: ...
    def finish_reclaim(self, job: Any) -> int: ...
    def close(self, live: dict[int, array[int]] | None = None) -> None: ...
    def delete_all(self) -> None: ...
    def stats(self) -> Mapping[str, int]: ...


class Screened(Protocol):
    """A batch without messages that are not to be stored: repeated ones by queue id, and ordinals of refused ones.
    `origins`: of those left, which they were in the batch."""

    records: bytes | bytearray | memoryview
    origins: array[int] | None
    repeated: dict[int, int]
    refused: list[int]


class Home(StreamHome, Protocol):
    """Where the stores of all vhosts lie."""

    def open(self, vhost: str) -> Store: ...
    def remove(self, vhost: str) -> None:
        """Of a vhost whose store is not open."""

    def keep_only(self, vhosts: Collection[str]) -> None:
        """Stores of other vhosts go."""

    def recovered(self, vhost: str, store: Any) -> None:
        """That store, as `open` gave it."""

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        """A store recovers."""


class Sync:
    """One sync of all stores and streams that need it: `run` in any thread, then `Shard.sync_ended`."""

    def __init__(self, jobs: list[tuple[Store | StreamQueue, SyncJob]]) -> None:
        self.jobs = jobs

    def run(self) -> None:
        for _, job in self.jobs:
            job.run()


class Shard:
    def __init__(
        self,
        number: int,
        epoch: int,
        pid: int,
        home: Home,
        *,
        no_room: tuple[type[Exception], ...] = (NoRoom,),
        process_stats: Callable[[], dict[str, float]] = dict,
        consumer_timeout: int | None = None,
        timeout_closes: bool = False,
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.ready = False
        self.stores: dict[str, Store] = {}
        self._dropped: dict[str, Store] = {}  # with their vhost, but a job has them in hand
        self.upkeep = Upkeep()
        self.queues = Roster()
        self.streams = Streams(home)
        self.peers: dict[int, Peer] = {}
        self._senders: dict[envelope.Message, Peer] = {}  # the same, by how their messages begin
        self._incarnations: dict[int, int] = {}  # of each peer: lower ones are gone
        self.dead_letters = DeadLetters()
        self.alarm = ""
        self.refused_batches = 0  # for want of room
        self.batch_messages, self.batch_bytes = Histogram(), Histogram()
        self._pid = pid
        self._home = home
        self._no_room = no_room
        self._process_stats = process_stats
        self._gone = Counters()  # of queues that are no more
        self._looked_over: list[int] = []  # what the controller asks for the numbers of, part by part
        self._consumer_timeout = consumer_timeout  # ms, of queues that say nothing
        self._timeout_closes = timeout_closes
        self._used: set[int] = set()  # auto-delete queues that have had a consumer
        self._dirty: dict[Queue, None] = {}  # may have something to hand out, in turn
        self._timers: list[tuple[int, int]] = []  # (due, queue id)
        self._timer_of: dict[int, int] = {}
        self._dirty_stores: set[Store] = set()
        self._sync: Sync | None = None
        self._syncs_begun = self._syncs_ended = 0
        self._sync_wanted = False
        self._now = 0
        self._kinds: dict[int, Callable[[Peer, envelope.Message, int], None]] = {
            m.PUBLISH: self._on_publish,
            m.SETTLE: self._on_settle,
            m.CREDIT: self._on_credit,
            m.CONTROL: self._on_control,
        }
        self._controls: dict[type[m.Message], Callable[[Peer, Any, int], None]] = {
            m.AssignPart: self._on_assign_part,
            m.Assign: self._on_assign,
            m.CreateQueues: self._on_create,
            m.DeleteQueue: self._on_delete,
            m.DropVhost: self._on_drop_vhost,
            m.Gone: self._on_gone,
            m.Stats: self._on_stats,
            m.ListQueues: self._on_list_queues,
            m.Attach: self._on_attach,
            m.AttachReader: self._on_attach_reader,
            m.Look: lambda peer, look, _: peer.tell(self.streams.look(peer, look)),
            m.Pull: lambda peer, pull, _: peer.tell(self.streams.pull(peer, pull)),
            m.Unwatch: lambda peer, what, _: self.streams.unwatch(peer, what),
            m.Place: lambda peer, place, _: peer.tell(self.streams.place(place)),
            m.Detach: self._on_detach,
            m.Release: self._on_release,
            m.Grant: self._on_grant,
            m.Tune: self._on_tune,
            m.Recall: self._on_recall,
            m.Get: self._on_get,
            m.Count: self._on_count,
            m.Left: self._on_left,
            m.LetGo: self._on_let_go,
            m.Purge: self._on_purge,
            m.Departed: self._on_departed,
        }

    # -- in --------------------------------------------------------------------------------------------

    def receive(self, message: envelope.Message, now: int) -> None:
        """Of a known process and of this epoch, or a Join; everything else is stale. Nothing of the message is kept."""
        self._now = now
        peer = self._senders.get(message[1 : m.HEADER_BYTES])
        if peer is not None:
            self._kinds[message[0]](peer, message, now)
            return
        head = envelope.read(message)
        peer = self.peers.get(head.peer)
        if peer is not None and head.epoch == self.epoch and head.incarnation == peer.incarnation:
            self._kinds[head.kind](peer, message, now)
        elif head.kind == m.CONTROL and isinstance(join := envelope.read_control(message), m.Join):
            self._on_join(head, join.endpoint, now)

    def _on_publish(self, peer: Peer, message: envelope.Message, now: int) -> None:
        publish = codec.read_publish(message)
        size = len(message)
        peer.took(size)
        self.batch_messages.add(publish.messages)
        self.batch_bytes.add(size)
        in_sequence, records = publish.in_sequence, publish.records
        ids = publish.queue_ids
        known = self.queues.named(ids)
        held = peer.hold(publish.batch) if publish.wanted else None
        if not known:
            return  # all its queues were deleted meanwhile
        store: Store = known[0].store  # type: ignore[assignment] # queues were made with a Store of ours
        streams = self.streams.among(known) if self.streams.queues else ()
        stored = len(streams) < len(known)
        screened = self._screen(store, records, known) if in_sequence and stored else None
        arrivals: Sequence[Arrival] = ()
        refused: set[int] = set()
        try:
            if streams:
                refused = self.streams.append(streams, records, alone=len(ids) == 1, in_sequence=in_sequence)
            if stored:
                indexes = known[0].may_refuse if len(known) == 1 else any(map(_may_refuse, known))
                kept = records if screened is None else screened.records
                arrivals = store.append(kept, indexes=indexes, in_sequence=in_sequence)
                self._dirty_stores.add(store)
        except self._no_room:
            if screened is not None:
                store.unscreen()
            self.refused_batches += 1
            if held is not None:
                held.refused = refused_runs(message, range(publish.messages), unnumbered=True)
            # Publishes without confirms would be lost in silence: let the front doors hold them back.
            self.set_alarm(m.LOW_ON_DISK)
            return
        if held is not None and (publish.needs_sync or streams):
            held.sync = self._syncs_begun + 1
        if publish.needs_sync or streams:  # a stream's readers wait for it, too
            self._sync_wanted = True
        origins = None
        if screened is not None:
            refused.update(screened.refused)
            origins = screened.origins
        for arrival in arrivals:
            queue = self.queues.get(arrival.queue_id)
            if queue is None:
                store.settle(arrival.queue_id, arrival.entries, False)
                continue
            if turned_away := queue.publish(arrival, now):
                refused.update(turned_away if origins is None else [origins[i] for i in turned_away])
            self._dirty[queue] = None
        if refused and held is not None:
            held.refused = refused_runs(message, sorted(refused))

    def _screen(self, store: Store, records: memoryview, known: list[Queue]) -> Screened:
        """Of messages that say their place in what a producer sends, those that are new to their queues. What a queue
        will refuse is left out here: on disk it would later be taken for stored."""
        screened = store.screen(records, {queue.id: queue.room() for queue in known if queue.may_refuse})
        for queue_id, count in screened.repeated.items():
            queue = self.queues.get(queue_id)
            if queue is not None and queue.keeps_in_store:
                queue.counters.repeated += count
        return screened

    def forget_producers(self, heard_before: int) -> None:
        """Those that were last heard before that, ms since the epoch."""
        for store in self.stores.values():
            store.forget_producers(heard_before)
        self.streams.forget_producers(heard_before)

    def _catch_up(self, queue: Queue, now: int) -> None:
        """Whoever comes, goes or looks finds the queue as if each message had been handed out when it arrived, though
        several requests make one turn. The consumers' windows bound it."""
        if queue in self._dirty and queue.keeps_in_store:
            while queue.deliver(now, self, QUEUE_PASS_BYTES):
                pass

    def _on_settle(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for number, kind, first, last in envelope.read_settles(message):
            holder = peer.holders.get(number)
            if isinstance(holder, Consumer):
                entries, size = holder.unacked.settle(first, last)
                if isinstance(holder, Reader):
                    self.streams.settle(holder, kind, entries, size)
                    self._dirty[holder.queue] = None
                elif entries:
                    self._settle(holder.queue, kind, entries, size)
                self._forget_if_done(peer, holder)
            elif holder is not None:
                for queue, entries, size in holder.settle(first, last):
                    self._settle(queue, kind, entries, size)

    def _settle(self, queue: Queue, kind: int, entries: array[int], size: int) -> None:
        act = (queue.ack, queue.reject, queue.requeue, queue.give_back)[kind]
        act(entries, size)
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
        self._dirty[queue] = None

    def _forget_if_done(self, peer: Peer, consumer: Consumer) -> None:
        if consumer.detached and not consumer.unacked.count:
            consumer.queue.let_holder_go(consumer)
            peer.holders.pop(consumer.number, None)
            peer.forget_window(consumer.connection)

    def _on_credit(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for connection, count in envelope.read_credit(message):
            window = peer.windows.get(connection)
            if window is None:
                continue
            window.free(count)
            for queue in window.unblocked():
                self._dirty[queue] = None

    def _on_control(self, peer: Peer, message: envelope.Message, now: int) -> None:
        what = envelope.read_control(message)
        handler = self._controls.get(type(what))
        if handler is not None:
            handler(peer, what, now)
        elif isinstance(what, m.Join) and not self.ready and peer.number == m.CONTROLLER:
            self._greet(peer)

    # -- who is there ----------------------------------------------------------------------------------

    def greet(self, endpoint: str) -> Outgoing:
        """To the controller, at start, before it has said who it is."""
        hello = m.Hello(self._pid, ready=False)
        return Outgoing(endpoint, envelope.control(m.CONTROLLER, 0, self.epoch, self.number, hello))

    def _on_join(self, head: envelope.Header, endpoint: str, now: int) -> None:
        """Of a new process, or of one that does not know us yet; those that know us repeat it, and need no answer."""
        if head.incarnation < self._incarnations.get(head.peer, 0):
            return  # the late words of a process that is gone
        self._incarnations[head.peer] = head.incarnation
        peer = self.peers.get(head.peer)
        if peer is None or peer.incarnation != head.incarnation:
            self._remove(head.peer, now)
            peer = self.peers[head.peer] = Peer(head.peer, head.incarnation, endpoint, self.epoch, self.number)
            self._senders[peer.sender] = peer
            if head.peer == m.CONTROLLER:
                if not self.ready:  # it names all queues anew
                    self.queues, self._dirty, self.stores = Roster(), {}, {}
                    self.streams.close()
                self._greet(peer)
                self._tell_closed()
                return
        if self.ready or head.peer == m.CONTROLLER:
            self._greet(peer)

    def _tell_closed(self) -> None:
        """A controller that died may have taken the news of these queues with it."""
        for queue in self.queues.used():
            if queue.closed:
                self._tell_controller(m.AutoDeleted(queue.id, "auto-delete"))
            elif queue.id in self._used:
                self._tell_controller(m.Used(queue.id))

    def _greet(self, peer: Peer) -> None:
        peer.tell(m.Hello(self._pid, ready=self.ready))
        if self.alarm:
            peer.tell(m.Alarm(self.alarm))

    def _remove(self, number: int, now: int) -> None:
        """That process is gone, with all its consumers."""
        peer = self.peers.pop(number, None)
        if peer is not None:
            del self._senders[peer.sender]
            self._release(peer, list(peer.holders), now)
            self.dead_letters.door_gone(number)
            self.streams.peer_gone(number)

    def _on_gone(self, peer: Peer, gone: m.Gone, now: int) -> None:
        if gone.incarnation < self._incarnations.get(gone.door, 0):
            return  # its successor is here
        self._incarnations[gone.door] = gone.incarnation + 1
        self._remove(gone.door, now)

    def _tell_controller(self, what: m.Control) -> None:
        controller = self.peers.get(m.CONTROLLER)
        if controller is not None:
            controller.tell(what)

    def set_alarm(self, reason: str) -> None:
        if reason != self.alarm:
            self.alarm = reason
            for peer in self.peers.values():
                peer.tell(m.Alarm(reason))

    # -- what exists -----------------------------------------------------------------------------------

    def _on_assign_part(self, peer: Peer, part: m.AssignPart, now: int) -> None:
        if not self.ready:
            self._assigned(part.queues, now)

    def _on_assign(self, peer: Peer, assign: m.Assign, now: int) -> None:
        if self.ready:
            self._create(assign.queues, now)
            self._greet(peer)
            return
        self._assigned(assign.queues, now)
        self._home.keep_only(self.stores.keys())
        for vhost, store in self.stores.items():
            self._recover(vhost, store, now)
            self.streams.keep_only(vhost, store)
        self.ready = True
        for each in self.peers.values():
            self._greet(each)

    def _assigned(self, specs: Sequence[m.QueueSpec], now: int) -> None:
        """Before their stores are recovered, which is done when all queues are known."""
        for spec in specs:
            if spec.vhost not in self.stores:
                self.stores[spec.vhost] = self._home.open(spec.vhost)
        self._create(specs, now)

    def _recover(self, vhost: str, store: Store, now: int) -> None:
        """A queue that is not durable comes back empty: what it settled was never remembered."""
        durable = self.queues.lasting(store)
        timed = [queue_id for queue_id, limits in durable.items() if limits.message_ttl is not None]
        found = dict(store.recover(durable.keys(), timed, partial(self._home.progress, vhost)))
        self._home.recovered(vhost, store)
        while found:  # each array goes when its queue has it
            queue_id, arrival = found.popitem()
            queue = self.queues[queue_id]
            queue.restore(arrival, now)
            self._dirty[queue] = None

    def _on_create(self, peer: Peer, create: m.CreateQueues, now: int) -> None:
        self._create(create.queues, now)
        peer.tell(m.Done(create.request))

    def _create(self, specs: Sequence[m.QueueSpec], now: int) -> None:
        for spec in specs:
            if is_stream(spec.arguments):
                stream = self.streams.put(spec, self._store(spec.vhost), now)
                self.queues.adopt(stream)
                self._dirty[stream] = None
                continue
            limits = self._limits(spec)
            kind = Kind(self._store(spec.vhost), limits, spec.durable, spec.auto_delete)
            queue = self.queues.put(spec.id, kind, now)
            if queue is not None:
                self._dirty[queue] = None
            if kind.limits.dead_letters is not None:
                self.dead_letters.know(spec.id, sys.intern(spec.vhost), spec.name)

    def _limits(self, spec: m.QueueSpec) -> Limits:
        limits = limits_of(spec.arguments)
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
            store = self._dropped.pop(vhost, None)  # empty by now, and its files are still in use
            if store is None:
                store = self._home.open(vhost)
                store.recover([])
            self.stores[vhost] = store
        return store

    def _on_delete(self, peer: Peer, delete: m.DeleteQueue, now: int) -> None:
        queue = self.queues.get(delete.queue)
        if queue is None:
            peer.tell(m.Done(delete.request))
        elif delete.if_unused and queue.consumers:
            peer.tell(m.Refused(delete.request, 406, "in use"))
        elif delete.if_empty and queue.ready_count + queue.kept_back:
            peer.tell(m.Refused(delete.request, 406, "not empty"))
        else:
            peer.tell(m.Done(delete.request, messages=self._drop(queue)))

    def _drop(self, queue: Queue) -> int:
        for each in self.peers.values():
            for number, holder in list(each.holders.items()):
                if isinstance(holder, Consumer) and holder.queue is queue:
                    del each.holders[number]
                    if not holder.detached:
                        holder.detached = True
                        holder.window.consumers -= 1
                        each.tell(m.Cancelled(number))
                    each.forget_window(holder.connection)
            for window in each.windows.values():
                window.forget(queue)
        self.queues.pop(queue.id)
        self._dirty.pop(queue, None)
        self._timer_of.pop(queue.id, None)
        self._used.discard(queue.id)
        if queue.departures is not None and queue.departures.waits:
            self._have_died(queue)
        self.dead_letters.forget(queue)
        self._gone.add(queue.counters)
        count = queue.drop()
        self.streams.dropped(queue)
        return count

    def _on_drop_vhost(self, peer: Peer, drop: m.DropVhost, now: int) -> None:
        """Its files go when no job has them in hand."""
        store = self.stores.pop(drop.vhost, None)
        for queue_id in self.queues.of(store) if store is not None else ():
            queue = self.queues.pop(queue_id)
            if queue is not None:
                self._drop(queue)
        self.dead_letters.forget_vhost(drop.vhost)
        if store is None:
            if drop.vhost not in self._dropped:
                self._home.remove(drop.vhost)
        else:
            self._dirty_stores.discard(store)
            self._dropped[drop.vhost] = store
            self._delete_dropped()
        peer.tell(m.Done(drop.request))

    def _delete_dropped(self) -> None:
        syncing = [store for store, _ in self._sync.jobs] if self._sync else []
        for vhost, store in list(self._dropped.items()):
            if store not in syncing and store is not self.upkeep.store:
                del self._dropped[vhost]
                store.delete_all()

    # -- consumers -------------------------------------------------------------------------------------

    def _on_attach(self, peer: Peer, attach: m.Attach, now: int) -> None:
        queue = self.queues.get(attach.queue)
        if queue is None or queue.closed or isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        if not attach.resumed and queue.consumers.refuses(attach.exclusive):
            peer.tell(m.Refused(attach.request, 403, "exclusive use"))
            return
        consumer = Consumer(
            queue,
            peer,
            attach.consumer,
            peer.window(attach.connection),
            connection=attach.connection,
            channel=attach.channel,
            tag=attach.tag,
            no_ack=attach.no_ack,
            exclusive=attach.exclusive,
            priority=attach.priority,
            prefetch=attach.prefetch,
            limited=attach.granted,
            lent=attach.lent,
            affinity=attach.affinity,
        )
        queue.attach(consumer)
        peer.holders[attach.consumer] = consumer
        if queue.auto_delete and queue.id not in self._used:
            self._used.add(queue.id)
            self._tell_controller(m.Used(queue.id))
        peer.tell(m.Attached(attach.request))
        self._dirty[queue] = None

    def _on_attach_reader(self, peer: Peer, attach: m.AttachReader, now: int) -> None:
        queue = self.queues.get(attach.queue)
        if queue is None or queue.closed or not isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        try:
            reader = self.streams.attach(queue, peer, attach, now)
        except ValueError as error:
            peer.tell(m.Refused(attach.request, 406, str(error)))
            return
        peer.holders[attach.consumer] = reader
        peer.tell(m.AttachedAt(attach.request, reader.offset))
        self._dirty[queue] = None

    def _on_detach(self, peer: Peer, detach: m.Detach, now: int) -> None:
        consumer = peer.holders.get(detach.consumer)
        closed = False
        if isinstance(consumer, Consumer):
            self._catch_up(consumer.queue, now)
            self._detach(consumer, now)
            self._forget_if_done(peer, consumer)
            closed = consumer.queue.closed
        peer.tell(m.Done(detach.request, closed=closed), after_deliveries=True)

    def _detach(self, consumer: Consumer, now: int) -> None:
        queue = consumer.queue
        was_closed = queue.closed
        queue.detach(consumer, now)
        self._dirty[queue] = None
        if queue.closed and not was_closed:
            self._tell_controller(m.AutoDeleted(queue.id, "auto-delete"))

    def _on_release(self, peer: Peer, release: m.Release, now: int) -> None:
        self._release(peer, release.consumers, now)
        peer.tell(m.Done(release.request))

    def _release(self, peer: Peer, numbers: Sequence[int], now: int) -> None:
        """All let go of first, so that nothing is handed from one to the other."""
        for number in numbers:
            holder = peer.holders.pop(number, None)
            if isinstance(holder, Consumer):
                self._detach(holder, now)
                holder.queue.release(holder, now)
                self._dirty_stores.add(holder.queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
                peer.forget_window(holder.connection)
            elif holder is not None:
                for queue, entries, size in holder.take_all():
                    self._settle(queue, m.REQUEUE, entries, size)

    def _on_grant(self, peer: Peer, grant: m.Grant, now: int) -> None:
        consumer = peer.holders.get(grant.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            consumer.queue.grant(consumer, grant.count)
            self._dirty[consumer.queue] = None

    def _on_tune(self, peer: Peer, tune: m.Tune, now: int) -> None:
        consumer = peer.holders.get(tune.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            self._catch_up(consumer.queue, now)
            consumer.tune(tune.prefetch, tune.granted, tune.lent)
            self._dirty[consumer.queue] = None

    def _on_recall(self, peer: Peer, recall: m.Recall, now: int) -> None:
        consumer = peer.holders.get(recall.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            consumer.recalled = recall.keep
            self._dirty[consumer.queue] = None

    def _on_get(self, peer: Peer, get: m.Get, now: int) -> None:
        queue = self.queues.get(get.queue)
        if queue is None:
            peer.tell(m.Refused(get.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        getter = None
        if not get.no_ack:
            holder = peer.holders.setdefault(get.consumer, Getter(peer, get.connection, get.channel))
            assert isinstance(holder, Getter), "a consumer does not get"
            getter = holder
        message, number, redelivered, times = queue.get(getter, now) or (b"", 0, False, 0)
        if times:
            peer.tell(m.GotAgain(get.request, message, number, queue.ready_count, times))
        else:
            peer.tell(m.Got(get.request, message, number, redelivered, queue.ready_count))
        self._dirty[queue] = None

    def _on_count(self, peer: Peer, count: m.Count, now: int) -> None:
        queue = self.queues.get(count.queue)
        if queue is None:
            peer.tell(m.Refused(count.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        queue.expire(now)
        self._dirty[queue] = None
        queue.last_used = now
        peer.tell(m.Done(count.request, queue.ready_count + queue.kept_back, len(queue.consumers)))

    def _on_left(self, peer: Peer, asked: m.Left, now: int) -> None:
        queue = self.queues.get(asked.queue)
        if queue is None or not queue.keeps_in_store:
            peer.tell(m.Refused(asked.request, 404, "gone"))
            return
        until = asked.until or queue.newest()
        peer.tell(m.Marked(asked.request, until, queue.left_until(until)))

    def _on_let_go(self, peer: Peer, asked: m.LetGo, now: int) -> None:
        queue = self.queues.get(asked.queue)
        if queue is None or not queue.keeps_in_store or queue.limits.dead_letters is None:
            peer.tell(m.Refused(asked.request, 404, "gone, or without a dead-letter exchange"))
            return
        self._catch_up(queue, now)
        peer.tell(m.Done(asked.request, queue.let_go_until(asked.until, asked.reason)))
        self._dirty[queue] = None
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours

    def _on_purge(self, peer: Peer, purge: m.Purge, now: int) -> None:
        queue = self.queues.get(purge.queue)
        if queue is None:
            peer.tell(m.Refused(purge.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        peer.tell(m.Done(purge.request, queue.purge()))
        self.streams.purged(queue)
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours

    def _on_departed(self, peer: Peer, departed: m.Departed, now: int) -> None:
        queue = self.dead_letters.departed(peer, departed, now)
        if queue is not None:
            self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
            if queue.limits.delays:  # more may go
                self._dirty[queue] = None

    # -- out -------------------------------------------------------------------------------------------

    def turn_end(self, now: int) -> list[Outgoing]:
        """What to send, after everything at hand was received."""
        self._now = now
        if self._timers and self._timers[0][0] <= now:
            self._look_at_timers(now)
        if self._dirty:
            self._serve(now)
        if not self.dead_letters.idle and not self.alarm:  # copies take room
            self.dead_letters.hand_over(self.peers, now)
        return self.answers()

    def answers(self) -> list[Outgoing]:
        """Confirms and replies, without new deliveries; touches no store."""
        outgoing: list[Outgoing] = []
        for peer in self.peers.values():
            if peer.held:
                peer.confirm(self._syncs_ended)
            if peer.has_news:
                peer.take(outgoing)
        return outgoing

    @property
    def has_work(self) -> bool:
        """Whether a turn without new messages would do something."""
        return bool(self._dirty)

    def next_due(self) -> int | None:
        """When the next turn must be, at the latest."""
        due = self._timers[0][0] if self._timers else None
        if self.dead_letters.idle:
            return due
        retry = None if self.alarm else self.dead_letters.next_due()
        return due if retry is None else retry if due is None else min(due, retry)

    # queues.Outlet
    def deliver(self, consumer: Consumer, first_number: int, redelivered: bool, count: int, blob: bytes) -> None:
        peer = consumer.peer
        assert isinstance(peer, Peer)
        self._given += len(blob)
        peer.has_news = True
        connection, channel, number = consumer.connection, consumer.channel, consumer.number
        peer.writer.add(connection, channel, number, first_number, redelivered, count, blob, 0, consumer.queue.hides)

    def deliver_again(self, consumer: Consumer, first_number: int, times: int, count: int, blob: bytes) -> None:
        peer = consumer.peer
        assert isinstance(peer, Peer)
        self._given += len(blob)
        peer.has_news = True
        hides = consumer.queue.hides
        connection, channel, number = consumer.connection, consumer.channel, consumer.number
        peer.writer.add(connection, channel, number, first_number, True, count, blob, times, hides)

    def ungranted(self, consumer: Consumer, count: int, wants: bool) -> None:
        assert isinstance(consumer.peer, Peer)
        consumer.peer.tell(m.Ungranted(consumer.number, count, wants), after_deliveries=True)

    _given = 0

    def _serve(self, now: int) -> None:
        self._given = 0
        while self._dirty and self._given < DELIVERY_TURN_BYTES:
            queue = next(iter(self._dirty))
            del self._dirty[queue]
            if queue.deleted:
                continue
            before = self._given
            if queue.deliver(now, self, QUEUE_PASS_BYTES):
                self._dirty[queue] = None
                if self._given == before:  # letting go takes its time, too
                    self._given += QUEUE_PASS_BYTES
            if queue.is_watched:
                self._watch(queue, now)
            due = queue.next_due()
            if due is not None:
                self._set_timer(queue, due)

    def _watch(self, queue: Queue, now: int) -> None:
        """What goes back to it from consumers that are too slow, and what leaves it for its dead-letter exchange."""
        for late in queue.late(now):
            assert isinstance(late.peer, Peer) and queue.limits.consumer_timeout is not None
            late.peer.tell(m.Overdue(late.connection, late.channel, queue.limits.consumer_timeout))
        if queue.take_overdue(now):
            self._dirty[queue] = None
            self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
        if queue.departures is not None and queue.departures.waits:
            self._have_died(queue)

    def _have_died(self, queue: Queue) -> None:
        if not self.dead_letters.knows(queue.id):
            vhost = next((vhost for vhost, store in self.stores.items() if store is queue.store), None)
            if vhost is None:
                return  # about to be deleted, and all that is in it
            self.dead_letters.know(queue.id, vhost, queue.id)
        self.dead_letters.have_come(queue)

    def _set_timer(self, queue: Queue, due: int) -> None:
        if due < self._timer_of.get(queue.id, due + 1):
            self._timer_of[queue.id] = due
            heapq.heappush(self._timers, (due, queue.id))

    def _look_at_timers(self, now: int) -> None:
        for _ in range(TIMERS_PER_TURN):
            if not self._timers or self._timers[0][0] > now:
                return
            due, queue_id = heapq.heappop(self._timers)
            if self._timer_of.get(queue_id) != due:
                continue  # an earlier one was set meanwhile, or the queue is gone
            del self._timer_of[queue_id]
            queue = self.queues[queue_id]
            self._dirty[queue] = None  # what is too old goes when the queue is served
            if queue.expired_itself(now):
                queue.closed = True
                self._tell_controller(m.AutoDeleted(queue_id, "expired"))

    # -- stable storage --------------------------------------------------------------------------------

    def want_sync(self) -> None:
        """Of what nobody waits for: persistent messages without confirms, acknowledgements."""
        self._sync_wanted = self._sync_wanted or bool(self._dirty_stores or self.streams.dirty)

    @property
    def wants_sync(self) -> bool:
        """Whether begin_sync would do something now."""
        return self._sync is None and self._sync_wanted

    def begin_sync(self) -> Sync | None:
        """To be run, if there is something to do and no other runs. May confirm by itself: call before turn_end."""
        if self._sync is not None or not self._sync_wanted:
            return None
        jobs: list[tuple[Store | StreamQueue, SyncJob]] = []
        try:
            for store in [store for store in self.stores.values() if store in self._dirty_stores]:
                job = store.begin_sync()
                self._dirty_stores.discard(store)
                if job is not None:
                    jobs.append((store, job))
            for stream in list(self.streams.dirty):
                job = self.streams.begin_sync(stream)
                if job is not None:
                    jobs.append((stream, job))
                else:
                    self._dirty[stream] = None
        except self._no_room:
            # Confirms go on waiting for a sync of all stores; it is tried again with the next turn.
            self.set_alarm(m.LOW_ON_DISK)
        else:
            self._sync_wanted = False
            self._syncs_begun += 1
        if not jobs:
            self._syncs_ended = self._syncs_begun
            return None
        self._sync = Sync(jobs)
        return self._sync

    def sync_ended(self) -> None:
        """After `Sync.run`. Raises what the store raises when it failed."""
        assert self._sync is not None
        jobs, self._sync = self._sync.jobs, None
        full = False
        for store, job in jobs:
            try:
                store.finish_sync(job)
            except self._no_room:
                if not isinstance(store, StreamQueue):
                    self._dirty_stores.add(store)
                full = True
        self._dirty.update(dict.fromkeys(self.streams.sync_ended()))
        self._delete_dropped()
        if full:  # confirms wait for a sync that finds room
            self._sync_wanted = True
            self.set_alarm(m.LOW_ON_DISK)
        else:
            self._syncs_ended = self._syncs_begun

    def begin_reclaim(self, now: int) -> Step | None:
        """Of one store, to be run when it is due and there is something to do."""
        return self.upkeep.begin(self.stores.values(), now)

    def reclaim_ended(self, now: int) -> None:
        """After `Step.run`. The files of what was merged go after the next sync, which comes with the next tick."""
        store = self.upkeep.end(self.stores.values(), now)
        self._dirty_stores.update(each for each in self.stores.values() if each is store)
        self._delete_dropped()

    def close(self) -> None:
        """Everything to disk, with what of it was handed out before."""
        for store in self.stores.values():
            store.close(
                {
                    queue.id: queue.live()
                    for queue in self.queues.used()
                    if queue.durable and queue.store is store and queue.keeps_in_store
                }
            )
        self.streams.close()

    def abandon(self) -> list[Exception]:
        """Something broke: write what can be written, without the word that this was a clean stop; troubles met."""
        troubles: list[Exception] = []
        for store in [*self.stores.values(), *self._dropped.values()]:
            try:
                store.close(None)
            except Exception as error:  # one store's trouble must not cost the others theirs
                troubles.append(error)
        return troubles + self.streams.abandon()

    # -- numbers ---------------------------------------------------------------------------------------

    def _on_stats(self, peer: Peer, asked: m.Stats, now: int) -> None:
        process = self._process_numbers() if asked.passed == 0 else {}
        wanted, rest = asked.queues, 0
        if wanted is None:
            if asked.passed == 0:
                self._looked_over = [queue.id for queue in self.queues.used()]
            end = asked.passed + m.STATS_QUEUES_MAX
            wanted, rest = self._looked_over[asked.passed : end], max(0, len(self._looked_over) - end)
        queues, consumers = stats.of_queues(self.queues.used_among(wanted))
        if not self.streams.queues:
            peer.tell(m.StatsReply(asked.request, queues, consumers, process, rest))
            return
        streams, readers = self.streams.stats(wanted), self.streams.reader_stats(wanted)
        peer.tell(m.StreamsReply(asked.request, queues, consumers, process, rest, streams, readers))

    def _process_numbers(self) -> dict[str, float]:
        process = self._process_stats()
        process["syncs"] = self._syncs_ended
        process["dead_letters_waiting"] = self.dead_letters.count()
        for store in self.stores.values():
            for name, value in store.stats().items():
                if name != "syncs":
                    process[name] = process.get(name, 0) + value
        process |= stats.of_gone(self._gone) | stats.of_peers(self.peers.values())
        process |= self.batch_messages.report("batch_messages") | self.batch_bytes.report("batch_bytes")
        return process

    def _on_list_queues(self, peer: Peer, asked: m.ListQueues, now: int) -> None:
        peer.tell(m.Queues(asked.request, self.queues.ids()))
