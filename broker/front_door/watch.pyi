from collections.abc import Callable
from typing import Any

from shardmq.broker.front_door.hot_state import LinkState, PassState
from shardmq.broker.front_door.short_way import Inlet
from shardmq.shardd.wire.ring import LaneState

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
