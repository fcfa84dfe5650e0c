"""Making password hashes. Checking them is `shardmq.broker.model.passwords` and `shardmq.broker.shared.logins`."""

from __future__ import annotations

import secrets

from shardmq.broker.model.passwords import DEFAULT_ALGORITHM, HASHES, encode


def hash_password(
    password: str, salt: bytes | None = None, algorithm: str = DEFAULT_ALGORITHM
) -> str:
    """base64(salt + digest). The salt is an argument where the result must be known beforehand."""
    return encode(
        password,
        secrets.token_bytes(HASHES[algorithm].salt_bytes) if salt is None else salt,
        algorithm,
    )


def hash_new_password(password: str, algorithm: str) -> tuple[str, str]:
    """Hash and algorithm."""
    return hash_password(password, algorithm=algorithm), algorithm
