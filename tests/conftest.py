"""How random tests run: no time limit per example, and a failure prints the line that repeats it.

Asserts in tests/support say what they compared, as those of the tests do.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

# A busy machine makes an example slow, not wrong.
settings.register_profile("shardmq", deadline=None, print_blob=True)
settings.load_profile("shardmq")
