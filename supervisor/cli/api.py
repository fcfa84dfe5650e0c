"""The HTTP client of shardctl: finds the running broker, asks, turns every failure into one line and an exit status.

On the broker's own host it asks over the socket in the runtime directory, which takes no password: who may open it may
do everything. Elsewhere, and for whoever names a user or a URL, it is HTTP with a login.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn
from urllib.parse import quote, urlencode

import typer

# Exit statuses: rabbitmqctl's, by sysexits.h. CONFIG: what the broker's own processes end with when told wrongly.
FAILED, CONFIG, USAGE, DATA, NO_USER, UNREACHABLE, REFUSED = 1, 2, 64, 65, 67, 69, 70
NOT_FOUND = 404
LOGIN_FAILED = "Login failed"  # the API's reason for a wrong password; another is a right one with too few rights
TIMEOUT_S = 60.0
DEFAULT_URL = "http://127.0.0.1:15672"
DEFAULT_USER = "guest"
# Where a broker is looked for when nothing says where it is: beside us, then where the systemd unit has its.
DATA_DIRS = (Path("./data"), Path("/var/lib/shardmq"))
LOCAL_SOCKET = "shardctl.sock"  # the controller binds the same
LOCAL_URL = "http://localhost"
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}

Vhost = Annotated[str, typer.Option("--vhost", "-p", help="Virtual host.")]


def fail(text: str, status: int = FAILED) -> NoReturn:
    typer.echo(f"shardctl: {text}", err=True)
    raise typer.Exit(status)


class Absent(Exception):
    """The broker runs and has no such thing."""


class Rows(NamedTuple):
    """What a command lists: these columns of each row, whatever else it has."""

    rows: list[dict[str, Any]]
    columns: list[str]


class Where(NamedTuple):
    """A broker to ask; with a `socket` the URL is only a form."""

    url: str
    socket: str = ""


@dataclass(frozen=True)
class Api:
    where: Where
    user: str
    password: str
    timeout_s: float = TIMEOUT_S

    @property
    def url(self) -> str:
        return self.where.socket or self.where.url

    def get(self, *path: str, thing: str = "", **query: str) -> Any:
        """`thing` is what the refusal says does not exist."""
        return self._ask("GET", path, None, thing, query)

    def has(self, *path: str) -> bool:
        try:
            self._open("GET", path, None)
        except Absent:
            return False
        return True

    def health(self, *path: str) -> tuple[bool, dict[str, Any]]:
        """Whether a check is passed, and what it says; a refusal is neither."""
        try:
            return True, self._reply("GET", ("health", "checks", *path), None) or {}
        except urllib.error.HTTPError as error:
            said = _json(error)
            if error.code == 503 and isinstance(said, dict):
                return False, said
            fail(_refusal(error, said, self.user), REFUSED)

    def accepts(self) -> bool:
        """Whether our password is right, whatever we may do."""
        try:
            self._reply("GET", ("whoami",), None)
        except urllib.error.HTTPError as error:
            said = _json(error)
            return (
                error.code == 401
                and isinstance(said, dict)
                and said.get("reason") not in (None, LOGIN_FAILED)
            )
        return True

    def put(self, *path: str, body: dict[str, Any] | None = None) -> None:
        self._ask("PUT", path, body or {})

    def post(self, *path: str, body: Any, thing: str = "") -> Any:
        return self._ask("POST", path, body, thing)

    def ask(self, *path: str, body: Any, thing: str = "") -> Any:
        """A question that takes a body to ask; changes nothing."""
        return self._ask("POST", path, body, thing)

    def delete(self, *path: str, thing: str = "", **query: str) -> None:
        self._ask("DELETE", path, None, thing, query)

    def close(self, connection: str, reason: str) -> None:
        """Of a client, by its name."""
        self._ask(
            "DELETE",
            ("connections", connection),
            None,
            f"connection '{connection}'",
            {},
            {"X-Reason": reason},
        )

    def _ask(
        self,
        method: str,
        path: tuple[str, ...],
        body: Any,
        thing: str = "",
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        try:
            return self._open(method, path, body, query, headers)
        except Absent as absent:
            status = NO_USER if path[0] in ("users", "user-limits") else DATA
            fail(f"{thing} does not exist" if thing else str(absent), status)

    def _open(
        self,
        method: str,
        path: tuple[str, ...],
        body: Any,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        try:
            return self._reply(method, path, body, query, headers)
        except urllib.error.HTTPError as error:
            refusal = _refusal(error, _json(error), self.user)
            if error.code == NOT_FOUND:
                raise Absent(refusal) from None
            fail(refusal, REFUSED)

    def _reply(
        self,
        method: str,
        path: tuple[str, ...],
        body: Any,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The answer's JSON. Raises HTTPError for one that is a refusal."""
        target = "/".join(
            [self.where.url.rstrip("/"), "api", *(quote(part, safe="") for part in path)]
        )
        if query:
            target += f"?{urlencode(query)}"
        with self._failures():
            request = urllib.request.Request(
                target, None if body is None else json.dumps(body).encode(), self._headers() | (headers or {}),
                method=method,
            )  # fmt: skip
            with self._opener().open(request, timeout=self.timeout_s) as reply:
                text = reply.read()
        try:
            return json.loads(text) if text else None
        except ValueError:
            fail(f"{self.url} does not answer like a broker")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError:
            raise
        except TimeoutError:
            fail(f"{self.url} does not answer within {self.timeout_s:g} s", UNREACHABLE)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                fail(f"{self.url} does not answer within {self.timeout_s:g} s", UNREACHABLE)
            fail(f"no broker reachable at {self.url}: {reason}", UNREACHABLE)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if not self.where.socket:
            login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        return headers

    def _opener(self) -> urllib.request.OpenerDirector:
        # Not the opener of the environment: a proxy has no business between shardctl and its broker.
        direct = urllib.request.ProxyHandler({})
        if self.where.socket:
            return urllib.request.build_opener(direct, _UnixHandler(self.where.socket))
        return urllib.request.build_opener(direct)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnixHandler(urllib.request.HTTPHandler):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        path = self._path

        def connection(host: str, **options: Any) -> _UnixConnection:
            return _UnixConnection(path, host, **options)

        return self.do_open(connection, request)


def there(api: Api, username: str = "", vhost: str = "") -> None:
    """Ends the command unless this user and this vhost exist: what is put for them would be refused as a mistake."""
    if username:
        api.get("users", username, thing=f"user '{username}'")
    if vhost:
        api.get("vhosts", vhost, thing=f"vhost '{vhost}'")


def connect(
    url: str, user: str, password: str, data_dir: Path | None, timeout: float = TIMEOUT_S
) -> Api:
    return Api(_where(url, user, data_dir), user or DEFAULT_USER, password, timeout)


def _where(url: str, user: str, data_dir: Path | None) -> Where:
    """A user that was named is to be asked for the password, and to have no more rights than they have."""
    if url:
        return Where(url)
    found = running(data_dir)
    if found is None and data_dir is not None:
        fail(
            f"no broker runs on {data_dir}", UNREACHABLE
        )  # whoever is at the usual address is not the one meant
    if found is None:
        return Where(DEFAULT_URL)
    local = str(Path(str(found.get("runtime_dir") or "/nonexistent")) / LOCAL_SOCKET)
    if not user and os.access(local, os.W_OK):
        return Where(LOCAL_URL, local)
    host, _, port = str(found.get("http", "127.0.0.1:15672")).rpartition(":")
    return Where(f"http://{EVERYWHERE.get(host, host)}:{port}")


def http_url(api: Api) -> str:
    """For a login, which the local socket does not know."""
    listeners = api.get("overview")["listeners"]
    found = next((one for one in listeners if one["protocol"] == "http"), None)
    if found is None:
        fail("the broker has no HTTP listener")
    host = f"[{found['ip_address']}]" if ":" in found["ip_address"] else found["ip_address"]
    return f"http://{EVERYWHERE.get(host, host)}:{found['port']}"


def running(data_dir: Path | None) -> dict[str, Any] | None:
    """What the broker on this data directory, or the first of those on the usual ones, says of itself."""
    for directory in DATA_DIRS if data_dir is None else (data_dir,):
        found = pointer(directory)
        if found is not None:
            return found
    return None


def looked_in(data_dir: Path | None) -> str:
    """Where `running` looked."""
    return " or ".join(map(str, DATA_DIRS)) if data_dir is None else str(data_dir)


def pointer(data_dir: Path) -> dict[str, Any] | None:
    """What the broker on this data directory says of itself; None when none runs there."""
    try:
        found: dict[str, Any] = json.loads((data_dir / "broker.json").read_text())
        runs = is_alive(int(found["pid"]), int(found["pid_started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if runs else None


def is_alive(pid: int, started_ticks: int) -> bool:
    """Whether the process is there that got this pid at that time, not another that has it now. A zombie has ended;
    only its parent has not looked yet."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state != "Z" and int(rest[18]) == started_ticks


def json_argument(text: str, kind: type) -> Any:
    """What an argument says in JSON: an object, or with `kind` object anything."""
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"not JSON: {text}: {error}", USAGE)
    if not isinstance(value, kind):
        fail(f"not a JSON object: {text}", USAGE)
    return value


def _json(error: urllib.error.HTTPError) -> Any:
    try:
        return json.loads(error.read())
    except (OSError, ValueError):
        return None


def _refusal(error: urllib.error.HTTPError, said: Any, user: str) -> str:
    reason = (
        str(said.get("reason") or said.get("error")) if isinstance(said, dict) else error.reason
    )
    if (
        error.code == 401
    ):  # a wrong password, or a right one of somebody without the tag that it takes
        return f"user {user} is not accepted: {reason}"
    return f"refused ({error.code}): {reason}"
