# cython: language_level=3
"""Short copies, and numbers in network order."""

from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy


cdef inline uint32_t be32(const uint8_t *p) noexcept nogil:
    return (<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | p[3]


cdef inline void copy_short(uint8_t *to, const uint8_t *data, size_t size) noexcept nogil:
    """Do the same as memcpy(), for copies that are mostly short: a call would cost more.

    The pieces of a copy overlap in the middle.
    """
    if size > 64:
        memcpy(to, data, size)
    elif size >= 32:
        memcpy(to, data, 32)
        memcpy(to + size - 32, data + size - 32, 32)
    elif size >= 16:
        memcpy(to, data, 16)
        memcpy(to + size - 16, data + size - 16, 16)
    elif size >= 8:
        memcpy(to, data, 8)
        memcpy(to + size - 8, data + size - 8, 8)
    elif size >= 4:
        memcpy(to, data, 4)
        memcpy(to + size - 4, data + size - 4, 4)
    elif size:
        to[0] = data[0]
        to[size // 2] = data[size // 2]
        to[size - 1] = data[size - 1]
