from collections.abc import Callable

TARGETS: int
NOWHERE: int
CALLER: int
HERE: int
RENDEZVOUS: int
MODULUS: int
CHANCE: int
JUMP: int

class Published:
    def add(self, exchange: bytes, came: int, left: int) -> None: ...
    def report(self) -> dict[bytes, tuple[int, int]]: ...
    def forget(self, gone: Callable[[bytes], bool]) -> None: ...

class Routes:
    def __init__(self, seed: int = 1, published: Published | None = None) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...
    def learn_spread(
        self, exchange: bytes, how: int, members: list[tuple[int, int, int, int, bool]]
    ) -> bool: ...
    def learn_exchange(
        self,
        exchange: bytes,
        kind: int,
        targets: list[tuple[int, list[int]]],
        durable: bool,
        reach: int = 0,
    ) -> bool: ...
    def learn(
        self,
        line: bytes,
        kind: int,
        targets: list[tuple[int, list[int]]],
        durable: bool,
        reach: int = 0,
    ) -> None: ...

def key_hash(key: bytes) -> int: ...
def jump_winner(hashed: int, weights: list[int]) -> int: ...
def winners(hashes: list[int], members: list[tuple[int, int]]) -> list[int]: ...
def winner(hashed: int, members: list[tuple[int, int]]) -> int: ...
