"""What a client sees of a broker, without what may differ from one run to the next.

`seen` brings the bytes that a broker sent on one connection into a normal form. Two brokers that
serve a client alike give the same normal form. The normal form has lists of bytes under these
heads, for each life of a channel (from channel.open-ok to the next one):

- *replies*: the answers to the client's methods in their order, errors among them, and the messages
  that answer basic.get;
- *deliveries to TAG*: all messages that this consumer got, in their order;
- *returns*: the messages that came back, in their order;
- *confirms*: each confirmed publish once, by its number;
- *cancels*: the consumers that the broker cancelled;
- *end*: whether the broker hung up without connection.close and without the name of its protocol.

A message is there with everything: the fields of its method, the bytes of its properties, its body,
and the sizes of the body's frames. What is left out may legally differ between two runs:

1. how frames of different channels are mixed;
2. where replies, deliveries of one consumer, returns and confirms stand among each other on a
   channel: they come from different processes;
3. how confirms are grouped by `multiple`, and their order;
4. heartbeats, connection.blocked and connection.unblocked;
5. names that the broker or a client makes at random: each is replaced by a number, the same number
   wherever the name appears;
6. the times in the headers of dead letters, and dates that a client writes into its texts;
7. delivery tags. They are checked instead.

`Broken` is raised where a rule is not kept that holds in every order: frames are whole and not too
long; the frames of a message follow each other on their channel; delivery tags are 1, 2, 3 ...; a
consumer gets nothing before consume-ok and after cancel-ok; a publish is confirmed once; a channel
that is closed is silent, but for the answer to a client that closed the channel at the same time.

`asked` does the same with the bytes of the client, to find which connections of two runs belong
together.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
FRAME_BYTES_MAX = 131072
PROTOCOL = b"AMQP"

CONNECTION_START_OK = (10, 11)
CONNECTION_BLOCKED, CONNECTION_UNBLOCKED = (10, 60), (10, 61)
CONNECTION_CLOSE, CONNECTION_CLOSE_OK = (10, 50), (10, 51)
CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (20, 11), (20, 40), (20, 41)
CONSUME_OK, CANCEL, CANCEL_OK = (60, 21), (60, 30), (60, 31)
PUBLISH, RETURN, DELIVER, GET_OK = (60, 40), (60, 50), (60, 60), (60, 71)
ACK, NACK = (60, 80), (60, 120)

Kind = tuple[int, int]
NormalForm = dict[str, list[bytes]]


class Broken(Exception):
    """The bytes break a rule of the protocol that holds in every order."""


class Frame(NamedTuple):
    kind: int
    channel: int
    payload: bytes


# -- names -----------------------------------------------------------------------------------------

_HEX = rb"[0-9a-fA-F]"
SERVER_NAMES = rb"amq\.(?:gen|ctag)-[\w-]{22}|amq\.rabbitmq\.reply-to\.[\w.=+/-]+"
# What the clients of the suites make names of. A time whose last digits are zeros is shorter, and
# so is a low process id. Then the sizes before it differ, too, and the connection is not found in
# the other run.
CLIENT_NAMES = b"|".join(
    (
        rb"%s{8}(?:-%s{4}){3}-%s{12}" % (_HEX, _HEX, _HEX),  # a uuid
        rb"%s{13,}" % _HEX,  # random bytes; PHP's uniqid
        rb"(?<![0-9A-Za-z])[2-9A-HJ-NP-Za-km-z]{22}(?![0-9A-Za-z])",  # a shortuuid
        rb"[0-9]{10}\.[0-9]{1,4}",  # PHP's microtime
        rb"(?<=amqptools-)[0-9]+",  # a process id
        rb"(?<=/tmp/go-build)[0-9]+",  # the path of a program of tests, in consumer tags
    )
)
# The moment at which a client of PHP connected, among the properties of the client.
CLIENT_DATE = re.compile(
    rb"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT"
)
DEATH_TIME = re.compile(rb"(?<=\x04timeT).{8}", re.DOTALL)


class Names:
    """Numbers for names that are made at random, by their first appearance."""

    def __init__(self, of_clients: bool = False) -> None:
        """Know the names that brokers make. With `of_clients` those that clients make, too."""
        self._numbers: dict[bytes, bytes] = {}
        self._of_clients = of_clients
        self._pattern = re.compile(
            SERVER_NAMES + b"|" + CLIENT_NAMES if of_clients else SERVER_NAMES
        )

    def masked(self, payload: bytes) -> bytes:
        if self._of_clients:
            payload = CLIENT_DATE.sub(b"<date>", payload)
        return DEATH_TIME.sub(b"*", self._pattern.sub(self._number, payload))

    def _number(self, found: re.Match[bytes]) -> bytes:
        name = found[0]
        return self._numbers.setdefault(name, b"<name %d>" % (len(self._numbers) + 1))


# -- frames ----------------------------------------------------------------------------------------


def frames(stream: bytes, *, may_be_cut: bool) -> Iterator[Frame]:
    """Yield the frames of a stream; a protocol header is a frame of kind 0.

    A frame that is not whole at the end is left out if it `may_be_cut`. Raises Broken if it may
    not, for a frame without its end, and for one longer than brokers offer.
    """
    at = 0
    while at < len(stream):
        if stream[at : at + 4] == PROTOCOL:
            yield Frame(0, 0, stream[at : at + 8])
            at += 8
            continue
        if len(stream) - at < 7:
            break
        kind, channel, size = struct.unpack_from(">BHI", stream, at)
        end = at + 7 + size
        if size > FRAME_BYTES_MAX - 8 or kind not in (METHOD, HEADER, BODY, HEARTBEAT):
            raise Broken(f"a frame of kind {kind} and {size} bytes at {at}")
        if end >= len(stream):
            break
        if stream[end] != FRAME_END:
            raise Broken(f"the frame at {at} has no end")
        yield Frame(kind, channel, stream[at + 7 : end])
        at = end + 1
    if at < len(stream) and not may_be_cut:
        raise Broken(f"{len(stream) - at} bytes of a frame at the end")


def kind_of(payload: bytes) -> Kind:
    if len(payload) < 4:
        raise Broken("a method without its number")
    class_id, method_id = struct.unpack_from(">HH", payload)
    return class_id, method_id


def short(payload: bytes, at: int) -> bytes:
    """Return the short string at this offset."""
    return payload[at + 1 : at + 1 + payload[at]]


# -- one life of a channel -------------------------------------------------------------------------


@dataclass(slots=True)
class _Content:
    """A message whose frames are still coming."""

    method: bytes
    header: bytes | None = None
    body: bytearray = field(default_factory=bytearray)
    sizes: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.header is not None and len(self.body) >= self._body_bytes()

    def add(self, frame: Frame) -> None:
        if self.header is None and frame.kind == HEADER and len(frame.payload) >= 14:
            self.header = frame.payload
        elif self.header is not None and frame.kind == BODY and frame.payload:
            self.body += frame.payload
            self.sizes.append(len(frame.payload))
        else:
            raise Broken(f"a frame of kind {frame.kind} inside a message")
        if len(self.body) > self._body_bytes():
            raise Broken("a body longer than its header says")

    def _body_bytes(self) -> int:
        assert self.header is not None
        (size,) = struct.unpack_from(">Q", self.header, 4)
        return int(size)

    def text(self, method: bytes) -> bytes:
        """Return the message as one line, with these bytes for its method."""
        assert self.header is not None
        sizes = ",".join(map(str, self.sizes)).encode()
        return b"|".join((method, self.header, sizes, bytes(self.body)))


class _Life:
    """One life of a channel as the client saw it."""

    def __init__(self) -> None:
        self.lists: NormalForm = {}
        self._content: _Content | None = None
        self._next_tag = 1
        self._confirmed: dict[int, bytes] = {}
        self._lowest_unconfirmed = 1
        self._consumers: dict[bytes, str] = {}  # by tag: "consumes" or "cancelled"
        self._closed = False
        self._answered_close = False

    def take(self, frame: Frame) -> None:
        if self._content is not None or frame.kind != METHOD:
            self._take_content(frame)
            return
        kind = kind_of(frame.payload)
        # Both sides may close at once: the broker then also answers the client.
        if self._closed and (kind != CHANNEL_CLOSE_OK or self._answered_close):
            raise Broken(f"method {kind} on a closed channel")
        if kind in (DELIVER, GET_OK, RETURN):
            self._content = _Content(frame.payload)
        elif kind in (ACK, NACK):
            self._confirm(kind, frame.payload)
        elif kind == CANCEL:
            self._cancelled(short(frame.payload, 4))
            self._put("cancels", frame.payload)
        else:
            if kind == CONSUME_OK:
                self._subscribed(short(frame.payload, 4))
            elif kind == CANCEL_OK:
                self._cancelled(short(frame.payload, 4))
            elif kind in (CHANNEL_CLOSE, CHANNEL_CLOSE_OK):
                self._closed = True
                self._answered_close = kind == CHANNEL_CLOSE_OK
            self._put("replies", frame.payload)

    def _put(self, head: str, line: bytes) -> None:
        self.lists.setdefault(head, []).append(line)

    def _take_content(self, frame: Frame) -> None:
        content = self._content
        if content is None:
            raise Broken(f"a frame of kind {frame.kind} outside of a message")
        content.add(frame)
        if not content.is_whole:
            return
        self._content = None
        method = content.method
        kind = kind_of(method)
        if kind == RETURN:
            self._put("returns", content.text(method))
        elif kind == GET_OK:
            self._check_tag(method, 4)
            self._put("replies", content.text(method[:4] + method[12:]))
        else:
            tag = short(method, 4)
            if self._consumers.get(tag) == "cancelled":
                raise Broken(f"a delivery to the cancelled consumer {tag!r}")
            at = 5 + len(tag)
            self._check_tag(method, at)
            self._put(f"deliveries to {tag!r}", content.text(method[at + 8 :]))

    def _check_tag(self, method: bytes, at: int) -> None:
        (tag,) = struct.unpack_from(">Q", method, at)
        if tag != self._next_tag:
            raise Broken(f"delivery tag {tag} after {self._next_tag - 1}")
        self._next_tag += 1

    def _subscribed(self, tag: bytes) -> None:
        if tag not in self._consumers and f"deliveries to {tag!r}" in self.lists:
            raise Broken(f"a delivery to {tag!r} before consume-ok")
        self._consumers[tag] = "consumes"

    def _cancelled(self, tag: bytes) -> None:
        self._consumers[tag] = "cancelled"

    def _confirm(self, kind: Kind, payload: bytes) -> None:
        if len(payload) != 13 or payload[12] > (1 if kind == ACK else 3):
            raise Broken("a confirm of another length or with unknown bits")
        (tag,) = struct.unpack_from(">Q", payload, 4)
        said = b"ack" if kind == ACK else b"nack, bits %d" % (payload[12] & ~1)
        if tag in self._confirmed:
            raise Broken(f"publish {tag} is confirmed twice")
        for number in range(self._lowest_unconfirmed if payload[12] & 1 else tag, tag + 1):
            self._confirmed.setdefault(number, said)
        while self._lowest_unconfirmed in self._confirmed:
            self._lowest_unconfirmed += 1

    def finished(self) -> NormalForm:
        if self._confirmed:
            self.lists["confirms"] = [
                b"%d %s" % (number, said) for number, said in sorted(self._confirmed.items())
            ]
        if "cancels" in self.lists:
            self.lists["cancels"].sort()
        # Not in the order in which the first line of each came: that differs from run to run.
        return {head: self.lists[head] for head in self._heads() if head in self.lists}

    def _heads(self) -> list[str]:
        deliveries = [f"deliveries to {tag!r}" for tag in self._consumers]  # as the broker answered
        without_answer = {head for head in self.lists if head.startswith("deliveries to ")}
        without_answer.difference_update(deliveries)
        return ["replies", *deliveries, *sorted(without_answer), "returns", "confirms", "cancels"]


# -- a connection ----------------------------------------------------------------------------------


def seen(server: bytes, ended_by: str, names: Names) -> NormalForm:
    """Return the normal form of what a broker sent on one connection.

    `ended_by` is "client" or "server". All connections of a run share `names`. Raises Broken.
    """
    lives: dict[int, list[_Life]] = {0: [_Life()]}
    closing = False
    for frame in frames(server, may_be_cut=ended_by == "client"):
        if frame.kind == HEARTBEAT:
            if frame.channel or frame.payload:
                raise Broken("a heartbeat of a channel, or with a payload")
            continue
        if frame.kind == 0:
            closing = True
            lives[0][0].lists.setdefault("replies", []).append(frame.payload)
            continue
        kind = kind_of(frame.payload) if frame.kind == METHOD else None
        if kind in (CONNECTION_BLOCKED, CONNECTION_UNBLOCKED):
            continue
        closing = closing or kind in (CONNECTION_CLOSE, CONNECTION_CLOSE_OK)
        if kind == CHANNEL_OPEN_OK:
            lives.setdefault(frame.channel, []).append(_Life())
        if frame.channel not in lives:
            raise Broken(f"channel {frame.channel} is not open")
        lives[frame.channel][-1].take(frame)
    found: NormalForm = {}
    for channel in sorted(lives):
        for number, life in enumerate(lives[channel], 1):
            for head, lines in life.finished().items():
                found[f"channel {channel}, life {number}, {head}"] = lines
    if ended_by == "server" and not closing:
        found["end"] = [b"the broker hung up"]
    # Names are numbered in the order of the normal form, which is the same in every run.
    return {
        names.masked(head.encode()).decode(): [names.masked(line) for line in lines]
        for head, lines in found.items()
    }


def asked(client: bytes, names: Names) -> tuple[bytes, ...]:
    """Return what a client sent on one connection: its frames in their order, with their channels.

    The order counts over channels, too: two channels may publish to one queue. Heartbeats are left
    out. The bytes of connection.start-ok are sorted: clients in Go write the table of what they are
    in another order each time. Bytes that are not frames are there as they are.
    """
    found = []
    try:
        for frame in frames(client, may_be_cut=True):
            payload = names.masked(frame.payload)
            if frame.kind == METHOD and kind_of(frame.payload) == CONNECTION_START_OK:
                payload = bytes(sorted(payload))
            if frame.kind != HEARTBEAT:
                found.append(b"%d|%d|%s" % (frame.channel, frame.kind, payload))
    except Broken:
        return (names.masked(bytes(client)),)
    return tuple(found)


# -- two runs --------------------------------------------------------------------------------------

SHOWN_BYTES = 160


def differences(ours: NormalForm, others: NormalForm) -> list[str]:
    """Return a text for each head under which two normal forms differ: where they first do."""
    found = []
    for head in dict.fromkeys([*ours, *others]):
        one, other = ours.get(head, []), others.get(head, [])
        if one != other:
            at = common_start(one, other)
            a, b = (lines[at] if at < len(lines) else b"" for lines in (one, other))
            since = max(0, common_start(a, b) - SHOWN_BYTES // 2)
            shown = [repr(line[since : since + SHOWN_BYTES]) for line in (a, b)]
            counts = f"{len(one)} and {len(other)} in all"
            found.append(f"{head}, number {at + 1} ({counts}):\n    {shown[0]}\n    {shown[1]}")
    return found


def common_start(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items two sequences have in common at their start."""
    both = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
