"""A batch of dead letters is answered when all its copies last, and says which of them do not."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.publish.dead_letters import CONNECTION, DUE, DeadLettering
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import BindingPut, ExchangePut, QueuePut, VhostDelete, VhostPut
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as wire
from tests.reference.wire import records_of

NO_TTL = 0xFFFFFFFF


class Links:
    """Two shards, of which the test decides what they say."""

    def __init__(self) -> None:
        self.packer = codec.Packer(2)
        self.links = [SimpleNamespace(epoch=1), SimpleNamespace(epoch=1)]
        self.told: list[tuple[int, wire.Message]] = []
        self.waiting: list[tuple[int, Any]] = []
        self.vhost = ""

    def use_vhost(self, vhost: str) -> None:
        self.vhost = vhost

    def wait_for(self, shards: int, waiting: Any) -> None:
        self.waiting += [(shard, waiting) for shard in range(2) if shards >> shard & 1]

    def tell(self, shard: int, what: wire.Message) -> None:
        self.told.append((shard, what))

    def packed(
        self, shard: int
    ) -> list[tuple[int, int, int, int, tuple[int, ...], list[bytes], int]]:
        """Return the records for a shard, each run with the connection and channel of its batch."""
        message = self.packer.take(shard, 0, 1, 1, 1)
        return records_of(bytes(codec.read_publish(message).records)) if message is not None else []


class Bench:
    def __init__(self) -> None:
        self.links = Links()
        catalog = Catalog()
        catalog.apply(VhostPut("/"))
        catalog.apply(ExchangePut("/", "dlx", "topic", True, False, False, {}))
        catalog.apply(ExchangePut("/", "heads", "headers", True, False, False, {}))
        for number, name in enumerate(("source", "a", "b", "c")):
            catalog.apply(QueuePut("/", name, number + 10, number % 2, name != "c", False, "", {}))
        for name in ("a", "b", "c"):
            catalog.apply(BindingPut("/", "dlx", "queue", name, f"to.{name}", {}))
            catalog.apply(BindingPut("/", "dlx", "queue", name, "all", {}))
        arguments = {"x-match": "all-with-x", "x-first-death-queue": "source"}
        catalog.apply(BindingPut("/", "heads", "queue", "a", "", arguments))
        self.catalog = catalog
        self.lettering = DeadLettering(SimpleNamespace(catalog=catalog), self.links)  # type: ignore[arg-type]

    def receive(self, *messages: bytes, key: str | None = None, **more: Any) -> None:
        fields: dict[str, Any] = {
            "exchange": "dlx",
            "reason": "expired",
            "insist": False,
            "queue": "source",
        } | more
        self.lettering.receive(
            0,
            wire.DeadLetters(
                number=fields.pop("number", 70_000),
                vhost="/",
                routing_key=key,
                count=len(messages),
                messages=b"".join(messages),
                **fields,
            ),
        )
        while self.lettering.publish_next():
            pass

    def answers(self) -> list[tuple[int, list[tuple[int, int]]]]:
        found = [
            (what.number, what.left)
            for shard, what in self.links.told
            if isinstance(what, wire.DeadLettersPublished)
        ]
        assert {shard for shard, _ in self.links.told} <= {0}
        self.links.told.clear()
        return found


def stored(key: str = "all", body: bytes = b"body", exchange: str = "", **what: Any) -> bytes:
    props = commands.Basic.Properties(**what).marshal()
    names = bytes([len(exchange)]) + exchange.encode() + bytes([len(key)]) + key.encode()
    return struct.pack("<II", len(body), len(props)) + names + props + body


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_answer_waits_for_every_shard_that_got_a_copy(bench: Bench) -> None:
    bench.receive(stored())
    assert [shard for shard, _ in bench.links.waiting] == [0, 1] and not bench.answers()
    for _, waiting in bench.links.waiting:
        assert not bench.answers()
        waiting.confirmed()
    assert bench.answers() == [(70_000, [])]


def test_copies_keep_what_the_message_was_but_for_its_expiration(bench: Bench) -> None:
    bench.receive(
        stored(delivery_mode=2, priority=7, expiration="5", headers={"h": 1}, message_id="m"),
        key="to.a",
    )
    ((_, ttl, priority, persistent, ids, (message,), _),) = bench.links.packed(1)
    assert (ttl, priority, persistent, ids) == (NO_TTL, 7, 1, (11,))
    exchange, key, props, body = contents.read_stored(message)
    said = properties.read(props)
    assert (exchange, key, body) == (b"dlx", b"to.a", b"body")
    assert (said.message_id, said.expiration, said.delivery_mode, (said.headers or {})["h"]) == (
        "m",
        None,
        2,
        1,
    )
    assert bench.links.packed(0) == []


def test_neighbours_for_the_same_queues_are_one_run_in_their_order(bench: Bench) -> None:
    bench.receive(*(stored("to.a" if number < 50 else "to.c", b"%d" % number,
                           message_id=str(number))
                    for number in range(100)))  # fmt: skip
    found = bench.links.packed(1)
    assert [
        (ids, [contents.read_stored(each)[3] for each in some]) for *_, ids, some, _ in found
    ] == [
        ((11,), [b"%d" % number for number in range(50)]),
        ((13,), [b"%d" % number for number in range(50, 100)]),
    ]


@pytest.mark.parametrize(("exchange", "key"), [("none", None), ("dlx", "nowhere"), ("", "nowhere")])
def test_what_leads_nowhere_is_done_with(bench: Bench, exchange: str, key: str | None) -> None:
    bench.receive(stored(), stored(), exchange=exchange, key=key)
    assert bench.answers() == [(70_000, [])] and bench.lettering.dropped == 2


def test_what_was_lost_or_found_no_room_is_named_and_only_of_its_batch(bench: Bench) -> None:
    bench.receive(stored(), number=1)
    bench.receive(stored(), stored(), number=1 + 65536)
    for _, waiting in bench.links.waiting:
        waiting.refuse(CONNECTION, 2, 0, 0)  # no room for the second batch, said to all who wait
        waiting.refuse(7, 1, 1, 1)  # a client's
        waiting.confirmed()
    assert bench.answers() == [(1, []), (65537, [(0, 1)])]
    bench.links.waiting.clear()
    bench.receive(stored(), number=3)
    bench.links.waiting[0][1].lost()
    bench.links.waiting[1][1].confirmed()
    assert bench.answers() == [(3, [(0, 0)])]


def test_what_cannot_be_published_is_left_with_its_shard_and_the_next_batch_goes(
    bench: Bench,
) -> None:
    bench.receive(stored()[:-1], number=1)
    assert bench.answers() == [(1, [(0, 0)])]
    bench.receive(stored("nowhere"), number=2)
    assert bench.answers() == [(2, [])]


def test_nothing_leaves_of_a_batch_of_which_a_message_cannot_be_published(bench: Bench) -> None:
    bench.receive(stored("to.a"), stored("to.c"), stored()[:-1], number=1)
    assert bench.answers() == [(1, [(0, 2)])]
    assert bench.links.packed(0) == bench.links.packed(1) == [] and not bench.links.waiting


def test_who_insists_hears_which_were_refused(bench: Bench) -> None:
    bench.receive(stored("to.a"), number=1, insist=True)
    bench.receive(*[stored("to.a")] * 5, number=2, insist=True)
    message = bench.links.packer.take(1, 0, 1, 1, 1)
    assert message is not None
    runs = [codec.run_of(message, ordinal) for ordinal in range(6)]
    assert runs == [(CONNECTION, 1, 1)] + [(CONNECTION, 2, seq) for seq in range(2, 7)]
    _, waiting = bench.links.waiting[1]
    for connection, channel, seq in (runs[1], runs[3], runs[4]):
        waiting.refuse(connection, channel, seq, seq)
    waiting.confirmed()
    assert bench.answers() == [(2, [(0, 0), (2, 3)])]


def test_where_one_of_several_queues_is_full_the_others_are_not_filled_with_repetitions(
    bench: Bench,
) -> None:
    bench.receive(stored("all"), insist=True)
    for shard in range(2):
        message = bench.links.packer.take(shard, 0, 1, 1, 1)
        assert message is not None and codec.run_of(message, 0) == (CONNECTION, 1, 0)


def test_a_shard_that_began_anew_is_not_answered(bench: Bench) -> None:
    bench.receive(stored("to.a"))
    bench.links.links[0].epoch = 2
    bench.links.waiting[0][1].confirmed()
    assert not bench.answers()


def test_a_copy_for_a_durable_queue_waits_for_the_disk_whatever_the_message_is(
    bench: Bench,
) -> None:
    for key, needs in (("to.a", True), ("to.c", False)):
        bench.receive(stored(delivery_mode=1), key=key)
        message = bench.links.packer.take(1, 0, 1, 1, 1)
        assert message is not None and codec.read_publish(message).needs_sync is needs


def test_where_headers_decide_each_goes_its_own_way(bench: Bench) -> None:
    bench.receive(
        stored(headers={"x-first-death-queue": "other", "x-death": []}), stored(), exchange="heads"
    )
    ((*_, ids, messages, _),) = bench.links.packed(1)
    assert ids == (11,) and len(messages) == 1 and bench.lettering.dropped == 1


def test_a_round_without_a_reject_ends_at_the_queue_it_would_come_back_to(bench: Bench) -> None:
    bench.receive(stored(), key="source", exchange="")
    assert bench.answers() == [(70_000, [])] and bench.lettering.dropped == 1
    bench.receive(stored(), key="source", exchange="", reason="rejected")
    ((*_, ids, _, _),) = bench.links.packed(0)
    assert ids == (10,)


def test_a_batch_of_a_vhost_that_is_gone_is_dropped(bench: Bench) -> None:
    bench.catalog.apply(VhostDelete("/"))
    bench.receive(stored())
    assert bench.answers() == [(70_000, [])] and bench.lettering.dropped == 1


def test_a_batch_of_a_process_that_is_gone_is_not_published(bench: Bench) -> None:
    batch = wire.DeadLetters(1, "/", "source", "expired", "dlx", "to.a", False, 1, stored())
    bench.lettering.receive(0, batch)
    bench.links.links[0].epoch = 2
    assert not bench.lettering.publish_next() and not bench.lettering.publish_next()
    assert bench.links.packed(1) == [] and not bench.answers()


@pytest.mark.parametrize("reason", ["expired", DUE])
def test_a_missing_exchange_is_told_once_and_no_exchange_is_not_told(
    bench: Bench, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.receive(stored(), exchange=None, reason=reason)
    assert caplog.messages == []
    for _ in range(2):
        bench.receive(stored(), exchange="none", reason=reason)
    (warning,) = caplog.messages
    assert "there is no exchange 'none'" in warning and bench.lettering.dropped == 3


def test_a_queue_that_its_shard_knows_by_number_is_named_in_what_the_message_went_through(
    bench: Bench,
) -> None:
    bench.receive(stored(), key="to.a", queue=10)
    ((*_, (message,), _),) = bench.links.packed(1)
    ((death,),) = ((properties.read(contents.read_stored(message)[2]).headers or {})["x-death"],)
    assert death["queue"] == "source"


@pytest.mark.parametrize(
    ("delay", "queue", "ttl"), [(5000, 15, 0), (-5000, 11, NO_TTL)], ids=["waits", "has waited"]
)
def test_a_dead_letter_for_an_exchange_that_delays_waits_if_it_can(
    bench: Bench, delay: int, queue: int, ttl: int
) -> None:
    bench.catalog.apply(
        ExchangePut("/", "late", "x-delayed-message", arguments={"x-delayed-type": "direct"})
    )
    bench.catalog.apply(QueuePut("/", "amq.delayed.late", 15, 1))
    bench.catalog.apply(BindingPut("/", "late", "queue", "a", "all", {}))
    bench.receive(stored(headers={"x-delay": delay}), exchange="late")
    ((_, found, _, _, ids, (_,), _),) = bench.links.packed(1)
    assert (ids, found) == ((queue,), ttl)


def test_a_copy_for_a_stream_has_no_bcc_which_a_queue_keeps(bench: Bench) -> None:
    for name, number, kind in (("s", 17, {"x-queue-type": "stream"}), ("b", 12, {})):
        bench.catalog.apply(QueuePut("/", name, number, 1, True, False, "", kind))
        bench.catalog.apply(BindingPut("/", "dlx", "queue", name, f"bcc.{name}", {}))
        bench.receive(stored(f"bcc.{name}", headers={"BCC": ["nowhere"]}))
        ((*_, (message,), _),) = bench.links.packed(1)
        assert ("BCC" in (properties.read(contents.read_stored(message)[2]).headers or {})) is (
            name == "b"
        )
