"""/api/stream/super-streams: make a super stream as RabbitMQ does.

A super stream is a direct exchange with the argument `x-super-stream: true`. Each of its partitions
is a stream that is bound with a key of its own. Clients choose the key of each message.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import (
    NAME_CHARS_SHOWN,
    Arguments,
    Call,
    Route,
    table_of,
)
from shardmq.broker.controller.management.numbers import number
from shardmq.broker.controller.requests import SuperStreamDeclare

PARTITIONS_MAX: Final = 1_000
# The arguments of a partition by their names in a call. RabbitMQ ignores all others.
ARGUMENTS: Final = (
    "max-length-bytes", "max-age", "stream-max-segment-size-bytes", "initial-cluster-size",
    "queue-leader-locator", "stream-filter-size-bytes",
)  # fmt: skip
NUMBERS: Final = frozenset(name for name in ARGUMENTS if "size" in name or "length" in name)


class SuperStreamBody(msgspec.Struct, rename="kebab"):
    """`binding_keys`: keys with commas between. `node` has no effect: there is one."""

    partitions: int | str | None = None
    binding_keys: str | None = None
    arguments: Arguments = {}
    node: str | None = None


async def put(call: Call) -> None:
    """Make an exchange and its streams: NAME-0 to NAME-(N-1) for N partitions, or NAME-KEY.

    The body says how many `partitions` or which `binding-keys`, and `arguments` such as `max-age`.
    All of them are made or none: one request to the authority carries the whole set. If the
    exchange or one of the streams exists, the call is refused with 400, as in RabbitMQ.
    """
    vhost, name = call.vhost_to_change(), call.part("name")
    body = await call.body(SuperStreamBody)
    arguments = _arguments(table_of(body.arguments))
    asked = SuperStreamDeclare(vhost.name, name, _keys(body), arguments)
    exchange, streams, bindings = asked.parts()
    for part in (exchange, *streams, *bindings):
        call.must(part)
    await call.ask_without_rights(asked)


def _keys(body: SuperStreamBody) -> list[str]:
    """Return the binding keys of the partitions, in order, or raise 400 in RabbitMQ's words."""
    if body.binding_keys is not None and body.partitions is not None:
        raise bad_request("Specify partitions or binding keys, not both")
    if body.partitions is not None:
        return [*map(str, range(number("partitions", str(body.partitions), 1, PARTITIONS_MAX)))]
    if body.binding_keys is None:
        raise bad_request("Must specify partitions or binding keys")
    keys = [key.strip() for key in body.binding_keys.split(",") if key.strip()]
    if not 0 < len(keys) <= PARTITIONS_MAX:
        raise bad_request(f"binding-keys: not from 1 to {PARTITIONS_MAX} keys")
    if len({*keys}) < len(keys):
        raise bad_request("binding-keys: a key is there twice")
    return keys


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of each stream. Names may begin with `x-`, as queues have them."""
    arguments: dict[str, Any] = {"x-queue-type": "stream"}
    for name, value in given.items():
        known = name.removeprefix("x-")
        if known not in ARGUMENTS:
            all_known = ", ".join(ARGUMENTS)
            raise bad_request(
                f"arguments: there is no {name[:NAME_CHARS_SHOWN]}; known are {all_known}"
            )
        is_digits = known in NUMBERS and isinstance(value, str)
        arguments[f"x-{known}"] = number(known, value) if is_digits else value
    return arguments


ROUTES = [
    Route("PUT", "/api/stream/super-streams/{vhost}/{name}", put, body=SuperStreamBody),
]
