"""Test rabbitmqctl's further commands, probes, formats, and the socket without password."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardmq.broker.controller.management.app import warning_value
from shardmq.supervisor.cli import diagnostics
from shardmq.supervisor.cli.app import PANELS, app, load
from shardmq.supervisor.cli.definitions import PIECE_OBJECTS_MAX, pieces
from shardmq.supervisor.cli.node import size_bytes
from shardmq.supervisor.cli.top import Rates
from shardmq.supervisor.cli.unsupported_commands import UNSUPPORTED
from shardmq.supervisor.logs import LogFollower
from shardmq.supervisor.supervisor import this_process
from tests.support.proving import proving

NAME = "127.0.0.1:4000 -> 127.0.0.1:5672"
PATH_OF_NAME = "127.0.0.1%3A4000%20-%3E%20127.0.0.1%3A5672"
FAILED = {
    "status": "failed",
    "reason": "There are alarms in effect",
    "alarms": [{"shard": 1, "alarm": "low on disk"}],
}

ANSWERS: dict[str, Any] = {
    "/api/overview": {"product_version": "1.2", "cluster_name": "c",
                      "queue_totals": {"messages_ready": 7,
                      "messages_unacknowledged": 0}, "object_totals": dict.fromkeys(
                          ("connections", "channels", "consumers", "queues"), 1),
                          "message_stats": {"publish": 5},
                      "listeners": [{"protocol": "http", "ip_address": "127.0.0.1", "port": 1}]},
    "/api/nodes": [{"node": "n", "name": "n", "running": True, "alarms": [],
                    "log_files": ["/run/log-shard-0"]}],
    "/api/whoami": {"name": "guest"},
    "/api/processes": [{"name": "shard-0", "state": "ready", "rss_bytes": 3000000, "pid": 1,
                        "fd_used": 4}],
    "/api/shards": [{"shard": 0, "queues": 2, "cpu_seconds": 1.0}],
    "/api/queues": {"items": [{"vhost": "/", "name": "big", "messages_ready": 7}]},
    "/api/queues/v": [{"name": "a, b\tc", "messages": 3, "state": "running"},
                      {"name": "gone", "state": "down"},
                      {"name": "keyed-eu", "type": "stream"},
                      {"name": "stream: spread - n - 0", "type": "stream"}],
    "/api/vhosts": [{"name": "/"}, {"name": "v"}],
    "/api/users/bob": {"name": "bob", "tags": []},
    "/api/vhosts/%2F": {"name": "/"},
    "/api/vhosts/v": {"name": "v", "description": "old", "tags": ["a"]},
    "/api/connections": [{"name": NAME, "user": "bob", "vhost": "v", "peer_host": "127.0.0.1"},
                         {"name": "other", "user": "eve", "vhost": "/"}],
    f"/api/connections/{PATH_OF_NAME}": {"name": NAME},
    "/api/channels": [{"name": "c1", "user": "bob", "consumer_count": 1,
                       "messages_unacknowledged": 2}],
    "/api/consumers/v": [{"queue": {"name": "q"}, "channel_details": {"name": "c1"},
                          "consumer_tag": "t",
                          "ack_required": True, "prefetch_count": 5, "active": True,
                          "arguments": {}}],
    "/api/policies/v": [
        {"vhost": "v", "name": "low", "pattern": "^a", "apply-to": "all", "definition": {},
         "priority": 1},
        {"vhost": "v", "name": "high", "pattern": "^ab", "apply-to": "queues", "definition": {},
         "priority": 2},
        {"vhost": "v", "name": "not", "pattern": "^b", "apply-to": "all", "definition": {},
         "priority": 9},
        {"vhost": "v", "name": "exchanges", "pattern": ".", "apply-to": "exchanges",
         "definition": {}, "priority": 9},
    ],
    "/api/exchanges/v/e/shards": {
        "step": "settling", "to_settle": 30, "to_settle_at_first": 120, "unknown": 0,
        "deadline_ms": 500, "at_deadline": "dead-letter",
        "queues": [{"name": "e-0", "shard": 1, "state": "active", "bound": True}],
        "groups": [{"group": "slow", "changes": 2, "waits_for": ["e-0"]},
                   {"group": "late", "changes": 1, "waits_for": None}]},
    "/api/exchanges/%2F/still/shards": {"step": "none", "queues": [], "groups": []},
    "/api/exchanges/v/e/shards/plan": {"shards": 2, "new_shards": 3, "share_moving": 0.34,
                                       "to_settle": 7,
                                       "coming": ["e-2"], "going": []},
    "/api/health/checks/is-in-service": {"status": "ok"},
    "/api/health/checks/virtual-hosts": {"status": "ok"},
    "/api/health/checks/port-listener/5672": {"status": "ok"},
    "/api/health/checks/certificate-expiration/3/days": {"status": "ok"},
    "/api/health/checks/below-node-connection-limit": {"status": "ok"},
    "/api/health/checks/node-is-quorum-critical": {"status": "ok"},
    "/api/health/checks/node-is-mirror-sync-critical": {"status": "ok"},
    "/api/deprecated-features": [],
    "/api/deprecated-features/used": [],
    "/api/feature-flags": [],
    "/api/message-sizes": [{"above": 64, "up_to": 128, "messages": 3, "percent": 75.0},
                           {"above": 512, "up_to": 1024, "messages": 1, "percent": 25.0}],
    "/api/auth/attempts/n": [{"protocol": "http", "auth_attempts": 3, "auth_attempts_failed": 1,
                              "auth_attempts_succeeded": 2}],
    "/api/logs": [{"time": 1e9, "level": "info", "process": "shard-0", "logger": "a.b",
                   "message": "old"},
                  {"time": 1e9 + 1, "level": "error", "process": "controller", "logger": "c",
                   "message": "new",
                   "exception": "Traceback"}],
    "/api/exchanges/v/spread": {"name": "spread", "shard_queues": ["stream: spread - n - 0"]},
    "/api/exchanges/v/spread/bindings/source": [{"destination": "stream: spread - n - 0",
                                                 "destination_type": "queue"}],
    "/api/exchanges/v/keyed": {"name": "keyed"},
    "/api/exchanges/v/keyed/bindings/source": [{"destination": "keyed-eu",
                                                "destination_type": "queue", "arguments": {}}],
    "/api/exchanges/v/super": {"name": "super"},
    "/api/exchanges/v/super/bindings/source": [
        {"destination": f"super-{number}", "destination_type": "queue",
         "arguments": {"x-stream-partition-order": number}}
        for number in reversed(range(12))],
    **{f"/api/streams/v/super-{number}/groups": [
        {"name": f"g{number % 3}", "lag": 1, "shards": [{"shard": 0, "next": number, "lag": 1}]}
    ] for number in range(12)},
    "/api/streams/v/single": {"name": "single"},
    "/api/streams/v/single/groups": [
        {"name": "g", "lag": 3, "shards": [{"shard": 0, "next": 7, "lag": 3}]}],
    "/api/exchanges/v/mixed": {"name": "mixed"},
    "/api/exchanges/v/mixed/bindings/source": [{"destination": "keyed-eu",
                                                "destination_type": "queue"},
                                               {"destination": "gone",
                                                "destination_type": "queue"}],
    "/api/queues/v/keyed-eu": {"name": "keyed-eu"},
    "/api/queues/quorum/v/q/status": [
        {"Node Name": "shardmq@n", "Raft State": "leader", "Membership": "voter", "In Sync": True,
         "Term": 3}],
}  # fmt: skip


COMMANDS = [load(place) for words in PANELS.values() for place in words.split()]


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, str, Any]] = []  # one for all calls of a test
    reasons: list[str] = []
    logins: list[str] = []
    warnings: list[str] = []  # values of the header

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.asked.append((self.command, self.path, json.loads(body) if body else None))
        self.reasons.append(self.headers.get("X-Reason", ""))
        self.logins.append(self.headers.get("Authorization", ""))
        login = base64.b64decode(self.logins[-1].partition(" ")[2]).decode()
        status: int
        answer: Any
        if login.endswith(":wrong"):
            status, answer = 401, {"error": "not_authorized", "reason": "Login failed"}
        elif login.startswith("plain:"):
            status, answer = 401, {"error": "not_authorised", "reason": "Not management user"}
        elif path == "/api/health/checks/alarms":
            status, answer = 503, FAILED
        elif self.command == "GET" and path not in ANSWERS:
            status, answer = 404, {"error": "Object Not Found", "reason": "Not Found"}
        else:
            status, answer = 200, ANSWERS.get(path)
        text = json.dumps(answer).encode()
        self.send_response(status)
        for warning in self.warnings:
            self.send_header("Warning", warning)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("local", 0)


def serving(server: HTTPServer) -> Iterator[HTTPServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def http() -> Iterator[HTTPServer]:
    yield from serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


@pytest.fixture(autouse=True)
def nothing_asked_yet() -> None:
    for kept in (Handler.asked, Handler.reasons, Handler.logins, Handler.warnings):
        kept.clear()


@pytest.fixture
def ctl(http: HTTPServer) -> Any:
    def run(*arguments: str, status: int = 0) -> str:
        command = [*arguments, "--url", f"http://127.0.0.1:{http.server_address[1]}"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == status, result.output
        return result.output

    return run


def changes() -> list[tuple[str, str, Any]]:
    return [asked for asked in Handler.asked if asked[0] != "GET"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        proving(row, command[0], command, expected)
        for row, command, expected in (
            ("H2", ["set_permissions_globally", "bob", "c", "w", "r"],
             [("PUT", f"/api/permissions/{vhost}/bob",
               {"configure": "c", "write": "w", "read": "r"})
              for vhost in ("%2F", "v")]),
            ("H3", ["update_vhost_metadata", "v", "--description", "new"],
             [("PUT", "/api/vhosts/v", {"description": "new", "tags": ["a"]})]),
            ("H3", ["set_vhost_tags", "v", "x", "y"],
             [("PUT", "/api/vhosts/v", {"description": "old", "tags": "x,y"})]),
            ("H1", ["add_user", "u", "--pre-hashed-password", "AAAA"],
             [("PUT", "/api/users/u",
               {"password_hash": "AAAA", "hashing_algorithm": "rabbit_password_hashing_sha256",
                                       "tags": ""})]),
            ("H5",
             ["create_queue", "-p", "v", "q", "--max-length", "3", "--reject-on-overflow",
              "--no-durable"],
             [("PUT", "/api/queues/v/q", {"durable": False, "auto_delete": False,
                                          "arguments": {"x-max-length": 3,
                                                        "x-overflow": "reject-publish"}})]),
            ("H6", ["create_exchange", "topic", "t", "--alternate-exchange", "a"],
             [("PUT", "/api/exchanges/%2F/t",
               {"type": "topic", "durable": True, "auto_delete": False,
                                               "internal": False,
                                               "arguments": {"alternate-exchange": "a"}})]),
            ("H6", ["delete_exchange", "t"], [("DELETE", "/api/exchanges/%2F/t", None)]),
            ("H7", ["close_connection", NAME, "why"],
             [("DELETE", f"/api/connections/{PATH_OF_NAME}", None)]),
            ("H7", ["close_all_user_connections", "bob", "why"],
             [("DELETE", f"/api/connections/{PATH_OF_NAME}", None)]),
            ("H7", ["close_all_connections", "-p", "v", "why"],
             [("DELETE", f"/api/connections/{PATH_OF_NAME}", None)]),
            ("H12", ["set_log_level", "notice"],
             [("PUT", "/api/settings/log_level", {"value": "info"})]),
            ("H12", ["set_disk_free_limit", "2GiB"],
             [("PUT", "/api/settings/shards.disk_free_min_bytes", {"value": 2 << 30})]),
            ("H12", ["set_vm_memory_high_watermark", "0.5"],
             [("PUT", "/api/settings/memory.high_watermark", {"value": 0.5}),
              ("PUT", "/api/settings/memory.high_watermark_bytes", {"value": 0})]),
            ("H12", ["set_vm_memory_high_watermark", "absolute", "1GB"],
             [("PUT", "/api/settings/memory.high_watermark_bytes", {"value": 10**9})]),
            ("H12", ["force_gc"], [("POST", "/api/nodes/gc_collect", {})]),
            ("H12", ["rotate_logs"], []),
            ("H3", ["restart_vhost", "-p", "v"], [("POST", "/api/vhosts/v/start/n", {})]),
            ("H13", ["enable_feature_flag", "all"], []),
            ("H15", ["diagnostics", "reset_node_auth_attempt_metrics"],
             [("DELETE", "/api/auth/attempts/n", None)]),
            ("H17",
             ["add_super_stream", "-p", "v", "s", "--partitions", "2", "--max-age", "P1DT1M",
              "--leader-locator",
                     "balanced"],
             [("PUT", "/api/exchanges/v/s",
               {"type": "x-consistent-hash", "durable": True, "arguments": {
                 "x-super-stream": 2, "x-shards-when-gone": "delete",
                 "x-shard-arguments": {"x-queue-type": "stream", "x-max-age": "86460s"}}})]),
            ("H17",
             ["add_super_stream", "-p", "v", "s", "--binding-keys", "eu, us", "--max-length-bytes",
              "1gb",
                     "--stream-max-segment-size-bytes", "1mb", "--max-age", "7D"],
             [("PUT", "/api/exchanges/v/s", {"type": "direct", "durable": True}),
              *[(verb, path, body) for order, key in enumerate(("eu", "us"))
                for verb, path, body in (
                  ("PUT", f"/api/queues/v/s-{key}", {"durable": True, "arguments": {
                      "x-queue-type": "stream", "x-max-length-bytes": 10**9, "x-max-age": "7D",
                      "x-stream-max-segment-size-bytes": 10**6}}),
                  ("POST", f"/api/bindings/v/e/s/q/s-{key}",
                   {"routing_key": key, "arguments": {"x-stream-partition-order": order}}))]]),
            ("H17", ["delete_super_stream", "-p", "v", "keyed"],
             [("DELETE", "/api/exchanges/v/keyed", None),
              ("DELETE", "/api/queues/v/keyed-eu", None)]),
            ("H17", ["delete_super_stream", "-p", "v", "spread"],
             [("DELETE", "/api/exchanges/v/spread", None)]),
            ("H13", ["set_cluster_name", "c"],
             [("PUT", "/api/global-parameters/cluster_name", {"value": "c"})]),
        )
    ],
)  # fmt: skip
def test_changes_are_asked_for_as_rabbitmqctl_says_them(
    ctl: Any, command: list[str], expected: list[tuple[str, str, Any]]
) -> None:
    assert ctl(*command) == ""
    assert changes() == expected
    if "why" in command:
        assert Handler.reasons[-1] == "why"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        proving(row, command[0], command, says)
        for row, command, says in (
            ("H5", ["list_unresponsive_queues", "-p", "v"], ["name", "gone"]),
            ("H7", ["list_connections", "pid", "user"],
             ["pid\tuser", f"{NAME}\tbob", "other\teve"]),
            ("H7", ["list_channels"],
             ["name\tuser\tconsumer_count\tmessages_unacknowledged", "c1\tbob\t1\t2"]),
            ("H7", ["list_consumers", "-p", "v", "queue_name", "channel_pid", "prefetch_count"],
             ["queue_name\tchannel_pid\tprefetch_count", "q\tc1\t5"]),
            ("H8", ["list_policies_that_match", "-p", "v", "abc", "-s"],
             ["v\thigh\t^ab\tqueues\t{}\t2", "v\tlow\t^a\tall\t{}\t1"]),
            ("H12", ["ping"], ["Ping succeeded"]),
            ("H12", ["version"], ["1.2"]),
            ("H13", ["cluster_status", "-s"], ['c\tn\ttrue\t\t["http 127.0.0.1:1"]']),
            ("H15", ["diagnostics", "listeners", "-s"], ["http\t127.0.0.1\t1"]),
            ("H15", ["diagnostics", "memory_breakdown", "-s"], ["shard-0\t3000000\t100"]),
            ("H15", ["diagnostics", "alarms", "-s"], ["low on disk\t\t1\t"]),
            ("H15", ["diagnostics", "message_size_stats", "-s"],
             ["64\t128\t3\t75", "512\t1024\t1\t25"]),
            ("H15", ["diagnostics", "list_node_auth_attempt_stats", "-s"], ["http\t3\t1\t2"]),
            ("H15", ["diagnostics", "log_location"], ["/run/log-shard-0"]),
            ("H13", ["list_feature_flags"], ["name\tstate"]),
            ("H13", ["list_deprecated_features"], ["name\tdeprecation_phase"]),
        )
    ],
)  # fmt: skip
def test_what_there_is_is_listed_with_tabs_between_columns(
    ctl: Any, command: list[str], says: list[str]
) -> None:
    assert ctl(*command).splitlines() == says


@pytest.mark.row("H15")
def test_probes_tell_by_their_exit_status_what_is_wrong(ctl: Any) -> None:
    expiration = ["check_certificate_expiration", "--within", "3", "--unit", "days"]
    below = ["check_if_node_is_below_connection_limit"]
    none = [
        [f"check_if_{what}"] for what in ("node_is_quorum_critical", "node_is_mirror_sync_critical")
    ]
    none.append(["check_if_any_deprecated_features_are_used"])
    there = (["check_running"], ["check_virtual_hosts"], ["check_port_listener", "5672"])
    for passed in (*there, expiration, below, *none):
        assert ctl("diagnostics", *passed, "-q") == ""
    said = ctl("diagnostics", "check_alarms", status=1)
    assert said == "shardctl: There are alarms in effect; shard 1: low on disk\n"
    assert "127.0.0.1:1: Connection refused" in ctl(
        "diagnostics", "check_port_connectivity", status=1
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert (
            CliRunner().invoke(app, ["diagnostics", "check_running", "--url", url]).exit_code == 69
        )


@pytest.mark.row("H19")
def test_formats_for_programs(ctl: Any) -> None:
    columns = ("list_queues", "-p", "v", "name", "messages")
    rows = [
        ["a, b\tc", "3"],
        *([name, ""] for name in ("gone", "keyed-eu", "stream: spread - n - 0")),
    ]
    assert list(csv.reader(io.StringIO(ctl(*columns, "--formatter", "csv")))) == [
        ["name", "messages"],
        *rows,
    ]
    assert list(csv.reader(io.StringIO(ctl(*columns, "--formatter", "csv", "-s")))) == rows
    assert json.loads(ctl(*columns, "--formatter", "json"))[0] == {"name": "a, b\tc", "messages": 3}
    assert ctl(*columns).splitlines() == [
        "name\tmessages",
        "a, b c\t3",
        *(f"{row[0]}\t" for row in rows[1:]),
    ]
    assert ctl(*columns, "--formatter", "pretty_table").split()[:7] == [
        "name",
        "messages",
        "a,",
        "b",
        "c",
        "3",
        "gone",
    ]


@pytest.mark.row("H19")
def test_options_may_stand_before_the_command_as_rabbitmqctls(ctl: Any) -> None:
    assert ctl("-q", "-s", "-n", "rabbit@host", "-p", "v", "list_queues", "messages") == "3\n\n\n\n"
    assert ctl("--formatter", "json", "list_queues", "-p", "v", "messages").startswith("[")
    assert ctl("-s", "diagnostics", "listeners") == "http\t127.0.0.1\t1\n"
    assert ctl("-p", "wrong", "list_queues", "-p", "v", "-s", "messages") == "3\n\n\n\n"


@pytest.mark.row("H1")
def test_a_password_can_be_tried_and_hashed(ctl: Any) -> None:
    # no right to the API, but the right password
    assert ctl("authenticate_user", "plain", "right") == "Success\n"
    assert ctl("authenticate_user", "guest", "right") == "Success\n"
    assert "not accepted" in ctl("authenticate_user", "guest", "wrong", status=65)
    hashed = base64.b64decode(CliRunner().invoke(app, ["hash_password", "secret"]).output)
    assert hashlib.sha256(hashed[:4] + b"secret").digest() == hashed[4:]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["close_all_connections"], "-p VHOST, or --global"),
        (["set_log_level", "loud"], "no such level: loud; it is one of debug, info"),
        (["set_vm_memory_high_watermark", "much"], "not a part of the memory"),
        (["set_vm_memory_high_watermark", "absolute"], "not a size: nothing"),
        (["list_consumers", "-p", "v", "colour"], "unknown column colour"),
        (["list_policies_that_match", "a", "--object-type", "user"], "queue or exchange"),
        (["list_queues", "--formatter", "erlang"], "--formatter: table, json, csv"),
        (["perf", "--uri", "http://x"], "not amqp://"),
        (["add_super_stream", "s", "--partitions", "2", "--binding-keys", "a"], "not both"),
        (["add_super_stream", "s", "--partitions", "0"], "--partitions"),
        (["add_super_stream", "s", "--binding-keys", ", "], "--binding-keys: none"),
        (["add_super_stream", "s", "--max-age", "P"], "neither an ISO 8601 duration"),
    ],
)
def test_what_makes_no_sense_is_status_64_and_named(
    ctl: Any, command: list[str], says: str
) -> None:
    assert says in ctl(*command, status=64)
    assert changes() == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1k", 1024), ("1kB", 1000), ("2MiB", 2 << 20), ("3 GB", 3 * 10**9), ("5b", 5)],
)
def test_sizes_have_rabbitmqs_units(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.fixture
def local(tmp_path: Path, http: HTTPServer) -> Iterator[Path]:
    """Yield a data directory whose broker has a socket and HTTP."""
    port = http.server_address[1]
    pointer = this_process() | {"runtime_dir": str(tmp_path), "http": f"127.0.0.1:{port}"}
    (tmp_path / "broker.json").write_text(json.dumps(pointer))
    for _ in serving(UnixServer(str(tmp_path / "shardctl.sock"), Handler)):  # type: ignore[arg-type]
        yield tmp_path


def test_on_the_brokers_host_no_password_goes_over_its_socket(local: Path) -> None:
    result = CliRunner().invoke(app, ["ping", "--data-dir", str(local)])
    assert (result.exit_code, Handler.logins) == (0, [""])


def test_who_names_a_user_is_asked_for_the_password_by_http(local: Path) -> None:
    result = CliRunner().invoke(
        app, ["ping", "--data-dir", str(local), "--user", "bob", "--password", "wrong"]
    )
    assert result.exit_code == 70 and "user bob is not accepted" in result.output


def test_a_socket_that_may_not_be_opened_is_passed_over_for_http(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardmq.supervisor.cli.api.os.access", lambda path, mode: "shardctl.sock" not in str(path)
    )
    assert CliRunner().invoke(app, ["ping", "--data-dir", str(local)]).exit_code == 0
    assert base64.b64decode(Handler.logins[0].partition(" ")[2]) == b"guest:guest"


def test_the_data_directory_may_come_from_the_environment(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDMQ_DATA_DIR", str(local))
    assert CliRunner().invoke(app, ["version"]).output == "1.2\n"


def test_an_export_for_rabbitmq_leaves_out_hashes_it_cannot_read_and_says_whose(
    ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def user(name: str, algorithm: str) -> dict[str, str]:
        return {"name": name, "password_hash": "AAAA", "hashing_algorithm": algorithm, "tags": ""}

    sha256, sha512 = "rabbit_password_hashing_sha256", "rabbit_password_hashing_sha512"
    users = [user("a", sha256), user("b", "SHA512"), user("c", "shardmq_password_hashing_scrypt")]
    monkeypatch.setitem(ANSWERS, "/api/definitions", {"users": users})
    said = ctl("export_definitions", str(tmp_path / "all"))
    assert json.loads((tmp_path / "all").read_text())["users"] == users and said == ""
    said = ctl("export_definitions", "--for", "rabbitmq", str(tmp_path / "file"))
    assert json.loads((tmp_path / "file").read_text())["users"] == [
        user("a", sha256), user("b", sha512), {**user("c", sha256), "password_hash": ""}
    ]  # fmt: skip
    assert said.startswith("user 'c' is exported without a password: ") and said.count("\n") == 1


SETTING = [
    ["set_policy", "p", "^a", '{"ha-mode": "all"}'],
    ["set_operator_policy", "p", "^a", '{"max-length": 5}'],
    ["set_parameter", "shovel", "s", "{}"],
    ["set_global_parameter", "mqtt_default_vhosts", "1"],
    ["add_vhost", "v", "--default-queue-type", "quorum"],
]


@pytest.mark.parametrize("words", SETTING, ids=lambda words: words[0])
def test_what_is_set_and_has_no_effect_is_said_on_standard_error_alone(
    http: HTTPServer, words: list[str]
) -> None:
    texts = [
        "parameter shovel of 'ü \"x\"' is kept without effect: no",
        "another, \x1b[2J\n forged",
    ]
    Handler.warnings += [warning_value(text) for text in texts] + ["299 proxy not-ours", '110 - "']
    found = CliRunner().invoke(app, [*words, "--url", f"http://127.0.0.1:{http.server_port}"])
    assert found.exit_code == 0, found.output
    assert found.stderr.splitlines() == [
        "warning: parameter shovel of 'ü \"x\"' is kept without effect: no",
        "warning: another, \\x1b[2J\\n forged",
    ]
    assert "warning" not in found.stdout


def test_an_import_says_once_on_the_terminal_what_has_no_effect(
    ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        ANSWERS,
        "/api/definitions",
        {"warnings": ["parameter shovel of 's' is kept without effect"]},
    )
    queues = [{"name": f"q{at}"} for at in range(PIECE_OBJECTS_MAX + 1)]
    (tmp_path / "file").write_text(json.dumps({"queues": queues}))
    assert ctl("import_definitions", str(tmp_path / "file")).splitlines()[-1:] == [
        "warning: parameter shovel of 's' is kept without effect"
    ]


def test_an_import_says_which_of_its_lists_nobody_knows(ctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps({"users": [], "queus": [], "rabbit_version": "3.10.8", "x": []}))
    assert ctl("import_definitions", str(file)).splitlines()[-2:] == [
        "warning: there is no kind of definitions queus; did you mean queues?;"
        " nothing of it is imported",
        "warning: there is no kind of definitions x; nothing of it is imported",
    ]
    assert len(changes()) == 1
    file.write_text('{"queus": []}')
    said = ctl("import_definitions", str(file), status=65)
    assert said.endswith("there is no kind of definitions queus; did you mean queues?\n")
    assert len(changes()) == 1


def test_arguments_that_look_misspelt_are_sent_with_a_warning(ctl: Any) -> None:
    given = {"x-max-lenght": 5, "x-queue-mode": "lazy", "x-of-a-plugin": 1, "x-max-age": "1D"}
    text = json.dumps(given)
    said = ctl("create_queue", "q", "--arguments", text).splitlines()
    assert said[-1] == (
        "warning: there is no argument x-max-lenght, it has no effect; did you mean x-max-length?"
    )
    assert "".join(said).count("warning:") == 1
    assert changes()[0][2]["arguments"] == given
    said = ctl("create_exchange", "direct", "e", "--arguments", '{"x-shard": 1}').splitlines()
    assert said[-1].endswith("did you mean x-shards?")


@pytest.mark.row("H10")
def test_a_large_import_goes_in_pieces_and_bindings_come_last(ctl: Any, tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "users": [{"name": "u"}],
        "bindings": [
            {"source": "x", "destination": f"q{at}"} for at in range(PIECE_OBJECTS_MAX + 1)
        ],
        "queues": [{"name": f"q{at}"} for at in range(PIECE_OBJECTS_MAX + 1)],
        "exchanges": [{"name": "x"}],
    }
    (tmp_path / "file").write_text(json.dumps(document))
    ctl("import_definitions", str(tmp_path / "file"))
    bodies = [body for _, _, body in changes()]
    assert [{key: len(rows) for key, rows in body.items()} for body in bodies] == [
        {"users": 1}, {"exchanges": 1}, {"queues": PIECE_OBJECTS_MAX}, {"queues": 1},
        {"bindings": PIECE_OBJECTS_MAX}, {"bindings": 1},
    ]  # fmt: skip
    assert [row for body in bodies for row in body.get("queues", [])] == document["queues"]


@pytest.mark.parametrize(
    "document", [[], {"queues": 3}, {"queues": [{"name": "q"}], "users": []}, None]
)
def test_a_small_or_strange_document_goes_as_it_is(document: Any) -> None:
    assert pieces(document) == [document]


def test_top_shows_processes_shards_and_the_fullest_queues_once(ctl: Any) -> None:
    shown = ctl("top", "--count", "1")
    assert all(word in shown for word in ("7 ready", "shard-0", "big"))


def test_top_into_a_pipe_writes_each_look(ctl: Any) -> None:
    assert ctl("top", "--count", "2", "--interval", "0.2").count("7 ready") == 2


def test_rates_are_per_second_since_the_look_before_and_never_negative() -> None:
    rates = Rates()
    assert rates.rate(10.0, {"in": 100.0}) == {"in": 0.0}
    assert rates.rate(12.0, {"in": 150.0, "new": 9.0}) == {"in": 25.0, "new": 0.0}
    assert rates.rate(13.0, {"in": 10.0}) == {"in": 0.0}  # the shard began anew


def test_awaiting_a_broker_that_does_not_come_ends_with_its_status(tmp_path: Path) -> None:
    command = ["await_startup", "--data-dir", str(tmp_path), "-t", "0"]
    assert CliRunner().invoke(app, command).exit_code == 69
    starting = {"children": [{"name": "shard-0", "state": "starting", "status": "recovering 7 %"}]}
    pointer = this_process() | {"runtime_dir": str(tmp_path), "http": "127.0.0.1:1"}
    (tmp_path / "broker.json").write_text(json.dumps(pointer))
    (tmp_path / "status.json").write_text(json.dumps(starting))
    assert CliRunner().invoke(app, command).exit_code == 1
    starting["children"][0]["state"] = "ready"
    (tmp_path / "status.json").write_text(json.dumps(starting))
    assert CliRunner().invoke(app, command).exit_code == 0
    assert CliRunner().invoke(app, ["await_online_nodes", "1", *command[1:]]).exit_code == 0
    assert CliRunner().invoke(app, ["await_online_nodes", "2", *command[1:]]).exit_code == 64


def test_every_command_has_help_and_a_name_of_its_own() -> None:
    names = [command.__name__ for command in COMMANDS]
    assert len(names) == len(set(names))
    for command in COMMANDS:
        assert command.__doc__, command.__name__
    shown = CliRunner().invoke(app, ["list_queues", "--help"], env={"COLUMNS": "200"}).output
    assert all(
        option in shown for option in ("--vhost", "--formatter", "--url", "--quiet", "--timeout")
    )


@pytest.mark.parametrize("command", ["publish", "cluster forget"])
def test_help_breaks_its_lines_where_the_terminal_ends(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "500"}).output
    prose = shown.partition("Usage:")[2].partition("╭")[0]
    paragraphs = [line for line in prose.splitlines()[1:] if line.strip()]
    assert paragraphs
    assert all(line.rstrip().endswith(".") for line in paragraphs)


def test_shards_status_says_how_far_a_change_is(ctl: Any) -> None:
    first, slow, late, *rows = ctl("shards", "status", "e", "-p", "v").splitlines()
    assert slow == "group 'slow' has 2 changes before it, and first to settle the rest of 'e-0'"
    assert late == "group 'late' waits for the change"
    assert (
        first == "settling: [###############-----] 75%, 30 messages to go; at 500 ms: dead-letter"
    )
    assert rows[1].split("\t")[:4] == ["e-0", "1", "active", "true"]


def test_shards_plan_says_what_would_move(ctl: Any) -> None:
    assert ctl("shards", "plan", "e", "3", "-p", "v").splitlines() == [
        "2 shard queues, then 3",
        "34% of the keys go to another queue; 7 messages are consumed first",
        "add e-2",
    ]
    assert changes() == [("POST", "/api/exchanges/v/e/shards/plan", {"number": 3})]


def test_perf_says_that_no_rate_is_no_limit(ctl: Any) -> None:
    shown = CliRunner().invoke(app, ["perf", "--help"], env={"COLUMNS": "200"}).output
    assert "each producer. 0: no limit." in shown


def test_shards_set_changes_the_number_and_may_wait(ctl: Any) -> None:
    ctl("shards", "set", "still", "auto", "--wait")
    assert changes() == [("PUT", "/api/exchanges/%2F/still/shards", {"number": "auto"})]
    assert Handler.asked[-1][:2] == ("GET", "/api/exchanges/%2F/still/shards")
    ctl("shards", "set", "still", "many", status=64)
    assert len(changes()) == 1


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("of", [[], ["diagnostics"]], ids=["rabbitmqctl", "rabbitmq-diagnostics"])
def test_what_other_tools_have_and_makes_no_sense_here_says_why_in_one_line(
    ctl: Any, of: list[str], name: str
) -> None:
    said = ctl(*of, name, "argument", "--unknown", "option", status=64)
    assert said == f"shardctl: {name}: {UNSUPPORTED[name]}\n"
    assert Handler.asked == []


def test_no_command_is_both_here_and_not() -> None:
    assert UNSUPPORTED.keys().isdisjoint(
        {command.__name__ for command in COMMANDS} | diagnostics.COMMANDS.keys()
    )


@pytest.mark.row("H17")
def test_an_exchange_that_leads_to_more_than_streams_is_not_deleted_as_a_super_stream(
    ctl: Any,
) -> None:
    assert "'mixed' in vhost 'v' is no super stream" in ctl(
        "delete_super_stream", "-p", "v", "mixed", status=1
    )
    assert "exists already" in ctl("add_super_stream", "-p", "v", "keyed", status=70)
    assert changes() == []


@pytest.mark.row("H17")
def test_tail_of_a_super_stream_names_its_streams(ctl: Any) -> None:
    none = "stream '{}' in vhost 'v' does not exist"
    said = ctl("tail", "-p", "v", "super", status=65)
    names = ", ".join(f"'super-{number}'" for number in range(10))
    streams = f"'super' is a super stream with the streams {names} and 2 more"
    assert said == f"shardctl: {none.format('super')}; {streams}\n"
    for name in ("keyed", "nothing"):  # Bindings without an order make no super stream.
        assert ctl("tail", "-p", "v", name, status=65) == f"shardctl: {none.format(name)}\n"


@pytest.mark.row("H17")
def test_the_tracking_of_a_super_stream_is_that_of_all_its_streams(ctl: Any) -> None:
    single = ctl("list_stream_tracking", "-p", "v", "single").splitlines()
    assert single == ["reference\tshard\tnext\tlag", "g\t0\t7\t3"]
    listed = ctl("list_stream_tracking", "-p", "v", "super").splitlines()
    assert listed == [
        "stream\treference\tshard\tnext\tlag",
        *(f"super-{number}\tg{number % 3}\t0\t{number}\t1" for number in range(12)),
    ]
    assert "Not Found" in ctl("list_stream_tracking", "-p", "v", "nothing", status=65)


@pytest.mark.row("H15")
def test_the_log_is_shown_as_processes_write_it(ctl: Any) -> None:
    old, new, exception = ctl("diagnostics", "log_tail").splitlines()
    assert old.endswith(" INFO shard-0 a.b: old") and new.endswith(" ERROR controller c: new")
    assert exception == "    Traceback"
    assert ctl("diagnostics", "log_tail", "-N", "1").splitlines() == [new, exception]
    # what was there before is no news
    assert ctl("diagnostics", "log_tail_stream", "--duration", "0.6") == ""


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 7)), max_size=40),
    st.lists(st.integers(0, 50), max_size=8),
)
def test_each_line_of_the_log_is_news_once_though_processes_write_late(
    lines: list[tuple[int, int]], looks: list[int]
) -> None:
    """Follow a log: every line is shown once.

    A line may be readable only some time after it was written.

    Times are in quarters of a second. Polls at any times miss no line and show none twice.
    """
    rows = [
        ({"time": at / 4, "message": str(n)}, at + late)
        for n, (at, late) in enumerate(sorted(lines))
    ]
    follower, shown = LogFollower([]), []
    for now in [*sorted(looks), 100]:
        read = [row for row, at in rows if at <= now and row["time"] > follower.since]
        shown += [row["message"] for row in follower.new_rows(read)]
    assert sorted(shown, key=int) == [row["message"] for row, _ in rows]
