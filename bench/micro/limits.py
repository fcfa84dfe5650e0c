"""Measure what no broker on this machine can avoid: loopback, copies, wake-ups and syncs.

    PYTHONPATH=. python bench/micro/limits.py [--seconds 0.5] [--data DIR] > table.md

Another row is the cost of two processes that only hand on what one client asks at a time, as front
door and shard do.

CPU is that of this process, system calls included, the best of some rounds. A broker takes every
message in through one socket and gives it out through another: its share is one receive and one
send of the loopback, without the client's. A wake-up is the time from a byte in a socket pair until
the other process, asleep in poll, has answered: half of the round trip.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable

import uvloop

from shardmq.shardd.store.format import record

PIECE_BYTES = 64 << 10
SPREAD_BYTES = 64 << 20  # the memory that copies walk through, larger than the cache
ROUNDS = 5
SYNC_BYTES = 4096
SYNCS = 50
ASKED_BYTES = 64


def cpu_each(seconds: float, act: Callable[[], int]) -> float:
    """Return this thread's nanoseconds of CPU per unit that `act` returns, in the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        done, until, since = 0, time.perf_counter() + seconds / ROUNDS, time.thread_time_ns()
        while not done or time.perf_counter() < until:
            done += act()
        best = min(best, (time.thread_time_ns() - since) / done)
    return best


def copied(size: int) -> Callable[[], int]:
    source, target = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size))
    at = 0

    def act() -> int:
        nonlocal at
        target[at : at + PIECE_BYTES] = source[at : at + PIECE_BYTES]
        at = (at + PIECE_BYTES) % size
        return PIECE_BYTES

    return act


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def sending(own: socket.socket, far: socket.socket) -> Callable[[], int]:
    """Return a function that sends; a thread that is not counted empties the far end."""
    room = bytearray(1 << 20)

    def empty() -> None:
        while far.recv_into(room):
            pass

    threading.Thread(target=empty, daemon=True).start()
    piece = bytes(PIECE_BYTES)
    return lambda: own.send(piece)


def receiving(own: socket.socket, far: socket.socket) -> Callable[[], int]:
    piece, room = bytes(PIECE_BYTES), bytearray(1 << 20)

    def fill() -> None:
        with contextlib.suppress(OSError):  # the run is over
            while True:
                far.sendall(piece)

    threading.Thread(target=fill, daemon=True).start()
    return lambda: own.recv_into(room)


def woken_us(seconds: float) -> float:
    """Return half of a round trip in microseconds to a process that sleeps in poll and answers."""
    own, far = socket.socketpair()
    child = os.fork()
    if child == 0:
        own.close()
        waiting = select.poll()
        waiting.register(far, select.POLLIN)
        while waiting.poll() and far.recv(1):
            far.send(b"x")
        os._exit(0)
    far.close()
    trips: list[int] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(0.001)  # both processes fall asleep, as at a low rate
        since = time.perf_counter_ns()
        own.send(b"x")
        own.recv(1)
        trips.append(time.perf_counter_ns() - since)
    own.close()
    os.waitpid(child, 0)
    return sorted(trips)[len(trips) // 2] / 2000


def handed_on_us(seconds: float, answerer: bool) -> float:
    """Return the CPU of both processes for one request at a time, in microseconds.

    The way is: client, the process with a uvloop, the other process, and back. With `answerer` the
    other process sends to another client, whose answer comes back through the first process alone.
    """
    own, far = connected()
    inner, outer = socket.socketpair()
    second = connected() if answerer else None
    hands_on = (
        [(far, inner), (inner, far)]
        if second is None
        else [(far, inner), (inner, second[1]), (second[1], far)]
    )
    spent = [_child(lambda: _hand_on(hands_on)), _child(lambda: _hand_back(outer))]
    for each in (far, inner, outer, *(second[1:] if second else ())):
        each.close()
    asked, count, until = bytes(ASKED_BYTES), 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        own.send(asked)
        if second is not None:
            second[0].send(second[0].recv(ASKED_BYTES))
        own.recv(ASKED_BYTES)
        count += 1
    own.shutdown(socket.SHUT_WR)
    return sum(wait() for wait in spent) / count * 1e6


def _child(work: Callable[[], None]) -> Callable[[], float]:
    """Run `work` in a process; the result returns its CPU seconds when the process has ended."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        since = time.process_time()
        work()
        os.write(tell, repr(time.process_time() - since).encode())
        os._exit(0)
    os.close(tell)

    def wait() -> float:
        taken = float(os.read(told, 100))
        os.waitpid(child, 0)
        return taken

    return wait


def _hand_on(ways: list[tuple[socket.socket, socket.socket]]) -> None:
    loop = uvloop.new_event_loop()

    def readable(source: socket.socket, target: socket.socket) -> None:
        if data := source.recv(PIECE_BYTES):
            target.send(data)
        else:
            loop.stop()

    for source, target in ways:
        loop.add_reader(source.fileno(), readable, source, target)
    loop.run_forever()
    for source, _ in ways:  # close() is not enough: other processes have copies of the sockets
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)


def _hand_back(sock: socket.socket) -> None:
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    while waiting.poll() and (data := sock.recv(PIECE_BYTES)):
        sock.send(data)


def synced_us(directory: str) -> float:
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, SYNCS * SYNC_BYTES)
        os.fsync(file.fileno())
        took = []
        for at in range(SYNCS):
            since = time.perf_counter_ns()
            os.pwrite(file.fileno(), bytes(SYNC_BYTES), at * SYNC_BYTES)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter_ns() - since)
        return sorted(took)[SYNCS // 2] / 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of each row")
    parser.add_argument(
        "--data", default=tempfile.gettempdir(), help="directory on the disk to measure"
    )
    options = parser.parse_args()
    data = os.urandom(PIECE_BYTES)

    def sum_up() -> int:
        record.crc32c(data)
        return PIECE_BYTES

    rows = {
        "copy, in the cache, ns a byte": cpu_each(options.seconds, copied(2 * PIECE_BYTES)),
        "copy, out of memory, ns a byte": cpu_each(options.seconds, copied(SPREAD_BYTES)),
        "crc32c, in the cache, ns a byte": cpu_each(options.seconds, sum_up),
        "loopback, send of 64 KiB, ns a byte": cpu_each(options.seconds, sending(*connected())),
        "loopback, receive, ns a byte": cpu_each(options.seconds, receiving(*connected())),
        "a sleeping process woken, us of the clock": woken_us(options.seconds),
        "a request handed on and back by two processes, us of their CPU": handed_on_us(
            options.seconds, False
        ),
        "the same by way of another client, us of their CPU": handed_on_us(options.seconds, True),
        "fdatasync of 4 KiB, us of the clock": synced_us(options.data),
    }
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n| | |\n| --- | ---: |")
    for what, value in rows.items():
        print(f"| {what} | {value:.3g} |")


if __name__ == "__main__":
    main()
