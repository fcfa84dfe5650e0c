"""What a connection promises, whatever the pieces in which bytes arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from shardmq.broker.amqp import (
    Binds,
    ChannelException,
    ChannelOpenOk,
    Connection,
    ConnectionException,
    Failed,
    Method,
    Nothing,
    Open,
    Opened,
    Publishes,
    Settles,
    contents,
    methods,
)
from tests.amqp.bytes_of import HEADER, facts, method, publish, received, shake_hands


def connection(channels: int = 0, **kwargs: int) -> Connection:
    made = Connection(
        server_properties={"product": "x", "capabilities": {"basic.nack": True}}, **kwargs
    )  # type: ignore[arg-type]
    if channels:
        shake_hands(made, channels)
        made.data_to_send()
    return made


class Plain(Connection):
    """A connection that reads no method by hand."""

    def _open_or_close(
        self, buffer: bytearray | memoryview, ids: bytes, channel: int, state: int
    ) -> Method | None:
        return None


def failure(data: bytes, channels: int = 1, **kwargs: int) -> Failed:
    events = received(connection(channels, **kwargs), data)
    assert isinstance(events[-1], Failed), events
    return events[-1]


def test_a_wrong_protocol_header_is_answered_with_ours_and_closed() -> None:
    made = connection()
    assert received(made, b"GET / HTTP/1.1\r\n") == []
    assert made.data_to_send() == [HEADER]
    assert made.closed


@pytest.mark.parametrize("header", [HEADER, b"AMQP\x01\x01\x00\x09"])
def test_0_9_is_taken_for_0_9_1(header: bytes) -> None:
    made = connection()
    assert received(made, header) == []
    (start,) = made.data_to_send()
    assert start[7:13] == b"\0\x0a\0\x0a\0\x09"
    assert not made.closed


def test_the_handshake_agrees_on_the_clients_values() -> None:
    made = connection()
    shake_hands(made, 1, frame_max=8192)
    assert (made.frame_bytes_max, made.channels_max, made.heartbeat_s) == (8192, 2047, 60)
    assert made.channel_is_open(1)
    assert not made.channel_is_open(2)


@pytest.mark.parametrize("payload_bytes", [4096, 4097])
def test_until_a_frame_size_is_agreed_frames_are_small(payload_bytes: int) -> None:
    made = connection()
    start_ok = commands.Connection.StartOk({"filler": ""}, "PLAIN", "\0a\0b", "en_US")
    start_ok.client_properties = {"filler": "x" * (payload_bytes - len(method(0, start_ok)) + 8)}
    said = facts(received(made, HEADER + method(0, start_ok)))
    if payload_bytes == 4096:
        assert made.client_properties == start_ok.client_properties
    else:
        text = "type 1, all octets = <<>>: {frame_too_large,4097,4088}"
        assert said == [(ConnectionException, (501, text, 0, 0), 0)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            (2047, 0, 60),
            "negotiated frame_max = 0 is higher than the maximum allowed value (131072)",
        ),
        (
            (2047, 4095, 60),
            "negotiated frame_max = 4095 is lower than the minimum allowed value (4096)",
        ),
        (
            (2048, 131072, 60),
            "negotiated channel_max = 2048 is higher than the maximum allowed value (2047)",
        ),
    ],
)
def test_tune_ok_outside_of_what_was_offered_is_refused(
    values: tuple[int, int, int], text: str
) -> None:
    made = connection()
    received(made, HEADER + method(0, commands.Connection.StartOk({}, "PLAIN", "\0a\0b", "en_US")))
    events = received(made, method(0, commands.Connection.TuneOk(*values)))
    assert facts(events) == [(ConnectionException, (530, text, 10, 31), 0)]


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (method(2, commands.Basic.Qos()), 504, "expected 'channel.open'"),
        (method(1, commands.Channel.Open()), 504, "second 'channel.open' seen"),
        (publish(1, content=b"x")[1], 505, "expected method frame, got non method frame instead"),
        (method(0, commands.Basic.Qos()), 503, "method Basic.Qos on channel 0"),
        (
            method(0, commands.Connection.Open("/")),
            504,
            "unexpected method in connection state running",
        ),
        (publish(2, content=b"x")[1], 505, "expected method frame, got non method frame instead"),
        (b"\x05\0\x01\0\0\0\0\xce", 501, "type 5, all octets = <<>>: unknown_frame"),
        (b"\x08\0\x01\0\0\0\0\xce", 505, "heartbeat frame must be on channel 0"),
        (b'\x08\0\0\0\0\0\x02a"\xce', 501, 'type 8, all octets = <<"a\\"">>: unknown_frame'),
        (b"\x03\0\0\0\0\0\x02a\x80\xce", 505, "type 3, all octets = <<97,128>>"),
        (b"\x01\0\x01\0\0\0\x02\0\x32\xce", 501, "type 1, all octets = <<0,50>>: unknown_frame"),
        (b"\x01\0\x01\0\0\0\x04\0\x63\0\x01\xce", 503, "unimplemented method"),
        (
            b"\x01\0\x01\0\x02\0\1",
            501,
            "type 1, all octets = <<>>: {frame_too_large,131073,131064}",
        ),
        (b"\x01\0\x01\0\0\0\x04\0\x32\0\x0a\xce", 501, "a field ends behind its frame or table"),
        (
            # queue.declare with a name of two bytes that are no text
            b"\x01\0\x01\0\0\0\x0e\0\x32\0\x0a\0\0\x02\xff\xfe\0\0\0\0\0\xce",
            501,
            "Malformed UTF-8 in shortstr",
        ),
        (b"\x08\0\0\0\0\0\0\xcd", 501, "type 8, all octets = <<>>: {invalid_frame_end_marker,205}"),
        (method(1, commands.Basic.Publish(immediate=True)), 540, "immediate=true"),
    ],
)
def test_what_is_wrong_has_its_code_and_words(data: bytes, code: int, text: str) -> None:
    found = failure(data).exception
    assert isinstance(found, ConnectionException)
    assert (found.code, found.text) == (code, text)


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (method(2, commands.Basic.Qos()), (60, 10)),
        (method(1, commands.Channel.Open()), (20, 10)),
        (method(1, commands.Connection.Close(200, "", 0, 0)), (10, 50)),
        (method(0, commands.Connection.TuneOk(1, 131072, 0)), (10, 31)),
        (method(0, commands.Basic.Qos()), (60, 10)),
        # what waits for its content
        (publish(1, content=b"x")[0] + method(1, commands.Basic.Qos()), (60, 40)),
        (publish(1, content=b"x")[1], (0, 0)),
    ],
)
def test_the_method_that_failed_is_named(data: bytes, ids: tuple[int, int]) -> None:
    found = failure(data).exception
    assert (found.class_id, found.method_id) == ids


def test_a_frame_whose_payload_alone_is_of_the_agreed_size_is_taken() -> None:
    (event,) = received(connection(1), b"".join(publish(1, content=b"x" * 131072, part=131072)))
    assert isinstance(event, Publishes)


def test_a_message_over_the_limit_ends_its_channel_and_its_body_is_forgotten() -> None:
    made = connection(2, message_bytes_max=10)
    big = publish(1, content=b"12345678901")
    events = received(
        made,
        b"".join(publish(2, content=b"1")) + b"".join(big) + b"".join(publish(2, content=b"2")),
    )
    failed = events[1]
    assert isinstance(failed, Failed)
    assert failed.channel == 1
    assert failed.exception.text == "message size 11 is larger than configured max size 10"
    assert [type(event) for event in events] == [Publishes, Failed, Publishes]


def test_what_comes_on_a_channel_we_closed_is_forgotten_until_close_ok() -> None:
    made = connection(1)
    made.close_channel(1, ChannelException(404, "no exchange 'e' in vhost '/'", 60, 40))
    (sent,) = made.data_to_send()
    assert b"NOT_FOUND - no exchange 'e' in vhost '/'" in sent
    late = (
        b"".join(publish(1, content=b"late"))
        + method(1, commands.Basic.Ack(1))
        + method(1, commands.Queue.Declare())
    )
    assert received(made, late) == []
    events = received(
        made, method(1, commands.Channel.CloseOk()) + method(1, commands.Channel.Open())
    )
    assert [event.method.name for event in events if isinstance(event, Method)] == [
        "Channel.CloseOk",
        "Channel.Open",
    ]
    assert made.channel_is_open(1)


def test_after_our_close_nothing_but_close_ok_is_heard_or_said() -> None:
    made = connection(1)
    made.close(ConnectionException(320, "x" * 300))
    assert len(made.data_to_send()) == 1
    made.send_method(1, commands.Basic.QosOk())
    assert made.data_to_send() == []
    events = received(
        made, b"".join(publish(1, content=b"late")) + method(0, commands.Connection.CloseOk())
    )
    assert [event.method.name for event in events if isinstance(event, Method)] == [
        "Connection.CloseOk"
    ]
    assert made.closed


def test_what_a_handler_does_is_in_force_for_the_bytes_behind() -> None:
    made = connection(1)
    made.receive_data(
        method(1, commands.Queue.Declare(queue="q")) + b"".join(publish(1, content=b"x"))
    )
    assert isinstance(made.next_event(), Method)
    made.close_channel(1, ChannelException(406, "no"))
    assert made.next_event() is None


def test_runs_of_acks_become_ranges() -> None:
    made = connection(1)
    acks = [(commands.Basic.Ack(n), 0) for n in (1, 2, 3, 7)]
    data = b"".join(method(1, ack) for ack, _ in acks)
    data += method(1, commands.Basic.Ack(9, True)) + method(1, commands.Basic.Nack(10, False, True))
    data += method(1, commands.Basic.Reject(11, True)) + method(1, commands.Basic.Reject(12, False))
    ranges = [
        (0, 1, 3, False),
        (0, 7, 7, False),
        (0, 9, 9, True),
        (2, 10, 11, False),
        (1, 12, 12, False),
    ]
    assert received(made, data) == [Settles(1, ranges)]


def test_runs_of_binds_are_one_event_and_what_is_odd_about_one_ends_the_run() -> None:
    made = connection(1)
    Bind = commands.Queue.Bind
    binds = [Bind(queue="q", exchange="e", routing_key=key) for key in "abc"]
    with_arguments = Bind(queue="q", exchange="e", arguments={"x-match": "all"})
    unanswered = Bind(queue="q", exchange="e", routing_key="d", nowait=True)
    data = b"".join(method(1, each) for each in [*binds, with_arguments, unanswered])
    first, odd, last = received(made, data)
    assert first == Binds(1, [("e", "q", "a"), ("e", "q", "b"), ("e", "q", "c")], False)
    assert isinstance(odd, Method) and odd.method.arguments == {"x-match": "all"}
    assert last == Binds(1, [("e", "q", "d")], True)


def test_a_bind_on_a_channel_that_is_not_open_ends_the_connection() -> None:
    made = connection(1)
    (event,) = received(made, method(2, commands.Queue.Bind(queue="q", exchange="e")))
    assert isinstance(event, Failed) and event.exception.code == 504


def test_old_clients_get_a_ticket() -> None:
    made = connection(1)
    assert received(made, b"\x01\0\x01\0\0\0\x0b\0\x1e\0\x0a\x05/data\x1f\xce") == []
    assert made.data_to_send() == [b"\x01\0\x01\0\0\0\x06\0\x1e\0\x0b\0\x01\xce"]


def test_a_large_body_in_small_reads_is_one_message() -> None:
    made = connection(1)
    content = bytes(range(256)) * 4096
    data = b"".join(publish(1, "e", "k", content, part=131064))
    events = [
        event for at in range(0, len(data), 1000) for event in received(made, data[at : at + 1000])
    ]
    (event,) = events
    assert isinstance(event, Publishes)
    assert contents.read_stored(contents.stored(event.buffer, event.table, 0))[3] == content


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 140_000), max_size=6), st.integers(0, 1))
def test_a_large_body_frame_without_its_end_is_told_alike_however_it_is_cut(
    cuts: list[int], frame: int
) -> None:
    *before, first, second = publish(1, "e", "k", bytes(range(256)) * 512, part=70_000)
    broken = [first, second]
    broken[frame] = broken[frame][:-1] + b"\x01"
    data = b"".join([*before, *broken])
    made, events, at = connection(1), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        events += received(made, data[at:cut])
        at = cut
    (failed,) = events
    assert isinstance(failed, Failed)
    shown = ",".join(map(str, broken[frame][7:23]))
    text = f"type 3, first 16 octets = <<{shown}>>: {{invalid_frame_end_marker,1}}"
    assert (failed.exception.code, failed.exception.text) == (501, text)


@pytest.mark.parametrize("cut", [30, 60_000, 70_020, 70_060, 100_000])
def test_a_channel_closed_within_a_body_frame_forgets_the_rest_of_it(cut: int) -> None:
    made = connection(2)
    data = b"".join(publish(1, "e", "k", bytes(131_072), part=70_000))
    assert received(made, data[:cut]) == []
    made.close_channel(1, ChannelException(406, "no", 60, 40))
    behind = [
        method(1, commands.Channel.CloseOk()),
        method(1, commands.Channel.Open()),
        *publish(2, "e", "k", b"x"),
    ]
    closed, opened, published = received(made, data[cut:] + b"".join(behind))
    assert (
        isinstance(closed, Method)
        and isinstance(opened, Method)
        and isinstance(published, Publishes)
    )


PROPS = st.fixed_dictionaries(
    {},
    optional={
        "delivery_mode": st.sampled_from([1, 2]),
        "priority": st.integers(0, 9),
        "expiration": st.sampled_from(["0", "1000", "abc", "-1", "99999999999"]),
        "headers": st.sampled_from([{"CC": ["a"]}, {"x": "y"}, {}]),
        "user_id": st.just("guest"),
        "reply_to": st.sampled_from(["amq.rabbitmq.reply-to.1", "q"]),
    },
)


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """Frames of several channels, each channel's in order, the channels' mixed."""
    lanes: list[list[bytes]] = []
    for channel in (1, 2, 3):
        lane: list[bytes] = []
        for _ in range(draw(st.integers(0, 4))):
            what = draw(st.integers(0, 3))
            if what == 0:
                lane.append(
                    method(
                        channel, commands.Basic.Ack(draw(st.integers(0, 5)), draw(st.booleans()))
                    )
                )
            elif what == 1:
                lane.append(
                    method(
                        channel, commands.Queue.Declare(queue="q", arguments={"x-max-length": 5})
                    )
                )
            else:
                size = draw(st.sampled_from([0, 1, 16, 5000, 70000]))
                lane += publish(channel, "ex", "key", bytes([channel]) * size, **draw(PROPS))
        lanes.append(lane)
    out = []
    is_mixed = draw(st.booleans())
    while any(lanes):
        lane = (
            draw(st.sampled_from([lane for lane in lanes if lane]))
            if is_mixed
            else next(filter(None, lanes))
        )
        out.append(lane.pop(0))
    return b"".join(out)


@settings(max_examples=80, deadline=None)
@given(conversations(), st.lists(st.tuples(st.integers(0, 80000), st.booleans()), max_size=20))
def test_the_same_bytes_cut_anywhere_give_the_same_events(
    data: bytes, cuts: list[tuple[int, bool]]
) -> None:
    """Also when some pieces begin with what was kept of those before."""
    whole = facts(received(connection(3), data))
    made = connection(3)
    events, at = [], 0
    for cut, again in [*sorted(cut for cut in cuts if cut[0] < len(data)), (len(data), True)]:
        events += received(made, data[at:cut], again)
        at = cut
    assert facts(events) == whole


def test_what_was_kept_and_comes_again_is_one_event_with_what_follows() -> None:
    data = b"".join(b"".join(publish(1, "e", "k", b"%d" % number)) for number in range(6))
    made, cut = connection(1), len(data) // 2 + 3
    (first,) = received(made, data[:cut])
    (second,) = received(made, data[cut:], again=True)
    assert isinstance(first, Publishes) and isinstance(second, Publishes)
    assert (first.count, second.count) == (2, 4) or (first.count, second.count) == (3, 3)


@settings(max_examples=60, deadline=None)
@given(conversations().filter(lambda data: len(data) < 1500))
def test_byte_by_byte_gives_the_same_events(data: bytes) -> None:
    made = connection(3)
    events = [event for at in range(len(data)) for event in received(made, data[at : at + 1])]
    assert facts(events) == facts(received(connection(3), data))


@st.composite
def channel_methods(draw: st.DrawFn) -> bytes:
    """Return channel.open and channel.close frames in any order, some of them broken."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        text = draw(st.sampled_from([b"", b"0", b"done", b"x" * 255, "\u00e9".encode(), b"\xff"]))
        said = bytes([draw(st.sampled_from([len(text), len(text), len(text), 0, 255]))]) + text
        payload = (
            b"\0\x14\0\x0a" + said
            if draw(st.booleans())
            else b"\0\x14\0\x28" + b"\0\xc8" + said + bytes(draw(st.sampled_from([4, 4, 4, 3, 5])))
        )
        head = bytes([draw(st.sampled_from([1, 1, 1, 1, 2]))])
        head += draw(st.integers(0, 5)).to_bytes(2, "big") + len(payload).to_bytes(4, "big")
        out.append(head + payload + draw(st.sampled_from([b"\xce", b"\xce", b"\xce", b"\0"])))
    return b"".join(out)


@settings(max_examples=80, deadline=None)
@given(channel_methods(), st.integers(2, 4), st.lists(st.integers(0, 400), max_size=4))
def test_channels_opened_and_closed_by_hand_are_as_if_every_field_were_read(
    data: bytes, channels_max: int, cuts: list[int]
) -> None:
    seen = []
    for kind in (Connection, Plain):
        made = kind(server_properties={}, channels_max=channels_max)
        shake_hands(made, 1, channels_max=channels_max)
        made.data_to_send()
        events, at = [], 0
        for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
            events += received(made, data[at:cut])
            at = cut
        said = [
            (each.channel, each.method.name)
            if isinstance(each, Method)
            else (type(each), str(getattr(each, "exception", "")))
            for each in events
        ]
        states = [made.channel_is_open(number) for number in range(6)]
        seen.append((said, states, made.data_to_send(), made.closed))
    assert seen[0] == seen[1]


@st.composite
def used_channels(draw: st.DrawFn) -> bytes:
    """Return channels that are opened, used or not, and closed, with errors now and then."""
    kinds = [
        commands.Channel.Open, commands.Channel.Open, commands.Channel.Close,
        commands.Channel.CloseOk, commands.Basic.Qos, commands.Basic.Ack, commands.Queue.Bind,
        commands.Basic.Publish,
    ]  # fmt: skip
    out = []
    for _ in range(draw(st.integers(1, 25))):
        number, kind = draw(st.integers(1, 4)), draw(st.sampled_from(kinds))
        if kind is commands.Basic.Publish:
            out += publish(number, "ex", "key", b"x" * draw(st.sampled_from([0, 3, 5000])))
        elif kind is commands.Channel.Close:
            out.append(method(number, kind(200, draw(st.sampled_from(["", "done"])), 0, 0)))
        else:
            out.append(method(number, kind()))
    return b"".join(out)


def talk(made: Connection, data: bytes, cuts: list[int]) -> tuple[list[object], bytes, int]:
    """Return the events but those of channels that nobody uses, what is said, and the opens."""
    events: list[object] = []
    opened, at, open_ok = 0, 0, ChannelOpenOk()
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        made.receive_data(data[at:cut])
        at = cut
        while (event := made.next_event()) is not None:
            if isinstance(event, Method) and isinstance(event.method, commands.Channel.Open):
                opened += 1
                made.send_method(event.channel, open_ok)
            elif isinstance(event, Method) and isinstance(event.method, commands.Channel.Close):
                made.send_method(event.channel, commands.Channel.CloseOk())
            elif isinstance(event, Failed):
                events.append((type(event.exception), event.exception.args, event.channel))
                assert isinstance(event.exception, ConnectionException)
                made.close(event.exception)
            elif isinstance(event, Publishes):
                # How many of them one event has may differ.
                events += [("publish", each) for each in facts([event])]
            elif not isinstance(event, (Nothing, Opened)):
                events += facts([event])
    return events, b"".join(made.data_to_send()), opened + made.opened


@settings(max_examples=100, deadline=None)
@given(used_channels(), st.lists(st.integers(0, 600), max_size=4))
def test_channels_that_are_answered_without_an_event_are_as_all_others(
    data: bytes, cuts: list[int]
) -> None:
    asking, answering = connection(1), connection(1)
    answering.answers_channels = True
    assert talk(answering, data, cuts) == talk(asking, data, cuts)
    states = [[made.channel_is_open(number) for number in range(5)] for made in (asking, answering)]
    assert states[0] == states[1]


def test_a_channel_is_told_of_before_it_is_used_and_not_if_it_is_only_opened_and_closed() -> None:
    made = connection(1)
    made.answers_channels = True
    opens = b"".join(method(number, commands.Channel.Open()) for number in (2, 3))
    closes = method(2, commands.Channel.Close(200, "", 0, 0))
    assert received(made, opens + closes) == [] and made.untold() == [3] and made.opened == 2
    assert len(made.data_to_send()) == 3
    first, second = received(made, method(3, commands.Basic.Qos(prefetch_count=1)))
    assert first == Opened(3) and isinstance(second, Method) and made.untold() == []
    (closed,) = received(made, method(3, commands.Channel.Close(200, "", 0, 0)))
    assert isinstance(closed, Method)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([b"", b"bye", "\u00e9".encode(), b"\xff"]),
    st.integers(-5, 5),
    st.integers(-2, 2),
)
def test_connection_close_is_read_as_any_method(text: bytes, more: int, longer: int) -> None:
    said = bytes([max(0, len(text) + longer)]) + text
    payload = b"\0\x0a\0\x32\0\xc8" + said + bytes(4)
    payload = payload + bytes(more) if more >= 0 else payload[:more]
    data = b"\1\0\0" + len(payload).to_bytes(4, "big") + payload + b"\xce"
    made = connection(1)
    (event,) = received(made, data)
    try:
        methods.decode_method(payload)
    except ConnectionException as error:
        assert isinstance(event, Failed) and event.exception.args == error.args
    else:
        assert isinstance(event, Method) and event.method.name == "Connection.Close"
        assert received(made, method(1, commands.Basic.Qos())) == []


PROPERTIES = st.dictionaries(
    st.sampled_from(["product", "version", "capabilities"]),
    st.sampled_from(["x", 3, {"basic.nack": True}, [1, "a"], None]),
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([b"", b"/", b"x" * 200, "\u00e9".encode(), b"\xff"]),
    st.sampled_from([b"", b"cap", b"\xff"]),
    st.integers(-3, 3),
    st.integers(-2, 2),
)
def test_connection_open_is_read_as_any_method(
    vhost: bytes, reserved: bytes, more: int, longer: int
) -> None:
    said = bytes([max(0, len(vhost) + longer)]) + vhost
    payload = b"\0\x0a\0\x28" + said + bytes([len(reserved)]) + reserved + b"\1"
    payload = payload + bytes(more) if more >= 0 else payload[:more]
    made = connection()
    shakes = [
        HEADER,
        method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")),
        method(0, commands.Connection.TuneOk(2047, 131072, 60)),
    ]
    for each in shakes:
        received(made, each)
    (event,) = received(made, b"\1\0\0" + len(payload).to_bytes(4, "big") + payload + b"\xce")
    try:
        as_any = methods.decode_method(payload)
    except ConnectionException as error:
        assert isinstance(event, Failed) and event.exception.args == error.args
    else:
        assert isinstance(as_any, commands.Connection.Open)
        assert event == Open(as_any.virtual_host)


@settings(max_examples=100, deadline=None)
@given(PROPERTIES, st.binary(max_size=20), st.sampled_from(["PLAIN", ""]), st.integers(-3, 3))
def test_what_is_said_at_the_start_is_read_as_any_method(
    properties: dict[str, object], response: bytes, mechanism: str, cut: int
) -> None:
    """The second time the properties are known."""
    payload = b"\0\x0a\0\x0b" + methods.encode_table(properties)
    payload += bytes([len(mechanism)]) + mechanism.encode()
    payload += len(response).to_bytes(4, "big") + response + b"\x05en_US"
    payload = payload + bytes(cut) if cut >= 0 else payload[:cut]
    for _ in range(2):
        try:
            as_any = methods.decode_method(payload)
        except ConnectionException as error:
            with pytest.raises(ConnectionException) as other:
                methods.decode_start_ok(payload)
            assert other.value.args == error.args
            continue
        said = methods.decode_start_ok(payload)
        any_response = as_any.response
        assert isinstance(as_any, commands.Connection.StartOk)
        assert said.client_properties == as_any.client_properties
        assert (said.mechanism, said.locale) == (as_any.mechanism, as_any.locale)
        assert said.response == (
            any_response.encode() if isinstance(any_response, str) else any_response
        )


def test_no_more_properties_are_remembered_than_bounded() -> None:
    for number in range(3 * methods.KNOWN_PROPERTIES_MAX):
        for size in (1, methods.KNOWN_PROPERTIES_BYTES_MAX):
            table = methods.encode_table({"n": number, "filler": "x" * size})
            said = methods.decode_start_ok(b"\0\x0a\0\x0b" + table + b"\0\0\0\0\0\0")
            assert said.client_properties == {"n": number, "filler": "x" * size}
    known = methods._known_properties
    assert len(known) <= methods.KNOWN_PROPERTIES_MAX
    assert all(len(table) <= methods.KNOWN_PROPERTIES_BYTES_MAX for table in known)
