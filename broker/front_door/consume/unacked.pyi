from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C")

RUN_S_MAX: float

class Run(NamedTuple, Generic[C]):
    first_tag: int
    last_tag: int
    consumer: C
    epoch: int
    first_number: int
    at: float

class UnknownTag(Exception):
    tag: int
    def __init__(self, tag: int) -> None: ...

class Unacked(Generic[C]):
    count: int
    def add(
        self,
        first_tag: int,
        count: int,
        consumer: C,
        epoch: int,
        first_number: int,
        at: float = 0.0,
    ) -> None: ...
    def has(self, tag: int) -> bool: ...
    def take_through(self, tag: int) -> list[Run[C]]: ...
    def take(self, first: int, last: int) -> Iterator[Run[C]]: ...
    def runs(self) -> Iterator[Run[C]]: ...
    def of(self, consumer: C) -> Iterator[Run[C]]: ...
    def put_back(self, run: Run[C]) -> None: ...

def subsumed(
    ranges: list[tuple[int, int, int, bool]], is_outstanding: Callable[[int], bool]
) -> list[tuple[int, int, int, bool]]: ...
