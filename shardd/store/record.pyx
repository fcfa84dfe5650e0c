# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The loops over records: check and index a batch, copy it, scan a segment, read messages back, settle.

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

    entry     segment << 32 | position << 4 | flags          position: of a stored message in its segment
    pair      queue id << 32 | position                      one settled message of one queue
    abstract  what recovery needs of a record, without its messages:
              u64 timestamp | u32 ttl_ms | u32 count | u16 queues | u8 priority | u8 flags
              | u32 queue id[queues] | (u32 position, u32 body_bytes)[count]
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from shardd.grown cimport Grown, reserve
from shardd.store.layout cimport RECORD_HEADER, message_bytes, put32, record_bytes, u16, u32, u64

cdef extern from "../crc32c.h" nogil:
    int crc32c_hardware
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    uint32_t c_crc32c_narrow "crc32c_narrow"(uint32_t crc, const uint8_t *p, size_t n)
    uint32_t c_crc32c_tables "crc32c_tables"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

cdef uint32_t NONE = 0xFFFFFFFF
# Flags of a record that its queues are told of (queues/entry.py).
cdef uint8_t MARKS = 4 | 8
cdef uint64_t POSITION_LIMIT = 1 << 28
# Room that a segment's own header may take before the first record.
cdef uint64_t SEGMENT_HEADER_MAX = 64
# How many bytes a search for good records behind a bad one may run a crc over, per byte of segment: bodies can be
# made to look like records, and recovery must end.
cdef uint64_t RESYNC_CRC_SHARE = 8

# Less is sooner copied than a view is made.
cdef uint64_t VIEW_BYTES_MIN = 16 << 10

cdef array.array _Q = array.array("Q")
cdef array.array _I = array.array("I")


cdef class Arrival:
    """Messages that reached one queue: entries in publish order; what stands beside them has one item for each."""

    cdef readonly unsigned int queue_id
    cdef readonly object entries
    cdef readonly unsigned long long body_bytes
    cdef readonly object facts
    cdef readonly object indexes
    cdef readonly object times
    cdef readonly int marks  # MARKS of the flags of its records, all together

    def __init__(self, queue_id, entries, body_bytes, facts=None, indexes=None, times=None, marks=0):
        self.queue_id = queue_id
        self.entries = entries
        self.body_bytes = body_bytes
        self.facts = facts
        self.indexes = indexes
        self.times = times
        self.marks = marks

    def __repr__(self):
        return f"Arrival(queue_id={self.queue_id}, entries={self.entries!r}, body_bytes={self.body_bytes})"


def crc32c(data, uint32_t crc=0) -> int:
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return c_crc32c(crc, <const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def crc32c_narrow(const uint8_t[::1] data not None, uint32_t crc=0) -> int:
    """The one of processors that do not multiply 512 bits, for comparison."""
    return c_crc32c_narrow(crc, &data[0] if data.shape[0] else NULL, data.shape[0])


def crc32c_tables(const uint8_t[::1] data not None, uint32_t crc=0) -> int:
    """The way without the instruction; the same answer."""
    return c_crc32c_tables(crc, &data[0] if data.shape[0] else NULL, data.shape[0])


def crc32c_uses_hardware() -> bool:
    return crc32c_hardware != 0


# -- growing arrays and the table of queue ids --------------------------------------------------------

cdef struct IdTable:
    uint32_t *keys
    uint32_t *slots  # slot + 1, 0: free
    uint32_t mask
    uint32_t count


cdef int id_table_clear(IdTable *table, uint32_t size) except -1 nogil:
    """Empty, with `size` places (a power of two)."""
    if table.keys == NULL or table.mask + 1 != size:
        free(table.keys)
        free(table.slots)
        table.keys = <uint32_t*>malloc(<size_t>size * 4)
        table.slots = <uint32_t*>malloc(<size_t>size * 4)
        if table.keys == NULL or table.slots == NULL:
            with gil:
                raise MemoryError
        table.mask = size - 1
    memset(table.slots, 0, <size_t>size * 4)
    table.count = 0
    return 0


cdef inline uint32_t id_table_place(IdTable *table, uint32_t key) noexcept nogil:
    cdef uint32_t at = ((key * <uint32_t>2654435761) >> 7) & table.mask
    while table.slots[at] != 0 and table.keys[at] != key:
        at = (at + 1) & table.mask
    return at


cdef int id_table_grow(IdTable *table) except -1 nogil:
    cdef IdTable old = table[0]
    cdef uint32_t i, at
    table.keys = NULL
    table.slots = NULL
    id_table_clear(table, (old.mask + 1) * 2)
    for i in range(old.mask + 1):
        if old.slots[i] != 0:
            at = id_table_place(table, old.keys[i])
            table.keys[at] = old.keys[i]
            table.slots[at] = old.slots[i]
    table.count = old.count
    free(old.keys)
    free(old.slots)
    return 0


cdef int64_t id_table_add(IdTable *table, uint32_t key) except -1 nogil:
    """Slot of `key`, new ones count up."""
    cdef uint32_t at = id_table_place(table, key)
    if table.slots[at] == 0:
        if table.count * 2 > table.mask:
            id_table_grow(table)
            at = id_table_place(table, key)
        table.count += 1
        table.keys[at] = key
        table.slots[at] = table.count
    return table.slots[at] - 1


# -- one record ---------------------------------------------------------------------------------------

cdef inline int walk(const uint8_t *record, uint64_t length, uint64_t *offsets, uint64_t *body_bytes) noexcept nogil:
    """Offsets of the messages within the record; 0, or -1 when they do not fill it."""
    cdef uint64_t at = RECORD_HEADER + 4 * <uint64_t>u16(record + 24)
    cdef uint64_t total, bodies = 0
    cdef uint32_t i, count = u32(record + 20)
    for i in range(count):
        total = message_bytes(record + at, length - at)
        if total == 0:
            return -1
        offsets[i] = at
        bodies += u32(record + at)
        at += total
    body_bytes[0] = bodies
    return 0 if length - at < 8 else -1


cdef inline uint64_t position_of(uint64_t entry) noexcept nogil:
    return <uint32_t>entry >> 4


cdef inline uint64_t fact_of(const uint8_t *record) noexcept nogil:
    """priority << 56 | expires_at_ms; 0 says nothing: the lowest priority, never expires. Without a priority the time
    has all 64 bits: so it is in the record of a message that waits at an exchange until then."""
    cdef uint64_t fact = 0
    cdef uint32_t ttl = u32(record + 16)
    if ttl != NONE:
        fact = u64(record + 8) + ttl
    if record[26] != 255:
        fact = fact & <uint64_t>0xFFFFFFFFFFFFFF | <uint64_t>record[26] << 56
    return fact


# -- append -------------------------------------------------------------------------------------------

cdef struct Slot:
    uint32_t queue_id
    bint has_facts
    uint8_t marks
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


cdef class Batch:
    """A batch of records on its way into segments: `plan` checks it and counts, `fit` says how much of it a segment
    takes, `copy` copies that, `take` gives the entries. The object is kept and used for batch after batch."""

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

    def plan(self, records) -> None:
        """Check every record of the batch, crc and all; ValueError when one is not whole and true."""
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
            self._plan(<const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef int _plan(self, const uint8_t *records, uint64_t total) except -1:
        cdef uint64_t at = 0, length, bodies = 0
        cdef uint64_t *offsets
        cdef Seen *seen
        cdef uint32_t i, count
        while at < total:
            length = record_bytes(records + at, total - at)
            if length == 0:
                raise ValueError(f"no record at byte {at} of the batch")
            if c_crc32c(0, records + at + 8, length - 8) != u32(records + at + 4):
                raise ValueError(f"wrong crc of the record at byte {at} of the batch")
            count = u32(records + at + 20)
            reserve(&self.offsets, <size_t>count * 8)
            offsets = <uint64_t*>(self.offsets.data + self.offsets.used)
            if walk(records + at, length, offsets, &bodies) != 0:
                raise ValueError(f"messages do not fill the record at byte {at} of the batch")
            if offsets[count - 1] + SEGMENT_HEADER_MAX >= POSITION_LIMIT:
                raise ValueError(f"a message of the record at byte {at} of the batch begins too far in")
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
            if fact != 0:
                slot.has_facts = True
            refs[i] = <uint32_t>slot_number
        self.refs.used += <size_t>queues * 4
        return 0

    def fit(self, unsigned long long start, unsigned long long room) -> int:
        """Offset behind the last whole record that `room` bytes from the record at `start` can take."""
        cdef Seen *seen = <Seen*>self.seen.data
        cdef Py_ssize_t low = 0, high = self.seen.used // sizeof(Seen), middle
        if <unsigned long long>self.planned_bytes - start <= room:
            return self.planned_bytes
        while low < high:  # the first record that begins behind start + room
            middle = (low + high) // 2
            if seen[middle].offset <= start + room:
                low = middle + 1
            else:
                high = middle
        return seen[low - 1].offset

    def counts(self, unsigned long long start, unsigned long long stop) -> tuple:
        """(records, messages, references from queues) of the records from `start` to `stop`."""
        cdef Seen *seen = <Seen*>self.seen.data
        cdef size_t i, records = 0
        cdef uint64_t messages = 0, references = 0
        for i in range(self.seen.used // sizeof(Seen)):
            if start <= seen[i].offset < stop:
                records += 1
                messages += seen[i].count
                references += <uint64_t>seen[i].count * seen[i].refs
        return records, messages, references

    def copy(self, records, Py_ssize_t start, Py_ssize_t stop, bytearray target, Py_ssize_t position, uint32_t salt):
        """Records [start, stop) to `target` at `position`, in one piece, salted."""
        cdef Py_buffer view
        cdef uint8_t *out = <uint8_t*>PyByteArray_AS_STRING(target) + position
        cdef uint64_t at = 0, total = stop - start
        if position + (stop - start) > PyByteArray_GET_SIZE(target) or stop > self.planned_bytes:
            raise ValueError("no room for the batch")
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        try:
            memcpy(out, <const uint8_t*>view.buf + start, total)
        finally:
            PyBuffer_Release(&view)
        while at < total:
            put32(out + at + 4, u32(out + at + 4) ^ salt)
            at += u32(out + at)

    def take(self, list pieces, bint indexes) -> list:
        """One Arrival per queue. `pieces`: (start, stop, segment, position of start), in order, of the whole batch."""
        cdef list arrivals = self._arrivals(indexes)
        cdef Seen *seen = <Seen*>self.seen.data
        cdef size_t record = 0, records = self.seen.used // sizeof(Seen)
        cdef uint64_t start, stop, segment, position
        for start, stop, segment, position in pieces:
            while record < records and seen[record].offset < stop:
                self._index(&seen[record], (segment << 32) + ((position - start) << 4), indexes)
                record += 1
        return arrivals

    def facts(self, records, list arrivals) -> None:
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
            arrivals.append(arrival)
        return arrivals

    cdef void _index(self, Seen *seen, uint64_t base, bint indexes) noexcept:
        """Entries of one record, to each of its queues. A slot's pointers move on as it fills."""
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


# -- read and settle ----------------------------------------------------------------------------------

def copy_out(bytearray source, unsigned long long base, unsigned long long used, array.array entries,
             Py_ssize_t start, Py_ssize_t stop, Py_ssize_t bytes_max, bint at_least_one) -> tuple:
    """(blob, body_bytes of each) of messages of entries[start:stop], up to the first that is not whole in `source`,
    which holds `used` bytes of their segment from position `base` on, or that would make the blob longer than
    `bytes_max` (not the first, with `at_least_one`)."""
    return copied_out(source, base, used, entries, start, stop, bytes_max, at_least_one, False)


cdef tuple copied_out(bytearray source, uint64_t base, uint64_t used, array.array entries, Py_ssize_t start,
                      Py_ssize_t stop, Py_ssize_t bytes_max, bint at_least_one, bint views):
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


def look_at(bytearray source, unsigned long long used, array.array entries, Py_ssize_t start, Py_ssize_t stop,
            Py_ssize_t bytes_max) -> tuple:
    """As copy_out() of a whole segment, at least one; where they lie together a large blob is a view of `source`."""
    return copied_out(source, 0, used, entries, start, stop, bytes_max, True, True)


def pieces_out(list pieces, Py_ssize_t bytes_max, bint at_least_one) -> tuple:
    """(blob, body_bytes of each, whether there was room) of the stored messages that these bytes objects begin with, as
    copy_out(): up to the first that is not whole, or that there is no room for."""
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
            fits = total == 0 or blob_bytes + total <= <uint64_t>bytes_max or (at_least_one and n == 0)
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
    """Length of the stored message whose beginning is at `offset`, as far as `source` shows it; 0: it shows too little.
    The rest of the message need not be in `source`."""
    cdef const uint8_t *data = <const uint8_t*>PyByteArray_AS_STRING(source)
    cdef uint64_t size = PyByteArray_GET_SIZE(source), n
    if offset + 10 > size:
        return 0
    n = data[offset + 8]
    if offset + 10 + n > size:
        return 0
    return 10 + n + data[offset + 9 + n] + u32(data + offset + 4) + <uint64_t>u32(data + offset)


def segment_runs(array.array entries) -> list:
    """(segment, start, stop) of each run of entries of one segment."""
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


def settled_pairs(unsigned int queue_id, array.array entries, Py_ssize_t start, Py_ssize_t stop) -> bytes:
    cdef const uint64_t *entry = <const uint64_t*>entries.data.as_ulonglongs
    cdef bytes pairs = PyBytes_FromStringAndSize(NULL, (stop - start) * 8)
    cdef uint64_t *out = <uint64_t*>PyBytes_AS_STRING(pairs)
    cdef Py_ssize_t i
    for i in range(start, stop):
        out[i - start] = <uint64_t>queue_id << 32 | position_of(entry[i])
    return pairs


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
    """Those with the REDELIVERED flag."""
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


# -- recovery -----------------------------------------------------------------------------------------

cdef int add_abstract(Grown *out, const uint8_t *record, uint64_t position, const uint64_t *offsets) except -1 nogil:
    cdef uint32_t i, count = u32(record + 20), queues = u16(record + 24)
    cdef uint8_t *at
    reserve(out, 20 + 4 * <size_t>queues + 8 * <size_t>count)
    at = out.data + out.used
    memcpy(at, record + 8, 20 + 4 * <size_t>queues)
    at += 20 + 4 * <size_t>queues
    for i in range(count):
        put32(at, <uint32_t>(position + offsets[i]))
        put32(at + 4, u32(record + offsets[i]))
        at += 8
    out.used = at - out.data
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


cdef struct PairSet:
    uint64_t *pairs  # 0: free; no message is at position 0
    uint64_t mask


cdef inline uint64_t pair_place(PairSet *known, uint64_t pair) noexcept nogil:
    cdef uint64_t at = ((pair * <uint64_t>0x9E3779B97F4A7C15) >> 20) & known.mask
    while known.pairs[at] != 0 and known.pairs[at] != pair:
        at = (at + 1) & known.mask
    return at


cdef int pair_set_fill(PairSet *known, const uint64_t *pairs, size_t count) except -1:
    cdef uint64_t size = 16
    cdef size_t i
    while size < count * 2:
        size *= 2
    known.pairs = <uint64_t*>calloc(size, 8)
    if known.pairs == NULL:
        raise MemoryError
    known.mask = size - 1
    for i in range(count):
        if pairs[i] != 0:
            known.pairs[pair_place(known, pairs[i])] = pairs[i]
    return 0


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
            pair_set_fill(&settled, <const uint64_t*>PyBytes_AS_STRING(pairs), len(pairs) // 8)
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
        cdef uint64_t fact, pair, position
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
            if settled.pairs != NULL:
                pair = <uint64_t>queue_id << 32 | position
                if settled.pairs[pair_place(settled, pair)] != 0:
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
