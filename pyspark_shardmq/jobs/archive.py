"""Copy streams into Parquet files: `python -m pyspark_shardmq.jobs.archive`.

Each row is archived once, also when the job is killed. An epoch of Spark's query is in the archive
as soon as its manifest has its name; no manifest names the files that a killed job left. If Spark
repeats an epoch that is in the archive, nothing is done. The offsets of an epoch come from the
query's checkpoint, which lies in the archive. Only one job at a time writes to an archive.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.archive import Archive, Piece, facts, pieces_of
from pyspark_shardmq.jobs import command
from pyspark_shardmq.offsets import Positions, decode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_EPOCH = 1_000_000  # about 128 MB of rows of 100 bytes


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    made = command.parser(
        "archive", "Copy streams into Parquet files with a manifest, exactly once."
    )
    made.add_argument("streams", help="streams or stream exchanges, several with commas")
    made.add_argument("path", help="directory of the archive; the same one goes on where it ended")
    made.add_argument("--rows-per-epoch", type=command.at_least(1), default=ROWS_PER_EPOCH)
    made.add_argument("--table-format", choices=["parquet", "delta"], default="parquet")
    command.add_trigger(made)
    return made.parse_args(words)


def job(spark: SparkSession, given: argparse.Namespace) -> dict[str, Any]:
    archive = Archive(given.path)
    with only_one(archive):
        left = archive.remove_leftovers()
        keep = _into_delta(archive) if given.table_format == "delta" else _into_parquet(archive)
        before = {(p.queue, p.shard, p.start) for p in archive.pieces()}

        def begin() -> Any:
            writer = (
                _rows(spark, given).writeStream.foreachBatch(keep).trigger(**command.trigger(given))
            )
            return writer.option("checkpointLocation", str(archive.checkpoint)).start()

        command.follow(command.start(begin), "archive")
        new = [p for p in archive.pieces() if (p.queue, p.shard, p.start) not in before]
        return {**summary(archive, new), "leftovers removed": len(left)}


def _rows(spark: SparkSession, given: argparse.Namespace) -> DataFrame:
    options = {
        "subscribe": given.streams,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(given.rows_per_epoch),
        "includeHeaders": "true",
        "includeProperties": "true",
        **command.connector_options(given),
        **dict(given.option),
    }
    return spark.readStream.format("shardmq").options(**options).load()


def summary(archive: Archive, new: list[Piece]) -> dict[str, Any]:
    names = {name for piece in new for name in piece.files}
    return {
        "rows": sum(piece.rows for piece in new),
        "files": len(names),
        "bytes": sum((archive.path / name).stat().st_size for name in names),
        "ends": json.dumps(ends(archive), sort_keys=True),
    }


def ends(archive: Archive) -> dict[str, dict[str, int]]:
    """Return by queue and shard the offset behind the last archived row."""
    found: dict[str, dict[str, int]] = {}
    for piece in archive.pieces():
        shards = found.setdefault(piece.queue, {})
        shards[str(piece.shard)] = max(piece.end, shards.get(str(piece.shard), 0))
    return found


# -- one epoch -------------------------------------------------------------------------------------


def _into_parquet(archive: Archive) -> Callable[[DataFrame, int], None]:
    def keep(rows: DataFrame, epoch: int) -> None:
        if archive.has(epoch):
            return
        directory = archive.new_directory(epoch)
        rows.write.mode("errorifexists").parquet(f"file://{directory.resolve()}")
        names = {str(file.relative_to(archive.path)) for file in directory.glob("*.parquet")}
        start, end = offsets_of(archive.checkpoint, epoch)
        archive.commit(epoch, pieces_of(facts(archive, names), start, end))

    return keep


def _into_delta(archive: Archive) -> Callable[[DataFrame, int], None]:
    """Return the function that writes an epoch into the Delta table.

    The log of the table knows which epochs it holds. Files of the table that no manifest names are
    those of its last epoch.
    """
    try:
        import deltalake
    except ImportError:
        raise command.JobError(
            "--table-format delta needs deltalake: pip install 'pyspark-shardmq[delta]'"
        ) from None
    table = archive.path / "table"

    def keep(rows: DataFrame, epoch: int) -> None:
        if archive.has(epoch):
            return
        query = json.loads((archive.checkpoint / "metadata").read_text())["id"]
        done = (
            deltalake.DeltaTable(str(table)).transaction_version(query) if table.exists() else None
        )
        if done is None or done < epoch:
            properties = deltalake.CommitProperties(
                app_transactions=[deltalake.Transaction(query, epoch)]
            )
            deltalake.write_deltalake(
                str(table), rows.toArrow(), mode="append", commit_properties=properties
            )
        named = {name for piece in archive.pieces() for name in piece.files}
        there = {f"table/{Path(uri).name}" for uri in deltalake.DeltaTable(str(table)).file_uris()}
        start, end = offsets_of(archive.checkpoint, epoch)
        archive.commit(epoch, pieces_of(facts(archive, there - named), start, end))

    return keep


def offsets_of(checkpoint: Path, epoch: int) -> tuple[Positions | None, Positions]:
    """Return the start and the end of an epoch; the start of the first epoch is None.

    Spark's checkpoint has one file an epoch, with three lines: the version, facts about the epoch,
    and the offsets at its end.
    """
    end = _logged(checkpoint, epoch)
    if end is None:
        raise command.JobError(f"{checkpoint} says nothing of epoch {epoch}")
    return (_logged(checkpoint, epoch - 1) if epoch else None), end


def _logged(checkpoint: Path, epoch: int) -> Positions | None:
    file = checkpoint / "offsets" / str(epoch)
    if not file.exists():
        return None
    version, _, offsets = file.read_text().splitlines()[:3]
    if version != "v1":
        raise command.JobError(f"{file}: a checkpoint of version {version}; this is for v1")
    return decode(offsets)


@contextmanager
def only_one(archive: Archive) -> Iterator[None]:
    """Hold the archive's lock; raise JobError if another job holds it.

    The lock also ends with the process, in whatever way the process ends.
    """
    file = archive.path / "_shardmq" / "lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise command.JobError(f"another job writes to {archive.path}") from None
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(command.run("archive", arguments(), job))
