"""How random tests run: no time limit per example, and a failure prints the line that repeats it."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes an example slow, not wrong.
settings.register_profile("shardmq", deadline=None, print_blob=True)
settings.load_profile("shardmq")
