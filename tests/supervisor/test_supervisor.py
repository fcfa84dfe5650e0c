"""Test the supervisor with fake children: order, restart, giving up, draining, refusals."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert
from msgspec.structs import replace

from shardmq.broker.shared.control import binds_pipe
from shardmq.supervisor.config import (
    Cluster,
    ConfigError,
    FrontDoors,
    Listen,
    Reader,
    Settings,
    Shards,
    Supervision,
    Users,
    kinds,
)
from shardmq.supervisor.directories import DataDirectory, RuntimeDirectory
from shardmq.supervisor.plan import ChildPlan, Listening, children
from shardmq.supervisor.reload import flat, nested
from shardmq.supervisor.sources import Effective
from shardmq.supervisor.supervisor import Supervisor

FAKE = "tests.supervisor.fake_child"
POLL_S = 0.005  # status.json is a file: nothing tells of its change


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short, for there are sockets in it."""
    with tempfile.TemporaryDirectory(prefix="shardmq-") as directory:
        yield Path(directory)


def settings_for(tmp_path: Path, reader: bool = False, **supervision: Any) -> Settings:
    return Settings(
        data_dir=str(tmp_path / "data"),
        runtime_dir=str(tmp_path / "run"),
        listen=Listen(bind="127.0.0.1", amqp_port=0, http_port=0, metrics_port=0),
        front_doors=FrontDoors(count=2),
        shards=Shards(count=2),
        reader=Reader(enabled=reader),  # the same children whether pyarrow is installed or not
        supervision=Supervision(**supervision),
    )


def effective(settings: Settings, **sources: str) -> Effective:
    return Effective(settings, dict.fromkeys(flat(settings), "file") | sources)


def supervised(settings: Settings, *arguments: Any) -> Supervisor:
    return Supervisor(effective(settings), *(arguments or (4,)))


class Broker:
    """A supervisor over fake children; `does` tells single ones to misbehave."""

    def __init__(
        self,
        tmp_path: Path,
        does: dict[str, str] | None = None,
        reader: bool = False,
        **supervision: Any,
    ) -> None:
        self.journal_path = tmp_path / "journal"
        self.status_path = tmp_path / "run" / "status.json"
        self.does = does or {}
        self.lines: list[str] = []
        self.ready = asyncio.Event()
        self.written = settings_for(tmp_path, reader, **supervision)  # what a reload finds
        self.supervisor = supervised(self.written, 2, self._plans, self._reread)
        self.supervisor.open()
        self.running = asyncio.create_task(self.supervisor.run(self._announce))

    def _announce(self, line: str) -> None:
        self.lines.append(line)
        self.ready.set()

    def _plans(
        self, settings: Settings, cores: int, runtime: str, boot: str, at: Listening
    ) -> list[ChildPlan]:
        return [self._fake(plan) for plan in children(settings, cores, runtime, boot, at)]

    def _fake(self, plan: ChildPlan) -> ChildPlan:
        does = self.does.get(plan.name, "well")
        section = {"name": plan.name, "journal": str(self.journal_path), "does": does}
        section["says"] = (
            f"{plan.section['log_level']} {plan.section.get('disk_free_min_bytes', '')}".strip()
        )
        return replace_fields(plan, module=FAKE, section=section)

    def _reread(self, set: dict[str, Any]) -> Effective:
        if self.written.log_level == "debug":
            raise ConfigError("log_level: too much")
        try:
            settings = convert(nested(flat(self.written) | set), Settings)
            return effective(settings, **dict.fromkeys(set, "shardctl"))
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from None

    async def stop(self) -> int:
        self.supervisor.stop()
        return await self.running

    def journal(self) -> list[str]:
        return self.journal_path.read_text().splitlines() if self.journal_path.exists() else []

    async def status(self, satisfies: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """status.json by child name, as soon as it satisfies."""
        while True:
            status = json.loads(self.status_path.read_text())
            named = {child["name"]: child for child in status["children"]}
            if satisfies(named):
                return named
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("name", ["", "tea"])
async def test_the_number_of_shards_is_known_before_etcd_has_answered(
    tmp_path: Path, name: str
) -> None:
    cluster = Cluster(name=name, secret="a secret", address="127.0.0.1", port=0)
    supervisor = supervised(replace(settings_for(tmp_path), cluster=cluster))
    supervisor.open()
    assert supervisor.shards == 2
    supervisor._close()


def test_secrets_are_shown_as_hidden_with_their_sources(tmp_path: Path) -> None:
    users, cluster = Users(default_pass="s3cret one"), Cluster(secret="s3cret two")
    settings = replace(settings_for(tmp_path), users=users, cluster=cluster)
    source = "SHARDMQ_USERS_DEFAULT_PASS_FILE"
    supervisor = Supervisor(effective(settings, **{"users.default_pass": source}), 4)
    supervisor.open()
    shown = supervisor.describe()
    supervisor._close()
    assert shown["settings"]["users.default_pass"] == "(hidden)"
    assert shown["sources"]["users.default_pass"] == source
    assert shown["settings"]["cluster.secret"] == "(hidden)"
    assert shown["settings"]["cluster.etcd_password"] == "", "none is set"
    assert shown["settings"].keys() == shown["sources"].keys() == kinds().keys()
    assert "s3cret" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("a fault"), 1, "a task of the supervisor has ended: a fault"),
        (ConfigError("cluster: forgotten"), 2, "cluster: forgotten"),
        (None, 1, "a task of the supervisor has ended: it returned"),
    ],
)
async def test_the_broker_stops_when_a_task_of_the_supervisor_ends(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    status: int,
    said: str,
) -> None:
    """Nobody would renew the lease, look after the children or write their state."""

    async def fails() -> None:
        if error is not None:
            raise error

    broker = Broker(tmp_path)
    await broker.ready.wait()
    broker.supervisor._tasks.start(fails())
    assert await broker.running == status
    assert said in caplog.text
    assert all(f"shard-{number} drained" in broker.journal() for number in range(2))


@pytest.mark.row("N4")
async def test_shards_wait_for_the_controller_front_doors_for_a_shard_and_draining_is_the_reverse(
    tmp_path: Path,
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    assert await broker.stop() == 0
    journal = broker.journal()
    at = {line: index for index, line in enumerate(journal)}
    shards, doors = ("shard-0", "shard-1"), ("front-door-0", "front-door-1")
    assert all(at["controller ready"] < at[f"{shard} started"] for shard in shards)
    assert all(
        min(at[f"{shard} ready"] for shard in shards) < at[f"{door} started"] for door in doors
    )
    assert all(at[f"{door} drained"] < at[f"{shard} drained"] for shard in shards for door in doors)
    assert all(at[f"{shard} drained"] < at["controller drained"] for shard in shards)


async def test_the_ready_line_names_ports_that_accept_connections(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    (line,) = broker.lines
    word, *places = line.split()
    assert word == "ready:"
    for key, place in zip(("amqp", "http", "metrics"), places, strict=True):
        name, _, address = place.partition("=")
        host, _, port = address.rpartition(":")
        assert name == key
        socket.create_connection((host, int(port))).close()
    await broker.stop()


async def test_a_killed_child_comes_back_and_is_counted(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    before = await broker.status(lambda named: named["shard-1"]["state"] == "ready")
    os.kill(before["shard-1"]["pid"], signal.SIGKILL)
    after = await broker.status(
        lambda named: named["shard-1"]["restarts"] == 1 and named["shard-1"]["state"] == "ready"
    )
    assert after["shard-1"]["pid"] != before["shard-1"]["pid"]
    assert after["shard-0"] == before["shard-0"]
    assert await broker.stop() == 0


async def test_the_reader_is_started_for_a_call_and_again_when_it_died_before_its_answer(
    tmp_path: Path,
) -> None:
    broker = Broker(tmp_path, reader=True)
    await broker.ready.wait()
    before = await broker.status(lambda named: named["reader"]["state"] == "uncalled")
    assert before["reader"]["pid"] == 0 and "reader started" not in broker.journal()
    call = socket.socket(socket.AF_UNIX)
    call.connect(str(tmp_path / "run" / "reader.sock"))
    called = await broker.status(lambda named: named["reader"]["state"] == "ready")
    os.kill(called["reader"]["pid"], signal.SIGKILL)  # a fake: it has not even taken the call
    again = await broker.status(
        lambda named: named["reader"]["restarts"] == 1 and named["reader"]["state"] == "ready"
    )
    assert again["reader"]["pid"] != called["reader"]["pid"]
    call.close()
    assert await broker.stop() == 0
    assert not (tmp_path / "run" / "reader.sock").exists()


async def test_a_broker_ends_whose_reader_nobody_called(tmp_path: Path) -> None:
    broker = Broker(tmp_path, reader=True)
    await broker.ready.wait()
    assert await broker.stop() == 0
    assert "reader started" not in broker.journal()


async def test_a_disk_that_hangs_under_the_status_file_does_not_stop_the_watch_over_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    before = await broker.status(lambda named: named["shard-1"]["state"] == "ready")
    answers = threading.Event()
    monkeypatch.setattr("shardmq.supervisor.supervisor.replace_file", lambda *_: answers.wait())
    os.kill(before["shard-1"]["pid"], signal.SIGKILL)
    while broker.journal().count("shard-1 ready") < 2:
        await asyncio.sleep(POLL_S)
    answers.set()
    assert await broker.stop() == 0


async def test_a_child_that_keeps_dying_ends_the_broker_with_status_1_and_the_others_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(tmp_path, {"shard-1": "exits 3"})
    assert await broker.running == 1
    assert broker.lines == []
    assert "shard-1 died too often" in caplog.text
    assert {"controller drained", "shard-0 drained"} <= set(broker.journal())


async def test_a_child_that_refuses_its_settings_is_not_tried_twice(tmp_path: Path) -> None:
    broker = Broker(tmp_path, {"controller": "exits 2"})
    assert await broker.running == 2
    assert broker.journal() == ["controller started"]


async def test_a_silent_child_is_killed_and_comes_back(tmp_path: Path) -> None:
    broker = Broker(tmp_path, {"front-door-0": "falls silent"}, watchdog_s=0.1)
    await broker.status(lambda named: named["front-door-0"]["restarts"] >= 1)
    assert (await broker.status(lambda named: True))["front-door-1"]["restarts"] == 0
    assert await broker.stop() == 0


async def test_a_pause_of_the_whole_machine_is_nobodys_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardmq.supervisor.supervisor.POLL_INTERVAL_S", 0.01)
    loop = asyncio.get_running_loop()
    clock, paused_s = loop.time, 0
    monkeypatch.setattr(loop, "time", lambda: clock() + paused_s)
    broker = Broker(tmp_path, {"front-door-0": "falls silent"}, watchdog_s=500)
    await broker.ready.wait()
    paused_s = 1000
    while "nothing ran here for 100" not in caplog.text:
        await asyncio.sleep(0)
    named = await broker.status(lambda named: True)
    assert [child["restarts"] for child in named.values()] == [0] * len(named)
    assert "killed" not in caplog.text
    assert await broker.stop() == 0


async def test_a_child_that_will_not_drain_is_killed_in_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(tmp_path, {"shard-0": "will not stop"}, drain_timeout_s=2)
    await broker.ready.wait()
    assert await broker.stop() == 0
    assert "shard-0" in caplog.text and "not drained after 2 s: killed" in caplog.text
    assert "controller drained" in broker.journal()


async def test_stopping_while_starting_ends_what_was_started(tmp_path: Path) -> None:
    broker = Broker(tmp_path, {"shard-0": "hangs"})
    await broker.status(lambda named: named["shard-1"]["state"] == "ready")
    assert await broker.stop() == 0
    assert broker.lines == []
    assert "controller drained" in broker.journal()


async def test_nothing_is_left_in_the_runtime_directory_and_the_pointer_goes(
    tmp_path: Path,
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    pointer = json.loads((tmp_path / "data" / "broker.json").read_text())
    assert pointer["pid"] == os.getpid() and pointer["runtime_dir"] == str(tmp_path / "run")
    await broker.stop()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "data" / "broker.json").exists()


@pytest.mark.row("N2")
async def test_systemd_hears_ready_after_all_are_ready_and_stopping_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        broker = Broker(tmp_path)
        await broker.ready.wait()
        await broker.stop()
        heard = list[str]()
        while True:
            try:
                heard += systemd.recv(4096).decode().splitlines()
            except BlockingIOError:
                break
    words = [line for line in heard if line in ("READY=1", "STOPPING=1")]
    assert words == ["READY=1", "STOPPING=1"]
    assert heard[0].startswith("EXTEND_TIMEOUT_USEC=")


@pytest.mark.row("N2")
@pytest.mark.parametrize("for_us", [True, False])
async def test_systemds_watchdog_hears_that_we_live_if_it_watches_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_us: bool
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() if for_us else os.getppid()))
        broker = Broker(tmp_path)
        await broker.ready.wait()
        alive, end = 0, time.monotonic() + (30 if for_us else 1)
        while alive < 3 and time.monotonic() < end:
            try:
                alive += systemd.recv(4096).decode().splitlines().count("WATCHDOG=1")
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        await broker.stop()
    assert alive == (3 if for_us else 0)


@pytest.mark.row("N2", "N5")
async def test_systemd_hears_when_a_reload_begins_and_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        broker = Broker(tmp_path)
        broker.supervisor.reload()  # before it is ready: READY=1 is not said early
        await broker.ready.wait()
        before = time.monotonic_ns() // 1000
        broker.supervisor.reload()
        await broker.stop()
        heard = list[str]()
        while True:
            try:
                heard += systemd.recv(4096).decode().splitlines()
            except BlockingIOError:
                break
    words = [line for line in heard if line in ("READY=1", "STOPPING=1", "RELOADING=1")]
    assert words == ["READY=1", "RELOADING=1", "READY=1", "STOPPING=1"]
    since = [int(line.partition("=")[2]) for line in heard if line.startswith("MONOTONIC_USEC=")]
    assert len(since) == 1 and since[0] >= before


async def test_a_reload_tells_all_children_what_can_change_while_they_run_and_their_next_lives_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    new = replace(broker.written.shards, count=1, disk_free_min_bytes=7)
    broker.written = replace(broker.written, log_level="warning", shards=new)
    broker.supervisor.reload()
    names = {"controller", "front-door-0", "front-door-1", "shard-0", "shard-1"}
    while {line.split()[0] for line in broker.journal() if "reloaded warning" in line} != names:
        await asyncio.sleep(POLL_S)
    assert "shard-1 reloaded warning 7" in broker.journal()
    assert "shards.count: another value holds from the next start on" in caplog.text
    assert broker.supervisor.settings.shards.count == 2
    assert broker.supervisor.slots[1].plan.section["says"] == "warning 7"
    assert await broker.stop() == 0


@pytest.mark.row("N11")
async def test_settings_that_are_wrong_at_a_reload_change_nothing_and_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    broker.written = replace(broker.written, log_level="debug")
    broker.supervisor.reload()
    assert "the settings stay as they were: log_level: too much" in caplog.text
    assert broker.supervisor.settings.log_level == "info"
    assert await broker.stop() == 0
    assert not any("reloaded" in line for line in broker.journal())  # no child read its files


async def test_a_setting_can_be_set_until_the_next_start_and_only_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    broker.supervisor.set("log_level", '"error"')
    broker.supervisor.reload()  # the file does not undo it
    assert broker.supervisor.settings.log_level == "error"
    for key, value in (
        ("data_dir", '"/x"'),
        ("log_level", "}"),
        ("shards.disk_free_min_bytes", "-1"),
    ):
        broker.supervisor.set(key, value)
    assert broker.supervisor.settings.log_level == "error"
    assert caplog.text.count("not set: ") == 3
    assert await broker.stop() == 0


async def test_front_doors_let_clients_in_while_a_shard_recovers_and_systemd_hears_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        broker = Broker(tmp_path, {"shard-1": "recovers"})
        named = await broker.status(lambda named: named["front-door-1"]["state"] == "ready")
        assert (named["shard-0"]["state"], named["shard-1"]["state"]) == ("ready", "starting")
        said = "EXTEND_TIMEOUT_USEC=20000000\nSTATUS=shard-1: recovering 43 %"
        while await asyncio.get_running_loop().sock_recv(systemd, 4096) != said.encode():
            pass
        assert not broker.ready.is_set()
        assert broker.lines == []
        assert await broker.stop() == 0


@pytest.mark.row("N18")
async def test_a_second_broker_on_the_same_data_is_refused_naming_the_first(tmp_path: Path) -> None:
    first = supervised(settings_for(tmp_path), 1)
    first.open()
    with pytest.raises(
        ConfigError, match=f"data_dir: .*in use by the broker with pid {os.getpid()}"
    ):
        supervised(settings_for(tmp_path), 1).open()


@pytest.mark.parametrize("key", ["amqp_port", "http_port", "metrics_port"])
@pytest.mark.parametrize("reuse", [False, True])
async def test_a_busy_port_is_named_and_nothing_is_touched(
    tmp_path: Path, key: str, reuse: bool
) -> None:
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        ports = {"amqp_port": 0, "http_port": 0, "metrics_port": 0, key: port}
        settings = Settings(
            data_dir=str(tmp_path / "data"),
            listen=Listen(bind="127.0.0.1", **ports),
            front_doors=FrontDoors(count=2),
        )
        with pytest.raises(
            ConfigError, match=f"listen.{key}: 127.0.0.1:{port}: Address already in use"
        ):
            supervised(settings, 1).open()
    assert list(tmp_path.iterdir()) == []


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data_dir: .*/file/data: Not a directory"):
        DataDirectory(tmp_path / "file" / "data").open()


def test_a_lock_left_by_a_dead_broker_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("4194304999\n")
    directory = DataDirectory(tmp_path)
    directory.open()
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    directory.close()


def test_children_of_a_dead_broker_are_waited_for(tmp_path: Path) -> None:
    draining = DataDirectory(tmp_path)
    draining.open()
    # the supervisor is gone, a child still holds the lock
    os.pwrite(draining.lock_fd, b"4194304999\n", 0)
    with pytest.raises(ConfigError, match="in use by the broker with pid 4194304999"):
        DataDirectory(tmp_path).open(wait_s=0)
    draining.close()
    DataDirectory(tmp_path).open(wait_s=0)


def test_a_runtime_directory_belongs_to_one_broker_and_a_second_one_touches_nothing(
    tmp_path: Path,
) -> None:
    first = RuntimeDirectory(str(tmp_path / "run"), tmp_path)
    first.open()
    (tmp_path / "run" / "shard-0.sock").touch()
    with pytest.raises(
        ConfigError, match=f"runtime_dir: .*/run: in use by the broker with pid {os.getpid()}"
    ):
        supervised(settings_for(tmp_path), 2).open()
    assert (tmp_path / "run" / "shard-0.sock").exists() and not (tmp_path / "data").exists()
    first.remove()
    assert not (tmp_path / "run").exists()


def test_nothing_of_others_is_taken_out_of_a_runtime_directory(tmp_path: Path) -> None:
    for name in ("mysqld.sock", "notes", "shard-0.sock", "control.sock", binds_pipe(0, 7)):
        (tmp_path / name).touch()
    directory = RuntimeDirectory(str(tmp_path), tmp_path)
    directory.open()
    directory.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mysqld.sock", "notes"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("f", "not a directory"), ("f/r", "Not a directory"), ("r" * 80, "too long a path")],
)
def test_a_runtime_directory_that_cannot_be_used_is_named_and_nothing_is_touched(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "f").touch()
    settings = msgspec.structs.replace(settings_for(tmp_path), runtime_dir=str(tmp_path / name))
    with pytest.raises(ConfigError, match=f"runtime_dir: .*{says}"):
        supervised(settings, 2).open()
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_runtime_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="runtime_dir: .*/run: not writable"):
        supervised(settings_for(tmp_path), 2).open()
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("mode", "warnings"), [(0o750, 0), (0o755, 1)])
def test_a_data_directory_open_to_all_users_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(mode)
    # Said here: a test before this one may have run something that turns the root logger down.
    with caplog.at_level(logging.WARNING, logger="supervisor"):
        supervised(settings_for(tmp_path), 2).open()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_fewer_shards_than_the_data_has_are_refused_and_auto_starts_them_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "data" / "shard-03").mkdir(parents=True)
    with pytest.raises(ConfigError, match="shards.count: 2, but .* holds the queues of 4 shards"):
        supervised(settings_for(tmp_path), 1).open()
    supervisor = supervised(msgspec.structs.replace(settings_for(tmp_path), shards=Shards()), 1)
    supervisor.open()
    assert [slot.plan.name for slot in supervisor.slots if slot.plan.kind == "shard"] == [
        "shard-0",
        "shard-1",
        "shard-2",
        "shard-3",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
async def test_a_disk_that_refuses_everything_ends_no_stop_with_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    broker = Broker(tmp_path)
    await broker.ready.wait()
    dead = dead_disk(monkeypatch, tmp_path, number)
    with caplog.at_level(logging.ERROR, logger="supervisor"):
        assert await broker.stop() == 0
    assert {"unlink", "open"} <= dead
    assert "broker.json stays" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_a_start_on_a_dead_disk_says_so_in_one_line(tmp_path: Path) -> None:
    code = (
        "import os, sys, supervisor.__main__ as start\n"
        "def dead(*_, **__): raise OSError(5, 'Input/output error')\n"
        "os.scandir = dead\n"
        "sys.exit(start.main(sys.argv[1:]))\n"
    )
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-c", code, "--data-dir", str(tmp_path / "data"), "--bind",
               "127.0.0.1",
               "--amqp-port", "0", "--http-port", "0", "--metrics-port", "0"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"shardmq: data_dir: {tmp_path}/data: Input/output error\n"


def dead_disk(monkeypatch: pytest.MonkeyPatch, directory: Path, number: int) -> set[str]:
    """Whatever names a file below the directory fails from now on. Returns the calls that did."""
    failed: set[str] = set()

    def refuse(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[0] if arguments else "."
            if isinstance(path, (str, Path)) and str(path).startswith(str(directory)):
                failed.add(name)
                raise OSError(number, os.strerror(number))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in (
        "open",
        "unlink",
        "rmdir",
        "rename",
        "replace",
        "scandir",
        "stat",
        "listdir",
        "mkdir",
    ):
        refuse(name)
    monkeypatch.setattr(io, "open", refused(io.open, directory, number))
    return failed


def refused(real: Callable[..., Any], directory: Path, number: int) -> Callable[..., Any]:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, Path)) and str(path).startswith(str(directory)):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    return call
