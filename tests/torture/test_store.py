"""The store's promises over many more random lives, and at a size that takes minutes to make."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shard_lives import live_some_lives
from tests.support.store_lives import LIVES
from tests.torture.big_store import MESSAGES

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
OPEN_SECONDS_MAX = {"clean": 5.0, "kill": 15.0}
# The entry itself, what doubling may leave unused, and the segments.
MEMORY_BYTES_MAX = 24.0


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
def test_every_promise_holds_through_random_lives(
    live: Callable[[int], None], seeds: range
) -> None:
    for seed in seeds:
        try:
            live(seed)
        except BaseException:
            print(
                f"to see it again: make torture ARGS='--seed {seed} --histories 1 -k "
                f"{live.__name__}'"
            )
            raise


def test_what_a_shard_confirms_is_there_in_its_next_life(seeds: range) -> None:
    for seed in seeds:
        try:
            live_some_lives(seed)
        except BaseException:
            print(f"to see it again: make torture ARGS='--seed {seed} --histories 1 -k shard'")
            raise


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_ten_million_messages_are_back_in_seconds(stop: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "store")
    with started("fill", directory, stop) as filling:
        assert filling.stdout is not None and filling.stdout.readline() == "filled\n"
        if stop == "kill":
            filling.kill()
    try:
        with started("open", directory) as opening:
            found = json.loads(opening.communicate()[0])
        memory = found["bytes"] / found["messages"]
        print(
            f"{stop}: {found['messages']} messages in {found['seconds']:.2f} s, {memory:.1f} bytes "
            "of memory each"
        )
        assert found["messages"] == MESSAGES
        assert found["seconds"] < OPEN_SECONDS_MAX[stop]
        assert memory < MEMORY_BYTES_MAX
    finally:
        # more than a gigabyte: not to be kept with the last three runs
        for path in Path(directory).iterdir():
            path.unlink()


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.torture.big_store", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
