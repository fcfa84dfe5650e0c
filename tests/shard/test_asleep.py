"""A sleeping queue has no turn when messages arrive, and no client can tell.

It has no consumer, no limit and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmq.shardd.queues import Queue
from shardmq.shardd.queues.entry import OWN_LETTERS
from shardmq.shardd.wire import codec
from shardmq.shardd.wire import messages as m
from shardmq.shardd.wire.lane import joined
from tests.shard.test_shard import EPOCH, MESSAGE, Bench, read

ARGUMENTS = st.sampled_from(
    [
        {},
        {},
        {"x-max-length": 3},
        {"x-max-length-bytes": 9, "x-overflow": "reject-publish"},
        {"x-message-ttl": 20},
        {"x-expires": 50},
        {"x-max-priority": 4},
        {"x-max-length": 2, "x-dead-letter-exchange": "dead"},
        {"x-dead-letter-exchange": "dead"},
        {"x-consumer-timeout": 30},
        {"x-single-active-consumer": True},
    ]
)
ACT = st.one_of(
    st.tuples(
        st.just("publish"),
        st.integers(1, 4),
        st.sampled_from([0xFFFFFFFF, 0xFFFFFFFF, 15]),
        st.sampled_from([0, 0, OWN_LETTERS]),
    ),
    st.tuples(st.just("pass"), st.integers(1, 30)),
    st.sampled_from([("attach",), ("detach",), ("get",), ("purge",), ("turn",)]),
)


def played(arguments: dict[str, Any], acts: list[tuple[Any, ...]]) -> list[Any]:
    """Play the acts; return what the shard has sent and what it holds after each act."""
    bench = Bench(**arguments)
    shard, now, seen, request, batches = bench.shard, 1000, [], 10, 0
    for number, (what, *more) in enumerate(acts, 1):
        request += 1
        if what == "publish":
            packer = codec.Packer(1)
            count, ttl, marks = more
            for i in range(count):
                packer.add_stored(
                    0, [1], MESSAGE, 9, 1, number * 10 + i, now, ttl, 0xFF, True, False, marks=marks
                )
            batches += 1
            batch = packer.take(0, 0, 5, EPOCH, batches)
            assert batch is not None
            shard.receive(batch, now)
        elif what == "attach":
            bench.attach(consumer=number, no_ack=True)
        elif what == "detach":
            bench.tell(m.Detach(request, number - 1))
        elif what == "get":
            bench.tell(m.Get(request, 1, 1000 + number, 9, 1, True))
        elif what == "purge":
            bench.tell(m.Purge(request, 1))
        elif what == "pass":
            now += more[0]
        if what != "publish":  # else more comes in the same turn
            seen.append([(out.endpoint, read(joined(out.message))) for out in shard.turn_end(now)])
        queue = shard.queues.get(1)
        if queue is not None:
            counters = {name: getattr(queue.counters, name) for name in queue.counters.__slots__}
            seen.append(
                (
                    counters,
                    queue.backlog.ready_count,
                    queue.backlog.ready_bytes,
                    queue.next_due() if not shard.has_work else None,
                )
            )
    return seen


@contextmanager
def wide_awake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queue, "is_asleep", False)
        yield


@given(ARGUMENTS, st.lists(ACT, max_size=12))
@example({"x-max-length": 3}, [("publish", 4, 0xFFFFFFFF, 0), ("turn",)])
def test_a_queue_that_sleeps_does_what_it_would_do_awake(
    arguments: dict[str, Any], acts: list[tuple[Any, ...]]
) -> None:
    seen = played(arguments, acts)
    with wide_awake():
        assert played(arguments, acts) == seen


def test_a_plain_queue_without_consumers_sleeps_and_one_with_a_consumer_does_not() -> None:
    bench = Bench()
    bench.publish()
    assert not bench.shard.has_work
    bench.attach()
    bench.turn()
    bench.publish()
    assert bench.shard.has_work
