# cython: language_level=3
"""The facts about channels, consumers, limits, links and counters that the short way needs.

Each class here is the base of a Python class that has all else of the same thing: Counts, Channel,
Limit, ConsumingChannel, Consumer and ShardLink. A fact is in one of the two classes, never in both.
Python reads and sets the attributes like any others; the short way (short_way.pyx) reads and sets
them without Python.
"""

from shardmq.broker.amqp.frames cimport Sizes


cdef class MessageCounts:
    """Counters of messages since the start."""

    def __cinit__(self):
        self.sizes = Sizes()


cdef class PublishingState:
    """A channel as publishing sees it."""


cdef class LimitState:
    """A limit of unacknowledged deliveries: `most` of them, 0 is any number, and how many there are."""


cdef class ConsumingState:
    """The deliveries of a channel: the next tag, and what is not acknowledged."""


cdef class ConsumerState:
    """What a delivery needs of its consumer."""


cdef class LinkState:
    """What is gathered for a shard, and what it has not taken in.

    `epoch` counts the processes of the shard, 0 before the first. `in_flight` are the bytes of
    publishes that the shard has not taken in. `settles` holds the settles to tell, `packing` who
    waits for the batch that is being packed. `credits` are the bytes of deliveries written, by
    connection; with `credit_due` the shard is to be told of them.
    """
