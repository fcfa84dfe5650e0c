"""Messages between the controller and the process of bridges.

The controller connects to the socket `SOCKET_NAME` in the runtime directory, which starts the
process, and sends one `Run` after each change: all that is to run, and nothing else. It sends one
`Pull` after each change of which links of queues are to take messages, and one after each `Run`.
It sends one `Bindings` after each change of the bindings of a federated exchange. The process
answers with one `Told` after each change of a state. All are lines of JSON. When the connection
ends the process goes on for a while, because a controller that starts anew connects again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from shardmq.broker.model.federation import ExchangeLink, QueueLink
from shardmq.broker.model.shovels import SHOVEL, Shovel
from shardmq.broker.model.upstream_bindings import Binding

SOCKET_NAME: Final = "bridges.sock"
LINE_BYTES_MAX: Final = 256 << 20

# States of a bridge, with LavinMQ's words where RabbitMQ has none.
STARTING: Final = "starting"
RUNNING: Final = "running"
TERMINATED: Final = "terminated"
PAUSED: Final = "paused"


Key = tuple[str, ...]  # of a bridge: its kind, its vhost, and what tells it from others


QUEUE_LINK: Final = "queue-link"
EXCHANGE_LINK: Final = "exchange-link"

Bridge = Shovel | QueueLink | ExchangeLink


def key_of(bridge: Bridge) -> Key:
    """Return what a bridge is known by, whatever changes of it."""
    if isinstance(bridge, ExchangeLink):
        ends = bridge.exchange, bridge.source.upstream, bridge.upstream_exchange
        return EXCHANGE_LINK, bridge.vhost, *ends
    if isinstance(bridge, QueueLink):
        return QUEUE_LINK, bridge.vhost, bridge.queue, bridge.source.upstream, bridge.upstream_queue
    return SHOVEL, bridge.vhost, bridge.name


class Order(msgspec.Struct, frozen=True):
    """A bridge that is to run.

    life: another number for each restart that a user asks for, and each change of the parameter.
    """

    bridge: Bridge
    life: int


class Run(msgspec.Struct, frozen=True, tag="run"):
    """All bridges that are to run. `cluster` is the name that forwarded messages show."""

    bridges: list[Order]
    cluster: str = ""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """The links of queues that are to take messages now: these, and no others.

    Their queues are empty and have consumers at this broker.
    """

    keys: list[Key]


class Bindings(msgspec.Struct, frozen=True, tag="bindings"):
    """The bindings of a federated exchange, which its links make upstream.

    bindings: None if there are too many of them.
    """

    vhost: str
    exchange: str
    bindings: list[Binding] | None


class BridgeState(msgspec.Struct, kw_only=True):
    """The state of a bridge.

    since: the time of the last change of the state, in seconds of Unix time.
    error: why it does not run, or why it last did not.
    retry_in_s: so long after `since` the next try begins; 0 if none waits.
    moved: messages that the destination has taken since the process started.
    refused: messages that the destination has refused, each time that it has.
    dropped: messages that have come too far, and were taken from the source without a publish.
    pending: messages taken from the source and not yet settled there.
    is_done: it has moved what `src-delete-after` asks for, and its parameter is to be deleted.
    pulls: of a link of queues, it has a consumer at the upstream.
    local_connection: of a link, the name of its connection to this broker in listings.
    """

    key: Key
    life: int
    state: str = STARTING
    since: float = 0.0
    error: str = ""
    retry_in_s: float = 0.0
    src_uri: str = ""
    dest_uri: str = ""
    src_queue: str = ""
    moved: int = 0
    moved_bytes: int = 0
    refused: int = 0
    dropped: int = 0
    pending: int = 0
    failures: int = 0
    blocked: str = ""
    is_done: bool = False
    pulls: bool = False
    local_connection: str = ""


class Told(msgspec.Struct, frozen=True):
    """The states of all bridges that the process runs."""

    states: list[BridgeState]


def line(message: Run | Pull | Bindings | Told) -> bytes:
    return msgspec.json.encode(message) + b"\n"
