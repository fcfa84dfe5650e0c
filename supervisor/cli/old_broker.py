"""The broker that applications move away from: where it is, who logs in, and what it says.

A password comes from the URIs, an option, the environment, a file, a prompt or a pipe. What is
printed never has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from shardmq.supervisor.cli.api import DEFAULT_PASSWORD, DEFAULT_USER, USAGE, Api, Endpoint, fail
from shardmq.supervisor.cli.channel import Server, logged_in
from shardmq.supervisor.cli.migration_plan import Thing
from shardmq.supervisor.cli.migration_rules import PREFIX, Queue
from shardmq.supervisor.cli.passwords import given_or_asked, password_in

PORTS = {"amqp": 5672, "amqps": 5671}
HINT = (
    "; it needs the HTTP API of the old broker, in RabbitMQ by `rabbitmq-plugins enable"
    " rabbitmq_management`"
)
# Connections of bridges have the name of their shovel, behind this word.
BRIDGE = f"Shovel {PREFIX}"
COLUMNS = (
    "name,vhost,exclusive,auto_delete,arguments,type,state,messages,messages_ready,"
    "messages_unacknowledged,consumers,"
    "message_stats.publish_details.rate"
)


class Login(NamedTuple):
    """A name and a password."""

    user: str
    password: str


class OldBroker(NamedTuple):
    """The old broker.

    api: its HTTP API.
    amqp: its URI for AMQP, without a login and a vhost.
    login: whose messages the bridges take.
    vhost: the only vhost that moves, or "" for all.
    """

    api: Api
    amqp: SplitResult
    login: Login
    vhost: str

    def uri(self, vhost: str) -> str:
        """Return the URI of a vhost with the login, for a bridge."""
        user, password = (quote(word, safe="") for word in self.login)
        netloc = f"{user}:{password}@{self.amqp.netloc}"
        path = f"/{quote(vhost, safe='')}"
        return urlunsplit(self.amqp._replace(netloc=netloc, path=path))

    def shown(self) -> str:
        """Return the broker as people may see it."""
        return f"{self.amqp.scheme}://{self.amqp.netloc}"

    def definitions(self) -> dict[str, Any]:
        """Return the definitions of all vhosts, which only an administrator may read."""
        found = self.api.get("definitions")
        if not isinstance(found, dict):
            fail(f"{self.api.endpoint.url} does not answer like a broker")
        return found

    def queues(self) -> list[Thing]:
        """Return the queues of the vhosts that move. Numbers may be some seconds old."""
        path = ("queues", self.vhost) if self.vhost else ("queues",)
        rows: list[Thing] = self.api.get(
            *path, thing=f"vhost '{self.vhost}' of the old broker", columns=COLUMNS
        )
        return rows

    def counts(self, queues: list[Queue]) -> dict[Queue, tuple[int, int]]:
        """Return the messages that are ready in queues, and their consumers, as they are now."""
        found: dict[Queue, tuple[int, int]] = {}
        for vhost in sorted({queue.vhost for queue in queues}):
            server = Server(
                self.amqp.hostname or "",
                self.amqp.port or PORTS[self.amqp.scheme],
                self.amqp.scheme == "amqps",
            )
            with logged_in(server, *self.login, vhost, self.api.timeout_s) as channel:
                of_vhost = [queue for queue in queues if queue.vhost == vhost]
                counts = channel.counts([queue.name for queue in of_vhost])
                found.update(zip(of_vhost, counts, strict=True))
        return found

    def connections(self) -> list[str]:
        """Return the connections of clients that are not bridges, each with its user."""
        path = ("vhosts", self.vhost, "connections") if self.vhost else ("connections",)
        return [
            f"{row.get('name')} ({row.get('user')})"
            for row in self.api.get(*path)
            if row.get("name") and not _name_of(row).startswith(BRIDGE)
        ]


def _name_of(row: Thing) -> str:
    properties = row.get("client_properties")
    given = properties.get("connection_name") if isinstance(properties, dict) else ""
    return str(row.get("user_provided_name") or given or "")


def old_broker(
    amqp: str,
    http: str,
    user: str,
    password: str | None,
    password_file: Path | None,
    timeout_s: float,
) -> OldBroker:
    """Return the old broker that the arguments of a command name.

    Args:
        amqp: Its URI for AMQP. With a path, only this vhost moves.
        http: The URL of its HTTP API.
        user: The user at it, or "" for that of the URIs or, without one, the default user.
        password: The password, or None for that of the URIs, of the file or of a prompt.
        password_file: A file that holds the password, or None.
        timeout_s: The seconds to wait for a response.
    """
    at, there = _split(amqp, ("amqp", "amqps"), "AMQP"), _split(http, ("http", "https"), "HTTP")
    if password is not None and password_file is not None:
        fail("--old-password or --old-password-file, not both", USAGE)
    if password_file is not None:
        password = password_in(password_file)
    logins = []
    for parts, other in ((at, there), (there, at)):
        name = user or unquote(parts.username or other.username or "")
        word = password
        for each in (parts, other):
            if word is None and each.password is not None and unquote(each.username or "") == name:
                word = unquote(each.password)
        logins.append((name or DEFAULT_USER, word if name else (word or DEFAULT_PASSWORD)))
    asked: dict[str, str] = {}
    found = []
    for name, word in logins:
        if word is None and name not in asked:
            asked[name] = given_or_asked(None)
        found.append(Login(name, asked[name] if word is None else word))
    url = urlunsplit(_bare(there)._replace(query=""))
    path = at.path.removeprefix("/")
    if "/" in path:
        fail("a vhost with a slash is written with %2F", USAGE)
    api = Api(Endpoint(url, hint=HINT), found[1].user, found[1].password, timeout_s)
    return OldBroker(api, _bare(at)._replace(path=""), found[0], unquote(path))


def _split(text: str, schemes: tuple[str, str], what: str) -> SplitResult:
    form = f"{schemes[0]}://HOST or {schemes[1]}://HOST"
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right or not text.isprintable() or " " in text:
        fail(f"the {what} address of the old broker has the form {form}", USAGE)
    return parts


def _bare(parts: SplitResult) -> SplitResult:
    """Return a URI without its login."""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
