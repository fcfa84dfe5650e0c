# cython: language_level=3
"""Declare what the short way of a shard keeps of peers, batches and syncs."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from shardmq.shardd.grown cimport Grown
from shardmq.shardd.queues.state cimport BacklogState, ConsumerState, ConsumersState, QueueState
from shardmq.shardd.store.open_segment cimport SegmentStoreState
from shardmq.shardd.wire.codec cimport DeliveryWriter, Tally
from shardmq.shardd.wire.shared_memory cimport Taker


cdef class HeldState:
    cdef public uint64_t batch
    cdef public long long sync
    cdef public object state, refused


cdef class PeerState:
    cdef public object number, endpoint, held, next_batch
    cdef public uint64_t taken
    cdef public bint has_news, has_freed
    cdef public dict holders, windows
    cdef public DeliveryWriter writer
    cdef public list before_deliveries, after_deliveries


cdef class SyncsState:
    cdef public long long begun, ended
    cdef public bint wanted


cdef class DeadLettersState:
    cdef public bint idle


cdef class ShortWay(Taker):
    cdef public bint is_on
    cdef public long long given  # bytes handed out in this pass
    # The time of this pass, in ms since the epoch; whoever offers messages sets it.
    cdef public long long now
    cdef public object allot  # takes (peer, number, allowed, mode, now) of an ALLOT
    cdef bytes last_sender  # the key of the last message in `senders`
    cdef list timers
    cdef DeadLettersState dead_letters
    cdef long long turn_bytes, queue_bytes
    cdef dict senders, queues, dirty, peers, redeeming
    cdef set dirty_stores
    cdef SyncsState syncs
    cdef Tally batch_messages, batch_bytes
    cdef object queue_kind, consumer_kind, held_kind, outgoing_kind
    cdef object waiting, confirmable, failed
    cdef uint64_t credit_bytes
    cdef long long behind_messages, behind_bytes
    cdef dict watches
    cdef Grown gathered, bodies

    cdef bint publish(self, PeerState peer, const uint8_t *message, size_t size) except -1
    cdef HeldState hold(self, PeerState peer, uint64_t batch)
    cdef bint settle(self, PeerState peer, const uint8_t *message, size_t size) except -1
    cdef int ack(self, ConsumerState consumer, uint64_t first, uint64_t last) except -1
    cdef bint credit(self, PeerState peer, const uint8_t *message, size_t size) except -1
    cpdef list turn_end(self, uint64_t now)
    cdef long long serve_plain(self, long long given) except -1
    cdef long long deliver(self, QueueState queue, int *state) except -1
    cdef ConsumerState taker(self, QueueState queue, ConsumersState consumers)
    cdef long long deal(
        self, QueueState queue, SegmentStoreState store, ConsumerState taker, long long most,
        long long bytes_max,
    ) except? -2
    cdef Py_ssize_t hand_over(
        self, QueueState queue, SegmentStoreState store, ConsumerState taker,
        const uint64_t *entries, Py_ssize_t stop, long long bytes_max, long long *handed,
    ) except -1
    cdef int gather(self, const uint8_t *data, uint64_t size) except -1
    cpdef list answers(self)
    cdef int confirm(self, PeerState peer) except -1
    cdef int take(self, PeerState peer, list outgoing) except -1
    cdef object outgoing(self, object endpoint, object message)
