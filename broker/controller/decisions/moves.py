"""Decides about moves of queues to other shards, step by step.

A move gives the queue a new life: another id, on the other shard. The steps are in the catalog with
the queue (`Moving`), so any process that restarts goes on. What is done in each step:
`controller/moving/mover.py`.

    step        consumers are at   messages are published to   may follow
    BEGUN       the new life       the life before             PASSING, CALLED_OFF
    PASSING     the new life       the life before             SHUT
    SHUT        the new life       none: publishers wait       PASSING, MOVED
    CALLED_OFF  the life before    the life before             MOVED
"""

from __future__ import annotations

from typing import Final

import msgspec

from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.requests import MOVED, Move, MoveOn
from shardmq.broker.model import checks
from shardmq.broker.model.changes import (
    BEGUN,
    CALLED_OFF,
    PASSING,
    SHUT,
    Moving,
    QueuePut,
    other_life,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.deduplication import DedupRule
from shardmq.broker.shared.reading import is_stream

NEXT_STEPS: Final = {
    BEGUN: (PASSING, CALLED_OFF),
    PASSING: (SHUT,),
    SHUT: (PASSING, MOVED),
    CALLED_OFF: (MOVED,),
}


def begin(inputs: Inputs, ask: Move, owner: str) -> Decision:
    """Begin to move a queue. Raises Refusal for a queue that cannot be moved."""
    queue = inputs.vhost(ask.vhost).queues.get(ask.name)
    if queue is None or checks.is_hidden_queue(ask.name):
        raise checks.no_queue(ask.vhost, ask.name)
    if ask.shard not in inputs.placement.shards:
        raise _refused(queue, f"shard {ask.shard} takes no queues")
    if why := _unfit(queue):
        raise _refused(queue, why)
    if queue.id in inputs.leaving:
        raise _refused(queue, "it is just being deleted")
    if queue.shard == ask.shard:
        return Decision(uses=[queue])
    put = msgspec.structs.replace(
        queue,
        id=inputs.new_queue_id(),
        shard=ask.shard,
        moving=Moving(queue.id, queue.shard, BEGUN),
    )
    return Decision([put], create=[put, other_life(put)])


def _unfit(queue: QueuePut) -> str:
    """Return why a queue cannot be moved, "" if it can."""
    if queue.moving is not None:
        return "it is moving already"
    if is_stream(queue.arguments):
        return "it is a stream"
    if queue.part is not None:
        return f"it is a shard queue of exchange '{queue.part.exchange}'"
    if queue.arguments and DedupRule.of(queue.arguments) is not None:
        return "it takes each message once, and its shard knows which it had (deduplication)"
    return ""


def _refused(queue: QueuePut, why: str) -> Refusal:
    text = f"queue '{queue.name}' in vhost '{queue.vhost}' cannot be moved: {why}"
    return Refusal(checks.PRECONDITION_FAILED, text)


def go_on(inputs: Inputs, ask: MoveOn, owner: str) -> Decision:
    vhost = inputs.catalog.vhosts.get(ask.vhost)
    queue = vhost.queues.get(ask.name) if vhost is not None else None
    if queue is None or queue.moving is None or queue.moving.id != ask.id:
        return Decision()
    step = queue.moving.step
    if ask.step == step:
        lives = [queue] if step == CALLED_OFF else [queue, other_life(queue)]
        return Decision(create=lives)
    if ask.step not in NEXT_STEPS[step]:
        if ask.step == CALLED_OFF:
            raise Refusal(
                checks.PRECONDITION_FAILED,
                f"the move of queue '{ask.name}' in vhost '{ask.vhost}' cannot be called off: "
                "messages are at its new place",
            )
        return Decision()
    if ask.step == MOVED:
        put = msgspec.structs.replace(queue, moving=None)
        return Decision([put], drop=[other_life(queue)])
    if ask.step == CALLED_OFF:
        put = msgspec.structs.replace(
            other_life(queue), moving=Moving(queue.id, queue.shard, CALLED_OFF)
        )
        return Decision([put], create=[put])
    moving = msgspec.structs.replace(queue.moving, step=ask.step)
    put = msgspec.structs.replace(queue, moving=moving)
    return Decision([put], create=[other_life(put)] if step == BEGUN else [])
