"""Turns a document of definitions, RabbitMQ's JSON, into the requests that make them.

An import adds. Exchanges and queues that exist stay, even if they were declared otherwise. Users,
permissions, policies and parameters of the same name are replaced. The form of the document is
checked before anything is done. A request that is refused for its content stops the import there,
as in RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, get_args

import msgspec
from msgspec.structs import asdict

from shardmq.broker.controller.policies import USER_LIMITS, VHOST_LIMITS, bad
from shardmq.broker.model.arguments import QUEUE_TYPES
from shardmq.broker.model.catalog import PREDECLARED, Catalog
from shardmq.broker.model.changes import (
    GLOBAL,
    ParameterPut,
    PermissionPut,
    TopicPermissionPut,
    UserPut,
    VhostPut,
)
from shardmq.broker.model.passwords import HASHES, is_base64
from shardmq.broker.model.policies import OPERATOR_POLICY, POLICY
from shardmq.broker.shared.control import Bind, ExchangeDeclare, QueueDeclare
from shardmq.cluster.replicas import REPLICAS_MAX

RABBITMQ_DEFAULT = "rabbit_password_hashing_sha256"

Ask = (
    VhostPut
    | UserPut
    | PermissionPut
    | TopicPermissionPut
    | ParameterPut
    | ExchangeDeclare
    | QueueDeclare
    | Bind
)
HashPassword = Callable[[str], tuple[str, str]]  # returns hash and algorithm
Decrypt = Callable[[ParameterPut], ParameterPut]  # the secrets of a parameter, as far as can be


class User(msgspec.Struct):
    name: str
    tags: list[str] | str | None = None
    password_hash: str | None = None
    password: str | None = None
    hashing_algorithm: str = RABBITMQ_DEFAULT
    limits: dict[str, Any] | list[Any] | None = None


class VhostLimit(msgspec.Struct):
    name: str
    value: Any


class Vhost(msgspec.Struct):
    name: str
    description: str = ""
    tags: list[str] | str = []
    metadata: dict[str, Any] = {}
    limits: list[VhostLimit] = []
    default_queue_type: str | None = None
    protected_from_deletion: bool = False


class Permission(msgspec.Struct):
    user: str
    vhost: str
    configure: str
    write: str
    read: str


class TopicPermission(msgspec.Struct):
    user: str
    vhost: str
    exchange: str
    write: str
    read: str


class Parameter(msgspec.Struct):
    component: str
    name: str
    value: Any
    vhost: str | None = None


class GlobalParameter(msgspec.Struct):
    name: str
    value: Any


class Policy(msgspec.Struct, rename={"apply_to": "apply-to"}):
    name: str
    pattern: Any
    definition: Any
    priority: Any = 0
    apply_to: Any = "all"
    vhost: str | None = None


class Queue(msgspec.Struct):
    name: str
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}
    vhost: str | None = None
    type: str = ""


class Exchange(msgspec.Struct):
    name: str
    type: str
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class Binding(msgspec.Struct):
    source: str
    destination: str
    destination_type: str
    routing_key: str = ""
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class Document(msgspec.Struct):
    """A document of definitions; other keys (versions, metadata) are ignored."""

    users: list[User] = []
    vhosts: list[Vhost] = []
    permissions: list[Permission] = []
    topic_permissions: list[TopicPermission] = []
    parameters: list[Parameter] = []
    global_parameters: list[GlobalParameter] = []
    policies: list[Policy] = []
    exchanges: list[Exchange] = []
    queues: list[Queue] = []
    bindings: list[Binding] = []


def read(data: bytes) -> Document:
    """Decode a document. Raises Refusal (400) with the path of what is wrong.

    Items are decoded one by one: decoding holds up every thread, and there may be 100,000 items.
    """
    path = "$"
    found: dict[str, list[Any]] = {}
    try:
        sections = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        for name, kind in _KINDS.items():
            path = f"$.{name}"
            items = found[name] = []
            for raw in msgspec.json.decode(sections.get(name, b"[]"), type=list[msgspec.Raw]):
                path = f"$.{name}[{len(items)}]"
                items.append(msgspec.json.decode(raw, type=kind))
    except msgspec.ValidationError as error:
        # The error of an item says its path in the item; put it behind the item's own path.
        text = str(error)
        if "`$" in text:
            text = text.replace("`$", f"`{path}", 1)
        elif path != "$":
            text = f"{text} - at `{path}`"
        raise bad(text) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad(f"failed_to_parse_json: {error}") from None
    except RecursionError:
        raise bad("failed_to_parse_json: nested too deep") from None
    return Document(**found)


_KINDS = {field.name: get_args(field.type)[0] for field in msgspec.structs.fields(Document)}


def stages(
    document: Document,
    vhost: str | None,
    hash_password: HashPassword,
    decrypt: Decrypt = lambda put: put,
) -> list[list[Ask]]:
    """Return the requests in stages: those of one stage do not need each other.

    `vhost` is the vhost to import into; users and vhosts in the document are then ignored.
    Secrets that a broker without the key for them has exported are decrypted.
    """
    made: list[list[Ask]] = []
    if vhost is None:
        made.append([_user_put(user, hash_password) for user in document.users])
        made.append([_vhost_put(v) for v in document.vhosts])
        made.append([PermissionPut(**asdict(each)) for each in document.permissions])
        made.append([TopicPermissionPut(**asdict(each)) for each in document.topic_permissions])
        made.append(list(_limits(document)))
        made.append([ParameterPut("", GLOBAL, p.name, p.value) for p in document.global_parameters])

    def each(
        things: list[Any],
        said: str,
        make: Callable[[Any, str], Ask],
        name: Callable[[Any], str] = attrgetter("name"),
    ) -> None:
        """Make requests for things in a vhost: in `vhost`, or else in the one that they name."""
        asks: list[Ask] = []
        for thing in things:
            into = vhost if vhost is not None else thing.vhost
            if into is None:
                raise bad(f"{said} '{name(thing)}': no vhost is named")
            asks.append(make(thing, into))
        made.append(asks)

    each(document.parameters, "parameter", lambda one, into: decrypt(_parameter(one, into)))
    each(document.policies, "policy", _policy)
    each(document.exchanges, "exchange", _exchange)
    each(document.queues, "queue", _queue)
    each(document.bindings, "binding from", _binding, attrgetter("source"))
    return made


def needed(ask: Ask, catalog: Catalog) -> bool:
    """Return whether a request is to be made.

    What exists stays, and a binding whose ends do not exist is left out.
    """
    match ask:
        case VhostPut():  # files of some versions have only the name, so the settings stay
            return ask.name not in catalog.vhosts or msgspec.structs.replace(
                ask, name=""
            ) != VhostPut("")
        case QueueDeclare():
            return catalog.queue(ask.vhost, ask.name) is None
        case ExchangeDeclare():
            return ask.name not in PREDECLARED and catalog.exchange(ask.vhost, ask.name) is None
        case Bind():
            vhost = catalog.vhost(ask.vhost)
            there = vhost is None or (
                ask.source in vhost.exchanges and vhost.destination(ask.kind, ask.destination)
            )
            return ask.source != "" and bool(there)
    return True


def named(ask: Ask) -> str:
    """Return the name of what a request makes, "vhost/name" as RabbitMQ writes it."""
    vhost = getattr(ask, "vhost", "")
    name = getattr(ask, "name", "") or getattr(ask, "user", "") or getattr(ask, "destination", "")
    return f"{vhost}/{name}" if vhost else name


def refused(ask: Ask, text: str) -> str:
    return f"{text} ({named(ask)})"


def _user_put(user: User, hash_password: HashPassword) -> UserPut:
    if user.tags is None:
        raise bad(f"tags_not_present (user '{user.name}')")
    tags = user.tags.split(",") if isinstance(user.tags, str) else user.tags
    password_hash, algorithm = user.password_hash or "", user.hashing_algorithm
    if user.password_hash is None and user.password:
        password_hash, algorithm = hash_password(user.password)
    if algorithm not in HASHES:
        raise bad(f"unknown hashing_algorithm '{algorithm}' (user '{user.name}')")
    if not is_base64(password_hash):
        raise bad(f"password_hash: not base64 (user '{user.name}')")
    return UserPut(
        user.name, password_hash, algorithm, [tag for part in tags if (tag := part.strip())]
    )


def _vhost_put(vhost: Vhost) -> VhostPut:
    """Return the request for a vhost.

    Some versions keep settings in metadata. A default type that is none ("undefined") is ignored,
    and so are numbers of copies that cannot be.
    """
    tags = vhost.tags or vhost.metadata.get("tags") or []
    tags = tags.split(",") if isinstance(tags, str) else tags
    description = vhost.description or vhost.metadata.get("description") or ""
    kind = vhost.default_queue_type or vhost.metadata.get("default_queue_type")
    return VhostPut(
        vhost.name,
        str(description),
        [str(tag).strip() for tag in tags],
        kind if isinstance(kind, str) and kind in QUEUE_TYPES else "",
        vhost.protected_from_deletion or vhost.metadata.get("protected_from_deletion") is True,
        replicas=_copies(vhost.metadata.get("replicas")),
        min_in_sync=_copies(vhost.metadata.get("min_in_sync")),
    )


def _copies(value: Any) -> int:
    return value if type(value) is int and 0 < value <= REPLICAS_MAX else 0


def _limits(document: Document) -> Iterator[ParameterPut]:
    for user in document.users:
        if isinstance(user.limits, dict) and user.limits:
            yield ParameterPut("", USER_LIMITS, user.name, user.limits)
    for vhost in document.vhosts:
        if vhost.limits:
            yield ParameterPut(
                vhost.name,
                VHOST_LIMITS,
                "limits",
                {limit.name: limit.value for limit in vhost.limits},
            )


def _parameter(parameter: Parameter, vhost: str) -> ParameterPut:
    value = parameter.value
    if parameter.component == OPERATOR_POLICY and isinstance(value, dict):
        value = {"priority": 0, "apply-to": "all"} | value
    return ParameterPut(vhost, parameter.component, parameter.name, value)


def _policy(policy: Policy, vhost: str) -> ParameterPut:
    value = {
        "pattern": policy.pattern,
        "definition": policy.definition,
        "priority": policy.priority,
        "apply-to": policy.apply_to,
    }
    return ParameterPut(vhost, POLICY, policy.name, value)


def _exchange(exchange: Exchange, vhost: str) -> ExchangeDeclare:
    flags = (exchange.durable, exchange.auto_delete, exchange.internal)
    return ExchangeDeclare(vhost, exchange.name, exchange.type, *flags, exchange.arguments)


def _queue(queue: Queue, vhost: str) -> QueueDeclare:
    arguments = queue.arguments
    if queue.type and queue.type != "classic":
        arguments = {"x-queue-type": queue.type} | arguments
    return QueueDeclare(vhost, queue.name, queue.durable, queue.auto_delete, False, arguments)


def _binding(binding: Binding, vhost: str) -> Bind:
    if binding.destination_type not in ("queue", "exchange"):
        raise bad(
            f"destination_type: '{binding.destination_type}' (binding from '{binding.source}')"
        )
    ends = (binding.source, binding.destination_type, binding.destination)
    return Bind(vhost, *ends, binding.routing_key, binding.arguments)
