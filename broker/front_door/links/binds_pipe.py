"""The front door's ends of the pipes by which it tells the controller of binds ahead.

Nobody waits for the requests of one pipe, so the controller need not be woken for each. Clients
wait for those of the other pipe. What is in a pipe outlives this process: the controller reads it
to its end.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardmq.broker.front_door.hot_state import NO_PIPE
from shardmq.broker.front_door.links.control_stream import HEAD_BYTES
from shardmq.broker.shared.control import Ask, BindMany, binds_pipe

log = logging.getLogger("shardmq.broker.front_door.links.binds_pipe")


# Room for as many binds as may be unanswered, if their names are not long. It is what Linux gives
# to any user.
PIPE_BYTES = 1 << 20


class BindsPipe:
    """A pipe that belongs to one stream to the controller.

    The controller opens the pipe when it hears the hello of the front door, and takes its name
    away. A controller of another release, or on another node, does not.
    """

    def __init__(
        self, control_path: str, door: int, incarnation: int, waited: bool = False
    ) -> None:
        """Make the pipe; `waited` says that clients wait for its requests. Raises OSError."""
        self._path = Path(control_path).parent / binds_pipe(door, incarnation, waited)
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path, 0o600)
        # Both ends are open here, so that a controller that has gone is no error.
        self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # of a user who has many pipes; they are fuller sooner
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._is_read = False

    def answered(self) -> None:
        """Note that the controller has answered the hello."""
        self._is_read = not self._path.exists()

    def takes(self, request: bytes) -> bool:
        """Return whether the request may go by the pipe, once there is room."""
        return self._is_read and len(request) <= select.PIPE_BUF

    @property
    def fd(self) -> int:
        """Return the file descriptor to write to, NO_PIPE if the controller does not read."""
        return self._fd if self._is_read else NO_PIPE

    def write(self, request: bytes) -> bool:
        """Write a request whole. Return False, and do nothing, if that is not possible."""
        if not self.takes(request):
            return False
        try:
            os.write(self._fd, request)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._is_read = False
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def new_pipe(
    control_path: str, door: int, incarnation: int, waited: bool = False
) -> BindsPipe | None:
    """Return a new pipe, or None if there can be none."""
    try:
        return BindsPipe(control_path, door, incarnation, waited)
    except OSError as error:
        log.warning("no pipe for binds, they go by the stream: %s", error)
        return None


def around_key(
    ask: Ask, source: str, queue: str, encode: Callable[[Ask], bytes]
) -> tuple[bytes, bytes]:
    """Return the message of a run's next bind as bytes before and behind its routing key.

    The length that it begins with is to be set. `ask` is the request of the run, whose binds are
    between `source` and `queue`.
    """
    assert isinstance(ask.what, BindMany)
    vhost, waited = ask.what.vhost, ask.what.waited

    def with_key(key: str) -> bytes:
        binds = BindMany(vhost, [(source, queue, key)], True, waited)
        return encode(Ask(ask.id, binds, ask.owner, ask.user))

    empty, other = with_key(""), with_key("?")
    at = next(at for at in range(HEAD_BYTES, len(empty)) if empty[at] != other[at])
    return empty[:at], empty[at + 1 :]
