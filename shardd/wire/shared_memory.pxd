# cython: language_level=3
"""Declare the ends and takers of rings, the rings of a lane, and the memory of lent bodies."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    GRANULE = 16 << 10  # runs are multiples of this
    NO_RUN = 0xffffffff


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


cdef class BodyMemory

cdef class Run:
    cdef BodyMemory _memory
    cdef readonly uint32_t number
    cdef size_t _bytes


cdef class BodyMemory:
    cdef uint8_t *data
    cdef size_t size
    cdef uint32_t granules
    cdef object _memory
    cdef readonly int fd
    cdef uint32_t *_first  # of each granule: the first one of its run
    cdef uint32_t *_length  # of the first granule of a run: its granules
    cdef uint32_t *_holds  # of the first granule of a run: holds, those of shards included
    cdef uint32_t *_lent  # the same, by shard: holds of that shard
    cdef int _shards
    cdef uint32_t _top  # granules from here on belong to no run
    cdef uint32_t _touched  # granules from here on were never used, or were given back
    cdef dict _free  # free runs by their granules, the one that was let go last at the end
    cdef uint32_t _freed, _wanted  # granules let go since so many found no room
    cdef uint32_t _quiet  # calls of trim() since a run was taken or let go
    cdef readonly size_t held_bytes  # of runs that somebody holds

    cdef uint32_t run_of(self, const uint8_t *place) noexcept nogil
    cdef void hold(self, uint32_t run) noexcept nogil
    cdef int let_go(self, uint32_t run, uint32_t count) except -1
    cdef uint32_t _found(self, uint32_t length)
    cdef void _make(self, uint32_t run, uint32_t length) noexcept
    cdef int _join_free(self) except -1
    cdef uint32_t _cut(self, uint32_t length)
    cdef Run _held(self, uint32_t run, size_t size)
    cdef Run _borrowed(self, int shard, uint32_t run, size_t offset, size_t size)
    cdef void lend(self, uint32_t run, int shard) noexcept nogil
