"""Refusals of basic.consume and basic.get, in RabbitMQ's words."""

from __future__ import annotations

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.links.shard_requests import ShardRefused
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.reading import NOT_IMPLEMENTED

CONSUME = (60, 20)
GET = (60, 70)


def refused_consume(
    refusal: Refusal, method: tuple[int, int] = CONSUME
) -> ChannelException | ConnectionException:
    """Return what ends the channel, or the connection for what is not implemented."""
    kind = ConnectionException if refusal.code == NOT_IMPLEMENTED else ChannelException
    return kind(refusal.code, refusal.text, *method)


def refused_by_shard(
    refused: ShardRefused, queue: str, vhost: str, method: tuple[int, int] = CONSUME
) -> ChannelException:
    """Return what ends the channel when the shard has answered Refused."""
    if refused.code == 404:
        return ChannelException(404, f"no queue '{queue}' in vhost '{vhost}'", *method)
    if refused.code == 403:
        text = f"queue '{queue}' in vhost '{vhost}' in exclusive use"
        return ChannelException(403, text, *method)
    return ChannelException(refused.code, refused.text, *method)
