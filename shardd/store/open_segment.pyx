# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Append to the open segment of a store, find messages there, and settle them, without Python.

This is the short way of a store. `SegmentStore` (segments/store.py) does the same in Python, and
more: another segment, a store that is not usable, acks that have to be written. Each function here
returns before it changes anything if the case is one of these, and the caller goes the long way.
The other classes keep what both ways use: `Segment` derives from `SegmentState`, and so on.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from shardmq.shardd.grown cimport reserve
from shardmq.shardd.store.format.layout cimport (
    ABSTRACT_HEADER, put32, record_bytes, u32, walk, write_abstract,
)

cdef extern from "../crc32c.h" nogil:
    uint32_t crc32c(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

# An open segment of more bytes than this, of which nothing is written and nothing is needed, starts
# anew while its pages are in the CPU cache.
RENEW_BYTES = 256 << 10
# Bytes of settled pairs in memory of segments that are on disk. Beyond this each settle writes some
# of them.
SETTLED_BYTES_MAX = 1 << 20
# Bytes of forgotten pairs. Beyond this they are written with the others.
FORGOTTEN_BYTES_MAX = 4 << 20
# A segment ends with this many bytes of zeros (format/segment_file.py).
END_BYTES = 8

# A message that begins further in its record has no place in an entry, behind the header of a
# segment.
cdef uint64_t POSITION_MAX = (1 << 28) - 64
cdef long long RENEW = RENEW_BYTES
cdef long long SETTLED_MAX = SETTLED_BYTES_MAX
cdef long long FORGOTTEN_MAX = FORGOTTEN_BYTES_MAX
cdef long long END = END_BYTES
cdef str OPEN = "open"


cdef class StageState:
    """The state of a store or stream."""


cdef class SegmentState:
    """The state of a segment."""


cdef class AppendCounters:
    """The counters of appends."""


cdef class PendingState:
    """What is kept of the pairs of settled messages.

    `with_settled` and `with_forgotten` have the segments with such pairs, by number.
    """


cdef class SegmentsState:
    """What is kept of the segments of a store.

    `open` is the segment that is written to, or None. `returned` is not empty while some message
    has a count of its returns.
    """


cdef class SegmentStoreState:
    """The short way of a store."""

    def __dealloc__(self):
        free(self.offsets.data)

    cdef bint is_open(self):
        """Return whether the store may be read and settled."""
        return self._segments.state.stage is OPEN

    cdef SegmentState room_for(self, size_t size):
        """Return the open segment if it takes a batch of `size` bytes at once, else None."""
        cdef SegmentsState segments = self._segments
        cdef StageState state = segments.state
        cdef SegmentState segment = segments.open
        if state.stage is not OPEN or state.failure or (state.job is not None and state.job.done):
            return None
        if segment is None or segment.buffer is None:
            return None
        if (
            segment.used > RENEW
            and segment.live == 0
            and segment.flushed == 0
            and not segment.in_sequence
        ):
            return None
        if <long long> size > segment.capacity - segment.used - END:
            return None
        if segment.used + <long long> size > PyByteArray_GET_SIZE(segment.buffer):
            return None
        return segment

    cdef bint plan(self, const uint8_t *records, size_t size) except -1:
        """Check whole records that are all for one queue; return False if one is not true."""
        cdef uint64_t at = 0, length, bodies = 0
        cdef uint64_t *offsets
        cdef uint32_t count, i
        self.offsets.used = 0
        self.planned_records = self.planned_messages = self.planned_bodies = 0
        while at < size:
            length = record_bytes(records + at, size - at)
            if length == 0 or crc32c(0, records + at + 8, length - 8) != u32(records + at + 4):
                return False
            count = u32(records + at + 20)
            reserve(&self.offsets, count * sizeof(uint64_t))
            offsets = <uint64_t *> (self.offsets.data + self.offsets.used)
            if (
                walk(records + at, length, offsets, &bodies) != 0
                or offsets[count - 1] >= POSITION_MAX
            ):
                return False
            for i in range(count):
                offsets[i] += at
            self.offsets.used += count * sizeof(uint64_t)
            self.planned_records += 1
            self.planned_messages += count
            self.planned_bodies += bodies
            at += length
        return True

    cdef int append_bytes(
        self, const uint8_t *records, size_t size, SegmentState segment
    ) except -1:
        """Put the planned records into that segment.

        Entries then stand in the place of the offsets.
        """
        cdef uint8_t *out = <uint8_t *> PyByteArray_AS_STRING(segment.buffer) + segment.used
        cdef uint64_t base = (<uint64_t> segment.number << 32) + (<uint64_t> segment.used << 4)
        cdef uint64_t *offsets = <uint64_t *> self.offsets.data
        cdef uint64_t i, at = 0, messages = self.planned_messages
        cdef AppendCounters counters = self._segments.counters
        memcpy(out, records, size)
        while at < size:
            put32(out + at + 4, u32(out + at + 4) ^ segment.salt)
            at += u32(out + at)
        if segment.abstracts is not None and segment.abstracts.end != 0:
            self.collect(records, size, segment)
        for i in range(messages):
            offsets[i] = base + (offsets[i] << 4)
        segment.used += size
        segment.records += self.planned_records
        segment.messages += messages
        segment.references += messages
        segment.live += messages
        counters.appended_messages += messages
        counters.appended_bytes += size
        return 0

    cdef void collect(self, const uint8_t *records, size_t size, SegmentState segment) noexcept:
        """Add the abstracts of the planned records to those of the segment, as Batch does."""
        cdef Abstracts abstracts = segment.abstracts
        cdef const uint64_t *offsets = <const uint64_t *> self.offsets.data
        cdef uint64_t heads = ABSTRACT_HEADER * self.planned_records, at = 0
        cdef uint64_t bytes = heads + 4 * self.planned_records + 8 * self.planned_messages
        cdef uint8_t *out = (
            abstracts.room_for(bytes) if abstracts.end == <uint64_t> segment.used else NULL
        )
        if out == NULL:
            abstracts.give_up()
            return
        while at < size:
            out = write_abstract(out, records + at, records, segment.used, offsets)
            offsets += u32(records + at + 20)
            at += u32(records + at)
        abstracts.added(bytes, segment.used + size, heads + 12 * self.planned_messages)

    cdef bint holds(self, uint64_t entry) noexcept:
        """Return whether the message is in the buffer of the open segment, and its body, too."""
        cdef SegmentState segment = self._segments.open
        if (
            segment is None
            or segment.number != entry >> 32
            or segment.buffer is None
            or segment.moves is not None
        ):
            return False
        if segment.lends:
            return False
        return (<uint32_t> entry >> 4) < segment.used

    cdef bint settle_here(
        self, uint32_t queue_id, const uint64_t *entries, Py_ssize_t count, bint durable
    ) except -1:
        """Settle messages of the open segment.

        Return False, with nothing done, if that is too much here.
        """
        cdef SegmentsState segments = self._segments
        cdef SegmentState segment = segments.open
        cdef PendingState pending = segments.settled
        cdef long long pairs_bytes = 8 * count
        cdef Py_ssize_t i
        if (
            segments.state.stage is not OPEN
            or segment is None
            or segment.moves is not None
            or segments.returned
        ):
            return False
        if segment.live < count or pending.settled_bytes + pairs_bytes > SETTLED_MAX:
            return False
        # Entries that were handed out ascend, except where messages came back before.
        for i in range(count):
            if entries[i] >> 32 != segment.number:
                return False
        if durable or segment.live > count or segment.merging:
            if durable:
                if not segment.settled:
                    pending.with_settled[segment.number] = segment
                put_pairs(segment.settled, queue_id, entries, count)
                if segment.flushed:
                    pending.settled_bytes += pairs_bytes
            else:
                if pending.forgotten_bytes + pairs_bytes > FORGOTTEN_MAX:
                    return False
                if not segment.forgotten:
                    pending.with_forgotten[segment.number] = segment
                put_pairs(segment.forgotten, queue_id, entries, count)
                pending.forgotten_bytes += pairs_bytes
            segment.live -= count
            return True
        if segment.forgotten:
            return False
        segment.live -= count
        segment.dead_until = segment.used
        return True


cdef int put_pairs(
    bytearray pairs, uint32_t queue_id, const uint64_t *entries, Py_ssize_t count
) except -1:
    """Append the pairs of settled messages, as drawn in format/record.pyx."""
    cdef Py_ssize_t i, before = PyByteArray_GET_SIZE(pairs)
    cdef uint64_t *out
    PyByteArray_Resize(pairs, before + 8 * count)
    out = <uint64_t *> (PyByteArray_AS_STRING(pairs) + before)
    for i in range(count):
        out[i] = <uint64_t> queue_id << 32 | <uint32_t> entries[i] >> 4
    return 0
