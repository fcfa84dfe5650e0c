"""Every pair of state and arrival: what the tables name happens, all else has its one answer."""

from __future__ import annotations

import itertools

import pytest

from shardmq.broker.amqp import ConnectionException
from shardmq.broker.amqp.states import (
    CHANNEL_DISCARDS,
    CHANNEL_HOLDS_OPEN,
    CHANNEL_RECEIVED,
    CONNECTION_DISCARDS,
    CONNECTION_RECEIVED,
    CONNECTION_SENT,
    ChannelState,
    ConnectionState,
    next_of_channel,
    next_of_connection,
)

ON_CONNECTION = [
    "protocol header",
    *(
        f"Connection.{name}"
        for name in (
            "Start", "StartOk", "Secure", "SecureOk", "Tune", "TuneOk", "Open", "OpenOk", "Close",
            "CloseOk", "Blocked", "Unblocked", "UpdateSecret", "UpdateSecretOk",
        )
    ),
]  # fmt: skip
ON_CHANNEL = [
    "Channel.Open", "Channel.Close", "Channel.CloseOk", "Basic.Publish", "method",
    "header", "header of no body", "body", "last body",
]  # fmt: skip
CONTENT = ON_CHANNEL[5:]
WORDS = dict(
    zip(
        ConnectionState,
        [
            "pre_init",
            "starting",
            "securing",
            "tuning",
            "opening",
            "opening",
            "running",
            "closing",
            "closing",
            "closed",
        ],
        strict=True,
    )
)  # RabbitMQ's
BY_CLIENT = {ChannelState.CLOSED_BY_CLIENT, ChannelState.CLOSED_BY_BOTH}
LEAVING = {ChannelState.CLOSING, *BY_CLIENT}


@pytest.mark.parametrize(
    ("state", "arrived"), [*itertools.product(ConnectionState, ON_CONNECTION)], ids=str
)
def test_every_pair_of_the_connection(state: ConnectionState, arrived: str) -> None:
    following = CONNECTION_RECEIVED.get((state, arrived))
    if following is not None:
        assert next_of_connection(state, arrived) is following
        return
    with pytest.raises(ConnectionException) as refused:
        next_of_connection(state, arrived, (10, 99))
    assert (refused.value.code, refused.value.class_id, refused.value.method_id) == (504, 10, 99)
    assert refused.value.text == f"unexpected method in connection state {WORDS[state]}"


@pytest.mark.parametrize(
    ("state", "arrived"), [*itertools.product(ChannelState, ON_CHANNEL)], ids=str
)
def test_every_pair_of_a_channel(state: ChannelState, arrived: str) -> None:
    following = CHANNEL_RECEIVED.get((state, arrived))
    if following is not None or state in LEAVING:
        assert next_of_channel(state, arrived) is following
        return
    with pytest.raises(ConnectionException) as refused:
        next_of_channel(state, arrived)
    if state is ChannelState.CLOSED and arrived not in CONTENT:
        expected = (504, "expected 'channel.open'")
    elif arrived == "Channel.Open":
        expected = (504, "second 'channel.open' seen")
    elif state in (ChannelState.CLOSED, ChannelState.OPEN):
        assert arrived in CONTENT
        expected = (505, "expected method frame, got non method frame instead")
    elif state is ChannelState.AWAITING_CONTENT_HEADER:
        expected = (
            505,
            "expected content header for class 60, got non content header frame instead",
        )
    else:
        expected = (505, "expected content body, got non content body frame instead")
    assert (refused.value.code, refused.value.text) == expected


def test_the_tables_speak_of_nothing_else() -> None:
    assert {arrived for _, arrived in CONNECTION_RECEIVED} <= set(ON_CONNECTION)
    assert {arrived for _, arrived in CHANNEL_RECEIVED} <= set(ON_CHANNEL)
    assert CHANNEL_DISCARDS == LEAVING and CHANNEL_HOLDS_OPEN == BY_CLIENT


def test_the_handshake_is_the_only_way_in_and_every_state_is_reached() -> None:
    steps = [
        ("received", "protocol header"),
        ("received", "Connection.StartOk"),
        ("sent", "Connection.Tune"),
        ("received", "Connection.TuneOk"),
        ("received", "Connection.Open"),
        ("sent", "Connection.OpenOk"),
    ]
    state, path = ConnectionState.AWAITING_HEADER, []
    for way, name in steps:
        path.append(state)
        state = (
            CONNECTION_RECEIVED[state, name] if way == "received" else CONNECTION_SENT[state, name]
        )
    assert state is ConnectionState.OPEN
    assert [*path, state] == sorted([*path, state])
    entering = [
        pair
        for table in (CONNECTION_RECEIVED, CONNECTION_SENT)
        for pair, to in table.items()
        if to is state
    ]
    assert sorted(entering) == [
        (ConnectionState.OPENING, "Connection.OpenOk"),
        (state, "Connection.UpdateSecret"),
    ]


@pytest.mark.parametrize("state", ConnectionState)
def test_a_client_may_close_in_every_state_that_has_begun(state: ConnectionState) -> None:
    answered = (state, "Connection.Close") in CONNECTION_RECEIVED
    begun = state is not ConnectionState.AWAITING_HEADER
    assert answered == (begun and state not in CONNECTION_DISCARDS - {ConnectionState.CLOSING})


@pytest.mark.parametrize("state", ChannelState)
def test_no_state_of_a_channel_is_a_trap(state: ChannelState) -> None:
    """A client can always get to an open channel.

    It needs only methods that are allowed, and our close-ok.
    """
    reached, edge = {state}, [state]
    while edge:
        at = edge.pop()
        following = {to for (before, _), to in CHANNEL_RECEIVED.items() if before is at}
        if at in BY_CLIENT:
            following.add(ChannelState.CLOSED)
        edge += following - reached
        reached |= following
    assert ChannelState.OPEN in reached
