"""Whether a login's password is right, without keeping the event loop from its work, and how often one may guess.

A password that is known to be right (`passwords.Memory`) or has a quick hash is judged at once, in the loop; the others
in two threads. Who guesses wrong uses up a budget of their address, which fills again slowly; an address without any
is refused unseen, unless the password is one that was right lately. So guessing from a neighbour's address does not
lock out clients that are at work.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from broker import passwords
from broker.changes import UserPut

FAILURES_MAX = 30  # wrong passwords of one address at once ...
FAILURE_S = 2.0  # ... and after that one more for each so many seconds
ADDRESSES_MAX = 10_000  # that are remembered; the ones that were silent longest are forgotten
THREADS = 2  # each takes 16 MiB while it works
IPV6_PREFIX = 64  # what one subscriber has

WRONG = "unknown, or a wrong password"
TOO_MANY = "too many failed logins from this address"


class TakesLong(Exception):
    """Ask `slowly`."""

    def __init__(self, user: str, password: str) -> None:
        super().__init__("the password's hash takes long")
        self.user = user
        self.password = password


class Failures:
    """Wrong passwords by address. Pure: `now` in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures and when

    def may_try(self, address: str, now: float) -> bool:
        return self._now_used(address, now) <= FAILURES_MAX - 1

    def failed(self, address: str, now: float, count: int = 1) -> None:
        """A `count` of -1 takes one back."""
        self._used[address] = (max(0.0, self._now_used(address, now) + count), now)
        self._used.move_to_end(address)
        if len(self._used) > ADDRESSES_MAX:
            self._used.popitem(last=False)

    def _now_used(self, address: str, now: float) -> float:
        used, at = self._used.get(address, (0.0, now))
        return max(0.0, used - (now - at) / FAILURE_S)


class Logins:
    """Of one process. A verdict is "" when the password is right, else the reason, for the log alone."""

    def __init__(self) -> None:
        self._failures = Failures()
        self._memory = passwords.Memory(secrets.token_bytes(32))
        self._threads = ThreadPoolExecutor(THREADS, "password")
        self._pending: dict[bytes, asyncio.Future[bool]] = {}

    def at_once(self, user: UserPut | None, name: str, password: str, address: str, now: float) -> str:
        """Raises TakesLong when the loop should not wait for it."""
        address = source_of(address)
        if user is not None and self._memory.knows(self._memory.mark(user, password)):
            return ""
        if not self._failures.may_try(address, now):
            return TOO_MANY
        if passwords.is_slow(user):
            raise TakesLong(name, password)
        return self._judged(passwords.matches(user, password), address, now)

    async def slowly(self, user: UserPut | None, password: str, address: str, now: float) -> str:
        address = source_of(address)
        self._failures.failed(address, now)  # until it proves right: guesses side by side count too
        nobody = UserPut("", "")
        mark = self._memory.mark(user or nobody, password)
        right = await self._asked(mark, user, password)
        if right and user is not None:
            self._failures.failed(address, now, -1)
            self._memory.remember(mark)
            return ""
        return WRONG

    def _judged(self, right: bool, address: str, now: float) -> str:
        if right:
            return ""
        self._failures.failed(address, now)
        return WRONG

    async def _asked(self, mark: bytes, user: UserPut | None, password: str) -> bool:
        """A thousand clients that come back with one password cost one hash."""
        pending = self._pending.get(mark)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = loop.run_in_executor(self._threads, passwords.matches, user, password)
            self._pending[mark] = pending
            pending.add_done_callback(lambda _: self._pending.pop(mark, None))
        # Who gives up must not take the answer from the others.
        return await asyncio.shield(pending)


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
