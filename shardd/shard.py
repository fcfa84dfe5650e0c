"""Batches of requests meet their queues; confirms are held until the batch is on stable storage.

Publish path, 3 of 5. Before: broker/front_door/publish/publishing.py. After: shardd/queues/queue.py.

Knows no socket and no clock: `receive` takes a message in, `turn_end` says what to send. Syncs are begun here and run
by the caller, one at a time; a batch is confirmed by a sync that began after its append, and never before an earlier
batch. What exists, who is there and all other requests: controls.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from shardmq.shardd.controls import Controls
from shardmq.shardd.peers import (
    PUBLISH_CREDIT_BYTES,
    Outgoing,
    Peer,
    Refused,
    known_runs,
    refused_runs,
)
from shardmq.shardd.queues import Arrival, Consumer, Queue, Reader, StreamQueue
from shardmq.shardd.stores import Home, NoRoom, Screened, Store, Sync, SyncJob
from shardmq.shardd.streams import Fates
from shardmq.shardd.upkeep import Step
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m

# Deliveries of one queue before the next has its turn, and of all queues before messages are received again.
QUEUE_PASS_BYTES = 256 << 10
DELIVERY_TURN_BYTES = 1 << 20
# Timers looked at in one turn.
TIMERS_PER_TURN = 1000


class Shard(Controls):
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
        super().__init__(number, epoch, pid, home, process_stats, consumer_timeout, timeout_closes)
        self._no_room = no_room
        self._timers: list[tuple[int, int]] = []  # (due, queue id)
        self._syncs_begun = 0
        self._sync_wanted = False
        self._now = 0
        self._syncs_tried = 0
        self._settled_sync: Sync | None = None
        self._settled_after: int | None = 0  # syncs tried until one may begin; None: not wanted
        self._given = 0  # bytes handed out in this turn
        self._kinds: dict[int, Callable[[Peer, envelope.Message, int], None]] = {
            m.PUBLISH: self._on_publish,
            m.SETTLE: self._on_settle,
            m.CREDIT: self._on_credit,
            m.CONTROL: self._on_control,
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
        batch, messages, wanted, needs_sync, in_sequence, records, ids, weight = codec.read_publish(
            message
        )
        if batch != peer.next_batch:
            peer.check_first(batch)
        peer.next_batch = batch + 1
        peer.taken += weight
        self.batch_messages.add(messages)
        self.batch_bytes.add(len(message))
        held = peer.hold(batch) if wanted else None
        try:
            known = self.queues.named(ids)
            if not known:  # all its queues were deleted meanwhile
                if held is not None:
                    held.need_no_sync()
                return
            first = known[0]
            store: Store = first.store  # type: ignore[assignment] # queues were made with a Store of ours
            redeems = peer.number in self.reservations.redeeming
            refused: set[int] | None = None
            fates: Fates | None = None
            origins: Sequence[int] | None = None
            if in_sequence or self.streams.queues:
                arrivals, fates, origins, streamed = self._append(
                    peer, store, records, known, len(ids) == 1, in_sequence
                )
                refused = fates.refused
                needs_sync = needs_sync or streamed
            else:
                may_refuse = (
                    first.backlog.rules.may_refuse if len(known) == 1 else _may_refuse(known)
                )
                arrivals = store.append(records, may_refuse)
                self._dirty_stores.add(store)
            for arrival in arrivals:
                queue = first if arrival.queue_id == first.id else self.queues.get(arrival.queue_id)
                if queue is None:
                    store.settle(arrival.queue_id, arrival.entries, False)
                    continue
                if redeems and self.reservations.use(
                    peer.number, queue, len(arrival.entries), arrival.body_bytes
                ):
                    turned_away = queue.publish(arrival, now, reserved=True)
                else:
                    turned_away = queue.publish(arrival, now)
                if turned_away:
                    refused = refused or set()
                    refused.update(
                        turned_away if origins is None else [origins[i] for i in turned_away]
                    )
                if queue.consumers.all or not queue.is_asleep:
                    self._dirty[queue] = None
            if refused and held is not None:
                held.refused = refused_runs(message, sorted(refused), m.SOME)
            if fates is not None and fates.known and held is not None:
                held.refused = [
                    *held.refused,
                    *known_runs(message, sorted(fates.known), fates.altered),
                ]
        except self._no_room:
            if held is not None:
                held.refuse(_all_of(message, messages))
            # Publishes without confirms would be lost in silence: let the front doors hold them back.
            self.set_alarm(m.LOW_ON_DISK)
            return
        except envelope.WireError:
            # The message is dropped and the shard goes on: so must the confirms of this front door.
            if held is not None:
                held.refuse(_all_of(message, messages))
            raise
        except BaseException:
            if held is not None:
                held.fail()
            raise
        if needs_sync:
            self._sync_wanted = True
            if held is not None:
                held.wait_for(self._syncs_begun + 1)
        elif held is not None:
            held.need_no_sync()

    def _append(
        self,
        peer: Peer,
        store: Store,
        records: memoryview,
        known: list[Queue],
        alone: bool,
        in_sequence: bool,
    ) -> tuple[Sequence[Arrival], Fates, Sequence[int] | None, bool]:
        """Where there are streams, or messages that say their place in what a producer sends. What arrived, what
        became of the batch besides, which of it each that arrived was (None: all did), and whether a stream has some:
        its readers wait for the sync, too."""
        streams = self.streams.among(known) if self.streams.queues else ()
        stored = len(streams) < len(known)
        screened = self._screen(peer, store, records, known) if in_sequence and stored else None
        arrivals: Sequence[Arrival] = ()
        fates = Fates()
        try:
            if streams:
                fates = self.streams.append(streams, records, alone=alone, in_sequence=in_sequence)
            if stored:
                kept = records if screened is None else screened.records
                arrivals = store.append(kept, _may_refuse(known), in_sequence)
                self._dirty_stores.add(store)
        except Exception:
            if screened is not None:
                store.unscreen()
            raise
        if screened is None:
            return arrivals, fates, None, bool(streams)
        fates.add(screened)
        return arrivals, fates, screened.origins, bool(streams)

    def _screen(
        self, peer: Peer, store: Store, records: memoryview, known: list[Queue]
    ) -> Screened:
        """Of messages that say their place in what a producer sends, those that are new to their queues. What a queue
        will refuse is left out here: on disk it would later be taken for stored."""
        roomy = self.reservations.rooms_taken(peer.number)
        rooms = {
            queue.id: queue.admission().room()
            for queue in known
            if queue.backlog.rules.may_refuse and queue.id not in roomy
        }
        screened = store.screen(records, rooms)
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
            for peer in self.peers.values():
                peer.writer.own()  # before this turn's end more may be appended

    def _on_settle(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for number, kind, first, last in envelope.read_settles(message):
            holder = peer.holders.get(number)
            if kind > m.RETURN:
                self._on_turn(holder, kind, first, now, last)
            elif isinstance(holder, Consumer):
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

    def _on_credit(self, peer: Peer, message: envelope.Message, now: int) -> None:
        for connection, count in envelope.read_credit(message):
            window = peer.windows.get(connection)
            if window is None:
                continue
            window.free(count)
            for queue in window.unblocked():
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
            if peer.has_news or peer.taken >= PUBLISH_CREDIT_BYTES:
                peer.take(outgoing)
        return outgoing

    def break_off(self, alarm: str) -> list[Outgoing]:
        """Return the last words of a shard that breaks off: the alarm, and confirms of what lasts.

        Batches that wait for a sync, or whose append broke off, stay without an answer.
        """
        self.set_alarm(alarm)
        return self.answers()

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
    def deliver(
        self,
        consumer: Consumer,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        peer: Peer = consumer.peer  # type: ignore[assignment] # consumers were attached by a Peer
        self._given += len(blob)
        peer.has_news = True
        connection, channel, number = consumer.connection, consumer.channel, consumer.number
        peer.writer.add(
            connection,
            channel,
            number,
            first_number,
            redelivered,
            count,
            blob,
            0,
            consumer.queue.backlog.hides,
        )

    def deliver_again(
        self,
        consumer: Consumer,
        first_number: int,
        times: int,
        count: int,
        blob: bytes | memoryview,
    ) -> None:
        peer = consumer.peer
        assert isinstance(peer, Peer)
        self._given += len(blob)
        peer.has_news = True
        hides = consumer.queue.backlog.hides
        connection, channel, number = consumer.connection, consumer.channel, consumer.number
        peer.writer.add(connection, channel, number, first_number, True, count, blob, times, hides)

    def ungranted(self, consumer: Consumer, count: int, wants: bool) -> None:
        assert isinstance(consumer.peer, Peer)
        consumer.peer.tell(m.Ungranted(consumer.number, count, wants), after_deliveries=True)

    def passed(self, consumer: Consumer, offset: int) -> None:
        assert isinstance(consumer.peer, Peer)
        consumer.peer.tell(m.Passed(consumer.number, offset), after_deliveries=True)

    def _serve(self, now: int) -> None:
        dirty = self._dirty
        self._given = before = 0
        while dirty and before < DELIVERY_TURN_BYTES:
            queue = next(iter(dirty))
            del dirty[queue]
            if queue.deleted:
                continue
            if queue.deliver(now, self, QUEUE_PASS_BYTES):
                dirty[queue] = None
                if self._given == before:  # letting go takes its time, too
                    self._given += QUEUE_PASS_BYTES
            if queue.backlog.is_watched:
                self._watch(queue, now)
            due = queue.next_due()
            if due is not None:
                self._set_timer(queue, due)
            before = self._given

    def _watch(self, queue: Queue, now: int) -> None:
        """What goes back to it from consumers that are too slow, and what leaves it for its dead-letter exchange."""
        for late in queue.late(now):
            assert isinstance(late.peer, Peer) and queue.backlog.limits.consumer_timeout is not None
            late.peer.tell(
                m.Overdue(late.connection, late.channel, queue.backlog.limits.consumer_timeout)
            )
        if queue.take_overdue(now):
            self._dirty[queue] = None
            self._dirty_stores.add(queue.store)  # type: ignore[arg-type] # queues were made with a Store of ours
        if queue.backlog.departures is not None and queue.backlog.departures.waits:
            self._have_died(queue)

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
        """Ask for a sync of what nobody waits for; to be called each second.

        That is persistent messages without confirms, and behind them what is settled and where
        readers of streams are.
        """
        self._sync_wanted = self._sync_wanted or bool(self._dirty_stores or self.streams.dirty)
        if self._settled_after is None:
            self._settled_after = self._syncs_tried + self._sync_wanted

    @property
    def wants_sync(self) -> bool:
        """Whether begin_sync would do something now."""
        return self._sync is None and self._sync_wanted

    def begin_sync(self) -> Sync | None:
        """To be run, if there is something to do and no other runs. May confirm by itself: call before turn_end."""
        if self._sync is not None or not self._sync_wanted:
            return None
        self._syncs_tried += 1
        jobs: list[tuple[Store | StreamQueue, SyncJob]] = []
        number: int | None = None
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
            number = self._syncs_begun = self._syncs_begun + 1
        if not jobs:
            if number is not None:
                self._syncs_ended = number
            return None
        self._sync = Sync(jobs, number)
        return self._sync

    def sync_ended(self) -> None:
        """After `Sync.run`. Raises what the store raises when it failed."""
        assert self._sync is not None
        sync, self._sync = self._sync, None
        full = False
        for store, job in sync.jobs:
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
        elif sync.number is not None:
            self._syncs_ended = sync.number

    def begin_settled_sync(self) -> Sync | None:
        """Begin a sync of what is settled and of positions in streams, if it is wanted and needed.

        It is to be run in a thread of its own, beside syncs of messages; then `settled_sync_ended`.
        It begins behind the sync that `want_sync` asked for, and between two: what is settled of
        segments that one has in hand, or that have not been written, cannot be told before.
        """
        if self._settled_after is None or self._syncs_tried < self._settled_after:
            return None
        if self._settled_sync is not None or self._sync is not None:
            return None
        self._settled_after = None
        jobs: list[tuple[Store | StreamQueue, SyncJob]] = []
        keepers: list[Store | StreamQueue] = [*self.stores.values(), *self.streams.queues.values()]
        for each in keepers:
            job = each.begin_settled_sync()
            if job is not None:
                jobs.append((each, job))
                if job.more:
                    self._settled_after = self._syncs_tried
        if not jobs:
            return None
        self._settled_sync = Sync(jobs, None)
        return self._settled_sync

    def settled_sync_ended(self) -> None:
        """After `Sync.run`. Raises what a store raises when it failed."""
        assert self._settled_sync is not None
        sync, self._settled_sync = self._settled_sync, None
        for each, job in sync.jobs:
            each.finish_settled_sync(job)

    def begin_reclaim(self, now: int) -> Step | None:
        """Of one store, to be run when it is due and there is something to do."""
        return self.upkeep.begin(self.stores.values(), now)

    def reclaim_ended(self, now: int) -> None:
        """After `Step.run`. The files of what was merged go after the next sync, which comes with the next tick."""
        store = self.upkeep.end(self.stores.values(), now)
        for each in self.stores.values():
            if each is store:
                self._dirty_stores.add(each)
                if each.settled_held_back and self._settled_after is None:
                    self._settled_after = self._syncs_tried
        self._delete_dropped()

    def close(self) -> None:
        """Everything to disk, with what of it was handed out before."""
        for store in self.stores.values():
            store.close(
                {
                    queue.id: queue.live()
                    for queue in self.queues.used()
                    if queue.backlog.durable and queue.store is store and queue.keeps_in_store
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


def _all_of(message: envelope.Message, messages: int) -> list[Refused]:
    """The confirms wanted for all of a batch, which is refused."""
    return refused_runs(message, range(messages), 0)


def _may_refuse(queues: list[Queue]) -> bool:
    """Whether some of them may."""
    return True in [queue.backlog.rules.may_refuse for queue in queues]
