"""A client for etcd, over its JSON gateway (`/v3/...`, etcd 3.4 and later).

What the gateway does, found by asking etcd 3.4.23:

- Keys and values are base64. 64-bit numbers come as texts, and may be sent as numbers. A field that
  is 0, empty or false is left out.
- An error is `{"error": "text", "message": "text", "code": 5}` with the code of gRPC; in answers
  that are streams (watch, keep-alive) it is `{"error": {"grpc_code": 14, "message": "text"}}`.
- A watch is one POST whose answer never ends: a line of JSON for each event. No second request can
  be sent in it. To cancel a watch is to close the connection (a `cancel_request` gets no answer).
- A watch that etcd cancels (a compaction, no permission) says so in a line, and the connection
  stays open without another word.
- The header `Grpc-Metadata-hasleader` makes a member that has no leader refuse at once, before it
  has done anything. Without the header, requests hang for seconds and watches for ever.
- A lease that is gone is an error, but a keep-alive of it succeeds with no time to live.
- A member forgets the tokens of users when it restarts, and after 5 minutes without use.

Every wait has a bound. What only reads, or does the same when it is done twice, is asked at one
endpoint after the other. A transaction is sent again only if the last endpoint surely did nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple, TypeVar

import aiohttp
import msgspec
from msgspec import Struct, field

from shardmq.cluster.backoff import Backoff
from shardmq.cluster.pairs import (
    Changes,
    Compare,
    Delete,
    Deleted,
    EtcdAway,
    EtcdRefused,
    Get,
    Grant,
    LeaseGone,
    Listing,
    Operation,
    Outcome,
    Pair,
    Put,
)
from shardmq.cluster.records import BAD_JSON
from shardmq.cluster.settings import EtcdSettings

log = logging.getLogger(__name__)

ATTEMPT_S: Final = 1.5  # for an endpoint to accept a connection, or to answer a question
CALL_S: Final = 5.0  # for a call at all endpoints
# A watch that is silent for so long is asked for anew at the next endpoint. It loses nothing, as it
# names the revision to go on from, and a host that has vanished is noticed.
SILENCE_S: Final = 5.0
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 8 << 20
LOGINS_MAX: Final = 3  # for one call

ENDPOINT: Final = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")
HEADERS: Final = {"Accept-Encoding": "identity", "Grpc-Metadata-hasleader": "true"}

# Codes of gRPC.
INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = 3, 5, 6, 7
RESOURCE_EXHAUSTED, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED, UNAVAILABLE = 8, 9, 11, 12, 14
# All other codes say that the member has failed, perhaps in the middle.
REFUSALS: Final = (
    INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, RESOURCE_EXHAUSTED,
    FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED,
)  # fmt: skip
# Texts of etcd's errors; their codes alone do not tell them apart.
LEASE_GONE: Final = "requested lease not found"
NOT_ENABLED: Final = "authentication is not enabled"
# Nothing was done: the member that refused did not pass the request on.
NOT_DONE: Final = ("etcdserver: no leader", "etcdserver: too many requests")
# The token is unknown, too old, or was not sent because etcd had no users a moment ago.
BAD_TOKENS: Final = ("invalid auth token", "auth store is old", "user name is empty")


# -- what the gateway answers ----------------------------------------------------------------------


class _Header(Struct):
    cluster_id: int
    revision: int = 0


class _Kv(Struct):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    create_revision: int = 0
    lease: int = 0

    def pair(self) -> Pair:
        key = self.key.decode("utf-8", "replace")
        return Pair(key, self.value, self.mod_revision, self.create_revision, self.lease)


class _Answer(Struct):
    header: _Header


class _Range(_Answer):
    kvs: list[_Kv] = []


class _TxnRange(Struct):
    kvs: list[_Kv] = []


class _TxnResponse(Struct):
    response_range: _TxnRange | None = None


class _Txn(_Answer):
    succeeded: bool = False
    responses: list[_TxnResponse] = []


class _LeaseGrant(_Answer):
    lease: int = field(name="ID")
    ttl: int = field(name="TTL")


class _KeepAlive(_Answer):
    ttl: int = field(name="TTL", default=0)


class _Login(_Answer):
    token: str


class _Event(Struct):
    kv: _Kv
    type: str = "PUT"

    def change(self) -> Pair | Deleted:
        pair = self.kv.pair()
        return Deleted(pair.key, pair.mod_revision) if self.type == "DELETE" else pair


class _Watch(_Answer):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[_Event] = []


class _Line(Struct):
    """A line of an answer that is a stream."""

    result: msgspec.Raw


class _LineError(Struct):
    message: str
    grpc_code: int = 0  # 3.4
    code: int = 0  # 3.6


class _Error(Struct):
    error: str | _LineError = ""
    message: str = ""  # 3.6 has no `error` in plain answers
    code: int = 0


_T = TypeVar("_T", bound=_Answer)


# -- how an endpoint can fail ----------------------------------------------------------------------


class _Failed(Exception):
    """An endpoint gave no answer that can be used. `not_done`: it surely did nothing."""

    def __init__(self, reason: str, not_done: bool = False) -> None:
        super().__init__(reason)
        self.not_done = not_done


class _TokenRefused(Exception):
    """Etcd does not know the token of the user, and did nothing."""


def _failure(code: int, text: str) -> Exception:
    """Return the exception for an error of etcd."""
    said = text.removeprefix("etcdserver: ")
    if any(bad in text for bad in BAD_TOKENS):
        return _TokenRefused(said)
    if text in NOT_DONE:
        return _Failed(said, not_done=True)
    if LEASE_GONE in text:
        return LeaseGone(f"etcd refused: {said}")
    # Something between this client and etcd may answer with such codes, too.
    is_refused = code in REFUSALS and ("etcdserver: " in text or text.startswith("grpc: "))
    return EtcdRefused(f"etcd refused: {said}") if is_refused else _Failed(said)


def _error_in(raw: bytes, status: int) -> Exception:
    """Return the exception for an answer that is not the one that was expected."""
    try:
        error = msgspec.json.decode(raw, type=_Error)
    except BAD_JSON:
        error = _Error()
    if isinstance(error.error, _LineError):
        return _failure(error.error.grpc_code or error.error.code, error.error.message)
    if text := error.error or error.message:
        return _failure(error.code, text)
    return _Failed(f"not the answer of an etcd (HTTP status {status}, {len(raw)} bytes)")


def _failed(error: Exception) -> _Failed:
    """Return the failure for what aiohttp or the system says of a connection."""
    not_done = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return _Failed("cannot be reached in time", not_done)
    if isinstance(error, TimeoutError):
        return _Failed("no answer in time")
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return _Failed(str(error.certificate_error), not_done)
    if isinstance(error, aiohttp.ClientConnectorError):
        # The text of asyncio has the address, which is named already, and not the reason.
        refused = isinstance(error.os_error, ConnectionRefusedError)
        return _Failed("connection refused" if refused else str(error.os_error), not_done)
    return _Failed(str(error) or type(error).__name__)


class Tls(NamedTuple):
    """Files in PEM: who signs etcd's certificates, and the certificate and key of this client."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def stamp(self) -> list[tuple[int, ...]]:
        """Return what tells these files from those that may come in their places."""
        found = list[tuple[int, ...]]()
        for path in filter(None, self):
            try:
                about = os.stat(path)
                found.append((about.st_ino, about.st_size, about.st_mtime_ns))
            except OSError:
                found.append(())
        return found

    def context(self) -> ssl.SSLContext:
        """Return the context of a client. Raises ValueError with the file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:  # SSLError too
            raise ValueError(f"etcd's ca: {self.ca}: {error.strerror or error}") from None
        if self.cert:
            try:
                # Without a password OpenSSL would ask at the terminal for that of an encrypted key.
                context.load_cert_chain(self.cert, self.key or None, password=lambda: b"")
            except (OSError, ValueError) as error:
                said = getattr(error, "strerror", None) or error
                files = f"{self.cert}, {self.key or self.cert}"
                raise ValueError(f"etcd's cert and key: {files}: {said}") from None
        return context


NO_TLS: Final = Tls()


# -- what is asked ---------------------------------------------------------------------------------


def _below(prefix: str) -> dict[str, bytes]:
    """Return the range of all keys that begin with a prefix. UTF-8 has no byte 255."""
    key = prefix.encode()
    return {"key": key, "range_end": key[:-1] + bytes([key[-1] + 1])}


def _compared(compare: Compare) -> list[dict[str, Any]]:
    """Return the compares of the gateway for one compare. All of them must hold."""
    wanted = {
        "mod_revision": ("MOD", compare.mod_revision),
        "create_revision": ("CREATE", compare.create_revision),
        "value": ("VALUE", compare.value),
    }
    return [
        {"key": compare.key.encode(), "result": "EQUAL", "target": target, name: value}
        for name, (target, value) in wanted.items()
        if value is not None
    ]


def _operation(operation: Operation) -> dict[str, Any]:
    key = operation.key.encode()
    match operation:
        case Put(_, value, lease):
            return {"request_put": {"key": key, "value": value, "lease": lease}}
        case Delete():
            return {"request_delete_range": {"key": key}}
        case Get():
            return {"request_range": {"key": key}}


class Etcd:
    """A client for the endpoints of one etcd, such as `http://HOST:PORT` or `https://HOST:PORT`.

    Calls may run at the same time. They raise EtcdAway if no endpoint answers within `call_s`
    seconds, and EtcdRefused with etcd's reason. `heard_at` is when etcd last did what it was asked,
    in seconds of time.monotonic(). With a watch this is never longer ago than `silence_s` seconds
    and the time of a call, unless etcd is away.

    Args:
        endpoints: The members of etcd, which are tried in turn.
        tls: The files for endpoints with https. Without a ca, those of the system may sign.
        user: The user of etcd, or "" if etcd asks for none.
        password: The password of the user.
        attempt_s: The seconds for an endpoint to accept a connection, or to answer a question.
        call_s: The seconds for a call at all endpoints, and for the answer to a transaction.
        silence_s: The seconds without a word after which a watch goes on at the next endpoint.

    Raises:
        ValueError: An endpoint, a file or a combination cannot be used.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls = NO_TLS,
        user: str = "",
        password: str = "",
        attempt_s: float = ATTEMPT_S,
        call_s: float = CALL_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.endpoints = tuple(endpoint.rstrip("/") for endpoint in endpoints)
        if not self.endpoints:
            raise ValueError("etcd has no endpoint")
        for endpoint in self.endpoints:
            if not ENDPOINT.fullmatch(endpoint):
                raise ValueError(f"{endpoint}: an endpoint of etcd is like http://HOST:PORT")
            if any(tls) and not endpoint.startswith("https:"):
                raise ValueError(f"{endpoint}: with TLS, an endpoint of etcd begins with https:")
        if tls.key and not tls.cert:
            raise ValueError("etcd's key is of no use without a cert")
        if password and not user:
            raise ValueError("etcd's password is of no use without a user")
        self._tls = tls
        self._is_secure = any(endpoint.startswith("https:") for endpoint in self.endpoints)
        self._ssl: ssl.SSLContext | bool = True
        self._stamp: list[tuple[int, ...]] = []
        # TLS is used for https alone, and the certificates of the system take time to load.
        if self._is_secure:
            self._stamp = tls.stamp()
            self._ssl = tls.context()
        self._user = user
        self._password = password
        self._attempt_s = attempt_s
        self._call_s = call_s
        self._silence_s = silence_s
        self.heard_at = 0.0
        # None if the token is to be fetched, and "" if etcd wants none.
        self._token: str | None = None if user else ""
        self._cluster_id = 0
        self._at = 0  # the endpoint that is asked first
        # By whether a connection is kept for the next request.
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    def _reload(self) -> None:
        """Read the files for TLS again if they have changed, for later connections."""
        if not self._is_secure or (stamp := self._tls.stamp()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._ssl = self._tls.context()
        except ValueError as error:  # such as a certificate whose key comes in a moment
            log.warning("the files for etcd stay as they were: %s", error)

    async def __aenter__(self) -> Etcd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Watches must be closed before."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    # -- keys --------------------------------------------------------------------------------------

    async def get(self, key: str) -> Pair | None:
        """Return the pair of a key, as a majority of etcd has it, or None if it is absent."""
        answer = await self._call("kv/range", {"key": key.encode()}, _Range)
        return answer.kvs[0].pair() if answer.kvs else None

    async def range(self, prefix: str) -> Listing:
        """Return all pairs whose keys begin with a prefix, as a majority of etcd has them."""
        answer = await self._call("kv/range", _below(prefix), _Range)
        return Listing(tuple(kv.pair() for kv in answer.kvs), answer.header.revision)

    async def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
    ) -> Outcome:
        """Carry out `then` if all compares hold, else `otherwise`, as one change of the store.

        Raises:
            EtcdAway: If `unknown`, the transaction may have been carried out, or may still be.
            LeaseGone: The lease of a Put is gone. Nothing was changed.
            EtcdRefused: Etcd will not do it. Nothing was changed.
        """
        body = {
            "compare": [part for compare in compares for part in _compared(compare)],
            "success": [_operation(operation) for operation in then],
            "failure": [_operation(operation) for operation in otherwise],
        }
        answer = await self._call("kv/txn", body, _Txn, once=True)
        ranges = [one.response_range for one in answer.responses if one.response_range is not None]
        pairs = tuple(found.kvs[0].pair() if found.kvs else None for found in ranges)
        return Outcome(answer.succeeded, answer.header.revision, pairs)

    # -- leases ------------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> Grant:
        """Return a new lease. An attempt whose answer got lost leaves a lease that just ends."""
        answer = await self._call("lease/grant", {"TTL": ttl_s}, _LeaseGrant)
        return Grant(answer.lease, answer.ttl)

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease and return the seconds that it lasts from now on. Raises LeaseGone.

        The connection is kept for the next renewal, because to connect, by TLS above all, takes
        more than to ask.
        """
        answer = await self._call(
            "lease/keepalive", {"ID": lease}, _KeepAlive, streamed=True, kept=True
        )
        if answer.ttl <= 0:
            raise LeaseGone("etcd no longer has the lease: it has expired or was revoked")
        return answer.ttl

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Nothing happens if it has ended before."""
        with suppress(LeaseGone):
            await self._call("lease/revoke", {"ID": lease}, _Answer)

    # -- watches -----------------------------------------------------------------------------------

    async def watch(
        self, prefix: str, from_revision: int | None = None
    ) -> AsyncGenerator[Changes | Listing, None]:
        """Yield the changes below a prefix from a revision on, each once and in order, for ever.

        A dead endpoint, a lost leader or silence make the watch go on at another endpoint. Where
        the changes since the last ones cannot be had, because etcd has compacted them or its data
        was put back to an earlier state, the watch yields a Listing of all pairs instead. Without
        `from_revision` it begins with a Listing. While etcd is away, the watch waits; so it does
        while etcd refuses what it has allowed before, such as after a change of the password.

        Iterate within `contextlib.aclosing`, so that the connection is closed at the end.

        Raises:
            EtcdRefused: The password is wrong, or the user may not read the prefix, from the start.
        """
        revision = from_revision
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        failures = logins = 0
        is_allowed, refusal = False, ""
        for at in itertools.count(self._at):
            try:
                if revision is None:
                    listing = await self.range(prefix)
                    revision = listing.revision + 1
                    is_allowed = True
                    yield listing
                endpoint = self.endpoints[at % len(self.endpoints)]
                async with aclosing(self._watched(endpoint, prefix, revision)) as answers:
                    async for answer in answers:
                        is_allowed, refusal, logins = True, "", 0
                        if answer.compact_revision or await self._is_older(
                            answer, prefix, revision
                        ):
                            revision = None
                            break
                        if answer.events:
                            revision = answer.events[-1].kv.mod_revision + 1
                            changes = tuple(event.change() for event in answer.events)
                            yield Changes(changes, revision - 1)
                        elif not answer.created:  # It reports that there is nothing until here.
                            revision = max(revision, answer.header.revision + 1)
                failures = 0
                backoff.reset()
            except _TokenRefused as refused:
                logins += 1
                if is_allowed and logins > LOGINS_MAX:
                    refusal = _said_once(prefix, str(refused), refusal)
                    await asyncio.sleep(backoff.wait_s())
                    logins = 0
                self._forget_token(refused, logins)
            except EtcdRefused as refused:
                if not is_allowed:
                    raise
                refusal = _said_once(prefix, str(refused), refusal)
                await asyncio.sleep(backoff.wait_s())
            except (EtcdAway, _Failed):
                failures += 1
                if failures % len(self.endpoints) == 0:
                    await asyncio.sleep(backoff.wait_s())

    async def _is_older(self, answer: _Watch, prefix: str, revision: int) -> bool:
        """Return whether etcd's data ends before the changes that a watch has seen.

        The first answer to a watch tells what the member has. A member may lag behind, so a
        majority is asked then. Without this check a watch of data that were put back, from a copy
        or because the disk was replaced, would wait for their future.
        """
        if not answer.created or answer.header.revision + 1 >= revision:
            return False
        return (await self.range(prefix)).revision + 1 < revision

    async def _watched(
        self, endpoint: str, prefix: str, revision: int
    ) -> AsyncGenerator[_Watch, None]:
        """Yield what one endpoint answers to a watch. End when it has been silent for too long."""
        await self._log_in(time.monotonic() + self._call_s)
        request = {"start_revision": revision, "progress_notify": True, **_below(prefix)}
        lines = self._lines(endpoint, "watch", {"create_request": request})
        async with aclosing(lines):
            async for line in lines:
                answer = self._decoded(line, 200, _Watch, streamed=True)
                if answer.canceled and not answer.compact_revision:
                    denied = "permission denied" in answer.cancel_reason
                    code = PERMISSION_DENIED if denied else UNAVAILABLE
                    raise _failure(code, answer.cancel_reason or "the watch was cancelled")
                yield answer

    # -- requests ----------------------------------------------------------------------------------

    async def _call(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[_T],
        *,
        once: bool = False,
        streamed: bool = False,
        kept: bool = False,
        deadline: float | None = None,
    ) -> _T:
        """Ask the endpoints in turn until one answers. With a deadline, it is a login itself.

        Args:
            path: The path below /v3/.
            body: The question. Bytes become base64.
            kind: The answer.
            once: Whether the question must not be asked again if it may have had an effect.
            streamed: Whether the answer is a stream, of which the first line is wanted.
            kept: Whether the connection may be one that was kept, and is kept.
            deadline: The time of time.monotonic() at which to give up, and to go without a token.
        """
        is_login = deadline is not None
        if deadline is None:
            deadline = time.monotonic() + self._call_s
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        reasons: dict[str, str] = {}
        attempts = logins = 0
        while (left_s := deadline - time.monotonic()) > 0:
            at = self._at
            endpoint = self.endpoints[at]
            try:
                if not is_login:
                    await self._log_in(deadline)
                # Nobody else can be asked about a transaction, so its answer is waited for.
                answer_s = left_s if once else min(left_s, self._attempt_s)
                raw, status = await self._asked(endpoint, path, body, answer_s, kept)
                return self._decoded(raw, status, kind, streamed)
            except _TokenRefused as refused:
                logins += 1
                self._forget_token(refused, logins)
                continue
            except _Failed as failure:
                # An attempt that had too little time at the end says less than one before.
                if left_s >= self._attempt_s or endpoint not in reasons:
                    reasons[endpoint] = str(failure)
                if once and not failure.not_done:
                    text = "etcd may have carried out the transaction, or not"
                    raise EtcdAway(f"{text}: {endpoint}: {failure}", unknown=True) from None
            if self._at == at:
                self._at = (at + 1) % len(self.endpoints)
            attempts += 1
            if attempts % len(self.endpoints) == 0:
                await asyncio.sleep(min(backoff.wait_s(), max(0.0, deadline - time.monotonic())))
        said = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
        raise EtcdAway(f"no endpoint of etcd answers: {said or 'no time was left'}")

    async def _log_in(self, deadline: float) -> None:
        """Fetch a token if there is none. Raises EtcdRefused, EtcdAway."""
        if self._token is not None:
            return
        who = {"name": self._user, "password": self._password}
        try:
            self._token = (
                await self._call("auth/authenticate", who, _Login, deadline=deadline)
            ).token
        except EtcdRefused as error:
            if NOT_ENABLED not in str(error):
                raise EtcdRefused(f"{error} (user {self._user})") from None
            self._token = ""

    def _forget_token(self, refused: _TokenRefused, times: int) -> None:
        """Have a token fetched. Raises EtcdRefused if that was in vain, or if there is no user."""
        if not self._user:
            raise EtcdRefused("etcd refused: it wants a user and a password") from None
        if times > LOGINS_MAX:
            raise EtcdRefused(f"etcd refused: {refused} (user {self._user})") from None
        self._token = None

    async def _asked(
        self, endpoint: str, path: str, body: dict[str, Any], answer_s: float, kept: bool
    ) -> tuple[bytes, int]:
        """Return the whole answer of an endpoint and its HTTP status. Raises _Failed."""
        raw = bytearray()
        try:
            async with asyncio.timeout(answer_s):
                async with await self._post(endpoint, path, body, kept) as answer:
                    async for chunk in answer.content.iter_any():
                        raw += chunk
                        if len(raw) > ANSWER_BYTES_MAX:
                            raise _Failed(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
                    return bytes(raw), answer.status
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError too
            raise _failed(error) from None

    async def _lines(
        self, endpoint: str, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer that has no end. End when no line came for too long.

        Raises _Failed if the connection ends, or if the first line does not come soon.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._attempt_s
        heard = False
        try:
            async with asyncio.timeout_at(until):
                answer = await self._post(endpoint, path, body)
            try:
                rest = b""
                while True:
                    async with asyncio.timeout_at(until):
                        chunk = await answer.content.readany()
                    *lines, rest = (rest + chunk).split(b"\n") if chunk else (rest, b"")
                    if len(rest) > ANSWER_BYTES_MAX:
                        raise _Failed(f"a line of more than {ANSWER_BYTES_MAX} bytes")
                    for line in filter(None, lines):
                        yield line
                        heard = True
                        until = loop.time() + self._silence_s
                    if not chunk:
                        raise _Failed("the connection was closed")
            finally:
                answer.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if not (heard and isinstance(error, TimeoutError)):
                raise _failed(error) from None

    async def _post(
        self, endpoint: str, path: str, body: dict[str, Any], kept: bool = False
    ) -> aiohttp.ClientResponse:
        session = self._sessions.get(kept)
        if session is None:
            session = self._sessions[kept] = aiohttp.ClientSession(
                # A connection that died unseen must not be used for a transaction.
                connector=aiohttp.TCPConnector(limit=0, force_close=not kept),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._attempt_s),
                auto_decompress=False,
            )
        self._reload()
        return await session.post(
            f"{endpoint}/v3/{path}",
            data=msgspec.json.encode(body),
            headers={"Authorization": self._token} if self._token else None,
            allow_redirects=False,
            ssl=self._ssl,
        )

    def _decoded(self, raw: bytes, status: int, kind: type[_T], streamed: bool) -> _T:
        """Return the answer in these bytes. Raises what `_error_in` says of any other bytes."""
        try:
            if streamed:
                raw = bytes(msgspec.json.decode(raw, type=_Line).result)
            answer = msgspec.json.decode(raw, type=kind, strict=False)
        except BAD_JSON:
            raise _error_in(raw, status) from None
        if self._cluster_id not in (0, answer.header.cluster_id):
            raise _Failed("the endpoint belongs to another etcd than those before")
        self._cluster_id = answer.header.cluster_id
        self.heard_at = time.monotonic()
        return answer


def client(settings: EtcdSettings) -> Etcd:
    """Return the client that the settings mean. Raises ValueError."""
    return Etcd(
        settings.endpoints,
        user=settings.user,
        password=settings.password,
        tls=Tls(settings.ca, settings.cert, settings.key),
    )


def _said_once(prefix: str, refusal: str, said: str) -> str:
    if refusal != said:
        log.error("%s is not watched for now: %s", prefix, refusal)
    return refusal
