"""Read from the boards of the shards where the streams of this node begin and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from shardmq.shardd.wire.board import BoardView, Range, path_of

POLL_S: Final = 0.005  # how late a wait for news on the boards returns


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A stream by its shard and the id of its queue, and an offset that it may have passed."""

    shard: int
    id: int
    after: int = -1


class Boards:
    """The boards of the shards in one runtime directory, which are opened when they are needed."""

    def __init__(self) -> None:
        self._views: dict[int, BoardView] = {}

    def range_of(self, runtime_dir: str, shard: int, id: int) -> Range | None:
        """Return the range of a stream; None if its shard has not said it."""
        view = self._views.get(shard)
        if view is None:
            view = self._views[shard] = BoardView(path_of(runtime_dir, shard))
        return view.range_of(id)

    def ranges(self, runtime_dir: str, wanted: list[Wanted]) -> dict[int, Range]:
        """Return the ranges that are known, by id."""
        found = ((each.id, self.range_of(runtime_dir, each.shard, each.id)) for each in wanted)
        return {id: range for id, range in found if range is not None}


def have_gone_on(wanted: list[Wanted], ranges: dict[int, Range]) -> bool:
    """Return whether a stream has more than it had."""
    return any(each.id in ranges and ranges[each.id].next > each.after for each in wanted)


async def wait_until(met: Callable[[], bool], wait_s: float) -> None:
    """Wait until `met` returns true, but at most `wait_s` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + wait_s
    while not met() and loop.time() < end:
        await asyncio.sleep(min(POLL_S, max(end - loop.time(), 0)))
