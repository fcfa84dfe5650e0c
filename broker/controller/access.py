"""Makes password hashes; `model/passwords.py` and `shared/logins.py` check them."""

from __future__ import annotations

import secrets

from shardmq.broker.model.passwords import DEFAULT_ALGORITHM, HASHES, encode


def hash_password(
    password: str, salt: bytes | None = None, algorithm: str = DEFAULT_ALGORITHM
) -> str:
    """Return base64(salt + digest); a caller that must know the result gives the salt."""
    return encode(
        password,
        secrets.token_bytes(HASHES[algorithm].salt_bytes) if salt is None else salt,
        algorithm,
    )


def hash_new_password(password: str, algorithm: str) -> tuple[str, str]:
    """Return the hash of a new password, and the algorithm."""
    return hash_password(password, algorithm=algorithm), algorithm
