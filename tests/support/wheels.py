"""Check built wheels: names, tags, size and files. `python tests/support/wheels.py dist`."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

BYTES_MAX = 5_000_000
SOURCES = (".c", ".cpp", ".h", ".pyx", ".pxi", ".pxd")


def check(folder: Path) -> list[str]:
    """Return the faults of the wheels in a folder, one line each. There must be at least one."""
    found = sorted(folder.glob("*.whl"))
    faults = [] if found else [f"{folder}: no wheel"]
    for path in found:
        faults += [f"{path.name}: {fault}" for fault in _faults(path)]
    return faults


def _faults(path: Path) -> list[str]:
    name, version, *_, tag = path.stem.split("-")
    is_pure = name == "pyspark_shardmq"
    faults = []
    if tag != "any" if is_pure else not tag.startswith("manylinux"):
        faults.append(f"the tag is not that of {'all machines' if is_pure else 'manylinux'}: {tag}")
    if path.stat().st_size > BYTES_MAX:
        faults.append(f"{path.stat().st_size} bytes are more than {BYTES_MAX}")
    own = {name, f"{name}-{version}.dist-info", f"{name}-{version}.data"}
    for file in zipfile.ZipFile(path).namelist():
        top = file.split("/")[0]
        if top not in own:
            faults.append(f"{top} is at the top level")
        if top == name and file.endswith(SOURCES):
            faults.append(f"{file} is a source")
        if is_pure and file.endswith(".so"):
            faults.append(f"{file} is compiled")
    return faults


if __name__ == "__main__":
    if faults := check(Path(sys.argv[1])):
        sys.exit("\n".join(faults))
