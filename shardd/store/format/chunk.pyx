# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Make chunks of a stream out of records, read messages, and find the good chunks of a segment.

stream_append.pxi finds which records of a batch a stream gets, with the filters of their messages.

This file knows the shape of the bytes and nothing of files. A chunk is a record (drawn in
record.pyx) of messages of one stream with consecutive offsets. Where other records name their
queues, a chunk has what only a stream needs:

    chunk     0  u32 length, a multiple of 8
              4  u32 crc32c of [8, length) ^ salt
              8  u64 timestamp, ms: the latest of the records it was made of
             16  u32 NONE | u32 count of messages
             24  u16 words: 3 + filters | u8 255 | u8 3 if made of records IN_SEQUENCE, which share
                 a chunk with no others, else 1
             28  u64 offset of the first message
             36  u32 mark: the bytes of this file that were on stable storage before this chunk was
                 appended, divided by 8
             40  u32 filter[words - 3], ascending; stored messages; zero padding

    filter    a hash of the filter value of a message; UNFILTERED: a message has no value; ANY: the
              chunk has too many values to name. In a chunk without filters no message has a value.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, qsort
from libc.string cimport memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.store.format.chunk_shape cimport (
    CHUNK_HEADER,
    CUT_OFF,
    FILTERS,
    IN_SEQUENCE,
    MESSAGES_BYTES,
    NONE,
    SHARED_BYTES,
    WORDS,
    chunk_bytes,
)
from shardmq.shardd.store.format.layout cimport (
    RECORD_HEADER,
    message_bytes,
    put32,
    put64,
    record_bytes,
    u16,
    u32,
    u64,
)

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

cdef extern from *:
    """
    static int shardd_by_value(const void *a, const void *b) {
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
        return (x > y) - (x < y);
    }
    """
    int by_value "shardd_by_value"(const void *a, const void *b) noexcept nogil

cdef enum:
    # Room that stays for the next batch.
    KEPT_BYTES = 4 << 20
    # As in scanning.pxi: the search for good chunks behind a bad one must end.
    RESYNC_CRC_SHARE = 8

cdef uint32_t ANY_FILTER = 0xFFFFFFFF
cdef uint64_t NO_COUNT = <uint64_t>-1

UNFILTERED = 0
ANY = 0xFFFFFFFF
FILTERS_MAX = FILTERS

cdef array.array _Q = array.array("Q")
cdef array.array _I = array.array("I")


cdef struct Part:
    const uint8_t *at
    uint64_t size


cdef int push64(Grown *grown, uint64_t value) except -1:
    reserve(grown, 8)
    put64(grown.data + grown.used, value)
    grown.used += 8
    return 0


cdef int push_part(Grown *parts, const uint8_t *at, uint64_t size) except -1:
    """Append a part; it becomes one with the last part if both are neighbours."""
    cdef Part *last
    if size == 0:
        return 0
    if parts.used:
        last = <Part*>(parts.data + parts.used) - 1
        if last.at + last.size == at:
            last.size += size
            return 0
    reserve(parts, sizeof(Part))
    last = <Part*>(parts.data + parts.used)
    last.at = at
    last.size = size
    parts.used += sizeof(Part)
    return 0


cdef void copy_parts(Grown *parts, uint8_t *out) noexcept:
    cdef Part *part = <Part*>parts.data
    cdef size_t i
    for i in range(parts.used // sizeof(Part)):
        memcpy(out, part[i].at, part[i].size)
        out += part[i].size


# -- append ----------------------------------------------------------------------------------------

cdef class Packer:
    """Makes chunks of records. The object is kept and used for batch after batch."""

    cdef Grown out, rows, parts, words
    cdef const uint32_t *filters  # of the whole batch, or NULL
    cdef uint64_t first, count, bytes, timestamp  # of the chunk being made
    cdef uint32_t in_sequence  # whether the chunk being made is of records that are
    cdef uint64_t packed  # messages in chunks that are made
    cdef readonly unsigned long long messages

    def __dealloc__(self):
        free(self.out.data)
        free(self.rows.data)
        free(self.parts.data)
        free(self.words.data)

    def pack(self, records, unsigned long long offset, array.array filters=None) -> tuple:
        """Make chunks of a batch of whole records whose first message gets `offset`.

        Return (chunks, rows); a row is (start, first offset, timestamp) of a chunk. `filters` has
        one filter for each message. `seal` fills in what depends on the file. Raise ValueError if a
        record is not whole and true.
        """
        cdef Py_buffer view
        self.out.used = self.rows.used = self.parts.used = 0
        self.first = offset
        self.messages = self.count = self.bytes = self.timestamp = 0
        self.packed = self.in_sequence = 0
        self.filters = NULL
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        try:
            self._check(<const uint8_t*>view.buf, view.len)
            if filters is not None:
                if filters.typecode != "I" or <uint64_t>len(filters) != self.messages:
                    raise ValueError(
                        f"{len(filters)} filters of type {filters.typecode}"
                        f" for {self.messages} messages"
                    )
                self.filters = <const uint32_t*>filters.data.as_uints
            self._pack(<const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        rows = array.clone(_Q, self.rows.used // 8, False)
        if self.rows.used:
            memcpy((<array.array>rows).data.as_voidptr, self.rows.data, self.rows.used)
        chunks = PyByteArray_FromStringAndSize(<char*>self.out.data, self.out.used)
        if self.out.room > KEPT_BYTES:
            free(self.out.data)
            memset(&self.out, 0, sizeof(Grown))
        return chunks, rows

    cdef int _check(self, const uint8_t *records, uint64_t total) except -1:
        cdef uint64_t at = 0, length, place, size
        cdef uint32_t i
        while at < total:
            length = record_bytes(records + at, total - at)
            if length == 0:
                raise ValueError(f"no record at byte {at} of the batch")
            if c_crc32c(0, records + at + 8, length - 8) != u32(records + at + 4):
                raise ValueError(f"wrong crc of the record at byte {at} of the batch")
            place = RECORD_HEADER + 4 * <uint64_t>u16(records + at + 24)
            for i in range(u32(records + at + 20)):
                size = message_bytes(records + at + place, length - place)
                if size == 0:
                    break
                place += size
            if size == 0 or length - place >= 8:
                raise ValueError(f"messages do not fill the record at byte {at} of the batch")
            self.messages += u32(records + at + 20)
            at += length
        return 0

    cdef int _pack(self, const uint8_t *records, uint64_t total) except -1:
        cdef uint64_t at = 0, place, size
        cdef uint32_t i, in_sequence
        while at < total:
            in_sequence = records[at + 27] & IN_SEQUENCE
            if self.count and in_sequence != self.in_sequence:
                self._end_chunk()
            self.in_sequence = in_sequence
            place = at + RECORD_HEADER + 4 * <uint64_t>u16(records + at + 24)
            for i in range(u32(records + at + 20)):
                size = message_bytes(records + place, total - place)
                if self.count and self.bytes + size > MESSAGES_BYTES:
                    self._end_chunk()
                push_part(&self.parts, records + place, size)
                self.count += 1
                self.bytes += size
                self.timestamp = max(self.timestamp, u64(records + at + 8))
                place += size
            at += u32(records + at)
        if self.count:
            self._end_chunk()
        return 0

    cdef int _end_chunk(self) except -1:
        cdef uint64_t words = WORDS + self._gather_filters()
        cdef uint64_t fixed = RECORD_HEADER + 4 * words
        cdef uint64_t length = (fixed + self.bytes + 7) & ~<uint64_t>7
        cdef uint8_t *chunk
        if length > NONE:
            raise ValueError(f"a message of {self.bytes} bytes does not fit in a chunk")
        push64(&self.rows, self.out.used)
        push64(&self.rows, self.first)
        push64(&self.rows, self.timestamp)
        reserve(&self.out, length)
        chunk = self.out.data + self.out.used
        put32(chunk, <uint32_t>length)
        put64(chunk + 8, self.timestamp)
        put32(chunk + 16, NONE)
        put32(chunk + 20, <uint32_t>self.count)
        put32(chunk + 24, <uint32_t>(words | <uint32_t>255 << 16 | (1 | self.in_sequence) << 24))
        put64(chunk + 28, self.first)
        put32(chunk + 36, 0)
        if words > WORDS:
            memcpy(chunk + CHUNK_HEADER, self.words.data, (words - WORDS) * 4)
        copy_parts(&self.parts, chunk + fixed)
        memset(chunk + fixed + self.bytes, 0, length - fixed - self.bytes)
        self.out.used += length
        self.first += self.count
        self.packed += self.count
        self.parts.used = 0
        self.count = self.bytes = self.timestamp = 0
        return 0

    cdef uint64_t _gather_filters(self) except? 0xFFFFFFFF:
        """Put the distinct filters of the chunk's messages, ascending, to `words`; return how many.
        """
        cdef uint32_t *words
        cdef uint64_t i, n = 0
        if self.filters == NULL:
            return 0
        self.words.used = 0
        reserve(&self.words, self.count * 4)
        words = <uint32_t*>self.words.data
        memcpy(words, self.filters + self.packed, self.count * 4)
        qsort(words, self.count, 4, by_value)
        for i in range(self.count):
            if n == 0 or words[i] != words[n - 1]:
                words[n] = words[i]
                n += 1
        if n > FILTERS:
            words[0] = ANY_FILTER
            return 1
        return n


def seal(
    bytearray chunks, Py_ssize_t start, Py_ssize_t stop, uint32_t salt, unsigned long long mark
) -> None:
    """Fill in what depends on the file: the mark (a position) and the crc.

    [start, stop) are whole chunks that `pack` made.
    """
    cdef uint8_t *data = <uint8_t*>PyByteArray_AS_STRING(chunks)
    cdef Py_ssize_t at = start
    if not 0 <= start <= stop <= PyByteArray_GET_SIZE(chunks):
        raise ValueError("no such chunks")
    while at < stop:
        put32(data + at + 36, <uint32_t>(mark // 8))
        put32(data + at + 4, c_crc32c(0, data + at + 8, u32(data + at) - 8) ^ salt)
        at += u32(data + at)


# -- one chunk -------------------------------------------------------------------------------------

cdef bint is_true(const uint8_t *chunk, uint64_t length, uint32_t salt) noexcept:
    return c_crc32c(0, chunk + 8, length - 8) ^ salt == u32(chunk + 4)


def chunk_at(
    bytearray window, unsigned long long base, unsigned long long used, unsigned long long position,
    uint32_t salt
) -> tuple:
    """Return (length, first offset, count, timestamp) of the chunk at `position` of a file.

    `window` holds `used` bytes of the file from `base` on. The length is 0 if there is no good
    chunk. Then `first offset` is how many bytes it takes to tell, and 0 if these are enough.
    """
    cdef const uint8_t *chunk = <const uint8_t*>PyByteArray_AS_STRING(window) + (position - base)
    cdef uint64_t room = base + used - position
    cdef uint64_t length = chunk_bytes(chunk, room)
    if length == CUT_OFF or length > room:
        return 0, (room + SHARED_BYTES if length == CUT_OFF else length), 0, 0
    if length == 0 or not is_true(chunk, length, salt):
        return 0, 0, 0, 0
    return length, u64(chunk + 28), u32(chunk + 20), u64(chunk + 8)


# -- read ------------------------------------------------------------------------------------------

cdef bint wanted_in(
    const uint8_t *chunk, uint64_t words, const uint32_t *wanted, size_t wants
) noexcept:
    """Whether the chunk may have a message with one of the filters wanted."""
    cdef size_t i, low, high, middle, count = words - WORDS
    cdef const uint8_t *filters = chunk + CHUNK_HEADER
    if count and u32(filters + 4 * (count - 1)) == ANY_FILTER:
        return True
    for i in range(wants):
        if count == 0:
            if wanted[i] == 0:
                return True
            continue
        low = 0
        high = count
        while low < high:
            middle = (low + high) // 2
            if u32(filters + 4 * middle) < wanted[i]:
                low = middle + 1
            else:
                high = middle
        if low < count and u32(filters + 4 * low) == wanted[i]:
            return True
    return False


cdef class Copier:
    """Read messages out of windows of a segment.

    The object is kept and used for read after read. Its attributes say what a call found.
    """

    cdef Grown parts, sizes, runs
    cdef uint64_t count_max
    cdef readonly unsigned long long position  # of the chunk to go on with
    cdef readonly unsigned long long offset  # of the message to go on with
    # The position of the last chunk that was found good; 0 is none.
    cdef readonly unsigned long long checked
    # How many bytes from `position` on it takes to go on; 0 if these were enough.
    cdef readonly unsigned long long need
    cdef readonly bint damaged  # there is no good chunk at `position`
    cdef readonly bint full  # the next message would be too much

    def __dealloc__(self):
        free(self.parts.data)
        free(self.sizes.data)
        free(self.runs.data)

    def copy(
        self, bytearray window, unsigned long long base, unsigned long long used,
        unsigned long long position, unsigned long long checked, uint32_t salt,
        unsigned long long offset, unsigned long long limit, unsigned long long bytes_max,
        bint at_least_one, array.array wanted, unsigned long long count_max=NO_COUNT
    ) -> tuple:
        """Read messages with offsets from `offset` on and below `limit`.

        `window` holds `used` bytes of the file from `base` on; its chunks are read from `position`
        on, as far as their messages fit in `bytes_max` and `count_max`. The chunk at `checked` is
        known to be good. With `wanted`, only chunks are read that may have a message with one of
        these filters. Return (blob, body_bytes of each message, runs). A run is (first offset,
        count) of messages with consecutive offsets.
        """
        cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(window)
        cdef const uint8_t *chunk
        cdef uint64_t length, room, total = 0
        self.parts.used = self.sizes.used = self.runs.used = 0
        self.position = position
        self.offset = offset
        self.checked = checked
        self.need = 0
        self.damaged = self.full = False
        self.count_max = count_max
        if base + used > base + <uint64_t>PyByteArray_GET_SIZE(window) or position < base:
            raise ValueError("window is shorter than said")
        while self.offset < limit and self.position < base + used:
            chunk = data + (self.position - base)
            room = base + used - self.position
            length = chunk_bytes(chunk, room)
            if length == CUT_OFF or length > room:
                self.need = room + SHARED_BYTES if length == CUT_OFF else length
                break
            if length == 0 or (self.position != self.checked and not is_true(chunk, length, salt)):
                self.damaged = True
                break
            self.checked = self.position
            if u64(chunk + 28) >= limit:
                break
            if (
                wanted is None
                or wanted_in(
                    chunk, u16(chunk + 24), <const uint32_t*>wanted.data.as_uints, len(wanted)
                )
            ):
                self._take(chunk, length, bytes_max, at_least_one, &total)
                if self.full:
                    break
            else:
                self.offset = max(self.offset, u64(chunk + 28) + u32(chunk + 20))
            self.position += length
        return self._result(total)

    cdef int _take(
        self, const uint8_t *chunk, uint64_t length, uint64_t bytes_max, bint at_least_one,
        uint64_t *total
    ) except -1:
        cdef uint64_t first = u64(chunk + 28), count = u32(chunk + 20), i, size, begin = 0
        cdef uint64_t taken = 0
        cdef uint64_t at = RECORD_HEADER + 4 * <uint64_t>u16(chunk + 24)
        cdef uint64_t skip = self.offset - first if self.offset > first else 0
        cdef uint64_t *run
        cdef uint32_t *sizes
        if skip >= count:
            return 0
        reserve(&self.sizes, (count - skip) * 4)
        sizes = <uint32_t*>(self.sizes.data + self.sizes.used)
        for i in range(count):
            size = message_bytes(chunk + at, length - at)
            if size == 0:
                raise ValueError("a chunk with a good crc is not well made")
            if i < skip:
                at += size
                continue
            if i == skip:
                begin = at
            if total[0] + size > bytes_max and not (at_least_one and total[0] == 0):
                self.full = True
                break
            if self.sizes.used // 4 + taken >= self.count_max:
                self.full = True
                break
            sizes[taken] = u32(chunk + at)
            taken += 1
            total[0] += size
            at += size
        if taken == 0:
            return 0
        self.sizes.used += taken * 4
        push_part(&self.parts, chunk + begin, at - begin)
        run = <uint64_t*>(self.runs.data + self.runs.used)
        if self.runs.used and run[-2] + run[-1] == first + skip:
            run[-1] += taken
        else:
            push64(&self.runs, first + skip)
            push64(&self.runs, taken)
        self.offset = first + skip + taken
        return 0

    cdef tuple _result(self, uint64_t total):
        cdef bytes blob = PyBytes_FromStringAndSize(NULL, total)
        cdef array.array sizes = array.clone(_I, self.sizes.used // 4, False)
        cdef array.array runs = array.clone(_Q, self.runs.used // 8, False)
        copy_parts(&self.parts, <uint8_t*>PyBytes_AS_STRING(blob))
        if self.sizes.used:
            memcpy(sizes.data.as_voidptr, self.sizes.data, self.sizes.used)
            memcpy(runs.data.as_voidptr, self.runs.data, self.runs.used)
        return blob, sizes, runs


def expanded(array.array runs not None, unsigned long long plus) -> array.array:
    """Return each number of the runs (first, count), with `plus` added."""
    cdef uint64_t total = 0, i, k, at = 0
    cdef const uint64_t *run = <const uint64_t*>runs.data.as_voidptr
    cdef uint64_t *out
    cdef array.array found
    for i in range(len(runs) // 2):
        total += run[2 * i + 1]
    found = array.clone(_Q, total, False)
    out = <uint64_t*>found.data.as_voidptr
    for i in range(len(runs) // 2):
        for k in range(run[2 * i + 1]):
            out[at] = run[2 * i] + k + plus
            at += 1
    return found


# -- recovery --------------------------------------------------------------------------------------

cdef class Scanner:
    """Walk the chunks of one segment, window after window, and find what the segment holds.

    Bytes between good chunks that are no chunk are a hole. Bytes behind the last good chunk are
    none.
    """

    cdef uint32_t salt
    cdef uint64_t limit, every
    cdef readonly unsigned long long offset  # behind the last good message
    cdef readonly unsigned long long end  # position behind the last good chunk
    # The position behind the last byte that is not zero and in no good chunk.
    cdef readonly unsigned long long dirt
    cdef readonly unsigned long long timestamp  # of the last chunk
    cdef readonly unsigned long long newest  # the latest timestamp up to here, in all the stream
    cdef readonly unsigned long long last_chunk  # its first offset
    cdef readonly unsigned long long mark  # the highest position that a chunk calls lasting
    cdef readonly unsigned long long cursor  # position the next window has to begin at
    cdef readonly unsigned long long need  # its bytes, at least
    cdef readonly list holes  # (start, stop, what was known at start)
    cdef Grown entries
    cdef tuple before
    cdef bint lost

    def __cinit__(self, uint32_t salt, unsigned long long position, unsigned long long offset,
                  unsigned long long newest, unsigned long long limit, unsigned long long every):
        """Begin at `position`, where `offset` is expected; the segment ends before `limit`."""
        self.salt = salt
        self.cursor = self.end = position
        self.offset = self.last_chunk = offset
        self.timestamp = self.newest = newest
        self.limit = limit
        self.every = every
        self.holes = []

    def __dealloc__(self):
        free(self.entries.data)

    def feed(self, bytearray window, unsigned long long used, bint last) -> None:
        """Walk `window`, which holds `used` bytes from `cursor` on.

        With `last` the file ends there.
        """
        cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(window)
        cdef uint64_t base = self.cursor, at = 0, length
        cdef uint64_t crc_bytes_left = used * RESYNC_CRC_SHARE + SHARED_BYTES
        if used > <uint64_t>PyByteArray_GET_SIZE(window):
            raise ValueError("window is shorter than said")
        self.need = 0
        while at < used:
            length = chunk_bytes(data + at, used - at)
            if length == CUT_OFF or length > used - at:
                if not last:
                    self.need = used - at + SHARED_BYTES if length == CUT_OFF else length
                    break
                length = 0
            if self.lost and length:
                if length > crc_bytes_left:
                    length = 0
                else:
                    crc_bytes_left -= length
            if length == 0 or not self._is_next(data + at, length):
                if not self.lost:
                    self.lost = True
                    self.before = self._state()
                if at + 8 > used or u64(data + at) != 0:
                    self.dirt = min(base + at + 8, base + used)
                at += 8
                continue
            self._add(data + at, base + at, length)
            at += length
        self.cursor = base + min(at, used)

    cdef bint _is_next(self, const uint8_t *chunk, uint64_t length):
        cdef uint64_t first = u64(chunk + 28)
        if first < self.offset or first >= self.limit or (first != self.offset and not self.lost):
            return False
        return is_true(chunk, length, self.salt)

    cdef int _add(self, const uint8_t *chunk, uint64_t position, uint64_t length) except -1:
        if self.lost:
            self.lost = False
            self.holes.append((self.end, position, self.before))
        self._index(u64(chunk + 28), position)
        self.last_chunk = u64(chunk + 28)
        self.offset = self.last_chunk + u32(chunk + 20)
        self.timestamp = u64(chunk + 8)
        self.newest = max(self.newest, self.timestamp)
        self.mark = max(self.mark, 8 * <uint64_t>u32(chunk + 36))
        self.end = position + length
        return 0

    cdef int _index(self, uint64_t offset, uint64_t position) except -1:
        """Add an entry each `every` bytes; `index` describes the entries."""
        cdef const uint64_t *last = <const uint64_t*>(self.entries.data + self.entries.used)
        if self.entries.used and position - last[-1] < self.every:
            return 0
        push64(&self.entries, offset)
        push64(&self.entries, self.newest)
        push64(&self.entries, position)
        return 0

    cdef tuple _state(self):
        return (
            self.offset, self.end, self.timestamp, self.newest, self.last_chunk, self.entries.used
        )

    def cut(self, int hole) -> None:
        """Forget what lies behind this hole, as if the segment ended where the hole begins."""
        (self.offset, self.end, self.timestamp, self.newest, self.last_chunk,
         self.entries.used) = self.holes[hole][2]
        del self.holes[hole:]

    def index(self) -> array.array:
        """Return (offset, newest timestamp before it, position) of a chunk each `every` bytes."""
        cdef array.array entries = array.clone(_Q, self.entries.used // 8, False)
        if self.entries.used:
            memcpy(entries.data.as_voidptr, self.entries.data, self.entries.used)
        return entries


include "stream_append.pxi"
