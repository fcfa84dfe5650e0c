# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Take in and hand out what is plain, one message at a time, without Python: the short way.

A batch of one message costs the Python way about 75,000 instructions, nearly all of them the
interpreter's. Here it costs a few thousand. The short way decides nothing. It does what the Python
way does, in the same order, with the same numbers, for these cases:

    PUBLISH   of a known peer, with the next batch number, all records for one plain queue, and the
              open segment of its store has room
    deliver   a plain queue whose next messages lie in the open segment, and either one consumer
              that may be given messages, or one message
    SETTLE    acks of attached consumers of plain queues, and credit of allotments behind them.
              `allot` takes the credit, which is the same function as on the Python way
    CREDIT    any
    answers   confirms of batches of which nothing was refused, deliveries, other messages

Each function first looks whether its case is one of these, without a change. If not, it returns
False and the caller goes the Python way with the same bytes. So a malformed message, a full
segment, a queue that is gone and all else that is rare has one implementation, in Python
(shard.py, consumer_requests.py, serving.py, queues/).

A queue is *plain* while `BacklogState.is_plain` (queues/state.pyx) says so: no rule of rules.py
applies to it, and no message brought a fact with it. A new rule makes its queues go the Python way
with no change here, because `Rules.is_empty` counts the rules. State of a queue, of its consumers
or of its peer that the Python way newly looks at on these ways must be looked at here too:
tests/shard/test_short_way.py plays random histories on both ways and compares all that can be seen.
plain_passes.pxi has whole passes of the shard's loop, which are made of these functions.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from cpython.array cimport array, clone
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcmp, memcpy

from shardmq.shardd.grown cimport reserve
from shardmq.shardd.queues.state cimport (
    BacklogState, ConsumerState, ConsumersState, DispatchState, QueueState, Ready, Unacked, Window,
)
from shardmq.shardd.store.format.layout cimport (
    MESSAGE_BYTES_MIN, NO_TTL, RECORD_HEADER, kind_of, message_bytes, u16, u32, u64,
)
from shardmq.shardd.store.open_segment cimport SegmentState, SegmentStoreState
from shardmq.shardd.wire.buffer cimport write_header

cdef enum:
    HEADER = 16
    PUBLISH_HEADER = 40
    RUN = 24
    SETTLE_ITEM = 24
    CREDIT_ITEM = 8
    CONFIRMED_BYTES = 24
    # Kinds of messages and of settles, as in wire/messages.py.
    PUBLISH = 1
    SETTLE = 3
    CONFIRMED = 4
    CREDIT = 5
    ACK = 0
    ALLOT = 4
    # Flags in the head of a PUBLISH.
    IS_SYNCED = 1
    IS_WANTED = 2
    IS_IN_SEQUENCE = 4
    HAS_LENT = 8
    # The only flag of a plain record.
    PERSISTENT = 1
    NO_PRIORITY = 255
    REDELIVERED = 1
    # States in which `deliver` leaves a queue.
    DONE = 0
    STOPPED = 1
    LEFT = 2
    # The most messages that are handed out in one step, as in queues/store.py.
    STEP_MESSAGES = 8192
    # Messages of at least this many bytes are not copied into a DELIVER (wire/codec.pyx).
    LARGE_BYTES = 16 << 10

cdef array ENTRIES = array("Q")

cdef extern from *:
    object PyType_GenericAlloc(PyTypeObject *kind, Py_ssize_t items)


cdef class HeldState:
    """The state of a batch that wants a confirm."""


cdef class PeerState:
    """The state of a peer."""


cdef class SyncsState:
    """The state of syncs: the numbers of the last begun and the last ended; if one is wanted."""


cdef class DeadLettersState:
    """The state of dead letters. While they are `idle` there is nothing to hand over."""


cdef class ShortWay(Taker):
    """The short way of one shard.

    The collections are those of its registry. `kinds` are the classes of queues, consumers, held
    batches and outgoing messages; objects of other classes go the Python way. `states` are the
    states of held batches. `timers` are those of `Serving`. A peer is told of credit for publishes
    from `credit_bytes` on. A pass hands out about `turn_bytes`, one queue about `queue_bytes`. A
    queue with consumers and more ready messages than `behind_messages`, or bytes than
    `behind_bytes`, goes the Python way: it may hold publishers (holding.py). While queues are in
    `watches`, the end of each pass does, too.
    """

    def __init__(
        self,
        *,
        dict senders not None,
        dict queues not None,
        dict dirty not None,
        set dirty_stores not None,
        dict peers not None,
        dict redeeming not None,
        SyncsState syncs not None,
        Tally batch_messages not None,
        Tally batch_bytes not None,
        tuple kinds not None,
        tuple states not None,
        list timers not None,
        DeadLettersState dead_letters not None,
        uint64_t credit_bytes,
        long long turn_bytes,
        long long queue_bytes,
        long long behind_messages,
        long long behind_bytes,
        dict watches not None,
        bint is_on=True,
    ):
        self.last_sender = b""
        self.timers = timers
        self.dead_letters = dead_letters
        self.turn_bytes = turn_bytes
        self.queue_bytes = queue_bytes
        self.behind_messages, self.behind_bytes = behind_messages, behind_bytes
        self.watches = watches
        self.senders = senders
        self.queues = queues
        self.dirty = dirty
        self.dirty_stores = dirty_stores
        self.peers = peers
        self.redeeming = redeeming
        self.syncs = syncs
        self.batch_messages = batch_messages
        self.batch_bytes = batch_bytes
        self.queue_kind, self.consumer_kind, self.held_kind, self.outgoing_kind = kinds
        _, self.waiting, self.confirmable, self.failed = states
        self.credit_bytes = credit_bytes
        self.is_on = is_on

    def __dealloc__(self):
        free(self.gathered.data)
        free(self.bodies.data)

    # -- in ----------------------------------------------------------------------------------------

    def receive(self, message, long long now):
        """Take in a message; return False, with nothing changed, if it has to go the Python way."""
        cdef Py_buffer view
        self.now = now
        if type(message) is bytes:
            return self.take_in(
                <const uint8_t *> PyBytes_AS_STRING(message), PyBytes_GET_SIZE(message)
            )
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            return self.take_in(<const uint8_t *> view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef bint take_in(self, const uint8_t *message, size_t size) except -1:
        cdef PeerState peer
        cdef uint8_t kind
        if size < HEADER or not self.is_on:
            return False
        kind = message[0]
        if kind != PUBLISH and kind != SETTLE and kind != CREDIT:
            return False
        if PyBytes_GET_SIZE(self.last_sender) != HEADER - 1 \
                or memcmp(PyBytes_AS_STRING(self.last_sender), message + 1, HEADER - 1):
            self.last_sender = PyBytes_FromStringAndSize(<const char *> message + 1, HEADER - 1)
        peer = self.senders.get(self.last_sender)
        if peer is None:
            return False
        if kind == PUBLISH:
            return self.publish(peer, message, size)
        if kind == SETTLE:
            return self.settle(peer, message, size)
        return self.credit(peer, message, size)

    cdef bint publish(self, PeerState peer, const uint8_t *message, size_t size) except -1:
        cdef uint64_t batch_number = u64(message + 16) if size >= PUBLISH_HEADER else 0
        cdef uint32_t flags
        cdef size_t start, records_size
        cdef uint32_t queue_id = 0
        cdef int kinds = 0
        cdef const uint8_t *records
        cdef QueueState queue
        cdef BacklogState backlog
        cdef SegmentStoreState store
        cdef SegmentState segment
        cdef HeldState held = None
        cdef bint is_empty
        if size < PUBLISH_HEADER:
            return False
        flags = u32(message + 36)
        records_size = u32(message + 28)
        start = PUBLISH_HEADER + RUN * <size_t> u32(message + 24)
        if size != start + records_size or flags & (IS_IN_SEQUENCE | HAS_LENT) or self.redeeming:
            return False
        if <uint64_t> u32(message + 32) * MESSAGE_BYTES_MIN > records_size:
            return False
        if peer.next_batch is None or <uint64_t> peer.next_batch != batch_number:
            return False
        records = message + start
        if not only_queue(records, records_size, &queue_id, &kinds):
            return False
        found = self.queues.get(queue_id)
        if type(found) is not self.queue_kind:
            return False
        queue = <QueueState> found
        backlog = queue.backlog
        if not backlog.is_plain() or not isinstance(backlog.store, SegmentStoreState):
            return False
        store = <SegmentStoreState> backlog.store
        segment = store.room_for(records_size)
        if segment is None:
            return False
        if not store.plan(records, records_size):
            return False
        peer.next_batch = batch_number + 1
        peer.taken += size
        self.batch_messages.count(u32(message + 32))
        self.batch_bytes.count(size)
        if flags & IS_WANTED:
            held = self.hold(peer, batch_number)
        store.append_bytes(records, records_size, segment)
        self.dirty_stores.add(store)
        if backlog.kinds != kinds:
            is_empty = not backlog.ready_count and not backlog.unacked_count
            backlog.kinds = kinds if is_empty else backlog.kinds | kinds
        backlog.counters.published += store.planned_messages
        (<Ready> backlog.levels[0]).push_all(
            <uint64_t *> store.offsets.data, store.planned_messages
        )
        backlog.ready_count += store.planned_messages
        backlog.ready_bytes += store.planned_bodies
        if backlog.is_watched or queue.dispatch.consumers.all:
            self.dirty[queue] = None
        if flags & IS_SYNCED:
            self.syncs.wanted = True
            if held is not None:
                held.sync = self.syncs.begun + 1
                held.state = self.waiting
        elif held is not None:
            held.state = self.confirmable
        return True

    cdef HeldState hold(self, PeerState peer, uint64_t batch):
        """Remember a batch, about to be appended, until it is confirmed.

        The state is that of a batch whose append breaks off. The caller sets it behind the append.
        """
        cdef HeldState held = <HeldState?> self.held_kind.__new__(self.held_kind)
        held.batch = batch
        held.state = self.failed
        held.refused = ()
        peer.held.append(held)
        return held

    cdef bint settle(self, PeerState peer, const uint8_t *message, size_t size) except -1:
        cdef const uint8_t *item = message + HEADER
        cdef const uint8_t *end = message + size
        cdef const uint8_t *allots = end
        cdef ConsumerState consumer
        cdef QueueState queue
        cdef DispatchState dispatch
        if (size - HEADER) % SETTLE_ITEM:
            return False
        while item < end:
            if u32(item + 4) == ALLOT:
                if allots == end:
                    allots = item
                item += SETTLE_ITEM
                continue
            # Behind an ALLOT nobody can say yet what the acks will find.
            if u32(item + 4) != ACK or item > allots:
                return False
            holder = peer.holders.get(u32(item))
            if holder is not None:
                if type(holder) is not self.consumer_kind:
                    return False
                consumer = <ConsumerState> holder
                if consumer.detached or type(consumer.queue) is not self.queue_kind:
                    return False
                queue = <QueueState> consumer.queue
                dispatch = queue.dispatch
                if dispatch.keys is not None or not queue.backlog.is_plain():
                    return False
                if not isinstance(queue.backlog.store, SegmentStoreState):
                    return False
            item += SETTLE_ITEM
        item = message + HEADER
        while item < allots:
            holder = peer.holders.get(u32(item))
            if holder is not None:
                self.ack(<ConsumerState> holder, u64(item + 8), u64(item + 16))
            item += SETTLE_ITEM
        while item < end:
            self.allot(peer, u32(item), u64(item + 8), u64(item + 16), self.now)
            item += SETTLE_ITEM
        return True

    cdef int ack(self, ConsumerState consumer, uint64_t first, uint64_t last) except -1:
        """Settle the deliveries first..last that the consumer still holds."""
        cdef Unacked unacked = consumer.unacked
        cdef QueueState queue = <QueueState> consumer.queue
        cdef BacklogState backlog = queue.backlog
        cdef Py_ssize_t start, stop, count = 0, i
        cdef uint64_t *entries
        cdef array taken
        if not unacked.range_of(first, last, &start, &stop):
            return 0
        entries = unacked.entries
        for i in range(start, stop):
            count += entries[i] != 0
        if not count:
            return 0
        if count == stop - start:
            settle(<SegmentStoreState> backlog.store, backlog, entries + start, count)
            backlog.unacked_bytes -= <long long> unacked.remove(start, stop)
        else:
            taken, size = unacked.settle(first, last)
            settle(
                <SegmentStoreState> backlog.store, backlog, <uint64_t *> taken.data.as_ulonglongs,
                count
            )
            backlog.unacked_bytes -= <long long> size
        backlog.unacked_count -= count
        backlog.counters.acked += count
        self.dirty_stores.add(backlog.store)
        if queue.dispatch.order is None:
            self.dirty[queue] = None
        return 0

    cdef bint credit(self, PeerState peer, const uint8_t *message, size_t size) except -1:
        cdef const uint8_t *item = message + HEADER
        cdef const uint8_t *end = message + size
        cdef Window window
        if (size - HEADER) % CREDIT_ITEM:
            return False
        while item < end:
            window = peer.windows.get(u32(item))
            if window is not None:
                window.room = min(window.full, window.room + u32(item + 4))
                if window.blocked:
                    for queue in window.unblocked():
                        self.dirty[queue] = None
            item += CREDIT_ITEM
        return True

    # -- out ---------------------------------------------------------------------------------------

    cpdef list turn_end(self, uint64_t now):
        """Return the messages to send after a pass.

        Return None if a part of the pass is left to the Python way. `given` is then what was handed
        out so far.
        """
        self.given = 0
        self.now = now
        if not self.is_on or self.watches or (self.timers and self.timers[0][0] <= now):
            return None
        self.given = self.serve_plain(0)
        if (self.dirty and self.given < self.turn_bytes) or not self.dead_letters.idle:
            return None
        return self.answers()

    def serve(self, long long given):
        """Serve the queues that have changed, up to the first that has to go the Python way.

        `given` are the bytes handed out in this pass so far. Queues are served until these are
        enough for a pass. Return how many they are then.
        """
        return self.serve_plain(given)

    cdef long long serve_plain(self, long long given) except -1:
        cdef PyObject *key
        cdef Py_ssize_t at
        cdef int state
        while self.is_on and given < self.turn_bytes:
            at = 0
            if not PyDict_Next(self.dirty, &at, &key, NULL):
                break
            found = <object> key
            if type(found) is not self.queue_kind:
                break
            state = DONE
            if not (<QueueState> found).deleted:
                given += self.deliver(<QueueState> found, &state)
            if state == LEFT:
                break
            del self.dirty[found]
            if state == STOPPED:
                self.dirty[found] = None
        return given

    cdef long long deliver(self, QueueState queue, int *state) except -1:
        """Hand out ready messages of a queue; return their bytes.

        `state` is set to DONE, to STOPPED if the queue was stopped for the sake of other queues, or
        to LEFT if the rest has to go the Python way.
        """
        cdef BacklogState backlog = queue.backlog
        cdef DispatchState dispatch = queue.dispatch
        cdef ConsumersState consumers = dispatch.consumers
        cdef ConsumerState taker
        cdef long long given = 0, handed
        cdef bint is_behind, is_store, is_stuck = False
        if (
            not backlog.is_plain()
            or dispatch.order is not None
            or dispatch.keys is not None
            or consumers.has_allotments
        ):
            state[0] = LEFT
            return 0
        state[0] = DONE
        if not backlog.ready_count or not consumers.all:
            if dispatch.is_stuck and consumers.all:
                dispatch.note_stuck(False, self.now)
            return 0
        is_behind = (
            backlog.ready_count > self.behind_messages or backlog.ready_bytes > self.behind_bytes
        )
        is_store = isinstance(backlog.store, SegmentStoreState)
        if is_behind or not is_store or (consumers.only is None and backlog.ready_count > 1):
            state[0] = LEFT
            return 0
        while backlog.ready_count:
            taker = self.taker(queue, consumers)
            if taker is None:
                is_stuck = True
                break
            if given > self.queue_bytes - (self.queue_bytes >> 3):
                state[0] = STOPPED
                break
            handed = self.deal(
                queue, <SegmentStoreState> backlog.store, taker, consumers.room,
                self.queue_bytes - given
            )
            if handed < 0:
                state[0] = LEFT
                break
            given += handed
            if len(consumers.all) > 1:
                took(consumers.levels, taker)
        if is_stuck != dispatch.is_stuck and state[0] != LEFT:
            dispatch.note_stuck(is_stuck, self.now)
        return given

    cdef ConsumerState taker(self, QueueState queue, ConsumersState consumers):
        """Return the consumer whose turn it is, None if none has room: as Consumers.takers does."""
        cdef ConsumerState taker, found
        cdef long long room
        if consumers.only is not None:
            taker = <ConsumerState> consumers.only[0]
            consumers.room = room_of(taker, queue)
            return taker if consumers.room > 0 else None
        for level in consumers.levels:
            found = None
            consumers.room = 0
            for each in <list> level:
                taker = <ConsumerState> each
                room = room_of(taker, queue)
                if room > consumers.room:
                    consumers.room = room
                if room > 0 and found is None:
                    found = taker
            if found is not None:
                return found
        return None

    cdef long long deal(
        self, QueueState queue, SegmentStoreState store, ConsumerState taker, long long most,
        long long bytes_max,
    ) except? -2:
        """Give a consumer as many messages as it has room for; return their bytes.

        Returns -1, with nothing done, if a message does not lie in the open segment.
        """
        cdef BacklogState backlog = queue.backlog
        cdef Ready level = <Ready> backlog.levels[0]
        cdef long long room = min(taker.window.room, bytes_max), given = 0, handed
        cdef Py_ssize_t count, stop, left = 1
        cdef const uint64_t *entries = level.plain_head(&count)
        if backlog.ready_count > 1:
            left = room // (backlog.ready_bytes // backlog.ready_count + 1) + 1
            left = min(STEP_MESSAGES, min(most, min(left, <Py_ssize_t> backlog.ready_count)))
        if (
            count < left
            or not isinstance(taker.peer, PeerState)
            or (taker.no_ack and taker.unacked.stop)
        ):
            return -1
        if not store.is_open() or not store.holds(entries[0]) or not store.holds(entries[left - 1]):
            return -1
        while left and (room > 0 or not given):
            entries = level.plain_head(&count)
            stop = 1
            while stop < left and (entries[stop] ^ entries[0]) & REDELIVERED == 0:
                stop += 1
            count = self.hand_over(queue, store, taker, entries, stop, max(room, 1), &handed)
            given += handed
            room -= handed
            left -= count
            if count < stop:
                break
        return given

    cdef Py_ssize_t hand_over(
        self, QueueState queue, SegmentStoreState store, ConsumerState taker,
        const uint64_t *entries, Py_ssize_t stop, long long bytes_max, long long *handed,
    ) except -1:
        """Give a consumer the first messages, up to `stop`, as far as they fit, at least one.

        Return how many these are; `handed` is set to their bytes.
        """
        cdef BacklogState backlog = queue.backlog
        cdef PeerState peer = <PeerState> taker.peer
        cdef Unacked unacked = taker.unacked
        cdef SegmentState segment = store._segments.open
        cdef const uint8_t *data = <const uint8_t *> PyByteArray_AS_STRING(segment.buffer)
        cdef const uint8_t *blob = data + position_of(entries[0])
        cdef const uint8_t *message
        cdef uint32_t *bodies
        cdef uint64_t blob_bytes = 0, body_bytes = 0, size, number
        cdef Py_ssize_t count = 0
        cdef bint is_again = entries[0] & REDELIVERED
        cdef bint is_whole = True
        self.gathered.used = self.bodies.used = 0
        reserve(&self.bodies, stop * sizeof(uint32_t))
        bodies = <uint32_t *> self.bodies.data
        while count < stop:
            message = data + position_of(entries[count])
            size = message_bytes(message, data + segment.used - message)
            if count and blob_bytes + size > <uint64_t> bytes_max:
                break
            if not size:
                raise ValueError(f"no message at entry {entries[count]}")
            if is_whole and message != blob + blob_bytes:
                is_whole = False
                self.gather(blob, blob_bytes)
            if not is_whole:
                self.gather(message, size)
            bodies[count] = u32(message)
            body_bytes += bodies[count]
            blob_bytes += size
            count += 1
        number = unacked.first + unacked.stop
        if taker.no_ack:
            unacked.first += count
        else:
            unacked.append(entries, bodies, count)
        if is_again:
            backlog.counters.redelivered += count
        if blob_bytes < LARGE_BYTES:
            peer.writer.section(
                <uint32_t> taker.connection, <uint16_t> taker.channel, <uint32_t> taker.number,
                number, 1 if is_again else 0, <uint32_t> count,
                blob if is_whole else self.gathered.data, blob_bytes,
            )
        else:
            # A view is good until the next append. Nothing is appended before the end of the pass.
            large = (
                memoryview(segment.buffer)[blob - data:blob - data + blob_bytes].toreadonly()
                if is_whole
                else PyBytes_FromStringAndSize(<const char *> self.gathered.data, blob_bytes)
            )
            peer.writer.add(
                taker.connection, taker.channel, taker.number, number, is_again, count, large
            )
        peer.has_news = True
        taker.window.room -= blob_bytes
        taker.window.served = queue
        backlog.ready_count -= count
        backlog.ready_bytes -= body_bytes
        backlog.counters.delivered += count
        if taker.no_ack:
            backlog.counters.delivered_auto += count
            settle(store, backlog, entries, count)
        else:
            backlog.unacked_count += count
            backlog.unacked_bytes += body_bytes
        (<Ready> backlog.levels[0]).pass_on(count)
        handed[0] = blob_bytes
        return count

    cdef int gather(self, const uint8_t *data, uint64_t size) except -1:
        reserve(&self.gathered, size)
        memcpy(self.gathered.data + self.gathered.used, data, size)
        self.gathered.used += size
        return 0

    cpdef list answers(self):
        """Return the messages to send: confirms, replies, and deliveries."""
        cdef list outgoing = []
        cdef PeerState peer
        for each in self.peers.values():
            peer = <PeerState> each
            if len(peer.held):
                self.confirm(peer)
            if peer.has_news or peer.taken >= self.credit_bytes:
                self.take(peer, outgoing)
        return outgoing

    cdef int confirm(self, PeerState peer) except -1:
        """Confirm batches in their order, up to the first that is not confirmable."""
        cdef HeldState held = None
        cdef Py_ssize_t count = 0
        cdef bytes message
        for each in peer.held:
            held = <HeldState> each
            if held.state is self.waiting and held.sync <= self.syncs.ended:
                held.state = self.confirmable
            if held.state is not self.confirmable:
                break
            if held.refused:
                peer.confirm(self.syncs.ended)
                return 0
            count += 1
        if not count:
            return 0
        while count:
            held = <HeldState> peer.held.popleft()
            count -= 1
        message = PyBytes_FromStringAndSize(NULL, CONFIRMED_BYTES)
        write_header(
            <uint8_t *> PyBytes_AS_STRING(message), CONFIRMED, peer.writer.peer,
            peer.writer.incarnation, peer.writer.epoch, peer.writer.shard,
        )
        memcpy(PyBytes_AS_STRING(message) + HEADER, &held.batch, 8)
        peer.after_deliveries.append(message)
        peer.has_news = True
        return 0

    cdef int take(self, PeerState peer, list outgoing) except -1:
        """Move all messages that wait for this peer to `outgoing`."""
        if peer.taken >= self.credit_bytes or peer.has_freed:
            peer.take(outgoing)
            return 0
        peer.has_news = False
        if peer.before_deliveries:
            for message in peer.before_deliveries:
                outgoing.append(self.outgoing(peer.endpoint, message))
            peer.before_deliveries.clear()
        deliveries = peer.writer.take_parts()
        if deliveries is not None:
            outgoing.append(self.outgoing(peer.endpoint, deliveries))
        if peer.after_deliveries:
            for message in peer.after_deliveries:
                outgoing.append(self.outgoing(peer.endpoint, message))
            peer.after_deliveries.clear()
        return 0

    cdef object outgoing(self, object endpoint, object message):
        """Return Outgoing(endpoint, message), made without a call."""
        made = PyType_GenericAlloc(<PyTypeObject *> self.outgoing_kind, 2)
        Py_INCREF(endpoint)
        PyTuple_SET_ITEM(made, 0, endpoint)
        Py_INCREF(message)
        PyTuple_SET_ITEM(made, 1, message)
        return made


cdef bint only_queue(const uint8_t *records, size_t size, uint32_t *queue_id, int *kinds) noexcept:
    """Find the queue and the kinds of all records.

    Return False if there are several, or if a record is not plain.

    The records of a plain queue have no ttl, no priority and no flag but PERSISTENT.
    """
    cdef size_t at = 0, length
    cdef const uint8_t *record
    while at < size:
        if size - at < RECORD_HEADER + 4:
            return False
        record = records + at
        length = u32(record)
        if length < RECORD_HEADER + 4 or length > size - at:
            return False
        if (
            u16(record + 24) != 1
            or u32(record + 16) != <uint32_t> NO_TTL
            or record[26] != NO_PRIORITY
        ):
            return False
        if record[27] & ~PERSISTENT or (at and u32(record + RECORD_HEADER) != queue_id[0]):
            return False
        queue_id[0] = u32(record + RECORD_HEADER)
        kinds[0] |= kind_of(record[27])
        at += length
    return size > 0


cdef inline uint64_t position_of(uint64_t entry) noexcept:
    return <uint32_t> entry >> 4


cdef inline long long room_of(ConsumerState consumer, QueueState queue) except? -1:
    """Return how many messages a consumer without an allotment may take, as Consumer.room does."""
    if consumer.window.room <= 0:
        consumer.window.blocked[queue] = None
        return 0
    return consumer.prefetch - consumer.unacked.count if consumer.prefetch else 1 << 30


cdef int took(list levels, ConsumerState last) except -1:
    """Note that `last` got the last message, as Consumers.took does."""
    cdef list level
    for each in levels:
        level = <list> each
        if len(level) > 1 and (<ConsumerState> level[0]).priority == last.priority:
            at = level.index(last) + 1
            level[:] = level[at:] + level[:at]
    return 0


cdef int settle(
    SegmentStoreState store, BacklogState backlog, const uint64_t *entries, Py_ssize_t count
) except -1:
    """Settle messages in the store of their queue."""
    cdef array taken
    if store.settle_here(backlog.id, entries, count, backlog.durable):
        return 0
    taken = clone(ENTRIES, count, False)
    memcpy(taken.data.as_ulonglongs, entries, count * sizeof(uint64_t))
    store.settle(backlog.id, taken, backlog.durable)
    return 0


include "plain_passes.pxi"
