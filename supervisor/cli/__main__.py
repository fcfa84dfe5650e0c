"""The program shardctl.

A shell waits for a completion at each Tab. Python takes a fifth of that time to look for garbage
while it imports, and to take itself down at the end: a completion does without both.
"""

from __future__ import annotations

import gc
import os
import sys

COMPLETES = "_SHARDCTL_COMPLETE" in os.environ
if COMPLETES:
    gc.disable()

from shardmq.supervisor.cli.api import FAILED  # noqa: E402
from shardmq.supervisor.cli.app import app  # noqa: E402


def main() -> None:
    """Run shardctl with the arguments of the command line."""
    if sys.stdout is None:  # The caller has closed the standard output.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    try:
        try:
            app()
        except SystemExit as ended:
            if COMPLETES:
                sys.stdout.flush()
                os._exit(int(ended.code or 0))
            raise
        finally:
            sys.stdout.flush()
    except OSError as error:  # The standard output may be a full disk, or a pipe without a reader.
        if not isinstance(error, BrokenPipeError):
            print(f"shardctl: {error}", file=sys.stderr)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes once more.
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
