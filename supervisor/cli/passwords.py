"""Passwords from a file, a pipe or a prompt, so that none stands in a list of processes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from shardmq.supervisor.cli.api import CONFIG, USAGE, fail


def password_in(file: Path | None) -> str:
    """Return the first line of a file, or of standard input for None, without its end.

    An empty line ends the command.
    """
    try:
        if file is None:
            line = sys.stdin.readline()
        else:
            with file.open(encoding="utf-8") as lines:
                line = lines.readline()
    except OSError as error:
        fail(f"{file}: {error.strerror}", CONFIG)
    except UnicodeDecodeError:
        fail(f"{file or 'standard input'}: not UTF-8", CONFIG)
    password = line.rstrip("\r\n")
    if not password:
        fail(f"no password in {file or 'standard input'}", USAGE)
    return password


def given_or_asked(given: str | None, confirms: bool = False) -> str:
    """Return a password from the command line, or else from a prompt or a pipe.

    Args:
        given: The argument, or None if there is none.
        confirms: Whether a prompt asks twice, for a password that is new.
    """
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return password_in(None)
    asked: str = typer.prompt("Password", hide_input=True, confirmation_prompt=confirms, err=True)
    return asked


def for_login(user: str, given: str | None, file: Path | None) -> str | None:
    """Return the password of the user that a command names, or None if nothing says it.

    A terminal is asked. A pipe is not read: it may be the body of a message.
    """
    if given is not None and file is not None:
        fail("--password or --password-file, not both", USAGE)
    if file is not None:
        return password_in(file)
    if given is None and user and sys.stdin.isatty():
        return given_or_asked(None)
    return given
