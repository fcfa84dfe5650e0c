"""Exchange types: what each does with a routing key and headers. One class is one type.

Types that choose one destination of several are in spreading.py; types.py knows all types by name.

A matcher holds the bindings of one exchange and is changed in place; table.py keeps old tables as
they were. The caller adds a binding once and removes only bindings that it added. Two bindings may
lead to one target by the same key with other arguments: the target goes with the last of them.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Set
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol

from shardmq.broker.routing.topic import TopicTrie

Arguments = Mapping[str, Any]
Headers = Mapping[str, Any]
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Target(NamedTuple):
    """The destination of a binding."""

    kind: str  # "queue" or "exchange"
    name: str


class Message(NamedTuple):
    """The properties of a message that routing looks at.

    `properties` are message_id, correlation_id and timestamp as far as they are given. `draw` is 64
    random bits for decisions by chance. `more_keys` are those of the headers CC and BCC. `delay_ms`
    is not 0 if the message waits at exchanges that delay messages.
    """

    key: str
    headers: Headers = NOTHING
    properties: Mapping[str, str | int] = NOTHING
    draw: int = 0
    more_keys: tuple[str, ...] = ()
    delay_ms: int = 0


class Matcher(Protocol):
    """The bindings of one exchange, made with the exchange's arguments.

    `by_key`: the routing key alone decides.
    """

    by_key: bool

    def add(self, key: str, arguments: Arguments, target: Target) -> None: ...

    def remove(self, key: str, arguments: Arguments, target: Target) -> None: ...

    def match(self, message: Message) -> Collection[Target]:
        """Return each target once.

        The result is valid until the next `add` or `remove` and must not be kept.
        """
        ...


class _Targets(dict[Target, int]):
    """Targets with the number of bindings to each."""

    def add(self, target: Target) -> None:
        self[target] = self.get(target, 0) + 1

    def remove(self, target: Target) -> None:
        if self[target] == 1:
            del self[target]
        else:
            self[target] -= 1


class Direct:
    by_key = True

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        self._by_key: dict[str, _Targets] = {}

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        self._by_key.setdefault(key, _Targets()).add(target)

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        targets = self._by_key[key]
        targets.remove(target)
        if not targets:
            del self._by_key[key]

    def match(self, message: Message) -> Collection[Target]:
        return self._by_key.get(message.key, ())


class QueueNames:
    """The default exchange, which binds every queue by its name and has no other bindings.

    It keeps no bindings but reads `queues`.
    """

    by_key = True

    def __init__(self, queues: Set[str]) -> None:
        self._queues = queues

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        raise AssertionError("nothing is bound to the default exchange by hand")

    remove = add

    def match(self, message: Message) -> Collection[Target]:
        return (Target("queue", message.key),) if message.key in self._queues else ()


class Fanout:
    by_key = True

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        self._targets = _Targets()

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        self._targets.add(target)

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        self._targets.remove(target)

    def match(self, message: Message) -> Collection[Target]:
        return self._targets


class RecentHistory(Fanout):
    """Routes like a fanout exchange.

    The headers of a message say whether it is kept, so the routing key does not decide alone.
    """

    by_key = False


class Topic:
    by_key = True

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        self._trie = TopicTrie()

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        self._trie.add(key, target)

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        self._trie.remove(key, target)

    def match(self, message: Message) -> Collection[Target]:
        return self._trie.match(message.key)


class HeadersExchange:
    by_key = False

    def __init__(self, arguments: Arguments = NOTHING) -> None:
        self._rules: dict[tuple[Any, ...], tuple[HeaderRule, _Targets]] = {}

    def add(self, key: str, arguments: Arguments, target: Target) -> None:
        rule = HeaderRule.of(arguments)
        self._rules.setdefault(rule.identity(), (rule, _Targets()))[1].add(target)

    def remove(self, key: str, arguments: Arguments, target: Target) -> None:
        identity = HeaderRule.of(arguments).identity()
        targets = self._rules[identity][1]
        targets.remove(target)
        if not targets:
            del self._rules[identity]

    def match(self, message: Message) -> Collection[Target]:
        found: set[Target] = set()
        for rule, targets in self._rules.values():
            if rule.matches(message.headers):
                found.update(targets)
        return found


class HeaderRule(NamedTuple):
    """A headers binding.

    `all` asks for every one of `wanted`, `any` for one of them. A wanted value of None asks for the
    presence of the header.
    """

    quantity: Literal["all", "any"]
    wanted: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, arguments: Arguments) -> HeaderRule:
        mode = arguments.get("x-match", "all")
        with_x = mode in ("all-with-x", "any-with-x")
        wanted = [
            (name, value)
            for name, value in arguments.items()
            if name != "x-match" and (with_x or not name.startswith("x-"))
        ]
        return cls(
            "any" if mode in ("any", "any-with-x") else "all",
            tuple(sorted(wanted, key=lambda pair: pair[0])),
        )

    def identity(self) -> tuple[Any, ...]:
        # repr tells 1 from True and from 1.0, and makes lists and tables usable as part of a key.
        return (self.quantity, repr(self.wanted))

    def matches(self, headers: Headers) -> bool:
        ask = all if self.quantity == "all" else any
        return ask(
            name in headers and _is_wanted(headers[name], value) for name, value in self.wanted
        )


def _is_wanted(given: Any, wanted: Any) -> bool:
    """Return whether a header has the wanted value.

    As in RabbitMQ the value counts, not the AMQP type it travels in: numbers and times are numbers,
    text and bytes are bytes. A boolean is neither.
    """
    if wanted is None:
        return True
    if type(given) is type(wanted):
        return bool(given == wanted)
    return bool(_value(given) == _value(wanted))


def _value(field: Any) -> tuple[str, Any]:
    """Return what a field is compared by with a field of another type."""
    if isinstance(field, bool):
        return "bool", field
    if isinstance(field, datetime.datetime):
        return "number", field.timestamp()
    if isinstance(field, int | float):
        return "number", field
    if isinstance(field, str):
        return "bytes", field.encode()
    return (
        ("bytes", bytes(field))
        if isinstance(field, bytes | bytearray)
        else (type(field).__name__, field)
    )
