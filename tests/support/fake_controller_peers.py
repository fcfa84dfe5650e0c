"""Shards in memory, as the authority sees them.

They answer at once, or when they are told to.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from typing import Any

from shardmq.shardd.wire import messages as wire


class FakeShards:
    """Shards that know only their queues.

    `answer` may be replaced; `hold` keeps replies back.
    """

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.hold = False
        self.received: list[tuple[int, Any]] = []
        self.queues: dict[int, wire.QueueSpec] = {}
        self.closed: set[int] = set()  # queues that take no more consumers
        self.refuse: dict[int, wire.Refused] = {}
        self._number = 0
        self._held: list[tuple[Future[Any], Any]] = []

    def is_away(self, shard: int) -> bool:
        return False

    def request(
        self, shard: int, message: Callable[[int], wire.Message], wait_s: float = 0.0
    ) -> Future[Any]:
        self._number += 1
        sent = message(self._number)
        self.received.append((shard, sent))
        reply: Future[Any] = asyncio.get_running_loop().create_future()
        self._held.append((reply, sent))
        if not self.hold:
            self.release()
        return reply

    def release(self) -> None:
        for reply, sent in self._held:
            reply.set_result(self._answer(sent))
        self._held.clear()

    def _answer(self, sent: Any) -> wire.Done | wire.Refused:
        match sent:
            case wire.CreateQueues():
                self.queues |= {spec.id: spec for spec in sent.queues}
            case wire.DeleteQueue():
                if sent.queue in self.refuse and (sent.if_unused or sent.if_empty):
                    return self.refuse[sent.queue]
                if self.queues.pop(sent.queue, None) is None:
                    return wire.Refused(sent.request, 404, "gone")
                return wire.Done(sent.request, messages=3)
            case wire.Count():
                if sent.queue not in self.queues or sent.queue in self.closed:
                    return wire.Refused(sent.request, 404, "gone")
                return wire.Done(sent.request, messages=7, consumers=2)
            case wire.DropVhost():
                self.queues = {
                    id: spec for id, spec in self.queues.items() if spec.vhost != sent.vhost
                }
        return wire.Done(sent.request)
