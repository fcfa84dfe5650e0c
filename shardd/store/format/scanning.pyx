# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops of recovery: find the good records of a segment, keep an abstract of each, gather what is live of them.

Records are record.pyx's, and what it says of abstracts, entries and pairs holds here.
"""

from cpython cimport array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.store.format.id_table cimport (
    IdTable,
    id_table_add,
    id_table_clear,
    id_table_place,
)
from shardmq.shardd.store.format.layout cimport (
    ABSTRACT_HEADER,
    MARKS,
    RECORD_HEADER,
    fact_of,
    record_bytes,
    u16,
    u32,
    u64,
    walk,
    write_abstract,
)
from shardmq.shardd.store.format.pair_set cimport PairSet, pair_set_fill, pair_set_has

from shardmq.shardd.store.format.record import Arrival

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

# How many bytes a search for good records behind a bad one may run a crc over, per byte of segment: bodies can be
# made to look like records, and recovery must end.
cdef uint64_t RESYNC_CRC_SHARE = 8

cdef array.array _Q = array.array("Q")


cdef int add_abstract(Grown *out, const uint8_t *record, uint64_t position, const uint64_t *offsets) except -1 nogil:
    reserve(out, ABSTRACT_HEADER + 4 * <size_t>u16(record + 24) + 8 * <size_t>u32(record + 20))
    out.used = write_abstract(out.data + out.used, record, record, position, offsets) - out.data
    return 0


def scan(bytearray segment, unsigned long long start, unsigned long long stop, uint32_t salt) -> tuple:
    """(abstracts, end, holes): the good records of segment[start:stop], where the last of them ends, and the
    (from, to) of what is bad between good ones. What is bad behind the last good one is a tail, not a hole."""
    cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(segment)
    cdef uint64_t at = start, end = start, length, bodies = 0
    cdef uint64_t crc_bytes_left = (stop - start) * RESYNC_CRC_SHARE + 4096
    cdef bint lost = False
    cdef Grown out, offsets
    cdef list holes = []
    memset(&out, 0, sizeof(Grown))
    memset(&offsets, 0, sizeof(Grown))
    if stop > <unsigned long long>PyByteArray_GET_SIZE(segment):
        raise ValueError("segment is shorter than said")
    try:
        with nogil:
            while at < stop:
                length = record_bytes(data + at, stop - at)
                if length != 0:
                    reserve(&offsets, <size_t>u32(data + at + 20) * 8)
                    if walk(data + at, length, <uint64_t*>offsets.data, &bodies) != 0:
                        length = 0
                if length != 0 and lost:
                    if length > crc_bytes_left:
                        break
                    crc_bytes_left -= length
                if length == 0 or c_crc32c(0, data + at + 8, length - 8) ^ salt != u32(data + at + 4):
                    lost = True
                    at += 8
                    continue
                if lost:
                    with gil:
                        holes.append((end, at))
                    lost = False
                add_abstract(&out, data + at, at, <uint64_t*>offsets.data)
                at += length
                end = at
        return PyBytes_FromStringAndSize(<char*>out.data, out.used), end, holes
    finally:
        free(out.data)
        free(offsets.data)


def sound_until(bytearray data, unsigned long long start, unsigned long long stop, uint32_t salt) -> tuple:
    """(end, needed): the records of data[start:stop] are good up to `end`. `needed`: bytes from there on without which
    the next one cannot be judged; 0: there is none, or it is bad."""
    cdef const uint8_t *bytes_of = <const uint8_t*>PyByteArray_AS_STRING(data)
    cdef uint64_t at = start, length
    if stop > <unsigned long long>PyByteArray_GET_SIZE(data):
        raise ValueError("there is less than said")
    while at < stop:
        if stop - at < 8:
            return at, RECORD_HEADER
        length = u32(bytes_of + at)
        if length > stop - at:
            return at, length
        if record_bytes(bytes_of + at, stop - at) == 0:
            break
        if c_crc32c(0, bytes_of + at + 8, length - 8) ^ salt != u32(bytes_of + at + 4):
            break
        at += length
    return at, 0


def torn_bytes(bytearray segment, unsigned long long end, unsigned long long stop) -> int:
    """How much was torn off behind the last good record: 0 when nothing was begun there, else what the broken record says
    it would have taken, as far as the segment goes."""
    cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(segment)
    cdef uint64_t length
    if end + 8 > stop or u64(data + end) == 0:
        return 0
    length = u32(data + end)
    return min(max(length, <uint64_t>8), stop - end)


cdef struct Found:  # what recovery found for one queue
    uint64_t *entries
    uint64_t *facts  # NULL until one has something to say
    uint64_t *times  # NULL when nobody asked
    size_t count
    size_t room
    uint64_t body_bytes
    bint timed
    uint8_t marks


cdef int found_reserve(Found *found, size_t more) except -1:
    cdef size_t room
    cdef uint64_t *moved
    if found.count + more <= found.room:
        return 0
    room = found.count + more + found.room // 2 + 4
    moved = <uint64_t*>realloc(found.entries, room * 8)
    if moved == NULL:
        raise MemoryError
    found.entries = moved
    if found.facts != NULL:
        moved = <uint64_t*>realloc(found.facts, room * 8)
        if moved == NULL:
            raise MemoryError
        found.facts = moved
    if found.timed:
        moved = <uint64_t*>realloc(found.times, room * 8)
        if moved == NULL:
            raise MemoryError
        found.times = moved
    found.room = room
    return 0


cdef class Collector:
    """Gathers the live entries of the known queues from the abstracts of one segment after another."""

    cdef IdTable table
    cdef Found *found
    cdef list queue_ids

    def __cinit__(self, queue_ids, timed):
        cdef int64_t slot
        self.queue_ids = list(dict.fromkeys(queue_ids))
        id_table_clear(&self.table, 64)
        self.found = <Found*>calloc(len(self.queue_ids) + 1, sizeof(Found))
        if self.found == NULL:
            raise MemoryError
        for queue_id in self.queue_ids:
            slot = id_table_add(&self.table, queue_id)
            self.found[slot].timed = queue_id in timed

    def __dealloc__(self):
        cdef size_t i
        if self.found != NULL:
            for i in range(self.table.count):
                free(self.found[i].entries)
                free(self.found[i].facts)
                free(self.found[i].times)
        free(self.found)
        free(self.table.keys)
        free(self.table.slots)

    def add(self, bytes abstracts, unsigned long long segment, bytes pairs, unsigned int flags) -> tuple:
        """(records, messages, references, live references) of one segment. `pairs`: the settled of it, in any order,
        repeats and nonsense allowed. Raises ValueError when the abstracts are not whole."""
        cdef const uint8_t *at = <const uint8_t*>PyBytes_AS_STRING(abstracts)
        cdef const uint8_t *stop = at + PyBytes_GET_SIZE(abstracts)
        cdef PairSet settled
        cdef uint64_t records = 0, messages = 0, references = 0, live = 0
        cdef uint32_t count, queues, i
        cdef uint64_t base = segment << 32 | flags
        settled.pairs = NULL
        if len(pairs) >= 8:
            pair_set_fill(&settled, <const uint8_t*>PyBytes_AS_STRING(pairs), len(pairs) // 8)
        try:
            while at < stop:
                if stop - at < 20:
                    raise ValueError("abstracts end too early")
                count = u32(at + 12)
                queues = u16(at + 16)
                if <uint64_t>(stop - at) < 20 + 4 * <uint64_t>queues + 8 * <uint64_t>count:
                    raise ValueError("abstracts end too early")
                for i in range(queues):
                    live += self._add(at, at + 20 + 4 * <size_t>queues, count, u32(at + 20 + 4 * i), base, &settled)
                records += 1
                messages += count
                references += <uint64_t>count * queues
                at += 20 + 4 * <size_t>queues + 8 * <size_t>count
        finally:
            free(settled.pairs)
        return records, messages, references, live

    cdef int64_t _add(self, const uint8_t *abstract, const uint8_t *places, uint32_t count, uint32_t queue_id,
                      uint64_t base, PairSet *settled) except -1:
        cdef uint32_t slot = self.table.slots[id_table_place(&self.table, queue_id)]
        cdef Found *found
        cdef uint64_t fact, position
        cdef size_t i, at, before
        if slot == 0:
            return 0
        found = &self.found[slot - 1]
        found_reserve(found, count)
        # An abstract is the record without its first 8 bytes.
        fact = fact_of(abstract - 8)
        if u32(abstract + 8) == 0:
            # What waits at an exchange used to have its priority here; what is too old already needs none.
            fact = u64(abstract)
        if fact != 0 and found.facts == NULL:
            found.facts = <uint64_t*>calloc(found.room, 8)
            if found.facts == NULL:
                raise MemoryError
        before = at = found.count
        for i in range(count):
            position = u32(places + 8 * i)
            if settled.pairs != NULL and pair_set_has(settled, <uint64_t>queue_id << 32 | position):
                continue
            found.entries[at] = base + (position << 4)
            found.body_bytes += u32(places + 8 * i + 4)
            at += 1
        if found.facts != NULL:
            for i in range(before, at):
                found.facts[i] = fact
        if found.timed:
            for i in range(before, at):
                found.times[i] = u64(abstract)
        found.count = at
        if at > before:
            found.marks |= abstract[19] & MARKS
        return at - before

    def take(self) -> list:
        """An Arrival for each queue that has entries; the memory is theirs now."""
        cdef size_t i
        cdef Found *found
        cdef list arrivals = []
        for i in range(self.table.count):
            found = &self.found[i]
            if found.count:
                entries = moved_out(&found.entries, found.count)
                facts = moved_out(&found.facts, found.count) if found.facts != NULL else None
                times = moved_out(&found.times, found.count) if found.timed else None
                arrivals.append(Arrival(self.queue_ids[i], entries, found.body_bytes, facts, None, times, found.marks))
                found.count = found.room = 0
        return arrivals


cdef object moved_out(uint64_t **values, size_t count):
    cdef array.array result = array.clone(_Q, count, False)
    memcpy(result.data.as_voidptr, values[0], count * 8)
    free(values[0])
    values[0] = NULL
    return result
