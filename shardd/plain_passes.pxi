"""Run the passes of a shard that are plain, one after the other, without Python.

In a plain pass nothing but bells of front doors rang, the short way (short_way.pyx) took in all
that lay in the rings, no sync has to begin, nothing is due, and the short way could end the pass.
Then the shard waits again, still in here. What is not plain goes back to the caller, who goes on
with the same pass where it stands (links.py, server.py). So each rule of a pass has one
implementation, and this file has the order of the steps alone.
"""

from libc.stdint cimport uint64_t
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, clockid_t, timespec

from shardmq.shardd.wire.polling cimport epoll_event, epoll_wait
from shardmq.shardd.wire.shared_memory cimport LaneState

cdef enum:
    # Descriptors that are reported at once. The others are reported by the next wait.
    EVENTS_MAX = 64
    # Passes in a row that a look at the rings may begin before the other descriptors are asked.
    C_UNPOLLED_MAX = 4
    # What ring.look_again returns when a ring has something.
    C_RING = 1

UNPOLLED_MAX, RING = C_UNPOLLED_MAX, C_RING


cdef inline uint64_t now_ms(clockid_t clock) noexcept nogil:
    cdef timespec now
    clock_gettime(clock, &now)
    return <uint64_t> now.tv_sec * 1000 + now.tv_nsec // 1000000


cdef class PlainPasses:
    """The plain passes of one shard.

    `way` is its short way and `descriptor` its epoll. `heard` has the lanes whose messages are
    taken in, by the descriptors of their bells, and `lanes` the lanes that messages go to, by
    endpoint. A pass takes in at most `most` messages of each lane. `send` sends a list of messages
    of which some do not go by such a lane.
    """

    cdef ShortWay way
    cdef int descriptor, most
    cdef dict heard, lanes
    cdef object send
    # How many messages the last pass took in, also if Python goes on with that pass.
    cdef public int taken
    cdef int unpolled  # passes in a row that a look at the rings has begun

    def __init__(
        self, ShortWay way not None, int descriptor, dict heard not None, dict lanes not None,
        int most, send
    ):
        self.way = way
        self.descriptor = descriptor
        self.heard, self.lanes = heard, lanes
        self.most = most
        self.send = send

    def run(self, int wait_ms, bint came, look):
        """Wait, and run passes while they are plain, for `wait_ms` at most.

        Returns the events of the pass that is not plain, as `select.epoll.poll` does, or None if
        that pass has taken in its messages and only its end is left. Behind a pass that took
        something in (`came` says so of the one before), `look` is called if it is not None: it
        looks at the rings for a while and returns RING if one has something.
        """
        cdef epoll_event events[EVENTS_MAX]
        cdef uint64_t now = now_ms(CLOCK_MONOTONIC), until = now + <uint64_t> wait_ms
        cdef int count, timeout_ms, before, i
        cdef bint speaks, is_left
        cdef LaneState lane
        cdef list outgoing
        while True:
            self.taken = count = 0
            if came and look is not None and self.unpolled < C_UNPOLLED_MAX and look() == C_RING:
                self.unpolled += 1
            else:
                self.unpolled = 0
                speaks = self.speaks()
                now = now_ms(CLOCK_MONOTONIC)
                timeout_ms = 0 if speaks or now >= until else <int> (until - now)
                with nogil:
                    count = epoll_wait(self.descriptor, events, EVENTS_MAX, timeout_ms)
                for i in range(count):
                    if events[i].data.fd not in self.heard:
                        return [(events[i].data.fd, events[i].events) for i in range(count)]
            if count < 0 or now_ms(CLOCK_MONOTONIC) >= until:  # a signal, or something is due
                return []
            self.way.now = now_ms(CLOCK_REALTIME)  # messages expire by this clock
            for each in self.heard.values():
                lane = <LaneState> each
                if not lane.reads_ring:
                    continue
                before = self.way.taken
                is_left = (
                    lane.reader.offer(self.way, self.most) and self.way.taken - before < self.most
                )
                self.taken += self.way.taken - before
                if is_left:
                    return []
            if self.way.syncs.wanted:
                return None
            outgoing = self.way.turn_end(self.way.now)
            if outgoing is None:
                return None
            if outgoing:
                self.hand_out(outgoing)
            if self.way.dirty:
                return []
            came = self.taken > 0

    cdef bint speaks(self) except -1:
        """Return whether a ring has something; if none has, the bells ring when one has."""
        cdef LaneState lane
        for each in self.heard.values():
            lane = <LaneState> each
            if lane.reads_ring and not lane.reader.sleep():
                return True
        return False

    cdef int hand_out(self, list outgoing) except -1:
        """Send messages as `Links.send` does."""
        cdef LaneState lane, to_ring = None
        cdef Py_ssize_t i
        for i in range(len(outgoing)):
            endpoint, message = <tuple> outgoing[i]
            found = self.lanes.get(endpoint)
            if not isinstance(found, LaneState):
                if to_ring is not None:
                    to_ring.writer.ring()
                self.send(outgoing[i:])
                return 0
            lane = <LaneState> found
            if to_ring is not None and lane is not to_ring:
                to_ring.writer.ring()
            to_ring = lane
            # A lane whose ring has no room, or is not in use, knows how to go on.
            if (
                not lane.writes_ring
                or not (
                    lane.writer.put(<bytes> message)
                    if type(message) is bytes
                    else lane.writer.put_parts(message)
                )
            ):
                lane.put(message)
        if to_ring is not None:
            to_ring.writer.ring()
        return 0
