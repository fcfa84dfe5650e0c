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

NEGATIVE = schemathesis.GenerationMode.NEGATIVE
MODES = (schemathesis.GenerationMode.POSITIVE, NEGATIVE)
EXAMPLES, MANY_EXAMPLES = 1, 6  # of each operation, right ones and wrong ones each
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"fuzzer:fuzzer").decode()}
# A longer request line is answered by the HTTP server itself, in plain text.
LINE_BYTES_MAX = 8190 - len("DELETE  HTTP/1.1")
OURS = ("guest", "fuzzer")  # users that must stay as they are
# What `make` makes; so that examples also meet things that are there.
KNOWN = {
    "vhost": "v", "queue": "q", "exchange": "e", "source": "e", "destination": "q", "kind": "q",
    "user": "u", "name": "p", "component": "federation", "node": "shardmq@localhost",
    "properties": "~",
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
    ("PUT", "parameters/federation/v/p", {"value": {}}),
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


def call(url: str, method: str, path: str, body: Any, user: str = "guest") -> bytes:
    login = base64.b64encode(f"{user}:{user}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/api/{path}", data, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def make(url: str) -> Any:
    """Make THINGS. Return the definitions, which make them again in one call."""
    for method, path, body in THINGS:
        call(url, method, path, body)
    return json.loads(call(url, "GET", "definitions", None))


def _can_be_wrong(operation: Any) -> bool:
    """Return whether a request can have anything that the description forbids.

    Any text is right in a path and in a query, so the fuzzer would look in vain.
    """
    described = operation.definition.raw
    schemas = [one["schema"] for one in described["parameters"]]
    return "requestBody" in described or any(
        schema.get("type") != "string" or "enum" in schema for schema in schemas
    )


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
        if len(answer.request.path_url) > LINE_BYTES_MAX and answer.status_code == 400:
            return  # refused before anybody looks what is asked for
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
    definitions = make(url)
    faults: list[str] = []
    seen: dict[Any, list[int]] = {mode: [] for mode in MODES}
    changed = False  # what `make` makes may be gone
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == LIVE:
            continue
        for mode in MODES:
            if mode is NEGATIVE and not _can_be_wrong(operation):
                continue
            if changed:
                call(url, "POST", "definitions", definitions)
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
