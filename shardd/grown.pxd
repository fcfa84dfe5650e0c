# cython: language_level=3
"""Memory that grows by doubling, for output whose size is not known beforehand.

A struct of zeros is empty. Whoever has a Grown frees its `data`.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport realloc

cdef enum:
    GROWN_AT_FIRST = 256


cdef struct Grown:
    uint8_t *data
    size_t used
    size_t room


cdef inline int reserve(Grown *grown, size_t more) except -1 nogil:
    """Make room for so many bytes behind `used`."""
    cdef size_t room = grown.room * 2
    cdef uint8_t *moved
    if grown.used + more <= grown.room:
        return 0
    if room < grown.used + more:
        room = grown.used + more + GROWN_AT_FIRST
    moved = <uint8_t *> realloc(grown.data, room)
    if moved == NULL:
        with gil:
            raise MemoryError
    grown.data = moved
    grown.room = room
    return 0
