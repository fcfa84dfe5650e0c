"""Decide which rules a queue has, and when each rule is asked.

RULES is the table. `rules_of` goes through the table once, when a queue is declared or its policy
changes, and sorts the rules that apply by the moments at which they are asked. A queue without a
rule at a moment takes the short way there, so no queue can bypass a rule that is added to the
table. The functions here only decide; backlog.py and queue.py carry the decisions out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from shardmq.shardd.queues.limits import DELIVERY_LIMIT, Limits

# (messages that count, the most messages, bytes that count, the most bytes). None: not bounded.
Room = tuple[int, int | None, int, int | None]


class Ready(Protocol):
    """The ready messages as a rule sees them, in the order in which they leave."""

    @property
    def limits(self) -> Limits: ...
    @property
    def ready_count(self) -> int: ...
    @property
    def ready_bytes(self) -> int: ...
    def first_sizes(self) -> Sequence[int]:
        """Return the body bytes of the first messages of the priority that leaves first."""


class Rule(NamedTuple):
    """One rule, and the questions that it answers.

    `refuse` is asked at a publish, with the room there is, the number of messages and the body
        bytes of each (empty without a limit of bytes). It returns the ordinals of refused messages.
    `remembers` says that the queue keeps a fact of each message, so it looks at each arrival.
    `excess` is asked after messages were handed out. It returns how many of the first must go.
    `too_often` is asked for a message that comes back, with the number of its returns. It returns
        why the message leaves, or None.
    `rest_ms` is asked for a message that comes back, with the number of its returns. It returns
        how long the message rests.
    `acts_alone` says that time alone makes the queue do something.
    """

    name: str
    applies: Callable[[Limits], bool]
    refuse: Callable[[Room, int, Sequence[int]], list[int]] | None = None
    remembers: bool = False
    excess: Callable[[Ready], int] | None = None
    too_often: Callable[[Limits, int], str | None] | None = None
    rest_ms: Callable[[Limits, int], int] | None = None
    acts_alone: bool = False


class Rules:
    """The rules of one queue, by moment. Queues with the same rules share one object."""

    __slots__ = (
        "acts_alone",
        "counts_returns",
        "excess",
        "is_empty",
        "looks_at_each",
        "may_refuse",
        "refuse",
        "rests",
        "takes_all",
        "too_often",
    )

    def __init__(self, rules: Sequence[Rule]) -> None:
        # Messages only arrive, are handed out in order, and are settled.
        self.is_empty = not rules
        self.refuse = [rule.refuse for rule in rules if rule.refuse is not None]
        self.excess = [rule.excess for rule in rules if rule.excess is not None]
        self.too_often = [rule.too_often for rule in rules if rule.too_often is not None]
        self.rests = [rule.rest_ms for rule in rules if rule.rest_ms is not None]
        self.looks_at_each = any(rule.remembers for rule in rules)
        self.may_refuse = bool(self.refuse)
        # A publish is taken in as one piece, with no look at its messages.
        self.takes_all = not (self.looks_at_each or self.may_refuse)
        self.counts_returns = bool(self.too_often or self.rests)
        self.acts_alone = any(rule.acts_alone for rule in rules)


def _overflowing(room: Room, count: int, sizes: Sequence[int]) -> list[int]:
    """Return the ordinals of the `count` new messages that do not fit.

    A negative length means that consumers can take that many messages at once; these messages are
    free.
    """
    length, length_max, held, held_max = room
    refused: list[int] = []
    for i in range(count):
        size = sizes[i] if sizes else 0
        full = length_max is not None and length + 1 > length_max
        heavy = held_max is not None and held + size > held_max
        if length >= 0 and (full or heavy):
            refused.append(i)
            continue
        length += 1
        held += size if length > 0 else 0
    return refused


def _too_many(ready: Ready) -> int:
    return ready.limits.excess(ready.ready_count)


def _too_heavy(ready: Ready) -> int:
    """Return how many of the first messages must go. The caller asks again after they are gone."""
    limits, held = ready.limits, ready.ready_bytes
    count = 0
    if ready.ready_count and limits.too_big(held):
        for size in ready.first_sizes():
            if not limits.too_big(held):
                break
            held -= size
            count += 1
    return count


def _returned_too_often(limits: Limits, times: int) -> str | None:
    most = limits.delivery_limit
    return DELIVERY_LIMIT if most is not None and times > most else None


def _rest_ms(limits: Limits, times: int) -> int:
    return limits.retry.rest_ms(times) if limits.retry is not None else 0


RULES: Final = [
    Rule("message-ttl", lambda limits: limits.message_ttl is not None, remembers=True),
    Rule("max-priority", lambda limits: limits.max_priority > 0, remembers=True),
    Rule(
        "overflow: refuse",
        lambda limits: limits.bounded and limits.reject_publish,
        refuse=_overflowing,
    ),
    Rule(
        "max-length: drop the first",
        lambda limits: limits.max_length is not None and not limits.reject_publish,
        excess=_too_many,
    ),
    Rule(
        "max-length-bytes: drop the first",
        lambda limits: limits.max_bytes is not None and not limits.reject_publish,
        excess=_too_heavy,
    ),
    Rule(
        "delivery-limit",
        lambda limits: limits.delivery_limit is not None,
        too_often=_returned_too_often,
    ),
    Rule("delayed-retry", lambda limits: limits.retry is not None, rest_ms=_rest_ms),
    Rule("expires", lambda limits: limits.expires is not None, acts_alone=True),
    Rule("consumer-timeout", lambda limits: limits.consumer_timeout is not None, acts_alone=True),
]

_known: dict[tuple[Rule, ...], Rules] = {}


def rules_of(limits: Limits) -> Rules:
    """Return the rules that a queue with these limits has."""
    rules = tuple(rule for rule in RULES if rule.applies(limits))
    found = _known.get(rules)
    if found is None:
        found = _known[rules] = Rules(rules)
    return found
