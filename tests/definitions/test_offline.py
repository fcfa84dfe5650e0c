"""Definitions go out of and into the data directory of a stopped broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.support.real_broker import RealBroker

ROOT = Path(__file__).resolve().parents[2]


def definitions(*words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardmq.supervisor.cli", "definitions", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def named(document: dict[str, Any], kind: str) -> set[str]:
    return {row["name"] for row in document[kind]}


@pytest.mark.broker
@pytest.mark.row("H10", "J14")
def test_definitions_go_from_one_stopped_broker_into_another(tmp_path: Path) -> None:
    old = RealBroker(tmp_path / "old", shards=2)
    try:
        with pika.BlockingConnection(pika.URLParameters(old.url)) as connection:
            channel = connection.channel()
            channel.exchange_declare("orders", "topic", durable=True)
            channel.queue_declare("lasting", durable=True, arguments={"x-max-length": 7})
            channel.queue_declare("passing")
            channel.queue_bind("lasting", "orders", "a.#")
        refused = definitions("export", tmp_path / "old", status=2)
        assert "in use by the broker" in refused.stderr
        old.stop()
        before = {
            path: path.read_bytes() for path in (tmp_path / "old").glob("[!.]*.*") if path.is_file()
        }
        definitions("export", tmp_path / "old", tmp_path / "all.json")
        assert before == {path: path.read_bytes() for path in before}
    finally:
        old.clean_up()
    document = json.loads((tmp_path / "all.json").read_text())
    assert (tmp_path / "all.json").stat().st_mode & 0o077 == 0
    assert named(document, "queues") == {"lasting"}  # the other one is gone with its broker
    assert named(document, "exchanges") == {"orders"}
    assert [row["routing_key"] for row in document["bindings"]] == ["a.#"]
    assert named(document, "users") == {"guest"}

    (tmp_path / "new").mkdir()
    definitions("import", tmp_path / "new", tmp_path / "all.json")
    again = json.loads(definitions("export", tmp_path / "new").stdout)
    assert {
        key: again[key]
        for key in ("queues", "exchanges", "bindings", "users", "permissions", "vhosts")
    } == {
        key: document[key]
        for key in ("queues", "exchanges", "bindings", "users", "permissions", "vhosts")
    }
    new = RealBroker(tmp_path / "new", shards=2)
    try:
        with pika.BlockingConnection(pika.URLParameters(new.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish("orders", "a.b", b"here", mandatory=True)
            channel.queue_declare("lasting", durable=True, arguments={"x-max-length": 7})
        new.stop()
    finally:
        new.clean_up()


def test_what_cannot_be_read_is_status_2_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "no definitions there" in definitions("export", tmp_path / "data", status=2).stderr
    assert "not a directory" in definitions("export", tmp_path / "none", status=2).stderr
    (tmp_path / "bad.json").write_text('{"queues": [{"name": 3}]}')
    said = definitions("import", tmp_path / "data", tmp_path / "bad.json", status=2).stderr
    assert "bad.json" in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
