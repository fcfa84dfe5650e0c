"""Front doors in memory, as the parts of the controller see `DoorLinks`.

Whoever needs more than this file has adds it in a subclass. `test_fake_doors.py` compares the
methods with those of `DoorLinks`, so that a change of these is made here, and here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange
from tests.support.catalogs import rebuilt


class FakeDoor(NamedTuple):
    """The link to one front door. `read` is called to read the binds that it has ahead."""

    number: int = 0
    read: Callable[[], None] = lambda: None

    def read_binds(self) -> None:
        self.read()


class FakeDoors:
    """One front door, with a copy of the catalog if one is given.

    With `hold` it applies changes only in `apply_all`. Without a copy all is in force at once.
    """

    def __init__(self, catalog: Catalog | None = None) -> None:
        self._copy = None if catalog is None else rebuilt(catalog.version, catalog.changes())
        self.hold = False
        self.closed: list[tuple[str, int, str]] = []
        self.told: list[list[AnyChange]] = []
        self.told_by: list[set[str]] = []  # whose binds ahead they are, if of nobody else
        self.other_versions: dict[int, int] = {}
        self._unapplied: list[AnyChange] = []
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    @property
    def copy(self) -> Catalog:
        assert self._copy is not None, "this front door has no copy"
        return self._copy

    def hand_out(
        self,
        version: int,
        changes: list[AnyChange],
        waited: bool = True,
        by: Collection[str] = (),
    ) -> None:
        self.told.append(changes)
        self.told_by.append(set(by))
        if self._copy is not None:
            self._unapplied.extend(changes)
        if not self.hold:
            self.apply_all()

    def apply_all(self) -> None:
        for change in self._unapplied:
            self.copy.apply(change)
        self._unapplied.clear()
        self._settle()

    def say_together(self, say: Callable[[], None]) -> None:
        say()

    def doors(self) -> list[FakeDoor]:
        return [FakeDoor(read=lambda: self.read_binds())]

    def read_binds(self) -> None:
        """Read the binds that the front door has ahead; a test may replace this."""

    def heard_by(self, owner: str) -> bool:
        return False

    def when_in_force(self, version: int, then: Callable[[], None]) -> None:
        self._waiting.append((version, then))
        self._settle()

    def close_connection(self, owner: str, code: int, text: str) -> None:
        self.closed.append((owner, code, text))

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None:
        self.closed.append((owner, channel, tag))

    def _settle(self) -> None:
        while self._waiting and (self._copy is None or self._waiting[0][0] <= self._copy.version):
            self._waiting.pop(0)[1]()
