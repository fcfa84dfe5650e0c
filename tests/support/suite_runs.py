"""Other people's client suites behind a recording proxy, and how to compare several runs.

The clients of a suite make names at random, open connections from many threads and wait for times.
So connections of two runs belong together if their clients sent the same in the same order, after
names have been replaced by numbers. Many clients may send the same in one run. The answers of the
broker to them are *steady* if two or more runs without the short way have such clients, and all of
these runs have the same set of answers. An answer with the short way has to be in the set. All
connections of all runs have to keep the rules of `seen`.

A test that passes in each run without the short way has to pass with it.

Some tests of the suites wait for a time that a busy machine does not keep. So if there are few
faults, the suite runs once more in each mode, and all runs are judged together. What one of the two
runs with the short way does not show again, a test that fails or an answer outside of the set, is
named, but no fault. Answers that differ in the third run without the short way are not steady.

A suite that makes no connection in any run speaks no AMQP, if each of its tests passed. Then there
is nothing to compare but its tests.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.both_ways import OFF, ON, Way
from tests.support.recording_proxy import Conversation
from tests.support.seen import Broken, Names, NormalForm, asked, differences, seen

SUITE_S_MAX = 1800
OFF_RUNS = 2
WITNESSES = 2  # runs that must have a client which sent the same, for its answers to be steady
FEW_FAULTS = 10  # with more no run is repeated; a class of tests that is out of time has as many

Question = tuple[bytes, ...]


@dataclass(slots=True)
class SuiteRun:
    """The tests of a suite that passed, and what the broker sent, by what its clients sent."""

    passed: set[str]
    others: set[str] = field(default_factory=set)  # tests that failed or were skipped
    connections: int = 0
    answers: defaultdict[Question, list[NormalForm]] = field(
        default_factory=lambda: defaultdict(list)
    )
    broken: list[str] = field(default_factory=list)

    def add(self, conversation: Conversation) -> None:
        self.connections += 1
        names = Names(of_clients=True)
        question = asked(bytes(conversation.client), names)
        try:
            answer = seen(bytes(conversation.server), conversation.ended_by, names)
        except Broken as error:
            self.broken.append(str(error))
        else:
            self.answers[question].append(answer)


def run_suite(suite: Path, way: Way, out: Path, cache: Path) -> SuiteRun:
    """Run the script `run-NAME.sh` against a broker that nobody else uses."""
    environment = {**os.environ, "SUITES_OUT": str(out), "SUITES_CACHE": str(cache)}
    environment.pop("PYTHONPATH", None)  # of this source tree: nothing for the suite's own Python
    command = [str(suite), "127.0.0.1", str(way.proxy.port), way.broker.http.rpartition(":")[2]]
    subprocess.run(command, env=environment, timeout=SUITE_S_MAX, capture_output=True, check=False)
    results = out / f"{suite.stem.removeprefix('run-')}.all.tsv"
    run = with_results(results.read_text() if results.exists() else "")
    for conversation in way.proxy.taken():
        run.add(conversation)
    return run


def with_results(text: str) -> SuiteRun:
    """Return a run with these results, a test a line: "pass", "fail" or "skip", tab, its name."""
    run = SuiteRun(set())
    for line in text.splitlines():
        state, _, test = line.partition("\t")
        (run.passed if state == "pass" else run.others).add(test)
    return run


@dataclass(slots=True)
class Judgement:
    steady: int = 0
    unsteady: int = 0
    unknown: int = 0  # too few runs without the short way have a client that sent the same
    passed: int = 0
    without_amqp: bool = False
    once: list[str] = field(default_factory=list)  # in one of two runs with the short way
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.passed} tests passed; " + (
            "no connection in any run, the suite speaks no AMQP"
            if self.without_amqp
            else f"{self.steady} connections compared, {self.unsteady} that differ without the"
            f" short way, too, {self.unknown} not found again"
        )
        return text + "".join(
            f"\nin one of two runs with the short way: {one}" for one in self.once
        )


def compared(play: Callable[[dict[str, str]], SuiteRun]) -> Judgement:
    """Play a suite with brokers of both kinds, each told by its environment, and compare."""
    off, on = [play(OFF) for _ in range(OFF_RUNS)], [play(ON)]
    judgement = judge(off, on)
    if 0 < len(judgement.faults) <= FEW_FAULTS:
        off.append(play(OFF))
        on.append(play(ON))
        judgement = judge(off, on)
    return judgement


def lost(off: list[SuiteRun], on: SuiteRun) -> set[str]:
    """Return the tests that pass in each run without the short way, but not in this one."""
    return set.intersection(*(run.passed for run in off)) - on.passed


def judge(off: list[SuiteRun], on: list[SuiteRun]) -> Judgement:
    """Compare runs with the short way with runs without it."""
    made = Judgement(passed=len(set.union(*(run.passed for run in on))))
    lost_in = [lost(off, run) for run in on]
    for test in sorted(set.union(*lost_in)):
        if all(test in tests for tests in lost_in):
            made.faults.append(f"{test} passes only without the short way")
        else:
            made.once.append(f"{test} does not pass")
    if not any(run.connections for run in [*off, *on]):
        unexplained = without_connections([*off, *on])
        made.without_amqp = not unexplained
        made.faults += unexplained
        return made
    for run in off:
        made.faults += [f"without the short way: {rule}" for rule in run.broken]
    for run in on:
        made.faults += run.broken
    for question in dict.fromkeys(question for run in on for question in run.answers):
        _judge_answers(question, off, on, made)
    if not made.steady:
        made.faults.append("no connection could be compared")
    return made


def without_connections(runs: list[SuiteRun]) -> list[str]:
    """Return why this is not a suite that speaks no AMQP: which tests may have wanted to connect.

    The clients of a suite that cannot reach the broker fail or skip tests.
    """
    if not all(run.passed for run in runs):
        return ["no connection, and a run in which no test passed"]
    others = sorted(set.union(*(run.others for run in runs)))
    return [f"no connection, and {test} did not pass" for test in others]


def _judge_answers(
    question: Question, off: list[SuiteRun], on: list[SuiteRun], made: Judgement
) -> None:
    expected = [distinct(run.answers[question]) for run in off if question in run.answers]
    found = [run.answers[question] for run in on if question in run.answers]
    count = sum(map(len, found))
    if len(expected) < WITNESSES:
        made.unknown += count
    elif any(not same_set(each, expected[0]) for each in expected):
        made.unsteady += count
    else:
        made.steady += count
        strange = [outside(answers, expected[0]) for answers in found]
        texts = [text for each in strange for text in each]
        if all(strange):
            made.faults += texts
        else:
            made.once += texts


def outside(answers: list[NormalForm], expected: list[NormalForm]) -> list[str]:
    """Return how the answers that are not among those expected differ from the nearest of them."""
    texts: list[str] = []
    for answer in distinct(answers):
        if answer not in expected:
            texts += min((differences(one, answer) for one in expected), key=len)
    return texts


def distinct(answers: list[NormalForm]) -> list[NormalForm]:
    found: list[NormalForm] = []
    for answer in answers:
        if answer not in found:
            found.append(answer)
    return found


def same_set(one: list[NormalForm], other: list[NormalForm]) -> bool:
    """Return whether two lists of distinct answers have the same members in any order."""
    return len(one) == len(other) and all(answer in other for answer in one)
