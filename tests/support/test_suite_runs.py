"""Runs of a suite are compared by the connections whose clients sent the same."""

from __future__ import annotations

from pamqp import commands

from tests.support.raw_client import method
from tests.support.recording_proxy import Conversation
from tests.support.suite_runs import FEW_FAULTS, Judgement, SuiteRun, compared, judge, with_results

OPEN, OPENED = method(1, commands.Channel.Open()), method(1, commands.Channel.OpenOk())


def declares(name: str, messages: int) -> Conversation:
    asks, answers = commands.Queue.Declare(queue=name), commands.Queue.DeclareOk(name, messages, 0)
    return Conversation(
        bytearray(OPEN + method(1, asks)), bytearray(OPENED + method(1, answers)), "client"
    )


def run(*conversations: Conversation, passed: str = "a b", failed: str = "") -> SuiteRun:
    made = SuiteRun(set(passed.split()), set(failed.split()))
    for conversation in conversations:
        made.add(conversation)
    return made


def judged(*runs: SuiteRun) -> Judgement:
    *off, on = runs
    return judge(off, [on])


def played(*runs: SuiteRun) -> Judgement:
    """Compare a suite of which these are the runs, with all of them."""
    left = iter(runs)
    found = compared(lambda environment: next(left))
    assert not list(left), "a run was not wanted"
    return found


def test_connections_are_found_again_in_any_order_and_under_other_names() -> None:
    one, other = declares("q-" + "0a" * 16, 0), declares("plain", 2)
    found = judged(run(one, other), run(other, one), run(declares("q-" + "b1" * 16, 0), other))
    assert (found.steady, found.unsteady, found.unknown, found.faults) == (2, 0, 0, [])


def test_another_answer_is_a_fault_if_it_was_steady() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("q", 1))).faults
    steady = declares("steady", 0)
    found = judged(
        run(steady, declares("q", 0)), run(steady, declares("q", 1)), run(steady, declares("q", 2))
    )
    assert (found.unsteady, found.faults) == (1, [])


def test_what_no_other_run_asked_is_counted() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("r", 0))).unknown == 1
    once = run(declares("r", 0))
    assert judged(off, once, run(declares("r", 1))).unknown == 1, "of one run nothing is known"


def test_a_test_that_passes_only_without_the_short_way_is_a_fault() -> None:
    off = run(declares("q", 0))
    assert judged(off, off, run(declares("q", 0), passed="b")).faults == [
        "a passes only without the short way"
    ]
    b = run(declares("q", 0), passed="b")
    assert not judged(off, b, b).faults


def test_a_lost_test_is_named_if_a_second_run_has_it() -> None:
    good = run(declares("q", 0))
    bad = run(declares("q", 0), passed="b")
    found = played(good, good, bad, good, good)
    assert (found.once, found.faults) == (["a does not pass"], [])
    assert "in one of two runs with the short way: a does not pass" in str(found)
    assert played(good, good, bad, good, bad).faults == ["a passes only without the short way"]
    assert not played(good, good, bad, bad, bad).faults, "it fails without the short way, too"


def test_an_answer_is_a_fault_if_each_run_with_the_short_way_has_it() -> None:
    same, other = run(declares("q", 0)), run(declares("q", 1))
    assert played(same, same, other, same, other).faults
    assert played(same, same, other, same, run(declares("q", 2))).faults
    assert played(same, same, other, same, run(declares("r", 0))).faults, "it is not asked again"
    found = played(same, same, other, same, same)
    assert (len(found.once), found.faults) == (1, [])
    assert "in one of two runs with the short way: channel 1" in str(found)


def test_an_answer_is_no_fault_if_a_run_without_the_short_way_has_it() -> None:
    steady = declares("steady", 0)
    same, other = run(steady, declares("q", 0)), run(steady, declares("q", 1))
    found = played(same, same, other, other, other)
    assert (found.unsteady, found.once, found.faults) == (2, [], [])


def test_a_suite_is_not_run_again_if_there_is_no_fault_or_too_many() -> None:
    tests = " ".join(f"t{number}" for number in range(FEW_FAULTS + 1))
    good = run(declares("q", 0), passed=tests)
    bad = run(declares("q", 0), passed="")
    assert not played(good, good, good).faults
    assert len(played(good, good, bad).faults) == FEW_FAULTS + 1


def test_a_rule_that_one_of_two_runs_breaks_is_a_fault() -> None:
    good, bad = run(declares("q", 0)), run(declares("q", 0), passed="b")
    bad.broken.append("a rule")
    assert played(good, good, bad, good, good).faults == ["a rule"]


def test_answers_to_clients_that_send_the_same_are_a_set() -> None:
    off = [run(declares("q", 0), declares("q", 2)), run(*[declares("q", n) for n in (2, 0, 0)])]
    found = judged(*off, run(declares("q", 0), declares("q", 0)))
    assert (found.steady, found.faults) == (2, [])
    assert judged(*off, run(declares("q", 1))).faults
    assert not judged(*off, run(declares("q", 0), declares("q", 1))).unsteady
    found = judged(off[0], run(declares("q", 0)), run(declares("q", 1), declares("s", 0)))
    assert (found.unsteady, found.unknown) == (1, 1)


def test_a_suite_without_connections_is_judged_by_its_tests() -> None:
    found = judged(run(), run(), run())
    assert (found.without_amqp, found.faults) == (True, [])
    assert "speaks no AMQP" in str(found)
    assert judged(run(), run(), run(passed="b")).faults == ["a passes only without the short way"]


def test_a_suite_that_cannot_connect_is_a_fault() -> None:
    """The clients would fail tests, skip them, or pass none."""
    found = judged(*[run(passed="a", failed="b")] * 3)
    assert (found.without_amqp, found.faults) == (False, ["no connection, and b did not pass"])
    assert judged(*[run(passed="")] * 3).faults == [
        "no connection, and a run in which no test passed"
    ]
    connects = run(declares("q", 0))
    assert judged(connects, connects, run()).faults == ["no connection could be compared"]
    assert judged(run(), run(), connects).faults == ["no connection could be compared"]


def test_results_are_read_by_their_state() -> None:
    found = with_results("pass\ta b\nfail\tc\nskip\td\n")
    assert (found.passed, found.others) == ({"a b"}, {"c", "d"})


def test_a_rule_that_is_broken_is_a_fault_whatever_was_asked() -> None:
    off, bad = run(declares("q", 0)), declares("new", 0)
    bad.server += method(2, commands.Basic.QosOk())
    assert judged(off, off, run(declares("q", 0), bad)).faults == ["channel 2 is not open"]
    off, bad = run(declares("q", 0), bad), run(declares("q", 0))
    assert judged(off, bad, bad).faults == ["without the short way: channel 2 is not open"]
