"""Check that a value can stand in an AMQP table.

What comes as AMQP has only such values. JSON has more, which neither the log of what exists nor the
links between the processes can carry. Whoever takes values from JSON asks `fault_in` first.
"""

from __future__ import annotations

from typing import Any

from shardmq.broker.amqp.spec import TABLE_DEPTH_MAX

INTEGER_MIN = -(1 << 63)
# An integer above 2 ** 63 - 1 is a timestamp that no calendar has.
INTEGER_MAX = (1 << 64) - 1
KEY_BYTES_MAX = 255


def fault_in(value: Any, key_bytes_max: int = KEY_BYTES_MAX) -> str:
    """Return why a table cannot have the value, or ""."""
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, int):
            if not INTEGER_MIN <= each <= INTEGER_MAX:
                return "an integer of more than 64 bits"
        elif isinstance(each, dict | list):
            if depth > TABLE_DEPTH_MAX:
                return f"tables nested more than {TABLE_DEPTH_MAX} deep"
            if isinstance(each, dict):
                # A character has at most four bytes.
                if any(
                    len(key) > key_bytes_max // 4 and len(key.encode()) > key_bytes_max
                    for key in each
                ):
                    return f"a key of more than {key_bytes_max} bytes"
                waiting.extend((item, depth + 1) for item in each.values())
            else:
                waiting.extend((item, depth + 1) for item in each)
    return ""
