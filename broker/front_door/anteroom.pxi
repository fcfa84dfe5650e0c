"""The anteroom of a front door: connections that have done nothing yet but log in.

Some clients connect for each thing they do, and some only to see whether the broker is there. A
connection costs Python far more than the few answers of its handshake. So a connection begins here,
as a `Newcomer`: compiled code accepts it, answers the handshake, channels that are opened and
closed, and the end. Nobody else in the broker knows of a newcomer.

**What is plain** is a handshake like one that has succeeded before. `lessons` has, by a keyed
digest of start-ok and the client's address, the logins that Python let in, with the vhosts that it
opened for them without asking for a limit. Who changes what a login depends on meets all newcomers
first and clears the lessons: users, rights, vhosts, parameters, settings, and a login that was
refused.

**What is not plain** makes the newcomer a connection. If the newcomer is open, the connection goes
on from what the newcomer has agreed on. If it is not, Python does again all that it has said, and
leaves out the answers that were sent (`Connections._meet`). Newcomers that stay become connections,
too: `settle` sees to it.

`SHARDMQ_FASTPATH=0` in the environment switches the anteroom off.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, ECONNABORTED, EINTR, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from shardmq.broker.amqp.octets cimport get16, get32
from shardmq.shardd.wire.polling cimport (
    EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, epoll_create1, epoll_ctl, epoll_event,
    epoll_wait,
)

cdef extern from "<sys/socket.h>" nogil:
    ctypedef unsigned int socklen_t
    struct sockaddr:
        pass
    struct sockaddr_storage:
        pass
    ssize_t send(int fd, const void *data, size_t size, int flags)
    int accept4(int fd, sockaddr *address, socklen_t *size, int flags)
    int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
    int MSG_NOSIGNAL
    int SOCK_NONBLOCK
    int SOCK_CLOEXEC

cdef extern from "<netdb.h>" nogil:
    int getnameinfo(
        const sockaddr *address, socklen_t size, char *host, socklen_t host_bytes, char *service,
        socklen_t service_bytes, int flags
    )
    int NI_NUMERICHOST
    int NI_NUMERICSERV

cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP

cdef extern from "<netinet/tcp.h>" nogil:
    int TCP_NODELAY

cdef enum:
    # States, in their order.
    HEADER, START_OK, TUNE_OK, OPEN, OPENED, CLOSING
    NEWS_MAX = 64
    ACCEPT_BURST = 64  # connections taken from a listening socket before others are served again
    READ_BYTES = 4096
    SAID_BYTES_MAX = 4096  # what a newcomer may say; one that says more becomes a connection
    ANSWER_BYTES_MAX = 8192
    CHANNELS_MAX = 63  # the highest number of a channel
    FRAME_HEAD = 7
    FRAME_OVERHEAD = 8
    FRAME_BYTES_MIN = 4096  # of frame_max
    START_OK_IDS = 10 << 16 | 11
    TUNE_OK_IDS = 10 << 16 | 31
    OPEN_IDS = 10 << 16 | 40
    CLOSE_IDS = 10 << 16 | 50
    CHANNEL_OPEN_IDS = 20 << 16 | 10
    CHANNEL_CLOSE_IDS = 20 << 16 | 40
    TUNE_OK_BYTES = 12
    OPEN_BYTES_MIN = 7
    CHANNEL_OPEN_BYTES_MIN = 5
    CLOSE_BYTES_MIN = 11
    HOST_BYTES = 128
    SERVICE_BYTES = 16

cdef double C_OPEN_S = 0.002
cdef double C_HANDSHAKE_S = 0.25
cdef double C_LINGER_S = 1.0
# How long a newcomer whose connection is open may stay, and how long one may take for its
# handshake, before it becomes a connection. A client whose close was answered has some time to
# close its side.
OPEN_S, HANDSHAKE_S, LINGER_S = C_OPEN_S, C_HANDSHAKE_S, C_LINGER_S
# settle() is due again after so long while there are newcomers that have opened, or only others.
SOON_S, LATER_S = 0.002, 0.05


cdef bint is_ascii(const uint8_t *text, size_t size) noexcept nogil:
    cdef size_t at
    for at in range(size):
        if text[at] & 0x80:
            return False
    return True


cdef class Newcomer:
    cdef int fd
    cdef int state
    cdef double since  # when the state of its kind began: handshake, open, closing
    cdef uint64_t channels  # one bit for each that is open
    cdef uint32_t channels_opened
    cdef uint32_t channels_max
    cdef bytes host
    cdef uint32_t port
    cdef bytes key  # of its login; None before start-ok
    cdef object lesson  # its login
    cdef str vhost
    cdef uint32_t frame_bytes_max, heartbeat_s
    cdef uint64_t sent
    cdef uint32_t reads, writes
    cdef size_t said
    cdef uint8_t heard[SAID_BYTES_MAX]


cdef class Anteroom:
    """The newcomers of one front door."""

    cdef readonly int epoll
    cdef dict newcomers  # by file descriptor
    cdef set listeners  # file descriptors
    cdef readonly dict lessons
    cdef object digest, start, meet, ended
    cdef public object failed
    cdef bytes tune, open_ok, close_ok, channel_open_ok, channel_close_ok
    cdef uint32_t frame_bytes_max, channels_max
    cdef uint8_t buffer[READ_BYTES]
    cdef uint8_t answer[ANSWER_BYTES_MAX]
    cdef size_t answered

    def __init__(
        self, lessons, *, digest, start, meet, ended, open_ok, close_ok, channel_open_ok,
        channel_close_ok
    ):
        """Begin with no newcomers and no listeners.

        `lessons`: the Lesson (session.py) of each key. `digest(data)` returns a key that tells
        nothing of its data. `start()` returns the frame of connection.start. `meet(fd, host, port,
        said, sent, reads, writes, rest, *facts)` makes a connection of a newcomer; the facts are
        the fields of Newcomer. `ended(logged_in, was_open, channels)` hears that one has gone that
        opened so many channels. The others are frames, those of channels without the first three
        bytes. Set `failed(listener, errno)`: it hears that accepting fails, and that the listener
        is left.
        """
        self.lessons = lessons
        self.digest = digest
        self.start = start
        self.meet = meet
        self.ended = ended
        self.failed = None
        self.open_ok, self.close_ok = open_ok, close_ok
        self.channel_open_ok, self.channel_close_ok = channel_open_ok, channel_close_ok
        self.newcomers = {}
        self.listeners = set()
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
            raise OSError(errno, "epoll_create1")

    def __dealloc__(self):
        if self.epoll > 0:
            c_close(self.epoll)

    def offer(self, bytes tune not None, uint32_t channels_max, uint32_t frame_bytes_max):
        """Offer these limits from now on; `tune` is the frame that says them."""
        self.tune, self.channels_max, self.frame_bytes_max = tune, channels_max, frame_bytes_max

    def __len__(self):
        return len(self.newcomers)

    # -- listening ---------------------------------------------------------------------------------

    def listen(self, int fd):
        """Accept connections of a listening socket, which does not block."""
        self.watch(fd)
        self.listeners.add(fd)

    def leave(self, int fd):
        """Accept no connections of a listening socket any more."""
        if fd in self.listeners:
            self.listeners.discard(fd)
            self.unwatch(fd)

    def close(self):
        """Leave all listening sockets, and meet all newcomers."""
        for fd in list(self.listeners):
            self.leave(fd)
        self.meet_all()

    cdef int watch(self, int fd) except -1:
        cdef epoll_event event
        memset(&event, 0, sizeof(event))
        event.events = EPOLLIN
        event.data.fd = fd
        if epoll_ctl(self.epoll, EPOLL_CTL_ADD, fd, &event) < 0:
            raise OSError(errno, "epoll_ctl")
        return 0

    cdef void unwatch(self, int fd) noexcept:
        cdef epoll_event event
        memset(&event, 0, sizeof(event))
        epoll_ctl(self.epoll, EPOLL_CTL_DEL, fd, &event)

    # -- events ------------------------------------------------------------------------------------

    def ready(self):
        """Accept who comes, and answer what newcomers say. The caller has seen `epoll` readable."""
        cdef epoll_event events[NEWS_MAX]
        cdef int count, at, fd, left
        cdef Newcomer who
        count = epoll_wait(self.epoll, events, NEWS_MAX, 0)
        for at in range(count):
            fd = events[at].data.fd
            who = self.newcomers.get(fd)
            if who is not None:
                self.hear(who)
            else:
                left = ACCEPT_BURST
                while left and fd in self.listeners and self.accept(fd):
                    left -= 1

    cdef int accept(self, int listener) except -1:
        """Accept a connection; return 0 if there was none."""
        cdef sockaddr_storage address
        cdef socklen_t size = sizeof(address)
        cdef char host[HOST_BYTES]
        cdef char service[SERVICE_BYTES]
        cdef int fd, one = 1
        cdef Newcomer who
        fd = accept4(listener, <sockaddr *> &address, &size, SOCK_NONBLOCK | SOCK_CLOEXEC)
        if fd < 0:
            if errno not in (EAGAIN, EINTR, ECONNABORTED):
                fd = errno
                self.leave(listener)
                self.failed(listener, fd)
            return 0
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one))
        if getnameinfo(<sockaddr *> &address, size, host, HOST_BYTES, service, SERVICE_BYTES,
                       NI_NUMERICHOST | NI_NUMERICSERV):
            c_close(fd)
            return 0
        try:
            self.watch(fd)
        except OSError:
            c_close(fd)
            raise
        who = Newcomer.__new__(Newcomer)
        who.fd = fd
        who.state = HEADER
        who.since = seconds()
        who.host = host
        who.port = int(service)
        self.newcomers[fd] = who
        return 1

    cdef int hear(self, Newcomer who) except -1:
        """Read once, and answer what is plain of it."""
        cdef ssize_t count
        cdef size_t at = 0, size
        cdef bint plain
        cdef int state
        cdef double since
        cdef uint64_t channels
        cdef uint32_t channels_opened
        with nogil:
            count = recv(who.fd, self.buffer, READ_BYTES, MSG_DONTWAIT)
        if count < 0 and errno in (EAGAIN, EINTR):
            return 0
        if count <= 0:
            self.drop(who)
            return 0
        if who.state == CLOSING:
            return 0
        self.answered = 0
        state, since = who.state, who.since
        channels, channels_opened = who.channels, who.channels_opened
        plain = who.said + count <= SAID_BYTES_MAX
        while plain and at < <size_t> count:
            size = self.take(who, self.buffer + at, count - at)
            plain = size > 0
            at += size
        if not plain:  # all of this read is done by Python, as if it had not been looked at here
            who.state, who.since = state, since
            who.channels, who.channels_opened = channels, channels_opened
            self.give(who, PyBytes_FromStringAndSize(<char *> self.buffer, count))
            return 0
        memcpy(who.heard + who.said, self.buffer, at)
        who.said += at
        who.reads += 1
        if who.state == CLOSING:
            self.count(who)
        if not self.send_answer(who):
            self.drop(who)
        return 0

    cdef bint send_answer(self, Newcomer who) except -1:
        """Send what is answered.

        Return False if the client is gone, or the kernel has no room for so little.
        """
        cdef ssize_t sent = 0
        if self.answered:
            with nogil:
                sent = send(who.fd, self.answer, self.answered, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent > 0:
                who.sent += sent
                who.writes += 1
        return sent == <ssize_t> self.answered

    cdef size_t take(self, Newcomer who, const uint8_t *data, size_t size) except? 0:
        """Answer what is plain at the beginning of these bytes.

        Return its length, 0 if it is not plain.
        """
        cdef size_t frame_bytes, payload_bytes
        cdef uint32_t channel, ids
        if self.answered > ANSWER_BYTES_MAX - 64:
            return 0
        if who.state == HEADER:
            if size < 8 or memcmp(data, b"AMQP\0\0\x09\x01", 8):
                return 0
            if not self.say(<bytes> self.start()):
                return 0
            who.state = START_OK
            return 8
        if size < FRAME_OVERHEAD + 4 or data[0] != METHOD_FRAME:
            return 0
        payload_bytes = get32(data + 3)
        frame_bytes = payload_bytes + FRAME_OVERHEAD
        if payload_bytes < 4 or frame_bytes > size or data[frame_bytes - 1] != FRAME_END:
            return 0
        channel, ids = get16(data + 1), get32(data + FRAME_HEAD)
        data += FRAME_HEAD
        if channel:
            if who.state != OPENED or not self.on_channel(who, channel, ids, data, payload_bytes):
                return 0
        elif who.state == START_OK:
            if ids != START_OK_IDS or not self.log_in(who, data, payload_bytes):
                return 0
        elif who.state == TUNE_OK:
            if ids != TUNE_OK_IDS or not self.agree(who, data, payload_bytes):
                return 0
        elif who.state == OPEN:
            if ids != OPEN_IDS or not self.open(who, data, payload_bytes):
                return 0
        elif who.state == OPENED:
            if ids != CLOSE_IDS or not is_plain_close(data, payload_bytes):
                return 0
            self.say(self.close_ok)
            who.state = CLOSING
            who.since = seconds()
            return size  # what comes behind a close is discarded
        else:
            return 0
        return frame_bytes

    cdef bint log_in(self, Newcomer who, const uint8_t *data, size_t size) except -1:
        who.key = self.digest(
            PyBytes_FromStringAndSize(<const char *> data, size) + b"\0" + who.host
        )
        who.lesson = self.lessons.get(who.key)
        if who.lesson is None:
            return False
        self.say(self.tune)
        who.state = TUNE_OK
        return True

    cdef bint agree(self, Newcomer who, const uint8_t *data, size_t size) except -1:
        cdef uint32_t channels_max, frame_bytes_max
        if size != TUNE_OK_BYTES:
            return False
        channels_max, frame_bytes_max = get16(data + 4), get32(data + 6)
        if not (
            0 < channels_max <= self.channels_max
            and FRAME_BYTES_MIN <= frame_bytes_max <= self.frame_bytes_max
        ):
            return False
        who.channels_max, who.frame_bytes_max = channels_max, frame_bytes_max
        who.heartbeat_s = get16(data + 10)
        who.state = OPEN
        return True

    cdef bint open(self, Newcomer who, const uint8_t *data, size_t size) except -1:
        cdef size_t end
        cdef bytes vhost
        if size < OPEN_BYTES_MIN:
            return False
        end = 5 + data[4]
        if end >= size or size != end + 1 + data[end] + 1 or not is_ascii(data + 5, size - 6):
            return False
        vhost = PyBytes_FromStringAndSize(<const char *> data + 5, data[4])
        if vhost not in <set> who.lesson.vhosts:
            return False
        who.vhost = vhost.decode()
        self.say(self.open_ok)
        who.state = OPENED
        who.since = seconds()
        return True

    cdef bint on_channel(
        self, Newcomer who, uint32_t channel, uint32_t ids, const uint8_t *data, size_t size
    ) except -1:
        """Answer channel.open and channel.close of channels that nobody uses.

        The answers are those of amqp/connection.py.
        """
        cdef uint64_t bit
        cdef bytes answer
        if channel > CHANNELS_MAX or channel > who.channels_max:
            return False
        bit = (<uint64_t> 1) << channel
        if ids == CHANNEL_OPEN_IDS:
            if (
                who.channels & bit
                or size < CHANNEL_OPEN_BYTES_MIN
                or data[4] != size - CHANNEL_OPEN_BYTES_MIN
                or not is_ascii(data + 5, data[4])
            ):
                return False
            who.channels_opened += 1
            answer = self.channel_open_ok
        elif ids == CHANNEL_CLOSE_IDS:
            if not who.channels & bit or not is_plain_close(data, size):
                return False
            answer = self.channel_close_ok
        else:
            return False
        who.channels ^= bit
        self.answer[self.answered] = METHOD_FRAME
        self.answer[self.answered + 1] = channel >> 8
        self.answer[self.answered + 2] = channel & 0xFF
        self.answered += 3
        self.say(answer)
        return True

    cdef bint say(self, bytes frame) except -1:
        """Add a frame to the answer, if there is room."""
        cdef size_t size = PyBytes_GET_SIZE(frame)
        if self.answered + size > ANSWER_BYTES_MAX:
            return False
        memcpy(self.answer + self.answered, PyBytes_AS_STRING(frame), size)
        self.answered += size
        return True

    # -- the end of a newcomer ---------------------------------------------------------------------

    cdef int count(self, Newcomer who) except -1:
        self.ended(who.state >= TUNE_OK, who.state >= OPENED, who.channels_opened)
        return 0

    cdef int drop(self, Newcomer who) except -1:
        """Close the socket of a newcomer that has gone."""
        del self.newcomers[who.fd]
        c_close(who.fd)
        if who.state != CLOSING:
            self.count(who)
        return 0

    cdef int give(self, Newcomer who, bytes rest) except -1:
        """Make a connection of a newcomer, of whose bytes `rest` is not done."""
        del self.newcomers[who.fd]
        self.unwatch(who.fd)
        facts = (
            (
                0.0, who.key, who.lesson, who.vhost, who.channels_max, who.frame_bytes_max,
                who.heartbeat_s, who.channels, who.channels_opened
            )
            if who.state == OPENED
            else (seconds() - who.since, who.key, None, "", 0, 0, 0, 0, 0, who.state > START_OK)
        )
        self.meet(
            who.fd, who.host.decode(), who.port,
            PyBytes_FromStringAndSize(<char *> who.heard, who.said), who.sent, who.reads,
            who.writes, rest, *facts
        )
        return 0

    def meet_all(self):
        """Make connections of all newcomers that have not said that they go."""
        cdef Newcomer who
        for who in list(self.newcomers.values()):
            if who.state != CLOSING and who.fd in self.newcomers:
                self.give(who, b"")

    def settle(self):
        """Make connections of newcomers that stay, and close sockets whose clients do not.

        Return after how many seconds that is due again: 0 if there are no newcomers.
        """
        cdef Newcomer who
        cdef double now = seconds(), age
        cdef bint soon = False
        for who in list(self.newcomers.values()):
            if who.fd not in self.newcomers:
                continue
            age = now - who.since
            if who.state == CLOSING:
                if age >= C_LINGER_S:
                    self.drop(who)
            elif age >= (C_OPEN_S if who.state == OPENED else C_HANDSHAKE_S):
                self.give(who, b"")
            elif who.state == OPENED:
                soon = True
        return 0 if not self.newcomers else SOON_S if soon else LATER_S


cdef bint is_plain_close(const uint8_t *data, size_t size) noexcept nogil:
    """Return whether this is a whole connection.close or channel.close with plain letters."""
    return (
        size >= CLOSE_BYTES_MIN
        and data[6] == size - CLOSE_BYTES_MIN
        and is_ascii(data + 7, data[6])
    )
