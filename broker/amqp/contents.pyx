# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Stored messages: made of publishes, and put into the frames of deliveries, answers and returns.

A stored message, little endian:
    u32 body_bytes | u32 props_bytes | u8 n, exchange[n] | u8 m, key[m] | props | body
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from shardmq.broker.amqp.octets cimport Row, get16, get32, put, put16, put32, put64
from shardmq.shardd.content cimport (
    EXPIRATION_BIT, HEADERS_BIT, MODE_BIT, PRIORITY_BIT, Properties, properties_begin, properties_next, properties_seek,
)
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING

cdef enum:
    # Between two bodies: the end of a frame, a deliver with three names of 255 bytes, the head of a header frame.
    HEAD_BYTES_MAX = 1024

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
    cdef size_t n
    if left < 10:
        return -1
    memcpy(&s.body_len, p, 4)
    memcpy(&s.props_len, p + 4, 4)
    n = 8 + 1 + <size_t>p[8]
    if n >= left:
        return -1
    n += 1 + <size_t>p[n]
    if n + s.props_len + s.body_len > left:
        return -1
    s.names = p + 8
    s.names_len = n - 8
    s.props = p + n
    s.body = s.props + s.props_len
    s.size = n + s.props_len + s.body_len
    return 0

cdef inline size_t content_size(uint32_t props_len, uint64_t body_len, uint32_t part_max) noexcept nogil:
    return 20 + props_len + body_len + (body_len + part_max - 1) // part_max * 8

cdef inline uint8_t *put_frame_head(uint8_t *p, uint8_t kind, uint32_t channel, uint32_t size) noexcept nogil:
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

cdef inline uint8_t *put_deliver(uint8_t *p, uint32_t channel, const uint8_t *ctag, size_t ctag_len, uint64_t tag,
                                 bint redelivered, const uint8_t *names, size_t names_len) noexcept nogil:
    """Put the frame of a basic.deliver: 7 + 14 + 1 bytes, the consumer tag and the names."""
    p = put_frame_head(p, 1, channel, <uint32_t>(4 + 1 + ctag_len + 9 + names_len))
    p = put32(p, 60 << 16 | 60)
    p[0] = <uint8_t>ctag_len
    p = put64(put(p + 1, ctag, ctag_len), tag)
    p[0] = redelivered
    p = put(p + 1, names, names_len)
    p[0] = 0xCE
    return p + 1

def deliveries(const uint8_t[::1] blob not None, uint32_t count, uint16_t channel, bytes consumer_tag not None,
               uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max):
    """Return basic.deliver with content for each of `count` stored messages, with tags from `first_tag` on."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max), i
    cdef size_t ctag_len = len(consumer_tag), total = 0, left = blob.shape[0]
    cdef const uint8_t *start = &blob[0] if left else NULL
    cdef const uint8_t *at = start
    cdef const uint8_t *ctag = <const uint8_t *>PyBytes_AS_STRING(consumer_tag)
    cdef uint8_t *p
    cdef Stored s
    if ctag_len > 255:
        raise ValueError("a consumer tag has at most 255 bytes")
    for i in range(count):
        if read_message(at, left, &s) < 0:
            raise ValueError("no whole stored message")
        total += 8 + 4 + 1 + ctag_len + 9 + s.names_len + content_size(s.props_len, s.body_len, part_max)
        at += s.size
        left -= s.size
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    at = start
    left = blob.shape[0]
    with nogil:
        for i in range(count):
            read_message(at, left, &s)
            p = put_deliver(p, channel, ctag, ctag_len, first_tag + i, redelivered, s.names, s.names_len)
            p = put_content(p, channel, s.props, s.props_len, s.body, s.body_len, part_max)
            at += s.size
            left -= s.size
    return out

def delivery_parts(blob not None, uint32_t count, uint16_t channel, bytes consumer_tag not None,
                   uint64_t first_tag, bint redelivered, uint32_t frame_bytes_max):
    """Return what deliveries() returns, in parts whose bodies are views into `blob`: large ones are not copied."""
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
        p = put_deliver(p, channel, <const uint8_t *>PyBytes_AS_STRING(consumer_tag), ctag_len, first_tag + i, redelivered, s.names, s.names_len)
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

cdef uint8_t *put_bodies(uint8_t *p, uint32_t channel, const uint8_t *frame, uint64_t body_len, uint32_t part_max) noexcept nogil:
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

def passed_on(const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, size_t first, size_t count,
              uint16_t channel, bytes consumer_tag not None, uint64_t first_tag, uint32_t frame_bytes_max):
    """Return basic.deliver with content for each of `count` messages of a Publishes event, from row `first` on."""
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
        total += 8 + 4 + 1 + ctag_len + 9 + r[i].line_len - 1 + content_size(r[i].props_len, r[i].body_len, part_max)
    out = PyBytes_FromStringAndSize(NULL, total)
    p = <uint8_t *>PyBytes_AS_STRING(out)
    with nogil:
        for i in range(count):
            p = put_deliver(p, channel, ctag, ctag_len, first_tag + i, False, &buffer[0] + r[i].line_off, r[i].line_len - 1)
            p = put_frame_head(p, 2, channel, r[i].props_len + 12)
            p = put64(put32(p, 60 << 16), r[i].body_len)
            p = put(p, &buffer[0] + r[i].props_off, r[i].props_len)
            p[0] = 0xCE
            p = put_bodies(p + 1, channel, &buffer[0] + r[i].body_off, r[i].body_len, part_max)
    return out

def get_ok(const uint8_t[::1] message not None, uint16_t channel, uint64_t tag, bint redelivered, uint32_t remaining,
           uint32_t frame_bytes_max):
    """Return basic.get-ok with the content of one stored message."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max)
    cdef uint8_t *p
    cdef Stored s
    if message.shape[0] == 0 or read_message(&message[0], message.shape[0], &s) < 0:
        raise ValueError("no whole stored message")
    out = PyBytes_FromStringAndSize(NULL, 8 + 4 + 9 + s.names_len + 4 + content_size(s.props_len, s.body_len, part_max))
    p = <uint8_t *>PyBytes_AS_STRING(out)
    p = put_frame_head(p, 1, channel, <uint32_t>(4 + 9 + s.names_len + 4))
    p = put64(put32(p, 60 << 16 | 71), tag)
    p[0] = redelivered
    p = put32(put(p + 1, s.names, s.names_len), remaining)
    p[0] = 0xCE
    put_content(p + 1, channel, s.props, s.props_len, s.body, s.body_len, part_max)
    return out

def content(uint16_t channel, bytes method_payload not None, bytes props not None, const uint8_t[::1] body not None,
            uint32_t frame_bytes_max):
    """Return a method frame with content, such as basic.return."""
    cdef uint32_t part_max = body_part_max(frame_bytes_max)
    cdef size_t method_len = len(method_payload), props_len = len(props), body_len = body.shape[0]
    cdef uint8_t *p
    out = PyBytes_FromStringAndSize(NULL, 8 + method_len + content_size(<uint32_t>props_len, body_len, part_max))
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
    """Return each of `count` stored messages back to back as (look, flags, before, middle, after, body).

    `look` decides what becomes of a dead letter: (names, headers without the length before them, expiration or None,
    delivery mode or 0, priority or 255). The properties are flags, before, headers, middle, expiration, after.
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
        look = (
            PyBytes_FromStringAndSize(<char *>s.names, s.names_len),
            PyBytes_FromStringAndSize(<char *>headers + 4, headers_end - headers - 4) if has_headers else b"",
            PyBytes_FromStringAndSize(<char *>expiration + 1, expiration_end - expiration - 1) if has_expiration else None,
            mode,
            priority,
        )
        found.append((
            look,
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
    """Return (bit of its flag, start, end) of each property that is there. Raise ValueError if the list is broken."""
    cdef const uint8_t *start = &props[0] if props.shape[0] else NULL
    cdef Properties walk
    cdef list found = []
    if properties_begin(&walk, start, props.shape[0]) < 0 or start[1] & 3:  # no property has these bits
        raise ValueError("broken properties")
    while properties_next(&walk) > 0:
        found.append((walk.bit, walk.value - start, walk.next - start))
    if walk.left or walk.next != walk.end:
        raise ValueError("broken properties")
    return found
