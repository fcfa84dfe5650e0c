"""The commands `shardctl context`: give brokers names, and choose one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from shardmq.supervisor.cli.api import DATA, USAGE, Rows, fail
from shardmq.supervisor.cli.command import bound
from shardmq.supervisor.cli.contexts import NODE_OF_RABBITMQ, read, unknown, write
from shardmq.supervisor.cli.names import ContextName, complete_contexts
from shardmq.supervisor.cli.passwords import password_in

COLUMNS = ["name", "url", "data_dir", "user", "current"]

app = typer.Typer(no_args_is_help=True, help="Names for brokers, as -n takes them.")
Name = Annotated[str, typer.Argument(metavar="NAME")]


def add(
    name: Name,
    url: Annotated[str, typer.Option(help="URL of the HTTP API.")] = "",
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory of a broker on this host.")
    ] = None,
    user: Annotated[str, typer.Option(help="User name.")] = "",
    password_file: Annotated[
        Path | None, typer.Option(help="File with the password, which stays in that file.")
    ] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Keep the first line of standard input.")
    ] = False,
) -> None:
    """Give a broker a name for -n. Without a password, commands ask for it on a terminal."""
    if bool(url) == bool(data_dir):
        fail("--url or --data-dir, and not both", USAGE)
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        fail(f"--url: not http://HOST:PORT or https://HOST:PORT: {url}", USAGE)
    if parts.username is not None:
        fail("--url: a URL without a login; use --user", USAGE)
    if not name or "@" in name or not name.isprintable() or name == NODE_OF_RABBITMQ:
        fail(f"not a name for a context: {name!r}", USAGE)
    if (password_file or password_stdin) and not user:
        fail("a password needs --user", USAGE)
    entry = {"url": url, "user": user, "data_dir": str(data_dir.absolute()) if data_dir else ""}
    if password_file is not None:
        password_in(password_file)
        entry["password_file"] = str(password_file.absolute())
    elif password_stdin:
        entry["password"] = password_in(None)
    found = read()
    found["contexts"][name] = {key: value for key, value in entry.items() if value}
    write(found)


def list_contexts() -> Rows:
    """List the contexts, without passwords."""
    found = read()
    rows = [
        {"name": name, **entry, "current": name == found.get("current")}
        for name, entry in sorted(found["contexts"].items())
    ]
    return Rows(rows, COLUMNS)


def remove(name: ContextName) -> None:
    """Remove a context."""
    found = read()
    if found["contexts"].pop(name, None) is None:
        unknown(name, found["contexts"], DATA)
    if found.get("current") == name:
        found["current"] = None
    write(found)


def use(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Default: the broker on this host.",
            autocompletion=complete_contexts,
        ),
    ] = None,
) -> None:
    """Make a context the one for all commands without -n, --url or --data-dir."""
    found = read()
    if name is not None and name not in found["contexts"]:
        unknown(name, found["contexts"], DATA)
    found["current"] = name
    write(found)


app.command("add")(add)
app.command("list")(bound(list_contexts))
app.command("remove")(remove)
app.command("use")(use)
