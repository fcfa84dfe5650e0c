"""Other people's client suites behind a recording proxy, and how to compare several runs.

The clients of a suite make names at random, open connections from many threads and wait for times.
So connections of two runs belong together if their clients sent the same, after names have been
replaced by numbers. What the broker sent to such a connection is *steady* if it was the same in all
runs without the short way. A run with the short way is judged by its steady connections. All
connections of all runs have to keep the rules of `seen`.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.both_ways import Way
from tests.support.recording_proxy import Conversation
from tests.support.seen import Broken, Names, NormalForm, asked, differences, seen

SUITE_S_MAX = 1800

Frozen = tuple[tuple[str, tuple[bytes, ...]], ...]


@dataclass(slots=True)
class SuiteRun:
    """The tests of a suite that passed, and what the broker sent, by what its clients sent."""

    passed: set[str]
    answers: defaultdict[Frozen, list[NormalForm]] = field(
        default_factory=lambda: defaultdict(list)
    )
    broken: list[str] = field(default_factory=list)

    def add(self, conversation: Conversation) -> None:
        names = Names(of_clients=True)
        question = asked(bytes(conversation.client), names)
        try:
            answer = seen(bytes(conversation.server), conversation.ended_by, names)
        except Broken as error:
            self.broken.append(str(error))
        else:
            self.answers[frozen(question)].append(answer)


def frozen(form: NormalForm) -> Frozen:
    return tuple((head, tuple(lines)) for head, lines in form.items())


def run_suite(suite: Path, way: Way, out: Path, cache: Path) -> SuiteRun:
    """Run the script `run-NAME.sh` against a broker that nobody else uses."""
    environment = {**os.environ, "SUITES_OUT": str(out), "SUITES_CACHE": str(cache)}
    environment.pop("PYTHONPATH", None)  # of this source tree: nothing for the suite's own Python
    command = [str(suite), "127.0.0.1", str(way.proxy.port), way.broker.http.rpartition(":")[2]]
    subprocess.run(command, env=environment, timeout=SUITE_S_MAX, capture_output=True, check=False)
    results = out / f"{suite.stem.removeprefix('run-')}.all.tsv"
    lines = results.read_text().splitlines() if results.exists() else []
    run = SuiteRun({line.split("\t", 1)[1] for line in lines if line.startswith("pass\t")})
    for conversation in way.proxy.taken():
        run.add(conversation)
    return run


@dataclass(slots=True)
class Judgement:
    steady: int = 0
    unsteady: int = 0
    unknown: int = 0  # no run without the short way has a client that sent the same
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.steady} connections compared, {self.unsteady} that differ without the short"
            f" way, too, {self.unknown} in no other run"
        )


def judge(off: list[SuiteRun], on: SuiteRun) -> Judgement:
    """Compare one run with the short way with some runs without it."""
    made = Judgement()
    lost = set.intersection(*(run.passed for run in off)) - on.passed
    made.faults += [f"{test} passes only without the short way" for test in sorted(lost)]
    if not any(run.broken for run in off):
        made.faults += on.broken
    for question, answers in on.answers.items():
        expected = [answer for run in off for answer in run.answers.get(question, ())]
        if not expected:
            made.unknown += len(answers)
        elif any(answer != expected[0] for answer in expected):
            made.unsteady += len(answers)
        else:
            made.steady += len(answers)
            for answer in answers:
                made.faults += differences(expected[0], answer)
    return made
