"""One row says everything of an argument: all that ask for arguments know what the row says."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.responses import openapi
from shardmq.broker.controller.policies import check_parameter
from shardmq.broker.controller.without_effect import sentences
from shardmq.broker.model import arguments, checks, policies, values
from shardmq.broker.model.arguments import TABLE, Argument, Merge, PolicyKey, Table
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.checks import Refusal
from shardmq.broker.shared.control import QueueDeclare
from shardmq.shardd.consumer_requests import ConsumerRequests
from shardmq.shardd.queues.admission import Admission
from shardmq.shardd.queues.backlog import Backlog
from shardmq.shardd.queues.dispatch import Dispatch
from shardmq.shardd.queues.limits import Limits, limits_of
from shardmq.shardd.queues.queue import Queue
from shardmq.shardd.queues.rules import Rule
from shardmq.shardd.queues.stream import Retention, retention_of
from shardmq.supervisor.cli import arguments as shardctl
from shardmq.supervisor.cli import queues as queue_commands
from tests.arguments import DOCUMENT, PAGE, ROOT, SHARDCTL, files
from tests.http_api import conftest
from tests.http_api.conftest import Api

api = conftest.api

# An argument that the table does not have.
NAME, KEY = "x-example", "example"
NEW = Argument(
    NAME,
    "One short sentence for readers.",
    arguments.NOT_STREAMS,
    values.non_negative,
    PolicyKey(KEY, values.at_least(0, "number of examples"), Merge.LOWER, is_operator=True),
    limit="example",
    is_offered=True,
)
THING = "queue 'q' in vhost '/'"
# Two values of each argument that a shard reads, the second told apart from the first.
SAMPLES: dict[str, tuple[Any, Any]] = {
    "x-dead-letter-exchange": ("e", "f"),
    "x-dead-letter-routing-key": ("k", "l"),
    "x-dead-letter-strategy": ("at-most-once", "at-least-once"),
    "x-overflow": ("drop-head", "reject-publish"),
    "x-single-active-consumer": (False, True),
    "x-delayed-retry-type": ("all", "disabled"),
    "x-max-age": ("1D", "2D"),
    "x-stream-max-segment-size-bytes": (20_000_000, 30_000_000),
}
HOW_SAMPLED = (
    "Two values of the argument must change only the field that its row in "
    "broker/model/arguments.py names. If 5 and 7 are no values of it, name two in SAMPLES."
)
# Fields that no argument sets: what the broker itself says of a queue, and a second one of a value.
NOT_ARGUMENTS = {"refused_die", "delays", "paused", "timeout_closes", "held", "leaving"}


def with_row(row: Argument) -> Table:
    return Table((*TABLE.queue.values(), row), TABLE.exchange.values())


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Add one argument to the table, and nothing else anywhere."""
    table = with_row(NEW)
    monkeypatch.setattr(arguments, "TABLE", table)
    return table


def refusal(arguments: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as refused:
        checks.check_queue_arguments("/", "q", arguments)
    assert refused.value.code == checks.PRECONDITION_FAILED
    return refused.value.text


def refused_policy(component: str, definition: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as refused:
        check_parameter("/", component, "p", {"pattern": "", "definition": definition})
    return refused.value.text


# -- an argument is added


def test_an_argument_that_is_not_in_the_table_means_nothing() -> None:
    checks.check_queue_arguments("/", "q", {NAME: -1})
    assert "not recognised policy settings" in refused_policy("policy", {KEY: 5})


def test_an_added_argument_is_checked_at_a_declare(added: Table) -> None:
    checks.check_queue_arguments("/", "q", {NAME: 5})
    assert refusal({NAME: -1}) == f"invalid arg '{NAME}' for {THING}: {{value_negative,-1}}"
    assert refusal({"x-queue-type": "stream", NAME: 5}) == (
        f"invalid arg '{NAME}' for {THING} of queue type rabbit_stream_queue"
    )


def test_an_added_argument_is_compared_at_a_second_declare(added: Table) -> None:
    queue = QueuePut("/", "q", 1, 0, arguments={NAME: 5})
    checks.check_same_queue(queue, True, False, "", False, {NAME: 5})
    with pytest.raises(
        Refusal, match=f"inequivalent arg '{NAME}' .* received '6' but current is '5'"
    ):
        checks.check_same_queue(queue, True, False, "", False, {NAME: 6})


@pytest.mark.parametrize("component", ["policy", "operator_policy"])
def test_an_added_argument_is_a_key_of_policies(added: Table, component: str) -> None:
    check_parameter("/", component, "p", {"pattern": "", "definition": {KEY: 5}})
    assert "-1 is not a valid number of examples" in refused_policy(component, {KEY: -1})


def test_an_added_argument_is_merged_with_policies(added: Table) -> None:
    assert policies.merged({KEY: 5}, {KEY: 3}) == {KEY: 3}
    assert policies.queue_arguments({}, {KEY: 5}) == {NAME: 5}
    assert policies.queue_arguments({NAME: 3}, {KEY: 5}) == {NAME: 3}
    assert policies.queue_arguments({NAME: 8}, {KEY: 5}) == {NAME: 5}


def test_an_added_argument_without_effect_is_said_to_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = NEW._replace(no_effect="nothing is held")
    monkeypatch.setattr(arguments, "TABLE", with_row(idle))
    [said] = sentences([QueueDeclare("/", "q", True, False, False, {NAME: 5})])
    assert said == f"argument {NAME} of {THING} is kept without effect: nothing is held"


def test_an_added_argument_is_in_all_files_that_are_made_of_the_table(added: Table) -> None:
    made = files(added)
    assert (
        f"`{NAME}` | classic, quorum | `{KEY}`, operator | lower | {NEW.summary}" in made[DOCUMENT]
    )
    assert f'"{NAME}": "{NEW.summary}",' in made[SHARDCTL] and f'"{KEY}",' in made[SHARDCTL]
    assert f'"{NAME}"' in made[PAGE] and f'"{KEY}"' in made[PAGE]


async def test_an_added_argument_is_known_over_http(added: Table, api: Api) -> None:
    status, said = await api.call("PUT", "/api/queues/%2F/q", {"arguments": {NAME: -1}})
    assert (status, said["reason"]) == (
        400,
        f"invalid arg '{NAME}' for {THING}: {{value_negative,-1}}",
    )
    assert (await api.call("PUT", "/api/queues/%2F/q", {"arguments": {NAME: 9}}))[0] == 201
    policy = {"pattern": "^q$", "definition": {KEY: 5}}
    assert (await api.call("PUT", "/api/policies/%2F/p", policy))[0] == 201
    limit = {"pattern": "^q$", "definition": {KEY: 3}}
    assert (await api.call("PUT", "/api/operator-policies/%2F/o", limit))[0] == 201
    row = await api.get("/api/queues/%2F/q")
    assert row["arguments"] == {NAME: 9}
    assert row["effective_policy_definition"] == {KEY: 3}
    queue = api.authority.catalog.queue("/", "q")
    assert queue is not None and api.authority.catalog.queue_arguments(queue) == {NAME: 3}
    schemas = (await api.get("/api/openapi.json"))["components"]["schemas"]
    described = {"description": NEW.summary}
    assert schemas["QueueBody"]["properties"]["arguments"]["properties"][NAME] == described
    for body in ("PolicyBody", "OperatorPolicyBody"):
        assert schemas[body]["properties"]["definition"]["properties"][KEY] == described


# -- the table and those that cannot read it


@pytest.mark.parametrize("path", [PAGE, SHARDCTL, DOCUMENT])
def test_files_made_of_the_table_say_what_it_says(path: str) -> None:
    assert (ROOT / path).read_text() == files(TABLE)[path], "run `make arguments`"


def sample(name: str) -> tuple[Any, Any]:
    return SAMPLES.get(name, (5, 7))


@pytest.mark.parametrize(
    "row", [row for row in TABLE.queue.values() if row.limit], ids=lambda row: row.name
)
def test_an_argument_ends_in_its_field_of_the_limits(row: Argument) -> None:
    rows = [each for each in TABLE.queue.values() if each.limit]
    usual = {each.name: sample(each.name)[0] for each in rows}
    before, after = limits_of(usual), limits_of(usual | {row.name: sample(row.name)[1]})
    changed = {name for name in Limits._fields if getattr(before, name) != getattr(after, name)}
    assert changed == {row.limit}, HOW_SAMPLED


@pytest.mark.parametrize(
    "row", [row for row in TABLE.queue.values() if row.retention], ids=lambda row: row.name
)
def test_an_argument_of_streams_ends_in_its_field_of_the_retention(row: Argument) -> None:
    rows = [each for each in TABLE.queue.values() if each.retention]
    usual = {each.name: sample(each.name)[0] for each in rows}
    before, after = retention_of(usual), retention_of(usual | {row.name: sample(row.name)[1]})
    changed = {name for name in Retention._fields if getattr(before, name) != getattr(after, name)}
    assert changed == {row.retention}, HOW_SAMPLED


def test_each_limit_is_the_field_of_an_argument() -> None:
    how = "`limit` or `retention` of a row names each field, or the field is in NOT_ARGUMENTS"
    rows = TABLE.queue.values()
    limits = {row.limit for row in rows if row.limit}
    assert limits == set(Limits._fields) - NOT_ARGUMENTS, how
    assert {row.retention for row in rows if row.retention} == set(Retention._fields), how


@pytest.mark.parametrize("field", Limits._fields)
def test_a_shard_acts_on_each_limit(field: str) -> None:
    used = re.compile(rf"\blimits\.{field}\b")
    files = [path for path in (ROOT / "shardd").rglob("*.py") if path.name != "limits.py"]
    assert any(used.search(path.read_text()) for path in files), f"nothing reads `limits.{field}`"


def test_the_steps_that_the_readme_names_for_a_new_rule_are_there() -> None:
    section = (
        (ROOT / "broker/README.md")
        .read_text()
        .partition("### A queue argument")[2]
        .partition("\n### ")[0]
    )
    classes = {
        each.__name__: each for each in (Admission, Backlog, ConsumerRequests, Dispatch, Queue)
    }
    named = re.findall(rf"`({'|'.join(classes)})\.(\w+)`", section)
    fields = re.findall(r"^\|[^|]+\| `(\w+)`(?:, `(\w+)`)? \|", section, re.MULTILINE)
    assert len(named) >= 7
    assert [name for name in named if not hasattr(classes[name[0]], name[1])] == []
    assert {field for row in fields for field in row if field} == set(Rule._fields) - {
        "name",
        "applies",
    }


def test_no_name_has_two_rows() -> None:
    for rows in (arguments._QUEUE, arguments._EXCHANGE):
        names = [row.name for row in rows]
        assert sorted(names) == sorted(set(names))


def test_the_options_of_shardctl_say_what_the_rows_say() -> None:
    options = inspect.signature(queue_commands.create_queue).parameters.values()
    rows = {f"x-{option.name.replace('_', '-')}": option.default for option in options}
    said = {name: option.help for name, option in rows.items() if name in TABLE.queue}
    assert said == {name: TABLE.queue[name].summary for name in said} and len(said) == 7


def test_shardctl_names_the_policy_keys_that_act() -> None:
    assert set(shardctl.POLICY_KEYS) == TABLE.keys.keys() - TABLE.keys_without_effect.keys()


def test_every_key_of_policies_is_described() -> None:
    routes = (route for resource in RESOURCES for route in resource.ROUTES)
    schemas = openapi.document(routes, "1")["components"]["schemas"]
    assert (
        schemas["PolicyBody"]["properties"]["definition"]["properties"].keys() == TABLE.keys.keys()
    )
