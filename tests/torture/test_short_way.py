"""The short way of plain messages shows clients what the way of Python shows them, for longer.

The client suites are in `shared/suites` of a folder above the project, or where SUITES says. They
keep what they install in SUITES_CACHE.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import pytest

from tests.clients.test_short_way import compare
from tests.support.both_ways import Way, both_ways
from tests.support.conversations import CONVERSATIONS
from tests.support.random_conversation import random_conversation
from tests.support.suite_runs import SuiteRun, compared, run_suite

pytestmark = [pytest.mark.torture, pytest.mark.broker, pytest.mark.timeout(7200)]

SUITES = Path(os.environ.get("SUITES", Path(__file__).parents[3] / "shared" / "suites"))
CACHE = Path(os.environ.get("SUITES_CACHE", Path(tempfile.gettempdir()) / "shardmq-suites"))


@pytest.mark.parametrize("front_doors", [1, 0, 2])
def test_random_conversations_are_the_same_both_ways(
    front_doors: int, tmp_path: Path, seeds: range
) -> None:
    with both_ways(tmp_path, front_doors=front_doors) as ways:
        for seed in seeds:
            try:
                compare(ways, random_conversation(seed))
            except BaseException:
                print(f"to see it again: make torture ARGS='--seed {seed} --histories 1 -k ways'")
                raise


@pytest.mark.parametrize("front_doors", [0, 2])
def test_written_conversations_are_the_same_both_ways(front_doors: int, tmp_path: Path) -> None:
    with both_ways(tmp_path, front_doors=front_doors) as ways:
        for conversation in CONVERSATIONS:
            print(conversation.__name__)
            compare(ways, conversation)


@pytest.mark.parametrize("suite", sorted(SUITES.glob("run-*.sh")), ids=lambda path: path.stem)
def test_a_client_suite_sees_the_same_both_ways(suite: Path, tmp_path: Path) -> None:
    if suite.stem == "run-all":
        pytest.skip("runs the others")
    CACHE.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count()

    def play(environment: dict[str, str]) -> SuiteRun:
        number = next(numbers)
        way = Way(tmp_path / f"data-{number}", environment)
        try:
            return run_suite(suite, way, tmp_path / f"out-{number}", CACHE)
        finally:
            way.close()

    judgement = compared(play)
    print(f"\n{suite.stem}: {judgement}")
    assert not judgement.faults, "\n".join(judgement.faults)
