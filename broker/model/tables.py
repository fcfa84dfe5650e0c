"""Check that a value can stand in an AMQP table.

What comes as AMQP has only such values. JSON has more, which neither the log of what exists nor the
links between the processes can carry. Whoever takes values from JSON asks `fault_in` first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardmq.broker.amqp.spec import TABLE_DEPTH_MAX

INTEGER_MIN = -(1 << 63)
# An integer above 2 ** 63 - 1 is a timestamp that no calendar has.
INTEGER_MAX = (1 << 64) - 1
KEY_BYTES_MAX = 255
# A frame of the default size, 128 KiB, has fewer. To look at so many takes 10 ms, for which all
# others wait.
VALUES_MAX = 1 << 17
TOO_MANY_VALUES = f"more than {VALUES_MAX} values"


def fault_in(value: Any, key_bytes_max: int = KEY_BYTES_MAX) -> str:
    """Return why a table cannot have the value, or ""."""
    waiting: list[tuple[dict[str, Any] | list[Any], int]] = [([value], -1)]
    values = -1  # the list around the value is none
    while waiting:
        each, depth = waiting.pop()
        if depth > TABLE_DEPTH_MAX:
            return f"tables nested more than {TABLE_DEPTH_MAX} deep"
        values += len(each)
        if values > VALUES_MAX:
            return TOO_MANY_VALUES
        items: Iterable[Any] = each
        if isinstance(each, dict):
            # A character has at most four bytes.
            if any(
                len(key) > key_bytes_max // 4 and len(key.encode()) > key_bytes_max for key in each
            ):
                return f"a key of more than {key_bytes_max} bytes"
            items = each.values()
        for item in items:
            if isinstance(item, int):
                if not INTEGER_MIN <= item <= INTEGER_MAX:
                    return "an integer of more than 64 bits"
            elif isinstance(item, dict | list):
                waiting.append((item, depth + 1))
    return ""
