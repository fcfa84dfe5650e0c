# cython: language_level=3
"""The two ends of a ring, what takes messages in where they lie in it, and the rings of a lane."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef class Taker:
    cdef public int taken  # messages that were taken in where they lay

    cdef bint take_in(self, const uint8_t *message, size_t size) except -1


cdef class _End:
    cdef object _memory
    cdef uint8_t *_data
    cdef uint64_t *_tail
    cdef uint64_t *_head
    cdef uint32_t *_asleep
    cdef uint64_t _size


cdef class Writer(_End):
    cdef uint64_t _at
    cdef uint64_t _rung_at  # the bell was rung, if need be, for all entries before
    cdef uint64_t _largest
    cdef int _bell

    cpdef ring(self)
    cpdef bint put(self, bytes message) except -1
    cpdef bint put_parts(self, list parts) except -1
    cdef void _entry(self, uint64_t at, uint32_t length, uint32_t kind) noexcept
    cdef uint8_t *_room_for(self, uint64_t length) noexcept


cdef class Reader(_End):
    cdef uint64_t _at
    cdef bint _views
    cdef bint _holds  # the messages that were taken last still take up room in the ring
    cdef object _whole  # a view of the ring

    cpdef let_go(self)
    cpdef bint offer(self, Taker taker, int most) except -1
    cpdef bint sleep(self) except -1


cdef class LaneState:
    cdef public Writer writer
    cdef public Reader reader
    cdef public bint writes_ring, reads_ring
