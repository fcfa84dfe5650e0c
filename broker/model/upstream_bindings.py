"""The bindings that a link of federated exchanges makes at its upstream.

A message of the upstream exchange is wanted here if a binding of the exchange here would take it.
So each pair of a routing key and arguments is bound once at the upstream, to the internal exchange
of the link, however many queues here have it:

```
   upstream broker                                this broker
   exchange --- key, arguments ---> internal      exchange --- key, arguments ---> queues
        ^       x-bound-from          |               ^
        |                             +-----queue-----+ link
        +--- bound from here
```

The argument `x-bound-from` says which exchanges a binding came through, the last one first. A
broker between two others passes such bindings on, so that messages find their way over several
links. Each entry counts down how many more links may pass the binding on, and a binding goes to no
broker that it has been to. The names and rules are those of RabbitMQ's federation.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from shardmq.broker.amqp.methods import Short, decode_table, encode_table
from shardmq.broker.model.changes import BindingPut

BOUND_FROM: Final = "x-bound-from"
CLUSTER, VHOST, EXCHANGE, HOPS = "cluster-name", "vhost", "exchange", "hops"
# Of one exchange; a link of one that has more fails.
BINDINGS_MAX: Final = 100_000
BYTES_MAX: Final = 32 << 20
HOPS_MAX: Final = 32_767  # that a short has


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """A routing key and arguments, as the table that AMQP writes, with its length before it."""

    key: str
    arguments: bytes


class Place(NamedTuple):
    """The exchange here, as its bindings at the upstream name it.

    suffix: of the internal exchange that they lead to, A or B. The next broker then sees the
        bindings to the one as others than those to the other, and none is missing in between.
    """

    cluster: str
    vhost: str
    exchange: str
    suffix: str


class Wanted:
    """Each pair of a key and arguments that bindings of one exchange have, once.

    There may be `BINDINGS_MAX` of them and more, so they are added and taken in small parts.
    """

    def __init__(self) -> None:
        self._found: set[Binding] = set()
        self._runs: list[list[Binding]] = []  # each in order
        self._bytes = 0

    def add(self, bindings: Iterable[BindingPut]) -> bool:
        """Add bindings; return False if there are too many of them, or if they are too large."""
        run = []
        for put in bindings:
            try:
                arguments = encode_table(dict(sorted(put.arguments.items())))
            except (ValueError, struct.error):
                continue  # AMQP cannot write them, so no broker could have such a binding from here
            binding = Binding(put.routing_key, arguments)
            if binding not in self._found:
                self._found.add(binding)
                self._bytes += len(binding.key) + len(arguments)
                run.append(binding)
        self._runs.append(sorted(run, key=_order))
        return len(self._found) <= BINDINGS_MAX and self._bytes <= BYTES_MAX

    def in_order(self) -> Iterator[Binding]:
        """Yield all in the order of their keys and arguments."""
        return heapq.merge(*self._runs, key=_order)


def _order(binding: Binding) -> tuple[str, bytes]:
    return binding.key, binding.arguments


def at_upstream(
    bindings: Iterable[Binding], here: Place, upstream: tuple[str | None, str], max_hops: int
) -> Iterator[Binding]:
    """Yield what is to be bound at an upstream.

    Args:
        bindings: Those of the exchange here.
        here: The exchange here.
        upstream: The cluster name of the upstream, if it tells one, and the vhost there.
        max_hops: That of the link.
    """
    made: dict[bytes, bytes | None] = {}
    for binding in bindings:
        if binding.arguments not in made:
            made[binding.arguments] = _arguments(binding.arguments, here, upstream, max_hops)
        arguments = made[binding.arguments]
        if arguments is not None:
            yield Binding(binding.key, arguments)


def _arguments(
    given: bytes, here: Place, upstream: tuple[str | None, str], max_hops: int
) -> bytes | None:
    """Return the arguments at the upstream; None if the binding goes no further."""
    arguments = decode_table(given)
    before = arguments.get(BOUND_FROM, [])
    hops = max_hops
    if BOUND_FROM in arguments:
        hops = min(_hops_left(before), max_hops)
    if hops < 1 or not isinstance(before, list) or _has_been(before, upstream):
        return None
    entry = {
        CLUSTER: here.cluster,
        VHOST: here.vhost,
        EXCHANGE: f"{here.vhost}:{here.exchange} {here.suffix}",
        HOPS: hops,
    }
    return encode_table({**arguments, BOUND_FROM: [_written(each) for each in (entry, *before)]})


def _written(entry: Any) -> Any:
    """Return an entry with its hops in the type that RabbitMQ writes."""
    hops = entry.get(HOPS) if isinstance(entry, dict) else None
    if isinstance(hops, int) and 0 <= hops <= HOPS_MAX:
        return {**entry, HOPS: Short(hops)}
    return entry


def _hops_left(before: Any) -> int:
    """Return how many links a binding may still pass; 0 if its argument says nothing of use."""
    last = before[0] if isinstance(before, list) and before else None
    hops = last.get(HOPS) if isinstance(last, dict) else None
    return hops - 1 if isinstance(hops, int) else 0


def _has_been(before: list[Any], upstream: tuple[str | None, str]) -> bool:
    return any(
        isinstance(entry, dict) and (entry.get(CLUSTER), entry.get(VHOST)) == upstream
        for entry in before
        if upstream[0] is not None
    )
