"""Under which names the HTTP API is called: what DNS rebinding is told by.

A page of an attacker's is served under a name that then leads to this host: for the browser it is
one site with the API, and may call it and read the answers. It can do no more there than log in
with a password that it knows, which is that of the default user, who may log in from this host,
where the browser runs. The header Host says under which name a call comes. An attacker has no say
in where "localhost" and this machine's name lead, and an address leads nowhere else.

So users that may log in from this host only are refused under any other name, and under a name that
is known when a reverse proxy says that it passes somebody on. Everybody else may call by any name:
in containers and behind proxies names are many, and a password that the attacker does not know
protects there. With `listen.http_hosts` all calls under other names are refused, with or without a
login.
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
# What reverse proxies say of whom they pass on.
FORWARDED: Final = (
    "Forwarded",
    "X-Forwarded-For",
    "X-Real-IP",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "Via",
)
SAY_EACH_S: Final = 60.0  # of one name the log is told no more often
SAID_MAX: Final = 1_000  # names of which it is remembered when


def name_of(host: str) -> str:
    """Return the name or address in a header Host, without its port: lower case, no dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def is_known(host: str | None, names: Collection[str]) -> bool:
    """Whether only this machine, or one of these names, is meant by a header Host.

    Clients that send none, as HTTP/1.0 allows, are no browsers.
    """
    if host is None:
        return True
    name = name_of(host)
    if name in LOOPBACK_NAMES or name.endswith(LOCALHOST_SUFFIX) or name in machine_names():
        return True
    return _is_address(name) or any(name == name_of(known) for known in names)


def is_relayed(headers: Container[str]) -> bool:
    """Whether a reverse proxy says that it passes somebody on: then the socket's peer is not who calls."""
    return any(name in headers for name in FORWARDED)


@cache
def machine_names() -> frozenset[str]:
    """The name of this machine, whole and up to its first dot. In a container it is the container's."""
    name = socket.gethostname().lower()
    return frozenset(filter(None, (name, name.partition(".")[0])))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class Misnamed:
    """Names under which calls were refused: each is for the log at first, and then once in a while."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, float] = OrderedDict()

    def is_to_say(self, host: str, now: float) -> bool:
        """Whether the log is to be told; `now` in seconds of a clock that does not go back."""
        name = name_of(host)
        if now - self._said.get(name, -SAY_EACH_S) < SAY_EACH_S:
            return False
        self._said[name] = now
        self._said.move_to_end(name)
        if len(self._said) > SAID_MAX:
            self._said.popitem(last=False)
        return True
