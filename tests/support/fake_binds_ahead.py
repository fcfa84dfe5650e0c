"""Binds ahead of a front door in tests, which go to no controller."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from shardmq.broker.front_door.hot_state import NO_PIPE, BindRun, BindRuns
from shardmq.broker.shared.control import Answer

NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # takes all that is written


class FakeBindsAhead:
    """Binds of the queue "a" that are put in force, while there is room.

    `line` is the front door's line to the controller. What it is asked ends the runs.
    """

    def __init__(self, line: Any) -> None:
        self.runs = BindRuns()
        self.runs.first = lambda run: None
        self.has_room(True)
        self.all: list[tuple[str, BindRun]] = []
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

    def may_bind(self, vhost: str, source: str, queue: str) -> bool:
        return queue == "a"

    def bind(self, vhost: str, ends: list[Any], owner: str, user: str) -> BindRun | None:
        if self.runs.pipe == NO_PIPE:
            return None
        run = BindRun(self.runs, vhost, ends)
        run.go_on(lambda: (b"head", b"tail"))
        self.all.append((owner, run))
        return run

    def ask(self, *request: Any) -> asyncio.Future[Answer]:
        self.runs.epoch += 1
        answer: asyncio.Future[Answer] = self._ask(*request)
        return answer

    def has_room(self, is_so: bool) -> None:
        """Let the pipe to the controller have room, or none."""
        self.runs.pipe = NOWHERE if is_so else NO_PIPE

    def queue_is_there(self, vhost: str, name: str) -> None: ...
