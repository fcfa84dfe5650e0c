# cython: language_level=3
"""Declare routes, the packer, the writer of deliveries and the counts of batches."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from shardmq.shardd.wire.buffer cimport Bytes, same
from shardmq.shardd.wire.publishes cimport Row, Target, Writer
from shardmq.shardd.wire.shared_memory cimport BodyMemory

cdef enum:
    TALLY_CLASSES = 65  # 0 and 1; then up to 2^k, for k from 1 to 64


cdef class DeliveryWriter:
    cdef Bytes out
    cdef list large  # (how much of `out` is before it, its messages), ...
    cdef size_t large_bytes
    cdef uint32_t sections
    cdef uint16_t peer
    cdef uint32_t incarnation, epoch, shard

    cdef int leave(self, object blob, size_t blob_bytes) except -1
    cdef int section(
        self, uint32_t connection, uint16_t channel, uint32_t consumer, uint64_t first_number,
        uint16_t flags, uint32_t count, const uint8_t *blob, size_t blob_bytes, uint32_t weight=*
    ) except -1
    cpdef object take_parts(self)
    cdef list parts(self)


cdef class Tally:
    cdef uint64_t[TALLY_CLASSES] classes
    cdef uint64_t low, high  # of the sum

    cdef void count(self, uint64_t value) noexcept


# Routes, which the packer reads by itself and for each message.

cdef extern from "key_hash.h" nogil:
    uint64_t c_key_hash "key_hash"(const unsigned char *key, size_t length)
    uint64_t mixed(uint64_t bits)

cdef enum:
    H_RENDEZVOUS = 0
    H_MODULUS = 1
    H_CHANCE = 2
    H_JUMP = 3
    H_ANY = 4  # whatever the key, the one route there is

cdef struct Route:
    int kind
    int durable  # some queue of it is: a persistent message must be synced
    uint32_t count
    Target *targets
    uint8_t *line
    uint32_t line_len
    uint64_t hashed
    uint32_t exchange  # its place in Published
    uint32_t reach  # queues that the exchange gives each message to

cdef struct Passed:  # messages
    uint64_t came  # published to an exchange
    uint64_t left  # given to queues by it

cdef struct Share:  # of one queue, of the rows of a table while that is packed
    uint32_t count  # 0 before and after
    size_t bytes  # of the stored messages
    uint32_t next_row  # where each is put by itself: of those by queue
    # Where its record is laid out before it is filled:
    Writer *writer
    size_t record_at
    size_t run_at
    size_t start  # of the stored messages in the writer's records
    uint8_t *to

cdef struct Spread:  # an exchange that gives each message to one of its queues, or all to the same
    int how
    int equal  # all weights are the same
    uint32_t count
    Route *routes  # one for each queue
    uint64_t *seeds  # of a jump hash: the sum of weights up to here
    double *weights
    Share *shares  # of each route
    uint8_t *exchange
    uint32_t exchange_len  # as on the line, with its length byte

cdef inline bint goes_to(const uint8_t *line, uint32_t length, Spread *spread) noexcept nogil:
    return (
        length > spread.exchange_len
        and line[0] == spread.exchange[0]
        and same(spread.exchange, line, spread.exchange_len)
    )

cdef inline bint same_exchange(const uint8_t *line, const uint8_t *other) noexcept nogil:
    return line[0] == other[0] and same(line, other, <size_t> line[0] + 1)

cdef class Published:
    cdef Passed *counts
    cdef uint32_t room
    cdef dict places

    cdef uint32_t place_of(self, bytes exchange) except? 0xffffffff

cdef class Routes:
    cdef Published published
    cdef Route **slots
    cdef Spread spreads[64]  # SPREADS_MAX
    cdef uint32_t spread_count
    cdef uint64_t chance
    cdef Route **kept
    cdef uint32_t used
    cdef uint32_t size
    cdef uint64_t generation

    cdef void free_spreads(self) noexcept
    cdef Spread *find_spread(self, const uint8_t *line, uint32_t length) noexcept nogil
    cdef void choose(
        self, Spread *spread, const uint64_t *hashed, uint32_t count, uint32_t *chosen
    ) noexcept nogil
    cdef bint begin_spread(self, bytes exchange, int how, uint32_t count) except -1
    cdef void free_list(self, Route **routes, uint32_t count) noexcept
    cdef Route *find(self, const uint8_t *line, uint32_t length) noexcept nogil
    cdef void place(self, Route *route) noexcept
    cdef int grow(self) except -1

cdef inline void passed(Routes routes, Route *route, size_t messages) noexcept nogil:
    """Count messages that took this route.

    The packer does so once for neighbours of the same line.
    """
    cdef Passed *counts = routes.published.counts + route.exchange
    counts.came += messages
    counts.left += messages * route.reach

cdef inline uint64_t hash_of(Routes routes, Spread *spread, const uint8_t *line) noexcept nogil:
    """Return the hash of this message's key, or chance."""
    cdef const uint8_t *key = line + spread.exchange_len
    if spread.how == H_CHANCE:
        routes.chance += 0x9e3779b97f4a7c15ULL
        return mixed(routes.chance)
    return c_key_hash(key + 1, key[0])


# The packer.

cdef enum:  # why pack_rows() stopped
    PACKED_ALL = 0  # DONE
    PACKED_CHANNEL = 1  # CHANNEL


cdef class Records:
    cdef uint8_t *_data
    cdef Py_ssize_t _used


cdef class Packer:
    cdef Writer *writers
    cdef readonly int shards
    cdef uint64_t touched  # bit mask of the shards that got messages since take_touched()
    cdef uint64_t packed  # and of those that may have some from before
    cdef readonly bint in_sequence
    cdef readonly uint32_t near_queue  # when pack() stopped with NEAR: the queue
    # How many messages had no queue to go to and were dropped since the start.
    cdef readonly uint64_t unroutable
    # How many messages from there on go to `near_queue`; 0: the first must go to its shard.
    cdef readonly size_t near_count
    cdef uint32_t far_queue
    # Of the rows of the table that is packed, as far as a spread chooses:
    cdef uint64_t *hashes
    cdef uint32_t *chosen
    cdef uint32_t *sharers  # queues that are chosen for some of them
    cdef uint32_t *order  # of the rows by queue, where each is put by itself
    cdef bint alike  # they belong into the same record, but for the queue
    cdef size_t spread_room
    cdef list larges  # of each shard, bodies that were left: (records before it, view), ...
    cdef BodyMemory bodies  # that bodies are lent from, or None
    cdef uint64_t borrowers  # bit mask of the shards that see this memory

    cdef int pack_rows(
        self, Routes routes, const uint8_t *buf, Row *table, size_t rows, size_t start,
        uint32_t connection, uint64_t first_seq, uint64_t now_ms, size_t *stopped
    ) except -1
    cdef int _pack(
        self, Routes routes, const uint8_t *buf, Row *table, size_t rows, size_t start,
        uint32_t connection, uint64_t first_seq, uint64_t now_ms, size_t *stopped
    ) noexcept nogil
    cdef void come_near(
        self, Route *route, const uint8_t *buf, Row *first, size_t rows, int flags
    ) noexcept nogil
    cdef size_t collect(
        self, Routes routes, Spread *spread, const uint8_t *buf, Row *table, size_t rows
    ) noexcept nogil
    cdef int put_collected(
        self, Spread *spread, const uint8_t *buf, Row *table, uint32_t count, uint32_t connection,
        uint16_t channel, uint64_t first_seq, uint64_t now_ms, uint64_t generation
    ) noexcept nogil
    cdef int put_alike(
        self, Spread *spread, uint32_t sharers, const uint8_t *buf, Row *table, uint32_t count,
        uint32_t connection, uint16_t channel, uint64_t now_ms
    ) noexcept nogil
    cdef int lay_out(
        self, Spread *spread, uint32_t chosen, Row *like, uint32_t connection, uint16_t channel,
        uint64_t now_ms
    ) noexcept nogil
    cdef int put_each(
        self, Spread *spread, uint32_t sharers, const uint8_t *buf, Row *table, uint32_t count,
        uint32_t connection, uint16_t channel, uint64_t first_seq, uint64_t now_ms,
        uint64_t generation
    ) noexcept nogil
    cdef int add(
        self, Route *route, const uint8_t *buf, Row *row, uint32_t connection, uint16_t channel,
        uint64_t seq, uint64_t now_ms, uint8_t flags, uint64_t generation
    ) noexcept nogil
    cdef int leave(
        self, Routes routes, object buffer, const uint8_t *buf, Row *row, uint32_t connection,
        uint64_t seq, uint64_t now_ms
    ) except -1
    cdef uint32_t lent_run(
        self, Route *route, const uint8_t *buf, Row *row, int flags
    ) noexcept nogil
    cdef int lend(
        self, Route *route, const uint8_t *buf, Row *row, uint32_t connection, uint16_t channel,
        uint64_t seq, uint64_t now_ms, int flags
    ) noexcept nogil
    cdef void lend_all(self, int shard) noexcept
    cdef int let_go(self, int shard) except -1
    cdef list owned(self, int shard)
    cdef size_t close_small(self, int shard) noexcept
    cdef void write(
        self, int shard, uint8_t *to, uint16_t peer, uint32_t incarnation, uint32_t epoch,
        uint64_t batch, bint wanted
    ) noexcept
    cdef void write_head(
        self, Writer *w, uint8_t *p, uint32_t shard, uint16_t peer, uint32_t incarnation,
        uint32_t epoch, uint64_t batch, bint wanted
    ) noexcept
    cdef list with_larges(self, int shard, bytes head, Records records)
    cdef void clear(self, Writer *w) noexcept
    cpdef object take_parts(
        self, int shard, uint16_t peer, uint32_t incarnation, uint32_t epoch, uint64_t batch,
        bint wanted=*
    )
    cpdef uint64_t take_touched(self)
    cpdef uint64_t waiting(self)
    cpdef size_t pending(self, int shard)
    cpdef size_t weight(self, int shard)
