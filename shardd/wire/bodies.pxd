# cython: language_level=3
"""Declare the memory of lent bodies: in which run some bytes lie, and holds of a run."""

from libc.stdint cimport uint8_t, uint32_t

cdef enum:
    GRANULE = 16 << 10  # runs are multiples of this
    NO_RUN = 0xffffffff


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
