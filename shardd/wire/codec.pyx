# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Put PUBLISH and DELIVER messages together, and take them apart.

packer.pxi draws PUBLISH and makes it, by the routes of routes.pxi; all else is here. All numbers
are little endian and come after the 16-byte header (messages.py):

    DELIVER  16 u32 sections, u32 zero; section:
                 0 u32 connection  4 u32 consumer  8 u16 channel  12 u32 messages
                10 u16 1 = REDELIVERED, 2^15 = HIDES (a message may have a header BCC), and 2 x how
                   often each of them came back if the queue counts that
                16 u64 delivery number of the first  24 u32 bytes
                28 u32 its weight in the window, 0 for its bytes; + 2^31 = LENT
                32 stored messages, zeros to 8; if LENT, with places instead of bodies (bodies.pxi)

A stored message is drawn in packer.pxi too; here it is bytes.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from shardmq.shardd.wire.buffer cimport (
    KIND_DELIVER, LENT_SHARE, Bytes, references_weight, reserve, write_header,
)
from shardmq.shardd.wire.publishes cimport LENT, RECORD_HEADER, RUN
from shardmq.shardd.wire.messages import Publish, Weighed

cdef enum:
    PUBLISH_HEADER = 40
    MESSAGE_BYTES_MIN = 10
    SECTION = 32
    LENT_SECTION = 0x80000000
    TIMES_MAX = 0x3fff
    HIDES = 0x8000
    # A writer that was once larger than this does not keep its memory.
    KEPT_BYTES_MAX = 4 << 20
    # Messages of at least this much are not copied into a DELIVER, but left where they are until it
    # is sent.
    LARGE_BYTES = 16 << 10


# This does what Publish(...) does, without a function of Python in between.
cdef object new_tuple = tuple.__new__


cdef struct Head:
    uint64_t batch
    uint32_t messages
    uint32_t flags


# Plain buffers here, and no typed memoryviews: a batch of one message is mostly what surrounds it.
def read_publish(message not None):
    """Return the batch. Its lengths are checked, the checksums of its records are not."""
    cdef Py_buffer view
    cdef Head head
    cdef size_t start
    cdef size_t weight
    cdef list ids
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        weight = view.len
        start = read_head(&head, <const uint8_t *> view.buf, view.len)
        ids = queue_ids(<const uint8_t *> view.buf + start, view.len - start, &weight)
    finally:
        PyBuffer_Release(&view)
    return new_tuple(Publish, (head.batch, head.messages, head.flags & 2 != 0, head.flags & 1 != 0,
                               head.flags & 4 != 0, memoryview(message)[start:], ids, weight))


cdef size_t read_head(Head *head, const uint8_t *p, size_t total) except? 0:
    """Return where the records begin."""
    cdef uint32_t runs, size
    if total < PUBLISH_HEADER:
        raise ValueError("short PUBLISH")
    memcpy(&head.batch, p + 16, 8)
    memcpy(&runs, p + 24, 4)
    memcpy(&size, p + 28, 4)
    memcpy(&head.messages, p + 32, 4)
    memcpy(&head.flags, p + 36, 4)
    if total != PUBLISH_HEADER + <uint64_t> runs * RUN + size:
        raise ValueError("PUBLISH of another length than it says")
    if <uint64_t> head.messages * MESSAGE_BYTES_MIN > size:  # each would be told apart if refused
        raise ValueError("PUBLISH of fewer messages than it says")
    return PUBLISH_HEADER + <size_t> runs * RUN


def run_of(const unsigned char[::1] message not None, uint32_t ordinal):
    """Return (connection, channel, confirm number or 0) of the ordinal-th message of a PUBLISH."""
    cdef const uint8_t *p = &message[0]
    cdef uint32_t runs, i, count, connection
    cdef uint16_t channel
    cdef uint64_t seq
    memcpy(&runs, p + 24, 4)
    p += PUBLISH_HEADER
    for i in range(runs):
        memcpy(&count, p + 16, 4)
        if ordinal < count:
            memcpy(&connection, p + 4, 4)
            memcpy(&seq, p + 8, 8)
            memcpy(&channel, p + 20, 2)
            return connection, channel, (seq + ordinal if seq else 0)
        ordinal -= count
        p += RUN
    raise IndexError("no such message in the batch")


def runs_of(const unsigned char[::1] message not None, ordinals):
    """Return runs of messages of a PUBLISH: (connection, channel, first, last confirm number).

    `ordinals` are those of the messages, ascending. Neighbours are one run. Messages without a
    confirm number are left out.
    """
    cdef const uint8_t *p = &message[0]
    cdef uint32_t runs, i = 0, count, connection, ordinal, before = 0, open_connection = 0
    cdef uint16_t channel, open_channel = 0
    cdef uint64_t seq, first = 0, last = 0  # first 0: no run is open
    cdef list found = []
    memcpy(&runs, p + 24, 4)
    p += PUBLISH_HEADER
    for ordinal in ordinals:
        while i < runs:
            memcpy(&count, p + 16, 4)
            if ordinal - before < count:
                break
            before += count
            p += RUN
            i += 1
        if i == runs:
            raise IndexError("no such message in the batch")
        memcpy(&seq, p + 8, 8)
        if not seq:
            continue
        memcpy(&connection, p + 4, 4)
        memcpy(&channel, p + 20, 2)
        seq += ordinal - before
        if first and open_connection == connection and open_channel == channel and last + 1 == seq:
            last = seq
            continue
        if first:
            found.append((open_connection, open_channel, first, last))
        open_connection, open_channel, first, last = connection, channel, seq, seq
    if first:
        found.append((open_connection, open_channel, first, last))
    return found


cdef list queue_ids(const uint8_t *records, size_t end, size_t *weight):
    """Return the distinct queue ids in order of appearance.

    The weight of references and lent bodies is added to `weight`.
    """
    cdef size_t at = 0
    cdef const uint8_t *p
    cdef uint32_t length, count, qid, body, last = 0
    cdef uint16_t queues
    cdef int k
    cdef dict seen = {}
    while at + RECORD_HEADER <= end:
        p = records + at
        memcpy(&length, p, 4)
        memcpy(&count, p + 20, 4)
        memcpy(&queues, p + 24, 2)
        if length < RECORD_HEADER + 4 * queues or at + length > end:
            raise ValueError("record of a wrong length")
        weight[0] += references_weight(count, queues)
        if p[27] & LENT and length >= RECORD_HEADER + 4 * <uint32_t> queues + 4:
            memcpy(&body, p + RECORD_HEADER + 4 * queues, 4)
            weight[0] += body // LENT_SHARE
        for k in range(queues):
            memcpy(&qid, p + RECORD_HEADER + 4 * k, 4)
            if qid != last or not seen:
                seen[qid] = None
                last = qid
        at += length
    return list(seen)


cdef class DeliveryWriter:
    """Collect sections for one peer until they are taken as one DELIVER message.

    Large sections stay where they are until then.
    """

    def __cinit__(self, uint16_t peer, uint32_t incarnation, uint32_t epoch, uint32_t shard):
        self.peer = peer
        self.incarnation = incarnation
        self.epoch = epoch
        self.shard = shard
        self.large = []

    def __dealloc__(self):
        free(self.out.data)

    def add(
        self, uint32_t connection, uint16_t channel, uint32_t consumer, uint64_t first_number,
        bint redelivered, uint32_t count, blob not None, uint32_t times=0, bint hides=False,
        uint32_t weight=0, bint lent=False
    ):
        """Add a section of `count` stored messages, which are `blob`.

        Their delivery numbers are first_number, first_number + 1, ... `times` is how often each of
        them came back before; at most TIMES_MAX is told. `hides`: some may have a header BCC, which
        no consumer is to see. `weight` is that in the window, 0 for the size of `blob`. With
        `lent`, `blob` has the places of lent bodies.
        """
        cdef Py_buffer view
        cdef uint16_t flags = <uint16_t> (
            min(times, TIMES_MAX) << 1 | (1 if redelivered else 0) | (HIDES if hides else 0)
        )
        PyObject_GetBuffer(blob, &view, PyBUF_SIMPLE)
        try:
            self.section(connection, channel, consumer, first_number, flags, count,
                         NULL if view.len >= LARGE_BYTES else <const uint8_t *> view.buf, view.len,
                         weight | (LENT_SECTION if lent else 0))
            if view.len >= LARGE_BYTES:
                self.leave(blob, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef int leave(self, object blob, size_t blob_bytes) except -1:
        """Leave the messages of the section just begun where they are; make room for zeros to 8."""
        cdef size_t zeros = -blob_bytes & 7
        self.large.append((self.out.used, blob))
        self.large_bytes += blob_bytes
        memset(self.out.data + self.out.used, 0, zeros)
        self.out.used += zeros
        return 0

    cdef int section(
        self, uint32_t connection, uint16_t channel, uint32_t consumer, uint64_t first_number,
        uint16_t flags, uint32_t count, const uint8_t *blob, size_t blob_bytes, uint32_t weight=0
    ) except -1:
        """Add a section. If `blob` is NULL its messages stay where they are, see leave()."""
        cdef size_t here = 0 if blob == NULL else blob_bytes
        cdef uint8_t *p
        cdef uint32_t size = <uint32_t> blob_bytes
        if not self.sections:
            self.out.used = 24
        if reserve(&self.out, SECTION + here + 32):
            raise MemoryError()
        p = self.out.data + self.out.used
        memset(p, 0, SECTION)
        memcpy(p, &connection, 4)
        memcpy(p + 4, &consumer, 4)
        memcpy(p + 8, &channel, 2)
        memcpy(p + 10, &flags, 2)
        memcpy(p + 12, &count, 4)
        memcpy(p + 16, &first_number, 8)
        memcpy(p + 24, &size, 4)
        memcpy(p + 28, &weight, 4)
        if here:
            memcpy(p + SECTION, blob, here)
        self.out.used += SECTION + here
        while here & 7:
            self.out.data[self.out.used] = 0
            self.out.used += 1
            here += 1
        self.sections += 1
        return 0

    def own(self):
        """Copy what was left where it is: it is about to be changed."""
        if self.large:
            self.large = [(before, bytes(blob)) for before, blob in self.large]

    @property
    def size(self):
        """Return the size of the message so far."""
        return self.out.used + self.large_bytes if self.sections else 0

    def take(self):
        """Return the DELIVER message, or None when nothing was added."""
        message = self.take_parts()
        return b"".join(message) if type(message) is list else message

    cpdef object take_parts(self):
        """Do the same as take(); return a list of parts if some sections are large."""
        if not self.sections:
            return None
        write_header(
            self.out.data, KIND_DELIVER, self.peer, self.incarnation, self.epoch, self.shard
        )
        memcpy(self.out.data + 16, &self.sections, 4)
        memset(self.out.data + 20, 0, 4)
        cdef object out = (
            self.parts()
            if self.large
            else PyBytes_FromStringAndSize(<char *> self.out.data, self.out.used)
        )
        self.sections = 0
        self.out.used = 0
        if self.out.room > KEPT_BYTES_MAX:
            free(self.out.data)
            self.out.data = NULL
            self.out.room = 0
        return out

    cdef list parts(self):
        cdef list found = []
        cdef size_t at = 0, before
        for before, blob in self.large:
            found.append(PyBytes_FromStringAndSize(<char *> self.out.data + at, before - at))
            found.append(blob)
            at = before
        if at < self.out.used:
            found.append(PyBytes_FromStringAndSize(<char *> self.out.data + at, self.out.used - at))
        self.large = []
        self.large_bytes = 0
        return found


def read_deliveries(message not None):
    """Return the sections of a DELIVER message.

    A section is (connection, channel, consumer, first number, redelivered, count, blob, times,
    hides). The blob is a view into the message. It is a Weighed if the section weighs something
    else than its bytes.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        return deliveries(<const uint8_t *> view.buf, view.len, memoryview(message))
    finally:
        PyBuffer_Release(&view)


cdef list deliveries(const uint8_t *message, size_t end, object view):
    cdef const uint8_t *p
    cdef size_t at = 24
    cdef uint32_t sections, i, connection, consumer, count, size, weight
    cdef uint16_t channel, flags
    cdef uint64_t number
    cdef list found = []
    if end < 24:
        raise ValueError("short DELIVER")
    memcpy(&sections, message + 16, 4)
    for i in range(sections):
        if at + SECTION > end:
            raise ValueError("DELIVER of another length than it says")
        p = message + at
        memcpy(&connection, p, 4)
        memcpy(&consumer, p + 4, 4)
        memcpy(&channel, p + 8, 2)
        memcpy(&flags, p + 10, 2)
        memcpy(&count, p + 12, 4)
        memcpy(&number, p + 16, 8)
        memcpy(&size, p + 24, 4)
        memcpy(&weight, p + 28, 4)
        at += SECTION
        if at + size > end:
            raise ValueError("DELIVER of another length than it says")
        blob = view[at:at + size]
        if weight:
            blob = Weighed(blob, weight & ~LENT_SECTION, weight & LENT_SECTION != 0)
        found.append((connection, channel, consumer, number, (flags & 1) != 0, count, blob,
                      flags >> 1 & TIMES_MAX, (flags & HIDES) != 0))
        at += (size + 7) & ~<size_t> 7
    return found


# -- histograms ------------------------------------------------------------------------------------

cdef class Tally:
    """Counts integers from 0 on, below 2^64, by classes of powers of two (histogram.py).

    Each batch is counted. In Python this costs 5 % of the instructions of a batch of one message.
    """

    def add(self, uint64_t value):
        self.count(value)

    cdef void count(self, uint64_t value) noexcept:
        cdef uint64_t left = value, k = 0
        left -= left > 0
        while left:
            left >>= 1
            k += 1
        self.classes[k] += 1
        self.low += value
        self.high += self.low < value

    @property
    def sum(self):
        return <object> self.high << 64 | self.low

    @property
    def counts(self):
        return [self.classes[k] for k in range(TALLY_CLASSES)]


include "routes.pxi"
include "packer.pxi"
