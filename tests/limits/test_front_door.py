"""The limits that the settings of the front doors set to each message and each channel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp.commands import Basic, Confirm

from tests.support.brokers import CHANNELS
from tests.support.raw_client import RawClient, content_header, declare, is_empty, method, publish
from tests.support.real_broker import RealBroker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker whose messages may have 1 MiB, its channels 5 consumers."""
    directory = tmp_path_factory.mktemp("limits")
    settings = directory / "broker.toml"
    settings.write_text("[front_doors]\nmessage_bytes_max = 1048576\nchannel_consumers_max = 5\n")
    made = RealBroker(directory / "data", more=("--config", str(settings)))
    try:
        yield made
        made.stop()
        assert "Traceback" not in made.log_path.read_text()
    finally:
        made.clean_up()


@pytest.fixture
def client(broker: RealBroker) -> Iterator[RawClient]:
    with RawClient(broker.port) as made:
        yield made.shake_hands(channels=CHANNELS)


@pytest.mark.row("A5.4")
def test_a_larger_message_ends_the_channel_in_rabbitmqs_words(client: RawClient, name: str) -> None:
    declare(client, name)
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    too_large = method(1, Basic.Publish()) + content_header(1, 1048577)
    client.send(too_large + publish(1, "", name, b"behind it: dropped, neither acked nor nacked"))
    text = "PRECONDITION_FAILED - message size 1048577 is larger than configured max size 1048576"
    client.expect_channel_close(1, 406, text)
    assert is_empty(client, name, 2)


@pytest.mark.row("A6.5")
def test_a_channel_has_so_many_consumers_and_no_more(client: RawClient, name: str) -> None:
    declare(client, name)
    for _ in range(5):
        client.ask(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    client.ask(2, Basic.Consume(queue=name), Basic.ConsumeOk)
    client.send(method(1, Basic.Consume(queue=name)))
    client.expect_close(530, "NOT_ALLOWED - reached maximum (5) of consumers per channel")
