# cython: language_level=3
"""What the short way calls of confirms.pyx."""

from libc.stdint cimport uint32_t, uint64_t


cdef class Waiting:
    cdef readonly Confirms confirms
    cdef readonly uint64_t first, last
    cdef public int shards
    cdef public bint nacked

    cpdef confirmed(self)


cdef class Confirms:
    cdef public object client
    cdef public uint32_t channel
    cdef public uint64_t next_seq
    cdef list _waiting
    cdef Py_ssize_t _begun
    cdef public set refused
    cdef public bint closed, in_sequence
    cdef public object failure
    cdef list _due
    cdef bint _is_due
    cdef object _counts

    cpdef Waiting wait(self, uint64_t count, int shards)
    cpdef finished(self)
    cpdef bytes answers(self)
    cdef bytes one_by_one(self, Waiting waiting)
