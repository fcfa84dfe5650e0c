"""Direct replies go straight to a consumer at the same front door, or by its queue.

A reply that asks for the queue goes by it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pamqp import commands, frame

from shardmq.broker.amqp import contents, properties
from shardmq.broker.front_door.publish.replies import REPLIES_BYTES_MAX
from shardmq.broker.model.changes import QueuePut, VhostPut
from tests.publishing.test_publish import SHARD_0, Door
from tests.support.fake_publishing import Publisher, catalog, events_of

QUEUE = "amq.rabbitmq.reply-to.1"
REPLY = ("", QUEUE)


class Replying(Door):
    """A front door with a consumer of direct replies, and the client that publishes them."""

    def __init__(self) -> None:
        super().__init__(catalog([QueuePut("/", QUEUE, 7, 0)]))
        self.output = SimpleNamespace(pending=0)
        channel = SimpleNamespace(number=4, next_tag=1, delivered_auto=0)
        session = SimpleNamespace(
            id=8, user="guest", vhost="/", name="asking", frame_bytes_max=4096
        )
        client = SimpleNamespace(id=8, session=session, output=self.output)
        self.consumer: Any = SimpleNamespace(
            queue_id=7, queue_name=QUEUE, tag_bytes=b"tag", channel=channel, client=client
        )
        queue = self.catalog.queue("/", QUEUE)
        assert queue is not None
        self.replies = self.publishing._replies
        self.replies.add(self.consumer, queue)

    def delivered(self) -> list[tuple[int, bytes]]:
        """Return the delivery tags and bodies that the consumer was written."""
        data, found = b"".join(frames for _, frames in self.client.replied), []
        self.client.replied.clear()
        while data:
            size, number, what = frame.unmarshal(data)
            data = data[size:]
            assert number == 4
            if isinstance(what, commands.Basic.Deliver):
                found.append((what.delivery_tag, b""))
            elif hasattr(what, "value"):
                found[-1] = (found[-1][0], what.value)
        return found


def test_replies_of_a_read_are_handed_over_and_feed_no_shard() -> None:
    door = Replying()
    for first in (1, 3):
        published = door.publish(REPLY, REPLY)
        assert published.fed == 0 and not published.is_plain
        assert door.delivered() == [(first, b"0"), (first + 1, b"1")]
    assert door.stored() == []
    assert door.consumer.channel.delivered_auto == door.publishing._counts.delivered_auto == 4
    assert door.publishing.exchange_counts.report() == [("/", "", 4, 4)]


def test_a_reply_is_confirmed_at_the_end_of_the_pass() -> None:
    door = Replying()
    for tag in (1, 2):
        door.publish((2, REPLY, {}, False))
        door.client.answer_confirms()
        (ack,) = door.said()
        assert ack.delivery_tag == tag
    assert door.publishing._counts.received_confirm == 2


def test_a_reply_with_more_keys_is_handed_over_alone_and_without_bcc() -> None:
    door = Replying()
    published = door.publish((1, REPLY, {"headers": {"BCC": ["a"]}}, True))
    assert published.fed == SHARD_0 and not published.frames
    (reply,) = published.replies
    assert b"BCC" not in reply.frames
    assert door.delivered() == [(1, b"0")]
    assert door.stored() == [((1,), b"0")]


async def test_replies_go_by_the_queue_while_the_consumer_has_too_much_that_it_has_not_taken() -> (
    None
):
    door = Replying()
    door.publish(REPLY)
    door.output.pending = REPLIES_BYTES_MAX + 1
    assert door.publish(REPLY, REPLY).fed == SHARD_0
    assert door.stored() == [((7,), b"0"), ((7,), b"1")]
    assert door.delivered() == [(1, b"0")]


def test_what_one_read_hands_over_counts_before_it_is_written() -> None:
    """Nothing of a read is written before its end.

    The bytes that wait fill the memory as well.
    """
    door = Replying()
    requester = door.replies.here[7]
    (event,) = events_of([(1, REPLY, {"headers": {"BCC": ["a"]}}, False)] * 3)
    published = door.publishing.publish(
        door.client, door.client.route_cache, door.client.channels, event, 0
    )
    assert requester.unwritten_bytes == sum(len(reply.frames) for reply in published.replies) > 0
    door.client.carry_out(published)
    assert requester.unwritten_bytes == 0


async def test_a_reply_in_sequence_goes_by_the_queue_which_keeps_the_sequences() -> None:
    door = Replying()
    published = door.publish(
        (1, REPLY, {"headers": {"x-producer-id": "p", "x-sequence": 1}}, False)
    )
    assert published.fed == SHARD_0 and not published.replies
    assert [queues for queues, _ in door.stored()] == [(7,)]
    door.replies.here[7].close()


def test_a_consumer_that_leaves_gets_no_more_though_the_route_says_it_is_here() -> None:
    door = Replying()
    door.publish(REPLY)
    door.delivered()
    door.replies.remove(door.consumer)
    published = door.publish(REPLY)
    assert not published.replies and published.fed == SHARD_0
    assert door.stored() == [((7,), b"0")]


def test_who_asks_for_replies_gets_the_name_of_its_queue_into_the_message() -> None:
    door = Door()
    door.client.channels[1].reply_to = QUEUE
    ask = {"reply_to": "amq.rabbitmq.reply-to"}
    for end in (("", "a"), ("direct", "k1")):
        assert door.publish((1, end, ask, False), (1, end, ask, False)).is_plain
        found = [
            properties.read(contents.read_stored(stored)[2]).reply_to
            for *_, stored in door.links.stored()
        ]
        assert set(found) == {QUEUE}


def test_replies_are_copied_to_the_firehose_on_behalf_of_who_gets_them() -> None:
    door = Replying()
    door.catalog.apply(VhostPut("/", is_traced=True))
    door.publishing.catalog_changed()
    door.replies.tracing = SimpleNamespace(delivered=lambda *arguments: 2)  # type: ignore[assignment]
    assert isinstance(door.client, Publisher)
    published = door.publish(REPLY)
    assert [reply.fed for reply in published.replies] == [2] and published.fed == 0
