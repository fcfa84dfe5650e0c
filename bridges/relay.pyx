# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Turn what a source delivers into publishes to a destination, and confirms into acks.

All numbers are big endian, and every frame is of channel 1 on both connections:

    frame:      u8 type | u16 channel | u32 size | payload[size] | 0xCE
    a delivery: method 60,60 | u8 n, consumer tag[n] | u64 tag | u8 bits | u8 n, exchange[n]
                | u8 n, key[n];  then a header frame and body frames
    a publish:  method 60,40 | u16 0 | u8 n, exchange[n] | u8 n, key[n] | u8 bits (1 mandatory);
                then a header frame and body frames
    a confirm:  method 60,80 (ack) or 60,120 (nack) | u64 tag | u8 bits (1 multiple)

The header and the body frames of a message are copied as they are, because the connection to the
source has agreed on frames that are no larger than those of the destination. The source numbers its
deliveries from 1 on, and so does the destination its publishes. Each delivery is published once and
in order, so a message has one number on both sides. Only a link of federated exchanges drops
deliveries. `Settled` is told of each, and counts on with the numbers of the source.

`tests/reference/relay.py` has the same in plain Python.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from shardmq.broker.amqp.octets cimport get16, get32, get64, put16, put32, put64

cdef enum:
    METHOD_FRAME = 1
    HEADER_FRAME = 2
    BODY_FRAME = 3
    HEARTBEAT_FRAME = 8
    FRAME_END = 0xCE
    FRAME_HEAD = 7
    FRAME_OVERHEAD = 8
    DELIVER_IDS = 60 << 16 | 60
    PUBLISH_IDS = 60 << 16 | 40
    ACK_IDS = 60 << 16 | 80
    NACK_IDS = 60 << 16 | 120
    CHANNEL = 1
    # Expected next of the source.
    A_METHOD = 0
    A_HEADER = 1
    A_BODY = 2
    SKIPS_KEPT = 64
    GROWING_KEPT = 1000
    # A publish is longer than its delivery by no more than this and the two given names.
    GROWTH = 16


class Fault(Exception):
    """A peer breaks the protocol; the text says how."""


cdef class Relay:
    """The messages of one source on their way to one destination.

    exchange, key: bytes that replace those of each message; None keeps them.
    mandatory: whether the destination returns messages that it routes to no queue.
    edit: called with the properties of a message (flags and values), returns those to publish;
        equal properties of neighbours are edited once. None keeps them.
    limit: so many messages are taken, and frames behind the last one are left; -1 for no limit.
    with_names: `edit` is also given what the delivery says of the message, as in its method frame:
        u8 1 if it was redelivered | u8 n, exchange[n] | u8 n, key[n].
    may_drop: `edit` is also given the first of these bytes only, and may return None: the message
        is not published then. `take_dropped` names it when it is whole.
    """

    cdef object exchange, key, edit
    cdef bytes last_props, last_edited, names, last_names
    cdef bint with_names, may_drop, is_dropping
    cdef bytes method   # of `may_drop`: the publish of the message whose header comes next
    cdef list dropped_tags
    cdef uint8_t bits
    cdef uint32_t frame_max
    cdef int expected
    cdef uint64_t body_left, limit
    cdef readonly uint64_t begun     # messages whose delivery was read: the last tag
    cdef readonly uint64_t published # messages that were published to their end
    cdef readonly uint64_t dropped   # messages that were dropped, to their end
    cdef readonly uint64_t body_bytes
    cdef readonly str unfit          # why no more is taken: a message that fits into no frame
    cdef uint8_t last_key[255]       # the routing key of the last delivery
    cdef uint8_t last_key_len
    # Messages whose body is larger than all before it: number, bytes of the body, routing key. The
    # first one that a destination finds too large is among them. GROWING_KEPT at most are kept.
    cdef list growing
    cdef uint64_t largest            # the last one's bytes

    def __init__(
        self, exchange, key, bint mandatory, edit, uint32_t frame_bytes_max, long long limit=-1,
        bint with_names=False, bint may_drop=False,
    ):
        for name in (exchange, key):
            if name is not None and len(<bytes?>name) > 255:
                raise ValueError("a name has at most 255 bytes")
        self.exchange, self.key, self.edit = exchange, key, edit
        self.with_names = with_names or may_drop
        self.may_drop = may_drop
        self.dropped_tags = []
        self.growing = []
        self.bits = 1 if mandatory else 0
        self.frame_max = frame_bytes_max
        self.limit = <uint64_t>limit if limit >= 0 else 0xffffffffffffffff
        self.expected = A_METHOD
        self.unfit = ""

    @property
    def is_between(self):
        """Whether the last message that was begun is whole."""
        return self.expected == A_METHOD

    @property
    def passed(self):
        """Messages that were published or dropped, to their end."""
        return self.published + self.dropped

    def take_dropped(self):
        """Return the delivery tags of the messages that were dropped since the last call."""
        cdef list dropped = self.dropped_tags
        self.dropped_tags = []
        return dropped

    def first_of(self, uint64_t size):
        """Return the words for the first message with a body of so many bytes; '' if not known.

        It is known if it is larger than all that were published before it.
        """
        for number, each, key in self.growing:
            if each == size:
                return _named(number, key, each)
        return ""

    def feed(self, const uint8_t[::1] data not None, size_t at):
        """Take frames from `at` on; return (position behind the last taken one, bytes to publish).

        It stops at a frame that is not whole, at a method that is no delivery, and at the limit.
        It stops for good at the header of a message whose edited properties do not fit into a
        frame: `unfit` says so. Raises Fault.
        """
        cdef size_t end = data.shape[0]
        cdef const uint8_t *base = &data[0] if end else NULL
        cdef const uint8_t *p
        cdef const uint8_t *exchange = NULL
        cdef const uint8_t *key = NULL
        cdef uint8_t *out
        cdef uint8_t *q
        cdef uint8_t *start
        cdef uint32_t exchange_len = 0, key_len = 0, size, channel, names, extra
        cdef uint64_t room
        cdef bytes edited
        cdef bint own_exchange = self.exchange is not None, own_key = self.key is not None
        if own_exchange:
            exchange, exchange_len = <const uint8_t *><char *>self.exchange, len(self.exchange)
        if own_key:
            key, key_len = <const uint8_t *><char *>self.key, len(self.key)
        if at > end:
            raise ValueError("outside of the buffer")
        if self.unfit:
            return at, b""
        extra = GROWTH + exchange_len + key_len
        # A delivery has a method frame of at least 24 bytes and a header frame of at least 22.
        room = (end - at) + <uint64_t>extra * ((end - at) // 24 + 1)
        if self.method is not None:  # of a message whose header was not there the last time
            room += len(self.method)
        parts = []
        buffer = PyByteArray_FromStringAndSize(NULL, room)
        out = q = <uint8_t *>PyByteArray_AS_STRING(buffer)
        while end - at >= FRAME_OVERHEAD:
            p = base + at
            size = get32(p + 3)
            if size > self.frame_max - FRAME_OVERHEAD:
                raise Fault(f"a frame of {size} bytes, {self.frame_max} were agreed on")
            if end - at < <size_t>size + FRAME_OVERHEAD:
                break
            if p[FRAME_HEAD + size] != FRAME_END:
                raise Fault("a frame has no end")
            channel = get16(p + 1)
            if p[0] == HEARTBEAT_FRAME:
                at += FRAME_OVERHEAD + size
                continue
            if channel != CHANNEL:
                if channel == 0 and p[0] == METHOD_FRAME:
                    break
                raise Fault(f"a frame of type {p[0]} on channel {channel}")
            if p[0] == METHOD_FRAME:
                if self.expected != A_METHOD:
                    if size >= 4 and get32(p + FRAME_HEAD) == (20 << 16 | 40):
                        break  # the channel may end within a message
                    raise Fault("a method within a message")
                if size < 4:
                    raise Fault("a method of fewer than 4 bytes")
                if get32(p + FRAME_HEAD) != DELIVER_IDS or self.begun >= self.limit:
                    break
                start = q
                q = self.publish(
                    p + FRAME_HEAD, size, q, exchange, exchange_len, key, key_len, own_exchange,
                    own_key,
                )
                if q == NULL:
                    raise Fault("a delivery that is cut short, or out of order")
                if self.with_names:  # behind the ids, the consumer tag and the delivery tag
                    names = 5 + p[FRAME_HEAD + 4] + 8
                    self.names = PyBytes_FromStringAndSize(
                        <const char *>p + FRAME_HEAD + names, 1 if self.may_drop else size - names
                    )
                if self.may_drop:  # its header decides
                    self.method = PyBytes_FromStringAndSize(<const char *>start, q - start)
                    q = start
                self.expected = A_HEADER
            elif p[0] == HEADER_FRAME:
                if self.expected != A_HEADER or size < 14 or get16(p + FRAME_HEAD) != 60:
                    raise Fault("a content header out of order")
                self.body_left = get64(p + FRAME_HEAD + 4)
                if self.edit is None:
                    edited = None
                else:
                    edited = self.edited(p + FRAME_HEAD + 12, size - 12)
                    self.is_dropping = self.may_drop and edited is None
                    if edited is not None and len(edited) > <ssize_t>(
                        self.frame_max - FRAME_OVERHEAD - 12
                    ):
                        self.unfit = self.too_large(len(edited))
                        break
                if self.may_drop:
                    if not self.is_dropping:
                        memcpy(q, <char *>self.method, len(self.method))
                        q += len(self.method)
                    self.method = None
                if self.is_dropping:
                    pass
                elif edited is None:
                    memcpy(q, p, size + FRAME_OVERHEAD)
                    q += size + FRAME_OVERHEAD
                elif (
                    <uint32_t>len(edited) == size - 12
                    and memcmp(<char *>edited, p + FRAME_HEAD + 12, size - 12) == 0
                ):
                    memcpy(q, p, size + FRAME_OVERHEAD)
                    q += size + FRAME_OVERHEAD
                else:
                    # What is edited may be of any size: it goes into a piece of its own.
                    parts.append(PyBytes_FromStringAndSize(<char *>out, q - out))
                    parts.append(_header(p + FRAME_HEAD, edited))
                    out = q
                if not self.is_dropping:
                    self.body_bytes += self.body_left
                    if self.body_left > self.largest:
                        self.note_largest()
                self.expected = A_BODY if self.body_left else A_METHOD
                if self.expected == A_METHOD:
                    self.end_message()
            elif p[0] == BODY_FRAME:
                if self.expected != A_BODY or size > self.body_left:
                    raise Fault("a body frame out of order")
                if not self.is_dropping:
                    memcpy(q, p, size + FRAME_OVERHEAD)
                    q += size + FRAME_OVERHEAD
                self.body_left -= size
                if not self.body_left:
                    self.expected = A_METHOD
                    self.end_message()
            else:
                raise Fault(f"a frame of type {p[0]}")
            at += <size_t>size + FRAME_OVERHEAD
        if q != out:
            parts.append(PyBytes_FromStringAndSize(<char *>out, q - out))
        return at, parts[0] if len(parts) == 1 else b"".join(parts)

    cdef uint8_t *publish(
        self, const uint8_t *p, uint32_t size, uint8_t *q, const uint8_t *exchange,
        uint32_t exchange_len, const uint8_t *key, uint32_t key_len, bint own_exchange, bint own_key
    ) noexcept:
        """Write the method frame of a publish for a delivery; return its end, NULL for a fault."""
        cdef uint32_t at = 5, n
        if size < 17:
            return NULL
        at += p[4]              # consumer tag
        if at + 10 > size or get64(p + at) != self.begun + 1:
            return NULL
        at += 9
        n = p[at]
        at += 1
        if at + n >= size:
            return NULL
        if not own_exchange:
            exchange, exchange_len = p + at, n
        at += n
        n = p[at]
        at += 1
        if at + n != size:
            return NULL
        if not own_key:
            key, key_len = p + at, n
        memcpy(self.last_key, p + at, n)
        self.last_key_len = <uint8_t>n
        self.begun += 1
        q[0] = METHOD_FRAME
        q = put16(q + 1, CHANNEL)
        q = put32(q, 9 + exchange_len + key_len)
        q = put16(put32(q, PUBLISH_IDS), 0)
        q[0] = <uint8_t>exchange_len
        memcpy(q + 1, exchange, exchange_len)
        q += 1 + exchange_len
        q[0] = <uint8_t>key_len
        memcpy(q + 1, key, key_len)
        q += 1 + key_len
        q[0] = self.bits
        q[1] = FRAME_END
        return q + 2

    cdef str too_large(self, size_t props):
        """Return which message has properties of so many bytes, and how many may be."""
        key = PyBytes_FromStringAndSize(<const char *>self.last_key, self.last_key_len)
        return (
            f"{_named(self.begun, key, self.body_left)} does not fit: with what is added, its "
            f"properties have {props} bytes, and a frame has room for "
            f"{self.frame_max - FRAME_OVERHEAD - 12}"
        )

    cdef note_largest(self):
        """Note the message whose header was read: its body is larger than all before it."""
        self.largest = self.body_left
        if len(self.growing) == GROWING_KEPT:
            del self.growing[0]  # it was refused or taken long ago
        key = PyBytes_FromStringAndSize(<const char *>self.last_key, self.last_key_len)
        self.growing.append((self.begun, self.body_left, key))

    cdef void end_message(self):
        if self.is_dropping:
            self.dropped += 1
            self.dropped_tags.append(self.begun)
        else:
            self.published += 1

    cdef bytes edited(self, const uint8_t *props, uint32_t size):
        cdef bytes given
        if (
            self.last_props is not None
            and <uint32_t>len(self.last_props) == size
            and memcmp(<char *>self.last_props, props, size) == 0
            and (not self.with_names or self.names == self.last_names)
        ):
            return self.last_edited
        given = PyBytes_FromStringAndSize(<const char *>props, size)
        if self.with_names:
            self.last_edited = self.edit(given, self.names)
            self.last_names = self.names
        else:
            self.last_edited = self.edit(given)
        self.last_props = given
        return self.last_edited

    def forget_edited(self):
        """Edit the next properties anew, even if they are equal to the last ones."""
        self.last_props = None


def _named(number, bytes key, size):
    return (
        f"message {number} with the routing key '{key.decode('utf-8', 'replace')}' and {size} bytes"
    )


cdef bytes _header(const uint8_t *payload, bytes props):
    """Return a header frame with the class and body size of `payload`, and these properties."""
    cdef uint32_t length = len(props)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, length + 12 + FRAME_OVERHEAD)
    cdef uint8_t *q = <uint8_t *>PyBytes_AS_STRING(frame)
    q[0] = HEADER_FRAME
    q = put32(put16(q + 1, CHANNEL), length + 12)
    memcpy(q, payload, 12)
    memcpy(q + 12, <char *>props, length)
    q[12 + length] = FRAME_END
    return frame


cdef class Settled:
    """Which publishes the destination has confirmed.

    `low`: all publishes up to this number are confirmed or refused. Those behind a gap are
    remembered until the gap closes. Their number is that of the messages in flight at most.

    All numbers that are told are those of deliveries. As long as none was dropped they are those of
    publishes too. `skipped`: so many up to `low` were dropped.
    """

    cdef readonly uint64_t low, skipped
    cdef set beyond
    cdef list refused
    cdef list skips  # numbers of deliveries that were dropped, in order
    cdef size_t skips_from  # those before this position are not above `low`

    def __init__(self):
        self.beyond = set()
        self.refused = []
        self.skips = []

    def skip(self, uint64_t number):
        """Count a delivery as settled that was dropped: each one in order, before later confirms.

        Raises ValueError for one that was settled or skipped before, or out of order.
        """
        cdef uint64_t last = self.skips[len(self.skips) - 1] if self.skips else 0
        if number <= self.low or number <= last:
            raise ValueError("a delivery is dropped once and in order")
        self.skips.append(number)
        self.beyond.add(number)
        self.close_gap()

    def take_refused(self):
        """Return the numbers of the publishes that were refused since the last call."""
        cdef list refused = self.refused
        self.refused = []
        return refused

    def feed(self, const uint8_t[::1] data not None, size_t at, uint64_t published):
        """Take confirms from `at` on, and heartbeats; return the position behind them.

        `published` is the number of publishes so far. Raises Fault for a confirm of another one,
        and for frames that are not whole or do not end.
        """
        cdef size_t end = data.shape[0]
        cdef const uint8_t *base = &data[0] if end else NULL
        cdef const uint8_t *p
        cdef uint64_t tag
        cdef uint32_t ids
        if at > end:
            raise ValueError("outside of the buffer")
        while end - at >= FRAME_OVERHEAD:
            p = base + at
            if p[0] == HEARTBEAT_FRAME and get32(p + 3) == 0 and p[FRAME_HEAD] == FRAME_END:
                at += FRAME_OVERHEAD
                continue
            if (
                p[0] != METHOD_FRAME or get16(p + 1) != CHANNEL or get32(p + 3) != 13
                or end - at < 21 or p[20] != FRAME_END
            ):
                break
            ids = get32(p + FRAME_HEAD)
            if ids != ACK_IDS and ids != NACK_IDS:
                break
            tag = get64(p + 11)
            if tag > published or (tag == 0 and not p[19] & 1):
                raise Fault(f"a confirm of publish {tag}, of {published}")
            if tag == 0:
                tag = published
            if self.skipped or self.skips:
                tag = self.delivery(tag)
            if ids == NACK_IDS:
                self.refuse(self.low + 1 if p[19] & 1 else tag, tag)
            if p[19] & 1:
                if tag > self.low:
                    self.low = tag
                    if self.beyond:
                        self.beyond = {each for each in self.beyond if each > tag}
            elif tag == self.low + 1:
                self.low = tag
            elif tag > self.low:
                self.beyond.add(tag)
            if self.beyond or self.skips:
                self.close_gap()
            at += 21
        return at

    cdef close_gap(self):
        """Move `low` behind all that is settled without a gap."""
        while self.beyond and self.low + 1 in self.beyond:
            self.low += 1
            self.beyond.discard(self.low)
        while self.skips_from < <size_t>len(self.skips):
            if <uint64_t>self.skips[self.skips_from] > self.low:
                break
            self.skips_from += 1
            self.skipped += 1
        if self.skips_from > SKIPS_KEPT and 2 * self.skips_from > <size_t>len(self.skips):
            del self.skips[:self.skips_from]
            self.skips_from = 0

    cdef uint64_t delivery(self, uint64_t publish):
        """Return the number of the delivery that was published as this number.

        A publish that was settled before may get the number of another settled one.
        """
        cdef uint64_t number = publish + self.skipped
        cdef size_t left = self.skips_from, right = len(self.skips), middle
        # The dropped ones before it are found by halves: the i-th one has as many others before it.
        while left < right:
            middle = (left + right) // 2
            if <uint64_t>self.skips[middle] <= number + (middle - self.skips_from):
                left = middle + 1
            else:
                right = middle
        return number + (left - self.skips_from)

    cdef refuse(self, uint64_t first, uint64_t last):
        """Note a nack of these publishes. Those that were confirmed before stay confirmed."""
        cdef uint64_t number
        for number in range(first, last + 1):
            if number > self.low and number not in self.beyond:
                self.refused.append(number)
