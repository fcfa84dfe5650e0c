"""What is asked of the catalog's one writer by the controller itself: after what links report, at the steps of a stream
exchange, for operators. What clients ask comes from front doors (control.py), in the same line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(slots=True)
class Removal:
    """Queues that must go, asked for by no client: their shard or their connection said so.

    `at_shard`: they are already gone there (it was asked first), with so many messages.
    """

    queues: list[int]
    at_shard: bool = False
    messages: int = 0


@dataclass(slots=True)
class Pause:
    """A queue is to give no messages, or to give them again."""

    vhost: str
    name: str
    paused: bool


@dataclass(slots=True)
class OwnerGone:
    """A connection ended: the queues it held exclusively go."""

    connection: str


@dataclass(slots=True)
class Drained:
    """A shard queue that is to go when it is empty was found so. Its shard has the last word, if it still is to go."""

    queue: int
    if_unused: ClassVar = False
    if_empty: ClassVar = True


@dataclass(slots=True)
class Restore:
    """The shard queues of one exchange, as they are to be: behind a Drained, which may have crossed a change."""

    vhost: str
    exchange: str


@dataclass(slots=True)
class CutOff:
    """What these streams, shard queues of one exchange, have before they gain keys: offsets by queue id."""

    vhost: str
    exchange: str
    number: int
    offsets: dict[int, int]


@dataclass(slots=True)
class Closed:
    """These shard queues of one exchange keep back what arrives: their shards have said so."""

    vhost: str
    exchange: str
    queues: frozenset[int]


@dataclass(slots=True)
class Settled:
    """What one exchange's shard queues kept back may go: what was to go before it has gone, or is not waited for.
    `offsets`: of those that may have lost keys and are streams, the end of what came before, by queue id."""

    vhost: str
    exchange: str
    offsets: dict[int, int] = field(default_factory=dict)
