"""The queue for the direct replies to one channel."""

from __future__ import annotations

import base64
import secrets

from shardmq.broker.front_door.session import Session
from shardmq.broker.front_door.topology.steps import AskEach, SeeCatalog, Steps
from shardmq.broker.model import checks
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import QueueDeclare, QueueRemove

NAME_BYTES = 16  # random bytes in each half of the name


def open_reply_queue(session: Session) -> Steps[QueuePut]:
    """Declare a queue that only this connection may consume from and that goes with its consumer.

    Nobody can guess its name, which has the same shape as RabbitMQ's. Raises Refusal.
    """
    who, key = secrets.token_urlsafe(NAME_BYTES), secrets.token_bytes(NAME_BYTES)
    name = f"{checks.REPLY_TO}.{who}.{base64.urlsafe_b64encode(key).decode()}"
    yield AskEach([QueueDeclare(session.vhost, name, False, True, True, {})])
    queue: QueuePut | None = (yield SeeCatalog()).queue(session.vhost, name)
    if queue is None:
        raise checks.no_queue(session.vhost, name)
    return queue


def close_reply_queue(session: Session, name: str) -> Steps[None]:
    """Delete a reply queue that got no consumer and so would stay as long as its connection."""
    yield AskEach([QueueRemove(session.vhost, name, False, False)])
