"""Test the settings for consumers that do not settle their messages.

The settings give the timeout of queues that have none of their own, and say that the channel is
closed after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pika
import pika.exceptions
import pytest

from tests.support.real_broker import RealBroker, wait_until

pytestmark = pytest.mark.broker

SETTINGS = """
[shards]
consumer_timeout_ms = 300
consumer_timeout_action = "close"
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    directory = tmp_path_factory.mktemp("strict")
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS)
    made = RealBroker(Path(directory) / "data", more=("--config", str(settings)))
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


@pytest.mark.row("A6.7")
@pytest.mark.parametrize("how", ["consume", "get"])
def test_a_channel_that_does_not_settle_in_time_is_closed_as_by_rabbitmq(
    strict: RealBroker, how: str
) -> None:
    with pika.BlockingConnection(pika.URLParameters(strict.url)) as connection:
        channel, other = connection.channel(), connection.channel()
        channel.queue_declare(how)
        channel.confirm_delivery()
        channel.basic_publish("", how, b"1")
        if how == "consume":
            channel.basic_consume(how, lambda *_: None)
        else:
            channel.basic_get(how)

        def closed() -> bool:
            connection.process_data_events(0)
            return channel.is_closed

        wait_until(closed, "the channel's end")
        reason = channel._closing_reason
        assert (
            isinstance(reason, pika.exceptions.ChannelClosedByBroker) and reason.reply_code == 406
        )
        assert reason.reply_text == (
            "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value "
            "used: 300 ms. This timeout value can be configured, see consumers doc guide to learn "
            "more"
        )
        method, _, body = other.basic_get(how, auto_ack=True)
        assert body == b"1" and method.redelivered
