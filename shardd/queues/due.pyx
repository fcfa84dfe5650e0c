# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Messages in the order in which they are due: a heap of (due, entry), 16 bytes each, in one piece of memory.

Of those that are due at one time the one published first comes first (by `entry & ~15`, see entry.py).
"""

from cpython.array cimport array, clone
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, realloc

cdef enum:
    ROOM_MIN = 16

cdef array ENTRIES = array("Q")

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
        """Each entry with its fact, which is when it is due, in 64 bits; without facts all are due at once."""
        cdef size_t i, added = entries.shape[0]
        if facts is not None and <size_t> facts.shape[0] != added:
            raise ValueError(f"{facts.shape[0]} facts for {added} entries")
        if self.count + added > self.room:
            # Half as much again: the pages of a large one are moved, not copied.
            self.resize(max(self.count + added, self.room + self.room // 2, <size_t> ROOM_MIN))
        for i in range(added):
            self.items[self.count].due = 0 if facts is None else facts[i]
            self.items[self.count].entry = entries[i]
            self.count += 1
            sift_up(self.items, self.count - 1)

    def first_due(self):
        """None: nothing waits."""
        return self.items[0].due if self.count else None

    def pop_due(self, uint64_t now, size_t most):
        """The entries due at `now` or earlier, in their order, `most` at the most."""
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
        if self.room > ROOM_MIN and self.count < self.room // 4:
            self.resize(max(2 * self.count, <size_t> ROOM_MIN) if self.count else 0)
        return found[:taken]

    def entries(self):
        """All, in no order."""
        cdef array found = clone(ENTRIES, self.count, False)
        cdef size_t i
        for i in range(self.count):
            found.data.as_ulonglongs[i] = self.items[i].entry
        return found

    def clear(self):
        self.count = 0
        self.resize(0)
