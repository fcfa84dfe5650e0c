# cython: language_level=3
"""Declare the numbers of a segment and of its store, for batches that go to the open segment."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.grown cimport Grown
from shardmq.shardd.store.format.record cimport Abstracts


cdef class StageState:
    cdef public object stage, failure, job


cdef class SegmentState:
    cdef public unsigned long long number
    cdef public unsigned int salt
    cdef public long long capacity, used, flushed, records, messages, references, live, dead_until
    cdef public bytearray buffer, settled, forgotten
    cdef public Abstracts abstracts
    cdef public bint in_sequence, merging, sealed, lends
    cdef public object moves


cdef class AppendCounters:
    cdef public unsigned long long appended_messages, appended_bytes


cdef class PendingState:
    cdef public dict with_settled, with_forgotten
    cdef public long long settled_bytes, forgotten_bytes


cdef class SegmentsState:
    cdef public StageState state
    cdef public SegmentState open
    cdef public AppendCounters counters
    cdef public PendingState settled
    cdef public dict returned


cdef class SegmentStoreState:
    cdef public SegmentsState _segments
    # What `plan` found in a batch: where each message begins, and how many of all there are.
    cdef Grown offsets
    cdef uint64_t planned_records, planned_messages, planned_bodies

    cdef bint is_open(self)
    cdef SegmentState room_for(self, size_t size)
    cdef bint plan(self, const uint8_t *records, size_t size) except -1
    cdef int append_bytes(self, const uint8_t *records, size_t size, SegmentState segment) except -1
    cdef void collect(self, const uint8_t *records, size_t size, SegmentState segment) noexcept
    cdef bint holds(self, uint64_t entry) noexcept
    cdef bint settle_here(
        self, uint32_t queue_id, const uint64_t *entries, Py_ssize_t count, bint durable
    ) except -1
