"""AllotmentState of broker/front_door/hot_state.pyx in plain Python: what deliveries use up.

consume/credit.py names the states of an allotment and says what they mean.
"""

from __future__ import annotations

from shardmq.broker.front_door.consume.credit import Allotment
from shardmq.shardd.wire.messages import KEEP


def use(allotment: Allotment, count: int) -> bool:
    """Note deliveries; return whether the credit is used up."""
    unused = allotment.unused
    allotment.used += count
    if not unused:
        return False
    taken = min(count, unused)
    for limit in allotment.limits:
        limit.allotted -= taken
    if taken < unused:
        return False
    allotment.gave_back, allotment.used_all = False, allotment.wants
    place(allotment)
    return True


def place(allotment: Allotment) -> None:
    """Put the allotment into the list of its state."""
    home = allotment.home
    state: dict[Allotment, None] | None
    if allotment.allowed > allotment.used:
        state = home.holding if allotment.mode == KEEP else home.draining
    elif allotment.wants:
        state = home.hungry
    else:
        state = None if allotment.gave_back else home.empty
    if state is not allotment.state:
        if allotment.state is not None:
            del allotment.state[allotment]
        if state is not None:
            state[allotment] = None
        allotment.state = state
