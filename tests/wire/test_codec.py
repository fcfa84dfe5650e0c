"""A shard reads what a front door packs, in the order of each channel and queue."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.shardd.peers import refused_runs
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import CALLER, NOWHERE, TARGETS, Routes
from shardmq.shardd.wire.lane import joined
from tests.reference import wire as reference

SHARDS = 3
# From here on messages are left where they are.
LARGE = 32 << 10
# What a message weighs more for each queue of a shard but the first.
REFERENCE_BYTES = 4
# What is enough of that for one time slice.
PACK_WEIGHT_MAX = 64 << 10
# Where each key leads: (shard, queue ids), ...
ROUTES: dict[bytes, list[tuple[int, list[int]]]] = {
    b"one": [(0, [1])],
    b"other": [(0, [2])],
    b"two": [(1, [3, 4])],
    b"all": [(0, [1]), (1, [3]), (2, [5, 6, 7])],
    b"nowhere": [],
}

pieces = st.lists(st.binary(min_size=1, max_size=40), max_size=4).map(tuple)
facts = st.builds(
    reference.Facts,
    channel=st.just(1),
    exchange=st.sampled_from([b"", b"ex"]),
    key=st.sampled_from(list(ROUTES)),
    bits=st.just(0),
    props=st.sampled_from([b"\0\0", b"\x10\0\x02", b"\0\0" + b"p" * 30]),
    frames=pieces,
    ttl_ms=st.sampled_from([0xFFFFFFFF, 0, 5000]),
    delivery_mode=st.sampled_from([0, 1, 2]),
    priority=st.sampled_from([0xFF, 0, 9]),
    flags=st.sampled_from([0, 1]),
)


def line_of(fact: reference.Facts) -> bytes:
    return (
        bytes([len(fact.exchange)])
        + fact.exchange
        + bytes([len(fact.key)])
        + fact.key
        + bytes([fact.bits])
    )


def pack_all(
    packer: codec.Packer,
    routes: Routes,
    messages: list[reference.Facts],
    first_seq: int,
    lasting: bool = False,
) -> None:
    """As the front door does: learn what is unknown, go on behind it."""
    buffer, table = reference.read_of(messages)
    at = 0
    while at < len(messages):
        seq = first_seq + at if first_seq else 0
        at, why = packer.pack(routes, buffer, table, at, 77, seq, 1234, lasting)
        if why == codec.UNKNOWN:
            targets = ROUTES[messages[at].key]
            routes.learn(line_of(messages[at]), TARGETS if targets else NOWHERE, targets, True)


@given(st.lists(facts, max_size=40), st.sampled_from([0, 10]), st.integers(0, 40))
def test_every_publish_reaches_its_shards_in_order_with_its_facts(
    messages: list[reference.Facts], first_seq: int, forget_at: int
) -> None:
    packer, routes = codec.Packer(SHARDS), Routes()
    pack_all(packer, routes, messages[:forget_at], first_seq)
    routes.clear()
    pack_all(packer, routes, messages[forget_at:], first_seq + forget_at if first_seq else 0)
    for shard in range(SHARDS):
        expected = [
            (
                fact.ttl_ms,
                fact.priority,
                int(fact.delivery_mode == 2),
                tuple(ids),
                reference.stored(fact),
                number,
            )
            for number, fact in enumerate(messages)
            for target, ids in ROUTES[fact.key]
            if target == shard
        ]
        pending, weight = packer.pending(shard), packer.weight(shard)
        message = packer.take(shard, 5, 6, 7, 8)
        assert packer.pending(shard) == packer.weight(shard) == 0
        if message is None:
            assert expected == []
            continue
        assert envelope.read(message) == (wire.PUBLISH, 5, 6, 7, shard)
        read = codec.read_publish(message)
        assert (read.batch, read.messages) == (8, len(expected))
        assert weight == sum(REFERENCE_BYTES * (len(one[3]) - 1) for one in expected)
        assert read.weight == len(message) + weight  # both sides of a window count the same
        # the last may want its padding
        assert len(read.records) - 8 < pending - weight <= len(read.records)
        assert read.needs_sync == any(persistent for _, _, persistent, *_ in expected)
        found = []
        for stamp, ttl, priority, flags, ids, inner, _ in reference.records_of(bytes(read.records)):
            assert stamp == 1234
            found += [(ttl, priority, flags, ids, one) for one in inner]
        assert found == [one[:5] for one in expected]
        for ordinal, one in enumerate(expected):
            assert codec.run_of(message, ordinal) == (77, 1, one[5] + first_seq if first_seq else 0)
        for ordinals in (
            range(len(expected)),
            range(0, len(expected), 2),
            range(1, len(expected), 3),
        ):
            assert codec.runs_of(message, ordinals) == refused_runs(message, ordinals)
        known = dict.fromkeys(queue for one in expected for queue in one[3])
        assert read.queue_ids == list(known)
        assert packer.take(shard, 5, 6, 7, 9) is None


@given(
    st.lists(facts, max_size=5),
    st.lists(st.tuples(facts, st.integers(LARGE - 1, LARGE + 9)), min_size=1, max_size=3),
    st.lists(facts, max_size=5),
)
def test_what_is_left_where_it_is_makes_the_same_batch(
    before: list[reference.Facts],
    large: list[tuple[reference.Facts, int]],
    behind: list[reference.Facts],
) -> None:
    packers = [(codec.Packer(SHARDS), Routes(), lasting) for lasting in (False, True)]
    for packer, routes, lasting in packers:
        pack_all(packer, routes, before, 1)
        for number, (fact, size) in enumerate(large):
            one = dataclasses.replace(fact, frames=(bytes([number]) * size,))
            pack_all(packer, routes, [one], 1, lasting=lasting)
        pack_all(packer, routes, behind, 1)
    for shard in range(SHARDS):
        pending, taken = {packer.pending(shard) for packer, _, _ in packers}, []
        for packer, _, _ in packers:
            taken.append(packer.take(shard, 5, 6, 7, 8) or b"")
            assert packer.pending(shard) == 0
        assert _messages_of(taken[0]) == _messages_of(taken[1])
        # For each a record more, and one for what comes behind it.
        assert max(pending) - min(pending) <= 2 * len(large) * (28 + 4 * 4 + 8)


def _small(key: bytes) -> reference.Facts:
    return reference.Facts(1, b"", key, 0, b"\0\0", (b"x",), 0xFFFFFFFF, 0, 0xFF, 0)


@given(st.lists(st.sampled_from([0, 1, 2, 200, 5000]), min_size=1, max_size=4), st.data())
def test_no_more_goes_to_many_queues_at_once_than_is_enough_for_a_slice(
    queues: list[int], data: Any
) -> None:
    packer, routes = codec.Packer(2), Routes()
    chosen = data.draw(st.lists(st.sampled_from(range(len(queues))), min_size=1, max_size=2000))
    messages = [_small(b"%d" % number) for number in chosen]
    for number, count in enumerate(queues):
        ids = list(range(1, count + 1))
        targets = [(0, ids), (1, ids)] if count > 2 else [(0, ids)] if count else []
        routes.learn(
            line_of(_small(b"%d" % number)), TARGETS if targets else NOWHERE, targets, False
        )
    weights = [
        REFERENCE_BYTES * (n - 1) * (2 if n > 2 else 1) if n > 1 else 0
        for n in (queues[at] for at in chosen)
    ]
    buffer, table = reference.read_of(messages)
    at, stops = 0, []
    while at < len(messages):
        stop, why = packer.pack(routes, buffer, table, at, 77, 0, 1234)
        packed = weights[at:stop]
        assert sum(packed[:-1]) < PACK_WEIGHT_MAX  # it ends behind the first that makes it enough
        assert why == (codec.DONE if stop == len(messages) else codec.FULL)
        assert why == codec.DONE or sum(packed) >= PACK_WEIGHT_MAX
        stops.append(stop)
        at = stop
    assert len(stops) <= 1 + sum(weights) // PACK_WEIGHT_MAX


def _messages_of(message: bytes) -> list[Any]:
    """Of a batch, with their facts and confirm numbers: in which records they are is no matter."""
    if not message:
        return []
    found = []
    read = codec.read_publish(message)
    records, at = bytes(read.records), 0
    for stamp, ttl, priority, flags, ids, inner, crc in reference.records_of(records):
        length = int.from_bytes(records[at : at + 4], "little")
        assert crc == crc32c.crc32c(records[at + 8 : at + length])
        at += length
        found += [(stamp, ttl, priority, flags, ids, one) for one in inner]
    return [(one, codec.run_of(message, ordinal)) for ordinal, one in enumerate(found)]


@given(st.lists(facts, min_size=1, max_size=10))
def test_the_checksum_of_a_record_covers_everything_behind_it(
    messages: list[reference.Facts],
) -> None:
    packer = codec.Packer(SHARDS)
    pack_all(packer, Routes(), messages, 0)
    for shard in range(SHARDS):
        message = packer.take(shard, 0, 0, 0, 1)
        at, records = 0, bytes(codec.read_publish(message).records) if message else b""
        while at < len(records):
            length, crc = struct.unpack_from("<II", records, at)
            assert crc == crc32c.crc32c(records[at + 8 : at + length])
            at += length


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1023, 1024, 3071, 3072, 3073, 10_007])
def test_crc32c_is_the_castagnoli_polynomial(length: int) -> None:
    data = bytes((7 * i + i // 256) & 255 for i in range(length))
    assert codec.crc32c(data) == crc32c.crc32c(data)


def plain(**changes: Any) -> reference.Facts:
    start: dict[str, Any] = {
        "channel": 1, "exchange": b"", "key": b"one", "bits": 0, "props": b"\0\0",
        "frames": (b"x",), "ttl_ms": 0xFFFFFFFF, "delivery_mode": 0, "priority": 0xFF, "flags": 0,
    }  # fmt: skip
    return reference.Facts(**start | changes)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (plain(channel=2), codec.CHANNEL),
        (plain(key=b"unseen"), codec.UNKNOWN),
        (plain(flags=2), codec.ASK),
        (plain(flags=8), codec.ASK),
        (plain(key=b"asks"), codec.ASK),
        (plain(key=b"nowhere", bits=1), codec.UNROUTABLE),
    ],
)
def test_packing_stops_exactly_at_the_message_that_needs_a_decision(
    second: reference.Facts, why: int
) -> None:
    packer, routes = codec.Packer(1), Routes()
    routes.learn(line_of(plain()), TARGETS, [(0, [1])], False)
    routes.learn(line_of(plain(key=b"asks")), CALLER, [], False)
    routes.learn(line_of(plain(key=b"nowhere", bits=1)), NOWHERE, [], False)
    buffer, table = reference.read_of([plain(), second, plain()])
    assert packer.pack(routes, buffer, table, 0, 1, 0, 0) == (1, why)
    assert packer.messages(0) == 1


def test_many_routes_are_told_apart() -> None:
    packer, routes = codec.Packer(1), Routes()
    many = [plain(key=b"k%d" % i) for i in range(5000)]
    for number, fact in enumerate(many):
        routes.learn(line_of(fact), TARGETS, [(0, [number])], False)
    buffer, table = reference.read_of(many)
    assert packer.pack(routes, buffer, table, 0, 1, 0, 0) == (5000, codec.DONE)
    message = packer.take(0, 0, 0, 0, 1)
    assert message is not None
    assert codec.read_publish(message).queue_ids == list(range(5000))


def test_one_decided_message_is_a_run_of_its_own() -> None:
    packer = codec.Packer(2)
    message = reference.stored(plain(frames=(b"body",)))
    packer.add_stored(1, [4, 5], message, 9, 3, 21, 99, 1000, 7, True, True)
    assert packer.take_touched() == 2
    sent = packer.take(1, 0, 0, 0, 1)
    assert sent is not None
    read = codec.read_publish(sent)
    assert read.needs_sync
    assert [one[:6] for one in reference.records_of(bytes(read.records))] == [
        (99, 1000, 7, 1, (4, 5), [message])
    ]
    assert codec.run_of(sent, 0) == (9, 3, 21)


sections = st.lists(
    st.tuples(
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.booleans(),
        st.integers(0, 2**32 - 1),
        st.one_of(st.binary(max_size=50), st.integers(LARGE, LARGE + 9).map(bytes)),
        st.integers(0, 2**14 - 1),
        st.booleans(),
    ),
    max_size=8,
)


@given(sections)
def test_deliveries_come_out_as_they_went_in(given_sections: list[Any]) -> None:
    writer = codec.DeliveryWriter(1, 2, 3, 4)
    for section in given_sections:
        writer.add(*section)
    size = writer.size
    message = writer.take()
    assert size == len(message or b"")
    if message is None:
        assert not given_sections
        return
    assert envelope.read(message) == (wire.DELIVER, 1, 2, 3, 4)
    assert [
        (*one[:6], bytes(one[6]), *one[7:]) for one in codec.read_deliveries(message)
    ] == given_sections
    assert writer.take() is None


def test_large_deliveries_and_publishes_are_not_copied() -> None:
    writer = codec.DeliveryWriter(1, 2, 3, 4)
    small, large = b"s" * 9, b"l" * LARGE
    for blob in (small, large, small):
        writer.add(1, 1, 1, 1, False, 1, blob)
    parts = writer.take_parts()
    assert isinstance(parts, list) and sum(part is large for part in parts) == 1
    packer = codec.Packer(1)
    taken = []
    for body in (b"1", b"2"):
        message = reference.stored(plain(frames=(body * 4 * LARGE,)))
        packer.add_stored(0, [1], message, 9, 3, 21, 99, 1000, 7, True, True)
        taken.append((packer.take_parts(0, 0, 0, 0, 1), message))
    for parts, message in taken:  # what was packed later is not where the first is
        assert isinstance(parts, list)
        ((*_, found),) = [
            one[:6]
            for one in reference.records_of(bytes(codec.read_publish(joined(parts)).records))
        ]
        assert found == [message]


@given(st.binary(max_size=200))
def test_garbage_is_an_error_and_nothing_else(garbage: bytes) -> None:
    for read in (codec.read_publish, codec.read_deliveries, envelope.read, envelope.read_control):
        try:
            read(garbage)
        except (ValueError, envelope.WireError):
            pass  # refused, as it should be


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 3]), st.integers(0), st.integers(0)),
        max_size=5,
    )
)
def test_settles_come_out_as_they_went_in(ranges: list[tuple[int, int, int, int]]) -> None:
    small = [
        (consumer, kind, first % 2**64, last % 2**64) for consumer, kind, first, last in ranges
    ]
    assert envelope.read_settles(envelope.settles(1, 2, 3, 4, small)) == small
    assert envelope.read_confirmed(envelope.confirmed(1, 2, 3, 4, 99, small)) == (99, small)


def test_credit_larger_than_a_field_is_split() -> None:
    message = envelope.credit(1, 2, 3, 4, [(5, 2**33)])
    assert sum(count for _, count in envelope.read_credit(message)) == 2**33


def test_a_message_of_another_version_is_refused() -> None:
    message = bytearray(envelope.control(wire.CONTROLLER, 0, 0, 7, wire.Hello(1, True)))
    message[1] += 1
    said = (
        f"controller and shard 7 is of wire version {message[1]}, this process speaks "
        f"{wire.WIRE_VERSION}: restart"
    )
    with pytest.raises(envelope.WireError, match=said):
        envelope.read(message)


def test_a_batch_packed_for_one_process_of_a_shard_is_whole_for_the_next() -> None:
    packer = codec.Packer(1)
    made = []
    for epoch, batch in ((0, 0), (77, 1 << 40)):
        packer.add_stored(0, [1], bytes(8) + b"\0\1q", 9, 1, 5, 1000, 0xFFFFFFFF, 0xFF, True, True)
        made.append(packer.take(0, 3, 4, epoch, batch))
    first, second = made
    assert first is not None
    assert envelope.readdressed(first, 77, 1 << 40) == second


def test_a_batch_cannot_say_that_it_has_more_messages_than_fit() -> None:
    packer = codec.Packer(1)
    packer.add_stored(0, [1], bytes(8) + b"\0\1q", 9, 1, 5, 1000, 0xFFFFFFFF, 0xFF, True, True)
    message = bytearray(joined(packer.take(0, 3, 4, 0, 0) or ()))
    records = int.from_bytes(message[28:32], "little")
    message[32:36] = (records // 10).to_bytes(4, "little")
    codec.read_publish(message)
    message[32:36] = (records // 10 + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="fewer messages"):
        codec.read_publish(message)


def test_a_lent_body_is_not_looked_for_behind_the_batch() -> None:
    packer = codec.Packer(1)
    packer.add_stored(0, [1], bytes(8) + b"\0\1q", 9, 1, 5, 1000, 0xFFFFFFFF, 0xFF, True, True)
    message = bytearray(joined(packer.take(0, 3, 4, 0, 0) or ()))
    record = 40 + 24
    message[record : record + 4] = b"\xff\xff\xff\x7f"
    message[record + 24 : record + 26] = b"\xff\xff"
    message[record + 27] |= 16
    with pytest.raises(ValueError, match="wrong length"):
        codec.read_publish(message)
