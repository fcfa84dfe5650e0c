# cython: language_level=3
"""What other compiled modules use of frames.pyx."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.broker.amqp.octets cimport Row

cdef enum:
    STOPPED_INCOMPLETE = 0
    STOPPED_OTHER = 1
    STOPPED_SETTLE = 2
    STOPPED_FULL = 3


cdef uint32_t find_publishes(
    const uint8_t *base, size_t *at, size_t end, const uint8_t *states, size_t states_len,
    uint32_t frame_max, uint64_t message_max, Row **found, int *why, size_t *needed
) noexcept nogil


cdef list find_binds(
    const uint8_t *base, size_t *position, size_t end, const uint8_t *states, size_t states_len,
    uint32_t *number, bint *without_answer
)


cdef bint has_context(const uint8_t *p, size_t size) noexcept nogil


cdef class Sizes:
    cdef uint64_t counts[65]
    cdef uint64_t total

    cdef void count(self, const Row *row, size_t count) noexcept


cdef class Incoming:
    cdef public object state  # ConnectionState
    cdef public bytearray channels
    cdef public uint32_t received_frame_bytes_max
    cdef public uint64_t message_bytes_max
    cdef public object buffer, next, part
    cdef public size_t at
    cdef public bint answers_channels
    cdef public uint32_t channels_max, opened

    cdef bint has_unread(self)
    cdef size_t open_channels(self) noexcept
    cdef bytes answer_channel(self, const uint8_t *data, size_t size, size_t *taken)
