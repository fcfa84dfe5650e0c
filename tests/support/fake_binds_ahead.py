"""Binds ahead of a front door in tests, which go to no controller."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from shardmq.broker.front_door.hot_state import NO_PIPE, BindRun, BindRuns
from shardmq.broker.front_door.links.catalog_requests import RunWaits
from shardmq.broker.shared.control import Answer

NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # takes all that is written


class FakeBindsAhead:
    """Binds of the queue "a" that are put in force, while there is room.

    A client waits for those of the exchange "logs" until `record` is called. `line` is the front
    door's line to the controller. What it is asked ends the runs.
    """

    def __init__(self, line: Any) -> None:
        self.runs = BindRuns()
        self.runs.first = lambda run: None
        self.has_room(True)
        self.all: list[tuple[str, BindRun]] = []
        self.recorded: list[tuple[str, tuple[str, str, str]]] = []
        line.ahead = self
        self._ask = line.ask
        line.ask = line.request = self.ask

    @property
    def epoch(self) -> int:
        return self.runs.epoch

    @property
    def bound(self) -> list[tuple[str, tuple[str, str, str]]]:
        """Return the connection and (exchange, queue, routing key) of each bind, sorted."""
        return sorted((owner, end) for owner, run in self.all for end in run.ends)

    @property
    def waited(self) -> list[BindRun]:
        """Return the runs with binds that a client waits for."""
        return [run for _, run in self.all if run.waits is not None and run.ends]

    def record(self, done: int, code: int) -> None:
        """Answer all that is waited for: of each run the first `done` are recorded.

        The others are refused with `code`, unless it is 0: then all are recorded.
        """
        for owner, run in self.all:
            if run.waits is not None and run.ends:
                bound = min(done, len(run.ends)) if code else len(run.ends)
                self.recorded += [(owner, end) for end in run.answered(len(run.ends))[:bound]]
                run.waits.came(bound, code, "refused")

    def outlive(self, vhost: str, source: str, queue: str) -> bool:
        return source == "logs"

    def may_bind(self, vhost: str, source: str, queue: str) -> bool:
        return queue == "a"

    def bind(
        self,
        vhost: str,
        ends: list[Any],
        owner: str,
        user: str,
        waits: RunWaits | None = None,
    ) -> BindRun | None:
        if self.runs.pipe == NO_PIPE:
            return None
        run = BindRun(self.runs, vhost, ends)
        run.waits = waits
        run.go_on(lambda: (b"head", b"tail"))
        self.all.append((owner, run))
        return run

    def ask(self, *request: Any) -> asyncio.Future[Answer]:
        self.runs.epoch += 1
        answer: asyncio.Future[Answer] = self._ask(*request)
        return answer

    def has_room(self, is_so: bool) -> None:
        """Let the pipe to the controller have room, or none."""
        self.runs.pipe = self.runs.waited_pipe = NOWHERE if is_so else NO_PIPE

    def queue_is_there(self, vhost: str, name: str) -> None: ...
