"""What a handler raises instead of an answer."""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """Answered as JSON, with `error`, `reason` and these headers."""

    def __init__(
        self, status: int, error: str, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.error = error
        self.reason = reason
        self.headers = headers
