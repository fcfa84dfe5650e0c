# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The short way of a front door: what is plain is done here, without Python.

Most bytes of most clients are publishes whose route is known, acks and heartbeats, and most
messages of the shards are deliveries to consumers without extras. A batch of one of these costs the
interpreter far more than its work. So straight compiled code does this work from the bytes of a
read to the batches of the shards, and from a message of a shard to frames.

**What goes the short way.** `Inlet.read` reads the socket of a client that is open, if the read is
likely to be small, and `Inlet.take` is given the bytes of other reads. Both pack publishes if their
channel is open and not transactional, and the packer knows where they go. They settle acks (single
and multiple) of deliveries that are outstanding, unless the channel has a limit. They drop
heartbeats, and answer channels that nobody uses and binds that need not wait. `Outlet` is given a
DELIVER of a shard. It makes the frames for a consumer that has been announced and needs no offsets,
no counts of earlier deliveries, and whose vhost is not traced. Of a consumer of a virtual queue the
messages and acks go the short way, and so does the credit that acks free, if the shard that used
the last of it has the turn. Python divides all other credit. Publishes and deliveries of sampled
traces (publish/spans.py) are Python's. From the ring of a shard an Outlet also takes confirms of
whole batches and room for publishes.

**What is not plain** is left alone. An inlet stops before the first frame that is not plain, at
once, and has changed nothing for this frame; the caller gives the bytes from there on to the AMQP
library and Python does all that the library makes of them, errors included. `Outlet` hands a
section that is not plain to Python as it is. So every rule is written once, in Python, and the
short way only says when nothing but the usual can happen.

**What Python sees.** There are no tables beside those of Python: channels, consumers, limits, links
and counters, what is unacknowledged, unconfirmed or to be told to a shard are kept by compiled base
classes (hot_state.pyx) of the Python classes.

**To add a feature** that concerns publishes, acks or deliveries: write it in Python, and see that
the short way leaves what it concerns alone. A publish is left alone if the packer stops at it, so a
route of the kind CALLER is enough. An ack is judged by `Inlet.settle`, a delivery by
`is_plain_delivery`. tests/connections/test_short_way.py plays random histories both ways; have it
play the feature, too.

watch.pxi has the passes that read sockets and rings by inlets and outlets, anteroom.pxi what is
plain of connections that begin and end.

`SHARDMQ_FASTPATH=0` in the environment switches the short way off (shardd/wire/short_ways.py).
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.set cimport PySet_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from shardmq.broker.amqp.contents cimport deliveries_of
from shardmq.broker.amqp.frames cimport (
    STOPPED_FULL, STOPPED_SETTLE, Incoming, find_binds, find_publishes, has_context,
)
from shardmq.broker.amqp.octets cimport Row, get16, get32, get64
from shardmq.broker.front_door.hot_state cimport (
    AllotmentState, BindRun, ConfirmsState, ConsumerState, ConsumingState, Due, LimitState,
    LinkState, MessageCounts, PassState, PublishingState, SettlesState, SocketState, Span,
    SpansState, UnackedState, Waiting, acks_together,
)
from shardmq.broker.front_door.hot_state import NO_HURRY
from shardmq.shardd.wire.codec cimport PACKED_ALL, PACKED_CHANNEL, Packer, Routes
from shardmq.shardd.wire.publishes cimport Row as PackedRow
from shardmq.shardd.wire.shared_memory cimport Taker

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void *data, size_t size, int flags)
    int MSG_DONTWAIT

cdef extern from "<unistd.h>" nogil:
    int c_close "close"(int fd)

cdef extern from *:
    int __builtin_popcountll(unsigned long long) noexcept nogil
    int __builtin_ctzll(unsigned long long) noexcept nogil

cdef enum:
    METHOD_FRAME = 1
    HEARTBEAT_FRAME = 8
    FRAME_END = 0xCE
    HEARTBEAT_BYTES = 8
    ACK_BYTES = 21
    CHANNEL_OPEN = 1  # a state (broker/amqp/frames.pyx)
    BASIC_ACK = 60 << 16 | 80
    QUEUE_BIND = 50 << 16 | 20
    BIND_BYTES_MIN = 22  # of the frame if its three names are empty
    BIND_QUEUE = 13  # where its first name is: behind the head of the frame, method and ticket
    BIND_OK_BYTES = 12
    # Bytes of a publish before its line: the head of the frame, class, method and ticket.
    BEFORE_LINE = 13
    # A read of at least this much is Python's: it is worth a pass of its own.
    SMALL_READ_BYTES = 64 << 10
    # Larger bodies are Python's: they may stay where they are.
    PLAIN_BODY_BYTES_MAX = (16 << 10) - 1
    # Clients that wait for a shard are read again when no more is under way to it.
    ROOM_BYTES = 1 << 19
    # Messages of a shard (shardd/wire/messages.py, envelope.py).
    HEADER_BYTES = 16
    DELIVER = 2
    CONFIRMED = 4
    CREDIT = 5
    CONFIRMED_BYTES = 24
    CREDIT_ENTRY = 8
    # A section of DELIVER (shardd/wire/codec.pyx); all of its flags but this one are Python's.
    DELIVER_HEADER = 24
    SECTION = 32
    REDELIVERED = 1
    # What LimitState.go_on has done (hot_state.pyx).
    GRANTED = 1
    LEFT = 2


cdef int64_t C_NO_HURRY = NO_HURRY
# The frame of queue.bind-ok; its second and third byte are the number of the channel.
cdef const char *BIND_OK = b"\1\0\0\0\0\0\4\0\x32\0\x15\xce"


cdef inline uint64_t now_ms() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <uint64_t> now.tv_sec * 1000 + now.tv_nsec // 1000000


cdef inline double seconds() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <double> now.tv_sec + <double> now.tv_nsec * 1e-9


cdef inline bytes beginning_of_bind(const uint8_t *p):
    """Return the frame of a bind, which is whole, up to its routing key."""
    cdef size_t at = BIND_QUEUE + 1 + p[BIND_QUEUE]
    return PyBytes_FromStringAndSize(<const char *> p, at + 1 + p[at])


cdef class ShortWay:
    """The short way of one front door."""

    def __init__(
        self, links, counts, alarms, consuming, loop, *, open_state, reply_queues,
        set_timestamp=False, SpansState spans=None
    ):
        """Begin with the parts of the front door.

        `open_state` is the state of a connection that is open, `reply_queues` what the names of
        direct reply-to queues begin with. `set_timestamp`: each publish is stamped with the time at
        which it came, which Python does. `spans`: what takes part in a trace is Python's.
        """
        self.packer = links.packer
        self.counts = counts
        self.due = links.due
        self.links = links
        self.link_of = links.links
        self.freed = links.freed
        self.alarms = alarms
        self.deliveries = consuming.deliveries
        self.share_rest, links.share_freed = links.share_freed, self.share_freed
        self.groups = consuming.groups
        self.consumers = consuming.consumers
        self.loop = loop
        self.open_state = open_state
        self.reply_queues = reply_queues
        self.stamps = set_timestamp
        self.spans = spans

    def outlet(self, link, read, deliver, failed):
        """Return what handles a DELIVER of this link, and takes plain messages in from its ring.

        `read` returns the sections of a DELIVER, of which `deliver` is given those that are not
        plain. `failed` is given an error of a message in the ring that nobody foresaw.
        """
        cdef Outlet made = Outlet.__new__(Outlet)
        made.way = self
        made.link = link
        made.read = read
        made.deliver = deliver
        made.failed = failed
        return made

    cdef bint is_in_limit(self, ConsumerState consumer):
        """Return whether the limit of the channel counts what a consumer holds.

        Consumer.is_in_limit decides the same for Python.
        """
        cdef str name
        if consumer.group is not None:
            return True
        if consumer.reading is not None:
            return False
        name = consumer.queue_name
        return not name or name[0] != u"a" or not name.startswith(self.reply_queues)

    cdef int use(self, AllotmentState allotment, int64_t count, bint no_ack) except -1:
        """Note deliveries of an allotment, as Crediting.delivered does."""
        cdef LimitState home
        if (allotment.use(count) or no_ack) and allotment.limits:
            home = <LimitState> allotment.limits[len(allotment.limits) - 1]
            if home.most:
                self.freed[home] = None
        return 0

    def share_freed(self):
        """Give freed credit to whoever needs it, as Crediting does.

        What is not plain, and all behind it, is left to Python.
        """
        cdef LimitState limit
        cdef AllotmentState turn
        cdef SettlesState settles
        cdef int done
        for each in list(self.freed):
            limit = <LimitState> each
            done = limit.go_on(self.loop.now)
            if done == LEFT:
                self.share_rest()
                return
            if done == GRANTED:
                turn = limit.turn
                settles = (<LinkState> self.link_of[turn.shard]).settles
                settles.allots[turn.number] = (turn.allowed, turn.mode)
                settles.fall_due()
            del self.freed[limit]

    def inlet(self, socket, channels, waiting, cache, bind, failed):
        """Return the short way of a connection that is open.

        `socket` is its ClientSocket, `channels` its channels by number, `waiting` those with work
        that is not done, `cache` the RouteCache of its user. `bind` puts binds of a channel in
        force, and returns the run that they begin, None if they have to wait for the controller
        first. If the run has `waits`, that answers them. `failed` ends the connection for an error
        of ours, which it is given.
        """
        cdef Inlet made = Inlet.__new__(Inlet)
        made.way = self
        made.socket = socket
        made.connection = socket.id
        made.amqp = socket.amqp
        made.channels = channels
        made.waiting = waiting
        made.routes = cache.routes
        made.vhost = cache.vhost
        made.binds = bind
        made.failed = failed
        return made


cdef class Inlet:
    """Take in the plain part of what one client says.

    After a call of `take`, `things` is how many publishes and acks it took and `fed` has a bit for
    each shard that got a publish. `published`: the client has published something.

    An error that nobody foresaw ends the connection, as one in Python's way does. The bytes that
    were not taken then go Python's way, which looks in them for the answer of the client to the
    end.
    """

    def readable(self):
        """Read the socket once, and have what was read handled, as ClientSocket.readable() does."""
        self.socket.loop.begin_pass()
        self.read()

    cdef int read(self) except -1:
        """Do the same in a pass that has begun."""
        cdef SocketState socket = self.socket
        cdef PassState loop = socket.loop
        cdef Py_buffer view
        cdef ssize_t count
        cdef int error = 0
        if not socket.is_plain or socket.more_comes or self.amqp.part is not None:
            socket.readable()
            return 0
        if socket.lost or socket.paused:  # since the loop has seen it readable
            return 0
        PyObject_GetBuffer(loop.read_buffer, &view, PyBUF_WRITABLE)
        try:
            # To let go of the interpreter's lock takes longer than this call, which does not wait.
            count = recv(socket.fd, view.buf, view.len, MSG_DONTWAIT)
            if count < 0:
                error = errno
            if 0 < count < SMALL_READ_BYTES:
                loop.reads.short += 1
                loop.pace.read_by(self.connection)
                socket.received_bytes += count
                socket.reads += 1
                socket.last_received = loop.now
                self.take_plain(<const uint8_t *> view.buf, count)
        finally:
            PyBuffer_Release(&view)
        if count >= SMALL_READ_BYTES:
            socket.came(count)
        elif count > 0:
            if self.taken:
                loop.pace.came(self.things)
                if self.fed:
                    loop.fed(socket, self.fed)
            if self.taken < <size_t> count:
                socket.go_on(self.taken, count)
        elif count == 0 or error not in (EAGAIN, EINTR):
            socket.came(0)
        return 0

    cdef bint is_plain(self):
        """Return whether a read of this client may have something plain."""
        return (
            self.amqp.state is self.way.open_state
            and not PySet_GET_SIZE(self.waiting)
            and not self.amqp.has_unread()
            and not self.way.alarms.text
        )

    def take(self, buffer not None, size_t end):
        """Do what is plain of the first `end` bytes of a read.

        Return where the first frame begins that is not.
        """
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if end > <size_t> view.len:
                raise ValueError("outside of the buffer")
            self.take_plain(<const uint8_t *> view.buf, end)
        finally:
            PyBuffer_Release(&view)
        return self.taken

    cdef int take_plain(self, const uint8_t *base, size_t end) except -1:
        """Do what is plain of a read, and end the connection if that fails."""
        self.things = self.fed = self.taken = 0
        if not self.is_plain():
            return 0
        try:
            self.take_bytes(base, end)
        except Exception as error:
            self.way.packer.take_touched()  # or the next client would wait for these shards
            self.failed(error)
        return 0

    cdef int take_bytes(self, const uint8_t *base, size_t end) except -1:
        """Do what is plain from `taken` on, which moves behind it."""
        cdef Incoming amqp = self.amqp
        cdef size_t at, behind, needed
        cdef uint32_t count
        cdef int why
        cdef Row *rows
        while self.taken < end:
            at = self.taken
            if base[at] == HEARTBEAT_FRAME:
                if (
                    end - at < HEARTBEAT_BYTES
                    or get16(base + at + 1)
                    or get32(base + at + 3)
                    or base[at + 7] != FRAME_END
                ):
                    break
                self.taken += HEARTBEAT_BYTES
                continue
            behind = at
            count = find_publishes(
                base, &behind, end, <const uint8_t *> PyByteArray_AS_STRING(amqp.channels),
                PyByteArray_GET_SIZE(amqp.channels), amqp.received_frame_bytes_max,
                amqp.message_bytes_max, &rows, &why, &needed,
            )
            if count:
                self.taken = self.publish(base, rows, count, behind)
                # As many as fill the table are worth a time slice, which Python gives.
                if self.taken != behind or why == STOPPED_FULL:
                    break
            elif why == STOPPED_SETTLE:
                if not self.settle(base, &self.taken, end):
                    break
            elif not self.answer_channel(base, &self.taken, end) \
                    and not self.bind(base, &self.taken, end):
                break
            elif PySet_GET_SIZE(self.waiting):  # what is behind the binds waits for their answer
                break
        return 0

    cdef bint answer_channel(self, const uint8_t *base, size_t *position, size_t end) except -1:
        """Answer the opening or closing of a channel that nobody uses.

        Return whether there is one at `position`.
        """
        cdef SocketState socket = self.socket
        cdef size_t taken = 0
        cdef bytes answer
        if socket.closing or socket.lost:
            return False
        answer = self.amqp.answer_channel(base + position[0], end - position[0], &taken)
        if answer is None:
            return False
        position[0] += taken
        self.way.counts.channels_opened += self.amqp.opened
        self.amqp.opened = 0
        self.answer(answer)
        return True

    cdef int answer(self, bytes frames) except -1:
        """Answer the client, which may send nothing more until it has the answer."""
        cdef SocketState socket = self.socket
        socket.output.add(frames)
        socket.mark_dirty()
        socket.loop.pace.worth_a_pass()
        return 0

    cdef bint bind(self, const uint8_t *base, size_t *position, size_t end) except -1:
        """Have binds put in force that need not wait for the controller.

        Return whether there are some at `position`. They are answered, unless their run has
        `waits`, which then answers them.
        """
        cdef SocketState socket = self.socket
        cdef Incoming amqp = self.amqp
        cdef PublishingState channel
        cdef size_t at = position[0], size
        cdef uint32_t number = 0
        cdef bint nowait = False
        cdef list ends
        cdef object run
        cdef uint8_t answer[BIND_OK_BYTES]
        if end - at < BIND_BYTES_MIN or get32(base + at + 7) != QUEUE_BIND \
                or socket.closing or socket.lost:
            return False
        number, size = get16(base + at + 1), <size_t> get32(base + at + 3) + 8
        # More of them in one read are one request.
        if end - at == size and self.go_on_binding(base + at, size, number):
            at, ends = end, None
        else:
            ends = find_binds(
                base, &at, end, <const uint8_t *> PyByteArray_AS_STRING(amqp.channels),
                PyByteArray_GET_SIZE(amqp.channels), &number, &nowait,
            )
            channel = self.channels.get(number) if ends else None
            if channel is None or not channel.is_open:
                return False
            run = self.binds(channel, ends, nowait)
            if run is None:
                return False
            self.run = run
            self.bound = beginning_of_bind(base + position[0])
        position[0] = at
        if not nowait and self.run.waits is None:
            memcpy(answer, BIND_OK, BIND_OK_BYTES)
            answer[1], answer[2] = number >> 8, number & 0xff
            bind_ok = PyBytes_FromStringAndSize(<const char *> answer, BIND_OK_BYTES)
            self.answer(bind_ok if ends is None else bind_ok * len(ends))
        elif not nowait:
            socket.loop.pace.worth_a_pass()
        return True

    cdef bint go_on_binding(self, const uint8_t *p, size_t size, uint32_t number) except -1:
        """Go on with the last run of binds if the frame at `p` is one between the same two.

        Return False, and do nothing, if this is not so, or the bind has to wait. The frame lies
        within the read, and `number` is that of its channel.
        """
        cdef BindRun run = self.run
        cdef bytearray states = self.amqp.channels
        cdef PublishingState channel
        cdef const uint8_t *bound
        cdef size_t before
        # Within a message that has not come whole, a bind is out of order.
        if run is None or number >= <size_t> PyByteArray_GET_SIZE(states) \
                or <uint8_t> PyByteArray_AS_STRING(states)[number] != CHANNEL_OPEN:
            return False
        bound, before = <const uint8_t *> PyBytes_AS_STRING(self.bound), len(self.bound)
        # Behind the key come its flags (nowait) and arguments, both nothing, and the frame's end.
        if size < before + 7 or before + 7 + p[before] != size or p[size - 1] != FRAME_END \
                or p[size - 6] or get32(p + size - 5) \
                or memcmp(p, bound, 3) or memcmp(p + 7, bound + 7, before - 7):
            return False
        channel = self.channels.get(number)
        if channel is None or not channel.is_open or channel.busy or channel.work:
            return False
        return run.add(p + before + 1, p[before])

    # -- publishes ---------------------------------------------------------------------------------

    cdef size_t publish(
        self, const uint8_t *base, Row *rows, size_t count, size_t behind
    ) except? 0:
        """Pack publishes.

        Return where the first begins that was not packed, or `behind` all of them.
        """
        cdef ShortWay way = self.way
        cdef PublishingState channel
        cdef ConfirmsState confirms
        cdef size_t at = 0, plain = 0, stopped
        cdef uint64_t now = now_ms(), dropped
        cdef int why = PACKED_CHANNEL
        if way.stamps or self.vhost != <str> way.links.vhost:
            return rows[0].line_off - BEFORE_LINE
        if (
            way.spans is not None
            and (
                count > way.spans.until_chosen
                or has_context(base + rows[0].line_off, behind - rows[0].line_off)
            )
        ):
            return rows[0].line_off - BEFORE_LINE
        way.packer.far_queue = 0
        while plain < count and rows[plain].body_len <= PLAIN_BODY_BYTES_MAX:
            plain += 1
        while at < plain and why == PACKED_CHANNEL:
            channel = self.channels.get(rows[at].channel)
            if channel is None or not channel.is_open or channel.transaction is not None:
                break
            confirms = channel.confirms
            dropped = way.packer.unroutable
            why = way.packer.pack_rows(
                self.routes, base, <PackedRow *> rows, plain, at, self.connection,
                0 if confirms is None else confirms.next_seq, now, &stopped,
            )
            channel.unroutable_dropped += way.packer.unroutable - dropped
            if stopped > at:
                self.note(channel, confirms, rows + at, stopped - at)
                at = stopped
        return behind if at == count else rows[at].line_off - BEFORE_LINE

    cdef int note(
        self, PublishingState channel, ConfirmsState confirms, Row *rows, size_t count
    ) except -1:
        """Count publishes of a channel that were packed just now, and see to their confirms."""
        cdef ShortWay way = self.way
        cdef uint64_t touched = way.packer.touched
        cdef Waiting waiting
        way.packer.packed |= touched
        way.packer.touched = 0
        self.fed |= touched
        self.published = True
        self.things += count
        channel.published += count
        way.counts.received += count
        way.counts.sizes.count(rows, count)
        if way.spans is not None:
            way.spans.until_chosen -= count
        if confirms is None:
            return 0
        if way.packer.in_sequence:
            confirms.in_sequence = True
        way.counts.received_confirm += count
        waiting = confirms.wait(count, __builtin_popcountll(touched))
        while touched:
            (<LinkState> way.link_of[__builtin_ctzll(touched)]).packing.append(waiting)
            touched &= touched - 1
        return 0

    # -- acks --------------------------------------------------------------------------------------

    cdef bint settle(self, const uint8_t *base, size_t *position, size_t end) except -1:
        """Settle the acks of one channel from `position` on, which moves behind them.

        Return whether there were some.

        Acks of tags that follow each other are settled together.
        """
        cdef uint32_t number = get16(base + position[0] + 1)
        cdef PublishingState channel = self.channels.get(number)
        cdef ConsumingState consuming
        cdef UnackedState unacked
        cdef const uint8_t *p
        cdef size_t at = position[0], settled = at  # behind the last frame that is settled
        # The range of acks that are not settled yet; there is none while `first` is 0.
        cdef uint64_t first = 0, last = 0, tag
        cdef bint multiple, moved
        if channel is None or not channel.is_open or channel.transaction is not None:
            return False
        consuming = channel.consuming_if_any
        if consuming is None or consuming.limit.most:
            return False
        unacked = consuming.unacked
        while end - at >= ACK_BYTES:
            p = base + at
            if p[0] != METHOD_FRAME or get32(p + 3) != ACK_BYTES - 8 or get32(p + 7) != BASIC_ACK \
                    or get16(p + 1) != number or p[ACK_BYTES - 1] != FRAME_END:
                break
            tag, multiple = get64(p + 11), p[19] & 1
            if tag == 0:
                break
            if first and (multiple or tag != last + 1):
                if not self.settle_range(unacked, first, last):
                    first = 0
                    break
                first, settled = 0, at
            if multiple:
                if not self.settle_through(unacked, tag):
                    break
                settled = at + ACK_BYTES
            else:
                first, last = first or tag, tag
            at += ACK_BYTES
        if first and self.settle_range(unacked, first, last):
            settled = at
        moved = settled != position[0]
        position[0] = settled
        return moved

    cdef bint settle_range(self, UnackedState unacked, uint64_t first, uint64_t last) except -1:
        """Settle single acks of these tags; return False if one of them is not outstanding."""
        cdef Py_ssize_t place = unacked.find(first), at = place
        cdef uint64_t tag = first, until
        if place < 0:
            return False
        while unacked.spans[at].last_tag < last:
            at += 1
            if (
                at == unacked.ended
                or unacked.spans[at].first_tag != unacked.spans[at - 1].last_tag + 1
            ):
                return False
        while tag <= last:
            place = unacked.find(tag)
            until = min(last, unacked.spans[place].last_tag)
            self.tell(unacked, place, tag, until)
            unacked.cut(place, tag, until)
            tag = until + 1
        self.things += last - first + 1
        return True

    cdef bint settle_through(self, UnackedState unacked, uint64_t tag) except -1:
        """Settle an ack of all tags up to this one, as settle_range()."""
        cdef Py_ssize_t last = unacked.find(tag), at
        if last < 0:
            return False
        for at in range(unacked.begun, last + 1):
            self.tell(
                unacked, at, unacked.spans[at].first_tag, min(tag, unacked.spans[at].last_tag)
            )
        unacked.drop_before(last)
        unacked.cut(unacked.begun, unacked.spans[unacked.begun].first_tag, tag)
        self.things += 1
        return True

    cdef int tell(
        self, UnackedState unacked, Py_ssize_t place, uint64_t first, uint64_t last
    ) except -1:
        """Count settled deliveries of one span, and tell their shard soon."""
        cdef ShortWay way = self.way
        cdef Span *span = unacked.spans + place
        cdef ConsumerState consumer = <ConsumerState> unacked.consumers[place]
        cdef LinkState link = <LinkState> way.link_of[consumer.shard]
        cdef SettlesState settles
        cdef uint64_t number = span.first_number + first - span.first_tag
        cdef int64_t epoch = span.epoch
        consumer.channel.acked += last - first + 1
        if link.epoch == epoch:
            settles = link.settles
            settles.ack(
                consumer.number, number, number + last - first,
                C_NO_HURRY if consumer.group is not None and not consumer.affinity
                else acks_together(consumer.prefetch, consumer.affinity),
            )
            if not settles.due and not way.due.acks_wait:
                way.links.wait_for_acks()
        # What basic.get took does not count.
        if consumer.tag and way.is_in_limit(consumer):
            consumer.channel.limit.unacked -= last - first + 1
            if consumer.group_limit is not None:
                if consumer.let_go(last - first + 1, link.epoch == epoch):
                    way.groups.emptied(consumer)
                way.freed[consumer.group_limit] = None
        return 0


cdef class Outlet(Taker):
    """Take in the plain messages of one shard: deliveries, confirms, room for publishes.

    An Outlet is called with a DELIVER, or takes messages in where they lie in a ring.
    """

    def __call__(self, message not None):
        """Handle a DELIVER.

        Raises ValueError, and does nothing, if it is not of the length that it says.
        """
        cdef Py_buffer view
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            if not is_whole(<const uint8_t *> view.buf, view.len):
                self.read(message)
            self.deliver_all(<const uint8_t *> view.buf, view.len, message)
        finally:
            PyBuffer_Release(&view)

    cdef bint take_in(self, const uint8_t *message, size_t size) except -1:
        cdef uint64_t batch
        if size < HEADER_BYTES or self.link.sender is None \
                or memcmp(message + 1, PyBytes_AS_STRING(self.link.sender), HEADER_BYTES - 1):
            return False
        try:
            if message[0] == DELIVER:
                return is_whole(message, size) and self.deliver_all(message, size, None)
            if message[0] == CONFIRMED and size == CONFIRMED_BYTES:
                memcpy(&batch, message + HEADER_BYTES, 8)
                return self.confirm(batch)
            if message[0] == CREDIT and (size - HEADER_BYTES) % CREDIT_ENTRY == 0:
                return self.credit(message, size)
        except Exception as error:
            self.failed(error)
            return True
        return False

    cdef bint confirm(self, uint64_t batch) except -1:
        """Confirm all publishes up to a batch."""
        sent = self.link.sent
        while sent and <uint64_t> sent[0][0] <= batch:
            for waiting in <list?> sent.popleft()[1]:
                if type(waiting) is Waiting:
                    (<Waiting> waiting).confirmed()
                else:
                    waiting.confirmed()
        return True

    cdef bint credit(self, const uint8_t *message, size_t size) except -1:
        """Note what the shard has taken in, and read publishers that wait for room again."""
        cdef LinkState link = self.link
        cdef PassState loop = self.way.loop
        cdef size_t at = HEADER_BYTES
        cdef uint32_t count
        while at < size:
            memcpy(&count, message + at + 4, 4)
            link.in_flight -= count
            at += CREDIT_ENTRY
        if link.in_flight <= ROOM_BYTES and PySet_GET_SIZE(<set?> loop.held[link.shard]):
            loop.publish_room(link.shard)
        return True

    cdef bint deliver_all(self, const uint8_t *p, size_t size, message) except -1:
        """Deliver the sections of a DELIVER, which is whole.

        Return False if its first is not plain.

        Python gets sections that are not plain of `message`, or of a copy if `message` is None.
        With a `message`, Python gets the first section, too. A large message is not copied.
        """
        cdef size_t at = DELIVER_HEADER
        cdef uint32_t count, i, length, messages
        cdef list sections = None
        memcpy(&count, p + 16, 4)
        if message is None and size > PLAIN_BODY_BYTES_MAX:
            for i in range(count):
                memcpy(&messages, p + at + 12, 4)
                memcpy(&length, p + at + 24, 4)
                if length > <uint64_t> PLAIN_BODY_BYTES_MAX * messages:
                    return False
                at += SECTION + ((length + 7) & ~<size_t> 7)
            at = DELIVER_HEADER
        for i in range(count):
            memcpy(&length, p + at + 24, 4)
            if not self.deliver_plain(p + at, length):
                if message is None:
                    if i == 0:
                        return False
                    message = PyBytes_FromStringAndSize(<const char *> p, size)
                if sections is None:
                    sections = self.read(message)
                self.deliver(self.link.shard, sections[i])
            at += SECTION + ((length + 7) & ~<size_t> 7)
        return True

    cdef bint deliver_plain(self, const uint8_t *section, uint32_t size) except -1:
        """Deliver a section with `size` bytes of messages.

        Return False, and do nothing, if it is not plain.
        """
        cdef ShortWay way = self.way
        cdef uint32_t number, count, zero
        cdef uint16_t flags
        cdef uint64_t first_number, tag
        cdef ConsumerState consumer
        cdef ConsumingState channel
        cdef SocketState socket
        cdef bytes data
        cdef object client
        memcpy(&number, section + 4, 4)
        memcpy(&flags, section + 10, 2)
        memcpy(&count, section + 12, 4)
        memcpy(&first_number, section + 16, 8)
        memcpy(&zero, section + 28, 4)
        consumer = way.consumers.get(number)
        if (
            consumer is None
            or not is_plain_delivery(consumer)
            or flags & ~REDELIVERED
            or zero
            or size > <uint64_t> PLAIN_BODY_BYTES_MAX * count
            or way.deliveries.tracing is not None
            or way.spans is not None and has_context(section + SECTION, size)
        ):
            return False
        channel, client = consumer.channel, consumer.client
        socket, tag = client.socket, channel.next_tag
        try:
            data = deliveries_of(
                section + SECTION, size, count, channel.number, consumer.tag_bytes, tag,
                flags & REDELIVERED, socket.frame_bytes_max,
            )
        except ValueError:
            return False
        channel.next_tag += count
        if flags & REDELIVERED:
            channel.redelivered += count
        if consumer.no_ack:
            way.counts.delivered_auto += count
            channel.delivered_auto += count
        else:
            way.counts.delivered_manual += count
            channel.unacked.put(tag, count, consumer, self.link.epoch, first_number, way.loop.now)
            if way.is_in_limit(consumer):
                channel.limit.unacked += count
            if consumer.group_limit is not None:
                consumer.hold(count)
        consumer.delivered += count
        if consumer.allotment is not None:
            way.use(<AllotmentState?> consumer.allotment, count, consumer.no_ack)
        socket.write_later(data, self.link.shard, self.link.epoch, size)
        return True


cdef bint is_whole(const uint8_t *message, size_t size) noexcept:
    """Return whether the sections of a DELIVER end within it."""
    cdef size_t at = DELIVER_HEADER
    cdef uint32_t sections, i, length
    if size < DELIVER_HEADER:
        return False
    memcpy(&sections, message + 16, 4)
    for i in range(sections):
        if at + SECTION > size:
            return False
        memcpy(&length, message + at + 24, 4)
        if at + SECTION + length > size:
            return False
        at += SECTION + ((length + 7) & ~<size_t> 7)
    return True


cdef inline bint is_plain_delivery(ConsumerState consumer):
    """Return whether a delivery to this consumer needs nothing but the usual."""
    return consumer.announced and consumer.reading is None


include "watch.pxi"


include "anteroom.pxi"
