"""The fuzzer finds mistakes, tells the input, and finds none in what it runs over."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fuzzing
from tests.support.fuzz_targets import TARGETS
from tests.support.fuzzing import INPUT_BYTES_MAX, Target, changed, fuzz, last_input, run_in_process

INPUTS = 3000


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_no_input_is_too_bad(target: Target, request: pytest.FixtureRequest) -> None:
    assert fuzz(target, INPUTS, request.config.option.seed) > 5


def test_the_inputs_of_a_seed_are_always_the_same_and_bounded() -> None:
    def made() -> list[bytes]:
        chance, seeds = random.Random(3), [b"seed" * 900, b"other" * 100]
        return [changed(chance, seeds[n % 2], seeds) for n in range(500)]

    assert made() == made()
    assert len(set(made())) > 400
    assert max(map(len, made())) == INPUT_BYTES_MAX


def deep(data: bytes) -> int:
    """Return how far a number is right: each octet leads one branch deeper."""
    right = (0xCE, 0, 0xFF, 0)
    return next((n for n, octet in enumerate(right) if data[n : n + 1] != bytes([octet])), 4)


def test_an_input_that_does_something_new_leads_on() -> None:
    assert fuzz(Target("deep", (b"....",), deep), 100_000, 1) == 5


def test_a_twin_that_differs_is_found_and_the_input_is_kept(tmp_path: Path) -> None:
    def differ(data: bytes) -> None:
        assert deep(data) < 2, "differs"

    with pytest.raises(AssertionError, match="differs"):
        run_in_process(Target("wrong", (b"....",), deep, differ), 50_000, 1, tmp_path / "last")
    assert deep(last_input(tmp_path / "last")) >= 2


def test_a_process_that_crashes_leaves_its_input(tmp_path: Path) -> None:
    crashing = (
        "import os, sys; from pathlib import Path; from tests.support import fuzzing\n"
        "def run(data):\n    if data[:1] == b'\\xce': os.abort()\n    return 0\n"
        "fuzzing.run_in_process(fuzzing.Target('x', (b'....',), run), 100000, 1, Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", crashing, str(tmp_path / "last")],
        env={**os.environ, "PYTHONPATH": str(Path(fuzzing.__file__).parents[2])},
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == -6, done.stderr
    assert last_input(tmp_path / "last")[:1] == b"\xce"


def test_the_command_says_how_many_passed() -> None:
    command = [sys.executable, "-m", fuzzing.__name__, "settles", "--inputs", "2000", "--jobs", "2"]
    done = subprocess.run(
        command, cwd=Path(fuzzing.__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed"
