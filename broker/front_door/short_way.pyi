from collections.abc import Callable
from typing import Any

from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.hot_state import (
    BindRun,
    LinkState,
    MessageCounts,
    PassState,
    SocketState,
    SpansState,
)
from shardmq.broker.front_door.session import Lesson
from shardmq.shardd.wire.envelope import Message
from shardmq.shardd.wire.shared_memory import LaneState, Taker

OPEN_S: float
HANDSHAKE_S: float
LINGER_S: float
SOON_S: float
LATER_S: float

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
        bind: Callable[[Any, list[tuple[str, str, str]], bool], BindRun | None],
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

class Watch:
    @property
    def fd(self) -> int: ...
    loop_fd: int
    def __init__(self, loop: PassState) -> None: ...
    def read(self, fd: int, inlet: Inlet) -> None: ...
    def hear(
        self,
        fd: int,
        link: LinkState,
        lane: LaneState,
        rung: Callable[[Any, Any], None],
        rest: Callable[[Any, Any, int], None],
    ) -> None: ...
    def leave(self, fd: int) -> None: ...
    def ready(self) -> None: ...
    def wait(self, most: float) -> None: ...

class Anteroom:
    epoll: int
    lessons: dict[bytes, Lesson]
    failed: Callable[[int, int], None]
    def __init__(
        self,
        lessons: dict[bytes, Lesson],
        *,
        digest: Callable[[bytes], bytes],
        start: Callable[[], bytes],
        meet: Callable[..., None],
        ended: Callable[[bool, bool, int], None],
        open_ok: bytes,
        close_ok: bytes,
        channel_open_ok: bytes,
        channel_close_ok: bytes,
    ) -> None: ...
    def offer(self, tune: bytes, channels_max: int, frame_bytes_max: int) -> None: ...
    def __len__(self) -> int: ...
    def listen(self, fd: int) -> None: ...
    def leave(self, fd: int) -> None: ...
    def close(self) -> None: ...
    def ready(self) -> None: ...
    def meet_all(self) -> None: ...
    def settle(self) -> float: ...
