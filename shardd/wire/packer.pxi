"""Route publishes by their line (routes.pxi), and pack them into one PUBLISH message per shard.

All numbers are little endian and come after the 16-byte header (messages.py):

    PUBLISH  16 u64 batch number         24 u32 runs        28 u32 bytes of records
             32 u32 messages in all      36 u32 1 = confirm after a sync, 2 = confirm at all,
                                                4 = records IN_SEQUENCE, 8 = records LENT
             40 runs x 24: u32 offset of its record among the records, u32 connection, u64 confirm
                number of its first message (0: none wanted), u32 messages, u16 channel, u16 zero
             .. records, each a multiple of 8 bytes:
                 0 u32 length with padding   4 u32 crc32c of [8, length)    8 u64 ms since epoch
                16 u32 ttl_ms (0xffffffff none)    20 u32 messages   24 u16 queues
                26 u8 priority (0xff none)
                27 u8 1 = PERSISTENT, 2 = IN_SEQUENCE (sequence.pxd), 4 = HAS_BCC,
                   8 = OWN_LETTERS (entry.py), 16 = LENT: one message, with the place of its body
                   instead of the body (bodies.pxi)
                28 u32 queue id x queues     .. stored messages, zeros to a multiple of 8
    stored message: u32 body bytes, u32 property bytes, u8 n, exchange[n], u8 m, routing key[m],
                    properties, body

A record holds publishes of one channel to the same queues with the same flags, priority and ttl, in
their order. A run holds those publishes of a record that are neighbours also among all publishes of
the channel, so that their confirm numbers follow each other. If an exchange spreads its messages
over queues, the messages of a read for one queue are put together. The table that `Packer.pack`
reads is the one the AMQP library makes of a read (48 bytes a message, drawn in octets.pxd).
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.sequence cimport Sequence, sequence_read
from shardmq.shardd.wire.buffer cimport (
    KIND_PUBLISH, Bytes, references_weight, reserve, write_header,
)
from shardmq.shardd.wire.publishes cimport (
    IN_SEQUENCE, LENT, MAY_HAVE_SEQUENCE, PERSISTENT, RECORD_HEADER, RUN, SPECIAL, Row, Target,
    Writer, begin_run, c_crc32c, close_record, copied, crc32c_start, end_run, facts_of, open_record,
    put, put_head, put_lent, record_flags, seal, stored_bytes,
)
from shardmq.shardd.wire.shared_memory cimport NO_RUN, BodyMemory

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

crc32c_start()

cdef enum:
    HEADER = 16
    # A run longer than this is closed, so that one record never grows far beyond a socket read.
    RUN_BYTES_MAX = 1 << 20
    # Records of at least this much are not copied into their PUBLISH, but handed over with the
    # memory they are in.
    HANDED_BYTES = 32 << 10
    # Bodies of at least this much are lent, where they lie in memory that the shard can see.
    LENT_BYTES_MIN = 16 << 10
    # So many rows for each queue are worth records of their own; fewer are put behind what is there
    # of their queue.
    OWN_RECORD_ROWS = 8
    # What the references of one pack() may weigh, of messages that go to several queues of a shard:
    # a read of small ones to hundreds of queues would keep the shard busy for longer than any
    # client may wait.
    PACK_WEIGHT_MAX = 64 << 10

# Flags of a record of which its queues remember that they have some.
HAS_BCC = 4
OWN_LETTERS = 8

# Why Packer.pack stopped.
DONE = 0  # the table's end
CHANNEL = 1  # the next publish is on another channel
UNKNOWN = 2  # this exchange and key have no route yet: learn() it
ASK = 3  # the caller decides about this message
UNROUTABLE = 4  # mandatory, and goes nowhere
NEAR = 5  # for a consumer of this front door, see Packer.near_queue
FULL = 6  # what goes to several queues was enough for one time slice

cdef enum:
    W_DONE = 0
    W_CHANNEL = 1
    W_UNKNOWN = 2
    W_ASK = 3
    W_UNROUTABLE = 4
    W_NEAR = 5
    W_FULL = 6


cdef class Records:
    """The memory of a writer whose records were taken; read-only."""

    def __dealloc__(self):
        free(self._data)

    def __len__(self):
        return self._used

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self._data, self._used, 1, flags)


cdef Records handed_over(Bytes *records):
    """Hand the records over with their memory.

    The next records get memory of the same size with their first record, see regain().
    """
    cdef Records taken = Records.__new__(Records)
    taken._data = records.data
    taken._used = records.used
    records.data = NULL
    return taken


cdef inline void close_filled(Share *share) noexcept nogil:
    """Close the record of this share, which was laid out and is filled.

    Other records may lie behind it. No record is open: what the writer says of an open record means
    nothing then.
    """
    cdef Writer *w = share.writer
    cdef size_t used = w.records.used
    w.record_at, w.run_at, w.records.used = share.record_at, share.run_at, share.start + share.bytes
    w.count, w.counted = share.count, 0
    seal(w, NULL, 0)
    w.records.used = used


cdef inline void take_back(Writer *w, Share *share) noexcept nogil:
    """Take back the record that was laid out last, if there is no memory for more."""
    w.records.used, w.runs.used = share.record_at, share.run_at
    w.run_count -= 1


cdef bytes owned_record(const uint8_t *record, BodyMemory bodies):
    """Return a LENT record with a copy of its body."""
    cdef size_t head, names
    cdef uint32_t body_len, props_len, n32
    cdef uint64_t place
    cdef uint16_t queues
    memcpy(&queues, record + 24, 2)
    head = RECORD_HEADER + 4 * <size_t> queues
    memcpy(&body_len, record + head, 4)
    memcpy(&props_len, record + head + 4, 4)
    names = 2 + <size_t> record[head + 8]
    names += record[head + 8 + names - 1]
    head += 8 + names + props_len
    memcpy(&place, record + head, 8)
    n32 = <uint32_t> ((head + body_len + 7) & ~<size_t> 7)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n32)
    cdef uint8_t *p = <uint8_t *> PyBytes_AS_STRING(out)
    memcpy(p, record, head)
    memcpy(p + head, bodies.data + place, body_len)
    memset(p + head + body_len, 0, n32 - head - body_len)
    memcpy(p, &n32, 4)
    p[27] &= ~<uint8_t> LENT
    n32 = c_crc32c(0, p + 8, n32 - 8)
    memcpy(p + 4, &n32, 4)
    return out


cdef inline size_t weight_of(Route *route) noexcept nogil:
    """Return what the references of one message on this route weigh."""
    cdef uint32_t k
    cdef size_t weight = 0
    if route.kind == 0:
        for k in range(route.count):
            weight += references_weight(1, <uint16_t> route.targets[k].queues)
    return weight


cdef class Packer:
    """The publishes of one front door on their way to its shards.

    There is a writer for each shard. Routes belong to a scope (vhost and user): give each scope its
    own Routes.
    """

    def __cinit__(self, int shards):
        if not 0 < shards <= 64:
            raise ValueError(f"{shards} shards, 1 to 64 can be served")
        self.shards = shards
        self.writers = <Writer *> calloc(shards, sizeof(Writer))
        if self.writers == NULL:
            raise MemoryError()
        self.larges = [[] for _ in range(shards)]

    def __dealloc__(self):
        cdef int i
        if self.writers != NULL:
            for i in range(self.shards):
                free(self.writers[i].records.data)
                free(self.writers[i].runs.data)
                free(self.writers[i].lent.data)
            free(self.writers)
        free(self.hashes)

    def lend_from(self, BodyMemory bodies not None):
        """Lend large bodies in this memory to the shards that can see it (may_lend)."""
        self.bodies = bodies

    def may_lend(self, int shard, bint may):
        """Note whether the process of a shard can see the memory of lent bodies."""
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard} of {self.shards}")
        self.borrowers &= ~(<uint64_t> 1 << shard)
        if may and self.bodies is not None:
            self.borrowers |= <uint64_t> 1 << shard

    def pack(
        self, Routes routes not None, const unsigned char[::1] buffer not None,
        const unsigned char[::1] table not None, size_t start, uint32_t connection,
        uint64_t first_seq, uint64_t now_ms, bint lasting=False, uint32_t far_queue=0
    ):
        """Pack publishes of one channel from row `start` on.

        Returns (next row, why it stopped). `in_sequence` tells whether one of them was.

        `first_seq` is the confirm number of the first message, 0 when the channel takes no
        confirms. `lasting`: nobody changes the bytes of `buffer` any more; a large body is left
        there until take(). `far_queue`: what goes to that one is packed for its shard, though its
        consumer is HERE.
        """
        cdef size_t rows = table.shape[0] // sizeof(Row)
        cdef size_t at
        cdef int why
        cdef Row *row
        self.in_sequence = False
        self.far_queue = far_queue
        if start >= rows:
            return start, W_DONE
        row = <Row *> &table[0] + start
        if lasting and rows - start == 1 and row.body_len >= HANDED_BYTES and row.body_frames == 1:
            why = self.leave(
                routes, memoryview(buffer), &buffer[0], row, connection, first_seq, now_ms
            )
            return start + (why == W_DONE), why
        why = self.pack_rows(
            routes, &buffer[0], <Row *> &table[0], rows, start, connection, first_seq, now_ms, &at
        )
        return at, why

    cdef int pack_rows(
        self, Routes routes, const uint8_t *buf, Row *table, size_t rows, size_t start,
        uint32_t connection, uint64_t first_seq, uint64_t now_ms, size_t *stopped
    ) except -1:
        """Pack as pack() does, of rows in memory; at least one is left.

        Return why it stopped, before row `stopped`.
        """
        cdef int why
        self.in_sequence = False
        if routes.spread_count and rows > self.spread_room:
            free(self.hashes)
            self.spread_room = 0
            self.hashes = <uint64_t *> malloc(20 * rows)
            if self.hashes == NULL:
                raise MemoryError("publish batch")
            self.chosen = <uint32_t *> (self.hashes + rows)
            self.sharers = self.chosen + rows
            self.order = self.sharers + rows
            self.spread_room = rows
        with nogil:
            why = self._pack(
                routes, buf, table, rows, start, connection, first_seq, now_ms, stopped
            )
        if why < 0:
            raise MemoryError("publish batch")
        return why

    cdef int _pack(
        self, Routes routes, const uint8_t *buf, Row *table, size_t rows, size_t start,
        uint32_t connection, uint64_t first_seq, uint64_t now_ms, size_t *stopped
    ) noexcept nogil:
        cdef uint64_t seq = first_seq
        cdef size_t i = start, count
        cdef size_t begun = start  # the first row of those that take `route`
        cdef Row *row
        cdef Row *memo_row = NULL
        cdef Route *route = NULL
        cdef Spread *spread = NULL
        cdef uint16_t channel = table[start].channel
        cdef int flags
        cdef int why = W_DONE
        # What the references weigh of one message on `route`, of all before row `since`, and where
        # it is enough.
        cdef size_t weight = 0, weighed = 0, since = start, enough = rows
        while i < enough:
            row = &table[i]
            if row.channel != channel:
                why = W_CHANNEL
                break
            flags = record_flags(buf, row)
            if flags < 0:
                why = W_ASK
                break
            if flags & IN_SEQUENCE:
                self.in_sequence = True
            if memo_row == NULL or memo_row.line_len != row.line_len or \
                    memcmp(buf + memo_row.line_off, buf + row.line_off, row.line_len):
                if route != NULL:
                    passed(routes, route, i - begun)
                begun = i
                if (
                    routes.spread_count
                    and not (
                        goes_to(buf + row.line_off, row.line_len, spread)
                        if spread != NULL
                        else memo_row != NULL
                        and same_exchange(buf + row.line_off, buf + memo_row.line_off)
                    )
                ):
                    spread = routes.find_spread(buf + row.line_off, row.line_len)
                if spread != NULL and spread.how != H_ANY:
                    count = self.collect(routes, spread, buf, row, rows - i)
                    if self.put_collected(
                        spread, buf, row, <uint32_t> count, connection, channel, seq, now_ms,
                        routes.generation
                    ):
                        stopped[0] = i
                        return -1
                    passed(routes, spread.routes, count)
                    if seq:
                        seq += count
                    i += count
                    memo_row, route = NULL, NULL
                    continue
                route = (
                    spread.routes
                    if spread != NULL
                    else routes.find(buf + row.line_off, row.line_len)
                )
                memo_row = row
                if route == NULL:
                    why = W_UNKNOWN
                    break
                weighed += (i - since) * weight
                since, weight, enough = i, weight_of(route), rows
                if weight:
                    enough = min(
                        rows, i + 1 + (PACK_WEIGHT_MAX - min(weighed, PACK_WEIGHT_MAX)) // weight
                    )
            if route.kind >= 2:
                if route.kind == 2:
                    why = W_ASK
                    break
                if route.targets.ids[0] != self.far_queue:
                    self.come_near(route, buf, row, rows - i, flags)
                    why = W_NEAR
                    break
            if route.kind == 1:
                if buf[row.line_off + row.line_len - 1] & 1:
                    why = W_UNROUTABLE
                    break
                self.unroutable += 1
            elif (
                row.body_len >= LENT_BYTES_MIN
                and self.borrowers
                and self.lent_run(route, buf, row, flags) != NO_RUN
            ):
                if self.lend(route, buf, row, connection, channel, seq, now_ms, flags):
                    stopped[0] = i
                    return -1
            elif self.add(
                route, buf, row, connection, channel, seq, now_ms, flags, routes.generation
            ):
                stopped[0] = i
                return -1
            if seq:
                seq += 1
            i += 1
        if route != NULL:
            passed(routes, route, i - begun)
        if why == W_DONE and i < rows:
            why = W_FULL
        stopped[0] = i
        return why

    cdef void come_near(
        self, Route *route, const uint8_t *buf, Row *first, size_t rows, int flags
    ) noexcept nogil:
        """Note the queue of rows from `first` on, and how many of them go to its consumer at once.

        These rows say the same line, and no place in the messages of a producer: the shard alone
        knows what a producer sent before.
        """
        cdef Row *row = first
        cdef size_t count = 0
        while not flags & IN_SEQUENCE:
            count += 1
            row = first + count
            if count == rows or row.channel != first.channel or row.line_len != first.line_len or \
                    memcmp(buf + row.line_off, buf + first.line_off, first.line_len):
                break
            flags = record_flags(buf, row)
            if flags < 0:
                break
        self.near_queue = route.targets.ids[0]
        self.near_count = count

    cdef size_t collect(
        self, Routes routes, Spread *spread, const uint8_t *buf, Row *table, size_t rows
    ) noexcept nogil:
        """Return how many rows are like the first of `table`, which is of `spread`, and follow it.

        The first counts, too. `chosen` then says the queue of each. Each step is done for all rows
        at once, so that waiting for memory for one row does not keep others from being begun.
        """
        cdef size_t count = 0
        cdef uint64_t facts = facts_of(table)
        cdef Row *row
        cdef int flags
        self.alike = table.flags & (SPECIAL | MAY_HAVE_SEQUENCE) == 0
        while count < rows:
            row = table + count
            if (
                count
                and (
                    row.channel != table.channel
                    or not goes_to(buf + row.line_off, row.line_len, spread)
                )
            ):
                break
            if facts_of(row) != facts or not self.alike:
                flags = record_flags(buf, row)
                if flags < 0:
                    break
                self.alike = False
                if flags & IN_SEQUENCE:
                    self.in_sequence = True
            self.hashes[count] = hash_of(routes, spread, buf + row.line_off)
            count += 1
        routes.choose(spread, self.hashes, <uint32_t> count, self.chosen)
        return count

    cdef int put_collected(
        self, Spread *spread, const uint8_t *buf, Row *table, uint32_t count, uint32_t connection,
        uint16_t channel, uint64_t first_seq, uint64_t now_ms, uint64_t generation
    ) noexcept nogil:
        """Put the rows that were collected: one record for all rows of a queue, as far as possible.

        `first_seq` is the confirm number of the first row, or 0.
        """
        cdef uint32_t i, sharers = 0
        cdef size_t most = 0
        cdef Share *share
        cdef int failed
        cdef bint alike
        if count == 1:
            return self.add(
                &spread.routes[self.chosen[0]], buf, table, connection, channel, first_seq, now_ms,
                <uint8_t> record_flags(buf, table), generation
            )
        for i in range(count):
            share = &spread.shares[self.chosen[i]]
            if not share.count:
                self.sharers[sharers] = self.chosen[i]
                sharers += 1
            share.count += 1
            share.bytes += stored_bytes(table + i)
            most = max(most, share.bytes)
        alike = self.alike and not first_seq and most < RUN_BYTES_MAX
        if alike and sharers > 1 and count >= OWN_RECORD_ROWS * sharers:
            failed = self.put_alike(spread, sharers, buf, table, count, connection, channel, now_ms)
        else:
            failed = self.put_each(
                spread, sharers, buf, table, count, connection, channel, first_seq, now_ms,
                generation
            )
        for i in range(sharers):
            share = &spread.shares[self.sharers[i]]
            share.count, share.bytes = 0, 0
        return failed

    cdef int put_alike(
        self, Spread *spread, uint32_t sharers, const uint8_t *buf, Row *table, uint32_t count,
        uint32_t connection, uint16_t channel, uint64_t now_ms
    ) noexcept nogil:
        """Put rows that want no confirms and differ in nothing but the queue.

        The record of each queue is laid out before one is filled, so that the rows are read in
        their order, as they lie in memory.
        """
        cdef uint32_t i
        cdef Share *share
        for i in range(sharers):
            if self.lay_out(spread, self.sharers[i], table, connection, channel, now_ms):
                while i:  # nothing of what was laid out may stay
                    i -= 1
                    share = &spread.shares[self.sharers[i]]
                    take_back(share.writer, share)
                    share.writer.messages -= share.count
                return -1
        for i in range(sharers):
            share = &spread.shares[self.sharers[i]]
            share.to = share.writer.records.data + share.start
        for i in range(count):
            share = &spread.shares[self.chosen[i]]
            share.to = copied(share.to, buf, table + i)
        for i in range(sharers):
            close_filled(&spread.shares[self.sharers[i]])
        return 0

    cdef int lay_out(
        self, Spread *spread, uint32_t chosen, Row *like, uint32_t connection, uint16_t channel,
        uint64_t now_ms
    ) noexcept nogil:
        """Write the head of a record for this share, and make room for the rest."""
        cdef Share *share = &spread.shares[chosen]
        cdef Route *route = &spread.routes[chosen]
        cdef Writer *w = &self.writers[route.targets.shard]
        cdef uint8_t flags = PERSISTENT if like.delivery_mode == 2 else 0
        close_record(w)
        if (
            reserve(&w.runs, RUN)
            or open_record(w, route.targets, like, connection, channel, 0, now_ms, flags)
        ):
            return -1
        w.is_open = 0  # it is closed when it is filled
        share.writer, share.record_at = w, w.record_at
        share.run_at, share.start = w.run_at, w.records.used
        if reserve(&w.records, share.bytes + 8):
            take_back(w, share)
            return -1
        # seal() will pad the record like this.
        w.records.used += share.bytes + (-(share.start + share.bytes - share.record_at) & 7)
        w.messages += share.count
        if flags & PERSISTENT and route.durable:
            w.needs_sync = 1
        self.touched |= <uint64_t> 1 << route.targets.shard
        return 0

    cdef int put_each(
        self, Spread *spread, uint32_t sharers, const uint8_t *buf, Row *table, uint32_t count,
        uint32_t connection, uint16_t channel, uint64_t first_seq, uint64_t now_ms,
        uint64_t generation
    ) noexcept nogil:
        """Put any rows, queue after queue."""
        cdef uint32_t i, k, at = 0
        cdef Share *share
        for i in range(sharers):
            share = &spread.shares[self.sharers[i]]
            share.next_row = at
            at += share.count
        for i in range(count):
            share = &spread.shares[self.chosen[i]]
            self.order[share.next_row] = i
            share.next_row += 1
        for k in range(count):
            i = self.order[k]
            if self.add(
                &spread.routes[self.chosen[i]], buf, &table[i], connection, channel,
                first_seq + i if first_seq else 0, now_ms, <uint8_t> record_flags(buf, &table[i]),
                generation
            ):
                return -1
        return 0

    cdef int add(
        self, Route *route, const uint8_t *buf, Row *row, uint32_t connection, uint16_t channel,
        uint64_t seq, uint64_t now_ms, uint8_t flags, uint64_t generation
    ) noexcept nogil:
        cdef uint32_t k
        cdef Target *target
        cdef Writer *w
        for k in range(route.count):
            target = &route.targets[k]
            w = &self.writers[target.shard]
            self.touched |= <uint64_t> 1 << target.shard
            if not (
                w.is_open
                and w.target == target
                and w.generation == generation
                and w.connection == connection
                and w.channel == channel
                and w.flags == flags
                and w.priority == row.priority
                and w.ttl_ms == row.ttl_ms
                and w.records.used - w.record_at < RUN_BYTES_MAX
            ):
                close_record(w)
                if open_record(w, target, row, connection, channel, seq, now_ms, flags):
                    return -1
                w.generation = generation
            elif w.next_seq != seq:
                end_run(w)
                if begin_run(w, connection, channel, seq):
                    return -1
            if put(w, buf, row):
                return -1
            if seq:
                w.next_seq = seq + 1
            if flags & PERSISTENT and route.durable:
                w.needs_sync = 1
        return 0

    cdef uint32_t lent_run(
        self, Route *route, const uint8_t *buf, Row *row, int flags
    ) noexcept nogil:
        """Return the run that a large body is lent from, or NO_RUN if it is copied."""
        if row.body_frames != 1 or route.count != 1 or flags & ~PERSISTENT \
                or not self.borrowers >> route.targets.shard & 1:
            return NO_RUN
        return self.bodies.run_of(buf + row.body_off + 7)

    cdef int lend(
        self, Route *route, const uint8_t *buf, Row *row, uint32_t connection, uint16_t channel,
        uint64_t seq, uint64_t now_ms, int flags
    ) noexcept nogil:
        """Put a publish into a record of its own, with the place of its body.

        lent_run() has said that the body may be lent.
        """
        cdef const uint8_t *body = buf + row.body_off + 7
        cdef uint32_t run = self.bodies.run_of(body)
        cdef Writer *w = &self.writers[route.targets.shard]
        self.touched |= <uint64_t> 1 << route.targets.shard
        close_record(w)
        if (
            open_record(
                w, route.targets, row, connection, channel, seq, now_ms, <uint8_t> (flags | LENT)
            )
            or put_lent(w, buf, row, body - self.bodies.data, run)
        ):
            return -1
        self.bodies.hold(run)
        if flags & PERSISTENT and route.durable:
            w.needs_sync = 1
        return 0

    cdef int leave(
        self, Routes routes, object buffer, const uint8_t *buf, Row *row, uint32_t connection,
        uint64_t seq, uint64_t now_ms
    ) except -1:
        """Pack one publish with a large body, which stays in `buffer`.

        The body comes between the records before it and the zeros behind it. Return as _pack()
        does.
        """
        cdef Spread *spread = (
            routes.find_spread(buf + row.line_off, row.line_len) if routes.spread_count else NULL
        )
        cdef Route *route
        cdef Writer *w
        cdef uint32_t k, chosen = 0
        cdef uint64_t hashed
        cdef size_t zeros = 0, body = row.body_off + 7
        cdef int flags = record_flags(buf, row)
        if flags < 0:
            return W_ASK
        self.in_sequence = flags & IN_SEQUENCE != 0
        if spread != NULL:
            hashed = hash_of(routes, spread, buf + row.line_off)
            routes.choose(spread, &hashed, 1, &chosen)
            route = &spread.routes[chosen]
        else:
            route = routes.find(buf + row.line_off, row.line_len)
        if route == NULL:
            return W_UNKNOWN
        if route.kind == 2:
            return W_ASK
        if route.kind == 3 and route.targets.ids[0] != self.far_queue:
            self.come_near(route, buf, row, 1, flags)
            return W_NEAR
        if route.kind == 1:
            if buf[row.line_off + row.line_len - 1] & 1:
                return W_UNROUTABLE
            self.unroutable += 1
            passed(routes, route, 1)
            return W_DONE
        if self.borrowers and self.lent_run(route, buf, row, flags) != NO_RUN:
            if self.lend(route, buf, row, connection, row.channel, seq, now_ms, flags):
                raise MemoryError("publish batch")
            passed(routes, route, 1)
            return W_DONE
        for k in range(route.count):
            w = &self.writers[route.targets[k].shard]
            self.touched |= <uint64_t> 1 << route.targets[k].shard
            close_record(w)
            if (
                open_record(w, &route.targets[k], row, connection, row.channel, seq, now_ms, flags)
                or put_head(w, buf, row, &zeros)
            ):
                raise MemoryError("publish batch")
            self.larges[route.targets[k].shard].append(
                (w.records.used - zeros, buffer[body:body + row.body_len])
            )
            if flags & PERSISTENT and route.durable:
                w.needs_sync = 1
        passed(routes, route, 1)
        return W_DONE

    def add_stored(
        self, int shard, list ids not None, const unsigned char[::1] message not None,
        uint32_t connection, uint16_t channel, uint64_t seq, uint64_t now_ms, uint32_t ttl_ms,
        uint8_t priority, bint persistent, bint needs_sync, uint32_t count=1,
        bint in_sequence=False, uint8_t marks=0
    ):
        """Add stored messages, back to back, as a run of their own.

        The caller has decided where they go (CC, headers, transactions, dead letters). `seq` is the
        confirm number of the first. With `in_sequence` they are stored once, by what their headers
        say. `marks` are HAS_BCC and OWN_LETTERS.
        """
        cdef Writer *w
        cdef Row row
        cdef Target target
        cdef uint32_t i
        cdef uint8_t flags = (
            (PERSISTENT if persistent else 0) | (IN_SEQUENCE if in_sequence else 0) | marks
        )
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard {shard} of {self.shards}")
        w = &self.writers[shard]
        memset(&row, 0, sizeof(row))
        row.ttl_ms = ttl_ms
        row.priority = priority
        target.shard = shard
        target.queues = len(ids)
        target.ids = <uint32_t *> malloc(4 * len(ids) + 4)
        if target.ids == NULL:
            raise MemoryError()
        for i in range(target.queues):
            target.ids[i] = ids[i]
        close_record(w)
        if open_record(w, &target, &row, connection, channel, seq, now_ms, flags) or \
                reserve(&w.records, message.shape[0] + 8):
            free(target.ids)
            raise MemoryError()
        memcpy(w.records.data + w.records.used, &message[0], message.shape[0])
        w.records.used += message.shape[0]
        w.count = count
        w.messages += count
        if needs_sync:
            w.needs_sync = 1
        close_record(w)
        w.target = NULL
        self.touched |= <uint64_t> 1 << shard
        free(target.ids)

    cpdef uint64_t take_touched(self):
        """Return a bit mask of the shards that got messages since the last call."""
        cdef uint64_t touched = self.touched
        self.packed |= touched
        self.touched = 0
        return touched

    cpdef uint64_t waiting(self):
        """Return a bit mask of the shards for which messages wait for take()."""
        cdef uint64_t left = self.packed | self.touched, found = 0
        cdef int shard
        # Where most shards are never used, as in a cluster, their writers are not looked at.
        while left:
            shard = __builtin_ctzll(left)
            left &= left - 1
            if self.writers[shard].messages:
                found |= <uint64_t> 1 << shard
        self.packed = found
        return found

    cpdef size_t pending(self, int shard):
        """Return what all that waits for take() weighs: bytes of records, and weight()."""
        return self.writers[shard].records.used + self.writers[shard].elsewhere + self.weight(shard)

    cpdef size_t weight(self, int shard):
        """Return what all that waits for take_parts() weighs beside its bytes.

        Lent bodies have a weight, and so have the references of messages that go to several queues.
        """
        cdef Writer *w = &self.writers[shard]
        cdef size_t weight = w.weight
        cdef uint16_t queues
        if self.borrowers >> shard & 1:
            weight += w.lent_bytes
        if not w.is_open:
            return weight
        memcpy(&queues, w.records.data + w.record_at + 24, 2)
        return weight + references_weight(w.count, queues)

    def messages(self, int shard):
        """Return how many messages wait for take()."""
        return self.writers[shard].messages

    def take(
        self, int shard, uint16_t peer, uint32_t incarnation, uint32_t epoch, uint64_t batch,
        bint wanted=True
    ):
        """Return the PUBLISH message of what was packed for `shard`, or None, and empty the writer.

        `wanted`: somebody waits for its confirm. Without it nothing needs to be synced. Bodies are
        lent if may_lend() has said so, else they are copied.
        """
        message = self.take_parts(shard, peer, incarnation, epoch, batch, wanted)
        return b"".join(message) if type(message) is list else message

    cpdef object take_parts(
        self, int shard, uint16_t peer, uint32_t incarnation, uint32_t epoch, uint64_t batch,
        bint wanted=True
    ):
        """Do the same as take(); return a list of parts if the records are large."""
        cdef Writer *w = &self.writers[shard]
        cdef size_t total
        cdef bytes out
        cdef list parts
        if not w.messages:
            return None
        total = self.close_small(shard)
        if total:
            out = PyBytes_FromStringAndSize(NULL, total)
            self.write(
                shard, <uint8_t *> PyBytes_AS_STRING(out), peer, incarnation, epoch, batch, wanted
            )
            return out
        cdef list owned = (
            self.owned(shard) if w.lent.used and not self.borrowers >> shard & 1 else None
        )
        cdef uint32_t owned_bytes
        out = PyBytes_FromStringAndSize(NULL, PUBLISH_HEADER + w.runs.used)
        self.write_head(
            w, <uint8_t *> PyBytes_AS_STRING(out), shard, peer, incarnation, epoch, batch, wanted
        )
        if owned is not None:
            owned_bytes = <uint32_t> sum(map(len, owned))
            memcpy(PyBytes_AS_STRING(out) + 28, &owned_bytes, 4)
            parts = [out, *owned]
        else:
            self.lend_all(shard)
            parts = self.with_larges(shard, out, handed_over(&w.records))
        self.clear(w)
        return parts

    cdef size_t close_small(self, int shard) noexcept:
        """Close the last record of a shard that has messages.

        Return the bytes of its PUBLISH, 0 if take_parts() makes parts of it.
        """
        cdef Writer *w = &self.writers[shard]
        close_record(w)
        return (
            0 if w.lent.used or w.records.used + w.elsewhere >= HANDED_BYTES
            else PUBLISH_HEADER + w.runs.used + w.records.used
        )

    cdef void write(
        self, int shard, uint8_t *to, uint16_t peer, uint32_t incarnation, uint32_t epoch,
        uint64_t batch, bint wanted
    ) noexcept:
        """Write the PUBLISH to `to`, and empty the writer.

        There is room for as many bytes as close_small() returned.
        """
        cdef Writer *w = &self.writers[shard]
        self.write_head(w, to, shard, peer, incarnation, epoch, batch, wanted)
        memcpy(to + PUBLISH_HEADER + w.runs.used, w.records.data, w.records.used)
        self.clear(w)

    cdef void write_head(
        self, Writer *w, uint8_t *p, uint32_t shard, uint16_t peer, uint32_t incarnation,
        uint32_t epoch, uint64_t batch, bint wanted
    ) noexcept:
        cdef uint32_t n32
        write_header(p, KIND_PUBLISH, peer, incarnation, epoch, shard)
        memcpy(p + 16, &batch, 8)
        memcpy(p + 24, &w.run_count, 4)
        n32 = <uint32_t> (w.records.used + w.elsewhere)
        memcpy(p + 28, &n32, 4)
        memcpy(p + 32, &w.messages, 4)
        n32 = ((2 | w.needs_sync) if wanted else 0) | w.in_sequence << 2
        if w.lent.used:
            n32 |= 8
        memcpy(p + 36, &n32, 4)
        memcpy(p + PUBLISH_HEADER, w.runs.data, w.runs.used)

    cdef list with_larges(self, int shard, bytes head, Records records):
        cdef list parts = [head]
        cdef size_t at = 0, before
        if not self.larges[shard]:
            parts.append(records)
            return parts
        view = memoryview(records)
        for before, body in self.larges[shard]:
            parts.append(view[at:before])
            parts.append(body)
            at = before
        parts.append(view[at:])
        self.larges[shard] = []
        return parts

    cdef void lend_all(self, int shard) noexcept:
        """Make the holds of the bodies that wait for `shard` holds of the shard."""
        cdef Writer *w = &self.writers[shard]
        cdef uint32_t *runs = <uint32_t *> w.lent.data
        cdef size_t i
        for i in range(w.lent.used // 4):
            self.bodies.lend(runs[i], shard)
        w.lent.used = 0

    cdef int let_go(self, int shard) except -1:
        """End the holds of the bodies that wait for `shard`."""
        cdef Writer *w = &self.writers[shard]
        cdef uint32_t *runs = <uint32_t *> w.lent.data
        cdef size_t i
        for i in range(w.lent.used // 4):
            self.bodies.let_go(runs[i], 1)
        w.lent.used = 0
        return 0

    cdef list owned(self, int shard):
        """Return the records that wait for `shard`, as parts, with copies of the lent bodies.

        The shard cannot see the memory of these bodies, or can no longer.
        """
        cdef Writer *w = &self.writers[shard]
        cdef list parts = [], larges = self.larges[shard]
        # The offset of a record here, among all records, and in `parts`.
        cdef size_t at = 0, before, was = 0, comes = 0
        cdef size_t left = 0, run = 0
        cdef uint32_t length, said
        while at < w.records.used:
            memcpy(&length, w.records.data + at, 4)
            while run < w.runs.used:
                memcpy(&said, w.runs.data + run, 4)
                if said != was:
                    break
                said = <uint32_t> comes
                memcpy(w.runs.data + run, &said, 4)
                run += RUN
            was += length
            if w.records.data[at + 27] & LENT:
                record = owned_record(w.records.data + at, self.bodies)
                parts.append(record)
                at += length
                comes += <size_t> len(record)
                continue
            comes += length
            if left < <size_t> len(larges) and <size_t> larges[left][0] < at + length:
                before, body = larges[left]
                left += 1
                length -= <uint32_t> len(body)
                parts += [w.records.data[at:before], body, w.records.data[before:at + length]]
            else:
                parts.append(w.records.data[at:at + length])
            at += length
        self.larges[shard] = []
        self.let_go(shard)
        return parts

    def drop(self, int shard):
        """Forget what waits for `shard`."""
        close_record(&self.writers[shard])
        self.let_go(shard)
        self.larges[shard] = []
        self.clear(&self.writers[shard])

    cdef void clear(self, Writer *w) noexcept:
        w.records.used = 0
        w.runs.used = 0
        w.lent_bytes = 0
        w.run_count = 0
        w.messages = 0
        w.elsewhere = 0
        w.weight = 0
        w.needs_sync = 0
        w.in_sequence = 0
        w.is_open = 0
        w.target = NULL
        if w.records.room > 4 * RUN_BYTES_MAX:  # after a huge message
            free(w.records.data)
            w.records.data = NULL
            w.records.room = 0


def crc32c(const unsigned char[::1] data not None):
    """Return the CRC-32C of the bytes."""
    return c_crc32c(0, &data[0], data.shape[0]) if data.shape[0] else 0


def place_of(const unsigned char[::1] props not None):
    """Return (producer, sequence) that the headers of a message say, None if one is missing.

    Raise ValueError if the headers mean nothing.
    """
    cdef Sequence place
    cdef int found = sequence_read(&props[0], props.shape[0], &place) if props.shape[0] else 0
    if found < 0:
        raise ValueError(
            "x-producer-id must be a string of 1 to 255 bytes, x-sequence an integer from 0 on"
        )
    return (
        (PyBytes_FromStringAndSize(<char *> place.producer, place.length), place.number)
        if found
        else None
    )
