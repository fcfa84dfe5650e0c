"""make arguments: write the files that say what the table of arguments says.

The page and shardctl cannot read broker/model/arguments.py: the one runs in a browser, the other
belongs to a package that the broker builds on. Both have a file made of the rows, and so do
readers. tests/model/test_arguments.py fails while one of the files says something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from shardmq.broker.model import arguments
from shardmq.broker.model.arguments import Argument, Merge, Table
from shardmq.broker.model.policies import APPLY_TO

ROOT = Path(__file__).resolve().parents[1]
PAGE = "broker/controller/web/arguments.js"
SHARDCTL = "supervisor/cli/arguments.py"
DOCUMENT = "broker/ARGUMENTS.md"
SOURCE = "broker/model/arguments.py"
HOLDS = {
    Merge.ARGUMENT: "argument",
    Merge.APART: "argument",
    Merge.LOWER: "lower",
    Merge.LOWER_NOT_NEGATIVE: "lower, not negative",
}


def files(table: Table) -> dict[str, str]:
    """Return the text of each file by its path in the repository."""
    return {PAGE: page(table), SHARDCTL: shardctl(table), DOCUMENT: document(table)}


def page(table: Table) -> str:
    """Write the names that the page offers where somebody types arguments or policy keys."""
    rows = [*table.queue.values(), *table.exchange.values()]
    keys = [row.policy for row in rows if row.is_offered and row.policy is not None]
    lists = {
        "QUEUE_ARGUMENTS": [row.name for row in table.queue.values() if row.is_offered],
        "EXCHANGE_ARGUMENTS": [row.name for row in table.exchange.values() if row.is_offered],
        "POLICY_KEYS": [key.name for key in keys],
        "OPERATOR_POLICY_KEYS": [key.name for key in keys if key.is_operator],
        "APPLY_TO": list(APPLY_TO),
    }
    made = [f"// Names for forms. Written by `make arguments` from {SOURCE}.\n"]
    for name, names in lists.items():
        lines = [f"  {json.dumps(each)},\n" for each in names]
        made.append(f"\nexport const {name} = [\n{''.join(lines)}];\n")
    return "".join(made)


def shardctl(table: Table) -> str:
    """Write a module with a line for each argument that acts, and the policy keys that act."""
    acting = {
        name: key for name, key in table.keys.items() if name not in table.keys_without_effect
    }
    return "".join(
        (
            '"""Help of shardctl for arguments and policy keys.\n\n',
            f"Written by `make arguments` from {SOURCE}.\n",
            '"""\n\nfrom typing import Final\n\n',
            _dictionary("QUEUE", table.queue.values()),
            _dictionary("EXCHANGE", table.exchange.values()),
            _tuple("POLICY_KEYS", acting),
            _tuple("APPLY_TO", APPLY_TO),
            _tuple(
                "OPERATOR_POLICY_KEYS", [name for name, key in acting.items() if key.is_operator]
            ),
        )
    )


def _dictionary(name: str, rows: Iterable[Argument]) -> str:
    lines = [f'    "{row.name}": "{row.summary}",\n' for row in rows if not row.no_effect]
    return f"{name}: Final = {{\n{''.join(lines)}}}\n"


def _tuple(name: str, words: Iterable[str]) -> str:
    lines = [f'    "{word}",\n' for word in words]
    return f"{name}: Final = (\n{''.join(lines)})\n"


def document(table: Table) -> str:
    """Write the reference for readers."""
    made = [
        "# Arguments of queues and exchanges\n\n",
        f"Written by `make arguments` from [{SOURCE}](model/arguments.py).\n\n",
        "A policy sets an argument by its policy key. An operator policy may have only the keys "
        "that\n",
        "are marked *operator*. If a policy and the argument of a queue or exchange differ, the "
        "column\n",
        "*in force* says which one counts: the argument, or the lower value. If a policy and an "
        "operator\n",
        "policy differ, the operator policy counts, or the lower value.\n\n",
        "## Queues\n\n",
        *_rows(table.queue.values()),
        "\n## Exchanges\n\n",
        *_rows(table.exchange.values()),
        "\n## Accepted and without effect\n\n",
        "Definitions of other brokers may have these names. The broker warns when one is set.\n\n",
        "| argument | policy key | why |\n| --- | --- | --- |\n",
    ]
    idle = [row for row in table.queue.values() if row.no_effect]
    made += [f"| `{row.name}` | {_key(row)} | {row.no_effect} |\n" for row in idle]
    named = {row.policy.name for row in idle if row.policy is not None}
    for name, why in table.keys_without_effect.items():
        if name not in named:
            made.append(f"| | `{name}` | {why} |\n")
    return "".join(made)


def _rows(rows: Iterable[Argument]) -> Iterable[str]:
    yield (
        "| argument | types | policy key | in force | meaning |\n| --- | --- | --- | --- | --- |\n"
    )
    for row in rows:
        if row.no_effect:
            continue
        holds = HOLDS[row.policy.merge] if row.policy is not None else ""
        yield f"| `{row.name}` | {_types(row)} | {_key(row)} | {holds} | {row.summary} |\n"


def _types(row: Argument) -> str:
    if row.types in (arguments.ANY_EXCHANGE, arguments.QUEUE_TYPES):
        return "all"
    return ", ".join(sorted(row.types))


def _key(row: Argument) -> str:
    if row.policy is None:
        return ""
    return f"`{row.policy.name}`" + (", operator" if row.policy.is_operator else "")


if __name__ == "__main__":
    for path, text in files(arguments.TABLE).items():
        (ROOT / path).write_text(text)
