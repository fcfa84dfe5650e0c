"""The PROXY protocol, versions 1 and 2: a load balancer says whose connection it passes on.

`scan` reads a header. `Greeting` takes a header off a socket that has just come, never a byte more,
and hands the socket on. Only connections from addresses that the settings name may begin with a
header: from others anybody could claim anything. A connection from there that does not begin with a
header is the balancer's own, such as a health check.

A client that comes through a balancer is never taken for a client on this host, whatever address
the header names, or if it names none. Users that may log in from this host only are not let in, as
with RabbitMQ behind the PROXY protocol.

Format: https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt, sections 2.1 and 2.2:

    v1  "PROXY TCP4 192.0.2.1 198.51.100.7 56324 5672\\r\\n", or "PROXY UNKNOWN ...\\r\\n";
        at most 107 bytes
    v2  12 bytes of signature, u8 version 2 and command, u8 family and transport, u16 length, then
        that many bytes: source and destination address, source and destination port, TLVs
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

SIGNATURE_1 = b"PROXY "
SIGNATURE_2 = b"\r\n\r\n\x00\r\nQUIT\n"
LINE_BYTES_MAX = 107
HEAD_2 = struct.Struct("!12sBBH")
# Addresses and TLVs. A balancer that passes on names of a certificate sends some hundred bytes.
BODY_2_BYTES_MAX = 4096
LOCAL, PROXY = 0x20, 0x21
TCP4, TCP6 = 0x11, 0x21
READ_BYTES = HEAD_2.size + BODY_2_BYTES_MAX
# A listener for both gives an IPv4 address in the form of an IPv6 address.
IPV4_AS_IPV6 = "::ffff:"

log = logging.getLogger("shardmq.broker.front_door.proxy")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ProxyError(Exception):
    """The bytes begin like a header but are none."""


class Peer(NamedTuple):
    """The address and port of a client.

    `relayed`: the connection is a balancer's, which passes the client on.
    """

    host: str
    port: int
    relayed: bool = False


class Header(NamedTuple):
    """A header at the front of a connection, or the lack of one (`length` 0).

    `peer` is the client's address and port, or None when the balancer speaks for itself or does not
    know. `relayed`: the balancer passes a client on, known or not.
    """

    length: int
    peer: tuple[str, int] | None
    relayed: bool


def scan(data: bytes) -> Header | None:
    """Return the header at the front of `data`, or None when more bytes are needed.

    Without a header the result has length 0. Raises ProxyError.
    """
    for signature, read in ((SIGNATURE_1, _scan_1), (SIGNATURE_2, _scan_2)):
        if data[: len(signature)] == signature[: len(data)]:
            return read(data) if len(data) >= len(signature) else None
    return Header(0, None, relayed=False)


def _scan_1(data: bytes) -> Header | None:
    end = data.find(b"\r\n", 0, LINE_BYTES_MAX)
    if end < 0:
        if len(data) >= LINE_BYTES_MAX:
            raise ProxyError(f"no end of line within {LINE_BYTES_MAX} bytes")
        return None
    words = data[:end].decode("ascii", "replace").split(" ")
    if words[1] == "UNKNOWN":
        return Header(end + 2, None, relayed=True)
    if len(words) != 6 or words[1] not in ("TCP4", "TCP6"):
        raise ProxyError(f"not a header: {data[:end]!r}")
    version = 4 if words[1] == "TCP4" else 6
    try:
        addresses = [ipaddress.ip_address(word) for word in words[2:4]]
        ports = [_port(word) for word in words[4:]]
    except ValueError as error:
        raise ProxyError(str(error)) from None
    if any(address.version != version for address in addresses):
        raise ProxyError(f"not addresses of {words[1]}: {data[:end]!r}")
    return Header(end + 2, (str(addresses[0]), ports[0]), relayed=True)


def _port(word: str) -> int:
    if not (word.isascii() and word.isdigit() and int(word) <= 0xFFFF):
        raise ValueError(f"not a port: {word}")
    return int(word)


def _scan_2(data: bytes) -> Header | None:
    if len(data) < HEAD_2.size:
        return None
    _, command, family, length = HEAD_2.unpack_from(data)
    if command not in (LOCAL, PROXY):
        raise ProxyError(f"version and command {command:#x}")
    if length > BODY_2_BYTES_MAX:
        raise ProxyError(f"a header of {length} bytes, at most {BODY_2_BYTES_MAX}")
    if len(data) < HEAD_2.size + length:
        return None
    body, end = data[HEAD_2.size : HEAD_2.size + length], HEAD_2.size + length
    if command == LOCAL or family not in (TCP4, TCP6):
        return Header(end, None, relayed=command != LOCAL)
    size = 4 if family == TCP4 else 16
    if length < 2 * size + 4:
        raise ProxyError(f"{length} bytes hold no addresses")
    source = str(ipaddress.ip_address(body[:size]))
    return Header(end, (source, int.from_bytes(body[2 * size : 2 * size + 2], "big")), relayed=True)


class Balancers:
    """The networks whose connections may begin with a header.

    Raises ValueError that names a text which is no network.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(text) for text in networks]

    def __contains__(self, host: str) -> bool:
        if not self._networks:
            return False
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(
            address.version == network.version and address in network for network in self._networks
        )


class Greeting:
    """A connection of a balancer whose header is still to come.

    `entered(self)` is called with the socket and the peer that the header names, `left(self)` when
    the connection is of no use. The socket stays non-blocking; all bytes behind the header are
    unread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        peer: Peer,
        *,
        timeout_s: float,
        entered: Callable[[Greeting], None],
        left: Callable[[Greeting], None],
    ) -> None:
        self._loop = loop
        self.sock = sock
        self.peer = peer
        self._fd = sock.fileno()
        self._entered, self._left = entered, left
        self._data = b""
        self._timeout = loop.call_later(
            timeout_s, self._fail, f"no whole header within {timeout_s:g} s"
        )
        loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        self._let_go()
        self.sock.close()

    def _readable(self) -> None:
        try:
            seen = self.sock.recv(READ_BYTES - len(self._data), socket.MSG_PEEK)
            if not seen:
                raise ProxyError("the connection ended before its header")
            header = scan(self._data + seen)
            # The header's bytes are taken off: the socket is readable again only if more come.
            wanted = len(seen) if header is None else header.length - len(self._data)
            if wanted:
                self._data += self.sock.recv(wanted)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProxyError) as error:
            self._fail(str(error))
            return
        if header is not None:
            self.peer = Peer(*(header.peer or self.peer[:2]), header.relayed)
            self._let_go()
            self._entered(self)

    def _fail(self, reason: str) -> None:
        log.warning("%s:%d: PROXY header: %s", *self.peer[:2], reason)
        self.close()
        self._left(self)

    def _let_go(self) -> None:
        self._timeout.cancel()
        self._loop.remove_reader(self._fd)
