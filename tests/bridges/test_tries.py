"""Tries of many bridges do not come at once, and tell the log what is new."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shardmq.bridges import tries
from shardmq.bridges.connection import Connection
from shardmq.bridges.errors import LinkFailed
from shardmq.bridges.tries import Tries
from shardmq.broker.shared.bridging import BridgeState


def of(is_spread: bool = True, delay_s: float = 2.0) -> Tries:
    state = BridgeState(key=("shovel", "/", "s"), life=0)
    return Tries(state, "Shovel s", "/", delay_s, lambda: ["door"], lambda: None, is_spread)


def test_delays_of_links_are_spread_and_those_of_shovels_are_not() -> None:
    link, shovel = of(), of(is_spread=False)
    link.state.failures = shovel.state.failures = 2
    found = {link._delay_s() for _ in range(100)}
    assert len(found) > 90 and 3.2 <= min(found) < 3.7 and 4.3 < max(found) <= 4.8
    assert shovel._delay_s() == 4.0


async def test_few_connections_to_one_address_are_opened_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = {"a": 0, "b": 0}
    most = dict(opened)
    goes_on = asyncio.Event()

    async def connect(uri: Any, *given: Any, **more: Any) -> Connection:
        opened[uri.host] += 1
        most[uri.host] = max(most[uri.host], opened[uri.host])
        await goes_on.wait()
        opened[uri.host] -= 1
        return cast(Connection, None)

    monkeypatch.setattr(tries, "connect", connect)
    monkeypatch.setattr(tries, "OPENING_MAX", 3)
    opening = [asyncio.create_task(of().open_any("src", [f"amqp://{host}"])) for host in "aaaaaaab"]
    while sum(opened.values()) < 4:
        await asyncio.sleep(0)
    assert opened == {"a": 3, "b": 1}, "one address does not hold up another"
    goes_on.set()
    await asyncio.gather(*opening)
    assert most == {"a": 3, "b": 1}
    del opening
    assert not tries._opening


async def test_a_reason_is_logged_once_until_the_bridge_has_worked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = of(delay_s=1.0)
    monkeypatch.setattr(made, "_delay_s", lambda: 0.0001)
    fails = iter(["a", "b", "a", "b", "", "a", "a"])

    async def once() -> None:
        why = next(fails, None)
        if why is None:
            return
        if not why:
            made.state.moved += 1
        raise LinkFailed(why or "a")

    await made.run(once, lambda: None)
    said = [record.getMessage().partition("failed: ")[2][0] for record in caplog.records]
    assert said == ["a", "b", "a"]
