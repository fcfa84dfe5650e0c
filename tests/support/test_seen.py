"""The normal form of what clients see: what is left out is named, and every other byte counts."""

from __future__ import annotations

import random
import struct

import pytest
from pamqp import base, commands

from tests.support.raw_client import content_header, method, publish, raw_frame
from tests.support.seen import Broken, Names, NormalForm, asked, differences, frames, seen

TAG, QUEUE = "amq.ctag-" + "t" * 22, "amq.gen-" + "q" * 22
HEARTBEAT = raw_frame(8, 0, b"")
basic = commands.Basic


def content(channel: int, what: base.Frame, *bodies: bytes) -> list[bytes]:
    size = sum(map(len, bodies))
    pieces = (raw_frame(3, channel, body) for body in bodies)
    return [method(channel, what), content_header(channel, size), *pieces]


def deliver(
    channel: int, tag: int, *bodies: bytes, to: str = "c", redelivered: bool = False
) -> bytes:
    return b"".join(content(channel, basic.Deliver(to, tag, redelivered, "e", "k"), *bodies))


OPEN = method(1, commands.Channel.OpenOk())
SUBSCRIBED = method(1, basic.ConsumeOk("c"))
BEGINNING = OPEN + SUBSCRIBED
CLOSED = method(1, commands.Channel.Close(404, "", 0, 0))
CLOSE_OK = method(1, commands.Channel.CloseOk())
CONFIRMS = [method(1, basic.Ack(n)) for n in range(1, 5)]


def form(*data: bytes, ended_by: str = "client") -> NormalForm:
    return seen(b"".join(data), ended_by, Names())


def test_a_conversation_is_put_under_its_heads() -> None:
    told = content(1, basic.Return(312, "NO_ROUTE", "e", "nowhere"), b"back")
    got = content(1, basic.GetOk(2, False, "e", "k", 0), b"got")
    found = form(
        BEGINNING, deliver(1, 1, b"ab", b"c"), *CONFIRMS[:2], *told, *got,
        method(1, basic.Nack(3, False, True)), method(1, basic.Cancel("c")),
    )  # fmt: skip
    assert {head: len(lines) for head, lines in found.items()} == {
        "channel 1, life 1, replies": 3,
        "channel 1, life 1, deliveries to b'c'": 1,
        "channel 1, life 1, returns": 1,
        "channel 1, life 1, confirms": 3,
        "channel 1, life 1, cancels": 1,
    }
    (delivery,) = found["channel 1, life 1, deliveries to b'c'"]
    assert delivery.endswith(b"|2,1|abc")
    assert found["channel 1, life 1, confirms"] == [b"1 ack", b"2 ack", b"3 nack, bits 2"]


# -- what may differ -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([*CONFIRMS], [method(1, basic.Ack(4, True))]),
        ([*CONFIRMS], [CONFIRMS[2], method(1, basic.Ack(4, True))]),
        ([*CONFIRMS], [*reversed(CONFIRMS)]),
        ([*CONFIRMS, deliver(1, 1, b"x")], [deliver(1, 1, b"x"), *CONFIRMS]),
        ([deliver(1, 1, b"x")], [HEARTBEAT, deliver(1, 1, b"x"), HEARTBEAT]),
        (
            [deliver(1, 1, b"x"), method(1, basic.QosOk())],
            [method(1, basic.QosOk()), deliver(1, 1, b"x")],
        ),
        (
            [deliver(1, 1, b"x"), method(2, commands.Channel.OpenOk()), method(2, basic.QosOk())],
            [method(2, commands.Channel.OpenOk()), deliver(1, 1, b"x"), method(2, basic.QosOk())],
        ),
        (
            [deliver(1, 1, b"x", to="a"), deliver(1, 2, b"y", to="b")],
            [deliver(1, 1, b"y", to="b"), deliver(1, 2, b"x", to="a")],
        ),
        (
            [method(0, commands.Connection.Blocked("low on memory")), *CONFIRMS],
            [*CONFIRMS],
        ),
    ],
)
def test_what_may_differ_makes_no_difference(one: list[bytes], other: list[bytes]) -> None:
    assert form(BEGINNING, *one) == form(BEGINNING, *other)


def test_frames_of_channels_may_be_mixed_within_messages() -> None:
    both = [OPEN, method(2, commands.Channel.OpenOk())]
    parts = [content(n, basic.Deliver("c", 1, False, "e", "k"), b"ab", b"cd") for n in (1, 2)]
    mixed = [frame for pair in zip(*parts, strict=True) for frame in pair]
    assert form(*both, *parts[0], *parts[1]) == form(*both, *mixed)


def test_names_are_numbered_alike_whichever_list_of_a_channel_begins_first() -> None:
    names = [f"amq.gen-{letter * 22}" for letter in "abcd"]
    begins = [OPEN, method(1, basic.ConsumeOk("c")), method(1, basic.ConsumeOk("d"))]
    lists = [
        content(1, basic.Return(312, "NO_ROUTE", "e", names[0]), b"x"),
        [deliver(1, 1, names[1].encode(), to="c")],
        [deliver(1, 2, names[2].encode(), to="d")],
        [method(1, commands.Queue.DeclareOk(names[3], 0, 0))],
    ]
    orders = [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]]
    forms = [form(*begins, *[part for at in order for part in lists[at]]) for order in orders]
    assert forms[0] == forms[1] == forms[2]


def test_names_that_a_broker_makes_are_numbered_over_all_connections() -> None:
    def both(first: str, second: str, used: str) -> list[NormalForm]:
        names = Names()
        declared = [
            method(1, commands.Queue.DeclareOk(f"amq.gen-{name * 22}", 0, 0))
            for name in (first, second)
        ]
        later = b"".join(content(1, basic.GetOk(1, False, "", f"amq.gen-{used * 22}", 0), b"x"))
        return [seen(data, "client", names) for data in (OPEN + b"".join(declared), OPEN + later)]

    assert both("a", "b", "a") == both("x", "y", "x")
    assert both("a", "b", "a") != both("x", "y", "y")


def test_times_of_dead_letters_may_differ() -> None:
    def died(at: int) -> NormalForm:
        props = struct.pack(">HI", 0x2000, 14) + b"\x04timeT" + struct.pack(">Q", at)
        head = raw_frame(2, 1, struct.pack(">HHQ", 60, 0, 0) + props)
        return form(BEGINNING, method(1, basic.Deliver("c", 1, False, "e", "k")), head)

    assert died(1) == died(1_700_000_000)


# -- what may not ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([deliver(1, 1, b"abcd")], [deliver(1, 1, b"ab", b"cd")]),
        ([deliver(1, 1, b"x")], [deliver(1, 1, b"x", redelivered=True)]),
        ([deliver(1, 1, b"x"), deliver(1, 2, b"y")], [deliver(1, 1, b"y"), deliver(1, 2, b"x")]),
        ([*CONFIRMS], [*CONFIRMS[:3], method(1, basic.Nack(4, False, False))]),
        ([*CONFIRMS], [*CONFIRMS[:3]]),
        (
            [method(1, basic.QosOk()), method(1, basic.RecoverOk())],
            [method(1, basic.RecoverOk()), method(1, basic.QosOk())],
        ),
    ],
)
def test_what_may_not_differ_is_a_difference(one: list[bytes], other: list[bytes]) -> None:
    ours, others = form(BEGINNING, *one), form(BEGINNING, *other)
    assert differences(ours, others)
    assert not differences(ours, ours)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([deliver(1, 2, b"x")], "delivery tag 2 after 0"),
        ([deliver(1, 1, b"x"), deliver(1, 1, b"x")], "delivery tag 1 after 1"),
        ([CONFIRMS[0], CONFIRMS[0]], "confirmed twice"),
        ([method(1, basic.Ack(3, True)), CONFIRMS[1]], "confirmed twice"),
        ([method(1, basic.CancelOk("c")), deliver(1, 1, b"x")], "cancelled"),
        ([method(1, basic.Cancel("c")), deliver(1, 1, b"x")], "cancelled"),
        ([deliver(1, 1, b"x", to="n"), method(1, basic.ConsumeOk("n"))], "before consume-ok"),
        ([CLOSED, CONFIRMS[0]], "closed channel"),
        ([CLOSE_OK, deliver(1, 1, b"x")], "closed channel"),
        ([CLOSED, CLOSE_OK, CLOSE_OK], "closed channel"),
        ([CLOSE_OK, CLOSE_OK], "closed channel"),
        ([method(2, basic.QosOk())], "channel 2 is not open"),
        ([raw_frame(3, 1, b"x")], "outside of a message"),
        ([*content(1, basic.Deliver("c", 1, False, "", ""), b"x")[:2], CONFIRMS[0]], "inside"),
        ([content_header(1, 0)], "outside of a message"),
        ([deliver(1, 1, b"x")[:-1] + b"\0"], "has no end"),
        ([raw_frame(7, 1, b"")], "a frame of kind 7"),
    ],
)
def test_a_broken_rule_is_told(data: list[bytes], why: str) -> None:
    with pytest.raises(Broken, match=why):
        form(BEGINNING, *data)


def test_a_broker_that_closed_a_channel_answers_a_client_that_did_so_too() -> None:
    assert form(BEGINNING, CLOSED, CLOSE_OK)["channel 1, life 1, replies"][-1] == b"\0\x14\0)"


def test_only_a_client_that_hangs_up_may_cut_a_frame() -> None:
    assert form(BEGINNING, CONFIRMS[0][:5]) == form(BEGINNING)
    with pytest.raises(Broken, match="5 bytes of a frame"):
        form(BEGINNING, CONFIRMS[0][:5], ended_by="server")
    assert form(BEGINNING, ended_by="server")["end"] == [b"the broker hung up"]
    closed = method(0, commands.Connection.CloseOk())
    assert "end" not in form(BEGINNING, closed, ended_by="server")


def test_any_other_byte_is_noticed_unless_it_is_one_that_may_differ() -> None:
    """Replace each byte of a conversation in turn, by any other value."""
    chance = random.Random(1)
    data = b"".join(
        (
            OPEN, method(1, basic.ConsumeOk(TAG)), HEARTBEAT,
            method(1, commands.Queue.DeclareOk(QUEUE, 0, 0)),
            deliver(1, 1, b"first", b"part", to=TAG), *CONFIRMS[:2],
            *content(1, basic.GetOk(2, True, "e", QUEUE, 5), b"got"),
            *content(1, basic.Return(312, "NO_ROUTE", "e", "k"), b"returned"),
            method(1, basic.Nack(3, False, False)), deliver(1, 3, to=TAG),
            method(1, commands.Channel.Close(404, "NOT_FOUND - no queue", 60, 20)),
        )
    )  # fmt: skip
    whole = seen(data, "server", Names())
    unnoticed = []
    for at in range(len(data)):
        other = chance.choice([value for value in range(256) if value != data[at]])
        changed = data[:at] + bytes([other]) + data[at + 1 :]
        try:
            same = seen(changed, "server", Names()) == whole
        except (Broken, IndexError, struct.error):
            same = False
        if same:
            unnoticed.append(at)
    # Each invented name stands in two frames, so even its bytes count.
    assert not unnoticed


# -- what the client sent --------------------------------------------------------------------------


def test_a_client_is_known_by_what_it_asks() -> None:
    def asks(tag: str, first: int) -> tuple[bytes, ...]:
        said = [basic.Consume(queue="q", consumer_tag=tag), basic.Ack(first), basic.Ack(2)]
        return asked(b"".join(method(1, each) for each in said), Names(of_clients=True))

    assert asks("ctag1." + "0a" * 16, 1) == asks("ctag1." + "5f" * 16, 1)
    assert asks("ctag1." + "0a" * 16, 1) != asks("ctag2." + "5f" * 16, 1)
    assert asks("c", 1) != asks("c", 3)
    assert asked(b"GET / HTTP/1.1\r\n\r\n", Names()) == (b"GET / HTTP/1.1\r\n\r\n",)


def test_a_client_is_known_by_the_order_in_which_its_channels_publish() -> None:
    def asks(*channels: int) -> tuple[bytes, ...]:
        said = [publish(channel, "", "q", b"%d" % channel) for channel in channels]
        return asked(b"".join([said[0], HEARTBEAT, *said[1:]]), Names(of_clients=True))

    assert asks(3, 4, 3) == asks(3, 4, 3)
    assert asks(3, 4, 3) != asks(3, 3, 4)


def test_times_and_dates_of_a_client_are_names_or_left_out() -> None:
    def asks(time: str, other: str, date: str) -> tuple[bytes, ...]:
        said = [
            commands.Connection.StartOk({"connection started": f"{date} GMT"}, "PLAIN", "", "en"),
            commands.Queue.Declare(queue=f"queue1{time}"),
            basic.Publish(exchange=f"e{other}", routing_key=f"queue1{time}"),
            basic.Consume(queue="q", consumer_tag=f"6b0a9{time[5:9]}e6364_1"),
        ]
        return asked(b"".join(method(1, each) for each in said), Names(of_clients=True))

    first, second = "Sat, 28 Nov 2026 09:29:07", "Mon, 07 Dec 2026 23:00:59"
    one = asks("1795858071.4803", "1795858071.48", first)
    assert one == asks("1796684459.0001", "1796684459.99", second)
    assert one != asks("1796684459.0001", "1796684459.0001", second), "it is another name"
    assert one != asks("1796684459.0001", "1796684459.999", second), "its size is another"


def test_a_client_is_known_again_whatever_names_its_run_has_made() -> None:
    def asks(program: str, short_uuid: str, *properties: str) -> tuple[bytes, ...]:
        table = dict.fromkeys(properties, "a")
        said = [
            commands.Connection.StartOk(table, "PLAIN", "", "en"),
            commands.Queue.Declare(queue=f"amqptools-{program[-5:]}"),
            basic.Consume(consumer_tag=f"ctag-/tmp/go-build{program}/b001/x.test-5"),
            basic.Publish(exchange=f"test.{short_uuid}"),
        ]
        data, names = b"".join(method(1, each) for each in said), Names(of_clients=True)
        return asked(data + content_header(1, 22) + raw_frame(3, 1, short_uuid.encode()), names)

    one = asks("3579102380", "vytxeTZskVKR7C7WgdSP3d", "version", "platform")
    other = "CXc85b4rqinB7s5J52TRYb"
    assert one == asks("1941788078", other, "platform", "version")
    assert one != asks("1941788078", other, "platform", "product")
    assert one != asks("1941788078", f"0{other[1:]}", "platform", "version")


def test_frames_are_the_bytes_of_the_stream() -> None:
    data = b"AMQP\0\0\x09\x01" + OPEN + HEARTBEAT
    assert [frame.kind for frame in frames(data, may_be_cut=False)] == [0, 1, 8]
