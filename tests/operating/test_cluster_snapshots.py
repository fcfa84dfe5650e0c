"""A snapshot of a cluster has each shard once, by its leader, or there is none."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.nodes import cluster_snapshots, snapshot_parts
from shardmq.broker.controller.nodes.cluster_snapshots import ClusterSnapshots, Lead, divided
from shardmq.broker.controller.nodes.snapshot_parts import (
    PartElsewhere,
    PartHere,
    PartOfNode,
    make_part,
)
from shardmq.broker.controller.snapshots import Snapshots
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.snapshot_directory import INCOMPLETE, NoSnapshot
from shardmq.broker.controller.stored.snapshot_part import OwnPart, folder_of
from shardmq.broker.model.changes import QueuePut, VhostPut
from shardmq.cluster.membership import Part, Place, write_place
from shardmq.shardd.wire import messages as wire
from shardmq.supervisor.merging import NotMerged, merge
from tests.definitions.test_log import write
from tests.support.catalogs import state

NODES = {"h1": 0, "h2": 1, "h3": 2}


def read_place(directory: Path) -> Place:
    return msgspec.json.decode((directory / "cluster.json").read_bytes(), type=Place)


class Nodes:
    """Three nodes that lead a shard each, with disks of their own, or with one for all.

    own: the first, whose controller leads. `lead` may change while the shards are asked.
    """

    own = "h1"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lead = {shard: Lead(f"h{shard + 1}", 7) for shard in range(3)}
        self.down: list[str] = []
        self.is_deposed = False
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.servers: list[asyncio.Server] = []
        self.parts: dict[str, OwnPart] = {}
        for name, number in NODES.items():
            data = self.data(name)
            data.mkdir()
            (data / "VERSION").write_text('{"version": 1, "shards": [9]}\n')
            write_place(data, Place("tea", name, f"identity of {name}", number, [number]))

    def data(self, node: str) -> Path:
        return self.root / f"data-{node}"

    def alive(self) -> dict[str, int]:
        return {name: number for name, number in NODES.items() if name not in self.down}

    def away(self) -> list[str]:
        return self.down

    async def leads(self) -> dict[int, Lead]:
        return dict(self.lead)

    async def assure(self) -> None:
        if self.is_deposed:
            raise NoSnapshot("another node leads")

    async def part(self, node: str) -> PartOfNode:
        part = self.parts[node] = OwnPart(str(self.data(node)), "tea", node, NODES[node])
        if node == self.own:
            return PartHere(part)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.writers[node] = writer
            ended = self.ended[node] = asyncio.Event()
            await make_part(reader, writer, part)
            ended.set()

        path = str(self.root / f"{node}.sock")
        self.servers.append(await asyncio.start_unix_server(serve, path))
        return PartElsewhere(*await asyncio.open_unix_connection(path))


class Shards:
    """The shards at their nodes: `answers` say something else than that all is done."""

    def __init__(self) -> None:
        self.answers: dict[int, wire.Message | None] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.asked: list[str] = []
        self.unanswered: list[asyncio.Future[Any]] = []

    def request(self, shard: int, message: Callable[[int], Any], wait_s: float) -> Any:
        asked = message(1)
        self.asked.append(asked.directory)
        Path(asked.directory).mkdir()
        (Path(asked.directory) / "msgs.1").write_text(f"of shard {shard}")
        self.meanwhile()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer = self.answers.get(shard, wire.Done(1))
        if answer is not None:
            reply.set_result(answer)
        else:
            self.unanswered.append(reply)
        return reply


class World:
    def __init__(self, root: Path) -> None:
        self.nodes, self.shards = Nodes(root), Shards()
        self.definitions = Definitions(self.nodes.data("h1"), "boot")
        self.catalog = self.definitions.load()
        puts = [VhostPut("/"), QueuePut("/", "q", self.definitions.new_queue_id(), 1)]
        write(self.definitions, self.catalog, puts)
        self.definitions.complete()
        self.snapshots = Snapshots(
            str(self.nodes.data("h1")),
            self.catalog,
            self.definitions,
            self.shards,  # type: ignore[arg-type] # a fake
            dict,
        )
        self.snapshots.cluster = ClusterSnapshots(self.nodes)


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    made = World(tmp_path)
    yield made
    for server in made.nodes.servers:
        server.close()
    made.definitions.close()


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*") if not path.name.endswith(".sock"))


DATA = [f"data-{name}" for name in NODES]


async def test_each_node_has_its_shards_and_all_definitions(world: World, tmp_path: Path) -> None:
    target = tmp_path / "monday"
    world.nodes.lead[3] = Lead("h2", 0)
    made = await world.snapshots.make(target)
    assert made["parts"] == {"h1": [0], "h2": [1, 3], "h3": [2]} and made["nodes_away"] == []
    assert left(target) == ["h1", "h2", "h3"] and left(tmp_path) == [*DATA, "monday"]
    for name, shards in made["parts"].items():
        part = target / name
        assert state(Definitions(part, "another boot").load()) == state(world.catalog)
        place = read_place(part)
        assert (place.cluster, place.node, place.number) == ("tea", name, NODES[name])
        assert place.shards == shards
        assert place.identity != f"identity of {name}", "it cannot take the place of the node"
        assert place.origin is not None and place.origin.snapshot == made["snapshot"]
        assert place.origin.parts == {
            "h1": Part(0, {0: 7}), "h2": Part(1, {1: 7, 3: 0}), "h3": Part(2, {2: 7}),
        }  # fmt: skip
        version = msgspec.json.decode((part / "VERSION").read_bytes())
        assert version == {"version": 1, "shards": shards}
        for shard in shards:
            assert (part / f"shard-{shard:02d}" / "msgs.1").read_text() == f"of shard {shard}"


async def test_a_node_that_is_down_has_no_part_if_others_lead(world: World, tmp_path: Path) -> None:
    world.nodes.down = ["h3"]
    with pytest.raises(NoSnapshot, match="shard 2: its node h3 is away"):
        await world.snapshots.make(tmp_path / "monday")
    world.nodes.lead[2] = Lead("h1", 8)
    made = await world.snapshots.make(tmp_path / "monday")
    assert made["parts"] == {"h1": [0, 2], "h2": [1]} and made["nodes_away"] == ["h3"]


async def test_a_leader_without_its_lease_makes_no_snapshot(world: World, tmp_path: Path) -> None:
    world.nodes.down, world.nodes.lead = [world.nodes.own], {1: Lead("h2", 7), 2: Lead("h3", 7)}
    with pytest.raises(NoSnapshot, match="this node is not among those that are alive"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


async def test_a_lead_that_moves_meanwhile_makes_all_begin_anew(
    world: World, tmp_path: Path
) -> None:
    def move() -> None:
        world.shards.meanwhile = lambda: None
        world.nodes.lead[1] = Lead("h3", 8)

    world.shards.meanwhile = move
    made = await world.snapshots.make(tmp_path / "monday")
    assert made["parts"] == {"h1": [0], "h2": [], "h3": [1, 2]}
    assert len(world.shards.asked) == 6


async def test_leads_that_move_all_the_time_give_no_snapshot(world: World, tmp_path: Path) -> None:
    def move() -> None:
        world.nodes.lead[1] = Lead("h2", world.nodes.lead[1].term + 1)

    world.shards.meanwhile = move
    with pytest.raises(NoSnapshot, match="shard 1 is led by h2 since, in another term: try again"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


@pytest.mark.parametrize("shard", [0, 2])
async def test_a_shard_that_refuses_leaves_nothing_at_any_node(
    world: World, tmp_path: Path, shard: int
) -> None:
    world.shards.answers[shard] = wire.Refused(1, 541, "No space left on device")
    with pytest.raises(NoSnapshot, match=f"shard {shard}: No space left on device"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA
    world.shards.answers.clear()
    await world.snapshots.make(tmp_path / "monday")


async def test_definitions_of_a_controller_that_leads_no_more_are_no_snapshot(
    world: World, tmp_path: Path
) -> None:
    world.nodes.is_deposed = True
    with pytest.raises(NoSnapshot, match="another node leads"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


async def test_a_node_that_goes_away_meanwhile_is_named(world: World, tmp_path: Path) -> None:
    world.shards.answers[2] = None
    world.shards.meanwhile = lambda: world.nodes.writers["h3"].close()
    with pytest.raises(NoSnapshot, match="shard 2: its node h3 is away"):
        await world.snapshots.make(tmp_path / "monday")
    await world.nodes.ended["h3"].wait()  # it removes its part by itself
    assert left(tmp_path) == DATA


async def test_a_node_that_hangs_is_not_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams are open, and its lease in etcd has ended."""
    monkeypatch.setattr(cluster_snapshots, "LOOK_S", 0.001)
    world.shards.answers[2] = None
    world.shards.meanwhile = lambda: world.nodes.down.append("h3")
    with pytest.raises(NoSnapshot, match="shard 2: its node h3 is away"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA
    assert [reply.cancelled() for reply in world.shards.unanswered] == [True]


async def test_a_disk_without_room_for_the_definitions_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(handle: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_parts, "_write", write)
    with pytest.raises(NoSnapshot, match="h2: No space left on device"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


async def test_a_disk_that_is_full_at_the_end_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OwnPart.finish

    def finish(part: OwnPart, origin: Any) -> None:
        if part is world.nodes.parts["h3"]:
            raise OSError(28, "No space left on device", "monday/h3/VERSION")
        plain(part, origin)

    monkeypatch.setattr(OwnPart, "finish", finish)
    with pytest.raises(NoSnapshot, match="h3: monday/h3/VERSION: No space left on device"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


async def test_a_part_that_gets_no_name_takes_the_others_with_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = OwnPart.give_name

    def give_name(part: OwnPart) -> None:
        if part is world.nodes.parts["h2"]:
            raise OSError(5, "Input/output error", "monday/h2")
        plain(part)

    monkeypatch.setattr(OwnPart, "give_name", give_name)
    with pytest.raises(NoSnapshot, match="h2: monday/h2: Input/output error"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


@pytest.mark.parametrize("there", ["mine", f"h2{INCOMPLETE}"])
async def test_a_directory_with_something_in_it_is_left_alone(
    world: World, tmp_path: Path, there: str
) -> None:
    (tmp_path / "monday").mkdir()
    (tmp_path / "monday" / there).mkdir()
    why = "is not empty" if there == "mine" else "of a snapshot that was cut off: remove it"
    with pytest.raises(NoSnapshot, match=f"h1: .*{why}"):
        await world.snapshots.make(tmp_path / "monday")
    assert world.shards.asked == [] and left(tmp_path / "monday") == [there]


async def test_a_part_without_one_of_its_shards_is_refused(world: World, tmp_path: Path) -> None:
    def lose() -> None:
        for path in (tmp_path / "monday").glob("h2*/shard-01"):
            path.rename(path.with_name("shard-07"))

    world.shards.meanwhile = lose
    with pytest.raises(NoSnapshot, match=r"h2: the part has the shards \[7\], and not \[1\]"):
        await world.snapshots.make(tmp_path / "monday")
    assert left(tmp_path) == DATA


def test_a_leader_must_be_alive() -> None:
    assert divided({}, {"h1": 0}) == {"h1": Part(0, {})}
    with pytest.raises(NoSnapshot, match="away"):
        divided({0: Lead("h2", 1)}, {"h1": 0})


def test_names_of_nodes_that_are_paths_are_not_used() -> None:
    assert folder_of("shardmq@h1", 3) == "shardmq@h1"
    for name in ("../x", "a/b", ".", "", "a\nb", "-" * 300):
        assert folder_of(name, 3) == "node-3"


async def test_parts_are_merged_for_one_host(world: World, tmp_path: Path) -> None:
    made = await world.snapshots.make(tmp_path / "monday")
    assert merge(tmp_path / "monday", tmp_path / "one").snapshot == made["snapshot"]
    one = tmp_path / "one"
    assert state(Definitions(one, "another boot").load()) == state(world.catalog)
    assert msgspec.json.decode((one / "VERSION").read_bytes())["shards"] == [0, 1, 2]
    assert not (one / "cluster.json").exists()
    for shard in range(3):
        file = one / f"shard-{shard:02d}" / "msgs.1"
        assert file.read_text() == f"of shard {shard}" and file.stat().st_nlink == 1
    with pytest.raises(NotMerged, match="is there already"):
        merge(tmp_path / "monday", one)


async def test_parts_that_do_not_belong_together_are_not_merged(
    world: World, tmp_path: Path
) -> None:
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    await world.snapshots.make(monday)
    await world.snapshots.make(tuesday)

    def refused(why: str) -> None:
        with pytest.raises(NotMerged, match=why):
            merge(monday, tmp_path / "one")
        assert left(tmp_path) == [*DATA, "monday", "tuesday"]

    (monday / "h3").rename(tmp_path / "kept.sock")
    refused("no part of the node h3: copy it from its host")
    shutil.copytree(tuesday / "h3", monday / "h3")
    refused("parts of several snapshots")
    shutil.rmtree(monday / "h3")
    shutil.copytree(monday / "h2", monday / "again")
    refused("are of the same node")
    shutil.rmtree(monday / "again")
    (tmp_path / "kept.sock").rename(monday / "h3")
    (monday / "h3" / "shard-02.copy").touch()
    refused("a broker was started on it")
    (monday / "h3" / "shard-02.copy").unlink()
    shutil.rmtree(monday / "h3" / "shard-02")
    refused("shard-02 is missing")
    (monday / "h3" / "cluster.json").write_text("{")
    refused("cluster.json")
    for name in ("h1", "h2", "h3"):
        (monday / name / "cluster.json").unlink()
    refused("no part of one")
