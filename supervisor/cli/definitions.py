"""export_definitions, import_definitions: what exists, as the JSON that RabbitMQ reads and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shardmq.supervisor.cli.api import CONFIG, DATA, Api, fail
from shardmq.supervisor.cli.processes import module_command, module_environment
from shardmq.supervisor.config import ConfigError
from shardmq.supervisor.directories import DataDirectory

STREAM = "-"
MANY = (
    "exchanges",
    "queues",
    "bindings",
)  # of which there may be many; bindings come after what they bind
PIECE_OBJECTS_MAX = 2000
OneVhost = Annotated[str, typer.Option("--vhost", "-p", help="Of this virtual host alone.")]


class Broker(StrEnum):
    """Whose definitions an export is to be."""

    SHARDMQ = "shardmq"
    RABBITMQ = "rabbitmq"


# RabbitMQ's names of the hashes that it reads, by the names that users may have here.
RABBITMQ_HASHES = {
    **{
        f"rabbit_password_hashing_{name}": f"rabbit_password_hashing_{name}"
        for name in ("sha256", "sha512", "md5")
    },
    **{name.upper(): f"rabbit_password_hashing_{name}" for name in ("sha256", "sha512", "md5")},
}


def export_definitions(
    api: Api,
    file: Annotated[str, typer.Argument(metavar="FILE", help="- is standard output.")],
    vhost: OneVhost = "",
    reader: Annotated[
        Broker,
        typer.Option(
            "--for", help="Who reads it; rabbitmq: without the password hashes it cannot read."
        ),
    ] = Broker.SHARDMQ,
) -> None:
    """Write vhosts, users, permissions, policies, parameters, exchanges, queues and bindings to a file."""
    path = ["definitions", vhost] if vhost else ["definitions"]
    found = api.get(*path, thing=f"vhost '{vhost}'")
    if reader is Broker.RABBITMQ:
        for name in leave_out_hashes(found):
            print(
                f"user '{name}' is exported without a password: RabbitMQ cannot read its hash; give it a new one there",
                file=sys.stderr,
            )
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if file == STREAM:
        sys.stdout.write(text)
        return
    try:
        # Password hashes are in it.
        with open(
            os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as out:
            out.write(text)
    except OSError as error:
        fail(f"{file}: {error.strerror}")


def leave_out_hashes(document: dict[str, Any]) -> list[str]:
    """Take hashes that RabbitMQ cannot read out of the users; their names.

    Such a user is imported by RabbitMQ as one whom no password lets in, until it is given a new one.
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
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="- or none is standard input.")
    ] = STREAM,
    vhost: OneVhost = "",
) -> None:
    """Add what a file of definitions holds; what is there already stays."""
    try:
        text = sys.stdin.read() if file == STREAM else Path(file).read_text(encoding="utf-8")
        document = json.loads(text)
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    except ValueError as error:
        fail(f"{file}: not JSON: {error}", DATA)
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
        print(f"warning: {warning}", file=sys.stderr)


offline = typer.Typer(
    no_args_is_help=True, help="Definitions of a stopped broker, from its data directory."
)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The data directory.")]


@offline.command("export")
def export_offline(
    directory: Directory,
    file: Annotated[str, typer.Argument(metavar="FILE", help="None: standard output.")] = "",
) -> None:
    """Write what exists as RabbitMQ's JSON. Changes nothing."""
    _offline("export", directory, *([file] if file else []))


@offline.command("import")
def import_offline(
    directory: Directory, file: Annotated[Path, typer.Argument(metavar="FILE")]
) -> None:
    """Add what a file of definitions holds, for the next start; what is there already stays."""
    _offline("import", directory, str(file))


def _offline(verb: str, directory: Path, *others: str) -> None:
    """By the controller's own code, in a process of its own, while no broker can start."""
    if not directory.is_dir():
        fail(f"{directory}: not a directory", CONFIG)
    locked = DataDirectory(directory)
    try:
        locked.open()
    except ConfigError as error:
        fail(str(error), CONFIG)
    try:
        command = module_command(
            "shardmq.broker.controller.stored.offline", verb, str(directory), *others
        )
        status = subprocess.run(command, env=module_environment(), check=False).returncode
    finally:
        locked.close()
    raise typer.Exit(status)


def pieces(document: Any) -> list[Any]:
    """A large document as several, in the order that each needs: a call has a time and a size, and there is news
    between them."""
    if (
        not isinstance(document, dict)
        or sum(_count(document, kind) for kind in MANY) <= PIECE_OBJECTS_MAX
    ):
        return [document]
    found: list[Any] = [{key: value for key, value in document.items() if key not in MANY}]
    for kind in MANY:
        rows = document.get(kind) or []
        found += [
            {kind: rows[at : at + PIECE_OBJECTS_MAX]}
            for at in range(0, len(rows), PIECE_OBJECTS_MAX)
        ]
    return found


def _count(document: dict[str, Any], kind: str) -> int:
    rows = document.get(kind)
    return len(rows) if isinstance(rows, list) else 0
