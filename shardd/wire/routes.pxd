# cython: language_level=3
"""Declare what the packer reads of routes.pyx, by itself and for each message."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.wire.buffer cimport same
from shardmq.shardd.wire.publishes cimport Target, Writer

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
