# cython: language_level=3
"""Declare bytes that grow, and the head of every message, for codec.pyx and packer.pxi."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport malloc, realloc
from libc.string cimport memcmp, memcpy

cdef enum:
    KIND_PUBLISH = 1
    KIND_DELIVER = 2
    WIRE_VERSION = 2
    # A message to several queues of a shard weighs so much more for each queue but the first, in
    # the window of publishes. With four times as much a fan-out to 200 queues is a third as fast,
    # for the shard has too few messages at hand for each queue; with less, others wait longer
    # beside it.
    REFERENCE_BYTES = 4
    # A lent body weighs this part of its bytes in the window of publishes: it is not copied, so a
    # window of a few large bodies would only make publishers wait for each of them.
    LENT_SHARE = 4

cdef inline size_t references_weight(uint32_t messages, uint16_t queues) noexcept nogil:
    """Return what messages to that many queues of a shard weigh beside their bytes.

    Both sides of the window count it, of each record.
    """
    return <size_t> messages * (queues - 1) * REFERENCE_BYTES if queues > 1 else 0

cdef struct Bytes:
    uint8_t *data  # NULL and some room: it was given away, see regain()
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

cdef inline int regain(Bytes *b) noexcept nogil:
    """Get memory of the size of the memory that was given away.

    As a rule it is the same memory, which was given back meanwhile and is still in the cache.
    """
    if b.data == NULL and b.room:
        b.data = <uint8_t *> malloc(b.room)
        if b.data == NULL:
            b.room = 0
            return -1
    return 0

cdef inline void write_header(
    uint8_t *p, uint8_t kind, uint16_t peer, uint32_t incarnation, uint32_t epoch, uint32_t shard
) noexcept:
    p[0] = kind
    p[1] = WIRE_VERSION
    memcpy(p + 2, &peer, 2)
    memcpy(p + 4, &incarnation, 4)
    memcpy(p + 8, &epoch, 4)
    memcpy(p + 12, &shard, 4)

cdef inline bint same(const uint8_t *one, const uint8_t *other, size_t size) noexcept nogil:
    """Whether these are the same bytes, for what is mostly short and the same."""
    cdef uint64_t a, b
    cdef size_t at = 0
    if size < 8:
        return memcmp(one, other, size) == 0
    while at + 8 < size:
        memcpy(&a, one + at, 8)
        memcpy(&b, other + at, 8)
        if a != b:
            return False
        at += 8
    memcpy(&a, one + size - 8, 8)
    memcpy(&b, other + size - 8, 8)
    return a == b
