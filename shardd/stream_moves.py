"""Give the messages of a stream to its life on another shard, and take such messages in.

The controller (broker/controller/moving) takes chunks here and puts them there. They keep their
offsets and timestamps, so the stream that takes them in knows which it has: a request that comes
twice changes nothing. Until all are there, the stream is used at the old place alone.

This file knows no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from shardmq.shardd.peers import Peer
from shardmq.shardd.queues import StreamQueue
from shardmq.shardd.registry import Registry
from shardmq.shardd.syncs import Syncs
from shardmq.shardd.wire import messages as m

# The largest batch, apart from a chunk that is larger. The shard serves nobody while it makes one,
# or takes one in.
BATCH_BYTES: Final = 512 << 10
LOST: Final = "its old place has lost messages"


class StreamMoves:
    """The streams that leave this shard or come to it.

    Each handler answers its peer; `now` is in ms since the epoch. `no_room` is what a stream raises
    when its disk is full.
    """

    def __init__(
        self, registry: Registry, syncs: Syncs, no_room: tuple[type[Exception], ...]
    ) -> None:
        self._registry = registry
        self._streams = registry.streams
        self._syncs = syncs
        self._no_room = no_room

    def on_take_chunks(self, peer: Peer, take: m.TakeChunks, now: int) -> None:
        queue = self._streams.queues.get(take.queue)
        if queue is None:
            peer.tell(m.Refused(take.request, 404, "gone"))
            return
        log = queue.log.stream
        if take.offset > log.committed_offset:
            peer.tell(m.Refused(take.request, m.BEYOND, LOST))
            return
        found = log.copies.copied_from(take.offset, BATCH_BYTES)
        has_gap = any(stop > log.first_offset for _, stop in log.gaps)
        if has_gap or (not found.chunks and found.first < log.committed_offset):
            peer.tell(m.Refused(take.request, m.GAP, "messages of it are lost by damage"))
        else:
            peer.tell(
                m.Chunks(
                    take.request,
                    found.first,
                    found.behind,
                    found.chunks,
                    found.oldest,
                    found.newest_before,
                    found.end,
                    found.behind_bytes,
                    found.before,
                )
            )

    def on_put_chunks(self, peer: Peer, put: m.PutChunks, now: int) -> None:
        queue = self._streams.queues.get(put.queue)
        if queue is None or not queue.is_arriving:
            peer.tell(m.Refused(put.request, 404, "gone"))
            return
        log = queue.log.stream
        if not log.copies.goes_on(put.first, put.before):
            peer.tell(m.Refused(put.request, m.BEYOND, LOST))
            return
        is_there = put.behind <= log.next_offset

        def take() -> None:
            chunks = b"" if is_there else put.chunks
            log.copies.take(chunks, put.oldest, put.newest_before)
            if log.next_offset < put.behind:
                raise ValueError(f"no messages from {log.next_offset} to {put.behind}")

        if self._take_in(peer, put.request, queue, take):
            self._syncs.then(partial(peer.tell, m.Done(put.request)))

    def _take_in(
        self, peer: Peer, request: int, queue: StreamQueue, take: Callable[[], None]
    ) -> bool:
        """Let a stream take something in; return whether it did, or tell the peer why not."""
        self._streams.dirty[queue] = None
        self._registry.wake(queue)
        try:
            take()
        except self._no_room:
            self._refuse(peer, request)
        except ValueError as error:
            peer.tell(m.Refused(request, m.ELSEWHERE, str(error)))
        else:
            return True
        return False

    def on_take_places(self, peer: Peer, take: m.TakePlaces, now: int) -> None:
        queue = self._streams.queues.get(take.queue)
        if queue is None:
            peer.tell(m.Refused(take.request, 404, "gone"))
            return
        log = queue.log.stream
        positions, producers = dict(log.positions.offsets), log.producers.table.all_places()
        peer.tell(m.Places(take.request, positions, producers))

    def on_put_places(self, peer: Peer, put: m.PutPlaces, now: int) -> None:
        queue = self._streams.queues.get(put.queue)
        if queue is None or (put.instead_of is None and not queue.is_arriving):
            peer.tell(m.Refused(put.request, 404, "gone"))
        elif put.instead_of is None:
            take = partial(queue.log.stream.copies.take_places, put.positions, put.producers)
            if self._take_in(peer, put.request, queue, take):
                self._syncs.then(partial(self._tell_of_places, peer, put.request, queue))
        else:
            self._streams.dirty[queue] = None
            queue.change_positions(put.positions, put.instead_of)
            peer.tell(m.Done(put.request))

    def _tell_of_places(self, peer: Peer, request: int, queue: StreamQueue) -> None:
        if queue.log.stream.copies.lacks_room:
            self._refuse(peer, request)
        else:
            peer.tell(m.Done(request))

    def _refuse(self, peer: Peer, request: int) -> None:
        self._registry.set_alarm(m.LOW_ON_DISK)
        peer.tell(m.Refused(request, m.NO_ROOM, "no room"))
