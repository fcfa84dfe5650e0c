# cython: language_level=3
"""Numbers and bytes in network order, and the row that describes a publish."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef struct Row:
    uint32_t line_off       # 0 u8 n, exchange, u8 m, key, u8 bits (1 mandatory, 2 immediate)
    uint16_t line_len       # 4
    uint16_t channel        # 6
    uint32_t props_off      # 8 flags word(s) and property list
    uint32_t props_len      # 12
    uint32_t body_off       # 16 header of the first body frame, 0: no body
    uint32_t body_frames    # 20
    uint64_t body_len       # 24
    uint32_t ttl_ms         # 32 0xffffffff: none
    uint8_t delivery_mode   # 36 0: none
    uint8_t priority        # 37 0xff: none
    uint8_t flags           # 38
    uint8_t zero            # 39
    uint64_t reserved       # 40

cdef inline uint32_t get16(const uint8_t *p) noexcept nogil:
    return (<uint32_t>p[0] << 8) | p[1]

cdef inline uint32_t get32(const uint8_t *p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]

cdef inline uint64_t get64(const uint8_t *p) noexcept nogil:
    return (<uint64_t>get32(p) << 32) | get32(p + 4)

cdef inline uint8_t *put16(uint8_t *p, uint32_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 8)
    p[1] = <uint8_t>value
    return p + 2

cdef inline uint8_t *put32(uint8_t *p, uint32_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 24)
    p[1] = <uint8_t>(value >> 16)
    p[2] = <uint8_t>(value >> 8)
    p[3] = <uint8_t>value
    return p + 4

cdef inline uint8_t *put64(uint8_t *p, uint64_t value) noexcept nogil:
    return put32(put32(p, <uint32_t>(value >> 32)), <uint32_t>value)

cdef inline uint8_t *put(uint8_t *p, const uint8_t *data, size_t size) noexcept nogil:
    memcpy(p, data, size)
    return p + size
