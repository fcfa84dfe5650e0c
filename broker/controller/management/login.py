"""The user that makes an HTTP call, and the names under which the API may be called."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from aiohttp import web

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.management import csrf, host_header
from shardmq.broker.controller.management.api_error import (
    ApiError,
    not_authenticated,
    not_authorised,
)
from shardmq.broker.model.changes import UserPut
from shardmq.broker.shared import rights
from shardmq.broker.shared.failures import UNSEEN
from shardmq.broker.shared.logins import WRONG, Logins, TakesLong, is_loopback
from shardmq.cluster.streams import LOCAL as LOCAL_SERVICE

# Who calls by the Unix socket, as shardctl does. The catalog may have another user of this name.
LOCAL: Final = UserPut("shardctl", "", "", ["administrator"])

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoginCounts:
    succeeded: int = 0
    failed: int = 0
    # By node and protocol, the succeeded and failed logins that an operator has reset.
    forgotten: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


class LoginContext(Protocol):
    """The facts about a process that a login depends on."""

    @property
    def config(self) -> ControllerConfig: ...
    @property
    def users(self) -> Mapping[str, UserPut]: ...
    @property
    def logins(self) -> Logins: ...
    @property
    def http_logins(self) -> LoginCounts: ...
    @property
    def refusal_log(self) -> host_header.RefusalLog: ...


async def caller_of(context: LoginContext, request: web.Request) -> UserPut:
    """Return the user that calls, who may use this API, or raise 401, 403 or 421."""
    csrf.check_site(request)
    if "Authorization" in request.headers:
        csrf.check_transport(request, context.config.http_without_tls)
    user = await user_of(context, request)
    if not rights.has_tag(user.tags, rights.MANAGEMENT):
        raise not_authorised("Not management user")
    return user


async def user_of(context: LoginContext, request: web.Request) -> UserPut:
    """Return the user that calls, by basic authentication, or raise 401 or 421.

    Calls by the Unix socket need no login: only the broker's user and group can open it.
    """
    if _is_local(request):
        return LOCAL
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    try:
        name, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        scheme = name = password = ""
    if scheme.lower() != "basic":
        raise not_authenticated("Login failed")
    address = request.remote or ""
    # Before the password is checked: everybody may know the password of such a user.
    if name in context.config.loopback_users and not _is_known_host(context, request):
        reason = (
            f"user '{name}' may only log in under localhost, "
            "an address or a name in listen.http_hosts"
        )
        raise _misdirected(context, request, reason)
    user, now = context.users.get(name), asyncio.get_running_loop().time()
    try:
        wrong = context.logins.at_once(user, name, password, address, now)
    except TakesLong:
        wrong = await context.logins.slowly(user, name, password, address, now)
        user = context.users.get(name)  # as it is now; it may have been deleted meanwhile
        wrong = wrong or ("" if user is not None else WRONG)
    if wrong:
        context.http_logins.failed += 1
        if wrong not in UNSEEN:
            log.warning("login of user '%s' from %s refused: %s", name, address, wrong)
        raise not_authenticated("Login failed")
    if name in context.config.loopback_users and (
        not is_loopback(address) or host_header.is_relayed(request.headers)
    ):
        context.http_logins.failed += 1
        raise not_authorised(f"User '{name}' can only connect via localhost")
    context.http_logins.succeeded += 1
    assert user is not None, "nobody has a right password"
    return user


def check_host(context: LoginContext, request: web.Request) -> None:
    """Raise 421 for a call under a name that is not in `listen.http_hosts`, if that is set."""
    if (
        context.config.http_hosts
        and not _is_local(request)
        and not _is_known_host(context, request)
    ):
        raise _misdirected(context, request, "listen.http_hosts does not have it")


def _is_known_host(context: LoginContext, request: web.Request) -> bool:
    names = (*context.config.http_hosts, *context.config.listen_names)
    return host_header.is_known(request.headers.get("Host"), names)


def _misdirected(context: LoginContext, request: web.Request, reason: str) -> ApiError:
    host = request.headers.get("Host", "")
    if context.refusal_log.is_due(host, asyncio.get_running_loop().time()):
        log.warning(
            "calls from %s under the name '%s' are refused: %s", request.remote, host, reason
        )
    name = host_header.name_of(host)
    return ApiError(421, "misdirected_request", f"called under the name '{name}': {reason}")


def _is_local(request: web.Request) -> bool:
    if request.transport is None:
        return False
    opening = request.transport.get_extra_info("opening")
    if opening is not None:  # another node relays the call
        return bool(opening.service == LOCAL_SERVICE)
    sock = request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX
