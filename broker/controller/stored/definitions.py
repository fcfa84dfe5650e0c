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
another boot drops it. A start writes the log anew; where the disk has no room for that the start goes on with the log
as it is. The log ends at its first broken record; what is cut off is kept beside it as `definitions.amqp.cut`.
Queue ids are never used twice: the header carries the largest over a compaction.

`vhosts.json`, `users.json`, `permissions.json`, `topic_permissions.json`, `parameters.json`: readable, editable while
the broker is down, replaced whole. `definitions.files` says that all of them have been there: from then on one that is
missing is refused, not taken for empty.

Room for what may come is set aside (room.py). `lacks_room` says whether changes must be refused for want of it; what
cannot be refused, removals above all, has room of its own. What finds no room even so waits in memory.

Order of use, for each batch of changes: `add` (before the catalog applies it), `flush`, then `sync_job()` in a thread.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from shardmq.broker.controller.peers.method_frames import (
    Definition,
    decode_method,
    encode_bindings,
    encode_method,
)
from shardmq.broker.controller.stored import room
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
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

MAGIC = b"SHARDDEF"
FORMAT = 1
DEAD_RECORDS_MAX = 8192
RECORD_BYTES_MAX = 64 << 20
# A controller that starts again in one boot counts on from a version that no front door can have seen: changes of users
# are not in the log, so the last version in it may be behind.
RESTART_VERSION_GAP = 1 << 32

JsonChange = VhostPut | UserPut | PermissionPut | TopicPermissionPut | ParameterPut

LOG_NAME = "definitions.amqp"
FILES_NAME = "definitions.files"
# Of a record without arguments: its fields and names.
BARE_RECORD_BYTES_MAX = 2048
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
        self._log = room.GrowingLog(self._path)
        self._files = {name: room.ReplacedFile(directory / f"{name}.json") for name in _JSON_FILES}
        self._whole_bytes = 0  # of the log that was read, up to its first broken record
        self._has_passing = False  # it holds what is not durable
        self._is_behind = False  # something waits in memory for room
        self._boot_in_log = boot
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._promised: dict[str, int] = {}  # bytes of rows that are not in the JSON files yet
        self._durable_pending = False
        self._dead = 0
        self._live = 0
        self._rewrite = False
        self._dirty: set[str] = set()
        self.last_queue_id = 0

    # -- reading -------------------------------------------------------------------------------------

    def load(self) -> Catalog:
        """The catalog as of the last change that is whole on disk. Leaves the log open, and compacted if there is room
        for that."""
        self._directory.mkdir(parents=True, exist_ok=True)
        catalog = self.read()
        rewrite = self._compaction(catalog)
        try:
            rewrite()
        except OSError as error:
            if not room.is_full(error):
                raise
            if not self._whole_bytes:
                raise DefinitionsError(
                    f"{self._path}: {error.strerror}: there is no room to begin with"
                ) from None
            self._go_on(catalog)
        for file in self._files.values():
            file.set_aside()
        return catalog

    def _go_on(self, catalog: Catalog) -> None:
        """With the log as it is, for want of room. What of it another boot has left and is not durable must not come
        back with this boot's name: then the header keeps the name of the other one, and a controller that starts again
        in this boot finds only what is durable."""
        log.warning("%s: no room to write it anew; the start goes on with it as it is", self._path)
        self._rewrite = True
        boot = self._boot_in_log
        if boot != self._boot:
            catalog.version += RESTART_VERSION_GAP
            if not self._has_passing and len(boot) == len(self._boot):
                boot = self._boot
        self._log.open(self._whole_bytes)
        self._log.write_head(_encode_header(catalog.version, self.last_queue_id, boot))

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
        return not self._was_complete and not any(
            file.path.exists() for file in self._files.values()
        )

    @property
    def _was_complete(self) -> bool:
        return (self._directory / FILES_NAME).exists()

    def complete(self) -> None:
        """All files are there from now on, and it is known that they are. Without room another start does it."""
        if self._was_complete:
            return
        try:
            for file in self._files.values():
                if not file.path.exists():
                    file.replace(b"[]\n")
            listed = "".join(
                f"{name}\n"
                for name in (LOG_NAME, *(file.path.name for file in self._files.values()))
            )
            room.ReplacedFile(self._directory / FILES_NAME).replace(listed.encode())
            (self._directory / f"{FILES_NAME}.new").unlink(missing_ok=True)
        except OSError as error:
            if not room.is_full(error):
                raise

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
        self._boot_in_log, same_boot = boot, boot == self._boot
        for end, record_version, flags, queue_id, change in _records(data, at):
            at, version = end, max(version, record_version)
            self.last_queue_id = max(self.last_queue_id, queue_id)
            self._has_passing = self._has_passing or not flags & DURABLE
            if same_boot or flags & DURABLE:
                catalog.apply(change)
        catalog.version = max(version, catalog.version)
        self._whole_bytes = at
        if at < len(data):
            if (again := _next_record(data, at + 1)) is not None:
                raise DefinitionsError(
                    f"{self._path}: bytes {at} to {again} are broken, whole records follow: repair it"
                )
            log.error(
                "%s: %d bytes after byte %d are broken, kept as .cut",
                self._path,
                len(data) - at,
                at,
            )
            try:
                self._path.with_suffix(".amqp.cut").write_bytes(data[at:])
            except OSError as error:
                if not room.is_full(error):
                    raise
                log.error("%s: no room to keep them", self._path)
        return same_boot

    def _read_json(self, name: str) -> list[JsonChange]:
        path = self._files[name].path
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        except FileNotFoundError:
            if self._was_complete:
                raise DefinitionsError(
                    f"{path} is missing, but {self._directory} is not new: put it back, or write [] into it to go on "
                    f"without {name.replace('_', ' ')}"
                ) from None
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
        queue = (
            catalog.queue(change.vhost, change.name) if isinstance(change, QueueDelete) else change
        )
        self._pending.append(record := _encode_record(change, catalog.version + 1, durable, queue))
        self._pending_bytes += len(record)
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
                self._pending += (records := _encode_bindings(of_ends, version + 1, durable))
                self._pending_bytes += sum(map(len, records))
                self._durable_pending |= durable
                self._live += len(of_ends)
            version += len(of_ends)

    def lacks_room(self, changes: list[AnyChange], grows: bool = True) -> str:
        """Why these changes, which somebody asks for, cannot be kept; "" when there is room for them. With `grows`
        false something is taken away: room that was set aside will do for it."""
        if grows and room.is_full_disk(self._directory):
            return f"no room for definitions: the disk of {self._directory} is full"
        records = 0
        rows: dict[str, int] = {}
        for change in changes:
            if isinstance(change, Definition):
                records += _record_bytes_max(change)
                continue
            if isinstance(change, VhostPut) and self._rewrite and not self._may_rewrite():
                return f"no room to forget the queues of a vhost that was deleted before ({self._path})"
            for name in _FILES_OF[type(change)]:
                rows[name] = rows.get(name, 0) + _row_bytes_max(change)
        if records and grows:
            wanted = records + self._pending_bytes + room.LOG_KEPT_BYTES
            self._log.set_aside(wanted)
            if wanted > self._log.room:
                return f"no room for definitions in {self._path}"
        for name, size in rows.items():
            if self._no_room_for(name, size):
                return f"no room for definitions in {self._files[name].path}"
        return ""

    def _no_room_for(self, name: str, more: int) -> bool:
        """With `more` bytes than it has now, and with what was promised since it was last written."""
        file = self._files[name]
        wanted = file.size() + self._promised.get(name, 0) + more
        if wanted > file.room:
            file.set_aside(wanted + room.FILE_ROOM_BYTES)
        if wanted > file.room:
            return True
        self._promised[name] = self._promised.get(name, 0) + more
        return False

    def flush(self) -> None:
        """Hand what was added to the operating system: from here it outlives this process. What finds no room waits."""
        if self._dead > max(DEAD_RECORDS_MAX, self._live // 2):
            self._rewrite = True
        if not self._pending:
            return
        try:
            self._log.append(b"".join(self._pending))
        except OSError as error:
            self._wait_for_room(error, self._path)
            return
        self._is_behind = False
        self._pending.clear()
        self._pending_bytes = 0
        self._log.set_aside()

    def _wait_for_room(self, error: OSError, path: Path) -> None:
        if not room.is_full(error):
            raise error
        if not self._is_behind:
            log.error(
                "%s: %s: what changed is kept in memory alone until there is room",
                path,
                error.strerror,
            )
        self._is_behind = True

    def sync_job(self, catalog: Catalog) -> Callable[[], None] | None:
        """What must run, in any thread, before the changes may be told: None when nothing durable changed.

        The next `add` comes after its end. It raises OSError when stable storage refuses; then the process must end.
        """
        rewrites = self._rewrite and self._may_rewrite()
        if not (self._dirty or rewrites or self._durable_pending):
            return None
        files = {name: _encode_rows(name, catalog) for name in sorted(self._dirty)}
        # After the JSON files: a vhost that is still named there would come back empty, not the other way round.
        rewrite = self._compaction(catalog) if rewrites else None
        syncs, self._durable_pending = self._durable_pending, False
        return lambda: self._make_last(files, rewrite, syncs)

    def _make_last(
        self, files: dict[str, bytes], rewrite: Callable[[], None] | None, syncs: bool
    ) -> None:
        for name, data in files.items():
            try:
                self._files[name].replace(data)
            except OSError as error:
                self._wait_for_room(error, self._files[name].path)
            else:
                self._dirty.discard(name)
                self._promised.pop(name, None)
        if rewrite is not None:
            try:
                rewrite()
                return
            except OSError as error:
                if not room.is_full(error):
                    raise
                self._rewrite = True
        if syncs:
            self._log.sync()

    def _may_rewrite(self) -> bool:
        """Whether there seems to be room for another log beside this one."""
        return room.has_bytes(self._directory, self._log.size + 2 * room.LOG_ROOM_BYTES)

    def close(self) -> None:
        self._log.close()

    def _compaction(self, catalog: Catalog) -> Callable[[], None]:
        """The whole log anew, encoded now and written by the job."""
        changes = [change for change in catalog.changes() if isinstance(change, Definition)]
        parts = [_encode_header(catalog.version, self.last_queue_id, self._boot)]
        for change in changes:
            parts.append(
                _encode_record(change, catalog.version, is_lasting(change, catalog), change)
            )
        data = b"".join(parts)

        def rewrite() -> None:
            self._log.replace(data)
            self._dead, self._live, self._rewrite = 0, len(changes), False
            self._pending.clear()
            self._pending_bytes = 0

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
    source, destination = (
        vhost.exchanges.get(change.source),
        vhost.destination(change.kind, change.destination),
    )
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
    return ShardOf(
        exchange, _INDEX.unpack_from(data, at)[0], key, state, int(held or OPEN)
    ), at + _INDEX.size


def _encode_cuts(cuts: tuple[Cut, ...]) -> bytes:
    if not cuts:
        return b""
    return _COUNT.pack(len(cuts)) + b"".join(
        _CUT.pack(cut.number, cut.offset, cut.gains) for cut in cuts
    )


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
        if (
            length > RECORD_BYTES_MAX
            or end > len(data)
            or zlib.crc32(data[at + _LENGTHS : end]) != crc
        ):
            return
        vhost, after = _short_at(data, at + _RECORD.size)
        owner, after = _short_at(data, after)
        part = None
        if flags & PART:
            part, after = _part_at(data, after)
        if part is not None and flags & CUTS:
            cuts, after = _cuts_at(data, after)
            part = msgspec.structs.replace(part, cuts=cuts)
        yield (
            end,
            version,
            flags,
            queue_id,
            decode_method(data[after:end], vhost, queue_id, shard, owner, part),
        )
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
    rest = (
        _HEADER.pack(MAGIC, FORMAT, 0, version, last_queue_id)[_CHECKED_FROM:]
        + bytes((len(name),))
        + name
    )
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


def _record_bytes_max(change: Definition) -> int:
    arguments = getattr(change, "arguments", None)
    part = change.part if isinstance(change, QueuePut) else None
    cuts = _CUT.size * len(part.cuts) if part is not None else 0
    return BARE_RECORD_BYTES_MAX + cuts + (len(encode_method(change)) if arguments else 0)


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
        "permissions": catalog.permissions.puts.values(),
        "topic_permissions": catalog.permissions.topic_puts,
        "parameters": catalog.parameters.values(),
    }
    return [msgspec.structs.asdict(put) for put in puts[name]]


def _encode_rows(name: str, catalog: Catalog) -> bytes:
    return _encode_json(_rows_of(name, catalog)) + b"\n"


def _encode_json(rows: list[dict[str, Any]]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2)


def _row_bytes_max(change: AnyChange) -> int:
    """How much a change may add to a file of rows: nothing when it takes something away."""
    return (
        len(_encode_json([msgspec.structs.asdict(change)])) if isinstance(change, JsonChange) else 0
    )


def _change_of(row: dict[str, Any], kind: type[JsonChange], path: Path) -> JsonChange:
    try:
        # Through the builtin form, since only that checks the fields' types.
        return msgspec.convert(msgspec.to_builtins(kind(**row)), kind)
    except (TypeError, msgspec.ValidationError) as error:
        raise DefinitionsError(f"{path}: {row}: {error}") from None
