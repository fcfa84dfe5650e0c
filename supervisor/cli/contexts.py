"""Names for brokers, and the broker that a command is for.

The names are kept in a file that only its owner can read, because it may hold passwords.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shardmq.supervisor.cli.api import CONFIG, USAGE, fail
from shardmq.supervisor.cli.passwords import password_in

# Names of a node on this host in scripts for rabbitmqctl, before the @.
THIS_HOST = ("localhost", "127.0.0.1", "::1")
NODE_OF_RABBITMQ = "rabbit"


class Broker(NamedTuple):
    """What is known of the broker that a command is for. An empty text is not known."""

    url: str = ""
    user: str = ""
    password: str | None = None
    data_dir: Path | None = None


def path() -> Path:
    """Return the file of the contexts."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "shardmq" / "contexts.json"


def read() -> dict[str, Any]:
    """Return the contexts by name under `contexts`, and the name of the one in use or None."""
    try:
        found = json.loads(path().read_text())
        if isinstance(found, dict) and isinstance(found.get("contexts"), dict):
            return found
    except FileNotFoundError:
        return {"contexts": {}, "current": None}
    except OSError as error:
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
    found = read()
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


def chosen(node: str, given: Broker) -> Broker:
    """Return the broker that a command is for.

    Flags win over the option --node, --node over the environment, and the environment over the
    context in use.

    Args:
        node: The option --node, or "".
        given: The flags of the command, or what the environment says in their place.
    """
    from_environment = given.url == os.environ.get("SHARDMQ_URL", "") and str(
        given.data_dir or ""
    ) == os.environ.get("SHARDMQ_DATA_DIR", "")
    is_named = bool(given.url or given.data_dir)
    if is_named and from_environment:
        is_named = not node
        given = given._replace(url="", data_dir=None) if node else given
    context = named(node, is_named)
    if not context:
        return given
    password = given.password
    if password is None and given.user in ("", context.get("user", "")):
        password = context.get("password")
        if password is None and context.get("password_file"):
            password = password_in(Path(context["password_file"]))
    data_dir = Path(context["data_dir"]) if context.get("data_dir") else None
    user = given.user or context.get("user", "")
    return Broker(context.get("url", ""), user, password, data_dir)


def data_dir_here(node: str, data_dir: Path | None) -> Path | None:
    """Return the data directory for a command that acts on a broker of this host.

    If the context is a broker at a URL, the command ends: it must not act on another broker.
    """
    is_named = data_dir is not None and str(data_dir) != os.environ.get("SHARDMQ_DATA_DIR")
    if data_dir is not None and not node:
        return data_dir
    context = named(node, is_named)
    if context.get("url"):
        where = f"-n {node}" if node else "the context in use"
        fail(f"{where} is {context['url']}; for a broker on this host use --data-dir DIR", USAGE)
    return Path(context["data_dir"]) if context.get("data_dir") else data_dir
