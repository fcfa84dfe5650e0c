"""exchange.* and queue.*: who may, what is asked, what is answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pamqp import base, commands

from shardmq.broker.amqp.errors import ChannelException, ConnectionException
from shardmq.broker.front_door.topology import methods, queues, reply_queue
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model import checks
from shardmq.broker.model.changes import ExchangePut, PermissionPut, QueueDelete, QueuePut, ShardOf
from shardmq.broker.routing import keeping
from shardmq.broker.shared.control import (
    Answer,
    Bind,
    ExchangeDeclare,
    QueueDeclare,
    QueueRemove,
    VirtualLook,
)
from shardmq.shardd.wire import messages as wire
from tests.topology.topology_play import (
    MINE,
    PLAIN,
    SOURCE,
    THEIRS,
    Driver,
    FakeChannel,
    FakeSession,
)

Exchange, Queue = commands.Exchange, commands.Queue


def done(session: FakeSession, method: base.Frame, channel: FakeChannel | None = None) -> Any:
    """Return the reply. Raises what the channel or connection is closed with."""

    async def scenario() -> Any:
        driver = Driver(session, channel, at_once=True)
        driver.receive(method)
        await driver.finish()
        if driver.failures:
            raise driver.failures[0]
        return driver.said[0]

    return asyncio.run(scenario())


def refused(
    session: FakeSession, method: base.Frame, channel: FakeChannel | None = None
) -> tuple[int, str]:
    with pytest.raises((ChannelException, ConnectionException)) as caught:
        done(session, method, channel)
    error = caught.value
    assert (error.class_id, error.method_id) == (method.index >> 16, method.index & 0xFFFF)
    return error.code, error.text


# -- what is asked and answered --------------------------------------------------------------------


def test_every_field_of_a_declare_reaches_the_controller() -> None:
    session = FakeSession()
    arguments: dict[str, Any] = {"x-expires": 1000}
    done(
        session,
        Queue.Declare(
            queue="q", durable=True, exclusive=True, auto_delete=True, arguments=arguments
        ),
    )
    done(
        session,
        Exchange.Declare(
            exchange="e", exchange_type="topic", durable=True, auto_delete=True, internal=True
        ),
    )
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
    assert (
        done(session, Exchange.Declare(exchange="amq.direct", passive=True)).name
        == "Exchange.DeclareOk"
    )
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
    keys = [
        request.routing_key for request in session.catalog_link.asked if isinstance(request, Bind)
    ]
    assert keys == ["q", "k", ""]


def test_line_breaks_fall_out_of_names() -> None:
    session = FakeSession()
    queue, exchange = Queue.Declare(), Exchange.Declare()
    # as they come from the wire; the constructors refuse them
    queue.queue, exchange.exchange = "a\r\nb", "c\nd"
    done(session, queue)
    done(session, exchange)
    assert [request.name for request in session.catalog_link.asked] == ["ab", "cd"]  # type: ignore[union-attr]


# -- what is refused, in which words ---------------------------------------------------------------

NO_LAST = (404, "no previously declared queue")
DEFAULT = (403, "operation not permitted on the default exchange")
LOCKED = (
    405,
    "cannot obtain exclusive access to locked queue 'theirs' in vhost '/'. It could be originally "
    "declared on another connection or the exclusive property value does not match that of the "
    "original declaration.",
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
        (Exchange.Declare(exchange="missing", passive=True),
         (404, "no exchange 'missing' in vhost '/'")),
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
def test_refusals_have_rabbitmqs_codes_and_texts(
    method: base.Frame, answer: tuple[int, str]
) -> None:
    assert refused(FakeSession(SOURCE, PLAIN, THEIRS), method) == answer


@pytest.mark.parametrize(
    "method", [Queue.Declare(queue="far", passive=True), Queue.Purge(queue="far")]
)
def test_an_exclusive_queue_of_another_front_door_is_looked_for_behind_its_end(
    method: base.Frame,
) -> None:
    async def scenario(goes: bool) -> Driver:
        session = FakeSession(QueuePut("/", "far", 9, 0, owner="1.1.1"))
        driver = Driver(session)
        driver.receive(method)
        await driver.settle()
        assert driver.controller.asked == [VirtualLook("/", "far")]
        assert not driver.said
        if goes:  # the change is on its way, and comes before the answer
            session.catalog.apply(QueueDelete("/", "far"))
        await driver.finish()
        return driver

    for goes, code in ((True, 404), (False, 405)):
        driver = asyncio.run(scenario(goes))
        (failure,) = driver.failures
        assert isinstance(failure, ChannelException)
        assert failure.code == code


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("", NO_LAST),
        ("missing", (404, "no queue 'missing' in vhost '/'")),
        ("theirs", LOCKED),
        ("secret", (403, "read access to queue 'secret' in vhost '/' refused for user 'u'")),
    ],
)
def test_who_consumes_needs_the_queue_its_owner_and_the_right_to_read(
    name: str, answer: tuple[int, str]
) -> None:
    session = FakeSession(
        PLAIN, MINE, THEIRS, PermissionPut("/", "u", "", "", "^(q|mine|theirs|missing)$")
    )
    assert queues.readable_queue(session, session.catalog, "q") == PLAIN
    assert queues.readable_queue(session, session.catalog, "mine") == MINE
    with pytest.raises(checks.Refusal) as refused:
        queues.readable_queue(session, session.catalog, name)
    assert (refused.value.code, refused.value.text) == answer


def test_the_private_reply_to_name_can_be_looked_for() -> None:
    """By everybody, though it belongs to another connection; for all else it is not there."""
    private = "amq.rabbitmq.reply-to.alive"
    session = FakeSession(QueuePut("/", private, 4, 0, owner="0.1.2"), SOURCE)
    for name in (private, "amq.rabbitmq.reply-to"):
        for passive in (True, False):
            reply = done(session, Queue.Declare(queue=name, passive=passive))
            assert (reply.queue, reply.message_count, reply.consumer_count) == (name, 0, 1)
    assert refused(session, Queue.Purge(queue=private)) == (
        404,
        f"no queue '{private}' in vhost '/'",
    )
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
        (Queue.Unbind(queue="q", exchange="e"),
         [("write", "queue", "q"), ("read", "exchange", "e")]),
        (Exchange.Declare(exchange="new"), [("configure", "exchange", "new")]),
        (Exchange.Declare(exchange="new", arguments=ALTERNATE),
         [("configure", "exchange", "new"), ("read", "exchange", "new"),
          ("write", "exchange", "ae")]),
        (Exchange.Delete(exchange="e"), [("configure", "exchange", "e")]),
        (Exchange.Bind(destination="amq.fanout", source="e"),
         [("write", "exchange", "amq.fanout"), ("read", "exchange", "e")]),
        (Exchange.Unbind(destination="amq.fanout", source="e"),
         [("write", "exchange", "amq.fanout"), ("read", "exchange", "e")]),
    ],
    ids=lambda value: value.name if isinstance(value, base.Frame) else "",
)  # fmt: skip
def test_each_method_needs_exactly_its_rights(
    method: base.Frame, needs: list[tuple[str, str, str]]
) -> None:
    def permission(without: tuple[str, str, str] | None) -> PermissionPut:
        names = {
            right: [n for r, _, n in needs if r == right and (r, _, n) != without]
            for right in RIGHTS
        }
        patterns = {
            right: "|".join(f"^{name.replace('.', '[.]')}$" for name in names[right])
            for right in RIGHTS
        }
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


# -- virtual queues -------------------------------------------------------------------------------

STREAM = ExchangePut("/", "s", "x-modulus-hash")
SHARDS = tuple(QueuePut("/", f"s-{n}", 10 + n, n, part=ShardOf("s", n)) for n in range(2))


def decided(session: FakeSession, method: base.Frame) -> Any:
    return methods.decide(session, session.catalog, "", method)


def reply_to(steps: Any, answer: Any) -> Any:
    """Return the reply that the last answer leads to."""
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    return end.value.value


def test_a_virtual_queue_counts_its_shard_queues_and_each_consumer_once() -> None:
    session = FakeSession(STREAM, *SHARDS)
    found = []
    for first in (5, 3), None:  # one consumer of a shard queue by its own name
        steps = decided(session, Queue.Declare(queue="s", passive=True))
        assert next(steps).requests == [VirtualLook("/", "s")]
        assert steps.send([Answer(1, result={"seats": 4, "consumers": 2})]).queues == SHARDS
        found.append(reply_to(steps, [first, (6, 2)]))
    reply, without = found
    assert (reply.queue, reply.message_count, reply.consumer_count) == ("s", 11, 3)
    assert without.message_count == 6


@pytest.mark.parametrize(
    ("condition", "counts", "text"),
    [
        ("if_empty", [(0, 0), (1, 0)], "queue 's' in vhost '/' not empty"),
        ("if_unused", [(0, 1), None], "queue 's' in vhost '/' in use"),
    ],
)
def test_a_virtual_queue_is_deleted_only_if_all_shard_queues_may_go(
    condition: str, counts: list[tuple[int, int] | None], text: str
) -> None:
    session = FakeSession(STREAM, *SHARDS)
    refused_steps, steps = [
        decided(session, Queue.Delete(queue="s", **{condition: True})) for _ in range(2)
    ]
    assert next(refused_steps).queues == next(steps).queues == SHARDS
    with pytest.raises(checks.Refusal) as refused:
        refused_steps.send(counts)
    assert (refused.value.code, refused.value.text) == (406, text)
    ask = steps.send([(0, 0) if condition == "if_empty" else (1, 0), None])
    conditions = condition == "if_unused", condition == "if_empty"
    assert ask.requests == [QueueRemove("/", each.name, *conditions) for each in SHARDS]
    assert reply_to(steps, [Answer(1, result={"messages": 3}), Answer(1)]).message_count == 3


def test_a_virtual_queue_is_deleted_and_purged_with_all_its_messages() -> None:
    session = FakeSession(STREAM, *SHARDS)
    assert done(session, Queue.Purge(queue="s")).message_count == 8
    assert done(session, Queue.Delete(queue="s")).message_count == 14
    assert session.catalog_link.asked == [
        QueueRemove("/", each.name, False, False) for each in SHARDS
    ]


@pytest.mark.parametrize(
    ("method", "act"),
    [
        (Queue.Declare(queue="s"), "declare"),
        (Queue.Bind(queue="s", exchange="e"), "bind"),
        (Queue.Unbind(queue="s", exchange="e"), "unbind"),
    ],
)
def test_a_virtual_queue_is_not_declared_or_bound(method: base.Frame, act: str) -> None:
    session = FakeSession(STREAM, SOURCE, *SHARDS)
    assert refused(session, method) == (406, f'Can\'t {act} sharded queue: <<"s">>')


def test_who_consumes_from_a_virtual_queue_needs_the_right_to_read() -> None:
    session = FakeSession(STREAM, PLAIN, *SHARDS, PermissionPut("/", "u", "", "", "^q$"))
    assert queues.readable_shards(session, session.catalog, "q") == ()
    with pytest.raises(checks.Refusal, match="read access"):
        queues.readable_shards(session, session.catalog, "s")


# -- exchanges that keep messages, reply queues ---------------------------------------------------


def test_a_queue_bound_to_an_exchange_that_keeps_messages_gets_its_history_first() -> None:
    recent = ExchangePut("/", "r", "x-recent-history")
    session = FakeSession(PLAIN, MINE, THEIRS, recent, QueuePut("/", keeping.queue_name("r"), 9, 0))
    assert (
        done(session, Queue.Bind(queue="q", exchange="r", routing_key="k")).name == "Queue.BindOk"
    )
    # before and after the bind
    assert session.shards.asked == [wire.InspectStream(1, 9, PLAIN.id, 0, 0)] * 2
    assert session.catalog_link.asked == [Bind("/", "r", "queue", "q", "k", {})]
    assert refused(session, Queue.Bind(queue="theirs", exchange="r")) == LOCKED
    assert refused(session, Queue.Bind(queue="missing", exchange="r"))[0] == 404


def test_a_reply_queue_has_a_name_that_nobody_guesses() -> None:
    async def scenario() -> None:
        session = FakeSession()
        runner = StepRunner(session.catalog_link, session.shards)  # type: ignore[arg-type]
        first, second = [
            await runner.run(reply_queue.open_reply_queue(session), session) for _ in range(2)
        ]
        assert first.name != second.name
        assert checks.is_reply_queue(first.name) and len(first.name) > 60
        await runner.run(reply_queue.close_reply_queue(session, first.name), session)
        assert session.catalog.queue("/", first.name) is None
        session.catalog_link._do = lambda request: Answer(1, 506, "no")  # type: ignore[method-assign]
        with pytest.raises(checks.Refusal):
            await runner.run(reply_queue.open_reply_queue(session), session)

    asyncio.run(scenario())
