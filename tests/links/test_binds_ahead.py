"""A bind that is put in force ahead of the controller is in force as long as it may be.

Random histories: clients of the only front door bind and unbind, an operator deletes and declares,
and the controller decides in batches in an order of its own. What was answered ahead holds at each
moment unless an end of it has gone, and in the end the front door has what the controller has.
Clients hear of what outlives the broker when it is recorded, and of each bind once.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.peers.binds_pipe import together
from shardmq.broker.controller.peers.links import binds_in, take_messages
from shardmq.broker.front_door.hot_state import NO_PIPE, UNANSWERED_MAX, BindRun, BindRuns
from shardmq.broker.front_door.links.binds_ahead import ANSWERED_FIRST_MAX
from shardmq.broker.front_door.links.binds_pipe import around_key
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.catalog_requests import Reply
from shardmq.broker.front_door.links.control_stream import ControlStream
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, ExchangePut, QueuePut, VhostPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import (
    Answer,
    Ask,
    BindMany,
    Changes,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Snapshot,
    Unbind,
)

ME = "0.1.1"
OWNERS = ME, "0.1.2"
CONNECTS_MAX = 3  # fewer than a request may outlive
QUEUES, EXCHANGES, KEYS = ("q", "r", "kept"), ("e", "f", "lasting"), ("j", "k")
LASTING = "kept", "lasting"


class Listener:
    """Keeps what was routed by, and counts how often that was forgotten.

    `look` is called then: some of the services of a front door look at the catalog.
    """

    def __init__(self) -> None:
        self.changed = 0
        self.look: Callable[[], object] = object
        self.routes: set[tuple[str, str, str]] | None = None

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        self.changed += 1
        self.routes = None
        self.look()

    def logins_change(self) -> None: ...

    def consumers_here(self) -> list[Any]:
        return []


class Stream:
    def __init__(self) -> None:
        self.sent: deque[Any] = deque()
        self.encode = ControlStream(lambda stream: None).encode

    def send(self, message: Any) -> None:
        # What is asked goes as it is now, whatever is bound then.
        self.sent.extend(take_messages(bytearray(self.encode(message))))

    def hold(self) -> None: ...
    def flush(self) -> None: ...


class Pipe:
    """A pipe that the controller of this process reads."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self.fd, False)

    def takes(self, request: bytes) -> bool:
        return True

    def answered(self) -> None: ...

    def write(self, request: bytes) -> bool:
        try:
            return os.write(self.fd, request) == len(request)
        except BlockingIOError:
            return False

    def read(self) -> list[Ask]:
        """Take what was written."""
        try:
            return binds_in(take_messages(bytearray(os.read(self._read, 1 << 20))))
        except BlockingIOError:
            return []

    def fill(self) -> None:
        while self.write(b"x" * 4096):
            pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self.fd)


class Client:
    """A client that waits for the binds of its channel that outlive the broker.

    recorded: those that the controller has recorded since the client waits for them.
    wrong: answers that the client must not get.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.binds: list[tuple[str, str, str]] = []
        self.recorded: set[tuple[str, str, str]] = set()
        self.bound = self.refused = 0
        self.wrong: list[str] = []

    def begun(self, run: BindRun) -> None:
        assert not self.is_waiting
        self.is_waiting = True
        self.recorded.clear()

    def came(self, bound: int, code: int, text: str) -> None:
        if not self.is_waiting or bound != min(bound if code else bound + 1, len(self.binds)):
            self.wrong.append(f"{bound} of {len(self.binds)} answered, {code}")
        if not self.recorded.issuperset(self.binds[:bound]):
            self.wrong.append("answered, but not recorded")
        self.is_waiting = False
        self.bound += bound
        self.refused += bool(code)


class World:
    """A front door's link, and a controller that keeps its catalog in memory."""

    def __init__(
        self, answers_first: bool = True, refusals: float = 0.0, has_pipe: bool = False
    ) -> None:
        self.answers_first = answers_first
        # Binds ahead overtake the other requests.
        self.pipe = Pipe() if has_pipe else None
        self.waited_pipe = Pipe()
        self.clients = {owner: Client() for owner in OWNERS}
        self.records = True  # before it answers
        self.in_pipe: list[Ask] = []  # read, not decided
        self.refusals = refusals  # the share of binds ahead that are refused, whatever they are
        self.listener = Listener()
        self.link = CatalogLink(
            "nowhere",
            door=0,
            incarnation=1,
            pid=1,
            listener=self.listener,  # type: ignore[arg-type]
            is_alone=True,
        )
        self.listener.look = lambda: self.link.catalog
        self.judged: dict[tuple[str, str], int] = {}  # the epoch in which a bind was judged
        # The last run of each connection between an exchange and a queue.
        self.runs: dict[tuple[str, str, str], BindRun] = {}
        self.gone_on = 0  # binds that went on with a run
        self.stream = Stream()
        self.catalog = Catalog(routes=False)
        ids = itertools.count(10)
        self.decisions = Decisions(
            self.catalog, lambda: next(ids), lambda: "amq.gen", Placement([0])
        )
        self.catalog.apply_all(
            [
                VhostPut("/"),
                *(ExchangePut("/", name, "direct", durable=name in LASTING) for name in EXCHANGES),
                *(
                    QueuePut("/", name, id, 0, durable=name in LASTING)
                    for id, name in enumerate(QUEUES, 1)
                ),
            ]
        )
        self.of_operator: deque[Any] = deque()
        self.to_door: deque[Any] = deque()
        self.connect()
        self.handle(len(self.to_door))
        for name in QUEUES:
            self.there(name)

    def connect(self) -> None:
        """Begin a stream of the link: what was on the way is lost."""
        self.link._requests.up = False
        self.stream = self.link._stream = Stream()  # type: ignore[assignment]
        self.link._runs.pipe = self.link._runs.waited_pipe = NO_PIPE
        if self.pipe is not None:
            self.pipe.close()
            self.waited_pipe.close()
            self.pipe, self.waited_pipe = Pipe(), Pipe()
            self.link._binds = {False: self.pipe, True: self.waited_pipe}  # type: ignore[dict-item]
            self.in_pipe.clear()
        self.link._coming = Catalog()
        self.to_door.clear()
        self.to_door.append(Snapshot("boot", self.catalog.version, self.catalog.changes()))

    def there(self, name: str) -> None:
        assert self.link.ahead is not None
        self.link.ahead.queue_is_there("/", name)

    def bind(
        self, source: str, queue: str, key: str, owner: str = ME, more: tuple[str, ...] = ()
    ) -> bool:
        """Bind ahead if this may be, as an inlet or the pipeline of a channel does.

        There may be `more` keys.
        """
        ahead = self.link.ahead
        assert ahead is not None
        client = self.clients[owner] if ahead.outlive("/", source, queue) else None
        if client is not None and client.is_waiting:
            return False  # its channel is busy
        ends = [(source, queue, each) for each in (key, *more)]
        if client is not None:
            client.binds = ends
        run = self.runs.get((owner, source, queue))
        if not more and run is not None and run.bind(key.encode()):
            self.gone_on += 1
            assert client is None or client.is_waiting
            return True
        judged = self.judged.get((source, queue))
        if judged != ahead.epoch:
            if not ahead.may_bind("/", source, queue):
                return False
            self.judged[source, queue] = ahead.epoch
        run = ahead.bind("/", ends[:], owner, "guest", client)
        if run is not None:
            self.runs[owner, source, queue] = run
            if client is not None:
                client.begun(run)
        return run is not None

    def ask(self, what: Any) -> None:
        self.link._requests.add(what, ME, "guest", Reply())

    def decide(self, count: int, dice: random.Random) -> None:
        """Decide some requests as one batch; those of the front door keep their order."""
        answers: list[Answer] = []
        ahead: list[Answer] = []
        changes: list[AnyChange] = []
        others = False
        for _ in range(count):
            of_door = self.of_door()
            if self.of_operator and (not of_door or dice.random() < 0.5):
                self.change(self.of_operator.popleft(), "", changes)
                others = True
            elif of_door:
                for ask, parts in self.next_of(of_door):
                    is_ahead, done = in_force(ask), {}
                    if is_ahead and dice.random() < self.refusals:
                        code, done = 403, {"done": dice.randrange(len(ask.what.binds))}
                        self.change(BindMany("/", ask.what.binds[: done["done"]]), ME, changes)
                    else:
                        code = self.change(ask.what, ME, changes)
                    if is_ahead and self.records:
                        bound = done.get("done", 0) if code else len(ask.what.binds)
                        self.clients[ask.owner].recorded.update(ask.what.binds[:bound])
                    others = others or not is_ahead or code != 0
                    result = {**done, "binds": parts} if parts else done
                    answer = Answer(ask.id, code, "why" if code else "", result)
                    (ahead if is_ahead and self.answers_first else answers).append(answer)
        self.to_door.extend(ahead)
        if changes:
            is_known = self.pipe is not None and not others
            self.to_door.append(Changes(self.catalog.version, [] if is_known else changes))
        self.to_door.extend(answers)

    def of_door(self) -> list[Ask]:
        """Return what the front door asks, with what is in its pipe first."""
        if self.pipe is not None:
            self.in_pipe += self.pipe.read()
            self.in_pipe += self.waited_pipe.read()
        return [*self.in_pipe, *(each for each in self.stream.sent if isinstance(each, Ask))]

    def next_of(self, of_door: list[Ask]) -> list[tuple[Ask, int]]:
        """Take what the controller decides on next: a request, or all that is in the pipe."""
        if self.in_pipe:
            ahead, self.in_pipe = self.in_pipe, []
            return together(ahead)
        self.stream.sent.remove(of_door[0])
        return [(of_door[0], 0)]

    def change(self, what: Any, owner: str, changes: list[AnyChange]) -> int:
        try:
            decision: Decision = self.decisions.decide(what, owner)
        except Refusal as refusal:
            return refusal.code
        self.catalog.apply_all(decision.changes)
        changes += decision.changes
        return 0

    def handle(self, count: int) -> None:
        for _ in range(min(count, len(self.to_door))):
            for _ in self.link._handle(self.to_door.popleft()):
                pass

    def routed(self) -> set[tuple[str, str, str]]:
        """Return the bindings that messages are routed by, which are looked up once."""
        if self.listener.routes is None:
            self.listener.routes = self.bound()
        return self.listener.routes

    def bound(self) -> set[tuple[str, str, str]]:
        return bindings_of(self.link.catalog)


def in_force(ask: Ask) -> bool:
    return isinstance(ask.what, BindMany) and ask.what.in_force


def bindings_of(catalog: Catalog) -> set[tuple[str, str, str]]:
    return {
        (each.source, each.destination, each.routing_key) for each in catalog.vhosts["/"].bindings()
    }


def play(
    seed: int, *, answers_first: bool = True, refusals: float = 0.0, records: bool = True
) -> tuple[int, int, int]:
    """Play a history.

    Return how many binds were put in force ahead, how many of them went on with a run, and how many
    clients waited for.
    """
    dice = random.Random(seed)
    world = World(answers_first, refusals, has_pipe=seed % 2 == 1)
    world.records = records
    answered = connects = 0
    unanswered: list[tuple[str, str, str]] = []
    for _ in range(60):
        chance = dice.random()
        ends = dice.choice(EXCHANGES), dice.choice(QUEUES), dice.choice(KEYS)
        if chance < 0.35:
            more = ("j", "l") if dice.random() < 0.2 else ()
            if world.bind(*ends, dice.choice(OWNERS), more):
                answered += 1
                assert dice.random() < 0.5 or ends in world.routed()
        elif chance < 0.45:
            world.ask(Unbind("/", ends[0], "queue", *ends[1:], {}))
        elif chance < 0.5:
            world.ask(BindMany("/", [ends]))
        elif chance < 0.6:
            world.of_operator.append(
                dice.choice(
                    [
                        QueueRemove("/", ends[1], False, False),
                        ExchangeRemove("/", ends[0], False),
                        Unbind("/", ends[0], "queue", *ends[1:], {}),
                        BindMany("/", [ends]),
                    ]
                )
            )
        elif chance < 0.7:
            durable = [name in LASTING for name in ends]
            world.of_operator.append(QueueDeclare("/", ends[1], durable[1], False, False, {}))
            world.of_operator.append(
                ExchangeDeclare("/", ends[0], "direct", durable[0], False, False, {})
            )
        elif chance < 0.85:
            world.decide(dice.randrange(1, 4), dice)
        elif chance < 0.98:
            world.handle(dice.randrange(1, 4))
            world.there(ends[1])
        elif connects < CONNECTS_MAX:
            connects += 1
            world.connect()
            world.handle(1)
        assert world.link.ahead is not None
        if dice.random() < 0.5:
            continue  # nobody looks, and binds are collected
        assert world.routed() == world.bound(), seed
        vhost = world.link.catalog.vhosts["/"]
        unanswered = [end for run in world.link._requests.runs() for end in run.ends]
        for source, queue, key in unanswered:
            if source in vhost.exchanges and queue in vhost.queues:
                assert (source, queue, key) in world.routed(), seed
    while world.of_operator or world.of_door():
        world.decide(3, dice)
    world.handle(len(world.to_door))
    assert world.bound() == bindings_of(world.catalog), seed
    assert not world.link._requests.runs() and not world.link._runs.unanswered
    assert world.link.ahead is not None and not world.link.ahead._new
    for client in world.clients.values():
        assert not client.is_waiting and not client.wrong, (seed, client.wrong)
    return answered, world.gone_on, sum(client.bound for client in world.clients.values())


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_binds_that_are_put_in_force_ahead_hold(seed: int) -> None:
    answered, gone_on, waited = map(sum, zip(*map(play, range(seed, seed + 50)), strict=True))
    assert answered > 100 and gone_on > 15 and waited > 10


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_what_the_controller_refuses_is_taken_back_and_nothing_else(seed: int) -> None:
    assert sum(play(each, refusals=0.3)[0] for each in range(seed, seed + 50)) > 100


def test_a_binding_of_before_outlives_the_refusal_of_the_same_bind() -> None:
    world, dice = World(), random.Random(1)
    world.ask(BindMany("/", [("e", "q", "k")]))
    world.decide(1, dice)
    world.handle(2)
    assert world.bind("e", "q", "k") and world.bind("e", "q", "j")
    world.refusals = 1.0
    world.decide(2, dice)
    world.handle(2)
    assert world.bound() == bindings_of(world.catalog) == {("e", "q", "k")}


def test_a_controller_that_answers_behind_its_changes_is_caught() -> None:
    with pytest.raises(AssertionError):
        for seed in range(400):
            play(seed, answers_first=False)


def test_a_controller_that_answers_before_it_records_is_caught() -> None:
    with pytest.raises(AssertionError, match="not recorded"):
        for seed in range(50):
            play(seed, records=False)


def test_clients_wait_for_what_outlives_the_broker() -> None:
    world, client = World(has_pipe=True), Client()
    world.catalog.apply(QueuePut("/", "own", 91, 0, durable=True, owner=ME))
    world.connect()
    world.handle(1)
    world.there("own")
    client = world.clients[ME]
    for source, queue in (("lasting", "own"), ("lasting", "q"), ("e", "kept")):
        assert world.bind(source, queue, "k") and not client.is_waiting
    assert world.bind("lasting", "kept", "k") and client.is_waiting
    world.decide(1, random.Random(1))
    assert client.is_waiting
    world.handle(1)
    world.handle(len(world.to_door))
    assert client.bound == 1 and world.bound() == bindings_of(world.catalog)


def test_without_a_pipe_of_their_own_binds_that_outlive_the_broker_wait() -> None:
    world = World()
    assert not world.bind("lasting", "kept", "k") and world.bind("e", "q", "k")
    sent = len(world.stream.sent)
    assert not world.bind("lasting", "kept", "k" * 5000) and len(world.stream.sent) == sent


@pytest.mark.parametrize("code", [0, 404])
def test_a_run_that_is_over_leaves_its_client_to_no_garbage_collector(code: int) -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    world.refusals = float(bool(code))
    world.bind("lasting", "kept", "k")
    world.decide(1, dice)
    world.handle(len(world.to_door))
    if not code:
        assert world.bind("lasting", "kept", "j") and world.gone_on
        world.decide(1, dice)
        world.handle(len(world.to_door))
    assert bool(world.bound()) != bool(code)  # what is collected is put into the copy
    client = weakref.ref(world.clients[ME])
    gc.collect()
    gc.disable()
    try:
        world.clients.clear()
        world.runs.clear()
        assert client() is None
    finally:
        gc.enable()


def test_a_run_goes_on_while_the_client_waits_for_none_of_it() -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    for at in range(5):
        assert world.bind("lasting", "kept", f"k{at}") and world.gone_on == at
        assert world.link._requests.runs() and world.link._runs.unanswered == 1
        run = world.runs[ME, "lasting", "kept"]
        assert not run.bind(b"other") and len(run.ends) == 1
        world.decide(1, dice)
        world.handle(len(world.to_door))
        assert not world.link._requests.runs() and not world.link._runs.unanswered
    assert world.clients[ME].bound == 5 and len(world.bound()) == 5


@pytest.mark.parametrize("goes_on", [False, True], ids=["begun", "gone on"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_controller_that_is_killed_is_asked_again(goes_on: bool, is_recorded: bool) -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    if goes_on:
        assert world.bind("lasting", "kept", "j")
        world.decide(1, dice)
        world.handle(len(world.to_door))
    assert world.bind("lasting", "kept", "k") and world.gone_on == goes_on
    if is_recorded:
        world.decide(1, dice)  # the answer is lost
    world.connect()
    world.handle(1)
    client = world.clients[ME]
    assert client.is_waiting and ("lasting", "kept", "k") in world.bound()
    (ask,) = world.of_door()
    assert ask.what == BindMany("/", [("lasting", "kept", "k")], True, True)
    world.decide(1, dice)
    world.handle(len(world.to_door))
    assert client.bound == 1 + goes_on and not client.is_waiting
    assert world.bound() == bindings_of(world.catalog)


def test_what_is_answered_before_somebody_looks_is_seen_then() -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    changed = world.listener.changed
    world.listener.look = object  # nobody looks at the copy
    for at in range(ANSWERED_FIRST_MAX + 10):
        assert world.bind("lasting", "kept", f"k{at}")
        world.decide(1, dice)
        world.handle(len(world.to_door))
        if at in (3, 7):
            assert len(world.bound()) == at + 1
    assert world.link.ahead is not None
    assert world.bound() == bindings_of(world.catalog) and not world.link.ahead._new
    assert world.listener.changed - changed == 4  # once behind each look, and when many wait
    assert world.bind("e", "q", "k") and ("e", "q", "k") in world.bound()


def test_what_is_answered_before_somebody_looks_goes_with_its_queue() -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    world.listener.look = object
    assert world.bind("lasting", "kept", "k")
    world.decide(1, dice)
    world.handle(len(world.to_door))
    world.of_operator.append(QueueRemove("/", "kept", False, False))
    world.of_operator.append(QueueDeclare("/", "kept", True, False, False, {}))
    world.decide(1, dice)
    world.decide(1, dice)
    world.handle(len(world.to_door))
    assert world.bound() == bindings_of(world.catalog) == set()


def test_those_in_front_of_a_refused_one_are_kept() -> None:
    world = World(has_pipe=True)
    assert world.bind("lasting", "kept", "a", more=("b", "c"))
    (ask,), client = world.of_door(), world.clients[ME]
    client.recorded.add(("lasting", "kept", "a"))
    world.to_door.append(Answer(ask.id, 404, "gone", {"binds": 3, "done": 1}))
    world.handle(1)
    assert (client.bound, client.refused, client.is_waiting) == (1, 1, False)
    assert world.bound() == {("lasting", "kept", "a")}


def test_an_answer_that_cannot_be_taken_is_a_fault_for_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(has_pipe=True)
    assert world.bind("lasting", "kept", "a")
    assert world.bound()  # somebody has looked
    (ask,), client = world.of_door(), world.clients[ME]

    def fail() -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(world.link.ahead, "put_in", fail)
    world.to_door.append(Answer(ask.id, 0, "", {"binds": 1}))
    world.handle(1)
    assert (client.bound, client.refused, client.is_waiting) == (0, 1, False)


def test_a_queue_that_may_not_be_at_its_shard_yet_waits() -> None:
    world = World()
    world.of_operator.append(QueueDeclare("/", "new", False, False, False, {}))
    world.decide(1, random.Random(1))
    world.handle(1)
    assert not world.bind("e", "new", "k")
    world.there("new")
    assert world.bind("e", "new", "k")


def test_routes_are_not_forgotten_twice_for_one_bind() -> None:
    world = World()
    changed = world.listener.changed
    assert world.bind("e", "q", "k")
    assert world.bind("e", "r", "k")
    assert world.listener.changed == changed + 1
    world.decide(2, random.Random(1))
    world.handle(3)
    assert world.listener.changed == changed + 1 and not world.to_door
    assert world.bind("e", "r", "j")
    assert world.listener.changed == changed + 2


def test_where_other_front_doors_route_binds_wait() -> None:
    link = CatalogLink("nowhere", door=0, incarnation=1, pid=1, listener=Listener())  # type: ignore[arg-type]
    assert link.ahead is None


def test_a_binding_that_the_controller_has_outlives_the_refusal_of_another_connection() -> None:
    world, other = World(has_pipe=True), OWNERS[1]
    assert world.bind("e", "q", "j") and world.bind("e", "q", "k", other)
    assert len(world.bound()) == 2  # the second connection has put its own in force
    assert world.bind("e", "q", "k") and world.gone_on == 1
    first, second = together(world.of_door())
    for (ask, count), code in zip((first, second), (0, 403), strict=True):
        world.to_door.append(Answer(ask.id, code, "", {"binds": count}))
        world.handle(1)
    assert ("e", "q", "k") in world.bound() and not world.link._runs.unanswered


def test_without_the_controller_binds_wait() -> None:
    world = World()
    world.link._requests.up = False
    assert not world.bind("e", "q", "k")


@pytest.mark.parametrize("goes_on", [False, True], ids=["begins", "goes on"])
def test_while_the_controller_does_not_read_binds_wait(goes_on: bool) -> None:
    world = World(has_pipe=True)
    assert world.pipe is not None
    if goes_on:
        assert world.bind("e", "q", "first")
    sent, bound = len(world.stream.sent), world.bound()
    world.pipe.fill()
    assert not world.bind("e", "q", "k")
    assert world.bound() == bound and len(world.stream.sent) == sent
    assert world.link._runs.unanswered == goes_on
    os.read(world.pipe._read, 1 << 20)
    assert world.bind("e", "q", "k") and [ask.what.binds for ask in world.pipe.read()] == [
        [("e", "q", "k")]
    ]
    assert world.bound() == bound | {("e", "q", "k")} and len(world.stream.sent) == sent


def test_no_more_binds_are_unanswered_than_may_be() -> None:
    world = World(has_pipe=True)
    bound = 0
    # The controller reads now and then, and decides nothing.
    while world.bind("e", "q", f"k{bound}"):
        bound += 1
        if bound % 100 == 0:
            world.of_door()
    assert bound == UNANSWERED_MAX
    world.decide(1, random.Random(1))
    world.handle(2)
    assert world.bind("e", "q", "k") and world.gone_on == UNANSWERED_MAX - 1


def test_a_run_ends_when_something_else_is_asked_or_changes() -> None:
    world, dice = World(has_pipe=True), random.Random(1)
    assert world.bind("e", "q", "j") and world.bind("e", "q", "k") and world.gone_on == 1
    world.ask(Unbind("/", "e", "queue", "q", "k", {}))
    assert world.bind("e", "q", "k") and world.gone_on == 1
    assert len(world.link._requests.runs()) == 2
    assert world.bind("e", "q", "l") and world.gone_on == 2
    world.of_operator.append(QueueRemove("/", "r", False, False))
    while world.of_operator or world.of_door():
        world.decide(1, dice)
    world.handle(len(world.to_door))
    assert world.bind("e", "q", "m") and world.gone_on == 2
    world.connect()
    world.handle(1)
    assert world.bind("e", "q", "n") and world.gone_on == 2
    world.connect()
    world.to_door[0] = Changes(world.catalog.version, [])  # nothing was missed
    world.handle(1)
    assert world.bind("e", "q", "o") and world.gone_on == 2
    assert [len(run.ends) for run in world.link._requests.runs()] == [1, 1, 1]


@pytest.mark.parametrize("has_pipe", [False, True])
def test_a_run_that_cannot_begin_is_not_counted(has_pipe: bool) -> None:
    world, heard = World(has_pipe=has_pipe), Reply()

    def fail() -> None:
        raise RuntimeError("out of order")

    world.listener.look = fail
    with pytest.raises(RuntimeError):
        world.bind("e", "q", "k")
    world.listener.look = object
    assert not world.link._runs.unanswered and not world.link._runs.collected
    world.link._requests.add(QueueDeclare("/", "s", False, False, False, {}), ME, "guest", heard)
    world.decide(1, random.Random(1))
    world.handle(1)
    assert not heard.done()  # the answer was to the bind
    world.decide(1, random.Random(1))
    world.handle(len(world.to_door))
    assert heard.done() and not heard.result().code


@pytest.mark.parametrize("seed", range(3))
def test_the_bind_that_goes_on_is_the_request_that_python_would_write(seed: int) -> None:
    dice = random.Random(seed)
    encode, names = Stream().encode, ["", "q", "\u00e9" * 31, "x" * 255, "?" * 32]
    for at in range(200):
        runs, pipe, waited = BindRuns(), Pipe(), at % 2 == 1
        runs.first = lambda run: None
        runs.pipe = pipe.fd
        first = Ask(
            dice.choice([1, 127, 128, 70_000, 1 << 40]),
            BindMany(
                dice.choice(names), [(dice.choice(names), dice.choice(names), "")], True, waited
            ),
            dice.choice(names),
            dice.choice(names),
        )
        assert isinstance(first.what, BindMany)
        source, queue, _ = first.what.binds[0]
        run = BindRun(runs, first.what.vhost, first.what.binds)
        assert not run.bind(b"k")  # it does not go on yet
        run.go_on(partial(around_key, first, source, queue, encode))
        for key in dice.sample([*names, "y" * 31, "z" * 256][:6], 3):
            assert run.bind(key.encode())
            what = BindMany(first.what.vhost, [(source, queue, key)], True, waited)
            expected = Ask(first.id, what, first.owner, first.user)
            assert os.read(pipe._read, 1 << 16) == encode(expected)
            assert run.ends[-1] == (source, queue, key)
        assert runs.unanswered == 4 and not run.bind(b"\xff") and runs.unanswered == 4
        assert run.answered(3) and len(run.ends) == 1 and runs.unanswered == 1
        pipe.close()
