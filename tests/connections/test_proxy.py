"""Clients behind a load balancer keep their addresses; only a named balancer is believed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.proxy import (
    BODY_2_BYTES_MAX,
    SIGNATURE_2,
    Balancers,
    Greeting,
    Header,
    Peer,
    ProxyError,
    scan,
)

AMQP = b"AMQP\x00\x00\x09\x01"
PORTS = st.integers(0, 0xFFFF)


def version_2(source: str, port: int, command: int = 0x21, tlvs: bytes = b"") -> bytes:
    """By section 2.2, to a destination of the same family."""
    address = ipaddress.ip_address(source)
    family, other = (0x11, bytes(4)) if address.version == 4 else (0x21, bytes(16))
    body = address.packed + other + struct.pack("!HH", port, 5672) + tlvs
    return SIGNATURE_2 + struct.pack("!BBH", command, family, len(body)) + body


@given(st.ip_addresses(), PORTS, st.binary(max_size=200), st.integers(0, 400))
def test_version_2_names_the_client_and_is_wanted_whole(
    source: ipaddress.IPv4Address, port: int, tlvs: bytes, cut: int
) -> None:
    header = version_2(str(source), port, tlvs=tlvs)
    assert scan(header + AMQP) == Header(len(header), (str(source), port), relayed=True)
    if 0 < cut < len(header):
        assert scan(header[:cut]) is None


@given(st.ip_addresses(), PORTS, st.integers(0, 200))
def test_version_1_names_the_client_and_is_wanted_whole(
    source: ipaddress.IPv4Address, port: int, cut: int
) -> None:
    other = "192.0.2.1" if source.version == 4 else "2001:db8::1"
    header = f"PROXY TCP{source.version} {source} {other} {port} 5672\r\n".encode()
    assert scan(header + AMQP) == Header(len(header), (str(source), port), relayed=True)
    if 0 < cut < len(header):
        assert scan(header[:cut]) is None


@pytest.mark.parametrize(
    ("header", "relayed"),
    [
        (b"PROXY UNKNOWN\r\n", True),
        (b"PROXY UNKNOWN ffff:: ffff:: 1 2\r\n", True),
        (SIGNATURE_2 + b"\x21\x00\x00\x00", True),
        (version_2("192.0.2.1", 7, command=0x20), False),
    ],
)
def test_a_balancer_names_nobody_of_whom_it_does_not_know_or_when_it_speaks_for_itself(
    header: bytes, relayed: bool
) -> None:
    assert scan(header + AMQP) == Header(len(header), None, relayed)


@pytest.mark.parametrize(
    "data", [AMQP, b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", b"PROXIES", b"\r\n\r\nhello"]
)
def test_what_is_no_header_is_left_as_it_is(data: bytes) -> None:
    assert scan(data) == Header(0, None, relayed=False)


@pytest.mark.parametrize(
    "data",
    [
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n",
        b"PROXY TCP4 ::1 ::1 1 2\r\n",
        b"PROXY TCP4 localhost 192.0.2.2 1 2\r\n",
        b"PROXY \xff\r\n",
        b"PROXY " + b"x" * 107,
        SIGNATURE_2 + b"\x31\x11\x00\x0c",
        SIGNATURE_2 + b"\x21\x11\x00\x04" + bytes(4),
        SIGNATURE_2 + struct.pack("!BBH", 0x21, 0x11, BODY_2_BYTES_MAX + 1),
    ],
)
def test_a_broken_header_is_an_error(data: bytes) -> None:
    with pytest.raises(ProxyError):
        scan(data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_header_none_an_error_or_too_few(data: bytes) -> None:
    for start in (b"", b"PROXY ", SIGNATURE_2, SIGNATURE_2 + b"\x21\x11"):
        try:
            found = scan(start + data)
        except ProxyError:
            continue
        assert found is None or 0 <= found.length <= len(start + data)


def test_networks_are_balancers_of_their_own_family_also_written_as_ipv6() -> None:
    balancers = Balancers(["10.0.0.0/24", "2001:db8::/32"])
    assert "10.0.0.9" in balancers and "::ffff:10.0.0.9" in balancers and "2001:db8::7" in balancers
    assert "10.0.1.9" not in balancers and "::1" not in balancers
    assert "10.0.0.9" not in Balancers([])


class Arriving:
    """A connection that has just come to a listener, and the balancer's end of it."""

    def __init__(self, timeout_s: float = 10) -> None:
        self.balancer, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.greeting = Greeting(
            asyncio.get_running_loop(),
            self.sock,
            Peer("10.0.0.1", 9),
            timeout_s=timeout_s,
            entered=lambda _: self.done.set_result("entered"),
            left=lambda _: self.done.set_result("left"),
        )


@pytest.mark.row("N12")
@pytest.mark.parametrize(
    "header", [version_2("192.0.2.7", 77), b"PROXY TCP4 192.0.2.7 192.0.2.1 77 5672\r\n"]
)
async def test_however_the_bytes_arrive_those_behind_the_header_stay_unread(header: bytes) -> None:
    for piece in (1, 5, 1000):
        arriving = Arriving()
        data = header + AMQP
        for start in range(0, len(data), piece):
            arriving.balancer.sendall(data[start : start + piece])
            await asyncio.sleep(0)
        assert await arriving.done == "entered"
        assert arriving.greeting.peer == Peer("192.0.2.7", 77, relayed=True)
        assert arriving.sock.recv(100) == AMQP


async def test_without_a_header_the_connection_is_the_balancers_own() -> None:
    arriving = Arriving()
    arriving.balancer.sendall(AMQP)
    assert await arriving.done == "entered"
    assert arriving.greeting.peer == Peer("10.0.0.1", 9) and arriving.sock.recv(100) == AMQP


async def test_a_broken_header_an_early_end_and_silence_close_the_connection() -> None:
    for said, close in ((b"PROXY nonsense\r\n", False), (b"PRO", True), (b"PROXY TCP4", False)):
        arriving = Arriving(timeout_s=0.05)
        arriving.balancer.sendall(said)
        if close:
            arriving.balancer.close()
        assert await arriving.done == "left"
        assert arriving.sock.fileno() == -1
