"""The publishes of a read go to their shards, and the effects come back to the connection."""

from __future__ import annotations

from typing import Any

import pytest
from pamqp import commands, frame

from shardmq.broker.amqp import ConnectionException, Publishes, contents, properties
from shardmq.broker.front_door.publish.confirms import LOST
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.front_door.publish.publish import Publishing
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    PermissionDelete,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostDelete,
)
from shardmq.broker.model.permissions import INTERNAL_USER
from tests.support.fake_publishing import (
    NOW_MS,
    Links,
    Publisher,
    catalog,
    events_of,
    publishing_of,
)

A, B = ("", "a"), ("", "b")
NOWHERE = ("", "nobody")
HEADERS = ("headers", "")
ONE: dict[str, Any] = {"headers": {"one": 1}}
SHARD_0, SHARD_1 = 1, 2


class Door:
    """A front door with one client, whose channel 2 wants confirms."""

    def __init__(self, made: Catalog | None = None, **more: Any) -> None:
        self.links = Links()
        self.catalog = made or catalog()
        self.publishing: Publishing = publishing_of(self.catalog, self.links, **more)
        self.client = Publisher(self.publishing)

    def publish(self, *messages: Any) -> Published:
        """Publish the messages of one read: end, or (channel, end, properties, mandatory)."""
        full = [each if isinstance(each[0], int) else (1, each, {}, False) for each in messages]
        (event,) = events_of(full)
        return self.client.publish(event)

    def stored(self) -> list[tuple[tuple[int, ...], bytes]]:
        """Return (queue ids, body) of all that was packed since the last call."""
        return [
            (queues, contents.read_stored(stored)[3]) for _, queues, stored in self.links.stored()
        ]

    def change(self, *changes: Any, something_went: bool = True) -> None:
        for change in changes:
            self.catalog.apply(change)
        self.publishing.catalog_changed(something_went)

    def confirm_all(self) -> None:
        """Let the shards store what was packed; then the pass ends."""
        self.links.stored()
        waiting, self.links.waiting = self.links.waiting, []
        for each in waiting:
            each.confirmed()
        self.client.answer_confirms()

    def said(self) -> list[Any]:
        """Return the methods the client was written, bodies and headers left out."""
        data, found = b"".join(self.client.said), []
        self.client.said.clear()
        while data:
            size, _, what = frame.unmarshal(data)
            data = data[size:]
            if isinstance(what, commands.Basic.Ack | commands.Basic.Nack | commands.Basic.Return):
                found.append(what)
        return found


def acks(said: list[Any]) -> list[tuple[type, int, bool]]:
    return [(type(each), each.delivery_tag, getattr(each, "multiple", False)) for each in said]


# -- routes ----------------------------------------------------------------------------------------


def test_a_read_of_plain_publishes_feeds_its_shards_and_asks_for_nothing_else() -> None:
    door = Door()
    published = door.publish(A, B, ("direct", "k1"))
    assert published.fed == SHARD_0 | SHARD_1 and published.is_plain
    assert sorted(door.stored()) == [((1,), b"0"), ((1,), b"2"), ((2,), b"1"), ((2,), b"2")]
    assert door.publish(B).fed == SHARD_1
    assert door.client.channels[1].published == 4
    assert door.publishing._counts.received == 4


def test_a_route_is_looked_up_once_until_the_catalog_changes() -> None:
    door = Door()
    routes = door.client.route_cache.routes
    for _ in range(2):
        door.publish(A, A, B)
        assert len(routes) == 2
    door.change(QueuePut("/", "c", 3, 1), something_went=False)
    assert len(routes) == 0
    door.publish(A)
    assert len(routes) == 1


def test_a_queue_that_is_deleted_gets_nothing_more_though_its_route_was_learnt() -> None:
    door = Door()
    door.publish(A)
    door.stored()
    door.change(QueueDelete("/", "a"))
    assert door.publish(A).is_plain
    assert door.stored() == []
    assert door.publishing.unroutable_dropped == 1


def test_a_right_that_is_taken_counts_for_the_next_publish() -> None:
    door = Door()
    door.publish(A)
    door.change(PermissionDelete("/", "guest"))
    published = door.publish(A)
    assert [(number, error.code) for number, error in published.failed.items()] == [(1, 403)]


def test_users_of_a_vhost_learn_routes_of_their_own_and_share_counts() -> None:
    door = Door()
    assert door.publishing.route_cache("/", "guest") is door.client.route_cache
    other = door.publishing.route_cache("/", "other")
    assert other is not door.client.route_cache
    door.publish(A)
    assert len(other.routes) == 0
    assert door.publishing.exchange_counts.report() == [("/", "", 1, 1)]


def test_what_is_packed_next_belongs_to_the_clients_vhost() -> None:
    door = Door()
    door.links.use_vhost("another")
    door.publish(A)
    assert door.links.vhost == "/"


def test_messages_are_stamped_once_if_the_front_door_does_so() -> None:
    door = Door(set_timestamp=True)
    (event,) = events_of([(1, A, {}, False)] * 2)
    assert door.client.publish(event, lambda: True).is_plain
    assert event.done == event.count
    for _, _, stored in door.links.stored():
        assert (
            int(properties.read(contents.read_stored(stored)[2]).timestamp or 0) == NOW_MS // 1000
        )


# -- errors ----------------------------------------------------------------------------------------

CASES = [
    (("no such", ""), {}, 404, "no exchange 'no such' in vhost '/'"),
    (("internal", ""), {}, 403, "cannot publish to internal exchange 'internal' in vhost '/'"),
    (A, {"user_id": "another"}, 406, "user_id property set to 'another'"),
    (A, {"expiration": "-5"}, 406, "invalid expiration '-5'"),
    (HEADERS, {"headers": {"CC": 5}}, 406, "unacceptable_type_in_header"),
    (A, {"headers": {"x-producer-id": "p", "x-sequence": "one"}}, 406, "x-sequence"),
    (A, {"reply_to": "amq.rabbitmq.reply-to"}, 406, "fast reply consumer does not exist"),
    (("late", ""), {"headers": {"x-delay": "soon"}}, 406, "invalid header 'x-delay'"),
]


@pytest.mark.parametrize(("end", "props", "code", "text"), CASES)
def test_an_error_ends_its_channel_in_the_middle_of_a_read(
    end: tuple[str, str], props: dict[str, Any], code: int, text: str
) -> None:
    """Earlier messages are published, later ones of the channel are not; other channels go on."""
    door = Door(
        catalog(
            [
                ExchangePut("/", "internal", "fanout", internal=True),
                ExchangePut(
                    "/", "late", "x-delayed-message", arguments={"x-delayed-type": "fanout"}
                ),
                QueuePut("/", "amq.delayed.late", 5, 0),
                BindingPut("/", "late", "queue", "a", ""),
            ]
        )
    )
    published = door.publish(
        (1, A, {}, False),
        (1, end, props, False),
        (3, A, {}, False),
        (1, A, {}, False),
        (3, A, {}, False),
    )
    ((number, error),) = published.failed.items()
    assert (number, error.code) == (1, code) and text in str(error)
    assert [body for _, body in door.stored()] == [b"0", b"2", b"4"]
    assert published.fed == SHARD_0
    assert [channel.published for channel in door.client.channels.values()] == [0, 2]


def test_a_user_that_may_impersonate_others_names_them() -> None:
    door = Door(catalog([UserPut("guest", "", tags=["impersonator"])]))
    assert door.publish((1, HEADERS, {"user_id": "another", **ONE}, False)).is_plain
    assert len(door.stored()) == 1


def test_the_broker_itself_publishes_messages_of_any_user() -> None:
    door = Door(catalog([UserPut("another", "")]))
    door.client.user = INTERNAL_USER
    assert door.publish((1, HEADERS, {"user_id": "another", **ONE}, False)).is_plain
    assert len(door.stored()) == 1


def test_two_channels_may_fail_in_one_read() -> None:
    door = Door()
    published = door.publish(*[(channel, ("no such", ""), {}, False) for channel in (1, 3, 1, 3)])
    assert [*published.failed] == [1, 3]


def test_an_error_of_the_connection_ends_the_read() -> None:
    door = Door()
    door.change(VhostDelete("/"))
    (event,) = events_of([(1, A, {}, False), (3, A, {}, False)])
    published = door.client.publish(event)
    assert [*published.failed] == [1] and isinstance(published.failed[1], ConnectionException)
    assert event.done == event.count and door.stored() == []


def test_channels_that_are_closed_or_wait_are_left_out() -> None:
    door = Door()
    del door.client.channels[2]
    door.client.channels[3].is_open = False
    assert door.publish(*[(channel, A, {}, False) for channel in (1, 2, 3, 1)]).is_plain
    assert [body for _, body in door.stored()] == [b"0", b"3"]
    (event,) = events_of([(1, A, {}, False)])
    event.without = {1}
    assert door.client.publish(event).fed == 0 and event.done == 1


# -- messages that are decided about alone ---------------------------------------------------------


def test_a_message_is_routed_by_its_headers_and_its_further_keys() -> None:
    door = Door()
    cc = {"headers": {"CC": ["k2", 5], "BCC": ["k1"]}}
    assert (
        door.publish((1, HEADERS, ONE, False), (1, ("direct", "none"), cc, False)).fed
        == SHARD_0 | SHARD_1
    )
    assert sorted(door.stored()) == [((1,), b"0"), ((1,), b"1"), ((2,), b"1")]


def test_a_message_that_is_delayed_waits_in_the_queue_of_its_exchange() -> None:
    door = Door(
        catalog(
            [
                ExchangePut(
                    "/", "late", "x-delayed-message", arguments={"x-delayed-type": "fanout"}
                ),
                QueuePut("/", "amq.delayed.late", 5, 1),
                BindingPut("/", "late", "queue", "a", ""),
            ]
        )
    )
    published = door.publish(("late", ""), (1, ("late", ""), {"headers": {"x-delay": 1000}}, True))
    assert published.fed == SHARD_0 | SHARD_1 and not published.frames
    assert sorted(door.stored()) == [((1,), b"0"), ((5,), b"1")]


def test_a_mandatory_message_without_a_queue_is_returned_and_any_other_dropped() -> None:
    door = Door()
    published = door.publish(
        (1, NOWHERE, {}, True), (1, NOWHERE, {}, False), (1, HEADERS, {"headers": {}}, False)
    )
    assert published.fed == 0 and len(published.frames) == 1
    (returned,) = door.said()
    assert (returned.reply_code, returned.exchange, returned.routing_key) == (312, "", "nobody")
    assert door.publishing.unroutable_dropped == 2
    assert door.publishing._counts.returned == 1


def test_a_message_that_only_its_exchange_keeps_has_no_queue() -> None:
    kept = [
        ExchangePut("/", "keeps", "x-recent-history"),
        QueuePut("/", "amq.persistent.keeps", 6, 1, arguments={"x-queue-type": "stream"}),
    ]
    door = Door(catalog(kept))
    published = door.publish((1, ("keeps", "k"), {}, True))
    assert len(published.frames) == 1 and published.fed == SHARD_1
    assert door.publishing.exchange_counts.report() == [("/", "keeps", 1, 0)]


# -- confirms --------------------------------------------------------------------------------------


def test_publishes_of_a_read_are_acked_together_when_all_their_shards_have_them() -> None:
    door = Door()
    door.publish(*[(2, A, {}, False)] * 3, (2, B, {}, False))
    door.client.answer_confirms()
    assert door.said() == []
    door.confirm_all()
    assert acks(door.said()) == [(commands.Basic.Ack, 4, True)]
    assert door.publishing._counts.received_confirm == door.publishing._counts.confirmed == 4


def test_a_message_without_a_queue_is_acked_at_the_end_of_the_pass() -> None:
    door = Door()
    assert door.publish((2, NOWHERE, {}, False)).is_plain
    door.client.answer_confirms()
    assert acks(door.said()) == [(commands.Basic.Ack, 1, False)]


def test_acks_that_are_due_come_before_a_return_and_its_own_ack_behind() -> None:
    door = Door()
    door.publish((2, NOWHERE, {}, False), (2, NOWHERE, {}, True))
    door.client.answer_confirms()
    said = door.said()
    assert isinstance(said.pop(1), commands.Basic.Return)
    assert acks(said) == [(commands.Basic.Ack, 1, False), (commands.Basic.Ack, 2, False)]


def test_what_a_shard_refuses_is_nacked_alone() -> None:
    door = Door()
    door.publish(*[(2, A, {}, False)] * 3)
    for waiting in door.links.waiting:
        waiting.refuse(9, 3, 1, 3)  # another channel's
        waiting.refuse(9, 2, 2, 2)
    door.confirm_all()
    assert acks(door.said()) == [
        (commands.Basic.Ack, 1, False), (commands.Basic.Nack, 2, False),
        (commands.Basic.Ack, 3, False)
    ]  # fmt: skip


@pytest.mark.parametrize("in_sequence", [False, True])
def test_a_lost_publish_is_nacked_or_if_it_is_in_sequence_ends_the_channel(
    in_sequence: bool,
) -> None:
    door = Door()
    sequence = {"headers": {"x-producer-id": "p", "x-sequence": 1}}
    door.publish((2, A, sequence if in_sequence else {}, False), (2, A, {}, False))
    lost = list(door.links.waiting)
    assert {each.in_sequence for each in lost} == {in_sequence}
    for each in lost:
        each.lost()
    door.client.answer_confirms()
    door.client.answer_confirms()
    if in_sequence:
        ((number, text),) = door.client.failed
        assert number == 2 and LOST in text and door.said() == []
    else:
        assert {each[0] for each in acks(door.said())} == {
            commands.Basic.Nack
        } and not door.client.failed


def test_a_channel_that_is_gone_is_answered_nothing() -> None:
    door = Door()
    door.publish((2, A, {"headers": {"x-producer-id": "p", "x-sequence": 1}}, False))
    confirms = door.client.channels[2].confirms
    confirms.closed = True
    for each in list(door.links.waiting):
        each.lost()
    door.client.answer_confirms()
    assert door.said() == [] and door.client.failed == [] and confirms.failure is None


# -- time slices -----------------------------------------------------------------------------------


def test_a_slice_ends_behind_a_message_that_was_decided_about() -> None:
    door = Door()
    (event,) = events_of([(1, HEADERS, ONE, False)] * 3)
    for done in (1, 2, 3):
        published = door.client.publish(event, lambda: True)
        assert (event.done, published.fed) == (done, SHARD_0)
    assert door.publishing._counts.received == 3


def test_plain_publishes_are_one_slice() -> None:
    door = Door()
    door.publish(A)
    (event,) = events_of([(1, A, {}, False)] * 100)
    door.client.publish(event, lambda: True)
    assert event.done == 100


def test_an_error_before_a_slice_ends_is_said_with_the_slice() -> None:
    door = Door()
    (event,) = events_of([(1, ("no such", ""), {}, False), (3, A, {}, False), (1, A, {}, False)])
    published = door.client.publish(event, lambda: True)
    assert [*published.failed] == [1] and event.done == 1
    while event.done < event.count:
        assert not door.client.publish(event, lambda: True).failed
    assert [body for _, body in door.stored()] == [b"1"]


# -- exchanges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["direct", "fanout", "topic", "x-consistent-hash", "x-random", "x-modulus-hash"]
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_every_type_of_exchange_sends_by_its_learnt_route_what_it_sends_at_first(
    kind: str, rounds: int
) -> None:
    key = "1" if kind == "x-consistent-hash" else "k"
    door = Door(catalog([ExchangePut("/", "e", kind), BindingPut("/", "e", "queue", "a", key)]))
    for _ in range(rounds):
        assert door.publish(("e", "k")).fed == SHARD_0
        assert door.stored() == [((1,), b"0")]


def test_an_exchange_behind_another_is_found_and_its_alternate_too() -> None:
    changes = [
        ExchangePut("/", "first", "direct", arguments={"alternate-exchange": "rest"}),
        ExchangePut("/", "second", "fanout"),
        ExchangePut("/", "rest", "fanout"),
        BindingPut("/", "first", "exchange", "second", "k"),
        BindingPut("/", "second", "queue", "a", ""),
        BindingPut("/", "rest", "queue", "b", ""),
    ]
    door = Door(catalog(changes))
    for _ in range(2):
        door.publish(("first", "k"), ("first", "other"))
        assert door.stored() == [((1,), b"0"), ((2,), b"1")]
    door.change(ExchangeDelete("/", "second"))
    door.publish(("first", "k"))
    assert door.stored() == [((2,), b"0")]


def test_an_event_is_published_from_where_it_was_left() -> None:
    door = Door()
    (event,) = events_of([(1, A, {}, False)] * 3)
    event.done = 2
    assert isinstance(event, Publishes)
    door.client.publish(event)
    assert [body for _, body in door.stored()] == [b"2"]
