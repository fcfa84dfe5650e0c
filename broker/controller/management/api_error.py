"""The exception by which a handler refuses a request, and the usual refusals."""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """A response in JSON with `error` and `reason`, and these headers."""

    def __init__(
        self, status: int, error: str, reason: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.error = error
        self.reason = reason
        self.headers = headers


def bad_request(reason: str) -> ApiError:
    return ApiError(400, "bad_request", reason)


def not_authorised(reason: str) -> ApiError:
    """Return a refusal to a user that is known."""
    return ApiError(401, "not_authorised", reason)


def not_authenticated(reason: str) -> ApiError:
    """Return a refusal to somebody who has not logged in. RabbitMQ spells the two differently."""
    return ApiError(401, "not_authorized", reason)


def not_found(reason: str = "Not Found") -> ApiError:
    return ApiError(404, "Object Not Found", reason)


def too_large(bytes_max: int) -> ApiError:
    return ApiError(413, "payload_too_large", f"the body has more than {bytes_max} bytes")
