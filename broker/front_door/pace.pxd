# cython: language_level=3
"""What the passes of a front door ask of pace.pyx."""


cdef class Pace:
    cdef double _tick_s, _last_pass
    cdef double _busy_then  # less than 0: not known
    cdef bint _small_reads, _waited
    cdef unsigned long long _came  # things in this pass so far
    cdef int _alone  # passes in a row that waited for nothing
    cdef int _at_once  # how many of the next passes do not wait
    cdef unsigned int _reader  # the client that was read last
    cdef int _company  # in how many of the next passes it has company
    cdef object _clock, _busy

    cdef double wait(self) except? -1
    cdef double next(self, double now, double busy) noexcept
    cpdef read_by(self, unsigned int client)
    cpdef came(self, unsigned long long things)
    cpdef was_large(self)


cdef class Reads:
    cdef public int full, short, held

    cpdef bint may_wait(self)
