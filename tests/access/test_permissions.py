"""Changed permissions hold at once, over a whole broker."""

from __future__ import annotations

import pika
import pika.exceptions
import pytest

from tests.support import vhosts
from tests.support.real_broker import RealBroker
from tests.support.vhosts import Api, connect, publish

api, user, vhost = vhosts.api, vhosts.user, vhosts.vhost


@pytest.mark.row("I6", "I5", "G1.22")
def test_a_changed_permission_holds_for_the_next_publish(
    broker: RealBroker, api: Api, vhost: str, user: str
) -> None:
    with connect(broker, vhost, user) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        publish(channel, "q", 3)
        api("PUT", f"permissions/{vhost}/{user}", {"configure": "", "write": "^other", "read": ""})
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            publish(channel, "q", 1)
        text = (
            f"ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '{vhost}' "
            f"refused for user '{user}'"
        )
        assert (closed.value.reply_code, closed.value.reply_text) == (403, text)


@pytest.mark.row("I7", "G3.2")
def test_topic_permissions_say_which_keys(
    broker: RealBroker, api: Api, vhost: str, user: str
) -> None:
    body = {"exchange": "amq.topic", "write": "^{username}\\.", "read": "^open\\."}
    api("PUT", f"topic-permissions/{vhost}/{user}", body)
    with connect(broker, vhost, user) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.topic", "open.#")
        publish(channel, f"{user}.x", 2, "amq.topic")
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            publish(channel, "other.x", 1, "amq.topic")
        text = (
            "ACCESS_REFUSED - write access to topic 'other.x' in exchange 'amq.topic' in vhost "
            f"'{vhost}' refused"
        )
        assert closed.value.reply_text.startswith(text)
        channel = connection.channel()
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            channel.queue_bind("q", "amq.topic", "secret.#")
        assert closed.value.reply_text.startswith(
            "ACCESS_REFUSED - read access to topic 'secret.#'"
        )
        channel = connection.channel()
        publish(channel, "anything", 1, "amq.direct")
        api("DELETE", f"topic-permissions/{vhost}/{user}")
        publish(channel, "other.x", 1, "amq.topic")


@pytest.mark.row("I10")
def test_a_deleted_user_is_thrown_out_and_one_with_a_new_password_stays(
    broker: RealBroker, api: Api, vhost: str, name: str
) -> None:
    api("PUT", f"users/{name}-2", {"password": "a", "tags": ""})
    api("PUT", f"permissions/{vhost}/{name}-2", {"configure": ".*", "write": ".*", "read": ".*"})
    connection = connect(broker, vhost, f"{name}-2", "a")
    api("PUT", f"users/{name}-2", {"password": "b", "tags": ""})
    connection.process_data_events(0.1)
    assert connection.is_open
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, vhost, f"{name}-2", "a")
    connect(broker, vhost, f"{name}-2", "b").close()
    api("DELETE", f"users/{name}-2")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        connection.process_data_events(10)
    assert closed.value.reply_code == 320


def test_no_password_is_in_the_log(broker: RealBroker, api: Api, vhost: str) -> None:
    with pytest.raises(pika.exceptions.ProbableAuthenticationError):
        connect(broker, vhost, "guest", "s3cret-guess")
    assert api.refused("GET", "whoami", user="guest:s3cret-guess") == (401, "Login failed")
    api("PUT", "users/logged", {"password": "s3cret-new", "tags": ""})
    api("DELETE", "users/logged")
    assert "s3cret" not in broker.log_path.read_text()
