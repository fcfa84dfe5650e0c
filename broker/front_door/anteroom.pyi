from collections.abc import Callable

from shardmq.broker.front_door.session import Lesson

OPEN_S: float
HANDSHAKE_S: float
LINGER_S: float
SOON_S: float
LATER_S: float

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
