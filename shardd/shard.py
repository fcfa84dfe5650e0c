"""Append batches of publishes, and hold their confirms until the batch is on stable storage.

Publish path, 3 of 5. Before: broker/front_door/publish/publish.py. After: shardd/queues/queue.py.

`Shard.receive` takes a message in, and `Shard.turn_end` returns the messages to send. A shard holds
the objects that answer all other messages: serving.py hands out, consumer_requests.py has the
consumers, membership.py the peers, queue_requests.py and registry.py the rest, and syncs.py stable
storage. The table of who answers which message is here (`_table`). This file knows no socket and no
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardmq.shardd import stats
from shardmq.shardd.consumer_requests import ConsumerRequests
from shardmq.shardd.holding import BEHIND_BYTES, BEHIND_MESSAGES, Holding
from shardmq.shardd.lending import Lender
from shardmq.shardd.membership import Membership
from shardmq.shardd.moves import Moves
from shardmq.shardd.peers import (
    PUBLISH_CREDIT_BYTES,
    BatchState,
    HeldBatch,
    Outgoing,
    Peer,
    Refused,
    known_runs,
    refused_runs,
)
from shardmq.shardd.queue_requests import QueueRequests
from shardmq.shardd.queues import Arrival, Consumer, Queue
from shardmq.shardd.registry import Registry
from shardmq.shardd.serving import DELIVERY_TURN_BYTES, QUEUE_PASS_BYTES, Serving
from shardmq.shardd.short_way import ShortWay
from shardmq.shardd.snapshot_requests import SnapshotRequests
from shardmq.shardd.store.format.record import lent_runs, with_bodies
from shardmq.shardd.stores import NoRoom, Screened, Store, StoreHome, counters_of
from shardmq.shardd.stream_moves import StreamMoves
from shardmq.shardd.streams import Fates
from shardmq.shardd.syncs import Syncs
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.histogram import Histogram

Handler = Callable[[Peer, Any, int], None]

# The first byte of the flags of a PUBLISH, and the flag that says that it has LENT records.
FLAGS_AT, LENT = 36, 8


class Shard:
    """One shard: a loop of passes, each of which takes messages in and returns messages to send.

    `no_room` is what a store raises when its disk is full. `consumer_timeout` is in ms, for queues
    that set none. `process_stats` returns numbers of the process by name. With `short_way`, what is
    plain goes the short way (short_way.pyx).
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        pid: int,
        home: StoreHome,
        *,
        no_room: tuple[type[Exception], ...] = (NoRoom,),
        process_stats: Callable[[], dict[str, float]] = dict,
        consumer_timeout: int | None = None,
        timeout_closes: bool = False,
        short_way: bool = True,
    ) -> None:
        self.registry = registry = Registry(number, epoch, home, consumer_timeout, timeout_closes)
        self.syncs = Syncs(registry, no_room)
        self.batch_messages, self.batch_bytes = Histogram(), Histogram()
        self._holding = Holding()
        self.short_way = ShortWay(
            senders=registry.senders,
            queues=registry.queues.by_id,
            dirty=registry.dirty,
            dirty_stores=registry.dirty_stores,
            peers=registry.peers,
            redeeming=registry.reservations.redeeming,
            syncs=self.syncs,
            batch_messages=self.batch_messages,
            batch_bytes=self.batch_bytes,
            kinds=(Queue, Consumer, HeldBatch, Outgoing),
            states=tuple(BatchState),
            timers=registry.timers,
            dead_letters=registry.dead_letters,
            credit_bytes=PUBLISH_CREDIT_BYTES,
            turn_bytes=DELIVERY_TURN_BYTES,
            queue_bytes=QUEUE_PASS_BYTES,
            behind_messages=BEHIND_MESSAGES,
            behind_bytes=BEHIND_BYTES,
            watches=self._holding.watches,
            is_on=short_way,
        )
        self._serving = Serving(registry, self.short_way, self._holding)
        self._consumers = ConsumerRequests(registry, self._serving)
        self.short_way.allot = self._consumers.allot
        self.membership = Membership(registry, self._consumers, pid)
        self._queue_requests = QueueRequests(registry, self._serving, self._numbers)
        self._moves = Moves(registry, self._serving, self.syncs, no_room)
        self._stream_moves = StreamMoves(registry, self.syncs, no_room)
        self.snapshots = SnapshotRequests()
        self._no_room = no_room
        self._process_stats = process_stats
        # The loop uses these without a step through the registry.
        self.number = number
        self.epoch = epoch
        self.queues = registry.queues
        self.streams = registry.streams
        self.stores = registry.stores
        self.peers = registry.peers
        self.upkeep = registry.upkeep
        self.dead_letters = registry.dead_letters
        self.reservations = registry.reservations
        self._senders = registry.senders
        self._dirty = registry.dirty
        self._dirty_stores = registry.dirty_stores
        self._handlers = self._table()

    def _table(self) -> dict[int | type[m.Message], Handler]:
        """Return the handler of each message.

        The key is the kind of the message, or the type of a control message.
        """
        registry, consumers, requests = self.registry, self._consumers, self._queue_requests
        membership = self.membership
        return {
            m.PUBLISH: self._on_publish,
            m.SETTLE: consumers.on_settle,
            m.SyncSettled: self.syncs.on_sync_settled,
            m.CREDIT: consumers.on_credit,
            m.CONTROL: self._on_control,
            # who is there, and what exists
            m.Join: membership.on_join,
            m.Paused: membership.on_paused,
            m.FrontDoorGone: membership.on_front_door_gone,
            m.Assign: membership.on_assign,
            m.CreateQueues: registry.on_create,
            m.DeleteQueue: registry.on_delete,
            m.DropVhost: registry.on_drop_vhost,
            m.ListQueues: registry.on_list,
            # consumers
            m.Attach: consumers.on_attach,
            m.AttachPart: consumers.on_attach,
            m.AttachReader: consumers.on_attach_reader,
            m.AttachBounded: consumers.on_attach_reader,
            m.AttachStreamPart: consumers.on_attach_reader,
            m.SetBounds: consumers.on_set_bounds,
            m.Detach: consumers.on_detach,
            m.Release: consumers.on_release,
            # one queue
            m.Get: requests.on_get,
            m.Count: requests.on_count,
            m.CountUnsettled: requests.on_count_unsettled,
            m.DeadLetterUpTo: requests.on_dead_letter_up_to,
            m.Recall: self._moves.on_recall,
            m.TakeLetters: self._moves.on_take,
            m.PutLetters: self._moves.on_put,
            m.AskLetters: self._moves.on_ask,
            m.TakeChunks: self._stream_moves.on_take_chunks,
            m.PutChunks: self._stream_moves.on_put_chunks,
            m.TakePlaces: self._stream_moves.on_take_places,
            m.PutPlaces: self._stream_moves.on_put_places,
            m.Purge: requests.on_purge,
            m.DeadLettersPublished: requests.on_dead_letters_published,
            m.DedupAsk: requests.on_dedup_ask,
            m.DedupOutcome: requests.on_dedup_outcome,
            m.DedupForget: requests.on_dedup_forget,
            m.Reserve: requests.on_reserve,
            m.Redeem: requests.on_redeem,
            m.Unreserve: requests.on_unreserve,
            m.InspectStream: registry.streams.on_inspect_stream,
            m.Pull: registry.streams.on_pull,
            m.Unwatch: registry.streams.on_unwatch,
            m.StoreOffset: registry.streams.on_store_offset,
            m.Stats: requests.on_stats,
            # the files
            m.Snapshot: self.snapshots.on_snapshot,
        }

    @property
    def ready(self) -> bool:
        """Return whether all queues are known, with the messages that they still have."""
        return self.registry.ready

    def set_alarm(self, reason: str) -> None:
        self.registry.set_alarm(reason)

    # -- in ----------------------------------------------------------------------------------------

    def receive(self, message: envelope.Message, now: int) -> None:
        """Take in a message of a known process and of this epoch, or a Join.

        All other messages are stale, and are dropped. No part of the message is kept.
        """
        if self.short_way.receive(message, now):
            return
        peer = self._senders.get(message[1 : m.HEADER_BYTES])
        if peer is not None:
            self._handlers[message[0]](peer, message, now)
            return
        head = envelope.read(message)
        peer = self.peers.get(head.peer)
        if peer is not None and head.epoch == peer.epoch and head.incarnation == peer.incarnation:
            self._handlers[head.kind](peer, message, now)
        elif head.kind == m.CONTROL and isinstance(join := envelope.read_control(message), m.Join):
            self.membership.join(head, join, now)

    def _on_control(self, peer: Peer, message: envelope.Message, now: int) -> None:
        what = envelope.read_control(message)
        handler = self._handlers.get(type(what))
        if handler is not None:
            handler(peer, what, now)

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
        lender: Lender | None = None
        try:
            if message[FLAGS_AT] & LENT:
                lender = peer.lender
                if lender is None:
                    raise envelope.WireError(f"front door {peer.number} lends unknown memory")
            known = self.queues.named(ids)
            if not known:  # all queues of the batch were deleted meanwhile
                if lender is not None:
                    lender.let_all_go(lent_runs(records))
                if held is not None:
                    held.need_no_sync()
                return
            first = known[0]
            store: Store = first.store  # type: ignore[assignment] # queues were made with our Store
            redeems = peer.number in self.reservations.redeeming
            refused: set[int] | None = None
            fates: Fates | None = None
            origins: Sequence[int] | None = None
            if lender is not None and (in_sequence or self.streams.queues):
                runs = lent_runs(records)
                records = memoryview(with_bodies(records, lender.memory))
                lender.let_all_go(runs)
                lender = None
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
                if lender is None:
                    arrivals = store.append(records, may_refuse)
                else:
                    arrivals = store.append_lent(records, lender, may_refuse)
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
                held.refused = refused_runs(message, sorted(refused), m.PARTLY_REFUSED)
            if fates is not None and fates.known and held is not None:
                held.refused = [
                    *held.refused,
                    *known_runs(message, sorted(fates.known), fates.altered),
                ]
        except self._no_room:
            # The store has given the holds of lent bodies back. A WireError comes where nobody is
            # known to give them back to. Any other error ends this process, and the holds with it.
            if held is not None:
                held.refuse(_all_of(message, messages))
            # Publishes without confirms would be lost silently, so the front doors must hold them
            # back.
            self.registry.set_alarm(m.LOW_ON_DISK)
            return
        except envelope.WireError:
            # The message is dropped and the shard goes on, so the confirms of this front door must
            # go on too.
            if held is not None:
                held.refuse(_all_of(message, messages))
            raise
        except BaseException:
            if held is not None:
                held.fail()
            raise
        if needs_sync:
            self.syncs.wanted = True
            if held is not None:
                held.wait_for(self.syncs.begun + 1)
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
        """Append a batch that has messages for streams, or messages in a producer's sequence.

        Returns the arrivals in queues; the fates of refused and repeated messages; the ordinal in
        the batch of each message that arrived (None: all messages arrived); and whether a stream
        has some of the messages, because the consumers of a stream wait for the sync.
        """
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
        """Return a batch of producers without the messages that its queues know, or will refuse.

        A message that a queue will refuse is left out here, because on disk it would later count as
        stored.
        """
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

    def own_lent(self) -> None:
        """Copy lent bodies that have been here for long; called each second."""
        for store in self.stores.values():
            store.own_lent()

    @property
    def written_bytes(self) -> int:
        """Return the bytes of messages that the stores have written since the start."""
        return sum([store.written_bytes for store in self.stores.values()])

    def forget_producers(self, heard_before: int) -> None:
        """Forget producers that were last heard before this time, in ms since the epoch."""
        for store in self.stores.values():
            store.forget_producers(heard_before)
        self.streams.forget_producers(heard_before)

    # -- out ---------------------------------------------------------------------------------------

    def turn_end(self, now: int) -> list[Outgoing]:
        """Return the messages to send, after all messages at hand were received."""
        outgoing = self.short_way.turn_end(now)
        if outgoing is not None:
            return outgoing
        self._serving.turn(now)
        # Copies of dead letters take room on the disk.
        if not self.dead_letters.idle and not self.registry.alarm:
            self.dead_letters.hand_over(self.peers, now)
        if self._holding.watches:
            self._holding.pace(self.peers.values(), now)
        return self.answers()

    def answers(self) -> list[Outgoing]:
        """Return confirms and replies, without new deliveries.

        This touches no store.
        """
        if self.short_way.is_on:
            return self.short_way.answers()
        outgoing: list[Outgoing] = []
        for peer in self.peers.values():
            if peer.held:
                peer.confirm(self.syncs.ended)
            if peer.has_news or peer.taken >= PUBLISH_CREDIT_BYTES:
                peer.take(outgoing)
        return outgoing

    def break_off(self, alarm: str) -> list[Outgoing]:
        """Return the last messages of a shard that fails: the alarm, and confirms.

        Only batches that are on stable storage are confirmed. Batches that wait for a sync, or
        whose append broke off, stay without an answer.
        """
        self.set_alarm(alarm)
        return self.answers()

    @property
    def has_work(self) -> bool:
        """Return whether a pass without new messages would do something."""
        return bool(self._dirty)

    def next_due(self) -> int | None:
        """Return when the next pass must be at the latest, in ms since the epoch."""
        due = self._serving.next_due
        if self.dead_letters.idle:
            return due
        retry = None if self.registry.alarm else self.dead_letters.next_due()
        return due if retry is None else retry if due is None else min(due, retry)

    # -- stable storage ----------------------------------------------------------------------------

    def close(self) -> None:
        """Write everything to disk, with a note of which messages were handed out before."""
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
        """Write what can be written after a failure; return the errors met.

        The stores do not take this for a clean stop.
        """
        troubles: list[Exception] = []
        for store in [*self.stores.values(), *self.registry.dropped.values()]:
            try:
                store.close(None)
            # The error of one store must not keep the others from closing.
            except Exception as error:
                troubles.append(error)
        return troubles + self.streams.abandon()

    # -- numbers -----------------------------------------------------------------------------------

    def _numbers(self) -> dict[str, float]:
        process = self._process_stats()
        process["syncs"] = self.syncs.ended
        process["dead_letters_waiting"] = self.dead_letters.count()
        for numbers in (
            *(store.stats() for store in self.stores.values()),
            *(counters_of(store) for store in self.registry.dropped.values()),
            self.registry.gone_stores,
            self.streams.damage(),
        ):
            for name, value in numbers.items():
                if name != "syncs":
                    process[name] = process.get(name, 0) + value
        process |= stats.of_gone(self.registry.gone) | stats.of_peers(self.peers.values())
        process |= self.batch_messages.report("batch_messages")
        process |= self.batch_bytes.report("batch_bytes")
        return process


def _all_of(message: envelope.Message, messages: int) -> list[Refused]:
    """Return the confirm numbers of all messages of a batch, which is refused."""
    return refused_runs(message, range(messages), 0)


def _may_refuse(queues: list[Queue]) -> bool:
    """Return whether some of these queues may refuse publishes."""
    return True in [queue.backlog.rules.may_refuse for queue in queues]
