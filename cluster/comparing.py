"""Make the files of a follower like those of the leader, and then send what has come since."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from shardmq.cluster import frames
from shardmq.cluster.compression import PLAIN
from shardmq.cluster.operations import PIECE_BYTES, FileSums, digests_of
from shardmq.cluster.replicated_files import ReplicatedFiles, SnapshotFiles
from shardmq.cluster.sending import Sender, Session
from shardmq.shardd.store.files import Files

CATCH_UP_BYTES_S: Final = 200_000_000  # of pieces, to each follower

log = logging.getLogger(__name__)


class Comparing:
    """Compares the files of followers with those of the leader; in the loop of the leader.

    files: the disk.
    bytes_s: how fast pieces of files are sent to a follower.
    """

    def __init__(
        self, files: Files, replicated: ReplicatedFiles, sender: Sender, bytes_s: int
    ) -> None:
        self._files = files
        self._replicated = replicated
        self._sender = sender
        self._rate = bytes_s
        self._disk = ThreadPoolExecutor(2, "copies")

    def close(self) -> None:
        self._disk.shutdown(wait=False)

    async def bring_up(self, session: Session) -> None:
        """Have a follower make its files like the ones here, then send the operations since."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        try:
            snapshot = await loop.run_in_executor(self._disk, self._replicated.snapshot)
        except OSError as error:
            log.error("copies: %s cannot be compared: %s", session.node, error)
            session.stream.close()
            return
        try:
            listing = await loop.run_in_executor(self._disk, self._listed, session, snapshot)
            session.send(listing)
            await session.stream.drain()
            wanted = await session.wanted
            sent = await self._send_pieces(session, snapshot, listing, wanted)
            whole = await loop.run_in_executor(self._disk, self._replicated.position)
            session.send(frames.Compared(session.number, whole.number))
            session.after = snapshot.at
            log.info(
                "copies: %s got %d bytes of %d files in %.1f s",
                session.node,
                sent,
                len(snapshot.files),
                time.monotonic() - began,
            )
        except OSError as error:
            log.error("copies: the comparison with %s has ended: %s", session.node, error)
            session.stream.close()
            return
        finally:
            self._replicated.close_snapshot(snapshot)
        await self._sender.stream(session)

    def _listed(self, session: Session, snapshot: SnapshotFiles) -> frames.Listing:
        listed = []
        for path, handle in snapshot.files:
            size = self._files.size(handle)
            listed.append(FileSums(path, size, digests_of(self._files, handle, size)))
        return frames.Listing(session.number, snapshot.at, snapshot.folders, listed)

    async def _send_pieces(
        self,
        session: Session,
        snapshot: SnapshotFiles,
        listing: frames.Listing,
        wanted: frames.Want,
    ) -> int:
        """Send what differs, not faster than the rate; return how many bytes that were."""
        loop = asyncio.get_running_loop()
        handles = dict(snapshot.files)
        sizes = {file.path: file.size for file in listing.files}
        sent, began = 0, loop.time()
        for path, numbers in wanted.pieces:
            for number in numbers:
                position = number * PIECE_BYTES
                size = min(PIECE_BYTES, sizes.get(path, 0) - position)
                if size <= 0:
                    raise OSError(f"{session.node} wants piece {number} of {path!r}")
                piece = frames.Piece(session.number, path, position, b"")
                read = self._read_piece
                got, message = await loop.run_in_executor(
                    self._disk, read, session.method, piece, handles[path], size
                )
                self._sender.send_data(session, message)
                await session.stream.drain()
                sent += got
                ahead_s = sent / self._rate - (loop.time() - began)
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)
        return sent

    def _read_piece(
        self, method: str, piece: frames.Piece, handle: int, size: int
    ) -> tuple[int, frames.Data | frames.Compressed]:
        """Return how many bytes there are at the place of a piece, and the message with them."""
        data = self._replicated.read_snapshot(handle, size, piece.position)
        piece = msgspec.structs.replace(piece, data=data)
        compressed = None if method == PLAIN else frames.compressed(piece, method)
        return len(data), compressed or piece
