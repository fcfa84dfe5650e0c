from typing import Any

from shardmq.broker.amqp.frames import Sizes

class MessageCounts:
    received: int
    received_confirm: int
    confirmed: int
    returned: int
    delivered_auto: int
    delivered_manual: int
    got_auto: int
    got_manual: int
    got_empty: int
    sizes: Sizes

class PublishingState:
    number: int
    is_open: bool
    published: int
    confirms: Any
    transaction: Any
    consuming_if_any: Any

class LimitState:
    most: int
    unacked: int

class ConsumingState:
    client: Any
    number: int
    limit: Any
    next_tag: int
    delivered_auto: int
    unacked: Any

class ConsumerState:
    channel: Any
    client: Any
    number: int
    shard: int
    tag: str
    queue_name: str
    tag_bytes: bytes
    group: Any
    allotment: Any
    reading: Any
    announced: bool
    no_ack: bool
    affinity: bool
    delivered: int
    prefetch: int

class LinkState:
    shard: int
    epoch: int
    in_flight: int
    settles: Any
    packing: Any
    credits: dict[int, int]
    credit_due: bool
