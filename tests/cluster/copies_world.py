"""Nodes with copies in one event loop, over socket pairs, and a record store in memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from shardmq.cluster.following import FollowerOfCopies, HeldFile, NotLeading
from shardmq.cluster.frame_streams import FrameStream
from shardmq.cluster.leading import LeaderOfCopies
from shardmq.cluster.operations import Belongs, CopiedDirectory, OperationLog
from shardmq.cluster.record_store import RecordAway
from shardmq.cluster.rules import Lead, Record, Settings, Swap
from shardmq.cluster.secret import Keys, keys_of, tls_context
from shardmq.cluster.shared_ends import SharedEnd
from shardmq.shardd.store.files import Files, OsFiles

SETTINGS = Settings(
    lag_s=1.0, heartbeat_s=0.05, retry_s=0.05, restart_wait_s=0.1, disk_stall_s=20.0
)
PATIENCE_S = 20.0


@cache
def cluster_keys() -> Keys:
    return keys_of("a secret of tests", "tests")


class Store:
    """The record in memory; `is_away` answers nothing, `loses` carries out without an answer."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.revision = 0
        self.is_away = False
        self.loses = False
        self.asked_in_vain = 0
        self.watchers: list[Callable[[Record | None, int], None]] = []

    async def read(self) -> tuple[Record | None, int]:
        await asyncio.sleep(0)
        if self.is_away:
            self.asked_in_vain += 1
            raise RecordAway("on purpose")
        return self.record, self.revision

    async def swap(self, record: Record, revision: int) -> int | Swap:
        await asyncio.sleep(0)
        if self.is_away:
            self.asked_in_vain += 1
            return Swap.UNKNOWN
        if revision != self.revision:
            return Swap.REFUSED
        self.record, self.revision = record, self.revision + 1
        for watcher in list(self.watchers):
            watcher(record, self.revision)
        return Swap.UNKNOWN if self.loses else self.revision


class CopiesNode:
    """A node, whose process may be killed and started again."""

    def __init__(
        self,
        world: CopiesWorld,
        name: str,
        files: Files,
        root: str,
        belongs: Belongs,
    ) -> None:
        self.world = world
        self.name = name
        self.files = files
        self.root = root
        self.belongs = belongs
        self.life = 0
        self.follower: FollowerOfCopies | None = None
        self.leader: LeaderOfCopies | None = None
        self.log_bytes_max = 64 << 20
        self.methods: list[str] | None = None  # None: those whose library is installed
        self.founds = True
        self.why = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def held(self) -> HeldFile:
        return HeldFile(self.files, f"{self.root}-held.json")

    def start(self) -> None:
        self.life += 1
        self.task = asyncio.create_task(self._run())

    async def kill(self) -> None:
        """End the process without a word; what it has written stays."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.follower = self.leader = None

    async def _run(self) -> None:
        store, settings = self.world.store, self.world.settings
        log = OperationLog(self.log_bytes_max)
        directory = CopiedDirectory(self.files, self.root, self.belongs)
        self.follower = FollowerOfCopies(
            self.name,
            self.life,
            self.held,
            directory,
            log,
            store,
            self.world.connect,
            settings,
            founds=f"store-{self.name}-{self.life}" if self.founds else "",
            is_alone=self.world.is_alone,
        )
        if self.methods is not None:
            self.follower._methods = self.methods
        watchers = store.watchers
        watchers.append(told := self.follower.recorded)
        try:
            lead = await self.follower.run()
            watchers.remove(told)
            self.follower = None
            await self._lead(lead, log)
        finally:
            for watcher in watchers[:]:
                if getattr(watcher, "__self__", None) in (self.follower, self.leader):
                    watchers.remove(watcher)

    async def _lead(self, lead: Lead, log: OperationLog) -> None:
        store = self.world.store
        leader = LeaderOfCopies(
            self.name, self.life, lead, log, store, self.files, self.root, self.belongs,
            self.world.settings, compression=self.world.compression,
        )  # fmt: skip
        self.leader = leader
        store.watchers.append(told := leader.recorded)
        try:
            self.why = await leader.run()
        finally:
            store.watchers.remove(told)
            self.leader = None


class CopiesWorld:
    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.compression = "none"
        self.is_alone = False  # followers apply in the thread of the loop
        self.is_shared = True  # the ends of the leader, by TLS, with the threads that sync
        self.store = Store()
        self.nodes: dict[str, CopiesNode] = {}
        self.cut: set[str] = set()  # nodes that nobody reaches
        self.mute: set[str] = set()  # nodes whose port is open while nobody answers
        self.asked_mute = asyncio.Event()  # somebody waits for one of them
        self.pipes: list[FrameStream] = []

    def node(
        self,
        name: str,
        root: Path | str,
        files: Files | None = None,
        belongs: Belongs = lambda path: True,
    ) -> CopiesNode:
        node = CopiesNode(self, name, files or OsFiles(0o600), str(root), belongs)
        self.nodes[name] = node
        return node

    async def connect(self, to: str) -> FrameStream:
        node = self.nodes[to]
        if to in self.cut or (node.leader is None and node.follower is None):
            raise ConnectionRefusedError(to)
        if to in self.mute:
            self.asked_mute.set()
            await asyncio.Event().wait()
        if node.leader is None:
            raise NotLeading(node.life)
        mine, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        if self.is_shared:
            keys = cluster_keys()
            served = FrameStream(node.leader.serve)
            SharedEnd(theirs, tls_context(keys, server=True), served, node.leader.lock)
            tls = tls_context(keys, server=False)
            _, stream = await loop.create_connection(
                FrameStream, sock=mine, ssl=tls, server_hostname=""
            )
        else:
            _, served = await loop.create_connection(
                partial(FrameStream, node.leader.serve), sock=theirs
            )
            _, stream = await loop.create_connection(FrameStream, sock=mine)
        self.pipes.append(served)
        return stream

    def cut_all(self) -> None:
        for stream in self.pipes:
            stream.abort()
        self.pipes.clear()

    async def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Return the first true value of the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := condition()):
                await asyncio.sleep(0.005)
        return found

    async def leader(self, *names: str) -> LeaderOfCopies:
        found: LeaderOfCopies = await self.until(
            lambda: next(
                (
                    node.leader
                    for node in self.nodes.values()
                    if node.leader is not None and (not names or node.name in names)
                ),
                None,
            )
        )
        return found

    async def in_sync(self, *names: str) -> None:
        await self.until(
            lambda: self.store.record is not None and set(self.store.record.in_sync) == set(names)
        )

    async def close(self) -> None:
        for node in self.nodes.values():
            if node.task is not None:
                with contextlib.suppress(Exception):
                    await node.kill()
