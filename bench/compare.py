"""Compare two result files: `compare.py BEFORE AFTER` prints the ratio of medians for each bar.

A ratio inside the larger spread of the two files is printed as no difference ("~"). The spread does
not cover changes between the two files: a neighbour on the machine, or a peer that has not given
back its memory, looks like a difference here. Believe a difference when a run with both brokers
side by side shows it too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from load.families import BY_NAME


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--broker", default="shardmq", help="whose figures (shardmq)")
    parser.add_argument(
        "--against", metavar="BROKER", help="compare with this broker of the first file"
    )
    arguments = parser.parse_args()
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    if before["machine"] != after["machine"]:
        print("The machines differ: the ratios are worth little.\n")
    print("| scenario | figure | before | after | ratio | |\n| --- | --- | --- | --- | --- | --- |")
    for cells in compared(
        before["scenarios"],
        after["scenarios"],
        arguments.against or arguments.broker,
        arguments.broker,
    ):
        print(f"| {' | '.join(cells)} |")


def compared(
    before: dict[str, Any], after: dict[str, Any], old: str, new: str
) -> Iterator[list[str]]:
    for name in before:
        first, second = before[name].get(old), after.get(name, {}).get(new)
        if not first or not second or name not in BY_NAME:
            continue
        for bar in {bar.metric: bar for bar in BY_NAME[name].bars}.values():
            a, b = first["median"].get(bar.metric), second["median"].get(bar.metric)
            if a and b is not None:
                noise = max(
                    first["spread"].get(bar.metric, 0.0), second["spread"].get(bar.metric, 0.0)
                )
                found = verdict(b / a, noise, bar.wanted == "at least")
                amounts = [report.amount(a), report.amount(b), f"{b / a:.2f}"]
                yield [name, report.title(bar.metric), *amounts, found]


def verdict(ratio: float, noise: float, more_is_better: bool) -> str:
    if abs(ratio - 1) <= noise:
        return "~"
    return "better" if (ratio > 1) == more_is_better else "worse"


if __name__ == "__main__":
    main()
