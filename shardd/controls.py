"""What a shard has, and what it is told and asked of it: who is there, what exists, who consumes, numbers.

Each control message has a handler here (`_controls`), that answers its peer. What becomes of messages is shard.py's,
which builds on this. Knows no socket and no clock.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardmq.shardd import stats
from shardmq.shardd.dead_letters import DeadLetters
from shardmq.shardd.once import Once
from shardmq.shardd.peers import Outgoing, Peer
from shardmq.shardd.queues import (
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
from shardmq.shardd.reservations import Reservations
from shardmq.shardd.stores import Home, Store, Sync
from shardmq.shardd.streams import Streams
from shardmq.shardd.upkeep import Upkeep
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.histogram import Histogram


class Controls(ABC):
    def __init__(
        self,
        number: int,
        epoch: int,
        pid: int,
        home: Home,
        process_stats: Callable[[], dict[str, float]],
        consumer_timeout: int | None,
        timeout_closes: bool,
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
        self.once = Once()
        self.reservations = Reservations()
        self.alarm = ""
        self.batch_messages, self.batch_bytes = Histogram(), Histogram()
        self._pid = pid
        self._home = home
        self._process_stats = process_stats
        self._gone = Counters()  # of queues that are no more
        self._looked_over: list[
            int
        ] = []  # what the controller asks for the numbers of, part by part
        self._consumer_timeout = consumer_timeout  # ms, of queues that say nothing
        self._timeout_closes = timeout_closes
        self._used: set[int] = set()  # auto-delete queues that have had a consumer
        self._dirty: dict[Queue, None] = {}  # may have something to hand out, in turn
        self._timer_of: dict[int, int] = {}  # when a queue is to be looked at, by its id
        self._dirty_stores: set[Store] = set()
        self._sync: Sync | None = None
        self._syncs_ended = 0
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
            m.AttachPart: self._on_attach,
            m.AttachReader: self._on_attach_reader,
            m.AttachBounded: self._on_attach_reader,
            m.AttachStreamPart: self._on_attach_reader,
            m.Bound: self._on_bound,
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
            m.PurgeFirst: self._on_purge_first,
            m.Departed: self._on_departed,
            m.AskOnce: self._on_ask_once,
            m.OnceBecame: lambda peer, what, _: self.once.became(peer.number, what, self.peers),
            m.ForgetOnce: lambda peer, what, _: self.once.forget(what.thing),
            m.Reserve: self._on_reserve,
            m.Redeem: lambda peer, what, _: self.reservations.redeem(peer.number, what.number),
            m.Unreserve: lambda peer, what, _: self.reservations.end(peer.number, what.number),
        }

    @abstractmethod
    def _catch_up(self, queue: Queue, now: int) -> None:
        """Hand out what it has for those who are there: whoever comes, goes or looks finds it so."""

    def _on_control(self, peer: Peer, message: envelope.Message, now: int) -> None:
        what = envelope.read_control(message)
        handler = self._controls.get(type(what))
        if handler is not None:
            handler(peer, what, now)
        elif isinstance(what, m.Join) and not self.ready and peer.number == m.CONTROLLER:
            self._greet(peer)

    # -- who is there ------------------------------------------------------------------------------------

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
            peer = self.peers[head.peer] = Peer(
                head.peer, head.incarnation, endpoint, self.epoch, self.number
            )
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
            self.once.peer_gone(number, self.peers)
            self.reservations.peer_gone(number)

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

    # -- what exists -------------------------------------------------------------------------------------

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
        elif delete.if_empty and queue.backlog.ready_count + queue.backlog.kept_back:
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
        if queue.backlog.departures is not None and queue.backlog.departures.waits:
            self._have_died(queue)
        self.dead_letters.forget(queue)
        self.once.forget(queue.id)
        self._gone.add(queue.counters)
        count = queue.drop()
        self.streams.dropped(queue)
        return count

    def _have_died(self, queue: Queue) -> None:
        if not self.dead_letters.knows(queue.id):
            vhost = next(
                (vhost for vhost, store in self.stores.items() if store is queue.store), None
            )
            if vhost is None:
                return  # about to be deleted, and all that is in it
            self.dead_letters.know(queue.id, vhost, queue.id)
        self.dead_letters.have_come(queue)

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

    # -- consumers ---------------------------------------------------------------------------------------

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
            loan=peer.loan(attach.whole, self._wake) if isinstance(attach, m.AttachPart) else None,
            affinity=attach.affinity,
        )
        queue.attach(consumer)
        peer.holders[attach.consumer] = consumer
        if queue.auto_delete and queue.id not in self._used:
            self._used.add(queue.id)
            self._tell_controller(m.Used(queue.id))
        peer.tell(m.Attached(attach.request))
        self._dirty[queue] = None

    def _wake(self, queue: Queue) -> None:
        self._dirty[queue] = None

    def _on_attach_reader(self, peer: Peer, attach: m.AttachReader, now: int) -> None:
        queue = self.queues.get(attach.queue)
        if queue is None or queue.closed or not isinstance(queue, StreamQueue):
            peer.tell(m.Refused(attach.request, 404, "gone"))
            return
        try:
            loan = (
                peer.loan(attach.whole, self._wake)
                if isinstance(attach, m.AttachStreamPart)
                else None
            )
            reader = self.streams.attach(queue, peer, attach, loan, now)
        except ValueError as error:
            peer.tell(m.Refused(attach.request, 406, str(error)))
            return
        peer.holders[attach.consumer] = reader
        peer.tell(m.AttachedAt(attach.request, reader.offset))
        self._dirty[queue] = None

    def _on_bound(self, peer: Peer, bound: m.Bound, now: int) -> None:
        reader = peer.holders.get(bound.consumer)
        if isinstance(reader, Reader):
            reader.bound(bound.stop, bound.mark)
            self._dirty[reader.queue] = None

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
        closed = self._release(peer, release.consumers, now)
        peer.tell(m.Released(release.request, closed) if closed else m.Done(release.request))

    def _release(self, peer: Peer, numbers: Sequence[int], now: int) -> list[int]:
        """All let go of first, so that nothing is handed from one to the other. The ids of queues that go with them."""
        closed: dict[int, None] = {}
        for number in numbers:
            holder = peer.holders.pop(number, None)
            if isinstance(holder, Consumer):
                self._detach(holder, now)
                holder.queue.release(holder, now)
                if holder.queue.closed:
                    closed[holder.queue.id] = None
                self._dirty_stores.add(holder.queue.store)
                peer.forget_window(holder.connection)
            elif holder is not None:
                for queue, entries, size in holder.take_all():
                    self._settle(queue, m.REQUEUE, entries, size)
        return list(closed)

    def _settle(self, queue: Queue, kind: int, entries: array[int], size: int) -> None:
        if kind == m.ACK:
            queue.ack(entries, size)
        else:
            (queue.reject, queue.requeue, queue.give_back)[kind - 1](entries, size)
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
        if (
            kind != m.ACK or queue.dispatch.loan is None or not queue.consumers.all[0].lent
        ):  # else the loan wakes who is next
            self._dirty[queue] = None

    def _forget_if_done(self, peer: Peer, consumer: Consumer) -> None:
        if consumer.detached and not consumer.unacked.count:
            consumer.queue.dispatch.let_holder_go(consumer)
            peer.holders.pop(consumer.number, None)
            peer.forget_window(consumer.connection)

    def _on_grant(self, peer: Peer, grant: m.Grant, now: int) -> None:
        consumer = peer.holders.get(grant.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            consumer.grant(grant.count)
            self._dirty[consumer.queue] = None

    def _on_tune(self, peer: Peer, tune: m.Tune, now: int) -> None:
        consumer = peer.holders.get(tune.consumer)
        if isinstance(consumer, Consumer) and not consumer.detached:
            self._catch_up(consumer.queue, now)
            consumer.tune(tune.prefetch, tune.granted, tune.lent)
            self._dirty[consumer.queue] = None

    @staticmethod
    def _on_turn(
        holder: Consumer | Getter | None, kind: int, count: int, now: int, ms: int
    ) -> None:
        if isinstance(holder, Consumer) and holder.lent and holder.loan is not None:
            if kind == m.LENT:
                holder.loan.begin_turn_of_shard(holder, count, now, ms)
            elif kind == m.LOWERED:
                holder.loan.lower(holder, count)

    def _on_recall(self, peer: Peer, recall: m.Recall, now: int) -> None:
        consumer = peer.holders.get(recall.consumer)
        if isinstance(consumer, Consumer) and consumer.lent and consumer.loan is not None:
            consumer.loan.recall(consumer, recall.keep)
            self._dirty[consumer.queue] = None

    # -- of one queue ------------------------------------------------------------------------------------

    def _on_get(self, peer: Peer, get: m.Get, now: int) -> None:
        queue = self.queues.get(get.queue)
        if queue is None:
            peer.tell(m.Refused(get.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        getter = None
        if not get.no_ack:
            holder = peer.holders.setdefault(
                get.consumer, Getter(peer, get.connection, get.channel)
            )
            assert isinstance(holder, Getter), "a consumer does not get"
            getter = holder
        message, number, redelivered, times = queue.get(getter, now) or (b"", 0, False, 0)
        if times:
            peer.tell(m.GotAgain(get.request, message, number, queue.backlog.ready_count, times))
        else:
            peer.tell(m.Got(get.request, message, number, redelivered, queue.backlog.ready_count))
        self._dirty[queue] = None

    def _on_count(self, peer: Peer, count: m.Count, now: int) -> None:
        queue = self.queues.get(count.queue)
        if queue is None or queue.closed:
            peer.tell(m.Refused(count.request, 404, "gone"))
            return
        self._catch_up(queue, now)
        queue.backlog.expire(now)
        self._dirty[queue] = None
        queue.last_used = now
        peer.tell(
            m.Done(
                count.request,
                queue.backlog.ready_count + queue.backlog.kept_back,
                len(queue.consumers),
            )
        )

    def _on_left(self, peer: Peer, asked: m.Left, now: int) -> None:
        queue = self.queues.get(asked.queue)
        if queue is None:
            peer.tell(m.Refused(asked.request, 404, "gone"))
            return
        until = asked.until or queue.newest()
        peer.tell(m.Marked(asked.request, until, queue.left_until(until)))

    def _on_let_go(self, peer: Peer, asked: m.LetGo, now: int) -> None:
        queue = self.queues.get(asked.queue)
        if queue is None or not queue.keeps_in_store or queue.backlog.limits.dead_letters is None:
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
        if isinstance(queue, StreamQueue):
            self.streams.purge(queue, peer, purge.request)
        else:
            peer.tell(m.Done(purge.request, queue.purge()))
        self._dirty[queue] = None  # others may wait for its turn to end
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours

    def _on_purge_first(self, peer: Peer, purge: m.PurgeFirst, now: int) -> None:
        queue = self.queues.get(purge.queue)
        if queue is None or not queue.keeps_in_store:
            peer.tell(m.Refused(purge.request, 404, "gone, or a stream"))
            return
        self._catch_up(queue, now)
        queue.backlog.expire(now)
        peer.tell(m.Done(purge.request, queue.backlog.purge_first(purge.count)))
        self._dirty[queue] = None
        self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours

    def _on_departed(self, peer: Peer, departed: m.Departed, now: int) -> None:
        queue = self.dead_letters.departed(peer, departed, now)
        if queue is not None:
            self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
            if queue.backlog.limits.delays:  # more may go
                self._dirty[queue] = None

    def _on_ask_once(self, peer: Peer, question: m.AskOnce, now: int) -> None:
        peer.tell(m.ToldOnce(question.request, self.once.ask(peer.number, question, now)))

    def _on_reserve(self, peer: Peer, asked: m.Reserve, now: int) -> None:
        wanted = [
            (queue, sizes)
            for id, sizes in asked.wanted
            if (queue := self.queues.get(id)) is not None
        ]
        for queue, _ in wanted:
            self._catch_up(queue, now)
            queue.backlog.expire(now)
            self._dirty[queue] = None
        if self.reservations.reserve(peer.number, asked.number, wanted):
            peer.tell(m.Done(asked.request))
        else:
            peer.tell(m.Refused(asked.request, 406, "full"))

    # -- numbers -----------------------------------------------------------------------------------------

    def _on_stats(self, peer: Peer, asked: m.Stats, now: int) -> None:
        process = self._process_numbers() if asked.passed == 0 else {}
        wanted, rest = asked.queues, 0
        if wanted is None:
            if asked.passed == 0:
                self._looked_over = self.queues.used_ids()
            end = asked.passed + m.STATS_QUEUES_MAX
            wanted, rest = (
                self._looked_over[asked.passed : end],
                max(0, len(self._looked_over) - end),
            )
        queues, consumers = stats.of_queues(self.queues.used_among(wanted))
        if not self.streams.queues:
            peer.tell(m.StatsReply(asked.request, queues, consumers, process, rest))
            return
        streams, readers = self.streams.stats(wanted), self.streams.reader_stats(wanted)
        reply = asked.request, queues, consumers, process, rest, streams, readers
        gaps = self.streams.gaps(wanted)
        peer.tell(m.GapsReply(*reply, gaps) if gaps else m.StreamsReply(*reply))

    def _process_numbers(self) -> dict[str, float]:
        process = self._process_stats()
        process["syncs"] = self._syncs_ended
        process["dead_letters_waiting"] = self.dead_letters.count()
        for store in self.stores.values():
            for name, value in store.stats().items():
                if name != "syncs":
                    process[name] = process.get(name, 0) + value
        for name, value in self.streams.damage().items():
            process[name] = process.get(name, 0) + value
        process |= stats.of_gone(self._gone) | stats.of_peers(self.peers.values())
        process |= self.batch_messages.report("batch_messages") | self.batch_bytes.report(
            "batch_bytes"
        )
        return process

    def _on_list_queues(self, peer: Peer, asked: m.ListQueues, now: int) -> None:
        peer.tell(m.Queues(asked.request, self.queues.ids()))
