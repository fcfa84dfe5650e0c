"""The listening sockets, bound before any child starts and kept open while children come and go.

A client that connects while its front door restarts waits in the backlog of the socket and is not
refused. Sockets that systemd has opened (socket activation, by the names amqp, amqps, http, https
and metrics) are used as they are. This module binds the others.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardmq.supervisor.config import ConfigError, Settings
from shardmq.supervisor.plan import BACKLOG, Listening, front_door_count

EVERYWHERE = "*"  # Every address of this host, IPv4 and IPv6, as far as the host has them.
ANY_V4, ANY_V6 = "0.0.0.0", "::"
PORTS_MAX = 512  # of one node for the others
FREE_PORT_TRIES = 10  # How often a port is looked for that is free at all addresses.
NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
TLS_NAMES = ("amqps", "https")
NAMES = ("amqp", "http", "metrics", *TLS_NAMES)

Given = Mapping[str, Sequence[socket.socket]]


class Unavailable(Exception):
    """An address cannot be bound. `number` is the errno."""

    def __init__(self, number: int | None, text: str) -> None:
        super().__init__(text)
        self.number = number


@dataclass
class Sockets:
    """The listening sockets. Those of AMQP come in one list for each front door.

    Each front door has a socket for every address.
    """

    amqp: list[list[socket.socket]]
    http: list[socket.socket]
    metrics: list[socket.socket]
    # The lists for TLS are empty if no certificate is set.
    amqps: list[list[socket.socket]] = field(default_factory=list)
    https: list[socket.socket] = field(default_factory=list)
    # Sockets of systemd, which all front doors share.
    given: list[socket.socket] = field(default_factory=list)
    # In a cluster: that of the controller for other nodes, and that of each shard. Those for copies
    # follow, which are opened when they are needed.
    cluster: list[socket.socket] = field(default_factory=list)

    def listening(self) -> Listening:
        """Return the descriptors of the sockets, as the plan of the children needs them."""

        def numbers(sockets: Sequence[socket.socket]) -> tuple[int, ...]:
            return tuple(sock.fileno() for sock in sockets)

        return Listening(
            amqp_fds=tuple(numbers(door) for door in self.amqp),
            http_fds=numbers(self.http),
            metrics_fds=numbers(self.metrics),
            http_address=address(self.http[0]),
            amqps_fds=tuple(numbers(door) for door in self.amqps),
            https_fds=numbers(self.https),
        )

    def listeners(self) -> dict[str, list[str]]:
        """Return all addresses by protocol, as status.json shows them."""
        shown = {"amqp": self.amqp[0], "http": self.http, "metrics": self.metrics}
        if self.amqps:
            shown |= {"amqps": self.amqps[0], "https": self.https}
        return {name: [address(sock) for sock in sockets] for name, sockets in shown.items()}

    def addresses(self) -> dict[str, str]:
        """Return the first address of each protocol, as the line `ready:` shows them."""
        return {name: found[0] for name, found in self.listeners().items()}

    def stop_listening(self, door: int) -> None:
        """Let connections come to other front doors until the next process of this one listens.

        Connections that wait at its sockets are reset, and the kernel gives it no new ones. The
        sockets stay bound. Those that systemd has opened go on listening, because all front doors
        share them.

        A process that died before it listened has left its sockets as they are now. To shut such a
        socket down again would mark it for good: when it listens later, the kernel ends each of its
        connections at once.
        """
        for sock in (*self.amqp[door], *(self.amqps[door] if self.amqps else ())):
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and sock not in self.given:
                sock.shutdown(socket.SHUT_RDWR)

    def open_for_nodes(self, host: str, first: int) -> socket.socket:
        """Open one more socket for other nodes, at the next free port behind `first`, or at any.

        Raises:
            ConfigError: There is none.
        """
        for port in range(first + len(self.cluster), first + PORTS_MAX) if first else (0,):
            try:
                found = _bound(host, port, shared=False, first=True, only_v6=True)
            except Unavailable as error:
                if error.number != errno.EADDRINUSE:
                    raise ConfigError(f"cluster.port: {error}") from None
            else:
                found.listen(BACKLOG)
                self.cluster.append(found)
                return found
        raise ConfigError(f"cluster.port: no free port from {first} on")

    def close(self) -> None:
        """Close all sockets."""
        for group in (*self.amqp, *self.amqps, self.http, self.https, self.metrics, self.cluster):
            for sock in group:
                sock.close()


def listen(
    settings: Settings, given: Given | None = None, cores: int = 1, host: str = "", shards: int = 0
) -> Sockets:
    """Open the listening sockets.

    Args:
        settings: The settings of the broker.
        given: The sockets that systemd has opened, by name.
        cores: The number of cores that the broker may use.
        host: The address of this node of a cluster; empty without a cluster.
        shards: The number of shards that other nodes can reach.

    Raises:
        ConfigError: A socket cannot be opened. The text names the key of the port. All sockets have
            been closed, those of systemd too.
    """
    opening, doors = _Opening(settings, given or {}), front_door_count(settings, cores)
    try:
        opening.check_given()
        sockets = Sockets(
            amqp=opening.sockets_of("amqp", doors),
            http=opening.sockets_of("http")[0],
            metrics=opening.sockets_of("metrics")[0],
            amqps=opening.sockets_of("amqps", doors) if settings.tls.cert else [],
            https=opening.sockets_of("https")[0] if settings.tls.cert else [],
            given=[sock for sockets in (given or {}).values() for sock in sockets],
            cluster=opening.for_nodes(host, 1 + shards) if host else [],
        )
    except ConfigError:
        opening.close()
        raise
    for sock in opening.opened:
        sock.listen(BACKLOG)
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """Listen at a path for the broker's own processes.

    The rights of the directory decide who may connect.
    """
    path.unlink(missing_ok=True)  # A former life of the broker may have left the path behind.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Opening:
    """The sockets that are open while `listen` is under way, so that a failure can close them."""

    def __init__(self, settings: Settings, given: Given) -> None:
        self._settings = settings
        self._given = given
        self.opened: list[socket.socket] = []

    def check_given(self) -> None:
        """Raise ConfigError if systemd has opened a socket that the broker cannot use."""
        for name, sockets in self._given.items():
            if name not in NAMES:
                raise ConfigError(
                    f"socket activation: {name}: no name of ours; they are {', '.join(NAMES)}"
                )
            if name in TLS_NAMES and not self._settings.tls.cert:
                raise ConfigError(f"socket activation: {name}: there is no tls.cert")
            for sock in sockets:
                is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
                if not is_ip or sock.type != socket.SOCK_STREAM:
                    raise ConfigError(f"socket activation: {name}: not a TCP socket")

    def sockets_of(self, name: str, processes: int = 1) -> list[list[socket.socket]]:
        """Return the sockets of a protocol for each of the processes that serve it.

        Each process gets sockets of its own, so that the kernel spreads the connections. All
        processes share the sockets of systemd.
        """
        if given := list(self._given.get(name, ())):
            for sock in given:
                sock.setblocking(False)
            self.opened += given
            return [given] * processes
        result = [self._bound(name, shared=processes > 1)]
        for _ in range(processes - 1):
            result.append([])
            for sock in result[0]:
                host, port = sock.getsockname()[:2]
                only_v6 = sock.family == socket.AF_INET6 and bool(
                    sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                )
                try:
                    same = _bound(host, port, shared=True, first=False, only_v6=only_v6)
                except Unavailable as error:
                    raise ConfigError(f"listen.{name}_port: {error}") from None
                self.opened.append(same)
                result[-1].append(same)
        return result

    def for_nodes(self, host: str, count: int) -> list[socket.socket]:
        """Return sockets at neighbouring ports for the other nodes of a cluster."""
        first = self._settings.cluster.port
        for index in range(count):
            try:
                port = first + index if first else 0
                self.opened.append(_bound(host, port, shared=False, first=True, only_v6=True))
            except Unavailable as error:
                raise ConfigError(f"cluster.port: {error}") from None
        return self.opened[-count:]

    def close(self) -> None:
        """Close the sockets that are open so far, and those of systemd."""
        for sock in (*self.opened, *(sock for sockets in self._given.values() for sock in sockets)):
            sock.close()

    def _bound(self, name: str, shared: bool = False) -> list[socket.socket]:
        port, hosts = int(getattr(self._settings.listen, f"{name}_port")), self._hosts(name)
        for last in range(FREE_PORT_TRIES)[::-1] if port == 0 else (0,):
            found: list[socket.socket] = []
            try:
                for host, optional in hosts:
                    # The first socket decides the port of all. "::" alone accepts IPv4 too, as is
                    # usual on Linux.
                    at = int(found[0].getsockname()[1]) if found else port
                    try:
                        found.append(_bound(host, at, shared, True, only_v6=len(hosts) > 1))
                    except Unavailable as error:
                        if not (optional and error.number in NO_SUCH_FAMILY):
                            raise
            except Unavailable as error:
                for sock in found:
                    sock.close()
                # The port that was free at the first address is in use at another one, or has just
                # been taken.
                if error.number == errno.EADDRINUSE and last:
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
        """Return the hosts of a protocol, and for each whether it may be left out."""
        wanted = self._settings.listen
        bind = (wanted.tls_bind or wanted.bind) if name in TLS_NAMES else wanted.bind
        hosts = [bind] if isinstance(bind, str) else bind
        if not hosts:
            raise ConfigError("listen.bind: no address")
        if EVERYWHERE in hosts:
            return [(ANY_V4, False), (ANY_V6, True)]
        return [(host, False) for host in hosts]


def _bound(host: str, port: int, shared: bool, first: bool, only_v6: bool) -> socket.socket:
    """Bind a TCP socket.

    Args:
        host: A name or an address.
        port: The port. 0 means any free port.
        shared: Other sockets of the broker are bound to the same port.
        first: The socket is the first one at its port.
        only_v6: A socket for IPv6 does not accept IPv4.

    Raises:
        Unavailable: The address cannot be bound.
        ConfigError: The host does not exist.
    """
    if shared and first:
        # SO_REUSEPORT would bind a port that another broker of the same user listens at. So the
        # port is tried without it first. A free port is chosen at the same time: a socket that has
        # not been told its port loses it when it stops to listen.
        with _bound(host, port, shared=False, first=True, only_v6=only_v6) as tried:
            port = int(tried.getsockname()[1])
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
            # A port can be bound twice as long as nobody listens. Listening finds that out now.
            sock.listen(1)
    except OSError as error:
        sock.close()
        raise Unavailable(error.errno, f"{host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
