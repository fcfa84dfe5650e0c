"""Look into the message files of a stopped broker, or rescue what can be read.

    python -m shardd.store verify  DIR       check every record; counts, and damage by file and byte range
    python -m shardd.store stats   DIR       JSON lines per segment and per store: live and dead messages and bytes
    python -m shardd.store dump    DIR       a line of JSON per message that is not settled
    python -m shardd.store salvage DIR OUT   copy what is readable and not settled into the new directory OUT

DIR is one store (DATA/shard-00/<hash of the vhost>), one shard's directory, or the data directory with all of them.
Exit status: 0 good, 1 damage found, 2 wrong usage, the broker runs, or the files cannot be understood.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import json
import os
import struct
import sys
from collections.abc import Callable

from shardd.store.errors import FormatTooNew, StoreError
from shardd.store.files import OsFiles
from shardd.store.inspection import NO_PRIORITY, NONE, Message, Tally, contents, is_store
from shardd.store.recovery import Damage
from shardd.store.salvage import salvage

GOOD, DAMAGED, USAGE = 0, 1, 2
# From a store up to the data directory, which has the lock.
LEVELS_MAX = 2


class Refused(Exception):
    """Nothing was done; the text says why."""


def main(arguments: list[str]) -> int:
    command, *paths = arguments or [""]
    if command not in COMMANDS or len(paths) != (2 if command == "salvage" else 1):
        print(__doc__, file=sys.stderr)
        return USAGE
    try:
        locks = hold_off_broker(paths[0])
        try:
            damage = COMMANDS[command](*paths)
        finally:
            for lock in locks:
                os.close(lock)
    except (Refused, FormatTooNew, OSError) as error:
        print(error, file=sys.stderr)
        return USAGE
    except StoreError as error:
        print(error, file=sys.stderr)
        return DAMAGED
    return DAMAGED if damage else GOOD


def hold_off_broker(directory: str) -> list[int]:
    """The data directory's lock, shared with others who only look. No broker starts while they do."""
    folder = os.path.realpath(directory)
    locks = []
    for _ in range(LEVELS_MAX + 1):
        if os.path.exists(f"{folder}/.lock"):
            lock = os.open(f"{folder}/.lock", os.O_RDONLY | os.O_CLOEXEC)
            locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                os.close(lock)
                raise Refused(f"{folder} is in use by the broker with pid {holder}: stop it first") from None
        folder = os.path.dirname(folder)
    return locks


def stores_in(directory: str) -> list[str]:
    """Paths of the stores in it, relative to it; itself is "."."""
    if not os.path.isdir(directory):
        raise Refused(f"{directory}: not a directory")
    found = []
    for path, folders, _ in os.walk(directory):
        folders.sort()
        relative = os.path.relpath(path, directory)
        if is_store(OsFiles(), path):
            found.append(relative)
            folders.clear()
        elif relative.count("/") >= LEVELS_MAX - 1 and relative != ".":
            folders.clear()
    if not found:
        raise Refused(f"{directory}: no store's files in it")
    return found


def verify(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    for relative in stores_in(directory):
        tally = Tally()
        segments = 0
        for one in contents(OsFiles(), f"{directory}/{relative}"):
            segments += 1
            tally.add(one)
            damage += told(relative, one.damage)
        print(
            f"{relative}: {segments} segments, {tally.records} records, {tally.messages} messages, "
            f"{tally.live_messages} of them not settled"
        )
    return damage


def stats(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    for relative in stores_in(directory):
        total, segments = Tally(), 0
        for one in contents(OsFiles(), f"{directory}/{relative}"):
            tally = Tally()
            tally.add(one)
            total.add(one)
            segments += 1
            file = os.path.normpath(f"{relative}/{os.path.basename(one.segment.path)}")
            print(json.dumps({"file": file} | dataclasses.asdict(tally)))
            damage += told(relative, one.damage)
        print(json.dumps({"store": relative, "segments": segments} | dataclasses.asdict(total)))
    return damage


def dump(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    for relative in stores_in(directory):
        where = {} if relative == "." else {"store": relative}
        for one in contents(OsFiles(), f"{directory}/{relative}"):
            for message in one.messages():
                if message.live:
                    print(json.dumps(where | readable(message)))
            damage += told(relative, one.damage)
    return damage


def rescue(directory: str, target: str) -> list[Damage]:
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise Refused(f"{target}: there is something already; a new directory is wanted")
    if os.path.realpath(target).startswith(f"{os.path.realpath(directory)}/"):
        raise Refused(f"{target} lies in {directory}")
    damage: list[Damage] = []
    for relative in stores_in(directory):
        outcome = salvage(OsFiles(), f"{directory}/{relative}", os.path.normpath(f"{target}/{relative}"))
        damage += told(relative, outcome.damage)
        print(
            f"{relative}: {outcome.messages} messages copied, {outcome.references} counted per queue; left behind: "
            f"{outcome.settled} settled, {outcome.left_behind_bytes()} unreadable bytes"
            + ("" if outcome.clean else "; no clean stop, so all count as delivered before")
        )
    return damage


def told(relative: str, damage: list[Damage]) -> list[Damage]:
    for one in damage:
        file = os.path.normpath(f"{relative}/{one.file}")
        print(f"{file}: {one.what}, bytes {one.start} to {one.stop}", file=sys.stderr)
    return damage


def readable(message: Message) -> dict[str, object]:
    stored = message.stored
    body_bytes, props_bytes = struct.unpack_from("<II", stored)
    key = 9 + stored[8]
    props = key + 1 + stored[key]
    return {
        "segment": message.segment,
        "position": message.position,
        "queues": list(message.live),
        "timestamp": message.timestamp,
        "ttl_ms": None if message.ttl_ms == NONE else message.ttl_ms,
        "priority": None if message.priority == NO_PRIORITY else message.priority,
        "persistent": bool(message.flags & 1),
        "exchange": stored[9:key].decode(errors="replace"),
        "routing_key": stored[key + 1 : props].decode(errors="replace"),
        "properties_base64": base64.b64encode(stored[props : props + props_bytes]).decode(),
        "body_bytes": body_bytes,
        "body_base64": base64.b64encode(stored[props + props_bytes :]).decode(),
    }


COMMANDS: dict[str, Callable[..., list[Damage]]] = {
    "verify": verify,
    "stats": stats,
    "dump": dump,
    "salvage": rescue,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
