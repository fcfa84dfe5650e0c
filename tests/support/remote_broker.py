"""A broker whose front doors and controller reach its shards as if these were on other nodes.

`python -m tests.support.remote_broker` takes the flags of `python -m shardmq.supervisor`. The
shards listen at 127.0.0.2, and the others know them by TCP only.

VARIABLE may name a file with the addresses that are to be dialled, by shard, as JSON: a test puts
something between the processes so. The addresses of the shards are in the file `shards.json` beside
the data then, and the test writes the other file when it has seen them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shardmq.shardd.wire import dialer

HOST = "127.0.0.2"
VARIABLE = "SHARDMQ_TEST_RELAYED"
KEYS = "SHARDMQ_TEST_KEYS"  # the section of the keys, if they are not to be random
# If this is set, sessions are connected again by ZeroMQ, which must not be.
RECONNECTING = "SHARDMQ_TEST_RECONNECTING"
ADDRESSES = "SHARDMQ_TEST_ADDRESSES"
MODULES = {
    "shard": "shardmq.shardd",
    "front-door": "shardmq.broker.front_door",
    "controller": "shardmq.broker.controller",
}


def main() -> None:
    # settings come by a descriptor: else this is the supervisor
    if not sys.argv[-1].startswith("fd:"):
        _supervise()
    section = json.loads(os.pread(int(sys.argv[-1].removeprefix("fd:")), 1 << 20, 0))
    kind = "shard" if "shard" in section else "front-door" if "door" in section else "controller"
    if kind == "front-door":
        _teach_front_door(_addresses())
    elif kind == "controller":
        _teach_controller(_addresses())
    if os.environ.get(RECONNECTING):
        _reconnect()
    runpy.run_module(MODULES[kind], run_name="__main__", alter_sys=True)


def _addresses() -> dict[int, str]:
    relayed = os.environ.get(VARIABLE)
    while relayed and not Path(relayed).exists():
        time.sleep(0.01)
    text = Path(relayed).read_text() if relayed else os.environ[ADDRESSES]
    return {int(shard): address for shard, address in json.loads(text).items()}


def _teach_front_door(addresses: dict[int, str]) -> None:
    from shardmq.broker.front_door.door import FrontDoor

    class Taught(FrontDoor):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            for shard, address in addresses.items():
                self._links.learn(shard, address)

    from shardmq.broker.front_door import process

    process.FrontDoor = Taught  # type: ignore[attr-defined]


def _teach_controller(addresses: dict[int, str]) -> None:
    from shardmq.broker.controller.peers.shard_links import ShardLinks

    start, init = ShardLinks.start, ShardLinks.__init__

    def knows_none(
        self: ShardLinks, count: int, incarnation: int, local: object = None, *more: Any
    ) -> None:
        init(self, count, incarnation, (), *more)

    async def taught(self: ShardLinks, runtime_dir: Path) -> None:
        await start(self, runtime_dir)
        for shard, address in addresses.items():
            self.learn(shard, address)

    ShardLinks.__init__ = knows_none  # type: ignore[assignment, method-assign]
    ShardLinks.start = taught  # type: ignore[method-assign]


def _reconnect() -> None:
    """Let ZeroMQ connect again, and let neither side look at the ends of connections."""
    import zmq

    from shardmq.shardd.sessions import Sessions

    prepare = dialer.prepare

    def prepared(made: Any, keys: Any) -> None:
        prepare(made, keys)
        made.setsockopt(zmq.ROUTING_ID, os.urandom(8))

    dialer.prepare = prepared  # type: ignore[attr-defined]
    dialer.RECONNECT_MS = 10  # type: ignore[misc]
    dialer.ENDS = 0  # type: ignore[assignment]
    Sessions.ended = lambda self: []  # type: ignore[method-assign]


def _supervise() -> None:
    import zmq

    from shardmq.supervisor.__main__ import main as supervisor_main
    from shardmq.supervisor.config import Settings
    from shardmq.supervisor.plan import ChildPlan, ClusterPlan, Listening, children, shard_count

    @functools.cache
    def sockets(count: int) -> list[socket.socket]:
        found = [socket.create_server((HOST, 0)) for _ in range(count)]
        for each in found:
            each.set_inheritable(True)
        return found

    @functools.cache
    def keys() -> dict[str, Any]:
        if given := os.environ.get(KEYS):
            return dict(json.loads(given))
        public, secret = zmq.curve_keypair()
        return {"public": public.decode(), "secret": secret.decode(), "silent_s": 10.0}

    def plan(
        settings: Settings, cores: int, runtime_dir: str, boot: str, listening: Listening
    ) -> list[ChildPlan]:
        listeners = sockets(shard_count(settings, cores))
        addresses = {
            shard: f"tcp://{HOST}:{each.getsockname()[1]}" for shard, each in enumerate(listeners)
        }
        os.environ[ADDRESSES] = json.dumps(addresses)
        if os.environ.get(VARIABLE):
            seen = Path(settings.data_dir).with_name("shards.json")
            seen.with_suffix(".new").write_text(json.dumps(addresses))
            seen.with_suffix(".new").rename(seen)
        fds = tuple(each.fileno() for each in listeners)
        cluster = ClusterPlan(0, tuple(range(len(fds))), fds, keys())
        made = children(settings, cores, runtime_dir, boot, listening, cluster)
        return [_remote(each) for each in made]

    def _remote(plan: ChildPlan) -> ChildPlan:
        """Let a child know no shard but those that it is taught."""
        if plan.module not in MODULES.values():
            return plan
        nothing: dict[str, Any] = {"shards": []} if plan.kind == "front-door" else {}
        return dataclasses.replace(plan, module=__spec__.name, section={**plan.section, **nothing})

    sys.exit(supervisor_main(planner=plan))


if __name__ == "__main__":
    main()
