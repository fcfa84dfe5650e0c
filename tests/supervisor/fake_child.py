"""A child that does its part, or on demand does not.

Its section is {name, journal, does}.

`does`: "well", "exits N", "hangs" (never ready), "recovers" (never ready, says how far it is),
"falls silent" (ready, asks to be watched, says no more), "will not stop" (ignores SIGTERM). What
happens is appended to the journal, one line per event; with each SIGHUP "reloaded" and what its
section now has as `says`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

from shardmq.supervisor import notify


def main() -> int:
    section = json.loads(notify.section(sys.argv[2]))
    name, does = section["name"], section["does"]
    journal = os.open(section["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event: str) -> None:
        os.write(journal, f"{name} {event}\n".encode())

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if does != "will not stop":
        signal.set_wakeup_fd(wake_write)
    write("started")
    if does.startswith("exits"):
        return int(does.split()[1])
    if does == "recovers":
        notify.status("recovering 43 %")
    elif does != "hangs":
        write("ready")
        notify.ready(says=name)
    if does == "falls silent":
        notify.watchdog()
    lifeline = notify.lifeline_fd()
    assert lifeline is not None
    poll = select.poll()  # knows descriptors of any number
    poll.register(wake_read, select.POLLIN)
    poll.register(lifeline, select.POLLIN)
    while True:
        readable = [fd for fd, _ in poll.poll()]
        if lifeline in readable or set(os.read(wake_read, 16)) != {signal.SIGHUP}:
            break
        if (new := notify.new_section()) is not None:
            write(f"reloaded {json.loads(new).get('says', '')}")
    notify.stopping()
    write("orphaned" if lifeline in readable else "drained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
