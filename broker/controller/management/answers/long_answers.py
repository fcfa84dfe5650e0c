"""Long answers: lists, definitions and metrics. They are shared, and bounded in number and bytes.

Anybody may ask for metrics, as often as they like, and read none of them. So:

- An answer is made once for everybody who asked for it before its making began. Nobody gets an
  answer that is older than the question. Few answers are made at a time; those that wait have their
  turn address by address.
- An answer is kept compressed (`pieces.py`) until its last client has taken it. What is kept has a
  bound in all, and one for the answers that one address asked for first.
- Each client is sent the pieces at its own pace. A piece is unpacked when the client has taken the
  piece before. A client that takes nothing for `unread_timeout_s` is cut off, and after
  UNREAD_S_MIN when somebody else needs its place.
- Making and sending are done in slices, one slice of all answers in a pass of the event loop
  (`turns.py`).
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
from shardmq.broker.controller.management.answers.pieces import (
    GZIP_HEAD,
    PIECE_BYTES,
    Pieces,
    unpacked,
)
from shardmq.broker.controller.management.answers.turns import Turns
from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.shared.logins import source_of
from shardmq.shardd.wire.memory import give_back

UNREAD_S_MIN: Final = 1.0  # who has taken nothing for so long gives its place to others
RETRY_AFTER_S: Final = 1
GIVEN_BACK_FROM_BYTES: Final = 8 << 20  # made, before it pays to give memory back to the system
LOCAL: Final = ""  # the address of whoever calls by this host's own socket: never refused

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """What is answered: bytes that come one after the other."""

    content_type: str
    parts: AsyncGenerator[bytes]
    headers: Mapping[str, str] = {}


Make = Callable[[], Awaitable[Parts]]


class Reader:
    """One client that waits for a long answer, or is being sent it."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.address = source_of(request.remote) if request.remote else LOCAL
        self.unread_since: float | None = None  # while it does not take what it was sent

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
    """One long answer: waits to be made, is made, and is there until its last reader has gone."""

    def __init__(self, key: Hashable, address: str, make: Make) -> None:
        self.key = key
        self.address = address  # of who asked first
        self.make = make
        self.readers: set[Reader] = set()
        self.content_type = ""
        self.headers: Mapping[str, str] = {}
        self.pieces = Pieces()
        self.is_ended = False
        self.failed: Exception | None = None
        self._grown: list[asyncio.Future[None]] = []

    def tell(self) -> None:
        """Wake those that wait for more of it."""
        waiting, self._grown = self._grown, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def grown(self) -> None:
        """Wait until there is more, or it has ended or failed."""
        if not self.is_ended and self.failed is None:
            grown = asyncio.get_running_loop().create_future()
            self._grown.append(grown)
            await grown

    def fail(self, error: Exception) -> None:
        """Let go what was made; its readers are told."""
        if self.failed is None and not self.is_ended:
            self.failed = error
            self.pieces.clear()
            self.tell()


class LongAnswers:
    """All long answers of both ports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readers: dict[Reader, Rendering | None] = {}
        self._joinable: dict[Hashable, Rendering] = {}  # of which the making has not begun
        self._waiting: dict[str, deque[Rendering]] = {}  # by address, in the order of their turns
        self._making: dict[Rendering, asyncio.Task[None]] = {}
        self._made_since = 0  # bytes, since memory was given back
        self.refused: Counter[str] = Counter()  # by reason
        self.queued = self.shared = self.made = self.unread = 0

    # -- what monitoring shows ---------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """How many clients wait for an answer or are being sent one."""
        return len(self._readers)

    @property
    def waiting(self) -> int:
        """How many answers wait to be made."""
        return sum(map(len, self._waiting.values()))

    @property
    def bytes_held(self) -> int:
        return sum(rendering.pieces.bytes_held for rendering in self._renderings())

    # -- one call ----------------------------------------------------------------------------------

    async def answer(
        self, request: web.Request, key: Hashable, make: Make, limits: HttpLimits
    ) -> web.StreamResponse:
        """Answer with what `make` gives, or another call's with that key that has not begun.

        Raises ApiError with 429 or 503 when there are too many answers, and whatever `make` raises.
        """
        reader = Reader(request)
        self._let_in(reader, limits)
        try:
            rendering = self._joined(reader, key, make, limits)
            return await self._sent(reader, rendering, limits)
        finally:
            self._gone(reader)

    def _let_in(self, reader: Reader, limits: HttpLimits) -> None:
        if reader.address != LOCAL:
            same = sum(one.address == reader.address for one in self._readers)
            if same >= limits.answers_per_address_max and not self.cut_off(reader.address):
                raise self._busy(
                    429, "address", "too many long answers to this address are under way"
                )
            if len(self._readers) >= limits.answers_max and not self.cut_off(None):
                raise self._busy(503, "answers", "too many long answers are under way")
        self._readers[reader] = None

    def _busy(self, status: int, reason: str, text: str) -> ApiError:
        self.refused[reason] += 1
        return ApiError(status, "busy", text, {"Retry-After": str(RETRY_AFTER_S)})

    def cut_off(self, address: str | None) -> bool:
        """Cut off the reader that has taken nothing for longest, of that address or (None) of all.

        Return whether there is one that has taken nothing for some time, or is gone.
        """
        now = self._clock()
        among = [one for one in self._readers if address is None or one.address == address]
        for one in among:
            if one.is_gone:
                self._gone(one)
                return True
        longest = max(among, key=lambda one: one.unread_s(now), default=None)
        if longest is None or longest.unread_s(now) < UNREAD_S_MIN:
            return False
        self._end_unread(longest)
        return True

    def _end_unread(self, reader: Reader) -> None:
        self.unread += 1
        reader.cut_off()
        self._gone(reader)

    def _gone(self, reader: Reader) -> None:
        """Forget a reader, and the answer that nobody else reads."""
        rendering = self._readers.pop(reader, None)
        if rendering is None:
            return
        rendering.readers.discard(reader)
        if not rendering.readers and rendering.is_ended and rendering.failed is None:
            rendering.failed = ConnectionResetError("nobody reads it")
            rendering.pieces.clear()
        if rendering.readers or rendering.is_ended or rendering.failed is not None:
            return
        if (task := self._making.get(rendering)) is not None:
            task.cancel()
        else:
            self._waiting[rendering.address].remove(rendering)
            if not self._waiting[rendering.address]:
                del self._waiting[rendering.address]
        self._close(rendering)
        rendering.fail(ConnectionResetError("nobody waits for it"))

    def _joined(self, reader: Reader, key: Hashable, make: Make, limits: HttpLimits) -> Rendering:
        rendering = self._joinable.get(key)
        if rendering is None:
            rendering = self._joinable[key] = Rendering(key, reader.address, make)
            self._waiting.setdefault(reader.address, deque()).append(rendering)
            self._begin(limits)
            self.queued += rendering not in self._making
        else:
            self.shared += 1
        rendering.readers.add(reader)
        self._readers[reader] = rendering
        return rendering

    def _close(self, rendering: Rendering) -> None:
        """Let nobody join any more: who asks from now on may expect something newer."""
        if self._joinable.get(rendering.key) is rendering:
            del self._joinable[rendering.key]

    # -- making ------------------------------------------------------------------------------------

    def _begin(self, limits: HttpLimits) -> None:
        """Begin with those whose turn it is; half of what is made at a time may be for one address."""
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
        """Go on with others; a task that was cancelled may never have begun."""
        del self._making[rendering]
        if task.cancelled():
            rendering.fail(ConnectionResetError("it was cancelled"))
        self._begin(limits)

    async def _make(self, rendering: Rendering, limits: HttpLimits) -> None:
        try:
            await Turns.passes.mine()
            self._close(rendering)
            made = await rendering.make()
            rendering.content_type, rendering.headers = made.content_type, made.headers
            await Turns.passes.mine()
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
        """Pack some more, no more than a piece in one pass of the event loop."""
        self._made_since += len(part)
        for start in range(0, len(part), PIECE_BYTES):
            if start:
                await Turns.passes.mine()
            before = len(rendering.pieces.packed)
            rendering.pieces.add(part[start : start + PIECE_BYTES])
            if len(rendering.pieces.packed) != before:
                self._make_room(rendering, limits)
                rendering.tell()

    def _make_room(self, rendering: Rendering, limits: HttpLimits) -> None:
        """Let go of what only unread clients hold, while too much is kept.

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
        """Those that hold memory."""
        read = {rendering for rendering in self._readers.values() if rendering is not None}
        return read | self._making.keys()

    def _let_go(self, but: Rendering, address: str | None) -> bool:
        """Cut off the readers of the answer that nobody has read for longest, if there is one."""
        now = self._clock()
        unread = {
            rendering: min(reader.unread_s(now) for reader in rendering.readers)
            for rendering in self._renderings()
            if rendering is not but and rendering.readers and address in (None, rendering.address)
        }
        longest = max(unread, key=unread.__getitem__, default=None)
        if longest is None or unread[longest] < UNREAD_S_MIN:
            return False
        for reader in list(longest.readers):
            self._end_unread(reader)
        return True

    # -- sending -----------------------------------------------------------------------------------

    async def _sent(
        self, reader: Reader, rendering: Rendering, limits: HttpLimits
    ) -> web.StreamResponse:
        while not (rendering.is_ended or rendering.failed or rendering.pieces.packed):
            await rendering.grown()
        if rendering.failed is not None:
            raise rendering.failed
        pieces, request = rendering.pieces, reader.request
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
                    reader.unread_since = self._clock()
                    async with asyncio.timeout(limits.unread_timeout_s):
                        await response.write(data)
                    reader.unread_since = None
                reader.unread_since = self._clock()
                async with asyncio.timeout(limits.unread_timeout_s):
                    await response.write_eof()
        except TimeoutError:
            self._end_unread(reader)
        except _BrokenOff:
            reader.cut_off()
        return response

    # -- afterwards --------------------------------------------------------------------------------

    def look(self) -> None:
        """Now and then: give memory back when much was made and nothing is under way any more."""
        if not self._readers and not self._making and self._made_since >= GIVEN_BACK_FROM_BYTES:
            self._made_since = 0
            give_back()


class _BrokenOff(Exception):
    """The rest of an answer cannot be made; its client is told by an answer without an end."""


async def _data(rendering: Rendering, zipped: bool) -> AsyncIterator[bytes]:
    """Yield what is written to one client, each piece in a pass of the event loop of its own."""
    pieces, at, lead = rendering.pieces, 0, GZIP_HEAD if zipped else b""
    while True:
        if at < len(pieces.packed):
            await Turns.passes.mine()
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
    """Whether a client with this Accept-Encoding takes gzip by that name."""
    for one in accepted.lower().split(","):
        coding, _, weight = one.partition(";")
        if coding.strip() in ("gzip", "x-gzip"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
