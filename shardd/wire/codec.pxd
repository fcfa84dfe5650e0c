# cython: language_level=3
"""Declare the writer of deliveries and the counts of batches, for compiled code."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from shardmq.shardd.wire.buffer cimport Bytes

cdef enum:
    TALLY_CLASSES = 65  # 0 and 1; then up to 2^k, for k from 1 to 64


cdef class DeliveryWriter:
    cdef Bytes out
    cdef list large  # (how much of `out` is before it, its messages), ...
    cdef size_t large_bytes
    cdef uint32_t sections
    cdef uint16_t peer
    cdef uint32_t incarnation, epoch, shard

    cdef int leave(self, object blob, size_t blob_bytes) except -1
    cdef int section(
        self, uint32_t connection, uint16_t channel, uint32_t consumer, uint64_t first_number,
        uint16_t flags, uint32_t count, const uint8_t *blob, size_t blob_bytes, uint32_t weight=*
    ) except -1
    cpdef object take_parts(self)
    cdef list parts(self)


cdef class Tally:
    cdef uint64_t[TALLY_CLASSES] classes
    cdef uint64_t low, high  # of the sum

    cdef void count(self, uint64_t value) noexcept
