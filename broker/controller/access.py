"""Making password hashes, as RabbitMQ keeps them, so that users can move between the brokers.

Checking them is `Catalog.password_ok`. The salt is an argument where the result must be known beforehand.
"""

from __future__ import annotations

import base64
import hashlib
import secrets

from broker.catalog import HASHES, SALT_BYTES

DEFAULT_ALGORITHM = "rabbit_password_hashing_sha256"


def hash_password(password: str, salt: bytes | None = None, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """base64(salt + digest(salt + password))."""
    salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
    digest = hashlib.new(HASHES[algorithm], salt + password.encode()).digest()
    return base64.b64encode(salt + digest).decode()
