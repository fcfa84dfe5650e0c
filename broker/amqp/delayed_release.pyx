# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Delayed messages that are due: their header `x-delay` says so, and neighbours that are alike are put together.

A stored message is drawn in shardd/wire/packer.pyx, properties in shardd/content.pxd. As in
RabbitMQ's plugin the header stays with its number negated. So the message waits nowhere again, and its consumer sees how
long it waited. The number keeps its width. One that cannot be negated so (unsigned and large, text, a fraction) becomes
a 0 of its type.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.content cimport (
    EXPIRATION_BIT, HEADERS_BIT, MODE_BIT, PRIORITY_BIT, Properties, Table, properties_begin, properties_next,
    table_begin, table_next,
)

cdef enum:
    NO_PRIORITY = 255

cdef struct Look:  # all that decides where a message goes and how it is stored
    const uint8_t *names
    uint32_t names_len
    const uint8_t *expiration  # a text, or NULL
    uint32_t expiration_len
    uint8_t mode
    uint8_t priority
    bint alone  # has more routing keys or a dead-letter exchange of its own


cdef void negate(uint8_t *value, size_t size) noexcept nogil:
    """Negate the number of a value in place. `value` begins with its type, and `size` counts both."""
    cdef uint8_t kind = value[0]
    cdef uint8_t *number = value + 1
    cdef uint64_t said = 0
    cdef size_t i, width = size - 1
    cdef bint signed = kind == b'b' or kind == b's' or kind == b'I' or kind == b'l' or kind == b'L'
    cdef bint unsigned = kind == b'B' or kind == b'u' or kind == b'i'
    if kind == b'S':
        for i in range(4, width):
            number[i] = b'0'
        return
    if kind == b'D':  # the first byte of a decimal says where its point is
        memset(number + 1, 0, width - 1)
        return
    if not signed and not unsigned:
        memset(number, 0, width)
        return
    for i in range(width):
        said = said << 8 | number[i]
    if said >> (8 * width - 1):  # negative, so the message was not to wait; or too large for a sign
        said = said if signed else 0
    else:
        said = ~said + 1
        if unsigned:
            value[0] = b'b' if kind == b'B' else b's' if kind == b'u' else b'I'
    for i in range(width):
        number[width - 1 - i] = <uint8_t> (said >> (8 * i))


cdef int mend_headers(const uint8_t *entries, size_t size, Look *look) noexcept nogil:
    """Mend the delay in a table. Return -1 if the table is broken."""
    cdef Table entry
    cdef int found
    table_begin(&entry, entries, size)
    found = table_next(&entry)
    while found > 0:
        if entry.name_size == 7 and memcmp(entry.name, b"x-delay", 7) == 0:
            negate(<uint8_t *> entry.value - 1, 1 + entry.size)
        elif (entry.name_size == 2 and memcmp(entry.name, b"CC", 2) == 0) \
                or (entry.name_size == 3 and memcmp(entry.name, b"BCC", 3) == 0) \
                or (entry.name_size == 22 and memcmp(entry.name, b"x-dead-letter-exchange", 22) == 0):
            look.alone = True
        found = table_next(&entry)
    return found


cdef int look_at(const uint8_t *props, size_t size, Look *look) noexcept nogil:
    """Mend the delay of one message and fill what decides about it. Return -1 if its properties are broken."""
    cdef Properties walk
    cdef int found
    if properties_begin(&walk, props, size) < 0:
        return -1
    found = properties_next(&walk)
    while found > 0:
        if walk.bit == HEADERS_BIT:
            if mend_headers(walk.value + 4, walk.size - 4, look) < 0:
                return -1
        elif walk.bit == MODE_BIT:
            look.mode = walk.value[0]
        elif walk.bit == PRIORITY_BIT:
            look.priority = walk.value[0] if walk.value[0] != NO_PRIORITY else NO_PRIORITY - 1
        elif walk.bit == EXPIRATION_BIT:
            look.expiration = walk.value + 1
            look.expiration_len = <uint32_t> walk.size - 1
        found = properties_next(&walk)
    return 0 if found == 0 and walk.next == walk.end else -1


cdef bint alike(const Look *a, const Look *b) noexcept nogil:
    return (
        not a.alone and not b.alone and a.names_len == b.names_len and a.mode == b.mode and a.priority == b.priority
        and (a.expiration == NULL) == (b.expiration == NULL) and a.expiration_len == b.expiration_len
        and memcmp(a.names, b.names, a.names_len) == 0
        and (a.expiration == NULL or memcmp(a.expiration, b.expiration, a.expiration_len) == 0)
    )


cdef tuple run_of(const Look *look, size_t start, size_t stop, uint32_t messages):
    return (
        start,
        stop,
        messages,
        PyBytes_FromStringAndSize(<const char *> look.names, look.names_len),
        PyBytes_FromStringAndSize(<const char *> look.expiration, look.expiration_len)
        if look.expiration != NULL else None,
        look.mode,
        look.priority,
        look.alone,
    )


def released(const uint8_t[::1] blob not None, uint32_t count):
    """Return `count` stored messages as they are to be published again, and runs of neighbours that are alike.

    A run is (start, stop, messages, names, expiration or None, delivery mode or 0, priority or 255, whether it is alone).
    A message with more keys (CC, BCC) or an exchange of its own for its dead letter is a run of its own.
    """
    cdef size_t total = blob.shape[0], at = 0, start = 0, names_len
    cdef uint64_t size
    cdef uint32_t body_len, props_len, i, run = 0
    cdef Look look, last
    cdef list runs = []
    out = PyBytes_FromStringAndSize(<const char *> &blob[0] if total else NULL, total)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    memset(&last, 0, sizeof(Look))
    for i in range(count):
        if total - at < 10:
            raise ValueError("no whole stored message")
        memcpy(&body_len, data + at, 4)
        memcpy(&props_len, data + at + 4, 4)
        names_len = 1 + data[at + 8]
        if total - at < 8 + names_len + 1:
            raise ValueError("no whole stored message")
        names_len += 1 + data[at + 8 + names_len]
        size = 8 + <uint64_t> names_len + props_len + body_len
        if size > total - at:
            raise ValueError("no whole stored message")
        memset(&look, 0, sizeof(Look))
        look.priority = NO_PRIORITY
        look.names = data + at + 8
        look.names_len = <uint32_t> names_len
        if look_at(data + at + 8 + names_len, props_len, &look) < 0:
            raise ValueError("broken properties")
        if run and not alike(&look, &last):
            runs.append(run_of(&last, start, at, run))
            start, run = at, 0
        last = look
        run += 1
        at += size
    if run:
        runs.append(run_of(&last, start, at, run))
    if at != total:
        raise ValueError("bytes behind the last stored message")
    return out, runs
