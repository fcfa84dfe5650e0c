"""The answers to requests that are refused, to checks that fail, and to faults of the broker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.controller.management.responses.json_body import json_response
from shardmq.broker.controller.node_checks import Unhealthy

log = logging.getLogger(__name__)


@web.middleware
async def json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer all errors in JSON, and log those that are faults of the broker."""
    try:
        return await handler(request)
    except Unhealthy as error:
        return json_response({"status": "failed", "reason": error.reason, **error.more}, 503)
    except ApiError as error:
        headers = (
            {"WWW-Authenticate": 'Basic realm="shardmq Management"'}
            if error.status == 401
            else error.headers
        )
        return json_response({"error": error.error, "reason": error.reason}, error.status, headers)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        name = "Object Not Found" if error.status == 404 else error.reason
        return json_response({"error": name, "reason": error.reason}, error.status, headers)
    except Exception as error:
        has_hung_up = request.transport is None or request.transport.is_closing()
        if not (isinstance(error, ConnectionError) and has_hung_up):
            # The path of the Route, since the path of the call may hold a password.
            resource = request.match_info.route.resource
            log.exception(
                "%s %s", request.method, resource.canonical if resource is not None else ""
            )
        return json_response(
            {"error": "internal_server_error", "reason": "see the broker's log"}, 500
        )
