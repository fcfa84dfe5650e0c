"""Messages of shards and the controller reach the connections and consumers they are about."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.front_door.alarms import WHOLE_BROKER, Alarms
from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.events import ControllerEvents, ShardEvents
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.model.changes import ParameterPut, QueuePut
from shardmq.broker.shared.control import Fenced
from shardmq.shardd.wire import messages as wire
from tests.amqp.bytes_of import publish
from tests.connections.connection_play import FD, Play, Sock
from tests.consuming.test_consume import Consuming


class Heard(Consuming):
    """A connection among those of a front door that hears both."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = Connections(self.services)
        self.connections.by_number[self.connection.id] = self.connection
        self.batches = 0
        self.dead_lettering = SimpleNamespace(
            receive=lambda shard, what: setattr(self, "batches", self.batches + 1),
            publish_next=self._publish_next,
            unroutable=2,
            published={"expired": 3},
        )
        self.publishing.dedup = SimpleNamespace(
            duplicates=1, told=self._deduped, restarted=self._deduped
        )  # type: ignore[attr-defined]
        self.publishing.trace = lambda tracing: setattr(self.publishing, "tracing", tracing)  # type: ignore[attr-defined]
        self.publishing.catalog_changed = lambda something_went: self.changed.append(something_went)  # type: ignore[attr-defined]
        self.publishing.unroutable_dropped = 5  # type: ignore[attr-defined]
        self.publishing.exchange_counts = SimpleNamespace(report=lambda: ["row"])  # type: ignore[attr-defined]
        self.logins.refused_unseen = 0  # type: ignore[attr-defined]
        self.shards.numbers = lambda: {"ring_full.0": 0.0}  # type: ignore[attr-defined]
        self.shards.set_stalled = lambda shard, stalled: self.stalled.append((shard, stalled))  # type: ignore[attr-defined]
        self.changed: list[bool] = []
        self.deduplicated: list[tuple[Any, ...]] = []
        self.stalled: list[tuple[int, bool]] = []
        self.tracer: Any = None
        self.shard_events, self.controller_events = ShardEvents(), ControllerEvents()
        self.shard_events.attend(self.services, self.connections, self.dead_lettering)  # type: ignore[arg-type]
        self.controller_events.attend(
            self.services,
            self.connections,
            self.dead_lettering,  # type: ignore[arg-type]
            SimpleNamespace(tracing=None),  # type: ignore[arg-type]
            SimpleNamespace(catalog_changed=lambda: self.tracer),  # type: ignore[arg-type]
        )

    def _deduped(self, *what: Any) -> None:
        self.deduplicated.append(what)

    def _publish_next(self) -> bool:
        self.batches -= 1
        return self.batches > 0


def test_alarms_of_several_shards_are_told_once_for_each_reason() -> None:
    alarms = Alarms()
    assert (
        alarms.set(0, "disk") and not alarms.set(1, "disk") and alarms.set(WHOLE_BROKER, "memory")
    )
    assert alarms.text == "disk & memory"
    assert (
        not alarms.set(0, "")
        and alarms.set(1, "")
        and alarms.set(WHOLE_BROKER, "")
        and not alarms.text
    )
    assert not alarms.set(3, "")


# -- shards ----------------------------------------------------------------------------------------


async def test_what_a_shard_says_of_a_consumer_reaches_it() -> None:
    play = Heard()
    number = await play.consume()
    play.says(1, commands.Basic.Qos(prefetch_count=2, global_=True))
    play.shards.allotted.clear()
    play.shard_events.told(0, wire.CreditReport(number, 0, True))
    assert play.shards.allotted == [(number, 2, wire.KEEP)]
    play.shard_events.away(0)
    assert play.channel.limit.allotted == 0
    play.shard_events.told(0, wire.MarkReached(number, 7))  # no group's
    play.shard_events.told(0, wire.Cancelled(number))
    play.aio.run()
    assert play.names() == ["Basic.Cancel"]


async def test_a_channel_that_holds_something_for_too_long_is_closed() -> None:
    play = Heard()
    play.shard_events.told(0, wire.AckTimeout(play.connection.id, 1, 1000))
    play.shard_events.told(0, wire.AckTimeout(77, 1, 1000))
    play.aio.run()
    (close,) = play.got()
    assert (close.name, close.reply_code) == ("Channel.Close", 406)


async def test_an_alarm_of_a_shard_holds_publishers_until_it_or_the_shard_is_over() -> None:
    play = Heard()
    play.read(b"".join(publish(1, "", "a", b"x")))
    play.shard_events.told(1, wire.Alarm(wire.DISK_STALLED))
    assert play.stalled == [(1, True)] and FD not in play.aio.readers
    play.shard_events.restarted(1)
    assert FD in play.aio.readers
    play.aio.run()
    assert play.names() == ["Connection.Blocked", "Connection.Unblocked"]


async def test_what_became_of_first_copies_is_told_to_the_service_that_asked() -> None:
    play = Heard()
    became = wire.DedupOutcome([1], [2])
    play.shard_events.told(1, became)
    play.shard_events.restarted(1)
    assert play.deduplicated == [(1, became), (1,)]


async def test_dead_letters_are_published_batch_by_batch() -> None:
    play = Heard()
    batch = wire.DeadLetters(1, "/", "a", "expired", "", None, False, 0, b"")
    play.shard_events.told(0, batch)
    play.shard_events.told(0, batch)
    assert play.batches == 2
    play.aio.turn()
    assert play.batches == 1  # the other one in a turn of the loop of its own
    play.aio.run()
    assert play.batches == 0 and not play.shard_events._dead_letters_scheduled


async def test_only_the_controllers_own_connections_hear_of_repeated_publishes() -> None:
    for trusted in (False, True):
        play = Heard()
        play.connection.session.trusted = trusted
        play.connection.session.is_direct = not trusted
        play.shard_events.known(play.connection.id, 1, 3, 4, False)
        play.shard_events.known(77, 1, 3, 4, False)
        before = len(play.sock.taken)
        play.aio.run()
        assert (len(play.sock.taken) > before) is trusted


# -- the controller --------------------------------------------------------------------------------


async def test_new_things_alone_forget_routes_and_nothing_else() -> None:
    play = Heard()
    play.controller_events.catalog_changed([QueuePut("/", "new", 9, 0)])
    assert play.changed == [False] and play.services.server_properties == {}


async def test_a_snapshot_ends_the_alarm_of_the_broker_and_names_the_cluster() -> None:
    play = Heard()
    play.controller_events.alarmed("memory")
    play.tracer = object()
    play.controller_events.catalog_changed(None)
    assert play.changed == [True] and not play.services.alarms.text
    assert "cluster_name" in play.services.server_properties
    assert play.consuming.deliveries.tracing is play.consuming.gets.tracing is play.tracer


async def test_a_new_limit_of_channels_is_told_how_many_there_are() -> None:
    play = Heard()
    limit = ParameterPut(vhost="", component="user-limits", name="guest", value={"max-channels": 9})
    play.line.catalog.apply(limit)
    play.line.up.clear()
    play.controller_events.catalog_changed([limit])
    assert [info.channels for info in play.line.up] == [1]


async def test_the_controller_ends_connections_and_consumers_by_their_owner() -> None:
    play = Heard()
    await play.consume()
    play.controller_events.cancel_consumer("another", 1, "tag")
    play.controller_events.cancel_consumer(play.connection.session.owner, 1, "tag")
    await play.settled()
    play.shards.answer(wire.Done(1))
    await play.settled()
    play.controller_events.close_connection("another", 320, "no")
    play.controller_events.close_connection(play.connection.session.owner, 320, "by an operator")
    play.aio.run()
    (close,) = play.got()
    assert close.reply_text.endswith("by an operator")


async def test_a_fence_is_answered_when_the_shards_have_taken_all_in() -> None:
    play = Heard()
    fences: list[Any] = []

    async def fence() -> None:
        fences.append(1)

    play.shards.fence = fence  # type: ignore[attr-defined]
    play.controller_events.fence(4)
    await play.settled()
    assert fences == [1] and play.line.said == [Fenced(4)]


def test_a_process_that_is_taken_for_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    ControllerEvents().outlived()
    assert raised == [signal.SIGTERM]


async def test_reports_have_what_is_open_and_not_the_controllers_own() -> None:
    play = Heard()
    number = await play.consume()
    play.deliver(number, 1, b"x")
    connections, channels, totals = play.controller_events.report()
    assert [row["owner"] for row in connections] == [row["owner"] for row in channels] == ["0.7.9"]
    assert channels[0]["messages_unacknowledged"] == 1
    expected = {
        "connections": 1, "channels": 1, "publishers": 0, "unroutable_dropped": 7, "duplicates": 1,
        "dead_lettered_expired": 3, "publishers_waiting.1": 0, "ring_full.0": 0,
        "delivered_manual": 1,
    }  # fmt: skip
    assert {name: totals[name] for name in expected} == expected
    assert [row["delivery_tag"] for row in play.controller_events.unacked(1)] == [1]
    assert play.controller_events.published() == ["row"]
    assert play.controller_events.consumers_here() == []
    play.connection.session.trusted = True
    assert play.controller_events.report()[:2] == ([], [])


# -- all connections -------------------------------------------------------------------------------


async def test_connections_are_numbered_and_forgotten() -> None:
    play = Play()
    connections = Connections(play.services)
    for _ in range(2):
        connections.enter(Sock(), Peer("127.0.0.1", 1))  # type: ignore[arg-type]
    connections.enter(Sock(), Peer("", 0), trusted=True)  # type: ignore[arg-type]
    assert list(connections.by_number) == [1, 2, 3] and connections.connected() == 0
    connections.by_number[1].session.is_open = connections.by_number[3].session.is_open = True
    assert connections.connected() == 1
    connections.by_number[2].disconnect()
    assert list(connections.by_number) == [1, 3] and play.shards.forgotten == [2]


async def test_heartbeats_are_those_of_open_connections() -> None:
    play = Heard()
    play.aio.now += 31
    play.loop.now = play.aio.now
    play.connections.tick(play.aio.now)
    play.aio.run()
    assert [what.name for what in play.got()] == ["Heartbeat"]


async def test_who_is_told_of_an_alarm_may_end_meanwhile() -> None:
    play = Heard()
    play.read(b"".join(publish(1, "", "a", b"x")))
    play.services.alarms.set(0, "disk")
    play.connections.alarm_changed()
    play.aio.run()
    assert [what.name for what in play.got()] == ["Connection.Blocked"]
