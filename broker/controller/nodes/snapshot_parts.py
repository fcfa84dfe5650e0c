"""The parts of a snapshot at the nodes of a cluster, as the leader has them made.

The leader says the steps by a stream to each node, one line of JSON for each, and the node answers
each with a line. The bytes of a file follow their line. A stream that ends before the part has its
name is a snapshot that was given up: the node removes the part.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec

from shardmq.broker.controller.snapshots import in_thread
from shardmq.broker.controller.stored.snapshot_directory import NoSnapshot
from shardmq.broker.controller.stored.snapshot_part import OwnPart
from shardmq.cluster.membership import Origin
from shardmq.cluster.records import BAD_JSON

# How long a node may take for a step, and for syncing all of its part.
STEP_S_MAX: Final = 60.0
FINISH_S_MAX: Final = 600.0
LINE_BYTES_MAX: Final = 1 << 18
PIECE_BYTES: Final = 1 << 20
FILE_BYTES_MAX: Final = 1 << 40

Step = Literal["look", "begin", "file", "finish", "name", "remove"]

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step. `path` is the directory of the snapshot, or the name of a file."""

    step: Step
    path: str = ""
    size: int = 0
    mode: int = 0
    origin: Origin | None = None


class Answered(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a step: why it cannot be done, and the directory of the part."""

    error: str = ""
    path: str = ""


class PartOfNode(Protocol):
    """A part at a node; each step raises NoSnapshot. `gone` is set when the node is away."""

    gone: asyncio.Event

    async def look(self, target: Path) -> None: ...

    async def begin(self, target: Path) -> Path: ...

    async def add(self, file: Path) -> None: ...

    async def finish(self, origin: Origin) -> None: ...

    async def give_name(self) -> None: ...

    async def remove(self) -> None: ...

    def close(self) -> None: ...


class PartHere:
    """The part of this node, to be made in threads."""

    def __init__(self, part: OwnPart) -> None:
        self._part = part
        self.gone = asyncio.Event()  # it is never set

    async def look(self, target: Path) -> None:
        await _done(self._part.look, target)

    async def begin(self, target: Path) -> Path:
        await _done(self._part.begin, target)
        return self._part.path

    async def add(self, file: Path) -> None:
        """Do nothing: the files are written here."""

    async def finish(self, origin: Origin) -> None:
        await _done(self._part.finish, origin)

    async def give_name(self) -> None:
        await _done(self._part.give_name)

    async def remove(self) -> None:
        await _done(self._part.remove)

    def close(self) -> None:
        pass


class PartElsewhere:
    """The part of another node, at the end of a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.gone = asyncio.Event()
        self._writer = writer
        self._answers: asyncio.Queue[Answered] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen(reader))

    async def look(self, target: Path) -> None:
        await self._ask(Asked("look", str(target)))

    async def begin(self, target: Path) -> Path:
        return Path((await self._ask(Asked("begin", str(target)))).path)

    async def add(self, file: Path) -> None:
        """Send a file of the definitions."""
        with file.open("rb") as source:
            status = os.fstat(source.fileno())
            asked = Asked("file", file.name, status.st_size, status.st_mode & 0o777)
            self._writer.write(msgspec.json.encode(asked) + b"\n")
            left = status.st_size
            try:
                while left:
                    piece = await asyncio.to_thread(source.read, min(left, PIECE_BYTES))
                    if not piece:
                        raise NoSnapshot(f"{file} has become shorter")
                    left -= len(piece)
                    self._writer.write(piece)
                    await self._writer.drain()
            except OSError as error:
                raise NoSnapshot(f"the node is away: {error}") from None
        await self._answer(STEP_S_MAX)

    async def finish(self, origin: Origin) -> None:
        await self._ask(Asked("finish", origin=origin), FINISH_S_MAX)

    async def give_name(self) -> None:
        await self._ask(Asked("name"))

    async def remove(self) -> None:
        await self._ask(Asked("remove"), FINISH_S_MAX)

    def close(self) -> None:
        self._listening.cancel()
        self._writer.close()

    async def _ask(self, asked: Asked, wait_s: float = STEP_S_MAX) -> Answered:
        if not self.gone.is_set():
            self._writer.write(msgspec.json.encode(asked) + b"\n")
        return await self._answer(wait_s)

    async def _answer(self, wait_s: float) -> Answered:
        answer, gone = asyncio.ensure_future(self._answers.get()), _when_set(self.gone)
        try:
            await asyncio.wait((answer, gone), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise NoSnapshot(
                    "the node is away" if gone.done() else f"no answer within {wait_s:g} s"
                )
            if answer.result().error:
                raise NoSnapshot(answer.result().error)
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._answers.put_nowait(msgspec.json.decode(line, type=Answered))
        except (OSError, *BAD_JSON) as error:
            log.warning("a part of a snapshot: %s", error)
        finally:
            self.gone.set()
            self._writer.close()


async def make_part(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, part: OwnPart
) -> None:
    """Make the part of this node as the leader says, until the stream ends."""
    try:
        while line := await reader.readline():
            asked = msgspec.json.decode(line, type=Asked)
            try:
                path = await _carry_out(asked, reader, part)
                answer = Answered(path=path)
            except NoSnapshot as error:
                log.error("no part of a snapshot: %s", error)
                answer = Answered(error=str(error))
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
    except (OSError, EOFError, *BAD_JSON) as error:
        log.warning("a snapshot of the cluster has ended: %s", error)
    finally:
        writer.close()
        if not part.is_named:
            await in_thread(part.remove)


async def _carry_out(asked: Asked, reader: asyncio.StreamReader, part: OwnPart) -> str:
    """Do a step; return the directory of the part if it has begun. Raises NoSnapshot, OSError."""
    match asked.step:
        case "look":
            await _done(part.look, Path(asked.path))
            return ""
        case "begin":
            await _done(part.begin, Path(asked.path))
        case "file":
            await _take(asked, reader, part)
        case "finish" if asked.origin is not None:
            await _done(part.finish, asked.origin)
        case "name":
            await _done(part.give_name)
            log.info("a part of a snapshot is in %s", part.path)
        case "remove":
            await _done(part.remove)
            return ""
    return str(part.path)


async def _take(asked: Asked, reader: asyncio.StreamReader, part: OwnPart) -> None:
    """Take the bytes of a file, all of them, also if they cannot be written."""
    if not 0 <= asked.size <= FILE_BYTES_MAX:
        raise EOFError(f"{asked.size} bytes are too many for a file")
    failed: NoSnapshot | None = None
    handle, left = -1, asked.size
    try:
        try:
            handle = await asyncio.to_thread(part.create, asked.path, asked.mode)
        except (NoSnapshot, OSError) as error:
            failed = NoSnapshot(reason(error))
        while left:
            piece = await reader.read(min(left, PIECE_BYTES))
            if not piece:
                raise EOFError("the stream has ended")
            left -= len(piece)
            if failed is None:
                try:
                    await asyncio.to_thread(_write, handle, piece)
                except OSError as error:
                    failed = NoSnapshot(reason(error))
    finally:
        if handle >= 0:
            os.close(handle)
    if failed is not None:
        raise failed


def _write(handle: int, data: bytes) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(data):
            done += os.write(handle, view[done:])


def reason(error: Exception) -> str:
    """Return why something could not be done, with the path if there is one."""
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


async def _done(work: Callable[..., Any], *arguments: Any) -> None:
    """Run work in a thread, to its end. Raises NoSnapshot."""
    try:
        await in_thread(work, *arguments)
    except OSError as error:
        raise NoSnapshot(reason(error)) from None


def _when_set(event: asyncio.Event) -> asyncio.Task[Literal[True]]:
    return asyncio.create_task(event.wait())
