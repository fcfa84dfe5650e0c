# cython: language_level=3
"""The publishes of one shard as they are written: runs and records, which packer.pxi draws.

They are made of rows of the table that the AMQP library makes of a read.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from shardmq.shardd.octets cimport be32, copy_short
from shardmq.shardd.sequence cimport Sequence, sequence_read
from shardmq.shardd.wire.buffer cimport LENT_SHARE, Bytes, references_weight, regain, reserve

cdef extern from "../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const unsigned char *data, size_t length)
    void crc32c_start()

cdef enum:
    RUN = 24
    RECORD_HEADER = 28
    # flags of a table row that need a look by the caller: CC, user_id, bad expiration, reply-to,
    # bad properties, a dead-letter exchange of its own
    SPECIAL = 2 | 4 | 8 | 16 | 32 | 128
    # flag of one that may be in a sequence
    MAY_HAVE_SEQUENCE = 64
    # flags of a record
    PERSISTENT = 1
    IN_SEQUENCE = 2
    LENT = 16
    # the place of a lent body, see bodies.pxi
    LENT_PLACE = 16

cdef struct Row:  # a publish, as broker/amqp/octets.pxd describes it
    uint32_t line_off
    uint16_t line_len
    uint16_t channel
    uint32_t props_off
    uint32_t props_len
    uint32_t body_off
    uint32_t body_frames
    uint64_t body_len
    uint32_t ttl_ms  # from here on 8 bytes that decide, with the line, about the record: facts_of()
    uint8_t delivery_mode
    uint8_t priority
    uint8_t flags
    uint8_t zero
    uint64_t reserved

cdef struct Target:
    uint32_t shard
    uint32_t queues
    uint32_t *ids

cdef struct Writer:  # the next PUBLISH of one shard
    Bytes records
    Bytes runs
    uint32_t run_count
    uint32_t messages
    uint32_t needs_sync
    uint32_t in_sequence
    # the run being written
    int is_open
    size_t record_at
    size_t run_at
    Target *target
    uint64_t generation
    uint32_t connection
    uint16_t channel
    uint32_t ttl_ms
    uint8_t priority
    uint8_t flags
    uint64_t next_seq
    uint32_t count  # in the record
    uint32_t counted  # of these, in runs that are complete
    size_t elsewhere  # bytes of large bodies that belong between the records and are not copied
    size_t weight  # of references, of the records that are sealed
    Bytes lent  # the run (u32) of each body that is lent
    size_t lent_bytes  # what these bodies weigh

cdef inline size_t seal(Writer *w, const uint8_t *body, size_t body_len) noexcept nogil:
    """Finish the open record: length, count, checksum and padding. Return the bytes of padding.

    `body` comes before the padding, and lies elsewhere.
    """
    cdef uint8_t *record = w.records.data + w.record_at
    cdef uint8_t *behind = w.records.data + w.records.used
    cdef size_t here = w.records.used - w.record_at
    cdef size_t zeros = -(here + body_len) & 7
    cdef uint32_t n32 = <uint32_t> (here + body_len + zeros)
    cdef uint16_t queues
    memcpy(&queues, record + 24, 2)
    w.weight += references_weight(w.count, queues)
    memset(behind, 0, zeros)  # who wrote last left room
    memcpy(record, &n32, 4)
    memcpy(record + 20, &w.count, 4)
    if body_len:
        n32 = c_crc32c(0, record + 8, here - 8)
        n32 = c_crc32c(c_crc32c(n32, body, body_len), behind, zeros)
    else:
        n32 = c_crc32c(0, record + 8, here + zeros - 8)
    memcpy(record + 4, &n32, 4)
    w.records.used += zeros
    w.elsewhere += body_len
    end_run(w)
    w.is_open = 0
    return zeros

cdef inline void close_record(Writer *w) noexcept nogil:
    if w.is_open:
        seal(w, NULL, 0)

cdef inline uint64_t facts_of(const Row *row) noexcept nogil:
    cdef uint64_t facts
    memcpy(&facts, &row.ttl_ms, 8)
    return facts

cdef inline int record_flags(const uint8_t *buf, Row *row) noexcept nogil:
    """Return the flags of the record that a row belongs into, -1 if the caller must look at it."""
    cdef Sequence place
    cdef int found
    cdef int flags = PERSISTENT if row.delivery_mode == 2 else 0
    if row.flags & (SPECIAL | MAY_HAVE_SEQUENCE):
        found = sequence_read(buf + row.props_off, row.props_len, &place)
        if row.flags & SPECIAL or found < 0:
            return -1
        if found:
            flags |= IN_SEQUENCE
    return flags

cdef inline void end_run(Writer *w) noexcept nogil:
    cdef uint32_t count = w.count - w.counted
    memcpy(w.runs.data + w.run_at + 16, &count, 4)
    w.counted = w.count

cdef inline int begin_run(
    Writer *w, uint32_t connection, uint16_t channel, uint64_t seq
) noexcept nogil:
    """Begin a run in the open record.

    The confirm numbers in a record may have gaps, those in a run have none.
    """
    cdef uint8_t *p
    cdef uint32_t at = <uint32_t> (w.record_at + w.elsewhere)
    if reserve(&w.runs, RUN):
        return -1
    w.run_at = w.runs.used
    p = w.runs.data + w.run_at
    memset(p, 0, RUN)
    memcpy(p, &at, 4)
    memcpy(p + 4, &connection, 4)
    memcpy(p + 8, &seq, 8)
    memcpy(p + 20, &channel, 2)
    w.runs.used += RUN
    w.run_count += 1
    w.next_seq = seq
    return 0

cdef inline int open_record(
    Writer *w, Target *target, Row *row, uint32_t connection, uint16_t channel, uint64_t seq,
    uint64_t now_ms, uint8_t flags
) noexcept nogil:
    cdef uint8_t *p
    cdef uint16_t n16
    if regain(&w.records) or reserve(&w.records, RECORD_HEADER + 4 * target.queues + 8):
        return -1
    w.record_at = w.records.used
    p = w.records.data + w.record_at
    memset(p, 0, RECORD_HEADER)
    memcpy(p + 8, &now_ms, 8)
    memcpy(p + 16, &row.ttl_ms, 4)
    n16 = <uint16_t> target.queues
    memcpy(p + 24, &n16, 2)
    p[26] = row.priority
    p[27] = flags
    memcpy(p + RECORD_HEADER, target.ids, 4 * target.queues)
    w.records.used += RECORD_HEADER + 4 * target.queues
    if begin_run(w, connection, channel, seq):
        return -1
    w.target = target
    w.connection = connection
    w.channel = channel
    w.ttl_ms = row.ttl_ms
    w.priority = row.priority
    w.flags = flags
    if flags & IN_SEQUENCE:
        w.in_sequence = 1
    w.count = 0
    w.counted = 0
    w.is_open = 1
    return 0

cdef inline int put_head(Writer *w, const uint8_t *buf, Row *row, size_t *zeros) noexcept nogil:
    """Put a publish without its large body, which ends the record, and seal the record.

    `zeros` is set to the bytes of padding that come behind the body.
    """
    cdef uint32_t line = row.line_len - 1
    cdef uint32_t n32 = <uint32_t> row.body_len
    cdef uint8_t *p
    if reserve(&w.records, 24 + line + row.props_len):
        return -1
    p = w.records.data + w.records.used
    memcpy(p, &n32, 4)
    memcpy(p + 4, &row.props_len, 4)
    memcpy(p + 8, buf + row.line_off, line)
    memcpy(p + 8 + line, buf + row.props_off, row.props_len)
    w.records.used += 8 + line + row.props_len
    w.count += 1
    w.messages += 1
    zeros[0] = seal(w, buf + row.body_off + 7, row.body_len)
    return 0

cdef inline int put_lent(
    Writer *w, const uint8_t *buf, Row *row, uint64_t place, uint32_t run
) noexcept nogil:
    """Put a publish into the open record, which is LENT, and seal it.

    The body stays where it is.
    """
    cdef uint32_t line = row.line_len - 1
    cdef uint32_t n32 = <uint32_t> row.body_len
    cdef uint8_t *p
    if reserve(&w.records, 8 + line + row.props_len + LENT_PLACE + 8) or reserve(&w.lent, 4):
        return -1
    p = w.records.data + w.records.used
    memcpy(p, &n32, 4)
    memcpy(p + 4, &row.props_len, 4)
    memcpy(p + 8, buf + row.line_off, line)
    p += 8 + line
    memcpy(p, buf + row.props_off, row.props_len)
    p += row.props_len
    memcpy(p, &place, 8)
    memcpy(p + 8, &run, 4)
    memset(p + 12, 0, 4)
    w.records.used += 8 + line + row.props_len + LENT_PLACE
    w.count += 1
    w.messages += 1
    seal(w, NULL, 0)
    memcpy(w.lent.data + w.lent.used, &run, 4)
    w.lent.used += 4
    w.lent_bytes += row.body_len // LENT_SHARE
    return 0

cdef inline size_t stored_bytes(Row *row) noexcept nogil:
    return 8 + (row.line_len - 1) + <size_t> row.props_len + row.body_len

cdef inline uint8_t *copied(uint8_t *p, const uint8_t *buf, Row *row) noexcept nogil:
    """Copy a publish as a stored message to where there is room for it; return where it ends."""
    cdef uint32_t line = row.line_len - 1  # without the bits
    cdef uint32_t size
    cdef uint64_t left
    cdef const uint8_t *frame
    cdef uint32_t n32 = <uint32_t> row.body_len
    memcpy(p, &n32, 4)
    memcpy(p + 4, &row.props_len, 4)
    copy_short(p + 8, buf + row.line_off, line)
    p += 8 + line
    copy_short(p, buf + row.props_off, row.props_len)
    p += row.props_len
    frame = buf + row.body_off
    left = row.body_len
    while left:
        size = be32(frame + 3)
        copy_short(p, frame + 7, size)
        p += size
        left -= size
        frame += size + 8
    return p

cdef inline int put(Writer *w, const uint8_t *buf, Row *row) noexcept nogil:
    """Append the row's publish to the open record."""
    if reserve(&w.records, stored_bytes(row) + 8):
        return -1
    w.records.used = copied(w.records.data + w.records.used, buf, row) - w.records.data
    w.count += 1
    w.messages += 1
    return 0
