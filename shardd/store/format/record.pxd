# cython: language_level=3
"""Declare the abstracts of a segment, for compiled code that puts records there."""

from libc.stdint cimport uint8_t, uint64_t

from shardmq.shardd.grown cimport Grown


cdef class Abstracts:
    cdef Grown out
    cdef uint64_t end  # of the records that are in it; 0: given up
    # The bytes that judge whether an index is worth it: a message counts for each of its queues.
    cdef uint64_t share
    cdef uint64_t bytes_max
    cdef uint64_t share_max

    cdef void added(self, size_t size, uint64_t end, uint64_t share) noexcept
    cdef void give_up(self) noexcept
    cdef uint8_t *room_for(self, size_t size) noexcept
