"""The short way of a shard does what the Python way does, message by message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from shardmq.shardd.queues import rules
from shardmq.shardd.short_way import ShortWay
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m
from tests.support.short_way_history import Differs, History

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


class Broken(ShortWay):
    """A short way that is broken on purpose, except for messages in rings."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.parts = parts


class DropsCredit(Broken):
    def receive(self, message: Any) -> bool:
        is_credit = self.is_on and len(message) > 16 and message[0] == m.CREDIT
        return is_credit or super().receive(message)


class TakesAnyBatch(Broken):
    def receive(self, message: Any) -> bool:
        peer = self.parts["senders"].get(bytes(message[1:16]))
        if self.is_on and peer is not None and message[0] == m.PUBLISH and len(message) >= 24:
            peer.next_batch = int.from_bytes(message[16:24], "little")
        return super().receive(message)


class SyncsNothing(Broken):
    def receive(self, message: Any) -> bool:
        taken = super().receive(message)
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

    def receive(self, message: Any) -> bool:
        if self.is_on and message[0] == m.SETTLE and len(message) == 16 + 24:
            _, kind, first, last = envelope.read_settles(message)[0]
            peer = self.parts["senders"].get(bytes(message[1:16]))
            if peer is not None and peer.holders and kind == m.ACK:
                other = [(min(peer.holders), kind, first, last)]
                return super().receive(
                    bytes(message[:16]) + envelope.settles(0, 0, 0, 0, other)[16:]
                )
        return super().receive(message)


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
    "a rule is forgotten": a_rule_is_forgotten,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_short_way_that_is_broken_is_caught(broken: str) -> None:
    with BROKEN[broken](), pytest.raises(AssertionError):
        histories(1, 300)
