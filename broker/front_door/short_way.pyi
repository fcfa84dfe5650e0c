from typing import Any

from shardmq.broker.amqp import Connection
from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.hot_state import MessageCounts

def is_on() -> bool: ...

class ShortWay:
    def __init__(
        self, links: Any, counts: MessageCounts, alarms: Alarms, *, set_timestamp: bool = False
    ) -> None: ...
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
