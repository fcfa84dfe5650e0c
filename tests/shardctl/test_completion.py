"""shardctl completes commands, names and columns in bash, zsh and fish, and loads little for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardmq.broker.model.arguments import QUEUE_TYPES
from shardmq.broker.routing.types import FEDERATION_UPSTREAM, TYPES
from shardmq.supervisor.cli import names as offered_names
from shardmq.supervisor.cli.app import app
from tests.support.brokers import Api
from tests.support.real_broker import SOURCE, RealBroker

Complete = Callable[..., list[str]]

# These take long to load, and no completion needs them.
HEAVY = {"rich", "pydantic", "asyncio", "pamqp", "msgspec", "urllib.request", "logging", "tomllib"}


def completed(words: str, environment: dict[str, str]) -> list[str]:
    env = {
        "_SHARDCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"shardctl {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    found = CliRunner().invoke(app, [], env=env | environment, prog_name="shardctl")
    assert found.exit_code == 0 and found.stderr == "", found.output
    return found.stdout.split()


def program(directory: Path) -> Path:
    """Write the program that pip makes, whose name a completion looks at."""
    written = directory / "shardctl"
    written.write_text("from shardmq.supervisor.cli.__main__ import main\nmain()\n")
    return written


@pytest.fixture
def complete(broker: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return lambda words: completed(words, {"SHARDMQ_DATA_DIR": str(broker.data_dir)})


@pytest.fixture
def names(api: Api, name: str) -> str:
    """Return what the names of a queue, stream, exchange, vhost and user begin with."""
    stream = {"durable": True, "arguments": {"x-queue-type": "stream"}}
    api(f"/api/queues/%2F/{name}-q", method="PUT", body={})
    api(f"/api/queues/%2F/{name}-s", method="PUT", body=stream)
    api(f"/api/exchanges/%2F/{name}-x", method="PUT", body={"type": "fanout"})
    api(f"/api/vhosts/{name}-v", method="PUT", body={})
    api(f"/api/queues/{name}-v/{name}-other", method="PUT", body={})
    api(f"/api/users/{name}-u", method="PUT", body={"password": "p", "tags": ""})
    return name


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("get {}", ["{}-q", "{}-s"]),
        ("purge_queue {}", ["{}-q", "{}-s"]),
        ("move_messages {}-q {}", ["{}-q", "{}-s"]),
        ("tail {}", ["{}-s"]),
        ("publish {}", ["{}-q", "{}-s"]),
        ("publish --exchange {}", ["{}-x"]),
        ("bind {}", ["{}-x"]),
        ("delete_exchange {}", ["{}-x"]),
        ("delete_user {}", ["{}-u"]),
        ("delete_vhost {}", ["{}-v"]),
        ("list_queues -p {}", ["{}-v"]),
        ("get -p {}-v {}", ["{}-other"]),
        ("-p {}-v get {}", ["{}-other"]),
        ("shards status {}", ["{}-x"]),
        ("get no-such-{}", []),
    ],
)
def test_names_of_the_broker_are_offered(
    complete: Complete, names: str, words: str, offered: list[str]
) -> None:
    assert complete(words.replace("{}", names)) == [one.replace("{}", names) for one in offered]


def test_commands_options_and_columns_are_offered(complete: Complete) -> None:
    assert complete("list_exch") == ["list_exchanges"]
    assert complete("diagnostics check_a") == ["check_alarms"]
    assert complete("get --js") == ["--json"]
    assert complete("list_queues name messages_r") == ["messages_ready"]
    assert "join_cluster" not in complete("")


def test_types_are_offered_and_are_those_of_the_broker(tmp_path: Path) -> None:
    nowhere = {"SHARDMQ_DATA_DIR": str(tmp_path)}
    assert completed("create_queue q --queue-type q", nowhere) == ["quorum"]
    assert completed("add_vhost v --default-queue-type c", nowhere) == ["classic"]
    assert completed("create_exchange fa", nowhere) == ["fanout"]
    # Exchanges of the type that is left out are made by links of federation.
    assert {*offered_names.EXCHANGE_TYPES} == {*TYPES} - {FEDERATION_UPSTREAM}
    assert {*offered_names.QUEUE_TYPES} == QUEUE_TYPES


def test_contexts_are_offered(complete: Complete) -> None:
    CliRunner().invoke(app, ["context", "add", "prod", "--url", "http://127.0.0.1:9"])
    assert complete("-n pr") == ["prod"]
    assert complete("get -n ") == ["prod"]
    assert complete("context use p") == ["prod"]
    assert complete("-n prod get ") == []  # nobody answers there


def test_nothing_is_offered_and_nothing_is_said_without_a_broker(tmp_path: Path) -> None:
    assert completed("get ", {"SHARDMQ_DATA_DIR": str(tmp_path)}) == []
    assert completed("get --user bob ", {"SHARDMQ_URL": "http://127.0.0.1:9"}) == []


@pytest.mark.parametrize(
    ("shell", "shown"),
    [("zsh", "_arguments '*: :((\"list_exchanges\"))'\n"), ("fish", "list_exchanges\n")],
)
def test_zsh_and_fish_ask_in_their_way(shell: str, shown: str) -> None:
    env = {
        "_SHARDCTL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "shardctl list_exch",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert CliRunner().invoke(app, [], env=env, prog_name="shardctl").stdout == shown


@pytest.mark.parametrize("words", ["list_q", "get ", "list_queues na", "publish --exchange "])
def test_a_completion_loads_nothing_heavy(broker: RealBroker, tmp_path: Path, words: str) -> None:
    env = {
        "PYTHONPATH": str(SOURCE),
        "SHARDMQ_DATA_DIR": str(broker.data_dir),
        "_SHARDCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"shardctl {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    command = [sys.executable, "-X", "importtime", str(program(tmp_path))]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "shardmq.supervisor.cli.app" in loaded
    assert HEAVY & loaded == set()


def test_a_completion_ends_with_all_it_offers(tmp_path: Path) -> None:
    """Read as a shell does, from a pipe, what a process offers that ends in haste."""
    command = [sys.executable, str(program(tmp_path))]
    env = {
        "PYTHONPATH": str(SOURCE),
        "SHARDMQ_DATA_DIR": str(tmp_path),
        "_SHARDCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": "shardctl ",
        "COMP_CWORD": "1",
    }
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert {"start", "list_queues", "cluster"} < {*ended.stdout.split()}
    assert ended.stderr == ""
