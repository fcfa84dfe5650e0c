"""A fuzzer gets only answers that the API's own description has, and no 500."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.management.responses.openapi import LIVE
from tests.support.real_broker import RealBroker

schemathesis = pytest.importorskip(
    "schemathesis", reason="part of the extra `test`, large, and not everywhere"
)
from schemathesis.specs.openapi import checks  # noqa: E402 # as above

MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
EXAMPLES, MANY_EXAMPLES = 1, 6  # of each operation, right ones and wrong ones each
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"fuzzer:fuzzer").decode()}
OURS = ("guest", "fuzzer")  # users that must stay as they are
# What `make` makes; so that examples also meet things that are there.
KNOWN = {
    "vhost": "v", "queue": "q", "exchange": "e", "source": "e", "destination": "q", "kind": "q",
    "user": "u", "name": "p", "component": "shovel", "node": "shardmq@localhost", "properties": "~",
}  # fmt: skip
THINGS: list[tuple[str, str, Any]] = [
    ("PUT", "users/fuzzer", {"password": "fuzzer", "tags": "administrator"}),
    ("PUT", "users/u", {"password_hash": "", "tags": ""}),
    ("PUT", "vhosts/v", {}),
    ("PUT", "permissions/v/fuzzer", {"configure": ".*", "write": ".*", "read": ".*"}),
    ("PUT", "permissions/v/guest", {"configure": ".*", "write": ".*", "read": ".*"}),
    ("PUT", "permissions/v/u", {"configure": ".*", "write": ".*", "read": ".*"}),
    ("PUT", "queues/v/q", {}),
    ("PUT", "exchanges/v/e", {"type": "topic"}),
    ("POST", "bindings/v/e/e/q/q", {}),
    ("PUT", "policies/v/p", {"pattern": "^zz", "definition": {"max-length": 3}}),
    ("PUT", "operator-policies/v/p", {"pattern": "^zz", "definition": {"max-length": 3}}),
    ("PUT", "parameters/shovel/v/p", {"value": {}}),
    ("PUT", "global-parameters/p", {"value": 1}),
]
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path_factory.mktemp("fuzzed") / "data", shards=1)
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


def make(url: str, user: str = "guest") -> None:
    login = base64.b64encode(f"{user}:{user}".encode()).decode()
    for method, path, body in THINGS:
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/api/{path}", json.dumps(body).encode(), headers, method=method
        )
        urllib.request.urlopen(request).close()


def _spoils(case: Any) -> bool:
    """Return whether a request would lock the test out; such a request is not sent."""
    values = repr((case.path_parameters, case.body))
    return case.method.upper() not in ("GET", "HEAD") and any(name in values for name in OURS)


def _fuzz(
    url: str, operation: Any, mode: Any, seen: list[int], examples: int
) -> Callable[[], None]:
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def one(case: Any, known: bool) -> None:
        if known and case.path_parameters:
            case.path_parameters = {
                name: KNOWN.get(name, value) for name, value in case.path_parameters.items()
            }
        if _spoils(case):
            return
        answer = case.call(base_url=url, headers=LOGIN)
        seen.append(answer.status_code)
        if answer.status_code >= 500 and not case.path.startswith(
            ("/api/health", "/api/aliveness")
        ):
            raise AssertionError(
                f"{answer.status_code} {answer.content[:300]!r}: {case.as_curl_command()}"
            )
        case.validate_response(answer, checks=CHECKS)

    return one  # type: ignore[no-any-return]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(MANY_EXAMPLES, marks=pytest.mark.minutes)]
)
def test_every_operation_keeps_its_promise_whatever_it_is_sent(
    broker: RealBroker, examples: int
) -> None:
    url = f"http://{broker.http}"
    with urllib.request.urlopen(f"{url}/api/openapi.json") as answer:
        description = json.load(answer)
    # or what is wrong with a wrong one is hardly ever anything but its login
    del description["security"]
    schema = schemathesis.openapi.from_dict(description)
    faults: list[str] = []
    seen: dict[Any, list[int]] = {mode: [] for mode in MODES}
    changed = True  # what `make` makes may be gone
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == LIVE:
            continue
        for mode in MODES:
            if changed:
                make(url)
            changed = operation.method.upper() not in ("GET", "HEAD")
            try:
                _fuzz(url, operation, mode, seen[mode], examples)()
            except (Exception, BaseExceptionGroup) as error:
                if type(error).__name__ != "Unsatisfiable":  # nothing it could be sent is wrong
                    faults.append(f"{operation.label}: {error}"[:1500])
    assert not faults, "\n\n".join(faults)
    right, wrong = (seen[mode] for mode in MODES)
    assert len(right) + len(wrong) > 170 * examples
    # It is no proof if hardly anything was let in.
    assert {200, 201, 204, 400, 404} <= {*right, *wrong}
    assert max(right.count(401), wrong.count(401)) < 20 * examples
    assert wrong.count(400) > 15 * examples
