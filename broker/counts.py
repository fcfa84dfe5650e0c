"""What a front door did since its start, for metrics: each number goes up once per batch, not per message."""

from __future__ import annotations


class Counts:
    """Messages, but for `channels_opened`. `received` holds those of transactions when they are published."""

    __slots__ = (
        "channels_opened",
        "confirmed",
        "delivered_auto",
        "delivered_manual",
        "got_auto",
        "got_empty",
        "got_manual",
        "received",
        "received_confirm",
        "returned",
    )

    def __init__(self) -> None:
        self.received = self.received_confirm = self.confirmed = self.returned = 0
        self.delivered_auto = self.delivered_manual = 0  # to consumers that need not, and must, acknowledge
        self.got_auto = self.got_manual = self.got_empty = 0
        self.channels_opened = 0

    def report(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in self.__slots__}
