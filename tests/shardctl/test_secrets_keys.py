"""`shardctl generate_secrets_key` makes files that a broker takes, and never loses a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmq.broker.controller.stored.key_ring import KeyRing, keys_in
from shardmq.supervisor.cli.app import app


def made(*words: object, status: int = 0) -> str:
    done: Any = CliRunner().invoke(app, ["generate_secrets_key", *map(str, words)])
    assert done.exit_code == status, done.output
    return str(done.output)


def test_a_key_is_printed_or_written_for_the_owner_alone(tmp_path: Path) -> None:
    assert KeyRing([made().strip()]).encrypts
    assert made() != made()
    file = tmp_path / "keys"
    assert made(file) == ""
    assert len(keys_in(file)) == 1
    assert file.stat().st_mode & 0o777 == 0o600


def test_rotation_puts_a_key_before_those_that_are_there(tmp_path: Path) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    made(file)
    first = keys_in(file)
    file.write_text(f"# of May\n{first[0]}\n")
    file.chmod(0o640)
    link.symlink_to(file)
    made("--rotate", link)
    keys = keys_in(file)
    assert keys[1:] == first and keys[0] != first[0]
    assert "# of May" in file.read_text() and link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


def test_what_would_lose_a_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    made(file)
    before = file.read_bytes()
    assert "--rotate keeps the keys" in made(file, status=2)
    assert file.read_bytes() == before
    assert "No such file" in made("--rotate", tmp_path / "none", status=2)
    assert "needs the FILE" in made("--rotate", status=64)


@pytest.mark.parametrize("words", [[], ["--rotate"]])
def test_a_directory_that_is_not_there_is_named(tmp_path: Path, words: list[str]) -> None:
    assert f"{tmp_path}/none/keys" in made(*words, tmp_path / "none" / "keys", status=2)
