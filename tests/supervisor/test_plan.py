"""What is started for given settings and cores."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmq.supervisor.config import FrontDoors, Settings, Shards, Tls, Tracing
from shardmq.supervisor.plan import (
    STAGES,
    ClusterPlan,
    Listening,
    SeatPlan,
    children,
    copies_refused,
    replicas_wanted,
    shard_count,
)


def listening(doors: int) -> Listening:
    return Listening(tuple((10 + at,) for at in range(doors)), (5,), (6,), "127.0.0.1:15672")


@given(st.integers(1, 64), st.integers(1, 8))
def test_there_is_a_shard_for_each_core_and_a_front_door_for_each_socket(
    cores: int, doors: int
) -> None:
    settings = Settings(front_doors=FrontDoors(count=doors))
    plans = children(settings, cores, "/run/x", "b", listening(doors))
    kinds = [plan.kind for plan in plans]
    assert kinds == ["controller"] + ["shard"] * cores + ["front-door"] * doors
    assert sorted(kinds, key=STAGES.index) == kinds
    assert len({plan.name for plan in plans}) == len(plans)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_given_number_of_shards_does_not_depend_on_cores(cores: int, count: int) -> None:
    assert shard_count(Settings(shards=Shards(count=count)), cores) == count


def test_each_front_door_is_told_its_own_socket_and_the_controller_those_for_operators() -> None:
    plans = children(Settings(front_doors=FrontDoors(count=2)), 1, "/run/x", "b", listening(2))
    doors = [plan for plan in plans if plan.kind == "front-door"]
    assert [(door.section["listen_fds"], door.fds) for door in doors] == [
        ([10], (10,)),
        ([11], (11,)),
    ]
    assert plans[0].fds == (5, 6)


def test_a_certificate_brings_a_tls_socket_for_each_front_door_and_one_for_operators() -> None:
    sockets = Listening(
        ((10,), (11,)), (5,), (6,), "127.0.0.1:15672", amqps_fds=((20,), (21,)), https_fds=(7,)
    )
    settings = Settings(front_doors=FrontDoors(count=2), tls=Tls(cert="c.pem"))
    controller, _, *doors = children(settings, 1, "/run/x", "b", sockets)
    assert [
        (door.section["listen_fds"], door.section["tls_listen_fds"], door.fds) for door in doors
    ] == [
        ([10], [20], (10, 20)),
        ([11], [21], (11, 21)),
    ]
    assert controller.fds == (5, 7, 6) and controller.section["https_fds"] == (7,)
    assert all(plan.section["tls"]["cert"] == "c.pem" for plan in (controller, *doors))
    assert children(Settings(), 1, "/run/x", "b", listening(1))[0].section["tls"] is None


def test_every_child_is_told_where_to_read_its_section_which_is_not_on_its_command_line() -> None:
    for plan in children(Settings(), 2, "/run/x", "b", listening(1)):
        assert plan.arguments(7)[-2:] == ["--config", "fd:7"]
        assert plan.section["runtime_dir"] == "/run/x" and plan.section["log_level"] == "info"
        assert not any("/run/x" in argument for argument in plan.arguments(7))


def test_without_front_doors_of_their_own_each_shard_is_one() -> None:
    settings = Settings(front_doors=FrontDoors(count=0))
    _, *shards = children(settings, 2, "/run/x", "b", listening(2))
    assert [(plan.name, plan.front_door, plan.fds) for plan in shards] == [
        ("shard-0", 0, (10,)),
        ("shard-1", 1, (11,)),
    ]
    for number, plan in enumerate(shards):
        assert plan.module == "shardmq.combined"
        assert plan.section["shard"]["shard"] == plan.section["front_door"]["door"] == number
        assert plan.section["front_door"]["doors"] == 2


def test_the_controller_alone_is_told_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmq.supervisor.config._has_module", lambda name: True)
    tracing = Tracing(enabled=True, endpoint="http://h", headers="a=b", sample_ratio=0.5)
    controller, *others = children(Settings(tracing=tracing), 1, "/run", "b", listening(1))
    told = {"endpoint": "http://h", "headers": "a=b", "service_name": ""}
    assert controller.section["tracing"] == told
    assert [each.section.get("tracing_ratio") for each in others] == [None, 0.5]
    assert all("tracing" not in each.section for each in others)
    controller, *others = children(Settings(), 1, "/run", "b", listening(1))
    assert controller.section["tracing"] is None
    assert [each.section.get("tracing_ratio") for each in others] == [None, None]


@pytest.mark.parametrize("doors", [0, 2])
def test_in_a_cluster_shards_and_front_doors_have_numbers_of_the_cluster(doors: int) -> None:
    keys = {"public": "p", "secret": "s", "silent_s": 9.0}
    cluster = ClusterPlan(3, (5, 8), (20, 21), keys, node_timeout_s=9)
    settings = Settings(front_doors=FrontDoors(count=doors))
    controller, *others = children(settings, 2, "/run", "b", listening(2), cluster)
    assert controller.section["own_shards"] == (5, 8)
    assert controller.section["session_keys"] == keys
    shards = [each for each in others if each.kind == "shard"]
    assert [each.name for each in shards] == ["shard-5", "shard-8"]
    sections = [each.section if doors else each.section["shard"] for each in shards]
    assert [each["session_fd"] for each in sections] == [20, 21]
    assert all(fd in each.fds for fd, each in zip((20, 21), shards, strict=True))
    assert all(each["session_keys"] == keys for each in sections)
    found = [each.section if doors else each.section["front_door"] for each in others[-2:]]
    assert [(each["door"], each["shards"]) for each in found] == [(768, (5, 8)), (769, (5, 8))]
    assert all(each["session_keys"] == keys and each["node_timeout_s"] == 9 for each in found)


def test_without_a_cluster_nobody_has_keys_or_a_socket_for_other_nodes() -> None:
    for each in children(Settings(), 2, "/run", "b", listening(1)):
        assert each.section.get("session_keys") is None and "session_fd" not in each.section


def test_a_shard_with_copies_has_a_process_on_each_node_and_its_home_alone_begins_it() -> None:
    seats = (SeatPlan(5, 30), SeatPlan(9, 31, 32))
    copies = {"cluster": "tea"}
    cluster = ClusterPlan(3, (5, 8), (20, 21), {"public": "p"}, seats=seats, copies=copies)
    plans = children(Settings(data_dir="/d"), 2, "/run", "b", listening(1), cluster)
    own, plain, other = (plan for plan in plans if plan.kind == "shard")
    assert own.section["copies"] == {"cluster": "tea", "fd": 30, "founds": True}
    assert (own.section["data_dir"], own.fds, own.needed) == ("/d", (20, 30), True)
    assert "copies" not in plain.section
    assert other.section["copies"] == {"cluster": "tea", "fd": 31, "founds": False}
    assert (other.section["data_dir"], other.fds, other.needed) == ("/d/copies", (32, 31), False)
    assert (other.name, other.section["session_fd"]) == ("shard-9", 32)


def test_copies_need_syncs_and_front_doors_of_their_own() -> None:
    assert copies_refused(Settings()) == ""
    assert "shards.durability" in copies_refused(Settings(shards=Shards(durability="page-cache")))
    assert "front_doors.count" in copies_refused(Settings(front_doors=FrontDoors(count=0)))


@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        ({}, 3),
        ({"cluster": {"replicas": 1}}, 1),
        ({"cluster": {"replicas": 2}}, 2),
        ({"shards": {"durability": "page-cache"}}, 1),
        ({"front_doors": {"count": 0}}, 1),
        ({"shards": {"durability": "page-cache"}, "cluster": {"replicas": 2}}, 2),  # is refused
    ],
)
def test_shards_have_three_copies_where_the_settings_allow_them(
    settings: dict[str, object], replicas: int
) -> None:
    assert replicas_wanted(msgspec.convert(settings, Settings)) == replicas
