"""Random messages with whatever AMQP lets them have, and Arrow tables as plain rows."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa

from tests.reference.columns import LONG, PROPERTIES, SIZES, Header

KEYS = (b"", b"a", b"a.b", b"a.b.c", b"b..a", b"\xff\xfe", "ü.b".encode())
TEXTS = ("", "x", "text/plain", "é" * 20, "y" * 255)


def random_header(rng: random.Random) -> Header:
    kind = rng.choice([*SIZES, *LONG])
    size = rng.choice((0, 1, 40)) if kind in LONG else SIZES[kind]
    return rng.choice(("", "a", "x-stream-filter-value", "ü")), kind, rng.randbytes(size)


def random_values(rng: random.Random) -> dict[str, Any]:
    """Properties of one message; a timestamp in seconds."""
    values: dict[str, Any] = {}
    for name, kind in PROPERTIES:
        if rng.random() < 0.6:
            continue
        if kind == "s":
            values[name] = rng.choice(TEXTS)
        elif kind == "F":
            values[name] = [random_header(rng) for _ in range(rng.randrange(4))]
        elif kind == "B":
            values[name] = rng.randrange(256)
        else:
            values[name] = rng.choice((0, 1_700_000_000, 2**40, 2**64 - 1))
    return values


def plain(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table with times as microseconds."""
    for at, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(at, field.name, table.column(at).cast(pa.int64()))
    rows: list[dict[str, Any]] = table.drop_columns(
        [n for n in ("properties",) if n in table.column_names]
    ).to_pylist()
    if "properties" in table.column_names:
        properties = table.column("properties").combine_chunks()
        if isinstance(properties, pa.ChunkedArray):
            properties = pa.concat_arrays(properties.chunks)
        names = [field.name for field in properties.type]
        parts = [
            part.cast(pa.int64()) if pa.types.is_timestamp(part.type) else part
            for part in properties.flatten()
        ]
        for row, values in zip(
            rows, zip(*(part.to_pylist() for part in parts), strict=True), strict=True
        ):
            row["properties"] = dict(zip(names, values, strict=True))
    return rows
