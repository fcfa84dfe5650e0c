"""The archive of streams: Parquet files and the manifest that says which of them count. Reading it needs no Spark.

    DIR/_shardmq/epochs/0000000007.json   one epoch: what it holds and in which files; there or not, never half
    DIR/_shardmq/checkpoint/              Spark's, of the job that writes
    DIR/data/0000000007-3f2a.../part-*    rows of that epoch; files of a shard hold its rows in order of their offsets

A file that no manifest names is what a killed job left; it counts for nothing and the next job removes it.
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
    """Rows `start` to `end` - 1 of one shard in one epoch. Files in order of their offsets, relative to the archive."""

    queue: str
    shard: int
    id: str
    start: int
    end: int
    rows: int
    files: tuple[str, ...]


class Archive:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(str(path).removeprefix("file://"))

    @property
    def checkpoint(self) -> Path:
        return self.path / "_shardmq" / "checkpoint"

    @property
    def _epochs(self) -> Path:
        return self.path / "_shardmq" / "epochs"

    # -- written ------------------------------------------------------------------------------------------

    def has(self, epoch: int) -> bool:
        return self._manifest(epoch).exists()

    def _manifest(self, epoch: int) -> Path:
        return self._epochs / f"{epoch:010}.json"

    def room_for(self, epoch: int) -> Path:
        """A directory no other attempt writes to, not even one whose driver was killed and whose tasks live on."""
        return self.path / "data" / f"{epoch:010}-{uuid.uuid4().hex[:12]}"

    def commit(self, epoch: int, pieces: Sequence[Piece]) -> None:
        """From now on the epoch is in the archive, also after a power cut."""
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
        """Directories of attempts that no manifest names. Only by the one job that writes."""
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

    # -- read ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise OptionError where no archive is: an empty one looks the same to whoever only lists files."""
        if not self._epochs.parent.is_dir():
            raise OptionError(
                f"there is no archive at {self.path} (no directory {self._epochs.parent})"
            )

    def pieces(self) -> list[Piece]:
        """All there are, by queue, shard and offset; epochs in order where a stream was made anew. Raises OptionError
        where there is no archive.
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

    def reaching_back(
        self, states: Iterable[ShardState], queues: Container[str]
    ) -> list[ShardState]:
        """Return the shards with what is archived of them: each begins at the first row that is archived of the same
        stream, if that is older than its log.

        Shards of these queues that are archived and not there any more end with what is archived. Where another stream
        has taken the place of an archived one, only the other is told.
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
                # Of several streams that had the place one after another the last one.
                found[place] = ShardState(
                    piece.queue, piece.shard, piece.id, piece.start, piece.end
                )
        return list(found.values())

    def find(self, place: Place, id_: str, time_ms: int, below: int) -> int | None:
        """Return the offset of the first row that is not older than the time, among those archived of the stream
        below an offset. None where there is none.

        The rows of a stream are stored in the order of time: pieces are halved, and only few files are opened.
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
        """The rows of a range, in order. DataLoss where the archive does not hold all of it."""
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
        f"{one.queue}/{one.shard}: offsets {start} to {end - 1} are neither in the log nor in archive {path}"
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileFacts:
    """Of one shard a file holds rows `first` to `last`. name: relative to the archive."""

    name: str
    queue: str
    shard: int
    first: int
    last: int
    rows: int


def facts(archive: Archive, names: Iterable[str]) -> list[FileFacts]:
    """Of all these files with rows, each shard's rows in order of their offsets."""
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
    """What an epoch holds: of each place the rows from where the epoch before ended. Of the first epoch (start None)
    from the first row.
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
