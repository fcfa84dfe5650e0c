"""The place of a shard on one node of a cluster, where other nodes have copies of its files.

A seat begins as a follower: it does to its own directory what the leader of the shard does. When
`shardmq.cluster.rules` say that it leads, `files` are there, and the process serves the shard by
them: each change goes to the nodes that follow, and a sync waits for those of the in-sync set. A
leader that another node has replaced is over, and its process starts again as a follower.

All this runs in an event loop in a thread of its own, because the threads of the shard wait for it.
Only operations and their answers go without it: threads that sync send and hear them themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from shardmq.cluster.copy_streams import CopyStreams, copies_protocol
from shardmq.cluster.etcd import client
from shardmq.cluster.following import FollowerOfCopies, HeldFile, new_life
from shardmq.cluster.giving_back import GivingBack, Led
from shardmq.cluster.leading import LeaderOfCopies
from shardmq.cluster.operations import CopiedDirectory, OperationLog
from shardmq.cluster.pairs import Changes, Deleted, Listing, Pair
from shardmq.cluster.record_store import EtcdRecord, RecordAway
from shardmq.cluster.record_store import decoded as record_of
from shardmq.cluster.records import (
    COPIES_PORT,
    BadRecord,
    Copies,
    KeyNames,
    Node,
    decoded,
    number_in,
)
from shardmq.cluster.replicas import REPLICAS_MAX, Replicas
from shardmq.cluster.replicas import decoded as replicas_in
from shardmq.cluster.replicated_files import Deposed, ReplicatedFiles
from shardmq.cluster.rules import Record, Settings, Wait, heartbeat_s_of
from shardmq.cluster.secret import tls_context
from shardmq.cluster.shared_ends import SharedServer
from shardmq.cluster.streams import (
    COPY_STATE,
    Address,
    NoStream,
    Opening,
    OpeningProtocol,
    Receiving,
)
from shardmq.cluster.unclean import STATE_S_MAX, Ask, CopyState
from shardmq.cluster.versions import own_versions
from shardmq.shardd.config import CopiesConfig, ShardConfig
from shardmq.shardd.directories import held_path, shard_directory
from shardmq.shardd.snapshot import clear_links
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.wire import messages as wire
from shardmq.supervisor import notify

log = logging.getLogger(__name__)

STORE_BYTES: Final = 8
# How long a leader that is drained waits until another node leads.
HAND_OVER_S_MAX: Final = 2.0
STOP_S_MAX: Final = 1.0
# How often a leader looks whether the lead is to go back to the home of the shard.
LOOK_S: Final = 1.0
ASK_BYTES_MAX: Final = 4096
WAITS: Final = {
    None: "",
    Wait.OWN_DISK: "",
    Wait.MORE_MEMBERS: wire.TOO_FEW_IN_SYNC,
    Wait.MEMBERS: wire.NODE_STALLED,
    Wait.ENDED_MEMBERS: wire.NODE_STALLED,
}
# The files of a shard lie in the directories of its vhosts.
OF_SHARD: Final = re.compile(r"[0-9a-f]{40}(/.*)?")


def is_of_shard(path: str) -> bool:
    """Return whether a path below the directory of a shard is part of the copies."""
    return OF_SHARD.fullmatch(path) is not None


def read_count(path: Path) -> int:
    """Return the number in a file; 0 if there is none."""
    try:
        return max(0, int(path.read_bytes()))
    except (OSError, ValueError):
        return 0


def write_count(path: Path, count: int) -> None:
    """Write a number to a file; a failure is only logged."""
    try:
        path.write_text(f"{count}\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)


class Seat:
    """A follower that may become the leader; `start` begins.

    fd: becomes readable when something of the following has changed; then call `look`.
    is_settled: another node leads, or has led last, so that this one need not be waited for.
    files: the files to serve the shard by, once this node leads.
    heir: the node that is to lead next, so that this one has to drain and to hand over; "" if none.
    over: why the seat has ended; "" as long as it has not. An error of ours is in `failure`.
    """

    def __init__(self, config: ShardConfig, copies: CopiesConfig) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_settled = False
        self.files: ReplicatedFiles | None = None
        self.heir = ""
        self.over = ""
        self.failure: BaseException | None = None
        self._shard = config.shard
        self._copies = copies
        self._root = shard_directory(config.data_dir, config.shard)
        self._disk = OsFiles()
        self._held = HeldFile(self._disk, held_path(self._root))
        self._service = f"{COPIES_PORT}{config.shard}"
        self._settings = Settings(
            lag_s=copies.replica_lag_s,
            heartbeat_s=heartbeat_s_of(copies.replica_lag_s),
            disk_stall_s=config.disk_stall_s,
            min_in_sync=copies.min_in_sync,
        )
        self._life = new_life()
        self._keys = KeyNames(copies.cluster)
        self._own_replicas = self._keys.replicas_of(config.shard)
        self._operations = OperationLog()
        self._lock = threading.RLock()  # of the leader, and of its ends of streams
        self._nodes: dict[int, Node] = {}
        self._records: dict[int, Record] = {}  # of all shards
        self._claims: dict[int, Copies] = {}
        self._replicas: Replicas | None = None  # of this shard, if it is in a set
        self._knows_set = False  # etcd has said once whether it is, and the value could be read
        self._revision = 0  # of the record of this shard
        self._numbers: dict[str, float] = {}
        self._is_leaving = False  # the shard drains, and nothing changes the heir any more
        self._is_cut_off = False  # the lead was ended, so that the shard waits for no other node
        # Of the home: a hand-over ends this process, so a file tells the next one.
        self._lost_leads = Path(config.runtime_dir, f"shard-{config.shard:02d}.lost-leads")
        self._giving = GivingBack(
            copies.node, config.shard, copies.give_back_after_s, read_count(self._lost_leads)
        )
        self._follower: FollowerOfCopies | None = None
        self._leader: LeaderOfCopies | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._playing: asyncio.Task[str] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)

    # -- for the thread of the process -------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Make `fd` unreadable, until something changes again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def hand_over(self) -> None:
        """Let another node lead at once, if there is one that has all. Nobody writes any more.

        That is the heir, if there is one.
        """
        leader = self._leader
        if leader is None or self.over:
            return
        heirs = sorted(
            leader.record.in_sync.keys() - {self._copies.node},
            key=lambda node: (node != self.heir, node),
        )
        if heirs and self._call(leader.hand_over, heirs[0]):
            self._thread.join(HAND_OVER_S_MAX)

    def leave_within(self, seconds: float) -> None:
        """Lead no more after so long: what waits for the other nodes then ends.

        That is sooner if all of them end in order, too, as when the whole cluster is stopped. The
        heir stays the one that it is now.
        """
        self._is_leaving = True
        if (loop := self._loop) is not None:
            self._call(loop.call_later, seconds, self._cut_off)

    def _cut_off(self) -> None:
        """End the lead; in the thread of the copies. Syncs that wait raise Deposed."""
        self._is_cut_off = True
        if self._playing is not None:
            self._playing.cancel()

    def stop(self) -> None:
        """End, with connections and threads. The disk is as after a crash."""
        if self._call(self._begin_to_end):
            self._thread.join(STOP_S_MAX)

    def _call(self, act: Callable[..., object], *arguments: object) -> bool:
        """Call this in the thread of the copies; return False if the thread has ended."""
        if self._loop is None or self._playing is None:
            return False
        try:
            self._loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop is closed, which may be at any moment
            return False
        return True

    def _begin_to_end(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Take leave of the leader, if this node follows, and end."""
        if self._follower is not None:
            await self._follower.leave()
        if self._playing is not None:
            self._playing.cancel()

    def is_deposed(self, error: BaseException | None) -> bool:
        """Return whether an error of the shard says that this node leads no more."""
        while error is not None:
            if isinstance(error, Deposed):
                return True
            error = error.__cause__ or error.__context__
        return (bool(self.over) or self._is_cut_off) and self.failure is None

    @property
    def waits_for(self) -> str:
        """Why syncs are not confirmed, as an alarm; "" if it is the disk, or if they are."""
        leader = self._leader
        return "" if leader is None else WAITS[leader.waits_for()]

    def numbers(self) -> dict[str, float]:
        """Return how many nodes have all that is confirmed, and how far the last one is behind.

        The bytes that were sent to the followers are there, too. All are those of the last second.
        """
        return self._numbers

    # -- the thread of the copies ------------------------------------------------------------------

    def _run(self) -> None:
        clear_links(self._root)  # of a leader that ended: they keep the room of removed files
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.over = runner.run(self._play()) or "it leads no more"
        except asyncio.CancelledError:
            self.over = "it was stopped"
        except Exception as error:
            log.critical("the copies have ended: %s", error, exc_info=error)
            self.failure = error
            self.over = f"the copies have ended: {error}"
        self._tell()

    def _tell(self) -> None:
        os.eventfd_write(self.fd, 1)

    async def _play(self) -> str:
        """Follow, then lead; return why that is over."""
        self._loop = asyncio.get_running_loop()
        self._etcd = client(self._copies.etcd)
        server = SharedServer(
            socket.socket(fileno=os.dup(self._copies.fd)),
            tls_context(self._copies.keys, server=True),
            lambda: OpeningProtocol(self._accept),
            self._lock,
        )
        watching = asyncio.create_task(self._watch())
        looking = asyncio.create_task(self._look_at_copies())
        playing = self._playing = asyncio.create_task(self._follow_then_lead())
        try:
            await asyncio.wait((watching, playing, looking), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # etcd refuses
            if looking.done():
                looking.result()  # a fault of ours
            return playing.result()
        finally:
            for task in (watching, playing, looking):
                task.cancel()
            await asyncio.gather(watching, playing, looking, return_exceptions=True)
            server.close()
            await self._etcd.close()

    async def _follow_then_lead(self) -> str:
        copies, record = self._copies, EtcdRecord(self._etcd, self._keys.copies_of(self._shard))
        opening = Opening(own_versions(), copies.cluster, copies.node, self._service)
        streams = CopyStreams(
            tls_context(copies.keys, server=False),
            opening,
            lambda: self._record,
            self._address,
            self._leader_gone,
        )
        self._follower = FollowerOfCopies(
            copies.node,
            self._life,
            self._held,
            CopiedDirectory(self._disk, self._root, is_of_shard),
            self._operations,
            record,
            streams.connect,
            self._settings,
            os.urandom(STORE_BYTES).hex() if copies.founds else "",
            is_alone=True,
        )
        self._changed()
        lead = await self._follower.run()
        self._follower = None
        log.info("this node leads in term %d", lead.record.term)
        self._leader = LeaderOfCopies(
            copies.node,
            self._life,
            lead,
            self._operations,
            record,
            self._disk,
            self._root,
            is_of_shard,
            self._settings,
            waits=notify.watchdog,
            compression=self._copies.compression,
            lock=self._lock,
        )
        self._leader.copies_are(self._copies_count(), self._min_in_sync())
        self.files = self._leader.replicated
        self._tell()
        return await self._leader.run()

    async def _look_at_copies(self) -> None:
        """Look each second how the copies are, and whether the home of the shard is to lead."""
        while True:
            await asyncio.sleep(LOOK_S)
            leader = self._leader
            if leader is None:
                continue
            if self._is_leaving:
                if leader.waits_for() is Wait.ENDED_MEMBERS:
                    self._cut_off()
                continue
            self._numbers = {
                "replica_in_sync": len(leader.record.in_sync),
                "replica_lag_bytes": leader.lag(),
                "replica_lag_seconds": leader.lag_s(),
                "replica_sent_bytes": leader.sender.sent_bytes,
                "replica_plain_bytes": leader.sender.plain_bytes,
            }
            heir = self._giving.heir(time.monotonic())
            may_go = bool(heir) and await leader.may_hand_over(heir)
            if self._is_leaving:
                continue
            if may_go and not self.heir:
                log.info("the lead goes back to %s", heir)
            self.heir = heir if may_go else ""
            if may_go:
                self._tell()

    def _accept(self, opening: Opening) -> Receiving:
        """Return the protocol of a node that follows. Raises NoStream."""
        if opening.cluster != self._copies.cluster:
            raise NoStream(f"this is a node of the cluster '{self._copies.cluster}'")
        if opening.service == COPY_STATE:
            return asyncio.StreamReaderProtocol(
                asyncio.StreamReader(ASK_BYTES_MAX), self._tell_state
            )
        if opening.service != self._service:
            raise NoStream(f"this is {self._service}")
        if self._leader is None:
            raise NoStream(f"{self._copies.node} does not lead", self._life)
        return copies_protocol(self._leader)

    async def _tell_state(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say in a line of JSON what the copy is; nothing is said unless this node follows."""
        try:
            async with asyncio.timeout(STATE_S_MAX):
                asked = msgspec.json.decode(await reader.readline(), type=Ask)
                follower = self._follower
                if follower is not None and asked.promise:
                    await follower.promise(asked.promise)
                if follower is not None and follower is self._follower:
                    rules = follower.follower
                    state = CopyState(self._life, rules.held, rules.position, rules.confirmed)
                    writer.write(msgspec.json.encode(state) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # a timeout is an OSError
            log.info("a question for the state of the copy has ended: %s", error)
        finally:
            writer.close()

    # -- what etcd says ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        async with aclosing(self._etcd.watch(self._keys.all)) as watch:
            async for news in watch:
                self._take_all(news)

    def _take_all(self, news: Listing | Changes) -> None:
        if isinstance(news, Listing):
            for known in (self._nodes, self._records, self._claims):
                known.clear()
            self._revision = news.revision
            if all(pair.key != self._own_replicas for pair in news.pairs):
                self._replicas, self._knows_set = None, True
        for each in news.pairs if isinstance(news, Listing) else news.changes:
            try:
                self._take(each)
            except (BadRecord, RecordAway) as error:  # it must not hide those behind it
                log.error("etcd has a wrong value: %s", error)
        self._changed()

    def _take(self, news: Pair | Deleted) -> None:
        if news.key.startswith(self._keys.copies):
            shard = number_in(news.key)
            self._records.pop(shard, None)
            if shard == self._shard:
                self._revision = news.mod_revision
            if isinstance(news, Pair):
                self._records[shard] = record_of(news)
        elif news.key == self._own_replicas:  # one that cannot be read leaves the one before
            value = news.value if isinstance(news, Pair) else None
            self._replicas = None if value is None else replicas_in(news.key, value)
            self._knows_set = True
        elif news.key.startswith(self._keys.shards):
            shard = number_in(news.key)
            if isinstance(news, Pair):  # one that cannot be read leaves the one before
                self._claims[shard] = decoded(news.key, news.value, Copies)
            else:
                self._claims.pop(shard, None)
        elif news.key.startswith(self._keys.nodes):
            number = number_in(news.key)
            self._nodes.pop(number, None)
            if isinstance(news, Pair):
                self._nodes[number] = decoded(news.key, news.value, Node)

    def _changed(self) -> None:
        """Look at what etcd has now of the nodes and of the record."""
        record = self._record
        for copies in (self._follower, self._leader):
            if copies is not None:
                copies.recorded(record, self._revision)
        if self._leader is not None:
            self._leader.copies_are(self._copies_count(), self._min_in_sync())
        known = self._giving.lost
        self._giving.look(self._led(), time.monotonic())
        if self._giving.lost != known:
            write_count(self._lost_leads, self._giving.lost)
        if record is None or self._follower is None:
            return
        if record.leader != self._copies.node:
            if self._address(record.leader) is None:
                self._follower.leader_gone(record.term)
            if not self.is_settled:
                self.is_settled = True
                self._tell()

    @property
    def _record(self) -> Record | None:
        return self._records.get(self._shard)

    def _copies_count(self) -> int:
        """Return how many nodes have a copy or are to have one, at least.

        Half of them must have all before anything is confirmed, so too few would confirm too early.
        """
        claim = self._claims.get(self._shard)
        if claim is None:
            return max(1, 0 if self._record is None else len(self._record.in_sync))
        # A home that was lost, and has been replaced, is a member still.
        wanted = self._copies.replicas if self._replicas is None else self._replicas.count
        return max(1, min(len(claim.members), wanted))

    def _min_in_sync(self) -> int | None:
        """Return the number of the set that the shard is in; None: that of the settings.

        Before it is known whether the shard is in a set, and in which, only as many nodes as a set
        may ask for are enough for a confirm.
        """
        if not self._knows_set:
            return REPLICAS_MAX
        return None if self._replicas is None else self._replicas.min_in_sync

    def _led(self) -> dict[int, Led]:
        """Return what the rule of giving back looks at."""
        found = {}
        for shard, record in self._records.items():
            claim = self._claims.get(shard)
            home = None if claim is None else self._nodes.get(claim.leader)
            found[shard] = Led("" if home is None else home.name, record.leader, record.in_sync)
        return found

    def _address(self, name: str) -> Address | None:
        """Return where a node takes those who have copies of this shard; None if it is gone."""
        for node in self._nodes.values():
            if node.name == name and self._service in node.ports:
                return node.address, node.ports[self._service]
        return None

    def _leader_gone(self, term: int) -> None:
        if self._follower is not None:
            self._follower.leader_gone(term)
