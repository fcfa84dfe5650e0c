"""Keep the messages of queues: append records, read messages, settle them, sync them.

Publish path, 5 of 5. Before: shardd/queues/queue.py.

A store is blocking and belongs to one thread; only the `run` of a job may be called elsewhere. A
store knows records and queue ids, but no queues: the caller keeps the entries. Bytes stay in the
write buffer of their segment until a flush. Messages that are settled before that never touch the
disk. After StoreFailed nothing is written any more: only what the next recovery finds is true.

A store is made of objects that share its segments (segments.py): appending.py, retrieval.py,
syncs.py and merging.py. This file holds them together, and has the fast path for a
batch that fits into the open segment.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Collection, Mapping

from shardmq.shardd.lending import Lender, LentMessages
from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import Closed, DiskFull
from shardmq.shardd.store.files import Files, OsFiles, sync_file
from shardmq.shardd.store.format.producers_file import NAME as PRODUCERS
from shardmq.shardd.store.format.record import (
    Arrival,
    lent_runs,
    look_at,
    only_segment,
    segment_runs,
    settled_pairs,
    with_bodies,
)
from shardmq.shardd.store.format.segment_file import END_BYTES, file_name
from shardmq.shardd.store.format.sequences import Screened
from shardmq.shardd.store.open_segment import RENEW_BYTES, SETTLED_BYTES_MAX, SegmentStoreState
from shardmq.shardd.store.segments import producers, recovery, returns
from shardmq.shardd.store.segments.ack_waits import AckWait
from shardmq.shardd.store.segments.appending import Appender
from shardmq.shardd.store.segments.compaction import ReclaimJob
from shardmq.shardd.store.segments.letters import Letters
from shardmq.shardd.store.segments.merging import Merging
from shardmq.shardd.store.segments.pending_acks import ACKS_FILES_AT_ONCE
from shardmq.shardd.store.segments.recovery import Progress
from shardmq.shardd.store.segments.retrieval import Retrieval
from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments, UnderSync
from shardmq.shardd.store.segments.syncs import (
    SEALED_BUFFERS_MAX,
    Flusher,
    Syncs,
    UnderSettledSync,
)
from shardmq.shardd.store.state import StoreState
from shardmq.shardd.store.sync import SyncJob

POSITION_LIMIT = 1 << 28
SEGMENT_BYTES_MIN = 4096
# The lent bodies that are copied at once, and one segment more: others wait for the next second,
# while this process goes on.
OWN_BYTES_MAX = 32 << 20


class SegmentStore(SegmentStoreState):
    """The messages of the queues of one vhost at one shard, in one directory."""

    def __init__(
        self,
        directory: str,
        *,
        files: Files | None = None,
        segment_bytes: int = 3 << 20,
        sync: bool = True,
        spare_segments: int = 2,
    ) -> None:
        assert SEGMENT_BYTES_MIN <= segment_bytes <= POSITION_LIMIT and segment_bytes % 8 == 0
        self.directory = directory
        files = OsFiles() if files is None else files
        self._state = StoreState[UnderSync]("store", directory, files)
        self._segments = segments = Segments(self._state, segment_bytes, sync, spare_segments)
        self._flusher = Flusher(segments)
        self._appender = Appender(segments, self._flusher)
        self._retrieval = Retrieval(segments)
        self._syncs = Syncs(segments, self._flusher)
        self._merging = Merging(segments)
        # The fast path of a batch uses these without asking the objects that own them.
        self._batch = self._appender.batch
        self._by_number = segments.by_number
        self._counters = segments.counters
        self._producers = segments.producers
        self._returns = segments.returns
        self._waited_long: list[Segment] = []  # segments that had lent bodies at the last own_lent
        self._settled = segments.settled
        # Without a call between.
        self.peek, self.came_at = self._retrieval.peek, segments.ages.came_at
        self.note_time = segments.note_time
        self.growing = segments.growing
        # Whoever waits for acks gives the wait to `begin_settled_sync` again and again, until it
        # `is_over` or `is_refused`.
        self.wait_for_acks = AckWait
        self.has_unwritten_acks = segments.has_unwritten_acks
        # For queues that move to another shard, or come from there.
        self.letters = Letters(segments, self._retrieval).records
        self.set_returns = segments.returns.put
        self.has_producers = segments.producers.has

    # -- start and stop ----------------------------------------------------------------------------

    def recover(
        self,
        queue_ids: Collection[int],
        timed: Collection[int] = (),
        progress: Progress | None = None,
    ) -> dict[int, Arrival]:
        """Open the store, once; return what each of `queue_ids` still has, in publish order.

        Messages of queues that are not named here are dropped. After a clean stop the flags are as
        `close` was told, else all entries carry REDELIVERED. `progress` is called with bytes read,
        bytes in all and messages found. Raises DiskFull, FormatTooNew or StoreFailed.
        """
        segments = self._segments
        assert self._state.stage == "new", "recover is called once"
        try:
            self._state.find_directory()
            if not self._state.has_directory:
                self._state.stage = "open"
                return {}
            returned = returns.read(segments.files, segments.directory)
            found = recovery.recover(
                segments.files,
                segments.directory,
                segments.reclaimer,
                queue_ids,
                timed,
                segments.sync,
                progress,
                segments.producers,
                segments.ages.note,
            )
        except OSError as error:
            raise self._state.named(error) from error
        self._state.stage = "open"
        segments.next_number = segments.reclaimer.linked_below = found.next_number
        segments.counters.damage = found.damage
        self._merging.known_ids = array("I", sorted(queue_ids)) if found.segments else None
        for segment in found.segments:
            segment.recovered = True
            segments.enlist(segment)
            if segment.acks_end and not found.clean:
                segments.settled.written_before(segment)
            if segment.live == 0:
                segments.retire(segment)
            else:
                segments.candidates.look_at(segment)
        self._state.check_usable()
        segments.returns.recover(
            returned, {arrival.queue_id: arrival.entries for arrival in found.arrivals}
        )
        return {arrival.queue_id: arrival for arrival in found.arrivals}

    def close(self, live: Mapping[int, array[int]] | None = None) -> None:
        """Write everything to disk and end the use of the store.

        `live` has the entries that each queue still has, with their flags. Without `live` the next
        recovery takes all messages as delivered before.
        """
        if self._state.stage != "open":
            self._state.stage = "closed"
            return
        assert self._state.job is None, "a sync is running"
        self._merging.give_up()
        try:
            if not self._state.failure and self._state.has_directory:
                self._write_all(live)
        except OSError as error:
            raise self._state.named(error) from error
        finally:
            self._state.stage = "closed"
            self._segments.release()

    def delete_all(self) -> None:
        """Remove the store's files, and the directory if nothing else is in it."""
        segments = self._segments
        assert self._state.job is None and not self._merging.is_running, "a job is running"
        self._state.stage = "closed"
        segments.release()
        if not self._state.has_directory and self._state.is_missing():
            return
        for name in segments.files.list(segments.directory):
            if name.removesuffix(".new") in (
                "state",
                returns.NAME,
                PRODUCERS,
            ) or recovery.is_ours(name):
                segments.files.remove(f"{segments.directory}/{name}")
        if not segments.files.list(segments.directory):
            segments.files.remove_directory(segments.directory)

    def _write_all(self, live: Mapping[int, array[int]] | None) -> None:
        segments = self._segments
        self._flusher.flush_all()
        segments.settled.settle_forgotten()  # so that tools count only messages that are needed
        segments.settled.flush()
        for segment in [*segments.in_memory, *([segments.open] if segments.open else [])]:
            if segment.flushed and segment.index is None and not segment.has_index:
                segment.index = segment.make_index()
        # Without syncs nobody keeps count of what is only in the page cache, so a clean stop syncs
        # all.
        unsynced = (
            list(segments.unsynced.values())
            if segments.sync
            else [each for each in segments.distinct() if each.flushed]
        )
        for segment in unsynced:
            segments.files.sync(segments.handles.of(segment))
        if segments.open is not None:
            segments.producers.sealed(segments.open)  # nothing is appended to it any more
        with contextlib.suppress(DiskFull):  # segments that are not covered stay
            self._syncs.cover_all()
        for segment in segments.distinct():
            if segment.flushed == segment.used:
                self._flusher.write_index_if_made(segment)
            if segment.acks_end:
                # While the store lives acks may be lost, but not at a clean stop.
                name = file_name("acks", segment.number)
                sync_file(segments.files, f"{segments.directory}/{name}")
        segments.returns.make_last(segments.files, segments.directory)
        segments.files.sync_directory(segments.directory)
        segments.dispose_replaced()
        segments.reclaimer.remove_doomed()
        if live is not None:
            placed = {queue_id: segments.on_disk(entries) for queue_id, entries in live.items()}
            there = [segment.number for segment in segments.distinct() if segment.flushed]
            recovery.write_state(
                segments.files, segments.directory, segments.next_number, placed, there
            )

    # -- append ------------------------------------------------------------------------------------

    def screen(
        self, records: bytes | bytearray | memoryview, rooms: Mapping[int, producers.Room]
    ) -> Screened:
        """Return the part of a batch with records IN_SEQUENCE that is to be appended next.

        If that append fails, the caller must call `unscreen`.
        """
        if len(self._producers.uncovered) > producers.UNCOVERED_MAX:
            # The cover must be taken before the table holds sequences that are not appended yet.
            self._syncs.cover_now()
        return self._producers.screen(records, rooms)

    def unscreen(self) -> None:
        """Forget the batch that was screened last, since its append failed."""
        self._producers.table.undo()

    def forget_producers(self, heard_before: int) -> int:
        """Forget producers last heard before this time, in ms since the epoch; return how many."""
        return self._producers.sweep(heard_before)

    def append(
        self,
        records: bytes | bytearray | memoryview,
        indexes: bool = False,
        in_sequence: bool = False,
    ) -> list[Arrival]:
        """Append a batch of whole records; return one Arrival per queue id in it.

        All of the batch is appended or, with an error, nothing. A memoryview must be one of bytes.
        `in_sequence`: the batch was screened. Raises DiskFull, Closed or StoreFailed.
        """
        state = self._state
        if state.stage != "open" or state.job is not None or state.failure:
            state.check_usable()
        batch = self._batch
        messages = batch.plan(records)
        if not messages:
            return []
        size = len(records)
        segment = self._segments.open
        if segment is None or segment.buffer is None:
            return self._appender.append_in_pieces(records, indexes, in_sequence)
        used = segment.used
        if used > RENEW_BYTES and segment.live == 0 and segment.is_needless:
            segment = self._appender.renew(segment)
            used = segment.used
        if size > segment.capacity - used - END_BYTES or segment.buffer is None:
            return self._appender.append_in_pieces(records, indexes, in_sequence)
        arrivals, counts = batch.put(
            records, segment.buffer, used, segment.number, segment.salt, indexes, segment.abstracts
        )
        segment.add(size, counts)
        if in_sequence:
            self._producers.appended(segment)
        counters = self._counters
        counters.appended_messages += messages
        counters.appended_bytes += size
        return arrivals

    def append_lent(
        self, records: bytes | bytearray | memoryview, lender: Lender, indexes: bool = False
    ) -> list[Arrival]:
        """Append a batch that was not screened and has LENT records, as `append` does.

        Each lent body is held until its segment has its bytes or needs them no more.
        """
        try:
            self._state.check_usable()
            arrivals = self._appender.append_lent(records, lender, indexes)
            if arrivals is not None:
                return arrivals
            arrivals = self.append(with_bodies(records, lender.memory), indexes)
        except Exception:
            lender.let_all_go(lent_runs(records))
            raise
        lender.let_all_go(lent_runs(records))
        return arrivals

    def own_lent(self) -> None:
        """Copy lent bodies that were here at the last call, and give them back.

        Messages that stay for long thus take no memory of front doors. The oldest go first, and
        what is left of them behind OWN_BYTES_MAX is copied by the next calls. Sealed segments that
        have all their bytes now are written, as they would have been without lent bodies. A full
        disk leaves them in memory.
        """
        if self._state.stage != "open" or self._state.failure:
            return
        segments = self._segments
        segment = segments.open
        if segment is not None and segment.lends and segment.is_needless:
            self._appender.renew(segment)
        self._waited_long, waited = [], self._waited_long
        left = OWN_BYTES_MAX
        for segment in [*segments.in_memory, *([segments.open] if segments.open else [])]:
            if segment.lends and left > 0 and segment in waited:
                left -= segment.lent.held_bytes
                segment.fill_lent()
            elif segment.lends:
                self._waited_long.append(segment)
        # A sync may have copied the bodies, and then no publish need come to write the segments.
        if not waited and len(segments.in_memory) <= SEALED_BUFFERS_MAX:
            return
        try:
            self._flusher.write_oldest(0)
        except Exception as error:
            named = self._state.named(error)
            if not isinstance(named, DiskFull):
                raise named from error

    # -- read and settle ---------------------------------------------------------------------------

    def read(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        """Return stored messages and the body bytes of each: see `Retrieval.read`."""
        return self._retrieval.read(entries, bytes_max, whole)

    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes | memoryview | LentMessages, array[int]]:
        """Read as `read` does, but large messages may be a view of the write buffer.

        The view is good until the next append. The answer may end before the first message whose
        body is lent, or behind the last one.
        """
        segment = self._by_number.get(only_segment(entries))
        if (
            segment is not None
            and segment.buffer is not None
            and segment.moves is None
            and self._state.stage == "open"
        ):
            if segment.lends:
                return self._retrieval.look_at_lent(segment, entries, bytes_max)
            return look_at(segment.buffer, segment.used, entries, 0, len(entries), bytes_max)
        segment = self._by_number.get(entries[0] >> 32) if entries else None
        if segment is not None and segment.lends and self._state.stage == "open":
            return self._retrieval.look_at_lent(segment, entries, bytes_max)
        return self._retrieval.read(entries, bytes_max, whole)

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None:
        """Note that the queue needs these messages no more.

        `durable`: a recovery should know it, too. The acks are written with the next flush.
        """
        if self._state.stage != "open":
            raise Closed("the store is not open")
        if self._returns.times:
            self._returns.forget(queue_id, entries)
        for number, start, stop in segment_runs(entries):
            segment = self._by_number[number]
            live = segment.live = segment.live - stop + start
            assert live >= 0, "settled twice"
            is_open = segment is self._segments.open
            if live or segment.merging or (durable and (is_open or segment.awaits_cover)):
                self._remember(segment, queue_id, entries, start, stop, durable)
            if live or segment.merging:
                continue
            if not is_open:
                self._segments.retire(segment)
            elif not durable:
                segment.dead_until = segment.used
                self._settled.drop_forgotten(segment)
        if self._settled.settled_bytes > SETTLED_BYTES_MAX and not self._state.failure:
            self._state.quietly(self._settled.flush, ACKS_FILES_AT_ONCE)

    def _remember(
        self,
        segment: Segment,
        queue_id: int,
        entries: array[int],
        start: int,
        stop: int,
        durable: bool,
    ) -> None:
        """Remember settled messages of a segment of which other messages are needed.

        Recovery needs to know of `durable` ones, only merging of the others.
        """
        if segment.moves is not None:
            entries, start, stop = segment.moves.find(entries, start, stop), 0, stop - start
        pairs = settled_pairs(queue_id, entries, start, stop)
        if durable:
            self._settled.note(segment, pairs)
        else:
            self._settled.note_forgotten(segment, pairs)
        if segment.sealed and segment.live * 2 <= segment.references:
            self._segments.look_at(segment)

    def drop_queue(self, queue_id: int, entries: array[int]) -> None:
        """Settle all messages of a queue that was deleted.

        No recovery will be asked for the queue again, so nothing is remembered for recovery.
        """
        self.settle(queue_id, entries, False)
        self._producers.forget_queue(queue_id)

    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]:
        """Note that these messages were returned to the queue; return how often each was by now.

        The counts are kept until the messages are settled, also by a recovery. They are written
        with the next flush.
        """
        return self._returns.count(queue_id, entries)

    def times_returned(self, queue_id: int, entry: int) -> int:
        return self._returns.of(queue_id, entry)

    def flush(self) -> None:
        """Hand to the operating system what is only in this process's memory."""
        self._state.check_usable()
        try:
            self._flusher.flush_all()
        except Exception as error:
            raise self._state.named(error) from error

    def begin_sync(self) -> SyncJob[UnderSync] | None:
        """Flush, and return the job that makes all messages last: see `Syncs.begin_sync`.

        An open segment that nobody needs starts anew. So all acks until now are of messages that
        are on disk behind this, or that never will be.
        """
        self._state.check_usable()
        self._appender.renew_if_needless()
        return self._syncs.begin_sync()

    def finish_sync(self, job: SyncJob[UnderSync]) -> None:
        """End a job after its `run`: see `Syncs.finish_sync`."""
        self._syncs.finish_sync(job)

    def begin_settled_sync(
        self, waits: Collection[AckWait] = (), everything: bool = True
    ) -> SyncJob[UnderSettledSync] | None:
        """Return the job that makes the acks last: see `Syncs.begin_settled_sync`.

        An open segment whose messages were all settled before they were written starts anew here.
        Otherwise these messages would be written with later ones, and would come back if the power
        failed before the next sync of the acks.
        """
        self._state.check_usable()
        self._appender.renew_if_needless()
        return self._syncs.begin_settled_sync(waits, everything)

    def finish_settled_sync(self, job: SyncJob[UnderSettledSync]) -> None:
        """End a job after its `run`: see `Syncs.finish_settled_sync`."""
        self._syncs.finish_settled_sync(job)

    @property
    def settled_held_back(self) -> bool:
        """True when the last sync of the acks left something out because of a merge."""
        return self._syncs.held_back

    # -- merge what is nearly empty ----------------------------------------------------------------

    def compact(self) -> int:
        """Do one step in this thread; return how many fewer segments there are now."""
        return self._merging.compact()

    def begin_reclaim(self) -> ReclaimJob | None:
        """Return a job that removes and merges files: see `Merging.begin`."""
        return self._merging.begin()

    def finish_reclaim(self, job: ReclaimJob) -> int:
        """End a job after its `run`: see `Merging.finish`."""
        return self._merging.finish(job)

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def written_bytes(self) -> int:
        """The number of appended bytes that were written to segments."""
        return self._counters.written_bytes

    @property
    def damage(self) -> list[Damage]:
        """The damage that recovery found."""
        return self._counters.damage

    def stats(self) -> dict[str, int]:
        """Return the numbers of the store by name."""
        return self._segments.stats()
