# cython: language_level=3
"""Declare the numbers and parts of queues, consumers and windows, for compiled code."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef class Counters:
    cdef public unsigned long long acked, delivered, delivered_auto, got, got_auto, got_empty
    cdef public unsigned long long let_go
    cdef public unsigned long long published, redelivered, repeated


cdef class Window:
    cdef public long long full, room, consumers
    cdef public dict blocked
    cdef public object served


cdef class Unacked:
    cdef uint64_t *entries
    cdef uint32_t *sizes
    cdef Py_ssize_t start  # all items before it are settled
    cdef Py_ssize_t stop  # behind the last item
    cdef Py_ssize_t places
    cdef uint64_t first  # the delivery number of entries[0]
    cdef Py_ssize_t holes  # how many zeros there are from `start` on
    cdef public Py_ssize_t count

    cdef int resize(self, Py_ssize_t places) except -1
    cdef int append(
        self, const uint64_t *entries, const uint32_t *sizes, Py_ssize_t count
    ) except -1
    cdef bint range_of(
        self, uint64_t first, uint64_t last, Py_ssize_t *start, Py_ssize_t *stop
    ) noexcept
    cdef uint64_t remove(self, Py_ssize_t start, Py_ssize_t stop) noexcept
    cdef void cut(self) noexcept


cdef class ConsumerState:
    cdef public object queue, peer, allotment
    cdef public Window window
    cdef public Unacked unacked
    cdef public long long number, connection, channel, prefetch, priority
    cdef public bint no_ack, detached


cdef class ConsumersState:
    cdef public list all, levels, only
    cdef public long long room
    cdef public bint has_allotments


cdef class BacklogState:
    cdef public long long ready_count, ready_bytes, unacked_count, unacked_bytes
    cdef public int marks, kinds
    cdef public list levels
    cdef public object id, store, facts, resting, departures, held_back
    cdef public Counters counters
    cdef public bint durable, hides, is_watched, has_no_rule

    cdef bint is_plain(self) noexcept


cdef class DispatchState:
    cdef public BacklogState backlog
    cdef public ConsumersState consumers
    cdef public dict holders
    cdef public object order, keys
    cdef public bint is_stuck
    cdef public long long stuck_or_not_since
    cdef public double share

    cpdef note_stuck(self, bint is_stuck, long long now)


cdef class QueueState:
    cdef public object id
    cdef public BacklogState backlog
    cdef public DispatchState dispatch
    cdef public bint deleted


cdef struct Chunk:
    Chunk *next
    uint8_t *data  # u64s, or `packed` bytes
    uint64_t last  # entry of a packed one
    uint32_t start
    uint32_t end
    uint32_t room
    uint32_t packed


cdef class Ready:
    cdef Chunk *head
    cdef Chunk *tail
    cdef Chunk *done  # the next search for chunks to pack begins here, NULL: at the head
    cdef Py_ssize_t count

    cdef void free_all(self) noexcept
    cdef int push_all(self, uint64_t *data, Py_ssize_t count) except -1
    cdef const uint64_t *plain_head(self, Py_ssize_t *count) noexcept
    cdef int push(self, uint64_t *data, Py_ssize_t left, uint32_t room) except -1
    cdef void pack_middle(self) noexcept
    cdef int drop_first(self, Py_ssize_t most) except -1
    cdef int pass_on(self, Py_ssize_t most) except -1
    cdef void drop_chunk(self) noexcept
    cdef Py_ssize_t count_before(self, uint64_t place) except -1
    cdef void put_in_front(self, Ready front) noexcept
