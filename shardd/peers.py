"""Know the peers of a shard (front doors, the controller), and what waits to be sent to each.

This file keeps and orders; shard.py and the files beside it decide what messages mean. A peer is
one process: a process that starts again is another peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

from shardmq.shardd.lending import Lender
from shardmq.shardd.queues import Allotment, Consumer, Getter, Window
from shardmq.shardd.short_way import HeldState, PeerState
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as m

# The bytes of deliveries that may be on their way from this shard to one client. The window must
# hold at least four reads and chunks (measured). A lent body weighs a quarter (LENT_SHARE in
# wire/buffer.pxd), so a client that takes nothing may have four times as many bytes of lent bodies.
# Its front door copies these after a second.
CONNECTION_WINDOW_BYTES = 1 << 20
# The bytes of publishes that a shard takes in before it credits them: a quarter of the window of a
# front door, so that a trickle of publishes costs no message of its own.
PUBLISH_CREDIT_BYTES = 256 << 10

# How the endpoint of a peer begins that comes by a session (sessions.py).
SESSION = "session:"


class Outgoing(NamedTuple):
    endpoint: str
    message: envelope.Parts


_new_tuple = tuple.__new__  # does what Outgoing(...) does, without a Python function in between


class BatchState(Enum):
    """The state of a batch that wants a confirm."""

    APPENDING = "appending"  # the store is appending the batch
    WAITING = "waiting"  # appended; a sync that began after the append must end first
    CONFIRMABLE = "confirmable"  # the messages that were not refused need no sync any more
    FAILED = "failed"  # nobody knows how much of the batch the store has


APPENDING, WAITING, CONFIRMABLE, FAILED = BatchState

# The states that may follow each state. A batch that failed stays unconfirmed, and so do all later
# batches of its front door: a confirm covers all batches before it.
NEXT_STATES: Final[dict[BatchState, frozenset[BatchState]]] = {
    APPENDING: frozenset((WAITING, CONFIRMABLE, FAILED)),
    WAITING: frozenset((CONFIRMABLE,)),
    CONFIRMABLE: frozenset(),
    FAILED: frozenset(),
}

Refused = tuple[int, int, int, int]
"""(connection, channel, first, last) confirm numbers of messages that were not taken."""


class BatchMissing(Exception):
    """Some batches of a front door did not arrive.

    A confirm of a later batch would also confirm the missing ones.
    """


class HeldBatch(HeldState):
    """A batch that wants a confirm and has none yet.

    `sync` is the number of the sync that the batch waits for in the state WAITING.
    """

    __slots__ = ()

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.state: BatchState = APPENDING
        self.refused: Sequence[Refused] = ()

    def wait_for(self, sync: int) -> None:
        """Note that the append has ended, and which sync makes the messages durable."""
        assert self.state is APPENDING
        self.sync = sync
        self.state = WAITING

    def need_no_sync(self) -> None:
        """Note that the append has ended, and that no message of the batch needs a sync."""
        assert self.state is APPENDING
        self.state = CONFIRMABLE

    def refuse(self, refused: Sequence[Refused]) -> None:
        """Note that no message of the batch was taken, or none that a publisher may count on."""
        self.refused = refused
        self.need_no_sync()

    def fail(self) -> None:
        """Note that the append broke off."""
        if self.state is APPENDING:
            self.state = FAILED


class Peer(PeerState):
    """A front door, or the controller."""

    def __init__(
        self,
        number: int,
        incarnation: int,
        endpoint: str,
        epoch: int,
        shard: int,
        process: int = 0,
    ) -> None:
        self.number = number
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.epoch = epoch
        self.process = process  # the incarnation that the controller knows of
        self.held: deque[HeldBatch] = deque()
        self.next_batch: int | None = None  # None: the first batch may have any number
        self.taken = 0  # the weight of publishes since the last credit
        self.lender: Lender | None = None  # of the bodies that this front door lends
        self.has_freed = False  # holds of lent bodies are to be given back
        self.withheld = 0  # the weight of publishes taken in that are not to be credited now
        self.has_news = False  # `take` has something to send, apart from confirms and credit
        self.is_paused = False  # nothing more comes from this peer
        self.holders: dict[int, Consumer | Getter] = {}
        self.windows: dict[int, Window] = {}
        self.allotments: dict[int, Allotment] = {}  # of group consumers, by their number
        self.who = (number, incarnation, epoch, shard)
        self.sender = envelope.sender(*self.who)
        self.writer = codec.DeliveryWriter(*self.who)
        self.before_deliveries: list[envelope.Parts] = []
        self.after_deliveries: list[envelope.Parts] = []

    def sees(self, memory: memoryview) -> None:
        """Let the front door lend bodies from this memory."""
        self.lender = Lender(memory, self._has_freed)

    def _has_freed(self) -> None:
        self.has_news = self.has_freed = True

    def window(self, connection: int) -> Window:
        found = self.windows.get(connection)
        if found is None:
            found = self.windows[connection] = Window(CONNECTION_WINDOW_BYTES)
        return found

    def forget_window(self, connection: int) -> None:
        """Forget the window of a connection that has no consumer any more."""
        window = self.windows.get(connection)
        if window is not None and not window.consumers:
            del self.windows[connection]

    def check_first(self, batch: int) -> None:
        """Check a batch whose number is not the next one.

        Raises BatchMissing unless it is the first batch of the peer.
        """
        if self.next_batch is not None:
            raise BatchMissing(
                f"front door {self.number}: batch {batch} came instead of {self.next_batch}"
            )

    def hold(self, batch: int) -> HeldBatch:
        """Remember a batch, about to be appended, until it is confirmed."""
        held = HeldBatch(batch)
        self.held.append(held)
        return held

    # -- out ---------------------------------------------------------------------------------------

    def tell(self, what: m.Control, *, after_deliveries: bool = False) -> None:
        message = envelope.control(*self.who, what)
        (self.after_deliveries if after_deliveries else self.before_deliveries).append(message)
        self.has_news = True

    def confirm(self, syncs_ended: int) -> None:
        """Confirm batches in their order, up to the first that is not confirmable.

        `syncs_ended` is the number of the last sync that ended well, with all syncs before it.
        """
        last: HeldBatch | None = None
        refused: list[Refused] = []
        waiting = self.held
        while waiting:
            first = waiting[0]
            if first.state is WAITING and first.sync <= syncs_ended:
                first.state = CONFIRMABLE
            if first.state is not CONFIRMABLE:
                break
            last = waiting.popleft()
            refused += last.refused
        if last is not None:
            # A client that publishes to itself gets its message before the confirm, as from
            # RabbitMQ.
            self.after_deliveries.append(envelope.confirmed(*self.who, last.batch, refused))
            self.has_news = True

    def take(self, outgoing: list[Outgoing]) -> None:
        """Move all messages that wait for this peer to `outgoing`."""
        self.has_news = False
        endpoint = self.endpoint
        if self.taken >= PUBLISH_CREDIT_BYTES:
            self.before_deliveries.append(envelope.credit(*self.who, [(0, self.taken)]))
            self.taken = 0
        if self.before_deliveries:
            outgoing += [Outgoing(endpoint, message) for message in self.before_deliveries]
            self.before_deliveries.clear()
        deliveries = self.writer.take_parts()
        if deliveries is not None:
            outgoing.append(_new_tuple(Outgoing, (endpoint, deliveries)))
        # Behind the deliveries: until then these bodies are the shard's.
        if self.has_freed and self.lender is not None:
            self.has_freed = False
            self.after_deliveries.append(envelope.freed(*self.who, self.lender.take_freed()))
        if self.after_deliveries:
            outgoing += [
                _new_tuple(Outgoing, (endpoint, message)) for message in self.after_deliveries
            ]
            self.after_deliveries.clear()


def refused_runs(
    message: envelope.Message, ordinals: Sequence[int], unnumbered: int | None = None
) -> list[Refused]:
    """Return the confirm numbers of these messages of a batch, in runs of neighbours.

    With `unnumbered`, the result has one entry with the number 0 for each channel that has messages
    without confirm numbers among them, because a transaction must hear that it was not stored.
    `unnumbered` is the flag beside the channel: PARTLY_REFUSED if other messages of the batch were
    taken, else 0.
    """
    told: set[tuple[int, int]] = set()
    found: list[Refused] = []
    for ordinal in ordinals:
        connection, channel, seq = codec.run_of(message, ordinal)
        if not seq:
            if unnumbered is not None and (connection, channel) not in told:
                told.add((connection, channel))
                found.append((connection, channel | unnumbered, 0, 0))
            continue
        if found and found[-1][:2] == (connection, channel) and found[-1][3] + 1 == seq:
            found[-1] = (connection, channel, found[-1][2], seq)
        else:
            found.append((connection, channel, seq, seq))
    return found


def known_runs(
    message: envelope.Message, known: Sequence[int], altered: Collection[int]
) -> list[tuple[int, int, int, int]]:
    """Return the confirm numbers of messages that some queue had before, in runs of neighbours.

    The flag KNOWN or ALTERED stands beside the channel.
    """
    kinds = (
        (m.KNOWN, [n for n in known if n not in altered]),
        (m.ALTERED, [n for n in known if n in altered]),
    )
    return [
        (connection, channel | kind, first, last)
        for kind, ordinals in kinds
        for connection, channel, first, last in codec.runs_of(message, ordinals)
    ]
