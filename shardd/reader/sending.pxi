"""Send batches of rows as record batches of an Arrow IPC stream (drawn in ipc.py).

A batch is framed and written to a descriptor straight from the memory of its columns. A scan makes
and sends batch after batch in one call that does not hold the interpreter's lock.

pyarrow could write the batches, too: the reader imports pyarrow for the schema in any case. That
was built, with Arrow's C data interface and without a copy, and measured by turns (bench/arrow.py).
In ns of the reader's CPU per row, of 100 bytes:

    columns             3     7    all    3, to two tasks at once
    this file          33    46     52    41
    pyarrow's writer   43    58     85    55

The rate would be 20 to 40 % lower: pyarrow and the interpreter take 50 to 160 us for each batch.
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
    FRAME_BYTES_MAX = 20  # what HTTP's chunked coding has before a batch
    HEAD_BYTES_MAX = 88 + 16 * (NODES_MAX + BUFFERS_MAX)
    PIECES_MAX = 3 + 2 * BUFFERS_MAX

cdef uint8_t[ALIGNMENT] ZEROS
memset(ZEROS, 0, ALIGNMENT)


cdef class Sender(Sink):
    """Sends the batches of one answer.

    An error of the client is kept for `take_sent`, because an error of `take` would look like an
    error of the files to the scan.
    """

    cdef Arrays arrays
    cdef int handle, timeout_ms
    cdef bint chunked
    cdef int failed  # an errno, or 0
    cdef uint64_t pause_bytes, sent
    cdef uint8_t[HEAD_BYTES_MAX] head
    cdef size_t head_bytes, body_bytes_at, rows_at, nodes_at, buffers_at
    cdef iovec[PIECES_MAX] pieces
    cdef char[FRAME_BYTES_MAX] frame

    def __init__(
        self, Arrays arrays not None, head, int handle, bint chunked, int timeout_ms,
        uint64_t pause_bytes
    ):
        """Send `arrays` to the descriptor `handle`, with `head`, an ipc.BatchHead for these arrays.

        If `chunked`, each batch is a chunk of HTTP, else a part with its length before it. A step
        of a descriptor that does not block may take `timeout_ms`. After `pause_bytes` the scan
        pauses.
        """
        cdef bytes data
        self.arrays, self.handle, self.chunked = arrays, handle, chunked
        self.timeout_ms, self.pause_bytes = timeout_ms, pause_bytes
        data, self.body_bytes_at, self.rows_at, self.nodes_at, self.buffers_at = head
        self.head_bytes = len(data)
        if (
            self.head_bytes != self.buffers_at + 16 * arrays.buffers
            or self.head_bytes > HEAD_BYTES_MAX
        ):
            raise ValueError("the head is of other arrays")
        memcpy(self.head, <const uint8_t*><const char*>data, self.head_bytes)

    def take_sent(self) -> int:
        """Return the number of bytes written since the last call.

        Raise OSError if not all could be written, and TimeoutError if a step took too long. The
        client may have got a part of a batch then, so nothing can follow.
        """
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
        """Note the pieces of a batch, in order; return how many there are."""
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
        """Put a frame around a message of `size` bytes; return how many pieces there are then."""
        self.pieces[0].iov_base = self.frame
        if self.chunked:
            self.pieces[0].iov_len = snprintf(
                self.frame, FRAME_BYTES_MAX, b"%llx\r\n", <unsigned long long>size
            )
            return self._add(count, <uint8_t*>b"\r\n", 2)
        self.pieces[0].iov_len = 4
        put32(<uint8_t*>self.frame, size)
        return count

    cdef int _write(self, int count) noexcept nogil:
        """Write this many pieces; return 0 or an errno."""
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
        """Wait until the descriptor takes more; return 0, or an errno."""
        cdef pollfd of
        cdef int found
        of.fd, of.events, of.revents = self.handle, POLLOUT, 0
        found = poll(&of, 1, self.timeout_ms)
        return 0 if found > 0 else ETIMEDOUT if found == 0 else errno
