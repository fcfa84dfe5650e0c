"""A node that does not lead answers the checks of itself, and leaves all else to the leader."""

from __future__ import annotations

import asyncio
import itertools
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.node_checks import CHECKS, NodeState
from shardmq.broker.controller.node_facts import NodeFacts, OwnShard, own_doors, own_shards
from shardmq.broker.controller.nodes import own_checks
from shardmq.broker.controller.nodes.own_checks import OwnChecks
from shardmq.broker.controller.nodes.own_users import OwnUsers
from shardmq.broker.controller.nodes.request_head import RequestHead
from tests.cluster.test_streams_elsewhere import Relayed

BEGIN = "/api/health/checks"
PATIENCE_S = 30.0
SERVED_AND_FOUND = 2  # the looks at the users until a login has found its user
REST_SEEN_S = 6.0  # REST_S_MAX, on a machine with other work
FACTS = NodeFacts([], {"amqp": ["10.0.0.1:5672"]}, 1, 2, 3, 4, "", 5, 6, "", [])
WELL = NodeState("shardmq@b", True, [FACTS], [], [OwnShard(3, True, "")], 1)
PARTS = {"port": "5672", "protocol": "amqp", "within": "1", "unit": "weeks"}


class Node:
    """The checks of a node that listens by TCP and has a copy of these users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = WELL
        config = ControllerConfig(
            data_dir=str(directory), runtime_dir=str(directory), boot="b", shards=1
        )
        self.checks = OwnChecks(lambda: config, lambda: self.state)

    def has(self, tags: list[str], password: str = "secret") -> None:
        hashed, algorithm = hash_new_password(password, "rabbit_password_hashing_sha256")
        row = {"name": "eve", "password_hash": hashed, "hashing_algorithm": algorithm, "tags": tags}
        (self.directory / "users.json").write_text(json.dumps([row]))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[str, int]]:
        await self.checks.start()
        server = await asyncio.get_running_loop().create_server(
            lambda: RequestHead((self.checks,), Relayed), "127.0.0.1", 0
        )
        yield server.sockets[0].getsockname()[:2]
        server.close()
        await self.checks.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.has(["monitoring"])
    return made


async def asked(
    at: tuple[str, int], path: str, password: str | None = "secret", method: str = "GET"
) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; 0 if the leader has the request."""
    reader, writer = await asyncio.open_connection(*at)
    head = f"{method} {path} HTTP/1.1\r\nHost: {at[0]}\r\n"
    if password is not None:
        head += f"Authorization: Basic {b64encode(f'eve:{password}'.encode()).decode()}\r\n"
    writer.write(f"{head}\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        first = await reader.readline()
        if not first.startswith(b"HTTP/1.1 "):
            writer.close()
            return 0, None
        rest = await reader.read()  # the connection ends with the response
    body = rest.partition(b"\r\n\r\n")[2]
    return int(first.split()[1]), json.loads(body) if body else None


@pytest.mark.parametrize("path", CHECKS)
async def test_each_check_is_answered_by_the_node_itself(node: Node, path: str) -> None:
    async with node.listening() as at:
        for end in ("", "/", "?columns=status"):
            assert (await asked(at, path.format(**PARTS) + end))[0] == 200
        assert await asked(at, path.format(**PARTS), method="HEAD") == (200, None)


@pytest.mark.parametrize(
    "path", ["alarms", "node-is-quorum-critical", "local-alarms/more", "port-listener"]
)
async def test_other_calls_are_for_the_leader(node: Node, path: str) -> None:
    async with node.listening() as at:
        assert (await asked(at, f"{BEGIN}/{path}"))[0] == 0
        assert (await asked(at, "/api/overview"))[0] == 0
        assert (await asked(at, f"{BEGIN}/local-alarms", method="POST"))[0] == 0


@pytest.mark.parametrize(
    ("changed", "check", "reason"),
    [
        pytest.param(
            {"shards": [OwnShard(3, False, ""), OwnShard(4, True, "")]},
            "is-in-service",
            "shards not ready: 3",
            id="a shard recovers",
        ),
        pytest.param(
            {"shards": [OwnShard(3, True, "disk does not answer")]},
            "ready-to-serve-clients",
            "disk does not answer: shards 3",
            id="a disk stalls",
        ),
        pytest.param({"doors": 0}, "is-in-service", "no front door is connected", id="no door"),
        pytest.param(
            {"shards": [OwnShard(3, True, "low on disk")]},
            "local-alarms",
            "There are alarms in effect",
            id="an alarm",
        ),
        pytest.param({}, "port-listener/1", "No active listener", id="another port"),
    ],
)
async def test_a_check_says_what_is_wrong_with_the_node(
    node: Node, changed: dict[str, Any], check: str, reason: str
) -> None:
    node.state = WELL._replace(**changed)
    async with node.listening() as at:
        status, said = await asked(at, f"{BEGIN}/{check}")
    assert (status, said["status"], said["reason"]) == (503, "failed", reason)


async def test_who_asks_must_log_in_as_the_copy_of_the_users_says(node: Node) -> None:
    path = f"{BEGIN}/is-in-service"
    async with node.listening() as at:
        assert (await asked(at, path, None))[0] == 401
        assert (await asked(at, path, "wrong"))[0] == 401
        node.has([])
        assert await asked(at, path) == (
            401, {"error": "not_authorised", "reason": "Not management user"},
        )  # fmt: skip
        node.has(["management"], "another")
        assert (await asked(at, path))[0] == 401
        assert (await asked(at, path, "another"))[0] == 200
        (node.directory / "users.json").write_text("[")
        assert (await asked(at, path, "another"))[0] == 200, "the users before"
        (node.directory / "users.json").unlink()
        assert (await asked(at, path, "another"))[0] == 0, "the leader knows who may log in"


async def test_a_user_who_is_deleted_during_a_login_gets_an_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, looks = OwnUsers.now(OwnUsers(str(node.directory))), itertools.count()
    monkeypatch.setattr(OwnUsers, "now", lambda _: known if next(looks) < SERVED_AND_FOUND else {})
    async with node.listening() as at:
        assert (await asked(at, f"{BEGIN}/is-in-service"))[0] == 200
        assert (await asked(at, f"{BEGIN}/is-in-service"))[0] == 0


async def test_calls_whose_body_does_not_come_are_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_checks, "CALLS_MAX", 2)
    path = f"{BEGIN}/is-in-service"
    async with node.listening() as at, asyncio.timeout(PATIENCE_S):
        calling = [await asyncio.open_connection(*at) for _ in range(2)]
        for reader, writer in calling:
            head = f"GET {path} HTTP/1.1\r\nHost: {at[0]}\r\nContent-Length: 9\r\n\r\n"
            writer.write(head.encode())
            assert (await reader.readline()).split()[1] == b"401"
        assert (await asked(at, path))[0] == 0, "the leader has this one"
        async with asyncio.timeout(REST_SEEN_S):
            for reader, _ in calling:
                await reader.read()
        assert (await asked(at, path))[0] == 200


def test_a_node_knows_which_of_its_shards_serve() -> None:
    shard = {"kind": "shard", "state": "ready", "front_door": None}
    found = {
        "children": [
            {"kind": "controller", "index": 0, "state": "ready", "front_door": None},
            {**shard, "index": 1, "info": {"serves": "yes"}},
            {**shard, "index": 2, "info": {"serves": "yes", "alarm": "low on disk"}},
            {**shard, "index": 3, "status": "has a copy, another node leads"},
            {**shard, "index": 4, "state": "stopping", "info": {"serves": "yes"}},
            {"kind": "front-door", "index": 0, "state": "ready", "front_door": 0},
            {"kind": "front-door", "index": 1, "state": "starting", "front_door": 1},
        ]
    }
    assert own_shards(found) == {
        1: OwnShard(1, True, ""),
        2: OwnShard(2, True, "low on disk"),
        3: OwnShard(3, False, ""),
        4: OwnShard(4, False, ""),
    }
    assert own_doors(found) == 1
    assert (own_shards({}), own_doors({})) == ({}, 0)
