# cython: language_level=3
"""Declare the numbers and lengths in a record and its messages, for all that walk through them.

record.pyx draws both.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <string.h>
    static inline uint16_t shardd_u16(const unsigned char *p) {
        uint16_t v; memcpy(&v, p, 2); return v;
    }
    static inline uint32_t shardd_u32(const unsigned char *p) {
        uint32_t v; memcpy(&v, p, 4); return v;
    }
    static inline uint64_t shardd_u64(const unsigned char *p) {
        uint64_t v; memcpy(&v, p, 8); return v;
    }
    static inline void shardd_put16(unsigned char *p, uint16_t v) { memcpy(p, &v, 2); }
    static inline void shardd_put32(unsigned char *p, uint32_t v) { memcpy(p, &v, 4); }
    static inline void shardd_put64(unsigned char *p, uint64_t v) { memcpy(p, &v, 8); }
    """
    uint16_t u16 "shardd_u16"(const uint8_t *p) noexcept nogil
    uint32_t u32 "shardd_u32"(const uint8_t *p) noexcept nogil
    uint64_t u64 "shardd_u64"(const uint8_t *p) noexcept nogil
    void put16 "shardd_put16"(uint8_t *p, uint16_t v) noexcept nogil
    void put32 "shardd_put32"(uint8_t *p, uint32_t v) noexcept nogil
    void put64 "shardd_put64"(uint8_t *p, uint64_t v) noexcept nogil

cdef enum:
    RECORD_HEADER = 28
    ABSTRACT_HEADER = 20
    MESSAGE_BYTES_MIN = 10
    MARKS = 4 | 8  # flags of a record that its queues are told of (queues/entry.py)
    NO_TTL = 0xFFFFFFFF


cdef inline uint8_t kind_of(uint8_t flags) noexcept nogil:
    """Return the kind of a record's messages: 2 if they are PERSISTENT, else 1 (queues/entry.py).
    """
    return 1 + (flags & 1)


cdef inline uint64_t record_bytes(const uint8_t *record, uint64_t room) noexcept nogil:
    """Return the length of the record if its header can be true, else 0."""
    cdef uint64_t length, fixed, count
    if room < RECORD_HEADER:
        return 0
    length = u32(record)
    fixed = RECORD_HEADER + 4 * <uint64_t>u16(record + 24)
    count = u32(record + 20)
    if length & 7 or length > room or fixed == RECORD_HEADER or count == 0 or length < fixed:
        return 0
    if count * MESSAGE_BYTES_MIN > length - fixed:
        return 0
    return length


cdef inline uint64_t message_bytes(const uint8_t *message, uint64_t room) noexcept nogil:
    """Return the length of the stored message here, or 0 if it does not end within `room`."""
    cdef uint64_t n, total
    if room < MESSAGE_BYTES_MIN:
        return 0
    n = message[8]
    if 10 + n > room:
        return 0
    total = 10 + n + message[9 + n] + u32(message + 4) + <uint64_t>u32(message)
    return total if total <= room else 0


cdef inline int walk(
    const uint8_t *record, uint64_t length, uint64_t *offsets, uint64_t *body_bytes
) noexcept nogil:
    """Find the offsets of the messages within the record. Return 0, or -1 if they do not fill it.
    """
    cdef uint64_t at = RECORD_HEADER + 4 * <uint64_t>u16(record + 24)
    cdef uint64_t total, bodies = 0
    cdef uint32_t i, count = u32(record + 20)
    for i in range(count):
        total = message_bytes(record + at, length - at)
        if total == 0:
            return -1
        offsets[i] = at
        bodies += u32(record + at)
        at += total
    body_bytes[0] = bodies
    return 0 if length - at < 8 else -1


cdef inline uint64_t fact_of(const uint8_t *record) noexcept nogil:
    """Return priority << 56 | expires_at_ms.

    0 is the lowest priority and never expires. Without a priority the time has all 64 bits. It is
    so in the record of a message that waits at an exchange until then.
    """
    cdef uint64_t fact = 0
    cdef uint32_t ttl = u32(record + 16)
    if ttl != <uint32_t>NO_TTL:
        fact = u64(record + 8) + ttl
    if record[26] != 255:
        fact = fact & <uint64_t>0xFFFFFFFFFFFFFF | <uint64_t>record[26] << 56
    return fact


cdef inline uint8_t *write_abstract(
    uint8_t *out, const uint8_t *record, const uint8_t *base, uint64_t position,
    const uint64_t *offsets
) noexcept nogil:
    """Write the abstract of a record to `out`; return where the abstract ends.

    Its messages are at `offsets` from `base`, where the segment is at `position`.
    """
    cdef uint32_t i, count = u32(record + 20), queues = u16(record + 24)
    memcpy(out, record + 8, ABSTRACT_HEADER)
    out += ABSTRACT_HEADER
    for i in range(queues):
        put32(out, u32(record + RECORD_HEADER + 4 * i))
        out += 4
    for i in range(count):
        put32(out, <uint32_t>(position + offsets[i]))
        put32(out + 4, u32(base + offsets[i]))
        out += 8
    return out
