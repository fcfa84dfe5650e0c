# cython: language_level=3
"""Declare what compiled code reads and changes of channels, consumers, limits and counters.

The classes are in hot_state.pyx.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from shardmq.broker.amqp.frames cimport Sizes
from shardmq.shardd.wire.codec cimport Packer, Tally
from shardmq.shardd.wire.shared_memory cimport LaneState, Taker


cdef class MessageCounts:
    cdef public uint64_t received, received_confirm, confirmed, returned
    cdef public uint64_t delivered_auto, delivered_manual
    cdef public uint64_t got_auto, got_manual, got_empty
    cdef public uint64_t channels_opened
    cdef public Sizes sizes


cdef class SpansState:
    cdef public uint64_t until_chosen  # publishes before the next one that begins a trace


cdef class Waiting:
    cdef readonly ConfirmsState confirms
    cdef readonly uint64_t first, last
    cdef public int shards
    cdef public bint nacked

    cpdef confirmed(self)


cdef class ConfirmsState:
    cdef public object client
    cdef public uint32_t channel
    cdef public uint64_t next_seq, nacked
    cdef list _waiting
    cdef Py_ssize_t _begun
    cdef public set refused
    cdef public bint closed, in_sequence
    cdef public object failure
    cdef public list due
    cdef bint _is_due
    cdef public MessageCounts counts

    cpdef Waiting wait(self, uint64_t count, int shards)
    cpdef finished(self)
    cpdef bytes answers(self)
    cdef bytes one_by_one(self, Waiting waiting)


cdef class PublishingState:
    cdef public uint16_t number
    cdef public bint is_open
    cdef public uint64_t published, returned, unroutable_dropped
    cdef public ConfirmsState confirms  # None out of confirm mode
    cdef public object transaction
    cdef public ConsumingState consuming_if_any  # None: nothing was consumed on it


cdef class LimitState:
    cdef public int64_t most, unacked, allotted, members, nested, waits_for
    cdef public dict hungry, empty, holding, draining
    cdef public AllotmentState turn
    cdef public double turn_ends

    cpdef int go_on(self, double now) except -1


cdef class AllotmentState:
    cdef public uint32_t number, shard
    cdef public tuple limits
    cdef public int64_t allowed, used
    cdef public int mode
    cdef public bint wants, gave_back, used_all
    cdef public dict state

    cpdef bint use(self, int64_t count) except -1
    cpdef int place(self) except -1


cdef class ConsumingState:
    cdef public object client
    cdef public uint16_t number
    cdef public LimitState limit
    cdef public uint64_t next_tag, delivered_auto, acked, redelivered
    cdef public UnackedState unacked


cdef class ConsumerState:
    cdef public ConsumingState channel
    cdef public object client
    cdef public uint32_t number, shard
    cdef public str tag, queue_name
    cdef public bytes tag_bytes
    cdef public object group, allotment, reading
    cdef public LimitState group_limit  # None without a group
    cdef public bint announced, no_ack, affinity
    cdef public uint64_t delivered, prefetch
    cdef public int64_t held, counted  # of an assignment

    cpdef hold(self, int64_t count)
    cpdef bint let_go(self, int64_t count, bint counts)


cdef struct Span:  # neighbouring delivery tags of one consumer and one epoch of its shard
    uint64_t first_tag
    uint64_t last_tag
    int64_t epoch
    uint64_t first_number
    double at


cdef class UnackedState:
    # The spans, by tag, are those from `begun` to before `ended`; a consumer is at the same place.
    cdef Span *spans
    cdef Py_ssize_t begun, ended, _room
    cdef list consumers
    cdef public Py_ssize_t count

    cdef Py_ssize_t find(self, uint64_t tag) noexcept
    cdef int put(
        self, uint64_t first_tag, uint64_t count, object consumer, int64_t epoch,
        uint64_t first_number, double at
    ) except -1
    cdef int drop_before(self, Py_ssize_t place) except -1
    cdef int cut(self, Py_ssize_t place, uint64_t first, uint64_t last) except -1
    cdef int make_room(self) except -1
    cdef list spans_before(self, Py_ssize_t end)
    cdef tuple run_at(self, Py_ssize_t place, uint64_t first, uint64_t last)


cpdef int64_t acks_together(int64_t prefetch, bint counts_keys)
cpdef int64_t worth_a_grant(int64_t most)


cdef class Due:
    cdef public uint64_t shards
    cdef public bint acks_wait


cdef class SettlesState:
    cdef public bint due, hurries
    cdef public list ranges
    cdef public uint64_t shard
    cdef public Due due_all
    cdef public dict last_range, acks, allots

    cpdef fall_due(self)
    cpdef ack(self, consumer, uint64_t first, uint64_t last, int64_t together)


cdef class LinkState:
    cdef public uint32_t shard, epoch
    cdef public int64_t in_flight
    cdef public SettlesState settles
    cdef public list packing
    cdef public dict credits
    cdef public bint credit_due
    cdef public Due due
    cdef public Packer packer
    cdef public uint16_t peer
    cdef public uint32_t incarnation
    cdef public uint64_t batch
    cdef public object away_since, lane, sent
    cdef public bytes sender
    cdef public Taker outlet
    cdef public Tally batch_messages, batch_bytes

    cpdef flush(self)
    cpdef note_batch(self, uint64_t weight, list waiting)
    cdef int put(self, batch) except -1
    cpdef credit(self, uint32_t epoch, uint32_t connection, uint64_t count)


cdef class LinksState:
    cdef public Packer packer
    cdef public list links
    cdef public Due due
    cdef public dict freed
    cdef public object share_freed

    cpdef bint flush(self, size_t batch_bytes_min=*, size_t shared_bytes_min=*) except? 2
    cpdef list crowded(self, uint64_t shards)


cdef struct Credit:  # that is due to a shard when so many bytes are written
    uint64_t at
    uint64_t count
    uint32_t shard
    uint32_t epoch


cdef class OutputState:
    cdef public list chunks
    cdef public uint64_t pending, written, writes
    cdef public object has_room
    cdef Credit *_credits
    cdef Py_ssize_t _begun, _ended, _room

    cpdef add(self, data)
    cpdef add_then_credit(self, data, uint32_t shard, uint32_t epoch, uint64_t credit)
    cpdef credit_when_written(self, uint32_t shard, uint32_t epoch, uint64_t credit)
    cdef bint send(self, int fd) except -1


cdef class Pace:
    cdef double _tick_s, _last_pass
    cdef double _busy_then  # less than 0: not known
    cdef bint _small_reads, _waited
    cdef unsigned long long _came  # things in this pass so far
    cdef int _alone  # passes in a row that waited for nothing
    cdef int _at_once  # how many of the next passes do not wait
    cdef unsigned int _reader  # the client that was read last
    cdef int _company  # in how many of the next passes it has company
    cdef object _clock, _busy

    cdef double wait(self) except? -1
    cdef bint may_wait(self) noexcept
    cdef double next(self, double now, double busy) noexcept
    cpdef read_by(self, unsigned int client)
    cpdef came(self, unsigned long long things)
    cpdef worth_a_pass(self)


cdef class Reads:
    cdef public int full, short, held

    cpdef bint may_wait(self)


cdef class PassState:
    cdef public double now
    cdef public list dirty, confirms_due, feeders, held
    cdef public bint in_pass, end_scheduled, looks
    cdef public object read_buffer, aio, spin, beside
    cdef public Reads reads
    cdef public Pace pace
    cdef public LinksState links
    cdef uint64_t _fed

    cdef int begin(self) except -1
    cpdef begin_pass(self)
    cpdef end_of_pass(self)
    cpdef fed(self, SocketState client, uint64_t shards)
    cdef int answer_publishers(self) except -1
    cdef int hold_feeders(self) except -1
    cdef int write_out(self) except -1


cdef class SocketState:
    cdef public PassState loop
    cdef public list link_of
    cdef public OutputState output
    cdef public int fd
    cdef public uint32_t id
    cdef public uint64_t fed_shards
    cdef public bint closing, lost, is_plain
    cdef public uint32_t frame_bytes_max
    cdef public object paused
    cdef public bint more_comes
    cdef public uint64_t received_bytes, reads
    cdef public double last_sent, last_received
    cdef public bint is_dirty, is_writing

    cpdef flush(self)
    cpdef write(self, data)
    cpdef mark_dirty(self)
    cdef int write_later(
        self, bytes data, uint32_t shard, uint32_t epoch, uint64_t credit
    ) except -1


cdef class BindRuns:
    cdef public long epoch, unanswered
    cdef public int pipe, waited_pipe
    cdef public list collected
    cdef public object first


cdef class BindRun:
    cdef BindRuns runs
    cdef readonly str vhost, source, queue
    cdef readonly list ends
    cdef public Py_ssize_t put_in
    cdef public bint is_collected
    cdef long epoch
    cdef object around
    cdef bytes head, tail
    cdef public object waits

    cdef bint collect(self) except -1
    cdef bint add(self, const uint8_t *key, size_t size) except -1
