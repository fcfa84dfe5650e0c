"""URIs of brokers: `amqp://user:password@host:port/vhost?heartbeat=10`, as RabbitMQ reads them.

A URI without a host means this broker. Parts are percent-encoded, so `%2F` is the vhost `/`. A URI
without a path, or with a path that is empty, means the vhost `/`.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

PORT: Final = 5672
TLS_PORT: Final = 5671
HEARTBEAT_S: Final = 10
TIMEOUT_MS: Final = 60_000
DEFAULT_USER: Final = "guest"
DEFAULT_PASSWORD: Final = "guest"
URI_CHARS_MAX: Final = 4096
NUMBER_MAX: Final = {"heartbeat": 65_535, "connection_timeout": 86_400_000, "channel_max": 65_535}
MECHANISMS: Final = ("plain", "amqplain", "external")
VERIFY: Final = {"verify_peer": True, "verify_none": False}
FILES: Final = ("cacertfile", "certfile", "keyfile")
# What a secret is replaced by in texts that people see.
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/]*@")


class BadUri(Exception):
    """A text is not the URI of a broker; the text of the error has no secrets."""


class AmqpUri(msgspec.Struct, frozen=True, kw_only=True):
    """A broker and how to log in.

    host: "" means this broker, by its own socket.
    user: "" if the URI has none.
    mechanism: of SASL: plain, amqplain or external.
    verify: whether the certificate of the broker is checked; None if the URI does not say.
    server_name: the name in that certificate, "" for the host; None switches its check off.
    """

    host: str = ""
    port: int = PORT
    tls: bool = False
    user: str = ""
    password: str = ""
    vhost: str = "/"
    heartbeat_s: int = HEARTBEAT_S
    timeout_ms: int = TIMEOUT_MS
    channel_max: int = 2047
    mechanism: str = "plain"
    cacertfile: str = ""
    certfile: str = ""
    keyfile: str = ""
    verify: bool | None = None
    server_name: str | None = ""

    @property
    def is_here(self) -> bool:
        return not self.host


def parse(text: str, vhost_if_none: str = "/") -> AmqpUri:
    """Return what a URI says, with `vhost_if_none` if it names no vhost. Raises BadUri."""
    if len(text) > URI_CHARS_MAX:
        raise BadUri(f"more than {URI_CHARS_MAX} characters")
    parts = _split(text)
    if parts.scheme not in ("amqp", "amqps"):
        raise BadUri("unexpected scheme: it begins with amqp:// or amqps://")
    tls = parts.scheme == "amqps"
    host, port = _host_and_port(parts)
    if not host and tls:
        raise BadUri("amqps needs a host")
    userinfo, at, _ = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    vhost = parts.path.removeprefix("/")
    if "/" in vhost:
        raise BadUri("a vhost with a slash is written with %2F")
    found: dict[str, object] = {
        "host": host,
        "port": port or (TLS_PORT if tls else PORT),
        "tls": tls,
        "user": _decoded(user) if at else (DEFAULT_USER if host else ""),
        "password": _decoded(password) if colon else ("" if at or not host else DEFAULT_PASSWORD),
        "vhost": _decoded(vhost) or vhost_if_none,
    }
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        found.update(_parameter(name, value))
    if found.get("keyfile") and not found.get("certfile"):
        raise BadUri("keyfile without certfile")
    return msgspec.convert(found, AmqpUri)


def without_credentials(text: str) -> str:
    """Return a URI as people may see it: no user, no password, no query."""
    return re.split("[?#]", _CREDENTIALS.sub("", text), maxsplit=1)[0]


def _split(text: str) -> SplitResult:
    if any(ord(char) <= 32 or ord(char) == 127 for char in text):
        raise BadUri("spaces and control characters are written as %20 and the like")
    try:
        return urlsplit(text)
    except ValueError as error:
        raise BadUri(str(error)) from None


def _host_and_port(parts: SplitResult) -> tuple[str, int]:
    try:
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        raise BadUri("the port is no number up to 65535") from None
    if port and not host:
        raise BadUri("a port without a host")
    return host, port


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadUri("a part is not UTF-8") from None


def _parameter(name: str, value: str) -> dict[str, object]:
    """Return the fields that a parameter of the query sets. Unknown ones are ignored."""
    if name in NUMBER_MAX:
        if not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise BadUri(f"{name} is no number")
        if int(value) > NUMBER_MAX[name]:
            raise BadUri(f"{name} is at most {NUMBER_MAX[name]}")
        fields = {"heartbeat": "heartbeat_s", "connection_timeout": "timeout_ms"}
        return {fields.get(name, name): int(value)}
    if name == "auth_mechanism":
        if value not in MECHANISMS:
            raise BadUri(f"auth_mechanism is one of {', '.join(MECHANISMS)}")
        return {"mechanism": value}
    if name == "verify":
        if value not in VERIFY:
            raise BadUri("verify is verify_peer or verify_none")
        return {"verify": VERIFY[value]}
    if name == "server_name_indication":
        return {"server_name": None if value == "disable" else value}
    return {name: value} if name in FILES else {}
