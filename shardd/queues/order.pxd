# cython: language_level=3
"""Declare the list of ready entries, for compiled code that uses no array."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef struct Chunk:
    Chunk *next
    uint8_t *data  # u64s, or `packed` bytes
    uint64_t last  # entry of a packed one
    uint32_t start
    uint32_t end
    uint32_t room
    uint32_t packed


cdef class Ready:
    cdef Chunk *head
    cdef Chunk *tail
    cdef Chunk *done  # the next search for chunks to pack begins here, NULL: at the head
    cdef Py_ssize_t count

    cdef void free_all(self) noexcept
    cdef int push_all(self, uint64_t *data, Py_ssize_t count) except -1
    cdef const uint64_t *plain_head(self, Py_ssize_t *count) noexcept
    cdef int push(self, uint64_t *data, Py_ssize_t left, uint32_t room) except -1
    cdef void pack_middle(self) noexcept
    cdef int drop_first(self, Py_ssize_t most) except -1
    cdef int pass_on(self, Py_ssize_t most) except -1
    cdef void drop_chunk(self) noexcept
    cdef Py_ssize_t count_before(self, uint64_t place) except -1
    cdef void put_in_front(self, Ready front) noexcept
