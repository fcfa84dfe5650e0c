"""The listening sockets, bound before any child starts and kept open while children come and go.

A client that connects while its front door is being restarted waits in the socket's backlog instead of being refused.
Sockets that systemd has opened for us (socket activation, by the names amqp, amqps, http, https and metrics) are used
as they are; what it has not opened is bound here.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardmq.supervisor.config import ConfigError, Settings
from shardmq.supervisor.plan import Listening

BACKLOG = 4096
EVERYWHERE = "*"  # every address of this host, whatever of IPv4 and IPv6 it has
ANY_V4, ANY_V6 = "0.0.0.0", "::"
FREE_PORT_TRIES = 10  # for one that is free at all addresses
NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
TLS_NAMES = ("amqps", "https")
NAMES = ("amqp", "http", "metrics", *TLS_NAMES)

Given = Mapping[str, Sequence[socket.socket]]


class Unavailable(Exception):
    """This address cannot be had; `number` is the errno."""

    def __init__(self, number: int | None, text: str) -> None:
        super().__init__(text)
        self.number = number


@dataclass
class Sockets:
    """AMQP's by front door: each door has all addresses."""

    amqp: list[list[socket.socket]]
    http: list[socket.socket]
    metrics: list[socket.socket]
    amqps: list[list[socket.socket]] = field(
        default_factory=list
    )  # like `amqp` and `http`, or none of them
    https: list[socket.socket] = field(default_factory=list)

    def listening(self) -> Listening:
        return Listening(
            amqp_fds=tuple(_numbers(door) for door in self.amqp),
            http_fds=_numbers(self.http),
            metrics_fds=_numbers(self.metrics),
            http_address=address(self.http[0]),
            amqps_fds=tuple(_numbers(door) for door in self.amqps),
            https_fds=_numbers(self.https),
        )

    def listeners(self) -> dict[str, list[str]]:
        """All addresses, by the names clients of status.json know."""
        shown = {"amqp": self.amqp[0], "http": self.http, "metrics": self.metrics}
        if self.amqps:
            shown |= {"amqps": self.amqps[0], "https": self.https}
        return {name: [address(sock) for sock in sockets] for name, sockets in shown.items()}

    def addresses(self) -> dict[str, str]:
        """The first of each, as in the line `ready:`."""
        return {name: found[0] for name, found in self.listeners().items()}

    def close(self) -> None:
        for group in (*self.amqp, *self.amqps, self.http, self.https, self.metrics):
            for sock in group:
                sock.close()


def listen(settings: Settings, given: Given | None = None) -> Sockets:
    """`given`: what systemd has opened, by name. Raises ConfigError naming the port's key; then nothing is open."""
    opening = _Opening(settings, given or {})
    try:
        opening.check_given()
        sockets = Sockets(
            amqp=opening.for_doors("amqp"),
            http=opening.once("http"),
            metrics=opening.once("metrics"),
            amqps=opening.for_doors("amqps") if settings.tls.cert else [],
            https=opening.once("https") if settings.tls.cert else [],
        )
    except ConfigError:
        opening.close()
        raise
    for sock in opening.opened:
        sock.listen(BACKLOG)
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """For calls of the broker's own processes: whoever can enter the directory."""
    path.unlink(missing_ok=True)  # of a former life
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _numbers(sockets: Sequence[socket.socket]) -> tuple[int, ...]:
    return tuple(sock.fileno() for sock in sockets)


class _Opening:
    def __init__(self, settings: Settings, given: Given) -> None:
        self._settings = settings
        self._given = given
        self.opened: list[socket.socket] = []

    def check_given(self) -> None:
        for name, sockets in self._given.items():
            if name not in NAMES:
                raise ConfigError(
                    f"socket activation: {name}: no name of ours; they are {', '.join(NAMES)}"
                )
            if name in TLS_NAMES and not self._settings.tls.cert:
                raise ConfigError(f"socket activation: {name}: there is no tls.cert")
            for sock in sockets:
                if (
                    sock.family not in (socket.AF_INET, socket.AF_INET6)
                    or sock.type != socket.SOCK_STREAM
                ):
                    raise ConfigError(f"socket activation: {name}: not a TCP socket")

    def once(self, name: str) -> list[socket.socket]:
        return self._taken(name) or self._bound(name)

    def for_doors(self, name: str) -> list[list[socket.socket]]:
        """For each door sockets of its own, so that the kernel spreads the connections; systemd's are shared."""
        doors = self._settings.front_doors.count
        if taken := self._taken(name):
            return [taken] * doors
        first = self._bound(name, shared=doors > 1)
        return [first, *([self._again(name, sock) for sock in first] for _ in range(doors - 1))]

    def close(self) -> None:
        for sock in (*self.opened, *(sock for sockets in self._given.values() for sock in sockets)):
            sock.close()

    def _taken(self, name: str) -> list[socket.socket]:
        sockets = list(self._given.get(name, ()))
        for sock in sockets:
            sock.setblocking(False)
        self.opened += sockets
        return sockets

    def _bound(self, name: str, shared: bool = False) -> list[socket.socket]:
        port, hosts = int(getattr(self._settings.listen, f"{name}_port")), self._hosts(name)
        for last in range(FREE_PORT_TRIES)[::-1] if port == 0 else (0,):
            found: list[socket.socket] = []
            try:
                for host, optional in hosts:
                    # The first decides the port of all; "::" alone is for IPv4 too, as everywhere on Linux.
                    at = int(found[0].getsockname()[1]) if found else port
                    found += _bound_if_any(
                        host, at, shared, only_v6=len(hosts) > 1, optional=optional
                    )
            except Unavailable as error:
                for sock in found:
                    sock.close()
                # The port that was free at the first address is taken at another.
                if error.number == errno.EADDRINUSE and found and last:
                    continue
                raise ConfigError(f"listen.{name}_port: {error}") from None
            except ConfigError:
                for sock in found:
                    sock.close()
                raise
            self.opened += found
            return found
        raise AssertionError("the last try has raised")

    def _hosts(self, name: str) -> list[tuple[str, bool]]:
        """Where to listen, and whether it may be left out where this host has no such addresses."""
        wanted = self._settings.listen
        bind = (wanted.tls_bind or wanted.bind) if name in TLS_NAMES else wanted.bind
        hosts = [bind] if isinstance(bind, str) else bind
        if not hosts:
            raise ConfigError("listen.bind: no address")
        if EVERYWHERE in hosts:
            return [(ANY_V4, False), (ANY_V6, True)]
        return [(host, False) for host in hosts]

    def _again(self, name: str, sock: socket.socket) -> socket.socket:
        host, port = sock.getsockname()[:2]
        only_v6 = sock.family == socket.AF_INET6 and bool(
            sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        )
        try:
            self.opened.append(_bound(host, port, shared=True, first=False, only_v6=only_v6))
        except Unavailable as error:
            raise ConfigError(f"listen.{name}_port: {error}") from None
        return self.opened[-1]


def _bound_if_any(
    host: str, port: int, shared: bool, only_v6: bool, optional: bool
) -> list[socket.socket]:
    try:
        return [_bound(host, port, shared, first=True, only_v6=only_v6)]
    except Unavailable as error:
        if optional and error.number in NO_SUCH_FAMILY:
            return []
        raise


def _bound(host: str, port: int, shared: bool, first: bool, only_v6: bool) -> socket.socket:
    """Raises Unavailable, or ConfigError for a host that is none."""
    if shared and first and port:
        # SO_REUSEPORT would let us in beside another broker of the same user: try without it first.
        _bound(host, port, shared=False, first=True, only_v6=only_v6).close()
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"listen.bind: {host}: {error.strerror}") from None
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Unavailable(error.errno, f"{host}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_v6))
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(target)
        if not shared:
            sock.listen(
                1
            )  # a port can be bound twice as long as nobody listens: the news is to come now
    except OSError as error:
        sock.close()
        raise Unavailable(error.errno, f"{host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
