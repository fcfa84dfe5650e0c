"""A child process in one of its lives: start it, read its messages, signal it, describe its exit.

Each child has a session of its own. So Ctrl-C reaches the supervisor alone, and the children drain
in their order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from shardmq.supervisor import modules
from shardmq.supervisor.notify import DATAGRAM_BYTES_MAX, LIFELINE_FD, NOTIFY_FD
from shardmq.supervisor.plan import ChildPlan
from shardmq.supervisor.sources import is_setting

STARTING, READY, STOPPING, EXITED = "starting", "ready", "stopping", "exited"

DATAGRAMS_PER_PASS_MAX = 64  # The number of messages read from one child in one pass of the loop.
CHILD_UMASK = 0o027  # Other users must not read the messages in the files.
SYSTEMD_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)

log = logging.getLogger("supervisor")


class Child:
    """A child process in one of its lives.

    Args:
        plan: The module, the settings and the descriptors of the child.
        on_change: Called after each change of `state`, `status` or `info`.
        on_set: Called with a key and a value as TOML when the child asks to change a setting.
    """

    def __init__(
        self,
        plan: ChildPlan,
        on_change: Callable[[], None],
        on_set: Callable[[str, str], None] = lambda key, value: None,
    ) -> None:
        self.plan = plan
        self.state = STARTING
        self.status = ""
        self.info: dict[str, str] = {}
        self.pid = 0
        self.heard_at = asyncio.get_running_loop().time()
        self.watched = False
        self.killed = False
        self._on_change = on_change
        self._on_set = on_set
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    async def spawn(self, lifeline: int, inherited: tuple[int, ...] = ()) -> None:
        """Start the process.

        Args:
            lifeline: The read end of the pipe that tells the child that the supervisor is gone.
            inherited: More descriptors that the child keeps open, such as those of locks.

        Raises:
            OSError: The process cannot be made.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        section = -1
        try:
            section = _section_file(self.plan.section)
            self._process = await asyncio.create_subprocess_exec(
                *self.plan.arguments(section),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline, section, *self.plan.fds, *inherited),
                env=_environment(theirs.fileno(), lifeline),
                start_new_session=True,
                umask=CHILD_UMASK,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if section >= 0:
                os.close(section)
        self.pid = self._process.pid
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear)

    async def wait(self) -> int:
        """Wait for the end of the process and return its exit status, negative for a signal.

        All messages that the child has sent before its end have been read.
        """
        assert self._process is not None and self._socket is not None
        status = await self._process.wait()
        self._hear()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._change(EXITED)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Do nothing if the process has already ended."""
        if self._process is not None and self._process.returncode is None:
            if number == signal.SIGTERM:
                self._change(STOPPING)
            self.killed = self.killed or number == signal.SIGKILL
            self._process.send_signal(number)

    def reload(self) -> None:
        """Send the child its present settings and SIGHUP, so that it reads its files again.

        The child must be ready: before that it does not handle SIGHUP.
        """
        if self._socket is not None:
            try:
                self._socket.send(json.dumps(self.plan.section).encode())
            except OSError as error:  # The child does not listen. Its next life gets the settings.
                log.error("%s cannot be told its settings: %s", self.plan.name, error)
            self.signal(signal.SIGHUP)

    def unheard(self, seconds: float, now: float) -> None:
        """Take a pause of the supervisor out of the time for which the child has been silent.

        Args:
            seconds: The length of the pause.
            now: The time of the event loop in seconds.
        """
        self.heard_at = min(self.heard_at + seconds, now)

    def _hear(self) -> None:
        if self._socket is None:
            return
        for _ in range(DATAGRAMS_PER_PASS_MAX):
            try:
                datagram = self._socket.recv(DATAGRAM_BYTES_MAX)
            except (BlockingIOError, ConnectionError):
                return
            if not datagram:
                return
            for line in datagram.decode(errors="replace").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        """Handle one line of a message, by the protocol that `notify.py` describes."""
        self.heard_at = asyncio.get_running_loop().time()
        key, _, value = line.partition("=")
        match key:
            case "READY" if self.state == STARTING:
                self._change(READY)
            case "STOPPING":
                self._change(STOPPING)
            case "WATCHDOG":
                self.watched = True
            case "STATUS":
                self.status = value
                self._on_change()
            case "X_SET":
                self._on_set(*value.partition("=")[::2])
            case _ if key.startswith("X_"):
                self.info[key.removeprefix("X_").lower()] = value
                self._on_change()

    def _change(self, state: str) -> None:
        if self.state not in (state, EXITED):
            self.state = state
            self._on_change()


def describe_exit(status: int) -> str:
    """Return an exit status as words. A negative status is the number of a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _section_file(section: dict[str, Any]) -> int:
    """Return the descriptor of a file without a name that holds the settings.

    Only processes that inherit the descriptor can read the file.
    """
    fd = os.memfd_create("shardmq-section", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, json.dumps(section).encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _environment(notify_fd: int, lifeline: int) -> dict[str, str]:
    """Return the environment of a child.

    It has no variables that systemd sets for the supervisor alone, and no settings, of which some
    are secret: a child gets its settings as its section.
    """
    kept = {
        name: value
        for name, value in modules.environment().items()
        if name not in SYSTEMD_VARIABLES and not is_setting(name)
    }
    return kept | {NOTIFY_FD: str(notify_fd), LIFELINE_FD: str(lifeline)}
