"""The commands that export and import definitions, as the JSON that RabbitMQ reads and writes."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shardmq.supervisor.cli.api import CONFIG, DATA, Api, fail, warn
from shardmq.supervisor.cli.processes import run_module
from shardmq.supervisor.config import ConfigError
from shardmq.supervisor.directories import DataDirectory
from shardmq.supervisor.nearest import did_you_mean

STREAM = "-"
# The kinds of which there may be many. Bindings come after the objects that they bind.
MANY = ("exchanges", "queues", "bindings")
PIECE_OBJECTS_MAX = 2000
KINDS = (
    "users", "vhosts", "permissions", "topic_permissions", "parameters", "global_parameters",
    "policies", *MANY,
)  # fmt: skip
OneVhost = Annotated[
    str, typer.Option("--vhost", "-p", help="The definitions of this virtual host only.")
]


class Broker(StrEnum):
    """The broker that is to read an export."""

    SHARDMQ = "shardmq"
    RABBITMQ = "rabbitmq"


# RabbitMQ's names of the hashes that it reads, by the names of the hashes in this broker.
RABBITMQ_HASHES = {
    alias: f"rabbit_password_hashing_{name}"
    for name in ("sha256", "sha512", "md5")
    for alias in (f"rabbit_password_hashing_{name}", name.upper())
}


def export_definitions(
    api: Api,
    file: Annotated[str, typer.Argument(metavar="FILE", help="- is standard output.")],
    vhost: OneVhost = "",
    reader: Broker = typer.Option(
        Broker.SHARDMQ,
        "--for",
        help="The broker that reads the file. rabbitmq: leave out hashes that it cannot read.",
    ),
) -> None:
    """Write all definitions to a file.

    They are vhosts, users, permissions, policies, parameters, exchanges, queues and bindings.
    """
    path = ["definitions", vhost] if vhost else ["definitions"]
    found = api.get(*path, thing=f"vhost '{vhost}'")
    if reader is Broker.RABBITMQ:
        for name in leave_out_hashes(found):
            print(
                f"user '{name}' is exported without a password: RabbitMQ cannot read its hash;"
                " give it a new one there",
                file=sys.stderr,
            )
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if file == STREAM:
        sys.stdout.write(text)
        return
    try:
        # Other users must not read the file, which holds hashes of passwords.
        fd = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        fail(f"{file}: {error.strerror}")


def leave_out_hashes(document: dict[str, Any]) -> list[str]:
    """Remove the password hashes that RabbitMQ cannot read from a document of definitions.

    RabbitMQ imports such a user without a password, and nobody can log in as the user until a new
    password is set.

    Returns:
        The names of the users whose hashes were removed.
    """
    without = []
    for user in document.get("users", []):
        if algorithm := RABBITMQ_HASHES.get(user["hashing_algorithm"]):
            user["hashing_algorithm"] = algorithm
        else:
            user["password_hash"], user["hashing_algorithm"] = "", RABBITMQ_HASHES["SHA256"]
            without.append(user["name"])
    return without


def import_definitions(
    api: Api,
    file: str = typer.Argument(STREAM, metavar="FILE", help="- or no FILE is standard input."),
    vhost: OneVhost = "",
) -> None:
    """Add the definitions of a file. Objects that exist already stay as they are."""
    try:
        text = sys.stdin.read() if file == STREAM else Path(file).read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    except ValueError as error:
        fail(f"{file}: not JSON: {error}", DATA)
    _check_kinds(file, document)
    path = ["definitions", vhost] if vhost else ["definitions"]
    parts = pieces(document)
    warnings: dict[str, None] = {}
    with Progress(
        console=Console(stderr=True), transient=True, disable=len(parts) == 1
    ) as progress:
        for part in progress.track(parts, description="importing"):
            answer = api.post(*path, body=part) or {}
            warnings.update(dict.fromkeys(answer.get("warnings", ())))
    for warning in warnings:
        warn(warning)


def _check_kinds(file: str, document: Any) -> None:
    """Warn of lists that are imported by nobody. A document with nothing else ends the command."""
    if not isinstance(document, dict):
        return  # the broker refuses it
    unknown = [
        f"there is no kind of definitions {name}{did_you_mean(name, KINDS)}"
        for name, value in document.items()
        if name not in KINDS and isinstance(value, list)
    ]
    if unknown and document.keys().isdisjoint(KINDS):
        fail(f"{file}: {unknown[0]}", DATA)
    for text in unknown:
        warn(f"{text}; nothing of it is imported")


offline = typer.Typer(
    no_args_is_help=True, help="The definitions in the data directory of a stopped broker."
)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The data directory.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SHARDMQ_SECRETS_KEY_FILE", help="The file of secrets.key_file, to read secrets."
    ),
]


@offline.command("export")
def export_offline(
    directory: Directory,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Default: standard output.")] = "",
    key_file: KeyFile = None,
) -> None:
    """Write all definitions as the JSON of RabbitMQ. Changes nothing."""
    _offline(key_file, "export", directory, *([file] if file else []))


@offline.command("import")
def import_offline(
    directory: Directory,
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    key_file: KeyFile = None,
) -> None:
    """Add the definitions of a file, for the next start.

    Objects that exist already stay as they are.
    """
    _offline(key_file, "import", directory, str(file))


def _offline(key_file: Path | None, verb: str, directory: Path, *others: str) -> None:
    """Run the code of the controller in a process of its own.

    The lock of the data directory keeps a broker from starting meanwhile.
    """
    if not directory.is_dir():
        fail(f"{directory}: not a directory", CONFIG)
    locked = DataDirectory(directory)
    try:
        locked.open()
    except ConfigError as error:
        fail(str(error), CONFIG)
    try:
        keys = [] if key_file is None else ["--key-file", str(key_file)]
        status = run_module(
            "shardmq.broker.controller.stored.offline", *keys, verb, str(directory), *others
        )
    finally:
        locked.close()
    raise typer.Exit(status)


def pieces(document: Any) -> list[Any]:
    """Return a large document as several, in the order in which they must be imported.

    A request has a bound for its time and its size, and progress is shown between two requests.
    """
    if not isinstance(document, dict):
        return [document]
    lists = [rows for kind in MANY if isinstance(rows := document.get(kind), list)]
    if sum(map(len, lists)) <= PIECE_OBJECTS_MAX:
        return [document]
    found: list[Any] = [{key: value for key, value in document.items() if key not in MANY}]
    for kind in MANY:
        rows = document.get(kind) or []
        found += [
            {kind: rows[at : at + PIECE_OBJECTS_MAX]}
            for at in range(0, len(rows), PIECE_OBJECTS_MAX)
        ]
    return found
