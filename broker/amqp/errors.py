"""Errors of clients, with the reply code that the client is told."""

from __future__ import annotations

from shardmq.broker.amqp.spec import REPLY_NAMES

REPLY_TEXT_BYTES_MAX = 255  # a short string


class AmqpException(Exception):
    """An error of a client.

    `class_id` and `method_id` name the method that failed; they are 0 when none did.
    """

    def __init__(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(code, text, class_id, method_id)
        self.code = code
        self.text = text
        self.class_id = class_id
        self.method_id = method_id

    @property
    def reply_text(self) -> str:
        """Return `NAME - text`, as RabbitMQ writes it.

        It is cut between characters to what a short string holds.
        """
        full = f"{REPLY_NAMES.get(self.code, str(self.code))} - {self.text}"
        return full.encode("utf-8", "replace")[:REPLY_TEXT_BYTES_MAX].decode("utf-8", "ignore")

    def __str__(self) -> str:
        return f"{self.code} {self.reply_text}"


class ChannelException(AmqpException):
    """The error ends the channel."""


class ConnectionException(AmqpException):
    """The error ends the connection."""
