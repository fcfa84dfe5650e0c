"""Each folder of the store is used without the others, as the example in its README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

STORE = Path(__file__).parents[2] / "shardd" / "store"


def example(folder: str) -> str:
    return "\n".join(
        re.findall(r"```python\n(.*?)```", (STORE / folder / "README.md").read_text(), re.DOTALL)
    )


@pytest.mark.parametrize(
    "folder, other", [("segments", "streams"), ("streams", "segments"), ("format", "s")]
)
def test_the_example_of_a_folder_runs_without_its_neighbour(
    folder: str, other: str, tmp_path: Path
) -> None:
    program = f"""
import sys

directory = {str(tmp_path / "directory")!r}
{example("format")}
{example(folder) if folder != "format" else ""}
assert not [name for name in sys.modules if name.startswith("shardmq.shardd.store.{other}")]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(list(tmp_path.rglob("*.0*"))) == (folder != "format"), (
        "it wrote to the directory it was given"
    )


def test_examples_are_found() -> None:
    assert "SegmentStore(" in example("segments") and "StreamLog(" in example("streams")
