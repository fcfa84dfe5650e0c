"""Clients see no difference between the compiled short way and the way of Python.

The same conversations are played with a broker that has the short way and one that has it switched
off. tests/support/seen.py says what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_recorded_bytes import CONVERSATIONS as RECORDED
from tests.clients.test_recorded_bytes import differences as from_recorded
from tests.clients.test_recorded_bytes import masked
from tests.support.both_ways import SWITCH, Way, both_ways
from tests.support.conversations import CONVERSATIONS, Conversation
from tests.support.random_conversation import random_conversation
from tests.support.seen import differences

RANDOM_CONVERSATIONS = 12

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Way, Way]]:
    with both_ways(tmp_path_factory.mktemp("short-way")) as made:
        yield made


def compare(ways: tuple[Way, Way], play: Conversation) -> None:
    off, on = (way.seen_by(play) for way in ways)
    assert len(off) == len(on)
    found = [
        f"connection {number}, {line}"
        for number, (one, other) in enumerate(zip(off, on, strict=True), 1)
        for line in differences(one, other)
    ]
    assert not found, "off beside on:\n" + "\n".join(found)


def test_every_process_of_a_broker_is_told_of_the_switch(ways: tuple[Way, Way]) -> None:
    for way, value in zip(ways, "01", strict=True):
        for kind in ("front-door", "shard"):
            environment = Path(f"/proc/{way.broker.pid(kind)}/environ").read_bytes().split(b"\0")
            assert f"{SWITCH}={value}".encode() in environment


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda play: play.__name__)
def test_a_conversation_is_the_same_both_ways(
    ways: tuple[Way, Way], conversation: Conversation
) -> None:
    compare(ways, conversation)


def test_random_conversations_are_the_same_both_ways(
    ways: tuple[Way, Way], request: pytest.FixtureRequest
) -> None:
    first = request.config.option.seed
    for seed in range(first, first + RANDOM_CONVERSATIONS):
        print(f"to play it again: --seed {seed}")
        compare(ways, random_conversation(seed))


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "stopped"])
def test_a_conversation_that_rabbitmq_had_is_the_same_both_ways(
    ways: tuple[Way, Way], name: str
) -> None:
    """Compare what differs from RabbitMQ's bytes; all other bytes are alike."""
    off, on = (
        [(each.note, masked(each.ours)) for each in from_recorded(way.broker, name)] for way in ways
    )
    assert off == on
