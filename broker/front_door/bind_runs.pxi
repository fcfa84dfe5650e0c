"""Runs of binds ahead: binds of one connection between the same two, one after the other.

A run is one request to the controller, which goes to it in parts: each bind is written to the pipe
as a message of its own with the number of the request, and the controller answers how many of them
it has decided on. So a bind that goes on with a run takes no more than a name that is decoded, a
write and an entry in a list. binds_ahead.py begins runs and takes their answers.

A client waits for the answers to some runs, because their bindings outlive the broker. Such a run
has a pipe of its own, which the controller reads at once, and it goes on only while none of its
binds is unanswered: what else the client says on the channel waits.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy

cdef extern from "<unistd.h>" nogil:
    ssize_t c_write "write"(int fd, const void *data, size_t size)

cdef enum:
    PIPE_BUF = 4096  # bytes that a pipe takes whole or not at all
    PREFIX_BYTES = 4  # of a message: the length of what follows, little endian
    # A string in msgpack begins with a byte that has the length too, or with LONGER and a length.
    SHORT = 0xA0
    SHORT_MAX = 31
    LONGER = 0xD9
    C_UNANSWERED_MAX = 4096

# Binds ahead beyond which the next ones wait for the controller. It decides on so many in some
# 30 ms, for which others may have to wait.
UNANSWERED_MAX = C_UNANSWERED_MAX
NO_PIPE = -1
NEVER = -1  # an epoch


cdef class BindRuns:
    """What the runs of a front door have in common.

    - `epoch`: a run goes on while this is what it was when the run began
    - `unanswered`: binds that the controller has not answered
    - `pipe`: the file descriptor of the pipe to the controller; -1 if it cannot be used
    - `waited_pipe`: that of the pipe for runs that a client waits for
    - `collected`: runs with bindings that are not in the copy of the catalog yet
    - `first`: called with a run before it is the only collected one
    """

    def __init__(self):
        self.epoch = self.unanswered = 0
        self.pipe = self.waited_pipe = NO_PIPE
        self.collected = []
        self.first = None


cdef class BindRun:
    """A run, with those of its binds that are unanswered.

    - `ends`: (exchange, queue, routing key) of each, the list of the request itself
    - `put_in`: how many of them are in the copy of the catalog
    - `is_collected`: whether the others wait to be put there
    - `waits`: None if nobody waits for the answers. Its `begun(run)` is called when a bind has gone
      on with the run, its `came(bound, code, text)` with the number of binds that are recorded, and
      the code and text of a refusal of those behind them (code 0 if there is none)
    """

    def __init__(self, BindRuns runs not None, str vhost not None, list ends not None):
        """Begin a run with its first binds, which are written already. It does not go on yet."""
        self.runs, self.vhost, self.ends = runs, vhost, ends
        self.source, self.queue, _ = ends[0]
        self.epoch = NEVER
        self.collect()  # if that fails, nobody takes the answer
        runs.unanswered += len(ends)

    def go_on(self, around):
        """Let more binds come.

        `around` is called when the first of them comes. It returns the bytes of a message before
        its key, which begin with its length, and the bytes behind the key.
        """
        self.epoch, self.around = self.runs.epoch, around

    def end(self):
        """Let no more binds come."""
        self.epoch = NEVER

    def answered(self, Py_ssize_t count):
        """Take the first binds out of the run, and return them.

        The caller has put them into the copy of the catalog, or does so later.
        """
        cdef list taken = self.ends[:count]
        del self.ends[:count]
        self.put_in = max(0, self.put_in - len(taken))
        self.runs.unanswered -= len(taken)
        return taken

    def bind(self, bytes key not None):
        """Do what `add` does, for tests."""
        return self.add(<const uint8_t *> PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))

    cdef bint collect(self) except -1:
        cdef BindRuns runs = self.runs
        if not self.is_collected:
            if not runs.collected:
                runs.first(self)
            self.is_collected = True
            runs.collected.append(self)
        return True

    cdef bint add(self, const uint8_t *key, size_t size) except -1:
        """Go on with a bind of this routing key, which is at most 255 bytes long.

        Return False, and do nothing, if it has to go Python's way.
        """
        cdef BindRuns runs = self.runs
        cdef uint8_t message[PIPE_BUF]
        cdef size_t head, tail, at
        cdef uint32_t length
        cdef int pipe = runs.pipe if self.waits is None else runs.waited_pipe
        if self.epoch != runs.epoch or pipe < 0 or runs.unanswered >= C_UNANSWERED_MAX:
            return False
        if self.waits is not None and self.ends:
            return False
        try:
            text = PyUnicode_DecodeUTF8(<const char *> key, size, NULL)
        except UnicodeDecodeError:
            return False
        if self.head is None:
            self.head, self.tail = self.around()
            self.around = None
        head, tail = PyBytes_GET_SIZE(self.head), PyBytes_GET_SIZE(self.tail)
        if head + 2 + size + tail > PIPE_BUF:
            return False
        memcpy(message, PyBytes_AS_STRING(self.head), head)
        at = head
        if size <= SHORT_MAX:
            message[at] = SHORT | size
            at += 1
        else:
            message[at], message[at + 1] = LONGER, size
            at += 2
        memcpy(message + at, key, size)
        memcpy(message + at + size, PyBytes_AS_STRING(self.tail), tail)
        at += size + tail
        length = at - PREFIX_BYTES
        message[0], message[1] = length & 0xFF, length >> 8
        message[2] = message[3] = 0
        if c_write(pipe, message, at) != <ssize_t> at:
            return False
        self.ends.append((self.source, self.queue, text))
        runs.unanswered += 1
        self.collect()
        if self.waits is not None:
            self.waits.begun(self)
        return True
