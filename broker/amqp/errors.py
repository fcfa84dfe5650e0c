"""What a client did wrong, with the reply code it is told."""

from __future__ import annotations

from shardmq.broker.amqp.spec import REPLY_NAMES

REPLY_TEXT_BYTES_MAX = 255  # a short string


class AmqpException(Exception):
    """`class_id`, `method_id`: the method that failed, 0 when none did."""

    def __init__(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(code, text, class_id, method_id)
        self.code = code
        self.text = text
        self.class_id = class_id
        self.method_id = method_id

    @property
    def reply_text(self) -> str:
        """`NAME - text`, as RabbitMQ writes it, cut (between characters) to what a short string holds."""
        full = f"{REPLY_NAMES.get(self.code, str(self.code))} - {self.text}"
        return full.encode("utf-8", "replace")[:REPLY_TEXT_BYTES_MAX].decode("utf-8", "ignore")

    def __str__(self) -> str:
        return f"{self.code} {self.reply_text}"


class ChannelException(AmqpException):
    """Ends the channel."""


class ConnectionException(AmqpException):
    """Ends the connection."""
