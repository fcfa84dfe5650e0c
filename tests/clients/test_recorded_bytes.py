"""Every frame has the bytes that RabbitMQ 3.10.8 sends.

MASKS and DELIBERATE name the exceptions.

The recordings, and the script that makes them, are in tests/clients/recordings.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from shardmq.supervisor.cli.app import app
from tests.clients.recordings.record import CONTENT, METHOD, RECORDINGS, Connection
from tests.support.real_broker import PATIENCE_S, RealBroker

CONVERSATIONS = sorted(path.stem for path in RECORDINGS.glob("*.txt"))
START = bytes([0, 10, 0, 10])
FRAME_HEAD_BYTES = 7


# Methods of each class that RabbitMQ and we may send: the server's of AMQP 0-9-1 and of RabbitMQ's
# extensions, but for connection.secure and channel.flow: no mechanism needs the one, nobody sends
# the other.
SENT = {
    10: (10, 30, 41, 50, 51, 60, 61, 71),  # connection
    20: (11, 21, 40, 41),  # channel
    30: (11,),  # access
    40: (11, 21, 31, 51),  # exchange
    50: (11, 21, 31, 41, 51),  # queue
    60: (11, 21, 30, 31, 50, 60, 71, 72, 80, 111, 120),  # basic
    85: (11,),  # confirm
    90: (11, 21, 31),  # tx
}


class Mask(NamedTuple):
    """Bytes that differ from one broker, or one run, to the next.

    Group 1 of the pattern, if there is one, is the length octet of the short string behind it,
    which goes too.
    """

    why: str
    pattern: re.Pattern[bytes]


# All that may differ, in every frame of a method or a content header.
MASKS = (
    Mask("the broker makes the queue's name", re.compile(rb"amq\.gen-[\w-]{22}")),
    Mask("the broker makes the consumer's tag", re.compile(rb"amq\.ctag-[\w-]{22}")),
    Mask("the name that a reply goes to", re.compile(rb"(.)amq\.rabbitmq\.reply-to\.", re.DOTALL)),
    Mask("the time of a dead letter", re.compile(rb"(?<=\x04timeT).{8}", re.DOTALL)),
)
# Fields of connection.start's server-properties whose value differs, and those that RabbitMQ has
# not.
MASKED_PROPERTIES = (b"cluster_name", b"copyright", b"information", b"platform", b"version")
ADDED_PROPERTIES = (b"shardmq_version",)


class Deliberate(NamedTuple):
    """One frame that differs from RabbitMQ's on purpose.

    `parts` are RabbitMQ's, beside what ours has in their place.

    The note is the line of the recording above the frame. A part that is empty stands for the end
    of the connection.
    """

    conversation: str
    note: str
    parts: tuple[tuple[bytes, bytes], ...]
    why: str

    def explains(self, difference: Difference) -> bool:
        frame = masked(difference.theirs)
        for theirs, ours in self.parts:
            if theirs not in frame:
                return False
            frame = frame.replace(theirs, ours) if theirs else ours
        return self.note == difference.note and frame == masked(difference.ours)


def last_death(reason: bytes) -> bytes:
    """Return the headers x-last-death-* of a message that died in the queue m.live."""
    text = b"S\0\0\0"
    exchange, queue = (
        b"\x15x-last-death-exchange" + text + b"\0",
        b"\x12x-last-death-queue" + text + b"\x06m.live",
    )
    return exchange + queue + b"\x13x-last-death-reason" + text + bytes([len(reason)]) + reason


# Bytes of our frames that stand for some of RabbitMQ's.
UNKNOWN_MECHANISM = b"COMMAND_INVALID - unknown authentication mechanism 'SCRAM'"
BAD_AGE = (
    b"PRECONDITION_FAILED - invalid arg 'x-max-age' for queue 's.bad' in vhost '/': invalid_max_age"
)
HANGS_UP_WITH_WORDS = (
    b"\x01\0\0\0\x0a\0\x32\x01\xf7"
    + bytes([len(UNKNOWN_MECHANISM)])
    + UNKNOWN_MECHANISM
    + b"\0\x0a\0\x0b\xce"
)
INTERNAL_ERROR = b"\x01\0\0\0\x0a\0\x32\x02\x1d\x0eINTERNAL_ERROR\0\0\0\0"
BAD_AGE_CLOSE = (
    b"\x01\0\x01\0\x14\0\x28\x01\x96" + bytes([len(BAD_AGE)]) + BAD_AGE + b"\0\x32\0\x0a"
)
LATER = "later releases of RabbitMQ say too what a message died of last"
DELIBERATE = (
    Deliberate(
        "confirms",
        "basic.nack",
        ((b"\x04\x03\xce", b"\x04\x02\xce"),),
        "each message is nacked by itself: not `multiple`",
    ),
    Deliberate(
        "connection_refused",
        "a mechanism that is not offered",
        ((b"", HANGS_UP_WITH_WORDS),),
        "RabbitMQ hangs up without a word",
    ),
    Deliberate(
        "messages",
        "dead letters",
        (
            (b"\0\0\0\xea\x04mine", b"\0\0\1\x44\x04mine"),
            (b"rejected\xce", b"rejected" + last_death(b"rejected") + b"\xce"),
        ),
        LATER,
    ),
    Deliberate(
        "messages",
        "dead letters",
        (
            (b"\0\0\0\xf4\x07x-", b"\0\0\1\x4d\x07x-"),
            (b"expired\xce", b"expired" + last_death(b"expired") + b"\xce"),
        ),
        LATER,
    ),
    Deliberate(
        "messages_refused",
        "an unknown delivery tag rejected",
        ((b"\0\x3c\0\x5a\xce", b"\0\x3c\0\x78\xce"),),
        "basic.reject and basic.nack of one message are read as the same thing",
    ),
    Deliberate(
        "queues",
        "an argument more, in 64 bits",
        ((b"\x8fPRECOND", b"\x94PRECOND"), (b"of type 'long'", b"of type 'signedint'")),
        "numbers are kept without the width they came in",
    ),
    Deliberate(
        "streams",
        "an age that is none",
        ((INTERNAL_ERROR, BAD_AGE_CLOSE),),
        "RabbitMQ breaks down over it",
    ),
)


class Difference(NamedTuple):
    note: str
    sent: str
    theirs: bytes
    ours: bytes

    def __str__(self) -> str:
        sent = bytes.fromhex(self.sent)[:80]
        frames = f"theirs {masked(self.theirs)!r}\n    ours   {masked(self.ours)!r}"
        return f"{self.note}\n    sent   {sent!r}\n    {frames}"


def masked(frame: bytes) -> bytes:
    """Return the frame without its size and without what MASKS names."""
    if frame[:1] not in (bytes([METHOD]), bytes([CONTENT])):
        return frame
    head, payload = frame[:3], frame[FRAME_HEAD_BYTES:]
    if payload[:4] == START:
        at = 6 + 4 + struct.unpack_from(">I", payload, 6)[0]
        return head + payload[:6] + masked_properties(payload[10:at]) + payload[at:]
    for mask in MASKS:
        payload = blank(mask, payload)
    return head + payload


def blank(mask: Mask, payload: bytes) -> bytes:
    """Return the payload with a star in place of each thing that the mask names."""
    out, at = b"", 0
    for found in mask.pattern.finditer(payload):
        out += payload[at : found.start()] + b"*"
        at = found.start(1) + 1 + found[1][0] if mask.pattern.groups else found.end()
    return out + payload[at:]


def masked_properties(table: bytes) -> bytes:
    """Return the fields of a table in their order.

    A value that may differ is replaced by its type.
    """
    fields, at = [], 0
    while at < len(table):
        name = table[at + 1 : at + 1 + table[at]]
        at += 1 + len(name)
        size = 1 if table[at : at + 1] == b"t" else 4 + struct.unpack_from(">I", table, at + 1)[0]
        value, at = table[at : at + 1 + size], at + 1 + size
        if name not in ADDED_PROPERTIES:
            fields.append(name + b"=" + (value[:1] if name in MASKED_PROPERTIES else value))
    return b"{" + b" ".join(fields) + b"}"


class Replay:
    """A recording with our broker for the server."""

    def __init__(self, broker: RealBroker, lines: list[str]) -> None:
        self._broker = broker
        self._lines = lines
        self._connections: dict[str, Connection] = {}
        self._note = self._sent = ""

    def differences(self) -> Iterator[Difference]:
        for line in self._lines:
            who, what, *rest = line.split()
            if who == "#":
                self._note = line[2:]
            elif who == "do":
                self._operate([what, *rest])
            elif what == "connect":
                self._connections[who] = Connection(self._broker.port, PATIENCE_S)
            elif what == "close":
                self._connections.pop(who).close()
            elif what == ">":
                self._sent = rest[0]
                self._connections[who].send(bytes.fromhex(rest[0]))
            else:
                yield from self._hear(who, bytes.fromhex(rest[0]) if what == "<" else b"")

    def _hear(self, who: str, theirs: bytes) -> Iterator[Difference]:
        ours = self._connections[who].read(heartbeats=theirs[:1] == b"\x08")
        if masked(ours) != masked(theirs):
            yield Difference(self._note, self._sent, theirs, ours)
        if ours[FRAME_HEAD_BYTES:11] != theirs[FRAME_HEAD_BYTES:11]:
            raise Diverged

    def _operate(self, action: list[str]) -> None:
        match action:
            case ["alarm", "memory"]:
                self._ctl("set_vm_memory_high_watermark", "absolute", "1MB")
            case ["alarm", "over"]:
                self._ctl("set_vm_memory_high_watermark", "0.9")
            case ["close", "connections", *reason]:
                self._ctl("close_all_connections", "--global", " ".join(reason))
            case ["wait"]:
                pass  # the broker answers behind what came before
            case ["stop"]:
                self._broker.process.terminate()
            case _:
                raise AssertionError(f"no such action: {action}")

    def _ctl(self, *words: str) -> None:
        ended = CliRunner().invoke(app, [*words, "--data-dir", str(self._broker.data_dir)])
        assert ended.exit_code == 0, ended.output

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class Diverged(Exception):
    """The conversation cannot go on: another method came than the one that was recorded."""


def differences(broker: RealBroker, conversation: str) -> list[Difference]:
    replay = Replay(broker, (RECORDINGS / f"{conversation}.txt").read_text().splitlines())
    found = []
    try:
        for difference in replay.differences():
            found.append(difference)
    except Diverged:
        pass
    finally:
        replay.close()
    return found


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """Yield a broker that is stopped by the last recording."""
    made = RealBroker(tmp_path_factory.mktemp("replayed") / "data", shards=1)
    yield made
    made.clean_up()


@pytest.mark.broker
@pytest.mark.parametrize(
    "conversation", [name for name in CONVERSATIONS if name != "stopped"] + ["stopped"]
)
def test_the_bytes_are_those_of_the_recording(conversation: str, replayed: RealBroker) -> None:
    found = differences(replayed, conversation)
    meant = [one for one in DELIBERATE if one.conversation == conversation]
    more = [str(each) for each in found if not any(one.explains(each) for one in meant)]
    assert not more, "\n\n".join([f"{len(more)} differences", *more])
    gone = [one.note for one in meant if not any(one.explains(each) for each in found)]
    assert not gone, f"no longer different: {gone}"


def test_every_method_a_server_may_send_is_in_the_recordings() -> None:
    recorded = set()
    for path in RECORDINGS.glob("*.txt"):
        for line in path.read_text().splitlines():
            who, what, *rest = line.split()
            if who != "#" and what == "<" and (frame := bytes.fromhex(rest[0]))[0] == METHOD:
                recorded.add(struct.unpack_from(">HH", frame, FRAME_HEAD_BYTES))
    assert recorded == {
        (class_id, method_id) for class_id, methods in SENT.items() for method_id in methods
    }


def test_a_frame_with_one_other_byte_is_a_difference() -> None:
    """Masks must not hide the byte 0x30 in channel.open-ok, on which some clients fail."""
    assert masked(bytes.fromhex("010001000000080014000b00000000ce")) != masked(
        bytes.fromhex("010001000000090014000b0000000130ce")
    )
