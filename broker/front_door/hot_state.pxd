# cython: language_level=3
"""What compiled code reads and changes of channels, consumers, limits and counters; hot_state.pyx says more."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from shardmq.broker.amqp.frames cimport Sizes


cdef class MessageCounts:
    cdef public uint64_t received, received_confirm, confirmed, returned
    cdef public uint64_t delivered_auto, delivered_manual
    cdef public uint64_t got_auto, got_manual, got_empty
    cdef public Sizes sizes


cdef class PublishingState:
    cdef public uint16_t number
    cdef public bint is_open
    cdef public uint64_t published
    # Confirms, or None out of confirm mode; a Transaction or None.
    cdef public object confirms, transaction
    cdef public ConsumingState consuming_if_any  # None: nothing was consumed on it


cdef class LimitState:
    cdef public int64_t most, unacked


cdef class ConsumingState:
    cdef public object client
    cdef public uint16_t number
    cdef public LimitState limit
    cdef public uint64_t next_tag, delivered_auto
    cdef public object unacked  # Unacked


cdef class ConsumerState:
    cdef public ConsumingState channel
    cdef public object client
    cdef public uint32_t number, shard
    cdef public str tag, queue_name
    cdef public bytes tag_bytes
    cdef public object group, allotment, reading
    cdef public bint announced, no_ack, affinity
    cdef public uint64_t delivered, prefetch


cdef class LinkState:
    cdef public uint32_t shard, epoch
    cdef public int64_t in_flight
    cdef public object settles  # Settles
    cdef public list packing
    cdef public dict credits
    cdef public bint credit_due
