"""Errors of bridges, all expected: each ends one try of one bridge, and its text is the reason."""

from __future__ import annotations


class LinkFailed(Exception):
    """A connection could not be made, ended, or is of no use. The text has no secrets."""


class PeerSilent(LinkFailed):
    """Nothing comes from a peer any more, which may still take the connection for open."""


class _Closed(LinkFailed):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ChannelClosed(_Closed):
    """A peer closed the channel, with AMQP's reply code and text."""


class ConnectionClosed(_Closed):
    """A peer closed the connection, with AMQP's reply code and text."""


class Unread(LinkFailed):
    """The source has forgotten all that was to move, and the destination has not read all of it.

    Another try cannot move it.
    """
