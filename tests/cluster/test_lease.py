"""The lease of a node: held while its keys are in etcd, lost and made anew whatever happens."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager

import pytest

from shardmq.cluster import lease as lease_module
from shardmq.cluster.backoff import Backoff
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.lease import LAPSED, RENEWALS, Barred, Lease
from shardmq.cluster.pairs import (
    Changes,
    Compare,
    Deleted,
    EtcdAway,
    EtcdRefused,
    Grant,
    LeaseGone,
    Operation,
    Outcome,
    Pair,
    Put,
)
from tests.support.etcd import RealEtcd

WAIT_S = 20.0
TTL_S = 1


class Held:
    """A lease that is being held, and the states that it has told."""

    def __init__(self, etcd: Etcd | FakeEtcd, ttl_s: int = TTL_S) -> None:
        self.told: list[str] = []
        self.lease = Lease(etcd, ttl_s, self._changed)
        self._news = asyncio.Event()

    def _changed(self, lease: Lease) -> None:
        assert (lease.lost == "") == (lease.held_since is not None) == lease.is_held()
        self.told.append(lease.lost or "held")
        self._news.set()

    async def wait_until_told(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.told) < count:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def held(
    etcd: Etcd | FakeEtcd, keys: dict[str, bytes], ttl_s: int = TTL_S
) -> AsyncIterator[Held]:
    """Hold a lease with keys; wait until it is held the first time."""
    made = Held(etcd, ttl_s)
    for key, value in keys.items():
        made.lease.put(key, value)
    holding = asyncio.create_task(made.lease.hold())
    try:
        async with asyncio.timeout(WAIT_S):
            await made.lease.wait_until_held()
        yield made
        assert not holding.done()
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def values(etcd: Etcd, prefix: str = "/") -> dict[str, bytes]:
    return {pair.key: pair.value for pair in (await etcd.range(prefix)).pairs}


async def renewed(etcd: Etcd, times: int) -> None:
    """Wait until the lease of this client was renewed so often."""
    keep_alive, enough = etcd.keep_alive, asyncio.Event()
    left = [times]

    async def counted(lease: int) -> int:
        ttl_s = await keep_alive(lease)
        left[0] -= 1
        if left[0] <= 0:
            enough.set()
        return ttl_s

    etcd.keep_alive = counted  # type: ignore[method-assign]
    async with asyncio.timeout(WAIT_S):
        await enough.wait()


# -- with a real etcd ------------------------------------------------------------------------------


async def test_a_lease_that_a_key_excludes_ends_and_has_no_keys(etcd: Etcd, prefix: str) -> None:
    barred = Held(etcd)
    barred.lease.bar = f"{prefix}bar"
    barred.lease.put(f"{prefix}a", b"1")
    await etcd.transact([], [Put(f"{prefix}bar", b"")])
    with pytest.raises(Barred, match=f"{prefix}bar"):
        async with asyncio.timeout(WAIT_S):
            await barred.lease.hold()
    assert await values(etcd, prefix) == {f"{prefix}bar": b""} and not barred.lease.is_held()


async def test_the_keys_are_there_as_long_as_the_lease_is_held(etcd: Etcd, prefix: str) -> None:
    keys = {prefix + "a": b"1", prefix + "b": b"2"}
    async with held(etcd, keys) as node:
        assert await values(etcd, prefix) == keys
        pair = await etcd.get(prefix + "a")
        assert pair is not None and pair.lease
        async with aclosing(etcd.watch(prefix)) as watch, asyncio.timeout(WAIT_S):
            await anext(watch)
            node.lease.put(prefix + "a", b"3")
            news = await anext(watch)
        assert isinstance(news, Changes)
        (change,) = news.changes
        assert isinstance(change, Pair) and (change.value, change.lease) == (b"3", pair.lease)
        await renewed(etcd, RENEWALS + 1)  # longer than a time to live
        assert node.told == ["held"] and node.lease.is_held()
    assert node.lease.is_held()
    await node.lease.end()
    assert await values(etcd, prefix) == {}
    assert node.told == ["held", "the node has ended it"] and not node.lease.is_held()


async def test_a_lease_that_somebody_ends_is_made_anew_with_its_keys(
    etcd: Etcd, prefix: str
) -> None:
    async with held(etcd, {prefix + "a": b"1"}) as node:
        pair = await etcd.get(prefix + "a")
        assert pair is not None
        await etcd.revoke(pair.lease)
        await node.wait_until_told(3)
        assert node.told[0] == node.told[2] == "held" and "expired or was revoked" in node.told[1]
        other = await etcd.get(prefix + "a")
        assert other is not None and other.value == b"1" and other.lease != pair.lease


@pytest.mark.parametrize("how", ["stopped", "killed", "wiped"])
async def test_etcd_that_is_away_for_longer_than_the_lease_comes_back(
    own: RealEtcd, how: str
) -> None:
    async with Etcd(own.endpoints, attempt_s=0.3, call_s=0.5) as etcd:
        async with held(etcd, {"/a": b"1"}) as node:
            if how == "stopped":
                own.only.send(signal.SIGSTOP)
            else:
                own.only.kill()
            lost_after = time.monotonic()
            await node.wait_until_told(2)
            assert node.told == ["held", LAPSED]
            assert time.monotonic() - lost_after <= TTL_S + 5  # on a busy machine
            assert "127.0.0.1" in node.lease.trouble
            if how == "stopped":
                own.only.send(signal.SIGCONT)
            else:
                if how == "wiped":
                    own.only.wipe()
                await asyncio.to_thread(own.only.start)
            await node.wait_until_told(3)
            assert node.told[-1] == "held" and node.lease.trouble == ""
            assert await values(etcd) == {"/a": b"1"}


async def test_etcd_that_restarts_within_the_lease_changes_nothing(own: RealEtcd) -> None:
    async with Etcd(own.endpoints, attempt_s=0.5) as etcd:
        async with held(etcd, {"/a": b"1"}, ttl_s=60) as node:
            pair = await etcd.get("/a")
            own.only.kill()
            await asyncio.to_thread(own.only.start)
            async with aclosing(etcd.watch("/b")) as watch, asyncio.timeout(WAIT_S):
                await anext(watch)
                node.lease.put("/b", b"2")
                await anext(watch)
            assert await etcd.get("/a") == pair
            assert node.told == ["held"]


NODE = """
import asyncio, sys, time
from shardmq.cluster.etcd import Etcd
from shardmq.cluster.lease import Lease

def changed(lease):
    print(lease.lost or "held", flush=True)

async def main():
    async with Etcd([sys.argv[1]]) as etcd:
        lease = Lease(etcd, 1, changed)
        lease.put("/node", b"alive")
        await lease.hold()

asyncio.run(main())
"""


async def test_a_node_that_was_stopped_has_lost_its_lease_and_makes_it_anew(
    own: RealEtcd,
) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, own.only.endpoint], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        assert await asyncio.to_thread(node.stdout.readline) == "held\n"
        async with Etcd(own.endpoints) as etcd:
            async with aclosing(etcd.watch("/node")) as watch, asyncio.timeout(WAIT_S):
                await anext(watch)
                node.send_signal(signal.SIGSTOP)
                news = await anext(watch)  # Etcd ends the lease.
            assert isinstance(news, Changes) and isinstance(news.changes[0], Deleted)
            node.send_signal(signal.SIGCONT)
            lost = await asyncio.to_thread(node.stdout.readline)
            assert lost.strip() != "held"
            assert await asyncio.to_thread(node.stdout.readline) == "held\n"
            assert await values(etcd) == {"/node": b"alive"}
    finally:
        node.kill()
        node.wait()


# -- with an etcd that does as it is told ----------------------------------------------------------


class Clock:
    """The clock of the lease and of the event loop, which can be put forward."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def stand_still(self, seconds: float) -> None:
        """Do what the clock does to a process that is stopped for so long."""
        self._ahead_s += seconds


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lease_module, "time", made)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", made.monotonic)
    return made


class FakeEtcd:
    """An etcd in memory that fails on demand. With a `clock`, its client may stand still."""

    def __init__(self, ttl_s: int = TTL_S, clock: Clock | None = None) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self.fails: Exception | None = None
        self.leases: dict[int, dict[str, bytes]] = {}
        self.calls = 0
        self.stands_still_s = 0.0  # The process is stopped before it reads the next answer.
        self._next = 1

    async def grant(self, ttl_s: int) -> Grant:
        self._call()
        self.leases[self._next] = {}
        self._next += 1
        return Grant(self._next - 1, self.ttl_s)

    async def keep_alive(self, lease: int) -> int:
        self._call()
        if lease not in self.leases:
            raise LeaseGone("gone")
        if self._clock is not None:
            self._clock.stand_still(self.stands_still_s)
        self.stands_still_s = 0.0
        return self.ttl_s

    async def revoke(self, lease: int) -> None:
        self._call()
        self.leases.pop(lease, None)

    async def transact(self, compares: Iterable[Compare], then: Iterable[Operation]) -> Outcome:
        self._call()
        for operation in then:
            assert isinstance(operation, Put)
            if operation.lease not in self.leases:
                raise LeaseGone("gone")
            self.leases[operation.lease][operation.key] = operation.value
        return Outcome(True, 1, ())

    def _call(self) -> None:
        self.calls += 1
        if self.fails is not None:
            raise self.fails


async def test_a_process_that_stood_still_knows_at_once_that_the_lease_is_lost(
    clock: Clock,
) -> None:
    etcd = FakeEtcd()
    async with held(etcd, {"/a": b"1"}) as node:
        clock.stand_still(TTL_S + 0.1)
        assert not node.lease.is_held()  # before any timer ran
        assert node.lease.held_since is not None and node.told == ["held"]
        await node.wait_until_told(3)
        assert node.told == ["held", LAPSED, "held"]


async def test_an_answer_that_is_read_too_late_holds_nothing(clock: Clock) -> None:
    etcd = FakeEtcd(clock=clock)
    async with held(etcd, {"/a": b"1"}) as node:
        etcd.stands_still_s = TTL_S + 0.1
        await node.wait_until_told(3)
        assert node.told == ["held", LAPSED, "held"]


async def test_a_lease_whose_keys_are_not_written_is_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(lease_module, "LONGEST_WAIT_S", 0.001)
    etcd = FakeEtcd()
    transact = etcd.transact
    refuses = [True]

    async def no_transact(compares: Iterable[Compare], then: Iterable[Operation]) -> Outcome:
        if refuses:
            raise EtcdRefused("etcd refused: permission denied")
        return await transact(compares, then)

    etcd.transact = no_transact  # type: ignore[method-assign]
    made = Held(etcd)
    made.lease.put("/a", b"1")
    holding = asyncio.create_task(made.lease.hold())
    try:
        async with asyncio.timeout(WAIT_S):
            while etcd.calls < 5:
                await asyncio.sleep(0)
        assert made.told == [] and made.lease.trouble == "etcd refused: permission denied"
        assert made.lease.lost == "it has not been made yet"
        refuses.clear()
        await made.wait_until_told(1)
        assert len(etcd.leases) == 1 and etcd.leases[1] == {"/a": b"1"}
        assert made.lease.trouble == ""
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def test_a_lease_is_held_while_etcd_renews_it_and_refuses_to_write(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(lease_module, "LONGEST_WAIT_S", 0.001)
    etcd = FakeEtcd()
    transact = etcd.transact
    refused = asyncio.Event()

    async def refuse(compares: Iterable[Compare], then: Iterable[Operation]) -> Outcome:
        refused.set()
        raise EtcdRefused("etcd refused: mvcc: database space exceeded")

    async with held(etcd, {"/a": b"1"}) as node:
        etcd.transact = refuse  # type: ignore[method-assign]
        node.lease.put("/b", b"2")
        until = clock.monotonic() + 1.5 * TTL_S
        while clock.monotonic() < until:
            refused.clear()
            clock.stand_still(TTL_S / 10)
            await refused.wait()
        assert node.told == ["held"] and node.lease.is_held()
        assert "space exceeded" in node.lease.trouble
        etcd.transact = transact  # type: ignore[method-assign]
        async with asyncio.timeout(WAIT_S):
            while node.lease.trouble:
                await asyncio.sleep(0.01)
        assert etcd.leases == {1: {"/a": b"1", "/b": b"2"}}


async def test_a_value_that_is_put_during_a_write_is_written_next() -> None:
    etcd = FakeEtcd(ttl_s=60)
    transact = etcd.transact
    made = Held(etcd, ttl_s=60)

    async def put_meanwhile(compares: Iterable[Compare], then: Iterable[Operation]) -> Outcome:
        etcd.transact = transact  # type: ignore[method-assign]
        outcome = await transact(compares, then)
        made.lease.put("/a", b"2")
        return outcome

    etcd.transact = put_meanwhile  # type: ignore[method-assign]
    made.lease.put("/a", b"1")
    holding = asyncio.create_task(made.lease.hold())
    try:
        async with asyncio.timeout(WAIT_S):
            while etcd.leases.get(1) != {"/a": b"2"}:
                await asyncio.sleep(0)
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def test_an_end_that_etcd_does_not_answer_is_told() -> None:
    etcd = FakeEtcd()
    async with held(etcd, {}) as node:
        etcd.fails = EtcdAway("away")
    with pytest.raises(EtcdAway):
        await node.lease.end()
    assert not node.lease.is_held()


def test_waits_double_up_to_the_longest_until_a_success() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.wait_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.wait_s() == 0.1
