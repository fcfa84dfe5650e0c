"""The second of an id is answered as the first is; what was not stored may come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.publish.dedup_service import Copy, DedupService, ids_of, key_of
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.deduplication import HEADER, SIZE_DEFAULT, DedupRule
from shardmq.shardd.dedup_ids import DedupIds
from shardmq.shardd.wire import messages as wire
from tests.support.answered import Answered

PEER = 0


class Remembering:
    """One front door and the shard that remembers the ids of a queue."""

    def __init__(self, **arguments: Any) -> None:
        self.queue = QueuePut(
            "/", "q", 7, 0, arguments={"x-message-deduplication": True, **arguments}
        )
        self.of_cluster: list[int] | None = None
        self.links = self.known = [SimpleNamespace(shard=0, up=True)]
        self.now = 0
        self._shard = DedupIds()
        self._service = DedupService(self)
        self._peers: Any = {PEER: SimpleNamespace(tell=lambda said: self._service.told(0, said))}

    def __len__(self) -> int:
        return self._shard.count(key_of(self.queue))

    def ask(self, shard: int, make: Callable[[int], Any]) -> asyncio.Future[Any]:
        question = make(1)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(wire.DedupVerdicts(1, self._shard.ask(PEER, question, self.now)))
        return answer

    def tell(self, shard: int, what: Any) -> None:
        self._shard.became(PEER, what, self._peers)

    async def look(self, id: Any, now: int = 0) -> tuple[Copy, bool]:
        """Return the copy of a message with this id, and whether it is another one."""
        self.now = now
        answers = await self._service.ask(ids_of([self.queue], {HEADER: id}))
        rule = DedupRule.of(self.queue.arguments)
        assert rule is not None
        copy, again = answers.take(self.queue, rule.id_of({HEADER: id}) or ("", ""))
        assert copy is not None
        return copy, again


async def heard() -> None:
    """Let the front door tell the shard, and the shard the front door."""
    for _ in range(3):
        await asyncio.sleep(0)


async def first(ids: Remembering, shards: int = 2, seq: int = 7) -> Copy:
    """Of id "a", published on channel 3 of connection 1, on its way to shards."""
    copy, again = await ids.look("a")
    assert not again
    copy.published(1, 3, seq)
    copy.shards += shards
    copy.confirmed()
    return copy


async def again(ids: Remembering) -> Answered:
    copy, known = await ids.look("a")
    assert known
    answered = Answered()
    copy.follow(answered)
    return answered


async def test_the_second_waits_for_the_first() -> None:
    ids = Remembering()
    copy = await first(ids)
    second = await again(ids)
    copy.confirmed()
    await heard()
    assert second.said == []
    copy.confirmed()
    await heard()
    assert second.said == ["ack"]
    assert (await again(ids)).said == ["ack"]


@pytest.mark.parametrize("how", ["lost", "refused", "refused unnumbered"])
async def test_what_was_not_stored_is_forgotten_and_the_second_hears_so(how: str) -> None:
    ids = Remembering()
    copy = await first(ids)
    second = await again(ids)
    if how == "lost":
        copy.lost()
    else:
        copy.refuse(1, 3, *((7, 9) if how == "refused" else (0, 0)))
        copy.confirmed()
    copy.confirmed()
    await heard()
    assert second.said == ["nack"]
    assert len(ids) == 0
    await first(ids)


@pytest.mark.parametrize("who", [(1, 3, 1, 6), (1, 3, 8, 9), (2, 3, 7, 7), (1, 4, 7, 7)])
async def test_what_others_were_refused_is_not_its_affair(who: tuple[int, int, int, int]) -> None:
    ids = Remembering()
    copy = await first(ids, shards=1)
    copy.refuse(*who)
    copy.confirmed()
    await heard()
    assert (await again(ids)).said == ["ack"]


async def test_a_late_failure_does_not_forget_a_newer_copy() -> None:
    ids = Remembering(**{"x-cache-ttl": 100})
    old = await first(ids, shards=1)
    newer, known = await ids.look("a", 100)
    assert newer is not old and not known
    old.lost()
    await heard()
    assert (await ids.look("a", 150))[1]
    assert len(ids) == 1


@given(st.integers(1, 5), st.lists(st.integers(0, 8), max_size=40))
def test_it_remembers_the_last_ids_first_in_first_out(size: int, ids: list[int]) -> None:
    async def remember() -> None:
        remembered: list[int] = []
        found = Remembering(**{"x-cache-size": size})
        for id in ids:
            assert (await found.look(id))[1] == (id in remembered)
            if id not in remembered:
                remembered = [*remembered, id][-size:]
            assert len(found) == len(remembered)

    asyncio.run(remember())


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, None),
        ({"x-message-deduplication": False}, None),
        ({"x-message-deduplication": 1}, None),
        ({"x-message-deduplication": True}, DedupRule(HEADER, SIZE_DEFAULT, None)),
        (
            {
                "x-message-deduplication": True,
                "x-cache-size": 5,
                "x-cache-ttl": 6,
                "x-deduplication-header": "id",
            },
            DedupRule("id", 5, 6),
        ),
    ],
)
def test_arguments_make_the_rule(arguments: dict[str, Any], rule: DedupRule | None) -> None:
    assert DedupRule.of(arguments) == rule
