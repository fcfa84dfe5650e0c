"""Passwords and their hashes: whether one is right, and what is remembered of that. Pure; salts are arguments.

A hash is base64(salt + digest(salt, password)). RabbitMQ's own are one round of a fast digest, kept so that its users
can be imported; users made here get scrypt, which takes some 50 ms and 16 MiB each time: `is_slow` says so, and
`Memory` spares who logs in again the wait.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from shardmq.broker.model.changes import UserPut

REMEMBERED_MAX = 10_000  # logins that were right lately

SCRYPT: Final = "shardmq_password_hashing_scrypt"
DEFAULT_ALGORITHM: Final = SCRYPT
SCRYPT_COST = 1 << 14  # with blocks of 8: 16 MiB
SCRYPT_BYTES_MAX = 32 << 20


class Algorithm(NamedTuple):
    salt_bytes: int
    digest: Callable[[bytes, bytes], bytes]  # of salt and password


def _plain(name: str) -> Algorithm:
    """RabbitMQ's: 4 bytes of salt, one round."""
    return Algorithm(
        4, lambda salt, password: hashlib.new(name, salt + password, usedforsecurity=False).digest()
    )


def _scrypt(salt: bytes, password: bytes) -> bytes:
    return hashlib.scrypt(
        password, salt=salt, n=SCRYPT_COST, r=8, p=1, maxmem=SCRYPT_BYTES_MAX, dklen=32
    )


# What new passwords may be hashed with, as the settings name it.
FOR_NEW: Final[dict[str, str]] = {
    "scrypt": SCRYPT,
    "sha256": "rabbit_password_hashing_sha256",
    "sha512": "rabbit_password_hashing_sha512",
}
# Other brokers write RabbitMQ's under shorter names.
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
    """Whether `matches` takes long. An unknown user takes as long as one made here: else a stopwatch would know them
    apart."""
    return user is None or user.hashing_algorithm == SCRYPT


def matches(user: UserPut | None, password: str) -> bool:
    salt, digest, algorithm = _split(user)
    given = algorithm.digest(salt, password.encode("utf-8", "surrogatepass"))
    return hmac.compare_digest(given, digest)


def encode(password: str, salt: bytes, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The hash of a new password."""
    return base64.b64encode(salt + HASHES[algorithm].digest(salt, password.encode())).decode()


def is_base64(password_hash: str) -> bool:
    try:
        base64.b64decode(password_hash, validate=True)
    except ValueError:
        return False
    return True


def _split(user: UserPut | None) -> tuple[bytes, bytes, Algorithm]:
    """Salt, digest, algorithm; for no user or no password a digest that nothing hashes to."""
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
    """Passwords that were right, as keyed digests: another password, or another hash of the user, is not known."""

    def __init__(self, key: bytes) -> None:
        """`key`: random, of this process alone."""
        self._key = key
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def mark(self, user: UserPut, password: str) -> bytes:
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
        if mark not in self._known:
            return False
        self._known.move_to_end(mark)
        return True

    def remember(self, mark: bytes) -> None:
        self._known[mark] = None
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
