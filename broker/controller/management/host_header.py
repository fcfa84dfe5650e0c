"""The check of the header Host, against DNS rebinding.

An attacker serves a page under a name and then lets that name resolve to this host. To the browser
the page and the API are then one site, so the page may call the API and read its responses. It can
only log in with a password that it knows: that of the default user, who may log in from this host,
where the browser runs. The header Host has the name that was called. An attacker cannot change
where "localhost", this machine's name or an address lead.

So users that may log in from this host only are refused under any other name. They are also refused
when a reverse proxy says that it forwards the request. Everybody else may call under any name:
containers and proxies have many names, and the attacker does not know these passwords. With
`listen.http_hosts` all calls under other names are refused, with or without a login.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Collection, Container
from functools import cache
from typing import Final

LOOPBACK_NAMES: Final = frozenset(
    ("localhost", "ip6-localhost", "ip6-loopback", "localhost.localdomain")
)
LOCALHOST_SUFFIX: Final = ".localhost"  # all such names lead here (RFC 6761, section 6.3)
# The headers of a request that a reverse proxy forwards.
FORWARDED: Final = (
    "Forwarded",
    "X-Forwarded-For",
    "X-Real-IP",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "Via",
)
LOG_EACH_S: Final = 60.0  # the shortest time between two lines in the log about one name
REMEMBERED_MAX: Final = 1_000  # names


def name_of(host: str) -> str:
    """Return the name or address in a header Host, in lower case, without port and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def is_known(host: str | None, names: Collection[str]) -> bool:
    """Return whether a header Host has an address, a name of this machine, or one of `names`."""
    if host is None:
        return True  # browsers always send it; HTTP/1.0 does without
    name = name_of(host)
    if name in LOOPBACK_NAMES or name.endswith(LOCALHOST_SUFFIX) or name in machine_names():
        return True
    return _is_address(name) or any(name == name_of(known) for known in names)


def is_relayed(headers: Container[str]) -> bool:
    """Return whether a reverse proxy forwards the request: the peer is then not the client."""
    return any(name in headers for name in FORWARDED)


@cache
def machine_names() -> frozenset[str]:
    """Return the host name, whole and up to its first dot. In a container it is the container's."""
    name = socket.gethostname().lower()
    return frozenset(filter(None, (name, name.partition(".")[0])))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class RefusalLog:
    """The names whose refusal was logged lately."""

    def __init__(self) -> None:
        self._logged_at: OrderedDict[str, float] = OrderedDict()  # the oldest first

    def is_due(self, host: str, now: float) -> bool:
        """Return whether to log this refusal now; `now`: seconds of a monotonic clock."""
        name = name_of(host)
        if now - self._logged_at.get(name, -LOG_EACH_S) < LOG_EACH_S:
            return False
        self._logged_at[name] = now
        self._logged_at.move_to_end(name)
        if len(self._logged_at) > REMEMBERED_MAX:
            self._logged_at.popitem(last=False)
        return True
