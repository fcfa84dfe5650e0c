"""Turn rows of Arrow columns into basic.publish: method, header and body frames, back to back.

This file knows how Arrow's arrays lie in memory (drawn in store/format/columns.pyx) and the frames
of AMQP 0-9-1, whose numbers are big endian. It waits for nobody.

    frame      u8 type (1 method, 2 header, 3 body) | u16 channel | u32 bytes | payload | 0xCE
    method     u16 60 | u16 40 | u16 0 | exchange | routing key | u8 bits (1: mandatory)
    header     u16 60 | u16 0 | u64 body bytes | u16 flags | properties
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy

from shardmq.shardd.content cimport NO_TYPE, SAYS_SIZE, value_bytes
from shardmq.shardd.grown cimport Grown, reserve

cdef enum:
    METHOD = 1
    HEADER = 2
    BODY = 3
    END = 0xCE
    CHANNEL = 1
    HEAD = 7
    SHORT_MAX = 255
    SHORT = 0
    OCTET = 1
    TIME = 2
    PROPERTIES = 12

# The columns of `properties` in their order, which is AMQP's: kind, and bit of the flags word.
cdef int[PROPERTIES] kind_of = [
    SHORT, SHORT, OCTET, OCTET, SHORT, SHORT, SHORT, SHORT, TIME, SHORT, SHORT, SHORT
]
cdef int[PROPERTIES] bit_of = [15, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3]
# Headers stand behind the first two.
cdef int HEADERS_AT = 2
cdef int HEADERS_BIT = 13
cdef int DELIVERY_MODE_BIT = 12


cdef inline void put_big(uint8_t *at, uint64_t value, int size) noexcept:
    cdef int i
    for i in range(size):
        at[i] = <uint8_t>(value >> (8 * (size - 1 - i)))


cdef int push_big(Grown *out, uint64_t value, int size) except -1:
    reserve(out, size)
    put_big(out.data + out.used, value, size)
    out.used += size
    return 0


cdef int push(Grown *out, const uint8_t *at, size_t size) except -1:
    reserve(out, size)
    memcpy(out.data + out.used, at, size)
    out.used += size
    return 0


cdef int push_short(Grown *out, const uint8_t *at, size_t size) except -1:
    push_big(out, size, 1)
    return push(out, at, size)


cdef class Column:
    """One Arrow array: bits (or None), then i32 ends and data, or numbers of `width` bytes.

    The array begins at its first row: it has no offset. Its buffers stay as they are while the
    column exists.
    """

    cdef Py_buffer[3] views
    cdef int count
    cdef const uint8_t *bits
    cdef const uint8_t *first  # ends, or numbers
    cdef const uint8_t *data
    cdef int64_t data_bytes
    cdef readonly long long rows
    cdef int width

    def __cinit__(self):
        self.count = 0
        self.bits = self.first = self.data = NULL

    def __init__(self, long long rows, bits, values, data=None, int width=4):
        self.rows, self.width = rows, width
        self.bits = self._view(bits, (rows + 7) // 8)
        self.first = self._view(values, (rows + 1) * 4 if data is not None else rows * width)
        if data is not None:
            self.data = self._view(data, 0)
            self.data_bytes = self.views[self.count - 1].len

    def __dealloc__(self):
        cdef int i
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])

    cdef const uint8_t *_view(self, buffer, long long size) except? NULL:
        cdef int at = self.count
        if buffer is None:
            return NULL
        PyObject_GetBuffer(buffer, &self.views[at], PyBUF_SIMPLE)
        self.count += 1
        if self.views[at].len < size:
            raise ValueError("a buffer is shorter than its rows")
        return <const uint8_t*>self.views[at].buf

    cdef inline bint there(self, int64_t row) noexcept:
        return self.bits == NULL or self.bits[row >> 3] >> (row & 7) & 1

    cdef inline int64_t _end(self, int64_t row) noexcept:
        cdef int32_t end
        memcpy(&end, self.first + 4 * row, 4)
        return end

    cdef inline const uint8_t *text(self, int64_t row, size_t *size) except? NULL:
        cdef int64_t begin = self._end(row), end = self._end(row + 1)
        if begin < 0 or end < begin or end > self.data_bytes:
            raise ValueError(f"row {row}: its bytes are not there")
        size[0] = end - begin
        return self.data + begin

    cdef inline int64_t number(self, int64_t row) noexcept:
        cdef int32_t narrow
        cdef int64_t wide
        if self.width == 4:
            memcpy(&narrow, self.first + 4 * row, 4)
            return narrow
        memcpy(&wide, self.first + 8 * row, 8)
        return wide


cdef class Publishes:
    """Rows to be published.

    `value` has no nulls. Without `properties` all messages are persistent, else those that the
    column says.
    """

    cdef Column value, routing_key, exchange
    # The entries of the headers; `header_rows` has only ends.
    cdef Column header_rows, header_key, header_type, header_value
    cdef list properties
    cdef bytes default_key, default_exchange, producer
    cdef uint64_t sequence
    cdef uint8_t bits
    cdef size_t body_bytes_max
    cdef Grown out
    cdef readonly long long rows

    def __init__(
        self, Column value, bytes default_exchange, bytes default_key, bint mandatory,
        size_t frame_bytes_max, Column routing_key=None, Column exchange=None, tuple headers=None,
        list properties=None, bytes producer=None, unsigned long long sequence=0
    ):
        """Begin with columns, and with defaults for rows that do not say where they go.

        `headers` has the ends of the rows, then key, type and value of the entries. `sequence` is
        that of the first row.
        """
        self.value, self.routing_key, self.exchange = value, routing_key, exchange
        self.rows = value.rows
        self.default_exchange, self.default_key = default_exchange, default_key
        self.bits = 1 if mandatory else 0
        self.body_bytes_max = frame_bytes_max - HEAD - 1
        if headers is not None:
            self.header_rows, self.header_key, self.header_type, self.header_value = headers
        self.properties = properties
        self.producer, self.sequence = producer, sequence
        if len(default_exchange) > SHORT_MAX or len(default_key) > SHORT_MAX:
            raise ValueError(f"exchange and routing_key have at most {SHORT_MAX} bytes")
        if producer is not None and not 1 <= len(producer) <= SHORT_MAX:
            raise ValueError(f"producer has 1 to {SHORT_MAX} bytes")

    def __dealloc__(self):
        free(self.out.data)

    def encode(self, long long row, size_t bytes_max) -> tuple:
        """Return (frames, next row) of rows from `row` on until there are `bytes_max` bytes.

        At least one row is encoded. Raise ValueError, which names the row and what is wrong with
        it.
        """
        self.out.used = 0
        while row < self.rows and (self.out.used == 0 or self.out.used < bytes_max):
            self._add(row)
            row += 1
        return PyByteArray_FromStringAndSize(<char*>self.out.data, self.out.used), row

    cdef int _add(self, int64_t row) except -1:
        cdef size_t start, size, step
        cdef const uint8_t *body
        body = self.value.text(row, &size)
        start = self._begin(METHOD)
        push_big(&self.out, 60 << 16 | 40, 4)
        push_big(&self.out, 0, 2)
        self._name(row, self.exchange, self.default_exchange, "exchange")
        self._name(row, self.routing_key, self.default_key, "routing_key")
        push_big(&self.out, self.bits, 1)
        self._end(start)
        start = self._begin(HEADER)
        push_big(&self.out, 60 << 16, 4)
        push_big(&self.out, size, 8)
        self._properties(row)
        self._end(start)
        while size:
            step = min(size, self.body_bytes_max)
            start = self._begin(BODY)
            push(&self.out, body, step)
            self._end(start)
            body += step
            size -= step
        return 0

    cdef size_t _begin(self, int kind) except? 0:
        push_big(&self.out, kind, 1)
        push_big(&self.out, CHANNEL, 2)
        push_big(&self.out, 0, 4)
        return self.out.used

    cdef int _end(self, size_t start) except -1:
        if self.out.used - start > self.body_bytes_max:
            raise ValueError(f"properties of more than {self.body_bytes_max} bytes")
        put_big(self.out.data + start - 4, self.out.used - start, 4)
        return push_big(&self.out, END, 1)

    cdef int _name(self, int64_t row, Column column, bytes otherwise, str what) except -1:
        cdef size_t size
        cdef const uint8_t *at
        if column is not None and column.there(row):
            at = column.text(row, &size)
            if size > SHORT_MAX:
                raise ValueError(f"row {row}: {what} has more than {SHORT_MAX} bytes")
        else:
            at, size = <const uint8_t*><const char*>otherwise, len(otherwise)
        return push_short(&self.out, at, size)

    cdef int _properties(self, int64_t row) except -1:
        cdef size_t flags_at = self.out.used
        cdef uint32_t flags = 0
        cdef int i
        push_big(&self.out, 0, 2)
        for i in range(PROPERTIES):
            if i == HEADERS_AT and self._headers(row):
                flags |= 1 << HEADERS_BIT
            if self.properties is None:
                if bit_of[i] == DELIVERY_MODE_BIT:
                    flags |= 1 << DELIVERY_MODE_BIT
                    push_big(&self.out, 2, 1)
            elif self._property(row, i, <Column>self.properties[i]):
                flags |= 1 << bit_of[i]
        put_big(self.out.data + flags_at, flags, 2)
        return 0

    cdef bint _property(self, int64_t row, int i, Column column) except -1:
        cdef size_t size
        cdef const uint8_t *at
        cdef int64_t number
        if column is None or not column.there(row):
            return False
        if kind_of[i] == SHORT:
            at = column.text(row, &size)
            if size > SHORT_MAX:
                raise ValueError(f"row {row}: a property has more than {SHORT_MAX} bytes")
            push_short(&self.out, at, size)
            return True
        number = column.number(row)
        if number < 0 or (kind_of[i] == OCTET and number > 255):
            raise ValueError(f"row {row}: a property is {number}")
        push_big(
            &self.out, number if kind_of[i] == OCTET else number // 1000000,
            1 if kind_of[i] == OCTET else 8
        )
        return True

    cdef bint _headers(self, int64_t row) except -1:
        """Whether there are any. What names another producer is left out."""
        cdef size_t start = self.out.used
        cdef int64_t entry
        cdef bint there = self.header_rows is not None and self.header_rows.there(row)
        if not there and self.producer is None:
            return False
        push_big(&self.out, 0, 4)
        if there:
            for entry in range(self.header_rows._end(row), self.header_rows._end(row + 1)):
                self._header(row, entry)
        if self.producer is not None:
            push_short(&self.out, <const uint8_t*>"x-producer-id", 13)
            push(&self.out, <const uint8_t*>"S", 1)
            push_big(&self.out, len(self.producer), 4)
            push(&self.out, <const uint8_t*><const char*>self.producer, len(self.producer))
            push_short(&self.out, <const uint8_t*>"x-sequence", 10)
            push(&self.out, <const uint8_t*>"l", 1)
            push_big(&self.out, self.sequence + <uint64_t>row, 8)
        put_big(self.out.data + start, self.out.used - start - 4, 4)
        return True

    cdef int _header(self, int64_t row, int64_t entry) except -1:
        cdef size_t key_bytes, type_bytes, size
        cdef int fixed
        cdef const uint8_t *key
        cdef const uint8_t *type
        cdef const uint8_t *value
        if not 0 <= entry < self.header_key.rows:
            raise ValueError(f"row {row}: its headers are not there")
        key = self.header_key.text(entry, &key_bytes)
        if self.producer is not None and (
            (key_bytes == 13 and memcmp(key, <const char*>"x-producer-id", 13) == 0)
            or (key_bytes == 10 and memcmp(key, <const char*>"x-sequence", 10) == 0)
        ):
            return 0
        type = self.header_type.text(entry, &type_bytes)
        value = self.header_value.text(entry, &size)
        fixed = value_bytes(type[0]) if type_bytes == 1 else NO_TYPE
        if (
            key_bytes > SHORT_MAX
            or fixed == NO_TYPE
            or (fixed != SAYS_SIZE and <size_t>fixed != size)
        ):
            name = (<const char*>key)[:min(key_bytes, SHORT_MAX)].decode("utf-8", "replace")
            raise ValueError(f"row {row}: header '{name}' is no value of AMQP")
        push_short(&self.out, key, key_bytes)
        push(&self.out, type, 1)
        if fixed == SAYS_SIZE:
            push_big(&self.out, size, 4)
        return push(&self.out, value, size)
