"""Federation: the checks of upstreams and sets of them, and which links they ask for.

A link brings messages of a queue or an exchange of an upstream broker to the one of this broker
that a policy federates. The names, the defaults and the texts of faults are those of RabbitMQ's
plugins. One row of `KEYS` is one key of the parameter `federation-upstream`. An element of a
parameter `federation-upstream-set` names an upstream and may have the same keys, which then win.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from shardmq.broker.model import amqp_uri, patterns
from shardmq.broker.model import parameter_keys as keys
from shardmq.broker.model.arguments import SHARD_ARGUMENTS
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import ExchangePut, ParameterPut, QueuePut
from shardmq.broker.model.encrypted import NO_KEY, is_encrypted
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.erlang import json_term as term
from shardmq.broker.model.parameter_keys import Key
from shardmq.broker.model.policies import POLICY, Applied, queue_kind
from shardmq.broker.model.shovels import ACK_MODES, PREFETCH, RECONNECT_DELAY_S
from shardmq.broker.model.values import EXPIRY_MS_MAX, NAME_BYTES_MAX

UPSTREAM: Final = "federation-upstream"
UPSTREAM_SET: Final = "federation-upstream-set"
UPSTREAM_PATTERN: Final = "federation-upstream-pattern"
# The policy keys, of which a policy may have one.
POLICY_KEYS: Final = (UPSTREAM, UPSTREAM_SET, UPSTREAM_PATTERN)
ALL: Final = "all"  # the set of all upstreams of the vhost, without a parameter
ELEMENTS_MAX: Final = 1000  # of one set
HOPS_MAX: Final = 1000
# Queues and exchanges that are looked at and links that are made, before a pause.
STEPS_AT_A_TIME: Final = 100
# A queue with this argument serves a plugin of the broker, and is not federated.
INTERNAL_PURPOSE: Final = "x-internal-purpose"

_OPTIONAL: Final = {
    "exchange": Key(keys.text),
    "queue": Key(keys.text),
    "consumer-tag": Key(keys.text),
    "prefetch-count": Key(keys.prefetch),
    "reconnect-delay": Key(keys.delay),
    "max-hops": Key(keys.whole(0, HOPS_MAX)),
    "expires": Key(keys.whole(1, EXPIRY_MS_MAX)),
    "message-ttl": Key(keys.whole(0, EXPIRY_MS_MAX)),
    "trust-user-id": Key(keys.flag),
    "ack-mode": Key(keys.one_of(*ACK_MODES)),
    "resource-cleanup-mode": Key(keys.one_of("default", "never")),
    "queue-type": Key(keys.one_of("classic", "quorum")),
    "bind-nowait": Key(keys.flag),
    "channel-use-mode": Key(keys.one_of("multiple", "single")),
}
KEYS: Final[Mapping[str, Key]] = {
    "uri": Key(keys.uris, is_needed=True, is_secret=True),
    **_OPTIONAL,
}
_OF_ELEMENT: Final[Mapping[str, Key]] = {
    "upstream": Key(keys.filled, is_needed=True),
    "uri": Key(keys.uris, is_secret=True),
    **_OPTIONAL,
}


# -- checks ----------------------------------------------------------------------------------------


def faults(component: str, name: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the value of an upstream or of a set, in RabbitMQ's words."""
    if component == UPSTREAM:
        yield from _table_faults(name, value, KEYS)
        return
    if not isinstance(value, list):
        yield f"{name} should be list, actually was {term(value)}"
        return
    if len(value) > ELEMENTS_MAX:
        yield f"{name} has at most {ELEMENTS_MAX} elements"
        return
    for element in value:
        yield from _table_faults(name, element, _OF_ELEMENT)


def _table_faults(name: str, value: Any, known: Mapping[str, Key]) -> Iterator[str]:
    if isinstance(value, dict):
        yield from keys.faults(name, value, known)
    else:
        yield f"{name} should be a table, actually was {term(value)}"


def policy_faults(definition: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the federation keys of a policy, whose values are strings."""
    if sum(key in definition for key in POLICY_KEYS) > 1:
        yield f"cannot specify {UPSTREAM}, {UPSTREAM_SET} or {UPSTREAM_PATTERN} together"
    if UPSTREAM_PATTERN in definition:
        pattern = definition[UPSTREAM_PATTERN]
        if fault := _pattern_fault(pattern):
            shown = cut(pattern, NAME_BYTES_MAX)
            yield f"could not compile pattern {shown} to a regular expression. Error: {fault}"


def _pattern_fault(pattern: str) -> str:
    try:
        patterns.compiled(pattern)
    except patterns.BadPattern as error:
        return f'{{"{error.msg}",{error.pos}}}'
    return ""


# -- links -----------------------------------------------------------------------------------------


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The upstream of a link of queues or of exchanges, and how messages are taken from it.

    upstream: the name of the upstream.
    policy: the name of the policy that federates what is here.
    uris: of the upstream, one of which is used. Without a path in it, a URI means the vhost here.
    """

    upstream: str
    policy: str
    uris: list[str]
    consumer_tag: str
    prefetch: int = PREFETCH
    reconnect_delay_s: float = RECONNECT_DELAY_S
    ack_mode: str = "on-confirm"
    trust_user_id: bool = False

    @property
    def obstacle(self) -> str:
        """Return why no link of the upstream runs, "" if links do."""
        return NO_KEY if any(map(is_encrypted, self.uris)) else ""


class QueueLink(msgspec.Struct, frozen=True, kw_only=True, tag="queue-link"):
    """A link that moves messages of an upstream queue to a federated queue of this broker.

    upstream_queue: the queue there. It is declared like the queue here if it is not there.
    durable, auto_delete, arguments: how the queue here was declared.
    is_virtual: the queue here is the virtual queue of the stream exchange `queue`, to which
        messages go by their routing keys.
    """

    vhost: str
    queue: str
    source: Source
    upstream_queue: str
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}
    is_virtual: bool = False

    @property
    def id(self) -> str:
        """Return the name of the link in commands: the same for the same ends.

        The ends of another link may have the same id.
        """
        return hashlib.sha256("\0".join(self.ends).encode()).hexdigest()[:8]

    @property
    def ends(self) -> tuple[str, ...]:
        return self.vhost, self.queue, self.source.upstream, self.upstream_queue


Place = tuple[str, int, str]  # of a broker: host, port and vhost


class ExchangeLink(msgspec.Struct, frozen=True, kw_only=True, tag="exchange-link"):
    """A link that brings messages of an upstream exchange to a federated exchange of this broker.

    upstream_exchange: the exchange there. It is declared like the one here if it is not there.
    max_hops: messages that have come through so many links are dropped.
    expires, message_ttl: of the queue at the upstream, in milliseconds; None for no limit.
    queue_type: the type of that queue.
    cleans_up: the queue is deleted when the link is not asked for any more.
    twin: the upstream of another link with the same ends, which runs instead of this one; "" if
        there is none.
    exchange_type, durable, auto_delete, arguments: how the exchange here was declared.
    """

    vhost: str
    exchange: str
    source: Source
    upstream_exchange: str
    exchange_type: str
    max_hops: int = 1
    expires: int | None = None
    message_ttl: int | None = None
    queue_type: str = "classic"
    cleans_up: bool = True
    twin: str = ""
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """Return the name of the link in commands, as that of a queue."""
        return hashlib.sha256("\0".join(self.ends).encode()).hexdigest()[:8]

    @property
    def ends(self) -> tuple[str, ...]:
        return "exchange", self.vhost, self.exchange, self.source.upstream, self.upstream_exchange

    def upstream_queue(self, cluster: str, upstream_vhost: str) -> str:
        """Return the name of the queue at the upstream.

        Args:
            cluster: The name of this broker.
            upstream_vhost: The vhost at the upstream.
        """
        downstream = cluster
        if self.vhost != upstream_vhost:
            downstream += f":{self.vhost}:{self.exchange}"
        elif self.exchange != self.upstream_exchange:
            downstream += f":{self.exchange}"
        return f"federation: {self.upstream_exchange} -> {downstream}"

    @property
    def places(self) -> frozenset[Place]:
        """Return where the upstream is, by each of its URIs; nothing if they cannot be read."""
        if self.source.obstacle:
            return frozenset()
        uris = [amqp_uri.parse(uri, self.vhost) for uri in self.source.uris]
        return frozenset((uri.host, uri.port, uri.vhost) for uri in uris)

    def keeps_queue_of(self, other: ExchangeLink) -> bool:
        """Return whether this link goes on with the queue that the other one has declared.

        The URIs of an upstream are those of one broker, so one common place is enough. URIs that
        cannot be read may be of any.
        """
        if self.twin or not (self.source.obstacle or self.places & other.places):
            return False
        return all(
            getattr(self, name) == getattr(other, name)
            for name in (
                "vhost", "exchange", "upstream_exchange", "expires", "message_ttl", "queue_type",
            )
        )  # fmt: skip


Link = QueueLink | ExchangeLink


class _Upstreams:
    """The upstreams and sets of one vhost."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}
        self._sets: dict[str, list[dict[str, Any]]] = {}
        self._found: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}

    def add(self, put: ParameterPut) -> None:
        """Add a parameter. One with faults, which a file may have, is passed over."""
        if any(faults(put.component, put.name, put.value)):
            return
        if put.component == UPSTREAM:
            self._values[put.name] = put.value
        else:
            self._sets[put.name] = put.value

    def of(self, applied: Applied) -> Iterator[tuple[Source, dict[str, Any]]]:
        """Yield the upstreams that the policy of one object means, each with its value."""
        policy, definition = applied.policy, applied.definition
        key = next((key for key in POLICY_KEYS if key in definition), "")
        named = definition.get(key)
        if not policy or not isinstance(named, str):
            return
        if (key, named) not in self._found:
            self._found[key, named] = list(self._meant(key, named))
        for name, value in self._found[key, named]:
            yield _source(name, policy, value), value

    def _meant(self, key: str, named: str) -> Iterator[tuple[str, dict[str, Any]]]:
        elements: list[dict[str, Any]] = [{"upstream": name} for name in sorted(self._values)]
        if key == UPSTREAM:
            elements = [{"upstream": named}]
        elif key == UPSTREAM_PATTERN:
            if _pattern_fault(named):
                return
            pattern = patterns.compiled(named)
            elements = [each for each in elements if pattern.search(each["upstream"]) is not None]
        elif named != ALL:
            elements = self._sets.get(named, [])
        for element in elements:
            name = element["upstream"]
            if name in self._values:
                yield name, {**self._values[name], **element}


def links(catalog: Catalog) -> list[Link]:
    """Return the links that policies and upstreams ask for, one for each pair of ends."""
    return [link for link in walk(catalog) if link is not None]


def walk(catalog: Catalog) -> Iterator[Link | None]:
    """Yield the same links, and None after each `STEPS_AT_A_TIME` queues, exchanges and links.

    The catalog may change while the caller does something else after a None. The links of things
    that are new then may be missing, so the caller walks again after a change.
    """
    upstreams: dict[str, _Upstreams] = {}
    federates = federating_vhosts(catalog)
    for put in catalog.parameters.values():
        if put.component in (UPSTREAM, UPSTREAM_SET) and put.vhost in federates:
            upstreams.setdefault(put.vhost, _Upstreams()).add(put)
    seen: set[tuple[str, ...]] = set()
    taken: dict[tuple[str, str, str, Place], str] = {}  # the upstream of the link that runs
    steps = 0
    names = sorted(federates & upstreams.keys() & catalog.vhosts.keys())
    for vhost in [catalog.vhosts[name] for name in names]:
        for link in _of_vhost(vhost, upstreams[vhost.name]):
            steps += 1
            if steps % STEPS_AT_A_TIME == 0:
                yield None
            if link is None:
                continue
            if link.ends in seen:
                continue
            seen.add(link.ends)
            yield _beside(link, taken) if isinstance(link, ExchangeLink) else link


def _beside(link: ExchangeLink, taken: dict[tuple[str, str, str, Place], str]) -> ExchangeLink:
    """Return a link with its twin, if one of the links before it has the same ends.

    Both would use one queue, and each would delete the bindings of the other one.
    """
    ends = [(link.vhost, link.exchange, link.upstream_exchange, place) for place in link.places]
    twin = next((taken[each] for each in ends if each in taken), None)
    if twin is not None:
        return msgspec.structs.replace(link, twin=twin)
    taken.update(dict.fromkeys(ends, link.source.upstream))
    return link


def federating_vhosts(catalog: Catalog) -> set[str]:
    """Return the vhosts that have a policy with a key of federation."""
    return {
        put.vhost
        for put in catalog.parameters.values()
        if put.component == POLICY and is_federating(put.value)
    }


def is_federating(policy: Any) -> bool:
    """Return whether the value of a policy has a key of federation."""
    definition = policy.get("definition") if isinstance(policy, dict) else None
    return isinstance(definition, dict) and any(key in definition for key in POLICY_KEYS)


def _of_vhost(vhost: Vhost, upstreams: _Upstreams) -> Iterator[Link | None]:
    """Yield the links of a vhost, and None for each queue and exchange that is looked at."""
    for put in list(vhost.exchanges.values()):
        yield None
        if is_federable_exchange(vhost, put):
            for source, value in upstreams.of(vhost.policies_of(put)):
                yield _exchange_link(put, source, value)
    for queue in list(vhost.queues.values()):
        yield None
        # Consumers of a name that is a virtual queue's too are those of the latter.
        if is_federable(queue) and not vhost.shard_queues(queue.name):
            for source, value in upstreams.of(vhost.policies_of(queue)):
                yield _queue_link(queue, source, value)
    for exchange in vhost.part_exchanges():
        yield None
        virtual = virtual_queue(vhost, exchange)
        if virtual is not None:
            for source, value in upstreams.of(vhost.policies_of(virtual)):
                yield _queue_link(virtual, source, value, is_virtual=True)


def virtual_queue(vhost: Vhost, exchange: str) -> QueuePut | None:
    """Return the virtual queue of a stream exchange as if it were a queue of the exchange's name.

    Returns None if it is one of streams, which are not federated, or if there is none.
    """
    if not vhost.shard_queues(exchange):
        return None
    parts, put = vhost.parts(exchange), vhost.exchanges[exchange]
    if any(queue_kind(part.arguments) == "stream" for part in parts):
        return None
    arguments = put.arguments.get(SHARD_ARGUMENTS)
    return QueuePut(
        vhost.name,
        exchange,
        parts[0].id,
        parts[0].shard,
        durable=parts[0].durable,
        arguments=arguments if isinstance(arguments, dict) else {},
    )


def is_federable(queue: QueuePut) -> bool:
    """Return whether messages of other brokers may come to a queue by a link.

    They may not to a stream, nor to a queue that only its connection or the broker itself uses.
    They come to shard queues through their exchange.
    """
    return (
        queue.part is None
        and not queue.owner
        and queue_kind(queue.arguments) != "stream"
        and INTERNAL_PURPOSE not in queue.arguments
    )


def is_federable_exchange(vhost: Vhost, exchange: ExchangePut) -> bool:
    """Return whether messages of other brokers may come to an exchange by a link.

    They may not to the default exchange, which has no bindings, nor to internal ones, such as those
    that links declare. They come to a stream exchange through its virtual queue: its bindings are
    to its own shard queues, and say nothing of which messages are wanted.
    """
    return bool(exchange.name) and not exchange.internal and not vhost.parts(exchange.name)


def _exchange_link(exchange: ExchangePut, source: Source, value: dict[str, Any]) -> ExchangeLink:
    expires, message_ttl = value.get("expires"), value.get("message-ttl")
    return ExchangeLink(
        vhost=exchange.vhost,
        exchange=exchange.name,
        source=source,
        upstream_exchange=value.get("exchange") or exchange.name,
        exchange_type=exchange.type,
        max_hops=int(value.get("max-hops", 1)),
        expires=None if expires is None else int(expires),
        message_ttl=None if message_ttl is None else int(message_ttl),
        queue_type=value.get("queue-type", "classic"),
        cleans_up=value.get("resource-cleanup-mode", "default") != "never",
        durable=exchange.durable,
        auto_delete=exchange.auto_delete,
        arguments=exchange.arguments,
    )


def _queue_link(
    queue: QueuePut, source: Source, value: dict[str, Any], is_virtual: bool = False
) -> QueueLink:
    return QueueLink(
        vhost=queue.vhost,
        queue=queue.name,
        source=source,
        upstream_queue=value.get("queue") or queue.name,
        durable=queue.durable,
        auto_delete=queue.auto_delete,
        arguments=queue.arguments,
        is_virtual=is_virtual,
    )


def _source(upstream: str, policy: str, value: dict[str, Any]) -> Source:
    uris = value["uri"]
    return Source(
        upstream=upstream,
        policy=policy,
        uris=uris if isinstance(uris, list) else [uris],
        consumer_tag=value.get("consumer-tag") or _cut(f"federation-link-{upstream}"),
        prefetch=int(value.get("prefetch-count", PREFETCH)),
        reconnect_delay_s=float(value.get("reconnect-delay", RECONNECT_DELAY_S)),
        ack_mode=value.get("ack-mode", "on-confirm"),
        trust_user_id=value.get("trust-user-id", False),
    )


def _cut(text: str) -> str:
    """Return a text that fits into a name of AMQP."""
    return text.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
