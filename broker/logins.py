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
PENDING_MAX = 10_000  # passwords that wait for a thread
IPV6_PREFIX = 64  # what one subscriber has

WRONG = "unknown, or a wrong password"
TOO_MANY = "too many failed logins from this address"
BUSY = "too many logins at once"
NOBODY = UserPut("", "")


class TakesLong(Exception):
    """Ask `slowly`."""

    def __init__(self, user: str, password: str) -> None:
        super().__init__("the password's hash takes long")
        self.user = user
        self.password = password


class Failures:
    """Wrong passwords by address. Pure: `now` in seconds of any clock that does not go back.

    Guesses made side by side are all answered; what they are too many is paid for in time.
    """

    def __init__(self) -> None:
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures and when

    def may_try(self, address: str, now: float) -> bool:
        return self._now_used(address, now) <= FAILURES_MAX - 1

    def failed(self, address: str, now: float) -> None:
        self._used[address] = (self._now_used(address, now) + 1, now)
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
        self._pending: dict[bytes, _Pending] = {}

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
        mark = self._memory.mark(user or NOBODY, password)
        pending = self._pending.get(mark)
        if pending is None:
            if len(self._pending) >= PENDING_MAX:
                return BUSY
            pending = self._pending[mark] = self._begin(mark, user, password)
        pending.waiting += 1
        try:
            # Who gives up must not take the answer from the others.
            right = await asyncio.shield(pending.answer)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                pending.answer.cancel()  # nobody wants to know any more: if it has not begun, it need not
        return self._judged(right, source_of(address), now)

    def _begin(self, mark: bytes, user: UserPut | None, password: str) -> _Pending:
        """A thousand clients that come back with one password cost one hash."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._threads, passwords.matches, user, password)

        def answered(answer: asyncio.Future[bool]) -> None:
            self._pending.pop(mark, None)
            if user is not None and not answer.cancelled() and answer.exception() is None and answer.result():
                self._memory.remember(mark)

        answer.add_done_callback(answered)
        return _Pending(answer)

    def _judged(self, right: bool, address: str, now: float) -> str:
        if right:
            return ""
        self._failures.failed(address, now)
        return WRONG


class _Pending:
    """A hash under way, and how many wait for it."""

    __slots__ = ("answer", "waiting")

    def __init__(self, answer: asyncio.Future[bool]) -> None:
        self.answer = answer
        self.waiting = 0


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
