# cython: language_level=3
"""What the short way reads and changes of unacked.pyx."""

from libc.stdint cimport int64_t, uint64_t


cdef struct Span:  # neighbouring delivery tags of one consumer and one epoch of its shard
    uint64_t first_tag
    uint64_t last_tag
    int64_t epoch
    uint64_t first_number
    double at


cdef class Unacked:
    # The spans, by tag, are those from `begun` to before `ended`; a consumer is at the same place.
    cdef Span *spans
    cdef Py_ssize_t begun, ended, _room
    cdef list consumers
    cdef public Py_ssize_t count

    cdef Py_ssize_t find(self, uint64_t tag) noexcept
    cdef int put(self, uint64_t first_tag, uint64_t count, object consumer, int64_t epoch, uint64_t first_number,
                 double at) except -1
    cdef int drop_before(self, Py_ssize_t place) except -1
    cdef int cut(self, Py_ssize_t place, uint64_t first, uint64_t last) except -1
    cdef int _make_room(self) except -1
    cdef object _run(self, Py_ssize_t place, uint64_t first, uint64_t last)
