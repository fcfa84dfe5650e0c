# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Find the delivery of a shard that a delivery tag of a channel stands for, until it is settled.

A shard numbers the deliveries of each consumer 1, 2, 3 ...; a channel numbers all its deliveries.
`Unacked` keeps both numbers as runs (neighbouring tags of one consumer), so that a burst costs one
entry and a cumulative ack a few comparisons.
"""

from collections import namedtuple

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

cdef enum:
    ROOM_MIN = 8
    # Places at the front that nothing uses any more are given up when there are so many.
    UNUSED_MAX = 256

# Deliveries of one consumer within this time may be one run, which has one age.
RUN_S_MAX = 1.0
cdef double C_RUN_S_MAX = RUN_S_MAX


class Run(namedtuple("Run", "first_tag last_tag consumer epoch first_number at")):
    """Neighbouring delivery tags of one consumer and one epoch of its shard.

    `at` is the loop time of the first of them; the others came at most RUN_S_MAX later.
    """

    __slots__ = ()

    def __class_getitem__(cls, _consumer):
        return cls


class UnknownTag(Exception):
    """Raised for an ack of a tag that is not outstanding."""

    def __init__(self, tag):
        super().__init__(tag)
        self.tag = tag


cdef class Unacked:
    """The deliveries of one channel that wait for their ack, by tag."""

    def __cinit__(self):
        self.consumers = []

    def __dealloc__(self):
        free(self.spans)

    def __class_getitem__(cls, _consumer):
        return cls

    def add(self, uint64_t first_tag, uint64_t count, consumer, int64_t epoch, uint64_t first_number, double at=0.0):
        """Add deliveries that came from a shard at loop time `at`."""
        self.put(first_tag, count, consumer, epoch, first_number, at)

    def has(self, uint64_t tag):
        """Return whether the tag is outstanding."""
        return self.find(tag) >= 0

    def take_through(self, uint64_t tag):
        """Take all deliveries up to `tag`, which must be outstanding; 0 means all there are."""
        cdef Py_ssize_t place, last
        cdef list taken
        if tag == 0:
            taken = list(self.runs())
            self.drop_before(self.ended)
            return taken
        last = self.find(tag)
        if last < 0:
            raise UnknownTag(tag)
        taken = [
            self._run(place, self.spans[place].first_tag, self.spans[place].last_tag)
            for place in range(self.begun, last)
        ]
        taken.append(self._run(last, self.spans[last].first_tag, tag))
        self.drop_before(last)
        self.cut(last, self.spans[last].first_tag, tag)
        return taken

    def take(self, uint64_t first, uint64_t last):
        """Take each tag of first..last. Raises UnknownTag behind the tags that were taken."""
        cdef Py_ssize_t place
        cdef uint64_t end
        while first <= last:
            place = self.find(first)
            if place < 0:
                raise UnknownTag(first)
            end = min(last, self.spans[place].last_tag)
            run = self._run(place, first, end)
            self.cut(place, first, end)
            yield run
            first = end + 1

    def runs(self):
        """Return all runs, by tag."""
        cdef Py_ssize_t place
        return iter([
            self._run(place, self.spans[place].first_tag, self.spans[place].last_tag)
            for place in range(self.begun, self.ended)
        ])

    def of(self, consumer):
        return (run for run in self.runs() if run.consumer is consumer)

    def put_back(self, run):
        """Put back what a rolled back transaction had taken."""
        cdef uint64_t first_tag = run.first_tag
        cdef Py_ssize_t place
        cdef Span *span
        self._make_room()
        place = self.begun
        while place < self.ended and self.spans[place].first_tag <= first_tag:
            place += 1
        span = self.spans + place
        memmove(span + 1, span, (self.ended - place) * sizeof(Span))
        span.first_tag, span.last_tag, span.epoch = first_tag, run.last_tag, run.epoch
        span.first_number, span.at = run.first_number, run.at
        self.consumers.insert(place, run.consumer)
        self.ended += 1
        self.count += span.last_tag - span.first_tag + 1

    cdef Py_ssize_t find(self, uint64_t tag) noexcept:
        """Return the place of the tag's span, -1 if the tag is not outstanding."""
        cdef Py_ssize_t low = self.begun, high = self.ended, middle
        # Most often it is one of the first.
        if low == high:
            return -1
        if tag <= self.spans[low].last_tag:
            return low if tag >= self.spans[low].first_tag else -1
        while low < high:
            middle = (low + high) // 2
            if self.spans[middle].first_tag <= tag:
                low = middle + 1
            else:
                high = middle
        low -= 1
        return low if low >= self.begun and self.spans[low].last_tag >= tag else -1

    cdef int put(self, uint64_t first_tag, uint64_t count, object consumer, int64_t epoch, uint64_t first_number,
                 double at) except -1:
        cdef Span *span
        self.count += count
        if self.begun != self.ended:
            span = self.spans + self.ended - 1
            if span.last_tag + 1 == first_tag and span.epoch == epoch \
                    and span.first_number + first_tag - span.first_tag == first_number \
                    and self.consumers[self.ended - 1] is consumer and at - span.at < C_RUN_S_MAX:
                span.last_tag = first_tag + count - 1
                return 0
        self._make_room()
        span = self.spans + self.ended
        span.first_tag, span.last_tag, span.epoch = first_tag, first_tag + count - 1, epoch
        span.first_number, span.at = first_number, at
        self.consumers.append(consumer)
        self.ended += 1
        return 0

    cdef int drop_before(self, Py_ssize_t place) except -1:
        """Forget the spans before this place."""
        cdef Py_ssize_t at
        for at in range(self.begun, place):
            self.count -= self.spans[at].last_tag - self.spans[at].first_tag + 1
            self.consumers[at] = None
        self.begun = place
        if self.begun == self.ended:
            self.consumers.clear()
            self.begun = self.ended = 0
        return 0

    cdef int cut(self, Py_ssize_t place, uint64_t first, uint64_t last) except -1:
        """Take tags first..last out of the span at this place, which has all of them."""
        cdef Span *span = self.spans + place
        cdef Span *behind
        self.count -= last - first + 1
        if span.first_tag == first and span.last_tag == last:
            if place == self.begun:
                self.consumers[place] = None
                self.begun += 1
                if self.begun == self.ended:
                    self.consumers.clear()
                    self.begun = self.ended = 0
                return 0
            memmove(span, span + 1, (self.ended - place - 1) * sizeof(Span))
            del self.consumers[place]
            self.ended -= 1
        elif span.first_tag == first:
            span.first_number += last + 1 - first
            span.first_tag = last + 1
        elif span.last_tag == last:
            span.last_tag = first - 1
        else:
            # The room may lie elsewhere afterwards, and the places may be others.
            place -= self.begun
            self._make_room()
            place += self.begun
            span = self.spans + place
            behind = span + 1
            memmove(behind, span, (self.ended - place) * sizeof(Span))
            self.consumers.insert(place, self.consumers[place])
            self.ended += 1
            span.last_tag = first - 1
            behind.first_number += last + 1 - behind.first_tag
            behind.first_tag = last + 1
        return 0

    cdef int _make_room(self) except -1:
        """Have room for one more span at the end."""
        cdef Span *grown
        cdef Py_ssize_t room
        if self.ended < self._room:
            return 0
        if self.begun >= UNUSED_MAX or (self.begun and self.begun * 2 >= self.ended):
            memmove(self.spans, self.spans + self.begun, (self.ended - self.begun) * sizeof(Span))
            del self.consumers[:self.begun]
            self.ended -= self.begun
            self.begun = 0
            return 0
        room = max(<Py_ssize_t> ROOM_MIN, 2 * self._room)
        grown = <Span *> realloc(self.spans, room * sizeof(Span))
        if grown == NULL:
            raise MemoryError()
        self.spans, self._room = grown, room
        return 0

    cdef object _run(self, Py_ssize_t place, uint64_t first, uint64_t last):
        cdef Span *span = self.spans + place
        return Run(first, last, self.consumers[place], span.epoch, span.first_number + first - span.first_tag, span.at)


def subsumed(list ranges not None, is_outstanding):
    """Drop cumulative settles that the next one includes.

    This holds for those of one kind at the beginning, as long as each goes further than the one
    before and its tag is outstanding: the last of them settles the same deliveries. A settle that
    is an error stays, and so does the one before it.
    """
    if len(ranges) < 2 or not ranges[0][3] or not is_outstanding(ranges[0][1]):
        return ranges
    cdef Py_ssize_t at = 0
    kind, tag, _, _ = ranges[0]
    for next_kind, next_tag, _, multiple in ranges[1:]:
        if not (multiple and next_kind == kind and next_tag > tag and is_outstanding(next_tag)):
            break
        tag = next_tag
        at += 1
    return ranges[at:] if at else ranges
