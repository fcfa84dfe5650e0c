"""A packer knows for which shards messages wait, whatever is asked of it in between."""

from __future__ import annotations

import random

import pytest

from shardmq.shardd.wire.codec import Packer

MESSAGE = bytes(8) + b"\0\1q"  # no body, no properties, the default exchange, the key q
NO_TTL, NO_PRIORITY = 0xFFFFFFFF, 0xFF


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_shards_wait_from_a_message_until_it_is_taken_or_dropped(
    shards: int, request: pytest.FixtureRequest
) -> None:
    random_ = random.Random(request.config.getoption("--seed"))
    packer, waiting, touched = Packer(shards), 0, 0
    for _ in range(2000):
        shard = random_.randrange(shards)
        match random_.randrange(4):
            case 0:
                packer.add_stored(
                    shard, [1], MESSAGE, 1, 1, 0, 0, NO_TTL, NO_PRIORITY, False, False
                )
                waiting |= 1 << shard
                touched |= 1 << shard
            case 1:
                assert (packer.take(shard, 0, 1, 1, 1) is not None) == bool(waiting >> shard & 1)
                waiting &= ~(1 << shard)
            case 2:
                packer.drop(shard)
                waiting &= ~(1 << shard)
            case _:
                assert packer.take_touched() == touched
                touched = 0
        if random_.random() < 0.5:
            assert packer.waiting() == waiting
