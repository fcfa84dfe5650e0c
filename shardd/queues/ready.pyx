# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The order of ready messages: u64 entries, first in first out, with a way back to the old place.

A list of chunks, so that a deep backlog costs its 8 bytes an entry, never a doubling copy, and an empty queue nothing.
Entries ascend by position (`entry & ~15`, see entry.py): what is given back is merged in by it.
"""

from cpython.array cimport array, clone
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef enum:
    # The first chunk of a queue that was empty: most of 100,000 queues hold a handful of messages.
    SMALL_ENTRIES = 16
    CHUNK_ENTRIES = 8192

cdef uint64_t PLACE = ~<uint64_t> 15
cdef array ENTRIES = array("Q")

cdef struct Chunk:
    Chunk *next
    uint32_t start
    uint32_t end
    uint32_t room
    uint64_t *data


cdef Chunk *new_chunk(size_t room) except NULL:
    cdef Chunk *chunk = <Chunk *> malloc(sizeof(Chunk) + room * 8)
    if chunk == NULL:
        raise MemoryError()
    chunk.next = NULL
    chunk.start = chunk.end = 0
    chunk.room = <uint32_t> room
    chunk.data = <uint64_t *> (chunk + 1)
    return chunk


cdef class Ready:
    """FIFO of entries."""

    cdef Chunk *head
    cdef Chunk *tail
    cdef Py_ssize_t count

    def __cinit__(self):
        self.head = self.tail = NULL
        self.count = 0

    def __dealloc__(self):
        self.free_all()

    def __len__(self):
        return self.count

    cdef void free_all(self) noexcept:
        cdef Chunk *chunk
        while self.head != NULL:
            chunk = self.head
            self.head = chunk.next
            free(chunk)
        self.tail = NULL
        self.count = 0

    def push_many(self, array entries not None):
        """To the end."""
        cdef uint64_t *data = <uint64_t *> entries.data.as_ulonglongs
        cdef Py_ssize_t left = len(entries)
        cdef Py_ssize_t some
        cdef Chunk *chunk
        while left:
            if self.tail == NULL or self.tail.end == self.tail.room:
                chunk = new_chunk(SMALL_ENTRIES if self.tail == NULL and left <= SMALL_ENTRIES else CHUNK_ENTRIES)
                if self.tail == NULL:
                    self.head = chunk
                else:
                    self.tail.next = chunk
                self.tail = chunk
            some = min(left, <Py_ssize_t> (self.tail.room - self.tail.end))
            memcpy(self.tail.data + self.tail.end, data, some * 8)
            self.tail.end += <uint32_t> some
            self.count += some
            data += some
            left -= some

    def peek(self, Py_ssize_t most):
        """The first `most` entries, or all there are; they stay."""
        cdef Py_ssize_t wanted = max(0, min(most, self.count))
        cdef array found = clone(ENTRIES, wanted, False)
        cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
        cdef Chunk *chunk = self.head
        cdef Py_ssize_t some
        while wanted:
            some = min(wanted, <Py_ssize_t> (chunk.end - chunk.start))
            memcpy(to, chunk.data + chunk.start, some * 8)
            to += some
            wanted -= some
            chunk = chunk.next
        return found

    def first(self):
        """The first entry, 0 if there is none."""
        return self.head.data[self.head.start] if self.count else 0

    def drop(self, Py_ssize_t most):
        """Forget the first `most` entries."""
        cdef Py_ssize_t left = max(0, min(most, self.count))
        cdef Py_ssize_t some
        cdef Chunk *chunk
        self.count -= left
        while left:
            chunk = self.head
            some = min(left, <Py_ssize_t> (chunk.end - chunk.start))
            chunk.start += <uint32_t> some
            left -= some
            if chunk.start == chunk.end:
                if chunk.next == NULL and chunk.room == CHUNK_ENTRIES:
                    # A queue that is emptied and filled all the time keeps its chunk, warm.
                    chunk.start = chunk.end = 0
                    break
                self.head = chunk.next
                if self.head == NULL:
                    self.tail = NULL
                free(chunk)

    def take_all(self):
        """All entries; none stay."""
        found = self.peek(self.count)
        self.free_all()
        return found

    cdef Py_ssize_t count_before(self, uint64_t place):
        """How many entries, from the first, are before `place`."""
        cdef Py_ssize_t before = 0
        cdef Chunk *chunk = self.head
        cdef uint32_t low, high, middle
        while chunk != NULL:
            if chunk.start < chunk.end and (chunk.data[chunk.end - 1] & PLACE) >= place:
                low, high = chunk.start, chunk.end
                while low < high:
                    middle = (low + high) // 2
                    if (chunk.data[middle] & PLACE) < place:
                        low = middle + 1
                    else:
                        high = middle
                return before + low - chunk.start
            before += chunk.end - chunk.start
            chunk = chunk.next
        return before

    def merge(self, array entries not None):
        """Put `entries`, ascending, back to their places. Costs as much as there is before the last of them."""
        cdef Py_ssize_t more = len(entries)
        if not more:
            return
        cdef uint64_t *left = <uint64_t *> entries.data.as_ulonglongs
        cdef Py_ssize_t before = self.count_before(left[more - 1] & PLACE)
        cdef array passed = self.peek(before)
        cdef uint64_t *right = <uint64_t *> passed.data.as_ulonglongs
        cdef Chunk *chunk = new_chunk(more + before)
        cdef Py_ssize_t i = 0, j = 0
        cdef uint64_t *to = chunk.data
        while i < more or j < before:
            if j == before or (i < more and (left[i] & PLACE) < (right[j] & PLACE)):
                to[i + j] = left[i]
                i += 1
            else:
                to[i + j] = right[j]
                j += 1
        chunk.end = chunk.room
        self.drop(before)
        if self.count == 0:
            self.free_all()
            self.tail = chunk
        chunk.next = self.head
        self.head = chunk
        self.count += more + before


def marked(array entries not None):
    """The same entries, REDELIVERED."""
    cdef Py_ssize_t count = len(entries), i
    cdef array found = clone(ENTRIES, count, False)
    cdef uint64_t *data = <uint64_t *> entries.data.as_ulonglongs
    cdef uint64_t *to = <uint64_t *> found.data.as_ulonglongs
    for i in range(count):
        to[i] = data[i] | 1
    return found


def same_mark(array entries not None, Py_ssize_t start):
    """Where the run that begins at `start` and is all REDELIVERED, or all not, ends."""
    cdef Py_ssize_t count = len(entries), i = start + 1
    cdef uint64_t *data = <uint64_t *> entries.data.as_ulonglongs
    while i < count and (data[i] & 1) == (data[start] & 1):
        i += 1
    return i


def total(array sizes not None):
    """The sum of an array of u32."""
    cdef uint32_t *data = <uint32_t *> sizes.data.as_uints
    cdef uint64_t found = 0
    cdef Py_ssize_t i
    for i in range(len(sizes)):
        found += data[i]
    return found
