"""What front doors and the controller say to each other: every message as data.

A unix stream at RUNTIME_DIR/control.sock; each message is a u32 length (little endian, at most CONTROL_BYTES_MAX)
and msgpack of one struct below. The stream's end is the news that the other process is gone: the controller deletes the
exclusive queues of a front door's connections; a front door keeps serving from its copy and connects again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.broker.model.changes import AnyChange

CONTROL_BYTES_MAX = 256 << 20


class ControlMessage(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of all messages."""


# -- front door to controller -------------------------------------------------------------------------


class DoorHello(ControlMessage, tag="door-hello", frozen=True):
    """First on the stream. `version`: of the catalog the door already holds in `boot` (0: nothing). Answered by a
    Snapshot or, where the controller can, by the Changes since."""

    door: int
    incarnation: int
    pid: int
    boot: str
    version: int
    connections: list[ConnectionInfo] = []


class ConnectionInfo(msgspec.Struct, array_like=True, frozen=True):
    """One client. `owner` is the door's name for it: "door.incarnation.connection"."""

    owner: str
    name: str  # "peer:port -> host:port"
    user: str
    vhost: str
    peer_host: str
    peer_port: int
    host: str
    port: int
    protocol: str
    auth_mechanism: str
    tls: bool
    frame_max: int
    channel_max: int
    heartbeat_s: int
    connected_at_ms: int
    client_properties: dict[str, Any]
    tls_version: str = ""  # tlsv1.3
    tls_cipher: str = ""
    peer_cert_subject: str = ""
    peer_cert_issuer: str = ""
    channels: int = 0  # as of when it last mattered to a limit


class ConnectionUp(ControlMessage, tag="up", frozen=True):
    """New, or one that has another number of channels now."""

    info: ConnectionInfo


class ConnectionDown(ControlMessage, tag="down", frozen=True):
    """Its exclusive queues are deleted."""

    owner: str


class Applied(ControlMessage, tag="applied", frozen=True):
    """All changes up to `version` are in force at this door."""

    version: int


class Ask(ControlMessage, tag="ask", frozen=True):
    """A request to change what exists. Answered by Answer(id) once every door has applied the outcome.

    The door has checked the user's rights and the names' form; the controller checks existence, equivalence,
    exclusivity, use and limits.
    """

    id: int
    what: AnyRequest
    owner: str  # the connection that asks
    user: str


class ConsumeTerms(msgspec.Struct, array_like=True, frozen=True):
    """What a consumer of a virtual queue asks for (controller/groups/groups.py says what it means)."""

    group: str
    assignment: str
    exclusive: bool
    priority: int
    affinity: bool
    owner: str  # connection, channel and tag: for listings
    channel: int
    tag: str


class Fenced(ControlMessage, tag="fenced", frozen=True):
    """Answers Fence: all that this door routed by what was in force before has been taken in by the shards."""

    number: int


class DoorReport(ControlMessage, tag="report", frozen=True):
    """Answers Query. connections: per connection {owner, channels, send_oct, recv_oct, state, ...};
    channels: per channel {owner, number, prefetch_count, unacked, confirm, ...}; counters: totals of this
    door, "connections" and "channels" among them."""

    query: int
    connections: list[dict[str, Any]]
    channels: list[dict[str, Any]]
    counters: dict[str, float]
    unacked: list[
        dict[str, Any]
    ] = []  # {owner, channel, consumer_tag, delivery_tag, unacked_for (ms)}
    exchanges: list[
        tuple[str, str, int, int]
    ] = []  # vhost, name, messages published to it, messages to queues


class SeatName(msgspec.Struct, array_like=True, frozen=True):
    """A place at a shard queue, by its id; all but the first (0) are for consumers with key affinity."""

    queue: int
    place: int


class ConsumerHere(msgspec.Struct, array_like=True, frozen=True):
    """A consumer of a virtual queue as its front door sees it. `left`: its client cancelled it, and it holds seats."""

    number: int
    vhost: str
    exchange: str
    terms: ConsumeTerms
    left: bool
    seats: list[SeatName]


class ConsumersHere(ControlMessage, tag="consumers", frozen=True):
    """First after each Snapshot or Changes that answer a hello: all consumers of virtual queues at this door."""

    consumers: list[ConsumerHere]


class ConsumerLeave(ControlMessage, tag="consumer-", frozen=True):
    """Cancelled, or its channel is gone. Each seat it still has follows with SeatGivenUp."""

    number: int


class SeatGivenUp(ControlMessage, tag="seat-", frozen=True):
    """The consumer is stopped there, and what it held is settled or requeued; also when the queue went."""

    number: int
    seat: SeatName


class SeatPassed(ControlMessage, tag="seat>", frozen=True):
    """The consumer has settled all below `offset` there, which is not below the mark it was given."""

    number: int
    seat: SeatName
    offset: int


ConsumerNews = ConsumersHere | ConsumerLeave | SeatGivenUp | SeatPassed


# -- requests ----------------------------------------------------------------------------------------------


class Request(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of what can be asked; the fields are those of the AMQP methods. `arguments` are decoded field tables:
    bool, int, float, str, bytes, None, datetime, Decimal as str, list, dict."""

    vhost: str


class ExchangeDeclare(Request, tag="exchange.declare", frozen=True):
    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: dict[str, Any]


class ExchangeRemove(Request, tag="exchange.delete", frozen=True):
    name: str
    if_unused: bool


class QueueDeclare(Request, tag="queue.declare", frozen=True):
    """Answer.result: {"name": str, "messages": int, "consumers": int}; name "" asks for amq.gen-..."""

    name: str
    durable: bool
    auto_delete: bool
    exclusive: bool
    arguments: dict[str, Any]


class QueueRemove(Request, tag="queue.delete", frozen=True):
    """Answer.result: {"messages": int}. A missing queue is no error."""

    name: str
    if_unused: bool
    if_empty: bool


class Bind(Request, tag="bind", frozen=True):
    source: str
    kind: str  # "queue" or "exchange"
    destination: str
    routing_key: str
    arguments: dict[str, Any]


class BindMany(Request, tag="bind.many", frozen=True):
    """Queues, without arguments, in this order: (source, queue, routing key) of each. The first that is refused ends
    it; what was done before stays. Answer.result, if `code` is not 0: {"done": how many were}."""

    binds: list[tuple[str, str, str]]


class Unbind(Request, tag="unbind", frozen=True):
    source: str
    kind: str
    destination: str
    routing_key: str
    arguments: dict[str, Any]


class ConnectionOpen(Request, tag="connection.open", frozen=True):
    """May this connection, of which a ConnectionUp came before, be open beside the others of its vhost and user? Asked
    only where one of them has a limit; whoever is up first counts first."""

    user: str


class ConsumerJoin(Request, tag="consumer.join", frozen=True):
    """basic.consume on a virtual queue, by consumer `number` of the door. What it gets follows in SeatOrders."""

    exchange: str
    number: int
    terms: ConsumeTerms


class VirtualLook(Request, tag="virtual.look", frozen=True):
    """Answer.result: {"consumers": of the virtual queue, "seats": those they have at its shard queues}."""

    exchange: str


class ChannelOpen(Request, tag="channel.open", frozen=True):
    """May this connection have so many channels, beside all others of its user and of the broker? Asked only where
    there is a limit. Whoever is refused loses the connection: its channels count no more from then on."""

    user: str
    channels: int


class ChannelClose(Request, tag="channel.close", frozen=True):
    """The connection has but so many channels left. Asked, not told, where there is a limit: who has seen its
    channel.close-ok may open another at any front door. Never refused."""

    channels: int


AnyRequest = (
    ExchangeDeclare | ExchangeRemove | QueueDeclare | QueueRemove | Bind | BindMany | Unbind | ConnectionOpen
    | ChannelOpen | ChannelClose | ConsumerJoin | VirtualLook
)  # fmt: skip


def things_asked(request: Any) -> int:
    """For the bounds on requests: what many are asked with at once counts as many."""
    return len(request.binds) if type(request) is BindMany else 1


# -- controller to front door ---------------------------------------------------------------------------


class SnapshotPart(ControlMessage, tag="snapshot-part", frozen=True):
    """The first changes of the Snapshot that follows, when it is long: what is read at once is garbage at once."""

    changes: list[AnyChange]


class Snapshot(ControlMessage, tag="snapshot", frozen=True):
    """The whole catalog as the changes that make it, in an order that can be applied to an empty one."""

    boot: str  # names one life of the broker: versions of another boot mean nothing
    version: int
    changes: list[AnyChange]


class Changes(ControlMessage, tag="changes", frozen=True):
    """`version` is the catalog's after all of them. `waited`: somebody waits for Applied; else it may come later."""

    version: int
    changes: list[AnyChange]
    waited: bool = True


class Answer(ControlMessage, tag="answer", frozen=True):
    """`code` 0 means done; else an AMQP reply code with RabbitMQ's text without the "NAME - " in front."""

    id: int
    code: int = 0
    text: str = ""
    result: dict[str, Any] = {}


class CloseConnection(ControlMessage, tag="close", frozen=True):
    owner: str
    code: int
    text: str


class CancelConsumer(ControlMessage, tag="cancel-consumer", frozen=True):
    """An operator wants it gone: its client is told, as when its queue goes. One that is gone already is no error."""

    owner: str
    channel: int
    consumer_tag: str


class SeatOrder(msgspec.Struct, array_like=True, frozen=True):
    """`kind`: "give" a seat to consumer `number`, "take" it back (answered by SeatGivenUp), "bound" its reading there,
    or "close": the virtual queue is no more, which the client is told.

    Of streams, with "give" and "bound": it gets nothing from offset `stop` on, and SeatPassed is wanted when all below
    `mark` is settled. With "give", `fresh`: the shard came when its group was there already, and is read from its
    beginning, wherever the consumer began elsewhere."""

    kind: str
    number: int
    seat: SeatName
    stop: int | None = None
    mark: int | None = None
    fresh: bool = False


class SeatOrders(ControlMessage, tag="seats", frozen=True):
    orders: list[SeatOrder]


class Fence(ControlMessage, tag="fence", frozen=True):
    """Answered by Fenced, when every shard is there and has taken in what this door had routed before."""

    number: int


class Alarmed(ControlMessage, tag="alarmed", frozen=True):
    """Publishers are to be held back for this reason, whatever the shards say; "", or a Snapshot: that is over."""

    reason: str


class Outlived(ControlMessage, tag="outlived", frozen=True):
    """The only answer to a DoorHello of an incarnation that was taken for gone: shards have put back in order what it
    held, and hear it no more. It is to end; the next one is heard."""


class Query(ControlMessage, tag="query", frozen=True):
    """Answered by DoorReport. `totals_only`: with nothing of single connections and channels, of which there may be
    thousands. `unacked_of`: a queue's id, with nothing but its deliveries that wait for their ack."""

    query: int
    totals_only: bool = False
    unacked_of: int = 0


AnyControl = (
    DoorHello | ConnectionUp | ConnectionDown | Applied | Ask | DoorReport
    | SnapshotPart | Snapshot | Changes | Answer | CloseConnection | CancelConsumer | Alarmed | Outlived | Query
    | ConsumersHere | ConsumerLeave | SeatGivenUp | SeatPassed | SeatOrders | Fence | Fenced
)  # fmt: skip
