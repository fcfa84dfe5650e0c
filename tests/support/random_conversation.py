"""A random conversation of one connection that has one outcome, whatever the broker's timing.

A small model says how many messages each consumer has to get after a step, and the conversation
waits for them before it goes on. Each queue has at most one consumer, and within one step it is
published to on one channel, so that every order is determined. The model is not there to judge the
contents: two brokers that play the same conversation are compared.
"""

from __future__ import annotations

import random
from bisect import insort
from dataclasses import dataclass, field

from tests.support.conversations import (
    BIND_OK,
    CANCEL_OK,
    EXCHANGE_DECLARE_OK,
    GET_EMPTY,
    HEARTBEAT_FRAME,
    QOS_OK,
    Conversation,
    ack,
    basic,
    closed_with_error,
    confirm,
    consume,
    declare,
    exchange,
    nack,
    queue,
    reject,
)
from tests.support.player import Player
from tests.support.raw_client import publish, with_properties
from tests.support.seen import ACK, DELIVER, GET_OK, RETURN

STEPS = 40
QUEUES, PUBLISHERS = 3, 3  # consumers have the channels 1 to QUEUES, publishers those behind them
SIZES = (0, 1, 16, 16, 16, 100, 4000, 70_000, 131_064, 140_000)
BURSTS = (1, 1, 1, 2, 5, 60)
PREFETCHES = (0, 1, 2, 5, 20)
PROPERTIES: tuple[dict[str, object], ...] = (
    {},
    {},
    {"delivery_mode": 2},
    {"headers": {"h": 1}, "content_type": "text/plain"},
    {"priority": 3, "correlation_id": "c", "expiration": "600000"},
)


@dataclass(slots=True)
class _Queue:
    """A queue and its one consumer."""

    name: str
    channel: int
    prefetch: int
    no_ack: bool
    consumes: bool = False
    life: int = 0  # of the consumer: the unacknowledged of an earlier one take no room
    next_tag: int = 1
    published: int = 0
    arrived: int = 0  # deliveries in all lives of the channel
    ready: list[int] = field(default_factory=list)
    unacked: dict[int, tuple[int, int]] = field(default_factory=dict)  # tag: message, life

    def publish(self) -> None:
        self.ready.append(self.published)
        self.published += 1

    def deliver(self) -> None:
        """Give the consumer what it has room for."""
        while self.ready and self.consumes and self._has_room():
            message = self.ready.pop(0)
            if not self.no_ack:
                self.unacked[self.next_tag] = (message, self.life)
            self.next_tag += 1
            self.arrived += 1

    def _has_room(self) -> bool:
        held = sum(life == self.life for _, life in self.unacked.values())
        return self.no_ack or not self.prefetch or held < self.prefetch

    def settle(self, tags: list[int], requeue: bool) -> None:
        for tag in tags:
            message, _ = self.unacked.pop(tag)
            if requeue:
                insort(self.ready, message)


class _Play:
    def __init__(self, name: str, chance: random.Random, player: Player) -> None:
        self._exchange = name
        self._chance = chance
        self._player = player
        self._queues = [
            _Queue(f"{name}.{n}", n, chance.choice(PREFETCHES), chance.random() < 0.25)
            for n in range(1, QUEUES + 1)
        ]
        # The last publisher asks for no confirms.
        self._publishers = range(QUEUES + 1, QUEUES + PUBLISHERS + 1)
        self._confirmed = dict.fromkeys(self._publishers[:-1], 0)
        self._returned = dict.fromkeys(self._publishers, 0)

    def run(self) -> None:
        said = exchange.Declare(exchange=self._exchange, exchange_type="direct", auto_delete=True)
        self._player.ask(1, said, EXCHANGE_DECLARE_OK)
        for each in self._queues:
            declare(self._player, each.name)
            bind = queue.Bind(queue=each.name, exchange=self._exchange, routing_key=each.name)
            self._player.ask(1, bind, BIND_OK)
            self._subscribe(each)
        for channel in self._confirmed:
            confirm(self._player, channel)
        steps = (self._publish, self._settle, self._requeue, self._cancel, self._get, self._mistake)
        for step in self._chance.choices(steps, (10, 8, 2, 1, 1, 1), k=STEPS):
            step()

    def _subscribe(self, of: _Queue) -> None:
        qos = basic.Qos(prefetch_count=of.prefetch)
        self._player.ask(of.channel, qos, QOS_OK)
        consume(self._player, of.name, f"c.{of.name}", of.channel, no_ack=of.no_ack)
        of.consumes, of.life = True, of.life + 1
        self._wait(of)

    def _wait(self, of: _Queue) -> None:
        of.deliver()
        self._player.wait(of.channel, DELIVER, of.arrived)

    def _send(self, frames: list[bytes]) -> None:
        """Send in one write, or in writes that end anywhere; heartbeats stand between frames."""
        if self._chance.random() < 0.3:
            frames = [frame for each in frames for frame in (HEARTBEAT_FRAME, each)]
        data = b"".join(frames)
        cuts = 0 if self._chance.random() < 0.5 else self._chance.randrange(1, 6)
        sizes = [self._chance.randrange(1, min(len(data), 300) + 1) for _ in range(cuts)]
        self._player.send_in_pieces(data, sizes)

    def _publish(self) -> None:
        """Each queue gets its messages by one channel; the messages are sent mixed."""
        # Without a consumer only confirms say that the messages have arrived.
        by = {
            each.name: self._chance.choice(self._publishers[: None if each.consumes else -1])
            for each in self._queues
        }
        targets = self._chance.choices(self._queues, k=self._chance.choice(BURSTS))
        frames = []
        for number, to in enumerate(targets):
            channel = by[to.name]
            size = self._chance.choice(SIZES) if len(targets) < 10 else 16
            body = (b"%s %d." % (to.name.encode(), to.published + number) * size)[:size]
            through = self._chance.choice(("", self._exchange))
            if 0 < size < 100_000 and self._chance.random() < 0.7:
                properties = self._chance.choice(PROPERTIES)
                frames.append(with_properties(channel, through, to.name, body, **properties))
            else:
                frames.append(publish(channel, through, to.name, body))
            if self._chance.random() < 0.05:
                frames.append(publish(channel, self._exchange, "nowhere", body, mandatory=True))
                self._returned[channel] += 1
                if channel in self._confirmed:
                    self._confirmed[channel] += 1
            to.publish()
            if channel in self._confirmed:
                self._confirmed[channel] += 1
        self._send(frames)
        for channel in set(by.values()):
            self._player.wait(channel, RETURN, self._returned[channel])
            self._player.wait(channel, ACK, self._confirmed.get(channel, 0))
        for each in self._queues:
            self._wait(each)

    def _holder(self) -> _Queue | None:
        """Return a queue with unacknowledged messages."""
        holders = [each for each in self._queues if each.unacked]
        return self._chance.choice(holders) if holders else None

    def _settle(self) -> None:
        of = self._holder()
        if of is None:
            return
        frames = []
        for _ in range(self._chance.choice((1, 1, 2, 8))):
            if not of.unacked:
                break
            tags = sorted(of.unacked)
            tag = self._chance.choice((tags[0], tags[0], self._chance.choice(tags)))
            multiple = self._chance.random() < 0.3
            settled = [each for each in tags if each <= tag] if multiple else [tag]
            how = self._chance.random()
            if how < 0.7:
                frames.append(ack(of.channel, tag, multiple=multiple))
            elif how < 0.8 and not multiple:
                frames.append(reject(of.channel, tag, requeue=False))
            else:
                frames.append(nack(of.channel, tag, multiple=multiple, requeue=False))
            of.settle(settled, requeue=False)
        self._send(frames)
        self._wait(of)

    def _requeue(self) -> None:
        """Requeue once: after two at a time the order of what comes again is not determined."""
        of = self._holder()
        if of is None:
            return
        tags = sorted(of.unacked)
        tag = self._chance.choice(tags)
        multiple = self._chance.random() < 0.3
        self._send([nack(of.channel, tag, multiple=multiple)])
        of.settle([each for each in tags if each <= tag] if multiple else [tag], requeue=True)
        self._wait(of)

    def _cancel(self) -> None:
        of = self._chance.choice(self._queues)
        if of.consumes:
            self._player.ask(of.channel, basic.Cancel(f"c.{of.name}"), CANCEL_OK)
            of.consumes = False
        else:
            self._subscribe(of)

    def _get(self) -> None:
        """Take a message from a queue without a consumer."""
        idle = [each for each in self._queues if not each.consumes]
        if not idle:
            return
        of = self._chance.choice(idle)
        answer = GET_OK if of.ready else GET_EMPTY
        self._player.ask(of.channel, basic.Get(queue=of.name, no_ack=True), answer)
        if of.ready:
            of.ready.pop(0)
            of.next_tag += 1

    def _mistake(self) -> None:
        """Acknowledge what was never delivered. The channel closes and is opened again."""
        of = self._chance.choice(self._queues)
        bad = self._chance.choice(
            (
                [ack(of.channel, of.next_tag)],
                [nack(of.channel, of.next_tag + 7)],
                [publish(of.channel, "no.such", of.name, b"x")],
            )
        )
        closed_with_error(self._player, of.channel, *bad)
        of.settle(sorted(of.unacked), requeue=True)
        of.consumes, of.next_tag = False, 1
        self._subscribe(of)


def random_conversation(seed: int) -> Conversation:
    def play(port: int) -> None:
        with Player(port, channels=QUEUES + PUBLISHERS) as player:
            # What the seed before left may not be gone yet.
            _Play(f"r{seed}", random.Random(seed), player).run()

    return play
