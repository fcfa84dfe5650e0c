# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Find whole publishes, runs of settles and runs of binds in what was read of a client.

All numbers are big endian.

A frame:      u8 type | u16 channel | u32 size | payload[size] | 0xCE
A publish:    method frame  60,40 | u16 ticket | u8 n, exchange[n] | u8 m, key[m] | u8 bits
              header frame  60 | u16 weight | u64 body size | flags word | property list
              body frames   until the body size is reached; none for an empty body

`scan` stops at a frame that it does not understand at once (OTHER). The caller looks at that one
frame in plain code, which finds the mistake in it or puts an interleaved or large publish together.
So a check that fails here needs no reason.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset
from shardmq.broker.amqp.octets cimport Row, get16, get32, get64, put, put16, put64
from shardmq.shardd.content cimport (
    EXPIRATION_BIT, HEADERS_BIT, MODE_BIT, PRIORITY_BIT, REPLY_TO_BIT, TIMESTAMP_BIT, USER_ID_BIT,
    Properties, properties_begin, properties_next, properties_seek,
)
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE, PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8

# Why scan() stopped.
INCOMPLETE = 0
OTHER = 1
SETTLE = 2
FULL = 3

# Flags of a row: what was found in the properties.
HAS_HEADERS = 1
MAY_HAVE_CC = 2
HAS_USER_ID = 4
BAD_EXPIRATION = 8
DIRECT_REPLY_TO = 16
BAD_PROPERTIES = 32
MAY_HAVE_SEQUENCE = 64
MAY_HAVE_LETTERS = 128

# The state of a channel that matters here; states.py has the others.
CHANNEL_OPEN = 1

cdef enum:
    C_INCOMPLETE = 0
    C_OTHER = 1
    C_SETTLE = 2
    C_FULL = 3
    C_OPEN = 1
    C_HAS_HEADERS = 1
    C_MAY_HAVE_CC = 2
    C_HAS_USER_ID = 4
    C_BAD_EXPIRATION = 8
    C_DIRECT_REPLY_TO = 16
    C_BAD_PROPERTIES = 32
    C_MAY_HAVE_SEQUENCE = 64
    C_MAY_HAVE_LETTERS = 128
    NO_TTL = 0xffffffff
    ROWS_MAX = 2048         # rows of one event: 96 KiB, which stay in the cache
    RANGES_MAX = 4096       # ranges of one Settles event
    BINDS_MAX = 256         # binds of one Binds event, which is one request to the controller
    QUEUE_BIND = 0x320014   # class and method
    BIND_BYTES_MIN = 22     # bytes of the frame if its three names are empty
    CHANNEL_OPEN_IDS = 20 << 16 | 10
    CHANNEL_CLOSE_IDS = 20 << 16 | 40
    FRAME_HEAD = 7
    FRAME_OVERHEAD = 8
    FRAME_END = 0xCE
    METHOD_FRAME = 1
    # A header of a trace context (W3C), with its name: a string or bytes, of at least so many
    # letters. The last of these is a digit that is odd if the trace is sampled.
    CONTEXT_NAME_BYTES = 12
    CONTEXT_BYTES = 55
    # States of channels (states.py) that do not count.
    CLOSED = 0
    CLOSING = 4
    CLOSED_BY_CLIENT = 5
    CLOSED_BY_BOTH = 6
    UNTOLD = 128 | 1        # an open channel of which the caller of the library has not been told
    # A larger publish is not waited for in one piece: its frames are taken as they come.
    WHOLE_BYTES_MAX = 65536

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

cdef extern from "<string.h>" nogil:
    void *memmem(const void *data, size_t size, const void *wanted, size_t length)

# The answers to channel.open and channel.close, of channel 0.
cdef bytes OPEN_OK = b"\1\0\0\0\0\0\x08\0\x14\0\x0b\0\0\0\0\xce"
cdef bytes CLOSE_OK = b"\1\0\0\0\0\0\4\0\x14\0\x29\xce"

cdef Row rows[ROWS_MAX]     # only touched with the GIL held

# -- properties ------------------------------------------------------------------------------------

cdef uint32_t read_ttl(const uint8_t *p, uint32_t size, uint8_t *flags) noexcept nogil:
    cdef uint64_t value = 0
    cdef uint32_t i
    if size == 0 or size > 10:
        flags[0] |= C_BAD_EXPIRATION
        return 0xffffffff
    for i in range(size):
        if p[i] < 48 or p[i] > 57:
            flags[0] |= C_BAD_EXPIRATION
            return 0xffffffff
        value = value * 10 + (p[i] - 48)
    if value >= NO_TTL:
        flags[0] |= C_BAD_EXPIRATION
        return 0xffffffff
    return <uint32_t>value

cdef int may_have_cc(const uint8_t *p, uint32_t size) noexcept nogil:
    """Return whether "CC" or "BCC", with its length before it, is anywhere in the table."""
    cdef const uint8_t *end = p + size
    cdef const uint8_t *c = p
    while c < end:
        c = <const uint8_t *>memchr(c, 67, end - c)
        if c == NULL:
            return 0
        if c + 1 < end and c[1] == 67:
            if c - p >= 1 and (c - 1)[0] == 2:
                return 1
            if c - p >= 2 and (c - 1)[0] == 66 and (c - 2)[0] == 3:
                return 1
        c += 1
    return 0

cdef inline int may_have(
    const uint8_t *p, uint32_t size, const char *name, uint32_t length, uint32_t rarest
) noexcept nogil:
    """Return whether `name`, which begins with its length, is anywhere in the table.

    `rarest` is the place of its rarest letter.
    """
    cdef const uint8_t *end = p + size
    cdef const uint8_t *c = p + rarest
    while c < end:
        c = <const uint8_t *>memchr(c, name[rarest], end - c)
        if c == NULL:
            return 0
        if end - c >= length - rarest and memcmp(c - rarest, name, length) == 0:
            return 1
        c += 1
    return 0

cdef void read_properties(const uint8_t *p, uint32_t size, Row *row) noexcept nogil:
    """Fill ttl_ms, delivery_mode, priority, flags.

    Every length is checked; nothing may be left over.
    """
    cdef Properties walk
    cdef const uint8_t *entries
    cdef uint32_t length
    cdef int found
    row.ttl_ms = 0xffffffff
    row.delivery_mode = 0
    row.priority = 0xff
    row.flags = 0
    row.zero = 0
    row.reserved = 0
    # No property has the bits 1 and 0; the lowest announces a second word of flags.
    if properties_begin(&walk, p, size) < 0 or p[1] & 3:
        row.flags = C_BAD_PROPERTIES
        return
    found = properties_next(&walk)
    while found > 0:
        if walk.bit == HEADERS_BIT:
            entries = walk.value + 4
            length = <uint32_t>walk.size - 4
            row.flags |= C_HAS_HEADERS
            if length >= 4 and may_have_cc(entries, length):
                row.flags |= C_MAY_HAVE_CC
            if length >= 12 and may_have(entries, length, b"\x0ax-sequence", 11, 5):
                row.flags |= C_MAY_HAVE_SEQUENCE
            if length >= 23 and may_have(entries, length, b"\x16x-dead-letter-exchange", 23, 0):
                row.flags |= C_MAY_HAVE_LETTERS
        elif walk.bit == MODE_BIT:
            row.delivery_mode = walk.value[0]
        elif walk.bit == PRIORITY_BIT:
            # 0xff says that there is no priority.
            row.priority = walk.value[0] if walk.value[0] != 0xff else 0xfe
        elif walk.bit == REPLY_TO_BIT:
            if (
                walk.size == 22
                and memcmp(walk.value + 1, <const char *>b"amq.rabbitmq.reply-to", 21) == 0
            ):
                row.flags |= C_DIRECT_REPLY_TO
        elif walk.bit == EXPIRATION_BIT:
            row.ttl_ms = read_ttl(walk.value + 1, <uint32_t>walk.size - 1, &row.flags)
        elif walk.bit == USER_ID_BIT:
            row.flags |= C_HAS_USER_ID
        found = properties_next(&walk)
    if found < 0 or walk.next != walk.end:
        row.flags |= C_BAD_PROPERTIES


# -- publishes -------------------------------------------------------------------------------------

cdef struct Memo:                 # the publish before
    const uint8_t *method         # method frame
    uint32_t method_len
    const uint8_t *props
    uint32_t props_len
    Row *row

cdef int read_line(const uint8_t *p, uint32_t size) noexcept nogil:
    """Return whether the payload is one whole basic.publish that is not immediate."""
    cdef uint32_t n
    if size < 9:
        return 0
    n = 6 + p[6] + 1
    if n + 1 >= size:
        return 0
    n += 1 + p[n]
    return n + 1 == size and not p[n] & 2

cdef int read_body(const uint8_t *base, size_t start, size_t *at, size_t end, uint32_t channel,
                   uint32_t frame_max, Row *row, size_t *needed) noexcept nogil:
    """Count the frames of the body. Return -1 when all are there, else why not."""
    cdef uint64_t left = row.body_len
    cdef uint32_t size
    cdef const uint8_t *p
    row.body_off = <uint32_t>at[0] if left else 0
    row.body_frames = 0
    while left:
        if end - at[0] < 7:
            needed[0] = at[0] + left + 8 - start
            return C_OTHER if needed[0] > WHOLE_BYTES_MAX else C_INCOMPLETE
        p = base + at[0]
        size = get32(p + 3)
        if p[0] != 3 or get16(p + 1) != channel or size == 0 or size > left or size + 8 > frame_max:
            return C_OTHER
        if end - at[0] < <size_t>size + 8:
            needed[0] = at[0] + left + 8 - start
            return C_OTHER if needed[0] > WHOLE_BYTES_MAX else C_INCOMPLETE
        if p[size + 7] != 0xCE:
            return C_OTHER
        left -= size
        at[0] += <size_t>size + 8
        row.body_frames += 1
    return -1

cdef inline bint ends_alike(const uint8_t *frame, const uint8_t *other, size_t size) noexcept nogil:
    """Return whether the last 8 bytes are equal.

    They hold a part of the key, which differs most often.

    Both frames have 8 bytes or more.
    """
    cdef uint64_t a, b
    memcpy(&a, frame + size - 8, 8)
    memcpy(&b, other + size - 8, 8)
    return a == b

cdef inline int read_publish(
    const uint8_t *base, size_t *position, size_t end, const uint8_t *states, size_t states_len,
    uint32_t frame_max, uint64_t message_max, Memo *memo, Row *row, size_t *needed
) noexcept nogil:
    """Read one publish at `position`. Return -1 when it is whole, else why not.

    If it is whole, the row is filled and `position` is behind the publish.
    """
    cdef size_t start = position[0], at = start, left = end - start
    cdef const uint8_t *p = base + at
    cdef const uint8_t *props
    cdef uint32_t size, channel, props_len
    cdef int why
    if left < 7:
        needed[0] = 7
        return C_INCOMPLETE
    size = get32(p + 3)
    channel = get16(p + 1)
    if p[0] != 1 or size > frame_max - 8 or channel >= states_len or states[channel] != C_OPEN:
        return C_OTHER
    needed[0] = <size_t>size + 8 + 7  # and the head of the next frame
    if left < <size_t>size + 8:
        needed[0] = <size_t>size + 8
        return C_INCOMPLETE
    if (
        memo.row != NULL
        and memo.method_len == size + 8
        and ends_alike(memo.method, p, size + 8)
        and memcmp(memo.method, p, size + 8) == 0
    ):
        row.line_len = memo.row.line_len
    else:
        if p[size + 7] != 0xCE or size < 4 or get16(p + 7) != 60:
            return C_OTHER
        if get16(p + 9) != 40:
            why = get16(p + 9)
            return C_SETTLE if why == 80 or why == 90 or why == 120 else C_OTHER
        if not read_line(p + 7, size):
            return C_OTHER
        row.line_len = <uint16_t>(size - 6)
    row.line_off = <uint32_t>(at + 13)
    row.channel = <uint16_t>channel
    at += <size_t>size + 8
    left = end - at
    if left < 7:
        return C_INCOMPLETE
    p = base + at
    size = get32(p + 3)
    if p[0] != 2 or get16(p + 1) != channel or size < 14 or size > frame_max - 8:
        return C_OTHER
    if left < <size_t>size + 8:
        needed[0] = at - start + size + 8
        return C_OTHER if needed[0] > WHOLE_BYTES_MAX else C_INCOMPLETE
    if p[size + 7] != 0xCE or get16(p + 7) != 60:
        return C_OTHER
    row.body_len = get64(p + 11)
    if row.body_len > message_max:
        return C_OTHER
    props = p + 19
    props_len = size - 12
    row.props_off = <uint32_t>(props - base)
    row.props_len = props_len
    if (
        memo.row != NULL
        and memo.props_len == props_len
        and memcmp(memo.props, props, props_len) == 0
    ):
        memcpy(&row.ttl_ms, &memo.row.ttl_ms, 16)
    else:
        read_properties(props, props_len, row)
        if row.flags & C_BAD_PROPERTIES:
            return C_OTHER
    at += <size_t>size + 8
    why = read_body(base, start, &at, end, channel, frame_max, row, needed)
    if why >= 0:
        return why
    memo.method = base + start
    memo.method_len = <uint32_t>(row.line_len + 6 + 8)
    memo.props = props
    memo.props_len = props_len
    memo.row = row
    position[0] = at
    return -1

cdef uint32_t find_publishes(
    const uint8_t *base, size_t *at, size_t end, const uint8_t *states, size_t states_len,
    uint32_t frame_max, uint64_t message_max, Row **found, int *why, size_t *needed
) noexcept nogil:
    """Find publishes from `at` on, which moves behind them.

    Return how many there are; `found` are their rows.

    The rows are valid until the next call. `why` and `needed` are set as scan() returns them.
    """
    # Of their own, or each row written could change what the pointers lead to.
    cdef size_t position = at[0], need = 7
    cdef uint32_t count = 0
    cdef int stopped = C_FULL
    cdef Memo memo
    memo.row = NULL
    while count < ROWS_MAX:
        stopped = read_publish(
            base, &position, end, states, states_len, frame_max, message_max, &memo, &rows[count],
            &need
        )
        if stopped >= 0:
            break
        count += 1
        stopped = C_FULL
    at[0], needed[0], why[0], found[0] = position, need, stopped, rows
    return count

def scan(
    const uint8_t[::1] data not None, size_t at, size_t end, const uint8_t[::1] states not None,
    uint32_t frame_bytes_max, uint64_t message_bytes_max
):
    """Find publishes from `at` on.

    Return (position, rows as bytes, their count, why it stopped, bytes needed from position on to
    see more). `states` has a byte for each channel number, CHANNEL_OPEN where a publish may begin.
    Publishes may be of many channels.
    """
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    cdef const uint8_t *open_states = &states[0] if states.shape[0] else NULL
    cdef size_t states_len = states.shape[0], needed = 7
    cdef uint32_t count = 0
    cdef int why = C_FULL
    cdef Memo memo
    if end > <size_t>data.shape[0] or at > end:
        raise ValueError("outside of the buffer")
    memo.row = NULL
    with nogil:
        while count < ROWS_MAX:
            why = read_publish(
                base, &at, end, open_states, states_len, frame_bytes_max, message_bytes_max, &memo,
                &rows[count], &needed
            )
            if why >= 0:
                break
            count += 1
            why = C_FULL
    return at, PyBytes_FromStringAndSize(<char *>rows, count * sizeof(Row)), count, why, needed

def room(size_t size):
    """Return a bytearray that is to be filled. It holds whatever was in its memory."""
    return PyByteArray_FromStringAndSize(NULL, size)

def facts(const uint8_t[::1] props not None):
    """Return (ttl_ms, delivery_mode, priority, flags) of a property list, as in a row."""
    cdef Row row
    read_properties(&props[0] if props.shape[0] else NULL, <uint32_t>props.shape[0], &row)
    return row.ttl_ms, row.delivery_mode, row.priority, row.flags

def row(
    uint32_t line_off, uint16_t line_len, uint16_t channel, uint32_t props_off, uint32_t props_len,
    uint32_t body_off, uint64_t body_len, tuple found
):
    """Return the row of a publish that was put together, with its body in a single frame.

    `found` is of facts().
    """
    cdef Row r
    r.line_off, r.line_len, r.channel = line_off, line_len, channel
    r.props_off, r.props_len = props_off, props_len
    r.body_off = body_off if body_len else 0
    r.body_frames = 1 if body_len else 0
    r.body_len = body_len
    r.ttl_ms, r.delivery_mode, r.priority, r.flags = found
    r.zero = 0
    r.reserved = 0
    return PyBytes_FromStringAndSize(<char *>&r, sizeof(Row))

cdef class Sizes:
    """How large bodies are: `classes` as those of shardd.wire.histogram, and all their bytes."""

    def __cinit__(self):
        memset(self.counts, 0, sizeof(self.counts))
        self.total = 0

    def add(self, bytes table not None):
        """Add the body sizes of an event's rows."""
        self.count(<const Row *>PyBytes_AS_STRING(table), len(table) // sizeof(Row))

    cdef void count(self, const Row *row, size_t count) noexcept:
        cdef size_t at = 0, begun
        cdef uint64_t size
        while at < count:
            size = row[at].body_len
            begun = at
            while at < count and row[at].body_len == size:
                at += 1
            self.counts[64 - __builtin_clzll(size - 1) if size > 1 else 0] += at - begun
            self.total += size * (at - begun)

    @property
    def classes(self):
        return [self.counts[k] for k in range(65)]

    @property
    def sum(self):
        return self.total


cdef class Incoming:
    """What a connection knows of the bytes that it reads.

    `state` is that of the connection. `channels` has a byte for each channel number (scan). What is
    read and not parsed is `buffer` from `at` on, then `next`; with `part` the buffer begins within
    a frame. With `answers_channels`, channels that are opened and closed without use are answered
    here; `opened` counts them until the caller sets it to 0.
    """

    cdef bint has_unread(self):
        """Return whether something was read before and is not parsed."""
        return self.part is not None or self.next is not None or self.at < <size_t>len(self.buffer)

    cdef size_t open_channels(self) noexcept:
        """Return how many channels count for `channels_max` (_make_room in connection.py)."""
        cdef const uint8_t *states = <const uint8_t *> PyByteArray_AS_STRING(self.channels)
        cdef Py_ssize_t at
        cdef size_t count = 0
        for at in range(PyByteArray_GET_SIZE(self.channels)):
            count += states[at] not in (CLOSED, CLOSING, CLOSED_BY_CLIENT, CLOSED_BY_BOTH)
        return count

    cdef bytes answer_channel(self, const uint8_t *data, size_t size, size_t *taken):
        """Answer a channel.open or channel.close if nobody uses the channel.

        Return the frame that answers, and set `taken` to the length of the frame that is answered.
        Return None if these bytes do not begin with such a frame, whole and in order
        (Connection._open_or_close).
        """
        cdef uint32_t channel, ids, payload
        cdef size_t text_at, bytes_min, at, channels
        cdef char *states
        cdef bytes answer
        cdef uint8_t *p
        if not self.answers_channels or size < FRAME_HEAD + 4 or data[0] != METHOD_FRAME:
            return None
        channel, payload, ids = get16(data + 1), get32(data + 3), get32(data + FRAME_HEAD)
        if ids == CHANNEL_OPEN_IDS:
            text_at, bytes_min = FRAME_HEAD + 4, 5
        elif ids == CHANNEL_CLOSE_IDS:
            text_at, bytes_min = FRAME_HEAD + 6, 11
        else:
            return None
        if (
            not channel
            or payload < bytes_min
            or size < FRAME_OVERHEAD
            or payload > size - FRAME_OVERHEAD
            or data[FRAME_HEAD + payload] != FRAME_END
            or data[text_at] != payload - bytes_min
        ):
            return None
        for at in range(text_at + 1, text_at + 1 + data[text_at]):
            if data[at] & 0x80:
                return None
        channels = PyByteArray_GET_SIZE(self.channels)
        if ids == CHANNEL_OPEN_IDS:
            if channels > self.channels_max and self.open_channels() >= self.channels_max:
                return None
            if channel >= channels:
                PyByteArray_Resize(self.channels, channel + 1)
                memset(PyByteArray_AS_STRING(self.channels) + channels, 0, channel + 1 - channels)
            states = PyByteArray_AS_STRING(self.channels)
            if states[channel]:
                return None
            states[channel] = <char> UNTOLD
            self.opened += 1
            answer = PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(OPEN_OK), PyBytes_GET_SIZE(OPEN_OK)
            )
        else:
            states = PyByteArray_AS_STRING(self.channels)
            if channel >= channels or <uint8_t> states[channel] != UNTOLD:
                return None
            states[channel] = 0
            answer = PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(CLOSE_OK), PyBytes_GET_SIZE(CLOSE_OK)
            )
        p = <uint8_t *> PyBytes_AS_STRING(answer)
        p[1], p[2] = data[1], data[2]
        taken[0] = payload + FRAME_OVERHEAD
        return answer


# -- settles ---------------------------------------------------------------------------------------

def settles(const uint8_t[::1] data not None, size_t at, size_t end):
    """Find the whole ack, nack and reject frames of one channel from `at` on.

    Return (position, channel, ranges).
    """
    cdef const uint8_t *base = &data[0] if data.shape[0] else NULL
    cdef const uint8_t *p
    cdef uint32_t method, channel = 0
    cdef int kind, run_kind = -1, multiple, begun = 0
    cdef uint64_t tag, first = 0, last = 0
    cdef list ranges = []
    if end > <size_t>data.shape[0] or at > end:
        raise ValueError("outside of the buffer")
    while end - at >= 21 and len(ranges) < RANGES_MAX:
        p = base + at
        if p[0] != 1 or get32(p + 3) != 13 or p[20] != 0xCE or get16(p + 7) != 60:
            break
        method = get16(p + 9)
        if begun and get16(p + 1) != channel:
            break
        if method == 80:
            kind, multiple = 0, p[19] & 1
        elif method == 90:
            kind, multiple = 2 if p[19] & 1 else 1, 0
        elif method == 120:
            kind, multiple = 2 if p[19] & 2 else 1, p[19] & 1
        else:
            break
        begun = 1
        channel = get16(p + 1)
        tag = get64(p + 11)
        at += 21
        if not multiple and kind == run_kind and tag == last + 1:
            last = tag
            continue
        if run_kind >= 0:
            ranges.append((run_kind, first, last, False))
            run_kind = -1
        if multiple:
            ranges.append((kind, tag, tag, True))
        else:
            run_kind, first, last = kind, tag, tag
    if run_kind >= 0:
        ranges.append((run_kind, first, last, False))
    return at, channel, ranges


# -- binds -----------------------------------------------------------------------------------------

cdef size_t short_behind(const uint8_t *p, size_t at, size_t end) noexcept nogil:
    """Return where the short string at `at` ends, or 0 when that is behind `end`."""
    return at + 1 + p[at] if at < end and at + 1 + p[at] <= end else 0

cdef object text_again(const uint8_t *p, object text, const uint8_t **bytes, Py_ssize_t *size):
    """Return the short string at `p`: `text` itself, if its `bytes` are the same.

    Otherwise `bytes` and `size` are those of the new string afterwards.
    """
    if text is not None and p[0] == size[0] and memcmp(p + 1, bytes[0], p[0]) == 0:
        return text
    bytes[0], size[0] = p + 1, p[0]
    return PyUnicode_DecodeUTF8(<const char *>(p + 1), p[0], NULL)

cdef list find_binds(
    const uint8_t *base, size_t *position, size_t end, const uint8_t *states, size_t states_len,
    uint32_t *number, bint *without_answer
):
    """Find a run of queue.bind frames from `position` on, and set that behind them.

    Return (exchange, queue, key) of each, and set `number` to their channel and `without_answer`
    to their nowait. The frames are whole, of one channel, without arguments and alike in nowait;
    there are at most BINDS_MAX. A frame whose names are no UTF-8 ends the run. `states` is as in
    scan.
    """
    cdef const uint8_t *p
    cdef const uint8_t *last_queue = NULL
    cdef const uint8_t *last_exchange = NULL
    cdef Py_ssize_t queue_len = 0, exchange_len = 0
    cdef size_t at = position[0], size, exchange_at, key_at, behind
    cdef uint32_t channel = 0
    cdef int nowait = 0
    cdef list found = []
    cdef object queue = None, exchange = None, key
    while end - at >= BIND_BYTES_MIN and len(found) < BINDS_MAX:
        p = base + at
        size = <size_t>get32(p + 3) + 8
        if (
            p[0] != 1
            or size < BIND_BYTES_MIN
            or size > end - at
            or get32(p + 7) != QUEUE_BIND
            or p[size - 1] != 0xCE
        ):
            break
        exchange_at = short_behind(p, 13, size - 6)
        key_at = short_behind(p, exchange_at, size - 6) if exchange_at else 0
        behind = short_behind(p, key_at, size - 6) if key_at else 0
        if behind == 0 or behind != size - 6 or get32(p + behind + 1) != 0:
            break
        if found:
            if get16(p + 1) != channel or (p[behind] & 1) != nowait:
                break
        elif get16(p + 1) >= states_len or states[get16(p + 1)] != C_OPEN:
            break
        try:
            queue = text_again(p + 13, queue, &last_queue, &queue_len)
            exchange = text_again(p + exchange_at, exchange, &last_exchange, &exchange_len)
            key = PyUnicode_DecodeUTF8(<const char *>(p + key_at + 1), p[key_at], NULL)
        except UnicodeDecodeError:
            break
        channel, nowait = get16(p + 1), p[behind] & 1
        found.append((exchange, queue, key))
        at += size
    position[0], number[0], without_answer[0] = at, channel, nowait
    return found


def binds(
    const uint8_t[::1] data not None, size_t at, size_t end, const uint8_t[::1] states not None
):
    """Find a run of queue.bind frames from `at` on (find_binds).

    Return (position, channel, (exchange, queue, key) of each, nowait).
    """
    cdef uint32_t channel = 0
    cdef bint nowait = False
    cdef list found
    if end > <size_t>data.shape[0] or at > end:
        raise ValueError("outside of the buffer")
    if at == end or not states.shape[0]:
        return at, 0, [], False
    found = find_binds(&data[0], &at, end, &states[0], states.shape[0], &channel, &nowait)
    return at, channel, found, bool(nowait)

# -- properties put in -----------------------------------------------------------------------------

cdef uint32_t property_at(const uint8_t *props, uint32_t size, uint32_t bit) noexcept nogil:
    """Return where the property of that bit is in a property list, or would be.

    Return 0 if the list is broken.
    """
    cdef Properties walk
    cdef int found
    if properties_begin(&walk, props, size) < 0 or props[1] & 3:  # bits that are not used
        return 0
    found = properties_seek(&walk, bit)
    return 0 if found < 0 else <uint32_t>((walk.value if found else walk.next) - props)

cdef inline uint32_t timestamp_at(const uint8_t *props, uint32_t size) noexcept nogil:
    """Return where the timestamp of a property list would be.

    Return 0 if there is a timestamp, or if the list is broken.
    """
    if size < 2 or get16(props) >> TIMESTAMP_BIT & 1:
        return 0
    return property_at(props, size, TIMESTAMP_BIT)

def stamped(
    const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, uint64_t seconds
):
    """Give this timestamp to all publishes that have none.

    Return (buffer, table), or None if all publishes have a timestamp.
    """
    cdef size_t count = table.shape[0] // sizeof(Row), extra = 0, i
    cdef size_t used = buffer.shape[0]
    cdef Row *r
    cdef uint8_t *data
    cdef uint8_t *p
    cdef const uint8_t *props
    cdef uint32_t at
    if not count:
        return None
    new_table = PyBytes_FromStringAndSize(<const char *>&table[0], count * sizeof(Row))
    r = <Row *>PyBytes_AS_STRING(new_table)
    for i in range(count):
        if (
            not r[i].flags & C_BAD_PROPERTIES
            and timestamp_at(&buffer[0] + r[i].props_off, r[i].props_len)
        ):
            extra += r[i].props_len + 8
    if not extra:
        return None
    new_buffer = PyBytes_FromStringAndSize(NULL, used + extra)
    data = <uint8_t *>PyBytes_AS_STRING(new_buffer)
    memcpy(data, &buffer[0], used)
    p = data + used
    for i in range(count):
        props = data + r[i].props_off
        at = 0 if r[i].flags & C_BAD_PROPERTIES else timestamp_at(props, r[i].props_len)
        if not at:
            continue
        r[i].props_off = <uint32_t>(p - data)
        r[i].props_len += 8
        p = put64(put(put16(p, get16(props) | 0x40), props + 2, at - 2), seconds)
        p = put(p, props + at, r[i].props_len - 8 - at)
    return new_buffer, new_table

def asking(const uint8_t[::1] table not None):
    """Channels of the publishes that ask for direct replies."""
    cdef const Row *r = <const Row *>&table[0] if table.shape[0] else NULL
    cdef size_t i
    cdef set found = set()
    for i in range(table.shape[0] // sizeof(Row)):
        if r[i].flags & C_DIRECT_REPLY_TO:
            found.add(r[i].channel)
    return found

def with_replies(
    const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, dict names not None
):
    """Put the name of their channel into publishes that ask for direct replies, as reply_to.

    Return (buffer, table), in which these publishes no longer ask. `names` has the name of each
    channel. Publishes of other channels, or with broken properties, stay as they are.
    """
    cdef size_t count = table.shape[0] // sizeof(Row), extra = 0, i
    cdef size_t used = buffer.shape[0]
    cdef Row *r
    cdef uint8_t *data
    cdef uint8_t *p
    cdef const uint8_t *props
    cdef uint32_t at, behind
    cdef bytes name
    new_table = PyBytes_FromStringAndSize(
        <const char *>&table[0] if count else NULL, count * sizeof(Row)
    )
    r = <Row *>PyBytes_AS_STRING(new_table)
    for i in range(count):
        if r[i].flags & C_DIRECT_REPLY_TO and not r[i].flags & C_BAD_PROPERTIES:
            name = names.get(r[i].channel)
            if name is not None:
                at = property_at(&buffer[0] + r[i].props_off, r[i].props_len, REPLY_TO_BIT)
                if not at or len(name) > 255:
                    raise ValueError("no reply_to, or no short string to put there")
                extra += r[i].props_len - buffer[r[i].props_off + at] + len(name)
    new_buffer = PyBytes_FromStringAndSize(NULL, used + extra)
    data = <uint8_t *>PyBytes_AS_STRING(new_buffer)
    if used:
        memcpy(data, &buffer[0], used)
    p = data + used
    for i in range(count):
        if not r[i].flags & C_DIRECT_REPLY_TO or r[i].flags & C_BAD_PROPERTIES:
            continue
        name = names.get(r[i].channel)
        if name is None:
            continue
        props = data + r[i].props_off
        at = property_at(props, r[i].props_len, REPLY_TO_BIT)
        behind = at + 1 + props[at]
        r[i].props_off = <uint32_t>(p - data)
        p = put(p, props, at)
        p[0] = <uint8_t>len(name)
        p = put(p + 1, <const uint8_t *>PyBytes_AS_STRING(name), len(name))
        p = put(p, props + behind, r[i].props_len - behind)
        r[i].props_len = <uint32_t>(p - data - r[i].props_off)
        r[i].flags ^= C_DIRECT_REPLY_TO
    return new_buffer, new_table

# -- trace contexts --------------------------------------------------------------------------------

cdef bint has_context(const uint8_t *p, size_t size) noexcept nogil:
    """Return whether these bytes may have a header `traceparent` of a trace that is sampled.

    What the header says is not checked further, and it may be in a body.
    """
    cdef const uint8_t *end = p + size
    cdef const uint8_t *value
    cdef uint8_t digit
    while size >= CONTEXT_NAME_BYTES + 5 + CONTEXT_BYTES:
        p = <const uint8_t *>memmem(p, size, b"\x0btraceparent", CONTEXT_NAME_BYTES)
        if p == NULL or end - p < CONTEXT_NAME_BYTES + 5 + CONTEXT_BYTES:
            return False
        value = p + CONTEXT_NAME_BYTES
        if (value[0] == c"S" or value[0] == c"x") and get32(value + 1) >= CONTEXT_BYTES:
            digit = value[5 + CONTEXT_BYTES - 1]
            # Of 0 to 9 the odd ones have an odd code, of a to f an even one.
            if (digit & 1) == (digit <= c"9"):
                return True
        p = value
        size = end - p
    return False

def is_traced(const uint8_t[::1] data not None):
    """Return whether these bytes may have a context of a sampled trace, see has_context()."""
    return data.shape[0] and has_context(&data[0], data.shape[0])

def marked(
    const uint8_t[::1] buffer not None, const uint8_t[::1] table not None, list chosen not None,
    uint64_t now_ns
):
    """Mark the publishes that are traced; return their table, None if no publish is.

    They have `now_ns` as `reserved`, and a flag that brings them to the caller of the packer.

    Those are traced whose headers have a trace context that is sampled, and those at the indices
    `chosen`.
    """
    cdef size_t count = table.shape[0] // sizeof(Row), i
    cdef const Row *row = <const Row *>&table[0] if count else NULL
    cdef set found = set(chosen)
    cdef Row *r
    for i in range(count):
        if (
            row[i].props_len > CONTEXT_BYTES
            and has_context(&buffer[0] + row[i].props_off, row[i].props_len)
        ):
            found.add(i)
    if not found:
        return None
    new_table = PyBytes_FromStringAndSize(<const char *>row, count * sizeof(Row))
    r = <Row *>PyBytes_AS_STRING(new_table)
    for i in found:
        if i >= count:
            raise IndexError(i)
        r[i].flags |= C_HAS_USER_ID
        r[i].reserved = now_ns
    return new_table
