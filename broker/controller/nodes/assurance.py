"""The assurance that a node still leads when it answers a question about the catalog.

A leader that was stopped for a while, or is cut off, does not know that another node leads. It
cannot change anything, because the others do not confirm it. But what it says of its catalog may be
old. So it asks them before it answers: it syncs nothing new, and that is confirmed as a change is.
"""

from __future__ import annotations

import asyncio

from shardmq.cluster.replicated_files import ReplicatedFiles


class Assurance:
    """Gives the assurance to all who ask. Those who ask meanwhile share the next one."""

    def __init__(self, files: ReplicatedFiles, root: str) -> None:
        self._files = files
        self._root = root
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def leads(self) -> None:
        """Return when this node has led at some time after the call. Raises Deposed, OSError."""
        if self._next is None:
            self._next = asyncio.create_task(self._ask(self._running))
        await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        await asyncio.to_thread(self._files.sync_directory, self._root)
