# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Make stored messages of publishes, put them into frames, and change their headers.

A stored message, little endian:
    u32 body_bytes | u32 props_bytes | u8 n, exchange[n] | u8 m, key[m] | props | body
The properties are drawn in shardd/content.pxd.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from shardmq.broker.amqp.octets cimport Row, get16, get32, put, put16, put32, put64
from shardmq.shardd.content cimport (
    EXPIRATION_BIT,
    HEADERS_BIT,
    MODE_BIT,
    PRIORITY_BIT,
    Properties,
    Table,
    properties_begin,
    properties_next,
    properties_seek,
    table_begin,
    table_next,
)

cdef enum:
    # The bytes between two bodies: the end of a frame, a deliver with three names of 255 bytes, and
    # the head of a header frame.
    HEAD_BYTES_MAX = 1024
    HEADERS = 1 << 13
    NO_PRIORITY = 255

cdef struct Stored:
    const uint8_t *names      # u8 n, exchange, u8 m, key: as a deliver has them
    size_t names_len
    const uint8_t *props
    uint32_t props_len
    const uint8_t *body
    uint32_t body_len
    size_t size               # bytes of the whole message

cdef int read_message(const uint8_t *p, size_t left, Stored *s) noexcept nogil:
    """Fill `s`. Return 0, or -1 when the bytes are no whole stored message."""
    return 0 if read_head(p, left, s) == 0 and s.size <= left else -1

cdef inline int read_head(const uint8_t *p, size_t left, Stored *s) noexcept nogil:
    """Fill `s`. Return 0, or -1 when the bytes are not a whole stored message up to its body."""
    cdef size_t n
    if left < 10:
        return -1
    memcpy(&s.body_len, p, 4)
    memcpy(&s.props_len, p + 4, 4)
    n = 8 + 1 + <size_t>p[8]
    if n >= left:
        return -1
    n += 1 + <size_t>p[n]
    if n + s.props_len > left:
        return -1
    s.names = p + 8
    s.names_len = n - 8
    s.props = p + n
    s.body = s.props + s.props_len
    s.size = n + s.props_len + s.body_len
    return 0

cdef inline size_t content_size(
    uint32_t props_len, uint64_t body_len, uint32_t part_max
) noexcept nogil:
    return 20 + props_len + body_len + (body_len + part_max - 1) // part_max * 8

cdef inline uint8_t *put_frame_head(
    uint8_t *p, uint8_t kind, uint32_t channel, uint32_t size
) noexcept nogil:
    p[0] = kind
    return put32(put16(p + 1, channel), size)

cdef uint8_t *put_content(uint8_t *p, uint32_t channel, const uint8_t *props, uint32_t props_len,
                          const uint8_t *body, uint64_t body_len, uint32_t part_max) noexcept nogil:
    """Put the header frame and the body frames; return where they end."""
    cdef uint32_t part
    p = put_frame_head(p, 2, channel, props_len + 12)
    p = put64(put32(p, 60 << 16), body_len)
    p = put(p, props, props_len)
    p[0] = 0xCE
    p += 1
    while body_len:
        part = <uint32_t>body_len if body_len < part_max else part_max
        p = put(put_frame_head(p, 3, channel, part), body, part)
        p[0] = 0xCE
        p += 1
        body += part
        body_len -= part
    return p

cdef inline uint32_t body_part_max(uint32_t frame_bytes_max) except 0:
    if frame_bytes_max <= 8:
        raise ValueError("a frame is larger than that")
    return frame_bytes_max - 8

cdef inline uint8_t *put_deliver(
    uint8_t *p, uint32_t channel, const uint8_t *ctag, size_t ctag_len, uint64_t tag,
    bint redelivered, const uint8_t *names, size_t names_len
) noexcept nogil:
    """Put the frame of a basic.deliver: 7 + 14 + 1 bytes, the consumer tag and the names."""
    p = put_frame_head(p, 1, channel, <uint32_t>(4 + 1 + ctag_len + 9 + names_len))
    p = put32(p, 60 << 16 | 60)
    p[0] = <uint8_t>ctag_len
    p = put64(put(p + 1, ctag, ctag_len), tag)
    p[0] = redelivered
    p = put(p + 1, names, names_len)
    p[0] = 0xCE
    return p + 1

def deliveries(
    const uint8_t[::1] blob not None, uint32_t count, uint16_t channel, bytes consumer_tag not None,
    uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max
):
    """Return basic.deliver with content for each of `count` stored messages.

    The tags count up from `first_tag`.
    """
    return deliveries_of(
        &blob[0] if blob.shape[0] else NULL, blob.shape[0], count, channel, consumer_tag, first_tag,
        redelivered, frame_bytes_max
    )

cdef bytes deliveries_of(
    const uint8_t *start, size_t size, uint32_t count, uint16_t channel, bytes consumer_tag,
    uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max
):
    """Do the same as deliveries(), of `size` bytes in memory."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max), i
    cdef size_t ctag_len = len(consumer_tag), total = 0, left = size
    cdef const uint8_t *at = start
    cdef const uint8_t *ctag = <const uint8_t *>PyBytes_AS_STRING(consumer_tag)
    cdef uint8_t *p
    cdef Stored s
    if ctag_len > 255:
        raise ValueError("a consumer tag has at most 255 bytes")
    for i in range(count):
        if read_message(at, left, &s) < 0:
            raise ValueError("no whole stored message")
        total += 8 + 4 + 1 + ctag_len + 9 + s.names_len + content_size(
            s.props_len, s.body_len, part_max
        )
        at += s.size
        left -= s.size
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    at = start
    left = size
    with nogil:
        for i in range(count):
            read_message(at, left, &s)
            p = put_deliver(
                p, channel, ctag, ctag_len, first_tag + i, redelivered, s.names, s.names_len
            )
            p = put_content(p, channel, s.props, s.props_len, s.body, s.body_len, part_max)
            at += s.size
            left -= s.size
    return out

def delivery_parts(blob not None, uint32_t count, uint16_t channel, bytes consumer_tag not None,
                   uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max):
    """Return what deliveries() returns, in parts.

    Bodies are views into `blob`, so large ones are not copied.
    """
    cdef const uint8_t[::1] bytes_of = blob
    cdef uint32_t part_max = body_part_max(frame_bytes_max), part, i
    cdef size_t ctag_len = len(consumer_tag), at = 0, left = bytes_of.shape[0], body, end
    cdef const uint8_t *start = &bytes_of[0] if left else NULL
    cdef uint8_t head[HEAD_BYTES_MAX]
    cdef uint8_t *p = head
    cdef Stored s
    cdef list found = []
    view = memoryview(blob)
    if ctag_len > 255:
        raise ValueError("a consumer tag has at most 255 bytes")
    for i in range(count):
        if read_message(start + at, left - at, &s) < 0:
            raise ValueError("no whole stored message")
        p = put_deliver(
            p, channel, <const uint8_t *>PyBytes_AS_STRING(consumer_tag), ctag_len, first_tag + i,
            redelivered, s.names, s.names_len
        )
        p = put_frame_head(p, 2, channel, s.props_len + 12)
        p = put64(put32(p, 60 << 16), s.body_len)
        body = at + s.size - s.body_len
        end = at + s.size
        found.append(PyBytes_FromStringAndSize(<char *>head, p - head) + s.props[:s.props_len])
        head[0] = 0xCE
        p = head + 1
        while body < end:
            part = <uint32_t>min(end - body, part_max)
            p = put_frame_head(p, 3, channel, part)
            found.append(PyBytes_FromStringAndSize(<char *>head, p - head))
            found.append(view[body:body + part])
            p = head + 1
            body += part
        at = end
    found.append(PyBytes_FromStringAndSize(<char *>head, p - head))
    return found

def framed(
    list messages not None, uint16_t channel, bytes consumer_tag not None, uint64_t first_tag,
    bint redelivered, uint32_t frame_bytes_max
):
    """Return what deliveries() returns, in parts, of messages whose bodies lie apart.

    `messages` are (stored message without its body, body). Parts of the bodies are views.
    """
    cdef uint32_t part_max = body_part_max(frame_bytes_max), part
    cdef size_t ctag_len = len(consumer_tag), at, size
    cdef const uint8_t[::1] bytes_of
    cdef uint8_t head[HEAD_BYTES_MAX]
    cdef uint8_t *p = head
    cdef Stored s
    cdef list found = []
    if ctag_len > 255:
        raise ValueError("a consumer tag has at most 255 bytes")
    for before, body in messages:
        bytes_of = before
        size = len(body)
        if (
            not bytes_of.shape[0]
            or read_head(&bytes_of[0], bytes_of.shape[0], &s) < 0
            or s.body_len != size
        ):
            raise ValueError("no whole stored message")
        p = put_deliver(
            p, channel, <const uint8_t *>PyBytes_AS_STRING(consumer_tag), ctag_len, first_tag,
            redelivered, s.names, s.names_len
        )
        p = put_frame_head(p, 2, channel, s.props_len + 12)
        p = put64(put32(p, 60 << 16), s.body_len)
        found.append(PyBytes_FromStringAndSize(<char *>head, p - head) + s.props[:s.props_len])
        head[0] = 0xCE
        p = head + 1
        at = 0
        while at < size:
            part = <uint32_t>min(size - at, part_max)
            p = put_frame_head(p, 3, channel, part)
            found.append(PyBytes_FromStringAndSize(<char *>head, p - head))
            found.append(body if part == size else body[at:at + part])
            p = head + 1
            at += part
        first_tag += 1
    found.append(PyBytes_FromStringAndSize(<char *>head, p - head))
    return found

cdef uint8_t *put_bodies(
    uint8_t *p, uint32_t channel, const uint8_t *frame, uint64_t body_len, uint32_t part_max
) noexcept nogil:
    """Put a body, which lies in frames of its publisher's size, into frames of another size."""
    cdef uint32_t left = get32(frame + 3) if body_len else 0
    cdef uint32_t part, piece
    frame += 7
    while body_len:
        part = <uint32_t>body_len if body_len < part_max else part_max
        body_len -= part
        p = put_frame_head(p, 3, channel, part)
        while part:
            while not left:
                left = get32(frame + 4)
                frame += 8
            piece = part if part < left else left
            p = put(p, frame, piece)
            frame += piece
            left -= piece
            part -= piece
        p[0] = 0xCE
        p += 1
    return p

def passed_on(
    const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, size_t first,
    size_t count, uint16_t channel, bytes consumer_tag not None, uint64_t first_tag,
    uint32_t frame_bytes_max
):
    """Return basic.deliver with content for `count` messages of a Publishes event.

    The first is that of row `first`.
    """
    cdef uint32_t part_max = body_part_max(frame_bytes_max)
    cdef size_t ctag_len = len(consumer_tag), total = 0, i
    cdef const uint8_t *ctag = <const uint8_t *>PyBytes_AS_STRING(consumer_tag)
    cdef const Row *r
    cdef uint8_t *p
    if first + count > <size_t>table.shape[0] // sizeof(Row):
        raise IndexError(first + count)
    if ctag_len > 255:
        raise ValueError("a consumer tag has at most 255 bytes")
    if not count:
        return b""
    r = <const Row *>&table[0] + first
    for i in range(count):
        total += (
            8 + 4 + 1 + ctag_len + 9 + r[i].line_len - 1
            + content_size(r[i].props_len, r[i].body_len, part_max)
        )
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    with nogil:
        for i in range(count):
            p = put_deliver(
                p, channel, ctag, ctag_len, first_tag + i, False, &buffer[0] + r[i].line_off,
                r[i].line_len - 1
            )
            p = put_frame_head(p, 2, channel, r[i].props_len + 12)
            p = put64(put32(p, 60 << 16), r[i].body_len)
            p = put(p, &buffer[0] + r[i].props_off, r[i].props_len)
            p[0] = 0xCE
            p = put_bodies(p + 1, channel, &buffer[0] + r[i].body_off, r[i].body_len, part_max)
    return out

def get_ok(
    const uint8_t[::1] message not None, uint16_t channel, uint64_t tag, bint redelivered,
    uint32_t remaining, uint32_t frame_bytes_max
):
    """Return basic.get-ok with the content of one stored message."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max)
    cdef uint8_t *p
    cdef Stored s
    if message.shape[0] == 0 or read_message(&message[0], message.shape[0], &s) < 0:
        raise ValueError("no whole stored message")
    out = PyBytes_FromStringAndSize(
        NULL, 8 + 4 + 9 + s.names_len + 4 + content_size(s.props_len, s.body_len, part_max)
    )
    p = <uint8_t *>PyBytes_AS_STRING(out)
    p = put_frame_head(p, 1, channel, <uint32_t>(4 + 9 + s.names_len + 4))
    p = put64(put32(p, 60 << 16 | 71), tag)
    p[0] = redelivered
    p = put32(put(p + 1, s.names, s.names_len), remaining)
    p[0] = 0xCE
    put_content(p + 1, channel, s.props, s.props_len, s.body, s.body_len, part_max)
    return out

def content(
    uint16_t channel, bytes method_payload not None, bytes props not None,
    const uint8_t[::1] body not None, uint32_t frame_bytes_max
):
    """Return a method frame with content, such as basic.return."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max)
    cdef size_t method_len = len(method_payload), props_len = len(props), body_len = body.shape[0]
    cdef uint8_t *p
    out = PyBytes_FromStringAndSize(
        NULL, 8 + method_len + content_size(<uint32_t>props_len, body_len, part_max)
    )
    p = put_frame_head(<uint8_t *>PyBytes_AS_STRING(out), 1, channel, <uint32_t>method_len)
    p = put(p, <const uint8_t *>PyBytes_AS_STRING(method_payload), method_len)
    p[0] = 0xCE
    put_content(p + 1, channel, <const uint8_t *>PyBytes_AS_STRING(props), <uint32_t>props_len,
                &body[0] if body_len else NULL, body_len, part_max)
    return out

def stored(const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, size_t index):
    """Return one message of a Publishes event as a stored message."""
    cdef Row r
    cdef const uint8_t *base
    cdef const uint8_t *frame
    cdef uint8_t *p
    cdef uint32_t i, part, body_len
    if (index + 1) * sizeof(Row) > <size_t>table.shape[0]:
        raise IndexError(index)
    memcpy(&r, &table[index * sizeof(Row)], sizeof(Row))
    base = &buffer[0]
    body_len = <uint32_t>r.body_len
    out = PyBytes_FromStringAndSize(NULL, 8 + r.line_len - 1 + r.props_len + r.body_len)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    memcpy(p, &body_len, 4)
    memcpy(p + 4, &r.props_len, 4)
    p = put(put(p + 8, base + r.line_off, r.line_len - 1), base + r.props_off, r.props_len)
    frame = base + r.body_off
    for i in range(r.body_frames):
        part = get32(frame + 3)
        p = put(p, frame + 7, part)
        frame += <size_t>part + 8
    return out

def read_stored(const uint8_t[::1] message not None):
    """Return (exchange, key, props, body) of a stored message."""
    cdef Stored s
    cdef size_t n
    if message.shape[0] == 0 or read_message(&message[0], message.shape[0], &s) < 0:
        raise ValueError("no whole stored message")
    n = s.names[0]
    return (
        PyBytes_FromStringAndSize(<char *>s.names + 1, n),
        PyBytes_FromStringAndSize(<char *>s.names + n + 2, s.names_len - n - 2),
        PyBytes_FromStringAndSize(<char *>s.props, s.props_len),
        PyBytes_FromStringAndSize(<char *>s.body, s.body_len),
    )

def split(const uint8_t[::1] blob not None, uint32_t count):
    """Return (names, props, body) of each of `count` stored messages back to back.

    Names are u8 n, exchange, u8 m, key.
    """
    cdef Stored s
    cdef size_t at = 0, left = blob.shape[0]
    cdef uint32_t i
    cdef list found = []
    for i in range(count):
        if read_message(&blob[0] + at, left - at, &s) < 0:
            raise ValueError("no whole stored message")
        found.append((
            PyBytes_FromStringAndSize(<char *>s.names, s.names_len),
            PyBytes_FromStringAndSize(<char *>s.props, s.props_len),
            PyBytes_FromStringAndSize(<char *>s.body, s.body_len),
        ))
        at += s.size
    if at != left:
        raise ValueError("bytes behind the last stored message")
    return found

def letters(const uint8_t[::1] blob not None, uint32_t count):
    """Return each stored message as (facts, flags, before, middle, after, body).

    `blob` has `count` messages back to back. `facts` decide what becomes of a dead letter: (names,
    headers without the length before them, expiration or None, delivery mode or 0, priority or
    255). The properties are flags, before, headers, middle, expiration, after.
    """
    cdef Stored s
    cdef size_t at = 0, left = blob.shape[0]
    cdef uint32_t i
    cdef Properties walk
    cdef const uint8_t *headers
    cdef const uint8_t *headers_end
    cdef const uint8_t *expiration
    cdef const uint8_t *expiration_end
    cdef const uint8_t *end
    cdef uint8_t mode, priority
    cdef int has_headers, has_expiration
    cdef list found = []
    for i in range(count):
        if at >= left or read_message(&blob[0] + at, left - at, &s) < 0:
            raise ValueError("no whole stored message")
        at += s.size
        if properties_begin(&walk, s.props, s.props_len) < 0:
            raise ValueError("broken properties")
        has_headers = properties_seek(&walk, HEADERS_BIT)
        headers, headers_end = walk.value if has_headers else walk.next, walk.next
        mode = walk.value[0] if properties_seek(&walk, MODE_BIT) > 0 else 0
        priority = 255
        if properties_seek(&walk, PRIORITY_BIT) > 0:
            priority = walk.value[0] if walk.value[0] != 0xff else 0xfe
        has_expiration = properties_seek(&walk, EXPIRATION_BIT)
        expiration, expiration_end = walk.value if has_expiration else walk.next, walk.next
        end = s.props + s.props_len
        if properties_seek(&walk, 0) < 0 or walk.next != end:  # also where one before it is broken
            raise ValueError("broken properties")
        facts = (
            PyBytes_FromStringAndSize(<char *>s.names, s.names_len),
            PyBytes_FromStringAndSize(<char *>headers + 4, headers_end - headers - 4)
            if has_headers
            else b"",
            PyBytes_FromStringAndSize(<char *>expiration + 1, expiration_end - expiration - 1)
            if has_expiration
            else None,
            mode,
            priority,
        )
        found.append((
            facts,
            get16(s.props),
            PyBytes_FromStringAndSize(<char *>s.props + 2, headers - s.props - 2),
            PyBytes_FromStringAndSize(<char *>headers_end, expiration - headers_end),
            PyBytes_FromStringAndSize(<char *>expiration_end, end - expiration_end),
            PyBytes_FromStringAndSize(<char *>s.body, s.body_len),
        ))
    if at != left:
        raise ValueError("bytes behind the last stored message")
    return found

def fields(const uint8_t[::1] props not None):
    """Return (bit of its flag, start, end) of each property that is there.

    Raise ValueError if the list is broken.
    """
    cdef const uint8_t *start = &props[0] if props.shape[0] else NULL
    cdef Properties walk
    cdef list found = []
    # No property has these bits.
    if properties_begin(&walk, start, props.shape[0]) < 0 or start[1] & 3:
        raise ValueError("broken properties")
    while properties_next(&walk) > 0:
        found.append((walk.bit, walk.value - start, walk.next - start))
    if walk.left or walk.next != walk.end:
        raise ValueError("broken properties")
    return found


# -- the header with the offset --------------------------------------------------------------------


cdef bint has(
    const uint8_t *data, uint64_t size, const uint8_t *name, uint64_t name_size
) noexcept nogil:
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


def numbered(
    const uint8_t[::1] blob not None, const uint8_t[::1] offsets not None, bytes name not None,
    bint cleaned=False
):
    """Return the stored messages of `blob`, each with the header `name` that has its offset.

    `offsets` are u64, little endian, one for each message. Return None when a message may have a
    header of that name; that header must be taken out first, which `cleaned` says was done.
    """
    cdef uint64_t count = offsets.shape[0] // 8, total = blob.shape[0], at = 0, i, here, table
    cdef uint64_t offset
    cdef uint64_t name_size = len(name), pair = 1 + name_size + 9
    cdef const uint8_t *data = &blob[0] if total else NULL
    cdef const uint8_t *key = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef uint32_t props_size, flags
    cdef uint8_t *p
    cdef uint8_t *start
    cdef Stored s
    if not 0 < name_size < 256:
        raise ValueError("a header's name has 1 to 255 bytes")
    # Each message grows by flags, the size of a table and the entry at most.
    out = PyBytes_FromStringAndSize(NULL, total + count * (6 + pair))
    start = p = <uint8_t*>PyBytes_AS_STRING(out)
    for i in range(count):
        if read_message(data + at, total - at, &s) < 0:
            raise ValueError("no whole stored message")
        props_size = s.props_len
        flags = (<uint32_t>s.props[0] << 8 | s.props[1]) if props_size >= 2 else 0
        here = headers_at(s.props, props_size) if props_size >= 2 else 2
        if here == 0:
            raise ValueError("broken content properties")
        if (
            not cleaned
            and flags & HEADERS
            and has(s.props + here, props_size - here, key, name_size)
        ):
            return None
        p = put(p, data + at, 4)
        p += 4  # the new size of the properties is put below
        p = put(p, s.names, s.names_len)
        p[0] = <uint8_t>((flags | HEADERS) >> 8)
        p[1] = <uint8_t>flags
        p += 2
        if props_size > 2:
            p = put(p, s.props + 2, here - 2)
        table = get32(s.props + here) if flags & HEADERS else 0
        p = put32(p, <uint32_t>(table + pair))
        if flags & HEADERS:
            p = put(p, s.props + here + 4, table)
            here += 4 + table
        p[0] = <uint8_t>name_size
        p = put(p + 1, key, name_size)
        p[0] = c"l"
        memcpy(&offset, &offsets[8 * i], 8)
        p = put32(put32(p + 1, <uint32_t>(offset >> 32)), <uint32_t>offset)
        if props_size > here:
            p = put(p, s.props + here, props_size - here)
        props_size += <uint32_t>(
            pair + (0 if flags & HEADERS else 4) + (2 if props_size < 2 else 0)
        )
        p = put(p, s.body, s.body_len)
        memcpy(p - s.body_len - props_size - s.names_len - 4, &props_size, 4)
        at += s.size
    return out[:p - start]


# -- delayed messages that are due -----------------------------------------------------------------
#
# As in RabbitMQ's plugin the header `x-delay` stays, with its number negated. So the message does
# not wait again, and its consumer sees how long it waited. The number keeps its width. A number
# that cannot be negated so (unsigned and large, text, a fraction) becomes a 0 of its type.


cdef struct Facts:  # all that decides where a message goes and how it is stored
    const uint8_t *names
    uint32_t names_len
    const uint8_t *expiration  # a text, or NULL
    uint32_t expiration_len
    uint8_t mode
    uint8_t priority
    bint alone  # has more routing keys or a dead-letter exchange of its own


cdef void negate(uint8_t *value, size_t size) noexcept nogil:
    """Negate the number of a value in place.

    `value` begins with its type, and `size` counts both.
    """
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


cdef int mend_headers(const uint8_t *entries, size_t size, Facts *facts) noexcept nogil:
    """Mend the delay in a table. Return -1 if the table is broken."""
    cdef Table entry
    cdef int found
    table_begin(&entry, entries, size)
    found = table_next(&entry)
    while found > 0:
        if entry.name_size == 7 and memcmp(entry.name, b"x-delay", 7) == 0:
            negate(<uint8_t *> entry.value - 1, 1 + entry.size)
        elif (
            (entry.name_size == 2 and memcmp(entry.name, b"CC", 2) == 0)
            or (entry.name_size == 3 and memcmp(entry.name, b"BCC", 3) == 0)
            or (entry.name_size == 22 and memcmp(entry.name, b"x-dead-letter-exchange", 22) == 0)
        ):
            facts.alone = True
        found = table_next(&entry)
    return found


cdef int mend(const uint8_t *props, size_t size, Facts *facts) noexcept nogil:
    """Mend the delay of one message, and fill in its facts.

    Return -1 if its properties are broken.
    """
    cdef Properties walk
    cdef int found
    if properties_begin(&walk, props, size) < 0:
        return -1
    found = properties_next(&walk)
    while found > 0:
        if walk.bit == HEADERS_BIT:
            if mend_headers(walk.value + 4, walk.size - 4, facts) < 0:
                return -1
        elif walk.bit == MODE_BIT:
            facts.mode = walk.value[0]
        elif walk.bit == PRIORITY_BIT:
            facts.priority = walk.value[0] if walk.value[0] != NO_PRIORITY else NO_PRIORITY - 1
        elif walk.bit == EXPIRATION_BIT:
            facts.expiration = walk.value + 1
            facts.expiration_len = <uint32_t> walk.size - 1
        found = properties_next(&walk)
    return 0 if found == 0 and walk.next == walk.end else -1


cdef bint alike(const Facts *a, const Facts *b) noexcept nogil:
    return (
        not a.alone
        and not b.alone
        and a.names_len == b.names_len
        and a.mode == b.mode
        and a.priority == b.priority
        and (a.expiration == NULL) == (b.expiration == NULL)
        and a.expiration_len == b.expiration_len
        and memcmp(a.names, b.names, a.names_len) == 0
        and (a.expiration == NULL or memcmp(a.expiration, b.expiration, a.expiration_len) == 0)
    )


cdef tuple run_of(const Facts *facts, size_t start, size_t stop, uint32_t messages):
    return (
        start,
        stop,
        messages,
        PyBytes_FromStringAndSize(<const char *> facts.names, facts.names_len),
        PyBytes_FromStringAndSize(<const char *> facts.expiration, facts.expiration_len)
        if facts.expiration != NULL else None,
        facts.mode,
        facts.priority,
        facts.alone,
    )


def released(const uint8_t[::1] blob not None, uint32_t count):
    """Return `count` stored messages as they are to be published again, and runs that are alike.

    A run is (start, stop, messages, names, expiration or None, delivery mode or 0, priority or 255,
    whether it is alone). A message with more keys (CC, BCC) or an exchange of its own for its dead
    letter is a run of its own.
    """
    cdef size_t total = blob.shape[0], at = 0, start = 0
    cdef uint32_t i, run = 0
    cdef Stored s
    cdef Facts facts, last
    cdef list runs = []
    out = PyBytes_FromStringAndSize(<const char *> &blob[0] if total else NULL, total)
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(out)
    memset(&last, 0, sizeof(Facts))
    for i in range(count):
        if read_message(data + at, total - at, &s) < 0:
            raise ValueError("no whole stored message")
        memset(&facts, 0, sizeof(Facts))
        facts.priority = NO_PRIORITY
        facts.names = s.names
        facts.names_len = <uint32_t> s.names_len
        if mend(s.props, s.props_len, &facts) < 0:
            raise ValueError("broken properties")
        if run and not alike(&facts, &last):
            runs.append(run_of(&last, start, at, run))
            start, run = at, 0
        last = facts
        run += 1
        at += s.size
    if run:
        runs.append(run_of(&last, start, at, run))
    if at != total:
        raise ValueError("bytes behind the last stored message")
    return out, runs
