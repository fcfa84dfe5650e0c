"""The health checks that a node which does not lead answers itself.

So they are answered, truly and at once, also while no node leads or the leader is silent. All other
calls go to the leader.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from aiohttp import web

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.management import csrf, http_connections
from shardmq.broker.controller.management.host_header import RefusalLog
from shardmq.broker.controller.management.login import LoginCounts, caller_of, check_host
from shardmq.broker.controller.management.responses.json_body import json_response
from shardmq.broker.controller.management.responses.json_errors import json_errors
from shardmq.broker.controller.node_checks import CHECKS, Check, NodeState
from shardmq.broker.controller.nodes.own_users import OwnUsers
from shardmq.broker.controller.nodes.request_head import close_behind
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared.logins import Logins

METHODS: Final = ("GET", "HEAD")
SHUTDOWN_S_MAX: Final = 2.0
# Anybody can ask without a login. Calls beyond so many at a time go to the leader, by the relay,
# which has a bound of its own.
CALLS_MAX: Final = 256
# The rest of a request is awaited for so long, although nobody reads it.
REST_S_MAX: Final = 1.0
PART: Final = re.compile(r"\{(\w+)\}")
# The paths of CHECKS, of which each may end with a slash.
PATHS: Final = re.compile("|".join(f"{PART.sub('[^/]+', path)}/?" for path in CHECKS))


class Login:
    """The facts about a node that does not lead, for the logins of its checks."""

    def __init__(self, config: Callable[[], ControllerConfig]) -> None:
        self._config = config
        self._users = OwnUsers(config().data_dir)
        self.logins = Logins()
        self.http_logins = LoginCounts()
        self.refusal_log = RefusalLog()

    @property
    def config(self) -> ControllerConfig:
        return self._config()

    @property
    def users(self) -> Mapping[str, UserPut]:
        return self._users.now()


class OwnChecks:
    """Answers the checks of CHECKS by the state of this node; `start` comes first."""

    begins: tuple[bytes, ...] = tuple(f"{method} /api/health".encode() for method in METHODS)

    def __init__(
        self, config: Callable[[], ControllerConfig], state: Callable[[], NodeState]
    ) -> None:
        self._login = Login(config)
        self._state = state
        app = web.Application(middlewares=[json_errors])
        app.on_response_prepare.append(csrf.add_headers)
        app.on_response_prepare.append(close_behind)
        for path, check in CHECKS.items():
            route = PART.sub(r"{\1:[^/]+}", path)
            for each in (route, f"{route}/"):
                app.router.add_get(each, partial(self._answer, check))  # HEAD, too
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S_MAX,
            lingering_time=REST_S_MAX,
            **http_connections.SERVER,
        )

    async def start(self) -> None:
        await self._runner.setup()

    async def close(self) -> None:
        await self._runner.cleanup()

    def serving(self, head: bytes) -> asyncio.Protocol | None:
        """Return the protocol for a check of this node; None for any other call.

        A node without a copy of the definitions knows no user, and leaves logins to the leader.
        """
        path = head.split(b" ", 2)[1].partition(b"?")[0].decode("ascii", "replace")
        is_own = PATHS.fullmatch(path) is not None
        if not is_own or (b"\r\nauthorization:" in head.lower() and not self._login.users):
            return None
        server = self._runner.server
        assert server is not None, "the runner is set up"
        return server() if len(server.connections) < CALLS_MAX else None

    async def _answer(self, check: Check, request: web.Request) -> web.StreamResponse:
        check_host(self._login, request)
        await caller_of(self._login, request)
        return json_response(check(self._state(), request.match_info))
