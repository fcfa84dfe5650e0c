"""A broker whose socket for AMQP was opened before its start, as systemd does.

`python -m tests.support.activated_broker FLAGS` takes the flags of `python -m shardmq.supervisor
FLAGS`.
"""

from __future__ import annotations

import os
import socket
import sys

from shardmq.supervisor.__main__ import main as supervisor_main
from shardmq.supervisor.systemd import FIRST_SOCKET

if __name__ == "__main__":
    opened = socket.create_server(("127.0.0.1", 0))
    os.dup2(opened.detach(), FIRST_SOCKET)
    os.environ |= {
        "LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "amqp",
    }  # fmt: skip
    sys.exit(supervisor_main())
