# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Gives stored messages (drawn in contents.pyx) a header each with their offset: an int64 under a given name."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

from shardmq.broker.amqp.octets cimport get32, put, put32
from shardmq.shardd.content cimport HEADERS_BIT, Properties, properties_begin, properties_seek

cdef enum:
    HEADERS = 1 << 13

cdef bint has(const uint8_t *data, uint64_t size, const uint8_t *name, uint64_t name_size) noexcept nogil:
    cdef const uint8_t *end = data + size
    while data + name_size <= end:
        data = <const uint8_t*>memchr(data, name[0], end - data - name_size + 1)
        if data == NULL:
            return False
        if memcmp(data, name, name_size) == 0:
            return True
        data += 1
    return False

cdef uint64_t headers_at(const uint8_t *props, uint64_t size) noexcept nogil:
    """Return where the headers are, or would be; 0 if the properties are broken."""
    cdef Properties walk
    cdef int found
    if properties_begin(&walk, props, size) < 0:
        return 0
    found = properties_seek(&walk, HEADERS_BIT)
    return 0 if found < 0 else (walk.value if found else walk.next) - props


def numbered(const uint8_t[::1] blob not None, const uint8_t[::1] offsets not None, bytes name not None,
             bint cleaned=False):
    """Return the stored messages of `blob`, each with the header `name` that has its offset.

    `offsets` are u64, little endian, one for each message. Return None when a message may have a header of that name,
    which must be taken out before (`cleaned`: it was).
    """
    cdef uint64_t count = offsets.shape[0] // 8, total = blob.shape[0], at = 0, i, n, here, table, offset
    cdef uint64_t name_size = len(name), pair = 1 + name_size + 9
    cdef const uint8_t *data = &blob[0] if total else NULL
    cdef const uint8_t *key = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef const uint8_t *props
    cdef const uint8_t *body
    cdef uint32_t props_size, body_size, flags
    cdef uint8_t *p
    cdef uint8_t *start
    if not 0 < name_size < 256:
        raise ValueError("a header's name has 1 to 255 bytes")
    # Each message grows by flags, the size of a table and the entry at most.
    out = PyBytes_FromStringAndSize(NULL, total + count * (6 + pair))
    start = p = <uint8_t*>PyBytes_AS_STRING(out)
    for i in range(count):
        if at + 10 > total:
            raise ValueError("no whole stored message")
        n = 10 + <uint64_t>data[at + 8]
        if at + n > total:
            raise ValueError("no whole stored message")
        n += data[at + n - 1]
        memcpy(&body_size, data + at, 4)
        memcpy(&props_size, data + at + 4, 4)
        if at + n + props_size + body_size > total:
            raise ValueError("no whole stored message")
        props = data + at + n
        body = props + props_size
        flags = (<uint32_t>props[0] << 8 | props[1]) if props_size >= 2 else 0
        here = headers_at(props, props_size) if props_size >= 2 else 2
        if here == 0:
            raise ValueError("broken content properties")
        if not cleaned and flags & HEADERS and has(props + here, props_size - here, key, name_size):
            return None
        p = put(p, data + at, 4)
        p += 4  # the new size of the properties is put below
        p = put(p, data + at + 8, n - 8)
        p[0] = <uint8_t>((flags | HEADERS) >> 8)
        p[1] = <uint8_t>flags
        p += 2
        if props_size > 2:
            p = put(p, props + 2, here - 2)
        table = get32(props + here) if flags & HEADERS else 0
        p = put32(p, <uint32_t>(table + pair))
        if flags & HEADERS:
            p = put(p, props + here + 4, table)
            here += 4 + table
        p[0] = <uint8_t>name_size
        p = put(p + 1, key, name_size)
        p[0] = c"l"
        memcpy(&offset, &offsets[8 * i], 8)
        p = put32(put32(p + 1, <uint32_t>(offset >> 32)), <uint32_t>offset)
        if props_size > here:
            p = put(p, props + here, props_size - here)
        props_size += <uint32_t>(pair + (0 if flags & HEADERS else 4) + (2 if props_size < 2 else 0))
        p = put(p, body, body_size)
        memcpy(p - body_size - props_size - (n - 8) - 4, &props_size, 4)
        at += n + <uint64_t>(body - props) + body_size
    return out[:p - start]
