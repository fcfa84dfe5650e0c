"""Who talks to a shard (front doors, the controller), and what waits to be sent to each.

Keeps and orders only; what it means is decided in shard.py and controls.py. A peer is one process: when it starts anew
it is another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from shardd.queues import Consumer, Getter, Loan, Queue, Window
from shardd.wire import codec, envelope
from shardd.wire import messages as m

# Bytes of deliveries that may be on their way to one client; a window of at least four reads and chunks (measured).
CONNECTION_WINDOW_BYTES = 1 << 20
# Publishes taken in before their bytes are credited: a quarter of a front door's window, so that a trickle costs no
# message of its own.
PUBLISH_CREDIT_BYTES = 256 << 10


class Outgoing(NamedTuple):
    endpoint: str
    message: envelope.Parts


_new_tuple = tuple.__new__  # what Outgoing(...) does, without a function of Python in between


class Held:
    """A batch not yet confirmed. `sync`: number of the sync that makes it last; 0: it waits for those before it."""

    __slots__ = ("batch", "refused", "sync")

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.sync = 0
        self.refused: list[tuple[int, int, int, int]] = []


class Peer:
    """A front door, or the controller."""

    def __init__(self, number: int, incarnation: int, endpoint: str, epoch: int, shard: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.held: deque[Held] = deque()
        self.taken = 0  # bytes of publishes since the last credit
        self.has_news = False  # whether `take` has something, but for confirms and credit
        self.holders: dict[int, Consumer | Getter] = {}
        self.windows: dict[int, Window] = {}
        self._loans: WeakValueDictionary[int, Loan] = WeakValueDictionary()  # as long as some part uses them
        self._who = (number, incarnation, epoch, shard)
        self.sender = envelope.sender(*self._who)
        self.writer = codec.DeliveryWriter(*self._who)
        self._told: list[envelope.Parts] = []  # leaves before deliveries
        self._told_after: list[envelope.Parts] = []

    def window(self, connection: int) -> Window:
        found = self.windows.get(connection)
        if found is None:
            found = self.windows[connection] = Window(CONNECTION_WINDOW_BYTES)
        return found

    def forget_window(self, connection: int) -> None:
        """If no consumer of that connection needs it."""
        window = self.windows.get(connection)
        if window is not None and not window.consumers:
            del self.windows[connection]

    def loan(self, whole: int, wake: Callable[[Queue], None]) -> Loan:
        """Of the virtual consumer of that number."""
        found = self._loans.get(whole)
        if found is None:
            found = self._loans[whole] = Loan(wake)
        return found

    def hold(self, batch: int) -> Held:
        held = Held(batch)
        self.held.append(held)
        return held

    # -- out -------------------------------------------------------------------------------------------

    def tell(self, what: m.Control, *, after_deliveries: bool = False) -> None:
        message = envelope.control(*self._who, what)
        (self._told_after if after_deliveries else self._told).append(message)
        self.has_news = True

    def confirm(self, syncs_ended: int) -> None:
        """Batches in their order, as far as their syncs have ended."""
        batch = 0
        refused: list[tuple[int, int, int, int]] = []
        while self.held and self.held[0].sync <= syncs_ended:
            held = self.held.popleft()
            batch = held.batch
            refused += held.refused
        if batch:
            # A client that publishes to itself hears of its message first, as from RabbitMQ.
            self._told_after.append(envelope.confirmed(*self._who, batch, refused))
            self.has_news = True

    def take(self, outgoing: list[Outgoing]) -> None:
        """All there is to send, added to `outgoing`."""
        self.has_news = False
        endpoint = self.endpoint
        if self.taken >= PUBLISH_CREDIT_BYTES:
            self._told.append(envelope.credit(*self._who, [(0, self.taken)]))
            self.taken = 0
        if self._told:
            outgoing += [Outgoing(endpoint, message) for message in self._told]
            self._told.clear()
        deliveries = self.writer.take_parts()
        if deliveries is not None:
            outgoing.append(_new_tuple(Outgoing, (endpoint, deliveries)))
        if self._told_after:
            outgoing += [_new_tuple(Outgoing, (endpoint, message)) for message in self._told_after]
            self._told_after.clear()


def refused_runs(
    message: envelope.Message, ordinals: Sequence[int], unnumbered: bool = False
) -> list[tuple[int, int, int, int]]:
    """The confirms wanted for these messages of a batch, neighbours together. `unnumbered`: also those without a
    confirm number, as 0: a transaction must hear that it was not stored."""
    found: list[tuple[int, int, int, int]] = []
    for ordinal in ordinals:
        connection, channel, seq = codec.run_of(message, ordinal)
        if not seq:
            if unnumbered and found[-1:] != [(connection, channel, 0, 0)]:
                found.append((connection, channel, 0, 0))
            continue
        if found and found[-1][:2] == (connection, channel) and found[-1][3] + 1 == seq:
            found[-1] = (connection, channel, found[-1][2], seq)
        else:
            found.append((connection, channel, seq, seq))
    return found


def known_runs(
    message: envelope.Message, known: Sequence[int], altered: Collection[int]
) -> list[tuple[int, int, int, int]]:
    """The confirm numbers of messages that some queue had before, neighbours together; the kind beside the channel."""
    kinds = ((m.KNOWN, [n for n in known if n not in altered]), (m.ALTERED, [n for n in known if n in altered]))
    return [
        (connection, channel | kind, first, last)
        for kind, ordinals in kinds
        for connection, channel, first, last in codec.runs_of(message, ordinals)
    ]
