"""Parameters are refused in the words of RabbitMQ 3.10 and later."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.controller.policies import check_parameter, key_missing
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.erlang import json_term as term
from tests.support.proving import proving


def refusal(component: str, value: Any, vhost: str = "/") -> str:
    """ "" when it may be set."""
    try:
        check_parameter(vhost, component, "name", value)
    except Refusal as refused:
        assert refused.code == 400
        return refused.text
    return ""


def policy(definition: dict[str, Any]) -> dict[str, Any]:
    return {"pattern": "", "definition": definition}


def failed(text: str) -> str:
    return f"Validation failed\n\n{text}\n"


DEFINITIONS: list[tuple[str, str, dict[str, Any], str]] = [
    ("C3.1", "unknown", {"x": 1}, '[{<<"x">>,1}] are not recognised policy settings'),
    ("C3.1", "unknown beside known", {"x": 1, "max-length": 3},
     '[{<<"x">>,1}] are not recognised policy settings'),
    ("C3.1", "no key", {}, "no policy provided"),
    ("C3.1", "max-length", {"max-length": -1}, "-1 is not a valid maximum length"),
    ("C3.1", "max-length text", {"max-length": "a"}, '<<"a">> is not a valid maximum length'),
    ("C3.1", "max-length float", {"max-length": 3.5}, "3.5 is not a valid maximum length"),
    ("C3.1", "max-length bool", {"max-length": True}, "true is not a valid maximum length"),
    ("C3.1", "max-length-bytes", {"max-length-bytes": -1},
     "-1 is not a valid maximum length in bytes"),
    ("C3.1", "message-ttl", {"message-ttl": -1}, "-1 is not a valid message TTL"),
    ("C3.1", "expires", {"expires": 0}, "0 is not a valid queue expiry"),
    ("C3.1", "overflow", {"overflow": "zzz"}, '<<"zzz">> is not a valid overflow value'),
    ("C3.1", "dlx", {"dead-letter-exchange": 3}, "3 is not a valid dead letter exchange name"),
    ("C3.1", "dlk", {"dead-letter-routing-key": 3}, "3 is not a valid dead letter routing key"),
    ("C3.1", "delivery-limit", {"delivery-limit": -2}, "-2 is not a valid delivery limit"),
    ("C3.1", "max-age", {"max-age": "1W"}, '<<"1W">> is not a valid max age'),
    ("C3.1", "alternate", {"alternate-exchange": 4}, "4 is not a valid alternate exchange name"),
    ("C3.2", "strategy", {"dead-letter-strategy": "q"},
     '<<"q">> is not a valid dead letter strategy'),
    ("C3.2", "retry", {"delayed-retry-type": "q"}, '<<"q">> is not a valid delayed retry type'),
    ("C3.2", "retry time", {"delayed-retry-min": 0}, "0 is not a valid delayed retry time"),
    ("C3.2", "queue-mode", {"queue-mode": "q"}, '<<"q">> is not a valid queue-mode value'),
    ("C3.2", "queue-version", {"queue-version": 3}, "3 is not a valid queue-version value"),
    ("C3.2", "segment", {"stream-max-segment-size-bytes": -1}, "-1 is not a valid segment size"),
    ("C3.2", "in memory", {"max-in-memory-length": -1},
     "-1 is not a valid maximum memory in bytes"),
    ("C3.2", "leader", {"queue-leader-locator": "zz"},
     '<<"zz">> is not a valid queue leader locator value'),
    ("C3.2", "older locator", {"queue-master-locator": "balanced"},
     '<<"balanced">> invalid queue-master-locator value'),
    ("E2.2", "only the key", {"routing-key": "1"}, "shards-per-node must be specified"),
    ("E2.2", "no number", {"shards-per-node": "two"},
     'shards-per-node should be a number, actually was <<"two">>'),
    ("E2.2", "bool", {"shards-per-node": True},
     "shards-per-node should be a number, actually was true"),
    ("E2.2", "null", {"shards-per-node": None},
     "shards-per-node should be a number, actually was null"),
    ("E2.2", "negative", {"shards-per-node": -1},
     "shards-per-node should be greater than 0, actually was -1"),
    ("E2.2", "zero", {"shards-per-node": 0},
     "shards-per-node should be greater than 0, actually was 0"),
    ("E2.2", "fraction", {"shards-per-node": 1.5},
     "shards-per-node should be a whole number, actually was 1.5"),
    ("E2.2", "absurd", {"shards-per-node": 10**6},
     "shards-per-node should not exceed 1024, actually was 1000000"),
    ("E2.2", "key", {"shards-per-node": 1, "routing-key": 5},
     "routing-key should be binary, actually was 5"),
    ("E2.2", "both", {"shards-per-node": 1, "stream-definition": "d"},
     "shards-per-node and stream-definition are mutually exclusive"),
    ("E1.2", "no name", {"stream-definition": 3}, "3 is not a valid stream definition name"),
    ("E2.15", "no choice", {"shards-per-node": 1, "shards-when-gone": "x"},
     '<<"x">> is none of drain, merge, keep, delete'),
    ("C3.2", "copies", {"replicas": 8}, "8 is not a valid number of replicas: expected 1 to 7"),
    ("C3.2", "copies as text", {"replicas": "3"},
     '<<"3">> is not a valid number of replicas: expected 1 to 7'),
    ("C3.2", "copies as bool", {"min-in-sync": True},
     "true is not a valid number of nodes in sync: expected 1 to 7"),
    ("C3.2", "more in sync", {"replicas": 2, "min-in-sync": 3},
     "min-in-sync is 3, more than 2 replicas"),
    ("C3.2", "more in sync than asked", {"initial-cluster-size": 1, "min-in-sync": 2},
     "min-in-sync is 2, more than 1 replicas"),
    ("C3.2", "argument only", {"max-priority": 3},
     '[{<<"max-priority">>,3}] are not recognised policy settings'),
]  # fmt: skip


@pytest.mark.parametrize(("definition", "text"), [proving(*case) for case in DEFINITIONS])
def test_a_definition_that_is_none_is_refused_in_rabbitmqs_words(
    definition: dict[str, Any], text: str
) -> None:
    assert refusal("policy", {"pattern": "^x", "definition": definition}) == failed(text)


@pytest.mark.parametrize(
    "definition",
    [
        proving(row, next(iter(definition)), definition)
        for row, definition in (
            ("C3.1", {"max-length": 0}), ("C3.1", {"max-length-bytes": 5}),
            ("C3.1", {"message-ttl": 2**40}), ("C3.1", {"expires": 1}),
            ("C3.1", {"overflow": "reject-publish-dlx"}), ("C3.1", {"max-age": "1D"}),
            ("C3.1", {"dead-letter-exchange": ""}), ("C3.1", {"dead-letter-routing-key": "k"}),
            ("C3.1", {"delivery-limit": -1}), ("C3.1", {"alternate-exchange": "a"}),
            ("C3.1", {"federation-upstream": "u"}), ("C3.1", {"federation-upstream-set": "all"}),
            ("C3.2",
             {"delayed-retry-type": "failed", "delayed-retry-min": 1, "delayed-retry-max": 9}),
            ("C3.2", {"consumer-disconnected-timeout": 0}),
            ("C3.2", {"consumer-timeout": 1000}),
            ("C3.2", {"dead-letter-strategy": "at-least-once"}), ("C3.2", {"queue-mode": "lazy"}),
            ("C3.2", {"queue-version": 2}), ("C3.2", {"max-in-memory-bytes": 0}),
            ("C3.2", {"stream-filter-size-bytes": 16}),
            ("C3.2", {"queue-leader-locator": "balanced"}),
            ("C3.2", {"queue-master-locator": "min-masters"}),
            ("C3.2", {"initial-cluster-size": 3}),
            ("C3.2", {"replicas": 7, "min-in-sync": 7}), ("C3.2", {"min-in-sync": 5}),
            ("C3.3", {"shards-per-node": 2, "routing-key": "1234"}),
            ("C3.3", {"stream-definition": "my_stream"}), ("E2.1", {"shards-per-node": "auto"}),
            ("E2.15", {"shards-when-gone": "keep", "shards-per-node": 1}),
            ("K10", {"ha-mode": "all"}),
        )
    ],
)  # fmt: skip
def test_every_setting_users_have_may_be_set(definition: dict[str, Any]) -> None:
    assert refusal("policy", {"pattern": "^x", "definition": definition}) == ""


POLICIES: list[tuple[str, Any, str]] = [
    ("not an object", [], failed("a policy is an object with pattern and definition")),
    ("nothing", {}, "[{key_missing,pattern},{key_missing,definition}]"),
    ("priority", {"pattern": "a", "definition": {"max-length": 1}, "priority": "a"},
     failed('priority should be a number, actually was <<"a">>')),
    ("apply-to", {"pattern": "a", "definition": {"max-length": 1}, "apply-to": "zz"},
     failed("apply-to 'zz' unrecognised; should be one of: 'queues', 'classic_queues', "
            "'quorum_queues', 'streams', 'exchanges', or 'all'")),
    ("pattern", {"pattern": 3, "definition": {"max-length": 1}},
     failed("pattern should be a binary but was 3")),
]  # fmt: skip


@pytest.mark.row("J1")
@pytest.mark.parametrize(
    ("value", "text"), [pytest.param(value, text, id=id) for id, value, text in POLICIES]
)
def test_a_policy_that_is_none_is_refused(value: Any, text: str) -> None:
    assert refusal("policy", value) == text


def test_a_pattern_that_is_none_is_refused() -> None:
    text = refusal("policy", {"pattern": "(", "definition": {"max-length": 1}})
    assert text.startswith(
        "Validation failed\n\npattern should be regular expression but is invalid: {"
    )


@pytest.mark.row("C3.4")
@pytest.mark.parametrize(
    ("key", "value", "may"),
    [
        pytest.param(key, value, may, id=key)
        for key, value, may in (
            ("expires", 1, True), ("message-ttl", 0, True), ("max-length", 1, True),
            ("max-length-bytes", 1, True), ("max-in-memory-length", 1, True),
            ("max-in-memory-bytes", 1, True), ("delivery-limit", 1, True),
            ("queue-version", 2, True), ("overflow", "drop-head", True),
            ("dead-letter-exchange", "a", False), ("consumer-timeout", 1, False),
            ("ha-mode", "all", False), ("alternate-exchange", "a", False),
        )
    ],
)  # fmt: skip
def test_an_operator_policy_has_limits_only(key: str, value: Any, may: bool) -> None:
    text = refusal("operator_policy", {"pattern": "", "definition": {key: value}})
    wanted = failed(f'[{{<<"{key}">>,{term(value)}}}] are not recognised policy settings')
    assert text == ("" if may else wanted)


@pytest.mark.parametrize(
    ("component", "value", "last"),
    [
        ("policy", {"mesage-ttl": 1}, "mesage-ttl; did you mean message-ttl?"),
        ("policy", {"x-message-ttl": 1, "zz": 1}, "x-message-ttl; did you mean message-ttl?"),
        ("policy", {"max_length": 1}, "max_length; did you mean max-length?"),
        ("policy", {"overflow": "rejct-publish"},
         '<<"rejct-publish">> is not a valid overflow value; did you mean reject-publish?'),
        ("operator_policy", {"expire": 1}, "expire; did you mean expires?"),
    ],
)  # fmt: skip
def test_a_misspelt_key_or_value_of_a_policy_has_the_nearest_name(
    component: str, value: dict[str, Any], last: str
) -> None:
    text = refusal(component, {"pattern": "", "definition": value})
    assert text.startswith("Validation failed\n\n") and text.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("component", "value", "last"),
    [
        ("vhost-limits", {"max-conections": 1}, "max-conections; did you mean max-connections?"),
        ("user-limits", {"max-channel": 1}, "max-channel; did you mean max-channels?"),
        ("stream-definition", {"shard-per-node": 1},
         "shard-per-node; did you mean shards-per-node?"),
        ("operator-policy", {}, "operator-policy; did you mean operator_policy?"),
        ("federation-upstrem", {}, "federation-upstrem; did you mean federation-upstream?"),
    ],
)  # fmt: skip
def test_a_misspelt_limit_or_component_has_the_nearest_name(
    component: str, value: dict[str, Any], last: str
) -> None:
    assert refusal(component, value).splitlines()[-1] == last


@pytest.mark.parametrize(
    ("component", "value"),
    [
        ("policy", policy({f"max-lenght-{number}": 1 for number in range(60_000)})),
        ("policy", policy({"max-lenght" * 400_000: 1})),
        ("policy", policy({"x": "y" * 4_000_000})),
        ("policy", policy({"x": [1] * 1_000_000})),
        ("policy", policy({"overflow": "rejct-publish" * 300_000})),
        ("policy", policy({"overflow": [1] * 1_000_000})),
        ("policy", policy({}) | {"apply-to": "queues" * 700_000}),
        ("stream-definition", {f"shard-per-node{number}": 1 for number in range(60_000)}),
        ("user-limits", {"max-channel" * 400_000: 1}),
        ("federation-upstrem" * 200_000, {}),
    ],
    ids=lambda given: given[:20] if isinstance(given, str) else "",
)
def test_megabytes_of_mistakes_get_a_short_answer_after_few_searches(
    component: str, value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda given, *_, **__: searches.append(given)
    )
    text = refusal(component, value)
    assert text.startswith("Validation failed\n\n") and len(text) < 12_000
    assert len(searches) <= 3 and all(len(given) <= 100 for given in searches)


def test_the_first_names_of_many_are_shown() -> None:
    text = refusal("policy", policy({f"x{number}": 1 for number in range(12)}))
    names = [f'{{<<"x{number}">>,1}}' for number in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7)]
    assert text == failed(f"[{','.join(names)},...] are not recognised policy settings")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "[]"), ([1, [None, True]], "[1,[null,true]]"), ({}, "#{}"), ("", '<<"">>'),
        ({"a": 1.5, "b": {"c": "d"}}, '#{<<"a">> => 1.5,<<"b">> => #{<<"c">> => <<"d">>}}'),
        ("y" * 995, f'<<"{"y" * 995}">>'[:1000] + "..."), ([5] * 501, "[" + "5," * 499 + "5..."),
        ("y" * 994, f'<<"{"y" * 994}">>'),
    ],
)  # fmt: skip
def test_a_value_is_shown_as_erlang_prints_it_up_to_1000_characters(value: Any, text: str) -> None:
    assert term(value) == text


PARAMETERS: list[tuple[str, str, str, str, Any, str]] = [
    ("J3", "unknown component", "/", "nosuch", {}, failed("component nosuch not found")),
    ("J3", "stream is known", "/", "stream", "4321", ""),
    ("J3", "stream-definition is known", "/", "stream-definition", {"shards-per-node": 2}, ""),
    ("J4", "any value", "", "", [1, "a"], ""),
    ("J4", "only without a vhost", "/", "", 1, failed("component  not found")),
    *[
        (row, f"{component} {value}", "/", component, value, failed(text) if text else "")
        for row, component, value, text in (
            ("E1.2", "stream-definition",
             {"local-username": "guest", "shards-per-node": 2, "routing-key": "1234"}, ""),
            ("E1.2", "stream-definition", {"shards-per-node": "auto"}, ""),
            ("E1.2", "stream-definition", {}, ""),
            ("E1.2", "stream-definition", 3,
             "stream-definition should be an object, actually was 3"),
            ("E1.2", "stream-definition", {"x": 1},
             'Unrecognised terms [{<<"x">>,1}] in stream-definition'),
            ("E1.2", "stream-definition", {"shards-per-node": 0},
             "shards-per-node should be greater than 0, actually was 0"),
            ("E1.2", "stream-definition", {"routing-key": 7},
             "routing-key should be binary, actually was 7"),
            ("E1.2", "stream-definition", {"local-username": 7},
             "local-username should be binary, actually was 7"),
        )
    ],
    ("I8", "unknown limit", "/", "vhost-limits", {"zz": 3},
     failed('Unrecognised terms [{<<"zz">>,3}] in limits')),
    ("I8", "not a number", "/", "vhost-limits", {"max-queues": "a"},
     failed('max-queues should be a number, actually was <<"a">>')),
    ("I8", "none", "/", "vhost-limits", [], ""),
    ("I8", "negative is none", "/", "vhost-limits", {"max-queues": -1, "max-connections": 5}, ""),
    ("I9", "unknown limit", "", "user-limits", {"zz": 5},
     failed('Unrecognised terms [{<<"zz">>,5}] in user-limits')),
    ("I9", "both", "", "user-limits", {"max-connections": 1, "max-channels": 2}, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("vhost", "component", "value", "text"),
    [proving(*case) for case in PARAMETERS],
)
def test_parameters(vhost: str, component: str, value: Any, text: str) -> None:
    assert refusal(component, value, vhost) == text


JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["pattern", "definition", "priority", "apply-to", "max-length", "overflow", "max-queues", "x"]
)


@given(
    st.sampled_from(
        ["policy", "operator_policy", "vhost-limits", "user-limits", "stream", "nosuch"]
    ),
    st.one_of(JSON, st.dictionaries(KEYS, st.one_of(JSON, st.dictionaries(KEYS, JSON)))),
)
def test_any_json_is_taken_or_refused_with_a_reason(component: str, value: Any) -> None:
    refusal(component, value)


@pytest.mark.row("E1.3")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        pytest.param("shards-per-node", 3, "", id="number"),
        pytest.param(
            "shards-per-node",
            "3",
            'shards-per-node should be a number, actually was <<"3">>',
            id="text",
        ),
        pytest.param("routing-key", "4321", "", id="key"),
        pytest.param(
            "routing-key",
            4321,
            "routing-key should be binary, actually was 4321",
            id="number as key",
        ),
        pytest.param("local-username", "guest", "", id="user"),
    ],
)
def test_global_parameters_of_streams(name: str, value: Any, text: str) -> None:
    if not text:
        return check_parameter("/", "stream", name, value)
    with pytest.raises(Refusal) as refused:
        check_parameter("/", "stream", name, value)
    assert refused.value.text == failed(text)


def test_nesting_has_a_bound() -> None:
    value: Any = []
    for _ in range(200):
        value = [value]
    assert refusal("stream", value) == "nested deeper than 64"


def test_missing_keys_are_named_as_erlang_does() -> None:
    assert key_missing(["a", "b"]) == "[{key_missing,a},{key_missing,b}]"
