# cython: language_level=3
"""Columns that grow, texts and numbers, each a few buffers of memory as columns.pyx draws them.

`push_` and `fill_` make the room they need, `put_` is for where there is room already. Zero-filled is empty; whoever has
one frees it.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.octets cimport copy_short
from shardmq.shardd.store.format.layout cimport u32, u64


cdef struct Text:
    Grown ends
    Grown data
    Grown valid
    uint64_t rows
    uint64_t nulls


cdef struct Number:
    Grown values
    Grown valid
    uint64_t rows
    uint64_t nulls


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
    """Bits that are not set, until there is one for each of `rows`."""
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
    """Two words that overlap where one would leave a rest."""
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
    """One more value, without a bit."""
    reserve(&text.data, size)
    copy_short(text.data.data + text.data.used, at, size)
    text.data.used += size
    text.rows += 1
    return push32(&text.ends, <int32_t>text.data.used)


cdef inline void put_number(Grown *grown, int64_t value) noexcept nogil:
    """Where there is room."""
    (<int64_t*>(grown.data + grown.used))[0] = value
    grown.used += 8


cdef inline void put_end(Text *text) noexcept nogil:
    """Of one more value, where there is room."""
    (<int32_t*>(text.ends.data + text.ends.used))[0] = <int32_t>text.data.used
    text.ends.used += 4
    text.rows += 1


cdef inline int fill_text(Text *text, uint64_t rows) except -1 nogil:
    """Rows without a value, until there are `rows`."""
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
