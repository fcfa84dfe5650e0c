"""Keep the streams of a shard: open, append, sync and delete them, and answer requests about them.

`queues.stream` says what a stream does with its messages. This file knows no socket, no clock and
no file.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import Allotment, Log, Queue, Reader, Store, StreamQueue, retention_of
from shardmq.shardd.wire import messages as m

# The most entries for one stream in a reply.
POSITIONS_TOLD_MAX = 1000
GAPS_TOLD_MAX = 100


class Judged(Protocol):
    @property
    def refused(self) -> list[int]: ...
    @property
    def known(self) -> list[int]: ...
    @property
    def altered(self) -> list[int]: ...


@dataclass(slots=True)
class Fates:
    """Ordinals of messages of a batch that were not simply stored.

    `refused` were refused by some queue. `known` were known to some queue, because their producer
    had sent them before. `altered` are those in `known` whose message differs from the earlier one.
    """

    refused: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    altered: set[int] = field(default_factory=set)

    def add(self, judged: Judged) -> None:
        self.refused.update(judged.refused)
        self.known.update(judged.known)
        self.altered.update(judged.altered)


class _Purge(NamedTuple):
    """A purge that waits for its answer.

    `messages` is the number of messages that it found.
    """

    peer: Peer
    request: int
    messages: int


class StreamHome(Protocol):
    """The place where the logs of streams lie."""

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> Log:
        """Return the log of a stream, recovered and ready for use."""

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        """Remove the logs of all other streams of the vhost."""


class Streams:
    def __init__(self, home: StreamHome) -> None:
        self.queues: dict[int, StreamQueue] = {}
        self.dirty: dict[StreamQueue, None] = {}  # streams with something that waits for a sync
        self._home = home
        self._syncing: list[StreamQueue] = []
        # The purges that wait for the end of a sync, one for each request that waits for its
        # answer.
        self._purges: dict[StreamQueue, list[_Purge]] = {}
        self._gone: list[StreamQueue] = []  # deleted streams whose files a sync may still use

    # -- what exists -------------------------------------------------------------------------------

    def put(self, spec: m.QueueSpec, store: Store, now: int) -> StreamQueue:
        """Return a new stream, or the existing one with its new arguments."""
        retention = retention_of(spec.arguments)
        queue = self.queues.get(spec.id)
        if queue is None:
            log = self._home.open_stream(spec.vhost, spec.id, retention.segment_bytes)
            queue = self.queues[spec.id] = StreamQueue(spec.id, store, log, retention, now)
        else:
            queue.change_retention(retention)
        queue.is_arriving = spec.arriving
        return queue

    def keep_only(self, vhost: str, store: Store) -> None:
        """Remove files of deleted streams of a vhost that stayed behind."""
        self._home.keep_only_streams(
            vhost, [id for id, queue in self.queues.items() if queue.store is store]
        )

    def dropped(self, queue: Queue) -> None:
        """Delete the files of a deleted stream as soon as no sync uses them."""
        if isinstance(queue, StreamQueue):
            del self.queues[queue.id]
            self.dirty.pop(queue, None)
            self._gone.append(queue)
            self.delete_gone()

    def delete_gone(self) -> None:
        waiting = [queue for queue in self._gone if queue in self._syncing]
        for queue in self._gone:
            if queue not in waiting:
                queue.log.stream.delete_all()
        self._gone = waiting

    def close(self) -> None:
        """Write everything to disk."""
        queues, self.queues = self.queues, {}
        self.dirty.clear()
        for queue in queues.values():
            queue.log.stream.close()

    def abandon(self) -> list[Exception]:
        """Close the logs after a failure; return the errors met.

        The recovery decides what the logs have.
        """
        troubles: list[Exception] = []
        for queue in self.queues.values():
            try:
                if queue not in self._syncing:
                    queue.log.stream.close()
            except Exception as error:  # the error of one log must not keep the others from closing
                troubles.append(error)
        return troubles

    # -- messages ----------------------------------------------------------------------------------

    def among(self, queues: Iterable[Queue]) -> list[StreamQueue]:
        return [queue for queue in queues if isinstance(queue, StreamQueue)]

    def append(
        self, queues: Sequence[StreamQueue], records: memoryview, alone: bool, in_sequence: bool
    ) -> Fates:
        """Give each stream the records that name it.

        `alone` means that there is one stream, and that all records name it.
        """
        fates = Fates()
        for queue in queues:
            self.dirty[queue] = None
            fates.add(queue.append(records, alone, in_sequence))
        return fates

    def forget_producers(self, heard_before: int) -> None:
        for queue in self.queues.values():
            queue.log.stream.forget_producers(heard_before)

    def settle(self, reader: Reader, kind: int, entries: array[int], size: int) -> None:
        queue = reader.queue
        assert isinstance(queue, StreamQueue)
        queue.settled(reader, kind == m.ACK, entries, size, kind in (m.REQUEUE, m.RETURN))
        if reader.name:
            self.dirty[queue] = None

    def attach(
        self,
        queue: StreamQueue,
        peer: Peer,
        attach: m.AttachReader,
        allotment: Allotment | None,
        now: int,
    ) -> Reader:
        """Return a new consumer of a stream.

        Raises ValueError when the stream has too many names already.
        """
        read = attach.read
        offset, name, wanted = queue.new_reader(
            read.start, read.value, read.name, read.filters, read.unfiltered, now
        )
        if name:
            queue.log.stream.positions.set(name, offset)
            self.dirty[queue] = None
        reader = Reader(
            queue,
            peer,
            attach.consumer,
            peer.window(attach.connection),
            connection=attach.connection,
            channel=attach.channel,
            tag=attach.tag,
            prefetch=0
            if allotment is not None and allotment.order is not None
            else attach.prefetch,
            allotment=allotment,
        )
        reader.begin(offset, name, wanted, read.seen_below)
        if isinstance(attach, m.AttachBounded):
            reader.bound(attach.stop, attach.mark)
        queue.attach(reader)
        return reader

    def on_store_offset(self, peer: Peer, place: m.StoreOffset, now: int) -> None:
        queue = self.queues.get(place.queue)
        if queue is None:
            peer.tell(m.Refused(place.request, 404, "gone"))
            return
        try:
            queue.place(place.name.encode(), place.offset)
        except ValueError as error:
            peer.tell(m.Refused(place.request, 406, str(error)))
        else:
            self.dirty[queue] = None
            peer.tell(m.Done(place.request))

    # -- what exchanges keep -----------------------------------------------------------------------

    def on_inspect_stream(self, peer: Peer, look: m.InspectStream, now: int) -> None:
        queue = self.queues.get(look.queue)
        if queue is None:
            peer.tell(m.Refused(look.request, 404, "gone"))
            return
        if look.watch:
            queue.watched.setdefault((look.watch, peer.number), [])
        log = queue.log.stream
        since, young = log.find(look.timestamp), log.find(look.young)
        peer.tell(m.StreamInspected(look.request, log.first_offset, log.next_offset, since, young))

    def on_pull(self, peer: Peer, pull: m.Pull, now: int) -> None:
        queue = self.queues.get(pull.queue)
        if queue is None:
            peer.tell(m.Refused(pull.request, 404, "gone"))
            return
        blob, count, after = queue.pull(
            pull.watch, peer.number, pull.offset, pull.stop, pull.bytes_max
        )
        peer.tell(m.Pulled(pull.request, count, blob[: 8 * count], blob[8 * count :], after))

    def on_unwatch(self, peer: Peer, what: m.Unwatch, now: int) -> None:
        queue = self.queues.get(what.queue)
        if queue is not None:
            queue.watched.pop((what.watch, peer.number), None)

    def peer_gone(self, number: int) -> None:
        """Forget the watches of a front door that is gone."""
        for queue in self.queues.values():
            for key in [key for key in queue.watched if key[1] == number]:
                del queue.watched[key]

    # -- stable storage ----------------------------------------------------------------------------

    def begin_sync(self, queue: StreamQueue) -> Any:
        """Return the sync job of a stream, or None if there is nothing to wait for.

        Raises what the log raises, and then the stream stays dirty.
        """
        job = queue.begin_sync()
        del self.dirty[queue]
        if job is not None:
            self._syncing.append(queue)
        return job

    def sync_ended(self) -> list[StreamQueue]:
        """End the syncs of streams; return the streams that have something to read now.

        The caller has called `finish_sync` of each stream before.
        """
        ended, self._syncing = self._syncing, []
        for queue in ended:
            self._end_purges(queue)
        self.delete_gone()
        return [queue for queue in ended if not queue.deleted]

    def purge(self, queue: StreamQueue, peer: Peer, request: int) -> None:
        """Remove all messages of a stream, then answer.

        The answer comes when the sync that uses the files of the stream ends, or now if there is
        none.
        """
        self._purges.setdefault(queue, []).append(_Purge(peer, request, queue.purge()))
        if queue not in self._syncing:
            self._end_purges(queue)

    def _end_purges(self, queue: StreamQueue) -> None:
        purges = self._purges.pop(queue, ())
        all_went = not purges or queue.deleted or queue.purge_now()
        stay = "no room on the disk to begin the stream anew: its messages stay"
        for peer, request, messages in purges:
            peer.tell(
                m.Done(request, messages) if all_went else m.Refused(request, m.NO_ROOM, stay)
            )

    # -- damage ------------------------------------------------------------------------------------

    def look_at(self, id: int, offset: int) -> None:
        """Read an offset where another process has met damage.

        The log reports damage that it finds, as it does for a consumer.
        """
        queue = self.queues.get(id)
        if (
            queue is not None
            and queue.log.stream.first_offset <= offset < queue.log.stream.committed_offset
        ):
            queue.log.batch(offset, 0, 1)

    # -- numbers -----------------------------------------------------------------------------------

    def damage(self) -> dict[str, int]:
        """Return the count of damaged places known in all logs.

        The names are those in the numbers of a store.
        """
        found = [queue.log.stream.stats() for queue in self.queues.values()]
        return (
            {name: sum(one.get(name, 0) for one in found) for name in ("damaged", "torn")}
            if found
            else {}
        )

    def gaps(self, ids: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        """Return the offsets lost by damage, for the damaged streams among these queues."""
        return {
            queue.id: queue.log.stream.gaps[:GAPS_TOLD_MAX]
            for queue in self._among_ids(ids)
            if queue.log.stream.gaps
        }

    def stats(self, ids: Iterable[int]) -> list[m.StreamStats]:
        """Return the numbers of the streams among these queues."""
        found = []
        for queue in self._among_ids(ids):
            log = queue.log.stream
            positions = {
                name.decode("utf-8", "replace"): offset
                for name, offset in log.positions.offsets.items()
            }
            found.append(
                m.StreamStats(
                    queue.id,
                    log.first_offset,
                    log.committed_offset,
                    log.stats()["segments"],
                    log.disk_bytes,
                    dict(list(positions.items())[:POSITIONS_TOLD_MAX]),
                )
            )
        return found

    def _among_ids(self, ids: Iterable[int]) -> list[StreamQueue]:
        return [queue for id in ids if (queue := self.queues.get(id)) is not None]

    def reader_stats(self, ids: Iterable[int]) -> list[m.ReaderStats]:
        found = []
        for queue in self._among_ids(ids):
            for reader in queue.consumers:
                assert isinstance(reader, Reader) and isinstance(reader.peer, Peer)
                found.append(
                    m.ReaderStats(
                        queue.id,
                        reader.peer.number,
                        reader.connection,
                        reader.channel,
                        reader.tag,
                        reader.position,
                    )
                )
        return found
