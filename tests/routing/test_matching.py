"""Each exchange type against the plainest possible statement of its rule."""

from __future__ import annotations

import datetime
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.routing.matching import HeaderRule, Message, Target
from shardmq.broker.routing.types import TYPES
from tests.reference.topic import matches, words

SECOND = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
VALUES = st.sampled_from([None, 1, True, 1.0, 2, SECOND, "1", b"1", [1], {"n": 1}])
TABLES = st.dictionaries(st.sampled_from(["h", "k", "x-h"]), VALUES, max_size=3)
MODES = st.sampled_from([None, "all", "any", "all-with-x", "any-with-x"])
ARGUMENTS = st.builds(
    lambda mode, table: {**table, **({"x-match": mode} if mode else {})}, MODES, TABLES
)
KEYS = st.sampled_from(["", "a", "a.b", "b", "#", "a.*"])
TARGETS = st.builds(Target, st.sampled_from(["queue", "exchange"]), st.sampled_from("pqr"))
BINDINGS = st.lists(st.tuples(KEYS, ARGUMENTS, TARGETS), max_size=15)


def naive(type: str, key: str, arguments: dict, routing_key: str, headers: dict) -> bool:
    if type == "fanout":
        return True
    if type == "direct":
        return key == routing_key
    if type == "topic":
        return matches(words(key), words(routing_key))
    mode = arguments.get("x-match", "all")
    said = []
    for name, wanted in arguments.items():
        if name == "x-match" or (name.startswith("x-") and not mode.endswith("with-x")):
            continue
        here = name in headers
        same = here and plain(headers[name]) == plain(wanted)
        said.append(here and (wanted is None or same))
    return any(said) if mode.startswith("any") else all(said)


def plain(value: object) -> tuple[str, object]:
    """Numbers and times are numbers, text and bytes are bytes; a boolean is neither."""
    if isinstance(value, datetime.datetime):
        return "number", value.timestamp()
    if type(value) in (int, float):
        return "number", value
    return (
        ("bytes", value.encode()) if isinstance(value, str) else (value.__class__.__name__, value)
    )


@given(
    st.sampled_from(["direct", "fanout", "headers", "topic"]), BINDINGS, st.randoms(), KEYS, TABLES
)
def test_matches_exactly_the_targets_of_matching_bindings_whatever_came_and_went(
    type, bindings, random, routing_key, headers
) -> None:
    matcher = TYPES[type]({})
    for binding in bindings:
        matcher.add(*binding)
    random.shuffle(bindings)
    while True:
        expected = {
            t for key, arguments, t in bindings if naive(type, key, arguments, routing_key, headers)
        }
        found = list(matcher.match(Message(routing_key, headers)))
        assert set(found) == expected
        assert max(Counter(found).values(), default=1) == 1
        if not bindings:
            return
        matcher.remove(*bindings.pop())


def test_a_wanted_void_asks_for_presence_only() -> None:
    rule = HeaderRule.of({"h": None})
    assert rule.matches({"h": "anything"})
    assert not rule.matches({})


def test_all_of_nothing_matches_and_any_of_nothing_does_not() -> None:
    assert HeaderRule.of({}).matches({})
    assert not HeaderRule.of({"x-match": "any"}).matches({"h": 1})
