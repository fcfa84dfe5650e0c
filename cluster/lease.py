"""A lease in etcd that says for how long its keys hold: a node's sign of life.

The lease is renewed each third of its time to live. When etcd has ended it, because etcd or this
process stood still for too long, the lease is made anew with its keys. That etcd is away is no
error of the node: the lease is tried again for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Never, Protocol

from shardmq.cluster.backoff import Backoff
from shardmq.cluster.pairs import (
    Compare,
    EtcdAway,
    EtcdRefused,
    Grant,
    LeaseGone,
    Operation,
    Outcome,
    Put,
)

RENEWALS: Final = 3  # in a time to live
FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0
ENDED: Final = "the node has ended it"
LAPSED: Final = "no renewal was answered within its time to live"


class Barred(Exception):
    """A key is there that excludes the lease. The text is the key."""


class Client(Protocol):
    """The calls that a lease needs of `shardmq.cluster.etcd.Etcd`, which imports much."""

    async def grant(self, ttl_s: int) -> Grant: ...

    async def keep_alive(self, lease: int) -> int: ...

    async def revoke(self, lease: int) -> None: ...

    async def transact(self, compares: Iterable[Compare], then: Iterable[Operation]) -> Outcome: ...


class Lease:
    """A lease and its keys.

    The lease is *held* from the time at which its keys are in etcd, until etcd may have ended it.
    It may have ended it when the time to live is over since the last renewal that succeeded was
    sent, so a process that was stopped knows that it has lost the lease before it has asked etcd.
    A lease that was lost for want of answers and turns out to be alive is held again.

    `held_since` is a time of time.monotonic(), or None. `lost` says why the lease is not held, and
    is "" if it is. `trouble` is the last error of etcd, also while the lease is held, and "" after
    the next success.

    Args:
        etcd: The client.
        ttl_s: The seconds that the lease lasts without a renewal. Etcd has a minimum of 1.5 times
            its election timeout and then gives more.
        changed: Called with the lease each time it becomes held or lost.

    `bar` is a key that must be absent when keys of the lease are written; "": there is none.
    """

    def __init__(
        self, etcd: Client, ttl_s: int, changed: Callable[[Lease], None] = lambda lease: None
    ) -> None:
        self._etcd = etcd
        self._asked_ttl_s = ttl_s
        self._changed = changed
        self.bar = ""
        self.held_since: float | None = None
        self.lost = "it has not been made yet"
        self.trouble = ""
        self._lease = 0  # 0: there is none
        self._lapses_at = 0.0
        self._timer: asyncio.TimerHandle | None = None  # runs when the lease lapses
        self._values: dict[str, bytes] = {}
        self._unwritten: set[str] = set()  # keys that the lease has not, or with an older value
        self._has_keys = False  # Each key was written since the lease was made.
        self._wake = asyncio.Event()
        self._held = asyncio.Event()

    def put(self, key: str, value: bytes) -> None:
        """Set a key that ends with the lease, soon. A key that somebody deleted is written again.

        The last value wins, also over one that another lease has put.
        """
        self._values[key] = value
        self._unwritten.add(key)
        self._wake.set()

    def is_held(self) -> bool:
        """Return whether the lease is held now, exactly: no timer has to run first."""
        return self.held_since is not None and time.monotonic() < self._lapses_at

    async def wait_until_held(self) -> None:
        """Return when the lease is held."""
        await self._held.wait()

    async def hold(self) -> Never:
        """Make the lease, renew it and make it anew for ever. Run this as a task.

        Raises Barred.
        """
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        while True:
            self._wake.clear()
            try:
                renew_at = await self._renew()
                if self._has_keys:
                    self._become_held()  # Etcd may refuse writes and go on to renew leases.
                await self._write()
                self._become_held()
            except LeaseGone as gone:
                self._lease, self._has_keys = 0, False
                self._lose(str(gone))
                wait_s = backoff.wait_s()
            except (EtcdAway, EtcdRefused) as error:
                self.trouble = str(error)
                wait_s = backoff.wait_s()
            else:
                self.trouble = ""
                backoff.reset()
                wait_s = max(0.0, renew_at - time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def end(self) -> None:
        """End the lease and its keys at once. Cancel the task of `hold` before.

        Raises EtcdAway, EtcdRefused: the lease then ends when its time to live is over.
        """
        self._lose(ENDED)
        lease, self._lease = self._lease, 0
        if lease:
            await self._etcd.revoke(lease)

    async def _renew(self) -> float:
        """Renew the lease, or make one. Return the time at which the next renewal is due."""
        sent_at = time.monotonic()
        if self._lease:
            ttl_s = await self._etcd.keep_alive(self._lease)
        else:
            made = await self._etcd.grant(self._asked_ttl_s)
            self._lease, ttl_s = made.lease, made.ttl_s
            self._unwritten, self._has_keys = set(self._values), False
        self._lapses_at = sent_at + ttl_s
        return sent_at + ttl_s / RENEWALS

    async def _write(self) -> None:
        """Write the keys that the lease does not have yet. Raises Barred."""
        if self._unwritten:
            writing = {key: self._values[key] for key in sorted(self._unwritten)}
            puts = [Put(key, value, self._lease) for key, value in writing.items()]
            absent = [Compare(self.bar, create_revision=0)] if self.bar else []
            if not (await self._etcd.transact(absent, puts)).succeeded:
                raise Barred(self.bar)
            # A value that was put meanwhile is written next.
            self._unwritten -= {key for key, value in writing.items() if self._values[key] is value}
        self._has_keys = True

    def _become_held(self) -> None:
        """Tell that the lease is held, unless the process was stopped before it saw the answer."""
        if self.held_since is None and time.monotonic() < self._lapses_at:
            self.held_since, self.lost = time.monotonic(), ""
            self._held.set()
            self._changed(self)
        self._check()

    def _check(self) -> None:
        """Tell that the lease is lost if it has lapsed, and else look again when it would lapse."""
        if self._timer is not None:
            self._timer.cancel()
        left_s = self._lapses_at - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check)
        else:
            self._lose(LAPSED)

    def _lose(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.lost = reason
        if self.held_since is not None:
            self.held_since = None
            self._held.clear()
            self._changed(self)
