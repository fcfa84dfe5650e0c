# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The facts that the short way needs: of channels, consumers, sockets, links and counters.

Each class here is the base of a Python class, which has all else of the same thing: Counts,
Channel, Confirms, Limit, ConsumingChannel, Consumer, Unacked, Settles, ShardLink, Output, PassLoop,
Spans and ClientSocket. A fact is in one of the two classes, never in both. Python reads and sets
the attributes like any others; the short way (short_way.pyx) reads and sets them without Python.
What the passes keep to decide when small reads may pile up is in pace.pxi, and what binds that are
answered ahead of the controller keep in bind_runs.pxi.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove
cimport cython

from shardmq.broker.amqp.frames cimport Sizes
from shardmq.broker.amqp.octets cimport put16, put32, put64

cdef extern from "<sys/socket.h>" nogil:
    ssize_t c_send "send"(int fd, const void *data, size_t size, int flags)
    int MSG_NOSIGNAL
    int MSG_DONTWAIT

cdef extern from *:
    int __builtin_clzll(unsigned long long) noexcept nogil

cdef enum:
    BASIC = 60
    BASIC_ACK = 80
    BASIC_NACK = 120
    REQUEUE_BIT = 2  # in the bits of basic.nack
    # Answered ones are taken off the front of the list when there are so many.
    ANSWERED_MAX = 64
    # Spans that an Unacked has room for in the beginning. Places at its front that nothing uses any
    # more are given up when there are so many.
    SPANS_MIN = 8
    UNUSED_MAX = 256
    ACK = 0  # of the wire
    C_TOGETHER_MAX = 256
    C_RANGES_MAX = 4096
    CREDITS_ROOM_MIN = 16
    # Bytes of several chunks that are joined rather than given to the kernel as they are.
    JOINED_BYTES_MAX = 16 << 10
    C_BATCH_BYTES_MIN = 128 << 10
    C_SHARED_BATCH_BYTES_MIN = 192 << 10
    # Half of a limit is worth a grant, and so is this.
    C_WORTH_A_GRANT = 1000
    # What a shard is to do with credit that it cannot use, as in shardd/wire/messages.py.
    KEEP = 0
    DRAIN = 1
    # What LimitState.go_on has done.
    C_NOTHING = 0
    C_GRANTED = 1
    C_LEFT = 2

# Deliveries of one consumer within this time may be one run, which has one age.
RUN_S_MAX = 1.0
# At most this many acks of a consumer wait for each other. A batch of them costs little more than
# its messages.
ACKS_TOGETHER_MAX = C_TOGETHER_MAX
# At most this many ranges of all consumers wait at one shard.
RANGES_MAX = C_RANGES_MAX
# Said of the acks of a group consumer, in place of how many wait for each other.
NO_HURRY = 1 << 62
# Deliveries written to a client before its shard is told: an eighth of a connection's window at the
# shard, so that a trickle costs no message of its own.
DELIVERY_CREDIT_BYTES = 128 << 10
# Connections that got deliveries and whose shard is not told. With more, the shard is told of all:
# connections that left meanwhile would stay for ever.
CREDITS_MAX = 4096

# While all reads are full, a shard's batch waits until it has this many bytes: the fixed cost of a
# batch is then small beside the cost of its messages. Where a read has something for several
# shards, each waits for more: half of it takes about as long as the smaller batch.
BATCH_BYTES_MIN = C_BATCH_BYTES_MIN
SHARED_BATCH_BYTES_MIN = C_SHARED_BATCH_BYTES_MIN
# Publishes that a shard may have from this front door and has not taken in: their bytes, and what
# the references of messages to several queues weigh. Beyond, the clients that feed it are not read.
PUBLISH_WINDOW_BYTES = 1 << 20

NOTHING, GRANTED, LEFT = C_NOTHING, C_GRANTED, C_LEFT

cdef int64_t C_WINDOW_BYTES = PUBLISH_WINDOW_BYTES
cdef double C_RUN_S_MAX = RUN_S_MAX
cdef int64_t C_NO_HURRY = NO_HURRY
cdef uint64_t C_CREDIT_BYTES = DELIVERY_CREDIT_BYTES
cdef Py_ssize_t C_CREDITS_MAX = CREDITS_MAX


cdef class MessageCounts:
    """Counters of messages since the start."""

    def __cinit__(self):
        self.sizes = Sizes()


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
    return settle_frame(channel, BASIC_ACK, tag, multiple)


def nack_frame(uint32_t channel, uint64_t tag):
    """Return basic.nack of one message to its publisher.

    It has the bit `requeue`, which RabbitMQ sends and no publisher reads.
    """
    return settle_frame(channel, BASIC_NACK, tag, REQUEUE_BIT)


cdef class SpansState:
    """The number of publishes until the next one that is chosen for a trace."""


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


cdef class ConfirmsState:
    """Confirm mode of one channel: numbers given out, what waits, what was refused.

    `closed`: the channel is gone, nobody is answered, and the number may be another channel's now.
    `nacked` counts the nacks.
    `in_sequence`: some publish had x-producer-id and x-sequence, its place in the order of its
    producer. A channel with something to say puts itself on the list `due`. `failure` ends the
    channel, once.
    """

    def __cinit__(self):
        self.next_seq = 1
        self._waiting = []
        self.refused = set()

    @property
    def unconfirmed(self):
        """Return how many publishes wait for their answer."""
        cdef Py_ssize_t at
        cdef uint64_t count = 0
        for at in range(self._begun, len(self._waiting)):
            count += (<Waiting> self._waiting[at]).last - (<Waiting> self._waiting[at]).first + 1
        return count

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
            self.due.append(self)

    cpdef bytes answers(self):
        """Return acks and nacks for the longest finished beginning."""
        cdef Waiting waiting
        cdef uint64_t first = 0, last = 0  # an ack not yet written
        cdef list out = None
        cdef list all_of = self._waiting
        cdef MessageCounts counts = self.counts
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
                    out.append(settle_frame(self.channel, BASIC_ACK, last, last > first))
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
            ack = settle_frame(self.channel, BASIC_ACK, last, last > first)
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
                self.nacked += 1
                out.append(settle_frame(self.channel, BASIC_NACK, seq, REQUEUE_BIT))
            else:
                self.counts.confirmed += 1
                out.append(settle_frame(self.channel, BASIC_ACK, seq, 0))
        return b"".join(out)


cdef class PublishingState:
    """A channel as publishing sees it."""


cdef class LimitState:
    """A limit of unacknowledged deliveries: see `Limit` in consume/credit.py."""

    cpdef int go_on(self, double now) except -1:
        """Give what acks have freed to the allotment that has the turn, if it has used all it had.

        Return GRANTED then, NOTHING if nobody may get anything, and LEFT, with nothing done, for
        all that `Limit.share` has to decide.
        """
        cdef int64_t free = self.most - self.unacked - self.allotted
        cdef Py_ssize_t hungry = len(self.hungry)
        cdef AllotmentState turn = self.turn
        if (
            free < self.waits_for
            or not (hungry and len(self.holding) or free > 0 and (hungry or len(self.empty)))
        ):
            return C_NOTHING
        if (
            turn is None
            or now >= self.turn_ends
            or turn.state is not self.hungry
            or not turn.used_all
        ):
            return C_LEFT
        # An outer limit may have less, and what others hold may be needed.
        if len(turn.limits) != 1 or len(self.holding) or free < worth_a_grant(self.most):
            return C_LEFT
        self.waits_for = 0
        self.allotted += free
        turn.allowed = max(turn.allowed, turn.used) + free
        turn.mode = DRAIN if hungry > 1 else KEEP
        turn.place()
        return C_GRANTED


cdef class AllotmentState:
    """The credit of the consumers at one shard: see `Allotment` in consume/credit.py."""

    cpdef bint use(self, int64_t count) except -1:
        """Note deliveries; return whether the credit is used up."""
        cdef int64_t unused = self.allowed - self.used
        self.used += count
        if unused <= 0 or not self.limits:
            return False
        for each in self.limits:
            (<LimitState> each).allotted -= min(count, unused)
        if count < unused:
            return False
        self.gave_back, self.used_all = False, self.wants
        self.place()
        return True

    cpdef int place(self) except -1:
        """Put the allotment into the list of its state."""
        cdef LimitState home = <LimitState> self.limits[len(self.limits) - 1]
        cdef dict state
        if self.allowed > self.used:
            state = home.holding if self.mode == KEEP else home.draining
        elif self.wants:
            state = home.hungry
        else:
            state = None if self.gave_back else home.empty
        if state is not self.state:
            if self.state is not None:
                del self.state[self]
            if state is not None:
                state[self] = None
            self.state = state
        return 0


cdef class ConsumingState:
    """The deliveries of a channel: the next tag, and what is not acknowledged."""


cdef class ConsumerState:
    """The part of a consumer that a delivery needs.

    An assignment holds `held` deliveries that are not settled or, in a transaction, not committed;
    `counted` of them count for `group_limit`, the limit of its group consumer. Those of a process
    of its shard that is gone do not: they will come again.
    """

    cpdef hold(self, int64_t count):
        """Count deliveries of an assignment."""
        self.held += count
        self.counted += count
        self.group_limit.unacked += count

    cpdef bint let_go(self, int64_t count, bint counts):
        """Count settled deliveries of an assignment; return whether it holds nothing now.

        `counts`: they came from the process of its shard that is there.
        """
        self.held -= count
        if counts:
            count = min(count, self.counted)
            self.counted -= count
            self.group_limit.unacked -= count
        return self.held <= 0


cdef class UnackedState:
    """The deliveries of one channel that wait for their ack, by tag."""

    def __cinit__(self):
        self.consumers = []

    def __dealloc__(self):
        free(self.spans)

    def add(
        self, uint64_t first_tag, uint64_t count, consumer, int64_t epoch, uint64_t first_number,
        double at=0.0
    ):
        """Add deliveries that came from a shard at loop time `at`."""
        self.put(first_tag, count, consumer, epoch, first_number, at)

    def has(self, uint64_t tag):
        """Return whether the tag is outstanding."""
        return self.find(tag) >= 0

    def cut_through(self, uint64_t tag):
        """Take all deliveries up to `tag`, 0 means all there are.

        Return runs, None if `tag` is not outstanding.
        """
        cdef Py_ssize_t last = self.find(tag) if tag else self.ended - 1
        cdef list taken = self.spans_before(last if tag else self.ended)
        if not tag:
            self.drop_before(self.ended)
            return taken
        if last < 0:
            return None
        taken.append(self.run_at(last, self.spans[last].first_tag, tag))
        self.drop_before(last)
        self.cut(last, self.spans[last].first_tag, tag)
        return taken

    def cut_from(self, uint64_t first, uint64_t last):
        """Take the tags from `first` up to `last` that are of one run.

        Return that, None if `first` is not outstanding.
        """
        cdef Py_ssize_t place = self.find(first)
        if place < 0:
            return None
        last = min(last, self.spans[place].last_tag)
        run = self.run_at(place, first, last)
        self.cut(place, first, last)
        return run

    def all_runs(self):
        """Return all runs, by tag.

        A run is (first tag, last tag, consumer, epoch, first number, when they came).
        """
        return self.spans_before(self.ended)

    cdef list spans_before(self, Py_ssize_t end):
        cdef Py_ssize_t place
        return [
            self.run_at(place, self.spans[place].first_tag, self.spans[place].last_tag)
            for place in range(self.begun, end)
        ]

    def insert(
        self, uint64_t first_tag, uint64_t last_tag, consumer, int64_t epoch, uint64_t first_number,
        double at
    ):
        """Put a run back to its place among the others."""
        cdef Py_ssize_t place
        cdef Span *span
        self.make_room()
        place = self.begun
        while place < self.ended and self.spans[place].first_tag <= first_tag:
            place += 1
        span = self.spans + place
        memmove(span + 1, span, (self.ended - place) * sizeof(Span))
        span[0] = Span(first_tag, last_tag, epoch, first_number, at)
        self.consumers.insert(place, consumer)
        self.ended += 1
        self.count += last_tag - first_tag + 1

    cdef Py_ssize_t find(self, uint64_t tag) noexcept:
        """Return the place of the tag's span, -1 if the tag is not outstanding."""
        cdef Py_ssize_t low = self.begun, high = self.ended, middle
        # Most often it is one of the first.
        if low == high:
            return -1
        if tag <= self.spans[low].last_tag:
            return low if tag >= self.spans[low].first_tag else -1
        while low < high:
            middle = (low + high) // 2
            if self.spans[middle].first_tag <= tag:
                low = middle + 1
            else:
                high = middle
        low -= 1
        return low if low >= self.begun and self.spans[low].last_tag >= tag else -1

    cdef int put(
        self, uint64_t first_tag, uint64_t count, object consumer, int64_t epoch,
        uint64_t first_number, double at
    ) except -1:
        cdef Span *span
        self.count += count
        if self.begun != self.ended:
            span = self.spans + self.ended - 1
            if span.last_tag + 1 == first_tag and span.epoch == epoch \
                    and span.first_number + first_tag - span.first_tag == first_number \
                    and self.consumers[self.ended - 1] is consumer and at - span.at < C_RUN_S_MAX:
                span.last_tag = first_tag + count - 1
                return 0
        self.make_room()
        span = self.spans + self.ended
        span.first_tag, span.last_tag, span.epoch = first_tag, first_tag + count - 1, epoch
        span.first_number, span.at = first_number, at
        self.consumers.append(consumer)
        self.ended += 1
        return 0

    cdef int drop_before(self, Py_ssize_t place) except -1:
        """Forget the spans before this place."""
        cdef Py_ssize_t at
        for at in range(self.begun, place):
            self.count -= self.spans[at].last_tag - self.spans[at].first_tag + 1
            self.consumers[at] = None
        self.begun = place
        if self.begun == self.ended:
            self.consumers.clear()
            self.begun = self.ended = 0
        return 0

    cdef int cut(self, Py_ssize_t place, uint64_t first, uint64_t last) except -1:
        """Take tags first..last out of the span at this place, which has all of them."""
        cdef Span *span = self.spans + place
        cdef Span *behind
        self.count -= last - first + 1
        if span.first_tag == first and span.last_tag == last:
            if place == self.begun:
                self.consumers[place] = None
                self.begun += 1
                if self.begun == self.ended:
                    self.consumers.clear()
                    self.begun = self.ended = 0
                return 0
            memmove(span, span + 1, (self.ended - place - 1) * sizeof(Span))
            del self.consumers[place]
            self.ended -= 1
        elif span.first_tag == first:
            span.first_number += last + 1 - first
            span.first_tag = last + 1
        elif span.last_tag == last:
            span.last_tag = first - 1
        else:
            # The room may lie elsewhere afterwards, and the places may be others.
            place -= self.begun
            self.make_room()
            place += self.begun
            span = self.spans + place
            behind = span + 1
            memmove(behind, span, (self.ended - place) * sizeof(Span))
            self.consumers.insert(place, self.consumers[place])
            self.ended += 1
            span.last_tag = first - 1
            behind.first_number += last + 1 - behind.first_tag
            behind.first_tag = last + 1
        return 0

    cdef int make_room(self) except -1:
        """Have room for one more span at the end."""
        cdef Span *grown
        cdef Py_ssize_t room
        if self.ended < self._room:
            return 0
        if self.begun >= UNUSED_MAX or (self.begun and self.begun * 2 >= self.ended):
            memmove(self.spans, self.spans + self.begun, (self.ended - self.begun) * sizeof(Span))
            del self.consumers[:self.begun]
            self.ended -= self.begun
            self.begun = 0
            return 0
        room = max(<Py_ssize_t> SPANS_MIN, 2 * self._room)
        grown = <Span *> realloc(self.spans, room * sizeof(Span))
        if grown == NULL:
            raise MemoryError()
        self.spans, self._room = grown, room
        return 0

    cdef tuple run_at(self, Py_ssize_t place, uint64_t first, uint64_t last):
        cdef Span *span = self.spans + place
        return (
            first, last, self.consumers[place], span.epoch,
            span.first_number + first - span.first_tag, span.at
        )


cpdef int64_t acks_together(int64_t prefetch, bint counts_keys):
    """Return how many acks of a consumer may wait for each other.

    A `prefetch` of 0 is no limit. With `counts_keys`, other consumers wait for the keys it holds.
    """
    if counts_keys:
        return 1
    return (
        min(<int64_t> C_TOGETHER_MAX, max(<int64_t> 1, prefetch // 2))
        if prefetch
        else C_TOGETHER_MAX
    )


cpdef int64_t worth_a_grant(int64_t most):
    """Return how much free credit of a limit of `most` deliveries is worth a grant.

    Half of the limit is, so that the deliveries of two grants that a client settles one after the
    other become one grant again.
    """
    return max(<int64_t> 1, min(most // 2, <int64_t> C_WORTH_A_GRANT))


cdef class Due:
    """The shards (bit mask) that are to be told something at the end of this pass.

    `acks_wait`: some acks wait for each other, and a timer runs.
    """


cdef class SettlesState:
    """The settles to tell one shard, in the order in which they came.

    `ranges` are (consumer number, kind, first and last delivery number). With the kind ALLOT these
    are the number of an allotment, what it is allowed, and what becomes of credit that is not used.
    Neighbouring acks of a consumer are one range. When `due` is set they must not wait.
    `last_range` is the index of the last range of acks, `acks` how many acks wait, both by
    consumer. `allots` has allowed and mode by allotment. `hurries`: some acks are no part of a
    group consumer's. `shard` is the bit of the shard.
    """

    def __cinit__(self):
        self.ranges = []
        self.last_range, self.acks, self.allots = {}, {}, {}

    def __bool__(self):
        return bool(self.ranges or self.allots)

    cpdef fall_due(self):
        self.due = True
        self.due_all.shards |= self.shard

    cpdef ack(self, consumer, uint64_t first, uint64_t last, int64_t together):
        """Add acks, which wait until there are `together` of this consumer."""
        cdef list ranges = self.ranges
        cdef tuple before
        cdef int64_t acks
        at = self.last_range.get(consumer)
        before = None if at is None else <tuple> ranges[at]
        if before is not None and <uint64_t> before[3] + 1 == first:
            ranges[at] = (consumer, ACK, before[2], last)
        else:
            self.last_range[consumer] = len(ranges)
            ranges.append((consumer, ACK, first, last))
        if together == C_NO_HURRY:
            if len(ranges) >= C_RANGES_MAX:
                self.fall_due()
            return
        self.hurries = True
        told = self.acks.get(consumer)
        acks = <int64_t> (last + 1 - first)
        if told is not None:
            acks += told
        self.acks[consumer] = acks
        if acks >= together or len(ranges) >= C_RANGES_MAX:
            self.fall_due()


cdef class LinkState:
    """The messages gathered for a shard, and those it has not taken in.

    `epoch` counts the processes of the shard, 0 before the first. `in_flight` are the bytes of
    publishes that the shard has not taken in. `settles` holds the settles to tell, `packing` who
    waits for the batch that is being packed. `credits` are the bytes of deliveries written, by
    connection; with `credit_due` the shard is to be told of them. `batch` is the number of the
    batch that was sent last. `sent` has (number, who waits) of the batches that are not confirmed.
    `away_since` is the loop time at which the process of the shard was missed, or None. `sender` is
    how all its messages begin, behind their first byte. `outlet` takes in what is plain of them, if
    there is a short way.
    """

    cpdef flush(self):
        """Send the settles, the batch and the credit that wait.

        A batch alone goes into the lane from here, all else from flush_slowly().
        """
        cdef uint32_t messages
        cdef size_t size = 0, weight
        if self.credit_due or self.away_since is not None or not self.epoch or self.lane is None \
                or self.settles.ranges or self.settles.allots:
            self.flush_slowly()
            return
        messages = self.packer.writers[self.shard].messages
        if not messages:
            return
        weight = self.packer.weight(self.shard)
        batch = self.packer.take_parts(
            self.shard, self.peer, self.incarnation, self.epoch, self.batch + 1,
            len(self.packing) > 0
        )
        if type(batch) is bytes:
            size = len(<bytes> batch)
        else:
            for part in batch:
                size += len(part)
        self.batch_messages.count(messages)
        self.batch_bytes.count(size)
        self.note_batch(size + weight, self.packing)
        self.packing = []
        self.put(batch)

    cdef int put(self, batch) except -1:
        """Put a batch into the lane, and ring."""
        cdef LaneState lane
        if isinstance(self.lane, LaneState):
            lane = <LaneState> self.lane
            if (
                lane.writes_ring
                and (
                    lane.writer.put(<bytes> batch)
                    if type(batch) is bytes
                    else lane.writer.put_parts(<list?> batch)
                )
            ):
                lane.writer.ring()
                return 0
        self.lane.put(batch)
        self.lane.ring()
        return 0

    cpdef note_batch(self, uint64_t weight, list waiting):
        """Note a batch that is about to be sent, and who waits for it."""
        self.batch += 1
        self.in_flight += weight
        if waiting:
            self.sent.append((self.batch, waiting))

    cpdef credit(self, uint32_t epoch, uint32_t connection, uint64_t count):
        """Note that `count` bytes of deliveries that came in `epoch` were written to the client."""
        if epoch != self.epoch:
            return
        told = self.credits.get(connection)
        if told is not None:
            count += told
        self.credits[connection] = count
        if count >= C_CREDIT_BYTES or len(self.credits) > C_CREDITS_MAX:
            self.credit_due = True
            self.due.shards |= <uint64_t> 1 << self.shard


cdef class LinksState:
    """The links by shard, what is packed for them, and which are to be told something else.

    `freed` has the limits whose credit this pass has freed, as keys; `share_freed` gives it to
    others.
    """

    def __cinit__(self):
        self.freed = {}

    cpdef bint flush(self, size_t batch_bytes_min=0, size_t shared_bytes_min=0) except? 2:
        """Send what this pass of the loop has gathered.

        Batches smaller than `batch_bytes_min` stay, unless something else leaves with them;
        `shared_bytes_min` takes its place if several shards have batches. Return whether some stay.
        """
        cdef uint64_t packed, due, shards
        cdef int shard
        cdef bint left = False
        if self.freed:
            self.share_freed()
        packed, due = self.packer.waiting(), self.due.shards
        shards = packed | due
        if not shards:
            return False
        self.due.shards = 0
        if packed & (packed - 1):
            batch_bytes_min = shared_bytes_min
        while shards:
            shard = 63 - __builtin_clzll(shards)
            shards ^= <uint64_t> 1 << shard
            if (
                not batch_bytes_min
                or due >> shard & 1
                or self.packer.pending(shard) >= batch_bytes_min
            ):
                (<LinkState> self.links[shard]).flush()
            else:
                left = True
        return left

    cpdef list crowded(self, uint64_t shards):
        """Return those of the shards (bit mask) whose feeders must wait."""
        cdef list found = []
        cdef int shard
        while shards:
            shard = 63 - __builtin_clzll(shards)
            shards ^= <uint64_t> 1 << shard
            if (
                (<LinkState> self.links[shard]).in_flight + <int64_t> self.packer.pending(shard)
                >= C_WINDOW_BYTES
            ):
                found.append(shard)
        return found


cdef class OutputState:
    """The output of one socket: bytes that wait, and the credit that is due when they are written.

    `chunks` are the bytes. `pending` counts the bytes that the kernel has not taken, `written`
    those that it has, `writes` the calls in which it took some. `has_room` is an event that
    somebody waits for, or None.
    """

    def __cinit__(self):
        self.chunks = []

    def __dealloc__(self):
        free(self._credits)

    @property
    def due(self):
        """Return how many credits wait for bytes to be written."""
        return self._ended - self._begun

    cpdef add(self, data):
        self.chunks.append(data)
        self.pending += len(data)

    cpdef add_then_credit(self, data, uint32_t shard, uint32_t epoch, uint64_t credit):
        """Add bytes; `credit` is due to `shard` when all that was added so far is written."""
        self.chunks.append(data)
        self.pending += len(data)
        self.credit_when_written(shard, epoch, credit)

    cpdef credit_when_written(self, uint32_t shard, uint32_t epoch, uint64_t credit):
        """Let `credit` be due to `shard` when all that was added so far is written."""
        cdef Credit *grown
        cdef Py_ssize_t room
        if self._ended == self._room:
            if self._begun > self._ended // 2:
                memmove(
                    self._credits, self._credits + self._begun,
                    (self._ended - self._begun) * sizeof(Credit)
                )
                self._ended -= self._begun
                self._begun = 0
            else:
                room = max(<Py_ssize_t> CREDITS_ROOM_MIN, 2 * self._room)
                grown = <Credit *> realloc(self._credits, room * sizeof(Credit))
                if grown == NULL:
                    raise MemoryError()
                self._credits, self._room = grown, room
        self._credits[self._ended] = Credit(self.written + self.pending, credit, shard, epoch)
        self._ended += 1

    def take_credits(self):
        """Take the credits that became due: shard, its epoch, the credit."""
        cdef list due = []
        cdef Credit *first
        while self._begun < self._ended and self._credits[self._begun].at <= self.written:
            first = self._credits + self._begun
            due.append((first.shard, first.epoch, first.count))
            self._begun += 1
        if self._begun == self._ended:
            self._begun = self._ended = 0
        return due

    cdef bint send(self, int fd) except -1:
        """Write little output to a socket of the kernel; return whether that was all.

        If it was not, nothing was written, or Python goes on with what is left.
        """
        cdef list chunks = self.chunks
        cdef ssize_t sent
        cdef const char *data
        cdef Py_ssize_t size
        if not chunks:
            return True
        if self.has_room is not None:
            return False
        if len(chunks) > 1:
            if self.pending > JOINED_BYTES_MAX:
                return False
            joined = b"".join(chunks)
            chunks.clear()
            chunks.append(joined)
        chunk = chunks[0]
        if type(chunk) is not bytes:
            return False
        data, size = PyBytes_AS_STRING(chunk), PyBytes_GET_SIZE(chunk)
        # To let go of the interpreter's lock takes longer than this call, which does not wait.
        sent = c_send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT)
        if sent <= 0:
            return False
        self.pending -= sent
        self.written += sent
        self.writes += 1
        if sent == size:
            chunks.clear()
            return True
        chunks[0] = memoryview(chunk)[sent:]
        return False


cdef class PassState:
    """The pass of the loop: what was read, who has output, and whose publishes it took.

    `now` is the loop time at which the pass began. `end_scheduled`: its end comes by itself.
    `reads` counts the reads of the pass, which all go into `read_buffer`. `dirty` are the clients
    with output, `confirms_due` the channels with an answer to their publisher, `feeders` the
    clients that published, each with a bit for each shard that it fed. `held` has for each shard
    the clients that are not read until the shard has room. `looks`: a look before the loop sleeps
    is scheduled. `beside` does what the shard of this process has to do, if there is one.
    """

    def __cinit__(self):
        self.reads = Reads()
        self.dirty, self.feeders, self.held = [], [], []

    cpdef begin_pass(self):
        """Begin a pass before its first read, and see to its end."""
        if self.in_pass:
            return
        self.begin()
        if not self.end_scheduled:
            self.schedule_end_of_pass()

    cdef int begin(self) except -1:
        """Begin a pass, after a distance if reads are small and frequent."""
        cdef double wait = self.pace.wait()
        if wait > 0:
            if self.end_scheduled:  # what there is does not wait
                self.end_of_pass()
            self.keep_distance(wait)
        self.in_pass = True
        self.now = self.aio.time()
        return 0

    cpdef end_of_pass(self):
        """Let everything leave that the pass has produced."""
        cdef bint was_read = self.in_pass
        self.in_pass = self.end_scheduled = False
        if self.confirms_due:
            self.answer_publishers()
        if self._fed:
            self.hold_feeders()
        if self.dirty:
            self.write_out()
        if self.reads.may_wait() and self.links.flush(C_BATCH_BYTES_MIN, C_SHARED_BATCH_BYTES_MIN):
            self.flush_later()
        else:
            self.reads.held = 0
            self.links.flush()
        if not self.looks and self.spin.is_on:
            self.look_later(was_read)

    cpdef fed(self, SocketState client, uint64_t shards):
        """Note that a client published to these shards (bit mask) in this pass."""
        self._fed |= shards
        if not client.fed_shards:
            self.feeders.append(client)
        client.fed_shards |= shards

    cdef int answer_publishers(self) except -1:
        """Write acks and nacks that are due, and end channels that lost a publish in sequence."""
        cdef ConfirmsState confirms
        cdef list due = self.confirms_due[:]
        self.confirms_due.clear()
        for confirms in due:
            (<SocketState?> confirms.client.socket).write(confirms.answers())
            if confirms.failure is not None:
                confirms.client.fail(confirms.failure, confirms.channel)
                confirms.failure = None  # later the number may be another channel's
        return 0

    cdef int hold_feeders(self) except -1:
        """Do not read those who fed a shard that has no room any more."""
        cdef SocketState client
        cdef int shard
        for shard in self.links.crowded(self._fed):
            self.hold(
                shard,
                [each for each in self.feeders if (<SocketState> each).fed_shards >> shard & 1]
            )
        self._fed = 0
        for client in self.feeders:
            client.fed_shards = 0
        self.feeders.clear()
        return 0

    cdef int write_out(self) except -1:
        cdef SocketState client
        cdef list dirty = self.dirty
        self.dirty = []
        for client in dirty:
            try:
                client.flush()
            except Exception as error:
                self.cannot_write(client, error)
        return 0


cdef class SocketState:
    """The socket of a client, as far as it is written to at the end of a pass.

    `is_plain`: it is one of the kernel, without TLS. `frame_bytes_max` is what was agreed on.
    `is_writing`: the kernel had no room, and the loop says when it has. `fed_shards` has a bit for
    each shard that the client published to in this pass. `reads` counts the reads that got
    something.
    """

    cpdef flush(self):
        """Write as much as the kernel takes."""
        cdef OutputState output = self.output
        cdef Credit *first
        self.is_dirty = False
        if not self.is_plain or self.is_writing or self.lost or not output.send(self.fd):
            self.flush_slowly()
            return
        self.last_sent = self.loop.now
        while output._begun < output._ended and output._credits[output._begun].at <= output.written:
            first = output._credits + output._begun
            (<LinkState> self.link_of[first.shard]).credit(first.epoch, self.id, first.count)
            output._begun += 1
        if output._begun == output._ended:
            output._begun = output._ended = 0

    cpdef write(self, data):
        """Send frames that are ready."""
        if data and not self.lost and not self.closing:
            self.output.add(data)
            self.mark_dirty()

    cpdef mark_dirty(self):
        """Have the output written at the end of the pass."""
        if not self.is_dirty:
            self.is_dirty = True
            self.loop.dirty.append(self)
            if not self.loop.end_scheduled:
                self.loop.schedule_end_of_pass()

    cdef int write_later(
        self, bytes data, uint32_t shard, uint32_t epoch, uint64_t credit
    ) except -1:
        """Write deliveries at the end of the pass, then give `credit` bytes back to the shard."""
        if self.closing or self.lost:
            (<LinkState> self.link_of[shard]).credit(epoch, self.id, credit)
            return 0
        self.output.add_then_credit(data, shard, epoch, credit)
        self.mark_dirty()
        return 0


include "pace.pxi"
include "bind_runs.pxi"
