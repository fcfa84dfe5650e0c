# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Batches of rows on their way out: each is a record batch of an Arrow IPC stream (drawn in ipc.py), framed, and written to
a descriptor straight from the memory of its columns. Nothing here needs the interpreter as long as all goes well: a scan
makes and sends batch after batch in one call.
"""

from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, memset, strerror

from shardmq.shardd.store.format.columns cimport BUFFERS_MAX, NODES_MAX, Arrays, Buffer, Node, Sink
from shardmq.shardd.store.format.layout cimport put32, put64

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t writev(int handle, const iovec *pieces, int count)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *of, unsigned long count, int timeout_ms)
    short POLLOUT

cdef enum:
    ALIGNMENT = 8
    FRAME_BYTES_MAX = 20  # before a batch
    HEAD_BYTES_MAX = 88 + 16 * (NODES_MAX + BUFFERS_MAX)
    PIECES_MAX = 3 + 2 * BUFFERS_MAX

cdef uint8_t[ALIGNMENT] ZEROS
memset(ZEROS, 0, ALIGNMENT)


cdef class Sender(Sink):
    """Of one answer. Whether it went well, `take_sent` says: what goes wrong here must not look like trouble with the files."""

    cdef Arrays arrays
    cdef int handle, timeout_ms
    cdef bint chunked
    cdef int failed  # errno, 0: not
    cdef uint64_t pause_bytes, sent
    cdef uint8_t[HEAD_BYTES_MAX] head
    cdef size_t head_bytes, body_bytes_at, rows_at, nodes_at, buffers_at
    cdef iovec[PIECES_MAX] pieces
    cdef char[FRAME_BYTES_MAX] frame

    def __init__(self, Arrays arrays not None, head, int handle, bint chunked, int timeout_ms, uint64_t pause_bytes):
        """`head`: an ipc.BatchHead for these arrays. `chunked`: batches are chunks of HTTP, else each has its length
        before it. `timeout_ms`: for each step of a descriptor that does not block. After `pause_bytes` it pauses."""
        cdef bytes data
        self.arrays, self.handle, self.chunked = arrays, handle, chunked
        self.timeout_ms, self.pause_bytes = timeout_ms, pause_bytes
        data, self.body_bytes_at, self.rows_at, self.nodes_at, self.buffers_at = head
        self.head_bytes = len(data)
        if self.head_bytes != self.buffers_at + 16 * arrays.buffers or self.head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head is of other arrays")
        memcpy(self.head, <const uint8_t*><const char*>data, self.head_bytes)

    def take_sent(self) -> int:
        """Bytes written since the last call. Raises OSError when not all could be written, TimeoutError when it took too
        long: some of a batch may be gone then, and nothing more can follow."""
        cdef uint64_t sent = self.sent
        if self.failed:
            raise OSError(self.failed, (<const char*>strerror(self.failed)).decode())
        self.sent = 0
        return sent

    cdef bint take(self) except -1 nogil:
        self.arrays.settle()
        if not self.failed:
            self.failed = self._write(self._lay_out())
        return self.sent < self.pause_bytes and not self.failed

    cdef int _lay_out(self) noexcept nogil:
        """The pieces of a batch, in order; how many."""
        cdef Node *node = self.arrays.node
        cdef Buffer *buffer = self.arrays.buffer
        cdef uint8_t *to = self.head + self.nodes_at
        cdef uint64_t body_bytes = 0, size
        cdef int i, count = 2
        for i in range(self.arrays.nodes):
            put64(to + 16 * i, node[i].rows[0])
            put64(to + 16 * i + 8, 0 if node[i].nulls == NULL else node[i].nulls[0])
        to = self.head + self.buffers_at
        for i in range(self.arrays.buffers):
            size = 0
            if buffer[i].memory != NULL and (buffer[i].nulls == NULL or buffer[i].nulls[0]):
                size = buffer[i].memory.used
            put64(to + 16 * i, body_bytes)
            put64(to + 16 * i + 8, size)
            if size:
                count = self._add(count, buffer[i].memory.data, size)
                count = self._add(count, ZEROS, -size % ALIGNMENT)
                body_bytes += size + -size % ALIGNMENT
        put64(self.head + self.rows_at, self.arrays.rows[0])
        put64(self.head + self.body_bytes_at, body_bytes)
        self.pieces[1].iov_base, self.pieces[1].iov_len = self.head, self.head_bytes
        return self._frame(count, self.head_bytes + body_bytes)

    cdef int _add(self, int count, uint8_t *data, size_t size) noexcept nogil:
        if size == 0:
            return count
        self.pieces[count].iov_base, self.pieces[count].iov_len = data, size
        return count + 1

    cdef int _frame(self, int count, uint64_t size) noexcept nogil:
        """Around that many bytes."""
        self.pieces[0].iov_base = self.frame
        if self.chunked:
            self.pieces[0].iov_len = snprintf(self.frame, FRAME_BYTES_MAX, b"%llx\r\n", <unsigned long long>size)
            return self._add(count, <uint8_t*>b"\r\n", 2)
        self.pieces[0].iov_len = 4
        put32(<uint8_t*>self.frame, size)
        return count

    cdef int _write(self, int count) noexcept nogil:
        """0, or an errno."""
        cdef iovec *left = self.pieces
        cdef ssize_t done
        cdef int failed
        while count:
            done = writev(self.handle, left, count)
            if done < 0:
                failed = self._wait() if errno == EAGAIN else errno
                if failed and failed != EINTR:
                    return failed
                continue
            self.sent += done
            while count and <size_t>done >= left.iov_len:
                done -= left.iov_len
                left += 1
                count -= 1
            if count:
                left.iov_base = <uint8_t*>left.iov_base + done
                left.iov_len -= done
        return 0

    cdef int _wait(self) noexcept nogil:
        """0 when more can be written, else an errno."""
        cdef pollfd of
        cdef int found
        of.fd, of.events, of.revents = self.handle, POLLOUT, 0
        found = poll(&of, 1, self.timeout_ms)
        return 0 if found > 0 else ETIMEDOUT if found == 0 else errno
