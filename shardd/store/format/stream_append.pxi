"""Find the records of a batch that go to a stream, and the filter values of their messages.

This file knows records and stored messages (drawn in record.pyx), and finds the header FILTER_NAME
in a message's properties.
"""

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from shardmq.shardd.content cimport (
    HEADERS_BIT, Properties, Table, properties_begin, properties_seek, table_begin, table_next,
)
from shardmq.shardd.store.format.layout cimport (
    RECORD_HEADER,
    message_bytes,
    record_bytes,
    u16,
    u32,
)

cdef extern from *:
    """
    #define _GNU_SOURCE
    #include <string.h>
    #include <stddef.h>
    static const void *shardd_find(const void *in, size_t n, const void *what, size_t m) {
        const unsigned char *p = in, *end = p + n, *first = what;
        while ((size_t)(end - p) >= m && (p = memchr(p, *first, end - p - m + 1)) != NULL) {
            if (memcmp(p, what, m) == 0) return p;
            p++;
        }
        return NULL;
    }
    """
    const void *find "shardd_find"(
        const void *data, size_t n, const void *what, size_t m
    ) noexcept nogil

FILTER_NAME = b"x-stream-filter-value"

cdef enum:
    NAME_BYTES = 22  # with its length before it

cdef const uint8_t *NAME = b"\x15x-stream-filter-value"


cdef bint names(const uint8_t *record, uint32_t queue_id) noexcept nogil:
    cdef uint32_t i
    for i in range(u16(record + 24)):
        if u32(record + RECORD_HEADER + 4 * i) == queue_id:
            return True
    return False


def records_of(const uint8_t[::1] records not None, uint32_t queue_id) -> bytes:
    """Return the records that name this queue, as they are."""
    cdef const uint8_t *data = &records[0] if records.shape[0] else NULL
    cdef uint64_t total = records.shape[0], at, length, size = 0
    cdef uint8_t *out
    cdef bytes found
    at = 0
    while at < total:
        length = record_bytes(data + at, total - at)
        if length == 0:
            raise ValueError(f"no record at byte {at} of the batch")
        if names(data + at, queue_id):
            size += length
        at += length
    found = PyBytes_FromStringAndSize(NULL, size)
    out = <uint8_t*>PyBytes_AS_STRING(found)
    at = 0
    while at < total:
        length = u32(data + at)
        if names(data + at, queue_id):
            memcpy(out, data + at, length)
            out += length
        at += length
    return found


cdef uint32_t filter_in(const uint8_t *props, uint64_t size) noexcept nogil:
    """Return what stands for the message's filter value, 0 if it has none."""
    cdef Properties walk
    cdef Table entry
    cdef uint32_t crc
    if properties_begin(&walk, props, size) < 0 or properties_seek(&walk, HEADERS_BIT) < 1:
        return 0
    table_begin(&entry, walk.value + 4, walk.size - 4)
    while table_next(&entry) > 0:
        if (
            entry.type == c"S"
            and entry.name_size == NAME_BYTES - 1
            and memcmp(entry.name, NAME + 1, NAME_BYTES - 1) == 0
        ):
            crc = c_crc32c(0, entry.value + 4, entry.size - 4)
            return 1 if crc == 0 or crc == ANY_FILTER else crc
    return 0


cdef uint32_t filter_at(const uint8_t *message) noexcept nogil:
    cdef uint64_t n = message[8]
    return filter_in(message + 10 + n + message[9 + n], u32(message + 4))


def filters_of(const uint8_t[::1] records not None):
    """Return for each message of the records what stands for its filter value (`stream.filter_of`).

    Return None if no message has a value.
    """
    cdef const uint8_t *data = &records[0] if records.shape[0] else NULL
    cdef uint64_t total = records.shape[0], at = 0, place, size, count = 0, i
    cdef array.array found
    if find(data, total, NAME, NAME_BYTES) == NULL:
        return None
    while at < total:
        size = record_bytes(data + at, total - at)
        if size == 0:
            raise ValueError(f"no record at byte {at} of the batch")
        count += u32(data + at + 20)
        at += size
    found = array.clone(_I, count, False)
    at = count = 0
    while at < total:
        place = at + RECORD_HEADER + 4 * <uint64_t>u16(data + at + 24)
        for i in range(u32(data + at + 20)):
            size = message_bytes(data + place, total - place)
            if size == 0:
                raise ValueError(f"messages do not fill the record at byte {at} of the batch")
            found.data.as_uints[count] = filter_at(data + place)
            count += 1
            place += size
        at += u32(data + at)
    return found


def select(
    const uint8_t[::1] blob not None, array.array offsets not None, array.array sizes not None,
    array.array wanted not None
) -> tuple:
    """Return (blob, offsets, sizes) of the stored messages whose filter is one of `wanted`."""
    cdef const uint8_t *data = &blob[0] if blob.shape[0] else NULL
    cdef uint64_t total = blob.shape[0], at = 0, size, i, k, kept = 0, used = 0
    cdef uint64_t count = len(offsets), wants = len(wanted)
    cdef const uint64_t *numbers = <const uint64_t*>offsets.data.as_voidptr
    cdef uint32_t found
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t *to = <uint8_t*>PyBytes_AS_STRING(out)
    cdef array.array some_offsets = array.clone(_Q, count, False)
    cdef array.array some_sizes = array.clone(_I, count, False)
    if <uint64_t>len(sizes) != count:
        raise ValueError(f"{len(sizes)} sizes for {count} messages")
    for i in range(count):
        size = message_bytes(data + at, total - at)
        if size == 0:
            raise ValueError(f"no stored message at byte {at}")
        found = filter_at(data + at)
        for k in range(wants):
            if wanted.data.as_uints[k] == found:
                (<uint64_t*>some_offsets.data.as_voidptr)[kept] = numbers[i]
                some_sizes.data.as_uints[kept] = sizes.data.as_uints[i]
                memcpy(to + used, data + at, size)
                used += size
                kept += 1
                break
        at += size
    return out[:used], some_offsets[:kept], some_sizes[:kept]
