# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Messages that have waited long enough: told so in their header `x-delay`, and put together with their neighbours.

A stored message is drawn in shardd/wire/packer.pyx, properties in properties.py. As RabbitMQ's plugin does it, the
header stays with the number negated: so the message waits nowhere again, and whoever gets it sees how long it did. The
number keeps its width; one that cannot be negated so (unsigned and large, text, a fraction) becomes a 0 of its type.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from shardmq.broker.amqp.octets cimport get32

cdef enum:
    HEADERS = 13
    MODE = 12
    PRIORITY = 11
    EXPIRATION = 8
    TIMESTAMP = 6
    NO_PRIORITY = 255

cdef struct Look:  # all that decides where a message goes, and how
    const uint8_t *names
    uint32_t names_len
    const uint8_t *expiration  # its text, NULL without one
    uint32_t expiration_len
    uint8_t mode
    uint8_t priority
    bint alone  # has more keys


cdef int64_t value_bytes(const uint8_t *p, size_t left) noexcept nogil:
    """Of a value of a table, with its type before it; -1: broken."""
    cdef uint8_t kind
    cdef uint64_t size
    if not left:
        return -1
    kind = p[0]
    if kind == b't' or kind == b'b' or kind == b'B':
        size = 1
    elif kind == b's' or kind == b'u':
        size = 2
    elif kind == b'I' or kind == b'i' or kind == b'f':
        size = 4
    elif kind == b'l' or kind == b'L' or kind == b'd' or kind == b'T':
        size = 8
    elif kind == b'D':
        size = 5
    elif kind == b'V':
        size = 0
    elif kind == b'S' or kind == b'x' or kind == b'A' or kind == b'F':
        if left < 5:
            return -1
        size = 4 + <uint64_t> get32(p + 1)
    else:
        return -1
    return <int64_t> (1 + size) if size < left else -1


cdef void negate(uint8_t *value, size_t size) noexcept nogil:
    """`value`: with its type; `size`: of both."""
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
    if kind == b'D':  # its first byte says where the point is
        memset(number + 1, 0, width - 1)
        return
    if not signed and not unsigned:
        memset(number, 0, width)
        return
    for i in range(width):
        said = said << 8 | number[i]
    if said >> (8 * width - 1):  # negative, then it was not to wait; or too large for a sign
        said = said if signed else 0
    else:
        said = ~said + 1
        if unsigned:
            value[0] = b'b' if kind == b'B' else b's' if kind == b'u' else b'I'
    for i in range(width):
        number[width - 1 - i] = <uint8_t> (said >> (8 * i))


cdef int mend_headers(uint8_t *at, size_t left, Look *look) noexcept nogil:
    """A table's inside. -1: broken."""
    cdef size_t n
    cdef int64_t size
    while left:
        n = at[0]
        if 1 + n >= left:
            return -1
        size = value_bytes(at + 1 + n, left - 1 - n)
        if size < 0:
            return -1
        if n == 7 and memcmp(at + 1, b"x-delay", 7) == 0:
            negate(at + 1 + n, size)
        elif (n == 2 and memcmp(at + 1, b"CC", 2) == 0) or (n == 3 and memcmp(at + 1, b"BCC", 3) == 0) \
                or (n == 22 and memcmp(at + 1, b"x-dead-letter-exchange", 22) == 0):
            look.alone = True
        at += 1 + n + size
        left -= 1 + n + size
    return 0


cdef int look_at(uint8_t *props, size_t left, Look *look) noexcept nogil:
    """The properties of one message, its delay mended. -1: broken."""
    cdef uint32_t flags
    cdef uint64_t size
    cdef size_t at = 2
    cdef int bit
    if left < 2:
        return -1
    flags = <uint32_t> props[0] << 8 | props[1]
    for bit in range(15, 1, -1):
        if not flags >> bit & 1:
            continue
        if at >= left:
            return -1
        if bit == HEADERS:
            if left - at < 4:
                return -1
            size = 4 + <uint64_t> get32(props + at)
        elif bit == MODE or bit == PRIORITY:
            size = 1
        elif bit == TIMESTAMP:
            size = 8
        else:
            size = 1 + <uint64_t> props[at]
        if size > left - at:
            return -1
        if bit == HEADERS:
            if mend_headers(props + at + 4, size - 4, look) < 0:
                return -1
        elif bit == MODE:
            look.mode = props[at]
        elif bit == PRIORITY:
            look.priority = props[at] if props[at] != NO_PRIORITY else NO_PRIORITY - 1
        elif bit == EXPIRATION:
            look.expiration = props + at + 1
            look.expiration_len = <uint32_t> size - 1
        at += size
    return 0 if at == left else -1


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
    """`count` stored messages back to back, as they are to be published again, and runs of neighbours that are alike:
    (start, stop, messages, names, expiration or None, delivery mode or 0, priority or 255, whether it is alone).

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
