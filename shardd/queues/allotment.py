"""Use the credit that a front door has allotted to consumers at this shard.

The front door divides a limit among shards and says why (broker/front_door/consume/credit.py).
Here an allotment is two numbers: up to which number its consumers may be given messages, and how
many they were given or have left. Acks change neither of them.

An allotment belongs to one consumer, or to all consumers that a group consumer has at this shard.
The queues of the latter use it in the order of the log (log_order.py).
"""

from __future__ import annotations

from typing import Final

from shardmq.shardd.queues.log_order import LogOrder

NO_END: Final = 1 << 62  # above any number


class Allotment:
    """The credit of one consumer, or of the consumers of a group consumer.

    `peer` is the object that the caller reports to. `is_limited` says that nothing may be delivered
    until the front door allows it. `prefetch` is that of a group consumer, for listings.
    """

    __slots__ = (
        "_drains", "_said_waits", "allowed", "number", "order", "peer", "prefetch", "used",
        "useless_at",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        peer: object = None,
        order: LogOrder | None = None,
        is_limited: bool = True,
        used: int = 0,
        prefetch: int = 0,
    ) -> None:
        self.number = number
        self.peer = peer
        self.order = order  # None: the allotment of one consumer
        self.allowed = 0 if is_limited else NO_END
        self.used = used
        self.prefetch = prefetch
        # The state of a queue whose ready messages were of no use to it, None for any other queue.
        self.useless_at: tuple[int, int, int, int] | None = None
        self._drains = False
        self._said_waits = False  # that messages wait, as the front door knows it

    @property
    def is_limited(self) -> bool:
        return self.allowed < NO_END

    @property
    def left(self) -> int:
        """Return how many more messages may be handed out."""
        return self.allowed - self.used

    @property
    def is_asleep(self) -> bool:
        """Return whether nothing is left and the front door knows that messages wait."""
        return self._said_waits and self.allowed <= self.used

    def allow(self, allowed: int | None, drains: bool) -> bool:
        """Take what the front door allows (None: any number), and let a queue use it.

        With `drains`, credit that cannot be used at once is given back. Return whether the front
        door must be told. Otherwise the caller lets the queue of a single consumer look.
        """
        self.allowed = NO_END if allowed is None else allowed
        self._drains = drains
        return drains and self.order is not None and self.order.is_idle and self.ended(False)

    def stop(self, allowed: int) -> None:
        """Give back all credit. The caller tells the front door."""
        self.allowed = allowed
        # A consumer that had no limit may have been given more than is allowed now.
        self.used = max(self.used, allowed)
        self._drains = self._said_waits = False

    def ended(self, waits: bool, blocked: bool = False) -> bool:
        """End a pass of a queue; return whether the front door must be told.

        `waits` says that some queue has messages which could go if there was credit, or if its turn
        came. `blocked` says that the client has to take some bytes first.
        """
        if self.left > 0:
            if self._drains and (blocked or not waits):
                self.used = self.allowed
                self._drains = self._said_waits = False
                return True
            return False
        needs = waits and not blocked
        if needs == self._said_waits or (blocked and waits):
            return False
        self._said_waits = needs
        return True

    @property
    def report(self) -> tuple[int, int, bool]:
        """Return the number of the allotment, what it has used, and whether messages wait."""
        return self.number, self.used, self._said_waits
