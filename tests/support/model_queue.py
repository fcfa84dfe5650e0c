"""A model of a queue, in lists: slow and obvious.

Windows of connections are left out: all have room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardmq.shardd.queues.limits import Limits

NEVER = 0
MANY = 1 << 30


@dataclass
class Message:
    id: int  # in publish order
    size: int
    priority: int = 0
    expires: int = NEVER
    redelivered: bool = False
    returns: int = 0
    due: int | None = None  # of one that rests, once that has begun


@dataclass(eq=False)
class ModelConsumer:
    number: int
    priority: int = 0
    prefetch: int = 0
    no_ack: bool = False
    exclusive: bool = False
    allowed: int | None = None  # of a limit that is shared with consumers elsewhere
    used: int = 0  # messages that were given, or given back, in all
    said: bool = False  # that messages wait
    drains: bool = False
    detached: bool = False
    next_number: int = 1
    held: dict[int, Message] = field(default_factory=dict)  # by delivery number

    def wanted(self) -> int:
        return self.prefetch - len(self.held) if self.prefetch and not self.no_ack else MANY

    def room(self) -> int:
        return (
            self.wanted() if self.allowed is None else min(self.wanted(), self.allowed - self.used)
        )


class ModelQueue:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ready: list[Message] = []
        self.consumers: list[ModelConsumer] = []  # by arrival
        self.turns: list[ModelConsumer] = []  # whose turn it is first
        self.last_used = 0
        self.let_go = 0
        self.acked = 0
        self.resting: list[Message] = []
        # (message, reason) of those that wait for their copies to last
        self.departed: list[tuple[int, str]] = []
        # What the last deliver said: (consumer, delivery number, redelivered, message), (consumer,
        # used, waits)
        self.given: list[tuple[int, int, bool, int]] = []
        self.reports: list[tuple[int, int, bool]] = []
        # how often what was given had come back, if that is counted
        self.times_given: dict[int, int] = {}

    @property
    def counts_returns(self) -> bool:
        return self.limits.delivery_limit is not None or self.limits.retry is not None

    @property
    def ready_bytes(self) -> int:
        return sum(message.size for message in self.ready)

    def _sort(self) -> None:
        self.ready.sort(key=lambda message: (-message.priority, message.id))

    # -- in ----------------------------------------------------------------------------------------

    def publish(self, messages: list[Message], now: int) -> list[int]:
        """Which of them are refused."""
        refused = []
        for i, message in enumerate(messages):
            message.priority = min(message.priority, self.limits.max_priority)
            if self.limits.message_ttl is not None:
                own = now + self.limits.message_ttl
                message.expires = min(message.expires, own) if message.expires else own
            if message.expires:
                message.expires = max(message.expires, now)
            if self._is_full(message):
                refused.append(i)
                if self.limits.refused_die:
                    self._let_go(message, "maxlen")
                else:
                    self.let_go += 1
            else:
                self.ready.append(message)
        self._sort()
        return refused

    def _is_full(self, message: Message) -> bool:
        """Only what no consumer is about to take counts."""
        limits = self.limits
        capacity = sum(max(0, consumer.room()) for consumer in self._active())
        waiting = len(self.ready) - capacity
        if not limits.reject_publish or waiting < 0:
            return False
        if limits.max_length is not None and waiting + 1 > limits.max_length:
            return True
        held = sum(each.size for each in self.ready[capacity:])
        return limits.max_bytes is not None and held + message.size > limits.max_bytes

    # -- out ---------------------------------------------------------------------------------------

    def _active(self) -> list[ModelConsumer]:
        return self.consumers[:1] if self.limits.single_active else self.consumers

    def deliver(self, now: int) -> None:
        self.given, self.reports, self.times_given = [], [], {}
        self._wake(now)
        self.expire(now - 1)
        self.priorities_served: set[int] = set()
        while self.ready and (consumer := self._next()) is not None:
            self.priorities_served.add(consumer.priority)
            self._give(consumer, self.ready.pop(0))
            self.expire(now - 1)
        self.expire(now)
        self._enforce()
        self.expire(now)
        self._report()

    def _next(self) -> ModelConsumer | None:
        able = [
            consumer
            for consumer in self.turns
            if consumer in self._active() and consumer.room() > 0
        ]
        return max(able, key=lambda consumer: consumer.priority, default=None)

    def _give(self, consumer: ModelConsumer, message: Message) -> None:
        self.given.append((consumer.number, consumer.next_number, message.redelivered, message.id))
        if self.counts_returns and message.returns:
            self.times_given[message.id] = message.returns
        if not consumer.no_ack:
            consumer.held[consumer.next_number] = message
        consumer.next_number += 1
        consumer.used += 1
        equals = [each for each in self.turns if each.priority == consumer.priority]
        at = equals.index(consumer) + 1
        self.turns = [each for each in self.turns if each not in equals] + equals[at:] + equals[:at]

    def _report(self) -> None:
        served = min(self.priorities_served, default=MANY)
        for consumer in self.consumers:
            if consumer.allowed is None:
                continue
            # Without credit it asks for its share of what others take, once until it has some.
            missed = consumer.used >= consumer.allowed and len(self.consumers) > 1
            missed = missed and (consumer.said or consumer.priority >= served)
            can = consumer in self._active() and consumer.wanted() > 0
            waits = can and (bool(self.ready) or missed)
            if consumer.used < consumer.allowed:
                if not consumer.drains:
                    continue
                consumer.used, consumer.said, consumer.drains = consumer.allowed, False, False
            elif consumer.said == waits:
                continue
            else:
                consumer.said = waits
            self.reports.append((consumer.number, consumer.used, consumer.said))

    def get(self, now: int) -> Message | None:
        self.last_used = now
        self._wake(now)
        self.expire(now)
        return self.ready.pop(0) if self.ready else None

    # -- back --------------------------------------------------------------------------------------

    def ack(self, messages: list[Message]) -> None:
        self.acked += len(messages)

    def reject(self, messages: list[Message]) -> None:
        for message in messages:
            self._let_go(message, "rejected")

    def _let_go(self, message: Message, reason: str) -> None:
        self.let_go += 1
        if self.limits.dead_letters is not None:
            self.departed.append((message.id, reason))

    def requeue(self, messages: list[Message]) -> None:
        # handed out by priority, they go back by age
        for message in sorted(messages, key=lambda each: each.id):
            message.redelivered = True
            message.returns += self.counts_returns
            if (
                self.limits.delivery_limit is not None
                and message.returns > self.limits.delivery_limit
            ):
                self._let_go(message, "delivery_limit")
            elif self.limits.retry is not None:
                self.resting.append(message)
            else:
                self.ready.append(message)
        self._sort()

    def _wake(self, now: int) -> None:
        """Wake the messages whose rest is over.

        A message rests for its time, and at most a sixteenth longer: until a multiple of that
        sixteenth.
        """
        for message in self.resting:
            if message.due is None and self.limits.retry is not None:
                rest = self.limits.retry.rest_ms(message.returns)
                message.due = next(
                    at for at in range(now + rest, now + 2 * rest + 2) if at % (rest // 16 + 1) == 0
                )
        awake = [
            each for each in self.resting if self.limits.retry is None or (each.due or 0) <= now
        ]
        self.resting = [each for each in self.resting if each not in awake]
        for message in awake:
            message.due = None
        self.give_back(awake)

    def give_back(self, messages: list[Message]) -> None:
        self.ready += messages
        self._sort()

    # -- limits ------------------------------------------------------------------------------------

    def expire(self, now: int) -> None:
        """At the head of each priority only."""
        for priority in range(self.limits.max_priority + 1):
            level = [message for message in self.ready if message.priority == priority]
            while level and NEVER < level[0].expires <= now:
                self.ready.remove(level[0])
                self._let_go(level.pop(0), "expired")

    def _enforce(self) -> None:
        limits = self.limits
        while not limits.reject_publish and self.ready:
            long = limits.max_length is not None and len(self.ready) > limits.max_length
            heavy = limits.max_bytes is not None and self.ready_bytes > limits.max_bytes
            if not long and not heavy:
                return
            self._let_go(self.ready.pop(0), "maxlen")

    def expired_itself(self, now: int) -> bool:
        unused = self.limits.expires is not None and not self.consumers
        return unused and now >= self.last_used + (self.limits.expires or 0)

    def change(self, limits: Limits, now: int) -> None:
        self.last_used = now
        if limits.single_active != self.limits.single_active:
            self.turns = list(self.consumers)
        self.limits = limits
        self._enforce()

    # -- consumers ---------------------------------------------------------------------------------

    def refuses(self, exclusive: bool) -> bool:
        if exclusive and (self.consumers or self.limits.single_active):
            return True
        return any(each.exclusive for each in self.consumers)

    def attach(self, consumer: ModelConsumer) -> None:
        self.consumers.append(consumer)
        self.turns = list(self.consumers)

    def detach(self, consumer: ModelConsumer, now: int) -> None:
        if not consumer.detached:
            consumer.detached = True
            self.consumers.remove(consumer)
            self.turns = list(self.consumers)
            self.last_used = now

    def release(self, consumer: ModelConsumer, now: int) -> None:
        self.detach(consumer, now)
        held, consumer.held = consumer.held, {}
        self.requeue(list(held.values()))

    def purge(self) -> int:
        count, self.ready = len(self.ready), []
        return count
