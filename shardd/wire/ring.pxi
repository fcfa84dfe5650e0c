"""Move messages from one process to another through a ring in shared memory, without locks.

    byte 0 of `place`    u64 tail    where the writer goes on; the writer sets it
         64              u64 head    where the reader goes on; the reader sets it
        128              u32 asleep  1: the reader sleeps and wants the bell; who rings it sets 0
    `start` .. + `size`  entries:    u32 bytes  u32 kind  the message, zeros to 8

Tail and head only rise. An entry lies at its position modulo `size`, in one piece. If an entry
would not fit before the end of the ring, a SKIP leads to the start. A SKIP also leads to the start
when the reader has taken everything, so that a ring that never fills touches only its first pages,
which stay in the caches. A SWITCH says that the next messages come by ZeroMQ (lane.py). The bell is
an eventfd. It is rung only for a reader that sleeps, and once for all messages that were put
together.

The writer can gather a large message from several buffers, and the reader can look at it where it
lies in the ring. So its bytes are copied once.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from shardmq.shardd.wire.polling cimport POLLIN, poll, pollfd, ppoll

cdef extern from *:
    """
    #include <stdint.h>
    #include <errno.h>
    #include <poll.h>
    #include <unistd.h>
    static inline uint64_t seen(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void show(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    static inline uint32_t swap(uint32_t *p, uint32_t v) {
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
    }
    static inline uint32_t peek(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    #if defined(__x86_64__) || defined(__i386__)
    static inline void rest(void) { __builtin_ia32_pause(); }
    #elif defined(__aarch64__)
    static inline void rest(void) { __asm__ __volatile__("yield"); }
    #else
    static inline void rest(void) { }
    #endif
    static inline void ring_bell(int fd) { uint64_t one = 1; (void) !write(fd, &one, sizeof one); }
    """
    uint64_t seen(const uint64_t *p) nogil
    void show(uint64_t *p, uint64_t v) nogil
    void fence() nogil
    uint32_t swap(uint32_t *p, uint32_t v) nogil
    uint32_t peek(const uint32_t *p) nogil
    void ring_bell(int fd) nogil
    void rest() nogil

cdef enum:
    HEAD = 64
    ASLEEP = 128
    ENTRY = 8
    MESSAGE = 1
    SKIP = 2
    SWITCH = 3
    # When the reader has taken everything, the writer goes back to the start if it is beyond this
    # position. It does so only if there is room for some small messages, and for a few as large as
    # the largest since the last time, before the reader takes the SKIP. Otherwise a reader that
    # wakes late would send them by ZeroMQ.
    BACK_AT = 64 << 10
    SMALL_ONES = 16 << 10
    LARGE_ONES = 5
    # The reader looks at messages of at least this size in the ring. To copy a smaller message is
    # cheaper than to make a view of it.
    VIEW_BYTES_MIN = 16 << 10

CONTROL_BYTES = 192


cdef class _End:
    def __cinit__(
        self, unsigned char[::1] memory not None, size_t place, size_t start, size_t size, *_
    ):
        if size % ENTRY or place % 64 or place + CONTROL_BYTES > <size_t> memory.shape[0] \
                or start + size > <size_t> memory.shape[0] or size < 64:
            raise ValueError("a ring does not lie in its memory")
        self._memory = memory
        self._data = &memory[start]
        self._tail = <uint64_t *> &memory[place]
        self._head = <uint64_t *> &memory[place + HEAD]
        self._asleep = <uint32_t *> &memory[place + ASLEEP]
        self._size = size


cdef class Writer(_End):
    """The end that writes. `bell` is the eventfd that the reader listens to."""

    def __init__(self, memory, size_t place, size_t start, size_t size, int bell):
        self._at = self._rung_at = self._tail[0]
        self._bell = bell

    cdef void _entry(self, uint64_t at, uint32_t length, uint32_t kind) noexcept:
        cdef uint32_t *entry = <uint32_t *> (self._data + at % self._size)
        entry[0] = length
        entry[1] = kind

    cpdef ring(self):
        """Ring the bell if the reader sleeps and something was put. Called behind what was put."""
        if self._rung_at == self._at:
            return
        self._rung_at = self._at
        fence()
        if peek(self._asleep) and swap(self._asleep, 0):
            ring_bell(self._bell)

    cpdef bint put(self, bytes message) except -1:
        """Put a message into the ring; return False if there is no room beside that for a SWITCH.

        A reader that sleeps does not hear of the message before `ring`.
        """
        cdef uint64_t length = PyBytes_GET_SIZE(message)
        cdef uint8_t *to = self._room_for(length)
        if to == NULL:
            return False
        memcpy(to, PyBytes_AS_STRING(message), length)
        self._at += ENTRY + (length + 7) // 8 * 8
        show(self._tail, self._at)
        return True

    cpdef bint put_parts(self, list parts) except -1:
        """Do the same as put() for one message whose bytes lie in several buffers."""
        cdef Py_buffer view
        cdef uint64_t length = 0, left
        cdef uint8_t *to
        for part in parts:
            length += <uint64_t> len(part)
        to = self._room_for(length)
        if to == NULL:
            return False
        left = length
        for part in parts:
            PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)
            try:
                if <uint64_t> view.len > left:
                    raise ValueError("a part has items larger than a byte")
                memcpy(to, view.buf, view.len)
                to += view.len
                left -= view.len
            finally:
                PyBuffer_Release(&view)
        self._at += ENTRY + (length + 7) // 8 * 8
        show(self._tail, self._at)
        return True

    cdef uint8_t *_room_for(self, uint64_t length) noexcept:
        """Begin an entry, and return where its message goes.

        Returns NULL if there is no room beside that for a SWITCH.
        """
        cdef uint64_t need = ENTRY + (length + 7) // 8 * 8
        cdef uint64_t offset = self._at % self._size
        cdef uint64_t head = seen(self._head)
        cdef uint64_t skip = 0
        if need > self._largest:
            self._largest = need
        if (
            offset + need > self._size
            or (
                head == self._at
                and offset >= BACK_AT
                and offset >= LARGE_ONES * self._largest + SMALL_ONES
            )
        ):
            skip = self._size - offset
            self._largest = need
        if length > 0xffffffff or self._at - head + skip + need + ENTRY > self._size:
            return NULL
        if skip:
            self._entry(self._at, 0, SKIP)
            self._at += skip
        self._entry(self._at, <uint32_t> length, MESSAGE)
        return self._data + self._at % self._size + ENTRY

    def put_switch(self):
        """Tell the reader that the next messages come by ZeroMQ.

        The reader takes all that is in the ring first.
        """
        self._entry(self._at, 0, SWITCH)
        self._at += ENTRY
        show(self._tail, self._at)

    def empty(self):
        """Return whether the reader has taken everything."""
        return seen(self._head) == self._at


cdef class Taker:
    """Takes messages in where they lie in the ring, one after the other."""

    cdef bint take_in(self, const uint8_t *message, size_t size) except -1:
        """Take a message in where it lies.

        Return False, with nothing done, if the message is to be taken out of the ring.
        """
        return False


cdef class Reader(_End):
    """The end that reads. With `views`, large messages are views into the ring.

    A view is valid until let_go() or the next take().
    """

    def __init__(self, memory, size_t place, size_t start, size_t size, bint views=False):
        self._at = self._head[0]
        self._views = views
        self._whole = memoryview(memory)[start:start + size].toreadonly()

    cpdef let_go(self):
        """Give the room of the messages that were taken last back to the writer."""
        if self._holds:
            self._holds = False
            show(self._head, self._at)

    cpdef bint offer(self, Taker taker, int most) except -1:
        """Let a taker take in the first messages where they lie, up to the first that it declines.

        The taker gets at most `most` messages. Returns whether something is left in the ring.
        """
        cdef uint64_t tail = seen(self._tail)
        cdef uint64_t offset
        cdef uint32_t *entry
        if peek(self._asleep):  # awake: something else has woken the reader
            swap(self._asleep, 0)
        self.let_go()
        while self._at != tail and most:
            offset = self._at % self._size
            entry = <uint32_t *> (self._data + offset)
            if (
                entry[1] != MESSAGE
                or min(self._size - offset, tail - self._at) < ENTRY + <uint64_t> entry[0]
            ):
                break
            if not taker.take_in(self._data + offset + ENTRY, entry[0]):
                break
            taker.taken += 1
            self._at += ENTRY + (<uint64_t> entry[0] + 7) // 8 * 8
            most -= 1
        show(self._head, self._at)
        return self._at != tail

    def take(self, int most):
        """Return (messages, switched): at most `most` messages, and none behind a SWITCH.

        Raises ValueError if the ring is damaged.
        """
        cdef list messages = []
        cdef uint64_t tail = seen(self._tail)
        cdef uint64_t offset, left
        cdef uint32_t length, kind
        cdef bint switched = False
        if peek(self._asleep):  # awake: something else has woken the reader
            swap(self._asleep, 0)
        self.let_go()
        while self._at != tail and most and not switched:
            offset = self._at % self._size
            left = min(self._size - offset, tail - self._at)
            memcpy(&length, self._data + offset, 4)
            memcpy(&kind, self._data + offset + 4, 4)
            if kind == MESSAGE and left >= ENTRY + <uint64_t> length:
                if self._views and length >= VIEW_BYTES_MIN:
                    messages.append(self._whole[offset + ENTRY:offset + ENTRY + length])
                    self._holds = True
                else:
                    messages.append(
                        PyBytes_FromStringAndSize(<char *> self._data + offset + ENTRY, length)
                    )
                self._at += ENTRY + (<uint64_t> length + 7) // 8 * 8
                most -= 1
            elif kind == SKIP:
                self._at += self._size - offset
                if not self._holds:  # the room may be most of the ring: do not wait for let_go()
                    show(self._head, self._at)
            elif kind == SWITCH:
                self._at += ENTRY
                switched = True
            else:
                raise ValueError(f"no entry of a ring at {self._at}: {length} bytes of kind {kind}")
        if not self._holds:
            show(self._head, self._at)
        return messages, switched

    cpdef bint sleep(self) except -1:
        """Return whether the reader may sleep. If so, the next message rings the bell."""
        swap(self._asleep, 1)
        if seen(self._tail) != self._at:
            swap(self._asleep, 0)
            return False
        return True


cdef class LaneState:
    """The rings of a lane, and whether messages go by them or by ZeroMQ (lane.py), by direction."""


def wait_for_any(list fds not None, double seconds):
    """Sleep until one of the descriptors is readable, or for so long; return those that are.

    The time is kept to microseconds. A signal ends the wait.
    """
    cdef Py_ssize_t count = len(fds), i
    cdef timespec left
    cdef int found
    left.tv_sec = <long> seconds
    left.tv_nsec = <long> ((seconds - <double> left.tv_sec) * 1e9)
    cdef pollfd *watched = <pollfd *> PyMem_Malloc(max(count, 1) * sizeof(pollfd))
    if watched == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            watched[i].fd = fds[i]
            watched[i].events = POLLIN
            watched[i].revents = 0
        with nogil:
            found = ppoll(watched, count, &left, NULL)
        return [watched[i].fd for i in range(count) if watched[i].revents] if found > 0 else []
    finally:
        PyMem_Free(watched)


cdef enum:
    RINGS_MAX = 128
    # Looks at the rings between two looks at the clock, and between two looks at a descriptor,
    # which are system calls.
    CLOCK_EACH = 8
    DESCRIPTOR_EACH = 64


cdef inline int64_t _now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t> now.tv_sec * 1000000000 + now.tv_nsec


def look_again(list readers not None, int fd, int64_t most_ns):
    """Look at rings and a descriptor until there is something, or for `most_ns`.

    Returns (what has something, the nanoseconds it took): 0 nothing, 1 a ring, 2 the descriptor.
    The bells of the rings do not ring meanwhile, nor behind it: the caller asks each reader with
    sleep() before it sleeps. Other threads go on.
    """
    cdef const uint64_t *tails[RINGS_MAX]
    cdef uint64_t at[RINGS_MAX]
    cdef Py_ssize_t count = min(len(readers), RINGS_MAX), i
    cdef Reader reader
    cdef pollfd watched
    cdef int64_t began, now
    cdef unsigned int looks = 0
    cdef int found = 0
    for i in range(count):
        reader = readers[i]
        if peek(reader._asleep):
            swap(reader._asleep, 0)
        tails[i] = reader._tail
        at[i] = reader._at
    watched.fd = fd
    watched.events = POLLIN
    with nogil:
        began = now = _now_ns()
        while not found:
            for i in range(count):
                if seen(tails[i]) != at[i]:
                    found = 1
                    break
            looks += 1
            if looks % CLOCK_EACH == 0:
                now = _now_ns()
                if now - began >= most_ns:
                    break
            if looks % DESCRIPTOR_EACH == 0:
                watched.revents = 0
                if not found and poll(&watched, 1, 0) > 0:
                    found = 2
            rest()
        if found:
            now = _now_ns()
    return found, now - began
