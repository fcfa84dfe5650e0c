# cython: language_level=3
"""What takes messages in where they lie in a ring."""

from libc.stdint cimport uint8_t


cdef class Taker:
    cdef public int taken  # messages that were taken in where they lay

    cdef bint take_in(self, const uint8_t *message, size_t size) except -1
