"""Decide when a front door lets small reads, or small batches of large reads, pile up.

Clients that write one message at a time would turn each into a wake-up of every process on its way.
While reads are small and come fast, passes keep a distance, so that many of them make a batch. The
distance is short as long as small passes leave most of the processor to others, and up to a tick
when they do not. A client that sends rarely never waits. Neither does a client that sends one
message and waits for its answer: nothing would join that message, however long it waited. Nor does
a client that is the only one to send, unless it sends much: then larger batches take far less of
the processor than smaller ones, and without them only its latency counts. Nor does a client that
the front door answers by itself: no batch would become larger.

Times are in seconds. `now` is of one clock, `busy` is the processor time that this thread has had.
tests/reference/pace.py is the same in plain Python.
"""

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int CLOCK_THREAD_CPUTIME_ID
    int clock_gettime(int clock, timespec *now)

cdef enum:
    C_PASSES_HELD_MAX = 4
    C_ALONE_PASSES = 4
    C_AT_ONCE_PASSES = 16
    C_COMPANY_PASSES = 16
    C_MUCH = 8

# A small batch waits for this many passes at most.
PASSES_HELD_MAX = C_PASSES_HELD_MAX
# The distance, in multiples of the processor time that the pass before took. Small passes then take
# a third of the processor at most, unless that needs more than a tick.
TIMES_ITS_WORK = 3.0
# When this many passes in a row have waited and got only one thing to do, no more can be expected.
# The next AT_ONCE_PASSES do not wait, and the one after them tries again.
ALONE_PASSES = C_ALONE_PASSES
AT_ONCE_PASSES = C_AT_ONCE_PASSES
# A client has company if another one was read in so many passes before.
COMPANY_PASSES = C_COMPANY_PASSES
# A client sends much if so many things came in the pass before.
MUCH = C_MUCH

cdef double C_TIMES_ITS_WORK = TIMES_ITS_WORK
cdef double UNKNOWN = -1.0


cdef inline double seconds(int clock) noexcept nogil:
    cdef timespec now
    clock_gettime(clock, &now)
    return <double> now.tv_sec + <double> now.tv_nsec * 1e-9


cdef class Pace:
    """The pace of one front door. `tick_s` is the longest distance of small passes.

    `clock` and `busy` return times in place of the clocks of the kernel, if they are given.
    """

    def __init__(self, double tick_s, clock=None, busy=None):
        self._tick_s = tick_s
        self._busy_then = UNKNOWN
        self._clock, self._busy = clock, busy

    cdef double wait(self) except? -1:
        """Return how long the pass that begins now should sleep before.

        To ask the kernel how busy the thread was takes longer than the rest, so a pass asks only if
        it is near the one before, and may wait.
        """
        cdef double now = seconds(CLOCK_MONOTONIC) if self._clock is None else self._clock()
        cdef double busy = UNKNOWN
        if now - self._last_pass < self._tick_s and self.may_wait():
            busy = seconds(CLOCK_THREAD_CPUTIME_ID) if self._busy is None else self._busy()
        return self.next(now, busy)

    def distance(self, double now, busy):
        """Return how long a pass should sleep before it begins, so that other reads join it.

        `busy` is None for a pass that is not near the one before. A pass does not wait behind a
        pass whose `busy` was None.
        """
        return self.next(now, UNKNOWN if busy is None else busy)

    cdef bint may_wait(self) noexcept:
        """Return whether what the pass before had may be joined by more."""
        return self._company > 0 or self._came >= C_MUCH

    cdef double next(self, double now, double busy) noexcept:
        cdef double wait = 0.0
        cdef bint may_wait = self.may_wait()
        if self._waited:
            self._alone = self._alone + 1 if self._came <= 1 else 0
            self._at_once = C_AT_ONCE_PASSES if self._alone >= C_ALONE_PASSES else 0
        if self._at_once:
            self._at_once -= 1
        elif may_wait and self._small_reads and busy >= 0 and self._busy_then >= 0:
            wait = (
                self._last_pass + min(self._tick_s, C_TIMES_ITS_WORK * (busy - self._busy_then))
                - now
            )
        if self._company:
            self._company -= 1
        self._waited = wait > 0
        self._busy_then = busy
        self._last_pass = now + wait if wait > 0 else now
        self._small_reads = True
        self._came = 0
        return wait

    cpdef read_by(self, unsigned int client):
        """Note that the client with this number is read in this pass."""
        if client != self._reader:
            self._reader = client
            self._company = C_COMPANY_PASSES

    cpdef came(self, unsigned long long things):
        """Note how many publishes, acks and methods a read of this pass had."""
        self._came += things

    cpdef worth_a_pass(self):
        """Note that a read of this pass was worth a pass of its own.

        It was large, or the front door has answered it, and its client waits for the answer.
        """
        self._small_reads = False


cdef class Reads:
    """Decides whether what a pass has for a shard may wait for the next pass.

    A read that filled the buffer says that there is more. After any other read its client may be
    waiting for an answer. `full` and `short` count the reads of this pass, `held` the passes that
    some batch has waited for.
    """

    cpdef bint may_wait(self):
        """Return, at the end of a pass, whether small batches may wait.

        The caller sets `held` to 0 when nothing had to wait.
        """
        cdef int full = self.full, short = self.short
        self.full = self.short = 0
        if short or self.held == C_PASSES_HELD_MAX or not (full or self.held):
            return False
        if full:
            self.held += 1
        return True
