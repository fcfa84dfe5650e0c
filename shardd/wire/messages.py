"""What front doors, the controller and shards say to each other: every message as data.

A ZeroMQ message is one part. Its first 16 bytes are the same for all:

     0  u8   kind        one of the constants below
     1  u8   WIRE_VERSION
     2  u16  peer        who of the front doors (0..F-1), or CONTROLLER
     4  u32  incarnation of that peer: a new, higher number each time its process starts
     8  u32  epoch of the shard: a new number each time the shard's process starts
    12  u32  shard       which shard

A message of another incarnation or epoch than the receiver knows is stale and dropped. What follows
the header is binary for the hot kinds (PUBLISH, DELIVER, SETTLE, CONFIRMED, CREDIT: drawn in
codec.pyx, little endian) and msgpack of one struct below for CONTROL. "peer" below is a front door or the controller.

Order is kept per direction between two processes; nothing is said about two pairs.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

WIRE_VERSION = 2
HEADER_BYTES = 16
CONTROLLER = 0xFFFF

PUBLISH = 1  # peer to shard: runs of messages, a batch number
DELIVER = 2  # shard to peer: messages for consumers
SETTLE = 3  # peer to shard: deliveries acknowledged, rejected, requeued
CONFIRMED = (
    4  # shard to peer: batches up to a number are on stable storage; refused messages by name
)
CREDIT = 5  # both ways: bytes taken off the other's hands
CONTROL = 6  # both ways: one struct below
LANE = 7  # both ways, no body: what follows comes through the ring again, see lane.py

# Beside the channel of confirm numbers in CONFIRMED: some queue had the message before, of the same producer; had
# another message of that sequence.
KNOWN, ALTERED = 1 << 16, 1 << 17
# The same, with the number 0: of what this channel published without numbers a queue refused some, not all of it. For
# transactions alone; without this bit nothing of it was taken.
SOME = 1 << 18

# Reasons of an Alarm that more than people act on.
LOW_ON_DISK = "low on disk"
DISK_STALLED = "disk does not answer"
# Code of what is refused for want of room on the disk: HTTP's. AMQP has 541 for it, which is said of other things too.
NO_ROOM: Final = 507
# Queues told of in one StatsReply: what a shard does at once, while its clients wait.
STATS_QUEUES_MAX = 128
# An incarnation is the time since the machine started, in steps shorter than a process takes to start.
INCARNATION_STEP_NS = 100_000_000

# Settle kinds, also used by codec.pyx.
ACK = 0
REJECT = 1  # drop or dead-letter
REQUEUE = 2  # back to the old place, redelivered
RETURN = 3  # back to the old place, never seen by a client: not redelivered
# What else a SETTLE says, of a consumer with a lent prefetch; `first` is how many. In the turn in which it is taken in:
LENT = 4  # it has so many more, and may use all there is of it now and for `last` ms, whatever was recalled: its turn
LOWERED = 5  # it has so many fewer: the room that acks in this message make is another's

# What a message is to an exchange or queue that wants each once (ToldOnce).
FIRST = 0
AGAIN = 1  # the first is stored
FOLLOWS = 2  # it is not known yet what becomes of the first


def incarnation_at(monotonic_ns: int) -> int:
    """Of a process that starts now. Clocks that people set would go back; this one lasts 13 years."""
    return monotonic_ns // INCARNATION_STEP_NS + 1


class Publish(NamedTuple):
    """A PUBLISH, its head taken apart (codec.pyx); `records` looks into the message, `queue_ids` are the distinct ones
    that the records name, in order of appearance. `weight`: what it takes of the window of publishes, its bytes and
    those of the references to messages that go to several queues."""

    batch: int
    messages: int
    wanted: bool
    needs_sync: bool
    in_sequence: bool
    records: memoryview
    queue_ids: list[int]
    weight: int


class Message(msgspec.Struct, tag_field="t", array_like=True, frozen=True):
    """Base of all control structs."""


class QueueSpec(msgspec.Struct, array_like=True, frozen=True):
    """A queue as its shard must know it. `id` is never used again after a delete."""

    id: int
    vhost: str
    name: str
    durable: bool
    auto_delete: bool = False
    exclusive: bool = False
    arguments: dict[str, Any] = {}  # effective: the queue's own merged with policies
    paused: bool = False  # gives no messages
    held: bool = (
        False  # gives none of what arrives from now on; after a restart: none of what is there
    )


# -- a peer makes itself known, a shard answers -------------------------------------------------------


class Join(Message, tag="join", frozen=True):
    """Peer to shard, at start and after each Hello of a new epoch: send me your Hello at `endpoint`.

    A Join with a new incarnation also says that the former process of this peer is gone: all its
    consumers go, their unsettled deliveries are requeued. One with a lower incarnation than was heard of comes late,
    from a process that is gone.
    """

    endpoint: str


class Hello(Message, tag="hello", frozen=True):
    """Shard to peer, when ready (all queues recovered) and as the answer to Join.

    To a front door a new epoch means: outstanding publishes are lost (nack them), attach consumers
    anew, old delivery numbers mean nothing.
    """

    pid: int
    ready: bool


class Gone(Message, tag="gone", frozen=True):
    """Controller to shard: front door `door` of `incarnation` ended; requeue what it held."""

    door: int
    incarnation: int


# -- what exists (controller only) --------------------------------------------------------------------


class AssignPart(Message, tag="assign-part", frozen=True):
    """Controller to shard: the first queues of the Assign that follows, when they are many."""

    queues: list[QueueSpec]


class Assign(Message, tag="assign", frozen=True):
    """Controller to a shard that said Hello(ready=False): all queues of this shard, with those of the AssignParts
    before it. The shard recovers, drops what belongs to no queue named, and then says Hello(ready=True) to all."""

    queues: list[QueueSpec]


class CreateQueues(Message, tag="create", frozen=True):
    """Controller to shard. Answered by Done(request). Creating one that exists updates its arguments."""

    request: int
    queues: list[QueueSpec]


class DeleteQueue(Message, tag="delete", frozen=True):
    """Controller to shard. Answered by Done(request, messages=ready count) or Refused.

    Consumers of the queue get Cancelled. Refused texts are the reply text's middle: "in use", "not empty".
    """

    request: int
    queue: int
    if_unused: bool = False
    if_empty: bool = False


class DropVhost(Message, tag="drop-vhost", frozen=True):
    """Controller to shard: all queues and files of the vhost go. Answered by Done(request)."""

    request: int
    vhost: str


class AutoDeleted(Message, tag="auto-deleted", frozen=True):
    """Shard to controller: this queue's last consumer went (auto_delete) or it expired; it takes no more
    consumers. The controller answers with DeleteQueue once it is out of the catalog."""

    queue: int
    reason: str  # "auto-delete" or "expired"


class Used(Message, tag="used", frozen=True):
    """Shard to controller: this auto_delete queue has a consumer, for the first time in the shard's life; again to a
    new controller. A later life of the shard does not know it, and would wait for ever for the last one to leave."""

    queue: int


class Stats(Message, tag="stats", frozen=True):
    """Controller to shard. Answered by StatsReply, about the used queues among `queues`, or (None) about the next
    STATS_QUEUES_MAX behind the first `passed` of those that were used when `passed` was 0."""

    request: int
    queues: list[int] | None = None
    passed: int = 0


class ListQueues(Message, tag="list-queues", frozen=True):
    """Controller to shard. Answered by Queues."""

    request: int


class Queues(Message, tag="queues", frozen=True):
    """`ids`: of all queues this shard has."""

    request: int
    ids: list[int]


class QueueStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Counters since the shard's start; sizes in bytes of stored messages."""

    id: int
    ready: int = (
        0  # of a queue where an exchange keeps messages: not due yet, or not yet at their queues
    )
    unacked: int = 0
    consumers: int = 0
    ready_bytes: int = 0
    unacked_bytes: int = 0
    published: int = 0
    delivered: int = 0  # with and without ack, `got` included
    acked: int = 0
    redelivered: int = 0
    got: int = 0  # with and without ack
    repeated: int = 0  # publishes not stored, since their producer had sent them before
    delivered_auto: int = 0  # of `delivered`: to consumers that do not acknowledge
    got_auto: int = 0  # of `got`: not to be acknowledged
    got_empty: int = 0  # times that basic.get found nothing


class ConsumerStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    queue: int
    door: int
    connection: int
    channel: int
    tag: str
    no_ack: bool
    exclusive: bool
    prefetch: int
    active: bool
    priority: int = 0


class StatsReply(Message, tag="stats-reply", frozen=True):
    """`consumers`: of `queues`. `rest`: how many used queues are still to be asked for. A queue that is not used holds
    nothing, did nothing, has nobody, and is left out."""

    request: int
    queues: list[QueueStats]
    consumers: list[ConsumerStats]
    # rss_bytes, cpu_seconds, segments, disk_bytes, ..., histograms (histogram.py); {} in all parts but the first
    process: dict[str, float]
    rest: int


class StreamStats(msgspec.Struct, array_like=True, frozen=True):
    """Of a stream: what it has beside what QueueStats say. `next_offset`: behind its last message."""

    id: int
    first_offset: int
    next_offset: int
    segments: int
    disk_bytes: int
    positions: dict[str, int] = {}  # of named consumers, whether they are there or not


class ReaderStats(msgspec.Struct, array_like=True, frozen=True):
    """A consumer of a stream: where it goes on."""

    queue: int
    door: int
    connection: int
    channel: int
    tag: str
    offset: int


class StreamsReply(StatsReply, tag="stats-reply-streams", frozen=True):
    """The StatsReply of a shard with streams."""

    streams: list[StreamStats]
    readers: list[ReaderStats]


class GapsReply(StreamsReply, tag="stats-reply-gaps", frozen=True):
    """Where some of the streams are damaged. `gaps`: by the stream's id, the offsets whose messages are lost,
    [from, to) each, as far as the damage is known."""

    gaps: dict[int, list[tuple[int, int]]] = {}


class Alarm(Message, tag="alarm", frozen=True):
    """Shard to all peers: publishing must pause (for a reason, in words for people) or may go on (reason "").

    DISK_STALLED besides means: whoever waits for a confirm is told no. What was published may be stored all the same.
    """

    reason: str


# -- consumers and gets (front door) -----------------------------------------------------------------


class Attach(Message, tag="attach", frozen=True):
    """Front door to shard: a consumer. Answered by Attached or Refused before its first delivery.

    `consumer` is a number that this front door uses once in its life. prefetch 0 = no limit.
    `granted`: deliveries come only for Grant (the channel has a limit of its own). `resumed`: attached
    again after the shard restarted: never refused for exclusivity by order of arrival.
    """

    request: int
    queue: int
    consumer: int
    connection: int
    channel: int
    tag: str
    no_ack: bool
    exclusive: bool
    priority: int
    prefetch: int
    granted: bool = False
    resumed: bool = False
    lent: bool = False  # `prefetch` is what it has of a limit that it shares: 0 is none; see Recall
    affinity: bool = (
        False  # while it is attached, messages of one routing key go to one consumer at a time
    )


class AttachPart(Attach, tag="attach-part", frozen=True):
    """Front door to shard: a part of a virtual consumer. What its parts here were lent they use together. `whole`: a
    number that this front door uses once in its life."""

    whole: int = 0


class Attached(Message, tag="attached", frozen=True):
    request: int


class ReadFrom(msgspec.Struct, array_like=True, frozen=True):
    """Where a consumer of a stream begins, and what it wants to see.

    `start`: "first", "last" (the last chunk), "next", "offset" (`value`: behind the end counts as the end), "timestamp"
    (`value`: ms), "ago" (`value`: ms), "back" (`value`: so many before the end), "at" (`value`: resumed). `name`: where
    the consumer of that name was takes the place of `start`, unless it is "at", and how far it comes is remembered; "":
    neither. `filters`: only messages with one of these values, and with `unfiltered` those without any.
    """

    start: str = "next"
    value: int = 0
    name: str = ""
    filters: list[str] = []
    unfiltered: bool = False
    seen_below: int = 0  # resumed: what is below this offset may have been seen by the client


class Look(Message, tag="look", frozen=True):
    """Front door to shard: what has this stream, where is `timestamp` (ms) in it, and `young`, another time? Answered
    by Looked or Refused. From now on until Unwatch it is remembered which of its messages are published for the queue
    `watch` too (their records name it, wherever it lives); 0: none."""

    request: int
    queue: int
    watch: int
    timestamp: int
    young: int


class Looked(Message, tag="looked", frozen=True):
    """Offsets. `end_offset`: behind all that was appended, readable already or not."""

    request: int
    first_offset: int
    end_offset: int
    at_time: int
    young: int


class Pull(Message, tag="pull", frozen=True):
    """Front door to shard: messages of a stream from `offset` on and below `stop`, about `bytes_max` of them, but for
    those that were published for the queue `watch` too. Answered by Pulled or Refused."""

    request: int
    queue: int
    watch: int
    offset: int
    stop: int
    bytes_max: int


class Pulled(Message, tag="pulled", frozen=True):
    """`messages`: `count` stored messages back to back; `offsets`: u64 each. With none and the same `next_offset`: they
    are not on stable storage yet."""

    request: int
    count: int
    offsets: bytes
    messages: bytes
    next_offset: int


class Unwatch(Message, tag="unwatch", frozen=True):
    """Front door to shard: no more to be remembered of `watch`, as asked for with Look."""

    queue: int
    watch: int


class Place(Message, tag="place", frozen=True):
    """Controller to shard: those that read a stream under that name elsewhere have come to `offset`, which is the next
    they want; None: forget the name. Answered by Done or Refused (406: consumers are reading under it; beyond the
    stream's end; too many names)."""

    request: int
    queue: int
    name: str
    offset: int | None


class AttachReader(Attach, tag="attach-reader", frozen=True):
    """Front door to shard: a consumer of a stream. Answered by AttachedAt or Refused. Before the messages of each of
    its deliveries come their offsets, u64 each."""

    read: ReadFrom = ReadFrom()


class AttachedAt(Attached, tag="attached-at", frozen=True):
    """`offset`: where it begins."""

    offset: int


class AttachBounded(AttachReader, tag="attach-bounded", frozen=True):
    """The same, of one that is bounded from the beginning: drawn at Bound."""

    stop: int | None = None
    mark: int | None = None


class AttachStreamPart(AttachBounded, tag="attach-stream-part", frozen=True):
    """The same, of a part of a virtual consumer: `whole` is drawn at AttachPart."""

    whole: int = 0


class Bound(Message, tag="bound", frozen=True):
    """Front door to shard: from now on a consumer of a stream gets nothing from offset `stop` on (None: all), and its
    shard says with Passed, once, that it has settled all below `mark` (None: no more)."""

    consumer: int
    stop: int | None
    mark: int | None


class Passed(Message, tag="passed", frozen=True):
    """Shard to front door: this consumer has settled all below `offset`, which is not below its mark."""

    consumer: int
    offset: int


class Detach(Message, tag="detach", frozen=True):
    """Front door to shard: no more deliveries. Unsettled ones stay until settled or Release. Answered by
    Done(request) after the last delivery."""

    request: int
    consumer: int


class Release(Message, tag="release", frozen=True):
    """Front door to shard: these consumers (channel or connection closed) are gone for good; what they hold
    is requeued in place, redelivered. Consumers still attached are detached. Answered by Released(request) when
    auto_delete queues go with them, else by Done(request)."""

    request: int
    consumers: list[int]


class Grant(Message, tag="grant", frozen=True):
    """Front door to shard: consumer (attached with granted=True) may get up to `count` more.

    The shard delivers what it has and gives the rest back at once with Ungranted. To a consumer with a lent prefetch:
    it has so much more, and what was recalled before counts no more.
    """

    consumer: int
    count: int


class Tune(Message, tag="tune", frozen=True):
    """Front door to shard: another prefetch; from now on only what is granted, or (False) no more grants needed.

    Not answered. When `granted` changes the consumer has no grant; if something is ready it is asked for (Ungranted).
    """

    consumer: int
    prefetch: int
    granted: bool
    lent: bool = False


class Recall(Message, tag="recall", frozen=True):
    """Front door to shard: others want of what this consumer was lent. As soon as it can, and until the next Grant, it
    keeps `keep` of it while messages wait, and none while none do, but as much as is unsettled; the rest is given back
    with Ungranted. Not answered otherwise."""

    consumer: int
    keep: int


class Ungranted(Message, tag="ungranted", frozen=True):
    """Shard to front door: `count` grants not used, the queue is empty. Sent also with count 0 when a message
    becomes ready for a consumer without a grant, or whose lent prefetch is used up ("wants=True": ask me again with
    Grant)."""

    consumer: int
    count: int
    wants: bool = False


class Cancelled(Message, tag="cancelled", frozen=True):
    """Shard to front door: the queue of this consumer is gone (basic.cancel to the client)."""

    consumer: int


class Overdue(Message, tag="overdue", frozen=True):
    """Shard to front door: this channel holds something for longer than `timeout_ms`; it is to be closed. What it holds
    stays with it until its Release."""

    connection: int
    channel: int
    timeout_ms: int


class Get(Message, tag="get", frozen=True):
    """Front door to shard: basic.get. `consumer`: pseudo consumer of the channel on this shard that holds the delivery
    (0 with no_ack). Answered by Got or Refused."""

    request: int
    queue: int
    consumer: int
    connection: int
    channel: int
    no_ack: bool


class Got(Message, tag="got", frozen=True):
    """`message` is one stored message (drawn in packer.pyx), or b"" when the queue is empty."""

    request: int
    message: bytes
    number: int  # delivery number within `consumer`
    redelivered: bool
    remaining: int


class GotAgain(Message, tag="got-again", frozen=True):
    """As Got, of a message that came back `times` times to a queue with a delivery limit: redelivered."""

    request: int
    message: bytes
    number: int
    remaining: int
    times: int


class Released(Message, tag="released", frozen=True):
    """Shard to peer, for Release: as Done. `closed`: the queues that will be deleted for want of consumers."""

    request: int
    closed: list[int]


class Count(Message, tag="count", frozen=True):
    """Peer to shard: how many messages and consumers. Answered by Done(request, messages, consumers), or Refused by one
    that takes no more consumers: whoever was told its counts would take it for one that stays."""

    request: int
    queue: int


class Left(Message, tag="left", frozen=True):
    """Controller to shard: how many messages of the queue up to the place `until` (0: to its end as it is now) are not
    settled; of a stream: not on stable storage. Answered by Marked(request) or Refused. Places are of one life of the
    shard; a stream's are offsets, behind the last message."""

    request: int
    queue: int
    until: int = 0


class Marked(Message, tag="marked", frozen=True):
    """`until`: the place that was meant; `left`: messages up to it, ready ones and held ones."""

    request: int
    until: int
    left: int


class LetGo(Message, tag="letgo", frozen=True):
    """Controller to shard: what of the queue up to the place `until` is not settled, held by a consumer or not, leaves
    for its dead-letter exchange. Answered by Done(request, messages) or Refused."""

    request: int
    queue: int
    until: int
    reason: str


class Purge(Message, tag="purge", frozen=True):
    """Peer to shard. Answered by Done(request, messages), or Refused: code NO_ROOM of a stream whose messages stay."""

    request: int
    queue: int


class PurgeFirst(Message, tag="purge-first", frozen=True):
    """Controller to shard: purge the `count` messages that would be delivered next, or all if there are fewer. Answered
    by Done(request, messages)."""

    request: int
    queue: int
    count: int


class DeadLetters(Message, tag="dead-letters", frozen=True):
    """Shard to one front door: messages that left `queue` for `reason` ("expired", "rejected", "maxlen",
    "delivery_limit"), to be published to `exchange`, with `routing_key` or (None) the keys they have, unless they say
    where themselves; those that do not are dropped where `exchange` is None. `queue`: its id, where the shard does not
    know its name. Reason "delayed":
    they have waited for `exchange` and are due, which is no death. `messages`:
    `count` stored messages back to back. Answered by Departed(number) when their copies last; until then the shard
    keeps them, and gives them to another front door if this one goes. `insist`: what its only queue refuses is not
    stored."""

    number: int
    vhost: str
    queue: str | int
    reason: str
    exchange: str | None
    routing_key: str | None
    insist: bool
    count: int
    messages: bytes


class Departed(Message, tag="departed", frozen=True):
    """Front door to shard: the messages of DeadLetters `number` are stored where they belong, or belong nowhere; but
    for those `left` (first and last ordinal of runs): they are to be handed over again, some time later."""

    number: int
    left: list[tuple[int, int]] = []


class AskOnce(Message, tag="ask-once", frozen=True):
    """Front door to shard, where there are several: which of these messages are the first of their ids, of exchanges
    and queues that want each message once. `things`: (id of the queue, or vhost/name of the exchange; how many ids are
    remembered of it). `ids`: (which of the things, id, for how many ms it is remembered, 0: for ever), under the
    numbers from `first` on, which this front door uses once in its life. Answered by ToldOnce.

    The front door says of each FIRST what became of it (OnceBecame), and is told so of each that FOLLOWS."""

    request: int
    first: int
    things: list[tuple[int | str, int]]
    ids: list[tuple[int, bytes, int]]


class ToldOnce(Message, tag="told-once", frozen=True):
    """`verdicts`: FIRST, AGAIN or FOLLOWS, a byte for each id."""

    request: int
    verdicts: bytes


class OnceBecame(Message, tag="once-became", frozen=True):
    """Front door to shard: these first copies were stored, those not. Shard to front door: so were those that these
    numbers follow."""

    stored: list[int]
    lost: list[int]


class ForgetOnce(Message, tag="forget-once", frozen=True):
    """Front door to shard: this exchange (vhost/name) is deleted."""

    thing: str


class Reserve(Message, tag="reserve", frozen=True):
    """Front door to shard: set room aside for a transaction. `wanted`: for each queue that may refuse publishes, its id
    and the body bytes of each message it would get. Answered by Done(request) when all of them fit, or by
    Refused(request, 406), and then no room is set aside. `number` is the front door's own, used once in its life."""

    request: int
    number: int
    wanted: list[tuple[int, list[int]]]


class Redeem(Message, tag="redeem", frozen=True):
    """Front door to shard: its publishes from here to the next Redeem or Unreserve are the transaction `number`.

    Its queues take all of them, out of the room that was set aside. 0: they are of no such transaction.
    """

    number: int


class Unreserve(Message, tag="unreserve", frozen=True):
    """Front door to shard: what is left of the room set aside under `number` is free again, if there is any. Not
    answered."""

    number: int


class Done(Message, tag="done", frozen=True):
    request: int
    messages: int = 0
    consumers: int = 0
    closed: bool = False  # the queue will be deleted for want of consumers


class Refused(Message, tag="refused", frozen=True):
    """`code` is an AMQP reply code (404, 405, 403, 406) or NO_ROOM, `text` what the peer's handler puts into words:
    "gone" (no such queue here), "in use", "not empty", "exclusive use", "exclusive consumer"."""

    request: int
    code: int
    text: str


Control = (
    Join | Hello | Gone | AssignPart | Assign | CreateQueues | DeleteQueue | DropVhost | AutoDeleted | Used | Stats
    | StatsReply | StreamsReply | GapsReply | ListQueues | Queues | Alarm | Attach | AttachPart | Attached
    | AttachReader | AttachBounded | AttachStreamPart | AttachedAt | Bound | Passed
    | Look | Looked | Pull | Pulled | Unwatch | Place | Detach | Release | Released | Grant | Tune
    | Recall | Ungranted | Cancelled | Overdue | Get | Got | GotAgain | Count | Left | Marked | LetGo | Purge
    | DeadLetters | Departed | AskOnce | ToldOnce | OnceBecame | ForgetOnce | Reserve | Redeem | Unreserve
    | PurgeFirst | Done | Refused
)  # fmt: skip
