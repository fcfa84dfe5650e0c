"""The states of a reshard, a change of the number of shard queues of a stream exchange, as tables.

A reshard moves keys from some shard queues to others. A queue that gains keys holds back what
arrives until the queues that lose keys have settled what they had; so each key stays in order.

The state of a queue is `ShardOf.held` in the catalog, so it outlives every process. An event
changes the state as follows (HOLDS). A dot means that the event changes nothing, because every
event may come twice.

                hold back   shard holds back   rebind     settled   call off
    open        closing     .                  .          .         .
    closing     .           closed             .          .         open
    closed      .           .                  settling   .         open
    settling    .           .                  .          open      .

    hold back           the queue is to gain keys, so its shard is told to hold back what arrives
    shard holds back    the shard has said that it does
    rebind              all queues that gain keys hold back, so the bindings change
    settled             the queues that lose keys have settled what they had, or are not waited for
    call off            the queue is to gain no keys after all; too late once the bindings changed

The step of the exchange follows from the states of its queues and from what the controller has
found out since its start (`reshard_progress.py`). One step follows another like this (STEPS):

    none        the number changes so that keys move                          closing
    closing     all shards hold back, and the bindings change                 passing
    closing     the number is set back, or the exchange loses its shards      none
    passing     front doors have the bindings, what they routed has arrived   settling
    passing     the same, and no queue has anything to settle                 settled
    passing     the deadline is over, and the order is given up               settled
    passing     the queues that hold something back are deleted               none
    settling    the queues that lose keys have settled what they had          settled
    settling    the deadline is over, and the order is given up               settled
    settling    the queues that hold something back are deleted               none
    settled     what was held back is let go                                  none
    settled     it is let go, and the next change waits already               closing
    settling    the controller restarts                                       passing
    settled     the controller restarts                                       passing
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from shardmq.broker.model.changes import CLOSED, CLOSING, KEPT, OPEN, SETTLING, QueuePut

# What the HTTP API calls the states of a queue.
HOLD_NAMES: Final = {OPEN: "open", CLOSING: "closing", CLOSED: "closed", SETTLING: "settling"}


class Event(StrEnum):
    """An event that changes the state of a shard queue."""

    HOLD_BACK = "hold back"
    SHARD_HOLDS_BACK = "shard holds back"
    REBIND = "rebind"
    SETTLED = "settled"
    CALL_OFF = "call off"


HOLDS: Final = {
    (OPEN, Event.HOLD_BACK): CLOSING,
    (CLOSING, Event.SHARD_HOLDS_BACK): CLOSED,
    (CLOSED, Event.REBIND): SETTLING,
    (SETTLING, Event.SETTLED): OPEN,
    (CLOSING, Event.CALL_OFF): OPEN,
    (CLOSED, Event.CALL_OFF): OPEN,
}


class Step(StrEnum):
    """The step that a reshard has reached; the HTTP API uses the same words."""

    NONE = "none"
    CLOSING = "closing"
    PASSING = "passing"
    SETTLING = "settling"
    SETTLED = "settled"


STEPS: Final = {
    Step.NONE: {Step.CLOSING},
    Step.CLOSING: {Step.PASSING, Step.NONE},
    Step.PASSING: {Step.SETTLING, Step.SETTLED, Step.NONE},
    Step.SETTLING: {Step.SETTLED, Step.NONE, Step.PASSING},
    Step.SETTLED: {Step.NONE, Step.CLOSING, Step.PASSING},
}


def hold_of(queue: QueuePut | None) -> int:
    """Return the state of a queue; it is OPEN if the queue is not made yet, or is no shard."""
    return queue.part.held if queue is not None and queue.part is not None else OPEN


def after(queue: QueuePut, event: Event) -> QueuePut:
    """Return the shard queue as it is after an event."""
    assert queue.part is not None
    held = HOLDS.get((queue.part.held, event), queue.part.held)
    return msgspec.structs.replace(queue, part=msgspec.structs.replace(queue.part, held=held))


def changed_by(event: Event, queues: Iterable[QueuePut]) -> list[QueuePut]:
    """Return the queues that an event changes, as they are after it."""
    return [after(queue, event) for queue in queues if (hold_of(queue), event) in HOLDS]


def queues_in(hold: int, parts: Iterable[QueuePut]) -> list[QueuePut]:
    return [queue for queue in parts if hold_of(queue) == hold]


def is_under_way(parts: Iterable[QueuePut]) -> bool:
    """Return whether the exchange with these shard queues is at any step but `none`."""
    return any(map(hold_of, parts))


def queues_losing_keys(parts: Iterable[QueuePut]) -> list[QueuePut]:
    """Return the queues that may have messages of keys which go elsewhere now.

    These are all that hold nothing back: a queue that gains keys loses none.
    """
    return [
        queue
        for queue in parts
        if queue.part is not None and queue.part.state != KEPT and not hold_of(queue)
    ]
