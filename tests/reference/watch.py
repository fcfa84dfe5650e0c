"""broker/front_door/watch.pxi in plain Python: a pass over sockets and rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RECEIVE_BURST = 64


class Pass:
    """The passes of a front door. Its parts are methods, so that tests can break one of them."""

    def __init__(self, loop: Any, inbox: Any, readers: dict[int, Callable[[], None]]) -> None:
        self.loop, self.inbox, self.readers = loop, inbox, readers

    def run(self, readable: list[int]) -> None:
        """Run a pass over descriptors in the order in which they became readable."""
        bells = [fd for fd in readable if fd in self.inbox._lanes]
        self.loop.end_scheduled = True
        self.hear(bells)
        self.answer_publishers()
        self.read([fd for fd in readable if fd not in bells])
        self.loop.end_of_pass()

    def hear(self, bells: list[int]) -> None:
        for bell in bells:
            link = self.inbox._lanes[bell]
            lane = link.lane
            if lane.writes_ring and lane.reads_ring:
                lane.hear()
                self.inbox._hear_rest(link, lane, RECEIVE_BURST)
            else:
                self.readers[bell]()
            self.loop.end_scheduled = True

    def answer_publishers(self) -> None:
        due, self.loop.confirms_due[:] = self.loop.confirms_due[:], []
        for confirms in due:
            confirms.client.write(confirms.answers())
            if confirms.failure is not None:
                confirms.client.fail(confirms.failure, confirms.channel)
                confirms.failure = None

    def read(self, sockets: list[int]) -> None:
        for fd in sockets:
            if fd in self.readers:  # it may have been closed or paused meanwhile
                self.loop.begin_pass()
                self.loop.end_scheduled = True
                self.readers[fd]()
