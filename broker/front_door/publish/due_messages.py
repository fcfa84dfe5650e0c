"""Messages that are due at an exchange that delayed them: routed as if they had been published now.

A shard hands them over as it does dead letters, and keeps them until the shards that got the copies
have them on stable storage (dead_letters.py). A message's own ttl begins now. A message without a
queue is dropped: nobody waits for a return. Messages that are alike are decided about once,
neighbours for the same queues leave as one run.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from shardmq.broker.amqp import contents, properties
from shardmq.broker.amqp.contents import released
from shardmq.broker.front_door.publish.stored_runs import NO_TTL, PERSISTENT, StoredRun
from shardmq.broker.front_door.publish.targets import ShardQueues, by_shard, existing
from shardmq.broker.model import checks, message_dlx
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import Message, goes_by_key, route_message
from shardmq.broker.routing.spreading import hash_facts
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import messages as wire

# The connection of what no client publishes: theirs begin with 1.
CONNECTION = 0
# Index of a Run: it has more keys (nobody is to see those of BCC), or says where it goes when it
# dies.
ALONE = 7

# Start, stop, messages, names, expiration, delivery mode, priority, whether it is alone:
# amqp/contents.pyx
Run = tuple[int, int, int, bytes, bytes | None, int, int, bool]


class Targets(NamedTuple):
    """The queues of a message by shard, and whether one of them is a stream."""

    by_shard: list[ShardQueues]
    to_stream: bool


class _Common(NamedTuple):
    """The values that all messages of a run have in common."""

    targets: Targets
    ttl_ms: int | None
    persistent: bool
    priority: int


class DueMessages:
    """The decisions about a batch of due messages."""

    def __init__(
        self, vhost: Vhost, batch: wire.DeadLetters, exchange: str, channel: int, now_s: float
    ) -> None:
        """`channel` stands for the batch when a shard refuses some of it."""
        self._vhost = vhost
        self._batch = batch
        self._exchange = exchange
        self._channel = channel
        self._now_ms = int(now_s * 1000)
        self._by_key = goes_by_key(vhost.table, exchange, is_due=True)
        self._known: dict[bytes, Targets] = {}  # by exchange and key
        self._runs: list[StoredRun] = []
        self.dropped = 0  # messages that had no queue to go to

    def runs(self) -> list[StoredRun]:
        """Return what is to be published. Neighbours that go to the same queues are one run."""
        data, runs = released(self._batch.messages, self._batch.count)
        view = memoryview(data)
        common: _Common | None = None
        start = stop = count = 0
        for run in runs if self._by_key else self._singly(data, runs):
            own = self._common(view, run)
            if own != common or run[ALONE]:
                self._add(common, view[start:stop], count)
                common, start, count = own, run[0], 0
            stop, count = run[1], count + run[2]
            if run[ALONE]:
                self._add_one(own, bytes(view[start:stop]))
                common, count = None, 0
        self._add(common, view[start:stop], count)
        return self._runs

    def _singly(self, data: bytes, runs: list[Run]) -> list[Run]:
        """Return runs of one message, for an exchange that looks at headers or asks chance."""
        found: list[Run] = []
        for start, stop, messages, *facts in runs:
            at = start
            for names, props, body in contents.split(data[start:stop], messages):
                size = 8 + len(names) + len(props) + len(body)
                found.append((at, at + size, 1, *facts))  # type: ignore[arg-type]
                at += size
        return found

    def _common(self, view: memoryview, run: Run) -> _Common:
        start, stop, _, names, expiration, mode, priority, alone = run
        if alone or not self._by_key:
            targets = self._targets(_routable(bytes(view[start:stop])))
        else:
            known = self._known.get(names)
            if known is None:
                key = names[names[0] + 2 :].decode("utf-8", "replace")
                known = self._known[names] = self._targets(Message(key))
            targets = known
        return _Common(targets, _ttl_ms(expiration), mode == PERSISTENT, priority)

    def _targets(self, message: Message) -> Targets:
        routed = route_message(self._vhost.table, self._exchange, message)
        queues = existing(self._vhost, (*routed.queues, *routed.kept))
        return Targets(by_shard(queues), any(is_stream(queue.arguments) for queue in queues))

    def _add_one(self, common: _Common, stored: bytes) -> None:
        """Add a message whose headers decide which marks its record has."""
        headers = properties.read(contents.read_stored(stored)[2]).headers or {}
        keeps_bcc = not common.targets.to_stream
        if not keeps_bcc:
            stored = properties.without_header(stored, message_dlx.BCC)
        self._add(common, stored, 1, message_dlx.marks_of(headers, keeps_bcc=keeps_bcc))

    def _add(
        self, common: _Common | None, data: memoryview | bytes, count: int, marks: int = 0
    ) -> None:
        if common is None or not count:
            return
        if not common.targets.by_shard:
            self.dropped += count
            return
        late_ms, ttl_ms = (0, NO_TTL) if common.ttl_ms is None else checks.in_record(common.ttl_ms)
        if common.targets.to_stream:
            late_ms = 0  # streams find messages by their time
        for shard, queue_ids, durable in common.targets.by_shard:
            run = (
                shard,
                queue_ids,
                data,
                CONNECTION,
                self._channel,
                0,
                self._now_ms + late_ms,
                ttl_ms,
                common.priority,
                common.persistent,
                durable,  # for transient messages too: the old copy is settled for this one
                count,
                False,
                marks,
            )
            self._runs.append(run)


def _routable(stored: bytes) -> Message:
    """Return all that an exchange may look at. There is no delay: it is over."""
    _, key, props, _ = contents.read_stored(stored)
    said = properties.read(props)
    headers = said.headers or {}
    more = [each for name in ("CC", "BCC") for each in _texts(headers.get(name))]
    facts, chance = hash_facts(said), random.getrandbits(64)
    return Message(key.decode("utf-8", "replace"), headers, facts, chance, tuple(more))


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _ttl_ms(expiration: bytes | None) -> int | None:
    """Return the ttl, None if it is no number, as a dead letter may have it."""
    if expiration is None or not expiration.isdigit():
        return None
    return min(int(expiration), checks.EXPIRY_MS_MAX)
