"""shardctl: what it asks of the broker, how it shows the answer, and its exit statuses."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from shardmq.supervisor.supervisor import this_process
from tests.support.proving import proving

ROOT = Path(__file__).parents[2]

ANSWERS: dict[str, Any] = {
    "/api/queues/%2F": [{"name": "q [red]1", "messages": 3, "durable": True}],
    "/api/bindings/a%2Fb": [
        {"source": "x", "destination": "q", "destination_type": "queue", "routing_key": "k"}
    ],
    "/api/processes": [
        {
            "name": "shard-0",
            "kind": "shard",
            "index": 0,
            "pid": 77,
            "state": "ready",
            "restarts": 0,
        },
        {
            "name": "bridges",
            "kind": "bridges",
            "index": 0,
            "pid": 0,
            "state": "idle",
            "restarts": 3,
        },
    ],
    "/api/vhosts/old": {"name": "old", "description": "d", "tags": ["t"]},
    "/api/users/bob": {
        "name": "bob",
        "tags": ["monitoring"],
        "password_hash": "AAAA",
        "hashing_algorithm": "SHA256",
    },
    "/api/shards": [{"shard": 0, "queues": 5}],
    "/api/overview": {
        "product_version": "1.2",
        "listeners": [],
        "object_totals": {"connections": 1, "queues": 2},
    },
    "/api/nodes": [{"name": "n"}],
    "/api/users": [{"name": "bob", "tags": ["monitoring"]}],
    "/api/vhosts": [{"name": "/", "description": "d", "tags": []}],
    "/api/vhosts/v/permissions": [
        {"user": "u", "vhost": "v", "configure": "c", "write": "w", "read": "r"}
    ],
    "/api/vhosts/v/topic-permissions": [
        {"user": "u", "vhost": "v", "exchange": "e", "write": "w", "read": "r"}
    ],
    "/api/users/bob/permissions": [
        {"user": "bob", "vhost": "v", "configure": "c", "write": "w", "read": "r"}
    ],
    "/api/users/bob/topic-permissions": [
        {"user": "bob", "vhost": "v", "exchange": "e", "write": "w", "read": "r"}
    ],
    "/api/vhost-limits/v": [{"vhost": "v", "value": {"max-queues": 3}}],
    "/api/vhost-limits": [{"vhost": "v", "value": {"max-queues": 3}}],
    "/api/user-limits/bob": [{"user": "bob", "value": {"max-channels": 3, "max-connections": 4}}],
    "/api/user-limits": [{"user": "bob", "value": {"max-channels": 3}}],
    "/api/policies/v": [
        {
            "vhost": "v",
            "name": "p",
            "pattern": "^a",
            "apply-to": "all",
            "definition": {"max-length": 3},
            "priority": 1,
        }
    ],
    "/api/operator-policies/v": [],
    "/api/parameters": [
        {"vhost": "v", "component": "stream", "name": "routing-key", "value": "4321"},
        {"vhost": "/", "component": "stream", "name": "other", "value": 1},
    ],
    "/api/global-parameters": [{"name": "g", "value": [1]}],
    "/api/definitions": {"queues": [{"name": "ü"}]},
    "/api/definitions/v": {"queues": []},
}


class FakeApi(ThreadingHTTPServer):
    asked: list[tuple[str, str, Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, body))
        login = base64.b64decode(self.headers["Authorization"].partition(" ")[2]).decode()
        status: int
        answer: Any
        if login != "guest:guest":
            status, answer = 401, {"error": "not_authorised", "reason": "Not management user"}
        elif (self.command == "GET" and self.path not in ANSWERS) or "/nope" in self.path:
            status, answer = 404, {"error": "Object Not Found", "reason": "no such vhost"}
        else:
            status, answer = 200, ANSWERS.get(self.path)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def api() -> Iterator[FakeApi]:
    server = FakeApi(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_queues_are_shown_as_a_table_with_their_names_to_the_letter(api: FakeApi) -> None:
    status, output = run("list_queues", "--url", api.url)
    assert status == 0
    assert [line.split() for line in output.splitlines()] == [
        ["name", "messages"],
        ["q", "[red]1", "3"],
    ]


def test_columns_can_be_chosen_and_had_as_json(api: FakeApi) -> None:
    status, output = run("list_queues", "name", "durable", "--url", api.url, "--formatter", "json")
    assert status == 0 and json.loads(output) == [{"name": "q [red]1", "durable": True}]


def test_columns_go_by_rabbitmqctls_names_and_a_vhost_may_hold_a_slash(api: FakeApi) -> None:
    status, output = run(
        "list_bindings", "source_name", "destination_kind", "-p", "a/b", "--url", api.url
    )
    assert status == 0 and output.splitlines()[1].split() == ["x", "queue"]


@pytest.mark.parametrize(
    "command",
    [("list_queues", "name"), ("cluster", "status"), ("list_queues", "--", "name")],
    ids=["command", "group", "before the double dash"],
)
def test_before_a_command_a_flag_says_which_broker_is_asked_and_wins_over_the_environment(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SHARDMQ_URL", "http://127.0.0.1:1")
    assert run(*command)[0] == 69
    assert run("--url", api.url, *command)[0] == 0


def test_status_shows_processes_pids_shards_and_their_queues(api: FakeApi) -> None:
    status, output = run("status", "--url", api.url)
    assert status == 0
    assert all(word in output for word in ("shard-0", "77", "ready", "queues", "5"))
    (idle,) = (line for line in output.splitlines() if "bridges" in line)
    assert idle.split() == ["bridges", "idle", "3"], "a process that does not run has no pid"
    status, output = run("status", "--url", api.url, "--formatter", "json")
    assert json.loads(output)["shards"] == ANSWERS["/api/shards"]


@pytest.mark.parametrize(
    ("command", "asks"),
    [
        (["add_vhost", "a/b"], ("PUT", "/api/vhosts/a%2Fb", {})),
        (["delete_vhost", "v"], ("DELETE", "/api/vhosts/v", None)),
        (
            ["add_vhost", "v", "--tags", "a,b", "--default-queue-type", "quorum"],
            ("PUT", "/api/vhosts/v", {"tags": "a,b", "default_queue_type": "quorum"}),
        ),
        (
            ["add_vhost", "v", "--replicas", "3", "--min-in-sync", "0"],
            ("PUT", "/api/vhosts/v", {"replicas": 3, "min_in_sync": 0}),
        ),
        (
            ["update_vhost_metadata", "old", "--replicas", "2"],
            ("PUT", "/api/vhosts/old", {"description": "d", "tags": ["t"], "replicas": 2}),
        ),
        (
            ["update_vhost_metadata", "old", "--default-queue-type", "quorum"],
            (
                "PUT",
                "/api/vhosts/old",
                {"description": "d", "tags": ["t"], "default_queue_type": "quorum"},
            ),
        ),
        (
            ["trace_on", "-p", "old"],
            ("PUT", "/api/vhosts/old", {"description": "d", "tags": ["t"], "tracing": True}),
        ),
        (
            ["trace_off", "-p", "old"],
            ("PUT", "/api/vhosts/old", {"description": "d", "tags": ["t"], "tracing": False}),
        ),
        (
            ["enable_vhost_deletion_protection", "old"],
            ("POST", "/api/vhosts/old/deletion/protection", {}),
        ),
        (
            ["disable_vhost_deletion_protection", "old"],
            ("DELETE", "/api/vhosts/old/deletion/protection", None),
        ),
        (["add_user", "u", "secret"], ("PUT", "/api/users/u", {"password": "secret", "tags": ""})),
        (
            ["change_password", "bob", "new"],
            ("PUT", "/api/users/bob", {"password": "new", "tags": ["monitoring"]}),
        ),
        (["delete_user", "u"], ("DELETE", "/api/users/u", None)),
        (
            ["set_permissions", "-p", "old", "bob", "c.*", "w", "r"],
            ("PUT", "/api/permissions/old/bob", {"configure": "c.*", "write": "w", "read": "r"}),
        ),
    ],
)
def test_changes_are_asked_of_the_http_api(
    api: FakeApi, command: list[str], asks: tuple[str, str, Any]
) -> None:
    assert run(*command, "--url", api.url) == (0, "")
    assert api.asked[-1] == asks


def test_a_refusal_is_status_70_with_the_brokers_reason(api: FakeApi) -> None:
    status, output = run("list_queues", "-p", "nowhere", "--url", api.url)
    assert status == 65 and "vhost 'nowhere' does not exist" in output
    status, output = run("list_queues", "--url", api.url, "--user", "mallory")
    assert status == 70 and "user mallory is not accepted: Not management user" in output


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["add_user", "bob", "secret"], 70, "user 'bob' exists already"),
        (["add_vhost", "old"], 0, "vhost 'old' exists already"),
        (["change_password", "nope", "secret"], 67, "user 'nope' does not exist"),
        (["delete_user", "nope"], 67, "user 'nope' does not exist"),
        (["set_permissions", "nope", ".*", ".*", ".*"], 67, "user 'nope' does not exist"),
        (
            ["set_permissions", "-p", "nowhere", "bob", ".*", ".*", ".*"],
            65,
            "vhost 'nowhere' does not exist",
        ),
        (
            ["set_topic_permissions", "nope", "amq.topic", ".*", ".*"],
            67,
            "user 'nope' does not exist",
        ),
        (["set_user_limits", "nope", '{"max-channels": 1}'], 67, "user 'nope' does not exist"),
        (
            ["set_vhost_limits", "-p", "nowhere", '{"max-queues": 1}'],
            65,
            "vhost 'nowhere' does not exist",
        ),
        (["delete_vhost", "nope"], 65, "vhost 'nope' does not exist"),
        (["update_vhost_metadata", "nope"], 65, "vhost 'nope' does not exist"),
        (["disable_vhost_deletion_protection", "nope"], 65, "vhost 'nope' does not exist"),
    ],
)
def test_what_is_there_is_not_made_again_and_what_is_not_is_named(
    api: FakeApi, command: list[str], status: int, says: str
) -> None:
    api.asked.clear()
    ended, output = run(*command, "--url", api.url)
    assert ended == status and says in output
    assert not [path for method, path, _ in api.asked if method == "PUT"]


def test_an_unknown_column_is_status_64_with_those_known(api: FakeApi) -> None:
    status, output = run("list_queues", "name", "bogus", "--url", api.url)
    assert status == 64 and "unknown column bogus" in output and "messages_ready" in output


def test_the_version_is_told() -> None:
    status, output = run("--version")
    assert status == 0 and output.startswith("shardctl ") and output.split()[1][0].isdigit()


def test_no_broker_is_status_69() -> None:
    with socket.socket() as closed:  # bound and not listening: nobody else can be there
        closed.bind(("127.0.0.1", 0))
        status, output = run("status", "--url", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert status == 69 and "no broker reachable" in output


def test_the_broker_on_a_data_directory_is_found_by_its_pointer(
    api: FakeApi, tmp_path: Path
) -> None:
    pointer = this_process() | {
        "runtime_dir": "",
        "http": api.url.replace("http://127.0.0.1", "0.0.0.0"),
    }
    (tmp_path / "broker.json").write_text(json.dumps(pointer))
    assert run("list_queues", "--data-dir", str(tmp_path))[0] == 0


def test_a_process_that_got_a_dead_brokers_pid_is_not_taken_for_it(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        pointer = this_process() | {"pid": stranger.pid, "runtime_dir": "", "http": "127.0.0.1:1"}
        (tmp_path / "broker.json").write_text(json.dumps(pointer))
        status, output = run("stop", "--data-dir", str(tmp_path))
        assert status == 69 and f"no broker runs on {tmp_path}" in output
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_broker_elsewhere_is_not_asked_when_none_runs_on_the_data_directory(
    tmp_path: Path,
) -> None:
    status, output = run("status", "--data-dir", str(tmp_path))
    assert status == 69 and f"no broker runs on {tmp_path}" in output


def test_stopping_where_nothing_runs_is_status_69(tmp_path: Path) -> None:
    assert run("stop", "--data-dir", str(tmp_path))[0] == 69


def test_an_unknown_format_or_command_is_status_64(api: FakeApi) -> None:
    assert run("status", "--url", api.url, "--formatter", "xml")[0] == 64
    assert run("fly")[0] == 64


def test_a_start_with_a_flag_that_is_wrong_is_status_2(tmp_path: Path) -> None:
    """As one with a wrong value is, so that a unit need not know where it was refused."""
    status, output = run("start", "--data-dir", str(tmp_path / "data"), "--bogus")
    assert status == 2 and "--bogus" in output
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--shards", "none"],
            "shards.count: expected auto or a whole number from 1 to 64, got 'none' (--shards)",
        ),
        (
            ["--shards", "0"],
            "shards.count: expected auto or a whole number from 1 to 64, got 0 (--shards)",
        ),
        (
            ["--durability", "hope"],
            "shards.durability: expected fsync or page-cache, got 'hope' (--durability)",
        ),
        (
            ["--amqp-port", "abc"],
            "listen.amqp_port: expected a whole number from 0 to 65535, got 'abc' (--amqp-port)",
        ),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml: No such file or directory"),
    ],
)
def test_a_start_with_wrong_settings_is_one_line_and_status_2(
    tmp_path: Path, flags: list[str], says: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "shardmq.supervisor.cli",
        "start",
        "--data-dir",
        str(tmp_path / "data"),
        *flags,
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"shardmq: {says}\n"
    assert not (tmp_path / "data").exists()


POLICY = {"pattern": "^a", "definition": {"max-length": 3}, "priority": 2, "apply-to": "queues"}


@pytest.mark.parametrize(
    ("command", "asks"),
    [
        proving(row, command[0], command, asks)
        for row, command, asks in (
            ("H1", ["set_user_tags", "bob", "administrator"], ("PUT", "/api/users/bob")),
            ("H1", ["clear_password", "bob"], ("PUT", "/api/users/bob")),
            ("H2", ["clear_permissions", "-p", "v", "u"], ("DELETE", "/api/permissions/v/u")),
            (
                "H2",
                ["set_topic_permissions", "-p", "old", "bob", "e", "w", "r"],
                ("PUT", "/api/topic-permissions/old/bob"),
            ),
            (
                "H2",
                ["clear_topic_permissions", "-p", "v", "u"],
                ("DELETE", "/api/topic-permissions/v/u"),
            ),
            (
                "H2",
                ["clear_topic_permissions", "-p", "v", "u", "e"],
                ("DELETE", "/api/topic-permissions/v/u?exchange=e"),
            ),
            (
                "H3",
                ["set_vhost_limits", "-p", "old", '{"max-queues": 3}'],
                ("PUT", "/api/vhost-limits/old/max-queues"),
            ),
            ("H3", ["clear_vhost_limits", "-p", "v"], ("DELETE", "/api/vhost-limits/v/max-queues")),
            (
                "H4",
                ["set_user_limits", "bob", '{"max-channels": 3}'],
                ("PUT", "/api/user-limits/bob/max-channels"),
            ),
            (
                "H4",
                ["clear_user_limits", "bob", "all"],
                ("DELETE", "/api/user-limits/bob/max-connections"),
            ),
            (
                "H4",
                ["clear_user_limits", "bob", "max-channels"],
                ("DELETE", "/api/user-limits/bob/max-channels"),
            ),
            (
                "H5",
                ["delete_queue", "-p", "v", "q", "--if-empty"],
                ("DELETE", "/api/queues/v/q?if-empty=true"),
            ),
            ("H5", ["purge_queue", "-p", "v", "q"], ("DELETE", "/api/queues/v/q/contents")),
            ("C1.19", ["pause_queue", "-p", "v", "q"], ("PUT", "/api/queues/v/q/pause")),
            ("K13", ["call_off_move", "-p", "v", "q"], ("DELETE", "/api/queues/v/q/relocation")),
            (
                "K13",
                ["cluster", "drain", "n", "--cancel"],
                ("DELETE", "/api/nodes/n/drain"),
            ),
            ("C1.19", ["resume_queue", "-p", "v", "q"], ("PUT", "/api/queues/v/q/resume")),
            (
                "H11",
                ["delete_shovel", "-p", "v", "s/1"],
                ("DELETE", "/api/shovels/vhost/v/s%2F1"),
            ),
            ("H11", ["restart_shovel", "s"], ("DELETE", "/api/shovels/vhost/%2F/s/restart")),
            ("H11", ["pause_shovel", "s"], ("PUT", "/api/shovels/%2F/s/pause")),
            ("H11", ["resume_shovel", "s"], ("PUT", "/api/shovels/%2F/s/resume")),
            ("H8", ["clear_policy", "-p", "v", "p"], ("DELETE", "/api/policies/v/p")),
            (
                "H8",
                ["clear_operator_policy", "-p", "v", "p"],
                ("DELETE", "/api/operator-policies/v/p"),
            ),
            (
                "H9",
                ["clear_parameter", "-p", "v", "stream", "n"],
                ("DELETE", "/api/parameters/stream/v/n"),
            ),
            ("H9", ["clear_global_parameter", "g"], ("DELETE", "/api/global-parameters/g")),
        )
    ],
)
def test_commands_of_rabbitmqctl_ask_for_the_same(
    api: FakeApi, command: list[str], asks: tuple[str, str]
) -> None:
    api.asked.clear()
    assert run(*command, "--url", api.url) == (0, "")
    assert asks in [(method, path) for method, path, _ in api.asked]


def test_a_snapshot_has_the_path_that_the_user_sees(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(ANSWERS, "/api/snapshots", {"directory": "/there"})
    monkeypatch.chdir(tmp_path)
    for given in ("backup", "other/../backup", str(tmp_path / "backup")):
        api.asked.clear()
        code, output = run("snapshot", given, "--url", api.url)
        assert (code, output) == (0, "a snapshot is in /there\n")
        assert api.asked == [("POST", "/api/snapshots", {"directory": str(tmp_path / "backup")})]


@pytest.mark.row("H11")
def test_links_of_federation_are_listed_and_started_anew(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = {"vhost": "v", "id": "01ab", "node": "n@h", "queue": "q", "status": "error"}
    monkeypatch.setitem(ANSWERS, "/api/federation-links", [link])
    monkeypatch.setitem(ANSWERS, "/api/federation-links/state/down", [link | {"queue": "down"}])
    assert "q" in run("federation_status", "--url", api.url)[1]
    assert "down" in run("federation_status", "--only-down", "--url", api.url)[1]
    api.asked.clear()
    assert run("restart_federation_link", "01ab", "--url", api.url) == (0, "")
    path = "/api/federation-links/vhost/v/01ab/n%40h/restart"
    assert [asked[:2] for asked in api.asked][-1] == ("DELETE", path)
    code, output = run("restart_federation_link", "02ab", "--url", api.url)
    assert (code, output) == (65, "shardctl: there is no link of federation '02ab'\n")


@pytest.mark.row("K13")
def test_queues_change_their_nodes_by_command(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = {"vhost": "/", "name": "q", "from_node": "a", "from_shard": 0, "to_node": "b",
             "to_shard": 1}  # fmt: skip
    slow = {"vhost": "/", "name": "r", "why": "what is left does not get less"}
    drained = {"being_drained": True, "queues": 0, "left_behind": [], "held_up": []}
    stuck = {"vhost": "/", "name": "s", "why": "it is a shard queue"}
    for path, answer in {
        "/api/queues/%2F/q": {"name": "q"},
        "/api/cluster/rebalance": [moved],
        "/api/nodes/n/drain": drained,
        "/api/nodes/m/drain": drained | {"queues": 1, "left_behind": [stuck], "held_up": [slow]},
        "/api/nodes/n/forget": {"node": "n", "queues_lost": 1, "shards_lost": [4], "new_homes": {}},
        "/api/nodes/m/forget": {
            "node": "m",
            "queues_lost": 0,
            "shards_lost": [],
            "new_homes": {"3": "shardmq@n"},
        },
        "/api/shards/3/elect-unclean/n": {"shard": 3, "node": "n", "term": 9, "loss": "12 may go"},
        "/api/nodes": [
            {"name": "shardmq@n", "running": True, "uptime": 1, "shards": [2, 3]},
            {"name": "shardmq@m", "running": True, "uptime": 1, "shards": []},
        ],
        "/api/overview": {"node": "shardmq@n"},
    }.items():
        monkeypatch.setitem(ANSWERS, path, answer)
    for command, asked, status, said in (
        (["move_queue", "q", "2"], ("queues/%2F/q/relocation", {"shard": 2}), 0, ""),
        (["move_queue", "q", "b"], ("queues/%2F/q/relocation", {"node": "b"}), 0, ""),
        (["cluster", "rebalance", "--dry-run"], ("cluster/rebalance", {"dry_run": True}), 0, "a"),
        (["cluster", "drain", "n"], ("nodes/n/drain", {}), 0, "0 queues are left"),
        (
            ["cluster", "drain", "m"],
            ("nodes/m/drain", {}),
            1,
            "1 queue is left\nqueue 'r' in vhost '/': what is left does not get less\n"
            "queue 's' in vhost '/' stays: it is a",
        ),
        (
            ["cluster", "forget", "n", "--lose"],
            ("nodes/n/forget", {"lose": True}),
            0,
            "n is forgotten, 1 queue is lost\nlost shards: 4\n",
        ),
        (
            ["cluster", "forget", "m"],
            ("nodes/m/forget", {"lose": False}),
            0,
            "m is forgotten, 0 queues are lost\nshard 3 has its home on shardmq@n\n",
        ),
        (["cluster", "elect-unclean", "3", "n"], None, 1, "12 may go"),
        (
            ["cluster", "elect-unclean", "3", "n", "--lose"],
            ("shards/3/elect-unclean/n", {"lose": True}),
            0,
            "n leads shard 3 in term 9",
        ),
        (["cluster", "join", "n"], None, 0, "shardmq@n takes part, with the shards 2, 3"),
        (["cluster", "join"], None, 0, "shardmq@n takes part"),
        (["cluster", "join", "m"], None, 0, "shardmq@m takes part, and leads no shard yet"),
        (["cluster", "join", "x", "--within", "0"], None, 1, "does not take part"),
        (
            ["cluster", "join", "x", "--within", "0.1"],
            None,
            1,
            "for node 'x': the cluster of shardmq@n, shardmq@m has no such node yet",
        ),
        (["cluster", "drain", "nosuch"], None, 1, "node 'nosuch' does not exist"),
        (["move_queue", "nope", "n"], None, 1, "queue 'nope' in vhost '/' does not exist"),
        (["call_off_move", "nope"], None, 1, "queue 'nope' in vhost '/' does not exist"),
    ):
        api.asked.clear()
        code, output = run(*command, "--url", api.url)
        assert (bool(code), said in output) == (bool(status), True), (command, output)
        if "elect-unclean" in command and "--lose" not in command:
            assert [method for method, _, _ in api.asked] == ["GET"]
        if asked is not None:
            assert (f"/api/{asked[0]}", asked[1]) in [(path, body) for _, path, body in api.asked]


@pytest.mark.parametrize(
    ("command", "path", "body"),
    [
        proving(row, command[0], command, path, body)
        for row, command, path, body in (
            ("H8",
             ["set_policy", "-p", "v", "p", "^a", '{"max-length": 3}', "--priority", "2",
              "--apply-to", "queues"],
             "/api/policies/v/p", POLICY),
            ("H8",
             ["set_operator_policy", "--priority", "2", "--apply-to", "queues", "p", "^a",
              '{"max-length": 3}'],
             "/api/operator-policies/%2F/p", POLICY),
            ("H8", ["set_policy", "my_stream", "^shard\\.", '{"stream-definition": "my_stream"}'],
             "/api/policies/%2F/my_stream",
             {"pattern": "^shard\\.", "definition": {"stream-definition": "my_stream"},
              "priority": 0,
              "apply-to": "all"}),
            ("H9", ["set_parameter", "stream", "routing-key", '"4321"'],
             "/api/parameters/stream/%2F/routing-key",
             {"value": "4321"}),
            ("H9", ["set_parameter", "-p", "v", "stream-definition", "n", '{"shards-per-node": 2}'],
             "/api/parameters/stream-definition/v/n", {"value": {"shards-per-node": 2}}),
            ("H9", ["set_global_parameter", "g", "[1, 2]"], "/api/global-parameters/g",
             {"value": [1, 2]}),
        )
    ],
)  # fmt: skip
def test_policies_and_parameters_are_said_as_to_rabbitmqctl(
    api: FakeApi, command: list[str], path: str, body: Any
) -> None:
    api.asked.clear()
    assert run(*command, "--url", api.url) == (0, "")
    assert api.asked[-1] == ("PUT", path, body)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        proving(row, command[0], command, words)
        for row, command, words in (
            ("H1", ["list_users"], ["user", "tags", "bob", '["monitoring"]']),
            ("H2", ["list_permissions", "-p", "v"],
             ["user", "configure", "write", "read", "u", "c", "w", "r"]),
            ("H2", ["list_user_permissions", "bob"],
             ["vhost", "configure", "write", "read", "v", "c", "w", "r"]),
            ("H2", ["list_topic_permissions", "-p", "v"],
             ["user", "exchange", "write", "read", "u", "e", "w", "r"]),
            ("H2", ["list_user_topic_permissions", "bob"],
             ["vhost", "exchange", "write", "read", "v", "e", "w", "r"]),
            ("H3", ["list_vhosts"], ["name", "/"]),
            ("H3", ["list_vhosts", "name", "description", "tags"],
             ["name", "description", "tags", "/", "d"]),
            ("H6", ["list_bindings", "-p", "a/b", "-s"], ["x", "exchange", "q", "queue", "k"]),
            ("H3", ["list_vhost_limits", "-p", "v"],
             ["vhost", "limits", "v", '{"max-queues":', "3}"]),
            ("H3", ["list_vhost_limits", "--global"],
             ["vhost", "limits", "v", '{"max-queues":', "3}"]),
            ("H4", ["list_user_limits"], ["user", "limits", "bob", '{"max-channels":', "3}"]),
            ("H8", ["list_policies", "-p", "v"],
             ["vhost", "name", "pattern", "apply-to", "definition", "priority", "v", "p", "^a",
              "all",
              '{"max-length":', "3}", "1"]),
            ("H8", ["list_operator_policies", "-p", "v"],
             ["vhost", "name", "pattern", "apply-to", "definition", "priority"]),
            ("H9", ["list_parameters", "-p", "v"],
             ["component", "name", "value", "stream", "routing-key", "4321"]),
            ("H9", ["list_global_parameters"], ["name", "value", "g", "[1]"]),
        )
    ],
)  # fmt: skip
def test_lists_have_rabbitmqctls_columns(
    api: FakeApi, command: list[str], words: list[str]
) -> None:
    status, output = run(*command, "--url", api.url)
    assert (status, output.split()) == (0, words)


@pytest.mark.row("H10")
def test_definitions_go_to_a_file_only_its_owner_reads_and_back(
    api: FakeApi, tmp_path: Path
) -> None:
    file = tmp_path / "definitions.json"
    assert run("export_definitions", str(file), "--url", api.url) == (0, "")
    assert json.loads(file.read_text()) == ANSWERS["/api/definitions"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert run("import_definitions", str(file), "-p", "v", "--url", api.url) == (0, "")
    assert api.asked[-1] == ("POST", "/api/definitions/v", ANSWERS["/api/definitions"])
    status, output = run("export_definitions", "-", "-p", "v", "--url", api.url)
    assert status == 0 and json.loads(output) == {"queues": []}


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["set_policy", "p", "a", "{"], 64, "not JSON: {"),
        (["set_policy", "p", "a", "[]"], 64, "not a JSON object: []"),
        (["set_parameter", "stream", "routing-key", "abc"], 64, "not JSON: abc"),
        (["set_vhost_limits", "3"], 64, "not a JSON object: 3"),
        (["import_definitions", "/nonexistent"], 1, "/nonexistent: No such file or directory"),
        (["export_definitions", "/nonexistent/x"], 1, "/nonexistent/x: No such file or directory"),
        (["clear_policy", "nope"], 65, "policy 'nope' does not exist"),
    ],
)
def test_what_cannot_be_said_is_named(
    api: FakeApi, command: list[str], status: int, said: str
) -> None:
    found, output = run(*command, "--url", api.url)
    assert (found, output.startswith(f"shardctl: {said}")) == (status, True), output
