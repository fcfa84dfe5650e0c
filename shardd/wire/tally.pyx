# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What a histogram is made of, where it counts each batch: values by classes of powers of two (histogram.py)."""

from libc.stdint cimport uint64_t

cdef enum:
    CLASSES = 65  # 0 and 1; then up to 2^k, k = 1 .. 64


cdef class Tally:
    """Of integers from 0 on, below 2^64."""

    cdef uint64_t[CLASSES] classes
    cdef readonly object sum

    def __cinit__(self):
        self.sum = 0

    def add(self, value):
        cdef uint64_t left = value, k = 0
        left -= left > 0
        while left:
            left >>= 1
            k += 1
        self.classes[k] += 1
        self.sum += value

    @property
    def counts(self):
        """Of each class, the first first."""
        return [self.classes[k] for k in range(CLASSES)]
