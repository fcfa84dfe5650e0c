# cython: language_level=3
"""Declare what the kernel offers to find out which descriptors are readable."""

from libc.stdint cimport uint32_t
from posix.time cimport timespec

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_DEL
    int EPOLLIN
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int what, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout_ms)

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int POLLIN
    int poll(pollfd *fds, unsigned long count, int timeout_ms)
    int ppoll(pollfd *fds, unsigned long count, const timespec *timeout, const void *mask)
