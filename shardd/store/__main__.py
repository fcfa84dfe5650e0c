"""Look into the directory of a stopped store: python -m shardd.store list|dump|verify DIR

Reads only. `list`: a line per segment. `dump`: a JSON line per message that is not settled. `verify`: every record's
crc, indexes aside. Exit status: 0 good, 1 damage found, 2 wrong usage.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Iterator

from shardd.store import record
from shardd.store.errors import StoreError
from shardd.store.files import OsFiles
from shardd.store.recovery import Damage, Loaded, Reader
from shardd.store.segment import file_name, parse_name

GOOD, DAMAGED, USAGE = 0, 1, 2
ABSTRACT = struct.Struct("<QIIHBB")
NONE = 0xFFFFFFFF


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return USAGE
    command, directory = arguments
    try:
        names = OsFiles().list(directory)
    except OSError as error:
        print(error, file=sys.stderr)
        return USAGE
    if names and not any(name == "state" or name.startswith("lost.") or parse_name(name) for name in names):
        print(f"{directory}: not a store, which is DATA/shard-NN/<hash of the vhost>", file=sys.stderr)
        return USAGE  # that nothing is damaged where nothing was looked at is no answer
    damage = [Damage(name, "header", 0, 0) for name in names if name.startswith("lost.")]
    try:
        for number in sorted(parsed[1] for parsed in map(parse_name, names) if parsed and parsed[0] == "msgs"):
            loaded = Reader(OsFiles(), directory, False).load(number, repair=False, index=False)
            if loaded is not None:
                damage += loaded.damage
                COMMANDS[command](directory, loaded)
    except (StoreError, OSError) as error:
        print(error, file=sys.stderr)
        return DAMAGED
    for one in damage:
        print(f"{one.file}: {one.what}, bytes {one.start} to {one.stop}", file=sys.stderr)
    return DAMAGED if damage else GOOD


def settled_of(directory: str, loaded: Loaded) -> set[int]:
    pairs = Reader(OsFiles(), directory, False).load_acks(loaded.segment, repair=False)
    return set(struct.unpack(f"<{len(pairs) // 8}Q", pairs))


def list_segment(directory: str, loaded: Loaded) -> None:
    segment = loaded.segment
    records = list(abstracts(loaded.abstracts))
    line = {
        "segment": file_name("msgs", segment.number),
        "bytes": segment.used,
        "records": len(records),
        "messages": sum(len(places) for _, _, places in records),
        "references": sum(len(queues) * len(places) for _, queues, places in records),
        "settled": len(settled_of(directory, loaded)),
        "damage": [one.what for one in loaded.damage],
    }
    print(json.dumps(line))


def dump_segment(directory: str, loaded: Loaded) -> None:
    settled = settled_of(directory, loaded)
    handle = OsFiles().open(loaded.segment.path, read_only=True)
    data = bytearray(loaded.segment.used)
    with memoryview(data) as view:
        OsFiles().read_into(handle, view, 0)
    OsFiles().close(handle)
    for (timestamp, ttl_ms, _, _, priority, flags), queues, places in abstracts(loaded.abstracts):
        for position in places:
            left = [queue for queue in queues if queue << 32 | position not in settled]
            if left:
                line = {"segment": loaded.segment.number, "position": position, "queues": left, "timestamp": timestamp}
                line |= {
                    "ttl_ms": None if ttl_ms == NONE else ttl_ms,
                    "priority": None if priority == 255 else priority,
                }
                print(json.dumps(line | {"persistent": bool(flags & 1)} | decode_message(data, position)))


def verify_segment(directory: str, loaded: Loaded) -> None:
    """Loading was the check."""
    records = sum(1 for _ in abstracts(loaded.abstracts))
    damage = f"damaged in {len(loaded.damage)} places" if loaded.damage else "good"
    print(f"{file_name('msgs', loaded.segment.number)}: {records} records, {damage}")


def abstracts(data: bytes) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(header, queue ids, positions) of each record."""
    at = 0
    while at < len(data):
        header = ABSTRACT.unpack_from(data, at)
        _, _, count, queues, _, _ = header
        at += ABSTRACT.size
        ids = struct.unpack_from(f"<{queues}I", data, at)
        places = struct.unpack_from(f"<{2 * count}I", data, at + 4 * queues)
        at += 4 * queues + 8 * count
        yield header, ids, places[::2]


def decode_message(data: bytearray, at: int) -> dict[str, object]:
    end = at + record.message_bytes_at(data, at)
    body_bytes, props_bytes = struct.unpack_from("<II", data, at)
    key = at + 9 + data[at + 8]
    props = key + 1 + data[key]
    return {
        "exchange": bytes(data[at + 9 : key]).decode(errors="replace"),
        "routing_key": bytes(data[key + 1 : props]).decode(errors="replace"),
        "properties_base64": base64.b64encode(data[props : props + props_bytes]).decode(),
        "body_bytes": body_bytes,
        "body_base64": base64.b64encode(data[end - body_bytes : end]).decode(),
    }


COMMANDS = {"list": list_segment, "dump": dump_segment, "verify": verify_segment}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
