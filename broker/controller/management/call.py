"""An HTTP call (user, rights, path, query and body) and the table of routes.

The file of a resource has a list of Routes and their handlers. A handler takes a Call and returns
anything that JSON can hold, a web.Response, or None for 204. If the Route `is_long`, the handler
may return a Listing, a LazyListing or a Document as well. It raises ApiError to refuse.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import orjson
from aiohttp import web
from msgspec.structs import fields
from multidict import MultiMapping

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.management.api_error import (
    ApiError,
    bad_request,
    not_authorised,
    not_found,
    too_large,
)
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.login import LOCAL
from shardmq.broker.controller.management.responses.schemas import Schema
from shardmq.broker.controller.policies import key_missing
from shardmq.broker.controller.stored import imported
from shardmq.broker.model import tables
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import UserPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared import rights
from shardmq.broker.shared.control import Answer

BODY_BYTES_MAX = 8 << 20
STALLED_S_MAX = 60.0  # between two pieces of a body
UNPACKED: Final = ("", "identity")
ZIPPED: Final = ("gzip", "x-gzip", "deflate")
ANY_HEADER: Final = zlib.MAX_WBITS | 32  # of gzip or of zlib
# The HTTP status and error for the reply codes of the authority.
AMQP_STATUS: Final = {
    404: (404, "not_found"),  # of a thing that a request needs; a path to nothing is another
    403: (401, "not_authorised"),
    412: (412, "precondition_failed"),
    507: (507, "insufficient_storage"),
    541: (503, "unavailable"),
}

FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
NAME_CHARS_SHOWN = 100
MESSAGES_PURGED: Final = "X-Messages-Purged"  # a header of responses

T = TypeVar("T")
Arguments = dict[str, Any] | list[Any]  # some languages write an empty table as []


def check_query(
    query: MultiMapping[str], names: Collection[str], once: Collection[str] = ()
) -> None:
    """Raise 400 for a parameter that is not one of `names`, or is in `once` and repeated."""
    for name in query:
        if name not in names:
            known = ", ".join(names) or "none"
            raise bad_request(
                f"{name[:NAME_CHARS_SHOWN]}: there is no such parameter; {known} are known"
            )
        if name in once and len(query.getall(name)) > 1:
            raise bad_request(f"{name}: is there twice")


def table_of(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments as a table. As in RabbitMQ an empty array is an empty table."""
    if isinstance(arguments, list):
        if arguments:
            raise bad_request("Expected `object`, got `array` - at `$.arguments`")
        return {}
    return arguments


def values_in(raw: bytes) -> int:
    """Return the number of values in arrays and objects of a JSON text.

    An empty array or object counts as if it had one. Of more than VALUES_MAX values the number need
    not be right. If the text is malformed, this holds for the part before the fault.
    """
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * tables.VALUES_MAX:  # a value has at most two strings, with its key
        return tables.VALUES_MAX + 1
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{")))


def _unknown_encoding() -> ApiError:
    return ApiError(415, "unsupported_media_type", "Content-Encoding: not known here")


def _unpacked(body: bytes, encoding: str, bytes_max: int) -> bytes:
    if encoding.lower() in UNPACKED:
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


class Call:
    def __init__(self, context: Context, request: web.Request, user: UserPut) -> None:
        self.context = context
        self.authority = context.authority
        self.catalog = context.catalog
        self.request = request
        self.user = user
        self.is_local = user is LOCAL  # may do everything
        self.warnings: list[str] = []  # about requests that have no effect

    def part(self, name: str) -> str:
        """Return a part of the path, by its name in the Route."""
        return self.request.match_info[name]

    @property
    def via(self) -> str:
        """The name of the node that was called; it may relay the call to this one."""
        return called_node(self.context, self.request)

    def node(self) -> str:
        """Return the node in the path, else the one that was called. Raises 404 if unknown."""
        name = self.request.match_info.get("node", self.via)
        if all(node.name != name for node in self.context.cluster.nodes):
            raise not_found()
        return name

    def check_node(self) -> None:
        """Raise 404 if the path names an unknown node."""
        self.node()

    def flag(self, name: str) -> bool:
        """Return a condition in the query, False if there is none.

        Any other value is refused: it must not be taken for False, as that may delete more.
        """
        return flag(self.request.query, name)

    def knows_only(self, names: Collection[str], *, once: bool = False) -> None:
        """Raise 400 for any other parameter in the query, and with `once` for a repeated one.

        Calls that delete or purge check this: a misspelt parameter that would spare something must
        not be ignored.
        """
        check_query(self.request.query, names, names if once else ())

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

    def must_be_unpacked(self) -> None:
        """Raise 415 for a compressed body."""
        if self.request.headers.get("Content-Encoding", "").lower() not in UNPACKED:
            raise _unknown_encoding()

    async def body(self, type: type[T]) -> T:
        """Return the JSON body as this type, or raise 400 with the path of the wrong key.

        No body is taken for an empty object. Values that the catalog could not store, such as
        deeply nested ones and long numbers, are refused. So is a body of very many values, before
        it is decoded: the event loop would stand still for a second.
        """
        raw = await self.raw_body()
        if len(raw) > tables.VALUES_MAX and values_in(raw) > tables.VALUES_MAX:
            raise bad_request(tables.TOO_MANY_VALUES)
        try:
            value = msgspec.json.decode(raw or b"{}")
            if fault := tables.fault_in(value, key_bytes_max=BODY_BYTES_MAX):
                raise bad_request(fault)
            if isinstance(value, dict):
                with_keys(value, *_required_keys(type))
            return msgspec.convert(value, type=type, strict=False, str_keys=True)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise bad_request(str(error)) from None
        except UnicodeDecodeError:
            raise bad_request("not UTF-8") from None
        except RecursionError:
            raise bad_request("nested too deep") from None

    async def json(self) -> dict[str, Any]:
        """Return the JSON body, an object of any keys."""
        return await self.body(dict[str, Any])

    # -- rights ------------------------------------------------------------------------------------

    async def ask(self, request: Any) -> Answer:
        """Have the authority carry out a request, or raise ApiError.

        A user who lacks a right for the request gets 401. Parts of the request that have no effect
        here are named in the header `Warning`, and logged if the request makes something.
        """
        self.must(request)
        return await self.ask_without_rights(request)

    async def ask_without_rights(self, request: Any) -> Answer:
        """Do the same as `ask` without checking rights."""
        makes_something = imported.needed(request, self.catalog)
        answer = check(await self.authority.ask(request, asked_at=self.via))
        self.warnings += without_effect.sentences([request], self.authority.most_copies)
        if makes_something:
            self.authority.warn_of(request)
        return answer

    def must(self, act: Any) -> None:
        """Raise 401 if this user lacks a right for this act of `shardmq.broker.shared.rights`."""
        if self.is_local:
            return
        try:
            rights.check(self.catalog, self.user.name, act)
        except Refusal as refusal:
            raise not_authorised(f"ACCESS_REFUSED - {refusal.text}") from None

    def may(self, act: Any) -> bool:
        """Return whether this user has the rights for this act, to filter a list."""
        try:
            self.must(act)
        except ApiError:
            return False
        return True

    def has(self, tag: str) -> bool:
        return rights.has_tag(self.user.tags, tag)

    def sees(self, vhost: str) -> bool:
        return (
            self.is_local
            or self.has("monitoring")
            or self.catalog.permissions.may_enter(self.user.name, vhost)
        )

    def visible_vhosts(self) -> list[Vhost]:
        return [vhost for vhost in self.catalog.vhosts.values() if self.sees(vhost.name)]

    def vhosts(self) -> list[Vhost]:
        """Return the vhost in the path, or else all that this user may see."""
        return [self.vhost()] if "vhost" in self.request.match_info else self.visible_vhosts()

    def vhost(self) -> Vhost:
        """Return the vhost in the path, if this user may see it."""
        vhost = existing(self.catalog.vhost(self.part("vhost")))
        if not self.sees(vhost.name):
            raise not_authorised("User not authorised to access virtual host")
        return vhost

    def vhost_to_change(self) -> Vhost:
        """Return the vhost in the path, if this user may enter it: tags do not allow changes."""
        vhost = self.vhost()
        if not self.is_local and not self.catalog.permissions.may_enter(self.user.name, vhost.name):
            raise not_authorised("User not authorised to access virtual host")
        return vhost


def called_node(context: Context, request: web.Request) -> str:
    """Return the name of the node that was called; it may relay the call to this one."""
    transport = request.transport
    opening = None if transport is None else transport.get_extra_info("opening")
    return context.cluster.own if opening is None else str(opening.node)


def flag(query: MultiMapping[str], name: str) -> bool:
    """Return a condition in a query, False if there is none. Raises 400 for any other value."""
    given = query.get(name, "false").lower()
    if given not in FLAGS:
        raise bad_request(f"{name}: true or false")
    return FLAGS[given]


def existing(thing: T | None) -> T:
    """Return the thing, or raise 404 if there is none."""
    if thing is None:
        raise not_found()
    return thing


def with_keys(body: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the body, or raise 400 in RabbitMQ's words if it lacks one of these keys."""
    missing = [key for key in keys if key not in body]
    if missing:
        raise bad_request(key_missing(missing))
    return body


def _required_keys(type: Any) -> list[str]:
    """Return the keys that an object of this type must have."""
    if not hasattr(type, "__struct_fields__"):
        return []
    return [field.encode_name for field in fields(type) if field.required]


Handler = Callable[[Call], Awaitable[Any]]


class Route(NamedTuple):
    """A line of the table of routes.

    `tag`: the tag that users need. `query`: all known parameters of the query, others are refused;
    None: others are ignored, except by DELETE, which then knows none. `is_long`: the response may
    be long, and is made and sent as `long_responses.py` says. For the OpenAPI description `body`
    is the type, schema, or name of a schema of the request's body; `shows` is the name of a row in
    `schemas.py`, or [name] for a list of such rows.
    """

    method: str
    path: str
    handler: Handler
    tag: str = "management"
    query: tuple[str, ...] | None = None
    is_long: bool = False
    body: type[msgspec.Struct] | Schema | str | None = None
    shows: str | list[str] | None = None

    @property
    def destroys(self) -> bool:
        """True for a call that deletes or purges: it refuses unknown parameters."""
        return self.method == "DELETE" or self.query is not None


def long_list(path: str, handler: Handler, shows: str, tag: str = "management") -> Route:
    """Return the route of a list that may be long; `shows` names its rows in `schemas.py`."""
    return Route("GET", path, handler, tag, is_long=True, shows=[shows])


def check(answer: Answer) -> Answer:
    """Return the authority's answer, or raise ApiError if it is a refusal."""
    if answer.code == 0:
        return answer
    raise ApiError(*refusal_status(answer.code), answer.text)


def refusal_status(code: int) -> tuple[int, str]:
    """Return the HTTP status and error for a reply code of the authority."""
    return AMQP_STATUS.get(code, (400, "bad_request"))


def put_status(existed: bool) -> web.Response:
    return web.Response(status=204 if existed else 201)


def to_json(value: Any) -> bytes:
    """Return a value as JSON; bytes, as headers of messages have them, are shown as text.

    msgspec cannot do this: it writes bytes as base64, without a question to its hook.
    """
    return orjson.dumps(value, default=_shown, option=orjson.OPT_NON_STR_KEYS)


def _shown(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return str(value)
