"""The HTTP client of shardctl: find the running broker and send it requests.

Every failure becomes one line on standard error and an exit status.

On the broker's own host shardctl connects to the socket in the runtime directory, which takes no
password: whoever may open the socket may do everything. On other hosts, and if a user or a URL is
given, it uses HTTP with a login.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import typer

# The exit statuses of rabbitmqctl, which come from sysexits.h. CONFIG is the status with which the
# processes of the broker refuse their settings.
FAILED, CONFIG, USAGE, DATA, NO_USER, UNREACHABLE, REFUSED = 1, 2, 64, 65, 67, 69, 70
NOT_FOUND = 404
# The reason that the HTTP API gives for a wrong password. With any other reason the password is
# right, and the user has too few permissions.
LOGIN_FAILED = "Login failed"
TIMEOUT_S = 60.0
DEFAULT_URL = "http://127.0.0.1:15672"
DEFAULT_USER = DEFAULT_PASSWORD = "guest"
# The data directories in which a broker is looked for if none is given. The second one is that of
# the systemd unit.
DATA_DIRS = (Path("./data"), Path("/var/lib/shardmq"))
HINT = "; say where it is by --data-dir DIR, --url URL, or -n NAME (shardctl context)"
LOCAL_SOCKET = "shardctl.sock"  # The controller binds a socket of this name.
LOCAL_URL = "http://localhost"
# The addresses at which a listener that is bound to every address is reached from this host.
HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def fail(text: str, status: int = FAILED) -> NoReturn:
    """End the command with a line on standard error and an exit status."""
    typer.echo(f"shardctl: {text}", err=True)
    raise typer.Exit(status)


class Rows(NamedTuple):
    """The result of a command that lists objects: the rows, and the columns to show.

    `document` is printed as JSON in their place, if there is one.
    """

    rows: list[dict[str, Any]]
    columns: list[str]
    document: Any = None


class Endpoint(NamedTuple):
    """The address of a broker. If there is a `socket`, the URL is a form only.

    `hint` is for the user if nobody answers.
    """

    url: str
    socket: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Api:
    """The HTTP API of a broker.

    The methods take the parts of a path as they are and quote them. A request that fails ends the
    command. `thing` is the name of the object in the error text if the broker does not have it.
    """

    endpoint: Endpoint
    user: str
    password: str
    timeout_s: float = TIMEOUT_S

    def get(self, *path: str, thing: str = "", **query: str) -> Any:
        """Return what the broker has at a path."""
        return self._ask("GET", path, None, thing, query)

    def has(self, *path: str) -> bool:
        """Return whether the broker has something at a path."""
        status, said = self._call("GET", path)
        if status >= 400 and status != NOT_FOUND:
            fail(self._refusal(status, said), REFUSED)
        return status != NOT_FOUND

    def health(self, *path: str) -> tuple[bool, dict[str, Any]]:
        """Return whether a health check is passed, and its report."""
        status, said = self._call("GET", ("health", "checks", *path))
        if status >= 400 and not (status == 503 and isinstance(said, dict)):
            fail(self._refusal(status, said), REFUSED)
        return status < 400, said or {}

    def answers(self) -> bool:
        """Return whether anybody listens at the address, without a line if not."""
        url = urlsplit(self.endpoint.url)
        try:
            if self.endpoint.socket:
                self._socket().close()
            else:
                address = (url.hostname or "", url.port or 80)
                socket.create_connection(address, timeout=self.timeout_s).close()
        except OSError:
            return False
        return True

    def accepts(self) -> bool:
        """Return whether the password is right, even if the user has no permission for the API."""
        status, said = self._call("GET", ("whoami",))
        reason = said.get("reason") if isinstance(said, dict) else None
        return status < 400 or (status == 401 and reason not in (None, LOGIN_FAILED))

    def put(self, *path: str, body: dict[str, Any] | None = None, thing: str = "") -> None:
        """Create or change the object at a path."""
        self._ask("PUT", path, body or {}, thing)

    def post(self, *path: str, body: Any, thing: str = "") -> Any:
        """Send a body to a path and return the response."""
        return self._ask("POST", path, body, thing)

    def delete(self, *path: str, thing: str = "", **query: str) -> None:
        """Delete the object at a path."""
        self._ask("DELETE", path, None, thing, query)

    def close(self, connection: str, reason: str) -> None:
        """Close the connection of a client, by its name. The client gets the reason."""
        path, thing = ("connections", connection), f"connection '{connection}'"
        self._ask("DELETE", path, None, thing, {}, {"X-Reason": reason})

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        body: Any,
        thing: str = "",
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        status, said = self._call(method, path, body, query, headers)
        if status < 400:
            return said
        refusal = self._refusal(status, said)
        if status != NOT_FOUND:
            fail(refusal, REFUSED)
        exit_status = NO_USER if path[0] in ("users", "user-limits") else DATA
        fail(f"{thing} does not exist" if thing else refusal, exit_status)

    def _call(
        self,
        method: str,
        path: tuple[str, ...],
        body: Any = None,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return the status of the response and its JSON, or None in place of other content."""
        import http.client  # It takes longer to load than the rest of shardctl.

        asked = self.endpoint.socket or self.endpoint.url
        url = urlsplit(self.endpoint.url)
        target = "/".join([url.path.rstrip("/"), "api", *(quote(part, safe="") for part in path)])
        target += f"?{urlencode(query)}" if query else ""
        sent = {"Content-Type": "application/json", "Connection": "close"}
        if not self.endpoint.socket:
            login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            sent["Authorization"] = f"Basic {login}"
        data = None if body is None else json.dumps(body).encode()
        try:
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError("not http://HOST:PORT or https://HOST:PORT")
            secure = url.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(url.hostname, url.port, timeout=self.timeout_s)
            if self.endpoint.socket:
                connection.sock = self._socket()
            connection.request(method, target, data, sent | (headers or {}))
            with connection.getresponse() as reply:
                status, text = reply.status, reply.read()
                if status < 400:
                    _show_warnings(reply.headers.get_all("Warning", ()))
            connection.close()
        except TimeoutError:
            fail(f"{asked} does not answer within {self.timeout_s:g} s", UNREACHABLE)
        except (OSError, ValueError, http.client.HTTPException) as error:
            fail(f"no broker reachable at {asked}: {error}{self.endpoint.hint}", UNREACHABLE)
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            if status < 400:
                fail(f"{asked} does not answer like a broker")
            return status, None

    def _socket(self) -> socket.socket:
        """Return a connection to the socket of the broker on this host."""
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(self.timeout_s)
        connected.connect(self.endpoint.socket)
        return connected

    def _refusal(self, status: int, said: Any) -> str:
        if isinstance(said, dict):
            reason = str(said.get("reason") or said.get("error"))
        else:
            from http import HTTPStatus

            reason = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        if status == 401:  # The password is wrong, or the user lacks a tag.
            return f"user {self.user} is not accepted: {reason}"
        return f"refused ({status}): {reason}"


def check_exists(api: Api, username: str = "", vhost: str = "") -> None:
    """End the command unless this user and this vhost exist.

    A PUT for a user or vhost that does not exist would be refused as a wrong request.
    """
    if username:
        api.get("users", username, thing=f"user '{username}'")
    if vhost:
        api.get("vhosts", vhost, thing=f"vhost '{vhost}'")


def connect(
    url: str, user: str, password: str, data_dir: Path | None, timeout: float = TIMEOUT_S
) -> Api:
    """Return the API of the broker that the options of a command name.

    A command with a user uses HTTP, so that it has the permissions of that user and no more.

    Args:
        url: The URL of the HTTP API, or "" for a broker on this host.
        user: The user, or "" for the socket of the broker or, without one, the default user.
        password: The password of the user.
        data_dir: The data directory of the broker, or None for the usual ones.
        timeout: The seconds to wait for a response.
    """
    hint = "" if url else f", and none runs on {searched(data_dir)}{HINT}"
    endpoint, found = Endpoint(url or DEFAULT_URL, hint=hint), None
    if not url:
        found = running(data_dir)
        if found is None and data_dir is not None:
            # A broker at the default URL is not the one that the user asks for.
            fail(f"no broker runs on {data_dir}", UNREACHABLE)
    if found is not None:
        local = str(Path(str(found.get("runtime_dir") or "/nonexistent")) / LOCAL_SOCKET)
        if not user and os.access(local, os.W_OK):
            endpoint = Endpoint(LOCAL_URL, local)
        else:
            host, _, port = str(found.get("http", "127.0.0.1:15672")).rpartition(":")
            endpoint = Endpoint(_url(host.strip("[]"), port))
    return Api(endpoint, user or DEFAULT_USER, password, timeout)


def http_url(api: Api) -> str:
    """Return the URL of the HTTP API for a login. The socket of the broker knows no logins."""
    listeners = api.get("overview")["listeners"]
    found = next((one for one in listeners if one["protocol"] == "http"), None)
    if found is None:
        fail("the broker has no HTTP listener")
    return _url(found["ip_address"], found["port"])


def _url(host: str, port: str) -> str:
    host = HERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def running(data_dir: Path | None) -> dict[str, Any] | None:
    """Return the pointer file `broker.json` of a running broker.

    Args:
        data_dir: The data directory, or None for the first of DATA_DIRS on which a broker runs.

    Returns:
        The content of the file, or None if no broker runs.
    """
    for directory in DATA_DIRS if data_dir is None else (data_dir,):
        try:
            found: dict[str, Any] = json.loads((directory / "broker.json").read_text())
            if is_alive(int(found["pid"]), int(found["pid_started"])):
                return found
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def searched(data_dir: Path | None) -> str:
    """Return the directories in which `running` looks, as a text."""
    return " or ".join(map(str, DATA_DIRS)) if data_dir is None else str(data_dir)


def is_alive(pid: int, started_ticks: int) -> bool:
    """Return whether a process still runs that has this pid and was started at this time.

    Another process may have the pid now. A zombie has ended: only its parent has not read its exit
    status.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state != "Z" and int(rest[18]) == started_ticks


def json_argument(text: str, kind: type) -> Any:
    """Return the value of a JSON argument. A wrong one ends the command with status 64.

    Args:
        text: The argument.
        kind: The type of the value: dict for an object, object for any value.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"not JSON: {text}: {error}", USAGE)
    if not isinstance(value, kind):
        fail(f"not a JSON object: {text}", USAGE)
    return value


def pairs(words: list[str] | None) -> dict[str, Any]:
    """Return words of the form NAME=VALUE as a dictionary. Other words end the command.

    A value is JSON or, if it is not, a text without quotes.
    """
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            fail(f"not NAME=VALUE: {word}", USAGE)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _show_warnings(values: Iterable[str]) -> None:
    """Write the warnings of a response on stderr: what the broker keeps without effect.

    `values` are the values of the header `Warning`. Each ends with a JSON string.
    """
    for value in values:
        _, _, quoted = value.partition('"')
        try:
            text = json.loads(f'"{quoted}')
        except ValueError:
            continue  # somebody's between us and the broker
        warn(text)


def warn(text: str) -> None:
    """Write a warning on stderr, with its control characters escaped.

    A warning holds names that clients chose, and a terminal must act on none of them.
    """
    from shardmq.supervisor.logs import escaped

    typer.echo(f"warning: {escaped(str(text))}", err=True)
