"""An AMQP channel for the commands that publish and read messages.

The channel is a driver of `supervisor/amqp_client.py` that waits: one thing happens at a time, as a
command line needs it. `perf` has a driver of its own, because its connections run side by side.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Broken, Client, Closed, Event, Message, Received
from shardmq.supervisor.cli.api import (
    DATA,
    DEFAULT_USER,
    HERE,
    REFUSED,
    UNREACHABLE,
    Api,
    fail,
)

READ_BYTES = 256 << 10
# With these capabilities the broker says that a password is wrong, that a consumer is cancelled and
# that an alarm blocks publishers, instead of only closing or stopping.
CAPABILITIES: Any = {
    "authentication_failure_close": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
}
BLOCKED_S_MAX = 5.0  # The time for confirms of what was published before an alarm.
DOOR = re.compile(r"door-\d+\.sock")  # The front door of that number binds a socket of this name.
NOT_ALLOWED = 403
NOT_FOUND = 404


class Server(NamedTuple):
    """The AMQP listener of a broker. If there is a `door`, it is the path of a socket."""

    host: str
    port: int
    is_secure: bool = False
    door: str = ""

    def __str__(self) -> str:
        return self.door or f"{self.host}:{self.port}"


class Channel:
    """An open channel. A refusal of the broker, or its absence, ends the command."""

    def __init__(
        self, server: Server, sock: socket.socket, client: Client, user: str, timeout_s: float
    ) -> None:
        self.client = client
        self.user = user
        self._server, self._sock, self._timeout_s = server, sock, timeout_s
        self._events: deque[Event] = deque()

    def greeting(self) -> dict[str, Any]:
        """Return what the broker says about itself, before the login is sent."""
        import pamqp.decode

        self.flush()
        while not self.client.server_properties:
            self._receive()
        return pamqp.decode.field_table(self.client.server_properties)[1]

    def expect(self, method: int) -> None:
        """Wait for the arrival of a method. Messages that come before it are kept."""
        kept: list[Event] = []
        while (event := self.next()) != Received(method):
            kept.append(event)
        self._events.extendleft(reversed(kept))

    def next(self) -> Event:
        """Return the next event, after sending what is queued."""
        self.flush()
        while not self._events:
            self._receive()
            self.flush()
        return self._events.popleft()

    def next_or_none(self, within_s: float | None) -> Event | None:
        """Return the next event, or None after some seconds.

        Ends the command as a broken pipe does if nobody reads the standard output any more.

        Args:
            within_s: The seconds to wait, or None to wait until something comes.
        """
        self.flush()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        with contextlib.suppress(OSError, ValueError):  # Tests replace the standard output.
            poll.register(sys.stdout.fileno(), 0)
        until = None if within_s is None else time.monotonic() + within_s
        while not self._events:
            # TLS may have decrypted more than was asked for.
            if not (self._server.is_secure and self._sock.pending()):  # type: ignore[attr-defined]
                wait_ms = None if until is None else max(0.0, 1000 * (until - time.monotonic()))
                ready = poll.poll(wait_ms)
                if not ready:
                    return None
                if any(fd != self._sock.fileno() for fd, _ in ready):
                    raise BrokenPipeError(errno.EPIPE, "nobody reads the standard output")
            self._receive()
        return self._events.popleft()

    def flush(self) -> None:
        """Send what the client has queued."""
        data = self.client.data_to_send()
        if data:
            try:
                self._sock.sendall(data)
            except OSError as error:
                # The broker may have said why before it closed the connection.
                with contextlib.suppress(OSError):
                    while True:
                        self._receive()
                self._lost(error)

    def get(self, queue: str) -> Message | None:
        """Return a message of a queue, or None if the queue is empty."""
        self.client.get(queue)
        return self.fetched()

    def fetched(self) -> Message | None:
        """Return the answer to the oldest `client.get` that is not answered."""
        event = self.next()
        return event if isinstance(event, Message) else None

    def counts(self, queues: Sequence[str]) -> list[tuple[int, int]]:
        """Return the messages that are ready in each queue, and its consumers, as they are now."""
        found: list[tuple[int, int]] = []
        for start in range(0, len(queues), amqp_client.DECLARED_MAX):
            asked = queues[start : start + amqp_client.DECLARED_MAX]
            self.client.declared.clear()
            for queue in asked:
                self.client.look_at(queue)
            for _ in asked:
                self.expect(amqp_client.DECLARE_OK)
            found += self.client.declared
        return found

    def close(self) -> None:
        """Return when the broker has done all that was asked before.

        A broker that blocks publishers reads nothing of the channel until the alarm is over. Do not
        wait for an answer then.
        """
        if self.client.blocked:
            return
        self.client.close()
        self.expect(amqp_client.CHANNEL_CLOSE_OK)

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except TimeoutError:
            if self.client.blocked:
                fail(
                    f"publishers are blocked: {self.client.blocked}; what is not confirmed may be"
                    " stored when the alarm is over",
                    REFUSED,
                )
            fail(f"{self._server} does not answer within {self._timeout_s:g} s", UNREACHABLE)
        except OSError as error:
            self._lost(error)
        if not data:
            self._lost("the connection was closed")
        for event in self.client.receive_data(data):
            match event:
                case Closed(code, text, opened):
                    refused(code, text, opened)
                case Broken(why):
                    fail(f"{self._server}: {why}", UNREACHABLE)
            self._events.append(event)
        limit_s = BLOCKED_S_MAX if self.client.blocked else self._timeout_s
        if limit_s != self._sock.gettimeout():
            self._sock.settimeout(limit_s)

    def _lost(self, why: object) -> NoReturn:
        fail(f"{self._server}: {getattr(why, 'strerror', None) or why}", UNREACHABLE)


def refused(code: int, text: str, opened: bool) -> NoReturn:
    """End the command with what the broker said when it closed a channel or connection.

    Args:
        code: The reply code of AMQP.
        text: The reply text, "NAME - why".
        opened: Whether the connection had been open.
    """
    why = text.partition(" - ")[2] or text
    if code == NOT_FOUND:
        fail(why, DATA)
    if code == NOT_ALLOWED and not opened:
        fail(f"not accepted: {why}", REFUSED)
    fail(f"refused ({code}): {why}", REFUSED)


@contextlib.contextmanager
def opened(api: Api, vhost: str) -> Iterator[Channel]:
    """Open a channel to the broker that answers by `api`, and close it in the end.

    Messages that are not acknowledged by then go back to their queues.
    """
    import pamqp.encode

    properties = pamqp.encode.field_table({"product": "shardctl", "capabilities": CAPABILITIES})
    server = server_of(api)
    user = _acting_user(api, vhost) if server.door else api.user
    if server.door:
        client = Client(vhost, "EXTERNAL", user, properties=properties)
    else:
        login = f"\0{api.user}\0{api.password}"
        client = Client(vhost, "PLAIN", login, properties=properties)
    with opened_at(server, client, user, api.timeout_s) as channel:
        yield channel


@contextlib.contextmanager
def logged_in(
    server: Server, user: str, password: str, vhost: str, timeout_s: float
) -> Iterator[Channel]:
    """Open a channel to any broker with a name and a password, and close it in the end."""
    import pamqp.encode

    properties = pamqp.encode.field_table({"product": "shardctl", "capabilities": CAPABILITIES})
    client = Client(vhost, "PLAIN", f"\0{user}\0{password}", properties=properties)
    with opened_at(server, client, user, timeout_s) as channel:
        yield channel


@contextlib.contextmanager
def opened_at(server: Server, client: Client, user: str, timeout_s: float) -> Iterator[Channel]:
    """Open a channel with the login of a client, and close it in the end."""
    try:
        sock = _connected(server, timeout_s)
    except OSError as error:
        fail(f"no broker reachable by AMQP at {server}: {error.strerror or error}", UNREACHABLE)
    with sock:
        channel = Channel(server, sock, client, user, timeout_s)
        opening = channel.next()
        assert opening == amqp_client.Opened()
        yield channel
        channel.close()


def server_of(api: Api) -> Server:
    """Return where the broker that answers by `api` listens for AMQP.

    A broker that is asked by its socket has a socket for AMQP too, which takes no password. A
    broker that is named by a URL is at the host of the URL, whatever address it listens at.
    """
    if api.endpoint.socket:
        for door in sorted(Path(api.endpoint.socket).parent.iterdir()):
            if DOOR.fullmatch(door.name) and os.access(door, os.W_OK):
                return Server("", 0, door=str(door))
    return tcp_server_of(api)


def tcp_server_of(api: Api) -> Server:
    """Return the TCP listener for AMQP of the broker that answers by `api`."""
    overview = api.get("overview")
    listeners = {one["protocol"]: one for one in reversed(overview["listeners"])}
    url = urlsplit(api.endpoint.url)
    kinds = ("amqp/ssl", "amqp") if url.scheme == "https" else ("amqp", "amqp/ssl")
    kind = next((kind for kind in kinds if kind in listeners), None)
    if kind is None:
        fail("the broker has no AMQP listener")
    host, port, is_secure = url.hostname or "", listeners[kind]["port"], kind == "amqp/ssl"
    if host not in ("localhost", *HERE.values()):
        return Server(host, port, is_secure)
    host = HERE.get(listeners[kind]["ip_address"], listeners[kind]["ip_address"])
    server = Server(host, port, is_secure)
    if not api.endpoint.socket:
        _check_identity(server, api, overview.get("cluster_name"))
    return server


def _check_identity(server: Server, api: Api, cluster_name: str | None) -> None:
    """End the command if another broker listens at `server` than the one that answers by `api`.

    A URL of this host may be the end of a tunnel to another host. The port for AMQP that the broker
    there reports is not forwarded then, and a broker of this host may listen at it. This costs a
    connection, because the login must not be sent to another broker.
    """
    try:
        sock = _connected(server, api.timeout_s)
    except OSError:
        return  # Who connects next says why.
    with sock:
        channel = Channel(server, sock, Client("/", "PLAIN", ""), "", api.timeout_s)
        found = channel.greeting().get("cluster_name")
    if found != cluster_name:
        fail(
            f"{api.endpoint.url} is the broker '{cluster_name}', and at {server}, its port for"
            f" AMQP, is the broker '{found}': a tunnel must forward this port too",
            UNREACHABLE,
        )


def _connected(server: Server, timeout_s: float) -> socket.socket:
    if server.door:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        sock.connect(server.door)
        return sock
    sock = socket.create_connection((server.host, server.port), timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not server.is_secure:
        return sock
    import ssl

    return ssl.create_default_context().wrap_socket(sock, server_hostname=server.host)


def _acting_user(api: Api, vhost: str) -> str:
    """Return the user as whom to use a vhost over the socket, which takes no password.

    The user is the default user or, if that one may not do everything in the vhost, one who may.
    """
    rows = api.get("vhosts", vhost, "permissions", thing=f"vhost '{vhost}'")
    rights = ("configure", "write", "read")
    ranked = sorted(
        ([row[right] for right in rights] != [".*"] * 3, row["user"] != DEFAULT_USER, row["user"])
        for row in rows
    )
    if not ranked:
        fail(f"no user may enter vhost '{vhost}': set_permissions", REFUSED)
    return str(ranked[0][2])
