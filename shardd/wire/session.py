"""Define the sessions between peers and the shards of other nodes.

A session is one TCP connection and one DEALER socket with CURVE, which never connects again: at a
reconnect ZeroMQ would lose messages in silence. The owner of a session takes the shard for gone
when the session ends, as when the process of a local shard ends. The next session has a higher
incarnation, so the shard drops what is left of the one before. The end of the peer is dialer.py,
that of the shard is shardd/sessions.py.

**Versions.** Peers and shards of two releases speak the highest wire version that both understand.
A peer begins with its highest. A shard that does not understand it answers by a Hello of its own
highest version, and the next session begins with that, if the peer understands it. The shard takes
the version of a session from its first message. What leaves or comes by a session of a lower
version is translated here (`at_version`), so the processes themselves know one version only.

The socket has no bound for unsent messages, as they are bounded by credit. A shard that is silent
for `silent_s` ends the session, and with it what was unsent.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import zmq
from msgspec import Meta

from shardmq.shardd.wire.messages import incarnation_at

# A host that has been cut off or switched off is missed when it has not acknowledged bytes for this
# long. A process that is stopped is missed later, after `silent_s`: its kernel acknowledges.
UNACKNOWLEDGED_MS = 3000
HEARTBEAT_S = 1.0
# A connection that has not shaken hands by then is closed, at both ends.
HANDSHAKE_S = 3.0
# Incarnations of a cluster count from the begin of 2025, in ns since the epoch of Unix.
INCARNATIONS_BEGAN_NS = 1_735_689_600 * 1_000_000_000
# The constants of zmq are enums: each `&` with one of them costs as much as a call.
READABLE, AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)

Key = Annotated[str, Meta(min_length=40, max_length=40)]


class SessionKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The CURVE key pair of the cluster, in Z85, which both ends of each session prove to have.

    `silent_s` is how long the other end of a session may be silent. It must be longer than the
    largest message takes on the network.
    """

    public: Key
    secret: Key
    silent_s: Annotated[float, Meta(gt=0)] = 10.0


def at_version(message: bytes, version: int) -> bytes:
    """Return a message as a process that speaks this wire version reads and writes it.

    So far no two versions that one release understands differ in more than their number.
    """
    if message[1] == version:
        return message
    return b"".join((message[:1], bytes((version,)), message[2:]))


def first_incarnation() -> int:
    """Return the incarnation of a process that starts now, for peers on other hosts.

    Other hosts outlive a reboot of this one, which sets the monotonic clock back. So the wall clock
    counts. If somebody has set it back, a shard answers Outdated and the session takes a higher
    incarnation. The u32 lasts until 2038.
    """
    return incarnation_at(max(0, time.time_ns() - INCARNATIONS_BEGAN_NS))


def prepare(made: zmq.Socket[bytes], keys: SessionKeys) -> None:
    """Set the options that both ends of a session have."""
    made.set_hwm(0)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    made.setsockopt(zmq.HEARTBEAT_IVL, int(min(HEARTBEAT_S, keys.silent_s / 3) * 1000))
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(keys.silent_s * 1000))
    made.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    made.curve_publickey = keys.public.encode()
    made.curve_secretkey = keys.secret.encode()
