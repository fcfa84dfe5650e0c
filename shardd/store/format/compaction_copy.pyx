# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops over what is left of segments: copy it into one new segment, and find moved messages again.

Knows the shape of the bytes (drawn in record.pyx) and nothing of files, segments' headers or queues. The long loops let
other threads run: all of it may go on beside the store's owner.
"""

from cpython cimport array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.store.format.layout cimport (
    RECORD_HEADER,
    message_bytes,
    put16,
    put32,
    u16,
    u32,
)
from shardmq.shardd.store.format.pair_set cimport PairSet, pair_set_fill, pair_set_has

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

cdef uint32_t ABSTRACT_HEADER = 20
# Of records made anew: enough messages to make records few, few enough to keep them small.
cdef uint32_t RECORD_MESSAGES_MAX = 256
cdef uint64_t RECORD_BYTES_MAX = 1 << 20
cdef uint64_t FLAGS = 15

cdef array.array _Q = array.array("Q")


cdef inline int put64(Grown *grown, uint64_t value) except -1 nogil:
    reserve(grown, 8)
    memcpy(grown.data + grown.used, &value, 8)
    grown.used += 8
    return 0


cdef inline bint is_among(const uint32_t *ids, size_t count, uint32_t wanted) noexcept nogil:
    cdef size_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low < count and ids[low] == wanted


cdef class Survivors:
    """A new segment's bytes, which begin with `header_bytes` zeros, as one segment after another is added.

    records, messages, references: of it so far."""

    cdef Grown out, known, placed, ids
    cdef size_t open_at  # of the record that more may be added to, 0: none
    cdef uint32_t open_count
    cdef uint32_t salt
    cdef uint64_t number
    cdef readonly unsigned long long records, messages, references

    def __cinit__(self, unsigned long long number, uint32_t salt, size_t header_bytes):
        self.number = number
        self.salt = salt
        reserve(&self.out, header_bytes)
        memset(self.out.data, 0, header_bytes)
        self.out.used = header_bytes

    def __dealloc__(self):
        free(self.out.data)
        free(self.known.data)
        free(self.placed.data)
        free(self.ids.data)

    @property
    def size(self) -> int:
        return self.out.used

    def add(self, bytearray data, bytes abstracts, unsigned long long number, bytes settled,
            unsigned long long dead_until, array.array queue_ids) -> tuple:
        """(known, placed): entries of what is left of segment `number`, and what they are in the new one; flags are 0.

        Nobody needs what is `settled` (pairs), what lies below position `dead_until`, or queues that are not among
        `queue_ids` (ascending; None: all are). Raises ValueError when `abstracts` are not of these bytes."""
        cdef const uint8_t *source = <const uint8_t*>PyByteArray_AS_STRING(data)
        cdef uint64_t size = PyByteArray_GET_SIZE(data)
        cdef const uint8_t *at = <const uint8_t*>PyBytes_AS_STRING(abstracts)
        cdef const uint8_t *stop = at + PyBytes_GET_SIZE(abstracts)
        cdef const uint8_t *pairs = <const uint8_t*>PyBytes_AS_STRING(settled)
        cdef size_t pair_count = PyBytes_GET_SIZE(settled) // 8
        cdef const uint32_t *wanted = NULL
        cdef size_t wanted_count = 0
        cdef PairSet gone
        cdef bint good
        if queue_ids is not None:
            if queue_ids.typecode != "I":
                raise TypeError("queue ids must be array('I')")
            wanted = <const uint32_t*>queue_ids.data.as_uints
            wanted_count = len(queue_ids)
        self.known.used = self.placed.used = 0
        gone.pairs = NULL
        try:
            with nogil:
                pair_set_fill(&gone, pairs, pair_count)
                good = self._add(
                    source, size, at, stop, number, &gone, dead_until, wanted, wanted_count, queue_ids is None
                )
                self._close_record()
        finally:
            free(gone.pairs)
        if not good:
            raise ValueError("the abstracts are of other bytes")
        return array_of(&self.known), array_of(&self.placed)

    def ranges(self, bytes abstracts, unsigned long long end, bytes settled, unsigned long long dead_until,
               array.array queue_ids) -> list:
        """(start, stop) of the records of which something is left, neighbours together; the last record ends at `end`.
        The rest as for `add`."""
        cdef const uint8_t *at = <const uint8_t*>PyBytes_AS_STRING(abstracts)
        cdef const uint8_t *stop = at + PyBytes_GET_SIZE(abstracts)
        cdef const uint8_t *pairs = <const uint8_t*>PyBytes_AS_STRING(settled)
        cdef size_t pair_count = PyBytes_GET_SIZE(settled) // 8
        cdef const uint32_t *wanted = NULL
        cdef size_t wanted_count = 0
        cdef PairSet gone
        cdef Grown found
        cdef bint good
        cdef uint64_t first, last
        cdef size_t i
        if queue_ids is not None:
            wanted = <const uint32_t*>queue_ids.data.as_uints
            wanted_count = len(queue_ids)
        gone.pairs = NULL
        memset(&found, 0, sizeof(Grown))
        try:
            with nogil:
                pair_set_fill(&gone, pairs, pair_count)
                good = self._ranges(
                    &found, at, stop, end, &gone, dead_until, wanted, wanted_count, queue_ids is None
                )
            if not good:
                raise ValueError("the abstracts are not whole")
            ranges = []
            for i in range(found.used // 16):
                memcpy(&first, found.data + 16 * i, 8)
                memcpy(&last, found.data + 16 * i + 8, 8)
                ranges.append((first, last))
            return ranges
        finally:
            free(gone.pairs)
            free(found.data)

    cdef bint _ranges(self, Grown *found, const uint8_t *at, const uint8_t *stop, uint64_t end, PairSet *gone,
                      uint64_t dead_until, const uint32_t *wanted, size_t wanted_count,
                      bint all_wanted) except -1 nogil:
        cdef uint32_t count, queues, i, position
        cdef const uint8_t *places
        cdef uint64_t start
        cdef bint before = False, live
        while at < stop:
            if stop - at < ABSTRACT_HEADER:
                return False
            count = u32(at + 12)
            queues = u16(at + 16)
            if <uint64_t>(stop - at) < ABSTRACT_HEADER + 4 * <uint64_t>queues + 8 * <uint64_t>count or count == 0:
                return False
            places = at + ABSTRACT_HEADER + 4 * <size_t>queues
            start = <uint64_t>u32(places) - RECORD_HEADER - 4 * <uint64_t>queues
            live = False
            for i in range(count):
                position = u32(places + 8 * i)
                if position >= dead_until and self._live_of(
                    at, queues, position, gone, wanted, wanted_count, all_wanted
                ):
                    live = True
                    break
            if live != before:
                put64(found, start)
                before = live
            at = places + 8 * <size_t>count
        if before:
            put64(found, end)
        return True

    cdef bint _add(self, const uint8_t *source, uint64_t size, const uint8_t *at, const uint8_t *stop, uint64_t number,
                   PairSet *gone, uint64_t dead_until, const uint32_t *wanted, size_t wanted_count,
                   bint all_wanted) except -1 nogil:
        cdef uint32_t count, queues, i, live, position
        cdef const uint8_t *places
        cdef uint64_t total
        while at < stop:
            if stop - at < ABSTRACT_HEADER:
                return False
            count = u32(at + 12)
            queues = u16(at + 16)
            if <uint64_t>(stop - at) < ABSTRACT_HEADER + 4 * <uint64_t>queues + 8 * <uint64_t>count:
                return False
            places = at + ABSTRACT_HEADER + 4 * <size_t>queues
            for i in range(count):
                position = u32(places + 8 * i)
                if position < dead_until:
                    continue
                live = self._live_of(at, queues, position, gone, wanted, wanted_count, all_wanted)
                if live == 0:
                    continue
                total = message_bytes(source + position, size - position) if position < size else 0
                if total == 0:
                    return False
                self._put(at, live, source + position, total, number << 32 | <uint64_t>position << 4)
            at = places + 8 * <size_t>count
        return True

    cdef uint32_t _live_of(self, const uint8_t *abstract, uint32_t queues, uint32_t position, PairSet *gone,
                           const uint32_t *wanted, size_t wanted_count, bint all_wanted) except? 0xFFFFFFFF nogil:
        """How many queues need it; which: in `ids`."""
        cdef uint32_t i, queue_id, live = 0
        cdef uint64_t pair
        self.ids.used = 0
        reserve(&self.ids, 4 * <size_t>queues)
        for i in range(queues):
            queue_id = u32(abstract + ABSTRACT_HEADER + 4 * i)
            pair = <uint64_t>queue_id << 32 | position
            if not pair_set_has(gone, pair) and (all_wanted or is_among(wanted, wanted_count, queue_id)):
                put32(self.ids.data + 4 * live, queue_id)
                live += 1
        return live

    cdef int _put(self, const uint8_t *abstract, uint32_t live, const uint8_t *message, uint64_t total,
                  uint64_t entry) except -1 nogil:
        cdef uint64_t placed
        if self.open_at and not self._goes_on(abstract, live, total):
            self._close_record()
        if not self.open_at:
            self._open_record(abstract, live)
        reserve(&self.out, total + 8)
        memcpy(self.out.data + self.out.used, message, total)
        placed = self.number << 32 | <uint64_t>self.out.used << 4
        self.out.used += total
        self.open_count += 1
        self.messages += 1
        self.references += live
        put64(&self.known, entry)
        put64(&self.placed, placed)
        return 0

    cdef bint _goes_on(self, const uint8_t *abstract, uint32_t live, uint64_t total) noexcept nogil:
        """Whether the next message fits in the open record: the same queues, times, priority and flags."""
        cdef const uint8_t *record = self.out.data + self.open_at
        if self.open_count >= RECORD_MESSAGES_MAX or self.out.used - self.open_at + total > RECORD_BYTES_MAX:
            return False
        if memcmp(record + 8, abstract, 12) != 0 or memcmp(record + 26, abstract + 18, 2) != 0:
            return False
        return u16(record + 24) == live and memcmp(record + RECORD_HEADER, self.ids.data, 4 * <size_t>live) == 0

    cdef int _open_record(self, const uint8_t *abstract, uint32_t live) except -1 nogil:
        cdef uint8_t *record
        reserve(&self.out, RECORD_HEADER + 4 * <size_t>live)
        self.open_at = self.out.used
        self.open_count = 0
        record = self.out.data + self.open_at
        memcpy(record + 8, abstract, ABSTRACT_HEADER)
        put16(record + 24, <uint16_t>live)
        memcpy(record + RECORD_HEADER, self.ids.data, 4 * <size_t>live)
        self.out.used += RECORD_HEADER + 4 * <size_t>live
        return 0

    cdef int _close_record(self) except -1 nogil:
        cdef uint8_t *record
        cdef size_t length, padding
        if not self.open_at:
            return 0
        padding = (8 - (self.out.used - self.open_at) % 8) % 8
        reserve(&self.out, padding)
        memset(self.out.data + self.out.used, 0, padding)
        self.out.used += padding
        record = self.out.data + self.open_at
        length = self.out.used - self.open_at
        put32(record, <uint32_t>length)
        put32(record + 20, self.open_count)
        put32(record + 4, c_crc32c(0, record + 8, length - 8) ^ self.salt)
        self.records += 1
        self.open_at = 0
        return 0

    def take(self) -> bytearray:
        """The bytes. Nothing can be added after this."""
        cdef bytearray taken = PyByteArray_FromStringAndSize(<char*>self.out.data, self.out.used)
        free(self.out.data)
        memset(&self.out, 0, sizeof(Grown))
        return taken


cdef array.array array_of(Grown *values):
    cdef array.array result = array.clone(_Q, values.used // 8, False)
    if values.used:
        memcpy(result.data.as_voidptr, values.data, values.used)
    return result


# -- finding them again -------------------------------------------------------------------------------

cdef inline Py_ssize_t place_of(const uint64_t *known, Py_ssize_t count, uint64_t wanted, Py_ssize_t hint) noexcept nogil:
    """Index of `wanted`, or -1. Looks first at `hint`: who asks goes on in order."""
    cdef Py_ssize_t low = 0, high = count, middle
    if hint < count and known[hint] == wanted:
        return hint
    while low < high:
        middle = (low + high) // 2
        if known[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < count and known[low] == wanted else -1


def moved_entries(array.array known, array.array placed, array.array entries, Py_ssize_t start, Py_ssize_t stop):
    """entries[start:stop], each where `placed` says, with its flags. `known` ascends. KeyError if one is not known:
    another message in its place would be worse than none."""
    cdef const uint64_t *keys = <const uint64_t*>known.data.as_ulonglongs
    cdef const uint64_t *values = <const uint64_t*>placed.data.as_ulonglongs
    cdef const uint64_t *wanted = <const uint64_t*>entries.data.as_ulonglongs
    cdef array.array found = array.clone(_Q, stop - start, False)
    cdef uint64_t *out = <uint64_t*>found.data.as_ulonglongs
    cdef Py_ssize_t i, at = -1, count = len(known)
    for i in range(start, stop):
        at = place_of(keys, count, wanted[i] & ~FLAGS, at + 1)
        if at < 0:
            raise KeyError(wanted[i])
        out[i - start] = values[at] | wanted[i] & FLAGS
    return found


def moved_pairs(array.array known, array.array placed, unsigned long long number, bytes pairs) -> bytes:
    """Pairs of segment `number` as they are where its messages went; those of messages that went nowhere are left out."""
    cdef const uint64_t *keys = <const uint64_t*>known.data.as_ulonglongs
    cdef const uint64_t *values = <const uint64_t*>placed.data.as_ulonglongs
    cdef const uint8_t *data = <const uint8_t*>PyBytes_AS_STRING(pairs)
    cdef Py_ssize_t i, at = -1, n = 0, count = len(known), pair_count = PyBytes_GET_SIZE(pairs) // 8
    cdef bytes moved = PyBytes_FromStringAndSize(NULL, 8 * pair_count)
    cdef uint64_t *out = <uint64_t*>PyBytes_AS_STRING(moved)
    cdef uint64_t pair
    for i in range(pair_count):
        memcpy(&pair, data + 8 * i, 8)
        at = place_of(keys, count, number << 32 | (pair & 0xFFFFFFFF) << 4, at + 1)
        if at >= 0:
            out[n] = pair >> 32 << 32 | (values[at] & 0xFFFFFFFF) >> 4
            n += 1
    return moved[: 8 * n]


def moved_again(array.array known, array.array between, array.array from_there, array.array placed) -> tuple:
    """`known` messages went to `between` once, and `from_there` to `placed` now: (known, placed) of those that are in
    both. All ascend."""
    cdef const uint64_t *old = <const uint64_t*>known.data.as_ulonglongs
    cdef const uint64_t *via = <const uint64_t*>between.data.as_ulonglongs
    cdef const uint64_t *start = <const uint64_t*>from_there.data.as_ulonglongs
    cdef const uint64_t *end = <const uint64_t*>placed.data.as_ulonglongs
    cdef Py_ssize_t i = 0, j = 0, n = 0, first_count = len(known), second_count = len(from_there)
    cdef array.array keys = array.clone(_Q, second_count, False)
    cdef array.array values = array.clone(_Q, second_count, False)
    with nogil:
        while i < first_count and j < second_count:
            if via[i] < start[j]:
                i += 1
            elif via[i] > start[j]:
                j += 1
            else:
                keys.data.as_ulonglongs[n] = old[i]
                values.data.as_ulonglongs[n] = end[j]
                n += 1
                i += 1
                j += 1
    array.resize(keys, n)
    array.resize(values, n)
    return keys, values
