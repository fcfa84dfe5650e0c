"""Ask a broker for the same things again and again, as monitoring does, until the input ends.

    python bench/asking.py SECONDS URL...

A round requests each URL in turn as guest. The next round begins SECONDS after this one began, at
once with 0. Each round prints a line of JSON: a list of the seconds that each request took.
"""

from __future__ import annotations

import base64
import itertools
import json
import select
import sys
import time
import urllib.request

READ_BYTES = 64 << 10  # a larger read would keep others from the processor
SILENCE_S_MAX = 600.0
LOGIN = base64.b64encode(b"guest:guest").decode()


def read(url: str) -> None:
    """Read an answer to its end and throw the bytes away."""
    into = bytearray(READ_BYTES)
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {LOGIN}"})
    with urllib.request.urlopen(request, timeout=SILENCE_S_MAX) as answer:
        while answer.readinto(into):
            pass


def main(each_s: float, urls: list[str]) -> None:
    done = False
    while not done:
        times = [time.monotonic()]
        for url in urls:
            read(url)
            times.append(time.monotonic())
        print(json.dumps([end - begun for begun, end in itertools.pairwise(times)]), flush=True)
        wait_s = max(0.0, times[0] + each_s - time.monotonic())
        done = bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
