"""Limits of channels count over all front doors: those of a user, and that of the broker."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pika
import pika.exceptions
import pytest

from tests.support.real_broker import RealBroker

pytestmark = pytest.mark.broker

CHANNELS_MAX = 6
LIMIT = "NOT_ALLOWED - number of channels {} has reached the maximum allowed {}"
CONNECTIONS = 5  # on both front doors, most likely


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory = tmp_path_factory.mktemp("bounded")
    settings = Path(directory) / "broker.toml"
    settings.write_text(f"[front_doors]\nchannel_max_per_node = {CHANNELS_MAX}\n")
    made = RealBroker(Path(directory) / "data", front_doors=2, more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


@contextlib.contextmanager
def connections(broker: RealBroker) -> Iterator[list[pika.BlockingConnection]]:
    made = [pika.BlockingConnection(pika.URLParameters(broker.url)) for _ in range(CONNECTIONS)]
    try:
        yield made
    finally:
        for connection in made:
            if connection.is_open:
                connection.close()


def refused(connection: pika.BlockingConnection) -> str:
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as found:
        connection.channel()
    assert found.value.reply_code == 530
    return found.value.reply_text


@pytest.mark.row("A2.5")
def test_no_more_channels_than_the_broker_allows_over_all_front_doors(bounded: RealBroker) -> None:
    with connections(bounded) as made:
        channels = [made[n % CONNECTIONS].channel() for n in range(CHANNELS_MAX)]
        text = LIMIT.format("opened on node 'shardmq@localhost'", "limit of (6)")
        assert refused(made[-1]) == text  # its own channel goes with it
        again = made[0].channel()
        assert text == refused(made[1])
        again.close()
        channels[0].close()
        for _ in range(3):
            made[2].channel()


@pytest.mark.row("A2.5")
def test_a_limit_of_a_user_counts_what_was_open_when_it_was_set(bounded: RealBroker) -> None:
    with connections(bounded) as made:
        channels = [connection.channel() for connection in made[:3]]
        limit(bounded, "PUT", 4)
        try:
            made[3].channel()
            text = LIMIT.format("opened for user 'guest'", "user limit of (4)")
            assert refused(made[4]) == text
            channels[0].close()
            channels[0] = made[1].channel()
            assert refused(made[2]) == text
        finally:
            limit(bounded, "DELETE")


def limit(broker: RealBroker, method: str, value: int | None = None) -> None:
    body = None if value is None else json.dumps({"value": value}).encode()
    address = f"http://{broker.http}/api/user-limits/guest/max-channels"
    request = urllib.request.Request(address, body, method=method)
    request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
    with urllib.request.urlopen(request):
        pass
