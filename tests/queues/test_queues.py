"""Test the types of queues and their arguments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic, Channel, Confirm, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, method, publish, with_properties
from tests.support.real_broker import RealBroker, wait_until

Arguments = dict[str, Any]
QUORUM: Arguments = {"x-queue-type": "quorum"}


@pytest.fixture
def queues(api: Api) -> Iterator[list[str]]:
    """Names of queues that go with the test."""
    made: list[str] = []
    yield made
    for queue in made:
        api(f"/api/queues/%2F/{queue}", method="DELETE")


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.row("C1.1")
def test_an_unknown_type_is_refused(client: RawClient, name: str) -> None:
    client.send(method(1, Queue.Declare(queue=name, arguments={"x-queue-type": "fast"})))
    text = f"PRECONDITION_FAILED - invalid arg 'x-queue-type' for queue '{name}' in vhost '/': "
    client.expect_channel_close(1, 406, text + "\"unsupported queue type 'fast'\"")


@pytest.mark.row("C1.1")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "invalid property 'non-durable' for queue '{}' in vhost '/'"),
        (
            {"durable": True, "auto_delete": True},
            "invalid property 'auto-delete' for queue '{}' in vhost '/'",
        ),
        (
            {"durable": True, "exclusive": True},
            "invalid property 'exclusive-owner' for queue '{}' in vhost '/'",
        ),
        (
            {"queue": "", "durable": True},
            "Cannot declare a server-named queue for type rabbit_quorum_queue",
        ),
    ],
)
def test_a_quorum_queue_lasts_or_is_none(
    client: RawClient, name: str, how: dict[str, Any], text: str
) -> None:
    client.send(method(1, Queue.Declare(**{"queue": name, "arguments": QUORUM, **how})))
    client.expect_channel_close(1, 406, "PRECONDITION_FAILED - " + text.format(name))


@pytest.mark.row("C1.1")
def test_the_type_is_listed_and_compared(
    client: RawClient, api: Api, queues: list[str], name: str
) -> None:
    client.ask(1, Queue.Declare(queue=name, durable=True, arguments=QUORUM), Queue.DeclareOk)
    queues.append(name)
    assert api(f"/api/queues/%2F/{name}")["type"] == "quorum"
    client.send(method(1, Queue.Declare(queue=name, durable=True)))
    text = (
        f"PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue '{name}' in vhost "
        "'/': received 'classic'"
    )
    client.expect_channel_close(1, 406, text + " but current is 'quorum'")


@pytest.mark.row("C1.1", "I19")
def test_a_vhost_gives_its_type_to_lasting_queues_that_are_declared_without(
    api: Api, name: str
) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={})
    api(f"/api/queues/{name}/older", method="PUT", body={})
    api(
        f"/api/vhosts/{name}",
        method="PUT",
        body={"default_queue_type": "quorum", "description": "d"},
    )
    assert api(f"/api/vhosts/{name}")["default_queue_type"] == "quorum"
    for queue, body in (
        ("lasting", {}),
        ("passing", {"durable": False}),
        ("said", {"arguments": CLASSIC}),
    ):
        for _ in range(2):
            api(f"/api/queues/{name}/{queue}", method="PUT", body=body)
    api(f"/api/queues/{name}/older", method="PUT", body={})
    types = {row["name"]: row["type"] for row in api(f"/api/queues/{name}")}
    assert types == {
        "older": "classic",
        "lasting": "quorum",
        "passing": "classic",
        "said": "classic",
    }
    api(f"/api/vhosts/{name}", method="DELETE")


CLASSIC: Arguments = {"x-queue-type": "classic"}


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.row("A4.2")
def test_a_name_given_by_the_broker_begins_as_the_client_wants(client: RawClient) -> None:
    asked = Queue.Declare(queue="", exclusive=True, arguments={"x-name-prefix": "replies"})
    given = [client.ask(1, asked, Queue.DeclareOk).queue for _ in range(2)]
    assert len(set(given)) == 2 and all(
        name.startswith("replies-") and len(name) == 30 for name in given
    )
    client.send(method(1, Queue.Declare(queue="", arguments={"x-name-prefix": 65 * "p"})))
    text = f"PRECONDITION_FAILED - Queue name prefix '{65 * 'p'}' exceeds the 64-byte limit"
    client.expect_channel_close(1, 406, text)


@pytest.mark.row("C1.16")
def test_a_time_for_consumers_of_other_nodes_is_taken_and_means_nothing(
    client: RawClient, name: str
) -> None:
    arguments = {"x-consumer-disconnected-timeout": 1}
    client.ask(1, Queue.Declare(queue=name, exclusive=True, arguments=arguments), Queue.DeclareOk)
    client.send(
        method(
            1, Queue.Declare(queue=f"{name}-2", arguments={"x-consumer-disconnected-timeout": -1})
        )
    )
    text = "PRECONDITION_FAILED - invalid arg 'x-consumer-disconnected-timeout' for queue"
    client.expect_channel_close(1, 406, text)


# -- what lasts ------------------------------------------------------------------------------------


@pytest.mark.broker
@pytest.mark.row("C1.18")
def test_a_restart_leaves_durable_queues_and_the_persistent_messages_in_them(
    tmp_path: Path, name: str
) -> None:
    broker = RealBroker(tmp_path / "data", shards=1)
    kinds: dict[str, dict[str, bool]] = {
        "durable": {"durable": True},
        "transient": {},
        "exclusive": {"durable": True, "exclusive": True},
        "auto-delete": {"durable": True, "auto_delete": True},
    }
    try:
        with RawClient(broker.port) as made:
            client = made.shake_hands(channels=1)
            client.ask(1, Confirm.Select(), Confirm.SelectOk)
            for queue, how in kinds.items():
                client.ask(1, Queue.Declare(queue=queue, **how), Queue.DeclareOk)
                client.send(with_properties(1, "", queue, b"x", delivery_mode=2))
                client.expect(Basic.Ack)
        broker.stop()
        broker.restart()
        assert _counted(broker, kinds) == {
            "durable": 1,
            "transient": None,
            "exclusive": None,
            "auto-delete": 1,
        }
        broker.stop()
    finally:
        broker.clean_up()


def _counted(broker: RealBroker, queues: Any) -> dict[str, int | None]:
    """Messages in each, None if it is not there."""
    found: dict[str, int | None] = {}
    with RawClient(broker.port) as made:
        client = made.shake_hands(channels=len(queues))
        for channel, queue in enumerate(queues, 1):
            client.send(method(channel, Queue.Declare(queue=queue, passive=True)))
            read = client.read()
            assert read is not None
            found[queue] = read[1].message_count if isinstance(read[1], Queue.DeclareOk) else None
            if found[queue] is None:
                client.send(method(channel, Channel.CloseOk()))
    return found


@pytest.mark.row("C1.20")
def test_a_queue_whose_shard_does_not_answer_is_shown_as_down(
    broker: RealBroker, api: Api, name: str
) -> None:
    api(f"/api/queues/%2F/{name}", method="PUT", body={})
    path = f"/api/queues/%2F/{name}"
    wait_until(lambda: (api(path)["state"], api(path)["messages"]) == ("running", 0), "its figures")
    shard = broker.pid("shard", api(path)["shard"])
    os.kill(shard, signal.SIGSTOP)
    try:
        wait_until(
            lambda: api(f"/api/queues/%2F/{name}")["state"] == "down", "the silence to be noticed"
        )
        assert "messages" not in api(f"/api/queues/%2F/{name}")
    finally:
        os.kill(shard, signal.SIGCONT)
    wait_until(lambda: api(f"/api/queues/%2F/{name}")["state"] == "running", "the shard to answer")
    api(f"/api/queues/%2F/{name}", method="DELETE")


@pytest.mark.row("C1.15")
def test_what_comes_back_rests_longer_each_time_and_then_dies(
    client: RawClient, api: Api, queues: list[str], name: str
) -> None:
    client.ask(1, Queue.Declare(queue=f"{name}-dead", exclusive=True), Queue.DeclareOk)
    retry: Arguments = {
        "x-delayed-retry-type": "failed",
        "x-delayed-retry-min": 150,
        "x-delayed-retry-max": 250,
    }
    dead: Arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}-dead"}
    arguments = {**QUORUM, **retry, **dead, "x-delivery-limit": 2}
    client.ask(1, Queue.Declare(queue=name, durable=True, arguments=arguments), Queue.DeclareOk)
    queues.append(name)
    client.send(publish(1, "", name, b"again"))
    client.ask(1, Basic.Consume(queue=name), Basic.ConsumeOk)
    waits, counts = [], []
    for _ in range(3):
        tag = client.expect(Basic.Deliver).delivery_tag
        properties, _ = client.message()
        counts.append((properties.headers or {}).get("x-delivery-count"))
        client.send(publish(1, "", name, b"other"))  # is not held up by the one that rests
        client.expect(Basic.Deliver)
        assert client.content() == b"other"
        waits.append(time.monotonic())
        client.send(method(1, Basic.Reject(tag, requeue=True)))
    assert counts == [None, 1, 2]
    assert waits[1] - waits[0] >= 0.15 and waits[2] - waits[1] >= 0.25
    wait_until(
        lambda: api(f"/api/queues/%2F/{name}-dead").get("messages") == 1, "the message to die"
    )


@pytest.mark.row("C1.15")
def test_a_policy_makes_it_rest(client: RawClient, api: Api, queues: list[str], name: str) -> None:
    policy = {
        "pattern": f"^{name}$",
        "definition": {"delayed-retry-type": "all", "delayed-retry-min": 120_000},
    }
    api(f"/api/policies/%2F/{name}", method="PUT", body=policy)
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    queues.append(name)
    client.send(publish(1, "", name, b"x"))
    tag = client.ask(1, Basic.Get(queue=name), Basic.GetOk).delivery_tag
    client.message()
    client.send(method(1, Basic.Nack(tag, requeue=True)))
    client.ask(1, Basic.Get(queue=name), Basic.GetEmpty)
    wait_until(
        lambda: api(f"/api/queues/%2F/{name}").get("messages_unacknowledged") == 1, "the figures"
    )
    api(f"/api/policies/%2F/{name}", method="DELETE")
    client.ask(1, Basic.Get(queue=name), Basic.GetOk)  # rests no longer
    assert client.content() == b"x"


@pytest.mark.row("C1.9")
def test_who_is_the_single_active_consumer_is_shown(
    client: RawClient, api: Api, queues: list[str], name: str
) -> None:
    client.ask(
        1, Queue.Declare(queue=name, arguments={"x-single-active-consumer": True}), Queue.DeclareOk
    )
    queues.append(name)
    for tag in ("first", "second"):
        client.ask(1, Basic.Consume(queue=name, consumer_tag=tag), Basic.ConsumeOk)

    def shown(tag: str) -> bool:
        row = api(f"/api/queues/%2F/{name}")
        active = [one["consumer_tag"] for one in row["consumer_details"] if one["active"]]
        return row.get("single_active_consumer_tag") == tag and active == [tag]

    wait_until(lambda: shown("first"), "the first to be shown")
    client.ask(1, Basic.Cancel(consumer_tag="first"), Basic.CancelOk)
    wait_until(lambda: shown("second"), "the second to be shown")
    client.ask(1, Basic.Cancel(consumer_tag="second"), Basic.CancelOk)


@pytest.mark.broker
@pytest.mark.row("C1.15")
def test_what_rests_outlives_its_shard_and_knows_how_often_it_came_back(
    tmp_path: Path, name: str
) -> None:
    """Its rest is over then: sooner than it was told, but it is not lost."""
    broker = RealBroker(tmp_path / "data", shards=1)
    try:
        with RawClient(broker.port) as made:
            client = made.shake_hands()
            arguments = {**QUORUM, "x-delayed-retry-min": 600_000}
            client.ask(
                1, Queue.Declare(queue=name, durable=True, arguments=arguments), Queue.DeclareOk
            )
            client.ask(1, Confirm.Select(), Confirm.SelectOk)
            for content in (b"one", b"two"):
                client.send(with_properties(1, "", name, content, delivery_mode=2))
                client.expect(Basic.Ack)
                tag = client.ask(1, Basic.Get(queue=name), Basic.GetOk).delivery_tag
                client.message()
                client.send(method(1, Basic.Reject(tag, requeue=True)))
            client.ask(1, Basic.Get(queue=name), Basic.GetEmpty)
            client.send(with_properties(1, "", name, b"three", delivery_mode=2))
            client.expect(Basic.Ack)  # so that the returns are on disk
            broker.kill("shard")
            found = []
            for _ in range(3):
                client.ask(1, Basic.Get(queue=name, no_ack=True), Basic.GetOk)
                properties, content = client.message()
                found.append((content, (properties.headers or {}).get("x-delivery-count")))
            assert found == [(b"one", 1), (b"two", 1), (b"three", None)]
        broker.stop()
    finally:
        broker.clean_up()
