"""Each change of what exists, as data: made by the controller alone, applied by everybody in the same order.

`catalog.Catalog.apply(change)` gives them meaning; `controller.definitions` keeps them on disk; they cross the
control link as msgpack. Objects are named by vhost and name; a Put of an existing one replaces it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Change(msgspec.Struct, tag_field="t", array_like=True, frozen=True, gc=False):
    """Base of all changes. None is part of a cycle: the collector need not look at 100,000 of them again and again."""


class VhostPut(Change, tag="vhost+", frozen=True):
    """A new vhost comes with its predeclared exchanges ("" and amq.*), without further changes.

    `default_queue_type`: of queues declared without one, "" as if it were classic. `is_protected`: from being deleted.
    `is_traced`: what its clients say and hear is copied.
    """

    name: str
    description: str = ""
    tags: list[str] = []
    default_queue_type: str = ""
    is_protected: bool = False
    is_traced: bool = False


class VhostDelete(Change, tag="vhost-", frozen=True):
    """Everything in it goes, permissions too."""

    name: str


class UserPut(Change, tag="user+", frozen=True):
    name: str
    password_hash: str  # base64(salt + digest), see passwords.py; "" refuses every password
    hashing_algorithm: str = "rabbit_password_hashing_sha256"
    tags: list[str] = []


class UserDelete(Change, tag="user-", frozen=True):
    name: str


class PermissionPut(Change, tag="permission+", frozen=True):
    vhost: str
    user: str
    configure: str
    write: str
    read: str


class PermissionDelete(Change, tag="permission-", frozen=True):
    vhost: str
    user: str


class TopicPermissionPut(Change, tag="topic-permission+", frozen=True):
    """Which routing keys of one topic exchange a user may publish and bind with, beside the permission on it."""

    vhost: str
    user: str
    exchange: str
    write: str
    read: str


class TopicPermissionDelete(Change, tag="topic-permission-", frozen=True):
    """`exchange` None: those of all exchanges."""

    vhost: str
    user: str
    exchange: str | None = None


class ExchangePut(Change, tag="exchange+", frozen=True):
    vhost: str
    name: str
    type: str
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}


class ExchangeDelete(Change, tag="exchange-", frozen=True):
    """Its bindings, in both directions, go with it."""

    vhost: str
    name: str


ACTIVE, DRAINING, KEPT = "active", "draining", "kept"  # what a shard queue is to its exchange


# Whether a shard queue keeps back what arrives, while keys move to it: told to (CLOSING), known to (CLOSED), and, once
# the bindings are others, until the queues that the keys come from have settled what they had (SETTLING).
OPEN, CLOSING, CLOSED, SETTLING = range(4)


class Cut(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a change of the number of shards left in one that is a stream (`cuts.py`). `number`: counts the
    changes of one exchange. It `gains` keys: what came to it by the change lies from `offset` on; else it may lose
    some: what came before the change lies below."""

    number: int
    offset: int
    gains: bool


class ShardOf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Which part of a stream exchange a queue is.

    `state`: active (bound, with `key`), draining (unbound; goes when it is empty), kept (unbound; stays). `cuts`: the
    oldest first.
    """

    exchange: str
    index: int
    key: str = ""
    state: str = ACTIVE
    held: int = OPEN
    cuts: tuple[Cut, ...] = ()


class QueuePut(Change, tag="queue+", frozen=True):
    """`owner`: "" or who holds it exclusively, as "door.incarnation.connection". `shard`: where it lives. `part`: of
    shard queues alone."""

    vhost: str
    name: str
    id: int
    shard: int
    durable: bool = True
    auto_delete: bool = False
    owner: str = ""
    arguments: dict[str, Any] = {}
    part: ShardOf | None = None
    paused: bool = False  # takes messages and gives none


class QueueDelete(Change, tag="queue-", frozen=True):
    """Its bindings go with it."""

    vhost: str
    name: str


class BindingPut(Change, tag="binding+", frozen=True):
    vhost: str
    source: str
    kind: str  # "queue" or "exchange": what `destination` is
    destination: str
    routing_key: str
    arguments: dict[str, Any] = {}


class BindingDelete(Change, tag="binding-", frozen=True):
    vhost: str
    source: str
    kind: str
    destination: str
    routing_key: str
    arguments: dict[str, Any] = {}


VHOST_LIMITS, USER_LIMITS = "vhost-limits", "user-limits"
GLOBAL = ""  # the component of global parameters
CLUSTER_NAME = "cluster_name"  # the global parameter that names the broker


class ParameterPut(Change, tag="parameter+", frozen=True):
    """Runtime parameters, policies ("policy"), operator policies ("operator_policy"), limits ("vhost-limits").

    Limits of users ("user-limits", named as the user) have no vhost, global parameters neither vhost nor component.
    """

    vhost: str  # "" for global parameters
    component: str
    name: str
    value: Any


class ParameterDelete(Change, tag="parameter-", frozen=True):
    vhost: str
    component: str
    name: str


AnyChange = (
    VhostPut | VhostDelete | UserPut | UserDelete | PermissionPut | PermissionDelete
    | TopicPermissionPut | TopicPermissionDelete | ExchangePut | ExchangeDelete
    | QueuePut | QueueDelete | BindingPut | BindingDelete | ParameterPut | ParameterDelete
)  # fmt: skip

_ONLY_MORE = frozenset((BindingPut, ExchangePut, QueuePut))


def is_only_more(changes: list[AnyChange] | None) -> bool:
    """Whether they take nothing away and ask nothing of who is connected. None: whatever may have changed."""
    return changes is not None and _ONLY_MORE.issuperset(map(type, changes))
