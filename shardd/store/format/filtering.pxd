# cython: language_level=3
"""Which messages of a stream become rows."""

from libc.stdint cimport uint8_t, uint64_t

cdef enum:
    # Of a topic pattern: 255 bytes have no more words.
    PATTERN_WORDS = 129


cdef struct Word:
    int kind
    const uint8_t *at
    size_t size


cdef class Filter:
    cdef Word[PATTERN_WORDS] words
    cdef int count  # of words, -1: any routing key
    cdef bytes pattern, key, exchange  # what the words point into
    cdef Word wanted_key, wanted_exchange  # `at` NULL: any
    cdef uint64_t since, until

    cdef int _split(self, bytes pattern) except -1
    cdef bint in_time(self, uint64_t timestamp) noexcept nogil
    cdef bint passes(self, const uint8_t *message) noexcept nogil
    cdef bint _matches(self, const uint8_t *key, size_t size) noexcept nogil
    cdef void _take_word(self, uint8_t *reached, const uint8_t *at, size_t size) noexcept nogil
    cdef void _pass_hashes(self, uint8_t *reached) noexcept nogil
