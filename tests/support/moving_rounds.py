"""Rounds of kills while queues move between the shards all the time, with one ledger over all."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import threading
import time
import urllib.request
from typing import Any

from tests.support.kill_rounds import FANOUT, LATE, QUEUES, Rounds
from tests.support.real_broker import RealBroker

MOVED = (*QUEUES, *FANOUT, *LATE)
LOOK_S = 0.2
# The steps in which the old shard hands out no more (controller/decisions/moves.py).
HANDED_OVER = ("passing", "shut")
# Kills that end the whole broker leave less time for moves than a round has.
KINDS = {
    "shard": 30, "shard again": 10, "front-door": 16, "controller": 20, "both shards": 8,
    "controller and shard": 10, "everything": 6,
}  # fmt: skip


class Mover(threading.Thread):
    """Moves one queue after the other to the other shard until it is told to end."""

    def __init__(self, broker: RealBroker, rounds: MovingRounds, seed: int) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._rounds = rounds
        self._random = random.Random(seed)
        self.ends = threading.Event()
        self.moves = 0

    def run(self) -> None:
        while not self.ends.wait(self._random.uniform(0.0, 0.3)):
            self._move(self._random.choice(MOVED))

    def _move(self, name: str) -> None:
        """Move one queue, and tell the ledger between which moments it moved.

        An answer may be late or lost: the queue may move from the moment before the request to the
        moment when the controller says that it does not.
        """
        ledger = self._rounds.ledger
        ledger.move_begins(name, time.monotonic())
        with contextlib.suppress(OSError):  # what is asked was killed, or the other shard
            row = self._ask("GET", name)
            if "moving" not in row:
                self._ask("POST", f"{name}/relocation", {"shard": 1 - row["shard"]})
        while not self.ends.is_set():
            with contextlib.suppress(OSError):
                row = self._ask("GET", name)
                if "moving" not in row:
                    ledger.move_ends(name, time.monotonic())
                    self.moves += 1
                    return
                if row["moving"]["step"] in HANDED_OVER:
                    ledger.handed_over(name, time.monotonic())
            self.ends.wait(LOOK_S)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self._broker.http}/api/queues/%2F/{path}", method=method, data=data
        )
        request.add_header("Authorization", f"Basic {base64.b64encode(b'guest:guest').decode()}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")


class MovingRounds(Rounds):
    def __init__(self, broker: RealBroker, seed: int, **more: Any) -> None:
        super().__init__(broker, seed, KINDS, **more)
        self.mover = Mover(broker, self, seed)

    def run(self, rounds: int, rest_each: int = 5) -> dict[str, int]:
        self.mover.start()
        try:
            return super().run(rounds, rest_each) | {"moves": self.mover.moves}
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.load.state()}") from error
        finally:
            self.mover.ends.set()
            self.mover.join()
