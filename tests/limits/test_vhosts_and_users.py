"""Vhosts and users have no more queues, connections and channels than they may."""

from __future__ import annotations

from pathlib import Path

import pika
import pika.exceptions
import pytest

from tests.support import vhosts
from tests.support.real_broker import RealBroker, wait_until
from tests.support.vhosts import Api, connect

api, user, vhost = vhosts.api, vhosts.user, vhosts.vhost


@pytest.mark.row("I8", "A4.12", "G1.27")
def test_a_vhost_has_no_more_queues_and_connections_than_allowed(
    broker: RealBroker, api: Api, vhost: str
) -> None:
    api("PUT", f"vhost-limits/{vhost}/max-queues", {"value": 1})
    api("PUT", f"vhost-limits/{vhost}/max-connections", {"value": 2})
    first = connect(broker, vhost)
    first.channel().queue_declare("one")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
        first.channel().queue_declare("two")
    text = f"PRECONDITION_FAILED - queue limit in vhost '{vhost}' (1) is reached"
    assert (closed.value.reply_code, closed.value.reply_text) == (406, text)
    second = connect(broker, vhost)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as refused:
        connect(broker, vhost)
    text = (
        f"NOT_ALLOWED - access to vhost '{vhost}' refused for user 'guest': connection limit "
        "(2) is reached"
    )
    assert f'(530) "{text}"' in str(refused.value)
    second.close()
    wait_until(lambda: _opens(broker, vhost), "the closed connection to be counted no more")
    first.close()


def _opens(broker: RealBroker, vhost: str) -> bool:
    try:
        connect(broker, vhost).close()
    except pika.exceptions.AMQPConnectionError:
        return False
    return True


@pytest.mark.row("I9", "G3.3", "A2.5")
def test_a_user_has_no_more_connections_and_channels_than_allowed(
    broker: RealBroker, api: Api, vhost: str, user: str
) -> None:
    api("PUT", f"user-limits/{user}/max-connections", {"value": 1})
    api("PUT", f"user-limits/{user}/max-channels", {"value": 2})
    only = connect(broker, vhost, user)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError) as refused:
        connect(broker, vhost, user)
    text = (
        f"NOT_ALLOWED - connection refused for user '{user}': user connection limit (1) is reached"
    )
    assert f'(530) "{text}"' in str(refused.value)
    channels = [only.channel(), only.channel()]
    channels[0].close()
    only.channel()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as refused:
        only.channel()
    text = (
        f"NOT_ALLOWED - number of channels opened for user '{user}' has reached the maximum "
        "allowed user limit of (2)"
    )
    assert (refused.value.reply_code, refused.value.reply_text) == (530, text)


@pytest.mark.broker
@pytest.mark.row("I9")
def test_limits_count_over_all_front_doors(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data", front_doors=3)
    try:
        Api(broker)("PUT", "user-limits/guest/max-connections", {"value": 4})
        held = [connect(broker, "/") for _ in range(4)]
        for _ in range(6):  # the kernel chooses the front door
            with pytest.raises(pika.exceptions.ProbableAccessDeniedError):
                connect(broker, "/")
        for connection in held:
            connection.close()
        broker.stop()
    finally:
        broker.clean_up()
