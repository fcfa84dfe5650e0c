"""Keep open the files of the segments last used whose bytes are not in memory.

At most HANDLES_MAX files stay open, apart from those that something still waits for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from shardmq.shardd.store.files import Files
from shardmq.shardd.store.segment import Segment

HANDLES_MAX = 64


class Handles:
    def __init__(self, files: Files, is_busy: Callable[[Segment], bool]) -> None:
        self._files = files
        self._is_busy = is_busy  # tells whether the handle of a segment is still needed
        self._kept: OrderedDict[int, Segment] = OrderedDict()  # by segment number, last used last

    def of(self, segment: Segment) -> int:
        if segment.handle is None:
            segment.handle = self._files.open(segment.path)
            self.keep(segment)
        elif segment.number in self._kept:
            self._kept.move_to_end(segment.number)
        return segment.handle

    def keep(self, segment: Segment) -> None:
        """Remember the segment as the last used, and close the files that were not used for long.

        A segment that is busy keeps its handle.
        """
        self._kept[segment.number] = segment
        excess = len(self._kept) - HANDLES_MAX
        if excess <= 0:
            return
        idle = (one for one in self._kept.values() if one is not segment and not self._is_busy(one))
        for old in list(islice(idle, excess)):
            if old.handle is not None:
                self._files.close(old.handle)
                old.handle = None
                del self._kept[old.number]

    def drop(self, segment: Segment) -> None:
        self._kept.pop(segment.number, None)
