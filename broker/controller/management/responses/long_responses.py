"""Long responses: lists, definitions and metrics. They are shared, and bounded in number and bytes.

Anybody may ask for metrics as often as they like and read nothing. So:

- A response is made once for all clients that asked for it before its making began. No client gets
  a response that is older than its request. Few responses are made at a time; waiting ones are
  begun address by address, in turn.
- A response is kept compressed (`compressed_pieces.py`) until its last client has taken it. The
  bytes kept are bounded in all, and for the responses that one address asked for first.
- Each client is sent the pieces at its own pace. A piece is unpacked when the client has taken the
  piece before. A client that takes nothing for `unread_timeout_s` is cut off, and already after
  UNREAD_S_MIN when another client needs its place.
- Making and sending are done in slices, one slice of all responses in a pass of the event loop
  (`cpu_budget.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
)
from functools import partial
from typing import Final, NamedTuple

from aiohttp import web

from shardmq.broker.controller.config import HttpLimits
from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.controller.management.responses.compressed_pieces import (
    GZIP_HEAD,
    PIECE_BYTES,
    CompressedPieces,
    unpacked,
)
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.shared.logins import source_of
from shardmq.shardd.wire.memory import give_back

UNREAD_S_MIN: Final = 1.0  # a client that took nothing for this long is cut off for another one
RETRY_AFTER_S: Final = 1
GIVE_BACK_BYTES: Final = 8 << 20  # were made: it pays to give memory back to the system
LOCAL: Final = ""  # the address of clients of the Unix socket, which are never refused

log = logging.getLogger(__name__)


class ResponseBody(NamedTuple):
    """The body of a response, to be made part by part."""

    content_type: str
    parts: AsyncGenerator[bytes]
    headers: Mapping[str, str] = {}


Make = Callable[[], Awaitable[ResponseBody]]


async def in_one_part(body: bytes) -> AsyncGenerator[bytes]:
    """Yield a body that has been made already, for a ResponseBody."""
    yield body


class Recipient:
    """A client that waits for a long response or is being sent one."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.address = source_of(request.remote) if request.remote else LOCAL
        self.unread_since: float | None = None  # the time since when a write has been waiting

    @property
    def is_gone(self) -> bool:
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def unread_s(self, now: float) -> float:
        return 0.0 if self.unread_since is None else now - self.unread_since

    def cut_off(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


class Rendering:
    """A long response, which waits, is made, and is kept until its last recipient has gone."""

    def __init__(self, key: Hashable, address: str, make: Make) -> None:
        self.key = key
        self.address = address  # of the client that asked first
        self.make = make
        self.recipients: set[Recipient] = set()
        self.content_type = ""
        self.headers: Mapping[str, str] = {}
        self.pieces = CompressedPieces()
        self.is_ended = False
        self.failed: Exception | None = None
        self._grown: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Wake the recipients that wait in `grown`."""
        waiting, self._grown = self._grown, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def grown(self) -> None:
        """Wait until the response has more pieces, or has ended or failed."""
        if not self.is_ended and self.failed is None:
            grown = asyncio.get_running_loop().create_future()
            self._grown.append(grown)
            await grown

    def fail(self, error: Exception) -> None:
        """Free the pieces and wake the recipients, which are cut off."""
        if self.failed is None and not self.is_ended:
            self.failed = error
            self.pieces.clear()
            self.tell()


class LongResponses:
    """All long responses of the ports for HTTP and metrics."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recipients: dict[Recipient, Rendering | None] = {}
        self._joinable: dict[Hashable, Rendering] = {}  # by key, those whose making has not begun
        self._waiting: dict[str, deque[Rendering]] = {}  # by address, the next one first
        self._making: dict[Rendering, asyncio.Task[None]] = {}
        self._made_since = 0  # bytes that were made since memory was given back
        self.refused: Counter[str] = Counter()  # by reason
        self.queued = self.shared = self.made = self.unread = 0

    # -- metrics -----------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """The number of clients that wait for a response or are being sent one."""
        return len(self._recipients)

    @property
    def waiting(self) -> int:
        """The number of responses that wait to be made."""
        return sum(map(len, self._waiting.values()))

    @property
    def bytes_held(self) -> int:
        return sum(rendering.pieces.bytes_held for rendering in self._renderings())

    # -- one call ----------------------------------------------------------------------------------

    async def answer(
        self, request: web.Request, key: Hashable, make: Make, limits: HttpLimits
    ) -> web.StreamResponse:
        """Make the response, or share the one of another call with this key that has not begun.

        Raises ApiError with 429 or 503 when there are too many responses, and whatever `make`
        raises.
        """
        recipient = Recipient(request)
        self._let_in(recipient, limits)
        try:
            rendering = self._joined(recipient, key, make, limits)
            return await self._sent(recipient, rendering, limits)
        finally:
            self._gone(recipient)

    def _let_in(self, recipient: Recipient, limits: HttpLimits) -> None:
        if recipient.address != LOCAL:
            same = sum(one.address == recipient.address for one in self._recipients)
            if same >= limits.answers_per_address_max and not self.cut_off(recipient.address):
                raise self._busy(
                    429, "address", "too many long answers to this address are under way"
                )
            if len(self._recipients) >= limits.answers_max and not self.cut_off(None):
                raise self._busy(503, "answers", "too many long answers are under way")
        self._recipients[recipient] = None

    def _busy(self, status: int, reason: str, text: str) -> ApiError:
        self.refused[reason] += 1
        return ApiError(status, "busy", text, {"Retry-After": str(RETRY_AFTER_S)})

    def cut_off(self, address: str | None) -> bool:
        """Cut off the recipient that has taken nothing for longest, at this address or at any.

        Returns False, and cuts nobody off, when each has taken something within UNREAD_S_MIN.
        """
        now = self._clock()
        among = [one for one in self._recipients if address is None or one.address == address]
        for one in among:
            if one.is_gone:
                self._gone(one)
                return True
        longest = max(among, key=lambda one: one.unread_s(now), default=None)
        if longest is None or longest.unread_s(now) < UNREAD_S_MIN:
            return False
        self._end_unread(longest)
        return True

    def _end_unread(self, recipient: Recipient) -> None:
        self.unread += 1
        recipient.cut_off()
        self._gone(recipient)

    def _gone(self, recipient: Recipient) -> None:
        """Forget a recipient, and its response if it was the last recipient."""
        rendering = self._recipients.pop(recipient, None)
        if rendering is None:
            return
        rendering.recipients.discard(recipient)
        if not rendering.recipients and rendering.is_ended and rendering.failed is None:
            rendering.failed = ConnectionResetError("nobody reads it")
            rendering.pieces.clear()
        if rendering.recipients or rendering.is_ended or rendering.failed is not None:
            return
        if (task := self._making.get(rendering)) is not None:
            task.cancel()
        else:
            self._waiting[rendering.address].remove(rendering)
            if not self._waiting[rendering.address]:
                del self._waiting[rendering.address]
        self._close(rendering)
        rendering.fail(ConnectionResetError("nobody waits for it"))

    def _joined(
        self, recipient: Recipient, key: Hashable, make: Make, limits: HttpLimits
    ) -> Rendering:
        rendering = self._joinable.get(key)
        if rendering is None:
            rendering = self._joinable[key] = Rendering(key, recipient.address, make)
            self._waiting.setdefault(recipient.address, deque()).append(rendering)
            self._begin(limits)
            self.queued += rendering not in self._making
        else:
            self.shared += 1
        rendering.recipients.add(recipient)
        self._recipients[recipient] = rendering
        return rendering

    def _close(self, rendering: Rendering) -> None:
        """Let nobody join any more: later clients must get newer numbers."""
        if self._joinable.get(rendering.key) is rendering:
            del self._joinable[rendering.key]

    # -- making ------------------------------------------------------------------------------------

    def _begin(self, limits: HttpLimits) -> None:
        """Begin making what waits. One address may have half of all responses being made."""
        of_one_max = max(1, limits.made_max // 2)
        while len(self._making) < limits.made_max:
            made_for = Counter(rendering.address for rendering in self._making)
            address = next((one for one in self._waiting if made_for[one] < of_one_max), None)
            if address is None:
                return
            queue = self._waiting.pop(address)
            rendering = queue.popleft()
            if queue:
                self._waiting[address] = queue  # behind the others
            task = self._making[rendering] = asyncio.create_task(self._make(rendering, limits))
            task.add_done_callback(partial(self._after, rendering, limits))

    def _after(self, rendering: Rendering, limits: HttpLimits, task: asyncio.Task[None]) -> None:
        """Begin the next. A cancelled task may never have run, so failing is done here."""
        del self._making[rendering]
        if task.cancelled():
            rendering.fail(ConnectionResetError("it was cancelled"))
        self._begin(limits)

    async def _make(self, rendering: Rendering, limits: HttpLimits) -> None:
        try:
            await SlicedWork.passes.wait()
            self._close(rendering)
            made = await rendering.make()
            rendering.content_type, rendering.headers = made.content_type, made.headers
            await SlicedWork.passes.wait()
            async with contextlib.aclosing(made.parts) as parts:
                async for part in parts:
                    await self._add(rendering, part, limits)
            rendering.pieces.end()
            rendering.is_ended = True
            self.made += 1
            rendering.tell()
        except Exception as error:
            if rendering.pieces.packed and not isinstance(error, ApiError):
                log.exception("a long answer was broken off")
            rendering.fail(error)

    async def _add(self, rendering: Rendering, part: bytes, limits: HttpLimits) -> None:
        """Compress a part, no more than one piece in a pass of the event loop."""
        self._made_since += len(part)
        for start in range(0, len(part), PIECE_BYTES):
            if start:
                await SlicedWork.passes.wait()
            before = len(rendering.pieces.packed)
            rendering.pieces.add(part[start : start + PIECE_BYTES])
            if len(rendering.pieces.packed) != before:
                self._make_room(rendering, limits)
                rendering.tell()

    def _make_room(self, rendering: Rendering, limits: HttpLimits) -> None:
        """Drop responses that nobody takes, while more bytes are kept than the limits allow.

        Raises ApiError with 503 when that is not enough.
        """
        for bound, of in (
            (limits.answer_bytes_per_address_max, rendering.address),
            (limits.answer_bytes_max, None),
        ):
            while self._held(of) > bound:
                if not self._let_go(rendering, of):
                    raise self._busy(
                        503, "bytes", "long answers that are not taken yet fill the memory for them"
                    )

    def _held(self, address: str | None) -> int:
        return sum(
            rendering.pieces.bytes_held
            for rendering in self._renderings()
            if address in (None, rendering.address)
        )

    def _renderings(self) -> Iterable[Rendering]:
        """Return the responses that take memory."""
        read = {rendering for rendering in self._recipients.values() if rendering is not None}
        return read | self._making.keys()

    def _let_go(self, but: Rendering, address: str | None) -> bool:
        """Cut off the recipients of the response that was least recently taken from.

        Returns False when each response was taken from within UNREAD_S_MIN.
        """
        now = self._clock()
        unread = {
            rendering: min(recipient.unread_s(now) for recipient in rendering.recipients)
            for rendering in self._renderings()
            if rendering is not but
            and rendering.recipients
            and address in (None, rendering.address)
        }
        longest = max(unread, key=unread.__getitem__, default=None)
        if longest is None or unread[longest] < UNREAD_S_MIN:
            return False
        for recipient in list(longest.recipients):
            self._end_unread(recipient)
        return True

    # -- sending -----------------------------------------------------------------------------------

    async def _sent(
        self, recipient: Recipient, rendering: Rendering, limits: HttpLimits
    ) -> web.StreamResponse:
        while not (rendering.is_ended or rendering.failed or rendering.pieces.packed):
            await rendering.grown()
        if rendering.failed is not None:
            raise rendering.failed
        pieces, request = rendering.pieces, recipient.request
        headers = {"Content-Type": rendering.content_type, **rendering.headers}
        if pieces.whole is not None:
            return web.Response(body=pieces.whole, headers=headers)
        response = web.StreamResponse(headers={**headers, "Vary": "Accept-Encoding"})
        zipped = takes_gzip(request.headers.get("Accept-Encoding", ""))
        if zipped:
            response.headers["Content-Encoding"] = "gzip"
        if request.method == "HEAD":
            return response
        try:
            async with asyncio.timeout(limits.answer_timeout_s):
                await response.prepare(request)
                async for data in _data(rendering, zipped):
                    recipient.unread_since = self._clock()
                    async with asyncio.timeout(limits.unread_timeout_s):
                        await response.write(data)
                    recipient.unread_since = None
                recipient.unread_since = self._clock()
                async with asyncio.timeout(limits.unread_timeout_s):
                    await response.write_eof()
        except TimeoutError:
            self._end_unread(recipient)
        except _BrokenOff:
            recipient.cut_off()
        return response

    def give_memory_back(self) -> None:
        """Give memory back to the system, if much was made and nothing is under way any more."""
        if not self._recipients and not self._making and self._made_since >= GIVE_BACK_BYTES:
            self._made_since = 0
            give_back()


class _BrokenOff(Exception):
    """The rest of a response cannot be made: the client sees a response without an end."""


async def _data(rendering: Rendering, zipped: bool) -> AsyncIterator[bytes]:
    """Yield the body for one client, one piece in a pass of the event loop."""
    pieces, at, lead = rendering.pieces, 0, GZIP_HEAD if zipped else b""
    while True:
        if at < len(pieces.packed):
            await SlicedWork.passes.wait()
            yield lead + pieces.packed[at] if zipped else unpacked(pieces.packed[at])
            at, lead = at + 1, b""
        elif rendering.failed is not None:
            raise _BrokenOff
        elif rendering.is_ended:
            break
        else:
            await rendering.grown()
    if zipped:
        yield pieces.gzip_tail()


def takes_gzip(accepted: str) -> bool:
    """Return whether this Accept-Encoding names gzip; `*` is not taken for it."""
    for one in accepted.lower().split(","):
        coding, _, weight = one.partition(";")
        if coding.strip() in ("gzip", "x-gzip"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
