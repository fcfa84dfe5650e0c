"""An exchange that chooses one queue per key is packed without a cached route per key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.amqp import frames
from shardmq.broker.routing.hashing import jump_weighted, key_hash, modulus, rendezvous_weighted
from shardmq.shardd.wire import codec
from shardmq.shardd.wire.codec import (
    CHANCE,
    JUMP,
    MODULUS,
    NOWHERE,
    RENDEZVOUS,
    TARGETS,
    Routes,
    winners,
)
from shardmq.shardd.wire.lane import joined

MEMBERS = [(weight, seed, shard, queue, False) for weight, seed, shard, queue in
           ((1, 11, 0, 100), (1, 22, 1, 200), (3, 33, 0, 300), (1, 44, 1, 400))]  # fmt: skip


def packed(how: int, keys: list[bytes], exchange: bytes = b"spread") -> dict[bytes, set[int]]:
    """Return the queues that each key's messages were given to."""
    routes, packing = Routes(7), codec.Packer(2)
    assert routes.learn_spread(b"spread", how, MEMBERS)
    lines = [bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + b"\0" for key in keys]
    buffer, table = b"", b""
    for line in lines:
        table += frames.row(
            len(buffer), len(line), 1, len(buffer) + len(line), 0, 0, 0, (0xFFFFFFFF, 0, 0xFF, 0)
        )
        buffer += line
    at, why = packing.pack(routes, buffer, table, 0, 9, 1, 1000)
    if why == codec.UNKNOWN:
        return {}
    assert (at, why) == (len(keys), codec.DONE)
    found: dict[bytes, set[int]] = {}
    for shard in (0, 1):
        message = packing.take(shard, 0, 1, 1, 1)
        if message is not None:
            for queues, stored in records_of(codec.read_publish(message).records):
                for one in stored:
                    found.setdefault(key_of(one), set()).update(queues)
    return found


def records_of(records: memoryview) -> list[tuple[list[int], list[bytes]]]:
    """(queue ids, stored messages) of each record."""
    found, at = [], 0
    while at < len(records):
        length = int.from_bytes(records[at : at + 4], "little")
        messages = int.from_bytes(records[at + 20 : at + 24], "little")
        queues = int.from_bytes(records[at + 24 : at + 26], "little")
        ids = [
            int.from_bytes(records[at + 28 + 4 * i : at + 32 + 4 * i], "little")
            for i in range(queues)
        ]
        place, stored = at + 28 + 4 * queues, []
        for _ in range(messages):
            body, props = (
                int.from_bytes(records[place + i : place + i + 4], "little") for i in (0, 4)
            )
            line = 9 + records[place + 8]
            size = line + 1 + records[place + line] + props + body
            stored.append(bytes(records[place : place + size]))
            place += size
        found.append((ids, stored))
        at += length
    return found


def key_of(stored: bytes) -> bytes:
    at = 9 + stored[8]
    return stored[at + 1 : at + 1 + stored[at]]


def test_each_key_goes_where_plain_routing_says() -> None:
    keys = [b"key-%d" % i for i in range(500)] + [b"", b"x" * 255]
    chosen = packed(RENDEZVOUS, keys)
    lots = [(weight, seed) for weight, seed, *_ in MEMBERS]
    for key in keys:
        assert chosen[key] == {MEMBERS[rendezvous_weighted(key_hash(key), lots)][3]}
    chosen = packed(JUMP, keys)
    for key in keys:
        assert chosen[key] == {
            MEMBERS[jump_weighted(key_hash(key), [weight for weight, *_ in MEMBERS])][3]
        }
    chosen = packed(MODULUS, keys)
    for key in keys:
        assert chosen[key] == {MEMBERS[modulus(key_hash(key), 4)][3]}


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1]), max_size=40),
    st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 7]), st.integers(0, 2**64 - 1) | st.sampled_from([5, 6])
        ),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
def test_many_keys_at_once_go_where_each_alone_would(
    hashes: list[int], members: list[tuple[int, int]], equal: bool
) -> None:
    if equal:
        members = [(1, seed) for _, seed in members]
    assert winners(hashes, members) == [rendezvous_weighted(hashed, members) for hashed in hashes]


@pytest.mark.parametrize("count", [2047, 2048, 2049])
def test_the_last_of_very_many_is_chosen_like_the_first(count: int) -> None:
    members = [(1, seed) for seed in range(count)]
    hashes = [key_hash(b"%d" % i) for i in range(12)] + [
        best_for(members[0][1]),
        best_for(members[-1][1]),
    ]
    found = winners(hashes, members)
    assert found == [rendezvous_weighted(hashed, members) for hashed in hashes]
    assert found[-2:] == [0, count - 1]


def best_for(seed: int) -> int:
    """Return the hash that draws the highest number with this seed.

    The mixing steps are inverted for that.
    """
    bits = 2**64 - 1
    bits ^= bits >> 33
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        bits = bits * pow(factor, -1, 2**64) % 2**64
        bits ^= bits >> 33
    return bits ^ seed


KEYS = st.binary(max_size=12) | st.sampled_from([b"", b"k", b"12345678", b"123456789", b"x" * 255])


@given(
    st.lists(KEYS, min_size=1, max_size=70),
    st.sampled_from([RENDEZVOUS, MODULUS, JUMP]),
    st.lists(st.sampled_from([1, 1, 1, 4]), min_size=1, max_size=12),
    st.booleans(),
)
def test_keys_of_all_lengths_go_where_plain_routing_says(
    keys: list[bytes], how: int, weights: list[int], confirms: bool
) -> None:
    """Also where there is nothing to read behind the last one."""
    if how == MODULUS:
        weights = [1] * len(weights)
    lots = [(weight, 77 * i) for i, weight in enumerate(weights)]
    plain = {
        RENDEZVOUS: lambda hashed: rendezvous_weighted(hashed, lots),
        MODULUS: lambda hashed: modulus(hashed, len(lots)),
        JUMP: lambda hashed: jump_weighted(hashed, weights),
    }[how]
    routes, packing = Routes(7), codec.Packer(2)
    members = [(weight, seed, i % 2, i, False) for i, (weight, seed) in enumerate(lots)]
    assert routes.learn_spread(b"spread", how, members)
    buffer, table = read_of([line_of(b"spread", key) for key in keys])
    assert packing.pack(routes, buffer, table, 0, 9, confirms, 1000) == (len(keys), codec.DONE)
    found: dict[int, list[bytes]] = {}
    for message in (packing.take(shard, 0, 1, 1, 1) for shard in (0, 1)):
        for (queue,), stored in records_of(codec.read_publish(message).records) if message else ():
            found.setdefault(queue, []).extend(map(key_of, stored))
    wanted: dict[int, list[bytes]] = {}
    for key in keys:
        wanted.setdefault(plain(key_hash(key)), []).append(key)
    assert found == wanted


def test_an_exchange_that_sends_all_the_same_way_does_not_look_at_the_key() -> None:
    routes, packing = Routes(7), codec.Packer(2)
    assert routes.learn_exchange(b"all", TARGETS, [(0, [1, 2]), (1, [3])], False)
    assert routes.learn_exchange(b"none", NOWHERE, [], False)
    routes.learn(line_of(b"one", b"k"), TARGETS, [(0, [2])], False)
    lines = [line_of(exchange, b"k") for exchange in (b"all", b"one", b"none", b"all")] + [
        line_of(b"all", b"other")
    ]
    buffer, table = read_of([*lines, line_of(b"none", b"k", b"\1")])
    assert packing.pack(routes, buffer, table, 0, 9, 1, 1000) == (5, codec.UNROUTABLE)
    found = []
    for shard in (0, 1):
        message = packing.take(shard, 0, 1, 1, 1)
        assert message is not None
        records = records_of(codec.read_publish(message).records)
        found.append([(queues, [key_of(one) for one in stored]) for queues, stored in records])
    assert found == [
        [([1, 2], [b"k"]), ([2], [b"k"]), ([1, 2], [b"k", b"other"])],
        [([3], [b"k", b"k", b"other"])],
    ]
    routes.clear()
    assert packing.pack(routes, buffer, table, 0, 9, 1, 1000) == (0, codec.UNKNOWN)


def read_of(lines: list[bytes]) -> tuple[bytes, bytes]:
    """Return a read of publishes without properties and bodies, and its table."""
    buffer, table = b"", b""
    for line in lines:
        table += frames.row(
            len(buffer), len(line), 1, len(buffer) + len(line), 0, 0, 0, (0xFFFFFFFF, 0, 0xFF, 0)
        )
        buffer += line
    return buffer, table


def test_by_chance_the_same_key_goes_everywhere() -> None:
    assert packed(CHANCE, [b"k"] * 200)[b"k"] == {100, 200, 300, 400}


def test_neighbours_with_one_key_stay_together() -> None:
    assert all(
        len(queues) == 1 for queues in packed(RENDEZVOUS, [b"a"] * 50 + [b"b"] * 50).values()
    )


@pytest.mark.parametrize("exchange", [b"sprea", b"spread2", b""])
def test_an_exchange_of_another_name_is_not_meant(exchange: bytes) -> None:
    assert packed(RENDEZVOUS, [b"k"], exchange) == {}


def test_a_cleared_memory_knows_no_spread() -> None:
    routes = Routes()
    assert routes.learn_spread(b"e", MODULUS, MEMBERS)
    routes.clear()
    counted = Counter(routes.learn_spread(b"e%d" % i, MODULUS, MEMBERS) for i in range(70))
    assert counted == {True: 64, False: 6}


@given(
    st.lists(
        st.sampled_from(["spread", "spread", "spread", "other", "plain"]), min_size=1, max_size=80
    ),
    st.sampled_from([RENDEZVOUS, MODULUS, JUMP, CHANCE]),
    st.sampled_from([0, 1, 1000]),
    st.integers(0, 3),
)
def test_each_queue_keeps_its_order_and_each_message_its_number(
    exchanges: list[str], how: int, first_seq: int, start: int
) -> None:
    start = min(start, len(exchanges) - 1)
    routes, packing = Routes(7), codec.Packer(2)
    assert routes.learn_spread(b"spread", how, MEMBERS)
    assert routes.learn_spread(b"other", how, MEMBERS[1:])
    lines = [
        line_of(exchange.encode(), b"%d" % number) for number, exchange in enumerate(exchanges)
    ]
    for line, exchange in zip(lines, exchanges, strict=True):
        if exchange == "plain":  # into a queue that is a member of the spreads too
            routes.learn(line, TARGETS, [(1, [200])], False)
    buffer, table = b"", b""
    for line in lines:
        table += frames.row(
            len(buffer), len(line), 1, len(buffer) + len(line), 0, 0, 0, (0xFFFFFFFF, 0, 0xFF, 0)
        )
        buffer += line
    assert packing.pack(routes, buffer, table, start, 9, first_seq, 1000) == (
        len(lines),
        codec.DONE,
    )
    came: list[int] = []
    for shard in (0, 1):
        message = packing.take(shard, 0, 1, 1, 1)
        if message is None:
            continue
        by_queue: dict[int, list[int]] = {}
        ordinal = 0
        for queues, stored in records_of(codec.read_publish(message).records):
            for one in stored:
                number = int(key_of(one))
                by_queue.setdefault(queues[0], []).append(number)
                seq = first_seq + number - start if first_seq else 0
                assert codec.run_of(message, ordinal) == (9, 1, seq)
                ordinal += 1
        assert all(numbers == sorted(numbers) for numbers in by_queue.values())
        came += [number for numbers in by_queue.values() for number in numbers]
    assert sorted(came) == list(range(start, len(lines)))


def line_of(exchange: bytes, key: bytes, bits: bytes = b"\0") -> bytes:
    return bytes([len(exchange)]) + exchange + bytes([len(key)]) + key + bits


def test_of_random_keys_each_queue_has_one_record_not_one_for_each_message() -> None:
    routes, packing = Routes(7), codec.Packer(2)
    assert routes.learn_spread(b"spread", RENDEZVOUS, MEMBERS)
    buffer, table = b"", b""
    for line in (line_of(b"spread", b"key-%d" % i) for i in range(500)):
        table += frames.row(
            len(buffer), len(line), 1, len(buffer) + len(line), 0, 0, 0, (0xFFFFFFFF, 0, 0xFF, 0)
        )
        buffer += line
    assert packing.pack(routes, buffer, table, 0, 9, 1, 1000) == (500, codec.DONE)
    messages = [packing.take(shard, 0, 1, 1, 1) for shard in (0, 1)]
    assert [
        len(records_of(codec.read_publish(message).records)) for message in messages if message
    ] == [2, 2]


@pytest.mark.parametrize("confirms", [0, 1])
@pytest.mark.parametrize("rows", [1, 2, 8, 31])
def test_small_reads_go_on_with_the_records_of_those_before(rows: int, confirms: int) -> None:
    routes, packing = Routes(7), codec.Packer(4)
    assert routes.learn_spread(b"spread", MODULUS, [(1, 0, i, i, False) for i in range(4)])
    buffer, table = read_of([line_of(b"spread", b"%d" % i) for i in range(rows)])
    for turn in range(100):
        assert (
            packing.pack(
                routes, buffer, table, 0, 9, confirms + turn * rows if confirms else 0, 1000
            )[0]
            == rows
        )
    messages = [packing.take(shard, 0, 1, 1, 1) for shard in range(4)]
    records = [records_of(codec.read_publish(message).records) for message in messages if message]
    assert {len(found) for found in records} == {1}
    assert sum(len(stored) for ((_, stored),) in records) == 100 * rows


Sent = tuple[bytes, int, int, int, int]  # key, ttl, delivery mode, priority, bytes of the body
SENT = st.tuples(
    st.sampled_from([b"a", b"bb", b"ccc", b"a key that is longer than most others are"]),
    st.sampled_from([0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 50]),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([0xFF, 0xFF, 0xFF, 3]),
    st.sampled_from([0, 1, 7, 40, 300, 20_000, 90_000]),
)


def frames_of(sent: list[Sent]) -> tuple[bytes, bytes]:
    """Return a read of publishes to `spread`, and its table.

    Each body has the number of its message.
    """
    buffer, table = bytearray(), b""
    for number, (key, ttl, mode, priority, size) in enumerate(sent):
        line = line_of(b"spread", key)
        at = len(buffer)
        body = (b"%d " % number * size)[:size]
        buffer += line + b"\0\0" + b"\3\0\1" + size.to_bytes(4, "big") + body + b"\xce"
        found = (ttl, mode, priority, 0)
        table += frames.row(at, len(line), 1, at + len(line), 2, at + len(line) + 2, size, found)
    return bytes(buffer), table


@given(st.lists(SENT, min_size=1, max_size=60), st.booleans(), st.integers(1, 4))
def test_each_queue_gets_its_messages_in_order_and_as_they_were_sent(
    sent: list[Sent], confirms: bool, times: int
) -> None:
    """Batches are kept while others are packed.

    Groups may be longer than a record may grow.
    """
    routes, packing = Routes(7), codec.Packer(2)
    assert routes.learn_spread(b"spread", MODULUS, MEMBERS)
    buffer, table = frames_of(sent)
    kept = []
    for turn in range(2):
        for _ in range(times):
            assert packing.pack(routes, buffer, table, 0, 9, confirms, 1000) == (
                len(sent),
                codec.DONE,
            )
        kept += [packing.take_parts(shard, 0, 1, 1, turn) for shard in (0, 1)]
    wanted: dict[int, list[tuple[bytes, int, bool, int]]] = {}
    for _ in range(2 * times):
        for number, (key, ttl, mode, priority, size) in enumerate(sent):
            stored = (
                size.to_bytes(4, "little")
                + (2).to_bytes(4, "little")
                + line_of(b"spread", key)[:-1]
                + b"\0\0"
            )
            one = (stored + (b"%d " % number * size)[:size], ttl, mode == 2, priority)
            wanted.setdefault(MEMBERS[modulus(key_hash(key), 4)][3], []).append(one)
    found: dict[int, list[tuple[bytes, int, bool, int]]] = {}
    for message in (joined(parts) for parts in kept if parts is not None):
        records, at = codec.read_publish(message).records, 0
        for (queue,), messages in records_of(records):
            head = records[at : at + 28]
            assert int.from_bytes(head[4:8], "little") == codec.crc32c(
                records[at + 8 : at + record_bytes(head)]
            )
            facts = (int.from_bytes(head[16:20], "little"), bool(head[27] & 1), head[26])
            found.setdefault(queue, []).extend((one, *facts) for one in messages)
            at += record_bytes(head)
    assert found == wanted


def record_bytes(head: memoryview) -> int:
    return int.from_bytes(head[:4], "little")


WANT_OF_MEMORY = """
import resource, sys
from shardmq.shardd.wire.codec import Packer
from shardmq.shardd.wire.codec import MODULUS, Routes
from tests.wire.test_spread import frames_of, line_of

routes, packing = Routes(7), Packer(2)
assert routes.learn_spread(b"spread", MODULUS, [(1, 0, i % 2, i, True) for i in range(8)])
facts = (0xFFFFFFFF, 2, 0xFF)
few, many = (frames_of([(b"%d" % i, *facts, size) for i in range(1200)]) for size in (0, 4000))
packing.pack(routes, *few, 0, 9, 0, 1000)
before = [(packing.pending(shard), packing.messages(shard)) for shard in (0, 1)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = resource.getrlimit(resource.RLIMIT_AS)
refused = 0
for more in range(0, 16 << 20, 512 << 10):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, room[1]))
    try:
        packing.pack(routes, *many, 0, 9, 0, 1000)
        break
    except MemoryError:
        refused += 1
        assert [(packing.pending(shard), packing.messages(shard)) for shard in (0, 1)] == before
    finally:
        resource.setrlimit(resource.RLIMIT_AS, room)
assert refused > 2, refused
for shard in (0, 1):
    sys.stdout.buffer.write(packing.take(shard, 0, 1, 1, 1))
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="its malloc does not fail, it ends the process",
)
def test_for_want_of_memory_nothing_of_a_read_stays() -> None:
    ended = subprocess.run([sys.executable, "-c", WANT_OF_MEMORY], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    out, sizes = ended.stdout, []
    while out:  # two batches, whole and true
        size = 40 + 24 * int.from_bytes(out[24:28], "little") + int.from_bytes(out[28:32], "little")
        batch = codec.read_publish(out[:size])
        at = 0
        while at < len(batch.records):
            length = record_bytes(batch.records[at : at + 4])
            told = int.from_bytes(batch.records[at + 4 : at + 8], "little")
            assert told == codec.crc32c(batch.records[at + 8 : at + length])
            at += length
        sizes.append(sum(len(stored) for _, stored in records_of(batch.records)))
        out = out[size:]
    assert sum(sizes) == 2400 and len(sizes) == 2
