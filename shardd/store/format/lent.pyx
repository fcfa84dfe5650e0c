# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Records whose body lies elsewhere, in memory that a front door has lent (wire/bodies.pyx).

On the wire such a record is LENT: it holds one message, with the place of the body instead of the
body. In a segment the record is as long as with its body, but the bytes of the body are not written
before somebody needs them there. Until then the record has no checksum.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from shardmq.shardd.store.format.layout cimport RECORD_HEADER, put32, record_bytes, u16, u32, u64

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

cdef enum:
    LENT = 16
    PLACE_BYTES = 16


cdef struct Record:
    bint lent
    uint64_t length  # on the wire
    uint64_t message  # where its only message is
    uint64_t place  # where the place of the body is
    uint64_t body_bytes
    uint64_t stored  # length in a segment


cdef int read_record(const uint8_t *records, uint64_t at, uint64_t total, uint64_t memory, bint checked,
                     Record *found) except -1:
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
    """Return how many bytes these records take in a segment. Raise ValueError if one is not whole and true.

    `memory` is the size of the memory that the bodies lie in.
    """
    cdef uint64_t at = 0, total = records.shape[0], stored = 0
    cdef Record found
    while at < total:
        read_record(&records[0], at, total, memory, False, &found)
        stored += found.stored
        at += found.length
    return stored


def runs_of(const uint8_t[::1] records not None) -> list:
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


cdef uint8_t *put_head(uint8_t *to, const uint8_t *record, const Record *found) noexcept:
    """Put a LENT record up to its body; return where the body comes."""
    memcpy(to, record, found.place)
    put32(to, <uint32_t> found.stored)
    to[27] &= ~<uint8_t> LENT
    return to + found.place


cdef void seal(uint8_t *record, uint32_t salt) noexcept:
    cdef uint64_t length = u32(record)
    put32(record + 4, c_crc32c(0, record + 8, length - 8) ^ salt)


def joined(const uint8_t[::1] records not None, const uint8_t[::1] memory not None) -> bytes:
    """Return the records with copies of the bodies that are lent. Raise ValueError as stored_bytes() does."""
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


def lay_out(const uint8_t[::1] records not None, bytearray target not None, unsigned long long position) -> list:
    """Put records, which stored_bytes() has checked, into a segment at `position`, without the bodies that are lent.

    Return of each that is lent (position of the record, of its message, of its body, bytes of the body, offset of the
    body in the memory, run).
    """
    cdef uint64_t at = 0, total = records.shape[0], here = position
    cdef const uint8_t *record
    cdef Record found
    cdef uint8_t *to
    cdef uint8_t *body
    cdef list lent = []
    while at < total:
        record = &records[0] + at
        read_record(&records[0], at, total, <uint64_t> -1, True, &found)
        if here + found.stored > <uint64_t> PyByteArray_GET_SIZE(target):
            raise ValueError("no room for the batch")
        to = <uint8_t *> PyByteArray_AS_STRING(target) + here
        if found.lent:
            body = put_head(to, record, &found)
            memset(body + found.body_bytes, 0, found.stored - found.place - found.body_bytes)
            lent.append((here, here + found.message, here + found.place, found.body_bytes,
                         u64(record + found.place), u32(record + found.place + 8)))
        else:
            memcpy(to, record, found.length)
        at += found.length
        here += found.stored
    return lent


def fill(bytearray target not None, unsigned long long record, unsigned long long body,
         const uint8_t[::1] memory not None, unsigned long long offset, unsigned long long size, uint32_t salt) -> None:
    """Copy the body of a record that lay_out() has put into a segment, and give the record its checksum."""
    cdef uint8_t *data = <uint8_t *> PyByteArray_AS_STRING(target)
    cdef uint64_t room = PyByteArray_GET_SIZE(target)
    if offset + size > <uint64_t> memory.shape[0] or body + size > room or record + u32(data + record) > room:
        raise ValueError("no such body, or no such record")
    memcpy(data + body, &memory[0] + offset, size)
    seal(data + record, salt)


def place(bytearray source not None, unsigned long long message, unsigned long long body,
          unsigned long long offset, uint32_t run) -> bytes:
    """Return a message of a segment with the place of its body instead of the body, as a DELIVER has it."""
    cdef uint64_t head = body - message, zero = 0
    if body > <uint64_t> PyByteArray_GET_SIZE(source) or message > body:
        raise ValueError("no such message")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, head + PLACE_BYTES)
    cdef uint8_t *to = <uint8_t *> PyBytes_AS_STRING(out)
    cdef uint64_t at = offset
    memcpy(to, PyByteArray_AS_STRING(source) + message, head)
    memcpy(to + head, &at, 8)
    memcpy(to + head + 8, &run, 4)
    memcpy(to + head + 12, &zero, 4)
    return out
