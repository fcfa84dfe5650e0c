"""exchange.* and queue.*: who may, what is asked, what is answered, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import base, commands

from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.amqp.events import Binds
from shardmq.broker.front_door.links.catalog_link import Reply
from shardmq.broker.front_door.topology import pipeline, topology
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    PermissionPut,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.broker.shared.control import (
    Answer,
    AnyRequest,
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
)

Exchange, Queue = commands.Exchange, commands.Queue
EVERYTHING = PermissionPut("/", "u", ".*", ".*", ".*")


class FakeController:
    """Applies what it is asked when told to, in order; as the controller does, without its checks but for existence."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.asked: list[AnyRequest] = []
        self.open: list[tuple[AnyRequest, asyncio.Future[Answer] | Reply]] = []
        self.at_once = True

    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._take(request, future)
        return future

    def request(self, request: AnyRequest, owner: str, user: str) -> Reply:
        reply = Reply()
        self._take(request, reply)
        return reply

    def _take(self, request: AnyRequest, answer: asyncio.Future[Answer] | Reply) -> None:
        self.asked.append(request)
        self.open.append((request, answer))
        if self.at_once:
            self.answer_all()

    def answer_all(self) -> None:
        opened, self.open = self.open, []
        for request, future in opened:
            if not future.done():
                future.set_result(self._do(request))

    def _do(self, request: AnyRequest) -> Answer:
        match request:
            case BindMany():
                for done, (source, queue, key) in enumerate(request.binds):
                    answer = self._do(Bind(request.vhost, source, "queue", queue, key, {}))
                    if answer.code:
                        return Answer(1, answer.code, answer.text, {"done": done})
            case QueueDeclare():
                name = request.name or "amq.gen-made"
                id = self.catalog.version + 1
                self.catalog.apply(QueuePut(request.vhost, name, id, 0, arguments=request.arguments))
                return Answer(1, result={"name": name, "messages": 3, "consumers": 1})
            case ExchangeDeclare():
                self.catalog.apply(ExchangePut(request.vhost, request.name, request.type))
            case Bind():
                if self.catalog.exchange(request.vhost, request.source) is None:
                    return Answer(1, 404, f"no exchange '{request.source}' in vhost '/'")
                if self.catalog.vhosts["/"].destination(request.kind, request.destination) is None:
                    return Answer(1, 404, f"no {request.kind} '{request.destination}' in vhost '/'")
                self.catalog.apply(
                    BindingPut("/", request.source, request.kind, request.destination, request.routing_key)
                )
            case ExchangeRemove():
                self.catalog.apply(ExchangeDelete(request.vhost, request.name))
            case QueueRemove():
                self.catalog.apply(QueueDelete(request.vhost, request.name))
                return Answer(1, result={"messages": 7})
        return Answer(1)


class FakeShards:
    async def count(self, queue: QueuePut) -> tuple[int, int]:
        return 5, 2

    async def look(self, queue: QueuePut) -> tuple[int, int] | None:
        return None if queue.name == "leaving" else (5, 2)

    async def purge(self, queue: QueuePut) -> int:
        return 4


class FakeSession:
    user, vhost, owner = "u", "/", "0.1.1"

    def __init__(self, *changes: AnyChange) -> None:
        self.catalog = Catalog()
        for change in (VhostPut("/"), UserPut("u", ""), EVERYTHING, *changes):
            self.catalog.apply(change)
        self.catalog_link = FakeController(self.catalog)
        self.shards: topology.Counting = FakeShards()
        self.replies: list[tuple[int, base.Frame]] = []

    def reply(self, channel_number: int, method: base.Frame, count: int = 1) -> None:
        self.replies += [(channel_number, method)] * count


class FakeChannel:
    def __init__(self, last_queue: str = "") -> None:
        self.number = 1
        self.last_queue = last_queue


MINE = QueuePut("/", "mine", 1, 0, owner="0.1.1")
THEIRS = QueuePut("/", "theirs", 2, 0, owner="0.1.2")
PLAIN = QueuePut("/", "q", 3, 0)
SOURCE = ExchangePut("/", "e", "direct")


def done(session: FakeSession, method: base.Frame, channel: FakeChannel | None = None) -> Any:
    return asyncio.run(topology.handle(session, channel or FakeChannel(), method))


def refused(session: FakeSession, method: base.Frame, channel: FakeChannel | None = None) -> tuple[int, str]:
    with pytest.raises((ChannelException, ConnectionException)) as caught:
        done(session, method, channel)
    error = caught.value
    assert (error.class_id, error.method_id) == (method.index >> 16, method.index & 0xFFFF)
    return error.code, error.text


# -- what is asked and answered -------------------------------------------------------------------------


def test_every_field_of_a_declare_reaches_the_controller() -> None:
    session = FakeSession()
    arguments: dict[str, Any] = {"x-expires": 1000}
    done(session, Queue.Declare(queue="q", durable=True, exclusive=True, auto_delete=True, arguments=arguments))
    done(session, Exchange.Declare(exchange="e", exchange_type="topic", durable=True, auto_delete=True, internal=True))
    assert session.catalog_link.asked == [
        QueueDeclare("/", "q", True, True, True, arguments),
        ExchangeDeclare("/", "e", "topic", True, True, True, {}),
    ]


def test_declare_ok_carries_name_messages_and_consumers() -> None:
    channel = FakeChannel()
    reply = done(FakeSession(), Queue.Declare(queue=""), channel)
    assert (reply.queue, reply.message_count, reply.consumer_count) == ("amq.gen-made", 3, 1)
    assert channel.last_queue == "amq.gen-made"


def test_a_passive_declare_counts_at_the_shard_and_changes_nothing() -> None:
    session, channel = FakeSession(PLAIN), FakeChannel()
    reply = done(session, Queue.Declare(queue="q", passive=True), channel)
    assert (reply.queue, reply.message_count, reply.consumer_count) == ("q", 5, 2)
    assert channel.last_queue == "q"
    assert done(session, Exchange.Declare(exchange="amq.direct", passive=True)).name == "Exchange.DeclareOk"
    assert session.catalog_link.asked == []


def test_a_passive_declare_does_not_find_a_queue_that_its_shard_has_given_up() -> None:
    session = FakeSession(QueuePut("/", "leaving", 9, 0, auto_delete=True))
    missing = (404, "no queue 'leaving' in vhost '/'")
    assert refused(session, Queue.Declare(queue="leaving", passive=True)) == missing


def test_delete_and_purge_say_how_many_messages_went() -> None:
    session = FakeSession(PLAIN)
    assert done(session, Queue.Purge(queue="q")).message_count == 4
    assert done(session, Queue.Delete(queue="q", if_empty=True)).message_count == 7
    assert session.catalog_link.asked == [QueueRemove("/", "q", False, True)]


def test_deleting_what_is_not_there_is_asked_and_is_no_error() -> None:
    assert done(FakeSession(), Queue.Delete(queue="missing")).name == "Queue.DeleteOk"
    assert done(FakeSession(), Exchange.Delete(exchange="missing")).name == "Exchange.DeleteOk"


def test_unbind_of_exchanges_is_answered_by_the_odd_method_number() -> None:
    reply = done(FakeSession(SOURCE), Exchange.Unbind(destination="amq.fanout", source="e"))
    assert reply.index == 40 << 16 | 51


def test_an_empty_queue_name_means_the_queue_declared_last() -> None:
    session = FakeSession(SOURCE, PLAIN)
    channel = FakeChannel("q")
    done(session, Queue.Bind(queue="", exchange="e", routing_key=""), channel)
    done(session, Queue.Bind(queue="", exchange="e", routing_key="k"), channel)
    done(session, Queue.Bind(queue="q", exchange="e", routing_key=""), channel)
    keys = [request.routing_key for request in session.catalog_link.asked if isinstance(request, Bind)]
    assert keys == ["q", "k", ""]


def test_line_breaks_fall_out_of_names() -> None:
    session = FakeSession()
    queue, exchange = Queue.Declare(), Exchange.Declare()
    queue.queue, exchange.exchange = "a\r\nb", "c\nd"  # as they come from the wire; the constructors refuse them
    done(session, queue)
    done(session, exchange)
    assert [request.name for request in session.catalog_link.asked] == ["ab", "cd"]  # type: ignore[union-attr]


# -- what is refused, in which words ------------------------------------------------------------------------

NO_LAST = (404, "no previously declared queue")
DEFAULT = (403, "operation not permitted on the default exchange")
LOCKED = (
    405,
    "cannot obtain exclusive access to locked queue 'theirs' in vhost '/'. It could be originally declared on another "
    "connection or the exclusive property value does not match that of the original declaration.",
)
VOLATILE = (403, "cannot bind or unbind to a volatile (direct reply-to) queue")


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        (Queue.Declare(queue="missing", passive=True), (404, "no queue 'missing' in vhost '/'")),
        (Queue.Declare(queue="theirs", passive=True), LOCKED),
        (Queue.Declare(queue="", passive=True), (404, "no queue '' in vhost '/'")),
        (Queue.Declare(queue="amq.rabbitmq.reply-to.dead", passive=True),
         (404, "no queue 'amq.rabbitmq.reply-to.dead' in vhost '/'")),
        (Queue.Delete(queue=""), NO_LAST),
        (Queue.Purge(queue=""), NO_LAST),
        (Queue.Purge(queue="missing"), (404, "no queue 'missing' in vhost '/'")),
        (Queue.Purge(queue="theirs"), LOCKED),
        (Queue.Bind(queue="", exchange="e"), NO_LAST),
        (Queue.Unbind(queue="", exchange="e"), NO_LAST),
        (Queue.Bind(queue="q", exchange=""), DEFAULT),
        (Queue.Unbind(queue="q", exchange=""), DEFAULT),
        (Queue.Bind(queue="q", exchange="missing"), (404, "no exchange 'missing' in vhost '/'")),
        (Queue.Bind(queue="missing", exchange="e"), (404, "no queue 'missing' in vhost '/'")),
        (Queue.Bind(queue="amq.rabbitmq.reply-to", exchange="e"), VOLATILE),
        (Exchange.Declare(exchange=""), DEFAULT),
        (Exchange.Declare(exchange="", passive=True), DEFAULT),
        (Exchange.Declare(exchange="missing", passive=True), (404, "no exchange 'missing' in vhost '/'")),
        (Exchange.Declare(exchange="x", exchange_type="odd"), (503, "unknown exchange type 'odd'")),
        (Exchange.Delete(exchange=""), DEFAULT),
        (Exchange.Delete(exchange="amq.direct"),
         (403, "deletion of system exchange 'amq.direct' in vhost '/' not allowed")),
        (Exchange.Bind(destination="", source="e"), DEFAULT),
        (Exchange.Bind(destination="e", source=""), DEFAULT),
        (Exchange.Unbind(destination="e", source=""), DEFAULT),
    ],
    ids=lambda value: value.name if isinstance(value, base.Frame) else str(value[0]),
)  # fmt: skip
def test_refusals_have_rabbitmqs_codes_and_texts(method: base.Frame, answer: tuple[int, str]) -> None:
    assert refused(FakeSession(SOURCE, PLAIN, THEIRS), method) == answer


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("", NO_LAST),
        ("missing", (404, "no queue 'missing' in vhost '/'")),
        ("theirs", LOCKED),
        ("secret", (403, "read access to queue 'secret' in vhost '/' refused for user 'u'")),
    ],
)
def test_who_consumes_needs_the_queue_its_owner_and_the_right_to_read(name: str, answer: tuple[int, str]) -> None:
    session = FakeSession(PLAIN, MINE, THEIRS, PermissionPut("/", "u", "", "", "^(q|mine|theirs|missing)$"))
    assert topology.readable_queue(session, "q") == PLAIN
    assert topology.readable_queue(session, "mine") == MINE
    with pytest.raises(checks.Refusal) as refused:
        topology.readable_queue(session, name)
    assert (refused.value.code, refused.value.text) == answer


def test_the_private_reply_to_name_can_be_looked_for() -> None:
    """By everybody, though it belongs to another connection; for all else it is not there."""
    private = "amq.rabbitmq.reply-to.alive"
    session = FakeSession(QueuePut("/", private, 4, 0, owner="0.1.2"), SOURCE)
    for name in (private, "amq.rabbitmq.reply-to"):
        for passive in (True, False):
            reply = done(session, Queue.Declare(queue=name, passive=passive))
            assert (reply.queue, reply.message_count, reply.consumer_count) == (name, 0, 1)
    assert refused(session, Queue.Purge(queue=private)) == (404, f"no queue '{private}' in vhost '/'")
    assert done(session, Queue.Delete(queue=private)).message_count == 0
    assert session.catalog.queue("/", private) is not None


def test_what_the_controller_refuses_ends_the_channel_or_for_hard_codes_the_connection() -> None:
    session = FakeSession()
    session.catalog_link._do = lambda request: Answer(1, 406, "inequivalent arg")  # type: ignore[method-assign]
    assert refused(session, Queue.Declare(queue="q")) == (406, "inequivalent arg")
    session.catalog_link._do = lambda request: Answer(1, 506, "too many")  # type: ignore[method-assign]
    with pytest.raises(ConnectionException, match="too many"):
        done(session, Queue.Declare(queue="q"))


DLX: dict[str, Any] = {"x-dead-letter-exchange": "dlx"}
ALTERNATE: dict[str, Any] = {"alternate-exchange": "ae"}


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        (Queue.Declare(queue="new"), [("configure", "queue", "new")]),
        (Queue.Declare(queue="new", arguments=DLX),
         [("configure", "queue", "new"), ("read", "queue", "new"), ("write", "exchange", "dlx")]),
        (Queue.Delete(queue="q"), [("configure", "queue", "q")]),
        (Queue.Purge(queue="q"), [("read", "queue", "q")]),
        (Queue.Bind(queue="q", exchange="e"), [("write", "queue", "q"), ("read", "exchange", "e")]),
        (Queue.Unbind(queue="q", exchange="e"), [("write", "queue", "q"), ("read", "exchange", "e")]),
        (Exchange.Declare(exchange="new"), [("configure", "exchange", "new")]),
        (Exchange.Declare(exchange="new", arguments=ALTERNATE),
         [("configure", "exchange", "new"), ("read", "exchange", "new"), ("write", "exchange", "ae")]),
        (Exchange.Delete(exchange="e"), [("configure", "exchange", "e")]),
        (Exchange.Bind(destination="amq.fanout", source="e"),
         [("write", "exchange", "amq.fanout"), ("read", "exchange", "e")]),
        (Exchange.Unbind(destination="amq.fanout", source="e"),
         [("write", "exchange", "amq.fanout"), ("read", "exchange", "e")]),
    ],
    ids=lambda value: value.name if isinstance(value, base.Frame) else "",
)  # fmt: skip
def test_each_method_needs_exactly_its_rights(method: base.Frame, needs: list[tuple[str, str, str]]) -> None:
    def permission(without: tuple[str, str, str] | None) -> PermissionPut:
        names = {right: [n for r, _, n in needs if r == right and (r, _, n) != without] for right in RIGHTS}
        patterns = {right: "|".join(f"^{name.replace('.', '[.]')}$" for name in names[right]) for right in RIGHTS}
        return PermissionPut("/", "u", **patterns)

    done(FakeSession(SOURCE, PLAIN, permission(None)), method)
    for need in needs:
        right, kind, name = need
        text = f"{right} access to {kind} '{name}' in vhost '/' refused for user 'u'"
        assert refused(FakeSession(SOURCE, PLAIN, permission(need)), method) == (403, text)


RIGHTS = ("configure", "write", "read")


def test_a_passive_declare_needs_no_right() -> None:
    nobody = FakeSession(SOURCE, PLAIN, PermissionPut("/", "u", "", "", ""))
    assert done(nobody, Queue.Declare(queue="q", passive=True)).queue == "q"
    assert done(nobody, Exchange.Declare(exchange="e", passive=True)).name == "Exchange.DeclareOk"


# -- pipelining ---------------------------------------------------------------------------------------------


class Driver:
    """One channel's pipeline with what it says, in order."""

    def __init__(self, *changes: AnyChange) -> None:
        self.session = FakeSession(*changes)
        self.controller = self.session.catalog_link
        self.controller.at_once = False
        self.failures: list[Exception] = []
        self.idle = 0
        self.pipeline = pipeline.Pipeline(self.session, FakeChannel(), idle=self._idle, failed=self.failures.append)

    def _idle(self) -> None:
        self.idle += 1

    def receive(self, *methods: base.Frame | Binds) -> None:
        for method in methods:
            self.pipeline.receive(method)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        while self.pipeline.busy:
            await self.settle()
            self.controller.answer_all()
        await self.settle()

    @property
    def replies(self) -> list[str]:
        return [method.name for _, method in self.session.replies]


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())


def test_binds_of_what_exists_are_asked_without_waiting_for_answers() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(*(Queue.Bind(queue="q", exchange="e", routing_key=str(n)) for n in range(100)))
        await driver.settle()
        assert [request.routing_key for request in driver.controller.asked] == [str(n) for n in range(100)]  # type: ignore[union-attr]
        assert driver.replies == []
        driver.controller.answer_all()
        await driver.settle()
        assert driver.replies == ["Queue.BindOk"] * 100
        assert driver.idle == 1
        assert not driver.pipeline.busy

    run(scenario)


def test_a_run_of_binds_is_one_request() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        ends = [("e", "q", str(n)) for n in range(100)]
        driver.receive(Binds(1, ends, nowait=False), Binds(1, ends, nowait=True))
        await driver.settle()
        assert driver.controller.asked == [BindMany("/", ends), BindMany("/", ends)]
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"] * 100

    run(scenario)


def test_those_of_a_run_that_were_done_are_answered_before_the_failure() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(Binds(1, [("e", "q", "a"), ("e", "q", "b")], False), Queue.Declare(queue="later"))
        driver.controller.catalog = Catalog()  # another connection was quicker
        for change in (VhostPut("/"), SOURCE):
            driver.controller.catalog.apply(change)
        await driver.finish()
        assert driver.replies == []
        (error,) = driver.failures
        assert isinstance(error, ChannelException)
        assert (error.code, error.text, error.class_id, error.method_id) == (404, "no queue 'q' in vhost '/'", 50, 20)
        assert driver.session.catalog.queue("/", "later") is None

    run(scenario)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_run_that_ends_early_is_answered_as_far_as_it_went(done: int) -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(Binds(1, [("e", "q", "a"), ("e", "q", "b"), ("e", "q", "c")], False))
        (_, outcome) = driver.controller.open.pop()
        outcome.set_result(Answer(1, 404, "no queue", {"done": done}))
        await driver.settle()
        assert driver.replies == ["Queue.BindOk"] * done
        assert [str(error.text) for error in driver.failures] == ["no queue"]  # type: ignore[attr-defined]

    run(scenario)


def test_who_binds_more_than_may_wait_is_not_read() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        run_of = Binds(1, [("e", "q", str(n)) for n in range(256)], nowait=False)
        sent = 0
        while not driver.pipeline.full:
            driver.receive(run_of)
            sent += 1
        assert sent * 256 <= pipeline.PIPELINED_MAX + pipeline.WAITING_MAX + 512
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"] * 256 * sent

    run(scenario)


def test_new_queues_and_their_binds_overlap() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE)
        for name in ("a", "b"):
            driver.receive(Queue.Declare(queue=name), Queue.Bind(queue=name, exchange="e", nowait=True))
        await driver.settle()
        assert len(driver.controller.asked) == 4
        await driver.finish()
        assert driver.replies == ["Queue.DeclareOk"] * 2

    run(scenario)


def test_nothing_that_follows_a_failed_method_happens() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(
            Queue.Bind(queue="q", exchange="e"),
            Queue.Bind(queue="q", exchange="missing"),
            Queue.Declare(queue="later"),
        )
        await driver.finish()
        assert driver.replies == ["Queue.BindOk"]
        assert [error.code for error in driver.failures] == [404]  # type: ignore[attr-defined]
        assert driver.session.catalog.queue("/", "later") is None
        assert driver.idle == 0

    run(scenario)


def test_the_next_method_waits_for_the_name_the_server_gives() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE)
        driver.receive(Queue.Declare(queue="", nowait=True), Queue.Bind(queue="", exchange="e"))
        await driver.finish()
        assert driver.controller.asked[1] == Bind("/", "e", "queue", "amq.gen-made", "amq.gen-made", {})
        assert driver.replies == ["Queue.BindOk"]

    run(scenario)


def test_after_close_nothing_more_is_asked_or_replied() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(Queue.Purge(queue="missing"), *(Queue.Bind(queue="q", exchange="e") for _ in range(3)))
        driver.pipeline.close()
        await driver.settle()
        assert (driver.controller.asked, driver.replies, driver.failures, driver.idle) == ([], [], [], 0)
        driver.receive(Queue.Bind(queue="q", exchange="e"))
        assert not driver.pipeline.busy

    run(scenario)


def test_names_may_be_of_any_letters() -> None:
    async def scenario() -> None:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(Queue.Declare(queue="mine"))
        await driver.finish()
        method = Queue.Declare()
        method.queue = "grüße 你好"
        driver.receive(method)
        await driver.finish()
        assert driver.replies[-1] == "Queue.DeclareOk" and driver.failures == []

    run(scenario)


def in_runs(history: list[base.Frame]) -> list[base.Frame | Binds]:
    """As the codec tells them."""
    told: list[base.Frame | Binds] = []
    for method in history:
        if not isinstance(method, Queue.Bind):
            told.append(method)
        elif told and isinstance(told[-1], Binds) and told[-1].nowait == method.nowait:
            told[-1].ends.append((method.exchange, method.queue, method.routing_key))
        else:
            told.append(Binds(1, [(method.exchange, method.queue, method.routing_key)], method.nowait))
    return told


def singly(asked: list[AnyRequest]) -> list[AnyRequest]:
    return [
        each
        for request in asked
        for each in (
            [Bind(request.vhost, source, "queue", queue, key, {}) for source, queue, key in request.binds]
            if isinstance(request, BindMany)
            else [request]
        )
    ]


names = st.sampled_from(["q", "new", "other", "missing", ""])
exchanges = st.sampled_from(["e", "missing", "new"])
methods = st.one_of(
    st.builds(Queue.Declare, queue=names, passive=st.booleans(), nowait=st.booleans()),
    st.builds(Exchange.Declare, exchange=exchanges, passive=st.booleans()),
    st.builds(
        Queue.Bind, queue=names, exchange=exchanges, routing_key=st.sampled_from(["", "k"]), nowait=st.booleans()
    ),
    st.builds(Queue.Bind, queue=st.just("q"), exchange=st.just("e"), routing_key=st.sampled_from(["a", "b"])),
    st.builds(Exchange.Bind, destination=exchanges, source=exchanges),
    st.builds(Queue.Delete, queue=names),
    st.builds(Exchange.Delete, exchange=exchanges),
    st.builds(Queue.Unbind, queue=names, exchange=exchanges),
    st.builds(Queue.Purge, queue=names),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(methods, max_size=12))
def test_pipelined_methods_end_as_if_each_had_waited_for_the_one_before(history: list[base.Frame]) -> None:
    async def overlapping() -> tuple[Any, ...]:
        driver = Driver(SOURCE, PLAIN)
        driver.receive(*in_runs(history))
        await driver.finish()
        return (
            singly(driver.controller.asked),
            driver.replies,
            [str(e) for e in driver.failures],
            driver.session.catalog.state(),
        )

    async def one_by_one() -> tuple[Any, ...]:
        driver = Driver(SOURCE, PLAIN)
        for method in history:
            driver.receive(method)
            await driver.finish()
        return (
            driver.controller.asked,
            driver.replies,
            [str(e) for e in driver.failures],
            driver.session.catalog.state(),
        )

    assert asyncio.run(overlapping()) == asyncio.run(one_by_one())
