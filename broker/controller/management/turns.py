"""Long work is done in slices; between two of them everybody else has a turn."""

from __future__ import annotations

import asyncio
import os


async def others_first() -> None:
    """The controller's other calls, and before them whatever process waits for this processor: shards and front doors
    have messages in hand."""
    os.sched_yield()
    await asyncio.sleep(0)
