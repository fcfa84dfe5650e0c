"""route(): from an exchange through bindings between exchanges and alternates to queues."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from shardmq.broker.routing.delaying import Delayed, inner_type
from shardmq.broker.routing.keeping import is_kept, queue_name
from shardmq.broker.routing.matching import NOTHING, Fanout, Matcher, Message, Target
from shardmq.broker.routing.spreading import Spread
from shardmq.broker.routing.table import Exchange, RoutingTable


class Routed(NamedTuple):
    """The destinations of a message.

    `queues` has each queue once, in an order that depends only on the names. `kept` are streams of
    exchanges on the way that keep what comes to them. A message that goes nowhere else is not
    routed.
    """

    queues: tuple[str, ...]
    kept: tuple[str, ...] = ()


def route(
    table: RoutingTable, exchange: str, routing_key: str, headers: Mapping[str, Any] | None = None
) -> Routed:
    """Route by key and headers only; see `route_message`."""
    return route_message(table, exchange, Message(routing_key, headers or NOTHING))


class Step(NamedTuple):
    """A message at one exchange.

    `targets` get the message. `alternate` is asked instead, if it exists.
    """

    name: str
    exchange: Exchange
    targets: tuple[Target, ...]
    alternate: str | None


def route_message(
    table: RoutingTable, exchange: str, message: Message, trace: list[Step] | None = None
) -> Routed:
    """Return where a message goes. Each exchange is visited once.

    Raises NoSuchExchange for the first exchange only: a missing alternate is no route. `trace` gets
    what each exchange did.
    """
    queues: set[str] = set()
    visited = {exchange}
    waiting = [exchange]
    kept: list[str] = []
    while waiting:
        at = waiting.pop()
        here = table.exchange(at)
        matcher = here.matcher
        if here.keeps and _is_kept(here, message):
            kept.append(queue_name(at))
        targets = _matched(matcher, message) if message.more_keys else matcher.match(message)
        # RabbitMQ asks the alternate when no binding matched, not when the matched ones led
        # nowhere.
        following = (
            [] if targets or here.attributes.alternate is None else [here.attributes.alternate]
        )
        if trace is not None:
            trace.append(Step(at, here, tuple(targets), following[0] if following else None))
        for kind, name in targets:
            if kind == "queue":
                queues.add(name)
            else:
                following.append(name)
        for name in following:
            if name not in visited and table.has_exchange(name):
                visited.add(name)
                waiting.append(name)
    return Routed(tuple(sorted(queues)) if len(queues) > 1 else tuple(queues), tuple(kept))


def _is_kept(here: Exchange, message: Message) -> bool:
    """Return whether an exchange that keeps messages keeps this one.

    A message that the exchange delays is kept when it is due.
    """
    if isinstance(here.matcher, Delayed) and here.matcher.waiting(message):
        return False
    return is_kept(inner_type(here.attributes.type, here.attributes.arguments), message.headers)


def _matched(matcher: Matcher, message: Message) -> Collection[Target]:
    """Return the targets by any of the message's keys.

    An exchange that chooses one destination looks at the first key only.
    """
    if isinstance(matcher, Delayed):
        return matcher.waiting(message) or _matched(matcher.inner, message)
    if not matcher.by_key or isinstance(matcher, Spread):
        return matcher.match(message)
    found = set(matcher.match(message))
    for key in message.more_keys:
        found.update(matcher.match(message._replace(key=key)))
    return found


def goes_by_key(table: RoutingTable, exchange: str, *, is_due: bool = False) -> bool:
    """Return whether the routing key alone decides where messages published here go.

    This must hold at all exchanges that a message can come to; otherwise no route may be kept.
    `is_due`: the messages wait nowhere any more.
    """
    for here in _within_reach(table, exchange):
        matcher = (
            here.matcher.inner if is_due and isinstance(here.matcher, Delayed) else here.matcher
        )
        if not matcher.by_key:
            return False
    return True


def goes_always_alike(table: RoutingTable, exchange: str) -> bool:
    """Return whether all messages published here go to the same queues."""
    return all(
        here.matcher.by_key and isinstance(here.matcher, Fanout)
        for here in _within_reach(table, exchange)
    )


def _within_reach(table: RoutingTable, exchange: str) -> Iterator[Exchange]:
    """Return all exchanges that a message published here can come to, this one first."""
    visited = {exchange}
    waiting = [exchange]
    while waiting:
        here = table.exchange(waiting.pop())
        yield here
        for name in (*here.destination_exchanges, here.attributes.alternate):
            if name is not None and name not in visited and table.has_exchange(name):
                visited.add(name)
                waiting.append(name)


def spread_of(table: RoutingTable, exchange: str) -> Spread | None:
    """Return the matcher of an exchange that only chooses one of its queues, else None.

    The exchange chooses by the routing key or by chance.
    """
    here = table.exchange(exchange)
    matcher = here.matcher
    if (
        not isinstance(matcher, Spread)
        or here.destination_exchanges
        or not matcher.destinations
        or here.keeps
    ):
        return None
    return matcher if matcher.by_key or matcher.how == "chance" else None
