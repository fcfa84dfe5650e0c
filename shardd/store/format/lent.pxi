"""Records whose body lies elsewhere, in memory that a front door has lent (wire/bodies.pxi).

On the wire such a record is LENT: it holds one message, with the place of the body instead of the
body. In a segment the record is as long as with its body, but the bytes of the body are not written
before somebody needs them there. Until then the record has no checksum.
"""

from cpython cimport array
from cpython.bytearray cimport (
    PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.store.format.layout cimport RECORD_HEADER, put32, record_bytes, u16, u32, u64

cdef enum:
    LENT = 16
    PLACE_BYTES = 16
    # A lent body weighs this part of its bytes in windows and passes: it takes no room in a ring,
    # and no time to copy.
    LENT_SHARE = 4


cdef struct Record:
    bint lent
    uint64_t length  # on the wire
    uint64_t message  # where its only message is
    uint64_t place  # where the place of the body is
    uint64_t body_bytes
    uint64_t stored  # length in a segment


cdef int read_record(
    const uint8_t *records, uint64_t at, uint64_t total, uint64_t memory, bint checked,
    Record *found
) except -1:
    """Find the parts of a record. `memory` is the size of the memory that bodies lie in.

    The checksum is compared unless the record was `checked` before.
    """
    cdef const uint8_t *record = records + at
    cdef uint64_t names, offset
    found.length = record_bytes(record, total - at)
    if found.length == 0:
        raise ValueError(f"no record at byte {at} of the batch")
    if not checked and c_crc32c(0, record + 8, found.length - 8) != u32(record + 4):
        raise ValueError(f"wrong crc of the record at byte {at} of the batch")
    found.lent = record[27] & LENT != 0
    found.stored = found.length
    if not found.lent:
        return 0
    found.message = RECORD_HEADER + 4 * <uint64_t> u16(record + 24)
    names = found.message + 8
    if u32(record + 20) == 1 and names + 2 <= found.length:
        names += 1 + <uint64_t> record[names]
        if names < found.length:
            names += 1 + <uint64_t> record[names]
            found.place = names + u32(record + found.message + 4)
            if found.place + PLACE_BYTES <= found.length < found.place + PLACE_BYTES + 8:
                found.body_bytes = u32(record + found.message)
                offset = u64(record + found.place)
                if offset <= memory and found.body_bytes <= memory - offset:
                    found.stored = (found.place + found.body_bytes + 7) & ~<uint64_t> 7
                    return 0
    raise ValueError(f"no place of a body in the record at byte {at} of the batch")


def stored_bytes(const uint8_t[::1] records not None, unsigned long long memory) -> int:
    """Return how many bytes these records take in a segment.

    Raise ValueError if one is not whole and true.

    `memory` is the size of the memory that the bodies lie in.
    """
    cdef uint64_t at = 0, total = records.shape[0], stored = 0
    cdef Record found
    while at < total:
        read_record(&records[0], at, total, memory, False, &found)
        stored += found.stored
        at += found.length
    return stored


def lent_runs(const uint8_t[::1] records not None) -> list:
    """Return the run of each lent body, of records that stored_bytes() has checked."""
    cdef uint64_t at = 0, total = records.shape[0]
    cdef Record found
    cdef list runs = []
    while at < total:
        read_record(&records[0], at, total, <uint64_t> -1, True, &found)
        if found.lent:
            runs.append(u32(&records[0] + at + found.place + 8))
        at += found.length
    return runs


def segment_buffer(Py_ssize_t size) -> bytearray:
    """Return a buffer for a segment.

    Its bytes are anything: pages that nobody writes to take no memory.
    """
    return PyByteArray_FromStringAndSize(NULL, size)


cdef uint8_t *put_head(uint8_t *to, const uint8_t *record, const Record *found) noexcept:
    """Put a LENT record up to its body; return where the body comes."""
    memcpy(to, record, found.place)
    put32(to, <uint32_t> found.stored)
    to[27] &= ~<uint8_t> LENT
    return to + found.place


cdef void seal(uint8_t *record, uint32_t salt) noexcept:
    cdef uint64_t length = u32(record)
    put32(record + 4, c_crc32c(0, record + 8, length - 8) ^ salt)


def with_bodies(const uint8_t[::1] records not None, const uint8_t[::1] memory not None) -> bytes:
    """Return the records with copies of the bodies that are lent.

    Raise ValueError as stored_bytes() does.
    """
    cdef uint64_t at = 0, total = records.shape[0], come = 0
    cdef Record found
    cdef bytes out = PyBytes_FromStringAndSize(NULL, stored_bytes(records, memory.shape[0]))
    cdef uint8_t *to = <uint8_t *> PyBytes_AS_STRING(out)
    cdef uint8_t *body
    while at < total:
        read_record(&records[0], at, total, memory.shape[0], True, &found)
        if found.lent:
            body = put_head(to, &records[0] + at, &found)
            memcpy(body, &memory[0] + u64(&records[0] + at + found.place), found.body_bytes)
            memset(body + found.body_bytes, 0, found.stored - found.place - found.body_bytes)
            seal(to, 0)
        else:
            memcpy(to, &records[0] + at, found.length)
        at += found.length
        to += found.stored
    return out


cdef struct Body:  # a lent body, and the place that waits for it in a segment
    uint64_t record  # positions in the segment
    uint64_t message
    uint64_t body
    uint64_t size
    uint64_t offset  # in the memory of its lender
    uint32_t run
    uint32_t lender  # ordinal among the lenders


cdef class LentBodies:
    """The bodies of one segment that the segment does not have, in the order of their messages.

    Each is a hold of the memory of its lender (lending.py), until fill() or let_go().
    """

    cdef Grown bodies
    cdef list lenders
    cdef readonly uint64_t held_bytes  # of all bodies

    def __cinit__(self):
        self.lenders = []

    def __dealloc__(self):
        free(self.bodies.data)

    def __len__(self):
        return self.bodies.used // sizeof(Body)

    def lay_out(
        self, const uint8_t[::1] records not None, bytearray target not None,
        unsigned long long position, lender not None
    ) -> None:
        """Put records into the segment at `position`, without their lent bodies.

        stored_bytes() has checked the records.
        """
        cdef uint64_t at = 0, total = records.shape[0], here = position
        cdef const uint8_t *record
        cdef Record found
        cdef Body *body
        cdef uint8_t *to
        cdef uint8_t *gap
        cdef uint32_t ordinal = self.ordinal(lender)
        while at < total:
            record = &records[0] + at
            read_record(&records[0], at, total, <uint64_t> -1, True, &found)
            if here + found.stored > <uint64_t> PyByteArray_GET_SIZE(target):
                raise ValueError("no room for the batch")
            to = <uint8_t *> PyByteArray_AS_STRING(target) + here
            if found.lent:
                reserve(&self.bodies, sizeof(Body))
                gap = put_head(to, record, &found)
                memset(gap + found.body_bytes, 0, found.stored - found.place - found.body_bytes)
                body = <Body *> (self.bodies.data + self.bodies.used)
                body.record, body.message = here, here + found.message
                body.body = here + found.place
                body.size, body.offset = found.body_bytes, u64(record + found.place)
                body.run, body.lender = u32(record + found.place + 8), ordinal
                self.bodies.used += sizeof(Body)
                self.held_bytes += body.size
            else:
                memcpy(to, record, found.length)
            at += found.length
            here += found.stored

    cdef uint32_t ordinal(self, lender) except? 0xffffffff:
        for ordinal, each in enumerate(self.lenders):
            if each is lender:
                return ordinal
        self.lenders.append(lender)
        return <uint32_t> len(self.lenders) - 1

    def fill(self, bytearray target not None, uint32_t salt) -> None:
        """Copy the bodies into the segment, and give the holds back.

        Their records get checksums.
        """
        cdef const uint8_t[::1] memory
        cdef Body *body = <Body *> self.bodies.data
        cdef size_t i
        cdef uint8_t *data = <uint8_t *> PyByteArray_AS_STRING(target)
        cdef uint64_t room = PyByteArray_GET_SIZE(target)
        for i in range(self.bodies.used // sizeof(Body)):
            memory = self.lenders[body[i].lender].memory
            if (
                body[i].offset + body[i].size > <uint64_t> memory.shape[0]
                or body[i].body + body[i].size > room
            ):
                raise ValueError("no such body, or no such record")
            memcpy(data + body[i].body, &memory[0] + body[i].offset, body[i].size)
            seal(data + body[i].record, salt)
        self.let_go()

    def let_go(self) -> None:
        """Give all holds back."""
        cdef Body *body = <Body *> self.bodies.data
        cdef size_t i = 0, first, count = self.bodies.used // sizeof(Body)
        while i < count:
            first = i
            while (
                i < count
                and body[i].run == body[first].run
                and body[i].lender == body[first].lender
            ):
                i += 1
            self.lenders[body[first].lender].let_go(body[first].run, i - first)
        self.bodies.used = self.held_bytes = 0
        self.lenders.clear()

    def forget_from(self, unsigned long long position) -> None:
        """Forget the bodies of records from `position` on, which were not appended.

        Their holds are the caller's again.
        """
        cdef Body *body = <Body *> self.bodies.data
        cdef size_t count = self.bodies.used // sizeof(Body)
        while count and body[count - 1].record >= position:
            count -= 1
            self.held_bytes -= body[count].size
        self.bodies.used = count * sizeof(Body)

    def look(self, bytearray source not None, uint64_t segment, array.array entries not None,
             Py_ssize_t bytes_max) -> tuple:
        """Look at the first entries whose bodies one lender has lent.

        Return (lender, messages, their weight, body bytes of each). The messages have the places of
        their bodies. As many as weigh `bytes_max` are returned, but at least one. Without a lender
        no message is returned: the first entry is not lent. Then the last item is how many entries
        of the segment come before the first that is lent.
        """
        cdef const uint64_t *entry = <const uint64_t *> entries.data.as_ulonglongs
        cdef Py_ssize_t i, n = 0, count = len(entries)
        cdef const uint8_t *data = <const uint8_t *> PyByteArray_AS_STRING(source)
        cdef Body *body
        cdef Body *first = NULL
        cdef uint64_t head, zero = 0, size = 0, weight = 0, own
        cdef array.array sizes
        cdef uint8_t *to
        cdef bytes out
        for i in range(count):
            if entry[i] >> 32 != segment:
                break
            body = self.find(<uint32_t> entry[i] >> 4)
            if first == NULL and body != NULL and i:
                break  # some before it are not lent
            if first != NULL and (body == NULL or body.lender != first.lender):
                break
            n = i + 1
            if body == NULL:
                continue
            own = body.body - body.message + body.size // LENT_SHARE
            if i and weight + own > <uint64_t> max(bytes_max, 0):
                n = i
                break
            first = body if first == NULL else first
            weight += own
            size += body.body - body.message + PLACE_BYTES
        if first == NULL:
            return None, b"", 0, n
        sizes = array.clone(_I, n, False)
        out = PyBytes_FromStringAndSize(NULL, size)
        to = <uint8_t *> PyBytes_AS_STRING(out)
        for i in range(n):
            body = self.find(<uint32_t> entry[i] >> 4)
            head = body.body - body.message
            memcpy(to, data + body.message, head)
            memcpy(to + head, &body.offset, 8)
            memcpy(to + head + 8, &body.run, 4)
            memcpy(to + head + 12, &zero, 4)
            to += head + PLACE_BYTES
            sizes.data.as_uints[i] = <uint32_t> body.size
        return self.lenders[first.lender], out, weight, sizes

    cdef Body *find(self, uint64_t message) noexcept:
        """Return the body of the message at this position, NULL if it is not lent."""
        cdef Body *body = <Body *> self.bodies.data
        cdef size_t low = 0, high = self.bodies.used // sizeof(Body), middle
        while low < high:
            middle = (low + high) // 2
            if body[middle].message < message:
                low = middle + 1
            else:
                high = middle
        if low == self.bodies.used // sizeof(Body) or body[low].message != message:
            return NULL
        return &body[low]
