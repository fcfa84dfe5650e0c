"""Keep who waits until a shard has made last what was settled there."""

from __future__ import annotations

from typing import Protocol

from shardmq.shardd.wire import messages as wire


class Waiting(Protocol):
    """A commit that waits. `confirmed` or `lost` is called once."""

    def confirmed(self) -> None: ...
    def lost(self) -> None: ...


class SettledWaits:
    """Keeps who waits for the answers of one shard, at most one for each channel that commits."""

    def __init__(self) -> None:
        self._asked: dict[int, Waiting] = {}  # by the number of the question
        self._last = 0

    def ask(self, queues: list[int], waiting: Waiting) -> wire.SyncSettled:
        """Return the question to be sent behind the settles, which `waiting` hears the answer to.

        It hears of it as of a batch: `confirmed`, or `lost` if the messages may come again.
        """
        self._last += 1
        self._asked[self._last] = waiting
        return wire.SyncSettled(self._last, queues)

    def answered(self, what: wire.SettledSynced) -> None:
        """Tell who asked, if it still waits."""
        waiting = self._asked.pop(what.number, None)
        if waiting is None:
            return
        if what.lasts:
            waiting.confirmed()
        else:
            waiting.lost()

    def take(self) -> list[Waiting]:
        """Take all who wait, because no answer will come, or none is waited for."""
        taken = list(self._asked.values())
        self._asked.clear()
        return taken
