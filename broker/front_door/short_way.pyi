from collections.abc import Callable
from typing import Any

from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.hot_state import (
    LinkState,
    MessageCounts,
    SocketState,
    SpansState,
)
from shardmq.shardd.wire.envelope import Message
from shardmq.shardd.wire.ring import Taker

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
        spans: SpansState | None = None,
    ) -> None: ...
    def outlet(
        self,
        link: LinkState,
        read: Callable[[Message], list[Any]],
        deliver: Callable[[int, Any], None],
        failed: Callable[[Exception], None],
    ) -> Outlet: ...
    def inlet(
        self,
        socket: SocketState,
        channels: Any,
        waiting: Any,
        cache: Any,
        failed: Callable[[BaseException], None],
    ) -> Inlet: ...

class Outlet(Taker):
    def __call__(self, message: Message) -> None: ...

class Inlet:
    @property
    def things(self) -> int: ...
    @property
    def fed(self) -> int: ...
    published: bool
    def readable(self) -> None: ...
    def take(self, buffer: memoryview, end: int) -> int: ...
