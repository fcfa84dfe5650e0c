"""Record what RabbitMQ 3.10.8 answers, byte by byte, to the conversations of this file.

    python tests/clients/recordings/record.py [--port 35700]

starts the RabbitMQ that Debian packs, with a directory and ports of its own (PORT for AMQP, the
next two for Erlang), plays each conversation on plain sockets and writes it to
`rabbitmq-3.10.8/NAME.txt`. The frames of the client are made here by hand and those of the server
are kept as they came, so that no codec has a part in it. The lines of a recording:

    # words      what is tried
    a connect    connection `a` is opened
    a > HEX      connection `a` sends this
    a < HEX      the next frame that comes to `a`; heartbeats count only where they are asked for
    a end        the broker closes connection `a`
    a close      the client closes connection `a`
    do ACTION    an operator does something: see `Operator`

`test_recorded_bytes.py` plays the lines again, with our broker for the server.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORDINGS = HERE / "rabbitmq-3.10.8"
LIBRARY = Path("/usr/lib/rabbitmq/bin")  # not /usr/sbin: the scripts there change to another user
READY_S_MAX = 90.0
FRAME_S_MAX = 10.0

HEADER = b"AMQP\x00\x00\x09\x01"
METHOD, CONTENT, BODY, HEARTBEAT = 1, 2, 3, 8

Value = bool | int | str | dict[str, "Value"] | list["Value"]


# -- frames of the client --------------------------------------------------------------------------


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(channel: int, class_id: int, method_id: int, *fields: bytes) -> bytes:
    return frame(METHOD, channel, struct.pack(">HH", class_id, method_id) + b"".join(fields))


def short(text: str) -> bytes:
    return bytes([len(text.encode())]) + text.encode()


def long(text: str) -> bytes:
    return struct.pack(">I", len(text.encode())) + text.encode()


def octet(number: int) -> bytes:
    return bytes([number])


def u16(number: int) -> bytes:
    return struct.pack(">H", number)


def u32(number: int) -> bytes:
    return struct.pack(">I", number)


def u64(number: int) -> bytes:
    return struct.pack(">Q", number)


class Long(int):
    """A number that is sent in 64 bits although 32 would do."""


def value(what: Value) -> bytes:
    if isinstance(what, bool):
        return b"t" + octet(what)
    if isinstance(what, int):
        is_long = isinstance(what, Long) or what.bit_length() > 31
        return b"l" + struct.pack(">q", what) if is_long else b"I" + struct.pack(">i", what)
    if isinstance(what, str):
        return b"S" + long(what)
    if isinstance(what, dict):
        return b"F" + table(what)
    items = b"".join(map(value, what))
    return b"A" + u32(len(items)) + items


def table(values: dict[str, Value] | None = None) -> bytes:
    data = b"".join(short(name) + value(what) for name, what in (values or {}).items())
    return u32(len(data)) + data


CAPABILITIES: dict[str, Value] = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


def start_ok(user: str = "guest", password: str = "guest", mechanism: str = "PLAIN") -> bytes:
    properties = table({"product": "recorder", "capabilities": CAPABILITIES})
    return method(
        0, 10, 11, properties, short(mechanism), long(f"\0{user}\0{password}"), short("en_US")
    )


def tune_ok(channels: int = 2047, frame_bytes: int = 131072, heartbeat_s: int = 0) -> bytes:
    return method(0, 10, 31, u16(channels), u32(frame_bytes), u16(heartbeat_s))


def connection_open(vhost: str = "/") -> bytes:
    return method(0, 10, 40, short(vhost), short(""), octet(0))


CONNECTION_CLOSE = method(0, 10, 50, u16(200), short("bye"), u16(0), u16(0))
CONNECTION_CLOSE_OK = method(0, 10, 51)


def channel_open(channel: int = 1) -> bytes:
    return method(channel, 20, 10, short(""))


def channel_close_ok(channel: int = 1) -> bytes:
    return method(channel, 20, 41)


def exchange_declare(
    name: str,
    kind: str,
    flags: int = 0,
    arguments: dict[str, Value] | None = None,
    channel: int = 1,
) -> bytes:
    """Return exchange.declare.

    Flags: 1 passive, 2 durable, 4 auto-delete, 8 internal, 16 nowait.
    """
    return method(channel, 40, 10, u16(0), short(name), short(kind), octet(flags), table(arguments))


def exchange_delete(name: str, flags: int = 0) -> bytes:
    """Return exchange.delete. Flags: 1 if unused, 2 nowait."""
    return method(1, 40, 20, u16(0), short(name), octet(flags))


def exchange_bind(to: str, source: str, key: str, method_id: int = 30) -> bytes:
    return method(1, 40, method_id, u16(0), short(to), short(source), short(key), octet(0), table())


def queue_declare(
    name: str, flags: int = 0, arguments: dict[str, Value] | None = None, channel: int = 1
) -> bytes:
    """Return queue.declare. Flags: 1 passive, 2 durable, 4 exclusive, 8 auto-delete, 16 nowait."""
    return method(channel, 50, 10, u16(0), short(name), octet(flags), table(arguments))


def queue_bind(
    queue: str, exchange: str, key: str, arguments: dict[str, Value] | None = None
) -> bytes:
    return method(
        1, 50, 20, u16(0), short(queue), short(exchange), short(key), octet(0), table(arguments)
    )


def queue_unbind(queue: str, exchange: str, key: str) -> bytes:
    return method(1, 50, 50, u16(0), short(queue), short(exchange), short(key), table())


def queue_purge(name: str) -> bytes:
    return method(1, 50, 30, u16(0), short(name), octet(0))


def queue_delete(name: str, flags: int = 0) -> bytes:
    """Return queue.delete. Flags: 1 if unused, 2 if empty, 4 nowait."""
    return method(1, 50, 40, u16(0), short(name), octet(flags))


def qos(size: int = 0, count: int = 0, is_global: bool = False) -> bytes:
    return method(1, 60, 10, u32(size), u16(count), octet(is_global))


def consume(
    queue: str,
    tag: str,
    flags: int = 0,
    arguments: dict[str, Value] | None = None,
    channel: int = 1,
) -> bytes:
    """Return basic.consume. Flags: 1 no-local, 2 no-ack, 4 exclusive, 8 nowait."""
    return method(channel, 60, 20, u16(0), short(queue), short(tag), octet(flags), table(arguments))


def cancel(tag: str) -> bytes:
    return method(1, 60, 30, short(tag), octet(0))


def publish(
    exchange: str,
    key: str,
    body: bytes,
    flags: int = 0,
    properties: bytes = b"\0\0",
    channel: int = 1,
) -> bytes:
    """Return the frames of a basic.publish. Flags: 1 mandatory, 2 immediate."""
    said = method(channel, 60, 40, u16(0), short(exchange), short(key), octet(flags))
    said += frame(CONTENT, channel, u16(60) + u16(0) + u64(len(body)) + properties)
    return said + (frame(BODY, channel, body) if body else b"")


def get(queue: str, no_ack: bool = False) -> bytes:
    return method(1, 60, 70, u16(0), short(queue), octet(no_ack))


def ack(tag: int, multiple: bool = False) -> bytes:
    return method(1, 60, 80, u64(tag), octet(multiple))


def reject(tag: int, requeue: bool = False) -> bytes:
    return method(1, 60, 90, u64(tag), octet(requeue))


def nack(tag: int, flags: int = 0) -> bytes:
    """Return basic.nack. Flags: 1 multiple, 2 requeue."""
    return method(1, 60, 120, u64(tag), octet(flags))


def recover(requeue: bool = True, method_id: int = 110) -> bytes:
    return method(1, 60, method_id, octet(requeue))


CONFIRM_SELECT = method(1, 85, 10, octet(0))
TX_SELECT, TX_COMMIT, TX_ROLLBACK = (method(1, 90, number) for number in (10, 20, 30))

# All fourteen properties, in the order of their flags, and values of many types in the table.
ALL_PROPERTIES = (
    u16(0b1111111111111100)
    + short("text/plain")
    + short("gzip")
    + table({"text": "t", "yes": True, "number": 7, "table": {"a": 1}, "list": [1, "two"]})
    + octet(2)
    + octet(5)
    + short("correlation")
    + short("reply")
    + short("60000")
    + short("message")
    + u64(1_600_000_000)
    + short("type")
    + short("guest")
    + short("app")
    + short("cluster")
)


def headers(values: dict[str, Value]) -> bytes:
    return u16(1 << 13) + table(values)


def expiring(milliseconds: str) -> bytes:
    return u16(1 << 8) + short(milliseconds)


# -- how a conversation is told --------------------------------------------------------------------


class Connection:
    """A socket that gives whole frames as they come."""

    def __init__(self, port: int, patience_s: float = FRAME_S_MAX) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=patience_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def read(self, *, heartbeats: bool = False) -> bytes:
        """Return the next frame, or the 8 bytes of a protocol header.

        Return b"" at the end of the stream.
        """
        while True:
            if self._unread[:4] == HEADER[:4] and len(self._unread) >= 8:
                said, self._unread = self._unread[:8], self._unread[8:]
                return said
            if self._unread[:4] != HEADER[:4] and len(self._unread) >= 7:
                size = 8 + struct.unpack_from(">I", self._unread, 3)[0]
                if len(self._unread) >= size:
                    said, self._unread = self._unread[:size], self._unread[size:]
                    if said[0] == HEARTBEAT and not heartbeats:
                        continue
                    return said
            try:
                more = self._sock.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if not more:
                return b""
            self._unread += more

    def close(self) -> None:
        self._sock.close()


class Recorder:
    """Plays a conversation and keeps its lines."""

    def __init__(self, port: int, operator: Operator) -> None:
        self.lines: list[str] = []
        self._port = port
        self._operator = operator
        self._connections: dict[str, Connection] = {}

    def note(self, words: str) -> None:
        self.lines.append(f"# {words}")

    def wait(self) -> None:
        """RabbitMQ may answer what comes behind publishes before its queues have the messages."""
        self.do("wait")

    def connect(self, who: str = "a") -> None:
        self.lines.append(f"{who} connect")
        self._connections[who] = Connection(self._port)

    def say(self, said: bytes, answers: int = 1, who: str = "a") -> list[bytes]:
        """Send something that is answered by so many frames."""
        self.lines.append(f"{who} > {said.hex()}")
        self._connections[who].send(said)
        return self.hear(answers, who)

    def hear(self, answers: int = 1, who: str = "a", *, heartbeats: bool = False) -> list[bytes]:
        heard = []
        for _ in range(answers):
            got = self._connections[who].read(heartbeats=heartbeats)
            if not got:
                raise self._other(f"connection {who} ended")
            self.lines.append(f"{who} < {got.hex()}")
            heard.append(got)
        return heard

    def _other(self, words: str) -> SystemExit:
        """Return the exit of a conversation that went another way than it was written for."""
        shown = [line.split()[-1] for line in self.lines[-6:] if line[2] in "<>"]
        return SystemExit("\n".join([*map(repr, map(bytes.fromhex, shown)), words]))

    def end(self, who: str = "a") -> None:
        got = self._connections[who].read()
        if got:
            raise self._other(f"connection {who} goes on with {got!r}")
        self.lines.append(f"{who} end")
        self._connections.pop(who).close()

    def do(self, action: str) -> None:
        self.lines.append(f"do {action}")
        self._operator.do(action)

    # what most conversations begin and end with

    def log_in(self, who: str = "a") -> None:
        self.connect(who)
        self.say(HEADER, who=who)
        self.say(start_ok(), who=who)
        self.say(tune_ok() + connection_open(), who=who)

    def open(self, who: str = "a") -> None:
        self.log_in(who)
        self.say(channel_open(), who=who)

    def bye(self, who: str = "a") -> None:
        self.say(CONNECTION_CLOSE, who=who)
        self.leave(who)

    def leave(self, who: str = "a") -> None:
        self.lines.append(f"{who} close")
        self._connections.pop(who).close()

    def broken_off(self, who: str = "a") -> None:
        """Expect that the broker closes the connection, with or without connection.close."""
        got = self._connections[who].read()
        if got:
            self.lines.append(f"{who} < {got.hex()}")
            self.say(CONNECTION_CLOSE_OK, 0, who)
        self.end(who)

    def refused(self, words: str, said: bytes, before: int = 0) -> None:
        """Send something that closes the channel or connection, then open it again.

        `before` other answers come before the close.
        """
        self.note(words)
        answers = self.say(said, before + 1)
        match answers[-1][7:11]:
            case b"\0\x14\0\x28":
                self.say(channel_close_ok() + channel_open())
            case b"\0\x0a\0\x32":
                self.say(CONNECTION_CLOSE_OK, 0)
                self.end()
                self.open()
            case _:
                raise self._other("nothing is closed")

    def fatal(self, words: str, said: bytes, before: int = 0) -> None:
        """Something that closes a connection of its own, after so many other answers."""
        self.note(words)
        self.open()
        self.say(said, before)
        self.broken_off()


class Operator:
    """The `do` lines at RabbitMQ.

    `alarm memory` begins an alarm, `alarm over` ends it, `stop` ends the broker.

    `wait` lets what was published come to its queues.
    """

    def __init__(self, environment: dict[str, str], process: subprocess.Popen[bytes]) -> None:
        self._environment = environment
        self._process = process

    def do(self, action: str) -> None:
        match action.split():
            case ["alarm", "memory"]:
                self.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
            case ["alarm", "over"]:
                self.ctl("set_vm_memory_high_watermark", "0.9")
            case ["close", "connections", *reason]:
                self.ctl("close_all_connections", " ".join(reason))
            case ["wait"]:
                time.sleep(0.5)
            case ["stop"]:
                self._process.send_signal(signal.SIGTERM)
            case _:
                raise SystemExit(f"no such action: {action}")

    def ctl(self, *arguments: str) -> None:
        command = [str(LIBRARY / "rabbitmqctl"), "-q", *arguments]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)


# -- the conversations -----------------------------------------------------------------------------


def connection(p: Recorder) -> None:
    p.note("a connection, opened and closed by the client")
    p.log_in()
    p.note("connection.update-secret")
    p.say(method(0, 10, 70, long("guest"), short("renewed")))
    p.bye()
    p.note("another protocol")
    p.connect()
    p.say(b"HTTP/1.1")
    p.end()
    p.note("AMQP 0-9")
    p.connect()
    p.say(b"AMQP\x01\x01\x00\x09")
    p.say(start_ok())
    p.say(tune_ok() + connection_open())
    p.bye()
    p.note("a heartbeat")
    p.connect()
    p.say(HEADER)
    p.say(start_ok())
    p.say(tune_ok(heartbeat_s=2) + connection_open())
    p.hear(heartbeats=True)
    p.bye()


def connection_refused(p: Recorder) -> None:
    def hard(words: str, said: bytes, logged_in: bool = True) -> None:
        p.note(words)
        p.connect()
        p.say(HEADER)
        if logged_in:
            p.say(start_ok())
        p.say(said, 0)
        p.broken_off()

    hard("a wrong password", start_ok(password="wrong"), logged_in=False)
    hard("a mechanism that is not offered", start_ok(mechanism="SCRAM"), logged_in=False)
    hard("too small a frame_max", tune_ok(frame_bytes=100))
    hard("too large a frame_max", tune_ok(frame_bytes=1 << 20))
    hard("no limit of frames", tune_ok(frame_bytes=0))
    hard("too many channels", tune_ok(channels=3000))
    hard("a vhost that is not there", tune_ok() + connection_open("nowhere"))
    p.fatal(
        "a method on a channel that is not open",
        method(7, 50, 10, u16(0), short("q"), octet(0), table()),
    )
    p.fatal("a channel opened twice", channel_open())
    p.fatal("a method that does not exist", method(1, 77, 7))
    p.fatal("a connection method on a channel", method(1, 10, 31, u16(0), u32(0), u16(0)))
    p.fatal(
        "a channel method on channel 0", method(0, 50, 10, u16(0), short("q"), octet(0), table())
    )
    p.fatal("a frame of an unknown type", frame(9, 1, b"?"))
    p.fatal("a frame with a wrong end", frame(METHOD, 1, b"12345")[:-1] + b"!")
    p.fatal(
        "a content header without a publish", frame(CONTENT, 1, u16(60) + u16(0) + u64(1) + u16(0))
    )
    p.fatal("a body without a publish", frame(BODY, 1, b"x"))
    p.fatal(
        "a method between publish and content",
        method(1, 60, 40, u16(0), short(""), short("k"), octet(0)) + get("q"),
    )
    p.fatal(
        "a content header of another class",
        method(1, 60, 40, u16(0), short(""), short("k"), octet(0))
        + frame(CONTENT, 1, u16(50) + u16(0) + u64(1) + u16(0)),
    )
    p.fatal("channel.flow that stops", method(1, 20, 20, octet(0)))
    p.fatal("basic.publish immediate", publish("", "k", b"x", 2))
    p.fatal("basic.qos with a size", qos(size=1))
    p.fatal("basic.recover without requeue", recover(requeue=False))
    p.note("a consumer tag that is in use")
    p.open()
    p.say(queue_declare("twice", 4))
    p.say(consume("twice", "tag"))
    p.say(consume("twice", "tag"), 0)
    p.broken_off()


def channel(p: Recorder) -> None:
    p.log_in()
    p.note("channel.open, flow, close")
    p.say(channel_open())
    p.say(method(1, 20, 20, octet(1)))
    p.say(method(1, 20, 40, u16(200), short("bye"), u16(0), u16(0)))
    p.note("channel.open on the last number, with words in its reserved field")
    p.say(method(2047, 20, 10, short("out of band")))
    p.note("access.request")
    p.say(method(2047, 30, 10, short("/data"), octet(31)))
    p.bye()


def exchanges(p: Recorder) -> None:
    p.open()
    p.note("exchange.declare, bind, unbind, delete")
    for kind in ("direct", "fanout", "topic", "headers"):
        p.say(exchange_declare(f"e.{kind}", kind))
    p.say(exchange_declare("e.all", "topic", 2 | 4 | 8, {"alternate-exchange": "e.fanout"}))
    p.say(exchange_declare("e.direct", "", 1))
    p.say(exchange_bind("e.fanout", "e.direct", "k"))
    p.say(exchange_bind("e.fanout", "e.direct", "k", 40))
    p.say(
        method(
            1, 40, 40, u16(0), short("e.fanout"), short("e.direct"), short("k"), octet(1), table()
        ),
        0,
    )
    p.refused("passive, not there", exchange_declare("e.none", "direct", 1))
    p.refused("an unknown type", exchange_declare("e.x", "x-none"))
    p.refused("another type", exchange_declare("e.direct", "fanout"))
    p.refused("another durability", exchange_declare("e.direct", "direct", 2))
    p.refused(
        "other arguments",
        exchange_declare("e.direct", "direct", 0, {"alternate-exchange": "e.fanout"}),
    )
    p.refused(
        "an alternate exchange of a wrong type",
        exchange_declare("e.y", "direct", 0, {"alternate-exchange": 5}),
    )
    p.refused("a reserved name", exchange_declare("amq.mine", "direct"))
    p.refused("the default exchange", exchange_declare("", "direct"))
    p.refused("delete the default exchange", exchange_delete(""))
    p.refused("delete a system exchange", exchange_delete("amq.direct"))
    p.say(exchange_bind("e.fanout", "e.direct", "k"))
    p.refused("delete, in use", exchange_delete("e.direct", 1))
    p.refused("bind to an exchange that is not there", exchange_bind("e.none", "e.direct", "k"))
    p.refused("bind an exchange that is not there", exchange_bind("e.direct", "e.none", "k"))
    p.refused("bind the default exchange", exchange_bind("e.direct", "", "k"))
    p.refused("publish to an internal exchange", publish("e.all", "k", b"x"))
    p.refused("publish to an exchange that is not there", publish("e.none", "k", b"x"))
    for name in ("e.direct", "e.fanout", "e.topic", "e.headers", "e.all", "e.never"):
        p.say(exchange_delete(name))
    p.bye()


def queues(p: Recorder) -> None:
    p.open()
    p.note("queue.declare, bind, unbind, purge, delete")
    p.say(queue_declare("q", 2))
    p.say(queue_declare("q", 1))
    p.say(queue_declare("", 4))
    p.refused("passive, without a name", queue_declare("", 1))
    p.say(queue_bind("q", "amq.direct", "k"))
    p.say(queue_unbind("q", "amq.direct", "k"))
    p.say(queue_unbind("q", "amq.direct", "k"))
    p.say(publish("", "q", b"1") + publish("", "q", b"2"), 0)
    p.wait()
    p.say(queue_declare("q", 2))
    p.say(queue_purge("q"))
    p.say(publish("", "q", b"1"), 0)
    p.wait()
    p.say(queue_delete("q"))
    p.say(queue_delete("q"))
    p.say(queue_declare("q"))
    p.refused("passive, not there", queue_declare("q.none", 1))
    p.refused("another durability", queue_declare("q", 2))
    p.refused("another auto-delete", queue_declare("q", 8))
    p.refused("exclusive now", queue_declare("q", 4))
    p.refused("an argument more, in 64 bits", queue_declare("q", 0, {"x-message-ttl": Long(1000)}))
    p.refused("an argument more", queue_declare("q", 0, {"x-message-ttl": 1000}))
    p.say(queue_declare("q.ttl", 0, {"x-message-ttl": 1000, "x-max-length": 5}))
    p.refused(
        "an argument of another value",
        queue_declare("q.ttl", 0, {"x-message-ttl": 2000, "x-max-length": 5}),
    )
    p.refused(
        "an argument of another type",
        queue_declare("q.ttl", 0, {"x-message-ttl": "1000", "x-max-length": 5}),
    )
    p.refused("an argument less", queue_declare("q.ttl", 0, {"x-max-length": 5}))
    bad: list[tuple[str, dict[str, Value]]] = [
        ("a negative message TTL", {"x-message-ttl": -1}),
        ("a message TTL that is text", {"x-message-ttl": "soon"}),
        ("a message TTL that is too large", {"x-message-ttl": 1 << 40}),
        ("no time to expire", {"x-expires": 0}),
        ("a negative length", {"x-max-length": -1}),
        ("a length that is text", {"x-max-length": "long"}),
        ("negative bytes", {"x-max-length-bytes": -1}),
        ("an unknown overflow", {"x-overflow": "explode"}),
        ("an overflow of a wrong type", {"x-overflow": 5}),
        ("a dead-letter exchange of a wrong type", {"x-dead-letter-exchange": 5}),
        ("a dead-letter key without an exchange", {"x-dead-letter-routing-key": "k"}),
        ("too many priorities", {"x-max-priority": 256}),
        ("negative priorities", {"x-max-priority": -1}),
        ("single active consumer of a wrong type", {"x-single-active-consumer": "yes"}),
        ("an unknown queue type", {"x-queue-type": "none"}),
        ("a queue type of a wrong type", {"x-queue-type": 5}),
        ("an unknown queue mode", {"x-queue-mode": "busy"}),
        ("an age for a classic queue", {"x-max-age": "1D"}),
    ]
    for words, arguments in bad:
        p.refused(words, queue_declare("q.bad", 2, arguments))
    p.refused("a reserved name", queue_declare("amq.mine"))
    p.refused("bind to an exchange that is not there", queue_bind("q", "e.none", "k"))
    p.refused("bind a queue that is not there", queue_bind("q.none", "amq.direct", "k"))
    p.refused("bind to the default exchange", queue_bind("q", "", "k"))
    p.refused("no queue was declared on this channel", queue_bind("", "amq.direct", "k"))
    p.refused(
        "an x-match that does not exist", queue_bind("q", "amq.headers", "", {"x-match": "some"})
    )
    p.note("unbind from an exchange that is not there")
    p.say(queue_unbind("q", "e.none", "k"))
    p.refused("purge a queue that is not there", queue_purge("q.none"))
    p.say(publish("", "q", b"1"), 0)
    p.wait()
    p.say(queue_declare("q"))
    p.refused("delete, not empty", queue_delete("q", 2))
    p.say(consume("q", "c", 2), 4)
    p.refused("delete, in use", queue_delete("q", 1))
    p.note("an exclusive queue of another connection")
    p.open("b")
    p.say(queue_declare("q.mine", 4), who="b")
    p.refused("declare", queue_declare("q.mine", 4))
    p.refused("consume", consume("q.mine", "c"))
    p.refused("delete", queue_delete("q.mine"))
    p.refused("purge", queue_purge("q.mine"))
    p.refused("bind", queue_bind("q.mine", "amq.direct", "k"))
    p.refused("get", get("q.mine"))
    p.bye("b")
    for name in ("q", "q.ttl"):
        p.say(queue_delete(name))
    p.bye()


def messages(p: Recorder) -> None:
    p.open()
    p.say(queue_declare("m"))
    p.note("basic.get, empty and not")
    p.say(get("m"))
    p.say(publish("", "m", b"one", properties=ALL_PROPERTIES) + publish("", "m", b"two"), 0)
    p.wait()
    p.say(queue_declare("m"))
    p.say(get("m"), 3)
    p.say(get("m", no_ack=True), 3)
    p.say(reject(1, requeue=True) + get("m"), 3)
    p.say(ack(3) + queue_declare("m"))
    p.note("an empty body")
    p.say(publish("", "m", b""), 0)
    p.wait()
    p.say(queue_declare("m"))
    p.say(get("m", no_ack=True), 2)
    p.note("basic.qos, consume, deliver, cancel")
    p.say(qos(count=2))
    p.say(qos(count=10, is_global=True))
    p.say(consume("m", "tag"))
    p.say(publish("", "m", b"three", properties=ALL_PROPERTIES), 3)
    p.say(ack(5) + cancel("tag"))
    p.say(cancel("tag"))
    p.say(consume("m", ""))
    p.say(publish("", "m", b"four"), 3)
    p.note("basic.recover")
    p.say(recover(), 4)
    p.say(recover(method_id=100), 3)
    p.say(ack(0, multiple=True) + method(1, 20, 40, u16(200), short(""), u16(0), u16(0)))
    p.say(channel_open())
    p.note("more than one frame of body")
    p.say(consume("m", "large", 2))
    body = bytes(range(256)) * 800
    parts = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
    said = publish("", "m", b"")
    said = method(1, 60, 40, u16(0), short(""), short("m"), octet(0))
    said += frame(CONTENT, 1, u16(60) + u16(0) + u64(len(body)) + u16(0))
    p.say(said + b"".join(frame(BODY, 1, part) for part in parts), 4)
    p.say(cancel("large"))
    p.note("basic.return")
    p.say(publish("", "m.none", b"back", 1, ALL_PROPERTIES), 3)
    p.say(publish("amq.topic", "m.none", b"", 1), 2)
    p.note("the broker cancels")
    p.say(consume("m", "tag"))
    p.open("b")
    p.say(queue_delete("m"), who="b")
    p.hear()
    p.note("dead letters")
    p.say(queue_declare("m.dead"))
    p.say(
        queue_declare(
            "m.live", 0, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "m.dead"}
        )
    )
    p.say(publish("", "m.live", b"rejected", properties=headers({"mine": "kept"})), 0)
    p.wait()
    p.say(get("m.live"), 3)
    p.say(consume("m.dead", "dead", 2))
    p.say(nack(2), 3)
    p.say(publish("", "m.live", b"expired", properties=expiring("0")), 3)
    p.note("a reply")
    p.say(consume("amq.rabbitmq.reply-to", "replies", 2))
    p.say(
        publish("", "m.dead", b"question", properties=u16(1 << 9) + short("amq.rabbitmq.reply-to")),
        3,
    )
    p.say(queue_delete("m.dead"), 2)
    p.say(queue_delete("m.live"))
    p.bye("b")
    p.bye()


def messages_refused(p: Recorder) -> None:
    p.open()
    p.say(queue_declare("r"))
    p.refused("get from a queue that is not there", get("r.none"))
    p.refused("get, no queue was declared on this channel", get(""))
    p.refused("consume from a queue that is not there", consume("r.none", "c"))
    p.refused("an unknown delivery tag", ack(7))
    p.refused("all, of nothing", ack(7, multiple=True))
    p.refused("an unknown delivery tag rejected", reject(7))
    p.refused("an unknown delivery tag nacked", nack(7))
    p.refused(
        "an expiration that is no number", publish("", "r", b"x", properties=expiring("soon"))
    )
    p.refused(
        "an expiration with something behind", publish("", "r", b"x", properties=expiring("5s"))
    )
    p.refused("a negative expiration", publish("", "r", b"x", properties=expiring("-5")))
    p.refused(
        "another user's id", publish("", "r", b"x", properties=u16(1 << 4) + short("somebody"))
    )
    p.refused("a CC that is no list", publish("", "r", b"x", properties=headers({"CC": "r"})))
    p.refused("a consumer priority that is text", consume("r", "c", 0, {"x-priority": "high"}))
    p.say(consume("r", "first"))
    p.say(channel_open(2))
    p.note("exclusive, with another consumer")
    p.say(consume("r", "second", 4, channel=2))
    p.say(channel_close_ok(2) + channel_open(2))
    p.say(cancel("first"))
    p.say(consume("r", "first", 4))
    p.note("an exclusive consumer is there")
    p.say(consume("r", "second", channel=2))
    p.say(channel_close_ok(2) + channel_open(2))
    p.say(cancel("first"))
    p.refused("replies that would be acknowledged", consume("amq.rabbitmq.reply-to", "c"))
    p.refused("replies asked for twice", consume("amq.rabbitmq.reply-to", "c", 2) * 2, 1)
    p.refused(
        "a reply is asked for and nobody waits",
        publish("", "r", b"x", properties=u16(1 << 9) + short("amq.rabbitmq.reply-to")),
    )
    p.say(queue_delete("r"))
    p.bye()


def confirms(p: Recorder) -> None:
    p.open()
    p.say(CONFIRM_SELECT)
    p.say(CONFIRM_SELECT)
    p.say(queue_declare("c", 2))
    p.say(publish("", "c", b"1"))
    p.say(publish("", "c.none", b"2"))
    p.note("basic.return comes before its basic.ack")
    p.say(publish("", "c.none", b"3", 1), 4)
    p.note("basic.nack")
    p.say(queue_declare("c.full", 2, {"x-max-length": 0, "x-overflow": "reject-publish"}))
    p.say(publish("", "c.full", b"4"))
    p.refused("tx behind confirm", TX_SELECT)
    p.say(queue_delete("c"))
    p.say(queue_delete("c.full"))
    p.bye()


def transactions(p: Recorder) -> None:
    p.open()
    p.say(queue_declare("t"))
    p.refused("commit without a transaction", TX_COMMIT)
    p.refused("rollback without a transaction", TX_ROLLBACK)
    p.say(TX_SELECT)
    p.say(TX_SELECT)
    p.say(publish("", "t", b"1") + TX_COMMIT)
    p.say(publish("", "t", b"2") + TX_ROLLBACK)
    p.say(get("t"), 3)
    p.say(ack(1) + TX_COMMIT)
    p.refused("confirm behind tx", CONFIRM_SELECT)
    p.say(queue_delete("t"))
    p.bye()


def streams(p: Recorder) -> None:
    p.open()
    p.say(queue_declare("s", 2, {"x-queue-type": "stream"}))
    p.say(qos(count=10))
    p.say(CONFIRM_SELECT)
    p.say(publish("", "s", b"zero"))
    p.say(consume("s", "tag", 0, {"x-stream-offset": "first"}), 4)
    p.refused("a stream that is not durable", queue_declare("s.bad", 0, {"x-queue-type": "stream"}))
    p.refused("an exclusive stream", queue_declare("s.bad", 2 | 4, {"x-queue-type": "stream"}))
    p.refused("an auto-delete stream", queue_declare("s.bad", 2 | 8, {"x-queue-type": "stream"}))
    p.refused(
        "a message TTL for a stream",
        queue_declare("s.bad", 2, {"x-queue-type": "stream", "x-message-ttl": 5}),
    )
    p.refused(
        "an age that is none",
        queue_declare("s.bad", 2, {"x-queue-type": "stream", "x-max-age": "old"}),
    )
    p.refused("consume without a prefetch", consume("s", "c"))
    p.say(qos(count=10))
    p.refused("consume without acks", consume("s", "c", 2))
    p.say(qos(count=10))
    p.refused("an offset that does not exist", consume("s", "c", 0, {"x-stream-offset": "middle"}))
    p.fatal("basic.get", get("s"))
    p.fatal("queue.purge", queue_purge("s"))
    p.note("away with it")
    p.open()
    p.say(queue_delete("s"))
    p.bye()


def alarms(p: Recorder) -> None:
    p.open()
    p.say(queue_declare("a", 2))
    p.do("alarm memory")
    p.say(publish("", "a", b"x"))
    p.do("alarm over")
    p.hear()
    p.say(queue_delete("a"))
    p.bye()


def closed(p: Recorder) -> None:
    p.note("an operator closes the connection")
    p.open()
    p.do("close connections be gone")
    p.broken_off()


def stopped(p: Recorder) -> None:
    p.note("the broker is stopped")
    p.open()
    p.do("stop")
    p.hear()
    p.leave()


CONVERSATIONS: tuple[Callable[[Recorder], None], ...] = (
    connection,
    connection_refused,
    channel,
    exchanges,
    queues,
    messages,
    messages_refused,
    confirms,
    transactions,
    streams,
    alarms,
    closed,
    stopped,
)


# -- the RabbitMQ ----------------------------------------------------------------------------------


def settings(directory: Path, port: int) -> dict[str, str]:
    (directory / "plugins").write_text("[].\n")
    (directory / "rabbitmq.conf").write_text(
        f"listeners.tcp.default = 127.0.0.1:{port}\nvm_memory_high_watermark.relative = 0.9\n"
        "disk_free_limit.absolute = 1MB\n"
    )
    return {
        **os.environ,
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"recorded{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_DIST_PORT": str(port + 1),
        "ERL_EPMD_PORT": str(port + 2),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
    }


def wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + READY_S_MAX
    while process.poll() is None and time.monotonic() < give_up:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"RabbitMQ did not listen on port {port} within {READY_S_MAX:.0f} s")


def end_port_mapper(environment: dict[str, str]) -> None:
    """End Erlang's port mapper.

    It is a daemon that outlives the server, and it does not end while it knows a node.
    """
    for _ in range(50):
        said = subprocess.run(
            ["epmd", "-kill"], env=environment, capture_output=True, text=True, check=False
        )
        if "Killed" in said.stdout or "Cannot connect" in said.stdout + said.stderr:
            return
        time.sleep(0.1)
    print(f"the port mapper at port {environment['ERL_EPMD_PORT']} goes on", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=35700)
    parser.add_argument("names", nargs="*", help="of conversations; none: all")
    arguments = parser.parse_args()
    RECORDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recorded-") as name:
        directory = Path(name)
        environment = settings(directory, arguments.port)
        with (directory / "out").open("wb") as out:
            process = subprocess.Popen(
                [str(LIBRARY / "rabbitmq-server")],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            wait_for_port(process, arguments.port)
            operator = Operator(environment, process)
            operator.ctl("await_startup")
            for conversation in CONVERSATIONS:
                if arguments.names and conversation.__name__ not in arguments.names:
                    continue
                recorder = Recorder(arguments.port, operator)
                conversation(recorder)
                path = RECORDINGS / f"{conversation.__name__}.txt"
                path.write_text("\n".join(recorder.lines) + "\n")
                print(f"{path.name}: {len(recorder.lines)} lines")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_port_mapper(environment)


if __name__ == "__main__":
    sys.exit(main())
