"""Count the instructions of a message in the hot loops and compare with the baseline.

`make bench-guard` runs this file. Time on a shared machine is noise; a count of instructions is the
same each time. Valgrind's callgrind counts the instructions of each stage on a message's way
through one process (micro/path.py). The count covers user space and includes what Python does
around the loops.

What the counting itself costs, in a stage that does nothing, is subtracted.

If a stage takes more than `tolerance` above its baseline, the exit status is 1. If a stage takes as
much less, the output says so, and `python bench/guard.py --update` writes the new baseline.

Compilers differ by some percent. The baseline belongs to the compiler that instructions.json names;
for another compiler the tolerance is twice as wide. The way with one message per read is mostly
Python and is compared only with the same Python (such as 3.11). Without valgrind or a C compiler
the status is 0, and a line says what is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BASELINE = HERE / "instructions.json"
TOLERANCE = 0.10
WAYS = {
    "16 B": (16, 0, False),
    "16 B, acks": (16, 0, True),
    "1 KiB": (1024, 0, False),
    "one a read": (16, 1, False),
}
# One message a pass through a whole front door (micro/door.py).
DOOR = "front door, one a pass"
# The most instructions that some stages of a way may take together, whatever the baseline says.
BARS: dict[tuple[str, tuple[str, ...]], float] = {
    ("one a read", ("ring", "enqueue", "dequeue")): 6000,
    # From the bytes of a publish to the packer, and from the message of a shard to frames.
    (DOOR, ("take", "frames")): 6000,
    # A whole pass, from epoll to the ring or the socket.
    (DOOR, ("read",)): 10000,
    (DOOR, ("deliver",)): 10000,
    (DOOR, ("ack",)): 10000,
    (DOOR, ("bind",)): 10000,
    # The same, and the answers of the controller and to the client, which are Python's.
    (DOOR, ("bind-durable",)): 120000,
}
NOTHING = "nothing"  # the stage that does nothing
WARM_TURNS = 3  # turns in which buffers grow and caches fill
TURNS = 8
LIMIT_S = 300.0
SAID = re.compile(r"^desc: Trigger: Client Request: (.*)$", re.MULTILINE)
COUNT = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)

Counts = dict[str, dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="what is counted now is the baseline")
    # With this option the process is the one that valgrind watches.
    parser.add_argument("--counted", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.counted:
        play(Path(arguments.counted))
        return 0
    missing = [name for name in ("valgrind", "cc") if shutil.which(name) is None]
    if missing:
        print(
            f"instructions are not counted: {' and '.join(missing)} missing"
            " (apt-get install valgrind gcc)"
        )
        return 0
    counts = counted()
    if arguments.update:
        BASELINE.write_text(
            json.dumps({"of": surroundings(), "instructions": counts}, indent=1) + "\n"
        )
        print(f"written to {BASELINE}")
        return 0
    return compare(json.loads(BASELINE.read_text()), counts)


def surroundings() -> dict[str, str]:
    compiler = subprocess.run(
        ["cc", "-dumpfullversion"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "compiler": f"cc {compiler}",
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def compare(baseline: dict[str, Any], counts: Counts) -> int:
    same = baseline["of"] == surroundings()
    tolerance = TOLERANCE if same else 2 * TOLERANCE
    if not same:
        print(f"baseline of {baseline['of']}, here {surroundings()}: tolerance {tolerance:.0%}")
    slower = 0
    print(
        "| way | stage | instructions a message | baseline | |\n| --- | --- | ---: | ---: | --- |"
    )
    for way, stage, now, before in rows(baseline["instructions"], counts):
        if (way == DOOR or WAYS[way][1]) and python_of(baseline["of"]) != python_of(surroundings()):
            continue
        change = now / before - 1 if before else float("inf")
        worse = change > tolerance
        slower += worse
        verdict = (
            f"{change:+.1%} MORE"
            if worse
            else f"{change:+.1%} less: --update"
            if change < -tolerance
            else ""
        )
        print(f"| {way} | {stage} | {now:,.1f} | {before:,.1f} | {verdict} |")
    over = 0
    for (way, stages), most in BARS.items():
        if python_of(baseline["of"]) != python_of(surroundings()):
            continue
        now = sum(counts.get(way, {}).get(stage, 0.0) for stage in stages)
        over += now > most
        verdict = " TOO MANY" if now > most else ""
        print(f"{way}: {' + '.join(stages)} take {now:,.0f} of at most {most:,.0f}{verdict}")
    if slower:
        print(
            f"{slower} stages take more than {tolerance:.0%} above their baseline;"
            " is it worth it? then --update"
        )
    return 1 if slower or over else 0


def python_of(surroundings: dict[str, str]) -> str:
    """Return the version of Python as far as it matters for speed, such as 3.11."""
    return surroundings["python"].rpartition(".")[0]


def rows(baseline: Counts, counts: Counts) -> Iterator[tuple[str, str, float, float]]:
    for way, stages in counts.items():
        for stage, now in stages.items():
            yield way, stage, now, baseline.get(way, {}).get(stage, 0.0)


# -- counting --------------------------------------------------------------------------------------


def counted() -> Counts:
    """Return the instructions of a message, by way and stage."""
    with tempfile.TemporaryDirectory(prefix="guard-") as name:
        directory = Path(name)
        build = [
            "cc",
            "-shared",
            "-fPIC",
            "-O2",
            "-o",
            str(directory / "marks.so"),
            str(HERE / "micro" / "marks.c"),
        ]
        subprocess.run(build, check=True)
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--collect-atstart=no",
            "--combine-dumps=no",
        ]
        command += [
            f"--callgrind-out-file={directory}/out",
            "--quiet",
            sys.executable,
            __file__,
            "--counted",
            name,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=fixed(), check=False
        )
        if done.returncode:
            sys.exit(f"the counted process failed:\n{done.stdout}\n{done.stderr}")
        messages: dict[str, int] = json.loads((directory / "messages").read_text())
        times: dict[str, dict[str, int]] = json.loads((directory / "times").read_text())
        totals: dict[str, dict[str, int]] = {way: {} for way in (*WAYS, DOOR)}
        for out in directory.glob("out.*"):
            text = out.read_text()
            said, total = SAID.search(text), COUNT.search(text)
            if said and total:
                way, _, stage = said[1].partition("/")
                totals[way][stage] = int(total[1])
        found: Counts = {}
        for way, counts in totals.items():
            each = counts.pop(NOTHING) / times[way][NOTHING]
            found[way] = {
                stage: round((count - each * times[way][stage]) / messages[way], 2)
                for stage, count in sorted(counts.items())
            }
        return found


def fixed() -> dict[str, str]:
    """Return an environment in which counts do not differ from run to run or between processors.

    The C library uses `rep movsb` on some processors, which would count as one instruction per
    byte.
    """
    same = {
        "PYTHONHASHSEED": "0",
        "PYTHONMALLOC": "pymalloc",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-ERMS,-FSRM",
    }
    return {**os.environ, **same, "PYTHONPATH": str(HERE.parent)}


def play(directory: Path) -> None:
    """Run each stage of each way in a pass of its own, with the collection on for this stage only.

    This is called in the watched process.
    """
    from micro.door import STAGES as DOOR_STAGES
    from micro.door import Door
    from micro.path import STAGES
    from micro.path import Path as Way

    marks = ctypes.CDLL(str(directory / "marks.so"))
    assert marks.watched()
    messages: dict[str, int] = {}
    times: dict[str, dict[str, int]] = {}
    for name, (body_bytes, count, acks) in WAYS.items():
        turns = TURNS if not count else TURNS * 10
        way = Way(str(directory / f"store-{len(messages)}"), body_bytes, count, acks)
        for _ in range(WARM_TURNS):
            way.turn(lambda stage, act: act())
        marks.begin()
        times[name] = {}
        for wanted in STAGES if acks else STAGES[:-1]:
            around = watching(marks, wanted, times[name])
            messages[name] = sum(way.turn(around) for _ in range(turns))
            marks.dump(f"{name}/{wanted}".encode())
        around = watching(marks, NOTHING, times[name])
        for _ in range(turns):
            around(NOTHING, lambda: None)
        marks.dump(f"{name}/{NOTHING}".encode())
        way.close()
    door = Door()
    for _ in range(WARM_TURNS * 10):
        door.turn(lambda stage, act: act())
        door.bind(lambda stage, act: act())
    times[DOOR] = {}
    binds = {"bind": door.bind, "bind-durable": door.bind_durable}
    plain = [stage for stage in DOOR_STAGES if stage not in binds]
    for wanted in (*plain, NOTHING, *binds):
        turn = binds.get(wanted, door.turn)
        for _ in range(WARM_TURNS if wanted in binds else 0):  # the first bind begins a run
            turn(lambda stage, act: act())
        around = watching(marks, wanted, times[DOOR])
        messages[DOOR] = sum(turn(around) for _ in range(TURNS * 10))
        marks.dump(f"{DOOR}/{wanted}".encode())
    door.close()
    (directory / "times").write_text(json.dumps(times))
    (directory / "messages").write_text(json.dumps(messages))


def watching(
    marks: ctypes.CDLL, wanted: str, times: dict[str, int]
) -> Callable[[str, Callable[[], Any]], Any]:
    """Return a function that runs a stage, with the collection on if the stage is `wanted`.

    `times` counts how often it was.
    """
    times[wanted] = 0

    def around(stage: str, act: Callable[[], Any]) -> Any:
        if stage != wanted:
            return act()
        times[wanted] += 1
        marks.toggle()
        result = act()
        marks.toggle()
        return result

    return around


if __name__ == "__main__":
    sys.exit(main())
