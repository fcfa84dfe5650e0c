"""Run the passes of a front door over the sockets and rings that are plain, without Python.

The event loop of a front door would call a Python function for each socket that is readable, for
the end of the pass, and for each bell of a shard that rings. A `Watch` has one epoll descriptor for
the sockets of all clients that go the short way and for the bells of all lanes, and the event loop
watches this descriptor alone. What is rare stays with the event loop: timers, listeners, the
controller, ZeroMQ, TLS, connections that are not open yet, sockets whose kernel takes no more.

A pass takes in what the shards say first, then reads each socket once, and ends. What an Inlet or
an Outlet leaves goes Python's way at once, in its place among the rest. Behind a pass the watch may
look at rings and sockets again before the event loop sleeps (shardd/wire/spin.py).
"""

from cpython.list cimport PyList_GET_SIZE
from libc.errno cimport EEXIST, errno
from libc.stdint cimport uint64_t
from posix.time cimport timespec

from shardmq.broker.front_door.hot_state cimport LinkState, PassState
from shardmq.shardd.wire.polling cimport (
    EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, POLLIN, epoll_create1, epoll_ctl,
    epoll_event, epoll_wait, pollfd, ppoll,
)
from shardmq.shardd.wire.shared_memory cimport LaneState

from shardmq.shardd.wire.shared_memory import look_again

cdef extern from "<unistd.h>" nogil:
    ssize_t c_read "read"(int fd, void *data, size_t size)

cdef extern from "<string.h>" nogil:
    char *strerror(int error)

cdef enum:
    # Sockets and bells of one pass; the others are in the next one.
    EVENTS_MAX = 256
    BELLS_MAX = 128
    # Messages that are taken of one ring before other events get their turn.
    RECEIVE_BURST = 64
    # Looks in a row, each behind a pass, before the event loop gets its turn.
    LOOKS_MAX = 16
    # What a pass did.
    NOTHING = 0
    HEARD = 1
    READ = 2


# No look begins behind this many seconds of looks: timers, listeners and others wait meanwhile.
cdef double LOOKS_S = 0.001


cdef class Bell:
    """The bell of a lane, and who hears what is not plain."""

    cdef int fd
    cdef LinkState link
    cdef LaneState lane
    cdef object rung, rest


cdef class Watch:
    """The sockets and bells of one front door. `fd` is readable when one of them is.

    `loop_fd` is readable when the event loop has something to do, this watch included.
    """

    cdef readonly int fd
    cdef public int loop_fd
    cdef PassState loop
    cdef list places  # by descriptor: an Inlet, a Bell or None
    cdef list bells

    def __cinit__(self, PassState loop not None):
        self.fd = -1
        self.loop = loop
        self.places, self.bells = [], []
        self.fd = epoll_create1(EPOLL_CLOEXEC)
        if self.fd < 0:
            raise OSError(errno, strerror(errno).decode())
        self.loop_fd = self.fd

    def __dealloc__(self):
        if self.fd >= 0:
            c_close(self.fd)

    def read(self, int fd, Inlet inlet not None):
        """Read a socket by its inlet whenever it has something."""
        self.add(fd, inlet)

    def hear(self, int fd, LinkState link not None, LaneState lane not None, rung, rest):
        """Take in what a shard says when it rings.

        `rung` does all that a bell asks for, while the lane does not use its rings yet. `rest`
        takes so many messages that are not plain, and comes back for those that are left.
        """
        cdef Bell bell = Bell.__new__(Bell)
        bell.fd, bell.link, bell.lane = fd, link, lane
        bell.rung, bell.rest = rung, rest
        self.add(fd, bell)
        self.bells.append(bell)

    def leave(self, int fd):
        """Leave a socket or a bell alone. Called before its descriptor is closed."""
        cdef epoll_event event
        if fd < 0 or fd >= PyList_GET_SIZE(self.places) or self.places[fd] is None:
            return
        place = self.places[fd]
        self.places[fd] = None
        if type(place) is Bell:
            self.bells.remove(place)
        epoll_ctl(self.fd, EPOLL_CTL_DEL, fd, &event)

    cdef int add(self, int fd, place) except -1:
        cdef epoll_event event
        if fd < 0:
            raise ValueError("no descriptor")
        while PyList_GET_SIZE(self.places) <= fd:
            self.places.append(None)
        # A place without `leave` tells nothing: its descriptor may be closed, and the number be
        # another one's.
        event.events = EPOLLIN
        event.data.fd = fd
        if epoll_ctl(self.fd, EPOLL_CTL_ADD, fd, &event) < 0 and errno != EEXIST:
            raise OSError(errno, strerror(errno).decode())
        if type(self.places[fd]) is Bell:
            self.bells.remove(self.places[fd])
        self.places[fd] = place
        return 0

    def ready(self):
        """Run a pass over what has something now, and look again for a while where that may pay."""
        cdef PassState loop = self.loop
        cdef bint may_look = not loop.looks and loop.spin.is_on
        cdef int looks = 0, did
        cdef double until
        if not may_look:
            self.run_pass(False)
            return
        loop.looks = True  # or the ends of passes would schedule one
        try:
            did = self.run_pass(False)
            until = seconds() + LOOKS_S
            while did and looks < LOOKS_MAX and seconds() < until:
                did = self.look(did == READ)
                looks += 1
        finally:
            loop.looks = False

    cdef int look(self, bint behind) except -1:
        """Look at rings and sockets for a while; return what the pass did that followed.

        `behind`: clients were read in the pass before.
        """
        cdef PassState loop = self.loop
        cdef int did
        most_ns = loop.spin.most_ns(<long> (seconds() * 1e9), behind)
        if not most_ns:
            return NOTHING
        found, took_ns = look_again(
            [(<Bell> bell).lane.reader for bell in self.bells], self.loop_fd, most_ns
        )
        loop.spin.looked(took_ns, found != 0, behind)
        did = self.run_pass(True)
        return did if found else NOTHING

    cdef int run_pass(self, bint looked) except -1:
        """Run a pass and return what it did.

        After a look, no bell rings for what the rings have.
        """
        cdef epoll_event events[EVENTS_MAX]
        cdef PassState loop = self.loop
        cdef int count = epoll_wait(self.fd, events, EVENTS_MAX, 0), did = NOTHING, i
        if count <= 0 and not looked:
            return NOTHING
        loop.end_scheduled = True  # behind what is here
        try:
            if looked:
                for bell in self.bells[:]:
                    did |= self.take(<Bell> bell)
            for i in range(count):
                place = self.places[events[i].data.fd]
                if type(place) is Bell:
                    self.ring(<Bell> place)
                    did |= HEARD
            if loop.confirms_due:  # they come before what the reads have for the same clients
                loop.answer_publishers()
            for i in range(count):
                place = self.places[events[i].data.fd]
                if type(place) is Inlet:
                    self.read_one(<Inlet> place)
                    did = READ
        finally:
            loop.end_of_pass()
            if loop.beside is not None:
                loop.beside()
        return did

    cdef int read_one(self, Inlet inlet) except -1:
        cdef PassState loop = self.loop
        if not loop.in_pass:
            loop.begin()
        loop.end_scheduled = True
        try:
            inlet.read()
        except Exception as error:
            inlet.failed(error)
        return 0

    cdef int ring(self, Bell bell) except -1:
        """Take in what a shard that has rung says."""
        cdef uint64_t rings
        self.loop.end_scheduled = True
        if bell.link.lane is not bell.lane or not bell.lane.writes_ring or not bell.lane.reads_ring:
            bell.rung(bell.link, bell.lane)
        else:
            c_read(bell.fd, &rings, sizeof(rings))
            self.take(bell)
        return 0

    cdef int take(self, Bell bell) except -1:
        """Take in what is in the ring of a shard, and have the bell rung for more.

        Return whether there was some.
        """
        cdef LaneState lane = bell.lane
        cdef LinkState link = bell.link
        cdef bint left
        self.loop.end_scheduled = True
        link.outlet.taken = 0
        left = lane.reads_ring and lane.reader.offer(link.outlet, RECEIVE_BURST)
        if left or not lane.reader.sleep():
            bell.rest(link, lane, RECEIVE_BURST - link.outlet.taken)
            return HEARD
        return HEARD if link.outlet.taken else NOTHING

    def wait(self, double most):
        """Sleep for so many seconds, and take in meanwhile what shards ring about."""
        cdef pollfd polled[BELLS_MAX]
        cdef timespec left
        cdef double until = seconds() + most
        cdef int count, i
        while most > 0:
            count = min(<int> PyList_GET_SIZE(self.bells), BELLS_MAX)
            for i in range(count):
                polled[i].fd = (<Bell> self.bells[i]).fd
                polled[i].events = POLLIN
                polled[i].revents = 0
            left.tv_sec = <long> most
            left.tv_nsec = <long> ((most - <double> left.tv_sec) * 1e9)
            with nogil:
                i = ppoll(polled, count, &left, NULL)
            if i <= 0:
                return
            for bell in [self.bells[i] for i in range(count) if polled[i].revents]:
                if self.places[(<Bell> bell).fd] is bell:
                    self.ring(<Bell> bell)
            self.loop.end_of_pass()
            most = until - seconds()
