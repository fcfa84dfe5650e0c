# cython: language_level=3
"""What the short way calls of settling.pyx."""

from libc.stdint cimport int64_t, uint64_t

cpdef int64_t acks_together(int64_t prefetch, bint counts_keys)


cdef class Due:
    cdef public uint64_t shards
    cdef public bint acks_wait


cdef class Settles:
    cdef public bint due
    cdef public list ranges
    cdef uint64_t _shard
    cdef Due _due_all
    cdef dict _last_range  # index of the last range of acks, by consumer
    cdef dict _acks  # how many acks wait, by consumer
    cdef dict _allots  # allowed and mode, by allotment
    cdef bint _hurries  # some acks are no part of a group consumer's
    cdef int _waited  # in units of ACKS_WAIT_S

    cpdef fall_due(self)
    cpdef ack(self, consumer, uint64_t first, uint64_t last, int64_t together)
    cpdef list take(self)
