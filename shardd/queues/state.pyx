# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Hold the numbers and parts of queues that Python and the short way (short_way.pyx) both use.

Python decides; these classes only keep. `Counters`, `Window` and `Unacked` are whole. Each other
class is the memory of the Python class that derives from it: `Consumer` of `ConsumerState`, and so
on. An attribute that the short way reads costs it one load here, and some 60 instructions in a
Python object. To Python an attribute here costs a little more than a slot. The orders in which
messages wait are in order.pxi.
"""

from cpython.array cimport array, clone
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

cdef extern from "<math.h>" nogil:
    double exp2(double x)

cdef array ENTRIES = array("Q")

cdef double SHARE_HALF_LIFE_MS = 1000.0

cdef enum:
    # Settled items at the front are cut off when there are more than this many, and when they are
    # more than half of all items.
    CUT_MIN = 512
    PLACES_MIN = 8
    # Memory for more items than this is given back when no item is left.
    PLACES_KEPT = 1024

cdef class Counters:
    """The counters of a queue since the start of the process.

    `delivered_auto` and `got_auto` are the parts of `delivered` and `got` that need no ack.
    `got_empty` counts the gets that found no message. `repeated` counts publishes that a producer
    had sent before.
    """

    __slots__ = (
        "acked", "delivered", "delivered_auto", "got", "got_auto", "got_empty", "let_go",
        "published", "redelivered", "repeated",
    )

    def add(self, Counters other not None):
        for name in Counters.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


cdef class Window:
    """The bytes that may still be on their way to the client of one connection.

    `blocked` are the queues that wait for room, in the order in which they looked for it. `served`
    is the queue that got room last.
    """

    def __init__(self, long long room):
        self.full = room
        self.room = room
        self.consumers = 0
        self.blocked = {}
        self.served = None

    def unblocked(self):
        """Return the queues that waited for room, and let none of them wait any more.

        The queue that got room last comes last, together with the queues that looked before it.
        Otherwise one queue would take all the room again and again.
        """
        waiting = list(self.blocked)
        self.blocked.clear()
        if self.served in waiting[:len(waiting) - 1]:
            behind = waiting.index(self.served) + 1
            return waiting[behind:] + waiting[:behind]
        return waiting

    def forget(self, queue):
        self.blocked.pop(queue, None)
        if self.served is queue:
            self.served = None

    def free(self, long long count):
        # The window of a connection that came back starts full, while bytes that were sent before
        # are still credited. So the room is limited to the full window.
        self.room = min(self.full, self.room + count)


cdef class Unacked:
    """The deliveries that one consumer holds, by delivery number.

    Delivery numbers are consecutive from 1 for each consumer. Any range of them may be settled, in
    any order. Entries and sizes lie in two arrays, oldest first. A delivery that is settled in the
    middle leaves a zero (no entry is 0) until all deliveries before it are settled too.
    """

    def __cinit__(self):
        self.first = 1

    def __dealloc__(self):
        free(self.entries)
        free(self.sizes)

    @property
    def next_number(self):
        return self.first + self.stop

    @property
    def first_number(self):
        """Return the number before which all deliveries are settled."""
        return self.first + self.start

    @property
    def first_entry(self):
        """Return the oldest entry that the consumer holds, 0 if there is none."""
        return self.entries[self.start] if self.start < self.stop else 0

    @property
    def lowest(self):
        """Return the entry that was published first of those that the consumer holds, 0 if none."""
        cdef uint64_t found = 0, entry
        cdef Py_ssize_t i
        for i in range(self.start, self.stop):
            entry = self.entries[i]
            if entry and (not found or entry < found):
                found = entry
        return found

    def add(self, array entries not None, array sizes not None):
        """Add deliveries; return the delivery number of the first."""
        cdef uint64_t number = self.first + self.stop
        if len(sizes) != len(entries):
            raise ValueError(f"{len(sizes)} sizes for {len(entries)} entries")
        self.append(
            <const uint64_t *> entries.data.as_ulonglongs, <const uint32_t *> sizes.data.as_uints,
            len(entries)
        )
        return number

    cdef int append(
        self, const uint64_t *entries, const uint32_t *sizes, Py_ssize_t count
    ) except -1:
        if self.stop + count > self.places:
            self.resize(max(2 * self.places, self.stop + count, <Py_ssize_t> PLACES_MIN))
        memcpy(self.entries + self.stop, entries, count * sizeof(uint64_t))
        memcpy(self.sizes + self.stop, sizes, count * sizeof(uint32_t))
        self.stop += count
        self.count += count
        return 0

    cdef int resize(self, Py_ssize_t places) except -1:
        cdef uint64_t *entries = <uint64_t *> realloc(self.entries, places * sizeof(uint64_t))
        cdef uint32_t *sizes
        if entries == NULL:
            raise MemoryError()
        self.entries = entries
        sizes = <uint32_t *> realloc(self.sizes, places * sizeof(uint32_t))
        if sizes == NULL:
            raise MemoryError()
        self.sizes = sizes
        self.places = places
        return 0

    def skip(self, Py_ssize_t count):
        """Skip the numbers of deliveries that nobody will settle (no_ack); return the first."""
        cdef uint64_t number = self.first
        assert not self.stop
        self.first += count
        return number

    cdef bint range_of(
        self, uint64_t first, uint64_t last, Py_ssize_t *start, Py_ssize_t *stop
    ) noexcept:
        """Find the items first..last from `start` on; return whether there are any."""
        cdef uint64_t low = self.first + self.start, behind = self.first + self.stop
        if first < low:
            first = low
        if last >= behind:
            last = behind - 1
        if first > last or low == behind:
            return False
        start[0] = <Py_ssize_t> (first - self.first)
        stop[0] = <Py_ssize_t> (last - self.first) + 1
        return True

    def settle(self, first, last):
        """Settle the deliveries first..last that are still held.

        Return their entries and the sum of their sizes.
        """
        cdef Py_ssize_t start, stop, i, held = 0
        cdef uint64_t size
        cdef array taken
        if (
            last < 1
            or not self.range_of(max(first, 1), min(last, self.first + self.stop), &start, &stop)
        ):
            return clone(ENTRIES, 0, False), 0
        for i in range(start, stop):
            held += self.entries[i] != 0
        taken = clone(ENTRIES, held, False)
        held = 0
        for i in range(start, stop):
            if self.entries[i]:
                taken.data.as_ulonglongs[held] = self.entries[i]
                held += 1
        size = self.remove(start, stop)
        return taken, size

    cdef uint64_t remove(self, Py_ssize_t start, Py_ssize_t stop) noexcept:
        """Settle the items [start, stop), which lie at or behind `start`; return their bytes."""
        cdef Py_ssize_t i, held = 0
        cdef uint64_t size = 0
        for i in range(start, stop):
            held += self.entries[i] != 0
            size += self.sizes[i]
        self.count -= held
        if start != self.start:
            memset(self.entries + start, 0, (stop - start) * sizeof(uint64_t))
            memset(self.sizes + start, 0, (stop - start) * sizeof(uint32_t))
            self.holes += held
            return size
        self.holes -= stop - start - held
        while self.holes and not self.entries[stop]:
            stop += 1
            self.holes -= 1
        self.start = stop
        if stop == self.stop or (stop > CUT_MIN and stop * 2 > self.stop):
            self.cut()
        return size

    cdef void cut(self) noexcept:
        """Forget the settled items at the front."""
        cdef Py_ssize_t left = self.stop - self.start
        self.first += self.start
        if left:
            memmove(self.entries, self.entries + self.start, left * sizeof(uint64_t))
            memmove(self.sizes, self.sizes + self.start, left * sizeof(uint32_t))
        elif self.places > PLACES_KEPT:
            free(self.entries)
            free(self.sizes)
            self.entries = NULL
            self.sizes = NULL
            self.places = 0
        self.start = 0
        self.stop = left

    def held(self):
        """Return all entries, oldest first."""
        cdef array found = clone(ENTRIES, self.count, False)
        cdef Py_ssize_t i, at = 0
        for i in range(self.start, self.stop):
            if self.entries[i]:
                found.data.as_ulonglongs[at] = self.entries[i]
                at += 1
        return found

    def take_all(self):
        return self.settle(self.first, self.first + self.stop)

    def take_until(self, last):
        """Settle the entries that are not above `last`, in whatever order they were delivered.

        Return these entries and the sum of their sizes.
        """
        cdef Py_ssize_t i
        cdef list numbers = [
            self.first + i
            for i in range(self.start, self.stop)
            if 0 < self.entries[i] and self.entries[i] <= last
        ]
        taken, size = clone(ENTRIES, 0, False), 0
        for number in numbers:
            entries, entry_bytes = self.settle(number, number)
            taken += entries
            size += entry_bytes
        return taken, size


cdef class ConsumerState:
    """The state of a consumer."""


cdef class ConsumersState:
    """The state of the consumers of a queue.

    `only` is a list with the one consumer that may be given messages, None if several may or none.
    """


cdef class BacklogState:
    """The state of the messages of a queue.

    `kinds` has a bit for each kind of message that came since the queue was empty: TRANSIENT_KIND
    and LASTING_KIND of entry.py.
    """

    cdef bint is_plain(self) noexcept:
        """Return whether messages only arrive, are handed out in order, and are settled.

        `has_no_rule` is decided with the rules of the queue (rules.py). The other terms are facts
        that messages bring with them.
        """
        return (
            self.has_no_rule and self.marks == 0 and self.facts is None and self.resting is None
            and self.departures is None and self.held_back is None
        )


cdef class DispatchState:
    """The state of the dispatch of a queue.

    `is_stuck`: messages are ready, and no consumer has room for one. `share` is the share of time
    in which the queue was not stuck, at the time of the last change, `stuck_or_not_since`. It is a
    moving average with a half-life of SHARE_HALF_LIFE_MS, as RabbitMQ's consumer_utilisation is.
    """

    def __cinit__(self):
        self.share = 1.0

    cpdef note_stuck(self, bint is_stuck, long long now):
        """Note at `now`, in ms since the epoch, that the queue is or is not stuck any more."""
        self.share = self.share_at(now)
        self.stuck_or_not_since = now
        self.is_stuck = is_stuck

    def share_at(self, long long now):
        """Return the share as of `now`, from 0 to 1."""
        cdef double weight
        weight = exp2(-<double> max(0, now - self.stuck_or_not_since) / SHARE_HALF_LIFE_MS)
        return self.share * weight + (0.0 if self.is_stuck else 1.0 - weight)


cdef class QueueState:
    """The state of a queue."""


include "order.pxi"
