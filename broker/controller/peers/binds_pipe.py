"""The controller's ends of the pipes by which a front door tells of binds ahead.

Nobody waits for the requests of one pipe. So the first of them wakes this process, and the others
are read together with it a little later, or before anything else of the front door is heard. The
requests of the other pipe are waited for, so they are read at once. What a front door has written
is read to its end when it has died.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from shardmq.broker.shared.control import Ask, BindMany, binds_pipe

WAITS_S = 0.01  # how long requests wait for others
READ_BYTES = 256 << 10


class BindsPipe:
    """A pipe of one front door. `take` is given the bytes that came.

    `waited` says that clients wait for its requests.
    """

    def __init__(self, fd: int, take: Callable[[bytes], None], waited: bool) -> None:
        self._fd, self._take, self._waited = fd, take, waited
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False  # nothing more will come
        self._loop.add_reader(fd, self._woken)

    def _woken(self) -> None:
        if not self._waited:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(WAITS_S, self._go_on)
        elif not self.read():
            self._loop.remove_reader(self._fd)
            self.is_over = True

    def _go_on(self) -> None:
        self._timer = None
        if self.read():
            self._loop.add_reader(self._fd, self._woken)
        else:
            self.is_over = True

    def read(self) -> bool:
        """Take all that is there. Return False if there will be no more.

        A read that is not full has emptied the pipe, so the last request is whole.
        """
        if self._fd < 0:
            return False
        taken, goes_on = b"", True
        try:
            while len(data := os.read(self._fd, READ_BYTES)) == READ_BYTES:
                taken += data
            taken, goes_on = taken + data, bool(data)
        except BlockingIOError:
            pass
        if taken:
            self._take(taken)
        return goes_on

    def close(self) -> None:
        """Take all that is there, and no more."""
        if self._fd < 0:
            return
        self.read()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1


def opened(
    directory: Path,
    door: int,
    incarnation: int,
    take: Callable[[bytes], None],
    waited: bool = False,
) -> BindsPipe | None:
    """Open a pipe that a front door has made, if there is one, and take its name away."""
    path = directory / binds_pipe(door, incarnation, waited)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    path.unlink(missing_ok=True)
    return BindsPipe(fd, take, waited)


def together(asks: list[Ask]) -> list[tuple[Ask, int]]:
    """Join the parts of each request that have come; they are decided as one.

    Return the requests with how many binds were joined. Binds may change places among each other.
    """
    requests: dict[int, Ask] = {}
    for ask in asks:
        assert isinstance(ask.what, BindMany)
        first = requests.setdefault(ask.id, ask)
        if first is not ask:
            first.what.binds.extend(ask.what.binds)  # type: ignore[union-attr]
    return [(ask, len(ask.what.binds)) for ask in requests.values()]  # type: ignore[union-attr]
