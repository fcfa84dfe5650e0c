# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keep how far each producer has come in each queue, and look up each message of a batch.

A message IN_SEQUENCE names its producer and a sequence, which rises (sequence.pxd). A message whose
sequence is not above the highest that the queue has of the producer is a repetition. A message that
is refused leaves a gap: messages that the producer sent behind it are refused too, until the gap is
filled. Else the missing message would later look like a repetition.

The table keeps, in memory only, a checksum of the body of the first and the last SAMPLES messages
that a queue has stored of a producer. So a repetition of one of these with another body is
recognised. It is passed over like any repetition, and `Screened.altered` names it.

This file knows the shape of the bytes (drawn in record.pyx) and nothing of files, queues or time.

    place    0  u64 highest sequence + 1   8  u64 ms since epoch, when the producer was last heard
            16  u32 queue id              20  u8 n, producer[n]
"""

from cpython cimport array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.sequence cimport Sequence, sequence_read
from shardmq.shardd.store.format.layout cimport (
    RECORD_HEADER,
    message_bytes,
    put16,
    put32,
    record_bytes,
    u16,
    u32,
    u64,
)

cdef extern from "../../crc32c.h" nogil:
    uint32_t c_crc32c "crc32c"(uint32_t crc, const uint8_t *p, size_t n)
    void crc32c_start()

crc32c_start()

cdef enum:
    IN_SEQUENCE = 2
    ABSTRACT_HEADER = 20
    PLACE_HEADER = 21
    # What becomes of a message in a queue.
    KEPT = 0
    REPEATED = 1
    REFUSED = 2
    ALTERED = 3  # repeated, with another body
    SAMPLES = 4  # the first ones, and as many of the last ones

cdef uint64_t UNBOUNDED = 0xFFFFFFFFFFFFFFFF
cdef array.array _I = array.array("I")


cdef struct Place:
    uint64_t next  # the highest sequence + 1; 0: none is stored
    uint64_t gap  # the lowest that was refused + 1; 0: none was
    uint64_t last_ms
    uint32_t queue_id
    uint32_t hashed
    uint8_t *producer
    uint8_t length
    uint8_t changed  # it is among `changed`
    uint32_t samples  # taken so far: SAMPLES that stay, then SAMPLES in turn
    uint32_t sums[8]  # crc32c of bodies
    uint64_t sampled[8]  # their sequences


cdef struct Change:  # of a batch that may still be undone
    uint32_t index
    uint64_t next
    uint64_t gap
    uint64_t stored


cdef struct Bound:  # of a queue that refuses what is too much
    uint32_t queue_id
    int64_t length  # messages there, without those that consumers can take
    uint64_t length_max
    uint64_t size
    uint64_t size_max


cdef inline uint32_t hash_of(
    uint32_t queue_id, const uint8_t *producer, uint32_t length
) noexcept nogil:
    cdef uint64_t hashed = <uint64_t>0xcbf29ce484222325 ^ queue_id
    cdef uint32_t i
    hashed *= <uint64_t>0x100000001b3
    for i in range(length):
        hashed = (hashed ^ producer[i]) * <uint64_t>0x100000001b3
    return <uint32_t>(hashed ^ hashed >> 32)


cdef inline int place_in(const uint8_t *message, Sequence *found) noexcept nogil:
    """Return 1 if the stored message says its place."""
    cdef const uint8_t *props = message + 9 + message[8]
    props += 1 + props[0]
    return sequence_read(props, u32(message + 4), found)


cdef inline uint32_t sum_of(const uint8_t *message) noexcept nogil:
    """Return a checksum of the body of a stored message."""
    cdef const uint8_t *props = message + 9 + message[8]
    props += 1 + props[0]
    return c_crc32c(0, props + u32(message + 4), u32(message))


cdef inline void take_sample(Place *place, uint64_t number, uint32_t sum) noexcept nogil:
    cdef uint32_t at = (
        place.samples if place.samples < SAMPLES else SAMPLES + place.samples % SAMPLES
    )
    place.sampled[at] = number
    place.sums[at] = sum
    place.samples += 1
    if place.samples == 0:  # all of them are taken, and stay so
        place.samples = 2 * SAMPLES


cdef inline bint is_another(
    const Place *place, uint64_t number, const uint8_t *message
) noexcept nogil:
    """Return whether a message of that sequence was stored that surely had another body."""
    cdef uint32_t i, sum = 0, count = place.samples if place.samples < 2 * SAMPLES else 2 * SAMPLES
    cdef bint found = False
    for i in range(count):
        if place.sampled[i] != number:
            continue
        if not found:
            sum = sum_of(message)
            found = True
        if place.sums[i] == sum:
            return False
    return found


class Screened:
    """A batch without the messages that are not to be stored.

    `origins` has for each message of `records` its ordinal in the batch; it is None if no message
    was left out. `repeated` counts messages by queue id. `refused` has ordinals in the batch,
    `known` those of messages that some queue had already, and `altered` those of known messages
    that a queue had with another body.
    """

    __slots__ = ("altered", "known", "origins", "records", "refused", "repeated")

    def __init__(self, records, origins, repeated, refused, known, altered):
        self.records = records
        self.origins = origins
        self.repeated = repeated
        self.refused = refused
        self.known = known
        self.altered = altered


cdef class Sequences:
    """The table of one store.

    `screen` a batch, then append the records that `screen` returns; `undo` if that failed.
    """

    cdef Place *places
    cdef uint32_t count, room
    cdef uint32_t *slots  # index + 1, 0: free
    cdef uint32_t mask
    cdef Grown changed, changes

    def __cinit__(self):
        self.slots = <uint32_t*>calloc(64, 4)
        self.mask = 63
        if self.slots == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.count):
            free(self.places[i].producer)
        free(self.places)
        free(self.slots)
        free(self.changed.data)
        free(self.changes.data)

    def __len__(self):
        return self.count

    # -- the table ---------------------------------------------------------------------------------

    cdef int64_t find(
        self, uint32_t queue_id, const uint8_t *producer, uint32_t length
    ) except -1 nogil:
        """Return the index of the place, a new one if there is none."""
        cdef uint32_t hashed = hash_of(queue_id, producer, length)
        cdef uint32_t at = hashed & self.mask
        cdef Place *place
        while self.slots[at] != 0:
            place = &self.places[self.slots[at] - 1]
            if (
                place.hashed == hashed
                and place.queue_id == queue_id
                and place.length == length
                and memcmp(place.producer, producer, length) == 0
            ):
                return self.slots[at] - 1
            at = (at + 1) & self.mask
        if self.count == self.room:
            self.grow()
            at = hashed & self.mask
            while self.slots[at] != 0:
                at = (at + 1) & self.mask
        place = &self.places[self.count]
        memset(place, 0, sizeof(Place))
        place.producer = <uint8_t*>malloc(length)
        if place.producer == NULL:
            with gil:
                raise MemoryError
        memcpy(place.producer, producer, length)
        place.length = <uint8_t>length
        place.queue_id = queue_id
        place.hashed = hashed
        self.count += 1
        self.slots[at] = self.count
        return self.count - 1

    cdef int grow(self) except -1 nogil:
        cdef uint32_t room = self.room * 2 if self.room else 32
        cdef Place *moved = <Place*>realloc(self.places, room * sizeof(Place))
        if moved == NULL:
            with gil:
                raise MemoryError
        self.places = moved
        self.room = room
        self.put_in_slots(room * 2)
        return 0

    cdef int put_in_slots(self, uint32_t size) except -1 nogil:
        cdef uint32_t *slots = <uint32_t*>calloc(size, 4)
        cdef uint32_t i, at
        if slots == NULL:
            with gil:
                raise MemoryError
        free(self.slots)
        self.slots = slots
        self.mask = size - 1
        for i in range(self.count):
            at = self.places[i].hashed & self.mask
            while slots[at] != 0:
                at = (at + 1) & self.mask
            slots[at] = i + 1
        return 0

    cdef int note_change(self, uint32_t index) except -1 nogil:
        cdef Place *place = &self.places[index]
        if not place.changed:
            reserve(&self.changed, 4)
            put32(self.changed.data + self.changed.used, index)
            self.changed.used += 4
            place.changed = 1
        return 0

    cdef int raise_to(self, uint32_t index, uint64_t next, uint64_t ms) except -1 nogil:
        cdef Place *place = &self.places[index]
        if ms > place.last_ms:
            place.last_ms = ms
        if next > place.next:
            place.next = next
            self.note_change(index)
        return 0

    # -- a batch -----------------------------------------------------------------------------------

    def screen(self, const uint8_t[::1] records not None, dict rooms not None, uint32_t only=0):
        """Return which messages of the batch are to be stored, as Screened.

        With `only`, screen for that queue alone: the table is that queue's, and each record goes on
        naming all its queues. `rooms` has for queues that refuse publishes, by id, (messages that
        count, how many may, bytes that count, how many may); None is no bound. Records that are not
        whole are left to `Batch.plan`.
        """
        cdef const uint8_t *start = &records[0] if records.shape[0] else NULL
        cdef uint64_t total = records.shape[0]
        cdef Grown fates
        cdef Bound *bounds = NULL
        cdef uint32_t bound_count = len(rooms)
        cdef int altered
        cdef dict repeated = {}
        cdef set refused = set(), known = set(), others = set()
        memset(&fates, 0, sizeof(Grown))
        self.changes.used = 0
        try:
            bounds = bounds_of(rooms)
            with nogil:
                altered = self.judge(start, total, bounds, bound_count, only, &fates)
            if altered <= 0:
                return Screened(records, None, repeated, [], [], [])
            kept, origins = rebuilt(start, total, &fates, only, repeated, refused, known, others)
            return Screened(kept, origins, repeated, sorted(refused), sorted(known), sorted(others))
        finally:
            free(fates.data)
            free(bounds)

    cdef int judge(self, const uint8_t *start, uint64_t total, Bound *bounds, uint32_t bound_count,
                   uint32_t only, Grown *fates) except -2 nogil:
        """Append a fate for each (message, queue) of records IN_SEQUENCE, in their order.

        Return whether records change, or -1 if a record is not whole.
        """
        cdef uint64_t at = 0, length, place, size, ms
        cdef const uint8_t *record
        cdef uint32_t i, j, count, queues
        cdef uint8_t fate
        cdef Sequence found
        cdef int altered = 0, known
        while at < total:
            record = start + at
            length = record_bytes(record, total - at)
            if length == 0:
                return -1
            count = u32(record + 20)
            queues = u16(record + 24)
            place = RECORD_HEADER + 4 * <uint64_t>queues
            if not record[27] & IN_SEQUENCE:
                for i in range(count if bound_count else 0):
                    size = message_bytes(record + place, length - place)
                    if size == 0:
                        return -1
                    for j in range(queues):
                        takes(
                            bounds, bound_count, u32(record + RECORD_HEADER + 4 * j),
                            u32(record + place)
                        )
                    place += size
                at += length
                continue
            ms = u64(record + 8)
            reserve(fates, <size_t>count * queues)
            for i in range(count):
                size = message_bytes(record + place, length - place)
                if size == 0:
                    return -1
                known = place_in(record + place, &found)
                for j in range(queues):
                    fate = KEPT
                    if known > 0 and (not only or u32(record + RECORD_HEADER + 4 * j) == only):
                        fate = self.fate_of(
                            0 if only else u32(record + RECORD_HEADER + 4 * j), &found, ms, bounds,
                            bound_count, record + place
                        )
                    altered |= fate
                    fates.data[fates.used] = fate
                    fates.used += 1
                place += size
            altered |= queues > 1 and not only
            at += length
        return 1 if altered else 0

    cdef uint8_t fate_of(
        self, uint32_t queue_id, Sequence *found, uint64_t ms, Bound *bounds, uint32_t bound_count,
        const uint8_t *message
    ) except 255 nogil:
        cdef uint32_t index = <uint32_t>self.find(queue_id, found.producer, found.length)
        cdef Place *place = &self.places[index]
        cdef uint64_t next = found.number + 1
        cdef Change *change
        if ms > place.last_ms:
            place.last_ms = ms
        if next <= place.next:
            return ALTERED if is_another(place, found.number, message) else REPEATED
        if place.gap and next > place.gap:
            return REFUSED
        if bound_count and not takes(bounds, bound_count, queue_id, u32(message)):
            place.gap = next
            return REFUSED
        reserve(&self.changes, sizeof(Change))
        change = <Change*>(self.changes.data + self.changes.used)
        change.index = index
        change.next = place.next
        change.gap = place.gap
        change.stored = next
        self.changes.used += sizeof(Change)
        place.next = next
        take_sample(place, found.number, sum_of(message))
        if place.gap == next:
            place.gap = 0
        self.note_change(index)
        return KEPT

    def undo(self) -> None:
        """Undo `screen` of the last batch, as if its messages had been refused."""
        cdef Change *changes = <Change*>self.changes.data
        cdef size_t i = self.changes.used // sizeof(Change)
        cdef Place *place
        while i:
            i -= 1
            place = &self.places[changes[i].index]
            place.next = changes[i].next
            place.gap = changes[i].stored
        self.changes.used = 0

    # -- what lasts --------------------------------------------------------------------------------

    def take_changes(self, bint everything=False) -> bytes:
        """Return the places that changed since the last call, or all places."""
        cdef Grown out
        cdef uint32_t i, count = self.count if everything else <uint32_t>(self.changed.used // 4)
        memset(&out, 0, sizeof(Grown))
        try:
            for i in range(count):
                self.add_place(&out, i if everything else u32(self.changed.data + 4 * i))
            for i in range(<uint32_t>(self.changed.used // 4)):
                self.places[u32(self.changed.data + 4 * i)].changed = 0
            self.changed.used = 0
            return PyBytes_FromStringAndSize(<char*>out.data, out.used)
        finally:
            free(out.data)

    def all_places(self) -> bytes:
        """Return all places, for another table; `take_changes` returns what it would have."""
        cdef Grown out
        cdef uint32_t i
        memset(&out, 0, sizeof(Grown))
        try:
            for i in range(self.count):
                self.add_place(&out, i)
            return PyBytes_FromStringAndSize(<char*>out.data, out.used)
        finally:
            free(out.data)

    cdef int add_place(self, Grown *out, uint32_t index) except -1:
        cdef Place *place = &self.places[index]
        cdef uint8_t *p
        if place.next == 0:
            return 0
        reserve(out, PLACE_HEADER + place.length)
        p = out.data + out.used
        memcpy(p, &place.next, 8)
        memcpy(p + 8, &place.last_ms, 8)
        put32(p + 16, place.queue_id)
        p[20] = place.length
        memcpy(p + PLACE_HEADER, place.producer, place.length)
        out.used += PLACE_HEADER + place.length
        return 0

    def add(self, bytes places not None) -> None:
        """Add places that `take_changes` has returned in another life, or `all_places` elsewhere.

        Raise ValueError if one is not whole.
        """
        cdef const uint8_t *p = <const uint8_t*>PyBytes_AS_STRING(places)
        cdef const uint8_t *stop = p + PyBytes_GET_SIZE(places)
        while p < stop:
            if stop - p < PLACE_HEADER or stop - p - PLACE_HEADER < p[20]:
                raise ValueError("places end too early")
            self.raise_to(
                <uint32_t>self.find(u32(p + 16), p + PLACE_HEADER, p[20]), u64(p), u64(p + 8)
            )
            p += PLACE_HEADER + p[20]

    def gather(
        self, bytearray data not None, bytes abstracts not None, unsigned long long until
    ) -> bool:
        """Add the messages of the records IN_SEQUENCE that begin below `until`.

        `data` holds the bytes of the records at their positions, and `abstracts` are those of good
        records, as `scan` returns them. Return whether there are such records, below `until` or
        behind.
        """
        cdef const uint8_t *source = <const uint8_t*>PyByteArray_AS_STRING(data)
        cdef uint64_t size = PyByteArray_GET_SIZE(data)
        cdef const uint8_t *at = <const uint8_t*>PyBytes_AS_STRING(abstracts)
        cdef const uint8_t *stop = at + PyBytes_GET_SIZE(abstracts)
        cdef uint32_t i, j, count, queues, position
        cdef const uint8_t *positions
        cdef Sequence found
        cdef bint some = False
        while at < stop:
            count = u32(at + 12)
            queues = u16(at + 16)
            positions = at + ABSTRACT_HEADER + 4 * <size_t>queues
            if at[19] & IN_SEQUENCE:
                some = True
                for i in range(count):
                    position = u32(positions + 8 * i)
                    if (
                        position >= until
                        or position >= size
                        or message_bytes(source + position, size - position) == 0
                    ):
                        break
                    if place_in(source + position, &found) <= 0:
                        continue
                    for j in range(queues):
                        self.gather_one(
                            u32(at + ABSTRACT_HEADER + 4 * j), &found, u64(at), source + position
                        )
            at = positions + 8 * <size_t>count
        return some

    def gather_chunk(self, bytearray data not None, size_t at) -> bool:
        """Add the messages of a good chunk, which is all there; return whether it is IN_SEQUENCE.

        The table is that of the stream of the chunk alone.
        """
        cdef const uint8_t *chunk = <const uint8_t*>PyByteArray_AS_STRING(data) + at
        cdef uint64_t length, place, size
        cdef uint32_t i
        cdef Sequence found
        if (
            at + RECORD_HEADER > <size_t>PyByteArray_GET_SIZE(data)
            or at + u32(chunk) > <size_t>PyByteArray_GET_SIZE(data)
        ):
            raise ValueError("the chunk is not all there")
        if not chunk[27] & IN_SEQUENCE:
            return False
        length = u32(chunk)
        place = RECORD_HEADER + 4 * <uint64_t>u16(chunk + 24)
        for i in range(u32(chunk + 20)):
            size = message_bytes(chunk + place, length - place)
            if size == 0:
                raise ValueError("a chunk with a good crc is not well made")
            if place_in(chunk + place, &found) > 0:
                self.gather_one(0, &found, u64(chunk + 8), chunk + place)
            place += size
        return True

    cdef int gather_one(
        self, uint32_t queue_id, Sequence *found, uint64_t ms, const uint8_t *message
    ) except -1:
        """Add a stored message."""
        cdef uint32_t index = <uint32_t>self.find(queue_id, found.producer, found.length)
        take_sample(&self.places[index], found.number, sum_of(message))
        return self.raise_to(index, found.number + 1, ms)

    def sweep(self, unsigned long long heard_before_ms, queue_ids=None, forgotten=None) -> int:
        """Forget producers that were last heard before that time; return how many are forgotten.

        Those of queues that are not among `queue_ids`, or are among `forgotten`, are forgotten,
        too.
        """
        cdef uint32_t i, kept = 0, before = self.count
        cdef Place place
        for i in range(before):
            place = self.places[i]
            if (
                place.last_ms < heard_before_ms
                or (queue_ids is not None and place.queue_id not in queue_ids)
                or (forgotten is not None and place.queue_id in forgotten)
            ):
                free(place.producer)
                continue
            self.places[kept] = place
            kept += 1
        if kept == before:
            return 0
        self.count = kept
        self.changes.used = self.changed.used = 0
        for i in range(kept):
            if self.places[i].changed:
                self.places[i].changed = 0
                self.note_change(i)
        self.put_in_slots(self.mask + 1)
        return before - kept

    def heard_before(self, unsigned long long share) -> int:
        """Return a time before which about one in `share` of the producers were last heard."""
        cdef uint32_t i, step = max(1, self.count // 1000)
        times = sorted(self.places[i].last_ms for i in range(0, self.count, step))
        return times[len(times) // share] + 1 if times else 0

    def has_queue(self, unsigned int queue_id) -> bool:
        """Return whether a message of some producer is stored in that queue."""
        cdef uint32_t i
        for i in range(self.count):
            if self.places[i].queue_id == queue_id and self.places[i].next:
                return True
        return False

    def highest(self, unsigned int queue_id, bytes producer not None):
        """Return the highest sequence of that producer in that queue, None if there is none."""
        cdef uint32_t i
        cdef Place *place
        for i in range(self.count):
            place = &self.places[i]
            if place.queue_id == queue_id and place.next and \
                    PyBytes_FromStringAndSize(<char*>place.producer, place.length) == producer:
                return place.next - 1
        return None


cdef Bound *bounds_of(dict rooms) except? NULL:
    """Return the bounds of queues with limits; the caller frees them."""
    cdef Bound *bounds = NULL
    cdef size_t i = 0
    if not rooms:
        return NULL
    bounds = <Bound*>calloc(len(rooms), sizeof(Bound))
    if bounds == NULL:
        raise MemoryError
    for queue_id, (length, length_max, size, size_max) in rooms.items():
        bounds[i].queue_id = queue_id
        bounds[i].length = length
        bounds[i].length_max = UNBOUNDED if length_max is None else length_max
        bounds[i].size = size
        bounds[i].size_max = UNBOUNDED if size_max is None else size_max
        i += 1
    return bounds


cdef bint takes(
    Bound *bounds, uint32_t count, uint32_t queue_id, uint32_t body_bytes
) noexcept nogil:
    """Return whether the queue has room for this message too, and count the message if so.

    The rule is the same as that of Queue.
    """
    cdef uint32_t i
    cdef Bound *room
    for i in range(count):
        room = &bounds[i]
        if room.queue_id != queue_id:
            continue
        if room.length >= 0 and (
            <uint64_t>room.length + 1 > room.length_max or room.size + body_bytes > room.size_max
        ):
            return False
        room.length += 1
        if room.length > 0:
            room.size += body_bytes
        return True
    return True


cdef tuple rebuilt(
    const uint8_t *start, uint64_t total, Grown *fates, uint32_t only, dict repeated, set refused,
    set known, set altered
):
    """Return (records, origins): the batch without the messages that are not kept.

    Each record IN_SEQUENCE then is for one queue, so that a recovery finds in a record exactly what
    its queue has taken. With `only`, messages that are not kept in that queue are left out, the ids
    of other queues stay, and records that do not name the queue may go.
    """
    cdef Grown out, origins
    cdef uint64_t at = 0, length, place, size
    cdef const uint8_t *record
    cdef const uint8_t *fate = fates.data
    cdef uint32_t i, j, count, queues, named, kept, ordinal = 0
    cdef size_t record_at
    cdef array.array found
    memset(&out, 0, sizeof(Grown))
    memset(&origins, 0, sizeof(Grown))
    try:
        while at < total:
            record = start + at
            length = u32(record)
            count = u32(record + 20)
            queues = u16(record + 24)
            if not record[27] & IN_SEQUENCE:
                reserve(&out, length)
                memcpy(out.data + out.used, record, length)
                out.used += length
                for i in range(count):
                    add32(&origins, ordinal + i)
            else:
                for j in range(queues):
                    if only and u32(record + RECORD_HEADER + 4 * j) != only:
                        continue
                    reserve(&out, length)
                    record_at = out.used
                    named = queues if only else 1
                    memcpy(out.data + record_at, record, RECORD_HEADER)
                    memcpy(
                        out.data + record_at + RECORD_HEADER,
                        record + RECORD_HEADER + (0 if only else 4 * j), 4 * named
                    )
                    out.used += RECORD_HEADER + 4 * named
                    kept = 0
                    place = RECORD_HEADER + 4 * <uint64_t>queues
                    for i in range(count):
                        size = message_bytes(record + place, length - place)
                        if fate[i * queues + j] == KEPT:
                            memcpy(out.data + out.used, record + place, size)
                            out.used += size
                            kept += 1
                            add32(&origins, ordinal + i)
                        elif fate[i * queues + j] != REFUSED:
                            known.add(ordinal + i)
                            if fate[i * queues + j] == ALTERED:
                                altered.add(ordinal + i)
                            queue_id = u32(record + RECORD_HEADER + 4 * j)
                            repeated[queue_id] = repeated.get(queue_id, 0) + 1
                        else:
                            refused.add(ordinal + i)
                        place += size
                    if kept == 0:
                        out.used = record_at
                    else:
                        close_record(&out, record_at, kept, named)
                fate += <size_t>count * queues
            ordinal += count
            at += length
        found = array.clone(_I, origins.used // 4, False)
        if origins.used:
            memcpy(found.data.as_voidptr, origins.data, origins.used)
        return PyBytes_FromStringAndSize(<char*>out.data, out.used), found
    finally:
        free(out.data)
        free(origins.data)


cdef int add32(Grown *grown, uint32_t value) except -1:
    reserve(grown, 4)
    put32(grown.data + grown.used, value)
    grown.used += 4
    return 0


cdef int close_record(Grown *out, size_t record_at, uint32_t count, uint32_t queues) except -1:
    cdef size_t padding = (8 - (out.used - record_at) % 8) % 8
    cdef size_t length
    cdef uint8_t *record
    reserve(out, padding)
    memset(out.data + out.used, 0, padding)
    out.used += padding
    record = out.data + record_at
    length = out.used - record_at
    put32(record, <uint32_t>length)
    put32(record + 20, count)
    put16(record + 24, <uint16_t>queues)
    put32(record + 4, c_crc32c(0, record + 8, length - 8))
    return 0
