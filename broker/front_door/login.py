"""Decide who a client is and whether it may enter: connection.start-ok and connection.open.

Everything here decides by the catalog. The caller keeps the time of the handshake, sends what is
decided and closes. A refused login does not tell the client why: a wrong password and an unknown
user look the same. The reason is for the log.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any, NamedTuple

from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.methods import decode_table
from shardmq.broker.front_door.session import TlsPeer
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.checks import MAX_CHANNELS, MAX_CONNECTIONS
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION
from shardmq.broker.shared.failures import UNSEEN
from shardmq.broker.shared.logins import MECHANISMS, is_loopback

EXTERNAL = "EXTERNAL"
RESPONSE_BYTES_MAX = 4096  # of start-ok, from a client that has proved nothing yet

SYNTAX_ERROR = 502
COMMAND_INVALID = 503
ACCESS_REFUSED = 403
NOT_ALLOWED = 530
CONNECTION = 10
START_OK = 11
OPEN = 40
CHANNEL_OPEN = (20, 10)
NO_METHOD = (0, 0)  # a refused login names none in RabbitMQ

CAPABILITIES = (
    "publisher_confirms",
    "exchange_exchange_bindings",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "consumer_priorities",
    "authentication_failure_close",
    "per_consumer_qos",
    "direct_reply_to",
)


def mechanisms(tls: TlsPeer | None) -> bytes:
    """Return the mechanisms that connection.start offers.

    EXTERNAL is offered only to clients that have shown a certificate.
    """
    return MECHANISMS + b" EXTERNAL" if tls is not None and tls.has_certificate else MECHANISMS


class Credentials(NamedTuple):
    user: str
    password: str


class LoginRefused(Exception):
    """A login is refused.

    `tell`: send `answer` before closing. Otherwise the client expects the end of the stream and
    nothing else. `said`: the log has been told of logins like this one.
    """

    def __init__(
        self, reason: str, answer: ConnectionException, tell: bool, said: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer
        self.tell = tell
        self.said = said


def server_properties(cluster_name: str) -> dict[str, Any]:
    """Return what connection.start says of the broker.

    Product and version are those of the RabbitMQ whose behaviour the broker keeps to. Client
    libraries decide by them what qos(global) means (kombu) and which methods they may use.
    """
    return {
        "capabilities": dict.fromkeys(CAPABILITIES, True),
        "cluster_name": cluster_name,
        "copyright": "The shardmq authors",
        "information": "AMQP 0-9-1, sharded over the cores of a host",
        "platform": f"Python {platform.python_version()}",
        "product": "RabbitMQ",
        "version": RABBITMQ_VERSION,
        "shardmq_version": _version(),
    }


def _version() -> str:
    try:
        return metadata.version("shardmq")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0.0.0"


def authenticate(
    mechanism: str,
    response: bytes,
    client_properties: dict[str, Any],
    catalog: Catalog,
    *,
    verdict: Callable[[str, str], str],
    peer_host: str,
    loopback_users: Collection[str],
    tls: TlsPeer | None = None,
    relayed: bool = False,
) -> str:
    """Return the user's name.

    `verdict(user, password)` returns "" or why the login is refused; what it raises goes through
    (logins.TakesLong). `relayed`: a load balancer says that the client is at `peer_host`, which
    does not make it a client on this host.

    Raises LoginRefused, or ConnectionException when the response contains no credentials at all.
    """
    if mechanism == EXTERNAL and tls is not None and tls.has_certificate:
        user = tls.name
        if not user or user not in catalog.users:
            reason = f"user '{user}' (certificate of {tls.subject}): unknown"
            raise _refused(reason, mechanism, client_properties)
    else:
        given = read_credentials(mechanism, response)
        user = given.user
        if wrong := verdict(user, given.password):
            raise _refused(
                f"user '{user}': {wrong}", mechanism, client_properties, said=wrong in UNSEEN
            )
    if user in loopback_users and (relayed or not is_loopback(peer_host)):
        raise _refused(
            f"user '{user}' can only connect via localhost", mechanism, client_properties
        )
    return user


def _refused(
    reason: str, mechanism: str, client_properties: dict[str, Any], *, said: bool = False
) -> LoginRefused:
    text = (
        f"Login was refused using authentication mechanism {mechanism}. "
        "For details see the broker logfile."
    )
    capabilities = client_properties.get("capabilities")
    tell = (
        isinstance(capabilities, dict) and capabilities.get("authentication_failure_close") is True
    )
    return LoginRefused(reason, ConnectionException(ACCESS_REFUSED, text, *NO_METHOD), tell, said)


def read_credentials(mechanism: str, response: bytes) -> Credentials:
    """Return user and password as the mechanism writes them in the response of start-ok."""
    if mechanism.encode() not in MECHANISMS.split():
        text = f"unknown authentication mechanism '{mechanism}'"
        raise ConnectionException(COMMAND_INVALID, text, CONNECTION, START_OK)
    if len(response) > RESPONSE_BYTES_MAX:
        raise _malformed(mechanism)
    try:
        return _read_plain(response) if mechanism == "PLAIN" else _read_amqplain(response)
    except (ValueError, ConnectionException):  # UnicodeDecodeError is a ValueError
        raise _malformed(mechanism) from None


def _malformed(mechanism: str) -> ConnectionException:
    # The bytes are not repeated in the text: a password may be among them, and the text is logged.
    return ConnectionException(SYNTAX_ERROR, f"{mechanism} response invalid", CONNECTION, START_OK)


def _read_plain(response: bytes) -> Credentials:
    """Read RFC 4616: identity NUL user NUL password.

    The identity to act as is ignored, as every broker does.
    """
    _identity, user, password = response.split(b"\0")
    return Credentials(user.decode(), password.decode())


def _read_amqplain(response: bytes) -> Credentials:
    """Read a field table without the length before it, which is the response's own length."""
    fields = decode_table(struct.pack(">I", len(response)) + response)
    user, password = fields.get("LOGIN"), fields.get("PASSWORD")
    if not isinstance(user, str) or not isinstance(password, str):
        raise ValueError("LOGIN and PASSWORD must be strings")
    return Credentials(user, password)


def check_open(
    catalog: Catalog, user: str, vhost: str, connected: int = 0, connections_max: int = 0
) -> None:
    """Raise ConnectionException 530 with the reason if the user may not open this vhost.

    `connected` is the number of open connections of this front door without the new one. The limits
    of vhosts and users count all front doors: the controller is asked
    (checks.check_connection_limits).
    """
    if catalog.vhost(vhost) is None:
        raise not_allowed(f"vhost {vhost} not found")
    if not catalog.permissions.may_enter(user, vhost):
        raise not_allowed(f"access to vhost '{vhost}' refused for user '{user}'")
    if 0 < connections_max <= connected:
        raise not_allowed(
            f"connection refused: node connection limit ({connections_max}) is reached"
        )


def has_limits(catalog: Catalog, user: str, vhost: str) -> bool:
    """Return whether the vhost or the user has a limit of connections."""
    limits = (
        catalog.vhost_limit(vhost, MAX_CONNECTIONS),
        catalog.user_limit(user, MAX_CONNECTIONS),
    )
    return limits != (None, None)


def has_channel_limit(catalog: Catalog, user: str) -> bool:
    return catalog.user_limit(user, MAX_CHANNELS) is not None


def not_allowed(text: str) -> ConnectionException:
    return ConnectionException(NOT_ALLOWED, text, CONNECTION, OPEN)
