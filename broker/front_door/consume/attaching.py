"""Consumers of shard queues and their shards: numbers, attach, release, what a restart loses.

Single consumers and the assignments of group consumers are attached alike. Prefetch per consumer is
kept by the shard; limits that several consumers share are kept by credit.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from shardmq.broker.front_door.consume.consumers import Assignment, Consumer
from shardmq.broker.front_door.consume.crediting import Crediting, limits_over
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.shardd.wire import messages as wire


class Attaching:
    """The consumers of shard queues of this front door, by number."""

    def __init__(self, links: ShardLinks, crediting: Crediting) -> None:
        self.consumers: dict[int, Consumer] = {}
        self._links = links
        self._crediting = crediting
        self._last_number = 0
        # Consumers of auto-delete queues whose shard has not answered that they left.
        self._leaving: dict[int, Consumer] = {}
        # By their numbers, the answer to the last Release: one before it says nothing of the
        # present process of the shard, or of the present session.
        self._released: dict[int, asyncio.Future[wire.Control]] = {}

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def attach(
        self, consumer: Consumer, resumed: bool, leaving: bool = False
    ) -> asyncio.Future[wire.Control]:
        """Ask the shard to attach the consumer.

        `resumed` says that the shard has restarted. A consumer that is `leaving` gets no message.
        """
        if not leaving:
            self._crediting.attach(consumer)
        make = partial(_attach_message, consumer, _read_from(consumer, resumed), resumed, leaving)
        consumer.attaching = self._links.ask(consumer.shard, make)
        return consumer.attaching

    def detach(self, consumer: Consumer) -> asyncio.Future[wire.Control]:
        """Ask the shard for no more messages; the answer comes behind the last delivery."""
        if consumer.auto_delete:
            self._leaving[consumer.number] = consumer
        number = consumer.number
        return self._links.ask(consumer.shard, lambda request: wire.Detach(request, number))

    def release(self, consumers: Iterable[Consumer]) -> dict[int, asyncio.Future[wire.Control]]:
        """Forget these consumers and have their shards requeue what they hold.

        The future of each shard ends when the shard has done so.
        """
        by_shard: dict[int, list[Consumer]] = {}
        for consumer in consumers:
            self.consumers.pop(consumer.number, None)
            by_shard.setdefault(consumer.shard, []).append(consumer)
        return {shard: self._release_at(shard, those) for shard, those in by_shard.items()}

    def _release_at(self, shard: int, consumers: list[Consumer]) -> asyncio.Future[wire.Control]:
        numbers = [consumer.number for consumer in consumers]
        future = self._links.ask(shard, lambda request: wire.Release(request, numbers))
        leaving = {consumer.number: consumer for consumer in consumers if consumer.auto_delete}
        if leaving:
            self._leaving |= leaving
            self._released |= dict.fromkeys(leaving, future)
            future.add_done_callback(partial(self._have_left, list(leaving)))
        return future

    def _have_left(self, numbers: list[int], answer: asyncio.Future[wire.Control]) -> None:
        for number in numbers:
            if self._released.get(number) is answer:
                del self._leaving[number], self._released[number]

    def attach_again(
        self, shard: int, resumed: Callable[[int, asyncio.Future[wire.Control]], None]
    ) -> None:
        """Attach all consumers of a shard that has restarted; it knows none of them any more.

        `resumed` is called with the number of each consumer and the answer.
        """
        for consumer in self.consumers.values():
            if consumer.shard == shard and consumer.is_attached:
                self.attach(consumer, resumed=True).add_done_callback(
                    partial(resumed, consumer.number)
                )
        for consumer in [each for each in self._leaving.values() if each.shard == shard]:
            # For the new process the queue has never had a consumer. It would wait for one to come
            # and leave before it deletes the queue.
            self.attach(consumer, resumed=True, leaving=True).add_done_callback(
                asyncio.Future.exception
            )
            self._release_at(shard, [consumer])


def attached(consumer: Consumer, answer: wire.Control) -> None:
    """Note at which offset the shard begins, for a consumer of a stream."""
    if consumer.reading is not None and isinstance(answer, wire.AttachedAt):
        consumer.reading.begins(answer.offset)


def _read_from(consumer: Consumer, resumed: bool) -> wire.ReadFrom | None:
    """Return where to read from, None if the queue is no stream."""
    reading = consumer.reading
    if reading is None:
        return None
    if not resumed:
        return reading.asked
    return reading.resume(consumer.channel.first_unsettled(consumer, reading.epoch))


def _attach_message(
    consumer: Consumer, read: wire.ReadFrom | None, resumed: bool, leaving: bool, request: int
) -> wire.Attach:
    # Deliveries without acks do not count for a limit, but wait for room all the same.
    limited = leaving or bool(limits_over(consumer))
    group = 0 if leaving or consumer.group is None else consumer.group.number
    kind: Callable[..., wire.Attach] = wire.Attach
    if read is not None and isinstance(consumer, Assignment):
        stop, mark = consumer.bounds
        kind = partial(wire.AttachStreamPart, read=read, stop=stop, mark=mark, group=group)
    elif read is not None:
        kind = partial(wire.AttachReader, read=read)
    elif consumer.group is not None:
        kind = partial(wire.AttachPart, group=group)
    return kind(
        request=request,
        queue=consumer.queue_id,
        consumer=consumer.number,
        connection=consumer.client.id,
        channel=consumer.channel.number,
        tag=consumer.tag,
        no_ack=consumer.no_ack,
        exclusive=consumer.exclusive,
        priority=consumer.priority,
        prefetch=consumer.prefetch,
        limited=limited,
        resumed=resumed,
        affinity=consumer.affinity,
    )
