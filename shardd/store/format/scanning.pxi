"""Go through the records of a segment: find the good ones, gather or copy what is still needed.

`scan` and `Collector` are for recovery, `Survivors` and the functions at the end for compaction,
`sound_until` for reading back. The shapes of records, abstracts, entries and pairs are drawn in
record.pyx. The long loops of compaction let other threads run, beside the owner of the store.
"""

from cpython cimport array
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memset

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
    kind_of,
    message_bytes,
    put16,
    put32,
    record_bytes,
    u16,
    u32,
    u64,
    walk,
    write_abstract,
)

# Bytes of which a search for good records behind a bad one may take the crc, per byte of the
# segment: bodies can be made to look like records, and recovery must end.
cdef uint64_t RESYNC_CRC_SHARE = 8

# Limits of a record that compaction writes: enough messages to make records few, few enough to
# keep them small.
cdef uint32_t RECORD_MESSAGES_MAX = 256
cdef uint64_t RECORD_BYTES_MAX = 1 << 20
cdef uint64_t FLAGS = 15
# The times of messages that are found are noted as exactly as those of new ones (segments/ages.py).
cdef uint64_t NOTE_EACH_MS = 1000


cdef struct PairSet:  # settled pairs, filled once; the owner frees `pairs`
    uint64_t *pairs  # 0: free; no message is at position 0
    uint64_t mask


cdef inline uint64_t pair_place(const PairSet *known, uint64_t pair) noexcept nogil:
    cdef uint64_t at = ((pair * <uint64_t>0x9E3779B97F4A7C15) >> 20) & known.mask
    while known.pairs[at] != 0 and known.pairs[at] != pair:
        at = (at + 1) & known.mask
    return at


cdef inline bint pair_set_has(const PairSet *known, uint64_t pair) noexcept nogil:
    return known.pairs[pair_place(known, pair)] != 0


cdef inline int pair_set_fill(PairSet *known, const uint8_t *pairs, size_t count) except -1 nogil:
    """Fill the set with `count` pairs of 8 bytes, in any order; repeats and zeros are allowed."""
    cdef uint64_t size = 16, pair
    cdef size_t i
    while size < count * 2:
        size *= 2
    known.pairs = <uint64_t*>calloc(size, 8)
    if known.pairs == NULL:
        with gil:
            raise MemoryError
    known.mask = size - 1
    for i in range(count):
        pair = u64(pairs + 8 * i)
        if pair != 0:
            known.pairs[pair_place(known, pair)] = pair
    return 0


cdef int add_abstract(
    Grown *out, const uint8_t *record, uint64_t position, const uint64_t *offsets
) except -1 nogil:
    reserve(out, ABSTRACT_HEADER + 4 * <size_t>u16(record + 24) + 8 * <size_t>u32(record + 20))
    out.used = write_abstract(out.data + out.used, record, record, position, offsets) - out.data
    return 0


def scan(
    bytearray segment, unsigned long long start, unsigned long long stop, uint32_t salt
) -> tuple:
    """Return (abstracts, end, holes) of segment[start:stop].

    `abstracts` are those of the good records, `end` is where the last of them ends, `holes` are the
    (from, to) of bad bytes between good records. Bad bytes behind the last good record are a tail,
    not a hole.
    """
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
                if (
                    length == 0
                    or c_crc32c(0, data + at + 8, length - 8) ^ salt != u32(data + at + 4)
                ):
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


def sound_until(
    bytearray data, unsigned long long start, unsigned long long stop, uint32_t salt
) -> tuple:
    """Return (end, needed): the records of data[start:stop] are good up to `end`.

    `needed` is how many bytes from there on the next record needs to be judged, or 0 when there is
    none, or it is bad.
    """
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
    """Return how many bytes were torn off behind the last good record.

    0 means that nothing was begun there. Otherwise the result is the length that the broken record
    has in its header, as far as the segment goes.
    """
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
    uint8_t kinds


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
    """Gather the live entries of the known queues from abstracts, one segment after another."""

    cdef IdTable table
    cdef Found *found
    cdef list queue_ids
    cdef object note
    cdef uint64_t newest  # the latest time of a record so far, ms
    cdef uint64_t due  # when the next note is due, ms

    def __cinit__(self, queue_ids, timed, note=None):
        """`note` is given an entry, and a time in ms at which all messages before it were there."""
        cdef int64_t slot
        self.queue_ids = list(dict.fromkeys(queue_ids))
        self.note = note
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

    def add(
        self, bytes abstracts, unsigned long long segment, bytes pairs, unsigned int flags
    ) -> tuple:
        """Return (records, messages, references, live references) of one segment.

        `pairs` are its settled pairs, in any order; repeats and nonsense are allowed. Raises
        ValueError when the abstracts are not whole.
        """
        cdef const uint8_t *at = <const uint8_t*>PyBytes_AS_STRING(abstracts)
        cdef const uint8_t *stop = at + PyBytes_GET_SIZE(abstracts)
        cdef PairSet settled
        cdef uint64_t records = 0, messages = 0, references = 0, live = 0
        cdef uint32_t count, queues, i
        cdef uint64_t base = segment << 32 | flags, time
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
                time = u64(at)
                # With a ttl of 0 the time is the one at which a message is due.
                if time > self.newest and u32(at + 8) != 0:
                    if self.newest and time >= self.due:
                        if self.note is not None:
                            self.note(
                                segment << 32 | <uint64_t>u32(at + 20 + 4 * <size_t>queues) << 4,
                                self.newest
                            )
                        self.due = time + NOTE_EACH_MS
                    self.newest = time
                for i in range(queues):
                    live += self._add(
                        at, at + 20 + 4 * <size_t>queues, count, u32(at + 20 + 4 * i), base,
                        &settled
                    )
                records += 1
                messages += count
                references += <uint64_t>count * queues
                at += 20 + 4 * <size_t>queues + 8 * <size_t>count
        finally:
            free(settled.pairs)
        if self.newest and self.note is not None:
            self.note((segment + 1) << 32, self.newest)
        return records, messages, references, live

    cdef int64_t _add(
        self, const uint8_t *abstract, const uint8_t *places, uint32_t count, uint32_t queue_id,
        uint64_t base, PairSet *settled
    ) except -1:
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
            # Messages that wait at an exchange used to have their priority here; old ones need
            # none.
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
            found.kinds |= kind_of(abstract[19])
        return at - before

    def take(self) -> list:
        """Return an Arrival for each queue that has entries; the memory is theirs now."""
        cdef size_t i
        cdef Found *found
        cdef list arrivals = []
        for i in range(self.table.count):
            found = &self.found[i]
            if found.count:
                entries = moved_out(&found.entries, found.count)
                facts = moved_out(&found.facts, found.count) if found.facts != NULL else None
                times = moved_out(&found.times, found.count) if found.timed else None
                arrivals.append(
                    Arrival(
                        self.queue_ids[i], entries, found.body_bytes, facts, None, times,
                        found.marks, found.kinds
                    )
                )
                found.count = found.room = 0
        return arrivals


cdef object moved_out(uint64_t **values, size_t count):
    cdef array.array result = array.clone(_Q, count, False)
    memcpy(result.data.as_voidptr, values[0], count * 8)
    free(values[0])
    values[0] = NULL
    return result


# -- compaction ------------------------------------------------------------------------------------


cdef inline int push64(Grown *grown, uint64_t value) except -1 nogil:
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
    """The bytes of a new segment, to which one old segment after another is added.

    They begin with `header_bytes` zeros. `records`, `messages` and `references` count what they
    hold.
    """

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
        """Add what is left of segment `number`.

        Returns (known, placed): the entries of its messages there and in the new segment, with
        flags of 0. A message is left out if it is `settled` (pairs), if it lies below position
        `dead_until`, or if it is for queues that are not among `queue_ids` (ascending; None: all
        are). Raises ValueError when `abstracts` are not of these bytes.
        """
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
                    source, size, at, stop, number, &gone, dead_until, wanted, wanted_count,
                    queue_ids is None
                )
                self._close_record()
        finally:
            free(gone.pairs)
        if not good:
            raise ValueError("the abstracts are of other bytes")
        return array_of(&self.known), array_of(&self.placed)

    def ranges(
        self, bytes abstracts, unsigned long long end, bytes settled, unsigned long long dead_until,
        array.array queue_ids
    ) -> list:
        """Return the (start, stop) of the records of which something is left, neighbours together.

        The last record ends at `end`. The other arguments are as for `add`.
        """
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
                    &found, at, stop, end, &gone, dead_until, wanted, wanted_count,
                    queue_ids is None
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

    cdef bint _ranges(
        self, Grown *found, const uint8_t *at, const uint8_t *stop, uint64_t end, PairSet *gone,
        uint64_t dead_until, const uint32_t *wanted, size_t wanted_count, bint all_wanted
    ) except -1 nogil:
        cdef uint32_t count, queues, i, position
        cdef const uint8_t *places
        cdef uint64_t start
        cdef bint before = False, live
        while at < stop:
            if stop - at < ABSTRACT_HEADER:
                return False
            count = u32(at + 12)
            queues = u16(at + 16)
            if (
                <uint64_t>(stop - at) < ABSTRACT_HEADER + 4 * <uint64_t>queues + 8 * <uint64_t>count
                or count == 0
            ):
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
                push64(found, start)
                before = live
            at = places + 8 * <size_t>count
        if before:
            push64(found, end)
        return True

    cdef bint _add(
        self, const uint8_t *source, uint64_t size, const uint8_t *at, const uint8_t *stop,
        uint64_t number, PairSet *gone, uint64_t dead_until, const uint32_t *wanted,
        size_t wanted_count, bint all_wanted
    ) except -1 nogil:
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
                self._put(
                    at, live, source + position, total, number << 32 | <uint64_t>position << 4
                )
            at = places + 8 * <size_t>count
        return True

    cdef uint32_t _live_of(
        self, const uint8_t *abstract, uint32_t queues, uint32_t position, PairSet *gone,
        const uint32_t *wanted, size_t wanted_count, bint all_wanted
    ) except? 0xFFFFFFFF nogil:
        """Return how many queues need the message; `ids` has these queues."""
        cdef uint32_t i, queue_id, live = 0
        cdef uint64_t pair
        self.ids.used = 0
        reserve(&self.ids, 4 * <size_t>queues)
        for i in range(queues):
            queue_id = u32(abstract + ABSTRACT_HEADER + 4 * i)
            pair = <uint64_t>queue_id << 32 | position
            if (
                not pair_set_has(gone, pair)
                and (all_wanted or is_among(wanted, wanted_count, queue_id))
            ):
                put32(self.ids.data + 4 * live, queue_id)
                live += 1
        return live

    cdef int _put(
        self, const uint8_t *abstract, uint32_t live, const uint8_t *message, uint64_t total,
        uint64_t entry
    ) except -1 nogil:
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
        push64(&self.known, entry)
        push64(&self.placed, placed)
        return 0

    cdef bint _goes_on(self, const uint8_t *abstract, uint32_t live, uint64_t total) noexcept nogil:
        """Return whether the open record takes the next message.

        Both must have the same queues, times, priority and flags.
        """
        cdef const uint8_t *record = self.out.data + self.open_at
        if (
            self.open_count >= RECORD_MESSAGES_MAX
            or self.out.used - self.open_at + total > RECORD_BYTES_MAX
        ):
            return False
        if memcmp(record + 8, abstract, 12) != 0 or memcmp(record + 26, abstract + 18, 2) != 0:
            return False
        return (
            u16(record + 24) == live
            and memcmp(record + RECORD_HEADER, self.ids.data, 4 * <size_t>live) == 0
        )

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
        """Return the bytes. Nothing can be added after this."""
        cdef bytearray taken = PyByteArray_FromStringAndSize(<char*>self.out.data, self.out.used)
        free(self.out.data)
        memset(&self.out, 0, sizeof(Grown))
        return taken


cdef array.array array_of(Grown *values):
    cdef array.array result = array.clone(_Q, values.used // 8, False)
    if values.used:
        memcpy(result.data.as_voidptr, values.data, values.used)
    return result


# -- find moved messages ---------------------------------------------------------------------------

cdef inline Py_ssize_t place_of(
    const uint64_t *known, Py_ssize_t count, uint64_t wanted, Py_ssize_t hint
) noexcept nogil:
    """Return the index of `wanted`, or -1.

    `hint` is tried first, since a caller goes on in order.
    """
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


def moved_entries(
    array.array known, array.array placed, array.array entries, Py_ssize_t start, Py_ssize_t stop
):
    """Return entries[start:stop], each as `placed` has it, with its flags. `known` ascends.

    Raises KeyError if an entry is not known: another message in its place would be worse than none.
    """
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


def moved_pairs(
    array.array known, array.array placed, unsigned long long number, bytes pairs
) -> bytes:
    """Return the pairs of segment `number` as they are in the segment its messages went to.

    The pairs of messages that went nowhere are left out.
    """
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


def moved_again(
    array.array known, array.array between, array.array from_there, array.array placed
) -> tuple:
    """Return (known, placed) of messages that were moved twice.

    The messages `known` went to `between` once, and those of `from_there` go to `placed` now. The
    result has the messages that are in both. All arrays ascend.
    """
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
