"""Hold back the packets that a host sends to some others.

`python -m tests.support.late_packets MS INTERFACE ADDRESS OTHER...` runs on the host, in its
network namespace. It makes a tun device, and routes to the others through it. What comes out of the
device is sent MS milliseconds later by the interface itself. With the end of the process the device
and its routes are gone, and packets go straight again. It prints `ready` when the routes are there.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DEVICE = "late0"
PACKET_BYTES_MAX = 1 << 16
DESTINATION = slice(16, 20)  # in the header of IPv4


def main(late_ms: int, interface: str, address: str, others: list[str]) -> None:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    # The routes do not hold for a socket that is bound to the interface.
    out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    subprocess.run(["ip", "link", "set", DEVICE, "up"], check=True)
    for other in others:
        route = ["ip", "route", "add", other, "dev", DEVICE, "src", address]
        subprocess.run(route, check=True)
    print("ready", flush=True)
    pass_on(device, out, late_ms / 1000)


def pass_on(device: int, out: socket.socket, late_s: float) -> None:
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([device], [], [], wait_s)[0]:
            try:
                waiting.append((time.monotonic() + late_s, os.read(device, PACKET_BYTES_MAX)))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic():
            packet = waiting.popleft()[1]
            if packet[0] >> 4 != 4:
                continue  # IPv6 looks for neighbours by itself
            try:
                out.sendto(packet, (socket.inet_ntoa(packet[DESTINATION]), 0))
            except OSError:
                pass  # lost


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
