"""POST .../publish, .../get, .../stream, .../move: messages by HTTP, through a front door.

They are for trying and repairing things.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec

from shardmq.broker.amqp.properties import PROPERTIES
from shardmq.broker.controller.management.api_error import (
    ApiError,
    bad_request,
    not_authorised,
    not_found,
)
from shardmq.broker.controller.management.call import Call, Route, with_keys
from shardmq.broker.controller.management.numbers import NUMBER_MAX, number
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.management.responses.schemas import INTEGER, STRING, object_of
from shardmq.broker.controller.peers import front_door
from shardmq.broker.controller.peers.front_door import (
    MOVE_MESSAGES_MAX,
    FetchedMessage,
    NotMoved,
    Refused,
    Rejected,
    Session,
    Unavailable,
)
from shardmq.broker.controller.streams.stream_ranges import is_stream
from shardmq.broker.model import tables
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.shared.deduplication import WANTED as DEDUPLICATED

GET_MESSAGES_MAX = 10_000  # in one response
SHORT_BYTES_MAX = 255
OFFSET_MAX = (1 << 63) - 1
NUMBERS_MAX = {"B": 0xFF, "T": 0xFFFFFFFFFFFFFFFF}
# For each mode: requeue, reject.
ACK_MODES = {
    "ack_requeue_true": (True, False),
    "ack_requeue_false": (False, False),
    "reject_requeue_true": (True, True),
    "reject_requeue_false": (False, True),
}
# For AMQP reply codes: the HTTP status and error.
REFUSED_STATUS = {404: (404, "not_found"), 403: (401, "not_authorised")}


async def publish(call: Call) -> dict[str, Any]:
    """Publish a message to an exchange, and say whether it was routed."""
    vhost, exchange = _vhost(call), exchange_name(call.part("exchange"))
    body = with_keys(await call.json(), "routing_key", "properties", "payload", "payload_encoding")
    key, payload = body["routing_key"], payload_of(body["payload"], body["payload_encoding"])
    if not isinstance(key, str) or len(key.encode()) > SHORT_BYTES_MAX:
        raise bad_request(f"routing_key: a string of at most {SHORT_BYTES_MAX} bytes")
    properties = properties_of(body["properties"])
    try:
        async with session(call, vhost, publishes=True) as opened:
            return {"routed": await opened.publish(exchange, key, properties, payload)}
    except Refused as refused:
        if not refused.opened:
            raise not_authorised(refused.text) from None
        raise bad_request(f"{refused.code} {refused.text}") from None
    except Rejected:
        raise bad_request("rejected Unable to publish message. Check queue limits.") from None
    except Unavailable as error:
        raise ApiError(503, "unavailable", str(error)) from None


async def get(call: Call) -> list[dict[str, Any]]:
    """Get messages of a queue; `ackmode` says whether they stay in the queue."""
    vhost, queue = _vhost(call), call.part("queue")
    body = with_keys(await call.json(), "ackmode", "count", "encoding")
    mode = ACK_MODES.get(str(body["ackmode"]))
    if mode is None:
        raise bad_request(f"ackmode: one of {', '.join(ACK_MODES)}")
    if body["encoding"] not in ("auto", "base64"):
        raise bad_request("Unsupported encoding. Please use auto or base64.")
    count = _number(body, "count")
    truncate = _number(body, "truncate") if "truncate" in body else None
    if count < 0:  # all messages
        count = GET_MESSAGES_MAX
    async with _session_or_error(call, vhost) as opened:
        got = await opened.get(queue, min(count, GET_MESSAGES_MAX), *mode)
    return [row(message, body["encoding"], truncate) for message in got]


class ReadBody(msgspec.Struct):
    """The range of messages of a stream to read.

    `offset`: the offset of the first message, or as in x-stream-offset: first, last, next, or an
    age such as 1h. `truncate`: the number of bytes of each payload to show at the most.
    """

    offset: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] | str = "first"
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    encoding: Literal["auto", "base64"] = "auto"
    truncate: Annotated[int, msgspec.Meta(ge=0)] | None = None


async def read(call: Call) -> list[dict[str, Any]]:
    """Read messages of a stream, which stay there."""
    vhost, queue = _vhost(call), call.part("queue")
    body = await call.body(ReadBody)
    found = call.catalog.vhost(vhost)
    stream = None if found is None else found.queues.get(queue)
    if stream is None or is_hidden_queue(queue):
        raise not_found(f"no queue '{queue}' in vhost '{vhost}'")
    if not is_stream(stream):
        raise bad_request(
            f"queue '{queue}' in vhost '{vhost}' is no stream; .../get takes messages of it"
        )
    offset = body.offset
    if isinstance(offset, str) and offset.isdecimal():
        offset = number("offset", offset, most=OFFSET_MAX)
    ranges = await call.context.streams.of(call.context.config, [stream])
    async with _session_or_error(call, vhost) as opened:
        count = min(body.count, GET_MESSAGES_MAX)
        begin, end = ranges.get(stream.id, (0, 0))
        got = await opened.read(queue, count, offset, begin, end)
    return [row(message, body.encoding, body.truncate) for message in got]


class MoveBody(msgspec.Struct, forbid_unknown_fields=True):
    """The queue of the same vhost to move messages to, and the number of messages.

    Unknown fields are refused: a misspelt `count` must not move all messages.
    """

    destination: str
    count: Annotated[int, msgspec.Meta(ge=1)] = MOVE_MESSAGES_MAX


async def move(call: Call) -> dict[str, int]:
    """Move ready messages to another queue, the oldest first.

    Each message is removed when the other queue has confirmed it.
    """
    vhost, queue = _vhost(call), call.part("queue")
    body = await call.body(MoveBody)
    found = call.catalog.vhost(vhost)
    other = None if found is None else found.queues.get(body.destination)
    if other is None or is_hidden_queue(other.name):
        raise not_found(f"no queue '{body.destination}' in vhost '{vhost}'")
    if body.destination == queue:
        raise bad_request("destination: the queue itself")
    if call.catalog.queue_arguments(other).get(DEDUPLICATED) is True:
        raise bad_request(
            f"destination: a queue with {DEDUPLICATED} would drop what it has seen before"
        )
    count, now = min(body.count, MOVE_MESSAGES_MAX), asyncio.get_running_loop().time
    try:
        async with _session_or_error(call, vhost, publishes=True) as opened:
            moved, left = await opened.move(queue, body.destination, count, now)
    except NotMoved as error:
        raise bad_request(f"{error.why}; {error.moved} messages were moved before") from None
    return {"moved": moved, "left": left}


def row(got: FetchedMessage, encoding: str, truncate: int | None = None) -> dict[str, Any]:
    payload, text = got.body if truncate is None else got.body[:truncate], None
    if encoding != "base64":
        with contextlib.suppress(UnicodeDecodeError):
            text = payload.decode()
    properties = {name: getattr(got.properties, name) for name, _ in PROPERTIES}
    return {
        "payload_bytes": len(got.body),
        "redelivered": got.redelivered,
        "exchange": got.exchange,
        "routing_key": got.routing_key,
        "message_count": got.remaining,
        # RabbitMQ shows none as an empty list.
        "properties": {k: _shown(v) for k, v in properties.items() if v is not None} or [],
        "payload": base64.b64encode(payload).decode() if text is None else text,
        "payload_encoding": "base64" if text is None else "string",
    }


def payload_of(payload: Any, encoding: Any) -> bytes:
    if not isinstance(payload, str):
        raise bad_request("payload_not_string")
    if encoding == "string":
        return payload.encode()
    if encoding != "base64":
        raise bad_request(f"unsupported_encoding: {encoding}")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:  # binascii.Error, or letters beyond ASCII
        raise bad_request(f"not_base64: {payload[:100]}") from None


def properties_of(given: Any) -> dict[str, Any]:
    """Return the properties of AMQP, or raise 400 for a wrong type.

    As in RabbitMQ unknown properties are dropped.
    """
    if given == []:
        return {}
    if not isinstance(given, dict):
        raise bad_request("properties: not an object")
    found = {}
    for name, kind in PROPERTIES:
        if name not in given:
            continue
        value = found[name] = given[name]
        if kind == "s" and (not isinstance(value, str) or len(value.encode()) > SHORT_BYTES_MAX):
            raise bad_request(f"{name}: not a string of at most {SHORT_BYTES_MAX} bytes")
        if kind == "F" and not isinstance(value, dict):
            raise bad_request(f"{name}: not an object")
        if kind in NUMBERS_MAX and not (type(value) is int and 0 <= value <= NUMBERS_MAX[kind]):
            raise bad_request(f"{name}: not a number from 0 to {NUMBERS_MAX[kind]}")
    if found.get("delivery_mode", 1) not in (1, 2):
        raise bad_request("delivery_mode: 1 or, for persistent messages, 2")
    if fault := tables.fault_in(found.get("headers") or {}):
        raise bad_request(f"headers: {fault}")
    return found


def _shown(value: Any) -> Any:
    """Return a value of a header so that JSON can hold it."""
    if isinstance(value, dict):
        return {key: _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, datetime.datetime):
        return int(value.timestamp())
    return value


def _number(body: dict[str, Any], name: str) -> int:
    value = body[name]
    least = 0 if name == "truncate" else -NUMBER_MAX
    if isinstance(value, str):
        return number(name, value, least)
    if type(value) is not int or not least <= value <= NUMBER_MAX:
        raise bad_request(f"{name}: not a number from {least} to {NUMBER_MAX}")
    return value


def _vhost(call: Call) -> str:
    """Return the vhost in the path. As in RabbitMQ users cannot tell one they may not enter."""
    vhost = call.part("vhost")
    if call.catalog.vhost(vhost) is None or not call.catalog.permissions.may_enter(
        call.user.name, vhost
    ):
        raise not_authorised("Access refused.")
    return vhost


def session(
    call: Call, vhost: str, publishes: bool = False
) -> AbstractAsyncContextManager[Session]:
    """Open a session with a front door as the user that calls.

    A session that `publishes` is refused while an alarm blocks publishers: the front door would
    take its first message and read nothing more.

    Raises Refused, Rejected and Unavailable, as do the methods of the session.
    """
    alarms = {shard.alarm for shard in call.context.shards.shards if shard.ready}
    if publishes and (blocking := sorted((alarms | {call.context.memory.alarm}) - {""})):
        raise Unavailable(f"publishers are blocked: {' & '.join(blocking)}")
    doors = call.context.door_paths()
    if not doors:
        raise Unavailable("no front door is there")
    return front_door.opened(doors[0], call.user.name, vhost)


@asynccontextmanager
async def _session_or_error(
    call: Call, vhost: str, publishes: bool = False
) -> AsyncIterator[Session]:
    """Do the same as `session`, and turn what the front door refuses into ApiError."""
    try:
        async with session(call, vhost, publishes) as opened:
            yield opened
    except Refused as refused:
        if not refused.opened:  # the connection itself was refused
            raise not_authorised(refused.text) from None
        status = REFUSED_STATUS.get(refused.code, (400, "bad_request"))
        raise ApiError(*status, refused.text) from None
    except Unavailable as error:
        raise ApiError(503, "unavailable", str(error)) from None


PUBLISH_BODY = object_of(
    routing_key=STRING,
    properties={"type": "object"},
    payload=STRING,
    payload_encoding={"enum": ["string", "base64"]},
)
GET_BODY = object_of(
    {"truncate": {"type": "integer", "minimum": 0}},
    ackmode={"enum": [*ACK_MODES]},
    count=INTEGER,
    encoding={"enum": ["auto", "base64"]},
)

ROUTES = [
    Route(
        "POST",
        "/api/exchanges/{vhost}/{exchange}/publish",
        publish,
        body=PUBLISH_BODY,
        shows="Routed",
    ),
    Route(
        "POST", "/api/queues/{vhost}/{queue}/get", get, query=(), body=GET_BODY, shows=["Message"]
    ),
    Route("POST", "/api/queues/{vhost}/{queue}/stream", read, body=ReadBody, shows=["Message"]),
    Route("POST", "/api/queues/{vhost}/{queue}/move", move, query=(), body=MoveBody, shows="Moved"),
]
