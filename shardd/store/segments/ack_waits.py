"""Note which acks somebody waits for, until they are on stable storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

from shardmq.shardd.store.segments.segment import Segment
from shardmq.shardd.store.segments.segments import Segments


class AckWait:
    """A wait for the acks of some queues that the store has been told of until its first look.

    The wait remembers the segments of these acks, so acks that come later, also of other segments,
    do not prolong it. A segment is left out when its acks are on stable storage. A merged segment
    takes the place of its sources, as it has their acks.

    `is_over`: nothing is left to wait for. `is_refused`: the disk has no room for the acks.
    """

    def __init__(self, queue_ids: Collection[int]) -> None:
        self.queue_ids = queue_ids
        self.segments: dict[Segment, None] | None = None  # None: before the first look
        self.is_over = self.is_refused = False

    def look(
        self, segments: Segments, by_queue: Mapping[int, list[Segment]]
    ) -> dict[Segment, None]:
        """Return the segments whose acks are to be written or synced, as they are now.

        `by_queue` is what `Settled.by_queue` says now. Only the first look needs it.

        The caller begins a sync of acks, and no sync of messages runs. So acks of segments of which
        nothing is on disk came after the wait began: see `Segments.has_unwritten_acks`.
        """
        settled = segments.settled
        if self.segments is None:
            found = [by_queue.get(queue_id, ()) for queue_id in self.queue_ids]
            self.segments = dict.fromkeys(chain.from_iterable(found))
        else:
            now = [segments.successor(segment) for segment in self.segments]
            self.segments = dict.fromkeys(
                segment for segment in now if segment is not None and settled.are_left(segment)
            )
        return self.segments

    def written(self, has_room: bool) -> None:
        """Note that acks were written, and whether the disk had room for all."""
        if not has_room and any(each.settled and not each.merging for each in self.segments or ()):
            self.is_refused = True

    def synced(self, segments: Collection[Segment]) -> None:
        """Note that the acks of these segments, and names, are on stable storage."""
        assert self.segments is not None
        self.segments = {each: None for each in self.segments if each not in segments}
        self.is_over = not self.segments
