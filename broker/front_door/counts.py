"""What a front door did since its start, for metrics: each number goes up once per batch, not per message."""

from __future__ import annotations

from shardmq.broker.amqp.frames import Sizes
from shardmq.shardd.wire.histogram import SUM

MESSAGE_BYTES = "message_bytes"


class Counts:
    """Messages, but for `channels_opened` and logins. `received` holds those of transactions when they are published.
    `sizes`: of the bodies of those received."""

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
        self.delivered_auto = self.delivered_manual = (
            0  # to consumers that need not, and must, acknowledge
        )
        self.got_auto = self.got_manual = self.got_empty = 0
        self.channels_opened = 0
        self.logins_succeeded = self.logins_failed = 0
        self.sizes = Sizes()

    def report(self) -> dict[str, float]:
        told = {name: float(getattr(self, name)) for name in self.__slots__ if name != "sizes"}
        sizes = {
            f"{MESSAGE_BYTES}.{k}": float(count)
            for k, count in enumerate(self.sizes.classes)
            if count
        }
        return told | sizes | {f"{MESSAGE_BYTES}.{SUM}": float(self.sizes.sum)}
