# cython: language_level=3
"""Declare what the short way keeps of a front door and of a client."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shardmq.broker.amqp.frames cimport Incoming
from shardmq.broker.amqp.octets cimport Row
from shardmq.broker.front_door.hot_state cimport (
    AllotmentState, BindRun, ConfirmsState, ConsumerState, Due, LinkState, MessageCounts, PassState,
    PublishingState, SocketState, SpansState, UnackedState,
)
from shardmq.shardd.wire.codec cimport Packer, Routes
from shardmq.shardd.wire.shared_memory cimport Taker


cdef class ShortWay:
    cdef Packer packer
    cdef MessageCounts counts
    cdef Due due
    cdef object links  # ShardLinks
    cdef list link_of  # by shard
    cdef dict freed  # the same as that of the links
    cdef object alarms
    cdef object deliveries  # Deliveries
    cdef object share_rest  # shares freed credit in Python
    cdef object groups  # GroupConsuming
    cdef dict consumers  # by number
    cdef PassState loop
    cdef object open_state
    cdef str reply_queues
    cdef bint stamps
    cdef SpansState spans  # None: no spans are made

    cdef bint is_in_limit(self, ConsumerState consumer)
    cdef int use(self, AllotmentState allotment, int64_t count, bint no_ack) except -1


cdef class Inlet:
    cdef ShortWay way
    cdef SocketState socket
    cdef uint32_t connection
    cdef Incoming amqp
    cdef dict channels
    cdef set waiting
    cdef Routes routes
    cdef str vhost
    cdef object binds, failed
    cdef BindRun run  # the last run of binds ahead; None before the first
    cdef bytes bound  # what its binds begin with, to their routing key
    cdef size_t taken  # of the read: where the first frame begins that is not taken
    cdef readonly uint64_t things, fed
    cdef public bint published

    cdef int read(self) except -1
    cdef bint is_plain(self)
    cdef int take_plain(self, const uint8_t *base, size_t end) except -1
    cdef int take_bytes(self, const uint8_t *base, size_t end) except -1
    cdef int answer(self, bytes frames) except -1
    cdef size_t publish(self, const uint8_t *base, Row *rows, size_t count, size_t behind) except? 0
    cdef int note(
        self, PublishingState channel, ConfirmsState confirms, Row *rows, size_t count
    ) except -1
    cdef bint answer_channel(self, const uint8_t *base, size_t *position, size_t end) except -1
    cdef bint bind(self, const uint8_t *base, size_t *position, size_t end) except -1
    cdef bint go_on_binding(self, const uint8_t *p, size_t size, uint32_t number) except -1
    cdef bint settle(self, const uint8_t *base, size_t *position, size_t end) except -1
    cdef bint settle_range(self, UnackedState unacked, uint64_t first, uint64_t last) except -1
    cdef bint settle_through(self, UnackedState unacked, uint64_t tag) except -1
    cdef int tell(
        self, UnackedState unacked, Py_ssize_t place, uint64_t first, uint64_t last
    ) except -1


cdef class Outlet(Taker):
    cdef ShortWay way
    cdef LinkState link
    cdef object read, deliver, failed

    cdef bint deliver_all(self, const uint8_t *p, size_t size, message) except -1
    cdef bint deliver_plain(self, const uint8_t *section, uint32_t size) except -1
    cdef bint confirm(self, uint64_t batch) except -1
    cdef bint credit(self, const uint8_t *message, size_t size) except -1
