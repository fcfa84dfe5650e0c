"""Lend the bodies of large messages: memory that one front door fills, and its shards read.

A front door receives a large body into this memory. A shard is told where the body lies, and tells
the front door the same place when it delivers the message. So nobody copies the body, unless it
must be stored.

Only the front door writes, and only the front door counts. A *run* is a piece of the memory that is
taken and let go as a whole. Who needs the bytes of a run has a *hold* of it: a `Run` object in this
process, or a shard that was told of a body there. A shard gives its holds back with FREED messages.
No count is shared, so every process may die at any moment: the holds of a shard end with its epoch,
and the memory ends with the last process that has it mapped.

    a lent body in a record of a PUBLISH, and in a DELIVER, in place of its bytes:
        u64 offset in the memory | u32 run | u32 zero
    FREED, a shard to a front door, after the header:
        (u32 run | u32 holds)*
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

# Smaller bodies are copied: that costs less than a record of its own for each.
BODY_BYTES_MIN = 16 << 10

cdef enum:
    HEADER = 16
    FREED_ENTRY = 8
    PLACE = 16
    QUIET_CALLS = 50  # 5 s
    MADV_REMOVE = 9  # <sys/mman.h>


@cython.no_gc
cdef class Run:
    """A hold of a run. It ends with the object, and so with the last view of its bytes."""

    def __dealloc__(self):
        self._memory.let_go(self.number, 1)

    def __len__(self):
        return self._bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(
            view, self, self._memory.data + <size_t> self.number * GRANULE, self._bytes, 0, flags
        )

    @property
    def is_shared(self):
        """Return whether there are other holds of the run."""
        return self._memory._holds[self.number] > 1


@cython.no_gc
cdef class BodyMemory:
    """The memory of lent bodies of one front door, for up to `shards` shards.

    `memory` is a mapping of a file in memory, of which `fd` is a descriptor for the shards
    (lane.py).
    """

    def __cinit__(self, memory not None, int fd, int shards):
        cdef unsigned char[::1] view = memory
        cdef size_t size = view.shape[0]
        self.fd = fd
        self.granules = <uint32_t> (size // GRANULE)
        if not 0 < shards <= 64 or size >= <size_t> 1 << 40 or not self.granules:
            raise ValueError(f"{size} bytes of bodies for {shards} shards")
        self._shards = shards
        self.size = <size_t> self.granules * GRANULE
        self._first = <uint32_t *> calloc(self.granules, 4)
        self._length = <uint32_t *> calloc(self.granules, 4)
        self._holds = <uint32_t *> calloc(self.granules, 4)
        self._lent = <uint32_t *> calloc(<size_t> self.granules * shards, 4)
        if not (self._first and self._length and self._holds and self._lent):
            raise MemoryError()
        self._memory = memory
        self.data = &view[0]
        self._free = {}

    def __dealloc__(self):
        free(self._first)
        free(self._length)
        free(self._holds)
        free(self._lent)

    def __len__(self):
        return self.size

    def mapped(self):
        """Return the memory, as the shards see it."""
        return self._memory

    # -- runs --------------------------------------------------------------------------------------

    def take(self, size_t size):
        """Return a new Run of `size` bytes, or None if there is no room for it now."""
        cdef uint32_t run, length = <uint32_t> ((size + GRANULE - 1) // GRANULE)
        if not size or size > self.size:
            return None
        run = self._found(length)
        if run == NO_RUN:
            return None
        self._quiet = 0
        self.held_bytes += <size_t> length * GRANULE
        return self._held(run, size)

    cdef Run _held(self, uint32_t run, size_t size):
        """Return a new hold of a run."""
        cdef Run taken = Run.__new__(Run)
        self._holds[run] += 1
        taken._memory = self
        taken.number = run
        taken._bytes = size
        return taken

    cdef uint32_t _found(self, uint32_t length):
        """Return a run of that length.

        The one let go last is the best: its bytes are in the caches.
        """
        cdef list same = self._free.get(length)
        cdef uint32_t run
        if same:
            run = same.pop()
            return run
        if self._top + length > self.granules:
            # Joining takes as long as there are runs: it must have brought something since it
            # failed.
            if self._wanted and (length >= self._wanted and self._freed < self._wanted):
                return NO_RUN
            self._join_free()
            run = self._cut(length)
            self._freed = 0
            self._wanted = length if run == NO_RUN else 0
            return run
        run = self._top
        self._top += length
        self._touched = max(self._touched, self._top)
        self._make(run, length)
        return run

    cdef void _make(self, uint32_t run, uint32_t length) noexcept:
        cdef uint32_t i
        self._length[run] = length
        for i in range(run, run + length):
            self._first[i] = run

    cdef int _join_free(self) except -1:
        """Join free runs with their neighbours."""
        cdef list joined = []
        cdef uint32_t run, length, start = 0, stop = 0  # of the free granules found last
        for run, length in sorted(
            [(each, size) for size, runs in self._free.items() for each in runs]
        ):
            if run != stop:
                if stop > start:
                    joined.append((start, stop - start))
                start = run
            stop = run + length
        if stop == self._top:
            self._top = start
        elif stop > start:
            joined.append((start, stop - start))
        self._free.clear()
        for run, length in joined:
            self._make(run, length)
            self._free.setdefault(length, []).append(run)
        return 0

    cdef uint32_t _cut(self, uint32_t length):
        """Return a run of that length out of the smallest free one that is large enough."""
        cdef list fitting
        cdef uint32_t run, found
        if self._top + length <= self.granules:
            run = self._top
            self._top += length
            self._touched = max(self._touched, self._top)
            self._make(run, length)
            return run
        fitting = [size for size, runs in self._free.items() if size >= length and runs]
        if not fitting:
            return NO_RUN
        found = min(fitting)
        run = self._free[found].pop()
        if found > length:
            self._make(run + length, found - length)
            self._free.setdefault(found - length, []).append(run + length)
        self._make(run, length)
        return run

    def trim(self):
        """Give free memory back to the system, if no bodies came or went for QUIET_CALLS calls."""
        cdef uint32_t run, length
        self._quiet += 1
        if self._quiet != QUIET_CALLS or not self._touched:
            return
        self._join_free()
        for length, runs in self._free.items():
            for run in runs:
                self._memory.madvise(MADV_REMOVE, <size_t> run * GRANULE, <size_t> length * GRANULE)
        if self._touched > self._top:
            self._memory.madvise(
                MADV_REMOVE, <size_t> self._top * GRANULE,
                <size_t> (self._touched - self._top) * GRANULE
            )
        self._touched = self._top

    # -- holds -------------------------------------------------------------------------------------

    cdef uint32_t run_of(self, const uint8_t *place) noexcept nogil:
        """Return the run that somebody in this process holds and that has this byte, or NO_RUN."""
        cdef size_t at = <size_t> (place - self.data)
        if place < self.data or at >= self.size:
            return NO_RUN
        return self._first[at // GRANULE]

    cdef void hold(self, uint32_t run) noexcept nogil:
        self._holds[run] += 1

    cdef int let_go(self, uint32_t run, uint32_t count) except -1:
        cdef uint32_t length = self._length[run]
        self._holds[run] -= count
        if not self._holds[run]:
            self._quiet = 0
            self._freed += length
            self.held_bytes -= <size_t> length * GRANULE
            self._free.setdefault(length, []).append(run)
        return 0

    cdef void lend(self, uint32_t run, int shard) noexcept nogil:
        """Make a hold of this process one of the shard."""
        self._lent[<size_t> shard * self.granules + run] += 1

    def messages(self, int shard, const unsigned char[::1] places not None, uint32_t count):
        """Return (message without its body, view of its body) of each message of a DELIVER.

        `places` are the messages with the places of their bodies. The views hold the bodies. Raises
        ValueError if the shard has not borrowed what it names.
        """
        cdef size_t at = 0, end, total = places.shape[0], start
        cdef uint64_t offset
        cdef uint32_t i, size, props, run
        cdef list found = []
        for i in range(count):
            end = at + 8
            if end + 2 > total:
                raise ValueError("no whole message with the place of its body")
            memcpy(&size, &places[at], 4)
            memcpy(&props, &places[at + 4], 4)
            end += 1 + <size_t> places[end]
            if end < total:
                end += 1 + <size_t> places[end]
            end += props
            if end + PLACE > total:
                raise ValueError("no whole message with the place of its body")
            memcpy(&offset, &places[end], 8)
            memcpy(&run, &places[end + 8], 4)
            borrowed = memoryview(self._borrowed(shard, run, offset, size))
            start = offset - <size_t> run * GRANULE
            found.append(
                (
                    PyBytes_FromStringAndSize(<char *> &places[at], end - at),
                    borrowed[start:start + size]
                )
            )
            at = end + PLACE
        if at != total:
            raise ValueError("bytes behind the last message")
        return found

    cdef Run _borrowed(self, int shard, uint32_t run, size_t offset, size_t size):
        """Return a new hold of a run of which the shard has one and in which this body lies."""
        cdef size_t start = <size_t> run * GRANULE
        if run >= self.granules or not 0 <= shard < self._shards \
                or not self._lent[<size_t> shard * self.granules + run] \
                or offset < start or size > (<size_t> self._length[run]) * GRANULE \
                or offset - start > (<size_t> self._length[run]) * GRANULE - size:
            raise ValueError(
                f"shard {shard} has no body of {size} bytes at {offset} in the run {run}"
            )
        return self._held(run, (<size_t> self._length[run]) * GRANULE)

    def freed(self, int shard, const unsigned char[::1] message not None):
        """Take back the holds that a FREED message of this shard names.

        Raises ValueError if the shard does not have so many; those before are taken back.
        """
        cdef size_t at = HEADER, end = message.shape[0]
        cdef uint32_t run, count
        cdef uint32_t *lent
        if not 0 <= shard < self._shards or end < HEADER or (end - HEADER) % FREED_ENTRY:
            raise ValueError("FREED of a wrong length")
        while at < end:
            memcpy(&run, &message[at], 4)
            memcpy(&count, &message[at + 4], 4)
            if (
                run >= self.granules
                or not count
                or count > self._lent[<size_t> shard * self.granules + run]
            ):
                raise ValueError(f"shard {shard} has not {count} holds of the run {run}")
            lent = &self._lent[<size_t> shard * self.granules + run]
            lent[0] -= count
            self.let_go(run, count)
            at += FREED_ENTRY

    def lost(self, int shard):
        """Take back all holds of a shard: its process is gone."""
        cdef uint32_t run
        cdef uint32_t *lent = self._lent + <size_t> shard * self.granules
        if not 0 <= shard < self._shards:
            raise ValueError(f"shard {shard} of {self._shards}")
        for run in range(self.granules):
            if lent[run]:
                self.let_go(run, lent[run])
                lent[run] = 0

    def lent_to(self, int shard):
        """Return how many holds a shard has."""
        cdef uint32_t run
        cdef size_t found = 0
        if not 0 <= shard < self._shards:
            raise ValueError(f"shard {shard} of {self._shards}")
        for run in range(self.granules):
            found += self._lent[<size_t> shard * self.granules + run]
        return found
