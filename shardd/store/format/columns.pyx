# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Turn chunks of a stream into columns: the buffers of Arrow arrays.

They are made directly from the bytes of a window. The shapes are drawn elsewhere: a chunk in
chunk.pyx, a stored message in record.pyx, properties and tables in shardd/content.pxd. In memory
the arrays lie as Arrow has them:

    text, bytes    i32 ends[rows + 1], the first 0 | data back to back
                   | a bit per row that has a value, lowest first
    numbers        i32 or i64 [rows] | bits as above
    headers        i32 ends[rows + 1] of the entries | bits;
                   the entries' key, type and value are columns of their own
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.content cimport (
    HEADERS_BIT, Properties, Table, properties_begin, properties_next, table_begin, table_next,
)
from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.octets cimport be32, copy_short
from shardmq.shardd.store.format.chunk_shape cimport CHUNK_HEADER, CUT_OFF, FILTERS, chunk_bytes
from shardmq.shardd.store.format.layout cimport RECORD_HEADER, message_bytes, u16, u32, u64

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int handle, void *to, size_t size, int64_t position)

crc32c_start()

OFFSET, TIMESTAMP, EXCHANGE, ROUTING_KEY, VALUE, HEADERS, PROPERTIES = 1, 2, 4, 8, 16, 32, 64

cdef enum:
    # Kinds of words in a topic pattern, which has at most 255 bytes.
    LITERAL = 0
    STAR = 1
    HASH = 2
    PATTERN_WORDS = 129
    C_OFFSET = 1
    C_TIMESTAMP = 2
    C_EXCHANGE = 4
    C_KEY = 8
    C_VALUE = 16
    C_HEADERS = 32
    C_PROPERTIES = 64
    PLAIN = 1 | 2 | 16  # columns of numbers, and the value
    # Properties: bits of the flags word, the highest first.
    SHORT = 0
    TABLE = 1
    OCTET = 2
    TIME = 3
    KINDS = 14
    NUMBERS = 3
    TEXTS = 9
    # These bytes tell the length of a chunk: its header, and the names of a message that is alone.
    HEAD_BYTES_MAX = CHUNK_HEADER + 4 * FILTERS + 10 + 255
    CACHE_LINE = 64

# For each property from bit 15 down: its kind, and its place among the columns of that kind, -1 if
# it has no column.
cdef int[KINDS] kind_of = [
    SHORT, SHORT, TABLE, OCTET, OCTET, SHORT, SHORT, SHORT, SHORT, TIME, SHORT, SHORT, SHORT, SHORT
]
cdef int[KINDS] place_of = [0, 1, -1, 0, 1, 2, 3, 4, 5, 2, 6, 7, 8, -1]
PROPERTY_COLUMNS = (
    "content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to",
    "expiration", "message_id", "timestamp", "type", "user_id", "app_id",
)

# Seconds beyond which microseconds do not fit.
cdef uint64_t SECONDS_MAX = 9223372036854


cdef extern from *:
    """
    #if defined(__GNUC__)
    /* Returns `found`, by way of a branch that is not taken while `guess` is right: the processor
       then goes on with the guess and does not wait for `found`. */
    static inline uint64_t shardd_guessed(uint64_t found, uint64_t guess) {
        uint64_t right = guess;
        __asm__("" : "+r"(right));
        if (__builtin_expect(found != guess, 0)) {
            __asm__ volatile("" : "+r"(found));
            return found;
        }
        return right;
    }
    #else
    #define shardd_guessed(found, guess) (found)
    #endif
    """
    uint64_t guessed "shardd_guessed"(uint64_t found, uint64_t guess) noexcept nogil


# -- columns that grow: `push_` and `fill_` make the room they need, `put_` has it already ---------


cdef inline int push32(Grown *grown, int32_t value) except -1 nogil:
    reserve(grown, 4)
    memcpy(grown.data + grown.used, &value, 4)
    grown.used += 4
    return 0


cdef inline int push64(Grown *grown, int64_t value) except -1 nogil:
    reserve(grown, 8)
    memcpy(grown.data + grown.used, &value, 8)
    grown.used += 8
    return 0


cdef inline int fill_bits(Grown *bits, uint64_t rows) except -1 nogil:
    """Add bits that are not set, until there is one for each of `rows`."""
    cdef size_t size = (rows + 7) >> 3
    if size > bits.used:
        reserve(bits, size - bits.used)
        memset(bits.data + bits.used, 0, size - bits.used)
        bits.used = size
    return 0


cdef inline int set_bit(Grown *bits, uint64_t row) except -1 nogil:
    fill_bits(bits, row + 1)
    bits.data[row >> 3] |= <uint8_t>(1 << (row & 7))
    return 0


cdef inline int fill32(Grown *grown, uint64_t count, int32_t value) except -1 nogil:
    cdef int32_t *out
    cdef uint64_t i
    reserve(grown, 4 * count)
    out = <int32_t*>(grown.data + grown.used)
    for i in range(count):
        out[i] = value
    grown.used += 4 * count
    return 0


cdef inline bint is_ascii(const uint8_t *at, size_t size) noexcept nogil:
    """Return whether all bytes are ASCII. The last word overlaps the one before it."""
    cdef size_t i = 0
    cdef uint64_t seen = 0
    if size >= 8:
        while i + 8 <= size:
            seen |= u64(at + i)
            i += 8
        seen |= u64(at + size - 8)
    elif size >= 4:
        seen = u32(at) | u32(at + size - 4)
    elif size:
        seen = at[0] | at[size >> 1] | at[size - 1]
    return seen & <uint64_t>0x8080808080808080 == 0


cdef inline int clear_text(Text *text) except -1 nogil:
    text.ends.used = text.data.used = text.valid.used = 0
    text.rows = text.nulls = 0
    return push32(&text.ends, 0)


cdef inline void free_text(Text *text) noexcept:
    free(text.ends.data)
    free(text.data.data)
    free(text.valid.data)


cdef inline int push_bytes(Text *text, const uint8_t *at, size_t size) except -1 nogil:
    """Add one value, without a bit."""
    reserve(&text.data, size)
    copy_short(text.data.data + text.data.used, at, size)
    text.data.used += size
    text.rows += 1
    return push32(&text.ends, <int32_t>text.data.used)


cdef inline void put_number(Grown *grown, int64_t value) noexcept nogil:
    (<int64_t*>(grown.data + grown.used))[0] = value
    grown.used += 8


cdef inline void put_end(Text *text) noexcept nogil:
    """Add the end of one value."""
    (<int32_t*>(text.ends.data + text.ends.used))[0] = <int32_t>text.data.used
    text.ends.used += 4
    text.rows += 1


cdef inline int fill_text(Text *text, uint64_t rows) except -1 nogil:
    """Add rows without a value, until there are `rows`."""
    cdef uint64_t more = rows - text.rows
    if more:
        fill32(&text.ends, more, <int32_t>text.data.used)
        text.rows = rows
        text.nulls += more
    return fill_bits(&text.valid, rows)


cdef inline int fill_number(Number *number, uint64_t rows, size_t width) except -1 nogil:
    cdef uint64_t more = rows - number.rows
    if more:
        reserve(&number.values, width * more)
        memset(number.values.data + number.values.used, 0, width * more)
        number.values.used += width * more
        number.rows = rows
        number.nulls += more
    return fill_bits(&number.valid, rows)


# -- arrays and filters ----------------------------------------------------------------------------


cdef struct Word:
    int kind
    const uint8_t *at
    size_t size


cdef class Arrays:
    """Where the arrays of a batch lie, filled by `Columns.lay_out` and `repeat` in their order.

    As Arrow counts them: nodes (an array and those within it, parents first) and the buffers of all
    nodes. The pointers lead to memory of an owner that is kept alive. They are noted once and hold
    for batch after batch, as long as buffers are looked up through `Grown`.
    """

    def __cinit__(self):
        self.values = []

    def __dealloc__(self):
        cdef int i
        for i in range(self.repeats):
            free_text(&self.repeated[i].text)

    def repeat(self, bytes value, bint is_text) -> None:
        """Add a column that has the same value in each row.

        `value` is a text, or the bytes of a number.
        """
        cdef Repeated *repeated = &self.repeated[self.repeats]
        if self.repeats == REPEATED_MAX or self.rows == NULL:
            raise ValueError("two columns may repeat, of a batch that has rows")
        self.repeats += 1
        self.values.append(value)
        repeated.value, repeated.size = <const uint8_t*><const char*>value, len(value)
        self.add_node(self.rows, NULL, NULL)
        if is_text:
            self.add_buffer(&repeated.text.ends)
        self.add_buffer(&repeated.text.data)

    cdef int add_node(self, const uint64_t *rows, const uint64_t *nulls, Grown *bits) except -1:
        if self.nodes == NODES_MAX:
            raise ValueError("too many arrays")
        self.node[self.nodes].rows, self.node[self.nodes].nulls = rows, nulls
        self.nodes += 1
        self.add_buffer(bits)
        self.buffer[self.buffers - 1].nulls = nulls
        return 0

    cdef int add_buffer(self, Grown *memory) except -1:
        if self.buffers == BUFFERS_MAX:
            raise ValueError("too many buffers")
        self.buffer[self.buffers].memory, self.buffer[self.buffers].nulls = memory, NULL
        self.buffers += 1
        return 0

    cdef int add_text(self, const uint64_t *rows, Text *text, bint nullable) except -1:
        self.add_node(rows, &text.nulls if nullable else NULL, &text.valid if nullable else NULL)
        self.add_buffer(&text.ends)
        return self.add_buffer(&text.data)

    cdef int settle(self) except -1 nogil:
        """Make the repeated values as many as the rows of the batch.

        They are made for the longest batch so far; a shorter one uses their beginning.
        """
        cdef int i
        cdef uint64_t row, rows = self.rows[0]
        cdef Repeated *repeated
        for i in range(self.repeats):
            repeated = &self.repeated[i]
            repeated.text.ends.used = repeated.text.data.used = 0
            reserve(&repeated.text.ends, 4 * (rows + 1))
            reserve(&repeated.text.data, repeated.size * rows)
            if rows > repeated.rows or repeated.rows == 0:
                for row in range(rows + 1):
                    (<int32_t*>repeated.text.ends.data)[row] = <int32_t>(row * repeated.size)
                for row in range(rows):
                    memcpy(
                        repeated.text.data.data + row * repeated.size, repeated.value, repeated.size
                    )
                repeated.rows = rows
            repeated.text.ends.used = 4 * (rows + 1)
            repeated.text.data.used = repeated.size * rows
        return 0


cdef class Sink:
    """Takes batch after batch out of compiled code."""

    cdef bint take(self) except -1 nogil:
        """Take a batch; return whether another may follow at once.

        The memory of the batch is cleared after this.
        """
        with gil:
            raise NotImplementedError


cdef class Filter:
    """Choose the messages of a stream that become rows: those for which all given conditions hold.
    """

    cdef Word[PATTERN_WORDS] words
    cdef int count  # of words, -1: any routing key
    cdef bytes pattern, key, exchange  # what the words point into
    cdef Word wanted_key, wanted_exchange  # `at` NULL: any
    cdef uint64_t since, until

    def __init__(self, pattern=None, key=None, exchange=None, since=0, until=(1 << 64) - 1):
        """Make a filter; what is None lets all messages through.

        `pattern` is one of a topic binding, at most 255 bytes. A chunk passes with a timestamp from
        `since` on and below `until`, in ms.
        """
        self.pattern, self.key, self.exchange = pattern, key, exchange
        self.since, self.until = since, until
        self.wanted_key, self.wanted_exchange = _word(key), _word(exchange)
        self.count = -1
        if pattern is not None:
            if len(pattern) > 255:
                raise ValueError("a pattern has at most 255 bytes")
            self._split(pattern)

    cdef int _split(self, bytes pattern) except -1:
        cdef const uint8_t *at = <const uint8_t*><const char*>pattern
        cdef size_t total = len(pattern), begin = 0, i
        cdef Word *word
        self.count = 0
        if total == 0:
            return 0
        for i in range(total + 1):
            if i < total and at[i] != c".":
                continue
            word = &self.words[self.count]
            word.at, word.size = at + begin, i - begin
            word.kind = LITERAL
            if word.size == 1:
                word.kind = STAR if at[begin] == c"*" else HASH if at[begin] == c"#" else LITERAL
            self.count += 1
            begin = i + 1
        return 0

    cdef bint in_time(self, uint64_t timestamp) noexcept nogil:
        return self.since <= timestamp < self.until

    cdef bint passes(self, const uint8_t *message) noexcept nogil:
        cdef size_t n = message[8], m = message[9 + message[8]]
        if (
            not _equal(&self.wanted_exchange, message + 9, n)
            or not _equal(&self.wanted_key, message + 10 + n, m)
        ):
            return False
        return self.count < 0 or self._matches(message + 10 + n, m)

    cdef bint _matches(self, const uint8_t *key, size_t size) noexcept nogil:
        """Return whether a routing key matches the pattern.

        `reached[j]` says that the first j words of the pattern can stand for the words of the key
        so far.
        """
        cdef uint8_t[PATTERN_WORDS + 1] reached
        cdef size_t begin = 0, i
        memset(reached, 0, sizeof(reached))
        reached[0] = 1
        self._pass_hashes(reached)
        if size:
            for i in range(size + 1):
                if i == size or key[i] == c".":
                    self._take_word(reached, key + begin, i - begin)
                    begin = i + 1
        return reached[self.count] != 0

    cdef void _take_word(self, uint8_t *reached, const uint8_t *at, size_t size) noexcept nogil:
        cdef int j
        cdef bint stays, comes
        cdef Word *word
        for j in range(self.count, -1, -1):
            stays = j < self.count and self.words[j].kind == HASH and reached[j]
            comes = False
            if j > 0 and reached[j - 1]:
                word = &self.words[j - 1]
                comes = word.kind == STAR or (
                    word.kind == LITERAL and word.size == size and memcmp(word.at, at, size) == 0
                )
            reached[j] = stays or comes
        self._pass_hashes(reached)

    cdef void _pass_hashes(self, uint8_t *reached) noexcept nogil:
        cdef int j
        for j in range(self.count):
            if reached[j] and self.words[j].kind == HASH:
                reached[j + 1] = 1


cdef Word _word(bytes said):
    cdef Word word
    word.kind = LITERAL
    word.at, word.size = NULL, 0
    if said is not None:
        word.at, word.size = <const uint8_t*><const char*>said, len(said)
    return word


cdef inline bint _equal(Word *wanted, const uint8_t *at, size_t size) noexcept nogil:
    return wanted.at == NULL or (wanted.size == size and memcmp(wanted.at, at, size) == 0)


cdef int push_replaced(Text *text, const uint8_t *at, size_t size) except -1 with gil:
    """Add a text whose bytes are no UTF-8, with those bytes replaced.

    This is a function of its own because a function that may take the interpreter's lock prepares
    for it at each call.
    """
    cdef bytes said = (<const char*>at)[:size].decode("utf-8", "replace").encode()
    return push_bytes(text, <const uint8_t*><const char*>said, len(said))


cdef inline int push_text(Text *text, const uint8_t *at, size_t size) except -1 nogil:
    """Add a text as UTF-8, which Arrow asks for: other bytes are replaced."""
    return push_bytes(text, at, size) if is_ascii(at, size) else push_replaced(text, at, size)


cdef inline int put_name(Text *text, const uint8_t *at, size_t size) except -1 nogil:
    """Add a text as `push_text` does, where there is room for its end."""
    if not is_ascii(at, size):
        return push_replaced(text, at, size)
    reserve(&text.data, size)
    copy_short(text.data.data + text.data.used, at, size)
    text.data.used += size
    put_end(text)
    return 0


cdef inline uint64_t big64(const uint8_t *at) noexcept nogil:
    return <uint64_t>be32(at) << 32 | be32(at + 4)


cdef int _not_well_made() except -1 with gil:
    raise ValueError("a chunk with a good crc is not well made")


cdef class Columns:
    """The rows of a batch, taken one after the other out of windows of a segment.

    The object is kept and used for batch after batch. Its attributes say how far a `take` came.
    """

    cdef int wanted
    cdef Filter filter
    cdef Grown offsets, timestamps
    cdef Text exchange, key, value
    cdef Grown headers, headers_valid  # ends of the rows' entries
    cdef uint64_t headers_rows
    cdef Text header_key, header_type, header_value
    cdef uint64_t headers_nulls
    cdef Text[TEXTS] texts
    cdef Number[NUMBERS] numbers
    # Where the last batch became full: the position of the chunk, the offset of the message in it,
    # and where this message begins.
    cdef uint64_t left_position, left_offset, left_at
    cdef readonly unsigned long long rows
    cdef readonly unsigned long long bytes  # of their stored messages
    cdef readonly unsigned long long position  # of the chunk to go on with
    cdef readonly unsigned long long offset  # of the message to go on with
    cdef readonly unsigned long long checked  # position of the last good chunk, 0: none
    cdef readonly unsigned long long base, used  # the window: `used` bytes from `base` on
    cdef readonly unsigned long long need  # bytes needed from `position` on, 0: enough were there
    cdef readonly bint damaged  # there is no good chunk at `position`
    cdef readonly bint full  # the next message would be too much

    def __init__(self, int wanted, Filter filter=None):
        self.wanted = wanted
        self.filter = filter
        self.clear()

    def __dealloc__(self):
        cdef int i
        free(self.offsets.data)
        free(self.timestamps.data)
        free(self.headers.data)
        free(self.headers_valid.data)
        free_text(&self.exchange)
        free_text(&self.key)
        free_text(&self.value)
        free_text(&self.header_key)
        free_text(&self.header_type)
        free_text(&self.header_value)
        for i in range(TEXTS):
            free_text(&self.texts[i])
        for i in range(NUMBERS):
            free(self.numbers[i].values.data)
            free(self.numbers[i].valid.data)

    def clear(self) -> None:
        self._clear()

    cdef int _clear(self) except -1 nogil:
        cdef int i
        self.rows = self.bytes = self.headers_nulls = self.headers_rows = 0
        self.offsets.used = self.timestamps.used = self.headers.used = self.headers_valid.used = 0
        push32(&self.headers, 0)
        clear_text(&self.exchange)
        clear_text(&self.key)
        clear_text(&self.value)
        clear_text(&self.header_key)
        clear_text(&self.header_type)
        clear_text(&self.header_value)
        for i in range(TEXTS):
            clear_text(&self.texts[i])
        for i in range(NUMBERS):
            self.numbers[i].values.used = self.numbers[i].valid.used = 0
            self.numbers[i].rows = self.numbers[i].nulls = 0
        return 0

    def take(
        self, bytearray window, unsigned long long base, unsigned long long used,
        unsigned long long position, unsigned long long checked, uint32_t salt,
        unsigned long long offset, unsigned long long limit, unsigned long long rows_max,
        unsigned long long bytes_max, int handle=-1, unsigned long long end=0,
        unsigned long long piece=0, Sink sink=None
    ) -> None:
        """Add messages from `offset` on and below `limit`, until the batch is full.

        It is full with `rows_max` rows, or when the next message would make it more than
        `bytes_max`. The messages come from the chunks from `position` on in `window`, which holds
        `used` bytes of the file from `base` on. The chunk at `checked` is known to be good.

        `handle` is a descriptor of the file, of which the first `end` bytes may be read. The bytes
        behind the window are then read into it, a chunk at a time, or `piece` bytes where chunks
        are smaller, so that they are still in the cache when they are looked at. What does not fit
        or cannot be read is left to the caller, as without a descriptor. `base` and `used` say what
        the window holds in the end.

        With a `sink` full batches go there, until it wants no more at once. Then there are no rows,
        and `full` is set.
        """
        cdef uint8_t *data = <uint8_t*>PyByteArray_AS_STRING(window)
        cdef uint64_t size = PyByteArray_GET_SIZE(window)
        if used > size or position < base:
            raise ValueError("window is shorter than said")
        self.position, self.offset, self.checked = position, offset, checked
        self.base, self.used = base, used
        with nogil:
            while True:
                self._walk(data, salt, limit, rows_max, bytes_max)
                while (
                    handle >= 0
                    and self._is_cut_off(end, limit)
                    and self._read_on(handle, end, piece, data, size)
                ):
                    self._walk(data, salt, limit, rows_max, bytes_max)
                if not self.full or sink is None or not self._hand_over(sink):
                    break

    def flush(self, Sink sink not None) -> None:
        """Hand the rows to the sink."""
        with nogil:
            self._hand_over(sink)

    cdef bint _hand_over(self, Sink sink) except -1 nogil:
        cdef bint more
        cdef int i
        if self.wanted & C_HEADERS:
            self._fill_headers(self.rows)
        if self.wanted & C_PROPERTIES:
            for i in range(TEXTS):
                fill_text(&self.texts[i], self.rows)
            for i in range(KINDS):
                if place_of[i] >= 0 and kind_of[i] != SHORT:
                    fill_number(
                        &self.numbers[place_of[i]], self.rows, 8 if kind_of[i] == TIME else 4
                    )
        more = sink.take()
        self._clear()
        return more

    cdef bint _is_cut_off(self, uint64_t end, uint64_t limit) noexcept nogil:
        """Return whether the file has more, and only the window was too short."""
        if self.full or self.damaged or self.offset >= limit or self.base + self.used >= end:
            return False
        return self.need != 0 or self.position >= self.base + self.used

    cdef bint _read_on(
        self, int handle, uint64_t end, uint64_t piece, uint8_t *data, uint64_t size
    ) noexcept nogil:
        """Read on from `position`; return whether the window now reaches further than before.

        The bytes that the window has from there are read again, so that source and target lie alike
        in their cache lines: the kernel's copy is then up to twice as fast.
        """
        cdef uint64_t before = (self.position - <uint64_t>data) % CACHE_LINE, wanted = piece
        cdef uint64_t had = self.base + self.used
        cdef ssize_t got
        # Up to the next chunk's header, which says how much to read then.
        if self.need > piece >> 1:
            wanted = self.need + CHUNK_HEADER
        wanted = min(wanted + before, end - self.position + before)
        if before > self.position or wanted > size:
            return False
        got = pread(handle, data, wanted, <int64_t>(self.position - before))
        if got < <int64_t>wanted:
            self.used = 0  # what is left in it is of both
            return False
        self.base, self.used = self.position - before, wanted
        return self.base + wanted > had

    cdef int _walk(self, const uint8_t *data, uint32_t salt, uint64_t limit, uint64_t rows_max,
                   uint64_t bytes_max) except -1 nogil:
        cdef const uint8_t *chunk
        cdef uint64_t length, room, first, base = self.base, used = self.used
        self.need = 0
        self.damaged = self.full = False
        while self.offset < limit and self.position < base + used:
            chunk = data + (self.position - base)
            room = base + used - self.position
            length = chunk_bytes(chunk, room)
            if length == CUT_OFF or length > room:
                if length == CUT_OFF:  # the head of its message checks the length of a long chunk
                    length = room + HEAD_BYTES_MAX if room >= CHUNK_HEADER else CHUNK_HEADER
                self.need = length
                break
            if (
                length == 0
                or (
                    self.position != self.checked
                    and c_crc32c(0, chunk + 8, length - 8) ^ salt != u32(chunk + 4)
                )
            ):
                self.damaged = True
                break
            self.checked = self.position
            first = u64(chunk + 28)
            if first >= limit:
                self.offset = limit
                break
            if self.filter is None or self.filter.in_time(u64(chunk + 8)):
                self._take(chunk, length, limit, rows_max, bytes_max)
                if self.full or self.offset >= limit:
                    break  # it may hold more, for another scan
            else:
                self.offset = max(self.offset, first + u32(chunk + 20))
            self.position += length
        return 0

    cdef int _take(self, const uint8_t *chunk, uint64_t length, uint64_t limit, uint64_t rows_max,
                   uint64_t bytes_max) except -1 nogil:
        cdef uint64_t first = u64(chunk + 28), count = u32(chunk + 20), i, size, before = 0
        cdef uint64_t at = RECORD_HEADER + 4 * <uint64_t>u16(chunk + 24)
        cdef int64_t time_us = <int64_t>(u64(chunk + 8) * 1000)
        cdef bint steady = False
        if first + count <= self.offset:
            return 0
        if first < self.offset:
            at = self._begin(chunk, length, at, self.offset - first)
            count -= self.offset - first
            first = self.offset
        count = min(count, limit - first)
        self._make_room(count, length)
        if self.filter is None and not self.wanted & ~PLAIN:
            return self._take_plain(chunk, length, at, first, count, rows_max, bytes_max)
        for i in range(count):
            size = message_bytes(chunk + at, length - at)
            if size == 0:
                _not_well_made()
            if steady:  # most likely all have one length: the next place is known
                size = guessed(size, before)
            steady = size == before
            before = size
            if self.filter is None or self.filter.passes(chunk + at):
                if self.rows >= rows_max or (self.rows and self.bytes + size > bytes_max):
                    return self._leave(first + i, at)
                self._add(chunk + at, <int64_t>(first + i), time_us)
                self.bytes += size
            at += size
            self.offset = first + i + 1
        return 0

    cdef int64_t _begin(
        self, const uint8_t *chunk, uint64_t length, uint64_t at, uint64_t passed
    ) except -1 nogil:
        """Return where the message behind the first `passed` ones begins."""
        cdef uint64_t i, size
        if (
            self.position == self.left_position
            and self.offset == self.left_offset
            and self.left_at < length
        ):
            return <int64_t>self.left_at
        for i in range(passed):
            size = message_bytes(chunk + at, length - at)
            if size == 0:
                _not_well_made()
            at += size
        return <int64_t>at

    cdef int _leave(self, uint64_t offset, uint64_t at) except -1 nogil:
        """Remember where the next batch begins."""
        self.full = True
        self.left_position, self.left_offset, self.left_at = self.position, offset, at
        return 0

    cdef int _take_plain(
        self, const uint8_t *chunk, uint64_t length, uint64_t at, uint64_t first, uint64_t count,
        uint64_t rows_max, uint64_t bytes_max
    ) except -1 nogil:
        """Do what the loop in `_take` does, without a filter, for columns that have room already.

        Most readers want all of a stream, and this way costs half as much.
        """
        cdef uint64_t rows = min(count, rows_max - self.rows if self.rows < rows_max else 0), i = 0
        cdef uint64_t size, total = 0
        cdef uint64_t bytes_left = bytes_max - self.bytes if self.bytes < bytes_max else 0
        cdef uint64_t before = 0
        cdef bint steady = False
        cdef const uint8_t *message
        cdef int32_t *ends = <int32_t*>(self.value.ends.data + self.value.ends.used)
        cdef uint8_t *values = self.value.data.data
        cdef size_t end = self.value.data.used, body
        cdef bint with_value = self.wanted & C_VALUE
        while i < rows:
            message = chunk + at
            size = message_bytes(message, length - at)
            if size == 0:
                _not_well_made()
            if steady:  # as in `_take`
                size = guessed(size, before)
            steady = size == before
            before = size
            if total + size > bytes_left and self.rows + i:
                break
            if with_value:
                body = u32(message)
                memcpy(values + end, message + size - body, body)
                end += body
                ends[i] = <int32_t>end
            at += size
            total += size
            i += 1
        self._add_plain(i, total, end, <int64_t>first, <int64_t>(u64(chunk + 8) * 1000))
        if i:
            self.offset = first + i
        return self._leave(first + i, at) if i < count else 0

    cdef void _add_plain(self, uint64_t rows, uint64_t size, size_t value_end, int64_t first,
                         int64_t time_us) noexcept nogil:
        """Fill the numbers of `rows` rows, and count what was used of the room made for them."""
        cdef int64_t *out
        cdef uint64_t i
        self.rows += rows
        self.bytes += size
        if self.wanted & C_OFFSET:
            out = <int64_t*>(self.offsets.data + self.offsets.used)
            for i in range(rows):
                out[i] = first + <int64_t>i
            self.offsets.used += 8 * rows
        if self.wanted & C_TIMESTAMP:
            out = <int64_t*>(self.timestamps.data + self.timestamps.used)
            for i in range(rows):
                out[i] = time_us
            self.timestamps.used += 8 * rows
        if self.wanted & C_VALUE:
            self.value.ends.used += 4 * rows
            self.value.data.used = value_end
            self.value.rows += rows

    cdef int _make_room(self, uint64_t count, uint64_t length) except -1 nogil:
        """Make room for the columns of `count` rows of a chunk, once."""
        reserve(&self.offsets, 8 * count)
        reserve(&self.timestamps, 8 * count)
        if self.wanted & C_VALUE:
            reserve(&self.value.data, length)
            reserve(&self.value.ends, 4 * count)
        if self.wanted & C_EXCHANGE:
            reserve(&self.exchange.ends, 4 * count)
        if self.wanted & C_KEY:
            reserve(&self.key.ends, 4 * count)
        return 0

    cdef inline int _add(
        self, const uint8_t *message, int64_t offset, int64_t time_us
    ) except -1 nogil:
        cdef size_t n = message[8], m = message[9 + message[8]]
        cdef size_t props = u32(message + 4), body = u32(message)
        cdef const uint8_t *key = message + 10 + n
        cdef int wanted = self.wanted
        self.rows += 1
        if wanted & C_OFFSET:
            put_number(&self.offsets, offset)
        if wanted & C_TIMESTAMP:
            put_number(&self.timestamps, time_us)
        if wanted & C_EXCHANGE:
            put_name(&self.exchange, message + 9, n)
        if wanted & C_KEY:
            put_name(&self.key, key, m)
        if wanted & C_VALUE:
            memcpy(self.value.data.data + self.value.data.used, key + m + props, body)
            self.value.data.used += body
            put_end(&self.value)
        if wanted & (C_HEADERS | C_PROPERTIES):
            self._add_properties(key + m, props)
        return 0

    cdef int _add_properties(self, const uint8_t *props, size_t size) except -1 nogil:
        """Add a message's properties.

        Columns whose property the message lacks stay behind, until one has it or all are asked for.
        A broken property list ends where it breaks: what follows counts as not given.
        """
        cdef Properties walk
        cdef int i
        if size <= 2:
            return 0
        properties_begin(&walk, props, size)
        while properties_next(&walk) > 0:
            i = 15 - walk.bit
            if walk.bit == HEADERS_BIT:
                if self.wanted & C_HEADERS:
                    self._add_headers(walk.value + 4, walk.size - 4)
            elif place_of[i] >= 0 and self.wanted & C_PROPERTIES:
                self._add_property(i, walk.value, walk.size)
        return 0

    cdef int _add_property(self, int i, const uint8_t *at, size_t length) except -1 nogil:
        cdef Text *text = &self.texts[place_of[i]]
        cdef Number *number = &self.numbers[place_of[i] if kind_of[i] != SHORT else 0]
        cdef uint64_t row = self.rows - 1, seconds
        if kind_of[i] == SHORT:
            fill_text(text, row)
            set_bit(&text.valid, row)
            return push_text(text, at + 1, length - 1)
        if kind_of[i] == OCTET:
            fill_number(number, row, 4)
            push32(&number.values, at[0])
        else:
            seconds = big64(at)
            if seconds > SECONDS_MAX:
                return 0
            fill_number(number, row, 8)
            push64(&number.values, <int64_t>(seconds * 1000000))
        number.rows += 1
        return set_bit(&number.valid, row)

    cdef int _fill_headers(self, uint64_t rows) except -1 nogil:
        cdef uint64_t more = rows - self.headers_rows
        if more:
            fill32(&self.headers, more, <int32_t>self.header_key.rows)
            self.headers_nulls += more
            self.headers_rows = rows
        return fill_bits(&self.headers_valid, rows)

    cdef int _add_headers(self, const uint8_t *table, size_t size) except -1 nogil:
        """Add the entries of a table.

        The rest of a broken table becomes one entry without a name and of the type "?".
        """
        cdef Table entry
        cdef int found
        self._fill_headers(self.rows - 1)
        self.headers_rows += 1
        set_bit(&self.headers_valid, self.rows - 1)
        table_begin(&entry, table, size)
        found = table_next(&entry)
        while found > 0:
            push_text(&self.header_key, entry.name, entry.name_size)
            push_bytes(&self.header_type, &entry.type, 1)
            push_bytes(&self.header_value, entry.value + entry.head, entry.size - entry.head)
            found = table_next(&entry)
        if found < 0:
            push_bytes(&self.header_key, table, 0)
            push_bytes(&self.header_type, <const uint8_t*>"?", 1)
            push_bytes(&self.header_value, entry.next, entry.end - entry.next)
        return push32(&self.headers, <int32_t>self.header_key.rows)

    # -- the result --------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Return the offset of the first row. Raise ValueError without rows or a column of offsets.
        """
        if not self.rows or not self.wanted & C_OFFSET:
            raise ValueError("there is no offset")
        return (<int64_t*>self.offsets.data)[0]

    def arrays(self) -> Arrays:
        """Return arrays for these rows, without columns: `lay_out` adds those."""
        cdef Arrays found = Arrays.__new__(Arrays)
        found.owner, found.rows = self, <const uint64_t*>&self.rows
        return found

    def lay_out(self, int column, Arrays to not None) -> None:
        """Add the arrays of one column to `to`."""
        cdef const uint64_t *rows = <const uint64_t*>&self.rows
        if column == C_OFFSET or column == C_TIMESTAMP:
            to.add_node(rows, NULL, NULL)
            to.add_buffer(&self.offsets if column == C_OFFSET else &self.timestamps)
        elif column == C_HEADERS:
            self._lay_out_headers(to)
        elif column == C_PROPERTIES:
            self._lay_out_properties(to)
        else:
            to.add_text(
                rows,
                &self.exchange if column == C_EXCHANGE
                else &self.key if column == C_KEY else &self.value,
                False
            )

    cdef int _lay_out_headers(self, Arrays to) except -1:
        cdef const uint64_t *entries = &self.header_key.rows
        to.add_node(<const uint64_t*>&self.rows, &self.headers_nulls, &self.headers_valid)
        to.add_buffer(&self.headers)
        to.add_node(entries, NULL, NULL)
        to.add_text(entries, &self.header_key, False)
        to.add_text(entries, &self.header_type, False)
        return to.add_text(entries, &self.header_value, False)

    cdef int _lay_out_properties(self, Arrays to) except -1:
        """Add the arrays of the properties, in the order of PROPERTY_COLUMNS."""
        cdef const uint64_t *rows = <const uint64_t*>&self.rows
        cdef Number *number
        cdef int i
        to.add_node(rows, NULL, NULL)
        for i in range(KINDS):
            if place_of[i] < 0:
                continue
            if kind_of[i] == SHORT:
                to.add_text(rows, &self.texts[place_of[i]], True)
            else:
                number = &self.numbers[place_of[i]]
                to.add_node(rows, &number.nulls, &number.valid)
                to.add_buffer(&number.values)
        return 0
