"""Random changes for the catalog, in few names so that they meet."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from shardmq.broker.model import changes as c

VHOSTS = st.sampled_from(["/", "v"])
NAMES = st.sampled_from(["a", "b", "c"])
ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"x": 1}, {"x": True}, {"a": "s", "b": [1, 2.5, None]}]
)
KINDS = st.sampled_from(["queue", "exchange"])
TYPES = st.sampled_from(["direct", "fanout", "topic", "headers"])
KEYS = st.sampled_from(["", "k", "k.#"])
SOURCES = st.one_of(NAMES, st.just("amq.topic"))
IDS = st.integers(1, 10**6)


def any_change() -> st.SearchStrategy[c.AnyChange]:
    binding = (VHOSTS, SOURCES, KINDS, NAMES, KEYS, ARGUMENTS)
    return st.one_of(
        st.builds(c.VhostPut, VHOSTS),
        st.builds(c.VhostDelete, VHOSTS),
        st.builds(c.UserPut, NAMES, st.just("")),
        st.builds(c.UserDelete, NAMES),
        st.builds(c.PermissionPut, VHOSTS, NAMES, st.just(".*"), st.just("^a"), st.just("")),
        st.builds(c.PermissionDelete, VHOSTS, NAMES),
        st.builds(c.TopicPermissionPut, VHOSTS, NAMES, NAMES, st.just("^{username}"), st.just("b")),
        st.builds(c.TopicPermissionDelete, VHOSTS, NAMES, st.one_of(st.none(), NAMES)),
        st.builds(c.ParameterPut, VHOSTS, NAMES, NAMES, st.just({"k": 1})),
        st.builds(
            c.ParameterPut, VHOSTS, st.sampled_from(["policy", "operator_policy"]), NAMES, policy()
        ),
        st.builds(c.ParameterDelete, VHOSTS, st.sampled_from(["policy", "operator_policy"]), NAMES),
        st.builds(c.ParameterDelete, VHOSTS, NAMES, NAMES),
        definition(),
        st.builds(c.BindingPut, *binding),
        st.builds(c.BindingDelete, *binding),
    )


def part() -> st.SearchStrategy[c.ShardOf]:
    states = st.sampled_from([c.ACTIVE, c.DRAINING, c.KEPT])
    cut = st.builds(c.Cut, st.integers(1, 9), st.integers(0, 1 << 62), st.booleans())
    cuts = st.lists(cut, max_size=3).map(tuple)
    return st.builds(c.ShardOf, NAMES, st.integers(0, 3), KEYS, states, st.integers(0, 3), cuts)


def policy() -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for the value of a parameter, which is now and then no valid policy."""
    definitions = st.dictionaries(
        st.sampled_from(["max-length", "message-ttl", "delivery-limit"]),
        st.integers(0, 9),
        min_size=1,
    )
    return st.fixed_dictionaries(
        {
            "pattern": st.sampled_from(["^a", "b", "", "("]),
            "definition": st.one_of(definitions, st.just({"alternate-exchange": "amq.fanout"})),
            "priority": st.integers(-1, 2),
            "apply-to": st.sampled_from(
                ["all", "queues", "exchanges", "classic_queues", "quorum_queues"]
            ),
        }
    )


def definition() -> st.SearchStrategy[c.AnyChange]:
    """Exchanges, queues, bindings: what the log keeps."""
    binding = (VHOSTS, SOURCES, KINDS, NAMES, KEYS, ARGUMENTS)
    return st.one_of(
        st.builds(
            c.ExchangePut,
            VHOSTS,
            NAMES,
            TYPES,
            st.booleans(),
            st.booleans(),
            st.booleans(),
            ARGUMENTS,
        ),
        st.builds(c.ExchangeDelete, VHOSTS, NAMES),
        st.builds(
            c.QueuePut,
            VHOSTS,
            NAMES,
            IDS,
            st.integers(0, 3),
            st.booleans(),
            st.booleans(),
            st.sampled_from(["", "", "0.1.7"]),
            ARGUMENTS,
            st.one_of(st.none(), part()),
            moving=st.one_of(
                st.none(), st.builds(c.Moving, IDS, st.integers(0, 3), st.integers(1, 7))
            ),
            born=st.one_of(st.just(0), IDS),
        ),
        st.builds(c.QueueDelete, VHOSTS, NAMES),
        st.builds(c.BindingPut, *binding),
        st.builds(c.BindingDelete, *binding),
    )


def bindings() -> st.SearchStrategy[c.AnyChange]:
    return st.builds(c.BindingPut, VHOSTS, SOURCES, KINDS, NAMES, KEYS, ARGUMENTS)
