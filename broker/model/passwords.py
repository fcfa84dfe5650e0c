"""Passwords and their hashes: whether a password is right, and which ones were right lately.

A hash is base64(salt + digest(salt, password)). RabbitMQ's hashes are one round of a fast digest;
they are known so that its users can be imported. Users made here get scrypt, which takes some 50 ms
and 16 MiB each time: `is_slow` says so, and `Memory` spares a user who logs in again the wait. The
functions are pure; salts are arguments.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from shardmq.broker.model.changes import UserPut

REMEMBERED_MAX = 10_000  # logins

SCRYPT: Final = "shardmq_password_hashing_scrypt"
DEFAULT_ALGORITHM: Final = SCRYPT
SCRYPT_COST = 1 << 14  # with blocks of 8: 16 MiB
SCRYPT_BYTES_MAX = 32 << 20


class Algorithm(NamedTuple):
    """A way to hash passwords."""

    salt_bytes: int
    digest: Callable[[bytes, bytes], bytes]  # of salt and password


def _plain(name: str) -> Algorithm:
    """Make RabbitMQ's algorithm: 4 bytes of salt, one round of the digest of this name."""
    return Algorithm(
        4, lambda salt, password: hashlib.new(name, salt + password, usedforsecurity=False).digest()
    )


def _scrypt(salt: bytes, password: bytes) -> bytes:
    return hashlib.scrypt(
        password, salt=salt, n=SCRYPT_COST, r=8, p=1, maxmem=SCRYPT_BYTES_MAX, dklen=32
    )


# The algorithms for new passwords, by their names in the settings.
FOR_NEW: Final[dict[str, str]] = {
    "scrypt": SCRYPT,
    "sha256": "rabbit_password_hashing_sha256",
    "sha512": "rabbit_password_hashing_sha512",
}
# Other brokers write RabbitMQ's algorithms under shorter names.
HASHES: Final[dict[str, Algorithm]] = {
    "rabbit_password_hashing_sha256": _plain("sha256"),
    "rabbit_password_hashing_sha512": _plain("sha512"),
    "rabbit_password_hashing_md5": _plain("md5"),
    "SHA256": _plain("sha256"),
    "SHA512": _plain("sha512"),
    "MD5": _plain("md5"),
    SCRYPT: Algorithm(16, _scrypt),
}


def is_slow(user: UserPut | None) -> bool:
    """Return whether `matches` takes long.

    An unknown user takes as long as one made here; otherwise a stopwatch would tell them apart.
    """
    return user is None or user.hashing_algorithm == SCRYPT


def matches(user: UserPut | None, password: str) -> bool:
    """Return whether the password is that of the user; None is an unknown user.

    The answer takes the same time for an unknown user, a wrong password and a right one, if all are
    hashed alike. It may take long: who must not wait asks `shardmq.broker.shared.logins`.
    """
    salt, digest, algorithm = _split(user)
    given = algorithm.digest(salt, password.encode("utf-8", "surrogatepass"))
    return hmac.compare_digest(given, digest)


def encode(password: str, salt: bytes, algorithm: str = DEFAULT_ALGORITHM) -> str:
    return base64.b64encode(salt + HASHES[algorithm].digest(salt, password.encode())).decode()


def is_base64(password_hash: str) -> bool:
    try:
        base64.b64decode(password_hash, validate=True)
    except ValueError:
        return False
    return True


def _split(user: UserPut | None) -> tuple[bytes, bytes, Algorithm]:
    """Return salt, digest and algorithm; without a user or password no digest is the right one."""
    algorithm = (
        HASHES.get(user.hashing_algorithm) if user is not None else HASHES[DEFAULT_ALGORITHM]
    )
    if algorithm is None:
        algorithm = HASHES[DEFAULT_ALGORITHM]
    elif user is not None and user.password_hash and is_base64(user.password_hash):
        whole = base64.b64decode(user.password_hash)
        return whole[: algorithm.salt_bytes], whole[algorithm.salt_bytes :], algorithm
    return bytes(algorithm.salt_bytes), b"", algorithm


class Memory:
    """Passwords that were right, as keyed digests.

    Another password is not known, nor is the same one after the user's hash has changed.
    """

    def __init__(self, key: bytes) -> None:
        """Begin with no passwords; `key` is random and of this process alone."""
        self._key = key
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def mark(self, user: UserPut, password: str) -> bytes:
        """Return the keyed digest of a user and a password."""
        parts = (
            user.name.encode(),
            user.password_hash.encode(),
            password.encode("utf-8", "surrogatepass"),
        )
        mac = hashlib.blake2b(key=self._key, digest_size=32)
        for part in parts:
            mac.update(len(part).to_bytes(4, "little") + part)
        return mac.digest()

    def knows(self, mark: bytes) -> bool:
        """Return whether the login was right before."""
        if mark not in self._known:
            return False
        self._known.move_to_end(mark)
        return True

    def remember(self, mark: bytes) -> None:
        """Keep a login that was right; the one unused for longest makes room."""
        self._known[mark] = None
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
