"""What a socket takes only some of at a time arrives whole and in order."""

from __future__ import annotations

import random
import socket
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from shardd.reader.scanning import send_all

TIME_OUT_S = 60


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0, 1, 7, 100, 5000, 70_000]), max_size=12), st.integers(0, 99))
def test_pieces_leave_one_after_the_other_wherever_the_socket_cuts_them(sizes: list[int], seed: int) -> None:
    pieces = [random.Random(seed + at).randbytes(size) for at, size in enumerate(sizes)]
    here, there = socket.socketpair()
    received: list[bytes] = []

    def read() -> None:
        while data := there.recv(3001):
            received.append(data)

    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        here.settimeout(TIME_OUT_S)
        reader = threading.Thread(target=read)
        reader.start()
        sent = send_all(here, pieces)
        here.shutdown(socket.SHUT_WR)
        reader.join(TIME_OUT_S)
    assert sent == sum(sizes)
    assert b"".join(received) == b"".join(pieces)
