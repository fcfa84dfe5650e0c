"""An archive holds exactly the rows that its manifests name. These tests need no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_shardmq.offsets import DataLoss, Position, Range, ShardState

if TYPE_CHECKING:
    from pyspark_shardmq.archive import Archive, Piece

pa = pytest.importorskip("pyarrow")


def row(queue: str, shard: int, offset: int) -> dict[str, Any]:
    base = {
        "queue": queue,
        "shard": shard,
        "offset": offset,
        "timestamp": offset * 1000,
        "exchange": "x",
    }
    return base | {
        "routing_key": f"k.{offset % 3}",
        "value": b"%d" % offset,
        "headers": None,
        "properties": None,
    }


class Written:
    """An archive that is written epoch by epoch, as the job writes it."""

    def __init__(self, path: Path) -> None:
        from pyspark_shardmq.archive import Archive

        self.archive, self.at = Archive(path), None

    def epoch(
        self, number: int, end: dict[tuple[str, int], Position], begin: int = 0
    ) -> list[Piece]:
        import pyarrow.parquet as pq

        from pyspark_shardmq.archive import facts, pieces_of
        from pyspark_shardmq.schema import COLUMNS, arrow_schema

        directory = self.archive.new_directory(number)
        directory.mkdir(parents=True)
        names = set()
        for (queue, shard), position in end.items():
            low = begin if self.at is None else self.at.get((queue, shard), Position("", 0)).next
            rows = [row(queue, shard, offset) for offset in range(low, position.next)]
            if rows:
                table = pa.Table.from_pylist(rows, schema=arrow_schema(list(COLUMNS)))
                pq.write_table(table, directory / f"part-{queue}-{shard}.parquet", row_group_size=7)
                names.add(
                    str(
                        (directory / f"part-{queue}-{shard}.parquet").relative_to(self.archive.path)
                    )
                )
        pieces = pieces_of(facts(self.archive, names), self.at, end)
        self.archive.commit(number, pieces)
        self.at = end
        return pieces


def offsets(
    archive: Archive, start: int, end: int, shard: int = 0, id_: str = "one", **more: Any
) -> list[int]:
    batches = archive.scan(Range("orders", shard, id_, start, end), ["offset", "value"], **more)
    return [
        n
        for batch in batches
        for n in batch.column(batch.schema.get_field_index("offset")).to_pylist()
    ]


def test_ranges_are_read_over_epochs_and_shards(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.epoch(
        0, {("orders", 0): Position("one", 20), ("orders", 1): Position("two", 5)}, begin=3
    )
    written.epoch(1, {("orders", 0): Position("one", 31), ("orders", 1): Position("two", 5)})
    archive = written.archive
    assert offsets(archive, 3, 31) == list(range(3, 31))
    assert offsets(archive, 15, 25) == list(range(15, 25))
    assert offsets(archive, 4, 5, shard=1, id_="two") == [4]
    assert offsets(archive, 3, 31, filters=["key:k.1", "since:10"]) == [
        n for n in range(10, 31) if n % 3 == 1
    ]
    states = [ShardState("orders", 0, "one", 30, 40), ShardState("orders", 1, "another", 2, 9)]
    whole = [ShardState("orders", 0, "one", 3, 40), states[1]]
    assert archive.extended_back(states, ["orders"]) == whole
    assert archive.extended_back(states[:1], []) == whole[:1]
    assert archive.extended_back(states[:1], ["orders"]) == [
        whole[0],
        ShardState("orders", 1, "two", 3, 5),
    ]


def test_the_first_row_since_a_time_is_found_in_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    written, epochs = Written(tmp_path), 64
    for number in range(epochs):
        written.epoch(number, {("orders", 0): Position("one", 10 * (number + 1))})
    opened: list[object] = []
    parquet_file = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda name: opened.append(name) or parquet_file(name))
    for offset in (0, 1, 9, 10, 317, 639):
        opened.clear()
        # row n was stored in millisecond n
        assert written.archive.find(("orders", 0), "one", offset, 1000) == offset
        assert len(opened) <= 8
    assert written.archive.find(("orders", 0), "one", 640, 1000) is None
    assert written.archive.find(("orders", 0), "one", 317, 317) is None
    assert written.archive.find(("orders", 0), "another", 0, 1000) is None


def test_what_is_not_archived_is_said_and_not_left_out(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.epoch(0, {("orders", 0): Position("one", 20)}, begin=3)
    for start, end, missing in [(0, 10, "0 to 2"), (10, 25, "20 to 24"), (30, 31, "30 to 30")]:
        with pytest.raises(
            DataLoss, match=f"offsets {missing} are neither in the log nor in archive"
        ):
            offsets(written.archive, start, end)
    with pytest.raises(DataLoss):
        offsets(written.archive, 3, 20, id_="made anew")
    assert offsets(written.archive, 0, 10, fail_on_data_loss=False) == list(range(3, 10))


def test_half_an_epoch_counts_for_nothing_and_is_removed(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.epoch(0, {("orders", 0): Position("one", 20)})
    left = written.archive.new_directory(1)
    left.mkdir()
    (left / "part-0.parquet").write_bytes(b"half")
    (tmp_path / "_shardmq" / "epochs" / "0000000001.json.x.new").write_text("{")
    assert not written.archive.has(1) and offsets(written.archive, 0, 20) == list(range(20))
    assert written.archive.remove_leftovers() == [left.name]
    assert not left.exists() and offsets(written.archive, 0, 20) == list(range(20))
    assert written.archive.remove_leftovers() == []


def test_an_epoch_without_rows_still_says_how_far_it_went(tmp_path: Path) -> None:
    """Rows that were damaged at the broker are missing in a range that is archived all the same."""
    from pyspark_shardmq.archive import pieces_of

    (piece,) = pieces_of(
        [], {("orders", 0): Position("one", 5)}, {("orders", 0): Position("one", 9)}
    )
    assert (piece.start, piece.end, piece.rows, piece.files) == (5, 9, 0, ())
