"""The order that a client must keep, as tables: for a connection and for each of its channels.

What is not in a table is out of order, unless the state is among those that discard: what a client
sent before it heard of our close is read and forgotten.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from shardmq.broker.amqp.errors import ConnectionException
from shardmq.broker.amqp.frames import CHANNEL_OPEN
from shardmq.broker.amqp.spec import CHANNEL_ERROR, PUBLISH, UNEXPECTED_FRAME


class ConnectionState(IntEnum):
    AWAITING_HEADER = 0  # the protocol header
    AWAITING_START_OK = 1
    AUTHENTICATING = 2  # the caller decides: tune() or close()
    AWAITING_TUNE_OK = 3
    AWAITING_OPEN = 4
    OPENING = 5  # the caller decides: open-ok or close()
    OPEN = 6
    CLOSING = 7  # connection.close sent
    CLOSED_BY_CLIENT = 8  # connection.close received, close-ok not yet sent
    CLOSED = 9


class ChannelState(IntEnum):
    CLOSED = 0
    OPEN = CHANNEL_OPEN
    AWAITING_CONTENT_HEADER = 2
    AWAITING_BODY = 3
    CLOSING = 4  # channel.close sent
    CLOSED_BY_CLIENT = 5  # channel.close received, close-ok not yet sent
    CLOSED_BY_BOTH = 6  # channel.close sent and received, close-ok not yet sent


# Next state of a connection by what the client said on channel 0.
CONNECTION_RECEIVED: Final = {
    (ConnectionState.AWAITING_HEADER, "protocol header"): ConnectionState.AWAITING_START_OK,
    (ConnectionState.AWAITING_START_OK, "Connection.StartOk"): ConnectionState.AUTHENTICATING,
    (ConnectionState.AWAITING_TUNE_OK, "Connection.TuneOk"): ConnectionState.AWAITING_OPEN,
    (ConnectionState.AWAITING_OPEN, "Connection.Open"): ConnectionState.OPENING,
    (ConnectionState.OPEN, "Connection.UpdateSecret"): ConnectionState.OPEN,
    (ConnectionState.AUTHENTICATING, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.AWAITING_START_OK, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.AWAITING_TUNE_OK, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.AWAITING_OPEN, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.OPENING, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.OPEN, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.CLOSING, "Connection.Close"): ConnectionState.CLOSED_BY_CLIENT,
    (ConnectionState.CLOSING, "Connection.CloseOk"): ConnectionState.CLOSED,
}

# Next state of a connection by what we said on channel 0; other methods of ours change nothing.
CONNECTION_SENT: Final = {
    (ConnectionState.AUTHENTICATING, "Connection.Tune"): ConnectionState.AWAITING_TUNE_OK,
    (ConnectionState.OPENING, "Connection.OpenOk"): ConnectionState.OPEN,
    (ConnectionState.CLOSED_BY_CLIENT, "Connection.CloseOk"): ConnectionState.CLOSED,
}

# Connections in these states read nothing but close and close-ok.
CONNECTION_DISCARDS: Final = frozenset(
    {ConnectionState.CLOSING, ConnectionState.CLOSED_BY_CLIENT, ConnectionState.CLOSED}
)

# Next state of a channel by what the client said on it. "method": any but those named.
CHANNEL_RECEIVED: Final = {
    (ChannelState.CLOSED, "Channel.Open"): ChannelState.OPEN,
    # Both sides closed, and the client's close was answered already.
    (ChannelState.CLOSED, "Channel.CloseOk"): ChannelState.CLOSED,
    (ChannelState.OPEN, "Channel.Close"): ChannelState.CLOSED_BY_CLIENT,
    (ChannelState.OPEN, "Channel.CloseOk"): ChannelState.OPEN,  # answers nothing
    (ChannelState.OPEN, "Basic.Publish"): ChannelState.AWAITING_CONTENT_HEADER,
    (ChannelState.OPEN, "method"): ChannelState.OPEN,
    (ChannelState.AWAITING_CONTENT_HEADER, "header"): ChannelState.AWAITING_BODY,
    (ChannelState.AWAITING_CONTENT_HEADER, "header of no body"): ChannelState.OPEN,
    (ChannelState.AWAITING_BODY, "body"): ChannelState.AWAITING_BODY,
    (ChannelState.AWAITING_BODY, "last body"): ChannelState.OPEN,
    (ChannelState.CLOSING, "Channel.Close"): ChannelState.CLOSED_BY_BOTH,
    (ChannelState.CLOSING, "Channel.CloseOk"): ChannelState.CLOSED,
}

# Channels in these states discard what their table does not name.
CHANNEL_DISCARDS: Final = frozenset(
    {ChannelState.CLOSING, ChannelState.CLOSED_BY_CLIENT, ChannelState.CLOSED_BY_BOTH}
)

# In these states channel.open stays unread until our close-ok: it opens the number again.
CHANNEL_HOLDS_OPEN: Final = frozenset({ChannelState.CLOSED_BY_CLIENT, ChannelState.CLOSED_BY_BOTH})

# Nothing but close-ok is sent in these states.
CHANNEL_SILENT: Final = frozenset(
    {ChannelState.CLOSED, ChannelState.CLOSING, ChannelState.CLOSED_BY_BOTH}
)


def next_of_connection(
    state: ConnectionState, arrived: str, ids: tuple[int, int] = (0, 0)
) -> ConnectionState:
    """Return the state after `arrived` (a method's name) on channel 0.

    `ids` are class and method of what arrived. Raises ConnectionException when it is out of order.
    """
    try:
        return CONNECTION_RECEIVED[state, arrived]
    except KeyError:
        text = f"unexpected method in connection state {_STATE_WORDS[state]}"
        raise ConnectionException(CHANNEL_ERROR, text, *ids) from None


def next_of_channel(
    state: ChannelState, arrived: str, ids: tuple[int, int] = (0, 0)
) -> ChannelState | None:
    """Return the state after `arrived` on a channel, or None to discard it.

    `ids` are class and method of what arrived, if it is a method. Raises ConnectionException when
    it is out of order.
    """
    following = CHANNEL_RECEIVED.get((state, arrived))
    if following is not None or state in CHANNEL_DISCARDS:
        return following
    if state == ChannelState.CLOSED and arrived not in _CONTENT:
        raise ConnectionException(CHANNEL_ERROR, "expected 'channel.open'", *ids)
    if arrived == "Channel.Open":
        raise ConnectionException(CHANNEL_ERROR, "second 'channel.open' seen", *ids)
    awaited = (
        PUBLISH
        if state in (ChannelState.AWAITING_CONTENT_HEADER, ChannelState.AWAITING_BODY)
        else (0, 0)
    )
    raise ConnectionException(UNEXPECTED_FRAME, _EXPECTED[state], *awaited)


_CONTENT: Final = frozenset({"header", "header of no body", "body", "last body"})

# RabbitMQ's words.
_EXPECTED: Final = {
    ChannelState.CLOSED: "expected method frame, got non method frame instead",
    ChannelState.OPEN: "expected method frame, got non method frame instead",
    ChannelState.AWAITING_CONTENT_HEADER: (
        "expected content header for class 60, got non content header frame instead"
    ),
    ChannelState.AWAITING_BODY: "expected content body, got non content body frame instead",
}

_STATE_WORDS: Final = {
    ConnectionState.AWAITING_HEADER: "pre_init",
    ConnectionState.AWAITING_START_OK: "starting",
    ConnectionState.AUTHENTICATING: "securing",
    ConnectionState.AWAITING_TUNE_OK: "tuning",
    ConnectionState.AWAITING_OPEN: "opening",
    ConnectionState.OPENING: "opening",
    ConnectionState.OPEN: "running",
    ConnectionState.CLOSING: "closing",
    ConnectionState.CLOSED_BY_CLIENT: "closing",
    ConnectionState.CLOSED: "closed",
}
