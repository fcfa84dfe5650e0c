"""The path of a message through five files is written in them, and each names the next."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = [
    "broker/front_door/connection/connection.py",
    "broker/front_door/publish/publish.py",
    "shardd/shard.py",
    "shardd/queues/queue.py",
    "shardd/store/segments/store.py",
]


def docstring(name: str) -> str:
    return " ".join((ast.get_docstring(ast.parse((ROOT / name).read_text())) or "").split())


@pytest.mark.parametrize("name", PATH)
def test_each_file_of_the_path_names_its_place_and_its_neighbours(name: str) -> None:
    index = PATH.index(name)
    text = docstring(name)
    assert re.search(rf"Publish path, {index + 1} of {len(PATH)}\.", text)
    if index > 0:
        assert f"Before: {PATH[index - 1]}." in text
    if index < len(PATH) - 1:
        assert f"After: {PATH[index + 1]}." in text
