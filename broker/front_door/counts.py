"""Counters of a front door since its start, for metrics.

Each number goes up once per batch, not per message.
"""

from __future__ import annotations

from shardmq.broker.front_door.hot_state import MessageCounts
from shardmq.shardd.wire.histogram import SUM

MESSAGE_BYTES = "message_bytes"
# The counters of a channel: what came from its client and what went to it.
OF_CHANNEL = (
    "published", "confirmed", "returned", "unroutable_dropped", "acked", "redelivered",
    "delivered", "delivered_manual", "delivered_auto", "got_manual", "got_auto", "got_empty",
)  # fmt: skip
OF_CONNECTION = ("recv_oct", "send_oct")
# Deliveries that are `auto` went to consumers that need not acknowledge, others to those that must.
COUNTED = (
    "channels_opened", "confirmed", "delivered_auto", "delivered_manual", "got_auto", "got_empty",
    "got_manual", "received", "received_confirm", "returned",
)  # fmt: skip


class Counts(MessageCounts):
    """Counters of messages, of channels that were opened, and of logins.

    Messages of a transaction are `received` when they are published. `sizes` counts the bodies of
    received messages.
    """

    __slots__ = ("logins_failed", "logins_succeeded")

    def __init__(self) -> None:
        self.logins_succeeded = self.logins_failed = 0

    def report(self) -> dict[str, float]:
        """Return the counters by the names they have in metrics."""
        told = {name: float(getattr(self, name)) for name in (*COUNTED, *self.__slots__)}
        sizes = {
            f"{MESSAGE_BYTES}.{k}": float(count)
            for k, count in enumerate(self.sizes.classes)
            if count
        }
        return told | sizes | {f"{MESSAGE_BYTES}.{SUM}": float(self.sizes.sum)}
