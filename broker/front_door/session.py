"""Facts about one connection: its user, where it comes from, and what its login agreed on.

Data for those who work for the connection. What they do with it is in the other files.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.shared.control import DIRECT_PROTOCOL, PROTOCOL, ConnectionInfo


class TlsPeer(NamedTuple):
    """The results of the TLS handshake with a client.

    `name` is the user that the certificate names, or "". `has_certificate` says that a certificate
    was shown and verified.
    """

    version: str
    cipher: str
    name: str = ""
    has_certificate: bool = False
    subject: str = ""
    issuer: str = ""

    def shown(self) -> dict[str, str]:
        """Return the fields for listings."""
        return {
            "tls_version": self.version,
            "tls_cipher": self.cipher,
            "peer_cert_subject": self.subject,
            "peer_cert_issuer": self.issuer,
        }


class Lesson(NamedTuple):
    """A login that was right, and the vhosts (in UTF-8) that it opened without a limit.

    Newcomers that say and come from the same may use it (anteroom.pxi).
    """

    user: str
    mechanism: str
    client_properties: dict[str, Any]
    vhosts: set[bytes]


class Newcomer(NamedTuple):
    """A newcomer that has become a connection.

    `age_s` is how long its handshake has taken, and `key` that of its login, if it has logged in. A
    newcomer that is `open` has the Lesson that it used and what it agreed on with its client.
    `channels` has a bit for each number of an open channel; so many were opened in all.
    """

    age_s: float = 0.0
    key: bytes | None = None
    open: Lesson | None = None
    vhost: str = ""
    channels_max: int = 0
    frame_bytes_max: int = 0
    heartbeat_s: int = 0
    channels: int = 0
    channels_opened: int = 0
    logged_in: bool = False  # and was told so, but is not open


class Session:
    """A connection and its user.

    `id` is used once in the life of this front door. `owner` names the connection in the whole
    broker.
    """

    __slots__ = (
        "auth_mechanism", "channels_max", "client_properties", "connected_at", "frame_bytes_max",
        "heartbeat_s", "host", "id", "is_direct", "is_open", "name", "owner", "peer_host",
        "peer_port", "port", "relayed", "tls", "trusted", "user", "vhost",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        owner: str,
        peer: Peer,
        address: Any,
        tls: TlsPeer | None,
        *,
        trusted: bool,
    ) -> None:
        """Begin a session.

        `address` is the local end of the socket as getsockname() tells it. A `trusted` connection
        comes from a process of this broker. The controller's proves for whom it speaks before it
        connects, and counts in no listing and no limit. Bridges enter as INTERNAL_USER, or as the
        user that a URI names, and say that their connections are direct ones: these are listed.
        """
        self.id = number
        self.owner = owner
        self.peer_host, self.peer_port, self.relayed = peer.host, peer.port, peer.relayed
        self.host, self.port = address[:2] if isinstance(address, tuple) else (address, 0)
        self.name = f"{self.peer_host}:{self.peer_port} -> {self.host}:{self.port}"
        self.tls = tls
        self.trusted = trusted
        self.is_direct = False
        self.connected_at = time.time()
        # What the handshake of AMQP establishes.
        self.is_open = False  # connection.open-ok was sent
        self.user = self.vhost = self.auth_mechanism = ""
        self.client_properties: dict[str, Any] = {}
        self.frame_bytes_max = self.channels_max = self.heartbeat_s = 0

    @property
    def is_hidden(self) -> bool:
        """Return whether the connection is in no listing and no limit."""
        return self.trusted and not self.is_direct

    def become_direct(self) -> None:
        """Take note that this is the connection of a bridge; two of them have no address."""
        self.is_direct = True
        self.name, self.auth_mechanism = f"<{self.owner}>", ""

    def can(self, capability: str) -> bool:
        """Return whether the client said in start-ok that it has this capability."""
        capabilities = self.client_properties.get("capabilities")
        return isinstance(capabilities, dict) and capabilities.get(capability) is True

    def info(self, channels: int = 0) -> ConnectionInfo:
        """Return what operators see of a connection that has so many channels."""
        return ConnectionInfo(
            owner=self.owner,
            name=self.name,
            user=self.user,
            vhost=self.vhost,
            peer_host=self.peer_host,
            peer_port=self.peer_port,
            host=self.host,
            port=self.port,
            protocol=DIRECT_PROTOCOL if self.is_direct else PROTOCOL,
            auth_mechanism=self.auth_mechanism,
            tls=self.tls is not None,
            frame_max=self.frame_bytes_max,
            channel_max=self.channels_max,
            heartbeat_s=self.heartbeat_s,
            connected_at_ms=int(self.connected_at * 1000),
            client_properties=self.client_properties,
            channels=channels,
            **(self.tls.shown() if self.tls is not None else {}),
        )
