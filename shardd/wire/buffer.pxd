# cython: language_level=3
"""Bytes that grow, and the head of every message: shared by packer.pyx and codec.pyx."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy

cdef enum:
    KIND_PUBLISH = 1
    KIND_DELIVER = 2
    WIRE_VERSION = 1

cdef struct Bytes:
    uint8_t *data
    size_t used
    size_t room

cdef inline int reserve(Bytes *b, size_t more) noexcept nogil:
    cdef size_t room
    cdef uint8_t *data
    if b.used + more > b.room:
        room = b.room * 2 if b.room else 4096
        while room < b.used + more:
            room *= 2
        data = <uint8_t *> realloc(b.data, room)
        if data == NULL:
            return -1
        b.data = data
        b.room = room
    return 0

cdef inline void write_header(uint8_t *p, uint8_t kind, uint16_t peer, uint32_t incarnation, uint32_t epoch,
                       uint32_t shard) noexcept:
    p[0] = kind
    p[1] = WIRE_VERSION
    memcpy(p + 2, &peer, 2)
    memcpy(p + 4, &incarnation, 4)
    memcpy(p + 8, &epoch, 4)
    memcpy(p + 12, &shard, 4)
