"""Asks shards which publishes are the first of their ids: deduplication at a front door.

An exchange or queue with the argument `x-message-deduplication` lets the first message of each id
pass (broker/shared/deduplication.py). A shard remembers the ids: a queue's own shard, and for an
exchange the shard that the exchange's name chooses. A publish with an id waits for the answer, and
so does what its channel sends behind it; all ids of one read are asked about at once. The front
door tells the shard what became of each first copy, and the shard tells the front doors whose
publishes follow that copy. A shard that is away, or does not answer within ANSWER_S_MAX, has
forgotten all it knew: the message passes. So nothing waits for ever and nothing is lost.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from shardmq.broker.front_door.links.shard_link import Unconfirmed
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.shared.deduplication import DedupRule, Id
from shardmq.shardd.wire import messages as wire

ANSWER_S_MAX = 2.0
# A publish that follows another one's copy is nacked after this time, at the latest.
FOLLOW_S_MAX = 30.0
# Ids in one question: a shard looks them up at once, while its clients wait.
QUESTION_IDS_MAX = 4096
DIGEST_BYTES = 16

Thing = ExchangePut | QueuePut


class DedupId(NamedTuple):
    """The id of a message at an exchange or queue, which remembers `size` of them.

    The id is remembered for `ttl_ms`, 0 for ever.
    """

    thing: Thing
    size: int
    id: bytes
    ttl_ms: int

    @classmethod
    def of(cls, thing: Thing, rule: DedupRule, id: Id, ttl_ms: int | None) -> DedupId:
        return cls(thing, rule.size, digest(id), ttl_ms or 0)


def rule_of(thing: Thing | None) -> DedupRule | None:
    """Return how an exchange or queue tells duplicates, None if it takes them."""
    return DedupRule.of(thing.arguments) if thing is not None and thing.arguments else None


def ids_of(things: Iterable[Thing], headers: Mapping[str, Any]) -> list[DedupId]:
    """Return the ids of a message with these headers at its exchange and queues."""
    found = []
    for thing in things:
        rule = DedupRule.of(thing.arguments)
        id = rule.id_of(headers) if rule is not None else None
        if rule is not None and id is not None:
            found.append(DedupId.of(thing, rule, id, rule.ttl_of(headers)))
    return found


def digest(id: Id) -> bytes:
    """Return what a shard knows an id by. Ids of two types are two ids."""
    kind, value = id
    data = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return blake2b(data, digest_size=DIGEST_BYTES, person=kind.encode()[:DIGEST_BYTES]).digest()


def key_of(thing: Thing) -> int | str:
    """Return what a shard knows an exchange or queue by."""
    return thing.id if isinstance(thing, QueuePut) else f"{thing.vhost}/{thing.name}"


def home_of(thing: Thing, shards: Sequence[int]) -> int:
    """Return the number of the shard that remembers the ids of an exchange or queue.

    shards: the numbers of all shards, in order.
    """
    if isinstance(thing, QueuePut):
        return thing.shard
    return shards[zlib.crc32(f"{thing.vhost}/{thing.name}".encode()) % len(shards)]


class Copy:
    """A publish whose id a shard was asked about: the first of its id, or one that follows another.

    The shard knows it by a number. The first copy is on its way to `shards` batches, and hears what
    becomes of them as those do that want a confirm (Unconfirmed in links/shard_link.py). Its
    followers are answered as it is.
    """

    __slots__ = (
        "_channel",
        "_connection",
        "_failed",
        "_followers",
        "_number",
        "_seq",
        "_service",
        "_shard",
        "is_first",
        "shards",
        "since",
    )
    in_sequence = False  # the confirms of the channel answer for x-sequence

    def __init__(self, service: DedupService, shard: int, number: int, since: float) -> None:
        """`since` is the time of the event loop in seconds at which the shard was asked."""
        self._service = service
        self._shard = shard
        self._number = number
        self.since = since
        self.is_first = False
        self._connection = self._channel = self._seq = 0
        self._failed = False
        self._followers: list[Unconfirmed] = []
        self.shards = 1  # batches that are not confirmed, and the caller while it packs

    def published(self, connection: int, channel: int, seq: int) -> None:
        """Remember by whom it was published. `seq` is its confirm number, 0 without one."""
        self._connection, self._channel, self._seq = connection, channel, seq

    def follow(self, follower: Unconfirmed) -> None:
        """Tell somebody who published the same id what becomes of this copy."""
        if self.shards:
            self._followers.append(follower)
        elif self._failed:
            follower.lost()
        else:
            follower.confirmed()

    def refuse(self, connection: int, channel: int, first: int, last: int) -> None:
        """Hear that a shard refused publishes first..last, 0 for those without confirm number."""
        if (connection, channel) == (self._connection, self._channel) and (
            first <= self._seq <= last or not first
        ):
            self._failed = True

    def lost(self) -> None:
        self._failed = True
        self.confirmed()

    def confirmed(self) -> None:
        self.shards -= 1
        if self.shards:
            return
        if self.is_first:
            self._service.ended(self._shard, self._number, stored=not self._failed)
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.lost() if self._failed else follower.confirmed()


class Copies(NamedTuple):
    """Copies at the exchange and queues of a message: it is the first, or came again after them."""

    first: list[Copy]
    again: list[Copy]


class DedupAnswers:
    """The answers of shards about some publishes, used in the order of the questions."""

    def __init__(self) -> None:
        self._found: dict[tuple[int | str, bytes], deque[tuple[Copy, bool]]] = {}

    def add(self, what: DedupId, copy: Copy, *, again: bool) -> None:
        self._found.setdefault((key_of(what.thing), what.id), deque()).append((copy, again))

    def take(self, thing: Thing, id: Id) -> tuple[Copy | None, bool]:
        """Return the first copy, and whether the message is another one; None when nobody knows."""
        found = self._found.get((key_of(thing), digest(id)))
        return found.popleft() if found else (None, False)

    def release(self) -> None:
        """Forget the rest: what was not used after all was not published."""
        for found in self._found.values():
            for copy, again in found:
                if not again:
                    copy.lost()
        self._found.clear()


class _Question:
    """A question to one shard, about ids under the numbers from `first` on."""

    def __init__(
        self, service: DedupService, shard: int, first: int, ids: list[DedupId], since: float
    ) -> None:
        self.shard = shard
        self.first = first
        self.ids = ids
        self.copies = [Copy(service, shard, first + i, since) for i in range(len(ids))]
        self.is_open = True
        self._service = service

    def message(self, request: int) -> wire.DedupAsk:
        things: dict[int | str, tuple[int, int]] = {}  # index in the message, size
        ids = []
        for each in self.ids:
            index, _ = things.setdefault(key_of(each.thing), (len(things), each.size))
            ids.append((index, each.id, each.ttl_ms))
        return wire.DedupAsk(
            request, self.first, [(key, size) for key, (_, size) in things.items()], ids
        )

    def read(self, answer: asyncio.Future[wire.Control], answers: DedupAnswers) -> None:
        self.is_open = False
        verdicts = _verdicts(answer)
        for i, each in enumerate(self.ids):
            copy = self.copies[i]
            verdict = verdicts[i] if i < len(verdicts) else None
            if verdict != wire.FOLLOWS:
                self._service.close(self.shard, self.first + i)
            if verdict == wire.FIRST:
                copy.is_first = True
            elif verdict == wire.STORED_BEFORE:
                copy.confirmed()
            if verdict is not None:
                answers.add(each, copy, again=verdict != wire.FIRST)

    def give_up(self, answer: asyncio.Future[wire.Control]) -> None:
        """Read an answer that nobody waits for any more: nothing of it is published."""
        unused = DedupAnswers()
        self.read(answer, unused)
        unused.release()


def _verdicts(answer: asyncio.Future[wire.Control]) -> bytes:
    if answer.cancelled() or answer.exception() is not None:
        return b""
    said = answer.result()
    return said.verdicts if isinstance(said, wire.DedupVerdicts) else b""


class DedupService:
    """All that one front door asks shards about ids, and hears from them."""

    def __init__(self, links: ShardLinks) -> None:
        self._links = links
        self._last_number = 0
        # By shard and number: copies that are asked about, or follow a copy of another publish.
        self._open: dict[tuple[int, int], tuple[_Question, Copy]] = {}
        self._became: dict[int, wire.DedupOutcome] = {}  # by shard, not told yet
        self._exchanges: dict[tuple[str, str], ExchangePut] = {}  # asked about, by vhost and name
        self.duplicates = 0  # publishes dropped at exchanges and queues

    # -- questions -----------------------------------------------------------------------------

    async def ask(self, ids: Iterable[DedupId]) -> DedupAnswers:
        """Ask the shards concerned. A caller that is cancelled meanwhile has published nothing."""
        sent = {self._send(question): question for question in self._questions(ids)}
        try:
            if sent:
                await asyncio.wait(sent, timeout=ANSWER_S_MAX)
        except asyncio.CancelledError:
            for answer, question in sent.items():
                answer.add_done_callback(question.give_up)
            raise
        answers = DedupAnswers()
        for answer, question in sent.items():
            if answer.done():
                question.read(answer, answers)
            else:
                answer.add_done_callback(question.give_up)
        return answers

    def _questions(self, ids: Iterable[DedupId]) -> Iterator[_Question]:
        shards: dict[int, list[DedupId]] = {}
        links, homes = self._links.links, self._homes()
        for each in ids:
            shards.setdefault(home_of(each.thing, homes), []).append(each)
            if isinstance(each.thing, ExchangePut):
                self._exchanges[each.thing.vhost, each.thing.name] = each.thing
        now = asyncio.get_running_loop().time()
        for shard, found in shards.items():
            for at in range(0, len(found) if links[shard].up else 0, QUESTION_IDS_MAX):
                some = found[at : at + QUESTION_IDS_MAX]
                yield _Question(self, shard, self._last_number + 1, some, now)
                self._last_number += len(some)

    def _homes(self) -> Sequence[int]:
        """Return the numbers of all shards, in order.

        All front doors of a cluster agree on them, also one that was started while a node was down.
        """
        return self._links.of_cluster or sorted(link.shard for link in self._links.known)

    def _send(self, question: _Question) -> asyncio.Future[wire.Control]:
        for number, copy in enumerate(question.copies, question.first):
            # What becomes of a followed copy may be heard before the answer is looked at.
            self._open[question.shard, number] = question, copy
        return self._links.ask(question.shard, question.message)

    def close(self, shard: int, number: int) -> None:
        """Forget a copy that follows nobody."""
        self._open.pop((shard, number), None)

    # -- what becomes of the copies ------------------------------------------------------------

    def ended(self, shard: int, number: int, *, stored: bool) -> None:
        """Tell the shard soon what became of a first copy of this front door."""
        if not self._became:
            asyncio.get_running_loop().call_soon(self._tell)
        said = self._became.setdefault(shard, wire.DedupOutcome([], []))
        (said.stored if stored else said.lost).append(number)

    def _tell(self) -> None:
        became, self._became = self._became, {}
        for shard, said in became.items():
            if self._links.links[shard].up:
                self._links.tell(shard, said)

    def told(self, shard: int, said: wire.DedupOutcome) -> None:
        """Hear what became of first copies that some publishes of this front door follow."""
        for numbers, stored in ((said.stored, True), (said.lost, False)):
            for number in numbers:
                found = self._open.pop((shard, number), None)
                if found is not None:
                    found[1].confirmed() if stored else found[1].lost()

    def restarted(self, shard: int) -> None:
        """Nack what follows copies the shard has forgotten.

        What it had not answered it is asked again.
        """
        self._lose(
            key
            for key, (question, _) in self._open.items()
            if key[0] == shard and not question.is_open
        )

    def tick(self, now: float) -> None:
        """Nack what would wait for ever: the shard is away, or silent for FOLLOW_S_MAX."""
        if not self._open:
            return
        away = {link.shard for link in self._links.links if not link.up}
        self._lose(
            key
            for key, (question, copy) in self._open.items()
            if not question.is_open and (key[0] in away or now - copy.since > FOLLOW_S_MAX)
        )

    def _lose(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in list(keys):
            self._open.pop(key)[1].lost()

    def catalog_changed(self, catalog: Catalog) -> None:
        """Have the shards forget the ids of exchanges that were deleted."""
        for key, exchange in list(self._exchanges.items()):
            if catalog.exchange(*key) is None:
                del self._exchanges[key]
                shard = home_of(exchange, self._homes())
                if self._links.links[shard].up:
                    self._links.tell(shard, wire.DedupForget(str(key_of(exchange))))
