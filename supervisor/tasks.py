"""Run the tasks of the supervisor itself, for as long as the broker runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from shardmq.supervisor.config import ConfigError

# Exit statuses of the supervisor. A child too ends with REFUSED when it refuses its settings.
DRAINED: Final = 0
GAVE_UP: Final = 1
REFUSED: Final = 2

log = logging.getLogger("supervisor")


class Tasks:
    """Tasks that go on until they are cancelled; one that ends by itself ends the broker.

    give_up: ends the broker for a reason, with an exit status.
    """

    def __init__(self, give_up: Callable[[str, int], None]) -> None:
        self._give_up = give_up
        self._all: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self.ended)
        self._all.append(task)

    def ended(self, task: asyncio.Task[None]) -> None:
        """End the broker, unless the task was cancelled: nobody does its work any more.

        With a ConfigError, the broker may not go on as it is set up.
        """
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ConfigError):
            self._give_up(str(error), REFUSED)
            return
        why = "it returned" if error is None else error
        log.critical("a task of the supervisor has ended: %s", why, exc_info=error)
        self._give_up("the broker stops", GAVE_UP)

    def cancel(self) -> None:
        for task in self._all:
            task.cancel()
