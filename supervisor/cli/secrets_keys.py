"""The keys in the file of `secrets.key_file`, by which a broker encrypts passwords in URIs.

A key is 32 random bytes as Fernet takes them, in URL-safe base64. Each line of the file is a key,
the first one encrypts.
"""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import Annotated, Final

import typer

from shardmq.supervisor.cli.api import CONFIG, USAGE, fail

KEY_BYTES: Final = 32
OWNER_ONLY: Final = 0o600


def generate_secrets_key(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A new file. Without one the key is printed."),
    ] = None,
    rotate: Annotated[
        bool, typer.Option(help="Put the new key before those that FILE has.")
    ] = False,
) -> None:
    """Make a key for the setting secrets.key_file.

    The broker encrypts the URIs of shovels and upstreams in its data directory by the first key of
    the file, and reads what any of the keys has encrypted. Only the owner may read a new file.
    """
    key = base64.urlsafe_b64encode(os.urandom(KEY_BYTES)) + b"\n"
    if file is None:
        if rotate:
            fail("--rotate needs the FILE with the keys", USAGE)
        typer.echo(key.decode(), nl=False)
        return
    try:
        if rotate:
            _put_first(file, key)
        else:
            _create(file, key)
    except FileExistsError as error:
        hint = "" if rotate else ": --rotate keeps the keys in it"
        fail(f"{error.filename} is there already{hint}", CONFIG)
    except OSError as error:
        fail(f"{error.filename or file}: {error.strerror}", CONFIG)


def _create(file: Path, data: bytes, like: os.stat_result | None = None) -> None:
    """Write a file that was not there, with the owner and the mode of another one if given."""
    handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY)
    try:
        with open(handle, "wb") as out:
            if like is not None:
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(handle, like.st_uid, like.st_gid)
                os.fchmod(handle, stat.S_IMODE(like.st_mode))
            out.write(data)
            out.flush()
            os.fsync(handle)
    except OSError:
        file.unlink()
        raise


def _put_first(file: Path, key: bytes) -> None:
    """Replace a file by one that begins with the key.

    After a crash either the old file or the new one is there.
    """
    file = file.resolve()
    fresh = file.with_name(f"{file.name}.new")
    old = file.read_bytes()
    _create(fresh, key + old, file.stat())
    try:
        fresh.rename(file)
    except OSError:
        fresh.unlink()
        raise
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
