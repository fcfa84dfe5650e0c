# cython: language_level=3
"""The place of a publish in what its producer sends: the headers x-producer-id and x-sequence.

x-producer-id is a text of 1 to 255 bytes, x-sequence an integer from 0 on. They are read where a
publish is packed, and where a shard stores it.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from shardmq.shardd.content cimport (
    HEADERS_BIT, Properties, Table, properties_begin, properties_seek, table_begin, table_next,
)


cdef struct Sequence:
    const uint8_t *producer
    uint32_t length
    uint64_t number


cdef inline int read_number(const Table *entry, uint64_t *number) noexcept nogil:
    """Read an integer. Return 1, or -1 if the value is another thing or negative."""
    cdef uint8_t type = entry.type
    cdef size_t i
    if (
        type != c"b"
        and type != c"B"
        and type != c"s"
        and type != c"u"
        and type != c"I"
        and type != c"i"
        and type != c"l"
        and type != c"L"
    ):
        return -1
    number[0] = 0
    for i in range(entry.size):
        number[0] = number[0] << 8 | entry.value[i]
    if type != c"B" and type != c"u" and type != c"i" and number[0] >> (8 * entry.size - 1):
        return -1
    return 1


cdef inline int sequence_read(const uint8_t *props, size_t size, Sequence *out) noexcept nogil:
    """Read both headers out of the properties of a message.

    Return 1 if both are there, 0 if one is missing or the properties cannot be read, and -1 if both
    are there but mean nothing.
    """
    cdef Properties walk
    cdef Table entry
    cdef int found, producer = 0, number = 0
    if properties_begin(&walk, props, size) < 0 or properties_seek(&walk, HEADERS_BIT) < 1:
        return 0
    table_begin(&entry, walk.value + 4, walk.size - 4)
    found = table_next(&entry)
    while found > 0:
        if entry.name_size == 13 and memcmp(entry.name, b"x-producer-id", 13) == 0:
            producer = (
                1 if (entry.type == c"S" or entry.type == c"x") and 4 < entry.size <= 4 + 255
                else -1
            )
            out.producer = entry.value + 4
            out.length = <uint32_t> (entry.size - 4)
        elif entry.name_size == 10 and memcmp(entry.name, b"x-sequence", 10) == 0:
            number = read_number(&entry, &out.number)
        found = table_next(&entry)
    if found < 0 or not producer or not number:
        return 0
    return 1 if producer > 0 and number > 0 else -1
