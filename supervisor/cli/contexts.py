"""Names for brokers, and the broker that a command is for.

The names are kept in a file that only its owner can read, because it may hold passwords.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from shardmq.supervisor.cli.api import CONFIG, USAGE, fail

# Names of a node on this host in scripts for rabbitmqctl, before the @.
THIS_HOST = ("localhost", "127.0.0.1", "::1")
NODE_OF_RABBITMQ = "rabbit"


class Broker(NamedTuple):
    """The broker that a command is for, as far as it is known. An empty text is not known."""

    url: str = ""
    user: str = ""
    password: str | None = None
    password_file: Path | None = None
    data_dir: Path | None = None


def path() -> Path:
    """Return the file of the contexts."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "shardmq" / "contexts.json"


def read(is_needed: bool = True) -> dict[str, Any]:
    """Return the contexts by name under `contexts`, and the name of the one in use or None.

    Args:
        is_needed: Whether the command ends if this user has no home directory or may not enter it.
            Otherwise there are no contexts then.
    """
    try:
        found = json.loads(path().read_text())
        if isinstance(found, dict) and isinstance(found.get("contexts"), dict):
            return found
    except FileNotFoundError:
        return {"contexts": {}, "current": None}
    except RuntimeError as error:
        if not is_needed:
            return {"contexts": {}, "current": None}
        fail(f"no place for contexts: {error} HOME or XDG_CONFIG_HOME names one", CONFIG)
    except OSError as error:
        if not is_needed and isinstance(error, PermissionError | NotADirectoryError):
            return {"contexts": {}, "current": None}
        fail(f"{path()}: {error.strerror}", CONFIG)
    except ValueError:
        pass
    fail(f"{path()}: not a file of contexts", CONFIG)


def write(found: dict[str, Any]) -> None:
    """Replace the file as a whole. No other user can read it at any moment."""
    file = path()
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as out:
            json.dump(found, out, indent=2)
        os.replace(part, file)
    except OSError as error:
        fail(f"{file}: {error.strerror}", CONFIG)


def named(node: str, is_elsewhere_named: bool = False) -> dict[str, Any]:
    """Return the context that the option --node names, or {} for the broker on this host.

    Args:
        node: The name of a context, "" for the one in use, or a node of this host such as
            rabbit@localhost.
        is_elsewhere_named: Whether --url or --data-dir says where the broker is. Only then may
            a node of RabbitMQ be on another host.
    """
    found = read(is_needed=bool(node))
    contexts: dict[str, Any] = found["contexts"]
    if not node:
        current = found.get("current")
        return {} if is_elsewhere_named or not current else dict(contexts.get(current) or {})
    if node in contexts:
        if is_elsewhere_named:
            fail(f"-n {node} is a context: give either -n, or --url or --data-dir", USAGE)
        return dict(contexts[node])
    name, at, host = node.partition("@")
    here = (*THIS_HOST, socket.gethostname(), socket.gethostname().partition(".")[0])
    if is_elsewhere_named and at:
        return {}
    if (at and name and host in here) or node == NODE_OF_RABBITMQ:
        return {}
    if at:
        fail(f"node {node} is not on this host: use --url URL, or {_how_to_add(host)}", USAGE)
    unknown(node, contexts, USAGE)


def unknown(name: str, contexts: dict[str, Any], status: int) -> NoReturn:
    """End the command with the contexts that exist."""
    known = f"there are {', '.join(sorted(contexts))}" if contexts else _how_to_add(name)
    fail(f"no context '{name}': {known}", status)


def _how_to_add(name: str) -> str:
    return f"shardctl context add {name} --url URL"


def flags(context: typer.Context) -> set[str]:
    """Return the names of the options that stand on the command line behind the command."""
    # Some versions of typer have a copy of click, so the enum of click itself may be another one.
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def chosen(node: str, given: Broker, by_flag: set[str]) -> Broker:
    """Return the broker that a command is for.

    Flags win over the option --node, --node over the environment, and the environment over the
    context in use. A login of the environment is not for the broker that --node names.

    Args:
        node: The option --node, or "".
        given: The flags of the command, or what the environment says in their place.
        by_flag: The fields of `given` that are flags.
    """
    unset = Broker()._asdict()
    ignored: set[str] = set()
    if places := by_flag & {"url", "data_dir"}:
        ignored |= {"url", "data_dir"} - places
    elif node:
        ignored |= {"url", "data_dir"}
    if given.password is not None and given.password_file is not None:
        if "password_file" not in by_flag:
            ignored.add("password_file" if "password" in by_flag else "password")
        elif "password" not in by_flag:
            ignored.add("password")
    given = given._replace(**{name: unset[name] for name in ignored})
    context = named(node, bool(given.url or given.data_dir))
    if not context:
        return given
    if node:
        login = {"user", "password", "password_file"} - by_flag
        given = given._replace(**{name: unset[name] for name in login})
    password, file = given.password, given.password_file
    if password is None and file is None and given.user in ("", context.get("user", "")):
        password = context.get("password")
        file = Path(context["password_file"]) if context.get("password_file") else None
    data_dir = Path(context["data_dir"]) if context.get("data_dir") else None
    user = given.user or context.get("user", "")
    return Broker(context.get("url", ""), user, password, file, data_dir)


def data_dir_here(node: str, data_dir: Path | None, is_flag: bool) -> Path | None:
    """Return the data directory for a command that acts on a broker of this host.

    If the context or the environment says that the broker is at a URL, the command ends: it must
    not act on another broker.

    Args:
        node: The option --node, or "".
        data_dir: The data directory of the command line or the environment.
        is_flag: Whether the data directory stands on the command line.
    """
    if not node:
        url = os.environ.get("SHARDMQ_URL")
        if url and not is_flag:
            _fail_elsewhere("SHARDMQ_URL", url)
        if data_dir is not None:
            return data_dir
    context = named(node, is_flag)
    if context.get("url"):
        _fail_elsewhere(f"-n {node}" if node else "the context in use", context["url"])
    return Path(context["data_dir"]) if context.get("data_dir") else data_dir


def _fail_elsewhere(what: str, url: str) -> NoReturn:
    fail(f"{what} is {url}; for a broker on this host use --data-dir DIR", USAGE)
