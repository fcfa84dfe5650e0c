"""Look into the message files of a stopped broker, or rescue what can be read.

    python -m shardmq.shardd.store.tools verify  DIR
        check every record; print counts, and damage by file and byte range
    python -m shardmq.shardd.store.tools stats   DIR
        print JSON lines per segment and per store: live and dead messages, bytes
    python -m shardmq.shardd.store.tools dump    DIR
        print a line of JSON per message that is not settled
    python -m shardmq.shardd.store.tools salvage DIR OUT
        copy what is readable and not settled into the new directory OUT

DIR is one store (DATA/shard-00/<hash of the vhost>), one shard's directory, or the data directory
with all of them. Streams in DIR are inspected too: all their messages are counted and dumped, with
their offsets. Damage in one place of a stream costs no other message, so salvage copies the files
of a stream as they are.

The exit status is 0 when all is good and 1 when damage was found. The exit status is 2 for wrong
usage, when the broker runs, or when the files cannot be understood.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.errors import FormatTooNew, StoreError
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.tools.inspection import (
    NO_PRIORITY,
    NONE,
    PERSISTENT,
    Message,
    Tally,
    contents,
    is_store,
)
from shardmq.shardd.store.tools.salvage import salvage
from shardmq.shardd.store.tools.stream_inspection import StreamContents, is_stream

GOOD, DAMAGED, USAGE = 0, 1, 2
# A stream lies at most this many directories below the data directory, which has the lock.
LEVELS_MAX = 3


class Refused(Exception):
    """The command did nothing; the text says why."""


def main(arguments: list[str]) -> int:
    command, *paths = arguments or [""]
    if command not in COMMANDS or len(paths) != (2 if command == "salvage" else 1):
        print(__doc__, file=sys.stderr)
        return USAGE
    try:
        locks = hold_off_broker(paths[0])
        try:
            damage = COMMANDS[command](*paths)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of the pipe has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return GOOD
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
    """Take a shared lock on the data directory, so that no broker starts.

    Other tools that only read may share the lock. Returns the open lock files: the caller closes
    them. Raises Refused when a broker runs.
    """
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
                raise Refused(
                    f"{folder} is in use by the broker with pid {holder}: stop it first"
                ) from None
        folder = os.path.dirname(folder)
    return locks


def stores_in(directory: str) -> tuple[list[str], list[str]]:
    """Return the stores and the streams in a directory, as paths relative to the directory.

    The directory itself is ".". Raises Refused when the directory holds neither.
    """
    if not os.path.isdir(directory):
        raise Refused(f"{directory}: not a directory")
    stores, streams = [], []
    for path, folders, _ in os.walk(directory):
        folders.sort()
        relative = os.path.relpath(path, directory)
        level = 0 if relative == "." else relative.count("/") + 1
        if is_store(OsFiles(), path):
            stores.append(relative)
        elif is_stream(OsFiles(), path):
            streams.append(relative)
        if level >= LEVELS_MAX:
            folders.clear()
    if not stores and not streams:
        raise Refused(f"{directory}: no store's files in it")
    return stores, streams


def verify(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    stores, streams = stores_in(directory)
    for relative in stores:
        tally = Tally()
        segments, before = 0, len(damage)
        for one in contents(OsFiles(), f"{directory}/{relative}"):
            segments += 1
            tally.add(one)
            damage += told(relative, one.damage)
        places = damage[before:]
        print(
            f"{relative}: {segments} segments, {tally.records} records, {tally.messages} messages, "
            f"{tally.live_messages} of them not settled"
            + (f"; damaged places: {len(places)}, of {bytes_of(places)} bytes" if places else "")
        )
        kept = [
            name
            for name in OsFiles().list(f"{directory}/{relative}")
            if name.startswith("damaged.")
        ]
        if kept:
            print(
                f"{relative}: kept aside by former starts, remove when no longer wanted: "
                f"{', '.join(kept)}"
            )
    for relative in streams:
        stream = StreamContents(OsFiles(), f"{directory}/{relative}")
        tallies = list(stream.tallies())
        damage += told(relative, stream.damage)
        print(
            f"{relative}: a stream, {len(tallies)} segments, "
            f"{sum(one.chunks for one in tallies)} chunks, "
            f"{sum(one.messages for one in tallies)} messages, next offset {stream.next_offset}"
        )
    return damage


def bytes_of(damage: list[Damage]) -> int:
    return sum(one.stop - one.start for one in damage)


def stats(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    stores, streams = stores_in(directory)
    for relative in stores:
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
    for relative in streams:
        stream = StreamContents(OsFiles(), f"{directory}/{relative}")
        for segment in stream.tallies():
            file = os.path.normpath(f"{relative}/{segment.file}")
            print(json.dumps(dataclasses.asdict(segment) | {"file": file}))
        damage += told(relative, stream.damage)
    return damage


def dump(directory: str) -> list[Damage]:
    damage: list[Damage] = []
    stores, streams = stores_in(directory)
    for relative in stores:
        where = {} if relative == "." else {"store": relative}
        for one in contents(OsFiles(), f"{directory}/{relative}"):
            for message in one.messages():
                if message.live:
                    print(json.dumps(where | readable(message)))
            damage += told(relative, one.damage)
    for relative in streams:
        stream = StreamContents(OsFiles(), f"{directory}/{relative}")
        where = {} if relative == "." else {"stream": relative}
        for found in stream.messages():
            told_of_it = {"offset": found.offset, "timestamp": found.timestamp} | readable_stored(
                found.stored
            )
            print(json.dumps(where | told_of_it))
        damage += told(relative, stream.damage)
    return damage


def rescue(directory: str, target: str) -> list[Damage]:
    if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise Refused(f"{target}: there is something already; a new directory is wanted")
    if os.path.realpath(target).startswith(f"{os.path.realpath(directory)}/"):
        raise Refused(f"{target} lies in {directory}")
    damage: list[Damage] = []
    stores, streams = stores_in(directory)
    for relative in stores:
        outcome = salvage(
            OsFiles(), f"{directory}/{relative}", os.path.normpath(f"{target}/{relative}")
        )
        damage += told(relative, outcome.damage)
        print(
            f"{relative}: {outcome.messages} messages copied, "
            f"{outcome.references} counted per queue; "
            "left behind: "
            f"{outcome.settled} settled, {outcome.left_behind_bytes()} unreadable bytes"
            + ("" if outcome.clean else "; no clean stop, so all count as delivered before")
        )
    for relative in streams:
        shutil.copytree(
            f"{directory}/{relative}", os.path.normpath(f"{target}/{relative}"), dirs_exist_ok=True
        )
        print(f"{relative}: a stream, its files copied as they are")
    print(
        f"to go on with what was rescued, put the stores in {target} in the place of those in "
        f"{directory}"
    )
    return damage


def told(relative: str, damage: list[Damage]) -> list[Damage]:
    for one in damage:
        file = os.path.normpath(f"{relative}/{one.file}")
        where = f"bytes {one.start} to {one.stop} ({one.stop - one.start} bytes)"
        if one.offsets is not None:
            where += f", offsets {one.offsets[0]} to {one.offsets[1] - 1}"
        print(f"{file}: {one.what}, {where}: {MEANINGS[one.what]}", file=sys.stderr)
    return damage


def readable(message: Message) -> dict[str, object]:
    return {
        "segment": message.segment,
        "position": message.position,
        "queues": list(message.live),
        "timestamp": message.timestamp,
        "ttl_ms": None if message.ttl_ms == NONE else message.ttl_ms,
        "priority": None if message.priority == NO_PRIORITY else message.priority,
        "persistent": bool(message.flags & PERSISTENT),
    } | readable_stored(message.stored)


def readable_stored(stored: bytes) -> dict[str, object]:
    body_bytes, props_bytes = struct.unpack_from("<II", stored)
    key = 9 + stored[8]
    props = key + 1 + stored[key]
    return {
        "exchange": stored[9:key].decode(errors="replace"),
        "routing_key": stored[key + 1 : props].decode(errors="replace"),
        "properties_base64": base64.b64encode(stored[props : props + props_bytes]).decode(),
        "body_bytes": body_bytes,
        "body_base64": base64.b64encode(stored[props + props_bytes :]).decode(),
    }


MEANINGS = {
    "torn": "the end was not written whole and not confirmed; the next start cuts it off",
    "corrupt": "messages in it are lost, all others can be read",
    "header": "what is in the file cannot be told; its messages are lost",
    "unreadable": (
        "the disk does not give these bytes; messages in them are lost, all others can be read"
    ),
    "mendable": (
        "the header is damaged but the index tells it; the next start mends it, nothing is lost"
    ),
    "missing": "the file is not there, with all messages in it: put it back",
    "untrue": (
        "the index does not say what is in the segment; removed, the next start makes it anew"
    ),
}

COMMANDS: dict[str, Callable[..., list[Damage]]] = {
    "verify": verify,
    "stats": stats,
    "dump": dump,
    "salvage": rescue,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
