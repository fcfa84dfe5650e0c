"""Who waits for what becomes of a publish, and hears it."""

from __future__ import annotations


class Answered:
    def __init__(self) -> None:
        self.said: list[str] = []

    def confirmed(self) -> None:
        self.said.append("ack")

    def lost(self) -> None:
        self.said.append("nack")
