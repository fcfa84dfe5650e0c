"""Publishes to a queue with a consumer at this front door are left to the caller.

They come run by run; all others are packed.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.wire import codec
from shardmq.shardd.wire.codec import HERE, TARGETS, Routes
from tests.reference import wire as reference
from tests.wire.test_spread import records_of

QUEUES = {b"here": 7, b"there": 8, b"far": 9}
# exchange "", key, channel, in sequence
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([*QUEUES]), st.sampled_from([1, 1, 1, 2]), st.sampled_from([0, 0, 0, 2])
    ),
    max_size=20,
)


def routes() -> Routes:
    made = Routes()
    for key, queue in QUEUES.items():
        kind = TARGETS if key == b"far" else HERE
        made.learn(b"\0" + bytes([len(key)]) + key + b"\0", kind, [(0, [queue])], False)
    return made


def fact(key: bytes, channel: int, in_sequence: int, number: int) -> reference.Facts:
    props = b"\0\0"
    if in_sequence:
        table = b"\x0dx-producer-idS\0\0\0\x01p\x0ax-sequencel" + number.to_bytes(8, "big")
        props = b"\x20\0" + len(table).to_bytes(4, "big") + table
    flags = 64 if in_sequence else 0
    return reference.Facts(
        channel, b"", key, 0, props, (b"%04d" % number,), 0xFFFFFFFF, 0, 0xFF, flags
    )


@given(MESSAGES, st.sets(st.sampled_from([7, 8])), st.booleans())
def test_each_message_goes_one_way_and_each_queue_keeps_its_order(
    said: list[tuple[bytes, int, int]], by_shard: set[int], lasting: bool
) -> None:
    """`by_shard`: queues whose consumer is here, but takes no more."""
    buffer, table = reference.read_of(
        [fact(*message, number) for number, message in enumerate(said)]
    )
    known, packing = routes(), codec.Packer(1)
    at, far_queue = 0, 0
    near: dict[int, list[int]] = {7: [], 8: []}
    while at < len(said):
        at, why = packing.pack(known, buffer, table, at, 5, 0, 0, lasting, far_queue)
        far_queue = 0
        if why == codec.CHANNEL:
            continue
        if why == codec.DONE:
            assert at == len(said)
            break
        assert why == codec.NEAR
        queue, count = packing.near_queue, packing.near_count
        assert queue == QUEUES[said[at][0]]
        assert (count == 0) == bool(said[at][2])
        assert len(set(said[at : at + max(count, 1)])) == 1
        if count == 0 or queue in by_shard:
            far_queue = queue
            continue
        near[queue] += range(at, at + count)
        at += count
    packed: dict[int, list[int]] = {}
    message = packing.take(0, 0, 1, 1, 1)
    if message is not None:
        for queues, stored in records_of(codec.read_publish(message).records):
            packed.setdefault(queues[0], []).extend(int(one[-4:]) for one in stored)
    sequenced = {number for number, (_, _, in_sequence) in enumerate(said) if in_sequence}
    for queue in (7, 8, 9):
        mine = [number for number, (key, _, _) in enumerate(said) if QUEUES[key] == queue]
        gone_near = near.get(queue, [])
        assert sorted(gone_near + packed.get(queue, [])) == mine
        assert not set(gone_near) & sequenced
        assert gone_near == sorted(gone_near) and packed.get(queue, []) == sorted(
            packed.get(queue, [])
        )
        if queue in by_shard or queue == 9:
            assert not gone_near
