from collections.abc import Callable
from typing import Any

from shardmq.broker.amqp import Connection
from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.hot_state import LinkState, MessageCounts
from shardmq.shardd.wire.envelope import Message

class ShortWay:
    def __init__(
        self,
        links: Any,
        counts: MessageCounts,
        alarms: Alarms,
        consuming: Any,
        loop: Any,
        *,
        open_state: int,
        reply_queues: str,
        set_timestamp: bool = False,
    ) -> None: ...
    def outlet(
        self,
        link: LinkState,
        read: Callable[[Message], list[Any]],
        deliver: Callable[[int, Any], None],
    ) -> Callable[[Message], None]: ...
    def inlet(
        self, connection: int, amqp: Connection, channels: Any, waiting: Any, cache: Any
    ) -> Inlet: ...

class Inlet:
    @property
    def things(self) -> int: ...
    @property
    def fed(self) -> int: ...
    published: bool
    def take(self, buffer: memoryview, end: int) -> int: ...
