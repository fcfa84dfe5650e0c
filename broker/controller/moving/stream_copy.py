"""Copies a stream from its life on one shard to its life on another, by offset.

The messages go in batches of whole chunks, of which one is under way at a time. The shard at the
new place knows which it has, so a copy goes on where another process has ended. What goes over
beside the messages: the positions of named consumers, and how far producers have come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from shardmq.broker.model.changes import QueuePut
from shardmq.shardd.wire import messages as wire

# What is left of a stream gets less by so many bytes a second at most, before publishers wait. What
# is published meanwhile is copied in addition. All streams that move take turns (mover.AT_ONCE).
COPY_BYTES_PER_S: Final = 32 << 20
NOT_SYNCED_S: Final = 0.005  # before messages are asked for again that are not on stable storage

# Asks a shard, and returns its answer or Refused. Raises ShardSilent.
Ask = Callable[[int, Callable[[int], wire.Message]], Awaitable[Any]]


class CopyRefused(Exception):
    """A shard does not go on; `code` is that of wire.Refused."""

    def __init__(self, shard: int, refused: wire.Refused) -> None:
        super().__init__(f"shard {shard}: {refused.text}")
        self.code = refused.code
        self.text = refused.text


class StreamCopy:
    """The copy of one stream."""

    def __init__(self, ask: Ask) -> None:
        self.left = 0  # messages that the new place does not have
        self.left_bytes = 0
        self._ask_shard = ask
        self._next: int | None = None  # the offset that the new place has next; None: not known
        # The positions that the new place was given; None: by another process.
        self._positions: dict[bytes, int] | None = None

    async def _ask(self, shard: int, message: Callable[[int], wire.Message]) -> Any:
        reply = await self._ask_shard(shard, message)
        if isinstance(reply, wire.Refused):
            raise CopyRefused(shard, reply)
        return reply

    async def copy_some(self, old: QueuePut, new: QueuePut, is_rest: bool = False) -> int:
        """Copy a batch; return how many messages it had.

        Afterwards, `left` and `left_bytes` say how much there is to copy. With `is_rest` the copy
        goes as fast as it can, and the new place is told when it has all, even if that is nothing:
        what it has may have been purged at the old place.
        """
        loop = asyncio.get_running_loop()
        began, before = loop.time(), self.left_bytes
        if self._next is None:
            found = await self._ask(new.shard, lambda n: wire.InspectStream(n, new.id, 0, 0, 0))
            self._next = int(found.end_offset)
            before = 0
        offset, self._next = self._next, None  # it is not known while a request is under way
        taken = await self._ask(old.shard, lambda n: wire.TakeChunks(n, old.id, offset))
        if taken.chunks or (is_rest and taken.behind == taken.end):
            await self._ask(
                new.shard,
                lambda n: wire.PutChunks(
                    n, new.id, taken.first, taken.behind, taken.chunks, taken.oldest,
                    taken.newest_before, taken.before,
                ),
            )  # fmt: skip
        self._next = taken.behind
        self.left, self.left_bytes = taken.end - taken.behind, taken.behind_bytes
        if not is_rest and before > self.left_bytes:
            spare_s = (before - self.left_bytes) / COPY_BYTES_PER_S - (loop.time() - began)
            await asyncio.sleep(max(spare_s, 0))
        return int(taken.behind - taken.first)

    async def copy_rest(
        self, old: QueuePut, new: QueuePut, goes_on: Callable[[], bool] = lambda: True
    ) -> int:
        """Copy all that is left of a stream to which nobody publishes; return how many messages.

        It ends early when `goes_on` returns false.
        """
        copied = 0
        while True:
            some = await self.copy_some(old, new, is_rest=True)
            if not goes_on():
                return copied + some
            if not some and not self.left:
                return copied
            copied += some
            if not some:
                await asyncio.sleep(NOT_SYNCED_S)

    async def copy_places(self, old: QueuePut, new: QueuePut) -> None:
        """Give the new place all that the old one knows beside the messages."""
        places = await self._ask(old.shard, lambda n: wire.TakePlaces(n, old.id))
        await self._ask(
            new.shard,
            lambda n: wire.PutPlaces(n, new.id, places.positions, places.producers),
        )
        self._positions = places.positions

    async def copy_last_positions(self, old: QueuePut, new: QueuePut) -> None:
        """Give the new place the positions that were stored at the old one since `copy_places`.

        A position that has changed at the new place stays. If another process has copied the
        places, nobody knows which have changed: consumers may read some messages again.
        """
        if self._positions is None:
            return
        places = await self._ask(old.shard, lambda n: wire.TakePlaces(n, old.id))
        now, before = places.positions, self._positions
        changed = {name for name in {*now, *before} if now.get(name) != before.get(name)}
        if changed:
            new_ones = {name: now[name] for name in changed if name in now}
            old_ones = {name: before[name] for name in changed if name in before}
            await self._ask(new.shard, lambda n: wire.PutPlaces(n, new.id, new_ones, b"", old_ones))
        self._positions = now
