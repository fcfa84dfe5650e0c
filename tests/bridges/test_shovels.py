"""Shovels between the queues of one broker, and between two, do what their parameter says."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pika
import pytest

from shardmq.broker.controller.management.responses.schemas import ROWS
from tests.bridges.moving import (
    call,
    connected,
    delete_shovel,
    fill,
    set_shovel,
    shovel,
    taken,
    uri,
    wait_for_error,
    wait_for_state,
)
from tests.support.real_broker import RealBroker, wait_until

pytestmark = [pytest.mark.broker]


@pytest.fixture(scope="module")
def other_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Return a second broker."""
    other = RealBroker(tmp_path_factory.mktemp("other"), shards=1)
    yield other
    other.stop()


@pytest.fixture
def shovel_name(broker: RealBroker, name: str) -> Iterator[str]:
    yield name
    delete_shovel(broker, name)


BODIES = [b"%d" % number for number in range(1500)]


@pytest.mark.row("J5", "J6", "J8")
@pytest.mark.parametrize("ack_mode", ["on-confirm", "on-publish", "no-ack"])
def test_messages_move_within_the_broker_in_order(
    broker: RealBroker, shovel_name: str, ack_mode: str
) -> None:
    name = shovel_name
    fill(broker, f"{name}-from", BODIES)
    set_shovel(broker, name, src_queue=f"{name}-from", dest_queue=f"{name}-to", ack_mode=ack_mode)
    assert [body for _, body in taken(broker, f"{name}-to", len(BODIES))] == BODIES
    state = wait_for_state(broker, name, "running")
    assert {field.partition(":")[0] for field in ROWS["Shovel"].split()} <= state.keys()
    assert state["src_uri"] == "amqp://" and state["src_queue"] == f"{name}-from"
    wait_until(lambda: shovel(broker, name)["message_count"] == len(BODIES), "counted")
    assert taken(broker, f"{name}-from", 1, 0.2) == []


@pytest.mark.row("J5", "J6")
def test_messages_move_to_another_broker_and_back(
    broker: RealBroker, other_broker: RealBroker, shovel_name: str
) -> None:
    name = shovel_name
    bodies = [b"", b"x" * 300_000, b"y" * 5000]
    fill(broker, f"{name}-a", bodies, headers={"one": "1"}, content_type="text/plain")
    set_shovel(broker, name, src_queue=f"{name}-a", dest_uri=uri(other_broker), dest_queue=name)
    back = f"{name}-back"
    set_shovel(
        broker, back, src_uri=uri(other_broker), src_queue=name, dest_queue=f"{name}-b",
        dest_add_forward_headers=True, dest_add_timestamp_header=True,
        dest_publish_properties={"app_id": "moved"},
    )  # fmt: skip
    try:
        moved = taken(broker, f"{name}-b", len(bodies))
        assert [body for _, body in moved] == bodies
        properties = moved[0][0]
        assert properties.content_type == "text/plain" and properties.app_id == "moved"
        assert properties.headers["one"] == "1"
        assert properties.headers["x-shovelled"][0]["shovel-name"] == back
        assert (
            properties.headers["x-shovelled"][0]["src-uri"]
            == f"amqp://127.0.0.1:{other_broker.port}"
        )
        assert properties.headers["x-shovelled-timestamp"] > 1_700_000_000
        assert "guest:guest" not in str(call(broker, "GET", "shovels")[1])
    finally:
        delete_shovel(broker, back)


@pytest.mark.row("J5")
@pytest.mark.parametrize(("after", "moved"), [("queue-length", 50), (20, 20), (0, 0)])
def test_a_shovel_ends_after_so_many_messages(
    broker: RealBroker, name: str, after: str | int, moved: int
) -> None:
    fill(broker, f"{name}-from", BODIES[:50])
    set_shovel(
        broker, name, src_queue=f"{name}-from", dest_queue=f"{name}-to", src_delete_after=after
    )
    wait_until(lambda: shovel(broker, name) == {}, "it is deleted")
    assert [body for _, body in taken(broker, f"{name}-to", 51, 0.5)] == BODIES[:moved]
    assert [body for _, body in taken(broker, f"{name}-from", 51, 0.5)] == BODIES[moved:50]


@pytest.mark.row("J5")
@pytest.mark.parametrize("source", ["src_queue", "src_exchange"])
def test_a_shovel_of_an_empty_source_ends_at_once(
    broker: RealBroker, name: str, source: str
) -> None:
    call(broker, "PUT", f"exchanges/%2F/{name}", {"type": "direct"})
    set_shovel(
        broker, name, **{source: name}, dest_queue=f"{name}-to", src_delete_after="queue-length"
    )
    wait_until(lambda: shovel(broker, name) == {}, "it is deleted")


@pytest.mark.row("J5")
def test_a_queue_whose_messages_others_take_is_counted_anew(
    broker: RealBroker, shovel_name: str
) -> None:
    name = shovel_name
    fill(broker, name, [b"a", b"b"])
    set_shovel(
        broker, name, src_queue=name, dest_uri=f"http://{broker.http}/none",
        src_delete_after="queue-length", reconnect_delay=0.1,
    )  # fmt: skip
    assert shovel(broker, name) != {}
    wait_for_error(broker, name, "HTTP: status 404")

    def is_deleted() -> bool:
        call(broker, "DELETE", f"queues/%2F/{name}/contents")
        return shovel(broker, name) == {}

    wait_until(is_deleted, "it is deleted")


@pytest.mark.row("J5", "J6")
def test_an_exchange_is_a_source_and_keys_stay(broker: RealBroker, shovel_name: str) -> None:
    name = shovel_name
    set_shovel(
        broker, name, src_exchange="amq.topic", src_exchange_key=f"{name}.#",
        dest_exchange="amq.direct",
    )  # fmt: skip
    wait_for_state(broker, name, "running")
    call(broker, "PUT", f"queues/%2F/{name}", {"durable": True})
    call(broker, "POST", f"bindings/%2F/e/amq.direct/q/{name}", {"routing_key": f"{name}.x"})
    body = {
        "properties": {},
        "routing_key": f"{name}.x",
        "payload": "a",
        "payload_encoding": "string",
    }

    def published() -> bool:
        return bool(call(broker, "POST", "exchanges/%2F/amq.topic/publish", body)[1]["routed"])

    wait_until(published, "the shovel's queue is bound")
    assert taken(broker, name, 1)[0][1] == b"a"


@pytest.mark.row("J5", "J6")
def test_connections_of_shovels_are_listed_as_those_of_the_broker_itself(
    broker: RealBroker, shovel_name: str
) -> None:
    set_shovel(broker, shovel_name, src_queue=f"{shovel_name}-from", dest_queue=shovel_name)
    wait_for_state(broker, shovel_name, "running")
    rows = [
        row
        for row in call(broker, "GET", "connections")[1]
        if row["user_provided_name"] == f"Shovel {shovel_name}"
    ]
    shown = {(row["user"], row["vhost"], row["protocol"], row["type"]) for row in rows}
    assert shown == {("none", "/", "Direct 0-9-1", "direct")}
    assert len({row["name"] for row in rows}) == 2
    path = f"connections/{quote(rows[0]['name'], safe='')}"
    assert call(broker, "GET", f"{path}/channels")[1][0]["user"] == "none"


@pytest.mark.row("J5")
def test_several_uris_are_tried_in_turn(broker: RealBroker, shovel_name: str) -> None:
    name = shovel_name
    fill(broker, f"{name}-from", [b"a"])
    set_shovel(
        broker, name, src_uri=["amqp://guest:wrong@127.0.0.1:1", uri(broker)],
        src_queue=f"{name}-from", dest_queue=f"{name}-to",
    )  # fmt: skip
    assert taken(broker, f"{name}-to", 1)[0][1] == b"a"


@pytest.mark.row("G2.4", "J9")
def test_pause_resume_and_restart(broker: RealBroker, shovel_name: str) -> None:
    name = shovel_name
    set_shovel(broker, name, src_queue=f"{name}-from", dest_queue=f"{name}-to")
    wait_for_state(broker, name, "running")
    path = f"shovels/%2F/{name}"
    assert call(broker, "PUT", f"{path}/resume")[0] == 422
    assert call(broker, "PUT", f"{path}/pause")[0] == 204
    assert call(broker, "PUT", f"{path}/pause")[0] == 422
    assert shovel(broker, name)["state"] == "paused"
    wait_until(
        lambda: call(broker, "GET", f"queues/%2F/{name}-from")[1].get("consumers") == 0,
        "no consumer",
    )
    fill(broker, f"{name}-from", [b"a"])
    assert taken(broker, f"{name}-to", 1, 1.0) == []
    assert call(broker, "PUT", f"{path}/resume")[0] == 204
    assert taken(broker, f"{name}-to", 1)[0][1] == b"a"
    wait_until(lambda: shovel(broker, name)["message_count"] == 1, "it counts")
    assert call(broker, "DELETE", f"shovels/vhost/%2F/{name}/restart")[0] == 204
    wait_until(lambda: shovel(broker, name)["message_count"] == 0, "it counts anew")
    wait_for_state(broker, name, "running")
    assert call(broker, "PUT", f"{path}/pause")[0] == 204
    assert call(broker, "DELETE", f"parameters/shovel/%2F/{name}")[0] == 204
    set_shovel(broker, name, src_queue=f"{name}-from", dest_queue=f"{name}-to")
    wait_for_state(broker, name, "running")


@pytest.mark.row("J8", "J9")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"src_uri": "amqp://127.0.0.1:1"}, "cannot connect"),
        ({"dest_uri": "amqp://nowhere.invalid"}, "destination amqp://nowhere.invalid: cannot"),
        ({"src_uri": "amqp://guest:pass-word@127.0.0.1:{port}"}, "403"),
        ({"src_uri": "amqp://guest:guest@127.0.0.1:{port}/none"}, "vhost none not found"),
        ({"src_uri": "amqps://127.0.0.1:{port}"}, "cannot connect"),
        ({"src_uri": "amqps://127.0.0.1:{port}?cacertfile=/none.pem"}, "TLS: /none.pem"),
        ({"src_predeclared": True}, "no queue"),
        ({"dest_predeclared": True}, "no queue"),
        ({"dest_uri": "http://127.0.0.1:1/"}, ""),
    ],
)
def test_bad_ends_are_reasons_and_delays_grow(
    broker: RealBroker, shovel_name: str, value: dict[str, object], error: str
) -> None:
    name = shovel_name
    given = {
        key: item.format(port=broker.port) if isinstance(item, str) else item
        for key, item in value.items()
    }
    if not error:
        fill(broker, f"{name}-from", [b"a"])
    set_shovel(broker, name, **{"src_queue": f"{name}-from", "dest_queue": f"{name}-to", **given})
    state = wait_for_error(broker, name, error or "HTTP")
    assert state["state"] in ("starting", "running") and "pass-word" not in state["error"]
    wait_until(lambda: shovel(broker, name)["retry_in_s"] >= 0.8, "the delay grows")


@pytest.fixture
def user(broker: RealBroker, shovel_name: str) -> Iterator[str]:
    """Return a user, whose password is the same word; the user may not do anything yet."""
    call(broker, "PUT", f"users/{shovel_name}", {"password": shovel_name, "tags": "policymaker"})
    yield shovel_name
    call(broker, "DELETE", f"users/{shovel_name}")


@pytest.mark.row("J6")
def test_messages_of_all_users_move_within_the_broker_with_their_user_id(
    broker: RealBroker, user: str
) -> None:
    every = {"configure": ".*", "write": ".*", "read": ".*"}
    call(broker, "PUT", f"permissions/%2F/{user}", every)
    call(broker, "PUT", f"queues/%2F/{user}-from", {"durable": True})
    with connected(broker, user) as connection:
        properties = pika.BasicProperties(user_id=user)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", f"{user}-from", b"a", properties)
    set_shovel(broker, user, src_queue=f"{user}-from", dest_queue=f"{user}-to")
    ((properties, body),) = taken(broker, f"{user}-to", 1)
    assert (properties.user_id, body) == (user, b"a")


@pytest.mark.row("J5", "J6")
def test_who_may_enter_a_vhost_sets_shovels_that_may_do_everything_there(
    broker: RealBroker, user: str
) -> None:
    value = {
        "src-uri": "amqp://", "src-queue": f"{user}-from",
        "dest-uri": "amqp://", "dest-exchange": "amq.topic", "dest-exchange-key": user,
    }  # fmt: skip

    def set_by_user(**more: str) -> int:
        path = f"parameters/shovel/%2F/{user}"
        return call(broker, "PUT", path, {"value": value | more}, user)[0]

    call(broker, "PUT", f"queues/%2F/{user}-to", {"durable": True})
    call(broker, "POST", f"bindings/%2F/e/amq.topic/q/{user}-to", {"routing_key": user})
    fill(broker, f"{user}-from", [b"a"])
    assert set_by_user() == 401
    none = {"configure": "", "write": "", "read": ""}
    call(broker, "PUT", f"permissions/%2F/{user}", none)
    call(broker, "PUT", f"topic-permissions/%2F/{user}", {"exchange": "amq.topic", **none})
    assert set_by_user(**{"src-uri": "amqp:///other"}) == 401
    assert set_by_user(**{"dest-uri": "amqp://guest@/%2F"}) == 401
    assert set_by_user() == 201
    assert taken(broker, f"{user}-to", 1)[0][1] == b"a"


@pytest.mark.row("J8")
def test_a_message_that_the_destination_refuses_waits_and_all_others_move_once(
    broker: RealBroker, shovel_name: str
) -> None:
    name = shovel_name
    source, full, free = (f"{name}-{which}" for which in ("from", "full", "free"))
    limited = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for queue, arguments in ((source, {}), (full, limited), (free, {})):
        call(broker, "PUT", f"queues/%2F/{queue}", {"durable": True, "arguments": arguments})
    for queue in (full, free):
        call(broker, "POST", f"bindings/%2F/e/amq.topic/q/{source}", {"routing_key": queue})
        call(broker, "POST", f"bindings/%2F/e/amq.direct/q/{queue}", {"routing_key": queue})
    with connected(broker) as connection:
        channel = connection.channel()
        channel.tx_select()
        for queue in [full, full, *20 * [free]]:
            channel.basic_publish("amq.topic", queue, b"a")
        channel.tx_commit()
        set_shovel(broker, name, src_queue=source, dest_exchange="amq.direct")
        wait_until(lambda: shovel(broker, name)["message_count"] == 21, "all but one have moved")
        state = shovel(broker, name)
        assert (state["state"], state["failures"]) == ("running", 0)
        assert state["refused"] >= 1 and "refuses messages" in state["error"]
        channel = connection.channel()
        assert channel.queue_purge(full).method.message_count == 1
        wait_until(lambda: shovel(broker, name)["message_count"] == 22, "the last one has moved")
        wait_until(lambda: shovel(broker, name)["error"] == "", "it is not refused any more")
        purged = [channel.queue_purge(queue).method.message_count for queue in (full, free)]
        assert purged == [1, 20]


@pytest.mark.row("J9")
def test_a_queue_is_not_moved_into_itself(broker: RealBroker, shovel_name: str) -> None:
    set_shovel(broker, shovel_name, src_queue="same", dest_queue="same")
    state = wait_for_state(broker, shovel_name, "terminated")
    assert "the queue that is the source" in state["error"]
    assert state["reason"] == state["error"]
