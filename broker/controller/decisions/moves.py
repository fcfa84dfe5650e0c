"""Decides about moves of queues to other shards, step by step.

A move gives the queue a new life: another id, on the other shard. Both lives have messages for a
while. The steps are in the catalog with the queue (`Moving`), so any process that restarts goes on.
What is done in each step: `controller/moving/mover.py`.

    step        consumers are at   messages are published to   may follow
    CHOSEN      the old life       the old life                BEGUN (queue), HELD (stream),
                                                               CALLED_OFF
    BEGUN       the new life       the old life                PASSING, CALLED_OFF
    PASSING     the new life       the old life                SHUT
    SHUT        the new life       none: publishers wait       PASSING, MOVED
    HELD        the old life       none: publishers wait       CHOSEN, ARRIVED, CALLED_OFF
    ARRIVED     the new life       the new life                MOVED
    CALLED_OFF  the old life       the old life                MOVED

BEGUN, PASSING and SHUT are steps of a queue; HELD and ARRIVED are those of a stream, which is used
at one place at a time, because only one place can give offsets.
"""

from __future__ import annotations

from typing import Final

import msgspec

from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.decisions.placing import suiting
from shardmq.broker.controller.decisions.queues import removal_of
from shardmq.broker.controller.requests import MOVED, Forget, Move, MoveOn
from shardmq.broker.model import checks
from shardmq.broker.model.changes import (
    ARRIVED,
    BEGUN,
    CALLED_OFF,
    CHOSEN,
    HELD,
    PASSING,
    SHUT,
    TO_COME,
    Moving,
    QueuePut,
    other_life,
)
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.deduplication import DedupRule

NEXT_STEPS: Final = {
    CHOSEN: (BEGUN, HELD, CALLED_OFF),
    HELD: (CHOSEN, ARRIVED, CALLED_OFF),
    ARRIVED: (MOVED,),
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
    if ask.shard not in inputs.places.shards:
        raise _refused(queue, f"shard {ask.shard} takes no queues")
    if why := unfit(queue):
        raise _refused(queue, why)
    if queue.id in inputs.leaving:
        raise _refused(queue, "it is just being deleted")
    if queue.shard == ask.shard:
        return Decision(uses=[queue])
    put = msgspec.structs.replace(queue, moving=Moving(inputs.new_queue_id(), ask.shard, CHOSEN))
    return Decision([put], create=[other_life(put)])


def unfit(queue: QueuePut) -> str:
    """Return why a queue cannot be moved, "" if it can."""
    if queue.moving is not None:
        return "it is moving already"
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
        there = [queue] if step == CALLED_OFF else [queue, other_life(queue)]
        return Decision(create=there)
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
    if (step in TO_COME) != (ask.step in TO_COME):  # consumers change places
        put = msgspec.structs.replace(
            other_life(queue),
            moving=Moving(queue.id, queue.shard, ask.step),
            born=queue.stream_id if ask.step == ARRIVED else queue.born,
        )
        return Decision([put], create=[put] if step == BEGUN else [put, other_life(put)])
    moving = msgspec.structs.replace(queue.moving, step=ask.step)
    put = msgspec.structs.replace(queue, moving=moving)
    return Decision([put], create=[other_life(put)] if step == BEGUN else [])


def _new_shard(inputs: Inputs, queue: QueuePut) -> int:
    vhost = inputs.vhost(queue.vhost)
    places = suiting(inputs.places, vhost, queue.name, queue.arguments)
    return places.by_name(queue.vhost, queue.name)


def forget(inputs: Inputs, ask: Forget, owner: str) -> Decision:
    """Delete the queues on shards that are gone; of a queue that moves, one life may be left.

    If the new life is gone, the queue moves to another shard with what is left at the old one.
    """
    lost: list[QueuePut] = []
    kept = Decision()
    for queue in inputs.catalog.index.all():
        is_gone = queue.shard in ask.shards
        if queue.moving is None or (is_gone and queue.moving.shard in ask.shards):
            lost += [queue] if is_gone else []
        elif is_gone and queue.moving.step in TO_COME:
            lost.append(queue)  # the other life has nothing, or does not have all
        elif is_gone and queue.moving.step == ARRIVED:
            put = msgspec.structs.replace(other_life(queue), moving=None)
            kept.changes.append(put)
            kept.create.append(put)
        elif is_gone:
            put = msgspec.structs.replace(
                queue,
                id=inputs.new_queue_id(),
                shard=_new_shard(inputs, queue),
                moving=msgspec.structs.replace(
                    queue.moving, step=BEGUN if queue.moving.step == BEGUN else PASSING
                ),
            )
            kept.changes.append(put)
            kept.create += [put, other_life(put)]
        elif queue.moving.shard in ask.shards:
            kept.changes.append(msgspec.structs.replace(queue, moving=None))
    decision = removal_of(inputs.catalog, lost)
    decision.drop = []  # nobody is there to delete them
    decision.changes += kept.changes
    decision.create = kept.create
    return decision
