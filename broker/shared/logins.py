"""Whether a login's password is right, without keeping the event loop from its work, and how often
one may guess.

A password that is known to be right (`passwords.Memory`) or has a quick hash is judged at once, in
the loop; the others in two threads. Who guesses wrong uses up budgets (`failures`), by AMQP and
HTTP alike; who has none left is refused unseen, unless the password is one that was right lately.
So guessing from a neighbour's address, or of a neighbour with a stale password, does not lock out
clients that are at work. What is refused unseen is said in the log here, now and then; every other
refusal is for the caller to say.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardmq.broker.model import passwords
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared.failures import Failures, Unseen

MECHANISMS = b"AMQPLAIN PLAIN"  # in RabbitMQ's order
THREADS = 2  # each takes 16 MiB while it works
PENDING_MAX = 10_000  # passwords that wait for a thread
IPV6_PREFIX = 64  # what one subscriber has

WRONG = "unknown, or a wrong password"
BUSY = "too many logins at once"
NOBODY = UserPut("", "")

T = TypeVar("T")

log = logging.getLogger(__name__)


class TakesLong(Exception):
    """Ask `slowly`."""

    def __init__(self, user: str, password: str) -> None:
        super().__init__("the password's hash takes long")
        self.user = user
        self.password = password


class Logins:
    """Of one process. A verdict is "" when the password is right, else the reason, for the log alone."""

    def __init__(self) -> None:
        self._failures = Failures()
        self._unseen = Unseen()
        self._memory = passwords.Memory(secrets.token_bytes(32))
        self._threads = ThreadPoolExecutor(THREADS, "password")
        self._pending: dict[bytes, _Pending] = {}
        self._guesses: Counter[tuple[str, str]] = (
            Counter()
        )  # hashes under way, by address and user who began them
        self._guesses_from: Counter[str] = Counter()  # the same by address

    @property
    def refused_unseen(self) -> int:
        """How many logins were refused without a look at their password, for the metrics."""
        return self._unseen.count

    def at_once(
        self, user: UserPut | None, name: str, password: str, address: str, now: float
    ) -> str:
        """Raises TakesLong when the loop should not wait for it."""
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
            # Who gives up must not take the answer from the others.
            right = await asyncio.shield(pending.answer)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                pending.answer.cancel()  # nobody wants to know any more: if it has not begun, it need not
        if right:
            return ""
        if (
            source,
            name,
        ) not in pending.charged:  # a thousand clients with one password made one guess
            pending.charged.add((source, name))
            self._failures.failed(source, name, now)
        return WRONG

    def _begin(
        self, mark: bytes, user: UserPut | None, password: str, guesser: tuple[str, str]
    ) -> _Pending:
        """A thousand clients that come back with one password cost one hash."""
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
    """A hash under way, how many wait for it, and whose budgets it was taken from when it turned out wrong."""

    __slots__ = ("answer", "charged", "waiting")

    def __init__(self, answer: asyncio.Future[bool]) -> None:
        self.answer = answer
        self.charged: set[tuple[str, str]] = set()
        self.waiting = 0


def _lower(counts: Counter[T], key: T) -> None:
    """Count one less; what is none is forgotten."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def source_of(address: str) -> str:
    """Whose budget a guess from this address uses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_PREFIX), strict=False))
    return str(found)


def is_loopback(host: str) -> bool:
    """Whether the peer is on this machine; "" is a unix socket's peer. IPv4 written as IPv6 counts as IPv4."""
    if not host:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
