"""The catalog on disk.

`definitions.amqp`, a log of exchanges, queues and bindings as the AMQP frames that made them. Little endian:

    header  8s magic | u32 format | u32 crc32 of the rest | u64 version | u32 last queue id | u8 n, boot id[n]
    record  u32 length of what follows the checksum | u32 crc32 of it
            u64 version | u32 queue id | u16 shard | u8 flags (1 = durable, 2 = part of an exchange, 4 = with cuts)
            u8 n, vhost[n] | u8 n, owner[n]
            of a part: u8 n, exchange[n] | u8 n, binding key[n] | u8 n, state or state:held[n] | u16 index
            with cuts: u16 n, n times u32 number | u64 offset | u8 gains
            method frame

What is not durable is logged too, without a sync: a controller that starts again in the same boot gets it back,
another boot drops it. The log ends at its first broken record; what is cut off is kept beside it as
`definitions.amqp.cut`. Queue ids are never used twice: the header carries the largest over a compaction.

`vhosts.json`, `users.json`, `permissions.json`, `topic_permissions.json`, `parameters.json`: readable, editable while
the broker is down, replaced whole.

Order of use, for each batch of changes: `add` (before the catalog applies it), `flush`, then `sync_job()` in a thread.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.catalog import Catalog
from broker.changes import (
    OPEN,
    AnyChange,
    BindingDelete,
    BindingPut,
    Cut,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    QueueDelete,
    QueuePut,
    ShardOf,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from broker.controller.method_frames import Definition, decode_method, encode_bindings, encode_method

MAGIC = b"SHARDDEF"
FORMAT = 1
DEAD_RECORDS_MAX = 8192
RECORD_BYTES_MAX = 64 << 20
# A controller that starts again in one boot counts on from a version that no front door can have seen: changes of users
# are not in the log, so the last version in it may be behind.
RESTART_VERSION_GAP = 1 << 32

JsonChange = VhostPut | UserPut | PermissionPut | TopicPermissionPut | ParameterPut

LOG_NAME = "definitions.amqp"
DURABLE, PART, CUTS = 1, 2, 4

_HEADER: Final = struct.Struct("<8sII QI")
_CHECKED_FROM = 16  # the header's checksum covers what follows it
_RECORD: Final = struct.Struct("<II QIHB")
_LENGTHS = 8
_CHECKSUM: Final = struct.Struct("<II")  # a record's first fields, and those that it is of
_CHECKED: Final = struct.Struct("<QIHB")
_INDEX: Final = struct.Struct("<H")
_COUNT: Final = struct.Struct("<H")
_CUT: Final = struct.Struct("<IQ?")

_ends_of = attrgetter("vhost", "source", "kind", "destination")

log = logging.getLogger(__name__)


# How far behind a broken record the next whole one is looked for.
RESUME_BYTES_MAX = 1 << 20


class DefinitionsError(Exception):
    """A file that says what exists cannot be read: an operator must look."""


class Definitions:
    """One data directory's definitions; the only writer."""

    def __init__(self, directory: Path, boot: str) -> None:
        self._directory = directory
        self._boot = boot
        self._path = directory / LOG_NAME
        self._log: int = -1
        self._pending: list[bytes] = []
        self._durable_pending = False
        self._dead = 0
        self._live = 0
        self._rewrite = False
        self._dirty: set[str] = set()
        self.last_queue_id = 0

    # -- reading -------------------------------------------------------------------------------------

    def load(self) -> Catalog:
        """The catalog as of the last change that is whole on disk. Leaves the log compacted and open."""
        self._directory.mkdir(parents=True, exist_ok=True)
        catalog = self.read()
        self._run(self._compaction(catalog))
        return catalog

    def read(self) -> Catalog:
        """The same, and nothing is changed."""
        catalog = Catalog(routes=False)
        for name in _JSON_FILES:
            for change in self._read_json(name):
                catalog.apply(change)
        if self._read_log(catalog):
            catalog.version += RESTART_VERSION_GAP
        return catalog

    @property
    def is_new(self) -> bool:
        """Nothing was ever kept here: the first start."""
        return not any((self._directory / f"{name}.json").exists() for name in _JSON_FILES)

    def _read_log(self, catalog: Catalog) -> bool:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            if not self.is_new:
                # Without it every queue is unknown, and shards let go of what belongs to no queue.
                raise DefinitionsError(
                    f"{self._path} is missing, but {self._directory} is not new: put it back"
                ) from None
            return False
        version, self.last_queue_id, boot, at = _read_header(data, self._path)
        same_boot = boot == self._boot
        for end, record_version, flags, queue_id, change in _records(data, at):
            at, version = end, max(version, record_version)
            self.last_queue_id = max(self.last_queue_id, queue_id)
            if same_boot or flags & DURABLE:
                catalog.apply(change)
        catalog.version = max(version, catalog.version)
        if at < len(data):
            if (again := _next_record(data, at + 1)) is not None:
                raise DefinitionsError(
                    f"{self._path}: bytes {at} to {again} are broken, whole records follow: repair it"
                )
            log.error("%s: %d bytes after byte %d are broken, kept as .cut", self._path, len(data) - at, at)
            self._path.with_suffix(".amqp.cut").write_bytes(data[at:])
        return same_boot

    def _read_json(self, name: str) -> list[JsonChange]:
        path = self._directory / f"{name}.json"
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        except FileNotFoundError:
            return []
        except msgspec.MsgspecError as error:
            raise DefinitionsError(f"{path}: {error}") from None
        return [_change_of(row, _JSON_FILES[name], path) for row in rows]

    # -- writing -------------------------------------------------------------------------------------

    def new_queue_id(self) -> int:
        self.last_queue_id += 1
        return self.last_queue_id

    def add(self, change: AnyChange, catalog: Catalog) -> None:
        """Note one change that `catalog` is about to apply: whether it is durable depends on what is there now."""
        if isinstance(change, Definition):
            self._add_record(change, catalog)
            return
        self._dirty |= _FILES_OF[type(change)]
        # The log has no record for it: without a rewrite a vhost made anew would get the old one's queues.
        self._rewrite |= isinstance(change, VhostDelete)

    def _add_record(self, change: Definition, catalog: Catalog) -> None:
        if change.vhost not in catalog.vhosts:
            return  # nothing comes of it now; read again it might, since vhosts are read first
        durable = is_lasting(change, catalog)
        # Bindings noted before were durable by the thing that was there.
        self._rewrite |= _replaces(change, catalog, durable)
        queue = catalog.queue(change.vhost, change.name) if isinstance(change, QueueDelete) else change
        self._pending.append(_encode_record(change, catalog.version + 1, durable, queue))
        self._durable_pending |= durable
        if isinstance(change, ExchangeDelete | QueueDelete | BindingDelete):
            self._dead += 2
        self._live += 1

    def add_bindings(self, puts: list[BindingPut], catalog: Catalog) -> None:
        """The same of many that may be between the same two."""
        version = catalog.version
        for _, run in groupby(puts, _ends_of):
            of_ends = list(run)
            if of_ends[0].vhost in catalog.vhosts:
                durable = is_lasting(of_ends[0], catalog)
                self._pending += _encode_bindings(of_ends, version + 1, durable)
                self._durable_pending |= durable
                self._live += len(of_ends)
            version += len(of_ends)

    def flush(self) -> None:
        """Hand what was added to the operating system: from here it outlives this process."""
        if self._dead > max(DEAD_RECORDS_MAX, self._live // 2):
            self._rewrite = True
        if self._rewrite or not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        while data:
            data = data[os.write(self._log, data) :]

    def sync_job(self, catalog: Catalog) -> Callable[[], None] | None:
        """What must run, in any thread, before the changes may be told: None when nothing durable changed.

        The next `add` comes after its end. It raises OSError when stable storage refuses; then the process must end.
        """
        if not (self._dirty or self._rewrite or self._durable_pending):
            return None
        jobs: list[Callable[[], None]] = []
        for name in sorted(self._dirty):
            jobs.append(self._json_job(name, catalog))
        self._dirty.clear()
        if self._rewrite:
            # After the JSON files: a vhost that is still named there would come back empty, not the other way round.
            jobs.append(self._compaction(catalog))
        elif self._durable_pending:
            descriptor = self._log
            jobs.append(lambda: os.fdatasync(descriptor))
        self._durable_pending = False
        return (lambda: self._run(*jobs)) if jobs else None

    def close(self) -> None:
        if self._log >= 0:
            os.fsync(self._log)
            os.close(self._log)
            self._log = -1

    @staticmethod
    def _run(*jobs: Callable[[], None]) -> None:
        for job in jobs:
            job()

    def _json_job(self, name: str, catalog: Catalog) -> Callable[[], None]:
        data = msgspec.json.format(msgspec.json.encode(_rows_of(name, catalog)), indent=2) + b"\n"
        path = self._directory / f"{name}.json"
        return lambda: os.close(_replace(path, data))

    def _compaction(self, catalog: Catalog) -> Callable[[], None]:
        """The whole log anew, encoded now and written by the job."""
        changes = [change for change in catalog.changes() if isinstance(change, Definition)]
        parts = [_encode_header(catalog.version, self.last_queue_id, self._boot)]
        for change in changes:
            parts.append(_encode_record(change, catalog.version, is_lasting(change, catalog), change))
        data = b"".join(parts)
        self._dead, self._live, self._rewrite = 0, len(changes), False
        self._pending.clear()

        def rewrite() -> None:
            old, self._log = self._log, _replace(self._path, data)
            if old >= 0:
                os.close(old)

        return rewrite


def is_lasting(change: Definition, catalog: Catalog) -> bool:
    """Whether it outlives the broker: a durable thing, or a binding between two. An exclusive queue never does."""
    match change:
        case QueuePut():
            return change.durable and not change.owner
        case ExchangePut():
            return change.durable
        case QueueDelete():
            queue = catalog.queue(change.vhost, change.name)
            return queue is not None and is_lasting(queue, catalog)
        case ExchangeDelete():
            exchange = catalog.exchange(change.vhost, change.name)
            return exchange is not None and exchange.durable
    vhost = catalog.vhost(change.vhost)
    if vhost is None:
        return False
    source, destination = vhost.exchanges.get(change.source), vhost.destination(change.kind, change.destination)
    if source is None or destination is None or not source.durable:
        return False
    return is_lasting(destination, catalog)


def _replaces(change: Definition, catalog: Catalog, durable: bool) -> bool:
    """Whether a Put takes the place of a thing that lasts when it does not, or the other way round."""
    if not isinstance(change, QueuePut | ExchangePut):
        return False
    look_up = catalog.queue if isinstance(change, QueuePut) else catalog.exchange
    old = look_up(change.vhost, change.name)
    return old is not None and is_lasting(old, catalog) != durable


# -- bytes ------------------------------------------------------------------------------------------------


def _encode_record(change: Definition, version: int, durable: bool, queue: Any) -> bytes:
    known = isinstance(queue, QueuePut)
    vhost = change.vhost.encode()
    owner = queue.owner.encode() if known else b""
    names = bytes((len(vhost),)) + vhost + bytes((len(owner),)) + owner
    id, shard = (queue.id, queue.shard) if known else (0, 0)
    part = change.part if isinstance(change, QueuePut) else None
    cuts = part.cuts if part is not None else ()
    rest = names + _encode_part(part) + _encode_cuts(cuts) + encode_method(change)
    length = _RECORD.size - _LENGTHS + len(rest)
    flags = DURABLE * durable | PART * (part is not None) | CUTS * bool(cuts)
    record = _RECORD.pack(length, 0, version, id, shard, flags)[_LENGTHS:] + rest
    return struct.pack("<II", length, zlib.crc32(record)) + record


def _encode_bindings(puts: list[BindingPut], version: int, durable: bool) -> list[bytes]:
    """Records of bindings between the same two. `version`: of the first."""
    vhost = puts[0].vhost.encode()
    names = bytes((len(vhost),)) + vhost + b"\0"
    records = []
    for at, frame in enumerate(encode_bindings(puts), version):
        record = _CHECKED.pack(at, 0, 0, DURABLE * durable) + names + frame
        records.append(_CHECKSUM.pack(len(record), zlib.crc32(record)) + record)
    return records


def _encode_part(part: ShardOf | None) -> bytes:
    if part is None:
        return b""
    state = f"{part.state}:{part.held}" if part.held else part.state
    texts = [text.encode() for text in (part.exchange, part.key, state)]
    return b"".join(bytes((len(text),)) + text for text in texts) + _INDEX.pack(part.index)


def _part_at(data: bytes, at: int) -> tuple[ShardOf, int]:
    exchange, at = _short_at(data, at)
    key, at = _short_at(data, at)
    said, at = _short_at(data, at)
    state, _, held = said.partition(":")
    return ShardOf(exchange, _INDEX.unpack_from(data, at)[0], key, state, int(held or OPEN)), at + _INDEX.size


def _encode_cuts(cuts: tuple[Cut, ...]) -> bytes:
    if not cuts:
        return b""
    return _COUNT.pack(len(cuts)) + b"".join(_CUT.pack(cut.number, cut.offset, cut.gains) for cut in cuts)


def _cuts_at(data: bytes, at: int) -> tuple[tuple[Cut, ...], int]:
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    end = at + count * _CUT.size
    return tuple(Cut(*_CUT.unpack_from(data, each)) for each in range(at, end, _CUT.size)), end


def _records(data: bytes, at: int) -> Iterator[tuple[int, int, int, int, AnyChange]]:
    """End, version, flags, queue id and change of each record up to the first that is not whole."""
    while at + _RECORD.size <= len(data):
        length, crc, version, queue_id, shard, flags = _RECORD.unpack_from(data, at)
        end = at + _LENGTHS + length
        if length > RECORD_BYTES_MAX or end > len(data) or zlib.crc32(data[at + _LENGTHS : end]) != crc:
            return
        vhost, after = _short_at(data, at + _RECORD.size)
        owner, after = _short_at(data, after)
        part = None
        if flags & PART:
            part, after = _part_at(data, after)
        if part is not None and flags & CUTS:
            cuts, after = _cuts_at(data, after)
            part = msgspec.structs.replace(part, cuts=cuts)
        yield end, version, flags, queue_id, decode_method(data[after:end], vhost, queue_id, shard, owner, part)
        at = end


def _next_record(data: bytes, at: int) -> int | None:
    """Where a whole record begins again. What a crash tore is at the end: records behind it mean it was no crash."""
    for start in range(at, min(len(data) - _RECORD.size, at + RESUME_BYTES_MAX)):
        length, crc, *_ = _RECORD.unpack_from(data, start)
        end = start + _LENGTHS + length
        may_be = _RECORD.size - _LENGTHS < length <= RECORD_BYTES_MAX and end <= len(data)
        if may_be and zlib.crc32(data[start + _LENGTHS : end]) == crc:
            return start
    return None


def _short_at(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end


def _encode_header(version: int, last_queue_id: int, boot: str) -> bytes:
    name = boot.encode()
    rest = _HEADER.pack(MAGIC, FORMAT, 0, version, last_queue_id)[_CHECKED_FROM:] + bytes((len(name),)) + name
    return struct.pack("<8sII", MAGIC, FORMAT, zlib.crc32(rest)) + rest


def _read_header(data: bytes, path: Path) -> tuple[int, int, str, int]:
    """Version, last queue id, boot and where the records begin. The header is never torn: a log comes by rename."""
    if len(data) <= _HEADER.size or data[:8] != MAGIC:
        raise DefinitionsError(f"{path}: not a definitions log")
    _, format, crc, version, last_queue_id = _HEADER.unpack_from(data)
    if format != FORMAT:
        raise DefinitionsError(f"{path}: format {format}, this broker reads {FORMAT}")
    boot, at = _short_at(data, _HEADER.size)
    if zlib.crc32(data[_CHECKED_FROM:at]) != crc:
        raise DefinitionsError(f"{path}: the header is broken")
    return version, last_queue_id, boot, at


def _replace(path: Path, data: bytes) -> int:
    """The file with this content, whole or not at all, on stable storage. Its descriptor, for appending."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.rename(fresh, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return descriptor


# -- JSON -------------------------------------------------------------------------------------------------


_JSON_FILES: Final[dict[str, type[JsonChange]]] = {
    "vhosts": VhostPut,
    "users": UserPut,
    "permissions": PermissionPut,
    "topic_permissions": TopicPermissionPut,
    "parameters": ParameterPut,
}
_FILES_OF: Final[dict[type, set[str]]] = {
    VhostPut: {"vhosts"},
    VhostDelete: {"vhosts", "permissions", "topic_permissions", "parameters"},
    UserPut: {"users"},
    UserDelete: {"users", "permissions", "topic_permissions", "parameters"},
    PermissionPut: {"permissions"},
    PermissionDelete: {"permissions"},
    TopicPermissionPut: {"topic_permissions"},
    TopicPermissionDelete: {"topic_permissions"},
    ParameterPut: {"parameters"},
    ParameterDelete: {"parameters"},
}


def _rows_of(name: str, catalog: Catalog) -> list[dict[str, Any]]:
    """The structs travel as tagged arrays; in the files they are objects with named fields."""
    puts: dict[str, Any] = {
        "vhosts": [vhost.put for vhost in catalog.vhosts.values()],
        "users": catalog.users.values(),
        "permissions": catalog.permissions.values(),
        "topic_permissions": catalog.topic_permissions,
        "parameters": catalog.parameters.values(),
    }
    return [msgspec.structs.asdict(put) for put in puts[name]]


def _change_of(row: dict[str, Any], kind: type[JsonChange], path: Path) -> JsonChange:
    try:
        # Through the builtin form, since only that checks the fields' types.
        return msgspec.convert(msgspec.to_builtins(kind(**row)), kind)
    except (TypeError, msgspec.ValidationError) as error:
        raise DefinitionsError(f"{path}: {row}: {error}") from None
