"""The keys of a cluster in etcd, and the values at them, which are JSON.

    /shardmq/NAME/nodes/ID      Node     ends with the lease of the node's supervisor
    /shardmq/NAME/shards/N      Copies   the claim of a shard: its home, and the nodes with copies
    /shardmq/NAME/copies/N      Record   of `rules`: who leads a shard that has copies
    /shardmq/NAME/replicas/N    Replicas how many copies a shard has that is in a set (`replicas`)
    /shardmq/NAME/controller    Record   who leads the catalog

A newer version may add fields. Unknown fields are ignored, and are lost when an older node writes
the record, so an added field must not matter until every node knows it.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from shardmq.cluster.versions import Range, Versions

CLUSTER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
NODES_MAX: Final = 255
# The shards of all nodes. The packer of a front door keeps a bit for each in a word.
SHARDS_MAX: Final = 64
# The front doors of one node have the numbers from that of the node times this one on.
DOORS_PER_NODE: Final = 256
KEY_DIGITS_MAX: Final = 9  # of the number at the end of a key
# How the names of the ports of shards begin in the record of a node; the number follows. At the
# second one the node takes those who have copies, as long as it leads the shard.
SHARD_PORT: Final = "shard-"
COPIES_PORT: Final = "copies-"
# The folder of the data directory that has the copies of shards of other nodes.
COPIES_FOLDER: Final = "copies"

# The term of a claim whose home is the node that has made the shard.
FIRST_HOME: Final = 1

# The versions of a node that says none.
FIRST: Final = Versions(streams=Range(1, 1), wire=Range(2, 2), catalog=Range(1, 1))

NodeNumber = Annotated[int, Meta(ge=0, lt=NODES_MAX)]
Count = Annotated[int, Meta(ge=0)]


# What msgspec raises for bytes that are no JSON of the type: its own errors; UnicodeDecodeError, a
# ValueError, for texts that are not UTF-8; and RecursionError for JSON that is nested too deeply.
BAD_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)


class BadRecord(Exception):
    """A value in etcd is not a record of its kind. The text names the key and the fault."""


class KeyNames:
    """The names of the keys of one cluster. Raises ValueError for a bad name of a cluster."""

    def __init__(self, cluster: str) -> None:
        if not CLUSTER_NAME.fullmatch(cluster):
            raise ValueError(
                f"{cluster!r} is no name of a cluster: 1 to 64 letters, digits, '.', '-' and '_'"
            )
        self.all = f"/shardmq/{cluster}/"
        self.nodes = f"{self.all}nodes/"
        self.shards = f"{self.all}shards/"
        self.copies = f"{self.all}copies/"
        self.replicas = f"{self.all}replicas/"
        self.controller = f"{self.all}controller"

    def node(self, number: int) -> str:
        """Return the key of a node."""
        return f"{self.nodes}{number}"

    def shard(self, number: int) -> str:
        """Return the key of a shard."""
        return f"{self.shards}{number}"

    def copies_of(self, number: int) -> str:
        """Return the key of the record of a shard that has copies."""
        return f"{self.copies}{number}"

    def replicas_of(self, number: int) -> str:
        """Return the key of the numbers of a shard that is in a set."""
        return f"{self.replicas}{number}"


def number_in(key: str) -> int:
    """Return the number at the end of the key of a node or a shard. Raises BadRecord."""
    number = key.rpartition("/")[2]
    if not (number.isascii() and number.isdigit() and len(number) <= KEY_DIGITS_MAX):
        raise BadRecord(f"{key}: the key does not end with a number")
    return int(number)


class Node(Struct, frozen=True):
    """A node that is alive: where it is reached and what it is.

    `incarnation` is a higher number for each life of the node. `ports` are by the name of the
    service, such as amqp, http and cluster. `versions` are those that the node understands, and
    `version` is that of the program, for people.
    """

    number: NodeNumber
    name: str
    address: str
    ports: dict[str, Annotated[int, Meta(ge=1, le=65535)]]
    version: str
    cores: Count
    incarnation: Count
    front_doors: Count = 0
    versions: Versions = FIRST


class Copies(Struct, frozen=True):
    """The claim of a shard by its home, the node with the number `leader`.

    term: FIRST_HOME, and one more for each home that followed one that was forgotten. Such a home
        has the shard among its copies.
    members: the numbers of the nodes that have, or are to have, a copy, the home among them. Who
        leads a shard with copies says the record at `copies/N`.
    """

    term: Count
    leader: NodeNumber
    in_sync: list[NodeNumber]
    members: list[NodeNumber]

    def __post_init__(self) -> None:
        if self.leader not in self.in_sync:
            raise ValueError("the leader is not in in_sync")
        if not set(self.in_sync) <= set(self.members):
            raise ValueError("a node of in_sync is not among the members")


_Record = TypeVar("_Record", Node, Copies)


def encoded(record: Node | Copies) -> bytes:
    """Return the value for etcd."""
    return msgspec.json.encode(record)


def decoded(key: str, value: bytes, kind: type[_Record]) -> _Record:
    """Return the record that is the value of a key. Raises BadRecord."""
    try:
        return msgspec.json.decode(value, type=kind)
    except BAD_JSON as error:
        raise BadRecord(f"{key}: no {kind.__name__.lower()}: {error}") from None
