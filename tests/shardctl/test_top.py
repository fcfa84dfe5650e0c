"""shardctl top: what keys change, and the screen on a terminal with a real broker."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from shardmq.supervisor.cli.screen_state import LEFT, RIGHT, VIEWS, ScreenState
from shardmq.supervisor.cli.top import Screen
from tests.support.brokers import Api
from tests.support.real_broker import PATIENCE_S, SOURCE, RealBroker


def vhosts() -> list[str]:
    return ["/", "v"]


def pressed(*keys: str) -> ScreenState:
    state = ScreenState()
    for key in keys:
        state.press(key, vhosts)
    return state


def test_keys_choose_a_list() -> None:
    assert [pressed(key).view.name for key in ("1", "2", "3", "4", "5", "9")] == [
        "overview", "queues", "connections", "groups", "shards", "overview"
    ]  # fmt: skip
    assert pressed("\t").view.name == pressed(RIGHT).view.name == "queues"
    assert pressed(LEFT).view.name == "shards"


def test_keys_choose_an_order_for_each_list() -> None:
    assert (pressed("2").column.shown, pressed("2").is_reverse) == ("ready", True)
    assert pressed("2", "s").column.shown == "unacked"
    assert pressed("2", "SSSS").column.shown == "state"
    assert not pressed("2", "r").is_reverse
    assert pressed("2", "s", "3", "2").column.shown == "unacked"
    assert not pressed("2", "S", "S").is_reverse  # names begin with A


def test_a_filter_is_typed_and_taken_back() -> None:
    state = pressed("/", "qx\x7fü", "1")
    assert (state.filter, state.is_typing) == ("qü1", True)
    state.press("\n", vhosts)
    assert not state.is_typing and "filter: qü1" in state.line()
    assert state.shows({"name": "my-Qü1"}) and not state.shows({"name": "other"})
    state.press("\x1b", vhosts)
    assert state.filter == ""


def test_a_vhost_is_chosen_in_turn() -> None:
    assert [pressed(*["v"] * n).vhost for n in range(4)] == [None, "/", "v", None]


def test_pause_and_end() -> None:
    assert pressed(" ").is_paused and not pressed("  ").is_paused
    assert pressed("q").is_over


def test_only_a_cluster_has_a_list_of_nodes() -> None:
    assert pressed("2", "n", "6").view.name == "queues"
    state = ScreenState(is_cluster=True)
    for key in ("n", "6", LEFT):
        state = ScreenState(is_cluster=True)
        state.press(key, vhosts)
        assert state.view.name == "nodes"
    state.press(RIGHT, vhosts)
    assert state.view.name == "overview" and state.sort_by("node")
    assert not ScreenState().sort_by("node")


NODE_ROWS = [
    {"name": "shardmq@a", "running": True, "is_leader": True, "shards": [0], "mem_used": 5_000_000,
     "disk_free": 7_000_000, "uptime": 9_000, "sockets_used": 3, "processors": 2, "version": "1.2",
     "alarms": ["etcd does not answer"]},
    {"name": "shardmq@b", "running": False, "is_leader": False, "shards": [1], "alarms": []},
]  # fmt: skip


class ClusterApi:
    """The answers of a cluster whose second node is down."""

    def get(self, *path: str, **query: str) -> object:
        shards = [
            {"shard": n, "queues": 4 + n, "node": row["name"]} for n, row in enumerate(NODE_ROWS)
        ]
        totals = {"messages_ready": 1, "messages_unacknowledged": 0}
        objects = dict.fromkeys(("connections", "channels", "consumers", "queues"), 1)
        queue = {"name": "q", "vhost": "/", "shard": 1, "node": "shardmq@b"}
        answers = {
            "overview": {"queue_totals": totals, "object_totals": objects},
            "shards": shards,
            "processes": [{"name": "shard-0", "kind": "shard", "index": 0, "node": "shardmq@a"}],
            "nodes": [dict(row) for row in NODE_ROWS],
            "queues": {"items": [queue]},
        }
        return answers[path[0]]


def drawn(view: str) -> list[list[str]]:
    """Return the words of the lines that a cluster shows."""
    state = ScreenState(is_cluster=True)
    assert state.look_at(view)
    screen = Screen(ClusterApi(), state)  # type: ignore[arg-type]
    screen.poll()
    console = Console(width=300, file=io.StringIO())
    console.print(screen.draw(50, has_keys=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "n: nodes" in text
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_the_nodes_of_a_cluster_are_shown() -> None:
    rows = {line[0]: line[1:] for line in drawn("nodes")}
    assert rows["shardmq@a"][:4] == ["running", "true", "[0]", "4"]
    assert rows["shardmq@a"][4:] == ["3", "2", "5", "7", "9", "1.2", '["etcd does not answer"]']
    assert rows["shardmq@b"] == ["down", "false", "[1]", "5"]


def test_queues_and_processes_of_a_cluster_have_their_node() -> None:
    lines = drawn("overview")
    assert ["/", "q", "1", "shardmq@b"] in lines
    assert any(line[0] == "shard-0" and line[-1] == "shardmq@a" for line in lines)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_each_list_is_shown_of_a_real_broker_in_each_order(
    broker: RealBroker, api: Api, name: str, view: object
) -> None:
    assert isinstance(view, type(VIEWS[0]))
    api(f"/api/queues/%2F/{name}", method="PUT", body={})
    body = {"type": "x-consistent-hash", "arguments": {"x-shards": 2}}
    api(f"/api/exchanges/%2F/{name}-x", method="PUT", body=body)
    for column in view.columns:
        words = ["top", "--count", "1", "--view", view.name, "--sort", column.shown]
        words += ["-p", "/", "--data-dir", str(broker.data_dir)]
        if view.name != "shards":
            words += ["--filter", name]
        found = CliRunner().invoke(app, words, env={"COLUMNS": "200", "LINES": "40"})
        assert found.exit_code == 0, found.output
        assert f"by {column.shown}," in found.output
    if view.kind in ("queues", "virtual-queues"):
        assert name in found.output


def test_what_is_no_list_or_column_is_status_64(broker: RealBroker) -> None:
    at = ["--data-dir", str(broker.data_dir)]
    found = CliRunner().invoke(app, ["top", "--view", "users", *at])
    assert (found.exit_code, "one of overview, queues" in found.stderr) == (64, True)
    found = CliRunner().invoke(app, ["top", "--sort", "colour", *at])
    assert (found.exit_code, "--sort: one of vhost, name" in found.stderr) == (64, True)


def test_keys_work_on_a_terminal_and_leave_it_as_it_was(broker: RealBroker) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "shardmq.supervisor.cli", "top", "--interval", "0.3"]
    with subprocess.Popen(
        [*command, "--data-dir", str(broker.data_dir)],
        cwd=SOURCE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as running:
        shown = ""

        def wait_for(pattern: str) -> None:
            nonlocal shown
            until = time.monotonic() + PATIENCE_S
            while not re.search(pattern, shown):
                assert time.monotonic() < until, shown[-2000:]
                if select.select([master], [], [], 0.5)[0]:
                    shown += os.read(master, 1 << 16).decode(errors="replace")

        try:
            wait_for(r"\[overview\] by ready")
            os.write(master, b"2s")
            wait_for(r"\[queues\] by unacked")
            os.write(master, b"/abc\n")
            wait_for(r"filter: abc ")
            os.write(master, b"5")
            wait_for(r"\[shards\] by cpu %")
            os.write(master, b"q")
            assert running.wait(PATIENCE_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                running.kill()
            os.close(slave)
            os.close(master)
