"""Make what the stores and streams of a shard took in last: which sync begins when, and what it confirms.

Syncs are begun here and run by the caller. One sync of messages runs at a time, and beside it one
of what is settled. A batch is confirmed by a sync that began after its append, and never before an
earlier batch. Knows no thread and no clock.
"""

from __future__ import annotations

from shardmq.shardd.queues import Stream, StreamQueue
from shardmq.shardd.registry import Registry
from shardmq.shardd.stores import Store, Sync, SyncJob
from shardmq.shardd.upkeep import Step
from shardmq.shardd.wire import messages as m


class Syncs:
    """The syncs of one shard. `no_room`: what a store raises whose disk is full."""

    def __init__(self, registry: Registry, no_room: tuple[type[Exception], ...]) -> None:
        self._registry = registry
        self._no_room = no_room
        self.begun = 0  # number of the last sync that confirms batches
        self.ended = 0  # of these, the last of which all ended well, with all before it
        self.wanted = False  # somebody waits for a sync
        self._tried = 0
        self._settled: Sync[Store | Stream] | None = None
        self._settled_after: int | None = 0  # syncs tried until one may begin; None: not wanted

    def want(self) -> None:
        """Ask for a sync of what nobody waits for; to be called each second.

        That is persistent messages without confirms, and behind them what is settled and where
        readers of streams are.
        """
        registry = self._registry
        self.wanted = self.wanted or bool(registry.dirty_stores or registry.streams.dirty)
        if self._settled_after is None:
            self._settled_after = self._tried + self.wanted

    def begin(self) -> SyncJob | None:
        """Return a sync to be run, if there is something to do and no other runs.

        It may confirm by itself that nothing has to be waited for.
        """
        registry = self._registry
        if registry.sync is not None or not self.wanted:
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
            # Confirms go on waiting for a sync of all stores; it is tried again with the next turn.
            registry.set_alarm(m.LOW_ON_DISK)
        else:
            self.wanted = False
            number = self.begun = self.begun + 1
        if not jobs:
            if number is not None:
                self.ended = number
            return None
        registry.sync = Sync(jobs, number)
        return registry.sync

    def end(self) -> None:
        """End a sync after its `run`. Raises what the store raises when it failed."""
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
            self.ended = sync.number

    # -- what is settled -------------------------------------------------------------------------------

    def begin_settled(self) -> SyncJob | None:
        """Return a sync of what is settled and of positions in streams, if it is wanted and needed.

        It is to be run in a thread of its own, beside syncs of messages; then `end_settled`. It
        begins behind the sync that `want` asked for, and between two: what is settled of segments
        that one has in hand, or that have not been written, cannot be told before.
        """
        registry = self._registry
        if self._settled_after is None or self._tried < self._settled_after:
            return None
        if self._settled is not None or registry.sync is not None:
            return None
        self._settled_after = None
        jobs: list[tuple[Store | Stream, SyncJob]] = []
        keepers: list[Store | Stream] = [
            *registry.stores.values(),
            *(stream.log.stream for stream in registry.streams.queues.values()),
        ]
        for each in keepers:
            job = each.begin_settled_sync()
            if job is not None:
                jobs.append((each, job))
                if job.more:
                    self._settled_after = self._tried
        if not jobs:
            return None
        self._settled = Sync(jobs, None)
        return self._settled

    def end_settled(self) -> None:
        """End a sync of what is settled after its `run`. Raises what a store raises when it failed."""
        assert self._settled is not None
        sync, self._settled = self._settled, None
        for each, job in sync.jobs:
            each.finish_settled_sync(job)

    # -- merging ---------------------------------------------------------------------------------------

    def begin_reclaim(self, now: int) -> Step | None:
        """Return a step of one store, to be run, if one is due and there is something to do."""
        return self._registry.upkeep.begin(self._registry.stores.values(), now)

    def end_reclaim(self, now: int) -> None:
        """End a step after its `run`. The files of what was merged go after the next sync."""
        registry = self._registry
        store = registry.upkeep.end(registry.stores.values(), now)
        for each in registry.stores.values():
            if each is store:
                registry.dirty_stores.add(each)
                if each.settled_held_back and self._settled_after is None:
                    self._settled_after = self._tried
        registry.delete_dropped()
