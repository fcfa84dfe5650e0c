# cython: language_level=3
"""The batch and the abstracts, for compiled code that puts records into a segment itself."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.grown cimport Grown
from shardmq.shardd.store.format.id_table cimport IdTable


cdef struct Slot:
    uint32_t queue_id
    bint has_facts
    uint8_t marks
    uint64_t count
    uint64_t body_bytes
    uint64_t *entries
    uint64_t *facts
    uint32_t *indexes


cdef struct Seen:  # a record of the batch
    uint64_t offset
    uint64_t message
    uint64_t ref
    uint32_t count
    uint32_t refs


cdef class Abstracts:
    cdef Grown out
    cdef uint64_t end  # of the records that are in it; 0: given up
    cdef uint64_t share  # what an index takes of them, as its worth is judged: a message counts for each of its queues
    cdef uint64_t bytes_max
    cdef uint64_t share_max

    cdef void added(self, size_t size, uint64_t end, uint64_t share) noexcept
    cdef void give_up(self) noexcept
    cdef uint8_t *room_for(self, size_t size) noexcept


cdef class Batch:
    cdef IdTable table
    cdef Grown slots, seen, refs, offsets
    cdef Py_ssize_t planned_bytes
    cdef readonly unsigned long long messages

    cdef int plan_bytes(self, const uint8_t *records, Py_ssize_t size, bint checked=*) except -1
    cdef int _plan(self, const uint8_t *records, uint64_t total, bint checked) except -1
    cdef int _count(self, const uint8_t *record, uint32_t count, uint64_t bodies) except -1
    cdef size_t _before(self, uint64_t offset) noexcept
    cpdef tuple counts(self, unsigned long long start, unsigned long long stop)
    cpdef copy(self, records, Py_ssize_t start, Py_ssize_t stop, bytearray target, Py_ssize_t position, uint32_t salt,
               Abstracts abstracts=*)
    cdef void copy_bytes(self, const uint8_t *records, Py_ssize_t start, Py_ssize_t stop, uint8_t *target,
                         Py_ssize_t position, uint32_t salt, Abstracts abstracts) noexcept
    cdef void _collect(self, const uint8_t *records, uint64_t start, uint64_t stop, uint64_t position,
                       Abstracts abstracts) noexcept
    cpdef facts(self, records, list arrivals)
    cdef list _arrivals(self, bint indexes)
    cdef void _index(self, Seen *seen, uint64_t base, bint indexes) noexcept
