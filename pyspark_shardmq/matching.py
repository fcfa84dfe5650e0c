"""The broker's filters, applied to rows of the archive with the same meaning as at the broker."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def matches(batch: pa.RecordBatch, filters: Sequence[str]) -> pa.Array:
    """Return one truth value a row: true where all filters hold.

    The batch needs the columns that the filters look at: `routing_key`, `exchange`, `timestamp`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found = pa.repeat(True, batch.num_rows)
    for text in filters:
        word, _, value = text.partition(":")
        found = pc.and_(found, _HOLDS[word](batch, value))
    return found


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    return batch.column(batch.schema.get_field_index(name))


def _pattern(batch: pa.RecordBatch, value: str) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = _column(batch, "routing_key")
    pattern = topic_pattern(value)
    fitting = [key for key in pc.unique(keys).to_pylist() if pattern.fullmatch(key)]
    return pc.is_in(keys, pa.array(fitting, pa.string()))


def _equal(name: str) -> Callable[[pa.RecordBatch, str], pa.Array]:
    def holds(batch: pa.RecordBatch, value: str) -> pa.Array:
        import pyarrow.compute as pc

        return pc.equal(_column(batch, name), value)

    return holds


def _at(value: str) -> pa.Scalar:
    import pyarrow as pa

    return pa.scalar(int(value) * 1000, pa.timestamp("us", tz="UTC"))


def _since(batch: pa.RecordBatch, value: str) -> pa.Array:
    import pyarrow.compute as pc

    return pc.greater_equal(_column(batch, "timestamp"), _at(value))


def _until(batch: pa.RecordBatch, value: str) -> pa.Array:
    import pyarrow.compute as pc

    return pc.less(_column(batch, "timestamp"), _at(value))


_HOLDS: dict[str, Callable[[pa.RecordBatch, str], pa.Array]] = {
    "routing_key": _pattern,
    "key": _equal("routing_key"),
    "exchange": _equal("exchange"),
    "since": _since,
    "until": _until,
}


def topic_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a topic pattern of AMQP: `*` is one word, `#` any number; dots separate words."""
    words = re.sub(r"(?<![^.])#(?:\.#)+(?![^.])", "#", pattern).split(".")
    if words == ["#"]:
        return re.compile(".*", re.DOTALL)
    text = ""
    for i, word in enumerate(words):
        last = i == len(words) - 1
        if word != "#":
            text += ("[^.]*" if word == "*" else re.escape(word)) + ("" if last else r"\.")
        elif last:
            text = text.removesuffix(r"\.") + r"(?:\.[^.]*)*"
        else:
            text += r"(?:[^.]*\.)*"
    return re.compile(text, re.DOTALL)
