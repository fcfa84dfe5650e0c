# cython: language_level=3
"""What other compiled modules use of contents.pyx."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef bytes deliveries_of(
    const uint8_t *start, size_t size, uint32_t count, uint16_t channel, bytes consumer_tag,
    uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max
)
