from collections.abc import Callable

class Fault(Exception): ...

class Relay:
    begun: int
    published: int
    body_bytes: int
    @property
    def is_between(self) -> bool: ...
    def __init__(
        self,
        exchange: bytes | None,
        key: bytes | None,
        mandatory: bool,
        edit: Callable[[bytes], bytes] | Callable[[bytes, bytes], bytes] | None,
        frame_bytes_max: int,
        limit: int = -1,
        with_names: bool = False,
    ) -> None: ...
    def feed(self, data: bytes, at: int) -> tuple[int, bytes]: ...
    def forget_edited(self) -> None: ...

class Settled:
    low: int
    def __init__(self) -> None: ...
    def take_refused(self) -> list[int]: ...
    def feed(self, data: bytes, at: int, published: int) -> int: ...
