"""Asks the shard that remembers it which publishes are the first of their ids, when there are several front doors.

An exchange's ids are remembered by a shard that its name chooses, a queue's by its own. A publish with such an id waits
for the answer, and what its channel sends behind it waits too; all of one read are asked about at once. The shard hears
what became of each first copy, and tells those that follow one of another front door. One that is away, or does not
answer within ANSWER_S_MAX, has forgotten all it knew: the message passes. So nothing waits for ever, nothing is lost.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.shared.deduplication import Copy, Id, Rule
from shardmq.shardd.wire import messages as wire

ANSWER_S_MAX = 2.0
# Who follows another's copy is told no after this, at the latest.
FOLLOW_S_MAX = 30.0
# Ids in one question: a shard looks them up at once, while its clients wait.
QUESTION_IDS_MAX = 4096
DIGEST_BYTES = 16

Thing = ExchangePut | QueuePut


class Wanted(NamedTuple):
    """A message's id at an exchange or queue that wants each once. `ttl_ms`: how long it is remembered, 0: for ever."""

    thing: Thing
    size: int
    id: bytes
    ttl_ms: int

    @classmethod
    def of(cls, thing: Thing, rule: Rule, id: Id, ttl_ms: int | None) -> Wanted:
        return cls(thing, rule.size, digest(id), ttl_ms or 0)


def digest(id: Id) -> bytes:
    kind, value = id
    data = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return blake2b(data, digest_size=DIGEST_BYTES, person=kind.encode()[:DIGEST_BYTES]).digest()


def key_of(thing: Thing) -> int | str:
    return thing.id if isinstance(thing, QueuePut) else f"{thing.vhost}/{thing.name}"


def home_of(thing: Thing, shards: int) -> int:
    """The shard that remembers what came to it."""
    if isinstance(thing, QueuePut):
        return thing.shard
    return zlib.crc32(f"{thing.vhost}/{thing.name}".encode()) % shards


class _Known(Copy):
    """One that a shard knows by a number: the first of its id, or one that follows another's."""

    __slots__ = ("_number", "_once", "_shard", "is_first", "since")

    def __init__(self, once: Once, shard: int, number: int, since: float) -> None:
        super().__init__()
        self._once = once
        self._shard = shard
        self._number = number
        self.since = since  # loop time
        self.is_first = False

    def _ended(self, *, stored: bool) -> None:
        if self.is_first:
            self._once.ended(self._shard, self._number, stored=stored)


class Asked:
    """The answers about some publishes, used in the order of the questions."""

    def __init__(self) -> None:
        self._found: dict[tuple[int | str, bytes], deque[tuple[Copy, bool]]] = {}

    def add(self, what: Wanted, copy: Copy, *, again: bool) -> None:
        self._found.setdefault((key_of(what.thing), what.id), deque()).append((copy, again))

    def take(self, thing: Thing, id: Id) -> tuple[Copy | None, bool]:
        """The copy that counts, and whether this is another one; None: nobody knows."""
        found = self._found.get((key_of(thing), digest(id)))
        return found.popleft() if found else (None, False)

    def release(self) -> None:
        """What was not used after all was not published."""
        for found in self._found.values():
            for copy, again in found:
                if not again:
                    copy.lost()
        self._found.clear()


class _Question:
    """To one shard, about ids under the numbers from `first` on."""

    def __init__(
        self, once: Once, shard: int, first: int, wants: list[Wanted], since: float
    ) -> None:
        self.shard = shard
        self.first = first
        self.wants = wants
        self.copies = [_Known(once, shard, first + i, since) for i in range(len(wants))]
        self.is_open = True
        self._once = once

    def message(self, request: int) -> wire.AskOnce:
        things: dict[int | str, tuple[int, int]] = {}  # place, size
        ids = []
        for want in self.wants:
            place, _ = things.setdefault(key_of(want.thing), (len(things), want.size))
            ids.append((place, want.id, want.ttl_ms))
        return wire.AskOnce(
            request, self.first, [(key, size) for key, (_, size) in things.items()], ids
        )

    def read(self, answer: asyncio.Future[wire.Control], asked: Asked) -> None:
        self.is_open = False
        verdicts = _verdicts(answer)
        for i, want in enumerate(self.wants):
            copy = self.copies[i]
            verdict = verdicts[i] if i < len(verdicts) else None
            if verdict != wire.FOLLOWS:
                self._once.close(self.shard, self.first + i)
            if verdict == wire.FIRST:
                copy.is_first = True
            elif verdict == wire.AGAIN:
                copy.confirmed()
            if verdict is not None:
                asked.add(want, copy, again=verdict != wire.FIRST)

    def give_up(self, answer: asyncio.Future[wire.Control]) -> None:
        """Nobody waits for it any more."""
        unused = Asked()
        self.read(answer, unused)
        unused.release()


def _verdicts(answer: asyncio.Future[wire.Control]) -> bytes:
    if answer.cancelled() or answer.exception() is not None:
        return b""
    said = answer.result()
    return said.verdicts if isinstance(said, wire.ToldOnce) else b""


class Once:
    """Of one front door."""

    def __init__(self, links: ShardLinks) -> None:
        self._links = links
        self._last_number = 0
        self._open: dict[
            tuple[int, int], tuple[_Question, _Known]
        ] = {}  # by shard and number: asked, or following
        self._became: dict[int, wire.OnceBecame] = {}  # by shard, to be told
        self._exchanges: dict[tuple[str, str], ExchangePut] = {}  # asked about, by vhost and name

    # -- questions -----------------------------------------------------------------------------------------

    async def ask(self, wants: Iterable[Wanted]) -> Asked:
        """Whoever is asked meanwhile, and gives up, has published nothing."""
        sent = {self._send(question): question for question in self._questions(wants)}
        try:
            if sent:
                await asyncio.wait(sent, timeout=ANSWER_S_MAX)
        except asyncio.CancelledError:
            for answer, question in sent.items():
                answer.add_done_callback(question.give_up)
            raise
        asked = Asked()
        for answer, question in sent.items():
            if answer.done():
                question.read(answer, asked)
            else:
                answer.add_done_callback(question.give_up)
        return asked

    def _questions(self, wants: Iterable[Wanted]) -> Iterator[_Question]:
        by_shard: dict[int, list[Wanted]] = {}
        links = self._links.links
        for want in wants:
            by_shard.setdefault(home_of(want.thing, len(links)), []).append(want)
            if isinstance(want.thing, ExchangePut):
                self._exchanges[want.thing.vhost, want.thing.name] = want.thing
        now = asyncio.get_running_loop().time()
        for shard, found in by_shard.items():
            for at in range(0, len(found) if links[shard].up else 0, QUESTION_IDS_MAX):
                part = found[at : at + QUESTION_IDS_MAX]
                yield _Question(self, shard, self._last_number + 1, part, now)
                self._last_number += len(part)

    def _send(self, question: _Question) -> asyncio.Future[wire.Control]:
        for number, copy in enumerate(question.copies, question.first):
            # What becomes of those that follow may be told before the answer is looked at.
            self._open[question.shard, number] = question, copy
        return self._links.ask(question.shard, question.message)

    def close(self, shard: int, number: int) -> None:
        """It follows nobody."""
        self._open.pop((shard, number), None)

    # -- what becomes of them ------------------------------------------------------------------------------

    def ended(self, shard: int, number: int, *, stored: bool) -> None:
        """A first copy of ours."""
        if not self._became:
            asyncio.get_running_loop().call_soon(self._tell)
        said = self._became.setdefault(shard, wire.OnceBecame([], []))
        (said.stored if stored else said.lost).append(number)

    def _tell(self) -> None:
        became, self._became = self._became, {}
        for shard, said in became.items():
            if self._links.links[shard].up:
                self._links.tell(shard, said)

    def told(self, shard: int, said: wire.OnceBecame) -> None:
        """First copies that some of ours follow."""
        for numbers, stored in ((said.stored, True), (said.lost, False)):
            for number in numbers:
                found = self._open.pop((shard, number), None)
                if found is not None:
                    found[1].confirmed() if stored else found[1].lost()

    def restarted(self, shard: int) -> None:
        """It knows nothing any more, but is asked again what it had not answered."""
        self._lose(
            key
            for key, (question, _) in self._open.items()
            if key[0] == shard and not question.is_open
        )

    def look_after(self, now: float) -> None:
        """From time to time: nobody is to wait for ever for what a shard knew that is away, or forgot."""
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
        """What comes later to an exchange of the name of one that was deleted begins anew."""
        for key, exchange in list(self._exchanges.items()):
            if catalog.exchange(*key) is None:
                del self._exchanges[key]
                shard = home_of(exchange, len(self._links.links))
                if self._links.links[shard].up:
                    self._links.tell(shard, wire.ForgetOnce(str(key_of(exchange))))
