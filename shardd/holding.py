"""Hold publishers back while this lets the consumers of a queue keep up.

A publisher that does not stop takes the processor from consumers. An ack waits behind publishes in
the socket of the front door, in the ring and in the passes of the shard; with a prefetch, the next
delivery waits for the ack. So a queue may grow for ever although its consumers could take all of
it. The rule:

1. A queue is *behind* when more than BEHIND_MESSAGES or BEHIND_BYTES are ready and it has
   consumers. No other queue holds anybody.
2. Nobody can see whether consumers wait for the processor or have enough to do. So the shard tries.
   It counts for MEASURING what the queue hands out while publishers go on. Then it gives no credit
   for publishes. When those that were under way are taken in (SETTLING), it counts again (TRYING).
3. If the queue handed out GAIN times as much, and at least SLOWEST messages, the consumers had
   waited for the processor. From then on (HOLDING) publishers get credit for PACE of what the queue
   hands out, so that the queue shrinks, until it is half as long as a queue that is behind. They
   are held again when it is behind again.
4. Otherwise the consumers are full, and publishers are let go (RESTING). The next trial comes after
   REST_MS, and after twice as long behind each trial in vain, up to REST_MS_MAX.
5. If consumers do not take GAIN_KEPT times as much as before for SLOW_TIMES intervals of HOLDING,
   for example because the publisher that is held is also the consumer, publishers are let go
   (RESTING). After HOLDING_MS the gain is measured anew.

What follows from the rule:

- No deadlock: credit is held for SETTLING and TRYING, and then only while consumers take messages.
- A queue whose consumers take more when publishers wait is bounded by what comes until then.
- Who publishes to consumers that are full waits for SETTLING and TRYING in each REST_MS_MAX.

Credit is that of a front door for this shard, so publishers to its other queues wait, too: for as
long as the queue that is behind needs to hand out one step of credit (PUBLISH_CREDIT_BYTES).

Times are in milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final, Protocol

from shardmq.shardd.peers import PUBLISH_CREDIT_BYTES
from shardmq.shardd.queues import Queue

BEHIND_MESSAGES, BEHIND_BYTES = 1 << 18, 32 << 20
MEASURING_MS, SETTLING_MS, TRYING_MS = 20, 10, 30
GAIN, GAIN_KEPT = 1.5, 1.2
# Messages in a millisecond. A consumer that takes fewer has other work than to take messages.
SLOWEST = 10.0
PACE = 0.75
INTERVAL_MS, SLOW_TIMES, HOLDING_MS = 20, 5, 5000
REST_MS, REST_MS_MAX = 100, 6400
# What a message weighs in a batch beside its body, about.
OVERHEAD_BYTES = 32
# What publishers may send at once when they have sent less than they might for a while.
EARNED_MAX = 1 << 20


class State(Enum):
    MEASURING = "measuring"  # publishers go on, and what is handed out is counted
    SETTLING = "settling"  # no credit, and what is under way comes in
    TRYING = "trying"  # no credit, and what is handed out is counted
    HOLDING = "holding"  # credit for what is handed out, while the queue is too long
    RESTING = "resting"  # publishers go on


MEASURING, SETTLING, TRYING, HOLDING, RESTING = State

NEXT_STATES: Final[dict[State, frozenset[State]]] = {
    MEASURING: frozenset((SETTLING,)),
    SETTLING: frozenset((TRYING,)),
    TRYING: frozenset((HOLDING, RESTING)),
    HOLDING: frozenset((RESTING, MEASURING)),
    RESTING: frozenset((MEASURING,)),
}


class Feeder(Protocol):
    """A front door: the weight of its publishes that are to be credited, and of those held."""

    taken: int
    withheld: int


class Watch:
    """A queue that is or was behind. `until` is when its state, or an interval of it, ends."""

    __slots__ = (
        "_counted", "_counted_at", "_free_rate", "_held_at", "_limits", "_paid", "_queue",
        "_rest_ms", "_slow", "state", "until",
    )  # fmt: skip

    def __init__(self, queue: Queue, now: int) -> None:
        self._queue = queue
        self._free_rate = 0.0  # messages handed out in a millisecond while publishers went on
        self._held_at = now
        self._slow = 0  # intervals in a row
        self._limits = False  # HOLDING, and the queue was behind and has not become short since
        self._paid = 0  # messages handed out that publishers got credit for
        self._rest_ms = REST_MS
        self.state = MEASURING
        self._count_until(now, now + MEASURING_MS)

    @property
    def withholds(self) -> bool:
        return self.state in (SETTLING, TRYING) or self._limits

    def is_over(self, now: int) -> bool:
        """Return whether nothing is left to be watched."""
        queue = self._queue
        if queue.deleted or not queue.consumers.all:
            return True
        if self.state is HOLDING:
            return now >= self._held_at + HOLDING_MS and not is_behind(queue)
        return (self.state is not RESTING or now >= self.until) and _is_short(queue)

    def advance(self, now: int) -> None:
        """Go on to the state that holds now."""
        if self.state is HOLDING:
            if is_behind(self._queue):
                self._limits = True
            elif _is_short(self._queue):
                self._limits = False
        if now < self.until:
            return
        rate = (self._handed_out - self._counted) / max(1, now - self._counted_at)
        match self.state:
            case State.MEASURING:
                self._free_rate = rate
                self._become(SETTLING, now, SETTLING_MS)
            case State.SETTLING:
                self._become(TRYING, now, TRYING_MS)
            case State.TRYING:
                if rate >= max(SLOWEST, GAIN * self._free_rate):
                    self._held_at = now
                    self._paid = self._handed_out
                    self._limits = True
                    self._slow = 0
                    self._rest_ms = REST_MS
                    self._become(HOLDING, now, INTERVAL_MS)
                else:
                    self._rest(now)
            case State.HOLDING:
                is_slow = rate < max(SLOWEST, GAIN_KEPT * self._free_rate)
                self._slow = self._slow + 1 if is_slow and self._limits else 0
                if self._slow == SLOW_TIMES:
                    self._rest(now)
                elif now >= self._held_at + HOLDING_MS:
                    self._limits = False
                    self._become(MEASURING, now, MEASURING_MS)
                else:
                    self._count_until(now, now + INTERVAL_MS)
            case State.RESTING:
                self._become(MEASURING, now, MEASURING_MS)

    def allowance(self) -> int:
        """Return the weight of publishes that may be credited since the last time."""
        handed_out, backlog = self._handed_out, self._queue.backlog
        messages, self._paid = handed_out - self._paid, handed_out
        if self.state is not HOLDING:
            return 0
        each = backlog.ready_bytes // max(1, backlog.ready_count) + OVERHEAD_BYTES
        return int(PACE * messages * each)

    @property
    def _handed_out(self) -> int:
        return self._queue.backlog.counters.delivered

    def _rest(self, now: int) -> None:
        self._limits = False
        self._become(RESTING, now, self._rest_ms)
        self._rest_ms = min(2 * self._rest_ms, REST_MS_MAX)

    def _become(self, state: State, now: int, length_ms: int) -> None:
        assert state in NEXT_STATES[self.state], (self.state, state)
        self.state = state
        self._count_until(now, now + length_ms)

    def _count_until(self, now: int, until: int) -> None:
        self._counted, self._counted_at, self.until = self._handed_out, now, until


class Holding:
    """The queues of one shard that are behind."""

    def __init__(self) -> None:
        self._watches: dict[Queue, Watch] = {}
        self._withholds = False
        self._earned = 0  # the weight of publishes that may be credited now

    @property
    def is_on(self) -> bool:
        """Return whether `pace` has something to do."""
        return bool(self._watches)

    @property
    def next_due(self) -> int | None:
        """Return when `pace` must be called at the latest, while publishers are held."""
        if not self._withholds:
            return None
        return min((watch.until for watch in self._watches.values()), default=None)

    def look(self, queue: Queue, now: int) -> None:
        """Watch a queue with many ready messages, if it has consumers."""
        if queue not in self._watches and queue.keeps_in_store and queue.consumers.all:
            self._watches[queue] = Watch(queue, now)

    def pace(self, feeders: Collection[Feeder], now: int) -> None:
        """Decide how much of what was taken in since the last time may be credited."""
        self._withholds = False
        allowance = 0
        for queue, watch in list(self._watches.items()):
            if watch.is_over(now):
                del self._watches[queue]
                continue
            watch.advance(now)
            if watch.withholds:
                self._withholds = True
                allowance += watch.allowance()
        if not self._withholds:
            self._earned = 0
            for feeder in feeders:
                feeder.taken += feeder.withheld
                feeder.withheld = 0
            return
        for feeder in feeders:
            feeder.withheld += feeder.taken
            feeder.taken = 0
        self._earned = min(self._earned + allowance, EARNED_MAX)
        # Less than a step of credit would not be told to the front door.
        while self._earned >= PUBLISH_CREDIT_BYTES and feeders:
            most = max(feeders, key=lambda feeder: feeder.withheld)
            if most.withheld < PUBLISH_CREDIT_BYTES:
                break
            credited = min(most.withheld, self._earned)
            most.withheld -= credited
            most.taken += credited
            self._earned -= credited


def is_behind(queue: Queue) -> bool:
    backlog = queue.backlog
    return backlog.ready_count > BEHIND_MESSAGES or backlog.ready_bytes > BEHIND_BYTES


def _is_short(queue: Queue) -> bool:
    backlog = queue.backlog
    return backlog.ready_count <= BEHIND_MESSAGES // 2 and backlog.ready_bytes <= BEHIND_BYTES // 2
