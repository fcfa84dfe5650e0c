# cython: language_level=3
"""The properties of an AMQP message and the tables in them, walked where they lie.

All compiled code that reads properties or tables walks them by the two iterators of this file. All
numbers are big endian.

    properties    u16 flags | the properties whose bits are set, from bit 15 down
                  bit 13 (headers): u32 size, entries | bits 12 and 11: u8 | bit 6: u64
                  other bits: u8 size, text. Bits 1 and 0 are no property's.
    entry         u8 size, name | u8 type | value
    value         of the size that its type has, or u32 size and as many bytes
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.octets cimport be32

cdef extern from *:
    int __builtin_clz(unsigned int) noexcept nogil

cdef enum:
    # Bits of properties.
    HEADERS_BIT = 13
    MODE_BIT = 12
    PRIORITY_BIT = 11
    REPLY_TO_BIT = 9
    EXPIRATION_BIT = 8
    TIMESTAMP_BIT = 6
    USER_ID_BIT = 4
    # Sizes of values.
    SAYS_SIZE = -1
    NO_TYPE = -2


cdef struct Properties:
    const uint8_t *next  # where the next property begins, or would begin
    const uint8_t *end
    uint32_t left  # bits of the properties from `next` on
    uint32_t bit  # of the property that was found
    const uint8_t *value  # that property, with the size before a text or a table
    size_t size  # its bytes


cdef inline int properties_begin(
    Properties *walk, const uint8_t *props, size_t size
) noexcept nogil:
    """Begin to walk a list of properties. Return -1 if it has no flags, else 0."""
    if size < 2:
        walk.left = 0
        return -1
    walk.left = (<uint32_t> props[0] << 8 | props[1]) & ~<uint32_t> 3
    walk.next = props + 2
    walk.end = props + size
    return 0


cdef inline int properties_next(Properties *walk) noexcept nogil:
    """Walk to the next property.

    Return 1 if there is one, 0 behind the last, -1 if it is not whole.

    Bytes behind the last property are left to the caller: `next` is `end` if there are none.
    """
    cdef size_t room = walk.end - walk.next, size
    if not walk.left:
        return 0
    walk.bit = 31 - __builtin_clz(walk.left)
    if walk.bit == HEADERS_BIT:
        if room < 4:
            return -1
        size = 4 + <size_t> be32(walk.next)
    elif walk.bit == MODE_BIT or walk.bit == PRIORITY_BIT:
        size = 1
    elif walk.bit == TIMESTAMP_BIT:
        size = 8
    else:
        if not room:
            return -1
        size = 1 + <size_t> walk.next[0]
    if size > room:
        return -1
    walk.left ^= <uint32_t> 1 << walk.bit
    walk.value = walk.next
    walk.size = size
    walk.next += size
    return 1


cdef inline int properties_seek(Properties *walk, uint32_t bit) noexcept nogil:
    """Walk to the property of a bit.

    Return 1 if it is there, 0 if not, -1 if the list is broken before.

    If the property is not there, `next` is where it would be. Properties behind it are not looked
    at.
    """
    while walk.left >> bit:
        if properties_next(walk) < 0:
            return -1
        if walk.bit == bit:
            return 1
    return 0


cdef struct Table:
    const uint8_t *next  # where the next entry begins
    const uint8_t *end
    const uint8_t *name  # of the entry that was found
    size_t name_size
    uint8_t type
    uint8_t head  # bytes before a value that say its size: 4 or none
    const uint8_t *value  # behind its type, with the head
    size_t size  # its bytes, with the head


cdef inline int value_bytes(uint8_t type) noexcept nogil:
    """Return the size that values of a type have.

    Return SAYS_SIZE if each value says its size, and NO_TYPE if there is no such type.
    """
    if type == c"S" or type == c"x" or type == c"F" or type == c"A":
        return SAYS_SIZE
    if type == c"t" or type == c"b" or type == c"B":
        return 1
    if type == c"s" or type == c"u":
        return 2
    if type == c"I" or type == c"i" or type == c"f":
        return 4
    if type == c"l" or type == c"L" or type == c"d" or type == c"T":
        return 8
    if type == c"D":
        return 5
    return 0 if type == c"V" else NO_TYPE


cdef inline void table_begin(Table *walk, const uint8_t *entries, size_t size) noexcept nogil:
    """Begin to walk the entries of a table, without the size before them."""
    walk.next = entries
    walk.end = entries + size


cdef inline int table_next(Table *walk) noexcept nogil:
    """Walk to the next entry.

    Return 1 if there is one, 0 behind the last, -1 if it is not whole or has no type.
    """
    cdef size_t room = walk.end - walk.next
    cdef int size
    if not room:
        return 0
    walk.name_size = walk.next[0]
    if room < walk.name_size + 2:
        return -1
    walk.name = walk.next + 1
    walk.type = walk.name[walk.name_size]
    walk.value = walk.name + walk.name_size + 1
    room -= walk.name_size + 2
    size = value_bytes(walk.type)
    if size >= 0:
        walk.head = 0
        walk.size = size
    else:
        if size == NO_TYPE or room < 4:
            return -1
        walk.head = 4
        walk.size = 4 + <size_t> be32(walk.value)
    if walk.size > room:
        return -1
    walk.next = walk.value + walk.size
    return 1
