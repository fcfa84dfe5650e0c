"""Test connections and channels as clients see them, letter for letter as on RabbitMQ."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic, Channel, Connection, Exchange, Queue

from tests.support.brokers import Api
from tests.support.raw_client import HEADER, RawClient, content_header, method, publish, raw_frame
from tests.support.real_broker import RealBroker, wait_until

CAPABILITIES = {
    "publisher_confirms", "exchange_exchange_bindings", "basic.nack", "consumer_cancel_notify",
    "connection.blocked", "consumer_priorities", "authentication_failure_close", "per_consumer_qos",
    "direct_reply_to",
}  # fmt: skip
CLOSES = {"capabilities": {"authentication_failure_close": True}}
REFUSED = (
    "ACCESS_REFUSED - Login was refused using authentication mechanism {}. For details see "
    "the broker logfile."
)


def start(client: RawClient) -> Connection.Start:
    client.send(HEADER)
    return client.expect(Connection.Start)


def log_in(client: RawClient, **properties: Any) -> Connection.Tune:
    start(client)
    client.send(method(0, Connection.StartOk(properties, "PLAIN", "\0guest\0guest", "en_US")))
    return client.expect(Connection.Tune)


def enter(client: RawClient, *, heartbeat: int = 0, **properties: Any) -> RawClient:
    """Open, with what a client says of itself."""
    tune = log_in(client, **properties)
    client.send(method(0, Connection.TuneOk(tune.channel_max, tune.frame_max, heartbeat)))
    client.send(method(0, Connection.Open("/")))
    client.expect(Connection.OpenOk)
    client.send(method(1, Channel.Open()))
    client.expect(Channel.OpenOk)
    return client


@pytest.mark.row("A1.1")
@pytest.mark.parametrize(
    "said", [b"AMQP\x00\x01\x00\x00", b"AMQP\x01\x01\x08\x00", b"GET / HT", b"\x00" * 8]
)
def test_another_protocol_is_told_ours(broker: RealBroker, said: bytes) -> None:
    with RawClient(broker.port) as client:
        client.send(said)
        got = b""
        while more := client.sock.recv(100):
            got += more
    assert got == HEADER


@pytest.mark.row("A1.2", "A1.3", "A1.4")
def test_connection_start_says_what_clients_decide_by(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        said = start(client)
    assert (said.version_major, said.version_minor) == (0, 9)
    assert (said.mechanisms, said.locales) == ("AMQPLAIN PLAIN", "en_US")
    properties = said.server_properties
    assert properties["product"] == "RabbitMQ" and properties["version"].startswith("3.")
    assert {"platform", "copyright", "information", "cluster_name"} <= properties.keys()
    assert properties["capabilities"] == dict.fromkeys(CAPABILITIES, True)


def _amqplain(user: str, password: str) -> str:
    made = ""
    for name, value in (("LOGIN", user), ("PASSWORD", password)):
        made += chr(len(name)) + name + "S" + struct.pack(">I", len(value)).decode() + value
    return made


@pytest.mark.row("A1.4")
@pytest.mark.parametrize(
    ("mechanism", "response"),
    [("PLAIN", "\0guest\0guest"), ("AMQPLAIN", _amqplain("guest", "guest"))],
)
def test_both_mechanisms_log_in(broker: RealBroker, mechanism: str, response: str) -> None:
    with RawClient(broker.port) as client:
        start(client)
        client.send(method(0, Connection.StartOk({}, mechanism, response, "en_US")))
        client.expect(Connection.Tune)


@pytest.mark.row("A1.5")
@pytest.mark.parametrize(
    ("mechanism", "response"),
    [("PLAIN", "\0guest\0wrong"), ("AMQPLAIN", _amqplain("nobody", "guest"))],
)
def test_a_refused_login_is_told_to_who_can_hear_it(
    broker: RealBroker, mechanism: str, response: str
) -> None:
    for properties, told in ((CLOSES, True), ({}, False)):
        with RawClient(broker.port) as client:
            start(client)
            client.send(method(0, Connection.StartOk(properties, mechanism, response, "en_US")))
            if told:
                client.expect_close(403, REFUSED.format(mechanism))
            client.expect_end()


@pytest.mark.row("A1.5")
def test_an_unknown_mechanism_is_no_refused_login(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        start(client)
        client.send(method(0, Connection.StartOk({}, "EXTERNAL", "", "en_US")))
        client.expect_close(503, "COMMAND_INVALID - unknown authentication mechanism 'EXTERNAL'")


LOWER = "negotiated {} = {} is lower than the minimum allowed value ({})"
HIGHER = "negotiated {} = {} is higher than the maximum allowed value ({})"


@pytest.mark.row("A1.7")
@pytest.mark.parametrize(
    ("channel_max", "frame_max", "text"),
    [
        (2048, 131072, HIGHER.format("channel_max", 2048, 2047)),
        (0, 131072, HIGHER.format("channel_max", 0, 2047)),
        (2047, 131073, HIGHER.format("frame_max", 131073, 131072)),
        (2047, 0, HIGHER.format("frame_max", 0, 131072)),
        (2047, 4095, LOWER.format("frame_max", 4095, 4096)),
    ],
)
def test_what_was_not_offered_cannot_be_agreed(
    broker: RealBroker, channel_max: int, frame_max: int, text: str
) -> None:
    with RawClient(broker.port) as client:
        offered = log_in(client, **CLOSES)
        assert (offered.channel_max, offered.frame_max, offered.heartbeat) == (2047, 131072, 60)
        client.send(method(0, Connection.TuneOk(channel_max, frame_max, 0)))
        client.expect_close(530, f"NOT_ALLOWED - {text}")


@pytest.mark.row("A1.7")
def test_frames_are_as_small_as_agreed(broker: RealBroker, name: str) -> None:
    with RawClient(broker.port) as client:
        tune = log_in(client)
        client.send(
            method(0, Connection.TuneOk(tune.channel_max, 4096, 0))
            + method(0, Connection.Open("/"))
        )
        client.expect(Connection.OpenOk)
        client.ask(1, Channel.Open(), Channel.OpenOk)
        client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
        body = b"".join(raw_frame(3, 1, b"x" * 4000) for _ in range(5))
        client.send(method(1, Basic.Publish(routing_key=name)) + content_header(1, 20_000) + body)
        client.ask(1, Basic.Get(queue=name), Basic.GetOk)
        sizes = []
        while sum(sizes) < 20_000:
            read = client.read()
            assert read is not None
            if hasattr(read[1], "value"):
                sizes.append(len(read[1].value))
        assert max(sizes) <= 4096 - 8


@pytest.mark.row("A1.8")
def test_heartbeats_are_sent_and_a_silent_client_is_dropped(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        enter(client, heartbeat=1)
        began, got = time.monotonic(), b""
        while more := client.sock.recv(100):
            got += more
        took = time.monotonic() - began
    assert got == raw_frame(8, 0, b"") * (len(got) // 8) and len(got) >= 8
    assert 1.9 < took < 30


@pytest.mark.row("A1.8")
def test_who_sends_heartbeats_or_wants_none_stays(broker: RealBroker) -> None:
    with RawClient(broker.port) as alive, RawClient(broker.port) as silent:
        enter(alive, heartbeat=1)
        enter(silent, heartbeat=0)
        for _ in range(8):
            alive.send(raw_frame(8, 0, b""))
            time.sleep(0.5)
        for client in (alive, silent):
            client.ask(1, Basic.Qos(), Basic.QosOk)


@pytest.mark.row("A1.8")
def test_a_heartbeat_belongs_to_no_channel(client: RawClient) -> None:
    client.send(raw_frame(8, 1, b""))
    client.expect_close(505, "UNEXPECTED_FRAME - heartbeat frame must be on channel 0")


@pytest.mark.row("A1.9")
def test_a_vhost_that_is_not_there_is_refused(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        tune = log_in(client)
        client.send(method(0, Connection.TuneOk(tune.channel_max, tune.frame_max, 0)))
        client.send(method(0, Connection.Open("none")))
        client.expect_close(530, "NOT_ALLOWED - vhost none not found")


@pytest.mark.row("A1.9")
def test_a_vhost_without_rights_is_refused(broker: RealBroker, name: str, api: Api) -> None:
    api(f"/api/vhosts/{name}", method="PUT", body={})
    api(f"/api/users/{name}", method="PUT", body={"password": "secret", "tags": ""})
    with RawClient(broker.port) as client:
        start(client)
        client.send(method(0, Connection.StartOk({}, "PLAIN", f"\0{name}\0secret", "en_US")))
        tune = client.expect(Connection.Tune)
        client.send(method(0, Connection.TuneOk(tune.channel_max, tune.frame_max, 0)))
        client.send(method(0, Connection.Open(name)))
        client.expect_close(
            530, f"NOT_ALLOWED - access to vhost '{name}' refused for user '{name}'"
        )
    api(f"/api/users/{name}", method="DELETE")
    api(f"/api/vhosts/{name}", method="DELETE")


def _named(api: Api, name: str) -> dict[str, Any]:
    """Return the connection of this name, as soon as it is listed."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [one for one in api("/api/connections") if one["user_provided_name"] == name]
        return bool(found)

    wait_until(is_there, f"connection {name} to be listed")
    return found[0]


@pytest.mark.row("A1.10", "A1.13")
@pytest.mark.parametrize("reason", ["", "maintenance"])
def test_an_operator_closes_a_connection_with_a_reason(
    broker: RealBroker, name: str, api: Api, reason: str
) -> None:
    with RawClient(broker.port) as client:
        enter(client, connection_name=name)
        listed = _named(api, name)["name"]
        assert listed.endswith(f" -> 127.0.0.1:{broker.port}")
        headers = {"X-Reason": reason} if reason else {}
        api(
            f"/api/connections/{urllib.parse.quote(listed, safe='')}",
            method="DELETE",
            headers=headers,
        )
        client.expect_close(320, f"CONNECTION_FORCED - {reason or 'Closed via management plugin'}")


@pytest.mark.broker
@pytest.mark.row("A1.10", "A1.11")
def test_a_full_disk_blocks_publishers_who_are_told_and_a_stop_is_told_to_all(
    tmp_path: Path, name: str
) -> None:
    """The limit is above what any disk has free, so the alarm is there from the start."""
    (tmp_path / "broker.toml").write_text("[shards]\ndisk_free_min_bytes = 1125899906842624\n")
    broker = RealBroker(tmp_path / "data", more=("--config", str(tmp_path / "broker.toml")))
    try:
        with (
            RawClient(broker.port) as told,
            RawClient(broker.port) as deaf,
            RawClient(broker.port) as idle,
        ):
            enter(told, capabilities={"connection.blocked": True})
            enter(deaf, capabilities={})
            enter(idle, capabilities={"connection.blocked": True})
            for client in (told, deaf):
                client.send(publish(1, "", name, b"x"))
            assert told.expect(Connection.Blocked).reason == "low on disk"
            idle.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
            broker.stop()
            text = "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"
            for client in (told, deaf, idle):
                client.expect_close(320, text)
    finally:
        broker.clean_up()


@pytest.mark.row("A1.12")
def test_a_new_secret_is_taken(client: RawClient) -> None:
    client.ask(0, Connection.UpdateSecret("new", "renewed"), Connection.UpdateSecretOk)
    client.ask(1, Basic.Qos(), Basic.QosOk)


TOO_LARGE = "{frame_too_large,1048576,131064}"
NO_METHOD = "UNEXPECTED_FRAME - expected method frame, got non method frame instead"
NOT_NOW = "CHANNEL_ERROR - unexpected method in connection state running"
SHORT = "FRAME_ERROR - type 1, all octets = <<0,50>>: unknown_frame"
NO_HEARTBEAT = 'FRAME_ERROR - type 8, all octets = <<"x">>: unknown_frame'
FRAMES = [
    pytest.param(
        raw_frame(1, 1, b"\0\0", end=b"\0"),
        501,
        "FRAME_ERROR - type 1, all octets = <<0,0>>: {invalid_frame_end_marker,0}",
        id="bad end",
    ),
    pytest.param(
        raw_frame(9, 1, b""),
        501,
        "FRAME_ERROR - type 9, all octets = <<>>: unknown_frame",
        id="bad type",
    ),
    pytest.param(
        struct.pack(">BHI", 1, 1, 1 << 20),
        501,
        f"FRAME_ERROR - type 1, all octets = <<>>: {TOO_LARGE}",
        id="too large",
    ),
    pytest.param(content_header(1, 1), 505, NO_METHOD, id="header without publish"),
    pytest.param(raw_frame(3, 1, b"x"), 505, NO_METHOD, id="body without header"),
    pytest.param(
        method(0, Queue.Declare(queue="q")),
        503,
        "COMMAND_INVALID - ",
        id="queue.declare on channel 0",
    ),
    pytest.param(method(0, Connection.TuneOk(9, 131072, 0)), 504, NOT_NOW, id="tune-ok again"),
    pytest.param(method(0, Connection.CloseOk()), 504, NOT_NOW, id="close-ok to no close"),
    pytest.param(raw_frame(1, 1, b"\0\x32"), 501, SHORT, id="short"),
    pytest.param(raw_frame(8, 0, b"x"), 501, NO_HEARTBEAT, id="heartbeat"),
    pytest.param(
        raw_frame(1, 1, struct.pack(">HH", 60, 999)),
        503,
        "COMMAND_INVALID - unimplemented method",
        id="unknown method",
    ),
]


@pytest.mark.row("A1.14", "A1.15", "A2.6")
@pytest.mark.parametrize(("said", "code", "text"), FRAMES)
def test_a_broken_frame_ends_the_connection(
    client: RawClient, said: bytes, code: int, text: str
) -> None:
    client.send(said)
    client.expect_close(code, text)
    # else nobody knows where close-ok begins
    if "end_marker" not in text and "too_large" not in text:
        client.expect_end()


@pytest.mark.row("A1.16")
def test_a_storm_of_connections_is_let_in(broker: RealBroker) -> None:
    """More connections arrive than one pass accepts.

    The first of them do not wait for the last.
    """
    with contextlib.ExitStack() as stack:
        storm = [stack.enter_context(socket.socket()) for _ in range(400)]
        for sock in storm:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", broker.port))
        for sock in storm:
            sock.settimeout(60)
            sock.sendall(HEADER)
        for sock in storm:
            assert sock.recv(1) == b"\x01"


# -- channels --------------------------------------------------------------------------------------


@pytest.mark.row("A2.1")
def test_a_channel_is_opened_once(client: RawClient) -> None:
    client.send(method(1, Channel.Open()))
    client.expect_close(504, "CHANNEL_ERROR - second 'channel.open' seen")


@pytest.mark.row("A2.1")
def test_channels_end_at_the_agreed_number(broker: RealBroker) -> None:
    with RawClient(broker.port) as client:
        tune = log_in(client)
        client.send(
            method(0, Connection.TuneOk(2, tune.frame_max, 0)) + method(0, Connection.Open("/"))
        )
        client.expect(Connection.OpenOk)
        for number in (1, 65535):  # their number counts, not the numbers they have
            client.ask(number, Channel.Open(), Channel.OpenOk)
        client.ask(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
        client.ask(2, Channel.Open(), Channel.OpenOk)
        client.send(method(3, Channel.Open()))
        text = (
            "NOT_ALLOWED - number of channels opened (2) has reached the negotiated channel_max (2)"
        )
        client.expect_close(530, text)


@pytest.mark.row("A2.2")
@pytest.mark.parametrize(
    "said", [Queue.Declare(queue="q"), Basic.Ack(1), Channel.Close(200, "", 0, 0)]
)
def test_nothing_is_said_on_a_channel_before_it_is_open(client: RawClient, said: Any) -> None:
    client.send(method(9, said))
    client.expect_close(504, "CHANNEL_ERROR - expected 'channel.open'")


@pytest.mark.row("A2.3")
def test_what_follows_a_closed_channel_is_dropped_until_close_ok(
    client: RawClient, name: str
) -> None:
    client.send(
        method(1, Queue.Declare(queue=name, passive=True)) + method(1, Queue.Declare(queue=name))
    )
    client.send(publish(1, "", name, b"lost"))
    client.expect_channel_close(1, 404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
    client.ask(1, Channel.Open(), Channel.OpenOk)
    client.send(method(1, Queue.Declare(queue=name, passive=True)))
    client.expect_channel_close(1, 404, "NOT_FOUND")  # the second declare was not done


@pytest.mark.row("A2.3", "A6.11")
def test_what_a_channel_held_goes_back_in_its_place(client: RawClient, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name, exclusive=True), Queue.DeclareOk)
    for body in (b"1", b"2", b"3"):
        client.send(publish(1, "", name, body))
    for _ in range(2):
        client.ask(2, Basic.Get(queue=name), Basic.GetOk)
    client.ask(2, Channel.Close(200, "", 0, 0), Channel.CloseOk)
    got = [
        (client.ask(1, Basic.Get(queue=name), Basic.GetOk).redelivered, client.content())
        for _ in range(3)
    ]
    assert got == [(True, b"1"), (True, b"2"), (False, b"3")]


@pytest.mark.row("A2.4")
def test_flow_can_be_on_and_not_off(client: RawClient) -> None:
    assert client.ask(1, Channel.Flow(True), Channel.FlowOk).active
    client.send(method(1, Channel.Flow(False)))
    client.expect_close(540, "NOT_IMPLEMENTED - active=false")


@pytest.mark.row("A2.6")
def test_access_request_is_granted_to_old_clients(client: RawClient) -> None:
    client.send(raw_frame(1, 1, struct.pack(">HH", 30, 10) + b"\x05/data" + b"\x1f"))
    assert client.read_frame() == raw_frame(1, 1, struct.pack(">HHH", 30, 11, 1))


@pytest.mark.row("A1.15")
@pytest.mark.parametrize("hard", [True, False])
def test_hard_errors_end_the_connection_and_soft_ones_the_channel(
    client: RawClient, name: str, hard: bool
) -> None:
    said = Exchange.Declare(exchange=name, passive=True) if not hard else Basic.Qos(prefetch_size=1)
    client.send(method(1, said))
    if hard:
        client.expect_close(540, "NOT_IMPLEMENTED - prefetch_size!=0 (1)")
        client.expect_end()
    else:
        client.expect_channel_close(1, 404, f"NOT_FOUND - no exchange '{name}' in vhost '/'")
        client.ask(2, Basic.Qos(), Basic.QosOk)
