# cython: language_level=3
"""What other compiled modules use of packer.pyx."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from shardmq.shardd.wire.shared_memory cimport BodyMemory
from shardmq.shardd.wire.publishes cimport Row, Writer
from shardmq.shardd.wire.routes cimport Route, Routes, Spread

cdef enum:  # why pack_rows() stopped
    PACKED_ALL = 0  # DONE
    PACKED_CHANNEL = 1  # CHANNEL


cdef class Records:
    cdef uint8_t *_data
    cdef Py_ssize_t _used


cdef class Packer:
    cdef Writer *writers
    cdef readonly int shards
    cdef uint64_t touched
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
