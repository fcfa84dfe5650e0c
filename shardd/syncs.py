"""Make the data of a shard's stores and streams durable: when a sync begins, and what it confirms.

Syncs are begun here and run by the caller. One sync of messages runs at a time, and beside it one
sync of settled messages. A batch is confirmed by a sync that began after its append, and never
before an earlier batch. This file knows no thread and no clock.

Settled messages, and positions in streams, are synced each second (`want`), and at once if a
transaction waits for them (`on_sync_settled`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Stream, StreamQueue
from shardmq.shardd.registry import Registry
from shardmq.shardd.short_way import SyncsState
from shardmq.shardd.stores import AckWait, Store, Sync, SyncJob
from shardmq.shardd.upkeep import Step
from shardmq.shardd.wire import messages as m

# A question about acks waits for the end of a merge, which has some of them in hand.
HELD_BACK = 1 << 62


class Asked:
    """A question of a peer that is answered when the acks of some queues are on stable storage.

    There is at most one for each channel that commits a transaction. It may go into a sync of
    settled messages when `_tried` of `Syncs` has reached `after`. `unwritten` has the stores with
    acks that need a sync of messages first.
    """

    __slots__ = ("after", "number", "peer", "unwritten", "waits")

    def __init__(
        self,
        peer: Peer,
        number: int,
        waits: dict[Store, AckWait],
        unwritten: set[Store],
        after: int,
    ) -> None:
        self.peer = peer
        self.number = number
        self.waits = waits
        self.unwritten = unwritten
        self.after = after

    def answer(self, *, lasts: bool) -> None:
        self.peer.tell(m.SettledSynced(self.number, lasts))


class Syncs(SyncsState):
    """The syncs of one shard.

    `no_room` is what a store raises when its disk is full.
    """

    def __init__(self, registry: Registry, no_room: tuple[type[Exception], ...]) -> None:
        self._registry = registry
        self._no_room = no_room
        self.begun = 0  # the number of the last begun sync that confirms batches
        self.ended = 0  # the last of these numbers that ended well, with all before it
        self.wanted = False  # somebody waits for a sync
        self.are_held = False  # no job begins, because a snapshot waits for the end of all
        self._answers: deque[tuple[int, Callable[[], None]]] = deque()
        self._tried = 0  # how many syncs of messages were begun, or failed to begin
        self._settled: Sync[Store | Stream] | None = None
        # A sync of settled messages may begin when `_tried` has reached this. None: it is not
        # wanted.
        self._settled_after: int | None = 0
        self._asked: list[Asked] = []
        self.has_answered = False  # some question was answered, and the peer is to be told
        # A merge has ended that may have held back acks which somebody waits for: the next one
        # waits until these are written.
        self._merges_wait = False

    def want(self) -> None:
        """Ask for a sync of data that nobody waits for; the caller does this each second.

        The data is persistent messages without confirms, and then settled messages and the
        positions of consumers of streams.
        """
        registry = self._registry
        self.wanted = self.wanted or bool(registry.dirty_stores or registry.streams.dirty)
        if self._settled_after is None:
            self._settled_after = self._tried + self.wanted

    def then(self, answer: Callable[[], None]) -> None:
        """Call `answer` when all that was appended until now is on stable storage."""
        self.wanted = True
        self._answers.append((self.begun + 1, answer))

    def on_sync_settled(self, peer: Peer, asked: m.SyncSettled, now: int) -> None:
        """Answer when what was settled in these queues until now is on stable storage.

        Queues that are not durable, streams, and queues that are gone need no wait.
        """
        ids: dict[Store, list[int]] = {}
        for queue_id in asked.queues:
            queue = self._registry.queues.get(queue_id)
            if queue is not None and queue.keeps_in_store and queue.backlog.durable:
                # Queues were made with our Store.
                store: Store = queue.store  # type: ignore[assignment]
                ids.setdefault(store, []).append(queue_id)
        unwritten = {store for store in ids if store.has_unwritten_acks()}
        if unwritten:
            self._registry.dirty_stores.update(unwritten)
            self.wanted = True
        waits = {store: store.wait_for_acks(of_store) for store, of_store in ids.items()}
        after = self._tried + bool(unwritten)
        self._asked.append(Asked(peer, asked.number, waits, unwritten, after))
        self._answer_asked()

    def _answer_asked(self) -> None:
        """Answer the questions about acks that are on stable storage, or have no room."""
        left = []
        for asked in self._asked:
            there = [asked.waits[each] for each in self._stores if each in asked.waits]
            if any(wait.is_refused for wait in there):
                asked.answer(lasts=False)
            elif all(wait.is_over for wait in there):  # a deleted vhost needs no acks
                asked.answer(lasts=True)
            else:
                left.append(asked)
                continue
            self.has_answered = True
        self._asked = left

    def _refuse_asked(self, left: Collection[Store]) -> None:
        """Refuse the questions that waited for a sync of these stores, which found no room."""
        for asked in self._asked:
            if asked.after == self._tried:
                for store in asked.unwritten.intersection(left):
                    asked.waits[store].is_refused = True
        self._answer_asked()

    def _ended(self, number: int) -> None:
        self.ended = number
        while self._answers and self._answers[0][0] <= number:
            self._answers.popleft()[1]()

    @property
    def _stores(self) -> Collection[Store]:
        return self._registry.stores.values()

    @property
    def may_begin(self) -> bool:
        """Return whether `begin` would do something now."""
        return self.wanted and self._registry.sync is None and not self.are_held

    @property
    def are_idle(self) -> bool:
        """Return whether no job of a store or stream is under way."""
        registry = self._registry
        return registry.sync is None and self._settled is None and registry.upkeep.store is None

    def begin(self) -> SyncJob | None:
        """Return a sync to be run, if there is something to do and no other sync runs.

        If no store has anything to wait for, this makes the waiting batches confirmable at once. So
        call it before `Shard.turn_end`.
        """
        registry = self._registry
        if not self.may_begin:
            return None
        self._tried += 1
        jobs: list[tuple[Store | StreamQueue, SyncJob]] = []
        number: int | None = None
        try:
            dirty = registry.dirty_stores
            for store in [store for store in registry.stores.values() if store in dirty]:
                job = store.begin_sync()
                dirty.discard(store)
                if job is not None:
                    jobs.append((store, job))
            for stream in list(registry.streams.dirty):
                job = registry.streams.begin_sync(stream)
                if job is not None:
                    jobs.append((stream, job))
                else:
                    registry.dirty[stream] = None
        except self._no_room:
            # Confirms go on waiting for a sync of all stores, which is tried again in the next
            # pass.
            registry.set_alarm(m.LOW_ON_DISK)
            self._refuse_asked(dirty)
        else:
            self.wanted = False
            number = self.begun = self.begun + 1
        if not jobs:
            if number is not None:
                self._ended(number)
            return None
        registry.sync = Sync(jobs, number)
        return registry.sync

    def end(self) -> None:
        """End a sync after its `run`. Raises what the store raises when the sync failed."""
        registry = self._registry
        assert registry.sync is not None
        sync, registry.sync = registry.sync, None
        full = False
        for store, job in sync.jobs:
            try:
                store.finish_sync(job)
            except self._no_room:
                if not isinstance(store, StreamQueue):
                    registry.dirty_stores.add(store)
                full = True
        registry.dirty.update(dict.fromkeys(registry.streams.sync_ended()))
        registry.delete_dropped()
        if full:  # confirms wait for a sync that finds room
            self.wanted = True
            registry.set_alarm(m.LOW_ON_DISK)
        elif sync.number is not None:
            self._ended(sync.number)

    # -- what is settled ---------------------------------------------------------------------------

    def begin_settled(self) -> SyncJob | None:
        """Return a sync of settled messages and of positions in streams, if it is needed.

        The caller runs it in a thread of its own, beside syncs of messages, and then calls
        `end_settled`. The sync begins after the sync that `want` asked for, and while no sync of
        messages runs. Before that, a store cannot record settled messages of segments that the sync
        has in hand, or that have not been written. For a question about acks the sync begins
        without the second that `want` comes after, and has only the acks that were asked for.
        """
        registry = self._registry
        everything = self._settled_after is not None and self._tried >= self._settled_after
        if not everything and not self._asked:
            return None
        if self._settled is not None or registry.sync is not None or self.are_held:
            return None
        asked = [each for each in self._asked if each.after <= self._tried]
        if not everything and not asked:
            return None
        self._merges_wait = False
        if everything:
            self._settled_after = None
        jobs: list[tuple[Store | Stream, SyncJob]] = []
        for store in self._stores:
            of_store = [each.waits[store] for each in asked if store in each.waits]
            waits = [wait for wait in of_store if not wait.is_over]
            if everything or waits:
                job = store.begin_settled_sync(waits, everything)
                if job is not None:
                    jobs.append((store, job))
                    if everything and job.more:
                        self._settled_after = self._tried
        for stream in registry.streams.queues.values() if everything else ():
            job = stream.log.stream.begin_settled_sync()
            if job is not None:
                jobs.append((stream.log.stream, job))
                if job.more:
                    self._settled_after = self._tried
        begun = {each for each, _ in jobs}
        for each in asked:
            if begun.isdisjoint(each.waits):  # nothing of it could be written
                each.after = HELD_BACK
        self._answer_asked()
        if not jobs:
            return None
        self._settled = Sync(jobs, None)
        return self._settled

    def end_settled(self) -> None:
        """End a sync of settled messages after its `run`.

        Raises what a store raises when the sync failed.
        """
        assert self._settled is not None
        sync, self._settled = self._settled, None
        for each, job in sync.jobs:
            each.finish_settled_sync(job)
        self._answer_asked()

    @property
    def awaits_acks(self) -> bool:
        """Return whether a question about acks waits for its answer."""
        return bool(self._asked)

    # -- merging -----------------------------------------------------------------------------------

    @property
    def merges_are_held(self) -> bool:
        """Return whether no merge may begin now.

        Acks that a merge has held back, and that somebody waits for, are written before the next
        merge could hold them back again. So one merge runs for each such sync, at least.
        """
        return self.are_held or (self._merges_wait and bool(self._asked))

    def begin_reclaim(self, now: int) -> Step | None:
        """Return a step of one store, to be run, if one is due and there is something to do."""
        if self.merges_are_held:
            return None
        return self._registry.upkeep.begin(self._registry.stores.values(), now)

    def end_reclaim(self, now: int) -> None:
        """End a step after its `run`. Merged files are removed after the next sync."""
        registry = self._registry
        store = registry.upkeep.end(registry.stores.values(), now)
        self._merges_wait = bool(self._asked)
        for asked in self._asked:
            if asked.after == HELD_BACK:
                asked.after = self._tried
        for each in registry.stores.values():
            if each is store:
                registry.dirty_stores.add(each)
                if each.settled_held_back and self._settled_after is None:
                    self._settled_after = self._tried
        registry.delete_dropped()
