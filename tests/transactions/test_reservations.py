"""A transaction asks for room first.

It has room at all its shards, or at none when its commit is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shardmq.broker.amqp import ChannelException
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.front_door.publish.reservations import Reservations
from shardmq.shardd.wire import messages as wire


class FakeLinks:
    """Shards of which some refuse and some are silent."""

    def __init__(self, refuse: tuple[int, ...] = (), silent: tuple[int, ...] = ()) -> None:
        self.refuse, self.silent = refuse, silent
        self.said: list[tuple[int, wire.Message]] = []
        self.futures: list[asyncio.Future[wire.Control]] = []

    def tell(self, shard: int, what: wire.Message) -> None:
        self.said.append((shard, what))

    def ask(self, shard: int, make: Callable[[int], wire.Message]) -> asyncio.Future[wire.Control]:
        self.said.append((shard, make(1)))
        future: asyncio.Future[wire.Control] = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if shard in self.refuse:
            future.set_exception(ShardRefused(406, "full"))
        elif shard not in self.silent:
            future.set_result(wire.Done(1))
        return future


WANTED = {0: {7: [1, 2]}, 2: {8: [3]}}
ASKED = [(0, wire.Reserve(1, 1, [(7, [1, 2])])), (2, wire.Reserve(1, 1, [(8, [3])]))]
FREED = [(0, wire.Unreserve(1)), (2, wire.Unreserve(1))]


def test_what_was_reserved_is_redeemed_and_ended_at_every_shard_once() -> None:
    links = FakeLinks()

    async def run() -> None:
        reservation = await Reservations(links).reserve(WANTED)
        reservation.redeem()
        reservation.end()
        reservation.end()

    asyncio.run(run())
    assert links.said == [*ASKED, (0, wire.Redeem(1)), (2, wire.Redeem(1)), *FREED]


def test_what_is_published_while_a_reservation_rests_is_not_of_it() -> None:
    links = FakeLinks()

    async def run() -> None:
        reservation = await Reservations(links).reserve(WANTED)
        reservation.redeem()
        reservation.rest()
        reservation.redeem()
        reservation.end()

    asyncio.run(run())
    said = [(shard, wire.Redeem(number)) for number in (1, 0, 1) for shard in (0, 2)]
    assert links.said == [*ASKED, *said, *FREED]


@pytest.mark.parametrize(
    ("refuse", "silent", "why"), [((2,), (), "a queue is full"), ((), (2,), "has not answered")]
)
def test_a_refusal_frees_what_other_shards_have_set_aside(
    refuse: tuple[int, ...], silent: tuple[int, ...], why: str
) -> None:
    links = FakeLinks(refuse, silent)
    with pytest.raises(ChannelException, match=why) as refused:
        asyncio.run(Reservations(links, wait_s_max=0.01).reserve(WANTED))
    assert (refused.value.code, refused.value.class_id, refused.value.method_id) == (406, 90, 20)
    assert links.said == [*ASKED, *FREED]


def test_a_client_that_goes_while_shards_are_asked_leaves_no_room_behind() -> None:
    links = FakeLinks(silent=(0, 2))

    async def run() -> None:
        task = asyncio.create_task(Reservations(links).reserve(WANTED))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert links.said == [*ASKED, *FREED]
    # so that none is asked again after a restart
    assert all(future.cancelled() for future in links.futures)


def test_a_shard_that_is_away_is_not_asked_again_for_a_transaction_that_was_refused() -> None:
    """What nobody ends would be set aside for ever."""
    links = FakeLinks(refuse=(2,), silent=(0,))
    with pytest.raises(ChannelException, match="a queue is full"):
        asyncio.run(Reservations(links).reserve(WANTED))
    assert all(future.done() for future in links.futures)
