"""Password hashes are RabbitMQ's, so that users can be moved between the brokers."""

from __future__ import annotations

import pytest

from broker.catalog import Catalog
from broker.changes import UserPut
from broker.controller.access import hash_password

SHA256 = "rabbit_password_hashing_sha256"
# RabbitMQ's documentation, "Password hashes": salt 908DC60A, password test12.
KNOWN = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"


def test_the_hash_of_rabbitmqs_documentation_is_made() -> None:
    assert hash_password("test12", bytes.fromhex("908DC60A"), SHA256) == KNOWN


@pytest.mark.parametrize(
    ("stored", "given", "ok"),
    [(KNOWN, "test12", True), (KNOWN, "test13", False), ("", "", False), ("not base64!", "x", False)],
)
def test_only_the_right_password_is_taken(stored: str, given: str, ok: bool) -> None:
    catalog = Catalog()
    catalog.apply(UserPut("u", stored))
    assert catalog.password_ok("u", given) is ok
    assert not catalog.password_ok("nobody", given)


def test_sha512_users_can_log_in() -> None:
    catalog = Catalog()
    algorithm = "rabbit_password_hashing_sha512"
    catalog.apply(UserPut("u", hash_password("p", algorithm=algorithm), algorithm))
    assert catalog.password_ok("u", "p")
