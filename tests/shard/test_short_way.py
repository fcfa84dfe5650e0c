"""The short way of a shard does what the Python way does, message by message."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from shardmq.shardd import shard as shard_module
from shardmq.shardd.queues import rules
from shardmq.shardd.short_way import ShortWay
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.support import short_way_history
from tests.support.short_way_history import EPOCH, Differs, History

HISTORIES = 60
ACTS = 150


def histories(seed: int, count: int) -> None:
    """Play histories; raises AssertionError with the seed of the first that differs."""
    for each in range(seed, seed + count):
        try:
            History(each).play(ACTS)
        except Differs as error:
            raise AssertionError(f"history {each}: {error}") from error


def first_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seed") or random.randrange(1 << 32)


def test_both_ways_come_to_the_same(request: pytest.FixtureRequest) -> None:
    seed = first_seed(request)
    print(f"{HISTORIES} histories from --seed {seed}")
    histories(seed, HISTORIES)


@pytest.mark.torture
def test_both_ways_come_to_the_same_for_long(request: pytest.FixtureRequest) -> None:
    seed, count = first_seed(request), request.config.getoption("--histories")
    print(f"{count} histories from --seed {seed}")
    histories(seed, count)


@contextmanager
def room_for_many() -> Iterator[None]:
    """Let stores have large segments."""
    with mock.patch.object(short_way_history, "SEGMENT_BYTES", 3 << 20):
        yield


def one_for_queue_1(history: History, body: bytes) -> None:
    """Let both shards of a history receive one message."""
    stored = struct.pack("<II", len(body), 0) + b"\0\1q" + body
    history.packer.add_stored(0, [1], stored, 1, 1, 0, 1000, 0xFFFFFFFF, 0xFF, False, False)
    history.batches[0] += 1
    message = history.packer.take(0, 0, history.incarnations[0], EPOCH, history.batches[0], False)
    assert message is not None
    history.receive("publish", message)


def attach(history: History, *, no_ack: bool, prefetch: int) -> None:
    """Attach a consumer of the same queue to both shards."""
    what = m.Attach(9, 1, 1, 1, 1, "tag", no_ack, False, 0, prefetch)
    history.tell(what, 0, history.incarnations[0])


def test_messages_of_unequal_sizes_are_all_handed_out() -> None:
    # The estimate of how many fit changes while they are handed out, and so does whether they lie
    # together.
    with room_for_many():
        history = History(1)
        history.start()
        for size in [10] * 20 + [40_000] * 20:
            one_for_queue_1(history, bytes(size))
        history.turn()
        attach(history, no_ack=True, prefetch=0)
        shards = [side.shard for side in history.sides]
        while shards[1].has_work:
            for side in history.sides:
                side.turn(history.now)
        assert not shards[0].has_work
        assert [shard.queues[1].backlog.ready_count for shard in shards] == [0, 0]


def test_a_queue_that_is_behind_goes_the_python_way() -> None:
    with room_for_many(), mock.patch.object(shard_module, "BEHIND_MESSAGES", 2):
        history = History(1)
        history.start()
        attach(history, no_ack=False, prefetch=1)
        for size in [10] * 5:
            one_for_queue_1(history, bytes(size))
        history.turn()
        assert [side.shard.queues[1].backlog.ready_count for side in history.sides] == [4, 4]


class Broken(ShortWay):
    """A short way that is broken on purpose, except for messages in rings."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.parts = parts


class DropsCredit(Broken):
    def receive(self, message: Any, now: int) -> bool:
        is_credit = self.is_on and len(message) > 16 and message[0] == m.CREDIT
        return is_credit or super().receive(message, now)


class TakesAnyBatch(Broken):
    def receive(self, message: Any, now: int) -> bool:
        peer = self.parts["senders"].get(bytes(message[1:16]))
        if self.is_on and peer is not None and message[0] == m.PUBLISH and len(message) >= 24:
            peer.next_batch = int.from_bytes(message[16:24], "little")
        return super().receive(message, now)


class SyncsNothing(Broken):
    def receive(self, message: Any, now: int) -> bool:
        taken = super().receive(message, now)
        if taken:
            self.parts["dirty_stores"].clear()
        return taken


class ConfirmsTooMuch(Broken):
    def answers(self) -> list[Any]:
        ended = self.parts["syncs"].ended
        self.parts["syncs"].ended = ended + 1
        try:
            return super().answers()
        finally:
            self.parts["syncs"].ended = ended


class TakesReadMessagesOfOthers(Broken):
    """Settles go to the first consumer of the peer."""

    def receive(self, message: Any, now: int) -> bool:
        if self.is_on and message[0] == m.SETTLE and len(message) == 16 + 24:
            _, kind, first, last = envelope.read_settles(message)[0]
            peer = self.parts["senders"].get(bytes(message[1:16]))
            if peer is not None and peer.holders and kind == m.ACK:
                other = [(min(peer.holders), kind, first, last)]
                return super().receive(
                    bytes(message[:16]) + envelope.settles(0, 0, 0, 0, other)[16:], now
                )
        return super().receive(message, now)


class Allots(Broken):
    """Does something else with the credit of allotments behind acks."""

    def receive(self, message: Any, now: int) -> bool:
        settles = []
        if (
            self.is_on
            and len(message) >= 16
            and message[0] == m.SETTLE
            and (len(message) - 16) % 24 == 0
        ):
            settles = envelope.read_settles(message)
        allots = [each for each in settles if each[1] == m.ALLOT]
        peer = self.parts["senders"].get(bytes(message[1:16]))
        if peer is None or not allots:
            return super().receive(message, now)
        acks = [each for each in settles if each[1] != m.ALLOT]
        rest = bytes(message[:16]) + envelope.settles(0, 0, 0, 0, acks)[16:]
        return self.pass_on(peer, rest, allots, now)

    def pass_on(self, peer: Any, acks: bytes, allots: list[Any], now: int) -> bool:
        return super().receive(acks, now)


class AllotsFirst(Allots):
    def pass_on(self, peer: Any, acks: bytes, allots: list[Any], now: int) -> bool:
        for number, _, allowed, mode in allots:
            self.allot(peer, number, allowed, mode, now)
        return super().pass_on(peer, acks, allots, now)


class AllotsLate(Allots):
    """The credit comes at a time long gone."""

    def pass_on(self, peer: Any, acks: bytes, allots: list[Any], now: int) -> bool:
        taken = super().pass_on(peer, acks, allots, now)
        for number, _, allowed, mode in allots if taken else ():
            self.allot(peer, number, allowed, mode, 0)
        return taken


@contextmanager
def a_rule_is_forgotten() -> Iterator[None]:
    """Let each queue look as if it had no rule; only the short way asks for that."""
    real = rules.Rules.__init__

    def forgetful(self: rules.Rules, some: Any) -> None:
        real(self, some)
        self.is_empty = True

    with (
        mock.patch.object(rules.Rules, "__init__", forgetful),
        mock.patch.object(rules, "_known", {}),
    ):
        yield


def instead(kind: type[Broken]) -> Callable[[], Any]:
    return lambda: mock.patch("shardmq.shardd.shard.ShortWay", kind)


BROKEN: dict[str, Callable[[], Any]] = {
    "credit is dropped": instead(DropsCredit),
    "any batch number will do": instead(TakesAnyBatch),
    "nothing is synced": instead(SyncsNothing),
    "confirms come before the sync": instead(ConfirmsTooMuch),
    "acks are taken for those of others": instead(TakesReadMessagesOfOthers),
    "credit of allotments is dropped": instead(Allots),
    "credit of allotments comes before the acks": instead(AllotsFirst),
    "credit of allotments comes at another time": instead(AllotsLate),
    "a rule is forgotten": a_rule_is_forgotten,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_short_way_that_is_broken_is_caught(broken: str) -> None:
    with BROKEN[broken](), pytest.raises(AssertionError):
        histories(1, 300)
