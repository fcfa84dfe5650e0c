"""Counters of a front door since its start, for metrics.

Each number goes up once per batch, not per message.
"""

from __future__ import annotations

from shardmq.broker.amqp.frames import Sizes
from shardmq.shardd.wire.histogram import SUM

MESSAGE_BYTES = "message_bytes"


class Counts:
    """Counters of messages, of channels that were opened, and of logins.

    Messages of a transaction are `received` when they are published. `sizes` counts the bodies of
    received messages.
    """

    __slots__ = (
        "channels_opened",
        "confirmed",
        "delivered_auto",
        "delivered_manual",
        "got_auto",
        "got_empty",
        "got_manual",
        "logins_failed",
        "logins_succeeded",
        "received",
        "received_confirm",
        "returned",
        "sizes",
    )

    def __init__(self) -> None:
        self.received = self.received_confirm = self.confirmed = self.returned = 0
        # Deliveries to consumers that need not acknowledge, and to those that must.
        self.delivered_auto = self.delivered_manual = 0
        self.got_auto = self.got_manual = self.got_empty = 0
        self.channels_opened = 0
        self.logins_succeeded = self.logins_failed = 0
        self.sizes = Sizes()

    def report(self) -> dict[str, float]:
        """Return the counters by the names they have in metrics."""
        told = {name: float(getattr(self, name)) for name in self.__slots__ if name != "sizes"}
        sizes = {
            f"{MESSAGE_BYTES}.{k}": float(count)
            for k, count in enumerate(self.sizes.classes)
            if count
        }
        return told | sizes | {f"{MESSAGE_BYTES}.{SUM}": float(self.sizes.sum)}
