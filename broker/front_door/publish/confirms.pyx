# cython: language_level=3, boundscheck=False, wraparound=False
"""Publisher confirms of one channel: numbers, batches waited for, acks and nacks in order.

One `Waiting` stands for all publishes of one channel in one read. It is done when every shard
concerned has confirmed its batch. A channel answers for the longest finished beginning, with one
cumulative ack; what was refused or lost is nacked one by one. Nothing is written here: a channel
with something to say puts itself on the list `due`. At the end of a pass of the event loop the
owner of that list writes `answers`, then ends the channel if there is a `failure`.
"""

import struct

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
cimport cython

from shardmq.broker.amqp.octets cimport put16, put32, put64
from shardmq.broker.front_door.hot_state cimport MessageCounts

from shardmq.broker.amqp import ChannelException

LOST = "a publish with x-sequence may be lost: publish again, in order, what was not confirmed"

# basic.publish, in the words of errors: its class and its method.
PUBLISH = 60, 40
_KNOWN = struct.Struct(">BHIHHQQBB")

cdef enum:
    BASIC = 60
    ACK = 80
    NACK = 120
    REQUEUE = 2  # in the bits of basic.nack
    # Answered ones are taken off the front of the list when there are so many.
    ANSWERED_MAX = 64


cdef bytes settle_frame(uint32_t channel, uint32_t method, uint64_t tag, uint8_t bits):
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, 21)
    cdef uint8_t *p = <uint8_t *> PyBytes_AS_STRING(frame)
    p[0] = 1
    p = put64(put32(put32(put16(p + 1, channel), 13), BASIC << 16 | method), tag)
    p[0] = bits
    p[1] = 0xCE
    return frame


def ack_frame(uint32_t channel, uint64_t tag, bint multiple):
    """Return basic.ack to the publisher."""
    return settle_frame(channel, ACK, tag, multiple)


def nack_frame(uint32_t channel, uint64_t tag):
    """Return basic.nack of one message to its publisher.

    It has the bit `requeue`, which RabbitMQ sends and no publisher reads.
    """
    return settle_frame(channel, NACK, tag, REQUEUE)


def known_frame(channel, first, last, altered):
    """Return the frame that says that publishes repeat what a queue had of their producer.

    It comes before the ack. `altered` says that their bodies are others. A method of our own, in
    the class of confirms: u64 first, u64 last, u8 altered. Only the reader of streams gets it,
    which publishes what comes by HTTP.
    """
    return _KNOWN.pack(1, channel, 21, 85, 20, first, last, altered, 0xCE)


@cython.freelist(256)
cdef class Waiting:
    """Publishes first..last of one channel.

    `shards` counts the batches that must be confirmed before they are.
    """

    def refuse(self, connection, channel, uint64_t first, uint64_t last):
        """Hear that a shard refused publishes first..last of that channel, which may be another."""
        confirms = self.confirms
        if connection == confirms.client.id and channel == confirms.channel:
            confirms.refused.update(range(max(first, self.first), min(last, self.last) + 1))

    cpdef confirmed(self):
        self.shards -= 1
        if self.shards == 0:
            self.confirms.finished()

    @property
    def in_sequence(self):
        return self.confirms.in_sequence

    def lost(self):
        self.nacked = True
        self.confirmed()
        self.confirms.publish_lost()


cdef class Confirms:
    """Confirm mode of one channel: numbers given out, what waits, what was refused.

    `closed`: the channel is gone, nobody is answered, and the number may be another channel's now.
    `in_sequence`: some publish had x-producer-id and x-sequence, its place in the order of its
    producer. `failure` ends the channel, once.
    """

    def __init__(self, client, channel, list due, counts=None):
        self.client = client
        self.channel = channel
        self.next_seq = 1
        self._waiting = []
        self.refused = set()
        self._due = due
        self._counts = MessageCounts() if counts is None else counts

    @property
    def unconfirmed(self):
        """Return how many publishes wait for their answer."""
        cdef Py_ssize_t at
        cdef uint64_t count = 0
        for at in range(self._begun, len(self._waiting)):
            count += (<Waiting> self._waiting[at]).last - (<Waiting> self._waiting[at]).first + 1
        return count

    def publish_lost(self):
        """Hear that a publish was lost, or may be.

        What is stored behind a missing publish would make that one look like a repetition. So a
        channel whose publishes are in sequence ends, without another answer: the next channel
        begins with what was not confirmed.
        """
        if self.in_sequence and not self.closed:
            self.closed = True
            self.failure = ChannelException(406, LOST, *PUBLISH)
            self.finished()

    cpdef Waiting wait(self, uint64_t count, int shards):
        """Give the next `count` publishes their numbers; so many batches have them."""
        cdef Waiting waiting = Waiting.__new__(Waiting)
        waiting.confirms = self
        waiting.first = self.next_seq
        waiting.last = self.next_seq + count - 1
        waiting.shards = shards
        self.next_seq += count
        self._waiting.append(waiting)
        if shards == 0:
            self.finished()
        return waiting

    cpdef finished(self):
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    cpdef bytes answers(self):
        """Return acks and nacks for the longest finished beginning."""
        cdef Waiting waiting
        cdef uint64_t first = 0, last = 0  # an ack not yet written
        cdef list out = None
        cdef list all_of = self._waiting
        cdef MessageCounts counts = self._counts
        cdef bytes ack = b""
        self._is_due = False
        if self.closed:
            all_of.clear()
            self._begun = 0
            return b""
        while self._begun < len(all_of):
            waiting = <Waiting> all_of[self._begun]
            if waiting.shards > 0:
                break
            self._begun += 1
            if waiting.nacked or self.refused:
                if out is None:
                    out = []
                if last:
                    out.append(settle_frame(self.channel, ACK, last, last > first))
                    first = last = 0
                out.append(self.one_by_one(waiting))
                continue
            if not first:
                first = waiting.first
            last = waiting.last
            counts.confirmed += waiting.last - waiting.first + 1
        if self._begun == len(all_of):
            all_of.clear()
            self._begun = 0
        elif self._begun >= ANSWERED_MAX:
            del all_of[:self._begun]
            self._begun = 0
        if last:
            ack = settle_frame(self.channel, ACK, last, last > first)
        if out is None:
            return ack
        out.append(ack)
        return b"".join(out)

    cdef bytes one_by_one(self, Waiting waiting):
        cdef uint64_t seq
        cdef bint refused
        cdef list out = []
        for seq in range(waiting.first, waiting.last + 1):
            refused = waiting.nacked or seq in self.refused
            self.refused.discard(seq)
            if refused:
                out.append(settle_frame(self.channel, NACK, seq, REQUEUE))
            else:
                (<MessageCounts> self._counts).confirmed += 1
                out.append(settle_frame(self.channel, ACK, seq, 0))
        return b"".join(out)
