from collections.abc import Callable
from typing import Any

from shardmq.shardd.short_way import ShortWay

UNPOLLED_MAX: int
RING: int

class PlainPasses:
    taken: int
    def __init__(
        self,
        way: ShortWay,
        descriptor: int,
        heard: dict[int, Any],
        lanes: dict[str, Any],
        most: int,
        send: Callable[[list[Any]], None],
    ) -> None: ...
    def run(
        self, wait_ms: int, came: bool, look: Callable[[], int] | None
    ) -> list[tuple[int, int]] | None: ...
