"""Limits on guessing passwords. Pure.

Each user has a budget at each address, and each address has a larger one. A wrong password takes
one from both, and both fill again slowly. When one of them is used up, a login is refused unseen:
its password is not looked at. So a client that comes back with a stale password again and again
uses up its user's budget, but not that of other users at its address. A client that tries many
users at one address uses up the budget of the address.

Passwords that are being looked at count against the budget of their user as if they were wrong, but
not against that of the address: several hundred clients of one address that come back together with
right passwords must all be let in. To guess for many users side by side gains nothing in the long
run. Each wrong password is charged when it is known to be wrong, so the budget goes below zero, and
no password from the address is looked at until that is made up for: on average one guess each
ADDRESS_FAILURE_S. At once there are no more than ADDRESS_FAILURES_MAX and ADDRESS_GUESSES_MAX
together. Each process has budgets of its own.

`now` is in seconds, of any clock that does not go back. Every table has a bound; the key that was
silent longest is forgotten.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

USER_FAILURES_MAX: Final = 30  # wrong passwords of one user from one address at once ...
USER_FAILURE_S: Final = 2.0  # ... and after that one more for each so many seconds
# The same for all users from one address: the passwords of nine users may be stale at a time.
ADDRESS_FAILURES_MAX: Final = 300
ADDRESS_FAILURE_S: Final = 0.2
# Passwords with a slow hash from one address that are looked at at a time.
ADDRESS_GUESSES_MAX: Final = 1_000
USERS_MAX: Final = 20_000  # pairs of address and user that are remembered
ADDRESSES_MAX: Final = 10_000
SAID_MAX: Final = 1_000  # keys for which the time is kept when the log was told
SAY_EACH_S: Final = 60.0  # the log is told no more often of one key
DIGEST_BYTES: Final = 16  # kept in place of a pair: anybody may send long names of users

TOO_MANY_OF_USER: Final = "too many failed logins of this user from this address"
TOO_MANY: Final = "too many failed logins from this address"
TOO_MANY_AT_ONCE: Final = "too many logins at once from this address"
UNSEEN: Final = frozenset((TOO_MANY_OF_USER, TOO_MANY, TOO_MANY_AT_ONCE))


class Budget:
    """The failures that are left to each key.

    A key has `most` at once and one more each `refill_s` seconds. At most `keys_max` keys are
    remembered.
    """

    def __init__(self, most: int, refill_s: float, keys_max: int) -> None:
        self._most = most
        self._refill_s = refill_s
        self._keys_max = keys_max
        # Failures that are used, and the time when they were counted.
        self._used: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def left(self, key: Hashable, now: float) -> float:
        return self._most - self._now_used(key, now)

    def charge(self, key: Hashable, now: float) -> None:
        self._used[key] = (self._now_used(key, now) + 1, now)
        self._used.move_to_end(key)
        if len(self._used) > self._keys_max:
            self._used.popitem(last=False)

    def _now_used(self, key: Hashable, now: float) -> float:
        used, at = self._used.get(key, (0.0, now))
        return max(0.0, used - (now - at) / self._refill_s)


class Failures:
    """The wrong passwords by address and user."""

    def __init__(self) -> None:
        self._users = Budget(USER_FAILURES_MAX, USER_FAILURE_S, USERS_MAX)
        self._addresses = Budget(ADDRESS_FAILURES_MAX, ADDRESS_FAILURE_S, ADDRESSES_MAX)

    def refusal(
        self, address: str, user: str, now: float, guesses: int = 0, of_address: int = 0
    ) -> str:
        """Return why a password of this user from this address is not looked at, or "".

        `guesses` are other passwords of the user from there that are being looked at and may be
        wrong, `of_address` those of all users from there.
        """
        if self._users.left(pair_of(address, user), now) < 1 + guesses:
            return TOO_MANY_OF_USER
        if self._addresses.left(address, now) < 1:
            return TOO_MANY
        return TOO_MANY_AT_ONCE if of_address >= ADDRESS_GUESSES_MAX else ""

    def failed(self, address: str, user: str, now: float) -> None:
        self._users.charge(pair_of(address, user), now)
        self._addresses.charge(address, now)


class Unseen:
    """Counts logins that are refused unseen.

    It tells the log of each user or address, but not each time.
    """

    def __init__(self) -> None:
        self.count = 0
        # The time when the log was told, and the number of refusals since then.
        self._said: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def refused(self, address: str, user: str, why: str, now: float) -> str:
        """Return a line for the log, or "" when the log was told of this a short while ago."""
        self.count += 1
        key = pair_of(address, user) if why == TOO_MANY_OF_USER else address
        said_at, since = self._said.pop(key, (-SAY_EACH_S, 0))
        is_due = now - said_at >= SAY_EACH_S
        self._said[key] = (now, 0) if is_due else (said_at, since + 1)
        if len(self._said) > SAID_MAX:
            self._said.popitem(last=False)
        if not is_due:
            return ""
        more = f" ({since} more since this was last said)" if since else ""
        return f"login of user '{user}' from {address} refused unseen: {why}{more}"


def pair_of(address: str, user: str) -> bytes:
    name = f"{address}\0{user}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
