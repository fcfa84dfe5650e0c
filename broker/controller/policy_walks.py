"""Tells the shards which queues have other arguments since the policies changed, in slices.

100,000 queues would hold the event loop for seconds. So a walk over the queues of a vhost looks at
some of them in each pass of the loop, and all walks together have one slice in a pass.

What changes between two slices does no harm. A walk compares what was in force before its change
with what is in force when it comes to a queue. If the policies change again, the walk of that
change comes behind it and tells the shard what differs since. A queue that was declared meanwhile
was made with the policies in force. One that was deleted is passed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.pending import INTERNAL_ERROR, Pending
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.policies import Policies, queue_arguments, queue_kind
from shardmq.shardd.wire import messages as wire

SLICE_S = 0.005  # the loop goes on after so long, and one queue more
# The most queues in one message to a shard; the shard's clients wait for it.
CHANGED_QUEUES_MAX = 1000

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Walk:
    """A walk over the queues of a vhost, for requests that changed its policies.

    left: the queues that were not looked at, None before the first slice.
    waits: 1 until all are looked at, and the answers of shards that are awaited.
    """

    vhost: Vhost
    before: Policies
    requests: list[Pending]
    left: Iterator[QueuePut] | None = None
    may_differ: Callable[[str, str], bool] = field(default=lambda kind, name: False)
    error: str = ""
    waits: int = 1

    def differs(self, queue: QueuePut) -> bool:
        """Return whether the queue has other effective arguments than it had before."""
        kind = queue_kind(queue.arguments)
        if not self.may_differ(kind, queue.name):
            return False
        definition = self.before.of(kind, queue.name).definition
        return queue_arguments(queue.arguments, definition) != self.vhost.queue_arguments(queue)

    def one_came(self) -> None:
        self.waits -= 1
        if self.waits:
            return
        for pending in self.requests:
            if self.error:
                pending.refuse(INTERNAL_ERROR, self.error)
            pending.one_came()

    def shard_came(self, reply: Future[Any]) -> None:
        if (error := reply.exception()) is not None:
            self.error = str(error)
        self.one_came()


class PolicyWalks:
    """All walks of the controller, the oldest first."""

    def __init__(
        self,
        catalog: Catalog,
        shards: ShardLinks,
        spec: Callable[[QueuePut], wire.QueueSpec | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare; `spec` returns what a shard is told of a queue, None if it is told later.

        `clock` returns seconds.
        """
        self._catalog = catalog
        self._shards = shards
        self._spec = spec
        self._clock = clock
        self._walks: deque[_Walk] = deque()
        self._fresh: dict[Vhost, _Walk] = {}  # not begun, and not sealed

    def begin(self, pending: Pending, vhost: Vhost, before: Policies) -> None:
        """Have the shards told, soon; `pending` waits until they have answered.

        Changes share a walk while no shard is told of any queue between them, such as the policies
        of an import.
        """
        pending.waits += 1
        if (walk := self._fresh.get(vhost)) is not None:
            walk.requests.append(pending)
            return
        walk = self._fresh[vhost] = _Walk(vhost, before, [pending])
        self._walks.append(walk)
        if len(self._walks) == 1:
            asyncio.get_running_loop().call_soon(self._do_slice)

    def seal(self) -> None:
        """Give changes from now on another walk: a shard is told what is in force."""
        self._fresh.clear()

    def _do_slice(self) -> None:
        self.seal()
        walk = self._walks[0]
        try:
            is_done = self._look(walk)
        except Exception:  # the walks behind this one go on
            log.exception("policies of vhost '%s' do not reach all queues", walk.vhost.name)
            walk.error, is_done = "internal error", True
        if is_done:
            self._walks.popleft()
            walk.one_came()
        if self._walks:
            asyncio.get_running_loop().call_soon(self._do_slice)

    def _look(self, walk: _Walk) -> bool:
        """Look at some queues, tell their shards, and return whether all were looked at."""
        end, changed, is_done = self._clock() + SLICE_S, 0, True
        if walk.left is None:
            walk.may_differ = walk.vhost.policies.may_differ(walk.before)
            walk.left = iter([*walk.vhost.queues.values()])
        by_shard: dict[int, list[wire.QueueSpec]] = {}
        for known in walk.left:
            queue = self._catalog.queue_by_id(known.id)
            if queue is not None and walk.differs(queue) and (spec := self._spec(queue)):
                by_shard.setdefault(queue.shard, []).append(spec)
                changed += 1
            if changed == CHANGED_QUEUES_MAX or self._clock() > end:
                is_done = False
                break
        for shard, specs in by_shard.items():
            walk.waits += 1
            done = self._shards.request(shard, lambda n, specs=specs: wire.CreateQueues(n, specs))  # type: ignore[misc]
            done.add_done_callback(walk.shard_came)
        return is_done
