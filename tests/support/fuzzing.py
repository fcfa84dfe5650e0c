"""Give compiled modules inputs that nobody would send, millions of them.

    python -m tests.support.fuzzing [TARGET ...] [--inputs 10000000] [--seed N] [--jobs 2]
    python -m tests.support.fuzzing TARGET --again FILE          one input again
    make fuzz ARGS='--inputs 10000000'                           the same under an address sanitizer

A target is a row of `fuzz_targets.TARGETS`: right inputs, a function that runs the module over any
bytes, and one that compares the module with its slow twin. Inputs are made from the right ones by
a few random changes each. The function returns what the module did, in short; an input for which
this is new is kept, and is changed further. So the module is led into its rare branches.

Inputs are divided among processes. Each process writes an input into a file before the module sees
it, so the file has the last input of a process that crashed.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

INPUT_BYTES_MAX = 4096
KEPT_MAX = 4096  # of the inputs that did something new
CHANGES_MAX = 4
COMPARED_EVERY = 10  # the slow twin takes longer than the module
LENGTH = struct.Struct("<I")
REPORT_EVERY = 1 << 16
NUMBERS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


class Target(NamedTuple):
    """One compiled module, or one way through it."""

    name: str
    seeds: tuple[bytes, ...]  # right inputs
    run: Callable[[bytes], Hashable]  # takes any bytes; raises nothing; returns what it did
    compare: Callable[[bytes], None] | None = None  # raises AssertionError where the twin differs
    compared_every: int = COMPARED_EVERY  # inputs; besides, those with an outcome that is new


# -- inputs ----------------------------------------------------------------------------------------


def changed(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return `data` with a few random changes, no longer than INPUT_BYTES_MAX."""
    made = bytearray(data)
    for _ in range(1 + int(chance.random() * CHANGES_MAX)):
        CHANGES[int(chance.random() * len(CHANGES))](chance, made, others)
    return bytes(made[:INPUT_BYTES_MAX])


Change = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def _place(chance: random.Random, data: bytearray) -> int:
    return int(chance.random() * (len(data) + 1))


def _flip_bit(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[int(chance.random() * len(data))] ^= 1 << int(chance.random() * 8)


def _set_byte(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[int(chance.random() * len(data))] = chance.getrandbits(8)


def _set_number(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Write a number at which loops go wrong, of 1 to 8 bytes, either end first."""
    size = 1 << int(chance.random() * 4)
    if len(data) < size:
        return
    at = int(chance.random() * (len(data) - size + 1))
    number = NUMBERS[int(chance.random() * len(NUMBERS))]
    if chance.random() < 0.3:  # or nearly what there is in the input
        number = max(0, len(data) - at + int(chance.random() * 20) - 10)
    order = "big" if chance.random() < 0.7 else "little"
    data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, order)  # type: ignore[arg-type]


def _cut(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_place(chance, data) :]


def _leave_out(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = _place(chance, data)
    del data[at : at + 1 + int(chance.random() * 16)]


def _repeat(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at, end = sorted((_place(chance, data), _place(chance, data)))
    data[end:end] = data[at:end]


def _insert(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = _place(chance, data)
    data[at:at] = chance.randbytes(1 + int(chance.random() * 8))


def _join(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Put another input in place of the end, or of a piece in the middle."""
    other = others[int(chance.random() * len(others))]
    at = _place(chance, data)
    end = at if chance.random() < 0.5 else len(data)
    data[at:end] = other


CHANGES: tuple[Change, ...] = (
    _flip_bit, _set_byte, _set_number, _set_number, _cut, _leave_out, _repeat, _insert, _join,
)  # fmt: skip


# -- running ---------------------------------------------------------------------------------------


def fuzz(target: Target, inputs: int, seed: int, last: mmap.mmap | None = None) -> int:
    """Run a target over random inputs and return how many different things it did.

    `last` is a file of INPUT_BYTES_MAX + 4 bytes for the input that is being run.
    """
    logging.disable(logging.CRITICAL)  # each bad message would be told with its traceback
    try:
        return _fuzz(target, inputs, seed, last)
    finally:
        logging.disable(logging.NOTSET)


def _fuzz(target: Target, inputs: int, seed: int, last: mmap.mmap | None) -> int:
    chance = random.Random(seed)
    kept = list(target.seeds)
    did = {target.run(each) for each in kept}
    for number in range(inputs):
        data = changed(chance, kept[int(chance.random() * len(kept))], kept)
        if last is not None:
            last[: LENGTH.size + len(data)] = LENGTH.pack(len(data)) + data
        found = target.run(data)
        is_new = found not in did
        if is_new:
            did.add(found)
            if len(kept) < KEPT_MAX:
                kept.append(data)
        if target.compare is not None and (is_new or number % target.compared_every == 0):
            target.compare(data)
        if number % REPORT_EVERY == REPORT_EVERY - 1:
            print(f"{target.name}: {number + 1:,} inputs, {len(did):,} outcomes", flush=True)
    if target.compare is not None:
        target.compare(kept[0])  # what a target remembers may differ since it was compared
    print(f"{target.name}: {inputs:,} inputs, {len(did):,} outcomes", flush=True)
    return len(did)


def run_in_process(target: Target, inputs: int, seed: int, path: Path) -> None:
    """Run the share of one process, with `path` for the last input."""
    with path.open("w+b") as file:
        file.truncate(INPUT_BYTES_MAX + LENGTH.size)
        with mmap.mmap(file.fileno(), 0) as last:
            fuzz(target, inputs, seed, last)


def last_input(path: Path) -> bytes:
    data = path.read_bytes()
    (size,) = LENGTH.unpack_from(data)
    return data[LENGTH.size : LENGTH.size + size]


def run_target(target: Target, inputs: int, seed: int, jobs: int, directory: Path) -> Path | None:
    """Run a target in several processes and return the last input of one that failed, or None."""
    began = time.monotonic()
    processes = []
    for job in range(jobs):
        path = directory / f"{target.name}.{job}"
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            target.name,
            "--inputs",
            str(inputs // jobs),
        ]
        command += ["--seed", str(seed + job), "--last", str(path)]
        processes.append((path, subprocess.Popen(command)))
    failed = [path for path, process in processes if process.wait()]
    print(f"{target.name}: {inputs:,} inputs, {time.monotonic() - began:.0f} s", flush=True)
    if not failed:
        return None
    found = Path(tempfile.gettempdir()) / f"fuzz-{target.name}-{seed}"
    found.write_bytes(last_input(failed[0]))
    return found


def main() -> int:
    from tests.support.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument(
        "--inputs", type=int, default=10_000_000, help="of each target (10 million)"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--again", type=Path, help="run only the input in this file")
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets = [TARGETS[name] for name in arguments.targets or TARGETS]
    if arguments.again:
        for target in targets:
            print(target.run(arguments.again.read_bytes()))
            if target.compare is not None:
                target.compare(arguments.again.read_bytes())
        return 0
    if arguments.last:
        run_in_process(targets[0], arguments.inputs, arguments.seed, arguments.last)
        return 0
    print(f"--seed {arguments.seed}", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for target in targets:
            found = run_target(
                target, arguments.inputs, arguments.seed, arguments.jobs, Path(directory)
            )
            if found is not None:
                failures += 1
                print(
                    f"FAILED: python -m {__spec__.name} {target.name} --again {found}", flush=True
                )
    print(f"{len(targets) - failures} passed, {failures} failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
