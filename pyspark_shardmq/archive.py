"""The archive of streams: Parquet files, and manifests that say which files count.

    DIR/_shardmq/epochs/0000000007.json   the manifest of one epoch: its rows and their files
    DIR/_shardmq/checkpoint/              Spark's checkpoint of the job that writes
    DIR/data/0000000007-3f2a.../part-*    the rows of that epoch, each shard's in order of offsets

A manifest gets its name by a rename, so it is whole or absent. A file that no manifest names was
left by a job that was killed. Readers ignore such a file and the next job removes it. Reading an
archive needs no Spark.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_shardmq import schema
from pyspark_shardmq.offsets import DataLoss, Place, Positions, Range, ShardState
from pyspark_shardmq.options import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `end` - 1 of one shard in one epoch.

    id: the stream's id. rows: how many rows are stored, which is fewer than `end` - `start` where
    rows were lost. files: paths relative to the archive, in order of the offsets they hold.
    """

    queue: str
    shard: int
    id: str
    start: int
    end: int
    rows: int
    files: tuple[str, ...]


class Archive:
    """An archive directory; its path may begin with `file://`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(str(path).removeprefix("file://"))

    @property
    def checkpoint(self) -> Path:
        return self.path / "_shardmq" / "checkpoint"

    @property
    def _epochs(self) -> Path:
        return self.path / "_shardmq" / "epochs"

    # -- written -----------------------------------------------------------------------------------

    def has(self, epoch: int) -> bool:
        return self._manifest(epoch).exists()

    def _manifest(self, epoch: int) -> Path:
        return self._epochs / f"{epoch:010}.json"

    def new_directory(self, epoch: int) -> Path:
        """Return a new name of a directory for the rows of an epoch.

        No other attempt writes to it, also not the tasks that outlive a driver that was killed.
        """
        return self.path / "data" / f"{epoch:010}-{uuid.uuid4().hex[:12]}"

    def commit(self, epoch: int, pieces: Sequence[Piece]) -> None:
        """Put the epoch into the archive, so that it is there after a power cut too."""
        for name in {name for piece in pieces for name in piece.files}:
            _sync(self.path / name)
            _sync((self.path / name).parent)
        target = self._manifest(epoch)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"format": FORMAT, "epoch": epoch, "pieces": [asdict(piece) for piece in pieces]},
            indent=1,
        )
        scratch = target.with_name(f"{target.name}.{uuid.uuid4().hex}.new")
        scratch.write_text(text)
        _sync(scratch)
        os.replace(scratch, target)
        _sync(target.parent)

    def remove_leftovers(self) -> list[str]:
        """Remove the directories that no manifest names and return their names.

        Only the job that holds the archive's lock may call this.
        """
        import shutil

        named = {Path(name).parts[1] for piece in self.pieces() for name in piece.files}
        left = [
            found for found in sorted((self.path / "data").glob("*-*")) if found.name not in named
        ]
        for found in left:
            shutil.rmtree(found, ignore_errors=True)
        for scratch in self._epochs.glob("*.new"):
            scratch.unlink(missing_ok=True)
        return [found.name for found in left]

    # -- read --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise OptionError where there is no archive.

        Listing the manifests cannot tell a missing archive from an empty one.
        """
        if not self._epochs.parent.is_dir():
            raise OptionError(
                f"there is no archive at {self.path} (no directory {self._epochs.parent})"
            )

    def pieces(self) -> list[Piece]:
        """Return all pieces by queue and shard, those of a shard in order of epochs.

        Raises OptionError where there is no archive.
        """
        self.check()
        found = []
        for file in sorted(self._epochs.glob("*.json")):
            manifest = json.loads(file.read_text())
            if manifest["format"] != FORMAT:
                raise DataLoss(f"{file}: of format {manifest['format']}, this is for {FORMAT}")
            found += [
                Piece(**{**piece, "files": tuple(piece["files"])}) for piece in manifest["pieces"]
            ]
        return sorted(found, key=lambda piece: (piece.queue, piece.shard))

    def extended_back(
        self, states: Iterable[ShardState], queues: Container[str]
    ) -> list[ShardState]:
        """Return the shards, extended by their archived rows.

        A shard begins at the first archived row of the same stream, if that row is older than the
        shard's log. Archived shards of `queues` that do not exist any more are added and end with
        their last archived row. Where a stream of another id has the name and number of an
        archived shard, only the new stream is returned.
        """
        found = {state.place: state for state in states}
        live = set(found)
        for piece in self.pieces():
            place = piece.queue, piece.shard
            state = found.get(place)
            if state is not None and state.id == piece.id:
                end = state.next if place in live else max(state.next, piece.end)
                found[place] = replace(state, first=min(state.first, piece.start), next=end)
            elif place not in live and piece.queue in queues:
                # Several streams may have had this place one after another; the last one stays.
                found[place] = ShardState(
                    piece.queue, piece.shard, piece.id, piece.start, piece.end
                )
        return list(found.values())

    def find(self, place: Place, id_: str, time_ms: int, below: int) -> int | None:
        """Return the offset of the first archived row that is not older than a time.

        Only rows of the stream `id_` with offsets below `below` count. None: all are older. The
        rows of a stream are stored in the order of time, so a binary search opens few files.
        """
        mine = [
            p
            for p in self.pieces()
            if (p.queue, p.shard, p.id) == (*place, id_) and p.rows and p.start < below
        ]
        mine.sort(key=lambda piece: piece.start)
        low, high = 0, len(mine)
        found = None
        while low < high:
            middle = (low + high) // 2
            first = self._first_since(mine[middle], time_ms, below)
            if first is None:
                low = middle + 1
            else:
                found, high = first, middle
        return found

    def _first_since(self, piece: Piece, time_ms: int, below: int) -> int | None:
        filters = [f"since:{time_ms}"]
        rows = self._rows(piece, piece.start, min(piece.end, below), ["offset"], filters)
        for batch in rows:
            return int(batch.column(batch.schema.get_field_index("offset"))[0].as_py())
        return None

    def scan(
        self,
        one: Range,
        columns: Sequence[str],
        filters: Sequence[str] = (),
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range in order; raise DataLoss where the archive lacks some of it.

        With fail_on_data_loss=False the rows that are there are given and nothing is raised.
        """
        at = one.start
        mine = [
            p for p in self.pieces() if (p.queue, p.shard, p.id) == (one.queue, one.shard, one.id)
        ]
        for piece in sorted(mine, key=lambda piece: piece.start):
            if piece.end <= at or piece.start >= one.end:
                continue
            if piece.start > at and fail_on_data_loss:
                raise _missing(self.path, one, at, piece.start)
            yield from self._rows(piece, max(at, piece.start), one.end, columns, filters)
            at = piece.end
        if at < one.end and fail_on_data_loss:
            raise _missing(self.path, one, at, one.end)

    def _rows(
        self, piece: Piece, start: int, end: int, columns: Sequence[str], filters: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        from pyspark_shardmq.matching import matches

        place = ["queue", "shard", "offset"]
        needed = list(
            dict.fromkeys(
                [*columns, *place, *(["timestamp", "routing_key", "exchange"] if filters else [])]
            )
        )
        wanted = schema.arrow_schema(needed)
        for name in piece.files:
            with pq.ParquetFile(self.path / name) as file:
                for batch in file.iter_batches(BATCH_ROWS, columns=needed):
                    rows = schema.conform(batch, wanted)
                    queue, shard, offset = (rows.column(needed.index(column)) for column in place)
                    mine = pc.and_(pc.equal(queue, piece.queue), pc.equal(shard, piece.shard))
                    inside = pc.and_(pc.greater_equal(offset, start), pc.less(offset, end))
                    kept = rows.filter(pc.and_(mine, inside))
                    kept = kept.filter(matches(kept, filters)) if filters else kept
                    if kept.num_rows:
                        yield kept


def _missing(path: Path, one: Range, start: int, end: int) -> DataLoss:
    return DataLoss(
        f"{one.queue}/{one.shard}: offsets {start} to {end - 1} are neither in the log nor in "
        f"archive {path}"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileFacts:
    """A file holds rows `first` to `last` of one shard; `name` is relative to the archive."""

    name: str
    queue: str
    shard: int
    first: int
    last: int
    rows: int


def facts(archive: Archive, names: Iterable[str]) -> list[FileFacts]:
    """Return which rows of which shards the files hold, one entry per file and shard."""
    import pyarrow.parquet as pq

    found = []
    for name in sorted(names):
        places = pq.read_table(archive.path / name, columns=["queue", "shard", "offset"])
        spans = places.group_by(["queue", "shard"]).aggregate(
            [("offset", "min"), ("offset", "max"), ("offset", "count")]
        )
        for row in spans.to_pylist():
            span = row["offset_min"], row["offset_max"], row["offset_count"]
            found.append(FileFacts(name, row["queue"], row["shard"], *span))
    return found


def pieces_of(files: Sequence[FileFacts], start: Positions | None, end: Positions) -> list[Piece]:
    """Return the pieces of an epoch, whose rows lie in `files` and end before the positions `end`.

    Each piece begins where the epoch before ended, at `start`, or at offset 0 if its shard was
    added since. In the first epoch (`start` is None), and where a stream was made anew, a piece
    begins at the first row that the files hold.
    """
    pieces = []
    for (queue, shard), position in sorted(end.items()):
        mine = sorted(
            (f for f in files if (f.queue, f.shard) == (queue, shard)), key=lambda f: f.first
        )
        begun = None if start is None else start.get((queue, shard))
        if start is None or (begun is not None and begun.id != position.id):
            low = mine[0].first if mine else position.next
        else:
            low = begun.next if begun is not None else 0
        if low < position.next:
            names = tuple(f.name for f in mine)
            pieces.append(
                Piece(
                    queue, shard, position.id, low, position.next, sum(f.rows for f in mine), names
                )
            )
    return pieces
