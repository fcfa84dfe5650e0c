"""Under foreign host names the API does not take the well-known password.

With a setting it takes no call at all.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.management import host_header
from shardmq.broker.controller.management.host_header import (
    LOG_EACH_S,
    REMEMBERED_MAX,
    RefusalLog,
    is_known,
    name_of,
)
from tests.http_api.conftest import Api

MACHINE = "mq-7.example.org"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_header, "machine_names", lambda: frozenset((MACHINE, "mq-7")))


def configured(api: Api, **settings: Any) -> None:
    config = msgspec.structs.replace(api.context.config, **settings)
    object.__setattr__(api.context, "config_now", lambda: config)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:15672", "localhost"), ("LOCALHOST.", "localhost"), ("[::1]:15672", "::1"),
        ("[::1]", "::1"), ("10.0.0.1:1", "10.0.0.1"), ("mq.example.org.:80", "mq.example.org"),
        ("", ""), ("[", ""), (":1", ""),
    ],
)  # fmt: skip
def test_a_port_and_a_dot_at_the_end_are_no_part_of_the_name(host: str, name: str) -> None:
    assert name_of(host) == name


@pytest.mark.parametrize(
    "host",
    ["localhost", "Localhost:15672", "a.localhost", "127.0.0.1:15672", "10.1.2.3", "[::1]:15672",
     "[fe80::1%25eth0]",
     MACHINE, "mq-7:15672", "named.example", "NAMED.example.:443", None],
)  # fmt: skip
def test_this_machine_its_addresses_and_names_in_the_settings_are_known(host: str | None) -> None:
    assert is_known(host, ["named.example", "other.example"])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost",
     "mq-7.evil.example", "", ":1",
     "named.example.evil.example", "localhost@evil.example", "[evil.example]"],
)  # fmt: skip
def test_other_names_are_not_known_however_they_look(host: str) -> None:
    assert not is_known(host, ["named.example"])


@given(st.text())
def test_any_header_is_judged(host: str) -> None:
    assert is_known(host, []) in (True, False)
    assert is_known(host, [host]) or name_of(host) == ""


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:15672"])
async def test_the_default_user_is_refused_under_a_name_that_anybody_may_own(
    api: Api, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    for _ in range(3):
        status, found = await api.call("GET", "/api/overview", headers={"Host": host})
        assert (status, found["error"]) == (421, "misdirected_request")
    said = [line for line in caplog.messages if "are refused" in line]
    assert len(said) == 1 and f"under the name '{host}'" in said[0]
    assert (await api.call("GET", "/api/overview"))[0] == 200
    assert (await api.call("GET", "/api/overview", headers={"Host": f"{MACHINE}:15672"}))[0] == 200


async def test_other_users_may_call_by_any_name_unless_the_settings_have_some(api: Api) -> None:
    await api.call("PUT", "/api/users/u", {"password": "p", "tags": "administrator"})
    api.login, proxy = ("u", "p"), {"Host": "mq.in-a-container", "X-Forwarded-For": "192.0.2.7"}
    assert (await api.call("GET", "/api/overview", headers=proxy))[0] == 200
    configured(api, http_hosts=["mq.example.org"], listen_names=["front.example.org"])
    for path in ("/api/overview", "/metrics", "/", "/api/openapi.json"):
        assert (await api.call("GET", path, headers={"Host": "evil.example"}))[0] == 421, path
    for host in ("mq.example.org", "front.example.org:1", "127.0.0.1", MACHINE):
        assert (await api.call("GET", "/api/overview", headers={"Host": host}))[0] == 200, host


async def test_a_name_in_the_settings_is_one_for_the_default_user_too(api: Api) -> None:
    configured(api, http_hosts=["mq.example.org"])
    assert (await api.call("GET", "/api/overview", headers={"Host": "mq.example.org"}))[0] == 200


@pytest.mark.parametrize("header", host_header.FORWARDED)
async def test_whom_a_reverse_proxy_passes_on_is_not_on_this_host(api: Api, header: str) -> None:
    status, found = await api.call("GET", "/api/overview", headers={header: "127.0.0.1"})
    assert (status, found["reason"]) == (401, "User 'guest' can only connect via localhost")


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.sampled_from(["a.example", "b.example:1"])), max_size=50
    )
)
def test_each_name_is_said_at_once_and_then_now_and_then(history: list[tuple[int, str]]) -> None:
    refusal_log, now, last = RefusalLog(), 0.0, dict[str, float]()
    for pause, host in history:
        now += pause / 8
        assert refusal_log.is_due(host, now) == (host not in last or now - last[host] >= LOG_EACH_S)
        if host not in last or now - last[host] >= LOG_EACH_S:
            last[host] = now


def test_names_that_were_said_are_bounded() -> None:
    refusal_log = RefusalLog()
    for number in range(REMEMBERED_MAX + 10):
        refusal_log.is_due(f"{number}.example", 0.0)
    assert len(refusal_log._logged_at) == REMEMBERED_MAX
