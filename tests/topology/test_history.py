"""A queue bound to an exchange that keeps messages gets each of them once, at any time."""

from __future__ import annotations

import random
import struct
from collections import namedtuple
from typing import Any

import pytest
from pamqp import base, commands

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.topology import history, steps
from shardmq.broker.front_door.topology.steps import AskController
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import BindingDelete, BindingPut, ExchangePut, QueuePut, VhostPut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.routing import keeping
from shardmq.broker.shared.control import Answer, Bind
from shardmq.shardd.wire import messages as wire

Run = namedtuple(
    "Run",
    "shard queue_ids messages connection channel seq now_ms ttl_ms priority persistent needs_sync"
    " how_many in_sequence marks",
)
NOW_MS = 1_700_000_000_000
STREAM = QueuePut("/", keeping.queue_name("e"), 9, 0)
TARGET = QueuePut("/", "q", 3, 1, durable=True)
BIND_OK = commands.Queue.BindOk()
HISTORIES = 300
MESSAGES_MAX = 80


def message(body: bytes, key: str = "k", **said: Any) -> bytes:
    """Return a stored message."""
    props = commands.Basic.Properties(**said).marshal()
    names = b"\x01e" + bytes([len(key)]) + key.encode()
    return struct.pack("<II", len(body), len(props)) + names + props + body


def catalog(kind: str = "topic", **arguments: Any) -> Catalog:
    made = Catalog()
    for change in (
        VhostPut("/"), ExchangePut("/", "e", kind, arguments=arguments or {keeping.MESSAGES: 1000}),
        STREAM, TARGET,
    ):  # fmt: skip
        made.apply(change)
    return made


def bind(key: str = "k", **arguments: Any) -> Bind:
    return Bind("/", "e", "queue", "q", key, arguments or {"x-from": 0})


def begun(made: Catalog, request: Bind) -> Any:
    """Return the steps of a bind."""
    return history.bind(made.vhosts["/"], request, AskController(request, lambda _: BIND_OK))


class World:
    """The shards and the controller, asked by steps. What else happens is up to the test.

    The stream is a list of (stored message, whether its record names the queue). `behind` says how
    many of the last are not on stable storage yet.
    """

    def __init__(self, made: Catalog, *messages: bytes) -> None:
        self.catalog = made
        self.stream = [(each, False) for each in messages]
        self.behind = 0
        self.watched_from: int | None = None  # index in the stream
        self.pull_max = 1 << 20  # messages of one answer
        self.runs: list[Any] = []
        self.asked: list[Any] = []
        self.fails: dict[type, Exception] = {}  # by request
        self.stores = True
        self.code = 0  # the answer of the controller
        self.followed: list[Any] = []
        self.time_s = 0.0
        self.look_s = 0.0  # how long a look takes

    def run(self, going: Any) -> Any:
        """Do steps to their end. Return what they return."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                request = going.send(answer) if error is None else going.throw(error)
            except StopIteration as end:
                return end.value
            self.asked.append(request)
            answer = error = None
            try:
                answer = self.do(request)
            except Refusal as refusal:
                error = refusal

    def bound(self, request: Bind) -> base.Frame:
        """Do a bind and what follows behind it; return the reply."""
        reply: base.Frame = self.run(begun(self.catalog, request))
        for each in self.followed:
            self.run(each)
        return reply

    def do(self, request: Any) -> Any:
        if type(request) in self.fails:
            raise self.fails[type(request)]
        match request:
            case steps.AskShard():
                assert request.shard == STREAM.shard
                self.time_s += self.look_s
                return self.answer(request.make(1))
            case steps.Clock():
                return self.time_s
            case steps.Sleep(seconds):
                self.time_s += seconds
            case steps.Now():
                return NOW_MS
            case steps.SeeCatalog():
                return self.catalog
            case steps.Store(vhost, run):
                assert vhost == "/"
                if self.stores:
                    self.runs.append(Run(*run))
                return self.stores
            case steps.AskEach([request]):
                if self.code:
                    raise Refusal(self.code, "no")
                self.catalog.apply(
                    BindingPut("/", "e", "queue", "q", request.routing_key, request.arguments)
                )
                return [Answer(1)]
            case steps.Follow(going):
                self.followed.append(going)
        return None

    def answer(self, what: Any) -> wire.Control:
        assert (what.queue, what.watch) == (STREAM.id, TARGET.id)
        end = len(self.stream)
        if isinstance(what, wire.InspectStream):
            if self.watched_from is None:
                self.watched_from = end
            return wire.StreamInspected(1, 0, end, 0, 0)
        found, at = [], what.offset
        while at < min(what.stop, end - self.behind) and len(found) < self.pull_max:
            stored, named = self.stream[at]
            if not named or self.watched_from is None or at < self.watched_from:
                found.append((at, stored))
            at += 1
        offsets = b"".join(struct.pack("<Q", offset) for offset, _ in found)
        return wire.Pulled(1, len(found), offsets, b"".join(stored for _, stored in found), at)

    def copies(self) -> list[tuple[bytes, Any]]:
        """Return body and x-offset of each copy, in order."""
        return [
            (body, (properties.read(props).headers or {}).get("x-offset"))
            for run in self.runs
            for _, props, body in contents.split(run.messages, run.how_many)
        ]

    def kinds(self) -> list[str]:
        return [type(each).__name__ for each in self.asked]


# -- random histories ------------------------------------------------------------------------------


class Busy(World):
    """Two front doors publish while a third one binds.

    They publish at any time, and their messages arrive later.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(catalog())
        self.random = random.Random(seed)
        self.number = 0
        self.has_binding = [False, False]
        # by front door: key, message, for the queue
        self.on_the_way: list[list[tuple[bytes, bytes, bool]]] = [[], []]
        self.queue: list[bytes] = []  # bodies, in order
        # bodies of those that the binding lets through, published so far
        self.wanted: list[bytes] = []
        self.looks = 0
        for _ in range(self.random.randrange(12)):
            self.happen()

    def publish(self) -> None:
        if self.number == MESSAGES_MAX:
            return  # who copies what it should not must come to an end
        door, key = self.random.randrange(2), self.random.choice(["k", "k", "other"])
        body = b"%d" % self.number
        self.number += 1
        if key == "k":
            self.wanted.append(body)
        self.on_the_way[door].append(
            (body, message(body, key), key == "k" and self.has_binding[door])
        )

    def arrive(self, door: int) -> None:
        if self.on_the_way[door]:
            body, stored, named = self.on_the_way[door].pop(0)
            self.stream.append((stored, named))
            self.behind += 1
            if named:
                self.queue.append(body)

    def happen(self) -> None:
        """Let a few things happen."""
        for _ in range(self.random.randrange(4)):
            match self.random.randrange(3):
                case 0:
                    self.publish()
                case 1:
                    self.arrive(self.random.randrange(2))
                case _:
                    self.behind = self.random.randint(0, self.behind)

    def do(self, request: Any) -> Any:
        self.happen()
        self.pull_max = self.random.randint(1, 4)
        self.stores = self.random.random() < 0.8
        if isinstance(request, steps.AskEach):
            for door in self.random.sample([0, 1], 2):
                self.has_binding[door] = True
                self.happen()
        if isinstance(request, steps.Sleep):
            self.looks += bool(self.followed) and request.seconds == history.FOLLOW_EACH_S
            if self.looks == history.FOLLOW_LOOKS - 1:  # nothing is longer on its way
                for door in (0, 1):
                    while self.on_the_way[door]:
                        self.arrive(door)
            self.behind = 0
        answer = super().do(request)
        if isinstance(request, steps.Store) and answer:
            self.queue += [
                body
                for _, _, body in contents.split(
                    Run(*request.run).messages, Run(*request.run).how_many
                )
            ]
        if isinstance(request, steps.Unwatch):
            self.watched_from = None
        self.happen()
        return answer


def play(seed: int) -> None:
    """Bind at some point of a random history.

    Compare the messages of the queue with what a list says.
    """
    world = Busy(seed)
    wish = world.random.choice([{"x-from": 0}, {"x-tail": 3}, {"x-head": -1}])
    before: list[bytes] = []
    look = world.answer

    def note(what: Any) -> wire.Control:
        if isinstance(what, wire.InspectStream) and world.watched_from is None:
            kept = list(world.stream)
            kept = kept[-3:] if "x-tail" in wish else kept[:-1] if "x-head" in wish else kept
            names = [
                (stored[9 + 2 : 9 + 2 + stored[10]], contents.read_stored(stored)[3])
                for stored, _ in kept
            ]
            before[:] = [body for key, body in names if key == b"k"]
            passed_over = {contents.read_stored(stored)[3] for stored, _ in world.stream} - set(
                before
            )
            world.wanted = [body for body in world.wanted if body not in passed_over]
        return look(what)

    world.answer = note  # type: ignore[method-assign]
    assert world.run(begun(world.catalog, bind(**wish))) is BIND_OK
    (going,) = world.followed
    world.run(going)
    for door in (0, 1):
        while world.on_the_way[door]:
            world.arrive(door)
    assert world.queue[: len(before)] == before, f"seed {seed}: not in order before all others"
    assert sorted(world.queue) == sorted(world.wanted), f"seed {seed}: not each once"
    assert world.watched_from is None, f"seed {seed}: watched for ever"


def test_each_message_comes_once_and_those_from_before_come_first_in_order() -> None:
    for seed in range(HISTORIES):
        play(seed)


def no_watch(self: Any, what: Any) -> Any:
    answer = World.answer(self, what)
    self.watched_from = None
    return answer


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (history, "FOLLOW_LOOKS", 0),
        (history, "TRIES_MAX", 1),
        (Busy, "answer", no_watch),
        (history._Copying, "_matches", lambda self, names, props: True),
    ],
    ids=["does not follow", "does not try again", "forgets to watch", "lets all through"],
)
def test_the_random_histories_catch_a_bind_that(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((AssertionError, Refusal)):
        for seed in range(HISTORIES):
            play(seed)


# -- what is copied, and how -----------------------------------------------------------------------


def test_a_binding_that_exists_brings_nothing_again() -> None:
    made, request = catalog(), bind()
    made.apply(BindingPut("/", "e", "queue", "q", "k", {"x-from": 0}))
    step = begun(made, request)
    assert isinstance(step, AskController) and step.request is request


def test_an_exchange_that_is_gone_or_keeps_nothing_brings_no_history() -> None:
    made = catalog()
    wishes = {"x-from": 0}
    assert history.wants_history(made.vhosts["/"], "e", wishes)
    assert not history.wants_history(made.vhosts["/"], "e", {})
    assert not history.wants_history(made.vhosts["/"], "amq.direct", wishes)
    assert not history.wants_history(made.vhosts["/"], "gone", wishes)
    assert not history.wants_history(None, "e", wishes)


def test_neighbours_that_are_stored_alike_are_one_run_and_each_copy_has_its_offset() -> None:
    world = World(
        catalog(),
        message(b"a"), message(b"b"), message(b"-", "other"), message(b"c"),
        message(b"d", priority=7), message(b"e", expiration="50"), message(b"f", delivery_mode=2),
        message(b"g", delivery_mode=2, headers={"x-dead-letter-exchange": "dlx"}),
    )  # fmt: skip
    assert world.bound(bind()) is BIND_OK
    assert world.copies() == [
        (b"a", 0), (b"b", 1), (b"c", 3), (b"d", 4), (b"e", 5), (b"f", 6), (b"g", 7),
    ]  # fmt: skip
    first, priority, expiring, lasting, marked = world.runs
    assert (first.shard, first.queue_ids, first.how_many, first.now_ms) == (1, [3], 3, NOW_MS)
    assert (first.connection, first.persistent, first.needs_sync) == (
        history.CONNECTION,
        False,
        False,
    )
    assert (priority.priority, expiring.ttl_ms, lasting.persistent, lasting.needs_sync) == (
        7,
        50,
        True,
        True,
    )
    assert (lasting.marks, marked.marks) == (0, history.codec.OWN_LETTERS)


def test_copies_of_a_recent_history_are_as_the_messages_were() -> None:
    world = World(
        catalog("x-recent-history", **{keeping.LENGTH: 2}),
        message(b"a"),
        message(b"b"),
        message(b"c"),
    )
    world.bound(Bind("/", "e", "queue", "q", "any", {}))
    assert world.copies() == [(b"b", None), (b"c", None)]


def test_a_message_with_more_keys_is_copied_if_one_of_them_leads_to_the_queue() -> None:
    cc = message(b"cc", "other", headers={"CC": ["k", 5]})
    world = World(catalog(), cc, message(b"-", "other", headers={"CC": ["no"]}))
    world.bound(bind())
    assert [body for body, _ in world.copies()] == [b"cc"]


def test_where_each_message_goes_to_one_of_several_the_queue_gets_its_share() -> None:
    made = catalog("x-consistent-hash")
    made.apply(QueuePut("/", "other", 4, 0))
    made.apply(BindingPut("/", "e", "queue", "other", "1"))
    world = World(made, *(message(b"%d" % number, str(number)) for number in range(100)))
    world.bound(bind("1"))
    assert 20 < len(world.copies()) < 80


def test_the_shard_is_asked_for_the_times_that_binding_and_exchange_name() -> None:
    world = World(catalog(**{keeping.AGE_MS: 5000}))
    world.bound(bind(**{"x-from-time": 7}))
    looks = [each.make(1) for each in world.asked if isinstance(each, steps.AskShard)]
    assert (looks[0].timestamp, looks[0].young) == (7000, NOW_MS - 5000)
    assert {(look.timestamp, look.young) for look in looks[1:]} == {(7000, 0)}


def test_what_is_not_on_stable_storage_is_waited_for() -> None:
    world = World(catalog(), message(b"a"))
    world.behind = 1
    going = begun(world.catalog, bind())
    request = next(going)
    while not isinstance(request, steps.Sleep):
        request = going.send(world.do(request))
    assert request.seconds == history.LOOK_S
    world.behind = 0
    assert world.run(going) is BIND_OK
    assert world.copies() == [(b"a", 0)]


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_refused_bind_ends_the_watch_and_is_refused() -> None:
    world = World(catalog())
    world.code = 403
    with pytest.raises(Refusal):
        world.bound(bind())
    assert world.asked[0] == steps.Watch(STREAM, TARGET)
    assert world.asked[-1] == steps.Unwatch(STREAM, TARGET)
    assert world.followed == []


def test_copies_that_are_lost_again_and_again_refuse_the_bind() -> None:
    world = World(catalog(), message(b"a"))
    world.stores = False
    with pytest.raises(Refusal) as refused:
        world.bound(bind())
    assert (refused.value.code, refused.value.text) == (
        541,
        "messages for queue 'q' cannot be stored",
    )
    assert world.kinds().count("Store") == history.TRIES_MAX
    assert "AskEach" not in world.kinds() and world.kinds()[-1] == "Unwatch"


def test_a_binding_that_goes_is_followed_no_longer() -> None:
    world = World(catalog())
    world.run(begun(world.catalog, bind()))
    world.catalog.apply(BindingDelete("/", "e", "queue", "q", "k", {"x-from": 0}))
    world.stream.append((message(b"late"), False))
    world.asked.clear()
    world.run(world.followed[0])
    assert world.kinds() == ["Clock", "Clock", "Sleep", "AskShard", "SeeCatalog", "Unwatch"]
    assert world.copies() == []


def test_a_binding_is_followed_for_so_long_however_long_a_look_takes() -> None:
    world = World(catalog())
    world.run(begun(world.catalog, bind()))
    world.asked.clear()
    world.look_s = 1.0
    world.run(world.followed[0])
    assert world.kinds().count("Sleep") == 5
    assert world.kinds()[-1] == "Unwatch"


def test_the_binding_stands_though_what_follows_fails(caplog: pytest.LogCaptureFixture) -> None:
    world = World(catalog())
    assert world.run(begun(world.catalog, bind())) is BIND_OK
    world.fails[steps.SeeCatalog] = Refusal(541, "the stream is gone")
    world.run(world.followed[0])
    assert world.kinds()[-1] == "Unwatch"
    (warning,) = caplog.messages
    assert (
        "queue 'q'" in warning and "not all copied" in warning and "the stream is gone" in warning
    )
