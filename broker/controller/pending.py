"""A request to the authority on its way from its owner to its answer."""

from __future__ import annotations

import logging
from asyncio import Future
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.requests import (
    Closed,
    CutOff,
    Drained,
    Forget,
    Move,
    MoveOn,
    NodesChanged,
    OwnerGone,
    Pause,
    Removal,
    Restore,
    Settled,
    SuperStreamDeclare,
)
from shardmq.broker.model.changes import AnyChange
from shardmq.broker.shared.control import AnyRequest
from shardmq.shardd.wire import messages as wire

INTERNAL_ERROR = 541

log = logging.getLogger(__name__)

AnyAsk = (
    AnyRequest
    | AnyChange
    | Removal
    | OwnerGone
    | Pause
    | Move
    | MoveOn
    | Forget
    | Drained
    | NodesChanged
    | Restore
    | CutOff
    | Closed
    | Settled
    | SuperStreamDeclare
)
AnswerTo = Callable[[int, str, dict[str, Any]], None]  # code (0 if done), text, result

UNDECIDED = Decision()  # never changed


def no_answer(code: int, text: str, result: dict[str, Any]) -> None:
    """Take an answer that nobody waits for."""


class Pending:
    """A request, its decision, and the number of answers that the request still waits for."""

    __slots__ = (
        "answer", "asked_at", "code", "decision", "missed", "owner", "request", "text", "waits"
    )  # fmt: skip

    def __init__(
        self, request: AnyAsk, owner: str, answer: AnswerTo, missed: int = 0, asked_at: str = ""
    ) -> None:
        """Begin with a request of the connection `owner` ("" for none).

        `missed` is the id of a queue that the catalog had and its shard had no more. `asked_at` is
        the name of the node whose HTTP API was asked.
        """
        self.request = request
        self.owner = owner
        self.asked_at = asked_at
        self.answer = answer
        self.decision = UNDECIDED
        self.code = 0
        self.text = ""
        self.waits = 0
        self.missed = missed

    def refuse(self, code: int, text: str) -> None:
        self.code, self.text = code, text

    def one_came(self) -> None:
        """Note that one of the awaited answers came, and answer the request after the last."""
        self.waits -= 1
        if not self.waits:
            self.reply()

    def reply(self) -> None:
        """Answer the request; a fault in the way of the answer ends nothing else."""
        try:
            self.answer(
                self.code, self.text, {} if self.code == INTERNAL_ERROR else self.decision.result
            )
        except Exception:  # the caller goes on, and the client must not wait for ever
            log.exception("%s cannot be answered", type(self.request).__name__)
            with suppress(Exception):  # the client has an answer, or cannot be answered at all
                self.answer(INTERNAL_ERROR, "internal error", {})

    def shard_came(self, reply: Future[Any]) -> None:
        """Note that a shard has answered, or that it will not: then the request says why."""
        error = reply.exception()
        if error is not None:
            self.refuse(INTERNAL_ERROR, str(error))
        elif isinstance(reply.result(), wire.Done):
            done = reply.result()
            if "messages" in self.decision.result:
                self.decision.result["messages"] += done.messages
            if "consumers" in self.decision.result:
                self.decision.result["consumers"] += done.consumers
        self.one_came()
