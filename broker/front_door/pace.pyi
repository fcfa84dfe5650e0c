from collections.abc import Callable

PASSES_HELD_MAX: int
TIMES_ITS_WORK: float
ALONE_PASSES: int
AT_ONCE_PASSES: int
COMPANY_PASSES: int
MUCH: int

class Pace:
    def __init__(
        self,
        tick_s: float,
        clock: Callable[[], float] | None = None,
        busy: Callable[[], float] | None = None,
    ) -> None: ...
    def distance(self, now: float, busy: float | None) -> float: ...
    def read_by(self, client: int) -> None: ...
    def came(self, things: int) -> None: ...
    def was_large(self) -> None: ...

class Reads:
    full: int
    short: int
    held: int
    def may_wait(self) -> bool: ...
