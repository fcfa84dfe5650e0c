"""The HTTP client of shardctl: finds the running broker, asks, turns every failure into one line and an exit status."""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlencode

import typer
from rich.console import Console
from rich.table import Table

FAILED, USAGE, UNREACHABLE = 1, 2, 69
NOT_FOUND = 404
TIMEOUT_S = 30
DEFAULT_URL = "http://127.0.0.1:15672"
DEFAULT_DATA_DIR = Path("./data")

Url = Annotated[str, typer.Option(help="Of the HTTP API; else of the broker on --data-dir, else " + DEFAULT_URL)]
User = Annotated[str, typer.Option(envvar="SHARDMQ_USER", help="Who asks.")]
Password = Annotated[str, typer.Option(envvar="SHARDMQ_PASSWORD", help="Their password.")]
DataDir = Annotated[Path, typer.Option(help="Data directory of a broker on this host.")]
Formatter = Annotated[str, typer.Option(help="table or json.")]
Vhost = Annotated[str, typer.Option("--vhost", "-p", help="Virtual host.")]


def fail(text: str, status: int = FAILED) -> NoReturn:
    typer.echo(f"shardctl: {text}", err=True)
    raise typer.Exit(status)


class Absent(Exception):
    """The broker runs and has no such thing."""


@dataclass(frozen=True)
class Api:
    url: str
    user: str
    password: str

    def get(self, *path: str, thing: str = "") -> Any:
        """`thing` is what the refusal says does not exist."""
        return self._ask("GET", path, None, thing)

    def has(self, *path: str) -> bool:
        try:
            self._open("GET", path, None)
        except Absent:
            return False
        return True

    def put(self, *path: str, body: dict[str, Any] | None = None) -> None:
        self._ask("PUT", path, body or {})

    def post(self, *path: str, body: Any, thing: str = "") -> None:
        self._ask("POST", path, body, thing)

    def ask(self, *path: str, body: Any, thing: str = "") -> Any:
        """A question that takes a body to ask; changes nothing."""
        return self._ask("POST", path, body, thing)

    def delete(self, *path: str, thing: str = "", **query: str) -> None:
        self._ask("DELETE", path, None, thing, query)

    def _ask(
        self, method: str, path: tuple[str, ...], body: Any, thing: str = "", query: dict[str, str] | None = None
    ) -> Any:
        try:
            return self._open(method, path, body, query)
        except Absent as absent:
            fail(f"{thing} does not exist" if thing else str(absent))

    def _open(self, method: str, path: tuple[str, ...], body: Any, query: dict[str, str] | None = None) -> Any:
        target = "/".join([self.url.rstrip("/"), "api", *(quote(part, safe="") for part in path)])
        if query:
            target += f"?{urlencode(query)}"
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(target, data, headers, method=method)
            # Not the opener of the environment: a proxy has no business between shardctl and its broker.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as reply:
                text = reply.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            refusal = _refusal(error, self.user)
            if error.code == NOT_FOUND:
                raise Absent(refusal) from None
            fail(refusal)
        except json.JSONDecodeError:
            fail(f"{self.url} does not answer like a broker")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            fail(f"no broker reachable at {self.url}: {reason}", UNREACHABLE)


def connect(url: str, user: str, password: str, data_dir: Path) -> Api:
    return Api(url or _url_of(data_dir), user, password)


def pointer(data_dir: Path) -> dict[str, Any] | None:
    """What the broker on this data directory says of itself; None when none runs there."""
    try:
        found: dict[str, Any] = json.loads((data_dir / "broker.json").read_text())
        runs = Path(f"/proc/{int(found['pid'])}").exists()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if runs else None


def json_argument(text: str, kind: type) -> Any:
    """What an argument says in JSON: an object, or with `kind` object anything."""
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(f"not JSON: {text}: {error}", USAGE)
    if not isinstance(value, kind):
        fail(f"not a JSON object: {text}", USAGE)
    return value


def show(rows: list[dict[str, Any]], columns: list[str], formatter: str) -> None:
    """As a table, or as the JSON it came as, cut to these columns."""
    if formatter == "json":
        typer.echo(json.dumps([{column: row.get(column) for column in columns} for row in rows]))
    elif formatter == "table":
        table = Table(*columns, box=None, header_style="bold")
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        Console(width=None if os.isatty(1) else 10_000).print(table, markup=False)
    else:
        fail(f"--formatter: table or json, not {formatter}", USAGE)


def chosen(columns: list[str] | None, default: list[str]) -> list[str]:
    return columns or default


def _url_of(data_dir: Path) -> str:
    found = pointer(data_dir)
    if found is None and data_dir != DEFAULT_DATA_DIR:
        fail(f"no broker runs on {data_dir}", UNREACHABLE)  # whoever is at the usual address is not the one meant
    if found is None or "http" not in found:
        return DEFAULT_URL
    host, _, port = str(found["http"]).rpartition(":")
    return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


def _cell(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def _refusal(error: urllib.error.HTTPError, user: str) -> str:
    try:
        answer = json.loads(error.read())
        reason = str(answer.get("reason") or answer.get("error"))
    except (ValueError, AttributeError):
        reason = error.reason
    if error.code == 401:  # a wrong password, or a right one of somebody without the tag that it takes
        return f"user {user} is not accepted: {reason}"
    return f"refused ({error.code}): {reason}"
