"""The place of a node in its cluster: its number, and the numbers of its shards.

A node claims both at its first start, each by a transaction that creates a record. The file
`cluster.json` in its data directory keeps them, and has an *identity*: random bytes that tell this
data directory from another one which is started under the name of the same node.

    /shardmq/NAME/members/ID    Member     a node of the cluster, whether it runs or not
    /shardmq/NAME/forgotten/ID  Forgotten  a node that was one, and may not come back
    /shardmq/NAME/secret        bytes      a fingerprint, so that no node with another secret joins
    /shardmq/NAME/refused       Refused    the last node that was refused, for other logs
    /shardmq/NAME/restored      Origin     the snapshot that the cluster was restored from, if any

A data directory that is part of a snapshot has a new identity, and says so in its `cluster.json`.
The first node that starts on one notes the snapshot in etcd. Then no node may join that has the
data of another snapshot, or those of the cluster as it was before: their shards and definitions do
not belong together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from shardmq.cluster.pairs import (
    Changes,
    Compare,
    Delete,
    Deleted,
    Get,
    Listing,
    Operation,
    Outcome,
    Pair,
    Put,
)
from shardmq.cluster.records import (
    BAD_JSON,
    FIRST_HOME,
    NODES_MAX,
    SHARDS_MAX,
    BadRecord,
    Copies,
    KeyNames,
    decoded,
    encoded,
    number_in,
)
from shardmq.cluster.replicas import Replicas, ShardSet, assigned
from shardmq.cluster.replicas import decoded as replicas_in
from shardmq.cluster.replicas import encoded as value_of_replicas
from shardmq.cluster.rules import Record, RecordError

FILE_NAME: Final = "cluster.json"
IDENTITY_BYTES: Final = 16
UNCLAIMED: Final = -1
COMPARES_MAX: Final = 128  # of one transaction, as etcd has it by default (--max-txn-ops)

log = logging.getLogger(__name__)


class NoPlace(Exception):
    """The node cannot be of this cluster. The text says why, for the operator."""


class Member(Struct, frozen=True):
    """A node of the cluster: its name, and the identity of its data directory."""

    name: str
    identity: str


class Forgotten(Member, frozen=True):
    """A node that was forgotten.

    burnt: the numbers of its lost shards of which other nodes have older copies. They are not used
        again, because the terms of such copies are higher than those of a new shard.
    """

    burnt: list[int] = []


class Refused(Struct, frozen=True):
    """A node that could not be of the cluster: its name, its address, and why."""

    name: str
    address: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} at {self.address}: {self.why}"


class Part(Struct, frozen=True):
    """The part of a snapshot that one node has made: its number, and the terms of its shards.

    A shard without copies has the term 0.
    """

    number: int
    shards: dict[int, int]


class Origin(Struct, frozen=True):
    """A snapshot of a cluster: its name, when it was made, and its parts by the names of the nodes.

    Each shard is in one part.
    """

    snapshot: str
    made_at: str
    parts: dict[str, Part]

    @property
    def shards(self) -> set[int]:
        """All shards of the snapshot."""
        return {shard for part in self.parts.values() for shard in part.shards}


class Place(Struct, frozen=True):
    """The content of `cluster.json`. The number is UNCLAIMED before the first claim.

    origin: the snapshot that the cluster was restored from, or that the directory is part of.
    """

    cluster: str
    node: str
    identity: str
    number: int = UNCLAIMED
    shards: list[int] = []
    origin: Origin | None = None

    @property
    def founds(self) -> bool:
        """True if the definitions of the cluster may begin with those of this directory.

        In a cluster that was restored, only nodes with a part have the definitions of the snapshot.
        A node without one that led first would have all restored messages removed, as of vhosts
        that are gone. A node with the name of a part, but without its data, has another number.
        """
        if self.origin is None:
            return True
        part = self.origin.parts.get(self.node)
        return part is not None and part.number == self.number


def members_key(keys: KeyNames) -> str:
    """Return how the keys of all members begin."""
    return f"{keys.all}members/"


def forgotten_key(keys: KeyNames, number: int | str = "") -> str:
    """Return the key that says that a node was forgotten, or how the keys of all those begin."""
    return f"{keys.all}forgotten/{number}"


def refused_key(keys: KeyNames) -> str:
    """Return the key of the last node that was refused."""
    return f"{keys.all}refused"


def restored_key(keys: KeyNames) -> str:
    """Return the key of the snapshot that the cluster was restored from."""
    return f"{keys.all}restored"


def refused_of(pair: Pair) -> Refused:
    """Return the node that was refused. Raises BadRecord."""
    try:
        return msgspec.json.decode(pair.value, type=Refused)
    except BAD_JSON as error:
        raise BadRecord(f"{pair.key}: no node that was refused: {error}") from None


def read_place(data_dir: Path, cluster: str, node: str) -> Place:
    """Return the place of a data directory, or a new one without numbers.

    Raises NoPlace if the directory is that of another cluster or node, and OSError.
    """
    path = data_dir / FILE_NAME
    try:
        place = msgspec.json.decode(path.read_bytes(), type=Place)
    except FileNotFoundError:
        return Place(cluster, node, os.urandom(IDENTITY_BYTES).hex())
    except msgspec.MsgspecError as error:
        raise NoPlace(f"{path}: {error}") from None
    if (place.cluster, place.node) != (cluster, node):
        raise NoPlace(
            f"{data_dir} belongs to the node '{place.node}' of the cluster '{place.cluster}', "
            f"not to '{node}' of '{cluster}'"
        )
    return place


def write_place(data_dir: Path, place: Place) -> None:
    """Write `cluster.json`, on stable storage. Raises OSError."""
    path = data_dir / FILE_NAME
    new = path.with_name(f"{FILE_NAME}.new")
    with new.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(place)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Store(Protocol):
    """The calls that the claims need of `shardmq.cluster.etcd.Etcd`, which imports much."""

    async def range(self, prefix: str) -> Listing: ...

    async def transact(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
    ) -> Outcome: ...


class Claims:
    """The claims of one node in etcd.

    Each call may be repeated, with the place that the last one returned or that it was called with.
    All raise NoPlace, EtcdAway and EtcdRefused.
    """

    def __init__(self, etcd: Store, cluster: str) -> None:
        self._etcd = etcd
        self._keys = KeyNames(cluster)
        self._members = members_key(self._keys)

    async def secret(self, fingerprint: bytes) -> None:
        """Check that the cluster has the secret with this fingerprint. The first node sets it."""
        key = f"{self._keys.all}secret"
        absent = Compare(key, create_revision=0)
        outcome = await self._etcd.transact([absent], [Put(key, fingerprint)], [Get(key)])
        there = None if outcome.succeeded else outcome.pairs[0]
        if there is not None and there.value != fingerprint:
            raise NoPlace("the cluster has another secret than cluster.secret says")

    async def tell_refused(self, refused: Refused) -> None:
        """Tell the nodes of the cluster that a node was refused, so that their logs say why."""
        await self._etcd.transact([], [Put(refused_key(self._keys), msgspec.json.encode(refused))])

    async def number(self, place: Place) -> Place:
        """Return the place with the number of the node, which is claimed if there is none yet.

        The number of a node that was forgotten is never given to another one. The place has the
        snapshot that the cluster was restored from, and no other node gets the numbers in it. The
        first node of a snapshot notes it, unless the cluster has nodes that are not of it.
        """
        while True:
            place, noted = await self._with_origin(place)
            found = await self._number(place, noted)
            if found is not None:
                return found

    async def _with_origin(self, place: Place) -> tuple[Place, Compare]:
        """Return the place with the origin of the cluster, and the condition that it stays so."""
        key = restored_key(self._keys)
        if place.origin is not None:
            await self._create(key, msgspec.json.encode(place.origin))
        while (noted := await self._noted()) is not None:
            stays = Compare(key, mod_revision=noted.mod_revision)
            older = await self._older_member(noted)
            if older is None:
                return _of_origin(place, _origin_of(noted)), stays
            await self._etcd.transact([stays], [Delete(key)])  # all of the snapshot find this
            if place.origin is not None:
                raise NoPlace(
                    f"the data directory is of a snapshot, and the cluster has the node '{older}', "
                    "which is not: start on it with an etcd that knows nothing of the cluster"
                )
            # A node of the snapshot was killed before it could delete the key.
        if place.origin is not None:  # refused for another node meanwhile
            raise NoPlace("the cluster has nodes that are not of the snapshot: see their logs")
        return place, Compare(key, create_revision=0)

    async def _older_member(self, noted: Pair) -> str | None:
        """Return the name of a node that was there before the origin was noted, if there is one."""
        for pair in (await self._etcd.range(self._members)).pairs:
            if pair.mod_revision < noted.mod_revision:
                return member_of(pair.key, pair.value).name
        return None

    async def _noted(self) -> Pair | None:
        outcome = await self._etcd.transact([], [Get(restored_key(self._keys))])
        return outcome.pairs[0]

    async def _number(self, place: Place, origin_stays: Compare) -> Place | None:
        """Return the place with its number; None if the origin of the cluster is another by now."""
        members = await self._etcd.range(self._members)
        taken: set[int] = set()
        for number, forgotten in (await self._all_forgotten()).items():
            taken.add(number)
            if forgotten.identity == place.identity:
                raise NoPlace(was_forgotten(place.node))
        for pair in members.pairs:
            number = number_in(pair.key)
            taken.add(number)
            member = member_of(pair.key, pair.value)
            if member.identity == place.identity:
                return msgspec.structs.replace(place, number=number)
            if member.name == place.node:
                raise NoPlace(
                    f"the cluster has a node '{place.node}' with another data directory: start "
                    "it there, or take another name (cluster.node)"
                )
        known = place.number != UNCLAIMED  # etcd has lost it
        parts = {} if place.origin is None else place.origin.parts
        kept = taken | {part.number for part in parts.values()}
        free = [place.number] if known else [n for n in range(NODES_MAX) if n not in kept]
        put = Put("", msgspec.json.encode(Member(place.node, place.identity)))
        for number in free:
            keys = f"{self._members}{number}", forgotten_key(self._keys, number)
            absent = [Compare(each, create_revision=0) for each in keys]
            if number in taken:
                continue
            put = msgspec.structs.replace(put, key=keys[0])
            if (await self._etcd.transact([origin_stays, *absent], [put])).succeeded:
                return msgspec.structs.replace(place, number=number)
        if not (await self._etcd.transact([origin_stays], [])).succeeded:
            return None
        if known:
            raise NoPlace(f"another node of the cluster has the number {place.number}")
        raise NoPlace(
            f"the cluster has had {NODES_MAX} nodes, those that were forgotten among them, which "
            "is the most that it can have"
        )

    async def shards(self, place: Place, count: int, held: Collection[int]) -> Place:
        """Return the place with at least `count` shards; those that are missing are claimed.

        Shards that the node got from one that was forgotten are none of them: it has copies.
        The first node of a cluster may bring shards that it had before, whose directories it holds:
        their numbers are claimed as they are.
        """
        listing = await self._etcd.range(self._keys.shards)
        owners = {
            number_in(pair.key): decoded(pair.key, pair.value, Copies) for pair in listing.pairs
        }
        own = {shard for shard, claim in owners.items() if _is_made_by(place.number, claim)}
        brought = set(held) - own - set(place.shards)
        if brought and (owners.keys() - own or place.origin is not None):
            raise NoPlace(
                f"the data directory has messages of shard {min(brought)}, which is not of this "
                "cluster: only the first node of a cluster may bring data"
            )
        # Etcd has lost those that are in the file and not there.
        # A file of an older release may list shards that the node got from a forgotten one.
        inherited = {shard for shard, claim in owners.items() if claim.leader == place.number} - own
        for shard in sorted((set(place.shards) | brought) - own - inherited):
            if shard in owners or not await self._create_shard(shard, place):
                raise NoPlace(f"shard {shard} belongs to another node of the cluster")
            own.add(shard)
        forgotten = await self._all_forgotten()
        burnt = {shard for gone in forgotten.values() for shard in gone.burnt}
        # A node of the snapshot that the cluster was restored from may not have come yet.
        parts = {} if place.origin is None else place.origin.parts
        kept = {s for part in parts.values() if part.number not in forgotten for s in part.shards}
        for shard in sorted(set(range(SHARDS_MAX)) - burnt - kept):
            if len(own) >= count:
                break
            is_free = shard not in owners and shard not in own
            if is_free and await self._create_shard(shard, place):
                own.add(shard)
        if len(own) < count:
            to_come = kept - owners.keys() - own
            most = SHARDS_MAX - len(burnt | to_come)
            beside = f", and {len(to_come)} more of nodes of the snapshot that have not come"
            raise NoPlace(
                f"the cluster has {most} shards{beside if to_come else ''}, which is the most that "
                f"it can have: {count} are wanted here (shards.count), {len(own)} are there"
            )
        return msgspec.structs.replace(place, shards=sorted(own))

    async def replicas(self, place: Place, sets: Sequence[ShardSet]) -> dict[int, Replicas]:
        """Write which shards of a place are in which set, and return their numbers.

        A key of such a shard that cannot be read is written anew, or deleted: only its home can
        mend it. Nothing is written for a node that was forgotten meanwhile, because its shards have
        other homes.
        """
        keys = self._keys
        known = {pair.key: pair for pair in await self._range(keys.replicas)}
        before: dict[int, Replicas] = {}
        there = [shard for shard in place.shards if keys.replicas_of(shard) in known]
        for shard in there:
            key = keys.replicas_of(shard)
            try:
                before[shard] = replicas_in(key, known[key].value)
            except BadRecord as error:
                log.error("etcd has a wrong value, which is replaced: %s", error)
        try:
            found = assigned(place.shards, sets, before)
        except ValueError as error:
            raise NoPlace(f"cluster.shard_sets: {error}") from None
        changes: list[Operation] = [
            Put(keys.replicas_of(shard), value_of_replicas(replicas))
            for shard, replicas in found.items()
            if before.get(shard) != replicas
        ]
        changes += [Delete(keys.replicas_of(shard)) for shard in there if shard not in found]
        stays = Compare(forgotten_key(keys, place.number), create_revision=0)
        if changes and not (await self._etcd.transact([stays], changes)).succeeded:
            raise NoPlace(was_forgotten(place.node))
        return found

    async def copied(
        self, place: Place, replicas: int, in_sets: Mapping[int, Replicas] = MappingProxyType({})
    ) -> tuple[list[int], list[int]]:
        """Return which shards of a place have copies, or are to, and of which others it has copies.

        A shard that has copies has them for good, also if `replicas` is 1 now.

        in_sets: the numbers of the shards of the place that are in a set.
        """
        there = {number_in(pair.key) for pair in (await self._etcd.range(self._keys.copies)).pairs}
        own = [
            shard
            for shard in place.shards
            if shard in there or (in_sets[shard].count if shard in in_sets else replicas) > 1
        ]
        seats = [
            number_in(pair.key)
            for pair in (await self._etcd.range(self._keys.shards)).pairs
            if _is_seat(place.number, decoded(pair.key, pair.value, Copies))
        ]
        return own, sorted(seats)

    async def take_seat(self, wanted: Wanted) -> None:
        """Make a node a member of a shard.

        Nothing changes if the claim has another revision by now, or if a member that is taken for
        lost has just come back.
        """
        key = self._keys.shard(wanted.shard)
        record = msgspec.structs.replace(wanted.claim, members=wanted.members)
        absent = [Compare(self._keys.node(node), create_revision=0) for node in wanted.lost]
        same = Compare(key, mod_revision=wanted.revision)
        await self._etcd.transact([same, *absent], [Put(key, encoded(record))])

    async def forget(self, number: int, lost: Collection[int] | None = None) -> Inheritance:
        """Take a node that is gone for good out of the cluster, or (None) only say what that does.

        Its shards get new homes, or are lost with their claims. The node may not come back.

        lost: the shards that may be lost. Raises NoPlace if others would be lost by now, if the
            node lives, if it alone has all of a shard of another node, or if a node that this
            relies on was forgotten meanwhile. Raises BadRecord.
        """
        keys = self._keys
        members = {number_in(pair.key): pair for pair in (await self._range(self._members))}
        if number not in members:
            raise NoPlace(f"the cluster has no node {number}")
        names = {node: member_of(pair.key, pair.value).name for node, pair in members.items()}
        alive = {number_in(pair.key) for pair in await self._range(keys.nodes)}
        if number in alive:
            raise NoPlace(f"node {number} lives")
        claimed = {number_in(pair.key): pair for pair in await self._range(keys.shards)}
        recorded = {number_in(pair.key): pair for pair in await self._range(keys.copies)}
        claims = {shard: decoded(pair.key, pair.value, Copies) for shard, pair in claimed.items()}
        records = {shard: _record_of(pair) for shard, pair in recorded.items()}
        found = inheritance(number, claims, records, names, alive)
        compares = [
            Compare(keys.node(number), create_revision=0),
            Compare(members[number].key, mod_revision=members[number].mod_revision),
        ]
        # Else two nodes that are forgotten at once would each be the one that the other leaves
        # its shards to.
        compares += [
            Compare(members[each].key, mod_revision=members[each].mod_revision)
            for each in sorted(relied_on(number, claims, records, names, found))
        ]
        for shard in (*found.lost, *found.homes):
            compares.append(Compare(keys.shard(shard), mod_revision=claimed[shard].mod_revision))
            record = recorded.get(shard)
            revision = 0 if record is None else record.mod_revision
            compares.append(Compare(keys.copies_of(shard), mod_revision=revision))
        if len(compares) > COMPARES_MAX:
            raise NoPlace(f"it takes {len(compares)} compares in etcd, the most is {COMPARES_MAX}")
        if lost is None:
            return found
        member = member_of(members[number].key, members[number].value)
        burnt = [shard for shard in found.lost if shard in records]
        forgotten = Forgotten(member.name, member.identity, burnt)
        then: list[Operation] = [
            Delete(members[number].key),
            Put(forgotten_key(keys, number), msgspec.json.encode(forgotten)),
        ]
        for shard in found.lost:
            then += [Delete(keys.shard(shard)), Delete(keys.copies_of(shard))]
        for shard, home in found.homes.items():
            claim = claims[shard]
            given = Copies(claim.term + 1, home, in_sync=[home], members=claim.members)
            then.append(Put(keys.shard(shard), encoded(given)))
        if set(found.lost) - set(lost) or not (await self._etcd.transact(compares, then)).succeeded:
            raise NoPlace(f"node {number} lives, or its claims have just changed")
        return found

    async def _all_forgotten(self) -> dict[int, Forgotten]:
        """Return the nodes that were forgotten, by number."""
        pairs = await self._range(forgotten_key(self._keys))
        return {number_in(pair.key): _forgotten_of(pair) for pair in pairs}

    async def _range(self, prefix: str) -> tuple[Pair, ...]:
        return (await self._etcd.range(prefix)).pairs

    async def _create_shard(self, shard: int, place: Place) -> bool:
        """Make a node the home of a new shard; return False if the shard is there.

        Raises NoPlace if the node was forgotten meanwhile: a claim of it would stay for good.
        """
        key, gone = self._keys.shard(shard), forgotten_key(self._keys, place.number)
        record = Copies(FIRST_HOME, place.number, in_sync=[place.number], members=[place.number])
        absent = [Compare(each, create_revision=0) for each in (key, gone)]
        outcome = await self._etcd.transact(absent, [Put(key, encoded(record))], [Get(gone)])
        if not outcome.succeeded and outcome.pairs[0] is not None:
            raise NoPlace(was_forgotten(place.node))
        return outcome.succeeded

    async def _create(self, key: str, value: bytes) -> None:
        """Create a pair, unless its key is there."""
        await self._etcd.transact([Compare(key, create_revision=0)], [Put(key, value)])


def _of_origin(place: Place, there: Origin) -> Place:
    """Return a place in a cluster that was restored from `there`. Raises NoPlace."""
    if place.origin is None and place.number != UNCLAIMED:
        raise NoPlace(
            f"the cluster was restored from the snapshot {there.snapshot}, and the data "
            "directory is of the cluster as it was before: start with an empty one"
        )
    if place.origin is not None and place.origin.snapshot != there.snapshot:
        raise NoPlace(
            f"the data directory is of the snapshot {place.origin.snapshot}, and the cluster "
            f"was restored from the snapshot {there.snapshot}"
        )
    return msgspec.structs.replace(place, origin=there)


def was_forgotten(node: str) -> str:
    """Return what a node is told that was forgotten."""
    return (
        f"the node '{node}' was forgotten (shardctl cluster forget) and may not come back: start "
        "it with an empty data directory, and it joins as a new node"
    )


class Inheritance(NamedTuple):
    """The new homes of the shards of a node that is forgotten.

    lost: the shards of which no other node has all.
    homes: the number of the node that is the new home, by shard, for all others.
    """

    lost: list[int]
    homes: dict[int, int]


def inheritance(
    node: int,
    claims: Mapping[int, Copies],
    records: Mapping[int, Record],
    names: Mapping[int, str],
    alive: Collection[int],
) -> Inheritance:
    """Return what becomes of the shards of a node.

    The new home of a shard is the node that leads it, or else another one that has all of it, one
    that is alive if there is one. Raises NoPlace if the node alone has all of a shard that is at
    home elsewhere: the home has an older state of it, which would lack confirmed messages.

    names: the names of all nodes, by number.
    """
    found = Inheritance([], {})
    for shard, claim in sorted(claims.items()):
        record = records.get(shard)
        heirs = _heirs(node, claim, record, names)
        if claim.leader != node:
            if _has_all(node, record, names) and not heirs:
                home = names.get(claim.leader, claim.leader)
                raise NoPlace(f"it alone has all of shard {shard}, whose home is '{home}'")
        elif not heirs:
            found.lost.append(shard)
        else:
            leader = "" if record is None else record.leader
            found.homes[shard] = min(
                heirs, key=lambda each: (names[each] != leader, each not in alive, each)
            )
    return found


def relied_on(
    node: int,
    claims: Mapping[int, Copies],
    records: Mapping[int, Record],
    names: Mapping[int, str],
    found: Inheritance,
) -> set[int]:
    """Return the nodes that must stay in the cluster when a node is forgotten.

    These are the new homes, and the others that have all of a shard of which this node has all.
    """
    others = {
        heir
        for shard, claim in claims.items()
        if claim.leader != node and _has_all(node, records.get(shard), names)
        for heir in _heirs(node, claim, records.get(shard), names)
    }
    return others | set(found.homes.values())


def _has_all(node: int, record: Record | None, names: Mapping[int, str]) -> bool:
    return record is not None and names[node] in record.in_sync


def _heirs(node: int, claim: Copies, record: Record | None, names: Mapping[int, str]) -> list[int]:
    """Return the members other than a node that have all of a shard."""
    in_sync = {} if record is None else record.in_sync
    return [each for each in claim.members if each != node and names.get(each) in in_sync]


def _is_made_by(node: int, claim: Copies) -> bool:
    """Return whether a node is the home of a shard because it has made the shard."""
    return node == claim.leader and claim.term == FIRST_HOME


def _is_seat(node: int, claim: Copies) -> bool:
    """Return whether a node has a shard among its copies, be it the home or not."""
    return node in claim.members and not _is_made_by(node, claim)


class Wanted(NamedTuple):
    """A shard that a node is to take a copy of: its claim, which is to have other members.

    revision: of the claim.
    members: those that the claim is to have.
    lost: the members that are taken for lost, so that the node takes the place of one.
    """

    shard: int
    claim: Copies
    revision: int
    members: list[int]
    lost: list[int]


class Seats:
    """The shards with copies as a node knows them, so that it finds those to take a copy of.

    A shard is to be on `replicas` nodes, unless it is in a set with a number of its own.

    Shards take the next nodes that are alive. The order begins behind the home of the shard, and
    goes on by one for each shard, so that the copies of one node lie on several.

    A member is *lost* if it was forgotten, or has not been alive for `replace_after_s` (0: never by
    time). Another node takes its place when a node that is alive leads the shard and the lost one
    is not in the in-sync set. The home keeps its place beside that. A node replaces one copy at a
    time: the next one when the last one is in sync.
    """

    def __init__(
        self, keys: KeyNames, node: int, replicas: int, replace_after_s: float = 0.0
    ) -> None:
        self._keys = keys
        self._node = node
        self._replicas = replicas
        self._replace_after_s = replace_after_s
        self._alive: set[int] = set()
        self._names: dict[int, str] = {}  # of all nodes of the cluster, which are not forgotten
        self._away_since: dict[int, float] = {}
        self._records: dict[int, Record] = {}  # of the shards that are led by the rules of copies
        self._claims: dict[int, tuple[Copies, int]] = {}  # with their revisions
        self._in_sets: dict[int, Replicas] = {}  # of the shards that are in a set
        self._replacing: int | None = None  # a shard

    def take(self, news: Listing | Changes, now: float = 0.0) -> None:
        """Take what etcd has, or what has changed. What cannot be read is logged and left out."""
        if isinstance(news, Listing):
            for known in (self._alive, self._names, self._records, self._claims, self._in_sets):
                known.clear()
        for each in news.pairs if isinstance(news, Listing) else news.changes:
            try:
                self._take(each)
            except BadRecord as error:  # it must not hide those behind it
                log.error("etcd has a wrong value: %s", error)
        away = (self._names.keys() | self._members()) - self._alive
        self._away_since = {node: self._away_since.get(node, now) for node in away}

    def _take(self, each: Pair | Deleted) -> None:
        keys = self._keys
        pair = each if isinstance(each, Pair) else None
        if each.key.startswith(keys.nodes):
            (self._alive.discard if pair is None else self._alive.add)(number_in(each.key))
        elif each.key.startswith(members_key(keys)):
            self._names.pop(number_in(each.key), None)
            if pair is not None:
                self._names[number_in(each.key)] = member_of(pair.key, pair.value).name
        elif each.key.startswith(keys.copies):
            self._records.pop(number_in(each.key), None)
            if pair is not None:
                self._records[number_in(each.key)] = _record_of(pair)
        elif each.key.startswith(keys.replicas):
            self._in_sets.pop(number_in(each.key), None)
            if pair is not None:
                self._in_sets[number_in(each.key)] = replicas_in(pair.key, pair.value)
        elif each.key.startswith(keys.shards):
            self._claims.pop(number_in(each.key), None)
            if pair is not None:
                claim = decoded(pair.key, pair.value, Copies)
                self._claims[number_in(each.key)] = claim, pair.mod_revision

    def _replicas_of(self, shard: int) -> int:
        return self._in_sets[shard].count if shard in self._in_sets else self._replicas

    def _members(self) -> set[int]:
        return {node for claim, _ in self._claims.values() for node in claim.members}

    def taken(self) -> set[int]:
        """Return the shards of other nodes that this node has, or is to have, a copy of."""
        return {shard for shard, (claim, _) in self._claims.items() if _is_seat(self._node, claim)}

    def wanted(self, now: float = 0.0) -> list[Wanted]:
        """Return the shards that this node is to take a copy of."""
        missing, replacing = [], {}
        for shard, (claim, revision) in sorted(self._claims.items()):
            record = self._records.get(shard)
            if record is None:
                continue
            lost = self._lost(claim, record, now)
            if self._node not in self._next(shard, claim, len(lost)):
                continue
            # A claim never gets shorter: half of its members must have all before a confirm.
            spare = max(0, len(claim.members) + 1 - self._replicas_of(shard))
            gone = sorted(node for node in claim.members if node in lost - {claim.leader})[:spare]
            stay = [node for node in claim.members if node not in gone]
            wanted = Wanted(shard, claim, revision, [*stay, self._node], sorted(lost))
            if lost:
                replacing[shard] = wanted
            else:
                missing.append(wanted)
        if self._replacing not in replacing and not self._is_behind(self._replacing):
            self._replacing = min(replacing, default=None)
        return [*missing, *(each for each in replacing.values() if each.shard == self._replacing)]

    def _is_behind(self, shard: int | None) -> bool:
        """Return whether this node has a seat of a shard, and is not in sync yet."""
        if shard is None or shard not in self.taken() or shard not in self._records:
            return False
        return self._names.get(self._node) not in self._records[shard].in_sync

    def _lost(self, claim: Copies, record: Record, now: float) -> set[int]:
        """Return the members that are to be replaced."""
        alive = {self._names.get(node) for node in self._alive}
        if record.leader not in alive:
            return set()
        return {
            node
            for node in claim.members
            if node not in self._alive
            and self._is_lost(node, now)
            and set(record.in_sync) <= {name for n, name in self._names.items() if n != node}
        }

    def _is_lost(self, node: int, now: float) -> bool:
        if node not in self._names:
            return True
        since = self._away_since.get(node, now)
        return 0 < self._replace_after_s <= now - since

    def _next(self, shard: int, claim: Copies, lost: int) -> list[int]:
        """Return the nodes that are to take a copy of a shard."""
        missing = max(0, self._replicas_of(shard) - len(claim.members) + lost)
        others = sorted(
            self._alive.difference(claim.members),
            key=lambda node: (node - claim.leader) % NODES_MAX,
        )
        first = shard % len(others) if others else 0
        return [*others[first:], *others[:first]][:missing]


def _record_of(pair: Pair) -> Record:
    try:
        return msgspec.json.decode(pair.value, type=Record)
    except (*BAD_JSON, RecordError) as error:
        raise BadRecord(f"{pair.key}: {error}") from None


def _forgotten_of(pair: Pair) -> Forgotten:
    try:
        return msgspec.json.decode(pair.value, type=Forgotten)
    except BAD_JSON as error:
        raise BadRecord(f"{pair.key}: no forgotten node: {error}") from None


def _origin_of(pair: Pair) -> Origin:
    try:
        return msgspec.json.decode(pair.value, type=Origin)
    except BAD_JSON as error:
        raise BadRecord(f"{pair.key}: no snapshot: {error}") from None


def member_of(key: str, value: bytes) -> Member:
    """Return the record of a member. Raises BadRecord."""
    try:
        return msgspec.json.decode(value, type=Member)
    except BAD_JSON as error:
        raise BadRecord(f"{key}: no member: {error}") from None
