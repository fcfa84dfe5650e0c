"""Rounds of harm to the connections between front doors, controller and shards, under one load."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from tests.support.kill_rounds import QUIET_S, SETTINGS, Rounds
from tests.support.real_broker import REMOTE_COMMAND, RealBroker, wait_until
from tests.support.relay import Relay, harm
from tests.support.remote_broker import KEYS, RECONNECTING, VARIABLE

# How long a session may be silent here: harm that is not seen at once is seen after it.
SILENT_S = 2.0
# How often, of a hundred.
KINDS = {"harm": 80, "shard": 8, "front-door": 6, "controller": 6}


def new_keys(silent_s: float = SILENT_S) -> dict[str, str | float]:
    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode(), "silent_s": silent_s}


@contextlib.contextmanager
def started(
    directory: Path, relay: Relay | None, *, reconnecting: bool = False, shards: int = 2
) -> Iterator[tuple[RealBroker, dict[int, str], dict[str, str | float]]]:
    """Start a broker whose shards are reached through the relay.

    Yields the broker, the addresses of its shards, and its keys.
    """
    keys = new_keys()
    environment = {KEYS: json.dumps(keys)}
    if reconnecting:
        environment[RECONNECTING] = "1"
    seen, relayed = directory / "shards.json", directory / "relayed.json"
    environment[VARIABLE] = str(relayed)

    def put_between() -> None:
        wait_until(seen.exists, "the addresses of the shards")
        real = json.loads(seen.read_text())
        made = {shard: relay.to(at) for shard, at in real.items()} if relay is not None else real
        relayed.with_suffix(".new").write_text(json.dumps(made))
        relayed.with_suffix(".new").rename(relayed)

    threading.Thread(target=put_between, daemon=True).start()
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS)
    broker = RealBroker(
        directory / "data",
        shards=shards,
        front_doors=2,
        more=("--config", str(settings)),
        command=REMOTE_COMMAND,
        environment=environment,
    )
    addresses = {int(shard): at for shard, at in json.loads(seen.read_text()).items()}
    try:
        yield broker, addresses, keys
        if not reconnecting:  # a broker that is broken on purpose need not end well
            broker.stop()
    finally:
        broker.clean_up()


class CutRounds(Rounds):
    """Rounds with the relay of a broker that `started` has started."""

    def __init__(
        self,
        broker: RealBroker,
        relay: Relay,
        seed: int,
        kinds: dict[str, int] | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        super().__init__(broker, seed, KINDS if kinds is None else kinds, quiet_s)
        self._relay = relay

    def note_end(self) -> None:
        """Note that a connection has ended: what the peer held comes again."""
        self.ledger.was_cut(time.monotonic())

    def _kill(self) -> None:
        (kind,) = self.random.choices(list(self.kinds), self.kinds.values())
        if kind != "harm":
            shard, door = self.random.randrange(2), self.random.randrange(2)
            index = {"shard": shard, "front-door": door, "controller": 0}[kind]
            self.done.append(f"{time.strftime('%H:%M:%S')} {kind} {index}")
            self._kill_some([(kind, index)])
            return
        what = harm(self._relay, self.random, SILENT_S)
        self.done.append(f"{time.strftime('%H:%M:%S')} {what}")
