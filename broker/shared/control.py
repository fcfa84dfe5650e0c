"""The messages between front doors and the controller.

They travel on a unix stream at RUNTIME_DIR/control.sock. Each is a u32 length (little endian, at
most CONTROL_BYTES_MAX) and msgpack of one struct below. The end of the stream says that the other
process is gone: the controller deletes the exclusive queues of a front door's connections; a front
door keeps serving from its copy and connects again.

These messages have the WIRE_VERSION of shardd/wire/messages.py: a change that old processes misread
needs a new one. The first message of a front door says its version. A controller of another version
answers with OtherVersion and ends the stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.broker.model.changes import AnyChange
from shardmq.cluster.records import DOORS_PER_NODE

CONTROL_BYTES_MAX = 256 << 20
# The protocol of a connection, in listings. That of bridges of this broker is RabbitMQ's name of
# connections from within the broker.
PROTOCOL = "AMQP 0-9-1"
DIRECT_PROTOCOL = "Direct 0-9-1"


class ControlMessage(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of all messages."""


# -- front door to controller ----------------------------------------------------------------------


class DoorHello(ControlMessage, tag="door-hello", frozen=True):
    """First on the stream.

    All wire versions share the tag and the fields up to `pid`. The front door speaks
    `wire_version`, and understands all from `wire_least` on; 0 says that it understands no other.
    `version` is that of the catalog that the door already holds in `boot` (0: nothing). Answered by
    a Snapshot or, where the controller can, by the Changes since that version.
    """

    wire_version: int
    door: int
    incarnation: int
    pid: int
    boot: str
    version: int
    connections: list[ConnectionInfo] = []
    wire_least: int = 0


class ConnectionInfo(msgspec.Struct, array_like=True, frozen=True):
    """A client's connection, as front doors report it to the controller.

    `owner` is the door's name for it: "door.incarnation.connection". `name` is "peer:port ->
    host:port". `tls_version` is written as in "tlsv1.3". `channels` is their number when it last
    mattered to a limit.
    """

    owner: str
    name: str
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
    tls_version: str = ""
    tls_cipher: str = ""
    peer_cert_subject: str = ""
    peer_cert_issuer: str = ""
    channels: int = 0


class ConnectionUp(ControlMessage, tag="up", frozen=True):
    """A connection is new or has another number of channels now."""

    info: ConnectionInfo


class ConnectionDown(ControlMessage, tag="down", frozen=True):
    """A connection is gone; its exclusive queues are deleted."""

    owner: str


class ConnectionsPassed(ControlMessage, tag="passed", frozen=True):
    """So many connections came and went before there was anything else to say about them."""

    count: int


class Applied(ControlMessage, tag="applied", frozen=True):
    """All changes up to `version` are in force at this door."""

    version: int


class Ask(ControlMessage, tag="ask", frozen=True):
    """A request to change what exists.

    Answered by Answer(id) once every door has applied the outcome. The door has checked the user's
    rights and the form of names; the controller checks existence, equivalence, exclusivity, use and
    limits.
    """

    id: int
    what: AnyRequest
    owner: str  # the connection that asks
    user: str


class ConsumeTerms(msgspec.Struct, array_like=True, frozen=True):
    """The wishes of a consumer of a virtual queue, as controller/groups/groups.py explains them.

    `owner`, `channel` and `tag` are for listings.
    """

    group: str = ""
    assignment: str = "group"
    exclusive: bool = False
    priority: int = 0
    affinity: bool = False
    owner: str = ""
    channel: int = 0
    tag: str = ""


class Fenced(ControlMessage, tag="fenced", frozen=True):
    """Answers Fence.

    All that this door routed by what was in force before has been taken in by the shards.
    """

    number: int


class DoorReport(ControlMessage, tag="report", frozen=True):
    """Answers Query.

    - `connections`: for each connection {owner, channels, send_oct, recv_oct, state, ...}
    - `channels`: for each channel {owner, number, prefetch_count, unacked, confirm, ...}
    - `counters`: totals of this door, "connections" and "channels" among them
    - `unacked`: for each delivery {owner, channel, consumer_tag, delivery_tag, unacked_for (ms)}
    - `exchanges`: (vhost, name, messages published to it, messages to queues)
    - `vhosts`: by vhost, the counters of its channels and connections since the start of the door
    - `holders`: for each consumer with deliveries that wait for their ack {owner, channel,
      consumer_tag, messages_unacknowledged, unacked_for (ms, of the oldest one)}
    - `door`: the number of this door, if the counters are asked for
    """

    query: int
    connections: list[dict[str, Any]]
    channels: list[dict[str, Any]]
    counters: dict[str, float]
    unacked: list[dict[str, Any]] = []
    exchanges: list[tuple[str, str, int, int]] = []
    vhosts: dict[str, dict[str, int]] = {}
    holders: list[dict[str, Any]] = []
    door: int = 0


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A span of OpenTelemetry that has ended.

    `kind` is "consumer", "producer" or "internal". `parent_id` is empty if the trace begins here.
    `state` is the text of `tracestate`. Times are in ns since the epoch. A span without an `error`
    went well.
    """

    name: str
    kind: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    state: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, str | int]
    error: str


class SpansEnded(ControlMessage, tag="spans", frozen=True):
    """Spans to be sent to the collector."""

    spans: list[Span]


class AssignmentName(msgspec.Struct, array_like=True, frozen=True):
    """A place at a shard queue, which is named by its id.

    Places but the first (0) are for consumers with key affinity.
    """

    queue: int
    place: int


class ConsumerHere(msgspec.Struct, array_like=True, frozen=True):
    """A consumer of a virtual queue as its front door sees it.

    `left`: its client cancelled it, and it still holds assignments.
    """

    number: int
    vhost: str
    exchange: str
    terms: ConsumeTerms
    left: bool
    assignments: list[AssignmentName]


class ConsumersHere(ControlMessage, tag="consumers", frozen=True):
    """All consumers of virtual queues at this door.

    It is the first message after each Snapshot or Changes that answer a hello.
    """

    consumers: list[ConsumerHere]


class ConsumerLeave(ControlMessage, tag="consumer-", frozen=True):
    """A consumer was cancelled, or its channel is gone.

    Each assignment that it still has follows with AssignmentGivenUp.
    """

    number: int


class AssignmentGivenUp(ControlMessage, tag="seat-", frozen=True):
    """A consumer is stopped at a shard queue, and what it held is settled or requeued.

    This is also said when the queue is deleted.
    """

    number: int
    assignment: AssignmentName


class MarkPassed(ControlMessage, tag="seat>", frozen=True):
    """A consumer has settled all messages below `offset` at a shard queue.

    `offset` is not below the mark that the consumer was given.
    """

    number: int
    assignment: AssignmentName
    offset: int


ConsumerNews = ConsumersHere | ConsumerLeave | AssignmentGivenUp | MarkPassed


# -- requests --------------------------------------------------------------------------------------


class Request(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of what can be asked; the fields are those of the AMQP methods.

    `arguments` are decoded field tables: bool, int, float, str, bytes, None, datetime, Decimal as
    str, list, dict.
    """

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
    """queue.declare. An empty name asks for amq.gen-...

    Answer.result: {"name": str, "messages": int, "consumers": int}.
    """

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
    """Binds queues without arguments in this order: (source, queue, routing key) of each.

    The first bind that is refused ends the request; earlier ones stay. Answer.result, if `code` is
    not 0: {"done": how many were bound}.

    `in_force`: the binds are between one exchange and one queue, the only front door has put them
    in force. Such a request is answered before the Changes that it is part of. It may come in
    parts, each with the same id (binds_pipe).

    `waited`: the client is answered when they are recorded. Without it, binds that are in force are
    answered already.
    """

    binds: list[tuple[str, str, str]]
    in_force: bool = False
    waited: bool = False


class Unbind(Request, tag="unbind", frozen=True):
    source: str
    kind: str
    destination: str
    routing_key: str
    arguments: dict[str, Any]


class ConnectionOpen(Request, tag="connection.open", frozen=True):
    """Asks whether this connection may be open beside the others of its vhost and user.

    A ConnectionUp of the connection came before. Asked only where vhost or user have a limit. The
    connection that is up first counts first.
    """

    user: str


class ConsumerJoin(Request, tag="consumer.join", frozen=True):
    """basic.consume on a virtual queue by consumer `number` of the door.

    The assignments that it gets follow in AssignmentOrders.
    """

    exchange: str
    number: int
    terms: ConsumeTerms


class VirtualLook(Request, tag="virtual.look", frozen=True):
    """Asks for the consumers of a virtual queue.

    Answer.result: {"consumers": of the virtual queue, "seats": those they have at its shard
    queues}.
    """

    exchange: str


class ChannelOpen(Request, tag="channel.open", frozen=True):
    """Asks whether this connection may have so many channels.

    All other channels of its user and of the broker count too. Asked only where there is a limit. A
    connection that is refused is closed: its channels count no more from then on.
    """

    user: str
    channels: int


class ChannelClose(Request, tag="channel.close", frozen=True):
    """Tells that the connection has only so many channels left. Never refused.

    It is asked, not told, where there is a limit: a client that has seen its channel.close-ok may
    open another channel at any front door.
    """

    channels: int


AnyRequest = (
    ExchangeDeclare | ExchangeRemove | QueueDeclare | QueueRemove | Bind | BindMany | Unbind
    | ConnectionOpen | ChannelOpen | ChannelClose | ConsumerJoin | VirtualLook
)  # fmt: skip


def binds_pipe(door: int, incarnation: int, waited: bool = False) -> str:
    """Return the name of the pipe by which a front door tells of binds ahead.

    There is another one for binds that a client waits for (`waited`). Both lie beside the socket of
    the controller, from the hello of the front door until the controller has opened them. They have
    requests of the kind Ask, as the stream has them.
    """
    return f"binds-{door}-{incarnation}{'-waited' if waited else ''}.pipe"


def things_asked(request: Any) -> int:
    """Return how many requests this counts for in the bounds on requests.

    A request that asks many things at once counts as many.
    """
    return len(request.binds) if type(request) is BindMany else 1


# -- controller to front door ----------------------------------------------------------------------


class SnapshotPart(ControlMessage, tag="snapshot-part", frozen=True):
    """The first changes of the Snapshot that follows.

    A long snapshot comes in parts, so that its bytes need not be in memory all at once.
    """

    changes: list[AnyChange]


class Snapshot(ControlMessage, tag="snapshot", frozen=True):
    """The whole catalog as changes that make it out of an empty one, in their order.

    `boot` names one life of the broker: versions of another boot mean nothing.
    """

    boot: str
    version: int
    changes: list[AnyChange]


class Changes(ControlMessage, tag="changes", frozen=True):
    """Changes of the catalog, whose version is `version` after all of them.

    `waited`: somebody waits for Applied. Otherwise Applied may come later.
    """

    version: int
    changes: list[AnyChange]
    waited: bool = True


class Answer(ControlMessage, tag="answer", frozen=True):
    """Answers Ask.

    `code` 0 means done; else it is an AMQP reply code with RabbitMQ's text without the "NAME - " in
    front. `result["binds"]`: how many binds of the request are answered, where it comes in parts.
    """

    id: int
    code: int = 0
    text: str = ""
    result: dict[str, Any] = {}


class CloseConnection(ControlMessage, tag="close", frozen=True):
    owner: str
    code: int
    text: str


class CancelConsumer(ControlMessage, tag="cancel-consumer", frozen=True):
    """An operator cancels a consumer; its client is told, as when the queue is deleted.

    A consumer that is gone already is no error.
    """

    owner: str
    channel: int
    consumer_tag: str


class AssignmentOrder(msgspec.Struct, array_like=True, frozen=True):
    """An order to a consumer of a virtual queue about one assignment.

    `kind` is "give" (consumer `number` gets the assignment), "take" (it gives the assignment back,
    answered by AssignmentGivenUp), "bound" (its reading there gets bounds) or "close" (the virtual
    queue is no more, which the client is told).

    With "give" and "bound", for streams: the consumer gets nothing from offset `stop` on, and
    MarkPassed is wanted when all below `mark` is settled. With "give", `fresh` says that the shard
    came when its group was there already. It is then read from its beginning, even if the consumer
    began elsewhere.
    """

    kind: str
    number: int
    assignment: AssignmentName
    stop: int | None = None
    mark: int | None = None
    fresh: bool = False


class AssignmentOrders(ControlMessage, tag="seats", frozen=True):
    orders: list[AssignmentOrder]


class Fence(ControlMessage, tag="fence", frozen=True):
    """Answered by Fenced.

    The answer comes when every shard is there and has taken in what this door had routed before.
    """

    number: int


class Alarmed(ControlMessage, tag="alarmed", frozen=True):
    """Publishers are to be held back for this reason, whatever the shards say.

    An empty reason, or a Snapshot, ends the alarm.
    """

    reason: str


def node_of(door: int) -> int:
    """Return the number of the node that a front door is of; 0 without a cluster."""
    return door // DOORS_PER_NODE


class ShardElsewhere(msgspec.Struct, array_like=True, frozen=True):
    """A shard, the name of the node that leads it, and where other nodes reach it."""

    number: int
    node: str
    address: str


class ShardsElsewhere(ControlMessage, tag="shards", frozen=True):
    """All shards that other nodes than that of the front door lead, and the numbers of its own.

    In a cluster this is the first message to a front door, and the first behind a change; queues
    that lie on a new shard are named later. A shard with copies may change its node.

    all: the numbers of all shards of the cluster, also of those that nobody leads at present; None
        if they are not known.
    """

    shards: list[ShardElsewhere]
    here: list[int] = []
    all: list[int] | None = None


class Outlived(ControlMessage, tag="outlived", frozen=True):
    """The only answer to a DoorHello of an incarnation that was taken for gone.

    Shards have put back in order what it held, and do not hear it any more. The process is to end;
    the next one is heard.
    """


class OtherVersion(ControlMessage, tag="other-version", frozen=True):
    """The only answer to a DoorHello of another wire version. All versions share this message.

    A front door that understands this version says hello again, and speaks it.
    """

    wire_version: int


class Query(ControlMessage, tag="query", frozen=True):
    """Answered by DoorReport.

    `totals_only`: without single connections and channels, of which there may be thousands.
    `unacked_of`: the id of a queue; only its deliveries that wait for their ack are reported.
    `holders_of`: the id of a queue; only the consumers that hold such deliveries are reported.
    """

    query: int
    totals_only: bool = False
    unacked_of: int = 0
    holders_of: int = 0


AnyControl = (
    DoorHello | ConnectionUp | ConnectionDown | ConnectionsPassed | Applied | Ask | DoorReport
    | SnapshotPart | Snapshot | Changes | Answer | CloseConnection | CancelConsumer | Alarmed
    | Outlived | OtherVersion | Query
    | ConsumersHere | ConsumerLeave | AssignmentGivenUp | MarkPassed | AssignmentOrders
    | Fence | Fenced | SpansEnded | ShardsElsewhere
)  # fmt: skip
