"""The commands that publish, show, follow and move messages.

pamqp is imported when a command runs: completions must be quick.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import json
import struct
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Confirmed, Message, Received
from shardmq.supervisor.cli import channel as amqp
from shardmq.supervisor.cli.api import (
    DATA,
    REFUSED,
    USAGE,
    Api,
    fail,
    json_argument,
    pairs,
)
from shardmq.supervisor.cli.channel import Channel
from shardmq.supervisor.cli.names import Queue, Stream, Vhost, complete_exchanges, complete_queues
from shardmq.supervisor.cli.show import progress
from shardmq.supervisor.cli.streams import partitions_of

# The messages that are under way at the same time: published and not confirmed, or fetched and not
# settled. A message that is larger than all the bytes goes alone.
AT_ONCE_MESSAGES_MAX = 200
AT_ONCE_BYTES_MAX = 1 << 20
# The size of a message is known when it is here. So many may be asked for beyond those bytes.
GETS_AHEAD_MAX = 16
TAIL_PREFETCH = 1000
PARTITIONS_NAMED_MAX = 10  # in an error
OFFSETS = ("first", "last", "next")
STREAM_OFFSET = "x-stream-offset"
PRODUCER_ID = "x-producer-id"
DEDUPLICATED = "x-message-deduplication"
USER_ID_FLAG = 1 << 4  # AMQP 0-9-1, section 4.2.6.1: the property user_id is there.
# The headers of messages that move_messages leaves, and the reasons.
UNMOVABLE = {
    "CC": "by which it would go to other queues once more",
    "BCC": "by which it would go to other queues once more",
    PRODUCER_ID: "with which the other queue might take a message for a repeated one",
}
SHORT_BYTES_MAX = 255
# The properties of AMQP 0-9-1 by the names of the HTTP API. pamqp has another name for one.
PROPERTIES = (
    "content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id",
    "reply_to", "expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip
OTHER_NAMES = {"type": "message_type"}

Json = Annotated[
    bool, typer.Option("--json", help="Print a line of JSON for each message, as the HTTP API.")
]


def publish(
    api: Api,
    queue: Annotated[
        str | None,
        typer.Argument(
            metavar="QUEUE", help="Not with --exchange.", autocompletion=complete_queues
        ),
    ] = None,
    body: Annotated[
        str | None, typer.Argument(metavar="BODY", help="Default: all of standard input.")
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            "--exchange",
            "-e",
            help="Publish to this exchange.",
            autocompletion=complete_exchanges,
        ),
    ] = None,
    routing_key: Annotated[str, typer.Option("--routing-key", "-k", "-r", help="Its key.")] = "",
    properties: Annotated[
        str, typer.Option(metavar="JSON", help='Such as \'{"priority": 3, "type": "t"}\'.')
    ] = "{}",
    headers: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            metavar="NAME=VALUE",
            help="Numbers, true and false are read as such. Several are possible.",
        ),
    ] = None,
    persistent: Annotated[bool, typer.Option(help="Keep the message over a restart.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Publish the message so often.")] = 1,
    vhost: Vhost = "/",
) -> None:
    """Publish a message and wait until the broker confirms it.

    The exit status is 1 if the message goes to no queue, and nothing is printed if it does. While
    an alarm blocks publishers, no more is published than the broker takes at once, and a line says
    so. The exit status is 70 if not all messages were confirmed.
    """
    if exchange is not None:
        if body is not None:
            fail("QUEUE or --exchange, not both", USAGE)
        queue, body = None, queue
    elif queue is None:
        fail("where to: QUEUE, or --exchange and --routing-key", USAGE)
    elif routing_key:
        fail("--routing-key needs --exchange", USAGE)
    key = routing_key if queue is None else queue
    encoded = encode_properties(_given_properties(properties, headers, persistent))
    data = _standard_input() if body is None else body.encode("utf-8", "surrogateescape")
    for name in (exchange or "", key):
        check_name(name)
    with amqp.opened(api, vhost) as channel:
        publisher = Publisher(channel)
        with progress("publishing", count) as advance:
            for _ in range(count):
                publisher.publish(exchange or "", key, encoded, data)
                advance(1)
            publisher.finish()
        alarm = channel.client.blocked
        if alarm and not publisher.refused:
            typer.echo(
                f"publishers are blocked: {alarm}; what was published is confirmed", err=True
            )
    if publisher.returned:
        what = "the message was" if count == 1 else f"{publisher.returned} messages were"
        by = f"exchange '{exchange}' has no binding for key '{key}'"
        why = f"no queue '{key}'" if queue is not None else by
        fail(f"{what} not routed: {why} in vhost '{vhost}'")
    if publisher.refused:
        what = "the message was" if count == 1 else f"{len(publisher.refused)} messages were"
        why = f"publishers are blocked: {alarm}" if alarm else "the queue is full"
        fail(f"{what} refused: {why}", REFUSED)


def get(
    api: Api,
    queue: Queue,
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="Messages at most.")] = 1,
    ack: Annotated[
        bool, typer.Option("--ack/--requeue", help="Take the messages, or leave them there.")
    ] = False,
    as_json: Json = False,
    vhost: Vhost = "/",
) -> None:
    """Print the bodies of the oldest messages of a queue, which stay there without --ack.

    A file or pipe gets one body to the byte. With --count, a line end follows each body. The exit
    status is 1 if the queue is empty.
    """
    shown = 0
    with amqp.opened(api, vhost) as channel:
        for batch in _batches(channel, queue, count):
            for message in batch:
                _print(message, as_json, ends_line=count > 1)
            sys.stdout.flush()
            shown += len(batch)
            if ack:
                channel.client.ack(batch[-1].tag, multiple=True)
                channel.flush()
    if not shown:
        fail(f"queue '{queue}' in vhost '{vhost}' is empty")


def tail(
    api: Api,
    stream: Stream,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            "-f",
            metavar="FROM",
            help="first, last, next, an offset, an age such as 10m or 1h, or a time such as"
            " 2026-11-26T10:00:00.",
        ),
    ] = "next",
    count: Annotated[
        int, typer.Option("--count", "-c", min=0, help="End after so many messages. 0: never.")
    ] = 0,
    as_json: Json = False,
    vhost: Vhost = "/",
) -> None:
    """Print the messages of a stream as they come, a line for each, until Ctrl-C."""
    import pamqp.encode

    arguments = pamqp.encode.field_table({STREAM_OFFSET: _offset(start)})
    if not api.has("streams", vhost, stream):
        fail(_no_such_stream(api, vhost, stream), DATA)
    with contextlib.suppress(KeyboardInterrupt), amqp.opened(api, vhost) as channel:
        channel.client.qos(TAIL_PREFETCH)
        channel.expect(amqp_client.QOS_OK)
        channel.client.consume(stream, "", False, arguments)
        channel.expect(amqp_client.CONSUME_OK)
        shown = 0
        while not count or shown < count:
            event = channel.next_or_none(0)
            if event is None:
                sys.stdout.flush()
                event = channel.next_or_none(None)
            if event == Received(amqp_client.CANCEL):
                sys.stdout.flush()
                fail(f"stream '{stream}' in vhost '{vhost}' is gone")
            if isinstance(event, Message):
                _print(event, as_json, ends_line=True)
                channel.client.ack(event.tag)
                shown += 1
        sys.stdout.flush()


def _no_such_stream(api: Api, vhost: str, name: str) -> str:
    """Return what is wrong with the name of a stream, with the partitions if it has some."""
    text = f"stream '{name}' in vhost '{vhost}' does not exist"
    if not (partitions := partitions_of(api, vhost, name)):
        return text
    text += f"; '{name}' is a super stream with the streams "
    text += ", ".join(f"'{each}'" for each in partitions[:PARTITIONS_NAMED_MAX])
    more = len(partitions) - PARTITIONS_NAMED_MAX
    return text + (f" and {more} more" if more > 0 else "")


def move_messages(
    api: Api,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="The queue to take them from.", autocompletion=complete_queues
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="The queue to move them to.", autocompletion=complete_queues
        ),
    ],
    count: Annotated[
        int, typer.Option("--count", "-c", min=0, help="Messages at most. 0: all that are there.")
    ] = 0,
    vhost: Vhost = "/",
) -> None:
    """Move ready messages from one queue to another, the oldest first.

    A message leaves the first queue when the other queue has confirmed it. If the command is
    interrupted, a message may be in both queues, but never in none. Messages that come to the
    first queue meanwhile are not moved.

    The command stops at a message that it cannot move unchanged to the other queue alone: one with
    a header CC, BCC or x-producer-id, or with the user_id of another user.
    """
    if source == destination:
        fail("from a queue to itself", USAGE)
    thing = f"queue '{destination}' in vhost '{vhost}'"
    other: dict[str, Any] = api.get("queues", vhost, destination, thing=thing)
    if {**other["arguments"], **(other.get("effective_policy_definition") or {})}.get(DEDUPLICATED):
        fail(f"{thing} has {DEDUPLICATED}: it would drop what it has seen before")
    moved, why = 0, ""
    # A refused publish closes the channel of the publisher. What was confirmed before it can be
    # acknowledged even then, because it was fetched by another channel.
    with amqp.opened(api, vhost) as channel, amqp.opened(api, vhost) as publishing:
        publisher, user = Publisher(publishing), publishing.user
        found = api.get("users", user) if api.endpoint.socket else api.get("whoami")
        may_impersonate = "impersonator" in found["tags"]
        with progress("moving", count or None) as advance:
            for batch in _batches(channel, source, count):
                movable: list[Message] = []
                for message in batch:
                    if why := _obstacle(message, user, may_impersonate):
                        break
                    movable.append(message)
                first = publisher.published + 1
                try:
                    for message in movable:
                        publisher.publish("", destination, message.properties, message.body)
                    publisher.finish()
                except BaseException:
                    moved += _ack_stored(channel, movable, publisher, first)
                    channel.close()
                    typer.echo(f"{moved} messages moved")
                    raise
                done = _ack_stored(channel, movable, publisher, first)
                moved += done
                advance(done)
                if publisher.returned:
                    why = f"{thing} is not there any more"
                elif publisher.refused:
                    why = f"{thing} takes no more"
                if why:
                    break
    typer.echo(f"{moved} messages moved")
    if why:
        fail(f"the others stay: {why}")


def _ack_stored(channel: Channel, messages: list[Message], publisher: Publisher, first: int) -> int:
    """Take the messages that the other queue has stored, and return their number.

    Args:
        channel: The channel that has fetched the messages.
        messages: The messages, published in this order. The last ones may not be published.
        publisher: The publisher of the messages.
        first: The tag of the first publish.
    """
    if publisher.returned:
        # A return does not say which: what was routed before went with the queue.
        return 0
    done = [message for tag, message in enumerate(messages, first) if publisher.has_stored(tag)]
    for message in done:
        channel.client.ack(message.tag)
    channel.flush()
    return len(done)


def _obstacle(message: Message, user: str, may_impersonate: bool) -> str:
    """Return why a message cannot be moved unchanged and to one queue alone, or ""."""
    (flags,) = struct.unpack_from(">H", message.properties)
    data = message.properties
    if not flags & USER_ID_FLAG and not any(name.encode() in data for name in UNMOVABLE):
        return ""
    values = _properties(message)
    name = next((name for name in UNMOVABLE if name in (values["headers"] or {})), None)
    if name is not None:
        return f"the next message has the header {name}, {UNMOVABLE[name]}"
    claimed = values["user_id"]
    if claimed and claimed != user and not may_impersonate:
        return f"the next message has the user_id '{claimed}', and this is user '{user}': --user"
    return ""


class Publisher:
    """Publishes with confirms, a bounded number of messages at a time."""

    def __init__(self, channel: Channel) -> None:
        channel.client.select()
        channel.expect(amqp_client.SELECT_OK)
        self.published = 0
        self.returned = 0
        self.refused: set[int] = set()  # The tags of the messages that a queue did not take.
        self._channel = channel
        self._waiting: dict[int, int] = {}  # The bytes of the messages without a confirm, by tag.

    def publish(self, exchange: str, key: str, properties: bytes, body: bytes) -> None:
        """Publish a message, after waiting for the confirms of earlier ones if there are many.

        Ends the command while an alarm blocks publishers.
        """
        while len(self._waiting) >= AT_ONCE_MESSAGES_MAX or (
            self._waiting and sum(self._waiting.values()) + len(body) > AT_ONCE_BYTES_MAX
        ):
            self._hear()
        if alarm := self._channel.client.blocked:
            self.finish()
            fail(
                f"publishers are blocked: {alarm}; {self.published} messages were published, the"
                " others were not",
                REFUSED,
            )
        self._channel.client.publish(exchange, key, properties, body, True)
        self.published += 1
        self._waiting[self.published] = len(body)

    def finish(self) -> None:
        """Wait for the confirms of all messages."""
        while self._waiting:
            self._hear()

    def has_stored(self, tag: int) -> bool:
        """Return whether the broker has confirmed a publish and no queue has refused it."""
        return tag <= self.published and tag not in self._waiting and tag not in self.refused

    def _hear(self) -> None:
        match self._channel.next():
            case Message():
                self.returned += 1
            case Confirmed(tag, multiple, stored):
                tags = [one for one in self._waiting if one <= tag] if multiple else [tag]
                for one in tags:
                    del self._waiting[one]
                if not stored:
                    self.refused.update(tags)


def _batches(channel: Channel, queue: str, count: int) -> Iterator[list[Message]]:
    """Yield messages of a queue, some at a time. The caller settles them.

    A batch has AT_ONCE_BYTES_MAX at the most, and beyond that the messages that were asked for
    before their size was known: one at the beginning and after large ones, and up to
    GETS_AHEAD_MAX after small ones.

    Args:
        channel: The channel.
        queue: The queue.
        count: The messages to fetch at most. 0: those that are ready at the beginning.
    """
    first = channel.get(queue)
    if first is None:
        return
    yield [first]
    left = min(count or first.remaining + 1, first.remaining + 1) - 1
    ahead = 1
    while left > 0:
        batch: list[Message] = []
        size, most, is_empty = 0, min(left, AT_ONCE_MESSAGES_MAX), False
        asked = 0
        while asked < most and size < AT_ONCE_BYTES_MAX and not is_empty:
            ahead = min(ahead, most - asked)
            for _ in range(ahead):
                channel.client.get(queue)
            came = [message for _ in range(ahead) if (message := channel.fetched()) is not None]
            asked += ahead
            is_empty = len(came) < ahead
            size += sum(len(message.body) for message in came)
            batch += came
            ahead = 1 if size >= AT_ONCE_BYTES_MAX else min(2 * ahead, GETS_AHEAD_MAX)
        if batch:
            yield batch
        if is_empty:
            return
        left -= asked


def _print(message: Message, as_json: bool, ends_line: bool) -> None:
    if as_json:
        data = json.dumps(_row(message)).encode()
        ends_line = True
    elif sys.stdout.isatty():
        from shardmq.supervisor.logs import escaped

        text = message.body.decode("utf-8", "backslashreplace")
        data = "".join(c if c in "\n\t" else escaped(c) for c in text).encode()
        ends_line = True
    else:
        data = message.body
    sys.stdout.buffer.write(data + b"\n" if ends_line else data)


def _row(message: Message) -> dict[str, Any]:
    """Return a message as the HTTP API shows it."""
    values = _properties(message)
    try:
        payload, encoding = message.body.decode(), "string"
    except UnicodeDecodeError:
        payload, encoding = base64.b64encode(message.body).decode(), "base64"
    return {
        "payload_bytes": len(message.body),
        "redelivered": message.redelivered,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "message_count": message.remaining,
        # pamqp shows an absent cluster_id as an empty text.
        "properties": {n: _shown(value) for n, value in values.items() if value not in (None, "")},
        "payload": payload,
        "payload_encoding": encoding,
    }


def _properties(message: Message) -> dict[str, Any]:
    """Return the properties of a message by their names, absent ones as None.

    Properties that pamqp cannot read end the command.
    """
    import pamqp.commands
    import pamqp.decode

    decoded = pamqp.commands.Basic.Properties()
    (flags,) = struct.unpack_from(">H", message.properties)
    # pamqp fails at times after the year 9999, and takes large ones for milliseconds.
    methods, table = pamqp.decode.METHODS, pamqp.decode.TABLE_MAPPING
    read_time = methods["timestamp"]
    methods["timestamp"] = table[b"T"] = _raw_time
    try:
        decoded.unmarshal(flags, message.properties[2:])
    except ValueError as error:
        fail(f"the properties of a message are not readable: {error}", DATA)
    finally:
        methods["timestamp"] = table[b"T"] = read_time
    return {name: getattr(decoded, OTHER_NAMES.get(name, name)) for name in PROPERTIES}


def _raw_time(data: bytes) -> tuple[int, int]:
    """Return the bytes and the value of a timestamp, as pamqp's readers do."""
    return 8, int.from_bytes(data[:8], "big")


def _shown(value: Any) -> Any:
    """Return a value of a property in a form that JSON can hold."""
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return float(value) if isinstance(value, decimal.Decimal) else value


def _standard_input() -> bytes:
    if sys.stdin.isatty():
        typer.echo("the body, until Ctrl-D:", err=True)
    return sys.stdin.buffer.read()


def _given_properties(
    properties: str, headers: list[str] | None, persistent: bool
) -> dict[str, Any]:
    given: dict[str, Any] = json_argument(properties, dict)
    if unknown := given.keys() - PROPERTIES:
        known = ", ".join(PROPERTIES)
        fail(f"--properties: no property {', '.join(sorted(unknown))}; known are {known}", USAGE)
    if persistent:
        given["delivery_mode"] = 2
    if headers:
        if not isinstance(given.get("headers", {}), dict):
            fail("--properties: headers is not an object", USAGE)
        given["headers"] = {**given.get("headers", {}), **pairs(headers)}
    return given


def encode_properties(given: dict[str, Any]) -> bytes:
    """Return properties as they stand in a content header. A wrong value ends the command."""
    import pamqp.commands

    values = {OTHER_NAMES.get(name, name): value for name, value in given.items()}
    try:
        if "timestamp" in values:
            values["timestamp"] = datetime.datetime.fromtimestamp(values["timestamp"], datetime.UTC)
        return pamqp.commands.Basic.Properties(**values).marshal()
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        fail(f"--properties: {error}", USAGE)


def check_name(name: str) -> None:
    """End the command if a name is none that AMQP can send."""
    try:
        if len(name.encode()) > SHORT_BYTES_MAX:
            fail(f"longer than {SHORT_BYTES_MAX} bytes: {name[:40]}...", USAGE)
    except UnicodeEncodeError:
        fail(f"not UTF-8: {name!a}", USAGE)


def _offset(text: str) -> int | str | datetime.datetime:
    """Return a value of x-stream-offset. A wrong text ends the command."""
    from shardmq.supervisor.cli.streams import AGE

    if text.isascii() and text.isdecimal():
        return int(text)
    if text in OFFSETS or AGE.fullmatch(text):
        return text
    try:
        return datetime.datetime.fromisoformat(text).astimezone()
    except ValueError:
        fail(
            f"--from: {', '.join(OFFSETS)}, an offset, an age such as 10m, or a time such as"
            f" 2026-11-26T10:00:00, not {text}",
            USAGE,
        )
