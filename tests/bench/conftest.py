"""The scripts of bench/ import each other from their own folder; so do their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
