# cython: language_level=3, boundscheck=False, wraparound=False
"""Decide what to tell a shard of settled deliveries, and whether that can wait.

Nobody waits for the answer to an ack, and a client that holds enough deliveries does not wait for
the credit that the ack frees. Told one by one, each ack would cost the shard a pass and make the
next deliveries a batch of their own. So the acks of a consumer wait for each other: until they are
half of its prefetch, or ACKS_TOGETHER_MAX, or something else goes to that shard, and for
ACKS_WAIT_S at most. Rejects and requeues are told at once.

The acks of a group consumer free credit at the front door, which gives it to any shard
(credit.py). So the shard that is told of these acks has nothing to wait for, and they wait until
something else goes there, and for ACKS_WAIT_S times NO_HURRY_WAITS at most.

This file decides only; the clock is the caller's (links/shard_links.py).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shardmq.shardd.wire.messages import ACK, ALLOT

# At most this many acks of a consumer wait for each other. A batch of them costs little more than
# its messages.
ACKS_TOGETHER_MAX = 256
# Said of the acks of a group consumer, in place of how many wait for each other.
NO_HURRY = 1 << 62
# At most this many ranges of all consumers wait at one shard.
RANGES_MAX = 4096
ACKS_WAIT_S = 0.002
NO_HURRY_WAITS = 5

cdef enum:
    C_TOGETHER_MAX = 256
    C_RANGES_MAX = 4096
    C_ACK = 0

cdef int64_t C_NO_HURRY = NO_HURRY
assert (ACKS_TOGETHER_MAX, RANGES_MAX, ACK) == (C_TOGETHER_MAX, C_RANGES_MAX, C_ACK)


cpdef int64_t acks_together(int64_t prefetch, bint counts_keys):
    """Return how many acks of a consumer may wait for each other.

    A `prefetch` of 0 is no limit. With `counts_keys`, other consumers wait for the keys it holds.
    """
    if counts_keys:
        return 1
    return min(<int64_t> C_TOGETHER_MAX, max(<int64_t> 1, prefetch // 2)) if prefetch else C_TOGETHER_MAX


cdef class Due:
    """The shards (bit mask) that are to be told something at the end of this pass.

    `acks_wait`: some acks wait for each other, and a timer runs.
    """


cdef class Settles:
    """The settles to tell one shard, in the order in which they came.

    `ranges` are (consumer number, kind, first and last delivery number). With the kind ALLOT these
    are the number of an allotment, what it is allowed, and what becomes of credit that is not used.
    Neighbouring acks of a consumer are one range. When `due` is set they must not wait.
    """

    def __init__(self, shard=0, Due due=None):
        self._shard = 1 << shard
        self._due_all = Due() if due is None else due
        self.ranges = []
        self._last_range = {}
        self._acks = {}
        self._allots = {}

    def __bool__(self):
        return bool(self.ranges or self._allots)

    cpdef fall_due(self):
        self.due = True
        self._due_all.shards |= self._shard

    def add(self, consumer, kind, first, last):
        self.ranges.append((consumer, kind, first, last))
        self.fall_due()

    cpdef ack(self, consumer, uint64_t first, uint64_t last, int64_t together):
        """Add acks, which wait until there are `together` of this consumer."""
        cdef list ranges = self.ranges
        cdef tuple before
        cdef int64_t acks
        at = self._last_range.get(consumer)
        before = None if at is None else <tuple> ranges[at]
        if before is not None and <uint64_t> before[3] + 1 == first:
            ranges[at] = (consumer, ACK, before[2], last)
        else:
            self._last_range[consumer] = len(ranges)
            ranges.append((consumer, ACK, first, last))
        if together == C_NO_HURRY:
            if len(ranges) >= C_RANGES_MAX:
                self.fall_due()
            return
        self._hurries = True
        told = self._acks.get(consumer)
        acks = <int64_t> (last + 1 - first)
        if told is not None:
            acks += told
        self._acks[consumer] = acks
        if acks >= together or len(ranges) >= C_RANGES_MAX:
            self.fall_due()

    def allot(self, allotment, allowed, mode):
        """Add what an allotment is allowed; the last word counts."""
        self._allots[allotment] = allowed, mode
        self.fall_due()

    cpdef list take(self):
        """Take all there is to tell: what is allowed comes behind the acks."""
        cdef list ranges = self.ranges
        self.ranges = []
        self._last_range, self._acks = {}, {}
        if self._allots:
            ranges += [(number, ALLOT, *told) for number, told in self._allots.items()]
            self._allots = {}
        self._hurries = self.due = False
        self._waited = 0
        return ranges

    def may_wait_on(self):
        """Return, after each ACKS_WAIT_S, whether there are only acks that free nothing there."""
        self._waited += 1
        return not (self._hurries or self.due) and self._waited < NO_HURRY_WAITS
