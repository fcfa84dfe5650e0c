# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Check and index a batch of records, copy it, read messages back, and settle them.

scanning.pxi has recovery and compaction, lent.pxi the records whose body lies elsewhere.

Knows the shape of the bytes and nothing of files or queues. All numbers are little endian.

    record    0  u32 length, a multiple of 8          stored message   0  u32 body_bytes
              4  u32 crc32c of [8, length) ^ salt                      4  u32 props_bytes
              8  u64 timestamp, ms                                     8  u8 n, exchange[n]
             16  u32 ttl_ms, NONE: never                               .. u8 m, routing key[m]
             20  u32 count of messages                                 .. props, body
             24  u16 queues
             26  u8  priority, 255: none given
             27  u8  flags
             28  u32 queue id[queues], stored messages, zero padding

    entry     segment << 32 | position << 4 | flags    position: of a stored message in its segment
    pair      queue id << 32 | position                one settled message of one queue
    abstract  what recovery needs of a record, without its messages:
              u64 timestamp | u32 ttl_ms | u32 count | u16 queues | u8 priority | u8 flags
              | u32 queue id[queues] | (u32 position, u32 body_bytes)[count]
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from shardmq.shardd.grown cimport GROWN_AT_FIRST, Grown, reserve
from shardmq.shardd.store.format.id_table cimport IdTable, id_table_add, id_table_clear
from shardmq.shardd.store.format.layout cimport (
    ABSTRACT_HEADER,
    MARKS,
    RECORD_HEADER,
    fact_of,
    kind_of,
    message_bytes,
    put32,
    record_bytes,
    u16,
    u32,
    walk,
    write_abstract,
)

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    uint32_t c_crc32c_narrow "crc32c_narrow"(uint32_t crc, const uint8_t *p, size_t n)
    uint32_t c_crc32c_tables "crc32c_tables"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

cdef extern from * nogil:
    void prefetch "__builtin_prefetch" (const void *address)

crc32c_start()

cdef uint64_t POSITION_LIMIT = 1 << 28
# Room that a segment's own header may take before the first record.
cdef uint64_t SEGMENT_HEADER_MAX = 64
# Less is sooner copied than a view is made.
cdef uint64_t VIEW_BYTES_MIN = 16 << 10
# Of a backlog the beginning of each message is in no cache near by: that of the one so many behind
# is fetched meanwhile.
cdef enum:
    LOOK_AHEAD = 32
# So much more than what an index may take is collected before it is given up: the first messages of
# a segment need not be like the rest, and one that is about worth its index must not lose what was
# collected for it over a few of them.
cdef uint64_t ABSTRACTS_AHEAD = 4 << 10

cdef array.array _Q = array.array("Q")
cdef array.array _I = array.array("I")


cdef class Arrival:
    """The messages of a batch that reached one queue: entries in publish order.

    The arrays beside `entries` have one item for each entry.
    """

    cdef readonly unsigned int queue_id
    cdef readonly object entries
    cdef readonly unsigned long long body_bytes
    cdef readonly object facts
    cdef readonly object indexes
    cdef readonly object times
    cdef readonly int marks  # MARKS of the flags of its records, all together
    cdef readonly int kinds  # kind_of its records, all together; 0: not known

    def __init__(
        self, queue_id, entries, body_bytes, facts=None, indexes=None, times=None, marks=0, kinds=0
    ):
        self.queue_id = queue_id
        self.entries = entries
        self.body_bytes = body_bytes
        self.facts = facts
        self.indexes = indexes
        self.times = times
        self.marks = marks
        self.kinds = kinds

    def __repr__(self):
        return (
            f"Arrival(queue_id={self.queue_id}, entries={self.entries!r},"
            f" body_bytes={self.body_bytes})"
        )


def crc32c(data, uint32_t crc=0) -> int:
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return c_crc32c(crc, <const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def crc32c_narrow(const uint8_t[::1] data not None, uint32_t crc=0) -> int:
    """Compute the checksum as processors do that do not multiply 512 bits, for comparison."""
    return c_crc32c_narrow(crc, &data[0] if data.shape[0] else NULL, data.shape[0])


def crc32c_tables(const uint8_t[::1] data not None, uint32_t crc=0) -> int:
    """Compute the same checksum without the instruction."""
    return c_crc32c_tables(crc, &data[0] if data.shape[0] else NULL, data.shape[0])


# -- append ----------------------------------------------------------------------------------------

cdef struct Slot:
    uint32_t queue_id
    bint has_facts
    uint8_t marks
    uint8_t kinds
    uint64_t count
    uint64_t body_bytes
    uint64_t *entries
    uint64_t *facts
    uint32_t *indexes


cdef struct Seen:  # a record of the batch
    uint64_t offset
    uint64_t message
    uint64_t ref
    uint32_t count
    uint32_t refs


cdef class Abstracts:
    """The abstracts of a segment's records, collected while batches are put into it.

    They are the abstracts that scan() would find from position `start` on. They are given up, and
    their memory is freed, if other records were put in between, or if an index does not look worth
    its writing (Segment.index_is_worth_it). An index may take one byte for `share_max` bytes of its
    segment, so never more than `bytes_max`.
    """

    def __cinit__(
        self, unsigned long long start, unsigned long long capacity, unsigned long long share_max
    ):
        self.end = start
        self.bytes_max = capacity // share_max
        self.share_max = share_max

    def __dealloc__(self):
        free(self.out.data)

    def until(self, unsigned long long end):
        """Return the abstracts of all records up to `end`, None if there are more or fewer here."""
        if self.end != end:
            return None
        return PyBytes_FromStringAndSize(<char*>self.out.data, self.out.used)

    cdef void added(self, size_t size, uint64_t end, uint64_t share) noexcept:
        self.out.used += size
        self.end = end
        self.share += share
        if self.share > end // self.share_max + ABSTRACTS_AHEAD:
            self.give_up()

    cdef void give_up(self) noexcept:
        free(self.out.data)
        memset(&self.out, 0, sizeof(Grown))
        self.end = 0

    cdef uint8_t *room_for(self, size_t size) noexcept:
        """Return where the next abstracts go.

        Return NULL if there may be no more, or if there is no memory: that must not make a batch
        fail.
        """
        cdef size_t needed = self.out.used + size, room
        cdef uint8_t *moved
        if needed > self.bytes_max:
            return NULL
        if needed > self.out.room:
            room = min(max(2 * self.out.room, needed + GROWN_AT_FIRST), <size_t>self.bytes_max)
            moved = <uint8_t*>realloc(self.out.data, room)
            if moved == NULL:
                return NULL
            self.out.data = moved
            self.out.room = room
        return self.out.data + self.out.used


cdef class Batch:
    """A batch of records on its way into segments.

    `plan` checks the batch and counts, `fit` says how much of it a segment takes, `copy` copies
    that much, and `take` returns the entries. `put` does all this at once if one segment takes the
    batch. The object is kept and used for batch after batch.
    """

    cdef IdTable table
    cdef Grown slots, seen, refs, offsets
    cdef Py_ssize_t planned_bytes
    cdef readonly unsigned long long messages

    def __cinit__(self):
        id_table_clear(&self.table, 64)

    def __dealloc__(self):
        free(self.table.keys)
        free(self.table.slots)
        free(self.slots.data)
        free(self.seen.data)
        free(self.refs.data)
        free(self.offsets.data)

    def plan(self, records, bint checked=False) -> int:
        """Check every record of the batch, crc and all; ValueError when one is not whole and true.

        How many messages.

        `checked`: the checksums were compared before, or are still to be made.
        """
        cdef Py_buffer view
        cdef uint32_t places = self.table.mask + 1
        # A batch for very many queues must not make all later ones wipe its big table.
        if places > 1024 and <uint64_t>self.table.count * 8 < places:
            places = 64
        id_table_clear(&self.table, places)
        self.slots.used = self.seen.used = self.refs.used = self.offsets.used = 0
        self.messages = 0
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        try:
            self.planned_bytes = view.len
            self._plan(<const uint8_t*>view.buf, view.len, checked)
        finally:
            PyBuffer_Release(&view)
        return self.messages

    def put(
        self, records, bytearray target, Py_ssize_t position, unsigned long long segment,
        uint32_t salt, bint indexes, Abstracts abstracts=None
    ) -> tuple:
        """Put the whole batch into one segment, as `copy` does.

        Return (one Arrival per queue, what counts() returns for the batch).
        """
        cdef list arrivals
        cdef size_t record
        self.copy(records, 0, self.planned_bytes, target, position, salt, abstracts)
        arrivals = self._arrivals(indexes)
        for record in range(self.seen.used // sizeof(Seen)):
            self._index(
                <Seen*>self.seen.data + record, (segment << 32) + (<uint64_t>position << 4), indexes
            )
        self.facts(records, arrivals)
        return arrivals, self.counts(0, self.planned_bytes)

    cdef int _plan(self, const uint8_t *records, uint64_t total, bint checked) except -1:
        cdef uint64_t at = 0, length, bodies = 0
        cdef uint64_t *offsets
        cdef Seen *seen
        cdef uint32_t i, count
        while at < total:
            length = record_bytes(records + at, total - at)
            if length == 0:
                raise ValueError(f"no record at byte {at} of the batch")
            if not checked and c_crc32c(0, records + at + 8, length - 8) != u32(records + at + 4):
                raise ValueError(f"wrong crc of the record at byte {at} of the batch")
            count = u32(records + at + 20)
            reserve(&self.offsets, <size_t>count * 8)
            offsets = <uint64_t*>(self.offsets.data + self.offsets.used)
            if walk(records + at, length, offsets, &bodies) != 0:
                raise ValueError(f"messages do not fill the record at byte {at} of the batch")
            if offsets[count - 1] + SEGMENT_HEADER_MAX >= POSITION_LIMIT:
                raise ValueError(
                    f"a message of the record at byte {at} of the batch begins too far in"
                )
            for i in range(count):
                offsets[i] += at
            self.offsets.used += <size_t>count * 8
            reserve(&self.seen, sizeof(Seen))
            seen = <Seen*>(self.seen.data + self.seen.used)
            seen.offset = at
            seen.message = self.messages
            seen.ref = self.refs.used // 4
            seen.count = count
            seen.refs = u16(records + at + 24)
            self.seen.used += sizeof(Seen)
            self._count(records + at, count, bodies)
            self.messages += count
            at += length
        return 0

    cdef int _count(self, const uint8_t *record, uint32_t count, uint64_t bodies) except -1:
        """Add the record to each of its queues' counts; remember which slots these are."""
        cdef uint32_t i, queue_id, queues = u16(record + 24)
        cdef int64_t slot_number
        cdef uint64_t fact = fact_of(record)
        cdef uint32_t *refs
        cdef Slot *slot
        reserve(&self.refs, <size_t>queues * 4)
        refs = <uint32_t*>(self.refs.data + self.refs.used)
        for i in range(queues):
            queue_id = u32(record + RECORD_HEADER + 4 * i)
            slot_number = id_table_add(&self.table, queue_id)
            if <size_t>slot_number * sizeof(Slot) == self.slots.used:
                reserve(&self.slots, sizeof(Slot))
                slot = <Slot*>(self.slots.data + self.slots.used)
                memset(slot, 0, sizeof(Slot))
                slot.queue_id = queue_id
                self.slots.used += sizeof(Slot)
            slot = <Slot*>self.slots.data + slot_number
            slot.count += count
            slot.body_bytes += bodies
            slot.marks |= record[27] & MARKS
            slot.kinds |= kind_of(record[27])
            if fact != 0:
                slot.has_facts = True
            refs[i] = <uint32_t>slot_number
        self.refs.used += <size_t>queues * 4
        return 0

    def fit(self, unsigned long long start, unsigned long long room) -> int:
        """Return the offset behind the last whole record that fits.

        There are `room` bytes for records from the one at `start` on.
        """
        if <unsigned long long>self.planned_bytes - start <= room:
            return self.planned_bytes
        return (<Seen*>self.seen.data)[self._before(start + room + 1) - 1].offset

    cdef size_t _before(self, uint64_t offset) noexcept:
        """Return how many records begin before `offset`."""
        cdef Seen *seen = <Seen*>self.seen.data
        cdef size_t low = 0, high = self.seen.used // sizeof(Seen), middle
        while low < high:
            middle = (low + high) // 2
            if seen[middle].offset < offset:
                low = middle + 1
            else:
                high = middle
        return low

    cpdef tuple counts(self, unsigned long long start, unsigned long long stop):
        """Return (records, messages, references from queues) of the records from `start` to `stop`.
        """
        cdef Seen *seen = <Seen*>self.seen.data
        cdef size_t i, records = 0
        cdef uint64_t messages = 0, references = 0
        for i in range(self.seen.used // sizeof(Seen)):
            if start <= seen[i].offset < stop:
                records += 1
                messages += seen[i].count
                references += <uint64_t>seen[i].count * seen[i].refs
        return records, messages, references

    cpdef copy(
        self, records, Py_ssize_t start, Py_ssize_t stop, bytearray target, Py_ssize_t position,
        uint32_t salt, Abstracts abstracts=None
    ):
        """Copy records [start, stop) to `target` at `position`, in one piece.

        Their checksums are salted. `abstracts` are those of that segment.
        """
        cdef Py_buffer view
        cdef uint8_t *out = <uint8_t*>PyByteArray_AS_STRING(target) + position
        cdef uint64_t at = 0, total = stop - start
        if position + (stop - start) > PyByteArray_GET_SIZE(target) or stop > self.planned_bytes:
            raise ValueError("no room for the batch")
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        try:
            # The records may be in their place: lent.lay_out() has put them there.
            if out != <const uint8_t*>view.buf + start:
                memcpy(out, <const uint8_t*>view.buf + start, total)
            if abstracts is not None and abstracts.end != 0 and total != 0:
                self._collect(<const uint8_t*>view.buf, start, stop, position, abstracts)
        finally:
            PyBuffer_Release(&view)
        while at < total:
            put32(out + at + 4, u32(out + at + 4) ^ salt)
            at += u32(out + at)

    cdef void _collect(
        self, const uint8_t *records, uint64_t start, uint64_t stop, uint64_t position,
        Abstracts abstracts
    ) noexcept:
        """Collect the abstracts of records [start, stop), which go to `position`."""
        cdef Seen *seen = <Seen*>self.seen.data
        cdef const uint64_t *offsets = <const uint64_t*>self.offsets.data
        cdef size_t i, first = self._before(start), last = self._before(stop)
        cdef bint is_rest = last == self.seen.used // sizeof(Seen)
        cdef uint64_t refs = (self.refs.used // 4 if is_rest else seen[last].ref) - seen[first].ref
        cdef uint64_t messages = (
            (self.messages if is_rest else seen[last].message) - seen[first].message
        )
        cdef uint64_t size = ABSTRACT_HEADER * (last - first) + 4 * refs + 8 * messages
        cdef uint64_t references = 0
        cdef uint8_t *out = abstracts.room_for(size) if abstracts.end == position else NULL
        if out == NULL:
            abstracts.give_up()
            return
        for i in range(first, last):
            out = write_abstract(
                out, records + seen[i].offset, records, position - start, offsets + seen[i].message
            )
            references += <uint64_t>seen[i].count * seen[i].refs
        abstracts.added(
            size, position + stop - start,
            ABSTRACT_HEADER * (last - first) + 4 * references + 8 * messages
        )

    def take(self, list pieces, bint indexes) -> list:
        """Return one Arrival per queue.

        `pieces` has (start, stop, segment, position of start) of all pieces of the batch, in order.
        """
        cdef list arrivals = self._arrivals(indexes)
        cdef Seen *seen = <Seen*>self.seen.data
        cdef size_t record = 0, records = self.seen.used // sizeof(Seen)
        cdef uint64_t start, stop, segment, position
        for start, stop, segment, position in pieces:
            while record < records and seen[record].offset < stop:
                self._index(&seen[record], (segment << 32) + ((position - start) << 4), indexes)
                record += 1
        return arrivals

    cpdef facts(self, records, list arrivals):
        """Fill in the facts of the Arrivals that have some."""
        cdef Py_buffer view
        cdef Seen *seen = <Seen*>self.seen.data
        cdef Slot *slots = <Slot*>self.slots.data
        cdef Slot *slot
        cdef uint32_t *refs
        cdef uint64_t fact
        cdef size_t i
        cdef uint32_t j, k
        cdef array.array facts
        cdef bint some = False
        for i in range(self.slots.used // sizeof(Slot)):
            if slots[i].has_facts:
                facts = array.clone(_Q, slots[i].count, False)
                (<Arrival>arrivals[i]).facts = facts
                slots[i].facts = <uint64_t*>facts.data.as_ulonglongs
                some = True
        if not some:
            return
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        try:
            for i in range(self.seen.used // sizeof(Seen)):
                fact = fact_of(<const uint8_t*>view.buf + seen[i].offset)
                refs = <uint32_t*>self.refs.data + seen[i].ref
                for j in range(seen[i].refs):
                    slot = &slots[refs[j]]
                    if slot.has_facts:
                        for k in range(seen[i].count):
                            slot.facts[k] = fact
                        slot.facts += seen[i].count
        finally:
            PyBuffer_Release(&view)

    cdef list _arrivals(self, bint indexes):
        cdef Slot *slots = <Slot*>self.slots.data
        cdef size_t i
        cdef array.array entries, ordinals
        cdef Arrival arrival
        cdef list arrivals = []
        for i in range(self.slots.used // sizeof(Slot)):
            entries = array.clone(_Q, slots[i].count, False)
            slots[i].entries = <uint64_t*>entries.data.as_ulonglongs
            ordinals = None
            if indexes:
                ordinals = array.clone(_I, slots[i].count, False)
                slots[i].indexes = <uint32_t*>ordinals.data.as_uints
            arrival = Arrival.__new__(Arrival)
            arrival.queue_id = slots[i].queue_id
            arrival.entries = entries
            arrival.body_bytes = slots[i].body_bytes
            arrival.indexes = ordinals
            arrival.marks = slots[i].marks
            arrival.kinds = slots[i].kinds
            arrivals.append(arrival)
        return arrivals

    cdef void _index(self, Seen *seen, uint64_t base, bint indexes) noexcept:
        """Append the entries of one record to each of its queues.

        The pointers of a slot move on as the slot fills.
        """
        cdef uint64_t *offsets = <uint64_t*>self.offsets.data + seen.message
        cdef uint32_t *refs = <uint32_t*>self.refs.data + seen.ref
        cdef Slot *slots = <Slot*>self.slots.data
        cdef Slot *slot = &slots[refs[0]]
        cdef uint64_t *first = slot.entries
        cdef uint32_t i, j
        for i in range(seen.count):
            first[i] = base + (offsets[i] << 4)
        slot.entries += seen.count
        for j in range(1, seen.refs):
            slot = &slots[refs[j]]
            memcpy(slot.entries, first, <size_t>seen.count * 8)
            slot.entries += seen.count
        if indexes:
            for j in range(seen.refs):
                slot = &slots[refs[j]]
                for i in range(seen.count):
                    slot.indexes[i] = <uint32_t>(seen.message + i)
                slot.indexes += seen.count


# -- read and settle -------------------------------------------------------------------------------

def copy_out(
    bytearray source, unsigned long long base, unsigned long long used, array.array entries,
    Py_ssize_t start, Py_ssize_t stop, Py_ssize_t bytes_max, bint at_least_one
) -> tuple:
    """Return (blob, body_bytes of each) of the messages of entries[start:stop].

    `source` holds `used` bytes of their segment from position `base` on. The messages end before
    the first that is not whole in `source`, and before the first that would make the blob longer
    than `bytes_max`. With `at_least_one` the first message may be longer.
    """
    return copied_out(source, base, used, entries, start, stop, bytes_max, at_least_one, False)


cdef tuple copied_out(
    bytearray source, uint64_t base, uint64_t used, array.array entries, Py_ssize_t start,
    Py_ssize_t stop, Py_ssize_t bytes_max, bint at_least_one, bint views
):
    cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(source)
    cdef const uint64_t *wanted = <const uint64_t*>entries.data.as_ulonglongs
    cdef array.array sizes = array.clone(_I, stop - start, False)
    cdef uint32_t *size_of = <uint32_t*>sizes.data.as_uints
    cdef uint64_t *runs = <uint64_t*>malloc(<size_t>(stop - start) * 16 + 16)
    cdef uint64_t position, total, blob_bytes = 0, run_start = 0, run_stop = 0
    cdef Py_ssize_t i, n = 0, run_count = 0
    cdef char *out
    bytes_max = max(bytes_max, 0)
    if runs == NULL:
        raise MemoryError
    try:
        for i in range(start, stop):
            if i + LOOK_AHEAD < stop:
                prefetch(data + (position_of(wanted[i + LOOK_AHEAD]) - base))
            position = position_of(wanted[i]) - base
            if position >= used:
                break
            total = message_bytes(data + position, used - position)
            if total == 0:
                break
            if blob_bytes + total > <uint64_t>bytes_max and not (at_least_one and n == 0):
                break
            size_of[n] = u32(data + position)
            n += 1
            blob_bytes += total
            # Neighbours in the segment leave in one copy.
            if position != run_stop or run_count == 0:
                if run_count:
                    runs[2 * run_count - 1] = run_stop - run_start
                run_start = position
                runs[2 * run_count] = position
                run_count += 1
            run_stop = position + total
        if run_count:
            runs[2 * run_count - 1] = run_stop - run_start
        if views and run_count == 1 and blob_bytes >= VIEW_BYTES_MIN:
            if n < stop - start:
                array.resize(sizes, n)
            return memoryview(source)[run_start:run_stop].toreadonly(), sizes
        blob = PyBytes_FromStringAndSize(NULL, blob_bytes)
        out = PyBytes_AS_STRING(blob)
        for i in range(run_count):
            memcpy(out, data + runs[2 * i], runs[2 * i + 1])
            out += runs[2 * i + 1]
    finally:
        free(runs)
    if n < stop - start:
        array.resize(sizes, n)
    return blob, sizes


def look_at(
    bytearray source, unsigned long long used, array.array entries, Py_ssize_t start,
    Py_ssize_t stop, Py_ssize_t bytes_max
) -> tuple:
    """Do the same as copy_out() of a whole segment, for at least one message.

    A large blob is a view of `source` if its messages lie together.
    """
    return copied_out(source, 0, used, entries, start, stop, bytes_max, True, True)


def pieces_out(list pieces, Py_ssize_t bytes_max, bint at_least_one) -> tuple:
    """Return (blob, body_bytes of each, whether there was room) of stored messages.

    Each of `pieces` begins with a stored message. The messages end before the first that is not
    whole, or that there is no room for, as in copy_out().
    """
    cdef Py_ssize_t i, n = 0, count = len(pieces)
    cdef array.array sizes = array.clone(_I, count, False)
    cdef uint64_t *totals = <uint64_t*>malloc(<size_t>count * 8 + 8)
    cdef uint64_t total, blob_bytes = 0
    cdef bytes piece
    cdef char *out
    cdef bint fits = True
    bytes_max = max(bytes_max, 0)
    if totals == NULL:
        raise MemoryError
    try:
        for i in range(count):
            piece = pieces[i]
            total = message_bytes(<const uint8_t*>PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
            fits = (
                total == 0 or blob_bytes + total <= <uint64_t>bytes_max or (at_least_one and n == 0)
            )
            if total == 0 or not fits:
                break
            sizes.data.as_uints[n] = u32(<const uint8_t*>PyBytes_AS_STRING(piece))
            totals[n] = total
            n += 1
            blob_bytes += total
        blob = PyBytes_FromStringAndSize(NULL, blob_bytes)
        out = PyBytes_AS_STRING(blob)
        for i in range(n):
            memcpy(out, PyBytes_AS_STRING(<bytes>pieces[i]), totals[i])
            out += totals[i]
    finally:
        free(totals)
    if n < count:
        array.resize(sizes, n)
    return blob, sizes, fits


def message_bytes_at(bytearray source, unsigned long long offset) -> int:
    """Return the length of the stored message that begins at `offset`.

    The rest of the message need not be in `source`. Return 0 if `source` has too little to tell.
    """
    cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(source)
    cdef uint64_t size = PyByteArray_GET_SIZE(source), n
    if offset + 10 > size:
        return 0
    n = data[offset + 8]
    if offset + 10 + n > size:
        return 0
    return 10 + n + data[offset + 9 + n] + u32(data + offset + 4) + <uint64_t>u32(data + offset)


def only_segment(array.array entries) -> int:
    """Return the segment of all these entries, 0 if there is none, or more than one."""
    cdef const uint64_t *entry = <const uint64_t*>entries.data.as_ulonglongs
    cdef Py_ssize_t i, count = len(entries)
    if entries.ob_descr.typecode != c"Q":
        raise TypeError("entries must be array('Q')")
    for i in range(1, count):
        if entry[i] >> 32 != entry[0] >> 32:
            return 0
    return entry[0] >> 32 if count else 0


def segment_runs(array.array entries) -> list:
    """Return (segment, start, stop) of each run of entries of one segment."""
    cdef const uint64_t *entry = <const uint64_t*>entries.data.as_ulonglongs
    cdef Py_ssize_t i, start = 0, count = len(entries)
    cdef list runs = []
    if entries.ob_descr.typecode != c"Q":
        raise TypeError("entries must be array('Q')")
    for i in range(1, count):
        if entry[i] >> 32 != entry[start] >> 32:
            runs.append((entry[start] >> 32, start, i))
            start = i
    if count:
        runs.append((entry[start] >> 32, start, count))
    return runs


cdef inline uint64_t position_of(uint64_t entry) noexcept nogil:
    return <uint32_t>entry >> 4


def settled_pairs(
    unsigned int queue_id, array.array entries, Py_ssize_t start, Py_ssize_t stop
) -> bytes:
    cdef const uint64_t *entry = <const uint64_t*>entries.data.as_ulonglongs
    cdef bytes pairs = PyBytes_FromStringAndSize(NULL, (stop - start) * 8)
    cdef uint64_t *out = <uint64_t*>PyBytes_AS_STRING(pairs)
    cdef Py_ssize_t i
    for i in range(start, stop):
        out[i - start] = <uint64_t>queue_id << 32 | position_of(entry[i])
    return pairs


def queues_of_pairs(pairs) -> set:
    """Return the ids of the queues that settled pairs are of."""
    cdef const uint8_t[::1] view = pairs
    cdef Py_ssize_t at, size = view.shape[0] & ~7
    cdef uint64_t queue_id, last = <uint64_t>1 << 32  # no queue has this id
    cdef set found = set()
    for at in range(0, size, 8):
        queue_id = u32(&view[at + 4])
        if queue_id != last:
            last = queue_id
            found.add(queue_id)
    return found


def mark_redelivered(array.array entries, array.array marks) -> None:
    """Set the REDELIVERED flag of those of `entries` that are among `marks`; both ascending."""
    cdef uint64_t *entry = <uint64_t*>entries.data.as_ulonglongs
    cdef const uint64_t *mark = <const uint64_t*>marks.data.as_ulonglongs
    cdef Py_ssize_t i = 0, j = 0, n = len(entries), m = len(marks)
    while i < n and j < m:
        if entry[i] & ~<uint64_t>15 < mark[j] & ~<uint64_t>15:
            i += 1
        elif entry[i] & ~<uint64_t>15 > mark[j] & ~<uint64_t>15:
            j += 1
        else:
            entry[i] |= 1
            i += 1


def redelivered(array.array entries):
    """Return the entries with the REDELIVERED flag."""
    cdef const uint64_t *entry = <const uint64_t*>entries.data.as_ulonglongs
    cdef Py_ssize_t i, found = 0, n = len(entries)
    cdef uint64_t *to
    cdef array.array result
    for i in range(n):
        found += entry[i] & 1
    result = array.clone(_Q, found, False)
    to = <uint64_t*>result.data.as_ulonglongs
    for i in range(n):
        if entry[i] & 1:
            to[0] = entry[i]
            to += 1
    return result


include "scanning.pxi"
include "lent.pxi"
