"""Check the password of a login without stopping the event loop.

A password that is known to be right (`passwords.Memory`) or has a quick hash is judged at once, in
the loop; other passwords in two threads. Wrong guesses by AMQP and HTTP use up the same budgets
(`failures`). A login without budget is refused unseen, unless the password was right a short while
ago. So guesses from a neighbour's address, or a neighbour with a stale password, do not lock out
clients that are at work. This file logs now and then that logins are refused unseen; the caller
logs every other refusal.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from shardmq.broker.model import passwords
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared.failures import Failures, Unseen

MECHANISMS = b"AMQPLAIN PLAIN"  # in RabbitMQ's order
THREADS = 2  # each takes 16 MiB while it works
PENDING_MAX = 10_000  # passwords that wait for a thread
ADDRESSES_MAX = 1000  # remembered addresses, which take longer to read than to look up
IPV6_PREFIX = 64  # bits of the network that one subscriber has

WRONG = "unknown, or a wrong password"
BUSY = "too many logins at once"
NOBODY = UserPut("", "")

T = TypeVar("T")

log = logging.getLogger(__name__)


class TakesLong(Exception):
    """The password's hash takes long: ask `slowly`."""

    def __init__(self, user: str, password: str) -> None:
        super().__init__("the password's hash takes long")
        self.user = user
        self.password = password


class Logins:
    """The logins of one process.

    A verdict is "" when the password is right, else the reason, which is for the log alone.
    """

    def __init__(self) -> None:
        self._failures = Failures()
        self._unseen = Unseen()
        self._memory = passwords.Memory(secrets.token_bytes(32))
        self._threads = ThreadPoolExecutor(THREADS, "password")
        self._pending: dict[bytes, _Pending] = {}
        # Hashes under way, by address and user that began them, and by address.
        self._guesses: Counter[tuple[str, str]] = Counter()
        self._guesses_from: Counter[str] = Counter()

    @property
    def refused_unseen(self) -> int:
        """Return how many logins were refused without a look at their password."""
        return self._unseen.count

    def at_once(
        self, user: UserPut | None, name: str, password: str, address: str, now: float
    ) -> str:
        """Return the verdict. Raises TakesLong when the loop should not wait for it."""
        source = source_of(address)
        if user is not None and self._memory.knows(self._memory.mark(user, password)):
            return ""
        if why := self._failures.refusal(source, name, now):
            return self._refused(source, name, why, now)
        if passwords.is_slow(user):
            raise TakesLong(name, password)
        if passwords.matches(user, password):
            return ""
        self._failures.failed(source, name, now)
        return WRONG

    async def slowly(
        self, user: UserPut | None, name: str, password: str, address: str, now: float
    ) -> str:
        """Return the verdict after a hash in another thread."""
        mark, source = self._memory.mark(user or NOBODY, password), source_of(address)
        pending = self._pending.get(mark)
        if pending is None:
            under_way = self._guesses[source, name], self._guesses_from[source]
            if why := self._failures.refusal(source, name, now, *under_way):
                return self._refused(source, name, why, now)
            if len(self._pending) >= PENDING_MAX:
                return BUSY
            pending = self._pending[mark] = self._begin(mark, user, password, (source, name))
        pending.waiting += 1
        try:
            # A login that is given up must not take the answer from others.
            right = await asyncio.shield(pending.answer)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                pending.answer.cancel()  # nobody waits any more: it need not begin
        if right:
            return ""
        # A thousand clients with one password made one guess.
        if (source, name) not in pending.charged:
            pending.charged.add((source, name))
            self._failures.failed(source, name, now)
        return WRONG

    def _begin(
        self, mark: bytes, user: UserPut | None, password: str, guesser: tuple[str, str]
    ) -> _Pending:
        """Begin a hash in another thread.

        A thousand clients that come back with one password cost one hash.
        """
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, passwords.matches, user, password)
        self._guesses[guesser] += 1
        self._guesses_from[guesser[0]] += 1

        def answered(answer: asyncio.Future[bool]) -> None:
            self._pending.pop(mark, None)
            _lower(self._guesses, guesser)
            _lower(self._guesses_from, guesser[0])
            if (
                user is not None
                and not answer.cancelled()
                and answer.exception() is None
                and answer.result()
            ):
                self._memory.remember(mark)

        answer.add_done_callback(answered)
        return _Pending(answer)

    def _refused(self, source: str, name: str, why: str, now: float) -> str:
        if line := self._unseen.refused(source, name, why, now):
            log.warning("%s", line)
        return why


class _Pending:
    """A hash under way.

    `waiting` counts the logins that wait for it. `charged` are the budgets that a wrong password
    was taken from.
    """

    __slots__ = ("answer", "charged", "waiting")

    def __init__(self, answer: asyncio.Future[bool]) -> None:
        self.answer = answer
        self.charged: set[tuple[str, str]] = set()
        self.waiting = 0


def _lower(counts: Counter[T], key: T) -> None:
    """Count one less; forget a count of none."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


@lru_cache(ADDRESSES_MAX)
def source_of(address: str) -> str:
    """Return the key of the budget that guesses from this address use."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))
    return str(found)


@lru_cache(ADDRESSES_MAX)
def is_loopback(host: str) -> bool:
    """Return whether the peer is on this machine. "" is the peer of a unix socket.

    IPv4 written as IPv6 counts as IPv4.
    """
    if not host:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
