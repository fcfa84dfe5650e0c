"""Run the process of the reader: a listening socket, and a bounded number of threads for calls.

The reader reads the files of streams and writes to clients, beside the shards, which never wait for
it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

import msgspec

from shardmq.shardd.reader.config import ReaderConfig, read
from shardmq.shardd.reader.pace import Pacer
from shardmq.shardd.reader.scanning import NO_ARROW, Refused, Scanning, Streams
from shardmq.shardd.signals import Signals
from shardmq.shardd.store.errors import Corrupt
from shardmq.shardd.store.streams.scan import Truncated
from shardmq.shardd.wire.memory import collect_seldom, keep_warm
from shardmq.shardd.wire.precedence import messages_first
from shardmq.shardd.wire.reader_protocol import (
    BODY_BYTES_MAX,
    DIRECT,
    DONE,
    JSON_BYTES_MAX,
    LENGTH,
    PROXY,
    Answer,
    Call,
    Find,
    Publish,
    Scan,
)
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

# The most calls that wait for their turn, beside the running scans.
WAITING_MAX = 32
TURN_S_MAX = 30.0
# The longest time between two confirms: a shard may start anew meanwhile.
CONFIRMS_S_MAX = 30.0
# The longest time that a client or the controller may take for one step.
SEND_S_MAX = 60.0
NICENESS = 10
SESSION_NICENESS = "/proc/self/autogroup"
WATCHDOG_MS = 1000

log = logging.getLogger(__name__)
_answers = msgspec.json.Encoder()
_calls = msgspec.json.Decoder(Call)


class Server:
    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        self._streams = Streams(config.data_dir, config.runtime_dir, config.shards)
        self._turns = threading.BoundedSemaphore(config.scans_max)
        self._places = threading.BoundedSemaphore(config.scans_max + WAITING_MAX)
        self._publishing = threading.BoundedSemaphore(config.scans_max)
        self._pacer = Pacer(config.bytes_per_s)

    def run(self) -> int:
        """Serve calls until SIGTERM or the end of the supervisor.

        Running calls are cut off then.
        """
        _step_back()
        keep_warm()
        collect_seldom()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        listener, signals = socket.socket(fileno=self._config.listen_fd), Signals()
        poll = select.poll()
        lifeline = notify.lifeline_fd()
        for fd in (listener.fileno(), signals.fd, lifeline):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        notify.ready()
        while True:
            ready = [fd for fd, _ in poll.poll(WATCHDOG_MS)]
            notify.watchdog()
            reload = signals.fd in ready and signals.take()
            if signals.stop or lifeline in ready:
                notify.stopping()
                return 0
            if reload:
                self._take_settings()
            if listener.fileno() in ready:
                self._accept(listener)

    def _take_settings(self) -> None:
        """Apply the log level of new settings. The other settings apply from the next start."""
        section = notify.new_section()
        if section is not None:
            set_level(read(section).log_level)

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError:
            return  # the caller is gone again
        caller.settimeout(SEND_S_MAX)
        if not self._places.acquire(blocking=False):
            answer(caller, Answer(503, "busy", f"{WAITING_MAX} calls wait already"))
            caller.close()
            return
        threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                self._answer(caller)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            log.debug("a call was broken off: %r", error)
        except (Truncated, Corrupt) as error:
            log.warning("a scan was cut off: %s", error)
        except Exception:
            log.exception("a call failed")
        finally:
            self._places.release()

    def _answer(self, caller: socket.socket) -> None:
        call = _calls.decode(receive(caller, JSON_BYTES_MAX))
        try:
            match call:
                case Find():
                    answer(caller, self._streams.find(call))
                case Scan():
                    self._in_turn(caller, call)
                case Publish():
                    self._publish(caller, call)
        except Refused as refused:
            answer(caller, refused.answer)

    def _in_turn(self, caller: socket.socket, call: Scan) -> None:
        if not self._turns.acquire(timeout=TURN_S_MAX):
            raise Refused(Answer(503, "busy", f"{self._config.scans_max} scans run already"))
        try:
            scanning = Scanning(self._streams, call)
            try:
                answer(caller, scanning.begin())
                self._run(caller, scanning)
            finally:
                scanning.close()
        finally:
            self._turns.release()

    def _publish(self, caller: socket.socket, call: Publish) -> None:
        """Take in and publish the rows of a call when its turn comes.

        The rows are not read before, because they take the memory.
        """
        if not self._publishing.acquire(timeout=TURN_S_MAX):
            raise Refused(Answer(503, "busy", f"{self._config.scans_max} calls publish already"))
        try:
            body = receive_parts(caller, BODY_BYTES_MAX)
            answer(caller, publisher()(call, body, CONFIRMS_S_MAX))
        finally:
            self._publishing.release()

    def _run(self, caller: socket.socket, scanning: Scanning) -> None:
        way, fds, _, _ = socket.recv_fds(caller, 1, 1)
        if way == DIRECT and fds:
            with socket.socket(fileno=fds[0]) as client:
                client.settimeout(SEND_S_MAX)
                scanning.run(client, True, self._pacer)
            caller.sendall(DONE)
        elif way == PROXY:
            scanning.run(caller, False, self._pacer)
            caller.sendall(LENGTH.pack(0))


def _step_back() -> None:
    """Lower the priority of this process: shards and front doors go first.

    Linux may divide the cores by session before it looks at processes. The supervisor starts each
    child in a session of its own, so the priority of the session is lowered too.
    """
    messages_first()
    try:
        os.nice(NICENESS)
        if os.getsid(0) == os.getpid() and os.path.exists(SESSION_NICENESS):
            with open(SESSION_NICENESS, "w") as file:
                file.write(str(NICENESS))
    except OSError as error:
        log.warning("runs at the priority of the others: %s", error)


def answer(caller: socket.socket, said: Answer) -> None:
    data = _answers.encode(said)
    caller.sendall(LENGTH.pack(len(data)) + data)


def receive(caller: socket.socket, bytes_max: int) -> bytes:
    """Receive bytes that have their length before them.

    Raise EOFError at the end of the connection, and ValueError above `bytes_max` bytes.
    """
    (length,) = LENGTH.unpack(receive_exactly(caller, LENGTH.size))
    if length > bytes_max:
        raise ValueError(f"{length} bytes in a call, {bytes_max} allowed")
    return bytes(receive_exactly(caller, length))


def receive_parts(caller: socket.socket, bytes_max: int) -> bytes:
    """Receive the parts that `as_part` makes; return their bytes together.

    Raise Refused above `bytes_max` bytes.
    """
    parts: list[bytearray] = []
    total = 0
    while True:
        (length,) = LENGTH.unpack(receive_exactly(caller, LENGTH.size))
        if length == 0:
            return b"".join(parts)
        total += length
        if total > bytes_max:
            raise Refused(Answer(413, "too_large", f"at most {bytes_max} bytes of rows in a call"))
        parts.append(receive_exactly(caller, length))


def publisher() -> Callable[[Publish, bytes, float], Answer]:
    try:
        from shardmq.shardd.reader.publishing import publish
    except ImportError:
        raise Refused(Answer(501, "not_implemented", NO_ARROW)) from None
    return publish


def receive_exactly(caller: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    with memoryview(data) as view:
        done = 0
        while done < count:
            got = caller.recv_into(view[done:])
            if got == 0:
                raise EOFError
            done += got
    return data
