"""The catalog on disk.

`definitions.amqp` is a log of exchanges, queues and bindings (`records.py`). What is not durable is
logged too, without a sync: a controller that starts again in the same boot of the broker gets it
back, and another boot drops it. A start writes the log anew. Where the disk has no room for that,
the start goes on with the log as it is. What is cut off behind a broken record is kept beside the
log as `definitions.amqp.cut`. Queue ids are never used twice: the header keeps the largest.

`vhosts.json`, `users.json`, `permissions.json`, `topic_permissions.json` and `parameters.json` are
replaced whole (`rows.py`). If there are keys (`key_ring.py`), a start encrypts the secrets that are
not encrypted yet, or by another key. `definitions.files` says that all of them have been there:
from then on one that is missing is refused, and not taken for empty.

Room for what may come is set aside (`room.py`). `lacks_room` says whether changes must be refused
for want of room. What cannot be refused, above all removals, has room of its own, and waits in
memory if there is none even so.

For each batch of changes call `add` (before the catalog applies a change), then `flush`, and then
run `sync_job()` in a thread. `write` writes what a batch has added so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from shardmq.broker.controller.peers.method_frames import Definition
from shardmq.broker.controller.stored import installation, records, room, rows
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.key_ring import NO_KEYS, KeyRing
from shardmq.broker.controller.stored.rows import FILES_OF, JSON_FILES, JsonChange
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.erlang import cut
from shardmq.cluster.versions import CATALOG
from shardmq.shardd.store.files import (
    Files,
    is_full,
    read_head,
    read_if_there,
    remove_files,
    size_if_there,
    write_file,
)

DEAD_RECORDS_MAX = 8192
# A controller that starts again in one boot counts on from a version that no front door can have
# seen. Changes of users are not in the log, so the last version in the log may be behind.
RESTART_VERSION_GAP = 1 << 32

LOG_NAME = "definitions.amqp"
SECRET = "parameters"  # the JSON file that has secrets
UNREAD_SHOWN = 10  # parameters in one line of the log
NAME_CHARS_SHOWN = 100
ENDED_NAME = "ended_streams.json"  # written by controller/streams/ended_streams.py
FILES_NAME = "definitions.files"

_ends_of = attrgetter("vhost", "source", "kind", "destination")

log = logging.getLogger(__name__)


class Definitions:
    """The definitions in one data directory, and their only writer.

    Every system call goes through `files`.
    """

    def __init__(
        self,
        directory: Path,
        boot: str,
        files: Files = room.OWNER_ONLY,
        *,
        waits_for_others: bool = False,
        format: int = CATALOG.most,
        keys: KeyRing = NO_KEYS,
    ) -> None:
        """Prepare.

        `waits_for_others` says that a sync waits for other nodes, too. A log that is written anew
        has this `format`. The secrets of parameters are encrypted by `keys`.
        """
        self.keys = keys
        self._is_stale = False  # the file has secrets that are to be encrypted anew
        self._unread: list[ParameterPut] = []  # the parameters with secrets that no key decrypts
        self._format = self._format_in_log = format
        self.waits_for_others = waits_for_others
        self._directory = directory
        self._disk = files
        self._boot = boot
        self._path = directory / LOG_NAME
        self._log = room.GrowingLog(self._path, files)
        self._files = {
            name: room.ReplacedFile(
                directory / f"{name}.json", files, erases=bool(keys) and name == SECRET
            )
            for name in JSON_FILES
        }
        self._whole_bytes = 0  # bytes of the log up to its first broken record
        self._has_transient = False  # the log has something that is not durable
        self._is_behind = False  # something waits in memory for room
        self._is_full: bool | None = None  # whether the disk is, once for each batch
        self._boot_in_log = boot
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._promised: dict[str, int] = {}  # bytes by JSON file, of rows not written yet
        self._durable_pending = False
        self._dead = 0
        self._live = 0
        self._rewrite = False
        self._dirty: set[str] = set()
        self.last_queue_id = 0

    # -- reading -------------------------------------------------------------------------------

    def load(self) -> Catalog:
        """Return the catalog as of the last change that is whole on disk, and open the log.

        The log is compacted if there is room for that. Raises DefinitionsError.
        """
        self._disk.make_directory(str(self._directory))
        catalog = self.read()
        rewrite = self._compaction(catalog)
        try:
            rewrite()
        except OSError as error:
            if not is_full(error):
                raise
            if not self._whole_bytes:
                raise DefinitionsError(
                    f"{self._path}: {error.strerror}: there is no room to begin with"
                ) from None
            self._go_on(catalog)
        self._look_at_secrets()
        for file in self._files.values():
            file.erase()
            file.set_aside()
        return catalog

    def _look_at_secrets(self) -> None:
        """Have secrets encrypted anew if they are to be, and log which ones cannot be read."""
        path = self._files[SECRET].path
        if self._is_stale:
            self._dirty.add(SECRET)
        if self._unread:
            log.warning(
                "%s: no key in secrets.key_file for the secrets of %s; they stay encrypted, and "
                "what needs them does not run",
                path,
                _listed(self._unread),
            )

    def _go_on(self, catalog: Catalog) -> None:
        """Go on with the log as it is, for want of room.

        What another boot has left and is not durable must not come back as this boot's. Then the
        header keeps the name of the other boot, and a controller that starts again in this boot
        finds only what is durable.
        """
        log.warning("%s: no room to write it anew; the start goes on with it as it is", self._path)
        self._rewrite = True
        boot = self._boot_in_log
        if boot != self._boot:
            catalog.version += RESTART_VERSION_GAP
            if not self._has_transient and len(boot) == len(self._boot):
                boot = self._boot
        self._log.open(self._whole_bytes)
        self._log.write_head(
            records.encode_header(catalog.version, self.last_queue_id, boot, self._format_in_log)
        )

    def read(self) -> Catalog:
        """Return the same catalog, and change nothing on disk. Raises DefinitionsError."""
        catalog = Catalog(routes=False)
        self._is_stale, self._unread = False, []
        for name in JSON_FILES:
            for change in self._read_json(name):
                catalog.apply(self._opened(change))
        if self._read_log(catalog):
            catalog.version += RESTART_VERSION_GAP
        return catalog

    def _opened(self, change: JsonChange) -> JsonChange:
        if not isinstance(change, ParameterPut):
            return change
        opened = self.keys.opened(change)
        self._is_stale = self._is_stale or opened.is_stale
        if opened.is_unread:
            self._unread.append(change)
        return opened.put

    @property
    def is_new(self) -> bool:
        """Return whether nothing was ever kept here, as at a first start."""
        return not self._was_complete and not any(file.is_there for file in self._files.values())

    @property
    def _was_complete(self) -> bool:
        return size_if_there(self._disk, str(self._directory / FILES_NAME)) is not None

    def complete(self) -> None:
        """Make the files that are missing, and note that all are there from now on.

        If there is no room for that, another start does it.
        """
        if self._was_complete:
            return
        try:
            for file in self._files.values():
                if not file.is_there:
                    file.replace(b"[]\n")
            listed = "".join(
                f"{name}\n"
                for name in (LOG_NAME, *(file.path.name for file in self._files.values()))
            )
            room.ReplacedFile(self._directory / FILES_NAME, self._disk).replace(listed.encode())
            remove_files(self._disk, [str(self._directory / f"{FILES_NAME}.new")])
        except OSError as error:
            if not is_full(error):
                raise

    def _read_log(self, catalog: Catalog) -> bool:
        data = read_if_there(self._disk, str(self._path))
        if data is None:
            if not self.is_new:
                # Without the log no queue is known, and shards delete what belongs to no queue.
                raise DefinitionsError(
                    f"{self._path} is missing, but {self._directory} is not new: put it back"
                )
            return False
        version, self.last_queue_id, boot, at = records.read_header(data, self._path)
        self._format_in_log = records.format_of(data, self._path)
        self._boot_in_log, same_boot = boot, boot == self._boot
        for record in records.records(data, at):
            at, version = record.end, max(version, record.version)
            self.last_queue_id = max(self.last_queue_id, record.last_queue_id)
            is_durable = bool(record.flags & records.DURABLE)
            self._has_transient = self._has_transient or not is_durable
            if same_boot or is_durable:
                catalog.apply(record.change)
        catalog.version = max(version, catalog.version)
        self._whole_bytes = at
        if at < len(data):
            if (again := records.next_record(data, at + 1)) is not None:
                raise DefinitionsError(
                    f"{self._path}: bytes {at} to {again} are broken, whole records follow: "
                    "repair it"
                )
            log.error(
                "%s: %d bytes after byte %d are broken, kept as .cut",
                self._path,
                len(data) - at,
                at,
            )
            try:
                write_file(self._disk, f"{self._path}.cut", data[at:])
            except OSError as error:
                if not is_full(error):
                    raise
                log.error("%s: no room to keep them", self._path)
        return same_boot

    def _read_json(self, name: str) -> list[JsonChange]:
        path = self._files[name].path
        data = read_if_there(self._disk, str(path))
        if data is not None:
            return rows.read_rows(name, path, data)
        if self._was_complete:
            raise DefinitionsError(
                f"{path} is missing, but {self._directory} is not new: put it back, "
                f"or write [] into it to go on without {name.replace('_', ' ')}"
            )
        return []

    # -- writing -------------------------------------------------------------------------------

    @property
    def files(self) -> Files:
        """The files by which what lies beside the definitions is written, too.

        In a cluster the other nodes have all of it.
        """
        return self._disk if self.waits_for_others else room.READABLE

    def new_queue_id(self) -> int:
        self.last_queue_id += 1
        return self.last_queue_id

    def add(self, change: AnyChange, catalog: Catalog) -> None:
        """Note a change that `catalog` is about to apply.

        Whether the change is durable depends on what is in the catalog before.
        """
        if isinstance(change, Definition):
            self._add_record(change, catalog)
            return
        self._dirty |= FILES_OF[type(change)]
        # The log has no record of a deleted vhost. Without a rewrite a new vhost of the same name
        # would get the queues of the old one.
        self._rewrite |= isinstance(change, VhostDelete)

    def _add_record(self, change: Definition, catalog: Catalog) -> None:
        if change.vhost not in catalog.vhosts:
            return  # the catalog ignores it; a later start, which reads vhosts first, might not
        durable = is_lasting(change, catalog)
        # The bindings in the log are durable or not by the thing that is replaced.
        self._rewrite |= _replaces(change, catalog, durable)
        queue = (
            catalog.queue(change.vhost, change.name) if isinstance(change, QueueDelete) else change
        )
        self._pending.append(
            record := records.encode_record(change, catalog.version + 1, durable, queue)
        )
        self._pending_bytes += len(record)
        self._durable_pending |= durable
        if isinstance(change, ExchangeDelete | QueueDelete | BindingDelete):
            self._dead += 2
        self._live += 1

    def add_bindings(self, puts: list[BindingPut], catalog: Catalog) -> None:
        """Note bindings that `catalog` is about to apply; runs with the same ends are fast."""
        version = catalog.version
        for _, run in groupby(puts, _ends_of):
            of_ends = list(run)
            if of_ends[0].vhost in catalog.vhosts:
                durable = is_lasting(of_ends[0], catalog)
                encoded = records.encode_binding_records(of_ends, version + 1, durable)
                self._pending += encoded
                self._pending_bytes += sum(map(len, encoded))
                self._durable_pending |= durable
                self._live += len(of_ends)
            version += len(of_ends)

    def lacks_room(self, changes: list[AnyChange], grows: bool = True) -> str:
        """Return why changes that somebody asks for cannot be kept, or "" if there is room.

        With `grows` false they take something away, and room that was set aside will do.
        """
        if grows and self._is_full is None:
            self._is_full = not self._disk.has_room(str(self._directory), room.FREE_BYTES_MIN)
        if grows and self._is_full:
            return f"no room for definitions: the disk of {self._directory} is full"
        in_log = 0
        in_files: dict[str, int] = {}
        for change in changes:
            if isinstance(change, Definition):
                in_log += records.record_bytes_max(change)
                continue
            if isinstance(change, VhostPut) and self._rewrite and not self._may_rewrite():
                return (
                    "no room to forget the queues of a vhost that was deleted before "
                    f"({self._path})"
                )
            for name in FILES_OF[type(change)]:
                in_files[name] = in_files.get(name, 0) + rows.row_bytes_max(change, self.keys)
        if in_log and grows:
            wanted = in_log + self._pending_bytes + room.LOG_KEPT_BYTES
            self._log.set_aside(wanted)
            if wanted > self._log.room:
                return f"no room for definitions in {self._path}"
        for name, size in in_files.items():
            if self._no_room_for(name, size):
                return f"no room for definitions in {self._files[name].path}"
        return ""

    def _no_room_for(self, name: str, more: int) -> bool:
        """Return whether a JSON file has no room for `more` bytes.

        What was promised since the file was last written counts as used.
        """
        file = self._files[name]
        wanted = file.size() + self._promised.get(name, 0) + more
        if wanted > file.room:
            file.set_aside(wanted + room.FILE_ROOM_BYTES)
        if wanted > file.room:
            return True
        self._promised[name] = self._promised.get(name, 0) + more
        return False

    def flush(self) -> None:
        """Write what was added, and end a batch: the next one looks at the disk again."""
        self._is_full = None
        self.write()

    def write(self) -> None:
        """Write what was added, so that it outlives this process; what finds no room waits.

        This may be called at any time within a batch. Raises OSError unless the disk is full.
        """
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
        if not is_full(error):
            raise error
        if not self._is_behind:
            log.error(
                "%s: %s: what changed is kept in memory alone until there is room",
                path,
                error.strerror,
            )
        self._is_behind = True

    def sync_job(self, catalog: Catalog) -> Callable[[], None] | None:
        """Return what must run, in any thread, before the changes may be told.

        It is None when nothing durable changed. The caller waits for its end before the next `add`.
        It raises OSError when stable storage refuses; then the process must end.
        """
        rewrites = self._rewrite and self._may_rewrite()
        if not (self._dirty or rewrites or self._durable_pending):
            return None
        files = {name: rows.encode_rows(name, catalog, self.keys) for name in sorted(self._dirty)}
        # The log comes after the JSON files. The other way round, a crash between them would bring
        # back a deleted vhost, which vhosts.json still names, without its queues.
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
                if name == SECRET and self._is_stale:
                    self._say_that_secrets_are_fresh()
        if rewrite is not None:
            try:
                rewrite()
                return
            except OSError as error:
                if not is_full(error):
                    raise
                self._rewrite = True
        if syncs:
            self._log.sync()

    def _say_that_secrets_are_fresh(self) -> None:
        self._is_stale = False
        said = "encrypted by the first key now" if self.keys.encrypts else "no longer encrypted"
        log.info("%s: its secrets are %s", self._files[SECRET].path, said)

    def copy_job(self, catalog: Catalog, directory: Path) -> Callable[[], None]:
        """Encode all definitions, and return what writes them to another directory, in any thread.

        It raises OSError.
        """
        copy = Definitions(directory, self._boot, format=self._format, keys=self.keys)
        copy.last_queue_id = self.last_queue_id
        files = {name: rows.encode_rows(name, catalog, self.keys) for name in JSON_FILES}
        write_log = copy._compaction(catalog)

        def write() -> None:
            for name, data in files.items():
                copy._files[name].replace(data)
            try:
                write_log()
            finally:
                copy.close()
            copy.complete()

        return write

    def _may_rewrite(self) -> bool:
        """Return whether there seems to be room for another log beside this one."""
        wanted = self._log.size + 2 * room.LOG_ROOM_BYTES
        return self._disk.has_room(str(self._directory), wanted)

    def close(self) -> None:
        self._log.close()

    def _compaction(self, catalog: Catalog) -> Callable[[], None]:
        """Encode the whole log anew, and return what writes it."""
        changes = [change for change in catalog.changes() if isinstance(change, Definition)]
        parts = [
            records.encode_header(catalog.version, self.last_queue_id, self._boot, self._format)
        ]
        for change in changes:
            parts.append(
                records.encode_record(change, catalog.version, is_lasting(change, catalog), change)
            )
        data = b"".join(parts)

        def rewrite() -> None:
            self._log.replace(data)
            self._dead, self._live, self._rewrite = 0, len(changes), False
            self._pending.clear()
            self._pending_bytes = 0

        return rewrite


def stored_format(directory: Path) -> int | None:
    """Return the format of the log in a data directory; None without one.

    Raises DefinitionsError.
    """
    path, files = directory / LOG_NAME, room.OWNER_ONLY
    if size_if_there(files, str(path)) is None:
        return None
    handle = files.open(str(path), read_only=True)
    try:
        return records.format_of(read_head(files, handle, records.HEAD_BYTES), path)
    finally:
        files.close(handle)


def unread_secrets(directory: Path, keys: KeyRing) -> str:
    """Return which parameters in a directory have secrets that no key decrypts, for people.

    It is "" if there are none, and for a copy that is not whole. Raises OSError.
    """
    path = directory / f"{SECRET}.json"
    data = read_if_there(room.OWNER_ONLY, str(path))
    try:
        puts = rows.read_rows(SECRET, path, data or b"[]")
    except DefinitionsError:
        return ""
    parameters = (put for put in puts if isinstance(put, ParameterPut))
    return _listed([put for put in parameters if keys.opened(put).is_unread])


def _listed(puts: list[ParameterPut]) -> str:
    """Return the names of parameters as one text; of many, the first ones."""
    names = [
        f"{put.component} '{cut(put.name, NAME_CHARS_SHOWN)}' in vhost '{put.vhost}'"
        for put in puts[:UNREAD_SHOWN]
    ]
    more = len(puts) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def is_of_definitions(path: str) -> bool:
    """Return whether a file in a data directory, by its name, is one of the definitions."""
    name = path.removesuffix(".new")
    files = (LOG_NAME, f"{LOG_NAME}.cut", FILES_NAME, *(f"{each}.json" for each in JSON_FILES))
    return name in (*files, installation.NAME, ENDED_NAME)


def is_lasting(change: Definition, catalog: Catalog) -> bool:
    """Return whether a thing outlives the broker: it is durable, or a binding between such things.

    An exclusive queue never outlives the broker.
    """
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
    """Return whether a durable thing replaces one that is not, or the other way round."""
    if not isinstance(change, QueuePut | ExchangePut):
        return False
    look_up = catalog.queue if isinstance(change, QueuePut) else catalog.exchange
    old = look_up(change.vhost, change.name)
    return old is not None and is_lasting(old, catalog) != durable
