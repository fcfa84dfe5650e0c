"""The steps of a method on exchanges and queues: what is asked of other processes, and how.

methods.py decides and returns a step. A step is the reply itself, or says what to ask and makes the
next step of the answers. `carry_out` is the one place that does what steps say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from pamqp import base

from shardmq.broker.front_door.consume import rewinding
from shardmq.broker.front_door.topology.queues import Session
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared.control import Answer, AnyRequest

Counts = tuple[int, int]  # ready messages and consumers of a queue


class AskController(NamedTuple):
    """Ask the controller. The answer makes the reply; a refusal ends the method."""

    request: AnyRequest
    then: Callable[[Answer], base.Frame]


class AskEach(NamedTuple):
    """Ask the controller several things at once, or one that does not make the reply yet.

    The first refusal ends the method.
    """

    requests: list[AnyRequest]
    then: Callable[[list[Answer]], Step]


class CountQueues(NamedTuple):
    """Ask the shards for the counts of these queues; None means that a queue is about to go."""

    queues: tuple[QueuePut, ...]
    then: Callable[[list[Counts | None]], Step]


class PurgeQueues(NamedTuple):
    """Drop the ready messages of these queues. Their number makes the reply."""

    queues: tuple[QueuePut, ...]
    then: Callable[[int], Step]


class BindWithHistory(NamedTuple):
    """Copy what the exchange keeps for the new binding to the queue, then ask for the binding."""

    vhost: Vhost
    binding: rewinding.HistoryBinding
    bind: AskController


Step = base.Frame | AskController | AskEach | CountQueues | PurgeQueues | BindWithHistory


class PendingAnswer(Protocol):
    """The answer of the controller, once it is there (catalog_requests.Reply)."""

    def done(self) -> bool: ...
    def cancel(self) -> Any: ...
    def result(self) -> Any: ...
    def add_done_callback(self, then: Callable[[Any], None], /) -> None: ...


class ControllerLink(Protocol):
    """The copy of the catalog and the line to the controller (catalog_link.CatalogLink)."""

    @property
    def catalog(self) -> Catalog:
        """Return the copy that is in force. A snapshot replaces it by another object."""

    def request(self, request: AnyRequest, owner: str, user: str) -> PendingAnswer: ...
    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]: ...


class ShardQueries(Protocol):
    """The links to the shards (shard_links.ShardLinks)."""

    def count_if_there(self, queue: QueuePut) -> Awaitable[Counts | None]: ...
    def purge(self, queue: QueuePut) -> Awaitable[int]: ...


class TopologyLinks(Protocol):
    """The ways from a connection to the other processes."""

    @property
    def catalog_link(self) -> ControllerLink: ...
    @property
    def shards(self) -> ShardQueries: ...
    @property
    def rewinding(self) -> rewinding.Rewinding: ...


async def carry_out(step: Step, session: Session, links: TopologyLinks) -> base.Frame:
    """Do what the step and those that follow from it say; return the method to reply with.

    Raises Refusal when the controller or a shard refuses.
    """

    async def ask(request: AnyRequest) -> Answer:
        return granted(await links.catalog_link.ask(request, session.owner, session.user))

    while not isinstance(step, base.Frame):
        match step:
            case AskController():
                step = step.then(await ask(step.request))
            case AskEach():
                step = step.then(await asyncio.gather(*map(ask, step.requests)))
            case CountQueues():
                step = step.then(
                    await asyncio.gather(*map(links.shards.count_if_there, step.queues))
                )
            case PurgeQueues():
                step = step.then(sum(await asyncio.gather(*map(links.shards.purge, step.queues))))
            case BindWithHistory(vhost, binding, (request, then)):
                step = then(await links.rewinding.bind(vhost, binding, partial(ask, request)))
    return step


def granted(answer: Answer) -> Answer:
    """Return the answer. Raises Refusal if the controller refused."""
    if answer.code:
        raise checks.Refusal(answer.code, answer.text)
    return answer
