"""Pairs of a key and a value in etcd: what is asked about them, what is answered, what fails.

Keys are texts, values are bytes. A *revision* is the number of a change of the whole store; each
pair has the revisions at which it was created and last changed, and an absent key has 0 for both.
The module does no I/O and imports little, because every process of a node may need its errors.
"""

from __future__ import annotations

from msgspec import Struct


class EtcdAway(Exception):
    """No endpoint of etcd answered in time.

    `unknown` is True if etcd may have carried out what was asked. A transaction is never sent
    again then: the caller reads the keys and decides.
    """

    def __init__(self, text: str, unknown: bool = False) -> None:
        super().__init__(text)
        self.unknown = unknown


class EtcdRefused(Exception):
    """Etcd has answered that it will not do what was asked. Nothing was changed."""


class LeaseGone(EtcdRefused):
    """The lease has expired or was revoked, and its keys are gone."""


class Pair(Struct, frozen=True):
    """A key with its value, its revisions and the lease that it ends with (0: none)."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int = 0


class Deleted(Struct, frozen=True):
    """A key that was deleted, or that has ended with its lease, at a revision."""

    key: str
    mod_revision: int


class Listing(Struct, frozen=True):
    """All pairs below a prefix, ordered by key, as they were at `revision` of the store.

    A watch yields a listing when it cannot say which changes it missed: the caller compares.
    """

    pairs: tuple[Pair, ...]
    revision: int


class Changes(Struct, frozen=True):
    """Changes that a watch has seen, in their order. A transaction is never cut in two.

    `revision` is that of the last change.
    """

    changes: tuple[Pair | Deleted, ...]
    revision: int


class Compare(Struct, frozen=True):
    """A condition for a transaction to succeed: each value given here is that of the key.

    `create_revision=0` says that the key is absent. Raises ValueError if no value is given.
    """

    key: str
    mod_revision: int | None = None
    create_revision: int | None = None
    value: bytes | None = None

    def __post_init__(self) -> None:
        if (self.mod_revision, self.create_revision, self.value) == (None, None, None):
            raise ValueError(f"nothing to compare {self.key} with")


class Put(Struct, frozen=True):
    """Set a key, which then ends with `lease`, or lasts (0)."""

    key: str
    value: bytes
    lease: int = 0


class Delete(Struct, frozen=True):
    """Delete a key if it is there."""

    key: str


class Get(Struct, frozen=True):
    """Read a key. The outcome of the transaction has the pair."""

    key: str


Operation = Put | Delete | Get


class Outcome(Struct, frozen=True):
    """The outcome of a transaction.

    `succeeded` is True if all compares held, so that `then` was carried out, and False if
    `otherwise` was. `pairs` has what each Get of these operations read, in order: None for an
    absent key.
    """

    succeeded: bool
    revision: int
    pairs: tuple[Pair | None, ...]


class Grant(Struct, frozen=True):
    """A new lease, and the seconds that it lasts. Etcd may give more than was asked for."""

    lease: int
    ttl_s: int
