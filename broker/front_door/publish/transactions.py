"""Publishes and settles that a transactional channel holds back until commit, in their order.

Pure bookkeeping of one channel: what is held is opaque here. The caller sends what `take` returns,
and answers commit-ok once every shard concerned has it on stable storage. The guarantees are
RabbitMQ's: publishes come first, then settles; all or nothing holds for each queue only; after a
rollback the deliveries are unacknowledged as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from shardmq.broker.amqp.errors import ChannelException

# Limits of one channel: a transaction lives in memory until it is committed.
HELD_BYTES_MAX = 512 << 20
HELD_SETTLES_MAX = 1_000_000

PRECONDITION_FAILED = 406
TX = 90
CONFIRM = 85
SELECT, COMMIT, ROLLBACK = 10, 20, 30

P = TypeVar("P")  # a publish, as the caller keeps it
S = TypeVar("S")  # a settle, as the caller keeps it


class HeldBack(NamedTuple, Generic[P, S]):
    """All that a transaction held back."""

    publishes: list[P]
    settles: list[S]


class Transaction(Generic[P, S]):
    """The open transaction of a channel. After commit or rollback the next is open at once."""

    def __init__(self) -> None:
        self._publishes: list[P] = []
        self._settles: list[S] = []
        self.held_bytes = 0
        self.settled_messages = 0  # of the settles that are held

    def publish(self, publish: P, stored_bytes: int) -> None:
        """Hold a publish back. Raises ChannelException when the transaction has too many bytes."""
        if self.held_bytes + stored_bytes > HELD_BYTES_MAX:
            raise ChannelException(
                PRECONDITION_FAILED, f"more than {HELD_BYTES_MAX} bytes in one transaction", TX, 0
            )
        self.held_bytes += stored_bytes
        self._publishes.append(publish)

    def settle(self, settle: S, messages: int = 1) -> None:
        """Hold a settle of so many messages back.

        Raises ChannelException when the transaction has too many.
        """
        if len(self._settles) >= HELD_SETTLES_MAX:
            text = f"more than {HELD_SETTLES_MAX} acknowledgements in one transaction"
            raise ChannelException(PRECONDITION_FAILED, text, TX, 0)
        self._settles.append(settle)
        self.settled_messages += messages

    @property
    def publishes(self) -> Sequence[P]:
        """Return the publishes that are held, in order."""
        return self._publishes

    @property
    def settles(self) -> Sequence[S]:
        """Return the settles that are held, in order."""
        return self._settles

    @property
    def publish_count(self) -> int:
        return len(self._publishes)

    def take(self) -> HeldBack[P, S]:
        """Return everything held, in order, and begin a new transaction: tx.commit."""
        held = HeldBack(self._publishes, self._settles)
        self._begin()
        return held

    def drop(self) -> list[S]:
        """Forget the publishes and begin a new transaction: tx.rollback.

        Returns the settles. Their deliveries are unacknowledged again.
        """
        settles = self._settles
        self._begin()
        return settles

    def _begin(self) -> None:
        self._publishes, self._settles = [], []
        self.held_bytes = self.settled_messages = 0


def select(current: Transaction[P, S] | None, *, confirming: bool) -> Transaction[P, S]:
    """Return the transaction after tx.select. A repeated tx.select keeps what is held."""
    if confirming:
        raise ChannelException(
            PRECONDITION_FAILED, "cannot switch from confirm to tx mode", TX, SELECT
        )
    return current if current is not None else Transaction()


def opened(current: Transaction[P, S] | None, method_id: int) -> Transaction[P, S]:
    """Return the transaction for tx.commit or tx.rollback (`method_id`), which need one."""
    if current is None:
        raise ChannelException(PRECONDITION_FAILED, "channel is not transactional", TX, method_id)
    return current


def check_confirm_select(current: Transaction[P, S] | None) -> None:
    """Raise ChannelException for confirm.select on a channel that is transactional."""
    if current is not None:
        raise ChannelException(
            PRECONDITION_FAILED, "cannot switch from tx to confirm mode", CONFIRM, SELECT
        )
