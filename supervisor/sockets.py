"""The listening sockets, bound before any child starts and kept open while children come and go.

A client that connects while its front door is being restarted waits in the socket's backlog instead of being refused.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from supervisor.config import ConfigError, Settings
from supervisor.plan import Listening

BACKLOG = 4096


@dataclass
class Sockets:
    amqp: list[socket.socket]
    http: socket.socket
    metrics: socket.socket
    amqps: list[socket.socket] = field(default_factory=list)  # like `amqp` and `http`, or none of them
    https: list[socket.socket] = field(default_factory=list)

    def listening(self) -> Listening:
        return Listening(
            amqp_fds=tuple(sock.fileno() for sock in self.amqp),
            http_fds=(self.http.fileno(),),
            metrics_fds=(self.metrics.fileno(),),
            http_address=address(self.http),
            amqps_fds=tuple(sock.fileno() for sock in self.amqps),
            https_fds=tuple(sock.fileno() for sock in self.https),
        )

    def addresses(self) -> dict[str, str]:
        """By the names clients of status.json and readers of the line `ready:` know."""
        shown = {"amqp": self.amqp[0], "http": self.http, "metrics": self.metrics}
        if self.amqps:
            shown |= {"amqps": self.amqps[0], "https": self.https[0]}
        return {name: address(sock) for name, sock in shown.items()}

    def close(self) -> None:
        for sock in (*self.amqp, *self.amqps, self.http, *self.https, self.metrics):
            sock.close()


def listen(settings: Settings) -> Sockets:
    """Raises ConfigError naming the port's key."""
    wanted, opened = settings.listen, list[socket.socket]()
    doors, tls = settings.front_doors.count, settings.tls.cert != ""
    plain, secure = wanted.bind, wanted.tls_bind or wanted.bind

    def one(key: str, host: str, port: int) -> socket.socket:
        opened.append(_bound(key, host, port))
        return opened[-1]

    def for_each_door(key: str, host: str, port: int) -> list[socket.socket]:
        first = _bound(key, host, port, shared=doors > 1)
        opened.append(first)
        for _ in range(doors - 1):
            opened.append(_bound(key, host, first.getsockname()[1], shared=True, first=False))
        return opened[-doors:]

    try:
        sockets = Sockets(
            amqp=for_each_door("amqp_port", plain, wanted.amqp_port),
            http=one("http_port", plain, wanted.http_port),
            metrics=one("metrics_port", plain, wanted.metrics_port),
            amqps=for_each_door("amqps_port", secure, wanted.amqps_port) if tls else [],
            https=[one("https_port", secure, wanted.https_port)] if tls else [],
        )
    except ConfigError:
        for sock in opened:
            sock.close()
        raise
    for sock in opened:
        sock.listen(BACKLOG)
    return sockets


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(key: str, host: str, port: int, shared: bool = False, first: bool = True) -> socket.socket:
    if shared and first and port:
        # SO_REUSEPORT would let us in beside another broker of the same user: try without it first.
        _bound(key, host, port).close()
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"listen.bind: {host}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(target)
        if not shared:
            sock.listen(1)  # a port can be bound twice as long as nobody listens: the news is to come now
    except OSError as error:
        sock.close()
        raise ConfigError(f"listen.{key}: {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
