"""One HTTP call: who makes it, what they may, what they sent; and the answers every resource gives alike.

A resource file is a table of Routes and their handlers. A handler takes a Call and returns what is
shown (anything JSON can hold), a Response, or None for 204. Where the Route says `is_long` the
handler may return a Listing, a Lazy or a Document too. It raises ApiError for everything else.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import socket
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import orjson
from aiohttp import web

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.groups.groups import Groups
from shardmq.broker.controller.management import hosts
from shardmq.broker.controller.management.answers.long_answers import LongAnswers
from shardmq.broker.controller.management.answers.queue_names import QueueNames
from shardmq.broker.controller.management.api_error import ApiError as ApiError
from shardmq.broker.controller.management.callers import Callers
from shardmq.broker.controller.management.metrics.gathered import Gatherer, Rates
from shardmq.broker.controller.management.resources.imports import Imports
from shardmq.broker.controller.memory import MemoryWatch
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.policies import key_missing
from shardmq.broker.controller.resharding.settling import Settling
from shardmq.broker.controller.resharding.shard_sets import NODE as NODE
from shardmq.broker.controller.stored import imported
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.controller.streams.stream_ranges import StreamRanges
from shardmq.broker.model import tables
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import UserPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared import rights
from shardmq.broker.shared.control import Answer
from shardmq.broker.shared.failures import UNSEEN
from shardmq.broker.shared.logins import WRONG, Logins, TakesLong, is_loopback

OPEN = "open"  # no login
BODY_BYTES_MAX = 8 << 20
STALLED_S_MAX = 60.0  # between two pieces of a body
PLAIN: Final = ("", "identity")
ZIPPED: Final = ("gzip", "x-gzip", "deflate")
ANY_HEADER: Final = zlib.MAX_WBITS | 32  # gzip's or zlib's
LOCAL: Final = UserPut(
    "shardctl", "", "", ["administrator"]
)  # in the catalog there is no such user, or another
AMQP_STATUS: Final = {
    404: (404, "Object Not Found"),
    403: (401, "not_authorised"),
    412: (412, "precondition_failed"),
    507: (507, "insufficient_storage"),
    541: (503, "unavailable"),
}

FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
NAME_CHARS_SHOWN = 100
NUMBER_MAX: Final = (1 << 63) - 1
NUMBER_DIGITS_MAX: Final = len(str(NUMBER_MAX))

T = TypeVar("T")
Arguments = dict[str, Any] | list[Any]  # some languages write a table without values as []

log = logging.getLogger(__name__)


def bad_request(reason: str) -> ApiError:
    return ApiError(400, "bad_request", reason)


def not_found(reason: str = "Not Found") -> ApiError:
    return ApiError(404, "Object Not Found", reason)


def too_large(bytes_max: int) -> ApiError:
    return ApiError(413, "payload_too_large", f"the body has more than {bytes_max} bytes")


def number(name: str, given: str, least: int = 0, most: int = NUMBER_MAX) -> int:
    """Return the whole number that a text of a path, query or body says, or raise 400. No text is too long for it."""
    digits = given.removeprefix("-") if least < 0 else given
    if (
        digits.isascii()
        and digits.isdecimal()
        and len(digits) <= NUMBER_DIGITS_MAX
        and least <= int(given) <= most
    ):
        return int(given)
    raise bad_request(f"{name}: not a number from {least} to {most}")


def table_of(arguments: Arguments) -> dict[str, Any]:
    """An object, or the array without values that means one, as RabbitMQ takes it."""
    if isinstance(arguments, list):
        if arguments:
            raise bad_request("Expected `object`, got `array` - at `$.arguments`")
        return {}
    return arguments


def _unknown_encoding() -> ApiError:
    return ApiError(415, "unsupported_media_type", "Content-Encoding: not known here")


def _unpacked(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """No more is unpacked than may be."""
    if encoding.lower() in PLAIN:
        return body
    if encoding.lower() not in ZIPPED:
        raise _unknown_encoding()
    unzip = zlib.decompressobj(ANY_HEADER)
    try:
        plain = unzip.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise bad_request(f"Content-Encoding: {encoding}: {error}") from None
    if len(plain) > bytes_max:
        raise too_large(bytes_max)
    if not unzip.eof:
        raise bad_request(f"Content-Encoding: {encoding}: ends too early")
    return plain


def not_authorised(reason: str) -> ApiError:
    return ApiError(401, "not_authorised", reason)


def not_authenticated(reason: str) -> ApiError:
    """Nobody knows who calls. RabbitMQ spells the two differently."""
    return ApiError(401, "not_authorized", reason)


@dataclass(frozen=True, slots=True)
class Context:
    """What handlers see of the controller."""

    authority: Authority
    presence: Presence
    shards: ShardLinks
    links: DoorLinks
    config_now: Callable[[], ControllerConfig]
    stats: Gatherer
    groups: Groups = field(default_factory=lambda: Groups(lambda count: 0))
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    logins: Logins = field(default_factory=Logins)
    streams: StreamRanges = field(default_factory=StreamRanges)
    ended: EndedStreams | None = None  # streams that were shards
    settling: Mapping[tuple[str, str], Settling] = field(
        default_factory=dict
    )  # changes of shard numbers
    imports: Imports = field(default_factory=Imports)
    callers: Callers = field(default_factory=Callers)
    long_answers: LongAnswers = field(default_factory=LongAnswers)
    queue_names: QueueNames = field(default_factory=QueueNames)
    churn_rates: Rates = field(default_factory=Rates)
    node_rates: Rates = field(default_factory=lambda: Rates(may_fall=True))
    misnamed: hosts.Misnamed = field(default_factory=hosts.Misnamed)
    calls: Calls = field(default_factory=lambda: Calls())

    @property
    def catalog(self) -> Catalog:
        return self.authority.catalog

    @property
    def config(self) -> ControllerConfig:
        """As of the last reload."""
        return self.config_now()


class Calls:
    """Logins by HTTP."""

    def __init__(self) -> None:
        self.succeeded = self.failed = 0
        self.forgotten: dict[
            str, tuple[int, int]
        ] = {}  # by protocol: those nobody wants to hear of any more


class Call:
    def __init__(self, context: Context, request: web.Request, user: UserPut) -> None:
        self.context = context
        self.catalog = context.catalog
        self.request = request
        self.user = user
        self.is_local = user is LOCAL  # may do everything, everywhere
        self.warnings: list[str] = []  # what of its requests has no effect

    def part(self, name: str) -> str:
        """A piece of the path."""
        return self.request.match_info[name]

    def flag(self, name: str) -> bool:
        """A condition of the query. What is neither yes nor no is refused: it must not be taken for no."""
        given = self.request.query.get(name, "false").lower()
        if given not in FLAGS:
            raise bad_request(f"{name}: true or false")
        return FLAGS[given]

    def knows_only(self, names: Collection[str], *, once: bool = False) -> None:
        """Raise 400 for a parameter of the query that is none of these; `once`: or is there twice.

        Calls that destroy ask this: who wants less than everything to go, by a name that is not known here, must not
        lose everything.
        """
        query = self.request.query
        for name in query:
            if name not in names:
                known = ", ".join(names) or "none"
                raise bad_request(
                    f"{name[:NAME_CHARS_SHOWN]}: there is no such parameter; {known} are known"
                )
            if once and len(query.getall(name)) > 1:
                raise bad_request(f"{name}: is there twice")

    async def raw_body(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        if (self.request.content_length or 0) > bytes_max:
            raise too_large(bytes_max)
        body = bytearray()
        try:
            while chunk := await asyncio.wait_for(self.request.content.readany(), STALLED_S_MAX):
                body += chunk
                if len(body) > bytes_max:
                    raise too_large(bytes_max)
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", f"nothing came for {STALLED_S_MAX:g} s"
            ) from None
        return _unpacked(bytes(body), self.request.headers.get("Content-Encoding", ""), bytes_max)

    def must_be_plain(self) -> None:
        """Raises 415 for a body that is compressed."""
        if self.request.headers.get("Content-Encoding", "").lower() not in PLAIN:
            raise _unknown_encoding()

    async def body(self, type: type[T]) -> T:
        """The JSON body, or 400 with the path of the key that is wrong. No body is an empty one.

        What is nested deeper, or has longer numbers, than any store of ours can hold is refused before others see it.
        """
        raw = await self.raw_body()
        try:
            value = msgspec.json.decode(raw or b"{}")
            if fault := tables.fault_in(value, key_bytes_max=BODY_BYTES_MAX):
                raise bad_request(fault)
            return msgspec.convert(value, type=type, strict=False, str_keys=True)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise bad_request(str(error)) from None
        except UnicodeDecodeError:
            raise bad_request("not UTF-8") from None
        except RecursionError:
            raise bad_request("nested too deep") from None

    async def json(self) -> dict[str, Any]:
        """The JSON body, an object of any keys."""
        return await self.body(dict[str, Any])

    # -- rights ------------------------------------------------------------------------------------------

    async def ask(self, request: Any) -> Answer:
        """Have the authority carry out a request, if this user has the rights it needs. Raises ApiError if not.

        What of it is kept without effect is answered in the header `Warning`, and logged where it makes something.
        """
        self.must(request)
        return await self.ask_without_rights(request)

    async def ask_without_rights(self, request: Any) -> Answer:
        """The same; whether this user may was decided otherwise."""
        makes_something = imported.needed(request, self.catalog)
        answer = check(await self.context.authority.ask(request))
        self.warnings += without_effect.sentences([request])
        if makes_something:
            self.context.authority.warn_of(request)
        return answer

    def must(self, act: Any) -> None:
        """Raise ApiError, 401, when this user lacks a right that the act needs (`shardmq.broker.shared.rights`)."""
        if self.is_local:
            return
        try:
            rights.check(self.catalog, self.user.name, act)
        except Refusal as refusal:
            raise not_authorised(f"ACCESS_REFUSED - {refusal.text}") from None

    def may(self, act: Any) -> bool:
        """Whether this user has the rights that the act needs, for what is left out of a list if not."""
        try:
            self.must(act)
        except ApiError:
            return False
        return True

    def has(self, tag: str) -> bool:
        return rights.has_tag(self.user.tags, tag)

    def sees(self, vhost: str) -> bool:
        return (
            self.is_local or self.has("monitoring") or self.catalog.may_enter(self.user.name, vhost)
        )

    def visible_vhosts(self) -> list[Vhost]:
        return [vhost for vhost in self.catalog.vhosts.values() if self.sees(vhost.name)]

    def vhosts(self) -> list[Vhost]:
        """The one in the path, or all that may be seen."""
        return [self.vhost()] if "vhost" in self.request.match_info else self.visible_vhosts()

    def vhost(self) -> Vhost:
        """The one in the path, to be looked at."""
        vhost = self.catalog.vhost(self.part("vhost"))
        if vhost is None:
            raise not_found()
        if not self.sees(vhost.name):
            raise not_authorised("User not authorised to access virtual host")
        return vhost

    def vhost_to_change(self) -> Vhost:
        """To be changed inside: tags are no permission."""
        vhost = self.vhost()
        if not self.is_local and not self.catalog.may_enter(self.user.name, vhost.name):
            raise not_authorised("User not authorised to access virtual host")
        return vhost


def with_keys(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The body, if these are in it; else 400 in RabbitMQ's words."""
    missing = [key for key in keys if key not in body]
    if missing:
        raise bad_request(key_missing(missing))
    return body


Handler = Callable[[Call], Awaitable[Any]]


class Route(NamedTuple):
    """`is_long`: what the handler gives may be long, and is answered as `long_answers.py` says."""

    method: str
    path: str
    handler: Handler
    tag: str = "management"
    query: tuple[str, ...] | None = (
        None  # all parameters of its query; None: others are passed over
    )
    is_long: bool = False

    @property
    def destroys(self) -> bool:
        """Whether a parameter that is not known might mean that less is to go."""
        return self.method == "DELETE" or self.query is not None


def check(answer: Answer) -> Answer:
    """The authority's answer, if it is no refusal."""
    if answer.code == 0:
        return answer
    raise ApiError(*refusal_status(answer.code), answer.text)


def refusal_status(code: int) -> tuple[int, str]:
    """Status and error for what the authority refused."""
    return AMQP_STATUS.get(code, (400, "bad_request"))


def put_status(existed: bool) -> web.Response:
    return web.Response(status=204 if existed else 201)


async def user_of(context: Context, request: web.Request) -> UserPut:
    """Who calls, by basic auth; on this host's own socket without: who may open that may do everything."""
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
    if name in context.config.loopback_users:
        _check_name_for(context, request, name)
    if wrong := await _verdict(context, name, password, address):
        context.calls.failed += 1
        if wrong not in UNSEEN:
            log.warning("login of user '%s' from %s refused: %s", name, address, wrong)
        raise not_authenticated("Login failed")
    if name in context.config.loopback_users and (
        not is_loopback(address) or hosts.is_relayed(request.headers)
    ):
        context.calls.failed += 1
        raise not_authorised(f"User '{name}' can only connect via localhost")
    context.calls.succeeded += 1
    return context.catalog.users[name]


def check_name(context: Context, request: web.Request) -> None:
    """Raises 421 for a call under a name that is not among those in the settings, if there are any."""
    if context.config.http_hosts and not _is_local(request) and not _is_known(context, request):
        raise _misdirected(context, request, "listen.http_hosts does not have it")


def _check_name_for(context: Context, request: web.Request, user: str) -> None:
    """The same for a user that may log in from this host only, whose password may be known to everybody."""
    if not _is_known(context, request):
        reason = f"user '{user}' may only log in under localhost, an address or a name in listen.http_hosts"
        raise _misdirected(context, request, reason)


def _is_known(context: Context, request: web.Request) -> bool:
    names = (*context.config.http_hosts, *context.config.listen_names)
    return hosts.is_known(request.headers.get("Host"), names)


def _misdirected(context: Context, request: web.Request, reason: str) -> ApiError:
    host = request.headers.get("Host", "")
    if context.misnamed.is_to_say(host, asyncio.get_running_loop().time()):
        log.warning(
            "calls from %s under the name '%s' are refused: %s", request.remote, host, reason
        )
    return ApiError(
        421, "misdirected_request", f"called under the name '{hosts.name_of(host)}': {reason}"
    )


def _is_local(request: web.Request) -> bool:
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


async def _verdict(context: Context, name: str, password: str, address: str) -> str:
    user, now = context.catalog.users.get(name), asyncio.get_running_loop().time()
    try:
        return context.logins.at_once(user, name, password, address, now)
    except TakesLong:
        wrong = await context.logins.slowly(user, name, password, address, now)
        return wrong if wrong or name in context.catalog.users else WRONG  # deleted meanwhile


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, default=_shown, option=orjson.OPT_NON_STR_KEYS)


def _shown(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return str(value)
