"""Runs of a suite are compared by the connections whose clients sent the same."""

from __future__ import annotations

from pamqp import commands

from tests.support.raw_client import method
from tests.support.recording_proxy import Conversation
from tests.support.suite_runs import Judgement, SuiteRun, judge

OPEN, OPENED = method(1, commands.Channel.Open()), method(1, commands.Channel.OpenOk())


def declares(name: str, messages: int) -> Conversation:
    asks, answers = commands.Queue.Declare(queue=name), commands.Queue.DeclareOk(name, messages, 0)
    return Conversation(
        bytearray(OPEN + method(1, asks)), bytearray(OPENED + method(1, answers)), "client"
    )


def run(*conversations: Conversation, passed: str = "a b") -> SuiteRun:
    made = SuiteRun(set(passed.split()))
    for conversation in conversations:
        made.add(conversation)
    return made


def judged(*runs: SuiteRun) -> Judgement:
    *off, on = runs
    return judge(off, on)


def test_connections_are_found_again_in_any_order_and_under_other_names() -> None:
    one, other = declares("q-" + "0a" * 16, 0), declares("plain", 2)
    found = judged(run(one, other), run(other, one), run(declares("q-" + "b1" * 16, 0), other))
    assert (found.steady, found.unsteady, found.unknown, found.faults) == (2, 0, 0, [])


def test_another_answer_is_a_fault_if_it_was_steady() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("q", 1))).faults
    found = judged(off, run(declares("q", 1)), run(declares("q", 2)))
    assert (found.unsteady, found.faults) == (1, [])


def test_what_no_other_run_asked_is_counted() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("r", 0))).unknown == 1


def test_a_test_that_passes_only_without_the_short_way_is_a_fault() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("q", 0), passed="b")).faults == [
        "a passes only without the short way"
    ]
    assert not judged(off, run(passed="b"), run(declares("q", 0), passed="b")).faults


def test_a_rule_that_is_broken_is_a_fault_whatever_was_asked() -> None:
    off, bad = run(declares("q", 0)), declares("new", 0)
    bad.server += method(2, commands.Basic.QosOk())
    assert judged(off, off, run(bad)).faults == ["channel 2 is not open"]
