class Filter:
    def __init__(
        self,
        pattern: bytes | None = None,
        key: bytes | None = None,
        exchange: bytes | None = None,
        since: int = 0,
        until: int = ...,
    ) -> None: ...
