"""Changes that operators make in a running broker hold at once."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pytest
from pamqp import commands
from pika.exceptions import ProbableAccessDeniedError

from tests.support.raw_client import HEADER, RawClient, method
from tests.support.real_broker import PATIENCE_S, SOURCE, RealBroker, wait_until
from tests.support.vhosts import Api

pytestmark = pytest.mark.broker

BALANCED = b"PROXY TCP4 192.0.2.7 192.0.2.1 7777 5672\r\n"
USERS = {"users": [{"name": "late", "password": "secret", "tags": "monitoring"}],
         "vhosts": [{"name": "/"}],
         "permissions": [{"user": "late", "vhost": "/", "configure": "", "write": "",
                          "read": ""}]}  # fmt: skip


class Operated(RealBroker):
    """With a settings file, which `set` replaces and has read anew."""

    def __init__(self, folder: Path, text: str, environment: dict[str, str] | None = None) -> None:
        self.file = folder / "broker.toml"
        self.file.write_text(text)
        flags = ("--config", str(self.file), "--bind", "127.0.0.1")
        super().__init__(folder / "data", more=flags, environment=environment)

    def set(self, text: str) -> None:
        self.file.write_text(text)
        self.process.send_signal(signal.SIGHUP)

    def says(self, text: str, times: int = 1) -> None:
        wait_until(
            lambda: self.log_path.read_text().count(text) >= times, f"the log to say {text!r}"
        )

    def ctl(self, *arguments: str, status: int = 0) -> str:
        """shardctl on the broker's host: no password."""
        command = [
            sys.executable,
            "-m",
            "shardmq.supervisor.cli",
            *arguments,
            "--data-dir",
            str(self.data_dir),
        ]
        ended = subprocess.run(
            command, cwd=SOURCE, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == status, ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    started = Operated(tmp_path_factory.mktemp("operated"), "")
    yield started
    started.stop()


def connect(
    broker: RealBroker, user: str = "guest", password: str = "guest"
) -> pika.BlockingConnection:
    login = pika.PlainCredentials(user, password)
    return pika.BlockingConnection(pika.ConnectionParameters(broker.host, broker.port, "/", login))


@pytest.mark.row("N13")
def test_a_memory_alarm_blocks_publishers_and_is_in_health_nodes_and_metrics_until_it_is_over(
    operated: Operated,
) -> None:
    with connect(operated) as connection:
        blocked: list[str] = []
        connection.add_on_connection_blocked_callback(
            lambda _, frame: blocked.append(frame.method.reason)
        )
        connection.add_on_connection_unblocked_callback(lambda *_: blocked.append("over"))
        channel = connection.channel()
        operated.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
        operated.says("alarm: low on memory")
        channel.basic_publish("", "nowhere", b"x")
        wait(connection, lambda: blocked == ["low on memory"])
        assert "low on memory" in operated.ctl("diagnostics", "check_alarms", status=1)
        assert metric(operated, "rabbitmq_alarms_memory_used_watermark") == 1.0
        operated.ctl("set_vm_memory_high_watermark", "0.9")
        wait(connection, lambda: blocked == ["low on memory", "over"])
    operated.ctl("diagnostics", "check_alarms")
    assert metric(operated, "rabbitmq_alarms_memory_used_watermark") == 0.0
    assert metric(operated, "rabbitmq_process_open_fds") > 10


@pytest.mark.row("N14")
def test_the_disk_limit_can_be_raised_over_what_is_free(operated: Operated) -> None:
    operated.ctl("set_disk_free_limit", "900TB")
    wait_until(lambda: "low on disk" in operated.ctl("diagnostics", "alarms"), "the alarm")
    operated.ctl("set_disk_free_limit", "1MB")
    wait_until(lambda: "low on disk" not in operated.ctl("diagnostics", "alarms"), "its end")
    assert "2GiB" in operated.ctl("set_disk_free_limit", "much", status=64)


def test_nothing_that_publishes_hangs_while_publishers_are_blocked(operated: Operated) -> None:
    told = "publishers are blocked: low on disk"
    message = {
        "routing_key": "held",
        "properties": {},
        "payload": "h",
        "payload_encoding": "string",
    }
    operated.ctl("create_queue", "held")
    alarms = operated.log_path.read_text().count("alarm: low on disk") + 1
    operated.ctl("set_disk_free_limit", "900TB")
    operated.says("alarm: low on disk", alarms)
    try:
        assert told in operated.ctl("publish", "held", "x")  # the broker takes one and confirms it
        assert told in operated.ctl("publish", "held", "x", "--count", "5000", status=70)
        assert "were blocked: low on disk" in operated.ctl("perf", "--time", "0.5", "--quiet")
        refused = Api(operated).refused("POST", "exchanges/%2F/amq.default/publish", message)
        assert refused == (503, told)
    finally:
        operated.ctl("set_disk_free_limit", "1MB")
    wait_until(lambda: "low on disk" not in operated.ctl("diagnostics", "alarms"), "its end")
    bodies = operated.ctl("get", "held", "--count", "9999").split()
    assert 1 < len(bodies) < 5001 and set(bodies) == {"x"}
    operated.ctl("delete_queue", "held")


@pytest.mark.row("N12")
def test_behind_a_balancer_clients_have_their_own_addresses(operated: Operated) -> None:
    operated.set('[listen]\nproxy_protocol_from = ["127.0.0.0/8"]')
    operated.says("listen.proxy_protocol_from has changed")
    operated.ctl("add_user", "far", "away")
    operated.ctl("set_permissions", "far", ".*", ".*", ".*")
    wait_until(lambda: takes_header(operated), "the front door to take the balancer's word")
    with RawClient(operated.port) as client:
        client.send(BALANCED)
        log_in(client, "far", "away")
        client.expect(commands.Connection.Tune)
        client.send(
            method(0, commands.Connection.TuneOk(10, 131072, 0))
            + method(0, commands.Connection.Open())
        )
        client.expect(commands.Connection.OpenOk)
        wait_until(
            lambda: "192.0.2.7\t7777" in operated.ctl("list_connections", "peer_host", "peer_port"),
            "its row",
        )
    connect(operated).close()  # without a header: the balancer's own
    with RawClient(operated.port) as client:
        client.send(BALANCED)
        log_in(client, "guest", "guest")
        # guest, and not from this host
        assert client.expect(commands.Connection.Close).reply_code == 403
    for claim in (
        b"PROXY TCP4 127.0.0.1 127.0.0.1 7777 5672\r\n",
        b"PROXY TCP6 ::1 ::1 1 2\r\n",
        b"PROXY UNKNOWN\r\n",
    ):
        with RawClient(operated.port) as client:
            client.send(claim)
            log_in(client, "guest", "guest")
            # what a balancer says makes nobody a client on this host
            said = client.expect(commands.Connection.Close)
            assert said.reply_code == 403, claim
    operated.set("")
    operated.says("listen.proxy_protocol_from has changed", 2)
    wait_until(lambda: not takes_header(operated), "the front door to take no balancer's word")


def takes_header(broker: RealBroker) -> bool:
    with RawClient(broker.port) as client:
        client.send(BALANCED + HEADER)
        said = client.read_frame()
        return said is not None and said != HEADER


@pytest.mark.row("A1.9")
def test_a_limit_of_connections_holds_over_all_front_doors_and_can_be_lifted(
    operated: Operated,
) -> None:
    operated.set("[front_doors]\nconnections_max = 2")
    operated.says("front_doors.connections_max has changed")
    first, second = connect(operated), connect(operated)
    with pytest.raises(ProbableAccessDeniedError, match="node connection limit .2. is reached"):
        wait_until(lambda: connect(operated).close() is not None, "the limit to be in force")
    second.close()
    operated.set("")
    operated.says("front_doors.connections_max has changed", 2)
    wait_until(lambda: can_connect(operated), "the limit to be lifted")
    first.close()


@pytest.mark.row("N5")
def test_users_and_the_log_level_are_read_anew_and_a_wrong_file_changes_nothing(
    operated: Operated, tmp_path: Path
) -> None:
    given = tmp_path / "users.json"
    given.write_text(json.dumps(USERS))
    operated.set(f'log_level = "debug"\nload_definitions = "{given}"')
    operated.says(f"load_definitions: {given} taken in")
    assert 'late\t["monitoring"]' in operated.ctl("list_users")
    operated.says("log_level has changed")
    operated.set("colour = 1")
    operated.says("the settings stay as they were: colour: there is no such key")
    assert operated.status()["log_level"] == "debug"
    given.write_text("{")
    operated.set(f'log_level = "debug"\nload_definitions = "{given}"')
    operated.says("load_definitions: not taken in to its end")
    operated.set("")
    operated.says("log_level has changed", 2)


@pytest.mark.row("N6")
def test_the_environment_wins_over_the_file_at_a_start_and_at_a_reload(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret of alice\n")
    environment = {
        "SHARDMQ_USERS_DEFAULT_USER": "alice",
        "SHARDMQ_USERS_DEFAULT_PASS_FILE": str(secret),
        "SHARDMQ_FRONT_DOORS_HEARTBEAT_S": "11",
        "SHARDMQ_LISTEN_AMQP_PORT": "1",  # the flag wins
    }
    text = "[front_doors]\nheartbeat_s = 22\nchannels_max = 99\n"
    broker = Operated(tmp_path, text, environment)
    connect(broker, "alice", "secret of alice").close()
    broker.set(text.replace("22", "33").replace("99", "88"))
    broker.says("front_doors.channels_max has changed")
    assert "heartbeat_s has changed" not in broker.log_path.read_text()
    rows = json.loads(broker.ctl("environment", "--formatter", "json"))
    found = {row["key"]: (row["value"], row["source"]) for row in rows}
    assert found["front_doors.heartbeat_s"] == (11, "SHARDMQ_FRONT_DOORS_HEARTBEAT_S")
    assert found["front_doors.channels_max"] == (88, "file")
    assert found["front_doors.tick_us"] == (300, "default")
    assert found["listen.amqp_port"] == (0, "--amqp-port")
    assert found["users.default_user"] == ("alice", "SHARDMQ_USERS_DEFAULT_USER")
    assert found["users.default_pass"] == ("(hidden)", "SHARDMQ_USERS_DEFAULT_PASS_FILE")
    assert found["cluster.secret"] == ("", "default")
    broker.ctl("set_log_level", "warning")
    broker.says("log_level has changed")
    assert "log_level\twarning\tshardctl" in broker.ctl("environment")
    broker.stop()


@pytest.mark.row("H12")
def test_the_log_level_can_be_set_until_the_next_start(operated: Operated) -> None:
    operated.ctl("set_log_level", "warning")
    wait_until(lambda: operated.status()["log_level"] == "warning", "the level to be warning")
    assert "one of debug, info" in operated.ctl("set_log_level", "loud", status=64)
    shown = operated.ctl("environment")
    assert "log_level\twarning" in shown and "shards.count\t2" in shown
    operated.ctl("set_log_level", "info")
    wait_until(lambda: operated.status()["log_level"] == "info", "the level to be info")


@pytest.mark.row("H17")
def test_super_streams_are_made_and_deleted_with_their_streams(operated: Operated) -> None:
    operated.ctl(
        "add_super_stream",
        "spread",
        "--partitions",
        "2",
        "--max-age",
        "P1D",
        "--max-length-bytes",
        "1gb",
    )
    operated.ctl("add_super_stream", "keyed", "--binding-keys", "eu,us")
    assert "exists already" in operated.ctl("add_super_stream", "spread", status=70)
    with connect(operated) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for exchange, key in (("spread", "any"), ("keyed", "us")):
            channel.basic_publish(exchange, key, b"x", mandatory=True)

    def listed() -> dict[str, tuple[str, int]]:
        lines = operated.ctl("list_queues", "name", "type", "messages", "-s").splitlines()
        return {
            name: (kind, int(count)) for name, kind, count in (line.split("\t") for line in lines)
        }

    # Numbers are up to a second old, and asking for an exchange has asked for them before.
    wait_until(
        lambda: sum(count for _, count in listed().values()) == 2, "both messages to be counted"
    )
    found = listed()
    parts = [name for name in found if name.startswith("stream: spread - ")]
    assert len(parts) == 2 and sum(found[name][1] for name in parts) == 1
    assert {found[name][0] for name in found} == {"stream"}
    assert (found["keyed-eu"], found["keyed-us"]) == (("stream", 0), ("stream", 1))
    operated.ctl("delete_super_stream", "spread")
    operated.ctl("delete_super_stream", "keyed")
    assert operated.ctl("list_queues", "name", "-s") == ""
    assert "does not exist" in operated.ctl("delete_super_stream", "keyed", status=65)


@pytest.mark.row("H15")
def test_the_log_and_what_came_can_be_looked_at_by_shardctl(operated: Operated) -> None:
    lines = operated.ctl("diagnostics", "log_tail", "-N", "1000").splitlines()
    assert any(" INFO supervisor supervisor: shard-0 ready, pid " in line for line in lines)
    for path in operated.ctl("diagnostics", "log_location").splitlines():
        assert Path(path).is_file()
    with connect(operated) as connection:
        connection.channel().basic_publish("", "nowhere", bytes(100_000))
    rows = json.loads(operated.ctl("diagnostics", "message_size_stats", "--formatter", "json"))
    assert (65536, 131072, 1) in {(row["above"], row["up_to"], row["messages"]) for row in rows}


@pytest.mark.row("G4.4")
def test_a_channel_tells_how_much_went_through_it(operated: Operated) -> None:
    def counts() -> list[tuple[int, int, int, int]]:
        asked = http.client.HTTPConnection(operated.http, timeout=60)
        login = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}
        asked.request("GET", "/api/channels", headers=login)
        found = json.load(asked.getresponse())
        asked.close()
        return [
            (row["message_stats"]["publish"], row["message_stats"]["deliver_get"],
             row["messages_uncommitted"],
             row["acks_uncommitted"])
            for row in found
        ]  # fmt: skip

    with connect(operated) as connection:
        channel = connection.channel()
        channel.queue_declare("through", exclusive=True)
        channel.tx_select()
        for _ in range(3):
            channel.basic_publish("", "through", b"x")
        wait_until(lambda: counts() == [(0, 0, 3, 0)], "three messages to be held")
        channel.tx_commit()
        tag = channel.basic_get("through")[0].delivery_tag
        channel.basic_ack(tag)
        wait_until(lambda: counts() == [(3, 1, 0, 1)], "three in, one out, its ack held")
        channel.tx_rollback()


def can_connect(broker: RealBroker) -> bool:
    try:
        connect(broker).close()
    except ProbableAccessDeniedError:
        return False
    return True


def log_in(client: RawClient, user: str, password: str) -> None:
    client.send(HEADER)
    client.expect(commands.Connection.Start)
    properties = {"capabilities": {"authentication_failure_close": True}}
    client.send(
        method(
            0, commands.Connection.StartOk(properties, "PLAIN", f"\0{user}\0{password}", "en_US")
        )
    )


def wait(connection: pika.BlockingConnection, done: Callable[[], bool]) -> None:
    wait_until(
        lambda: connection.process_data_events(0.05) is not None or done(),
        "the client to hear of it",
    )


def metric(broker: RealBroker, name: str) -> float:
    asked = http.client.HTTPConnection(broker.metrics, timeout=60)
    asked.request("GET", "/metrics")
    lines = asked.getresponse().read().decode().splitlines()
    asked.close()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.row("H20")
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--confirm", "100", "--persistent", "-x", "2", "-y", "3", "--queues", "3"),
        ("--size", "300000"),
        ("-y", "0"),
    ],
)
def test_a_load_goes_through_and_leaves_nothing_behind(
    operated: Operated, more: tuple[str, ...]
) -> None:
    (row,) = json.loads(operated.ctl("-q", "perf", "--time", "0.3", "--formatter", "json", *more))
    assert row["published/s"] > 0 and row["refused"] == 0
    if "-y" not in more or "0" not in more:
        assert row["consumed/s"] == row["published/s"]
    if "--confirm" in more:
        assert row["confirmed/s"] == row["published/s"]
    assert operated.ctl("-s", "list_queues", "name") == ""


@pytest.mark.row("H20")
@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="the generator is compiled"
)
def test_the_scenarios_of_bench_run_on_a_broker_that_runs(
    operated: Operated, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    table = operated.ctl("perf", "--scenarios", "latency", "--quick", "--output", str(result))
    (run,) = json.loads(result.read_text())["scenarios"]["latency-1k"]["shardmq"]["runs"]
    assert "| latency-1k | latency p50, us |" in table
    assert run["consumed_per_s"] > 0 and run["cpu_s"] > 0  # its processes were found by its port
    assert result.with_suffix(".md").exists()


@pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="the generator is compiled"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("words", "queue"), [([], "shardctl-perf"), (["--scenarios", "small"], "bench-0")]
)
def test_a_load_that_is_interrupted_takes_its_queues_away(
    operated: Operated, tmp_path: Path, words: list[str], queue: str, number: int
) -> None:
    words = ["perf", "--time", "60", "--output", str(tmp_path / "result.json"), *words]
    command = [
        sys.executable,
        "-m",
        "shardmq.supervisor.cli",
        *words,
        "--data-dir",
        str(operated.data_dir),
    ]
    load = subprocess.Popen(
        command,
        cwd=SOURCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # Tests that run in the background of a script inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: queue in operated.ctl("list_consumers"), "the load")
        load.send_signal(number)
        _, said = load.communicate(timeout=PATIENCE_S)
        assert b"Traceback" not in said and load.returncode
        assert queue not in operated.ctl("list_queues", "name")
    finally:
        load.kill()


@pytest.mark.row("H20")
def test_a_load_with_a_wrong_password_says_so(operated: Operated) -> None:
    said = operated.ctl(
        "perf", "--uri", f"amqp://guest:wrong@{operated.host}:{operated.port}", status=1
    )
    assert "ACCESS_REFUSED" in said


def test_a_purge_by_number_takes_those_that_would_be_delivered_next(
    broker: RealBroker, connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(name, durable=True, arguments={"x-max-priority": 2})
    channel.confirm_delivery()
    for number in range(6):
        properties = pika.BasicProperties(priority=number // 3, delivery_mode=2)
        channel.basic_publish("", name, str(number).encode(), properties)
    Api(broker)("DELETE", f"queues/%2F/{name}/contents?count=4")
    assert [channel.basic_get(name, auto_ack=True)[2] for _ in range(3)] == [b"1", b"2", None]
