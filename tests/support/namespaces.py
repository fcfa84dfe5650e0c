"""Hosts in network namespaces, with addresses of their own, whose network can be harmed.

    the test -- bridge 10.213.N.1 --+-- veth -- namespace of host 0, 10.213.N.2
                                    +-- veth -- namespace of host 1, 10.213.N.3

Cuts and losses are rules of nftables in the namespace to which packets go, so a cut may be one way.
The bridge limits what goes to a host.
The kernels of the build machines have no netem: packets are late because a process holds them back
(tests/support/late_packets.py). The test itself always reaches all hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

SOURCE: Final = Path(__file__).resolve().parents[2]
NETWORKS_MAX: Final = 200  # at the same time, on one machine
BRIDGE: Final = "shardmq"
RULES: Final = """\
add table inet harm
delete table inet harm
table inet harm {{
    chain arrives {{
        type filter hook input priority 0; policy accept;
{lines}
    }}
}}
"""


class Network(Protocol):
    """The network of some hosts. `why_whole` says why it cannot be harmed, and is "" if it can."""

    why_whole: str

    def address(self, host: str) -> str: ...

    def command(self, host: str) -> tuple[str, ...]:
        """Return the beginning of a command that runs on a host."""
        ...


class Loopback:
    """Hosts without namespaces of their own. Their network cannot be harmed."""

    def __init__(self, hosts: Sequence[str], why: str) -> None:
        self.why_whole = why
        self._addresses = {host: f"127.0.0.{at + 2}" for at, host in enumerate(hosts)}

    def address(self, host: str) -> str:
        return self._addresses[host]

    def command(self, host: str) -> tuple[str, ...]:
        return ()


def why_impossible() -> str:
    """Return why no namespaces can be had here, or ""."""
    if os.geteuid() != 0:
        return "no network namespaces: not root"
    for program in ("ip", "nft", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"no network namespaces: there is no {program} (as root: .ci/nft)"
    tried = subprocess.run(
        [
            "unshare",
            "--net",
            "sh",
            "-ec",
            "ip link add va type veth peer name vb; nft list ruleset",
        ],
        capture_output=True,
        text=True,
    )
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Namespaces:
    """A namespace for each host, as a context manager."""

    why_whole = ""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._number = -1
        self._blocked: set[tuple[str, str]] = set()  # from, to
        self._lost: dict[str, int] = {}  # percent of what arrives at a host
        self._limited: set[str] = set()
        self._relays: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Namespaces:
        _remove_stale()
        self._number = _new_bridge()
        try:
            for host in self._hosts:
                self._add(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def address(self, host: str) -> str:
        return f"10.213.{self._number}.{self._hosts.index(host) + 2}"

    def command(self, host: str) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self._space(host)}")

    # -- harm --------------------------------------------------------------------------------------

    def cut(self, ways: Iterable[tuple[str, str]]) -> None:
        """Let nothing pass any more from the first to the second host of each pair."""
        self._blocked |= set(ways)
        self._write_rules()

    def lose(self, percent: int, hosts: Iterable[str]) -> None:
        """Lose so many of a hundred packets that arrive at these hosts from the others."""
        self._lost |= dict.fromkeys(hosts, percent)
        self._write_rules()

    def delay(self, late_ms: int, host: str) -> None:
        """Hold back for so long what a host sends to the others."""
        others = [self.address(each) for each in self._hosts if each != host]
        self._relays[host] = relay = subprocess.Popen(
            [
                *self.command(host), sys.executable, "-m", "tests.support.late_packets",
                str(late_ms), "eth0", self.address(host), *others,
            ],
            cwd=SOURCE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"

    def limit(self, mbits_per_s: int, host: str) -> None:
        """Let no more than so much arrive at a host."""
        self._limited.add(host)
        _run(
            "tc", "qdisc", "replace", "dev", self._port(host), "root", "tbf",
            "rate", f"{mbits_per_s}mbit", "burst", "16kb", "latency", "400ms",
        )  # fmt: skip

    def heal(self) -> None:
        """End all harm. What a relay holds back is lost, as packets may be."""
        self._blocked.clear()
        self._lost.clear()
        self._write_rules()
        for host in self._limited:
            _run("tc", "qdisc", "del", "dev", self._port(host), "root")
        self._limited.clear()
        for relay in self._relays.values():
            relay.kill()
            relay.wait()
            assert relay.stdout is not None
            relay.stdout.close()
        self._relays.clear()

    def _write_rules(self) -> None:
        for host in self._hosts:
            lines = [
                f"        ip saddr {self.address(source)} drop"
                for source, to in sorted(self._blocked)
                if to == host
            ]
            if percent := self._lost.get(host, 0):
                others = ", ".join(self.address(each) for each in self._hosts if each != host)
                lines.append(
                    f"        ip saddr {{ {others} }} numgen random mod 100 < {percent} drop"
                )
            rules = RULES.format(lines="\n".join(lines))
            _run(*self.command(host), "nft", "-f", "-", text=rules)

    # -- making and removing -----------------------------------------------------------------------

    def _space(self, host: str) -> str:
        return f"{BRIDGE}{self._number}-{host}"

    def _port(self, host: str) -> str:
        """Return the name of the bridge's end of the link to a host."""
        return f"{BRIDGE}{self._number}-{self._hosts.index(host)}"

    def _add(self, host: str) -> None:
        space, bridge, outer = self._space(host), f"{BRIDGE}{self._number}", self._port(host)
        _run("ip", "netns", "add", space)
        _run(
            "ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space,
        )  # fmt: skip
        _run("ip", "link", "set", outer, "master", bridge, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")

    def _remove(self) -> None:
        for relay in self._relays.values():
            relay.kill()
            relay.wait()
        _remove_network(self._number)


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{text}"
    return done.stdout


def _new_bridge() -> int:
    """Make a bridge with a number that is free, and return the number."""
    for number in range(NETWORKS_MAX):
        name = f"{BRIDGE}{number}"
        made = subprocess.run(
            ["ip", "link", "add", name, "type", "bridge"], capture_output=True, check=False
        )
        if made.returncode == 0:
            _run("ip", "link", "set", name, "alias", str(os.getpid()))
            _run("ip", "addr", "add", f"10.213.{number}.1/24", "dev", name)
            _run("ip", "link", "set", name, "up")
            return number
    raise AssertionError("no bridge can be made")


def _remove_network(number: int) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        space = line.split()[0]
        if space.startswith(f"{BRIDGE}{number}-"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    # A namespace ends some time after it was deleted, and its link with it.
    for path in [*Path("/sys/class/net").glob(f"{BRIDGE}{number}-*"), Path(f"{BRIDGE}{number}")]:
        subprocess.run(["ip", "link", "del", path.name], capture_output=True, check=False)


def _remove_stale() -> None:
    """Remove networks whose test was killed."""
    for path in Path("/sys/class/net").glob(f"{BRIDGE}*/bridge"):
        alias = (path.parent / "ifalias").read_text().strip()
        if alias and not Path(f"/proc/{alias}").exists():
            _remove_network(int(path.parent.name.removeprefix(BRIDGE)))
