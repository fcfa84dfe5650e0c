"""Encrypted texts: how a text that only a key can read is told from others.

`broker/controller/stored/key_ring.py` encrypts the secrets of parameters in files and decrypts them
when it reads the files. A text whose key is not there stays as it is, so it comes into the catalog.
"""

from __future__ import annotations

from typing import Any, Final

# RabbitMQ writes encrypted values of its settings in this way, too. No URI begins so.
ENCRYPTED: Final = "encrypted:"
NO_KEY: Final = (
    "its URI is encrypted, and secrets.key_file of this broker has no key for it: "
    "put the key back, or set the URI anew"
)


def is_encrypted(value: Any) -> bool:
    """Return whether a value is a text that only a key can read."""
    return isinstance(value, str) and value.startswith(ENCRYPTED)
