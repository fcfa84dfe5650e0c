"""Long histories of lent bodies and of shards that die: see tests/shard/test_lent.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.test_lent_memory import kill_rounds, started
from tests.shard.test_lent import Play

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]

STEPS = 5000
LIVES = 1000


def test_bodies_arrive_unchanged_and_all_memory_comes_back_for_long(
    tmp_path: Path, seeds: range
) -> None:
    for seed in seeds[:200]:
        print(f"to play the same history: make torture ARGS='--seed {seed} -k lent'")
        play = Play(tmp_path / str(seed), seed)
        for _ in range(STEPS):
            play.step()
        play.end()
        assert play.memory.held_bytes == 0


def test_a_thousand_kills_of_a_shard_leave_no_memory_behind(tmp_path: Path, seeds: range) -> None:
    play = Play(tmp_path, seeds[0])
    for _ in range(LIVES):
        for _ in range(20):
            play.step()
        play.send()
        play.begin()
    play.end()
    assert play.memory.held_bytes == 0


@pytest.mark.broker
def test_a_thousand_kills_of_real_processes_leave_no_memory_behind(
    tmp_path: Path, seeds: range
) -> None:
    for front_doors in (2, 0):
        directory = tmp_path / str(front_doors)
        directory.mkdir()
        broker = started(directory, front_doors=front_doors)
        try:
            kill_rounds(broker, seeds[0], LIVES // 2)
            broker.stop()
        finally:
            broker.clean_up()
