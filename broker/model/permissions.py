"""The permissions of users in vhosts and on the routing keys of topic exchanges.

A permission is a regular expression over names. It is unanchored, as in RabbitMQ. What a user may
do is asked for with each message and method, so the answers are remembered.

`INTERNAL_USER` stands for this broker itself, as a client of its own. It may do everything in each
vhost, without a permission. RabbitMQ's user of direct connections, `none`, is the same.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final, Literal

from shardmq.broker.model import patterns
from shardmq.broker.model.changes import (
    PermissionDelete,
    PermissionPut,
    TopicPermissionDelete,
    TopicPermissionPut,
)

Right = Literal["configure", "write", "read"]

DEFAULT_EXCHANGE_RIGHTS_NAME = "amq.default"
# No user of the catalog has this name: the decision of UserPut refuses it.
INTERNAL_USER: Final = "\0none"
# The mechanism by which bridges log in at the socket of a front door for this broker's processes.
# The response is the name of the user.
DIRECT: Final = "DIRECT"
RIGHTS_REMEMBERED_MAX = 10_000  # names per user and vhost whose expressions were tried
NOTHING: Final = re.compile(r"(?!)")


class Permissions:
    """The permissions of all users. `vhosts` has the names of the vhosts that exist."""

    def __init__(self, vhosts: Container[str]) -> None:
        self._vhosts = vhosts
        self._rights: dict[tuple[str, str], _Rights] = {}  # by vhost and user
        # By vhost and user, then by exchange.
        self._topic_rights: dict[tuple[str, str], dict[str, _TopicRights]] = {}

    @property
    def puts(self) -> dict[tuple[str, str], PermissionPut]:
        return {key: rights.put for key, rights in self._rights.items()}

    @property
    def topic_puts(self) -> list[TopicPermissionPut]:
        return [
            rights.put for of_user in self._topic_rights.values() for rights in of_user.values()
        ]

    def may_enter(self, user: str, vhost: str) -> bool:
        """Return whether the user may open a connection to the vhost: any permission will do."""
        return (vhost, user) in self._rights or self._is_internal(user, vhost)

    def may(self, user: str, vhost: str, right: Right, name: str) -> bool:
        """Return whether the user has the right to the thing of this name."""
        rights = self._rights.get((vhost, user))
        if rights is None:
            return self._is_internal(user, vhost)
        return rights.allow(right, name or DEFAULT_EXCHANGE_RIGHTS_NAME)

    def may_all(self, user: str, vhost: str, name: str) -> bool:
        """Return whether the user may configure, write and read the thing of this name."""
        rights = self._rights.get((vhost, user))
        if rights is None:
            return self._is_internal(user, vhost)
        return rights.allow_all(name or DEFAULT_EXCHANGE_RIGHTS_NAME)

    def _is_internal(self, user: str, vhost: str) -> bool:
        return user == INTERNAL_USER and vhost in self._vhosts

    def has_topic(self, user: str, vhost: str) -> bool:
        """Return whether the user has a topic permission for any exchange of the vhost."""
        return (vhost, user) in self._topic_rights

    def may_topic(
        self, user: str, vhost: str, right: Literal["write", "read"], exchange: str, key: str
    ) -> bool:
        """Return whether the user may use the routing key at a topic exchange.

        A user without a topic permission for the exchange may use every key. The right to the
        exchange itself is asked for with `may`.
        """
        rights = self._topic_rights.get((vhost, user), {}).get(exchange)
        return rights is None or rights.allow(right, key)

    def put(self, put: PermissionPut) -> None:
        """Set a permission, if the vhost exists."""
        if put.vhost in self._vhosts:
            self._rights[put.vhost, put.user] = _Rights(put)

    def delete(self, gone: PermissionDelete) -> None:
        self._rights.pop((gone.vhost, gone.user), None)

    def put_topic(self, put: TopicPermissionPut) -> None:
        """Set a topic permission, if the vhost exists."""
        if put.vhost in self._vhosts:
            of_user = self._topic_rights.setdefault((put.vhost, put.user), {})
            of_user[put.exchange] = _TopicRights(put)

    def delete_topic(self, gone: TopicPermissionDelete) -> None:
        of_user = self._topic_rights.get((gone.vhost, gone.user), {})
        if gone.exchange is None:
            of_user.clear()
        else:
            of_user.pop(gone.exchange, None)
        if not of_user:
            self._topic_rights.pop((gone.vhost, gone.user), None)

    def forget_vhost(self, vhost: str) -> None:
        self._forget(0, vhost)

    def forget_user(self, user: str) -> None:
        self._forget(1, user)

    def _forget(self, part: int, name: str) -> None:
        """Delete all permissions whose key has this name as its vhost (0) or user (1)."""
        for key in [key for key in self._rights if key[part] == name]:
            del self._rights[key]
        for key in [key for key in self._topic_rights if key[part] == name]:
            del self._topic_rights[key]


def shown_user(user: str) -> str:
    """Return the name of a user as people see it."""
    return user.removeprefix("\0")


class _Rights:
    """The three expressions of one user in one vhost, with what they have answered so far.

    A change of the permission makes a new object.
    """

    __slots__ = ("_answers", "_patterns", "put")

    def __init__(self, put: PermissionPut) -> None:
        self.put = put
        self._patterns = {
            "configure": pattern_of(put.configure),
            "write": pattern_of(put.write),
            "read": pattern_of(put.read),
        }
        self._answers: dict[tuple[str, str], bool] = {}

    def allow(self, right: str, name: str) -> bool:
        answer = self._answers.get((right, name))
        if answer is None:
            if len(self._answers) >= RIGHTS_REMEMBERED_MAX:
                self._answers.clear()
            answer = self._answers[right, name] = self._patterns[right].search(name) is not None
        return answer

    def allow_all(self, name: str) -> bool:
        answer = self._answers.get(("all", name))
        if answer is None:
            answer = all(self.allow(right, name) for right in self._patterns)
            self._answers["all", name] = answer
        return answer


class _TopicRights:
    """The two expressions of one user over the routing keys of one topic exchange."""

    __slots__ = ("_patterns", "put")

    def __init__(self, put: TopicPermissionPut) -> None:
        self.put = put
        self._patterns = {
            "write": pattern_of(expanded(put.write, put)),
            "read": pattern_of(expanded(put.read, put)),
        }

    def allow(self, right: str, key: str) -> bool:
        return self._patterns[right].search(key) is not None


def expanded(regex: str, put: TopicPermissionPut) -> str:
    """Put the names in for {username} and {vhost}, whatever characters the names have."""
    user, vhost = re.escape(put.user), re.escape(put.vhost)
    return regex.replace("{username}", user).replace("{vhost}", vhost)


def pattern_of(regex: str) -> patterns.Pattern:
    """Compile an expression; the empty one, and one that is refused, match nothing."""
    try:
        return patterns.compiled(regex) if regex else NOTHING
    except patterns.BadPattern:
        return NOTHING
