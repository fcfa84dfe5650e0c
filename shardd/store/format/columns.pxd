# cython: language_level=3
"""Declare where the arrays of a batch of rows lie, and to whom full batches go."""

from libc.stdint cimport uint8_t, uint64_t

from shardmq.shardd.grown cimport Grown

cdef enum:
    # All columns there are have 25 and 64.
    NODES_MAX = 32
    BUFFERS_MAX = 80
    REPEATED_MAX = 2


# Columns that grow. Zero-filled they are empty; the owner frees their memory.
cdef struct Text:
    Grown ends
    Grown data
    Grown valid
    uint64_t rows
    uint64_t nulls


cdef struct Number:
    Grown values
    Grown valid
    uint64_t rows
    uint64_t nulls


cdef struct Node:
    const uint64_t *rows
    const uint64_t *nulls  # NULL: none


cdef struct Buffer:
    Grown *memory  # NULL: without bytes
    const uint64_t *nulls  # NULL: always there; else bits, which are left out where that is 0


cdef struct Repeated:
    Text text
    const uint8_t *value
    size_t size
    uint64_t rows  # there is memory for


cdef class Arrays:
    cdef object owner
    cdef list values
    cdef const uint64_t *rows
    cdef readonly int nodes, buffers
    cdef Node[NODES_MAX] node
    cdef Buffer[BUFFERS_MAX] buffer
    cdef int repeats
    cdef Repeated[REPEATED_MAX] repeated

    cdef int add_node(self, const uint64_t *rows, const uint64_t *nulls, Grown *bits) except -1
    cdef int add_buffer(self, Grown *memory) except -1
    cdef int add_text(self, const uint64_t *rows, Text *text, bint nullable) except -1
    cdef int settle(self) except -1 nogil


cdef class Sink:
    cdef bint take(self) except -1 nogil
