"""The requests of a front door to the controller, until they are answered.

Every request gets an Answer, never an exception: code 0, or a reply code with its text. Answers to
the requests of one connection come in the order of asking. A request that was on its way when the
line broke is asked again: declares, deletes and binds mean the same when they are said twice, and
to delete what is gone is no error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shardmq.broker.front_door.hot_state import BindRun, BindRuns
from shardmq.broker.shared.control import Answer, AnyRequest, Ask, BindMany, things_asked

log = logging.getLogger("shardmq.broker.front_door.links.catalog_requests")

# Requests on their way at once. The first request of a connection waits behind so many of the
# others, about 0.1 ms each.
SENT_MAX = 1024
WAITING_MAX = 262_144  # requests behind them, and while the controller is away
# A request may end each controller that is asked: it is asked of this many and not more.
DEATHS_MAX = 4

RESOURCE_ERROR = 506
INTERNAL_ERROR = 541


class Reply:
    """The answer to a request, once it is there.

    It has what a callback needs of a Future. Unlike a Future it calls back in the turn of the event
    loop that has the answer.
    """

    __slots__ = ("_answer", "_cancelled", "_then")

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._cancelled = False
        self._then: Callable[[Reply], None] | None = None

    def done(self) -> bool:
        return self._answer is not None or self._cancelled

    def cancel(self) -> None:
        """Note that nobody waits for the answer any more."""
        self._cancelled, self._then = True, None

    def set_result(self, answer: Answer) -> None:
        self._answer = answer
        if self._then is not None:
            self._then(self)

    def result(self) -> Answer:
        assert self._answer is not None
        return self._answer

    def add_done_callback(self, then: Callable[[Reply], None]) -> None:
        """Call `then` when the answer is there, never from within this call. Only one is kept."""
        if self.done():
            asyncio.get_running_loop().call_soon(then, self)
        else:
            self._then = then


class _Asked(NamedTuple):
    ask: Ask
    answer: asyncio.Future[Answer] | Reply | BindRun
    deaths: int = 0  # controllers that went while they were asked this

    def is_waited_for(self) -> bool:
        """Return whether somebody still waits for the answer, or the controller has to hear it."""
        return isinstance(self.answer, BindRun) or not self.answer.done()


class RunWaits(Protocol):
    """A client that waits until the binds of a run are recorded."""

    def begun(self, run: BindRun) -> None:
        """Note that the run has gone on with a bind."""

    def came(self, bound: int, code: int, text: str) -> None:
        """Hear that so many binds are recorded, and why those behind them are not, if `code`."""


class _RunAsked:
    """A run that a client waits for. Its request is unanswered again when it goes on.

    The run holds this object, which does not hold the run: neither is left to the garbage
    collector, and with them the connection of the client.
    """

    __slots__ = ("_ask", "_sent", "_waits", "came")

    def __init__(self, sent: dict[int, _Asked], ask: Ask, waits: RunWaits) -> None:
        self._sent, self._ask, self._waits = sent, ask, waits
        self.came = waits.came

    def begun(self, run: BindRun) -> None:
        self._sent[self._ask.id] = _Asked(self._ask, run)
        self._waits.begun(run)


class CatalogRequests:
    """The requests that are on their way, and those that wait behind them.

    Connections take turns when more is asked than may be on its way at once. `up` says whether
    requests can be sent.
    """

    def __init__(
        self,
        send: Callable[[Ask], None],
        send_ahead: Callable[[Ask], BindRun | None],
        runs: BindRuns,
    ) -> None:
        """Begin with none.

        `send_ahead` sends binds for which nobody waits and returns the run that they begin, or does
        nothing and returns None. `answered_ahead` hears how many of the first binds of a run an
        answer is for, and how many of these are done.
        """
        self.up = False
        self.answered_ahead: Callable[[BindRun, int, int, Answer], None]
        self._send, self._send_ahead, self._runs = send, send_ahead, runs
        self._next_id = 1
        self._sent: dict[int, _Asked] = {}  # in the order of asking
        # By connection; the connection that is served next comes first.
        self._waiting: dict[str, deque[_Asked]] = {}
        self._sent_things = self._waiting_things = 0

    def add(
        self, request: AnyRequest, owner: str, user: str, answer: asyncio.Future[Answer] | Reply
    ) -> None:
        """Send a request now or in its turn. It is refused if too many wait."""
        asked = _Asked(Ask(self._next_id, request, owner, user), answer)
        self._next_id += 1
        self._runs.epoch += 1  # what is bound then comes behind this
        if self.sends_at_once:
            self._send_asked(asked)
        elif self._waiting_things < WAITING_MAX:
            self._waiting.setdefault(owner, deque()).append(asked)
            self._waiting_things += things_asked(request)
        else:
            text = "too many requests wait for the controller"
            answer.set_result(Answer(asked.ask.id, RESOURCE_ERROR, text))

    def add_ahead(
        self, request: BindMany, owner: str, user: str, waits: RunWaits | None = None
    ) -> BindRun | None:
        """Send binds for which nobody waits but `waits`, while `sends_at_once` holds.

        Return None, and do nothing, if they cannot leave this process now.
        """
        ask = Ask(self._next_id, request, owner, user)
        self._next_id += 1
        run = self._send_ahead(ask)
        if run is not None:
            self._sent[ask.id] = _Asked(ask, run)
            if waits is not None:
                run.waits = _RunAsked(self._sent, ask, waits)
        return run

    def runs(self) -> list[BindRun]:
        """Return the runs of binds that have unanswered ones, in the order of their beginning."""
        return [asked.answer for asked in self._sent.values() if isinstance(asked.answer, BindRun)]

    @property
    def sends_at_once(self) -> bool:
        """Return whether a request would be sent now."""
        return self.up and not self._waiting and self._sent_things < SENT_MAX

    def answered(self, answer: Answer) -> None:
        """Hand an answer to whoever asked, if somebody still waits for it."""
        asked = self._sent.get(answer.id)
        if asked is None:
            log.warning("the controller answers %d, which nobody asked", answer.id)
        elif isinstance(asked.answer, BindRun):
            self._run_answered(asked.answer, answer)
        else:
            del self._sent[answer.id]
            self._one_answered(asked.ask, asked.answer, answer)
        if self._waiting:
            self._send_waiting()

    def _run_answered(self, run: BindRun, answer: Answer) -> None:
        count = min(answer.result.get("binds", len(run.ends)), len(run.ends))
        left = len(run.ends) - count
        bound = answer.result.get("done", 0) if answer.code else count
        code, text = answer.code, answer.text
        try:
            self.answered_ahead(run, count, bound, answer)
        except Exception:
            log.exception("an answer to binds could not be taken")
            run.answered(len(run.ends) - left)  # if this was not done
            bound, code, text = 0, INTERNAL_ERROR, "internal error"
        if not run.ends:
            del self._sent[answer.id]
            if run.waits is None:
                run.end()
        if run.waits is not None:
            try:
                run.waits.came(bound, code, text)
            except Exception:  # of one connection; the others' answers come the same way
                log.exception("who asked for binds could not take the answer")

    def _one_answered(
        self, ask: Ask, waits: asyncio.Future[Answer] | Reply, answer: Answer
    ) -> None:
        self._sent_things -= things_asked(ask.what)
        if not waits.done():
            try:
                waits.set_result(answer)
            except Exception:  # of one connection; the others' answers come the same way
                log.exception("who asked %s could not take the answer", type(ask.what).__name__)

    def ask_again(self) -> None:
        """Ask a controller that is back all that is unanswered, then what waits."""
        self.up = True
        self._runs.epoch += 1  # a run is asked again whole
        self._sent = {
            number: asked._replace(deaths=asked.deaths + 1)
            for number, asked in self._sent.items()
            if asked.is_waited_for()
        }
        self._sent_things = sum(
            things_asked(asked.ask.what)
            for asked in self._sent.values()
            if not isinstance(asked.answer, BindRun)
        )
        for asked in list(self._sent.values()):
            if asked.deaths >= DEATHS_MAX:
                text = f"{DEATHS_MAX} controllers went while asked this"
                self.answered(Answer(asked.ask.id, INTERNAL_ERROR, text))
            else:
                self._send(asked.ask)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits, one request of each connection after the other."""
        while self._waiting and self._sent_things < SENT_MAX:
            owner = next(iter(self._waiting))
            its = self._waiting.pop(owner)
            asked = its.popleft()
            if its:
                self._waiting[owner] = its
            self._waiting_things -= things_asked(asked.ask.what)
            if asked.is_waited_for():
                self._send_asked(asked)

    def _send_asked(self, asked: _Asked) -> None:
        self._sent[asked.ask.id] = asked
        self._sent_things += things_asked(asked.ask.what)
        self._send(asked.ask)
