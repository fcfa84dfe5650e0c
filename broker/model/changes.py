"""The changes of what exists, as data.

The controller alone makes changes; everybody applies them in the same order with
`catalog.Catalog.apply`. `controller.stored.definitions` keeps changes on disk, and they cross the
control link as msgpack. Objects are named by vhost and name. A Put of an object that exists
replaces it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Change(msgspec.Struct, tag_field="t", array_like=True, frozen=True, gc=False):
    """Base of all changes.

    A change is never part of a reference cycle, so the garbage collector need not visit 100,000 of
    them again and again.
    """


class VhostPut(Change, tag="vhost+", frozen=True):
    """Add a vhost, with its predeclared exchanges ("" and amq.*), or change its settings.

    default_queue_type: the type of queues that are declared without one; "" is classic.
    is_protected: the vhost cannot be deleted.
    is_traced: messages of its clients are copied to amq.rabbitmq.trace.
    replicas: on how many nodes its queues are to be if nothing else says so; 0: as the broker says.
    min_in_sync: how many of them must have a message before a confirm; 0: as the broker says.
    """

    name: str
    description: str = ""
    tags: list[str] = []
    default_queue_type: str = ""
    is_protected: bool = False
    is_traced: bool = False
    replicas: int = 0
    min_in_sync: int = 0


class VhostDelete(Change, tag="vhost-", frozen=True):
    """Delete a vhost with everything in it, permissions too."""

    name: str


class UserPut(Change, tag="user+", frozen=True):
    """Add a user, or change the password or tags."""

    name: str
    password_hash: str  # base64(salt + digest), see passwords.py; "" refuses every password
    hashing_algorithm: str = "rabbit_password_hashing_sha256"
    tags: list[str] = []


class UserDelete(Change, tag="user-", frozen=True):
    """Delete a user with all permissions and limits of that user."""

    name: str


class PermissionPut(Change, tag="permission+", frozen=True):
    """Set what a user may do in a vhost: three regular expressions over names."""

    vhost: str
    user: str
    configure: str
    write: str
    read: str


class PermissionDelete(Change, tag="permission-", frozen=True):
    """Delete a permission."""

    vhost: str
    user: str


class TopicPermissionPut(Change, tag="topic-permission+", frozen=True):
    """Set which routing keys of one topic exchange a user may publish (write) and bind with (read).

    The user needs the permission for the exchange, too.
    """

    vhost: str
    user: str
    exchange: str
    write: str
    read: str


class TopicPermissionDelete(Change, tag="topic-permission-", frozen=True):
    """Delete a topic permission; `exchange` None: those for all exchanges."""

    vhost: str
    user: str
    exchange: str | None = None


class ExchangePut(Change, tag="exchange+", frozen=True):
    """Add or replace an exchange."""

    vhost: str
    name: str
    type: str
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}


class ExchangeDelete(Change, tag="exchange-", frozen=True):
    """Delete an exchange with all bindings from and to it."""

    vhost: str
    name: str


ACTIVE, DRAINING, KEPT = "active", "draining", "kept"  # what a shard queue is to its exchange


# Whether a shard queue keeps back what arrives while keys move to it. CLOSING: the shard has been
# told to. CLOSED: the shard is known to. SETTLING: the bindings are new, and the queues that the
# keys come from have not settled all that they had.
OPEN, CLOSING, CLOSED, SETTLING = range(4)


class Cut(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The place where a change of the number of shards cuts a stream (`cuts.py`).

    number: counts the changes of one exchange.
    gains: the stream gains keys, whose messages lie from `offset` on. Otherwise it may lose keys,
    whose messages lie below `offset`.
    """

    number: int
    offset: int
    gains: bool


class ShardOf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The part of a stream exchange that a shard queue holds.

    state: active (bound with `key`), draining (unbound, deleted when empty) or kept (unbound).
    cuts: the oldest first.
    """

    exchange: str
    index: int
    key: str = ""
    state: str = ACTIVE
    held: int = OPEN
    cuts: tuple[Cut, ...] = ()


# The step of a move. CHOSEN: the new life is made, and nobody uses it. BEGUN: consumers are there.
# PASSING: messages go there. SHUT: publishers wait for a moment. CALLED_OFF: consumers are at the
# old place again. A stream is copied while its move is CHOSEN. HELD: publishers to the stream wait
# for a moment. ARRIVED: publishers and consumers are at the new place.
BEGUN, PASSING, SHUT, CALLED_OFF, CHOSEN, HELD, ARRIVED = range(1, 8)
# With these steps, the catalog names the old life, and the other one is the new life.
TO_COME = (CHOSEN, CALLED_OFF, HELD)


class Moving(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The other life of a queue that moves from one shard to another.

    id, shard: the life that the move leaves; with a step of TO_COME, the new life.
    """

    id: int
    shard: int
    step: int


class QueuePut(Change, tag="queue+", frozen=True):
    """Add or replace a queue.

    owner: the connection of an exclusive queue, as "door.incarnation.connection", else "".
    shard: the number of the shard where the queue lives.
    part: which shard queue it is, if it is one of a stream exchange.
    born: the id that a stream had before it moved for the first time; 0: it has not moved.
    """

    vhost: str
    name: str
    id: int
    shard: int
    durable: bool = True
    auto_delete: bool = False
    owner: str = ""
    arguments: dict[str, Any] = {}
    part: ShardOf | None = None
    paused: bool = False  # the queue takes messages and gives none
    moving: Moving | None = None
    born: int = 0

    @property
    def stream_id(self) -> int:
        """Return the id by which readers know a stream, wherever it lives."""
        return self.born or self.id


def other_life(queue: QueuePut) -> QueuePut:
    """Return the other life of a queue that moves, with the arguments of the queue."""
    assert queue.moving is not None
    return msgspec.structs.replace(queue, id=queue.moving.id, shard=queue.moving.shard)


def lives(queue: QueuePut) -> list[QueuePut]:
    """Return the queue as each shard knows it that has messages of it, the older ones first."""
    return [queue] if queue.moving is None else [other_life(queue), queue]


def counted(queue: QueuePut) -> list[QueuePut]:
    """Return the lives that have different messages: the messages of a stream are only copied."""
    is_copy = queue.moving is not None and queue.moving.step in (*TO_COME, ARRIVED)
    return [queue] if is_copy else lives(queue)


def taking(queue: QueuePut) -> QueuePut:
    """Return the life of a queue to which its messages are published."""
    stays = queue.moving is None or queue.moving.step in (*TO_COME, ARRIVED)
    return queue if stays else other_life(queue)


class QueueDelete(Change, tag="queue-", frozen=True):
    """Delete a queue with all bindings to it."""

    vhost: str
    name: str


class BindingPut(Change, tag="binding+", frozen=True):
    """Add a binding."""

    vhost: str
    source: str
    kind: str  # whether `destination` is a "queue" or an "exchange"
    destination: str
    routing_key: str
    arguments: dict[str, Any] = {}


class BindingDelete(Change, tag="binding-", frozen=True):
    """Delete a binding."""

    vhost: str
    source: str
    kind: str
    destination: str
    routing_key: str
    arguments: dict[str, Any] = {}


VHOST_LIMITS, USER_LIMITS = "vhost-limits", "user-limits"
GLOBAL = ""  # the component of global parameters
# The component of parameters without a vhost that name the nodes which are drained; the value is
# true.
DRAINED_NODES = "drained-nodes"
CLUSTER_NAME = "cluster_name"  # the global parameter that names the broker


class ParameterPut(Change, tag="parameter+", frozen=True):
    """Set a runtime parameter.

    Policies ("policy"), operator policies ("operator_policy") and limits of vhosts ("vhost-limits")
    are parameters, too. Limits of users ("user-limits", named as the user) have no vhost. Global
    parameters have neither vhost nor component.
    """

    vhost: str  # "" for global parameters
    component: str
    name: str
    value: Any


class ParameterDelete(Change, tag="parameter-", frozen=True):
    """Delete a runtime parameter."""

    vhost: str
    component: str
    name: str


AnyChange = (
    VhostPut | VhostDelete | UserPut | UserDelete | PermissionPut | PermissionDelete
    | TopicPermissionPut | TopicPermissionDelete | ExchangePut | ExchangeDelete
    | QueuePut | QueueDelete | BindingPut | BindingDelete | ParameterPut | ParameterDelete
)  # fmt: skip

_ONLY_MORE = frozenset((BindingPut, ExchangePut, QueuePut))
# No login depends on these.
TOPOLOGY = _ONLY_MORE | {BindingDelete, ExchangeDelete, QueueDelete}


def is_only_more(changes: list[AnyChange] | None) -> bool:
    """Return whether the changes only add and ask nothing of clients that are connected.

    None stands for any changes.
    """
    return changes is not None and _ONLY_MORE.issuperset(map(type, changes))
