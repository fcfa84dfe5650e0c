"""Define the messages between front doors, the controller and shards.

A ZeroMQ message is one part. Its first 16 bytes are the same for all messages:

     0  u8   kind        one of the constants below
     1  u8   WIRE_VERSION
     2  u16  peer        number of the front door (0..F-1), or CONTROLLER
     4  u32  incarnation of that peer: a new, higher number each time its process starts, and for
             each of its sessions to a shard of another node
     8  u32  epoch of the shard: a new number each time the shard's process starts, and for each
             session of a peer on another node
    12  u32  shard       number of the shard

The receiver drops a message whose incarnation or epoch is not the one it knows: the message is
stale. It also drops a message of another WIRE_VERSION, and logs that once for each process that
sends one. All versions share this header and Join. A shard answers the Join of another version with
a Hello of its own version, and the controller answers such a Hello with Join, so that both sides
log which versions have met.

Behind the header the hot kinds (PUBLISH, DELIVER, SETTLE, CONFIRMED, CREDIT) are binary and little
endian: codec.pyx draws PUBLISH and DELIVER, envelope.py draws the others. A CONTROL message is
msgpack of one struct below. "Peer" below means a front door or the controller.

Messages of one direction between two processes arrive in order. Messages of different pairs of
processes have no order.
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
# shard to peer: batches up to a number are on stable storage; the refused messages are named
CONFIRMED = 4
CREDIT = 5  # both ways: bytes that the sender has taken in
CONTROL = 6  # both ways: one struct below
FREED = 8  # shard to front door: holds of lent bodies that are given back, see bodies.pxi
RING = 7  # both ways, no body: the messages that follow come through the ring again, see lane.py

# Flags in the channel of confirm numbers in CONFIRMED. KNOWN: some queue had the message before,
# from the same producer. ALTERED: the queue had another message with that sequence.
KNOWN, ALTERED = 1 << 16, 1 << 17
# A flag beside the confirm number 0, for transactions only: a queue refused some, but not all, of
# the messages that the channel published without confirm numbers. Without the flag none was taken.
PARTLY_REFUSED = 1 << 18

# Reasons of an Alarm on which programs act too.
LOW_ON_DISK = "low on disk"
DISK_STALLED = "disk does not answer"
TOO_FEW_IN_SYNC = "too few nodes are in sync"
NODE_STALLED = "a node in sync does not answer"
# With these, nobody knows when the next confirm comes.
STALLED = frozenset((DISK_STALLED, TOO_FEW_IN_SYNC, NODE_STALLED))
# The code of a request that is refused because the disk has no room. It is HTTP's code: AMQP has
# only 541, which stands for other errors too.
NO_ROOM: Final = 507
# The codes of a refused TakeChunks, whose docstring explains them, and of a refused PutChunks.
GAP: Final = 410
BEYOND: Final = 416
ELSEWHERE: Final = 409
# Queues in one StatsReply. The shard does no more at once, because its clients wait meanwhile.
STATS_QUEUES_MAX = 128
# An incarnation is the time since boot, in steps shorter than the start of a process.
INCARNATION_STEP_NS = 100_000_000

# Settle kinds, also used by codec.pyx.
ACK = 0
REJECT = 1  # drop or dead-letter
REQUEUE = 2  # back to the old place, redelivered
RETURN = 3  # back to the old place, not redelivered: no client has seen the message
# One more kind in a SETTLE, for an allotment of credit: the number of a consumer or of a group
# consumer stands in the place of the consumer. `first` is how many messages may have been delivered
# or given back in all, or UNLIMITED. `last` says what becomes of credit that is not used.
ALLOT = 4
KEEP = 0  # it stays
DRAIN = 1  # what cannot be used at once is given back
STOP = 2  # it is given back at once, with nothing delivered; CreditReport answers
CLOSE = 3  # the allotment is not used any more
UNLIMITED: Final = 1 << 62

# The verdict on a message of an exchange or queue that takes each message once (DedupVerdicts).
FIRST = 0
STORED_BEFORE = 1  # the first copy is stored
FOLLOWS = 2  # the fate of the first copy is not known yet


def incarnation_at(monotonic_ns: int) -> int:
    """Return the incarnation of a process that starts at this monotonic time.

    The wall clock is not used because people set it back. The u32 lasts for 13 years after boot.
    """
    return monotonic_ns // INCARNATION_STEP_NS + 1


class Weighed(NamedTuple):
    """The messages of a section of a DELIVER that weigh something else than their bytes.

    `weight` is what they take of the window of the connection. `is_lent`: `blob` has the places of
    the bodies instead of the bodies (bodies.pxi).
    """

    blob: memoryview
    weight: int
    is_lent: bool


class Publish(NamedTuple):
    """A PUBLISH with its head taken apart (codec.pyx).

    `records` is a view into the message. `queue_ids` are the distinct queues that the records name,
    in order of appearance. `weight` is the share of the window of publishes that the PUBLISH takes:
    its bytes, and the bytes of the references to messages that go to several queues.
    """

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
    """A queue as its shard must know it. An `id` is never used again after a delete."""

    id: int
    vhost: str
    name: str
    durable: bool
    auto_delete: bool = False
    exclusive: bool = False
    arguments: dict[str, Any] = {}  # the arguments of the queue, merged with policies
    paused: bool = False  # the queue delivers nothing
    # The queue delivers none of the messages that arrive from now on. After a restart of the shard
    # it delivers none of the messages that are there.
    held: bool = False
    # The queue gives its messages to its life on another shard (TakeLetters), and lets none go by
    # itself.
    leaving: bool = False
    # The stream is used at another shard, and is copied from there (PutChunks).
    arriving: bool = False


# -- a peer makes itself known, a shard answers ----------------------------------------------------


class Join(Message, tag="join", frozen=True):
    """Ask a shard to send its Hello to `endpoint`.

    A peer sends Join to a shard at its start and after each Hello of a new epoch. The shard answers
    the first Join of a process with Hello: at once to the controller, and to a front door when the
    shard is ready.

    A Join with a new incarnation also says that the former process of this peer is gone: the shard
    removes all consumers of that process and requeues its unsettled deliveries. A Join with a lower
    incarnation than the shard has heard of is a late message of a process that is gone.

    A peer on another node joins once in each session (session.py), with an incarnation of its own
    for each. The shard puts the name of the session in the place of `endpoint`. If the incarnation
    is too low, the shard answers with Outdated.

    `process` is the incarnation by which the controller knows a front door; 0: that of the header.
    `term` is that of a controller in a cluster. A Join of a lower term than the last is dropped.
    """

    endpoint: str
    process: int = 0
    term: int = 0


class Outdated(Message, tag="outdated", frozen=True):
    """Refuse the Join of a session, because the shard has had one with a higher incarnation.

    `lowest` is the lowest incarnation that the shard takes from this peer. The peer begins another
    session with it. This happens when the clock of a host was set back.
    """

    lowest: int


class Hello(Message, tag="hello", frozen=True):
    """Tell a peer that the shard runs.

    The shard sends Hello to the controller at its start with ready=False, to all peers when all
    queues are recovered, and as the answer to Join.

    To a front door a new epoch means that outstanding publishes are lost (the front door nacks
    them), that consumers must be attached again, and that old delivery numbers mean nothing.

    With `leaving`, which only front doors hear, another process is about to serve the shard. The
    front door sends nothing more in this epoch, and says so with Paused. A front door of an older
    release takes no notice.
    """

    pid: int
    ready: bool
    leaving: bool = False


class Paused(Message, tag="paused", frozen=True):
    """Answer a Hello with `leaving`: this is the last message of the front door in this epoch.

    Publishes of the front door wait for the next process of the shard.
    """


class FrontDoorGone(Message, tag="front-door-gone", frozen=True):
    """Tell a shard that front door `door` of `incarnation` ended.

    The controller sends FrontDoorGone. The shard requeues the deliveries that the front door held,
    and tells the front door, which may still be there (TakenForGone). There is no answer.
    """

    door: int
    incarnation: int


class TakenForGone(Message, tag="taken-for-gone", frozen=True):
    """Tell a front door that its process counts as gone: the controller has said FrontDoorGone.

    `process` is the incarnation by which the controller knew the process. The shard sends this when
    it hears so, and as the answer to each later Join of the process. What the front door held was
    given to others, so the process ends, and its successor begins anew. The controller says the
    same when the front door comes back, but another node may lead by then, which knows nothing of
    it.
    """

    process: int


# -- what exists (controller only) -----------------------------------------------------------------


class Assign(Message, tag="assign", frozen=True):
    """Give a shard its queues.

    The controller sends Assign to a shard that said Hello(ready=False), several times if there are
    many queues. After the last Assign the shard recovers, drops the data of queues that were not
    named, and then sends Hello(ready=True) to all peers. The others have no answer.

    `used` are auto-delete queues that have had a consumer in a former process of the shard. The
    shard names them to the next controller if this one dies before they are deleted.
    """

    queues: list[QueueSpec]
    last: bool = True
    used: list[int] = []


class CreateQueues(Message, tag="create", frozen=True):
    """Create queues, or update the arguments of queues that exist.

    The controller sends CreateQueues to a shard. The shard answers with Done(request).
    """

    request: int
    queues: list[QueueSpec]


class DeleteQueue(Message, tag="delete", frozen=True):
    """Delete a queue.

    The controller sends DeleteQueue to a shard. The shard answers with Done(request, messages=ready
    count) or Refused. The text of Refused is the middle of the reply text: "in use" or "not empty".
    The front doors of the queue's consumers get Cancelled.
    """

    request: int
    queue: int
    if_unused: bool = False
    if_empty: bool = False


class DropVhost(Message, tag="drop-vhost", frozen=True):
    """Delete all queues and files of a vhost.

    The controller sends DropVhost to a shard. The shard answers with Done(request).
    """

    request: int
    vhost: str


class AutoDeleted(Message, tag="auto-deleted", frozen=True):
    """Tell the controller that a queue must be deleted.

    The shard sends AutoDeleted when the last consumer of an auto_delete queue has left, or when the
    queue expired. The queue takes no more consumers. The controller answers with DeleteQueue when
    the queue is out of the catalog.
    """

    queue: int
    reason: str  # "auto-delete" or "expired"


class FirstConsumer(Message, tag="first-consumer", frozen=True):
    """Tell the controller that an auto_delete queue has had a consumer.

    The shard sends FirstConsumer for the first consumer of the queue in the life of the shard's
    process, and again to a new controller. The controller remembers the fact, because a shard that
    starts again does not know it and would wait for ever for the last consumer to leave. There is
    no answer.
    """

    queue: int


class Stats(Message, tag="stats", frozen=True):
    """Ask a shard for the counters of its queues.

    The controller sends Stats. The shard answers with StatsReply about the used queues among
    `queues`. If `queues` is None, the shard answers about the next STATS_QUEUES_MAX used queues: it
    skips the first `passed` of the queues that were used when `passed` was 0. The reply has the
    numbers of the process if `passed` is 0.
    """

    request: int
    queues: list[int] | None = None
    passed: int = 0


class ListQueues(Message, tag="list-queues", frozen=True):
    """Ask a shard which queues it has.

    The controller sends ListQueues. The shard answers with QueueIds.
    """

    request: int


class QueueIds(Message, tag="queue-ids", frozen=True):
    """Answer ListQueues.

    `ids` has the ids of all queues of the shard.
    """

    request: int
    ids: list[int]


class QueueStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The counters of one queue since the start of the shard.

    Sizes are in bytes of stored messages.
    """

    id: int
    # In a queue where an exchange keeps messages: those that are not due, or not yet in their
    # queues.
    ready: int = 0
    unacked: int = 0
    consumers: int = 0
    ready_bytes: int = 0
    unacked_bytes: int = 0
    published: int = 0
    delivered: int = 0  # with and without ack, `got` included
    acked: int = 0
    redelivered: int = 0
    got: int = 0  # with and without ack
    repeated: int = 0  # publishes not stored, because their producer had sent them before
    delivered_auto: int = 0  # the part of `delivered` that went to consumers with no_ack
    got_auto: int = 0  # the part of `got` with no_ack
    got_empty: int = 0  # how often basic.get found no message
    # The messages with delivery mode 2 in a durable queue, and the bytes of their bodies. None: the
    # queue has too many messages of both kinds to count them.
    persistent: int | None = 0
    persistent_bytes: int | None = 0
    # The property `timestamp`, in seconds, of the first message; None without one.
    head_timestamp: int | None = None
    oldest_ms: int | None = None  # the age of the message that came first; None without messages
    used_at: int | None = None  # when the queue was last used, in ms since the epoch
    # The share of time in which the queue could give its consumers each message at once, from 0 to
    # 1; 0 without consumers.
    utilisation: float = 0.0


class ConsumerStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A consumer as the HTTP API lists it.

    `wants` says that the consumer would be given a message if there was one.
    """

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
    wants: bool = True


class StreamStats(msgspec.Struct, array_like=True, frozen=True):
    """The numbers that a stream has beside its QueueStats.

    `next_offset` is the offset behind the last message on stable storage.
    """

    id: int
    first_offset: int
    next_offset: int
    segments: int
    disk_bytes: int
    positions: dict[str, int] = {}  # of named consumers, attached or not


class ReaderStats(msgspec.Struct, array_like=True, frozen=True):
    """A consumer of a stream, with the offset at which the consumer goes on."""

    queue: int
    door: int
    connection: int
    channel: int
    tag: str
    offset: int


class StatsReply(Message, tag="stats-reply", frozen=True):
    """Answer Stats of the controller.

    `rest` is the number of used queues that the controller has still to ask for. A queue that is
    not used holds no messages, has no consumers and has counted nothing, so the shard leaves it
    out.
    """

    request: int
    queues: list[QueueStats]
    consumers: list[ConsumerStats]  # of `queues`
    # rss_bytes, cpu_seconds, segments, disk_bytes, ..., and histograms (histogram.py). Only the
    # first reply has them: the others have {}.
    process: dict[str, float]
    rest: int
    streams: list[StreamStats] = []  # the streams among `queues`
    readers: list[ReaderStats] = []  # their consumers
    # The ranges [from, to) of offsets whose messages are lost, as far as the damage is known, by
    # the ids of damaged streams.
    gaps: dict[int, list[tuple[int, int]]] = {}


class Alarm(Message, tag="alarm", frozen=True):
    """Tell all peers that publishing must pause, or may go on.

    The shard sends Alarm when the reason changes, and after Hello while there is a reason. `reason`
    is in words for people; an empty reason means that publishing may go on. One of STALLED also
    means that front doors nack publishes that wait for a confirm; these messages may be stored all
    the same. There is no answer.
    """

    reason: str


# -- consumers and gets (front door) ---------------------------------------------------------------


class Attach(Message, tag="attach", frozen=True):
    """Attach a consumer to a queue.

    A front door sends Attach to a shard. The shard answers with Attached or Refused before the
    first delivery.

    `consumer` is a number that this front door uses once in its life. A `prefetch` of 0 is no
    limit. With `limited`, deliveries come only for an ALLOT, because consumers at other shards have
    the same limit. `resumed` means that the front door attaches the consumer again after the shard
    restarted: the shard never refuses such a consumer for exclusivity by order of arrival.
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
    limited: bool = False
    resumed: bool = False
    # While the consumer is attached, messages of one routing key go to one consumer at a time.
    affinity: bool = False


class AttachPart(Attach, tag="attach-part", frozen=True):
    """Attach a consumer of one shard queue for a group consumer.

    A front door sends AttachPart to a shard, in place of Attach. All consumers of one group
    consumer at this shard have one allotment. `group` is the number of the group consumer, which
    this front door uses once in its life; with 0 the consumer has an allotment of its own.
    """

    group: int = 0


class Attached(Message, tag="attached", frozen=True):
    """Answer Attach of a front door: the consumer is attached."""

    request: int


class ReadFrom(msgspec.Struct, array_like=True, frozen=True):
    """The place where a consumer of a stream begins, and the filter of the consumer.

    `start` is one of

        "first"      the first message
        "last"       the last chunk
        "next"       the end of the stream
        "offset"     `value` is an offset; beyond the end it means the end
        "timestamp"  `value` is a time in ms
        "ago"        `value` is ms before now
        "back"       `value` is the number of messages before the end
        "at"         `value` is the offset at which the consumer is resumed

    With a `name`, the stored offset of that name takes the place of `start`, unless `start` is
    "at", and the shard stores the progress of the consumer under the name. With an empty `name` it
    does neither. With `filters`, the consumer gets only messages that have one of these filter
    values; `unfiltered` adds the messages that have no filter value.
    """

    start: str = "next"
    value: int = 0
    name: str = ""
    filters: list[str] = []
    unfiltered: bool = False
    seen_below: int = 0  # the client of a resumed consumer may have seen messages below this offset


class InspectStream(Message, tag="inspect-stream", frozen=True):
    """Ask about a stream, and begin to watch it.

    A front door sends InspectStream to a shard. The shard answers with StreamInspected, which says
    which offsets the stream has and where the times `timestamp` and `young` (both ms) are in it, or
    with Refused.

    From now on until Unwatch, the shard remembers which messages of the stream are published for
    the queue `watch` too: their records name `watch`, on whichever shard that queue lives. A
    `watch` of 0 watches nothing.
    """

    request: int
    queue: int
    watch: int
    timestamp: int
    young: int


class StreamInspected(Message, tag="stream-inspected", frozen=True):
    """Answer InspectStream of a front door; all numbers but `request` are offsets.

    `end_offset` is behind all appended messages, also those that are not readable yet. `at_time`
    and `young` are the offsets of the two times that InspectStream asked for.
    """

    request: int
    first_offset: int
    end_offset: int
    at_time: int
    young: int


class Pull(Message, tag="pull", frozen=True):
    """Ask for messages of a stream, from `offset` on and below `stop`.

    A front door sends Pull to a shard. The shard answers with Pulled or Refused. Pulled has about
    `bytes_max` bytes of messages, without those that were published for the queue `watch` too.
    """

    request: int
    queue: int
    watch: int
    offset: int
    stop: int
    bytes_max: int


class Pulled(Message, tag="pulled", frozen=True):
    """Answer Pull of a front door.

    `messages` holds `count` stored messages back to back, and `offsets` one u64 for each of them.
    `next_offset` is the offset to pull from next. Without messages, and with the `next_offset` that
    was asked for, the messages there are not on stable storage yet.
    """

    request: int
    count: int
    offsets: bytes
    messages: bytes
    next_offset: int


class Unwatch(Message, tag="unwatch", frozen=True):
    """End the watch that began with InspectStream.

    A front door sends Unwatch to a shard. The shard forgets what it remembered for `watch`. There
    is no answer.
    """

    queue: int
    watch: int


class StoreOffset(Message, tag="store-offset", frozen=True):
    """Store the offset of a named consumer of a stream that reads elsewhere.

    The controller sends StoreOffset to a shard. `offset` is the next offset that the consumers of
    this name want; None forgets the name. The shard answers with Done, or with Refused (406) if
    consumers are reading under the name, if the offset is beyond the end of the stream, or if the
    stream has too many names.
    """

    request: int
    queue: int
    name: str
    offset: int | None


class AttachReader(Attach, tag="attach-reader", frozen=True):
    """Attach a consumer to a stream.

    A front door sends AttachReader to a shard. The shard answers with AttachedAt or Refused. In
    each delivery to such a consumer the offsets of the messages, u64 each, come before the
    messages.
    """

    read: ReadFrom = ReadFrom()


class AttachedAt(Attached, tag="attached-at", frozen=True):
    """Answer AttachReader of a front door: the consumer begins at `offset`."""

    offset: int


class AttachBounded(AttachReader, tag="attach-bounded", frozen=True):
    """Attach a consumer to a stream, bounded from the beginning.

    A front door sends AttachBounded to a shard, in place of AttachReader. SetBounds explains `stop`
    and `mark`.
    """

    stop: int | None = None
    mark: int | None = None


class AttachStreamPart(AttachBounded, tag="attach-stream-part", frozen=True):
    """Attach a consumer of one stream for a group consumer.

    A front door sends AttachStreamPart to a shard, in place of AttachBounded. AttachPart explains
    `group`.
    """

    group: int = 0


class SetBounds(Message, tag="set-bounds", frozen=True):
    """Change the bounds of a consumer of a stream.

    A front door sends SetBounds to a shard. From now on the consumer gets nothing from offset
    `stop` on; None removes this bound. The shard sends MarkReached once, when the consumer has
    settled all messages below `mark`; None asks for no MarkReached. There is no other answer.
    """

    consumer: int
    stop: int | None
    mark: int | None


class MarkReached(Message, tag="mark-reached", frozen=True):
    """Tell a front door that a consumer has settled all messages below `offset`.

    The shard sends MarkReached once for each mark, when `offset` has reached it. There is no
    answer.
    """

    consumer: int
    offset: int


class SyncSettled(Message, tag="sync-settled", frozen=True):
    """Ask a shard to make last what was settled in these queues until now.

    A front door sends SyncSettled to a shard when a client commits a transaction, behind the SETTLE
    of the transaction. The shard answers with SettledSynced. `number` is one that the front door
    uses once for each process of the shard.
    """

    number: int
    queues: list[int]


class SettledSynced(Message, tag="settled-synced", frozen=True):
    """Answer SyncSettled of a front door: all of it is on stable storage of all nodes in sync.

    Without `lasts` the disk has no room for it. Then the messages may come again when another
    process of the shard begins.
    """

    number: int
    lasts: bool


class Detach(Message, tag="detach", frozen=True):
    """Stop the deliveries to a consumer.

    A front door sends Detach to a shard. Unsettled deliveries stay with the consumer until they are
    settled or until Release. The shard answers with Done(request, closed=...), after the last
    delivery.
    """

    request: int
    consumer: int


class Release(Message, tag="release", frozen=True):
    """Tell a shard that these consumers are gone for good.

    A front door sends Release when a channel or a connection closed. The shard detaches consumers
    that are still attached and requeues the messages that they hold in their places, as
    redelivered. The shard answers with Done(request, closed=...).
    """

    request: int
    consumers: list[int]


class CreditReport(Message, tag="credit-report", frozen=True):
    """Tell a front door what an allotment has used, and whether messages wait.

    A shard sends CreditReport when the allotment is used up and messages wait, or went to other
    consumers of the queue; when no message waits any more; and when it gives credit back, because
    the front door said DRAIN or STOP. `used` is how many messages were delivered or given back in
    all. The front door answers with an ALLOT when it has credit.
    """

    allotment: int
    used: int
    waits: bool


class Cancelled(Message, tag="cancelled", frozen=True):
    """Tell a front door that the queue of a consumer is gone.

    The shard sends Cancelled. The front door sends basic.cancel to the client. There is no answer.
    """

    consumer: int


class AckTimeout(Message, tag="ack-timeout", frozen=True):
    """Ask a front door to close a channel that has held a message for longer than `timeout_ms`.

    The shard sends AckTimeout. The messages that the channel holds stay with it until its Release.
    """

    connection: int
    channel: int
    timeout_ms: int


class Get(Message, tag="get", frozen=True):
    """Get one message of a queue, for basic.get.

    A front door sends Get to a shard. The shard answers with Got or Refused. `consumer` is
    the pseudo consumer of the channel on this shard, which holds the delivery; it is 0 with
    `no_ack`.
    """

    request: int
    queue: int
    consumer: int
    connection: int
    channel: int
    no_ack: bool


class Got(Message, tag="got", frozen=True):
    """Answer Get of a front door.

    `message` is one stored message (drawn in packer.pxi), or b"" when the queue is empty.
    `remaining` is the number of messages that are still ready.
    """

    request: int
    message: bytes
    number: int  # delivery number within `consumer`
    redelivered: bool
    remaining: int
    times: int = 0  # how often the message came back, in a queue with a delivery limit


class Count(Message, tag="count", frozen=True):
    """Ask for the number of messages and consumers of a queue.

    A peer sends Count to a shard. The shard answers with Done(request, messages, consumers). A
    queue that takes no more consumers is Refused, so that no peer takes it for a queue that stays.
    """

    request: int
    queue: int


class CountUnsettled(Message, tag="count-unsettled", frozen=True):
    """Ask how many messages of a queue, up to the mark `until`, are not settled.

    The controller sends CountUnsettled to a shard. An `until` of 0 means the present end of the
    queue. For a stream, the shard counts the messages that are not on stable storage. The shard
    answers with UnsettledCount(request) or Refused. A mark is valid for one life of the shard's
    process. The mark of a stream is the offset behind the last message.
    """

    request: int
    queue: int
    until: int = 0


class UnsettledCount(Message, tag="unsettled-count", frozen=True):
    """Answer CountUnsettled of the controller.

    `until` is the mark that was used. `count` is the number of messages up to it, both ready and
    held by consumers.
    """

    request: int
    until: int
    count: int


class DeadLetterUpTo(Message, tag="dead-letter-up-to", frozen=True):
    """Dead-letter the unsettled messages of a queue up to the mark `until`.

    The controller sends DeadLetterUpTo to a shard, with a mark from UnsettledCount. The messages go
    to the dead-letter exchange of the queue for `reason`, also those that a consumer holds, but not
    those that wait for a delayed retry. The shard answers with Done(request, messages) or Refused.
    """

    request: int
    queue: int
    until: int
    reason: str


class TakeLetters(Message, tag="take-letters", frozen=True):
    """Take the next messages of a queue that leaves this shard.

    The controller sends TakeLetters. The shard answers with Letters or Refused. `number` rises by
    one in the life of a `mover`: the shard settles the messages of the Letters with the number
    before, because the new life of the queue has them on stable storage. A request that comes twice
    gets the same messages again. The first request of a mover that `goes_on` for another one marks
    the messages that the other one had taken as delivered before. `to` is the id of the new life.
    """

    request: int
    queue: int
    mover: int
    number: int
    to: int
    goes_on: bool = False


class Letters(Message, tag="letters", frozen=True):
    """Answer TakeLetters: `count` messages in order, as whole records of the new life of the queue.

    `marked` has runs (first, last) of ordinals of messages that were delivered before, and `times`
    the ordinals of messages that came back, with how often. `left` is how many messages the queue
    has behind these.
    """

    request: int
    count: int
    records: bytes
    marked: list[tuple[int, int]] = []
    times: list[tuple[int, int]] = []
    left: int = 0


class PutLetters(Message, tag="put-letters", frozen=True):
    """Give a queue the next messages of its life on another shard.

    The controller sends PutLetters. The shard answers with Done when the messages are on stable
    storage, or with Refused. `mover` and `number` are those of TakeLetters. A mover begins with
    number 0, which has no messages. A request that comes twice is stored once. If this process of
    the shard has not had the number before, the messages may be there already and are marked as
    delivered before. The other fields are those of Letters.
    """

    request: int
    queue: int
    mover: int
    number: int
    records: bytes = b""
    marked: list[tuple[int, int]] = []
    times: list[tuple[int, int]] = []


class AskLetters(Message, tag="ask-letters", frozen=True):
    """Ask which batch of PutLetters a queue has taken in last.

    The controller sends AskLetters. The shard answers with LastLetters or Refused. So a controller
    goes on for the one before it, and no message comes twice.
    """

    request: int
    queue: int


class LastLetters(Message, tag="last-letters", frozen=True):
    """Answer AskLetters. A `mover` of 0: this process of the shard has taken in none."""

    request: int
    mover: int
    number: int


class TakeChunks(Message, tag="take-chunks", frozen=True):
    """Ask for messages of a stream that moves to another shard, from `offset` on.

    The controller sends TakeChunks. The shard answers with Chunks or Refused. The code GAP says
    that messages are lost there by damage, BEYOND that the stream has no messages up to the offset,
    though it had. Nothing changes at the shard.
    """

    request: int
    queue: int
    offset: int


class Chunks(Message, tag="chunks", frozen=True):
    """Answer TakeChunks with whole chunks of messages that are on stable storage.

    `first` is the offset of their first message, and `behind` that behind their last one. `oldest`
    is the first offset of the stream, `newest_before` the latest timestamp before it, and `end` the
    offset behind the last message, whether that is on stable storage or not. `behind_bytes` is how
    much the stream has behind these chunks. `before` is the checksum of the chunk in front of them,
    -1 if none ends there, and None if the stream has nothing before, or nothing to take until it
    is synced.
    """

    request: int
    first: int
    behind: int
    chunks: bytes
    oldest: int
    newest_before: int
    end: int
    behind_bytes: int
    before: int | None = None


class PutChunks(Message, tag="put-chunks", frozen=True):
    """Give a stream that is `arriving` the next messages of its life on another shard.

    The controller sends PutChunks. The shard answers with Done when the messages are on stable
    storage, at once if they are, or with Refused. The code ELSEWHERE says that they do not begin
    where the stream ends: StreamInspected says where that is. The code BEYOND says that another
    chunk is in front of them here: the other shard has lost messages since, and taken in others.
    The other fields are those of Chunks. A stream that has nothing from `oldest` on begins anew
    there. Without chunks, the question is whether the stream has all up to `behind`.
    """

    request: int
    queue: int
    first: int
    behind: int
    chunks: bytes
    oldest: int
    newest_before: int
    before: int | None = None


class TakePlaces(Message, tag="take-places", frozen=True):
    """Ask what a stream that moves to another shard knows beside its messages.

    The controller sends TakePlaces. The shard answers with Places or Refused.
    """

    request: int
    queue: int


class Places(Message, tag="places", frozen=True):
    """Answer TakePlaces: the positions of named consumers, and the last sequences of producers.

    The sequences are drawn in sequences.pyx.
    """

    request: int
    positions: dict[bytes, int]
    producers: bytes


class PutPlaces(Message, tag="put-places", frozen=True):
    """Give a stream what its life on another shard knows beside its messages.

    The controller sends PutPlaces. The shard answers with Done when it is on stable storage, or
    with Refused. `positions` take the place of all that a stream has that is `arriving`. With
    `instead_of`, only the positions are set that are still as this says, and a second later they
    are on stable storage; a name that `positions` does not have is forgotten.
    """

    request: int
    queue: int
    positions: dict[bytes, int]
    producers: bytes = b""
    instead_of: dict[bytes, int] | None = None


class Recall(Message, tag="recall", frozen=True):
    """Ask how many messages of a queue are handed out, or have them back.

    The controller sends Recall. The shard answers with Done(request, messages). With `at_once`, the
    shard puts all these messages back to their places as delivered before, and the messages that
    rest, too. A later ack of one of them is no error.
    """

    request: int
    queue: int
    at_once: bool = False


class Purge(Message, tag="purge", frozen=True):
    """Purge a queue, or the `count` messages that would be delivered next.

    A peer sends Purge to a shard; only the controller gives a `count`. The shard answers with
    Done(request, messages) or Refused. The code NO_ROOM says that the disk has no room to begin a
    stream anew, so that its messages stay. A stream is not purged by count.
    """

    request: int
    queue: int
    count: int | None = None


class DeadLetters(Message, tag="dead-letters", frozen=True):
    """Hand dead letters, or delayed messages that are due, to a front door that publishes them.

    The shard sends DeadLetters to one front door at a time. The front door answers with
    DeadLettersPublished(number) when the copies are on stable storage. Until then the shard keeps
    the messages, and gives them to another front door if this one goes.

    `messages` holds `count` stored messages back to back. They left `queue` for `reason`:
    "expired", "rejected", "maxlen" or "delivery_limit". They are to be published to `exchange` with
    `routing_key`, or with the routing keys they have if that is None. The headers of a message may
    name another exchange. A message that names none is dropped if `exchange` is None. `queue` is
    the id of the queue where the shard does not know its name.

    The reason "delayed" is no death: the messages have waited for `exchange` and are due.

    With `insist`, a message that its only queue refuses is not stored, so DeadLettersPublished
    leaves it to the shard.
    """

    number: int
    vhost: str
    queue: str | int
    reason: str
    exchange: str | None
    routing_key: str | None
    insist: bool
    count: int
    messages: bytes


class DeadLettersPublished(Message, tag="dead-letters-published", frozen=True):
    """Answer DeadLetters `number` of a shard.

    A front door sends DeadLettersPublished when the messages are stored in their queues, or are
    routed to no queue. `left` has runs (first, last) of ordinals of messages that could not be
    stored: the shard hands these over again some time later.
    """

    number: int
    left: list[tuple[int, int]] = []


class DedupAsk(Message, tag="dedup-ask", frozen=True):
    """Ask which messages are the first with their ids (deduplication over several front doors).

    A front door sends DedupAsk to a shard, when there are several front doors, for exchanges and
    queues that take each message once. The shard answers with DedupVerdicts.

    `things` has (id of the queue, or vhost/name of the exchange; how many ids are remembered for
    it). `ids` has (index into `things`, id, ms for which the id is remembered, 0 for ever). The ids
    have the numbers from `first` on, which this front door uses once in its life.

    The front door sends DedupOutcome for each id that is FIRST. The shard sends DedupOutcome for
    each id that FOLLOWS.
    """

    request: int
    first: int
    things: list[tuple[int | str, int]]
    ids: list[tuple[int, bytes, int]]


class DedupVerdicts(Message, tag="dedup-verdicts", frozen=True):
    """Answer DedupAsk of a front door.

    `verdicts` has one byte for each id: FIRST, STORED_BEFORE or FOLLOWS.
    """

    request: int
    verdicts: bytes


class DedupOutcome(Message, tag="dedup-outcome", frozen=True):
    """Say which first copies of messages were stored and which were lost.

    A front door sends DedupOutcome to a shard with the numbers of its own messages that were FIRST.
    The shard sends DedupOutcome to a front door with the numbers of the messages that FOLLOWS was
    said of: the fate is that of the copy that they follow. There is no answer.
    """

    stored: list[int]
    lost: list[int]


class DedupForget(Message, tag="dedup-forget", frozen=True):
    """Tell a shard that an exchange (vhost/name) is deleted.

    A front door sends DedupForget. The shard forgets the ids of the exchange. There is no answer.
    """

    thing: str


class Reserve(Message, tag="reserve", frozen=True):
    """Set room aside for a transaction.

    A front door sends Reserve to a shard. `wanted` has, for each queue that may refuse publishes,
    its id and the body bytes of each message that the queue would get. The shard answers with
    Done(request) when all of them fit, or with Refused(request, 406), and then sets no room aside.
    `number` is chosen by the front door, which uses it once in its life.
    """

    request: int
    number: int
    wanted: list[tuple[int, list[int]]]


class Redeem(Message, tag="redeem", frozen=True):
    """Assign the publishes from here to the next Redeem or Unreserve to transaction `number`.

    A front door sends Redeem to a shard. The queues take all messages of the transaction, out of
    the room that was set aside. A `number` of 0 means that the publishes are of no such
    transaction. There is no answer.
    """

    number: int


class Unreserve(Message, tag="unreserve", frozen=True):
    """Free the room that is left of the reservation `number`, if there is any.

    A front door sends Unreserve to a shard. There is no answer.
    """

    number: int


class Snapshot(Message, tag="snapshot", frozen=True):
    """Make a snapshot of the files of the shard in a directory, which must not be there.

    The controller sends Snapshot. The shard answers with Done when the snapshot is on stable
    storage, or with Refused, with the reason for people as `text`.
    """

    request: int
    directory: str


class Done(Message, tag="done", frozen=True):
    """Answer a request that was carried out; the shard sends Done to the peer that asked.

    Each request says which of the numbers its Done has.
    """

    request: int
    messages: int = 0
    consumers: int = 0
    # The ids of the auto_delete queues that will be deleted because no consumer is left.
    closed: list[int] = []


class Refused(Message, tag="refused", frozen=True):
    """Answer a request that was not carried out; the shard sends Refused to the peer that asked.

    `code` is an AMQP reply code (404, 405, 403, 406) or NO_ROOM. `text` is what the peer's handler
    puts into words: "gone" (the shard has no such queue), "in use", "not empty", "exclusive use" or
    "exclusive consumer".
    """

    request: int
    code: int
    text: str


Control = (
    Join | Outdated | Hello | Paused | FrontDoorGone | TakenForGone | Assign | CreateQueues
    | DeleteQueue | DropVhost | AutoDeleted | FirstConsumer | Stats | ListQueues | QueueIds
    | StatsReply | Alarm | Attach
    | AttachPart | Attached | InspectStream | StreamInspected | Pull | Pulled | Unwatch
    | StoreOffset | AttachReader | AttachedAt | AttachBounded | AttachStreamPart | SetBounds
    | MarkReached | SyncSettled | SettledSynced
    | Detach | Release | CreditReport | Cancelled | AckTimeout | Get | Got | Count
    | CountUnsettled | UnsettledCount | DeadLetterUpTo | TakeLetters | Letters | PutLetters
    | AskLetters | LastLetters | TakeChunks | Chunks | PutChunks | TakePlaces | Places | PutPlaces
    | Recall | Purge | DeadLetters
    | DeadLettersPublished | DedupAsk | DedupVerdicts | DedupOutcome | DedupForget | Reserve
    | Redeem | Unreserve | Snapshot | Done | Refused
)  # fmt: skip
