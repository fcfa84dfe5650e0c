# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Which messages of a stream become rows: by the names in a stored message (record.pyx draws it), and the time of a chunk."""

from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp, memset

cdef enum:
    LITERAL = 0
    STAR = 1
    HASH = 2


cdef class Filter:
    """What a message must be to become a row; all that is given must hold."""

    def __init__(self, pattern=None, key=None, exchange=None, since=0, until=(1 << 64) - 1):
        """`pattern`: of a topic binding, at most 255 bytes; timestamps from `since` on and below `until`, ms."""
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
        if not _equal(&self.wanted_exchange, message + 9, n) or not _equal(&self.wanted_key, message + 10 + n, m):
            return False
        return self.count < 0 or self._matches(message + 10 + n, m)

    cdef bint _matches(self, const uint8_t *key, size_t size) noexcept nogil:
        """reached[j]: the first j words of the pattern can stand for the key's words so far."""
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
