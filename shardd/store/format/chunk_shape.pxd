# cython: language_level=3
"""The shape of a chunk, as chunk.pyx draws it: shared by all that walk through chunks."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.store.format.layout cimport RECORD_HEADER, u16, u32

cdef enum:
    CHUNK_HEADER = 40
    WORDS = 3
    # Its messages say their place in what a producer sends, and were looked up by it.
    IN_SEQUENCE = 2
    # Messages of many small publishes that share a crc and are read in one piece: small enough to
    # be checked again for a reader that takes a few messages at a time.
    MESSAGES_BYTES = 256 << 10
    FILTERS = 1024
    # No chunk of more than one message is longer.
    SHARED_BYTES = MESSAGES_BYTES + CHUNK_HEADER + 4 * FILTERS + 8

cdef extern from *:
    """
    #define SHARDD_NONE 0xFFFFFFFFu
    #define SHARDD_CUT_OFF ((uint64_t)-1)
    """
    const uint32_t NONE "SHARDD_NONE"
    const uint64_t CUT_OFF "SHARDD_CUT_OFF"


cdef inline uint64_t chunk_bytes(const uint8_t *chunk, uint64_t room) noexcept nogil:
    """Return the length of the chunk if its header can be true, else 0.

    The chunk may end behind `room`. Return CUT_OFF if there is too little to tell.
    """
    cdef uint64_t length, words, fixed, count, n
    if room < CHUNK_HEADER:
        return CUT_OFF
    length = u32(chunk)
    words = u16(chunk + 24)
    count = u32(chunk + 20)
    fixed = RECORD_HEADER + 4 * words
    if (
        length & 7
        or words < WORDS
        or words > WORDS + FILTERS
        or count == 0
        or length < fixed + 10 * count
    ):
        return 0
    if u32(chunk + 16) != NONE or chunk[26] != 255 or chunk[27] & ~IN_SEQUENCE != 1:
        return 0
    if length > SHARED_BYTES:
        # Before gigabytes are read for it: the one message in it says the same.
        if count != 1:
            return 0
        if room < fixed + 10:
            return CUT_OFF
        n = chunk[fixed + 8]
        if room < fixed + 10 + n:
            return CUT_OFF
        n += 10 + chunk[fixed + 9 + n] + u32(chunk + fixed + 4) + <uint64_t>u32(chunk + fixed)
        if (fixed + n + 7) & ~<uint64_t>7 != length:
            return 0
    return length
