"""Play the internal AMQP client, without sockets, against frames of pamqp and our server side."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import base, body, commands, frame, header, heartbeat

from shardmq.broker.amqp import ChannelOpenOk, Connection, Method, Publishes, StartOk, contents
from shardmq.broker.amqp.methods import decode_method
from shardmq.broker.amqp.properties import read
from shardmq.broker.amqp.spec import REPLY_NAMES
from shardmq.broker.front_door.publish.confirms import ack_frame, known_frame, nack_frame
from shardmq.supervisor import amqp_client as amqp
from shardmq.supervisor.amqp_client import (
    Broken,
    Client,
    Closed,
    Confirmed,
    Event,
    Known,
    Message,
    Opened,
    Received,
    State,
)
from tests.amqp.bytes_of import received

BASIC = commands.Basic
FRAME_MAX = 8192
PROPS = b"\x10\x00\x02"  # delivery_mode 2

START = frame.marshal(commands.Connection.Start(0, 9, {}, "PLAIN", "en_US"), 0)
TUNE = frame.marshal(commands.Connection.Tune(2047, FRAME_MAX, 60), 0)
OPEN_OK = frame.marshal(commands.Connection.OpenOk(), 0)
CHANNEL_OPEN_OK = frame.marshal(commands.Channel.OpenOk(), 1)
HANDSHAKE = [START, TUNE, OPEN_OK, CHANNEL_OPEN_OK]
HEARTBEAT = frame.marshal(heartbeat.Heartbeat(), 0)
BLOCKED = frame.marshal(commands.Connection.Blocked("no room"), 0)
SELECT_OK = frame.marshal(commands.Confirm.SelectOk(), 1)
GET_EMPTY = frame.marshal(BASIC.GetEmpty(), 1)


def content(data: bytes, part: int = FRAME_MAX - 8) -> bytes:
    pieces = [data[at : at + part] for at in range(0, len(data), part)]
    head = frame.marshal(header.ContentHeader(0, len(data), BASIC.Properties(delivery_mode=2)), 1)
    return bytes(head + b"".join(frame.marshal(body.ContentBody(one), 1) for one in pieces))


def delivered(data: bytes, tag: int = 1) -> bytes:
    return bytes(frame.marshal(BASIC.Deliver("c", tag, True, "x", "k"), 1)) + content(data)


def fetched(data: bytes, tag: int = 1) -> bytes:
    return bytes(frame.marshal(BASIC.GetOk(tag, False, "x", "k", 7), 1)) + content(data)


def returned(data: bytes) -> bytes:
    return bytes(frame.marshal(BASIC.Return(312, "NO_ROUTE", "x", "k"), 1)) + content(data)


def connection_close(code: int, text: str) -> bytes:
    return bytes(frame.marshal(commands.Connection.Close(code, text, 0, 0), 0))


def channel_close(code: int, text: str) -> bytes:
    return bytes(frame.marshal(commands.Channel.Close(code, text, 0, 0), 1))


def client(steps: int = len(HANDSHAKE), **options: Any) -> Client:
    """Return a client that has heard the first steps of the handshake."""
    made = Client("/", "PLAIN", "\0guest\0secret", **options)
    for step in HANDSHAKE[:steps]:
        made.receive_data(step)
    made.data_to_send()
    return made


def methods_in(data: bytes) -> list[base.Frame]:
    """Return the methods among frames, read as strictly as our server reads them."""
    found, at = [], 0
    while at < len(data):
        kind, _, size = struct.unpack_from(">BHI", data, at)
        if kind == 1:
            found.append(decode_method(data[at + 7 : at + 7 + size]))
        assert data[at + 7 + size] == 0xCE
        at += 8 + size
    return found


# -- the handshake ---------------------------------------------------------------------------------


def test_the_handshake_sends_one_step_for_each_answer() -> None:
    properties = b"\x00\x00\x00\x04\x01at\x01"  # a: true
    made = Client("vhost", "PLAIN", "\0guest\0secret", properties=properties)
    assert made.data_to_send() == b"AMQP\x00\x00\x09\x01"
    assert made.data_to_send() == b""
    assert made.receive_data(START) == []
    (start_ok,) = methods_in(made.data_to_send())
    assert isinstance(start_ok, commands.Connection.StartOk)
    assert (start_ok.client_properties, start_ok.mechanism) == ({"a": True}, "PLAIN")
    assert (start_ok.response, start_ok.locale) == ("\0guest\0secret", "en_US")
    assert made.receive_data(TUNE) == []
    tune_ok, opening = methods_in(made.data_to_send())
    assert dict(tune_ok) == {"channel_max": 2047, "frame_max": FRAME_MAX, "heartbeat": 0}
    assert isinstance(opening, commands.Connection.Open)
    assert opening.virtual_host == "vhost"
    assert made.receive_data(OPEN_OK) == []
    (opening_channel,) = methods_in(made.data_to_send())
    assert isinstance(opening_channel, commands.Channel.Open)
    assert made.receive_data(CHANNEL_OPEN_OK) == [Opened()]
    assert made.state is State.OPEN
    assert made.data_to_send() == b""


@pytest.mark.parametrize(
    "offered, ours, agreed",
    [(0, 131072, 131072), (8192, 131072, 8192), (1 << 20, 131072, 131072), (4096, 4096, 4096)],
)
def test_the_smaller_frame_size_is_agreed_on(offered: int, ours: int, agreed: int) -> None:
    made = client(1, frame_bytes_max=ours)
    made.receive_data(frame.marshal(commands.Connection.Tune(10, offered, 60), 0))
    tune_ok = methods_in(made.data_to_send())[0]
    assert dict(tune_ok) == {"channel_max": 10, "frame_max": agreed, "heartbeat": 0}
    assert made.frame_bytes_max == agreed


def test_a_frame_size_below_the_protocols_is_refused() -> None:
    made = client(1)
    (event,) = made.receive_data(frame.marshal(commands.Connection.Tune(10, 4095, 60), 0))
    assert event == Broken("frames of 4095 bytes are too small")


def test_our_server_lets_the_client_in_and_hears_its_messages() -> None:
    server = Connection(frame_bytes_max=FRAME_MAX, server_properties={})
    made = Client("/", "EXTERNAL", "somebody")
    heard: list[Event] = []

    def exchange_bytes() -> list[Any]:
        found: list[Any] = []
        while data := made.data_to_send():
            for event in received(server, data):
                found.append(event)
                if isinstance(event, Method) and isinstance(event.method, commands.Channel.Open):
                    server.send_method(event.channel, ChannelOpenOk())
            heard.extend(made.receive_data(b"".join(server.data_to_send())))
        return found

    login = exchange_bytes()
    assert heard == [Opened()]
    assert [one.mechanism for one in login if isinstance(one, StartOk)] == ["EXTERNAL"]
    large = bytes(range(256)) * 200  # in seven frames
    for data in (b"", b"small", large):
        made.publish("", "queue", PROPS, data, True)
    messages = [
        contents.read_stored(contents.stored(event.buffer, event.table, at))
        for event in exchange_bytes()
        if isinstance(event, Publishes)
        for at in range(event.count)
    ]
    assert [bytes(message[3]) for message in messages] == [b"", b"small", large]
    assert {bytes(message[1]) for message in messages} == {b"queue"}
    assert {read(bytes(message[2])).delivery_mode for message in messages} == {2}


# -- what the broker says --------------------------------------------------------------------------


def test_confirms_say_which_publishes_are_stored_or_refused() -> None:
    made = client()
    assert made.receive_data(SELECT_OK + ack_frame(1, 3, True) + nack_frame(1, 4)) == [
        Received(amqp.SELECT_OK),
        Confirmed(3, True, True),
        Confirmed(4, False, False),
    ]
    assert made.receive_data(known_frame(1, 5, 9, True) + known_frame(1, 10, 10, False)) == [
        Known(5, 9, True),
        Known(10, 10, False),
    ]


LARGE = bytes(range(256)) * 100


@pytest.mark.parametrize("data", [b"", b"x", LARGE], ids=["no body", "one frame", "four frames"])
def test_a_message_comes_with_its_content(data: bytes) -> None:
    assert client().receive_data(delivered(data, 5) + fetched(data, 6) + returned(data)) == [
        Message(amqp.DELIVER, 5, True, "x", "k", 0, PROPS, data),
        Message(amqp.GET_OK, 6, False, "x", "k", 7, PROPS, data),
        Message(amqp.RETURN, 0, False, "x", "k", 0, PROPS, data),
    ]


def test_a_client_that_keeps_no_content_hears_of_the_methods_alone() -> None:
    data = delivered(LARGE) + returned(LARGE) + delivered(b"") + GET_EMPTY
    assert client(keeps_content=False).receive_data(data) == [
        Received(amqp.DELIVER),
        Message(amqp.RETURN, 0, False, "x", "k", 0),
        Received(amqp.DELIVER),
        Received(amqp.GET_EMPTY),
    ]


@pytest.mark.parametrize("together", [True, False])
def test_deliveries_that_are_only_counted_are_not_looked_into(together: bool) -> None:
    payload = struct.pack(">I", amqp.DELIVER) + b"\xff"
    data = struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"
    made = client(3, keeps_content=False)
    parts = [CHANNEL_OPEN_OK + data] if together else [CHANNEL_OPEN_OK, data]
    events = [event for part in parts for event in made.receive_data(part)]
    assert events == [Opened(), Received(amqp.DELIVER)]
    assert client().receive_data(data) == [Broken("a frame is cut short")]


def test_names_that_are_no_utf_8_do_not_break_the_connection() -> None:
    payload = struct.pack(">I", amqp.RETURN) + b"\x01\x38\x00\x01\xff\x01\xfe"
    data = struct.pack(">BHI", 1, 1, len(payload)) + payload + b"\xce"
    (event,) = client(keeps_content=False).receive_data(data)
    assert event == Message(amqp.RETURN, 0, False, "\ufffd", "\ufffd", 0)


def test_heartbeats_and_notices_are_no_events() -> None:
    quiet = HEARTBEAT + BLOCKED + frame.marshal(commands.Connection.Unblocked(), 0)
    made = Client("/", "PLAIN", "")
    assert made.receive_data(quiet.join([b"", *HANDSHAKE, b""])) == [Opened()]
    message = content(b"body")
    head = frame.marshal(BASIC.GetOk(1, False, "x", "k", 7), 1)
    end_of_header = len(message) - 8 - len(b"body")
    parts = [head, message[:end_of_header], message[end_of_header:]]
    assert made.receive_data(quiet.join(parts)) == client().receive_data(head + message)


def test_the_counts_of_declared_queues_are_kept() -> None:
    made = client()
    answers = [frame.marshal(commands.Queue.DeclareOk("q", n, n + 1), 1) for n in range(150)]
    assert made.receive_data(b"".join(answers)) == [Received(amqp.DECLARE_OK)] * 150
    assert list(made.declared) == [(n, n + 1) for n in range(50, 150)]
    cut = struct.pack(">BHI", 1, 1, 6) + struct.pack(">IBB", amqp.DECLARE_OK, 1, 0x71) + b"\xce"
    assert client().receive_data(cut) == [Broken("a frame is cut short")]


def test_the_reason_for_which_publishers_are_blocked_is_known_until_it_is_over() -> None:
    made = client()
    assert made.blocked == ""
    made.receive_data(frame.marshal(commands.Connection.Blocked("low on disk"), 0))
    assert made.blocked == "low on disk"
    made.receive_data(frame.marshal(commands.Connection.Unblocked(), 0))
    assert made.blocked == ""


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [200, *REPLY_NAMES])
@pytest.mark.parametrize("steps", range(len(HANDSHAKE) + 1))
def test_a_close_is_the_last_event_whenever_it_comes(code: int, steps: int) -> None:
    text = REPLY_NAMES.get(code, "OK") + " - said why"
    made = client(steps)
    (event,) = made.receive_data(connection_close(code, text) + SELECT_OK)
    assert event == Closed(code, text, opened=steps >= 3)
    assert made.state is State.CLOSED
    assert [one.name for one in methods_in(made.data_to_send())] == ["Connection.CloseOk"]
    assert made.receive_data(SELECT_OK) == []


@pytest.mark.parametrize("code", REPLY_NAMES)
def test_a_closed_channel_is_the_end_too(code: int) -> None:
    made = client()
    assert made.receive_data(ack_frame(1, 1, False) + channel_close(code, "why")) == [
        Confirmed(1, False, True),
        Closed(code, "why", True),
    ]
    assert [one.name for one in methods_in(made.data_to_send())] == ["Channel.CloseOk"]


def test_a_connection_that_closes_within_a_message_says_so() -> None:
    last_frame_bytes = len(LARGE) % (FRAME_MAX - 8) + 8
    cut_short = fetched(LARGE)[:-last_frame_bytes]
    (event,) = client().receive_data(cut_short + connection_close(320, "shutdown"))
    assert event == Closed(320, "shutdown", True)


GARBAGE = {
    "another version": (b"AMQP\x00\x00\x09\x01", "the answer is not AMQP"),
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n", "the answer is not AMQP"),
    "a frame without end": (HEARTBEAT[:-1] + b"\x00", "a frame has no end"),
    "a frame that is too large": (b"\x01\x00\x01\x00\x10\x00\x01", "the answer is not AMQP"),
    "a method cut short": (b"\x01\x00\x01\x00\x00\x00\x02\x00\x3c\xce", "a frame is cut short"),
    "a string cut short": (
        b"\x01\x00\x00\x00\x00\x00\x08\x00\x0a\x00\x32\x01\x40\x09a\xce",
        "a frame is cut short",
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("steps", range(len(HANDSHAKE) + 1))
def test_garbage_is_told_and_nothing_behind_it_is_read(name: str, steps: int) -> None:
    data, why = GARBAGE[name]
    made = client(steps)
    assert made.receive_data(HEARTBEAT + data + SELECT_OK) == [Broken(why)]
    assert made.state is State.CLOSED
    assert made.receive_data(SELECT_OK) == []


OUT_OF_ORDER = {
    "the last body frame": frame.marshal(body.ContentBody(b""), 1),
    "a content header": content(b"x"),
    "a content header without body": content(b""),
    "connection.start": START,
    "connection.tune": TUNE,
    "connection.open-ok": OPEN_OK,
    "channel.open-ok": CHANNEL_OPEN_OK,
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_what_is_out_of_order_breaks_an_open_connection(name: str) -> None:
    assert client().receive_data(OUT_OF_ORDER[name]) == [Broken(f"{name} came out of order")]


@pytest.mark.parametrize("steps", range(len(HANDSHAKE)))
def test_methods_are_out_of_order_before_the_channel_is_open(steps: int) -> None:
    for data in (SELECT_OK, delivered(b"x"), ack_frame(1, 1, False)):
        (event,) = client(steps).receive_data(data)
        assert isinstance(event, Broken)


def test_a_method_within_the_content_of_a_message_breaks_the_connection() -> None:
    head = frame.marshal(BASIC.GetOk(1, False, "x", "k", 7), 1)
    assert client().receive_data(head + SELECT_OK) == [Broken("a method came out of order")]


def test_bodies_have_bounds() -> None:
    head = frame.marshal(BASIC.GetOk(1, False, "x", "k", 7), 1)
    announced = amqp.BODY_BYTES_MAX + 1
    huge = frame.marshal(header.ContentHeader(0, announced, BASIC.Properties()), 1)
    (event,) = client().receive_data(head + huge)
    assert event == Broken(f"a body of {announced} bytes is too large")
    short = frame.marshal(header.ContentHeader(0, 2, BASIC.Properties()), 1)
    longer = frame.marshal(body.ContentBody(b"abc"), 1)
    (event,) = client().receive_data(head + short + longer)
    assert event == Broken("a body is longer than announced")


# -- however the bytes are cut ---------------------------------------------------------------------

STORY = b"".join(
    (
        *HANDSHAKE,
        HEARTBEAT,
        SELECT_OK,
        ack_frame(1, 2, True),
        returned(b"back"),
        nack_frame(1, 3),
        fetched(b"fetched"),
        BLOCKED,
        delivered(b"abc", 2),
        known_frame(1, 4, 5, True),
        GET_EMPTY,
        channel_close(406, "PRECONDITION_FAILED - why"),
    )
)


@pytest.mark.parametrize("keeps_content", [True, False])
def test_the_same_bytes_cut_at_every_byte_give_the_same_events(keeps_content: bool) -> None:
    def heard(*parts: bytes) -> tuple[list[Event], bytes]:
        made = Client("/", "PLAIN", "", keeps_content=keeps_content)
        events = [event for part in parts for event in made.receive_data(part)]
        return events, made.data_to_send()

    expected = heard(STORY)
    assert len(expected[0]) == 10
    for cut in range(len(STORY) + 1):
        assert heard(STORY[:cut], STORY[cut:]) == expected
    assert heard(*(STORY[at : at + 1] for at in range(len(STORY)))) == expected


@given(st.integers(0, len(STORY) - 1), st.binary(max_size=64), st.integers(0, 200))
def test_no_bytes_raise_and_an_end_comes_last(at: int, garbage: bytes, kept: int) -> None:
    made = Client("/", "PLAIN", "")
    data = STORY[:at] + garbage + STORY[at + kept :]
    events = made.receive_data(data)
    ends = [place for place, event in enumerate(events) if isinstance(event, Closed | Broken)]
    assert ends in ([], [len(events) - 1])
    assert (made.state is State.CLOSED) == bool(ends)


# -- what the client says --------------------------------------------------------------------------

SAID = {
    "select": (lambda made: made.select(), "Confirm.Select", {"nowait": False}),
    "declare": (
        lambda made: made.declare("q<\u00fc>", True),
        "Queue.Declare",
        {"queue": "q<\u00fc>", "passive": False, "durable": True, "exclusive": False}
        | {"auto_delete": False, "nowait": False, "arguments": {}, "ticket": 0},
    ),
    "delete": (
        lambda made: made.delete("q"),
        "Queue.Delete",
        {"queue": "q", "if_unused": False, "if_empty": False, "nowait": False, "ticket": 0},
    ),
    "get": (lambda made: made.get("q"), "Basic.Get", {"queue": "q", "no_ack": False, "ticket": 0}),
    "qos": (
        lambda made: made.qos(65535),
        "Basic.Qos",
        {"prefetch_size": 0, "prefetch_count": 65535, "global_": False},
    ),
    "consume": (
        lambda made: made.consume("q", "tag", True, b"\x00\x00\x00\x04\x01at\x01"),
        "Basic.Consume",
        {"queue": "q", "consumer_tag": "tag", "no_local": False, "no_ack": True, "ticket": 0}
        | {"exclusive": False, "nowait": False, "arguments": {"a": True}},
    ),
    "consume plainly": (
        lambda made: made.consume("q", "", False),
        "Basic.Consume",
        {"queue": "q", "consumer_tag": "", "no_local": False, "no_ack": False, "ticket": 0}
        | {"exclusive": False, "nowait": False, "arguments": {}},
    ),
    "cancel": (
        lambda made: made.cancel("tag"),
        "Basic.Cancel",
        {"consumer_tag": "tag", "nowait": False},
    ),
    "ack": (
        lambda made: made.ack(1 << 40),
        "Basic.Ack",
        {"delivery_tag": 1 << 40, "multiple": False},
    ),
    "ack several": (
        lambda made: made.ack(9, True),
        "Basic.Ack",
        {"delivery_tag": 9, "multiple": True},
    ),
    "reject": (
        lambda made: made.nack(9, True, False),
        "Basic.Nack",
        {"delivery_tag": 9, "multiple": True, "requeue": False},
    ),
    "requeue": (
        lambda made: made.nack(9, False, True),
        "Basic.Nack",
        {"delivery_tag": 9, "multiple": False, "requeue": True},
    ),
    "recover": (lambda made: made.recover(), "Basic.Recover", {"requeue": True}),
    "close": (
        lambda made: made.close(),
        "Channel.Close",
        {"reply_code": 200, "reply_text": "", "class_id": 0, "method_id": 0},
    ),
    "publish": (
        lambda made: made.publish("x", "k", PROPS, b"", True),
        "Basic.Publish",
        {"exchange": "x", "routing_key": "k", "mandatory": True, "immediate": False, "ticket": 0},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_methods_are_written_as_the_protocol_has_them(name: str) -> None:
    say, method, fields = SAID[name]
    made = client()
    say(made)
    data = made.data_to_send()
    assert data[1:3] == b"\x00\x01"  # the channel
    (found,) = methods_in(data)
    assert (found.name, dict(found)) == (method, fields)


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 8, FRAME_MAX - 7, 3 * FRAME_MAX])
def test_a_body_is_cut_into_frames_of_the_agreed_size(size: int) -> None:
    made = client()
    made.publish("", "q", PROPS, bytes(size), False)
    data = made.data_to_send()
    at, bodies = 0, []
    while at < len(data):
        kind, _, length = struct.unpack_from(">BHI", data, at)
        assert length + 8 <= FRAME_MAX
        if kind == 3:
            bodies.append(data[at + 7 : at + 7 + length])
        at += 8 + length
    assert b"".join(bodies) == bytes(size)
    assert all(bodies)


@pytest.mark.parametrize("name", ["vhost", "queue"])
def test_a_name_too_long_for_the_protocol_is_the_callers_mistake(name: str) -> None:
    with pytest.raises(ValueError):
        _ = Client("v" * 256, "PLAIN", "") if name == "vhost" else client().get("q" * 256)


def test_each_state_is_reached() -> None:
    assert {State.AWAITING_START, *amqp._NEXT.values()} == set(State)
    assert {before for before, _ in amqp._NEXT} == set(State)
