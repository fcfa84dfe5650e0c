"""Decide which rights an act needs and whether a user has them.

An act is the request that asks for it (`control`, `changes`), or one of the classes below where
there is no such request. `needs` returns what an act needs in the order in which RabbitMQ looks.
`check` raises the Refusal that RabbitMQ gives for the first need that is not met. Code that carries
out an act for a user calls `check` first: front doors in `topology` and `publish`, the HTTP API in
`management.call`. Requests without a user (an import of definitions, the broker itself) are not
checked here: an import is an administrator's, by its route.

Needs are of four kinds: a right to a thing (`Need`), a right to the routing keys of a topic
exchange (`TopicNeed`), a tag (`Tag`), and any permission in a vhost (`Entry`). Policies that name a
dead-letter exchange or an alternate exchange need a tag and no right to write there, as in
RabbitMQ.

To add an act: a function that yields its needs (or `_one`), a line in `_NEEDS`, and its row in
tests/access/test_rights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

from shardmq.broker.model import checks, message_dlx
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CLUSTER_NAME,
    GLOBAL,
    USER_LIMITS,
    VHOST_LIMITS,
    ParameterDelete,
    ParameterPut,
)
from shardmq.broker.model.checks import ACCESS_REFUSED, SERVER_NAMED_PREFIX, Refusal
from shardmq.broker.model.permissions import Right
from shardmq.broker.model.policies import OPERATOR_POLICY
from shardmq.broker.routing import delaying
from shardmq.broker.shared.control import (
    Bind,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)

TopicRight = Literal["write", "read"]
MANAGEMENT, POLICYMAKER, MONITORING, ADMINISTRATOR = (
    "management",
    "policymaker",
    "monitoring",
    "administrator",
)
# The tags that include each tag: RabbitMQ's ranks.
TAGS: Final[dict[str, frozenset[str]]] = {
    MANAGEMENT: frozenset((MANAGEMENT, POLICYMAKER, MONITORING, ADMINISTRATOR)),
    POLICYMAKER: frozenset((POLICYMAKER, ADMINISTRATOR)),
    MONITORING: frozenset((MONITORING, ADMINISTRATOR)),
    ADMINISTRATOR: frozenset((ADMINISTRATOR,)),
}
# Parameters that have a path of their own need the tag of that path, by whatever path they are set.
COMPONENT_TAGS: Final = {
    OPERATOR_POLICY: ADMINISTRATOR,
    VHOST_LIMITS: ADMINISTRATOR,
    USER_LIMITS: ADMINISTRATOR,
}
GLOBAL_TAGS: Final = {CLUSTER_NAME: ADMINISTRATOR}

DEAD_LETTER_EXCHANGE: Final = "x-dead-letter-exchange"
ALTERNATE_EXCHANGE: Final = "alternate-exchange"
SHARD_ARGUMENTS: Final = "x-shard-arguments"
# The name that the broker will give to a queue is not known yet. Rights are those to such a name.
SERVER_NAMED: Final = SERVER_NAMED_PREFIX + 22 * "A"


# -- acts that are no requests ---------------------------------------------------------------------


class Read(NamedTuple):
    """Having messages of a queue, or of a stream exchange as a queue.

    Consume, get, purge and reading as Arrow are such acts.
    """

    vhost: str
    name: str


class Configure(NamedTuple):
    """Changing how a queue that is there behaves: pause, resume, restart."""

    vhost: str
    name: str


# -- needs -----------------------------------------------------------------------------------------


class Need(NamedTuple):
    """A right to a thing.

    `kind` is "exchange" or "queue", for the text.
    """

    right: Right
    kind: str
    vhost: str
    name: str

    def refusal(self, catalog: Catalog, user: str) -> str:
        """Return why this user does not meet the need, or ""."""
        if catalog.permissions.may(user, self.vhost, self.right, self.name):
            return ""
        shown = self.name or "amq.default" if self.kind == "exchange" else self.name
        thing = checks.named(self.kind, shown, self.vhost)
        return f"{self.right} access to {thing} refused for user '{user}'"


class TopicNeed(NamedTuple):
    """A right to a routing key of a topic exchange.

    Every key may be used with an exchange that is no topic exchange, or does not exist.
    """

    right: TopicRight
    vhost: str
    exchange: str
    key: str

    def refusal(self, catalog: Catalog, user: str) -> str:
        return topic_refusal(catalog, user, self.vhost, self.right, self.exchange, (self.key,))


class Tag(NamedTuple):
    tag: str

    def refusal(self, catalog: Catalog, user: str) -> str:
        known = catalog.users.get(user)
        return "" if known is not None and has_tag(known.tags, self.tag) else f"Not {self.tag} user"


class Entry(NamedTuple):
    """Any permission in a vhost.

    Administrators need none: they set parameters in every vhost.
    """

    vhost: str

    def refusal(self, catalog: Catalog, user: str) -> str:
        allowed = catalog.permissions.may_enter(user, self.vhost) or not Tag(ADMINISTRATOR).refusal(
            catalog, user
        )
        return "" if allowed else "User not authorised to access virtual host"


AnyNeed = Need | TopicNeed | Tag | Entry


def check(catalog: Catalog, user: str, act: Any) -> None:
    """Raise Refusal, 403, when the user lacks a right that the act needs.

    Raises KeyError for an act that has no line in `_NEEDS`: an act without a rule is allowed to
    nobody.
    """
    for need in needs(catalog, act):
        if text := need.refusal(catalog, user):
            raise Refusal(ACCESS_REFUSED, text)


def needs(catalog: Catalog, act: Any) -> Iterator[AnyNeed]:
    """Return what the act needs, in order.

    Raises Refusal on the way for what nobody may do at all.
    """
    return _NEEDS[type(act)](catalog, act)


def has_tag(tags: Iterable[str], tag: str) -> bool:
    """Return whether a user with these tags may do what the tag is for."""
    return not TAGS[tag].isdisjoint(tags)


# -- publishing: without a request for each message, for speed -------------------------------------


def check_publish(catalog: Catalog, user: str, vhost: str, exchange: str) -> None:
    """Raise Refusal when the user may not publish to this exchange at all."""
    if not catalog.permissions.may(user, vhost, "write", exchange):
        raise Refusal(
            ACCESS_REFUSED, Need("write", "exchange", vhost, exchange).refusal(catalog, user)
        )


def check_keys(catalog: Catalog, user: str, vhost: str, exchange: str, keys: Iterable[str]) -> None:
    """Raise Refusal when the user may not publish to a topic exchange with one of these keys.

    The keys are all by which the message is routed: its own and those of its headers CC and BCC.
    """
    if text := topic_refusal(catalog, user, vhost, "write", exchange, keys):
        raise Refusal(ACCESS_REFUSED, text)


def check_dead_letter(
    catalog: Catalog, user: str, vhost: str, headers: dict[str, Any], keys: Iterable[str]
) -> None:
    """Raise Refusal when the user may not publish to the exchange of the dead letter.

    A message may name an exchange for its dead letter. The dead letter goes there with the key that
    the message names for it, else with the message's own keys.
    """
    exchange = message_dlx.exchange_of(headers)
    if exchange is None:
        return
    check_publish(catalog, user, vhost, exchange)
    key = message_dlx.key_of(headers)
    check_keys(catalog, user, vhost, exchange, keys if key is None else (key,))


def topic_refusal(
    catalog: Catalog, user: str, vhost: str, right: TopicRight, exchange: str, keys: Iterable[str]
) -> str:
    """Return why one of these keys is refused, or ""."""
    put = catalog.exchange(vhost, exchange) if catalog.permissions.has_topic(user, vhost) else None
    if put is None or delaying.inner_type(put.type, put.arguments) != "topic":
        return ""
    for key in keys:
        if not catalog.permissions.may_topic(user, vhost, right, exchange, key):
            return checks.topic_refused(right, vhost, exchange, key, user)
    return ""


# -- what each act needs ---------------------------------------------------------------------------


def _exchange_declare(catalog: Catalog, act: ExchangeDeclare) -> Iterator[AnyNeed]:
    """Return the needs of exchange.declare.

    Names in the arguments of an exchange that is there change nothing: they are compared with what
    it has.
    """
    name = checks.clean_name(act.name)
    yield Need("configure", "exchange", act.vhost, name)
    if catalog.exchange(act.vhost, name) is not None:
        return
    shards = act.arguments.get(SHARD_ARGUMENTS)
    dead_letters = shards.get(DEAD_LETTER_EXCHANGE) if isinstance(shards, dict) else None
    for target in (act.arguments.get(ALTERNATE_EXCHANGE), dead_letters):
        if isinstance(target, str):
            yield Need("read", "exchange", act.vhost, name)
            yield Need("write", "exchange", act.vhost, target)


def _queue_declare(catalog: Catalog, act: QueueDeclare) -> Iterator[AnyNeed]:
    name = checks.clean_name(act.name)
    yield Need("configure", "queue", act.vhost, name or SERVER_NAMED)
    target = act.arguments.get(DEAD_LETTER_EXCHANGE)
    if isinstance(target, str) and catalog.queue(act.vhost, name) is None:
        yield Need("read", "queue", act.vhost, name or SERVER_NAMED)
        yield Need("write", "exchange", act.vhost, target)


def _bind(catalog: Catalog, act: Bind | Unbind) -> Iterator[AnyNeed]:
    yield Need("write", act.kind, act.vhost, act.destination)
    if act.kind == "exchange":
        checks.check_not_default(act.destination)
    checks.check_not_default(act.source)
    yield Need("read", "exchange", act.vhost, act.source)
    yield TopicNeed("read", act.vhost, act.source, act.routing_key)


def _parameter(catalog: Catalog, act: ParameterPut | ParameterDelete) -> Iterator[AnyNeed]:
    if act.vhost == "" and act.component == GLOBAL:
        yield Tag(GLOBAL_TAGS.get(act.name, POLICYMAKER))
        return
    yield Tag(COMPONENT_TAGS.get(act.component, POLICYMAKER))
    if act.vhost:
        yield Entry(act.vhost)


def _one(right: Right, kind: str) -> Callable[[Catalog, Any], Iterator[AnyNeed]]:
    """Return the rule of an act that needs one right to the thing that it names."""
    return lambda catalog, act: iter((Need(right, kind, act.vhost, act.name),))


_NEEDS: Final[dict[type, Callable[[Catalog, Any], Iterator[AnyNeed]]]] = {
    ExchangeDeclare: _exchange_declare,
    ExchangeRemove: _one("configure", "exchange"),
    QueueDeclare: _queue_declare,
    QueueRemove: _one("configure", "queue"),
    Bind: _bind,
    Unbind: _bind,
    Read: _one("read", "queue"),
    Configure: _one("configure", "queue"),
    ParameterPut: _parameter,
    ParameterDelete: _parameter,
}
