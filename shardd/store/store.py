"""Keep what queues were given: append records, read messages back, forget what is settled, make it last.

Publish path, 5 of 5. Before: shardd/queues/queue.py.

Blocking and for one thread, but for `SyncJob.run`. Knows records and queue ids, not queues: whoever calls keeps the
entries. Bytes stay in the write buffer of their segment until a flush; what is settled before that never touches the
disk. After StoreFailed nothing is written any more: only what recovery finds is true. Which segments there are, and how
nearly empty ones are merged: segments.py.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Collection, Mapping

from shardmq.shardd.store import producers, recovery, returns
from shardmq.shardd.store.errors import Closed, Corrupt, DiskFull
from shardmq.shardd.store.files import Files, OsFiles, is_full
from shardmq.shardd.store.pieces import Piece, allocate_alone, cut
from shardmq.shardd.store.reading import Place, are_scattered, is_scattered, span
from shardmq.shardd.store.record import (
    Arrival,
    Batch,
    copy_out,
    look_at,
    only_segment,
    segment_runs,
    settled_pairs,
)
from shardmq.shardd.store.recovery import Progress
from shardmq.shardd.store.segment import END_BYTES, HEADER_BYTES, Segment, encode_header, file_name
from shardmq.shardd.store.segments import Segments
from shardmq.shardd.store.sequences import Screened
from shardmq.shardd.store.settled import (
    ACKS_FILES_AT_ONCE,
    ACKS_FILES_SYNCED_AT_ONCE,
    SETTLED_BYTES_MAX,
)
from shardmq.shardd.store.sync import SettledSync, SyncJob

POSITION_LIMIT = 1 << 28
SEGMENT_BYTES_MIN = 4096
# Sealed segments whose buffers stay: read cache, and a last chance for their messages to be consumed unwritten.
SEALED_BUFFERS_MAX = 1
# An open segment of which nothing is written and nothing is needed starts anew here, while its pages are in the cache.
RENEW_BYTES = 256 << 10
# Of so many messages read together, some may be read alone.
SCATTERED_MIN = 16
# Indexes that wait for a sync; beyond this, recovery scans.
INDEX_BYTES_MAX = 1 << 20
# What was read is handed on as it is from this size on, where the rest lies elsewhere: joined it would be copied again.
PIECE_BYTES_MIN = 128 << 10
# Written segments that wait for somebody's sync.
UNSYNCED_MAX = 64


class SegmentStore(Segments):
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
        super().__init__(
            directory, OsFiles() if files is None else files, segment_bytes, sync, spare_segments
        )
        self._batch = Batch()
        self.settled_held_back = False  # by a merge, when the last sync of it began

    # -- start and stop -------------------------------------------------------------------------------

    def recover(
        self,
        queue_ids: Collection[int],
        timed: Collection[int] = (),
        progress: Progress | None = None,
    ) -> dict[int, Arrival]:
        """Once, first: the live entries of each of `queue_ids` that has some, in publish order. What belongs to no
        queue named here is dropped. After a clean stop flags are as `close` was told; else all carry REDELIVERED.
        """
        assert self._state == "new", "recover is called once"
        try:
            self._find_directory()
            if not self._has_directory:
                self._state = "open"
                return {}
            returned = returns.read(self._files, self.directory)
            found = recovery.recover(
                self._files,
                self.directory,
                self._reclaimer,
                queue_ids,
                timed,
                self.sync,
                progress,
                self._producers,
            )
        except OSError as error:
            raise self._named(error) from error
        self._state = "open"
        self._next_number = found.next_number
        self._counters.damage = found.damage
        self._known_ids = array("I", sorted(queue_ids)) if found.segments else None
        for segment in found.segments:
            segment.recovered = True
            self._enlist(segment)
            if segment.acks_end and not found.clean:
                self._settled.written_before(segment)
            if segment.live == 0:
                self._retire(segment)
            else:
                self._candidates.look_at(segment)
        self._check_usable()
        self._returns.recover(
            returned, {arrival.queue_id: arrival.entries for arrival in found.arrivals}
        )
        return {arrival.queue_id: arrival for arrival in found.arrivals}

    def close(self, live: Mapping[int, array[int]] | None = None) -> None:
        """Everything to disk. `live`: the entries each queue still has, with their flags; without it the next recovery
        takes all for delivered before."""
        if self._state != "open":
            self._state = "closed"
            return
        assert self._job is None, "a sync is running"
        self._give_up_reclaim()
        try:
            if not self._failure and self._has_directory:
                self._write_all(live)
        except OSError as error:
            raise self._named(error) from error
        finally:
            self._state = "closed"
            self._release()

    def delete_all(self) -> None:
        """Remove the store's files, and the directory if nothing else is in it."""
        assert self._job is None and self._reclaim is None, "a job is running"
        self._state = "closed"
        self._release()
        if not self._has_directory and self._is_missing():
            return
        for name in self._files.list(self.directory):
            if name.removesuffix(".new") in (
                "state",
                returns.NAME,
                producers.NAME,
            ) or recovery.is_ours(name):
                self._files.remove(f"{self.directory}/{name}")
        if not self._files.list(self.directory):
            self._files.remove_directory(self.directory)

    def _write_all(self, live: Mapping[int, array[int]] | None) -> None:
        self._flush()
        self._settled.settle_forgotten()  # so that tools count what is needed
        self._settled.flush()
        for segment in [*self._in_memory, *([self._open] if self._open else [])]:
            if segment.flushed and segment.index is None and not segment.has_index:
                segment.index = segment.make_index()
        # Without syncs nobody keeps count of what is only in the page cache: a clean stop makes sure of all.
        unsynced = (
            list(self._unsynced.values())
            if self.sync
            else [each for each in self._distinct() if each.flushed]
        )
        for segment in unsynced:
            self._files.sync(self._handles.of(segment))
        if self._open is not None:
            self._producers.sealed(self._open)  # nothing is added to it any more
        with contextlib.suppress(DiskFull):  # the segments that it would speak of stay
            self._cover_all()
        for segment in self._distinct():
            if segment.flushed == segment.used:
                self._write_index_if_made(segment)
            if segment.acks_end:
                self._sync_acks(segment)
        self._returns.make_last(self._files, self.directory)
        self._files.sync_directory(self.directory)
        self._dispose_replaced()
        self._reclaimer.remove_doomed()
        if live is not None:
            placed = {queue_id: self._on_disk(entries) for queue_id, entries in live.items()}
            there = [segment.number for segment in self._distinct() if segment.flushed]
            recovery.write_state(self._files, self.directory, self._next_number, placed, there)

    def _sync_acks(self, segment: Segment) -> None:
        """While the store lives acks may be lost; a clean stop promises them."""
        handle = self._files.open(f"{self.directory}/{file_name('acks', segment.number)}")
        try:
            self._files.sync(handle)
        finally:
            self._files.close(handle)

    def _release(self) -> None:
        for segment in [*self._distinct(), *self._dead, *self._replaced]:
            if segment.handle is not None:
                self._files.close(segment.handle)
                segment.handle = None
            segment.take_buffer()
        self._segments.clear()
        self._candidates.clear()
        self._replaced.clear()
        self._in_memory.clear()
        self._open = None
        self._windows.release()
        self._reclaimer.release()

    # -- append ---------------------------------------------------------------------------------------

    def screen(
        self, records: bytes | bytearray | memoryview, rooms: Mapping[int, producers.Room]
    ) -> Screened:
        """What of a batch with records IN_SEQUENCE is to be appended next, or was to be: see `unscreen`."""
        if len(self._producers.uncovered) > producers.UNCOVERED_MAX:
            self._cover_now()  # before the table speaks of messages that are not appended yet
        return self._producers.screen(records, rooms)

    def unscreen(self) -> None:
        """The append of what was screened failed."""
        self._producers.table.undo()

    def forget_producers(self, heard_before: int) -> int:
        """Those last heard before that (ms since the epoch); how many."""
        return self._producers.sweep(heard_before)

    def append(
        self,
        records: bytes | bytearray | memoryview,
        indexes: bool = False,
        in_sequence: bool = False,
    ) -> list[Arrival]:
        """Take a batch of whole records; one Arrival per queue id in it. All of it or, with an error, nothing. (A
        memoryview is one of bytes.) `in_sequence`: it was screened."""
        if self._state != "open" or self._job is not None or self._failure:
            self._check_usable()
        batch = self._batch
        messages = batch.plan(records)
        if not messages:
            return []
        size = len(records)
        segment = self._open
        if segment is None or segment.buffer is None:
            return self._append_in_pieces(records, indexes, in_sequence)
        used = segment.used
        if (
            used > RENEW_BYTES
            and segment.live == 0
            and segment.flushed == 0
            and not segment.in_sequence
        ):
            segment = self._renew(segment)
            used = segment.used
        if size > segment.capacity - used - END_BYTES or segment.buffer is None:
            return self._append_in_pieces(records, indexes, in_sequence)
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

    def _append_in_pieces(
        self, records: bytes | bytearray | memoryview, indexes: bool, in_sequence: bool
    ) -> list[Arrival]:
        """To more than one segment, or to another."""
        batch = self._batch
        view = memoryview(records).cast("B")
        pieces = self._make_room(view)
        try:
            placed = self._place(pieces, view, in_sequence)
        except Exception as error:
            raise self._fail(error) from error
        self._counters.appended_messages += batch.messages
        self._counters.appended_bytes += len(view)
        arrivals = batch.take(placed, indexes)
        batch.facts(records, arrivals)
        return arrivals

    def _place(
        self, pieces: list[Piece], view: memoryview, in_sequence: bool
    ) -> list[tuple[int, int, int, int]]:
        """(start, stop, segment, position) of each piece of the planned batch."""
        batch = self._batch
        placed = []
        for piece in pieces:
            segment = self._segment_for(piece)
            placed.append((piece.start, piece.stop, segment.number, segment.used))
            counts = batch.counts(piece.start, piece.stop)
            if in_sequence:
                self._producers.appended(segment)
            if piece.alone:
                self._write_alone(segment, view[piece.start : piece.stop])
            else:
                assert segment.buffer is not None
                batch.copy(
                    view,
                    piece.start,
                    piece.stop,
                    segment.buffer,
                    segment.used,
                    segment.salt,
                    segment.abstracts,
                )
            segment.add(piece.stop - piece.start, counts)
        return placed

    def _make_room(self, view: memoryview) -> list[Piece]:
        """Divide the batch among segments and have everything ready that could still fail."""
        room = self._open.room() if self._open else 0
        pieces = cut(self._batch, view, room, self.segment_bytes)
        if pieces[-1].fresh:
            try:
                self._make_directory()
                self._write_oldest()
                self._reclaimer.set_aside(sum(piece.fresh and not piece.alone for piece in pieces))
                allocate_alone(
                    self._reclaimer, [piece for piece in pieces if piece.fresh], self._next_number
                )
            except Exception as error:
                raise self._named(error) from error
        return pieces

    def _segment_for(self, piece: Piece) -> Segment:
        if piece.fresh:
            self._seal()
            number = self._take_number()
            if piece.segment is not None:
                assert piece.segment.number == number
                return piece.segment
            self._begin(self._reclaimer.new_segment(number))
        assert self._open is not None
        return self._open

    def _renew(self, segment: Segment) -> Segment:
        """A new number for the same file and memory: entries stay in publish order, pages stay warm."""
        del self._segments[segment.number]
        self._candidates.remove(segment)
        self._settled.drop(segment)
        renewed = Segment(
            self._take_number(),
            self._files.salt(),
            segment.capacity,
            segment.path,
            segment.handle,
            segment.take_buffer(),
        )
        self._begin(renewed)
        return renewed

    def _begin(self, segment: Segment) -> None:
        """It is the one that is written to."""
        self._open = segment
        self._enlist(segment)
        if self.sync:  # else indexes are made at a clean stop only, of the last ones
            segment.collect_abstracts()

    def _seal(self) -> None:
        segment, self._open = self._open, None
        if segment is None:
            return
        segment.sealed = True
        self._producers.sealed(segment)
        if segment.live == 0:
            self._retire(segment)
        else:
            self._in_memory.append(segment)

    def _write_oldest(self) -> None:
        """Write out and let go of buffers until one more segment may be sealed."""
        while len(self._in_memory) >= SEALED_BUFFERS_MAX:
            segment = self._in_memory[0]
            self._flush_segment(segment)
            if self.sync and self._index_bytes < INDEX_BYTES_MAX and not segment.has_index:
                segment.index = segment.make_index()
                self._index_bytes += len(segment.index or b"")
            self._reclaimer.take_back_buffer(segment)
            self._in_memory.pop(0)
            self._handles.keep(segment)
            self._candidates.look_at(segment)
            if segment.number not in self._unsynced and not self._in_job(segment):
                self._write_index_if_made(segment)
        while len(self._unsynced) > UNSYNCED_MAX:
            # Nobody asks for a sync, but neither files nor dirty pages may pile up without end.
            oldest = next(iter(self._unsynced.values()))
            if self.sync:
                self._sync_or_fail(self._handles.of(oldest))
            del self._unsynced[oldest.number]

    def _sync_or_fail(self, handle: int) -> None:
        """Sync. After one that failed, for want of room too, the next may succeed for nothing."""
        try:
            self._files.sync(handle)
        except Exception as error:
            raise self._fail(error) from error

    def _write_alone(self, segment: Segment, part: memoryview) -> None:
        """Straight to the file: a record of gigabytes must not be held a second time."""
        assert segment.handle is not None
        if segment.in_sequence:  # what is written says that all before it is stored
            for earlier in self._in_memory:
                self._flush_segment(earlier)
        salted = bytearray(part[:8])
        salted[4:8] = (int.from_bytes(part[4:8], "little") ^ segment.salt).to_bytes(4, "little")
        segment.chain = self._producers.chain_before(segment)
        head = encode_header(segment.number, segment.salt, segment.capacity, chain=segment.chain)
        self._files.write(segment.handle, head + salted, 0)
        self._files.write(segment.handle, part[8:], HEADER_BYTES + 8)
        segment.flushed = HEADER_BYTES + len(part)
        self._enlist(segment)
        self._producers.sealed(segment)
        self._unsynced[segment.number] = segment
        self._directory_changed = True
        self._counters.written_bytes += len(part)
        self._handles.keep(segment)

    # -- read and settle ------------------------------------------------------------------------------

    def read(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes, array[int]]:
        """Stored messages of entries[:n], back to back, and the body_bytes of each: as many as fit in `bytes_max`, but
        at least one. Not `whole`: it may end sooner, behind PIECE_BYTES_MIN, where it would have to be joined.
        After Corrupt close the store: the next recovery reads every record and leaves out what is bad."""
        if self._state != "open":
            raise Closed("the store is not open")
        runs = segment_runs(entries)
        if len(runs) == 1:
            ((number, start, stop),) = runs
            segment = self._segments[number]
            if segment.buffer is not None and segment.moves is None:
                return copy_out(
                    segment.buffer, 0, segment.used, entries, start, stop, bytes_max, True
                )
        try:
            return self._read(runs, entries, bytes_max, whole)
        except Corrupt:
            self._distrust()
            raise

    def _read(
        self, runs: list[tuple[int, int, int]], entries: array[int], bytes_max: int, whole: bool
    ) -> tuple[bytes, array[int]]:
        blobs: list[bytes] = []
        sizes: array[int] = array("I")
        if len(entries) >= SCATTERED_MIN and are_scattered(runs, entries):
            blobs, sizes, fits = self._read_strays(entries, bytes_max)
            if not fits or len(sizes) == len(entries):
                return b"".join(blobs), sizes
            bytes_max -= sum(map(len, blobs))
            entries = entries[len(sizes) :]
            runs = segment_runs(entries)
        for number, start, stop in runs:
            segment = self._segments[number]
            on_disk = segment.buffer is None and len(entries) >= SCATTERED_MIN
            scattered = on_disk and is_scattered(entries, start, stop)
            wanted = entries
            if segment.moves is not None:
                wanted, start, stop = segment.moves.find(entries, start, stop), 0, stop - start
            while start < stop:
                position = (wanted[start] & 0xFFFFFFFF) >> 4
                source, base, used = self._source(
                    segment, position, span(wanted, start, stop), scattered
                )
                blob, some = copy_out(source, base, used, wanted, start, stop, bytes_max, not blobs)
                if not some:
                    return b"".join(blobs), sizes
                if segment.buffer is None:
                    self._windows.took(len(blob))
                if not blobs and (
                    len(some) == len(entries) or (len(blob) >= PIECE_BYTES_MIN and not whole)
                ):
                    return blob, some
                blobs.append(blob)
                sizes.extend(some)
                bytes_max -= len(blob)
                start += len(some)
        return b"".join(blobs), sizes

    def _read_strays(
        self, entries: array[int], bytes_max: int
    ) -> tuple[list[bytes], array[int], bool]:
        """Messages here and there, up to the first that is in memory or cannot be read alone: their bytes, the
        body_bytes of each, and whether there is room for more."""
        blobs: list[bytes] = []
        sizes: array[int] = array("I")
        fits = True
        while fits and len(sizes) < len(entries):
            places: list[Place] = []
            at = len(sizes)
            for i, entry in enumerate(
                entries[at : at + self._windows.strays_at_once(bytes_max)], at
            ):
                segment = self._segments[entry >> 32]
                if segment.buffer is not None:
                    break
                if segment.moves is not None:
                    (entry,) = segment.moves.find(entries, i, i + 1)
                places.append((segment, self._handles.of(segment), (entry & 0xFFFFFFFF) >> 4))
            blob, some, fits = self._windows.strays(places, bytes_max, first=not blobs)
            if not some:
                break
            blobs.append(blob)
            sizes.extend(some)
            bytes_max -= len(blob)
        return blobs, sizes, fits

    def _source(
        self, segment: Segment, position: int, ahead: int, scattered: bool
    ) -> tuple[bytearray, int, int]:
        """Bytes that hold the whole message at `position`, the position they begin at, how many. The last that is
        asked for begins so many behind it."""
        if segment.buffer is not None:
            return segment.buffer, 0, segment.used
        if scattered:
            return self._windows.find_stray(segment, self._handles.of(segment), position)
        window = self._windows.find(segment, self._handles.of(segment), position, ahead)
        return window.data, window.start, window.used

    def look(
        self, entries: array[int], bytes_max: int, whole: bool = True
    ) -> tuple[bytes | memoryview, array[int]]:
        """As `read`, but large messages may be a view of the write buffer they lie in, good until the next append."""
        segment = self._segments.get(only_segment(entries))
        if (
            segment is not None
            and segment.buffer is not None
            and segment.moves is None
            and self._state == "open"
        ):
            return look_at(segment.buffer, segment.used, entries, 0, len(entries), bytes_max)
        return self.read(entries, bytes_max, whole)

    def settle(self, queue_id: int, entries: array[int], durable: bool) -> None:
        """The queue needs these no more. `durable`: a recovery should know it too; written with the next flush."""
        if self._state != "open":
            raise Closed("the store is not open")
        if self._returns.times:
            self._returns.forget(queue_id, entries)
        for number, start, stop in segment_runs(entries):
            segment = self._segments[number]
            live = segment.live = segment.live - stop + start
            assert live >= 0, "settled twice"
            if live or segment.merging or (durable and segment is self._open):
                self._remember(segment, queue_id, entries, start, stop, durable)
            else:
                self._let_go(segment)
        if self._settled.settled_bytes > SETTLED_BYTES_MAX and not self._failure:
            self._quietly(self._settled.flush, ACKS_FILES_AT_ONCE)

    def _let_go(self, segment: Segment) -> None:
        if segment is not self._open:
            self._retire(segment)
            return
        segment.dead_until = segment.used
        self._settled.drop_forgotten(segment)

    def _remember(
        self,
        segment: Segment,
        queue_id: int,
        entries: array[int],
        start: int,
        stop: int,
        durable: bool,
    ) -> None:
        """What is settled, while others of the segment are needed: recovery should know it, or only merging."""
        if segment.moves is not None:
            entries, start, stop = segment.moves.find(entries, start, stop), 0, stop - start
        pairs = settled_pairs(queue_id, entries, start, stop)
        if durable:
            self._settled.note(segment, pairs)
        else:
            self._settled.note_forgotten(segment, pairs)
        if segment.sealed and segment.live * 2 <= segment.references:
            self._look_at(segment)

    def drop_queue(self, queue_id: int, entries: array[int]) -> None:
        """The queue is gone with all it had. Recovery will not be asked for it again, so nothing is remembered."""
        self.settle(queue_id, entries, False)
        self._producers.forget_queue(queue_id)

    def count_returns(self, queue_id: int, entries: array[int]) -> list[int]:
        """These came back to the queue once more: how often now. Remembered until they are settled, also by a recovery;
        written with the next flush."""
        return self._returns.count(queue_id, entries)

    def times_returned(self, queue_id: int, entry: int) -> int:
        return self._returns.of(queue_id, entry)

    # -- flush and sync -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand to the operating system what is only in this process's memory."""
        self._check_usable()
        try:
            self._flush()
        except Exception as error:
            raise self._named(error) from error

    def _flush_some(self) -> None:
        """All messages, and as many acks as take no time worth mentioning."""
        try:
            self._flush_segments()
            self._settled.flush(ACKS_FILES_AT_ONCE)
        except Exception as error:
            raise self._named(error) from error

    def begin_sync(self) -> SyncJob | None:
        """Flush; then the job makes it last. One at a time, ended by `finish_sync`. None: nothing to wait for."""
        self._check_usable()
        assert self._job is None, "a sync is running"
        self._flush_some()
        if not self.sync:
            self._cover_all()
        if not self.sync or not (
            self._unsynced or self._directory_changed or self._producers.uncovered
        ):
            return None
        held = [
            (segment, self._handles.of(segment), segment.flushed)
            for segment in self._unsynced.values()
        ]
        spares = self._reclaimer.unlasting()
        cover = self._producers.begin()
        with_directory = self._directory_changed or bool(spares) or cover is not None
        manifest = self._reclaimer.manifest.begin_sync() if spares else None
        self._job = SyncJob(
            files=self._files,
            directory=self.directory,
            segments=held,
            with_directory=with_directory,
            cover=cover,
            spares=spares,
            replaced=self._replaced,
            manifest=manifest,
        )
        self._unsynced = {}
        self._replaced = []
        self._directory_changed = False
        self._counters.syncs += 1
        return self._job

    def finish_sync(self, job: SyncJob) -> None:
        """After `run`, on the owner's thread. Raises StoreFailed if it did not succeed, DiskFull if what producers have
        sent could not be made to outlive its segments: nothing may be confirmed before the next sync."""
        assert job is self._job and job.done, "not this job, or it did not run"
        self._job = None
        self._check_synced(job)
        self._reclaimer.manifest.end_sync(job.manifest)
        for spare in job.spares:
            spare.lasting = True
        for segment, _, flushed in job.segments:
            if segment.number in self._segments:
                self._reclaimer.manifest.is_lasting(segment.number)
                if segment.sealed and flushed == segment.used:
                    self._quietly(self._write_index_if_made, segment)
        if job.cover is not None:
            self._covered(job.cover)
        dead = self._take_dead()
        for segment in job.replaced:
            self._quietly(self._reclaimer.dispose_merged, segment)
        for segment in dead:
            self._dispose(segment)
        self._check_covered(job.cover)

    def begin_settled_sync(self) -> SettledSync | None:
        """Write what is settled; then the job makes it last.

        None: there is nothing to make last. The job ends with `finish_settled_sync`; all else goes
        on meanwhile. What is settled of segments that are being merged, or in the hands of a sync
        of messages, is for the next one.
        """
        self._check_usable()
        if not self.sync:
            return None
        manifest = self._reclaimer.manifest
        try:
            self._settled.flush(ACKS_FILES_SYNCED_AT_ONCE)
            manifest.write()
        except Exception as error:
            raise self._named(error) from error
        self.settled_held_back = self._settled.holds_back()
        paths, with_directory = self._settled.take_unsynced(ACKS_FILES_SYNCED_AT_ONCE)
        named = manifest.take_unsure()
        if not paths and not with_directory and not named:
            return None
        return SettledSync(
            files=self._files,
            directory=self.directory,
            with_directory=with_directory or bool(named),
            named=named,
            paths=paths,
            more=len(paths) == ACKS_FILES_SYNCED_AT_ONCE,
        )

    def finish_settled_sync(self, job: SettledSync) -> None:
        """After `run`, on the owner's thread. Raises StoreFailed if the job did not succeed."""
        self._check_synced(job)
        for number in job.named:
            if number in self._segments and self._segments[number].number == number:
                self._reclaimer.manifest.is_lasting(number)

    def _take_dead(self) -> list[Segment]:
        """Those that no job has in hand, and that nothing else must tell of first."""
        dead = [segment for segment in self._dead if not segment.in_sequence]
        self._dead = [segment for segment in self._dead if segment.in_sequence]
        return dead

    def _covered(self, cover: producers.Cover) -> None:
        for segment in self._producers.end(cover):
            is_whole = segment.flushed == segment.used and not self._is_waited_for(segment)
            if segment.number in self._segments and is_whole:
                self._quietly(self._write_index_if_made, segment)

    def _cover_all(self) -> None:
        """At once, in this thread. All that was written is on stable storage, or nobody asks for that."""
        cover = self._producers.begin()
        if cover is not None:
            cover.run()
            self._covered(cover)
            for segment in self._take_dead():
                self._dispose(segment)
            self._check_covered(cover)

    def _check_covered(self, cover: producers.Cover | None) -> None:
        if cover is not None and cover.full:
            raise DiskFull(f"no room for {producers.NAME} in {self.directory}")

    def _cover_now(self) -> None:
        """Nobody asks for a sync, but files of segments that are not covered may not pile up without end."""
        if self._job is None:
            with contextlib.suppress(DiskFull):
                job = self.begin_sync()
                if job is not None:
                    job.run()
                    self.finish_sync(job)

    def _flush(self) -> None:
        self._flush_segments()
        self._settled.flush()

    def _flush_segments(self) -> None:
        for segment in self._in_memory:
            self._flush_segment(segment)
        if self._open is not None:
            self._flush_segment(self._open)
        self._returns.write(self._files, self.directory, self._on_disk)

    def _flush_segment(self, segment: Segment) -> None:
        if segment.live == 0 and not segment.in_sequence:
            return
        if segment.flushed != segment.used:
            before = segment.flushed
            if before == 0:
                segment.chain = self._producers.chain_before(segment)
                segment.unnamed = True
            segment.write_out(self._files)
            self._counters.written_bytes += segment.flushed - before
            self._unsynced[segment.number] = segment
        if segment.unnamed:
            # The name comes after the header: a file of that name is this segment or nothing.
            path = f"{self.directory}/{file_name('msgs', segment.number)}"
            self._files.rename(segment.path, path)
            segment.path = path
            segment.unnamed = False
            self._directory_changed = True

    def _write_index_if_made(self, segment: Segment) -> None:
        if segment.index is not None and not segment.in_sequence:
            self._write_index(segment)

    def _write_index(self, segment: Segment) -> None:
        assert segment.index is not None
        path = f"{self.directory}/{file_name('index', segment.number)}"
        try:
            segment.has_index = True
            recovery.write_file(self._files, path, segment.index)
        except OSError as error:
            if not is_full(error):
                raise
        self._forget_index(segment)
