"""Password hashes are RabbitMQ's, so that users can be moved between the brokers."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from shardmq.broker.controller.access import hash_new_password, hash_password
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.model import passwords
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import UserPut

EXPORT = Path(__file__).parents[1] / "definitions" / "rabbitmq_definitions.json"
SHA256 = "rabbit_password_hashing_sha256"
# RabbitMQ's documentation, "Password hashes": salt 908DC60A, password test12.
KNOWN = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"


def test_the_hash_of_rabbitmqs_documentation_is_made() -> None:
    assert hash_password("test12", bytes.fromhex("908DC60A"), SHA256) == KNOWN


@pytest.mark.parametrize(
    ("stored", "given", "ok"),
    [
        (KNOWN, "test12", True),
        (KNOWN, "test13", False),
        ("", "", False),
        ("not base64!", "x", False),
    ],
)
def test_only_the_right_password_is_taken(stored: str, given: str, ok: bool) -> None:
    catalog = Catalog()
    catalog.apply(UserPut("u", stored))
    assert passwords.matches(catalog.users.get("u"), given) is ok
    assert not passwords.matches(catalog.users.get("nobody"), given)


def test_sha512_users_can_log_in() -> None:
    catalog = Catalog()
    algorithm = "rabbit_password_hashing_sha512"
    catalog.apply(UserPut("u", hash_password("p", algorithm=algorithm), algorithm))
    assert passwords.matches(catalog.users.get("u"), "p")


# Users that a RabbitMQ 3.10.8 has made and exported: EXPORT.
@pytest.mark.parametrize(
    ("word", "user", "password"), [("sha256", "olga", "olga secret"), ("sha512", "sha512", "long")]
)
def test_what_a_setting_makes_is_what_rabbitmq_would_have_made(
    word: str, user: str, password: str
) -> None:
    document = json.loads(EXPORT.read_bytes())
    [theirs] = [row for row in document["users"] if row["name"] == user]
    config = ControllerConfig(data_dir="", runtime_dir="", boot="b", shards=1, hashing=word)
    salt = base64.b64decode(theirs["password_hash"])[:4]
    assert config.hashing_algorithm == theirs["hashing_algorithm"]
    assert hash_password(password, salt, config.hashing_algorithm) == theirs["password_hash"]
    made, algorithm = hash_new_password(password, config.hashing_algorithm)
    assert algorithm == theirs["hashing_algorithm"] and len(made) == len(theirs["password_hash"])


def test_without_a_setting_new_passwords_are_hashed_slowly() -> None:
    config = ControllerConfig(data_dir="", runtime_dir="", boot="b", shards=1)
    assert config.hashing_algorithm == passwords.SCRYPT
