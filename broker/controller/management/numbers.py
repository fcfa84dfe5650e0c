"""Whole numbers in paths, queries and bodies."""

from __future__ import annotations

from typing import Final

from shardmq.broker.controller.management.api_error import bad_request

NUMBER_MAX: Final = (1 << 63) - 1
NUMBER_DIGITS_MAX: Final = len(str(NUMBER_MAX))


def number(name: str, given: str, least: int = 0, most: int = NUMBER_MAX) -> int:
    """Return the whole number in a text of a path, query or body, or raise 400."""
    digits = given.removeprefix("-") if least < 0 else given
    if (
        digits.isascii()
        and digits.isdecimal()
        and len(digits) <= NUMBER_DIGITS_MAX  # `int` raises for long texts
        and least <= int(given) <= most
    ):
        return int(given)
    raise bad_request(f"{name}: not a number from {least} to {most}")
