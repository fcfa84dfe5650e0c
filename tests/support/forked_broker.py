"""Start brokers by fork from a process that has imported all their modules.

A broker has five processes, which spend 2.2 seconds of a processor on imports: most of what a start
costs. Here a template, one process for each worker of pytest, imports the modules once. Each broker
is a fork of the template, and the processes of the broker are forks of its supervisor. All else is
as it always is: each is a process with its own session, environment, arguments and descriptors, and
runs the `main` of its module.

A process that comes back, such as after a kill, is started by a command. So it is away for as long
as it always is, and what clients do meanwhile is tested.

What differs from a broker that `shardctl start` has started is the command line in /proc, and the
memory, which holds all modules. Tests of these start a broker with `forked=False`, and all tests do
with the variable COLD in their environment.

`python -m tests.support.forked_broker FD` is the template. It ends when the other end of the socket
FD is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, NoReturn

COLD: Final = "SHARDMQ_TEST_COLD"
SUPERVISOR: Final = "shardmq.supervisor"
CHILDREN: Final = (
    "shardmq.broker.controller",
    "shardmq.broker.front_door",
    "shardmq.bridges",
    "shardmq.combined",
    "shardmq.shardd",
    "shardmq.shardd.reader",
)
# What those import when they need it.
LATER: Final = (
    "shardmq.broker.controller.management.app",
    "shardmq.broker.controller.nodes.node",
    "shardmq.shardd.seat",
)
REQUEST_BYTES_MAX: Final = 1 << 18
STATUS_BYTES: Final = 4
SECTION_BYTES_MAX: Final = 1 << 20
READ_ONCE: Final = ("LD_PRELOAD", "SHARDMQ_FASTPATH", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZ")
# What tells processes of the same module apart in their settings.
NUMBERS: Final = ("shard", "door")
IMPORTS_S_MAX: Final = 120.0
FIRST_FD: Final = 3  # behind standard input, output and error
SOURCE: Final = Path(__file__).resolve().parents[2]


# -- the side of the tests -------------------------------------------------------------------------


class Forked:
    """The supervisor of a broker, with what tests use of subprocess.Popen."""

    def __init__(self, pid: int, stdout: IO[str], status: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self.returncode: int | None = None
        self._status = status
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(SUPERVISOR, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        with self._reading:
            if self.returncode is None:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._status, selectors.EVENT_READ)
                    if not selector.select(timeout):
                        return None
                found = os.read(self._status, STATUS_BYTES)
                assert found, "the template of the brokers is gone"
                self.returncode = int.from_bytes(found, sys.byteorder, signed=True)
                os.close(self._status)
            return self.returncode


class Template:
    """The template of this process, which is started with the first broker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the process that may ask it

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> Forked:
        """Start a supervisor, whose standard error is the file `log`."""
        with self._lock:
            asked = self._asked()
            output, their_output = os.pipe()
            status, their_status = os.pipe()
            request = {"arguments": list(arguments), "environment": dict(environment)}
            try:
                socket.send_fds(
                    asked,
                    [json.dumps(request).encode()],
                    [their_output, log.fileno(), their_status],
                )
            finally:
                os.close(their_output)
                os.close(their_status)
            pid = int.from_bytes(asked.recv(STATUS_BYTES), sys.byteorder)
        assert pid, "the template of the brokers is gone"
        return Forked(pid, os.fdopen(output), status)

    def _asked(self) -> socket.socket:
        if self._socket is None or self._pid != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name, str(theirs.fileno())],
                    cwd=SOURCE,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            ours.settimeout(IMPORTS_S_MAX)
            self._socket, self._pid = ours, os.getpid()
        return self._socket


template: Final = Template()


def read_once(environment: Mapping[str, str]) -> dict[str, str | None]:
    return {name: environment.get(name) for name in READ_ONCE}


AT_FIRST: Final = read_once(os.environ)  # as the template has them


def may_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a broker with these variables beside those of this process may be a fork.

    Settings are read at each start; other variables are read when Python or a module is loaded.
    """
    return (
        COLD not in os.environ
        and all(name.startswith("SHARDMQ_") for name in environment)
        and read_once({**os.environ, **environment}) == AT_FIRST
    )


# -- the template ----------------------------------------------------------------------------------


def serve(asked: socket.socket) -> None:
    """Fork a supervisor for each request, and tell how each ends, until nobody can ask any more."""
    mains = {name: importlib.import_module(f"{name}.__main__") for name in (SUPERVISOR, *CHILDREN)}
    for name in LATER:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there in a fork"
    gc.collect()
    gc.freeze()
    statuses: dict[int, tuple[int, int]] = {}  # process and pipe, by the descriptor of the process
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in statuses:
                    pid, pipe = statuses.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                request, fds, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 3)
                if not request:
                    return
                output, log, pipe = fds
                pid = os.fork()
                if not pid:
                    _become_supervisor(mains, json.loads(request), output, log)
                os.close(output)
                os.close(log)
                told = os.pidfd_open(pid)
                statuses[told] = pid, pipe
                selector.register(told, selectors.EVENT_READ)
                asked.send(pid.to_bytes(STATUS_BYTES, sys.byteorder))


def _tell(pipe: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has ended
        os.write(pipe, status.to_bytes(STATUS_BYTES, sys.byteorder, signed=True))
    os.close(pipe)


def _become_supervisor(
    mains: Mapping[str, ModuleType], request: Mapping[str, Any], output: int, log: int
) -> NoReturn:
    os.dup2(output, 1)
    os.dup2(log, 2)
    os.closerange(FIRST_FD, os.sysconf("SC_OPEN_MAX"))
    os.setsid()
    asyncio.create_subprocess_exec = Children(mains).start  # type: ignore[assignment]
    _run(mains[SUPERVISOR].main, request["arguments"], request["environment"])


class Children:
    """Starts the processes of a broker in its supervisor, as asyncio does for others."""

    def __init__(self, mains: Mapping[str, ModuleType]) -> None:
        self._mains = mains
        self._exec = asyncio.create_subprocess_exec
        self._begun: set[tuple[str, ...]] = set()  # the kind and the numbers of each process

    async def start(
        self,
        *command: str,
        stdin: int,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        start_new_session: bool,
        umask: int,
    ) -> Child | asyncio.subprocess.Process:
        """Fork a process that runs a module of the broker. Its next life begins with a command."""
        _, _, _, module, *arguments = command
        assert start_new_session and stdin == asyncio.subprocess.DEVNULL
        section = json.loads(os.pread(_descriptor(arguments), SECTION_BYTES_MAX, 0))
        which = (module, *(str(section.get(name)) for name in NUMBERS))
        if which in self._begun:
            return await self._exec(
                *command,
                stdin=stdin,
                pass_fds=pass_fds,
                env=env,
                start_new_session=start_new_session,
                umask=umask,
            )
        self._begun.add(which)
        # No signal must reach a handler of the supervisor in the fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if not pid:
            asyncio.create_subprocess_exec = self._exec
            _leave_the_supervisor(pass_fds)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.setsid()
            os.umask(umask)
            _run(self._mains[module].main, arguments, env)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Child(pid)


def _descriptor(arguments: Sequence[str]) -> int:
    """Return the descriptor of the settings of a process: `--config fd:N`."""
    return int(arguments[-1].removeprefix("fd:"))


class Child:
    """A process of a broker in its supervisor, with what this uses of asyncio's Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._end.set_result(self.returncode)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def _leave_the_supervisor(kept: Sequence[int]) -> None:
    """Forget the loop, the handlers of signals and the descriptors of the supervisor.

    Its objects stay until the end of the process, so that none closes a descriptor that is new.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 10)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    asyncio.set_event_loop_policy(None)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    first = FIRST_FD
    for fd in sorted(kept):
        os.closerange(first, fd)
        os.set_inheritable(fd, True)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _run(
    main: Callable[[], int], arguments: Sequence[str], environment: Mapping[str, str]
) -> NoReturn:
    """Run the `main` of a module as the whole of this process, as `python -m` does."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        random.seed()
        try:
            status = main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
