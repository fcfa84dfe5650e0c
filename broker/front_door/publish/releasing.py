"""Messages that are due at an exchange that kept them: routed as if they had been published now.

A shard hands them over as it does dead letters, and keeps them until those that got the copies have them on stable
storage (dead_letters.py). Their own ttl begins now. What has no queue to go to is dropped: nobody waits for a return.
Messages that are alike are decided about once, neighbours for the same queues leave as one run.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from shardmq.broker.amqp import contents, properties
from shardmq.broker.amqp.released import released
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model import checks, own_letters
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.routing import Message, goes_by_key, keeping, route_message
from shardmq.broker.routing.spreading import HASH_PROPERTIES
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import messages as wire

# No client's: theirs begin with 1.
CONNECTION = 0
NO_TTL = 0xFFFFFFFF
PERSISTENT = 2
ALONE = 7  # of a Run: it has more keys (nobody is to see those of BCC), or says where it goes when it dies
QUEUES_MAX = 65535  # ids in one record: their count is a u16

# Start, stop, messages, names, expiration, delivery mode, priority, whether it is alone: amqp/released.pyx
Run = tuple[int, int, int, bytes, bytes | None, int, int, bool]


class Targets(NamedTuple):
    """Queues by shard: (shard, queue ids, whether one of them is durable); whether one of them is a stream."""

    by_shard: tuple[tuple[int, tuple[int, ...], bool], ...]
    to_stream: bool


class _Together(NamedTuple):
    """What a run of neighbours has in common."""

    targets: Targets
    ttl_ms: int | None
    persistent: bool
    priority: int


class Releasing:
    """One batch, being packed. `channel`: by which the batch knows what is refused of it."""

    def __init__(
        self,
        links: ShardLinks,
        vhost: Vhost,
        batch: wire.DeadLetters,
        exchange: str,
        channel: int,
        now_s: float,
    ) -> None:
        self._packer = links.packer
        self._vhost = vhost
        self._batch = batch
        self._exchange = exchange
        self._channel = channel
        self._now_ms = int(now_s * 1000)
        self._by_key = goes_by_key(vhost.table, exchange, is_due=True)
        self._known: dict[bytes, Targets] = {}  # by names
        self.dropped = 0

    def run(self) -> None:
        data, runs = released(self._batch.messages, self._batch.count)
        with memoryview(data) as view:
            of: _Together | None = None
            start = stop = count = 0
            for run in runs if self._by_key else self._singly(data, runs):
                together = self._together(view, run)
                if together != of or run[ALONE]:
                    self._pack(of, view[start:stop], count)
                    of, start, count = together, run[0], 0
                stop, count = run[1], count + run[2]
                if run[ALONE]:
                    self._pack_one(together, bytes(view[start:stop]))
                    of, count = None, 0
            self._pack(of, view[start:stop], count)

    def _singly(self, data: bytes, runs: list[Run]) -> list[Run]:
        """Where headers or chance decide about each message."""
        found: list[Run] = []
        for start, stop, messages, *look in runs:
            at = start
            for names, props, body in contents.split(data[start:stop], messages):
                size = 8 + len(names) + len(props) + len(body)
                found.append((at, at + size, 1, *look))  # type: ignore[arg-type]
                at += size
        return found

    def _together(self, view: memoryview, run: Run) -> _Together:
        start, stop, _, names, expiration, mode, priority, alone = run
        if alone or not self._by_key:
            targets = self._targets(self._message(bytes(view[start:stop])))
        else:
            known = self._known.get(names)
            if known is None:
                known = self._known[names] = self._targets(Message(_key(names)))
            targets = known
        return _Together(targets, _ttl_ms(expiration), mode == PERSISTENT, priority)

    def _message(self, stored: bytes) -> Message:
        """All that any exchange may look at; it waits nowhere any more."""
        _, key, props, _ = contents.read_stored(stored)
        said = properties.read(props)
        headers = said.headers or {}
        facts = {
            name: value for name in HASH_PROPERTIES if (value := getattr(said, name)) is not None
        }
        more = [each for name in ("CC", "BCC") for each in _texts(headers.get(name))]
        return Message(
            key.decode("utf-8", "replace"), headers, facts, random.getrandbits(64), tuple(more)
        )

    def _targets(self, message: Message) -> Targets:
        by_shard: dict[int, tuple[tuple[int, ...], bool]] = {}
        routed = route_message(self._vhost.table, self._exchange, message)
        there = self._vhost.queues
        found = [there[name] for name in (*routed.queues, *routed.kept) if name in there]
        for shard, queue in keeping.named(found):
            ids, durable = by_shard.get(shard, ((), False))
            by_shard[shard] = ((*ids, queue.id), durable or queue.durable)
        parts = tuple(
            (shard, ids[at : at + QUEUES_MAX], durable)
            for shard, (ids, durable) in by_shard.items()
            for at in range(0, len(ids), QUEUES_MAX)
        )
        return Targets(parts, any(is_stream(queue.arguments) for queue in found))

    def _pack_one(self, together: _Together, stored: bytes) -> None:
        """What its headers say decides how it lies in its queues."""
        headers = properties.read(contents.read_stored(stored)[2]).headers or {}
        keeps_bcc = not together.targets.to_stream
        if not keeps_bcc:
            stored = properties.without_header(stored, own_letters.BCC)
        self._pack(together, stored, 1, own_letters.marks_of(headers, keeps_bcc=keeps_bcc))

    def _pack(
        self, together: _Together | None, data: memoryview | bytes, count: int, marks: int = 0
    ) -> None:
        if together is None or not count:
            return
        if not together.targets.by_shard:
            self.dropped += count
            return
        late_ms, ttl_ms = (
            (0, NO_TTL) if together.ttl_ms is None else checks.in_record(together.ttl_ms)
        )
        if together.targets.to_stream:
            late_ms = 0  # streams find messages by their time
        for shard, ids, durable in together.targets.by_shard:
            self._packer.add_stored(
                shard,
                list(ids),
                data,
                CONNECTION,
                self._channel,
                0,
                self._now_ms + late_ms,
                ttl_ms,
                together.priority,
                together.persistent,
                durable,  # whatever the message is: the old one is settled for it
                count,
                marks=marks,
            )


def _key(names: bytes) -> str:
    return names[names[0] + 2 :].decode("utf-8", "replace")


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _ttl_ms(expiration: bytes | None) -> int | None:
    """It was checked when it was published, unless a dead letter brought it."""
    if expiration is None or not expiration.isdigit():
        return None
    return min(int(expiration), checks.EXPIRY_MS_MAX)
