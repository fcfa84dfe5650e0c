"""Keep the orders in which the messages of a queue wait: `Ready` by place, `DueOrder` by time.

An entry is a u64 (see entry.py). Entries ascend by position (`entry & ~15`). The functions at the
end are loops over arrays of entries.
"""

from cpython.array cimport array, clone, resize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

cdef enum:
    # The first chunk of a queue that was empty: most of 100,000 queues hold a handful of messages.
    SMALL_ENTRIES = 16
    CHUNK_ENTRIES = 4096
    # The chunks in the middle of a queue of more entries than this are packed. Messages that come
    # and go at once never get there.
    DEEP_ENTRIES = 4 * CHUNK_ENTRIES
    # Of one entry: a token without repeats, and its flags.
    PACKED_BYTES_MAX = 10
    CHANGED = 1
    REPEATED = 2
    DUE_ROOM_MIN = 16

cdef uint64_t PLACE = ~<uint64_t> 15
cdef uint64_t EXPIRY = (<uint64_t> 1 << 56) - 1  # see entry.py
cdef uint64_t PLACE_BITS = (<uint64_t> 1 << 60) - 1

cdef uint8_t[CHUNK_ENTRIES * PACKED_BYTES_MAX] scratch


cdef inline uint8_t *put_varint(uint8_t *to, uint64_t value) noexcept nogil:
    while value >= 128:
        to[0] = <uint8_t> (value | 128)
        value >>= 7
        to += 1
    to[0] = <uint8_t> value
    return to + 1


cdef inline const uint8_t *get_varint(const uint8_t *at, uint64_t *value) noexcept nogil:
    cdef uint64_t found = at[0] & 127
    cdef int shift = 7
    while at[0] & 128:
        at += 1
        found |= <uint64_t> (at[0] & 127) << shift
        shift += 7
    value[0] = found
    return at + 1


cdef size_t encode(const uint64_t *entries, uint32_t count, uint8_t *to) noexcept nogil:
    """Write the packed entries; return how many bytes, at most PACKED_BYTES_MAX for each entry."""
    cdef uint8_t *at = to
    cdef uint64_t place, distance, before = 0, flags = 0
    cdef uint32_t i = 0, j
    while i < count:
        place = entries[i] >> 4
        distance = (place - before) & PLACE_BITS
        j = i + 1
        while j < count and entries[j] == entries[j - 1] + (distance << 4):
            j += 1
        before = entries[j - 1] >> 4
        at = put_varint(
            at,
            distance << 2 | (REPEATED if j > i + 1 else 0)
            | (CHANGED if entries[i] & 15 != flags else 0)
        )
        if entries[i] & 15 != flags:
            flags = entries[i] & 15
            at[0] = <uint8_t> flags
            at += 1
        if j > i + 1:
            at = put_varint(at, j - i - 1)
        i = j
    return at - to


cdef void decode(const uint8_t *at, uint32_t count, uint64_t *to) noexcept nogil:
    """Unpack the first `count` entries."""
    # `place` may have bits above PLACE_BITS, which no entry gets.
    cdef uint64_t token, distance, repeats, place = 0, flags = 0
    cdef uint64_t *stop = to + count
    while to < stop:
        # Most tokens of a queue that shares its log take two bytes and stand for one entry.
        token = at[0]
        at += 1
        if token & 128:
            token = (token & 127) | <uint64_t> at[0] << 7
            at += 1
            if at[-1] & 128:
                at = get_varint(at - 2, &token)
        place += token >> 2
        if token & (CHANGED | REPEATED) == 0:
            to[0] = place << 4 | flags
            to += 1
            continue
        distance = token >> 2
        if token & CHANGED:
            flags = at[0]
            at += 1
        to[0] = place << 4 | flags
        to += 1
        if token & REPEATED:
            at = get_varint(at, &repeats)
            repeats = min(repeats, <uint64_t> (stop - to))
            while repeats:
                place += distance
                to[0] = place << 4 | flags
                to += 1
                repeats -= 1


cdef Chunk *new_chunk(uint32_t room) except NULL:
    cdef Chunk *chunk = <Chunk *> malloc(sizeof(Chunk))
    cdef uint8_t *data = <uint8_t *> malloc(<size_t> room * 8)
    if chunk == NULL or data == NULL:
        free(chunk)
        free(data)
        raise MemoryError()
    chunk.next = NULL
    chunk.data = data
    chunk.start = chunk.end = chunk.packed = 0
    chunk.room = room
    return chunk


cdef inline uint64_t *entries_of(Chunk *chunk) noexcept nogil:
    """Return the entries of a chunk that is not packed."""
    return <uint64_t *> chunk.data + chunk.start


cdef void free_chunk(Chunk *chunk) noexcept:
    free(chunk.data)
    free(chunk)


cdef void pack(Chunk *chunk) noexcept:
    """Pack a chunk if that is worth it, and if there is memory for it."""
    cdef uint32_t count = chunk.end - chunk.start
    cdef size_t size
    cdef uint8_t *data
    if chunk.packed or not count or count > CHUNK_ENTRIES:
        return
    chunk.last = entries_of(chunk)[count - 1]
    size = encode(entries_of(chunk), count, scratch)
    if size > count * 6:
        return
    data = <uint8_t *> malloc(size)
    if data == NULL:
        return
    memcpy(data, scratch, size)
    free(chunk.data)
    chunk.data = data
    chunk.packed = <uint32_t> size
    chunk.start = 0
    chunk.end = chunk.room = count


cdef int unpack(Chunk *chunk) except -1:
    cdef uint8_t *data
    if not chunk.packed:
        return 0
    # The room of a usual one, so that a queue that is emptied keeps it.
    data = <uint8_t *> malloc(<size_t> CHUNK_ENTRIES * 8)
    if data == NULL:
        raise MemoryError()
    decode(chunk.data, chunk.end, <uint64_t *> data)
    free(chunk.data)
    chunk.data = data
    chunk.packed = 0
    chunk.room = CHUNK_ENTRIES
    return 0


cdef class Ready:
    """Entries first in first out, with a way back to the old place.

    They lie in a list of chunks, so that a deep backlog never costs a doubling copy, and an empty
    queue nothing. Entries that are given back are merged in by position. In a deep backlog the
    chunks between the first and the last are packed, so that an entry costs two or three bytes, and
    next to nothing where messages of one size follow each other:

        token   varint  (place - place before) << 2 | REPEATED << 1 | CHANGED     place: entry >> 4
                u8      flags, from here on, if CHANGED; 0 before the first
                varint  how many more entries follow at the same distance, with the same flags,
                        if REPEATED
    """

    def __cinit__(self):
        self.head = self.tail = self.done = NULL
        self.count = 0

    def __dealloc__(self):
        self.free_all()

    def __len__(self):
        return self.count

    def held_bytes(self):
        """Return the bytes of memory for the entries."""
        cdef Py_ssize_t held = 0
        cdef Chunk *chunk = self.head
        while chunk != NULL:
            held += sizeof(Chunk) + (chunk.packed if chunk.packed else chunk.room * 8)
            chunk = chunk.next
        return held

    cdef void free_all(self) noexcept:
        cdef Chunk *chunk
        while self.head != NULL:
            chunk = self.head
            self.head = chunk.next
            free_chunk(chunk)
        self.tail = self.done = NULL
        self.count = 0

    def push_many(self, array entries not None):
        """Append entries at the end."""
        self.push_all(<uint64_t *> entries.data.as_ulonglongs, len(entries))

    cdef int push_all(self, uint64_t *data, Py_ssize_t count) except -1:
        return self.push(
            data, count,
            SMALL_ENTRIES if self.tail == NULL and count <= SMALL_ENTRIES else CHUNK_ENTRIES
        )

    cdef const uint64_t *plain_head(self, Py_ssize_t *count) noexcept:
        """Return the first entries, as far as they lie together and are not packed.

        `count` is set to their number, which is 0 if there are none.
        """
        count[0] = 0
        if self.head == NULL or self.head.packed:
            return NULL
        count[0] = self.head.end - self.head.start
        return entries_of(self.head)

    cdef int push(self, uint64_t *data, Py_ssize_t left, uint32_t room) except -1:
        cdef Py_ssize_t some
        cdef Chunk *chunk
        while left:
            if self.tail == NULL or self.tail.end == self.tail.room:
                chunk = new_chunk(room)
                if self.tail == NULL:
                    self.head = chunk
                else:
                    self.tail.next = chunk
                self.tail = chunk
                if self.count > DEEP_ENTRIES:
                    self.pack_middle()
            some = min(left, <Py_ssize_t> (self.tail.room - self.tail.end))
            memcpy(<uint64_t *> self.tail.data + self.tail.end, data, some * 8)
            self.tail.end += <uint32_t> some
            self.count += some
            data += some
            left -= some
        return 0

    cdef void pack_middle(self) noexcept:
        cdef Chunk *chunk = self.done if self.done != NULL else self.head
        while chunk.next != self.tail:
            chunk = chunk.next
            pack(chunk)
        self.done = chunk

    def peek(self, Py_ssize_t most):
        """Return the first `most` entries, or all there are; they stay."""
        cdef Py_ssize_t wanted = max(0, min(most, self.count))
        cdef array found = clone(ENTRIES, wanted, False)
        cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
        cdef Chunk *chunk = self.head
        cdef Py_ssize_t some
        while wanted:
            some = min(wanted, <Py_ssize_t> (chunk.end - chunk.start))
            if chunk.packed:
                decode(chunk.data, <uint32_t> some, to)
            else:
                memcpy(to, entries_of(chunk), some * 8)
            to += some
            wanted -= some
            chunk = chunk.next
        return found

    def first(self):
        """Return the first entry, or 0 if there is none."""
        return entries_of(self.head)[0] if self.count else 0

    def drop(self, Py_ssize_t most):
        """Forget the first `most` entries."""
        self.drop_first(most)

    cdef int drop_first(self, Py_ssize_t most) except -1:
        cdef Py_ssize_t left = max(0, min(most, self.count))
        cdef Py_ssize_t some
        cdef Chunk *chunk
        while left:
            chunk = self.head
            some = min(left, <Py_ssize_t> (chunk.end - chunk.start))
            if some < chunk.end - chunk.start:
                unpack(chunk)
            chunk.start += <uint32_t> some
            self.count -= some
            left -= some
            if chunk.start == chunk.end:
                if chunk.next == NULL and chunk.room == CHUNK_ENTRIES and not chunk.packed:
                    # A queue that is emptied and filled all the time keeps its chunk, warm.
                    chunk.start = chunk.end = 0
                    break
                self.drop_chunk()
        if self.head != NULL:
            unpack(self.head)
        return 0

    cdef int pass_on(self, Py_ssize_t most) except -1:
        """Forget the first `most` entries, which lie in the first chunk, and keep the last chunk.

        The queue is emptied and filled all the time.
        """
        cdef Chunk *chunk = self.head
        if chunk.next != NULL or chunk.packed:
            return self.drop_first(most)
        chunk.start += <uint32_t> most
        self.count -= most
        if chunk.start == chunk.end:
            chunk.start = chunk.end = 0
        return 0

    cdef void drop_chunk(self) noexcept:
        cdef Chunk *chunk = self.head
        self.head = chunk.next
        if self.head == NULL:
            self.tail = NULL
        if self.done == chunk:
            self.done = NULL
        free_chunk(chunk)

    def take_all(self):
        """Take out all entries and return them."""
        found = self.peek(self.count)
        self.free_all()
        return found

    cdef Py_ssize_t count_before(self, uint64_t place) except -1:
        """Return how many entries, from the first on, are before `place`."""
        cdef Py_ssize_t before = 0
        cdef Chunk *chunk = self.head
        cdef uint64_t *data
        cdef uint32_t low, high, middle
        while chunk != NULL:
            high = chunk.end - chunk.start
            if (
                high
                and ((chunk.last if chunk.packed else entries_of(chunk)[high - 1]) & PLACE) >= place
            ):
                unpack(chunk)
                data = entries_of(chunk)
                low = 0
                while low < high:
                    middle = (low + high) // 2
                    if (data[middle] & PLACE) < place:
                        low = middle + 1
                    else:
                        high = middle
                return before + low
            before += high
            chunk = chunk.next
        return before

    def merge(self, array entries not None):
        """Put `entries`, ascending, back to their places.

        This costs as much as there is before the last of them.
        """
        cdef Py_ssize_t more = len(entries)
        if not more:
            return
        cdef uint64_t last = (<uint64_t *> entries.data.as_ulonglongs)[more - 1]
        cdef Py_ssize_t before = self.count_before(last & PLACE)
        cdef array all = merged(entries, self.peek(before))
        cdef Ready front = Ready()
        front.push(
            <uint64_t *> all.data.as_ulonglongs, more + before,
            <uint32_t> min(more + before, <Py_ssize_t> CHUNK_ENTRIES)
        )
        self.drop(before)
        self.put_in_front(front)

    cdef void put_in_front(self, Ready front) noexcept:
        if self.count == 0:
            self.free_all()
            self.tail = front.tail
        front.tail.next = self.head
        self.head = front.head
        self.count += front.count
        self.done = NULL
        front.head = front.tail = NULL
        front.count = 0


cdef struct Item:
    uint64_t due
    uint64_t entry


cdef inline bint before(const Item *a, const Item *b) noexcept nogil:
    return a.due < b.due or (a.due == b.due and a.entry >> 4 < b.entry >> 4)


cdef void sift_up(Item *items, size_t at) noexcept nogil:
    cdef Item item = items[at]
    cdef size_t parent
    while at:
        parent = (at - 1) >> 1
        if not before(&item, &items[parent]):
            break
        items[at] = items[parent]
        at = parent
    items[at] = item


cdef void sift_down(Item *items, size_t count, size_t at) noexcept nogil:
    cdef Item item = items[at]
    cdef size_t child
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and before(&items[child + 1], &items[child]):
            child += 1
        if not before(&items[child], &item):
            break
        items[at] = items[child]
        at = child
    items[at] = item


cdef class DueOrder:
    """Entries in the order in which they are due: a heap of (due, entry), 16 bytes each.

    Of entries that are due at one time, the one published first comes first.
    """

    cdef Item *items
    cdef size_t count
    cdef size_t room

    def __dealloc__(self):
        free(self.items)

    def __len__(self):
        return self.count

    def held_bytes(self):
        return self.room * sizeof(Item)

    cdef int resize(self, size_t room) except -1:
        cdef Item *moved
        if not room:
            free(self.items)
            self.items = NULL
        else:
            moved = <Item *> realloc(self.items, room * sizeof(Item))
            if moved == NULL:
                raise MemoryError()
            self.items = moved
        self.room = room
        return 0

    def push_many(self, const uint64_t[::1] entries not None, const uint64_t[::1] facts):
        """Add each entry with its fact, the time when it is due. Without facts all are due at once.
        """
        cdef size_t i, added = entries.shape[0]
        if facts is not None and <size_t> facts.shape[0] != added:
            raise ValueError(f"{facts.shape[0]} facts for {added} entries")
        if self.count + added > self.room:
            # Half as much again: the pages of a large one are moved, not copied.
            self.resize(max(self.count + added, self.room + self.room // 2, <size_t> DUE_ROOM_MIN))
        for i in range(added):
            self.items[self.count].due = 0 if facts is None else facts[i]
            self.items[self.count].entry = entries[i]
            self.count += 1
            sift_up(self.items, self.count - 1)

    def first_due(self):
        """Return when the first entry is due, or None if nothing waits."""
        return self.items[0].due if self.count else None

    def pop_due(self, uint64_t now, size_t most):
        """Take out the entries due at `now` or earlier, in their order, at most `most`."""
        cdef array found = clone(ENTRIES, min(most, self.count), False)
        cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
        cdef size_t taken = 0
        while taken < most and self.count and self.items[0].due <= now:
            to[taken] = self.items[0].entry
            taken += 1
            self.count -= 1
            if self.count:
                self.items[0] = self.items[self.count]
                sift_down(self.items, self.count, 0)
        if self.room > DUE_ROOM_MIN and self.count < self.room // 4:
            self.resize(max(2 * self.count, <size_t> DUE_ROOM_MIN) if self.count else 0)
        return found[:taken]

    def entries(self):
        """Return all entries, in no order."""
        cdef array found = clone(ENTRIES, self.count, False)
        cdef size_t i
        for i in range(self.count):
            found.data.as_ulonglongs[i] = self.items[i].entry
        return found

    def clear(self):
        self.count = 0
        self.resize(0)


cpdef array merged(array a, array b):
    """Return two ascending arrays of entries as one."""
    cdef Py_ssize_t more = len(a), others = len(b), i = 0, j = 0
    cdef array found = clone(ENTRIES, more + others, False)
    cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
    cdef uint64_t *left = <uint64_t *> a.data.as_ulonglongs
    cdef uint64_t *right = <uint64_t *> b.data.as_ulonglongs
    while i < more and j < others:
        if (left[i] & PLACE) < (right[j] & PLACE):
            to[i + j] = left[i]
            i += 1
        else:
            to[i + j] = right[j]
            j += 1
    memcpy(to + i + j, left + i, (more - i) * 8)
    memcpy(to + more + j, right + j, (others - j) * 8)
    return found


def marked(array entries not None):
    """Return the same entries with the flag REDELIVERED."""
    cdef Py_ssize_t count = len(entries), i
    cdef array found = clone(ENTRIES, count, False)
    cdef uint64_t *data = <uint64_t *> entries.data.as_ulonglongs
    cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
    for i in range(count):
        to[i] = data[i] | 1
    return found


def same_mark(array entries not None, Py_ssize_t start):
    """Return where the run from `start` on ends whose entries are all REDELIVERED, or all not."""
    cdef Py_ssize_t count = len(entries), i = start + 1
    cdef uint64_t *data = <uint64_t *> entries.data.as_ulonglongs
    while i < count and (data[i] & 1) == (data[start] & 1):
        i += 1
    return i


def total(array sizes not None):
    """Return the sum of an array of u32."""
    cdef uint32_t *data = <uint32_t *> sizes.data.as_uints
    cdef uint64_t found = 0
    cdef Py_ssize_t i
    for i in range(len(sizes)):
        found += data[i]
    return found


def judge(
    const uint64_t[::1] entries not None, const uint64_t[::1] facts, const uint64_t[::1] times,
    uint64_t now, ttl, unsigned int levels
):
    """Return the fact that the queue keeps of each new message, and the entries by priority.

    `facts` is what the publishers said, `priority << 56 | expires_at_ms`, or None if nothing.
    `times` is when each message was published, None: now. All times are ms since the epoch. `ttl`
    is the queue's own, in ms, or None. A priority above `levels` counts as `levels`. A message goes
    at the sooner of its own expiry and the queue's, and never before it was offered
    (Limits.expiry). The second result is a list of (priority, array of entries).
    """
    cdef Py_ssize_t count = entries.shape[0], i
    cdef array kept = clone(ENTRIES, count, False), part
    cdef uint64_t *to = <uint64_t *> kept.data.as_ulonglongs
    cdef uint64_t fact, expiry, own, priority
    cdef uint64_t ttl_ms = 0 if ttl is None else min(ttl, <uint64_t> EXPIRY)
    cdef bint has_ttl = ttl is not None
    cdef Py_ssize_t[256] found
    cdef list parts = []
    if (
        levels > 255
        or (facts is not None and facts.shape[0] != count)
        or (times is not None and times.shape[0] != count)
    ):
        raise ValueError("a fact and a time for each entry, and at most 255 levels")
    memset(found, 0, sizeof(found))
    for i in range(count):
        fact = 0 if facts is None else facts[i]
        expiry = fact & EXPIRY
        if has_ttl:
            own = (now if times is None else times[i]) + ttl_ms
            expiry = own if not expiry or own < expiry else expiry
        if expiry:
            expiry = min(max(expiry, now), EXPIRY)
        priority = min(fact >> 56, <uint64_t> levels)
        found[priority] += 1
        to[i] = priority << 56 | expiry
    for priority in range(levels + 1):
        if found[priority]:
            part = clone(ENTRIES, found[priority], False)
            pick(&entries[0], to, count, priority, <uint64_t *> part.data.as_ulonglongs)
            parts.append((priority, part))
    return kept, parts


cdef void pick(
    const uint64_t *entries, const uint64_t *facts, Py_ssize_t count, uint64_t priority,
    uint64_t *to
) noexcept:
    """Copy the entries whose facts have this priority."""
    cdef Py_ssize_t i
    for i in range(count):
        if facts[i] >> 56 == priority:
            to[0] = entries[i]
            to += 1


def runs(const uint64_t[::1] entries not None, const uint64_t[::1] facts not None, before):
    """Return the first place and the fact of each run of messages that share a fact.

    `before` is the fact of the last message before these, None if there is none. A run that only
    goes on is not returned.
    """
    cdef Py_ssize_t count = entries.shape[0], i, at = 0
    cdef array firsts = array("Q"), kept = array("Q")
    cdef uint64_t last = 0 if before is None else before
    cdef bint any_before = before is not None
    if facts.shape[0] != count:
        raise ValueError("a fact for each entry")
    for i in range(count):
        if any_before and facts[i] == last:
            continue
        last, any_before = facts[i], True
        if at == len(firsts):
            resize(firsts, 2 * at + 1)
            resize(kept, 2 * at + 1)
        firsts.data.as_ulonglongs[at] = entries[i] & PLACE
        kept.data.as_ulonglongs[at] = last
        at += 1
    resize(firsts, at)
    resize(kept, at)
    return firsts, kept
