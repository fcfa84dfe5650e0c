"""The catalog outlives the controller, and no queue id is used twice.

The log may be cut anywhere, and the next controller may be of the same boot or another.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.peers.method_frames import decode_method, encode_method
from shardmq.broker.controller.stored.definitions import DEAD_RECORDS_MAX, Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ARRIVED,
    CHOSEN,
    PASSING,
    AnyChange,
    BindingPut,
    ExchangePut,
    Moving,
    ParameterPut,
    PermissionPut,
    QueueDelete,
    QueuePut,
    TopicPermissionPut,
    UserPut,
    VhostDelete,
    VhostPut,
)
from tests.support.catalogs import state
from tests.support.changes import any_change, bindings, definition


def write(definitions: Definitions, catalog: Catalog, changes: list[AnyChange]) -> None:
    for change in changes:
        definitions.add(change, catalog)
        catalog.apply(change)
    definitions.flush()
    job = definitions.sync_job(catalog)
    if job is not None:
        job()


def opened(directory: Path, boot: str = "boot") -> tuple[Definitions, Catalog]:
    definitions = Definitions(directory, boot)
    return definitions, definitions.load()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(any_change(), max_size=8), max_size=6))
def test_a_restart_in_the_same_boot_gives_everything_back(batches: list[list[AnyChange]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        definitions, catalog = opened(Path(name))
        write(definitions, catalog, [VhostPut("/")])
        for batch in batches:
            write(definitions, catalog, batch)
        definitions.close()
        again, copy = opened(Path(name))
        again.close()
        assert state(copy) == state(catalog)
        assert copy.version > catalog.version


@settings(deadline=None, max_examples=60)
@given(st.lists(definition(), max_size=30))
def test_another_boot_keeps_exactly_what_is_durable(history: list[AnyChange]) -> None:
    with tempfile.TemporaryDirectory() as name:
        definitions, catalog = opened(Path(name))
        write(definitions, catalog, [VhostPut("/"), *history])
        definitions.close()
        again, copy = opened(Path(name), "another")
        again.close()
        expected = Catalog()
        for change in catalog.changes():
            lasting = not isinstance(change, QueuePut | ExchangePut) or change.durable
            if lasting and not (isinstance(change, QueuePut) and change.owner):
                expected.apply(change)
        assert state(copy) == state(expected)


def test_a_log_torn_at_any_byte_keeps_what_was_whole_before(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/")])
    start = (tmp_path / "definitions.amqp").stat().st_size
    ends, states = [start], [state(catalog)]
    changes: list[AnyChange] = [
        ExchangePut("/", "e", "topic", arguments={"alternate-exchange": "f"}),
        QueuePut("/", "q", 1, 1),
        QueuePut("/", "moved", 7, 0, moving=Moving(6, 1, PASSING)),
        QueuePut("/", "arrived", 9, 0, moving=Moving(8, 1, ARRIVED), born=5),
        BindingPut("/", "e", "queue", "q", "a.#", {"x": 1}),
        QueueDelete("/", "q"),
    ]
    for change in changes:
        write(definitions, catalog, [change])
        ends.append((tmp_path / "definitions.amqp").stat().st_size)
        states.append(state(catalog))
    definitions.close()
    whole = (tmp_path / "definitions.amqp").read_bytes()
    for cut in range(start, len(whole) + 1):
        (tmp_path / "definitions.amqp").write_bytes(whole[:cut])
        again, copy = opened(tmp_path)
        again.close()
        assert state(copy) == states[sum(end <= cut for end in ends) - 1]


def test_zeros_behind_the_end_of_the_log_are_cut_off(tmp_path: Path) -> None:
    """A power cut may leave the new size of a file without its new bytes."""
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/"), QueuePut("/", "a", 1, 0)])
    definitions.close()
    with (tmp_path / "definitions.amqp").open("ab") as file:
        file.write(bytes(5000))
    again, copy = opened(tmp_path)
    again.close()
    assert state(copy) == state(catalog)


def test_a_broken_byte_cuts_the_log_there_and_keeps_the_rest_beside_it(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/"), QueuePut("/", "a", 1, 0)])
    end = (tmp_path / "definitions.amqp").stat().st_size
    write(definitions, catalog, [QueuePut("/", "b", 2, 0)])
    definitions.close()
    data = bytearray((tmp_path / "definitions.amqp").read_bytes())
    data[end + 20] ^= 1
    (tmp_path / "definitions.amqp").write_bytes(data)
    again, copy = opened(tmp_path)
    again.close()
    assert set(copy.vhosts["/"].queues) == {"a"}
    assert (tmp_path / "definitions.amqp.cut").read_bytes() == bytes(data[end:])


def test_a_broken_record_with_whole_ones_behind_it_is_no_crash_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/")])
    end = (tmp_path / "definitions.amqp").stat().st_size
    write(definitions, catalog, [QueuePut("/", "a", 1, 0)])
    write(definitions, catalog, [QueuePut("/", "b", 2, 0)])
    definitions.close()
    data = bytearray((tmp_path / "definitions.amqp").read_bytes())
    data[end + 20] ^= 1
    (tmp_path / "definitions.amqp").write_bytes(data)
    with pytest.raises(DefinitionsError, match=f"bytes {end} to .* are broken"):
        opened(tmp_path)
    assert (tmp_path / "definitions.amqp").read_bytes() == bytes(data)


def test_a_missing_log_beside_other_definitions_is_refused(tmp_path: Path) -> None:
    """Begun anew, every queue would be unknown and its messages let go."""
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/"), QueuePut("/", "a", 1, 0)])
    definitions.close()
    (tmp_path / "definitions.amqp").unlink()
    with pytest.raises(DefinitionsError, match="is missing"):
        opened(tmp_path)


def test_messages_without_any_definitions_are_not_taken_for_a_first_start(tmp_path: Path) -> None:
    store = tmp_path / "shard-00" / "ab"
    store.mkdir(parents=True)
    (store / "msgs.0000000001").write_bytes(b"x")
    config = ControllerConfig(
        data_dir=str(tmp_path), runtime_dir=str(tmp_path), boot="b", shards=1, doors=1
    )
    with pytest.raises(DefinitionsError, match="has no definitions"):
        load_or_begin(Definitions(tmp_path, "b"), config)


def test_stored_patterns_that_are_refused_match_nothing_and_are_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    definitions, catalog = opened(tmp_path)
    evil, definition = "(?!x)(a+)+$", {"max-length": 1}
    write(
        definitions,
        catalog,
        [
            VhostPut("/"),
            UserPut("u", "", "", []),
            PermissionPut("/", "u", "^a", evil, ""),
            TopicPermissionPut("/", "u", "amq.topic", "(" + "a" * 300, "^{username}"),
            ParameterPut("/", "policy", "p", {"pattern": evil, "definition": definition}),
            QueuePut("/", "a", 1, 0),
        ],
    )
    definitions.close()
    config = ControllerConfig(
        data_dir=str(tmp_path), runtime_dir=str(tmp_path), boot="b", shards=1, doors=1
    )
    with caplog.at_level(logging.WARNING):
        catalog = load_or_begin(Definitions(tmp_path, "b"), config)
    for thing in (
        "permission of user 'u' in vhost '/': '(?!x)(a+)+$'",
        "policy 'p' in vhost '/': '(?!x)(a+)+$'",
    ):
        assert f"{thing} matches nothing: it may take too long, and RE2" in caplog.text
    topic = f"topic permission of user 'u' in vhost '/': '({'a' * 199}...' matches nothing: missing"
    assert topic in caplog.text
    assert "^a" not in caplog.text
    assert not catalog.permissions.may("u", "/", "write", "a")
    assert catalog.permissions.may("u", "/", "configure", "a")
    assert not catalog.permissions.may_topic("u", "/", "write", "amq.topic", "a")
    queue = catalog.queue("/", "a")
    assert queue is not None
    assert catalog.queue_arguments(queue) == {}


def test_a_queue_id_is_never_given_twice(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/")])
    write(definitions, catalog, [QueuePut("/", "q", definitions.new_queue_id(), 0)])
    write(definitions, catalog, [QueueDelete("/", "q")])
    definitions.close()
    for boot in ("boot", "another", "another"):
        again, _ = opened(tmp_path, boot)
        again.close()
    assert again.new_queue_id() == 2


@pytest.mark.parametrize("boot", ["boot", "another"])
def test_neither_id_of_a_queue_that_moves_is_given_to_another(tmp_path: Path, boot: str) -> None:
    """The new life of a queue has an id before the queue itself has it (CHOSEN)."""
    definitions, catalog = opened(tmp_path)
    old, new = definitions.new_queue_id(), definitions.new_queue_id()
    moving = QueuePut("/", "q", old, 0, moving=Moving(new, 1, CHOSEN))
    write(definitions, catalog, [VhostPut("/"), QueuePut("/", "q", old, 0), moving])
    definitions.close()
    again, _ = opened(tmp_path, boot)
    again.close()
    assert again.new_queue_id() not in (old, new)


def test_a_vhost_made_anew_is_empty_after_a_restart(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("v"), QueuePut("v", "q", 1, 0)])
    write(definitions, catalog, [VhostDelete("v"), VhostPut("v")])
    definitions.close()
    again, copy = opened(tmp_path)
    again.close()
    assert not copy.vhosts["v"].queues


def test_the_log_does_not_grow_with_what_was_deleted(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [VhostPut("/")])
    for round in range(3):
        churn: list[AnyChange] = []
        for id in range(DEAD_RECORDS_MAX // 2 + 1):
            churn += [QueuePut("/", "q", round * 10_000 + id, 0), QueueDelete("/", "q")]
        write(definitions, catalog, churn)
    definitions.close()
    assert (tmp_path / "definitions.amqp").stat().st_size < 4096


def test_a_json_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "users.json").write_text('[{"name": "u", "pasword_hash": ""}]')
    with pytest.raises(DefinitionsError, match=r"users\.json.*pasword_hash"):
        Definitions(tmp_path, "boot").load()


def test_users_are_readable_json(tmp_path: Path) -> None:
    definitions, catalog = opened(tmp_path)
    write(definitions, catalog, [UserPut("u", "", tags=["administrator"])])
    definitions.close()
    assert '"name": "u"' in (tmp_path / "users.json").read_text()


@settings(deadline=None, max_examples=60)
@given(st.lists(definition(), max_size=20), st.lists(bindings(), max_size=20))
def test_bindings_noted_together_are_in_the_log_as_those_noted_one_by_one(
    things: list[AnyChange], bound: list[AnyChange]
) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        logs = []
        for name in (one, many):
            definitions, catalog = opened(Path(name))
            write(definitions, catalog, [VhostPut("/"), *things])
            if name == one:
                write(definitions, catalog, bound)
            else:
                definitions.add_bindings(bound, catalog)  # type: ignore[arg-type]
                catalog.put_bindings(bound)  # type: ignore[arg-type]
                write(definitions, catalog, [])
            definitions.close()
            logs.append((Path(name) / "definitions.amqp").read_bytes())
        assert logs[0] == logs[1]


@given(definition())
def test_frames_are_amqp_and_come_back_as_they_were(change: AnyChange) -> None:
    frame = encode_method(change)  # type: ignore[arg-type]  # definition() makes only these
    consumed, channel, _ = pamqp.frame.unmarshal(frame)
    assert (consumed, channel) == (len(frame), 0)
    beside: tuple[Any, ...] = (0, 0, "", None, None, 0)
    if isinstance(change, QueuePut):
        beside = (
            change.id, change.shard, change.owner, change.part, change.moving, change.born
        )  # fmt: skip
    assert decode_method(frame, change.vhost, *beside) == change  # type: ignore[union-attr]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1)
        | st.floats(allow_nan=False) | st.text()
        | st.binary(),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=20), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_arguments_of_every_type_come_back_as_they_were(value: object) -> None:
    put = QueuePut("/", "q", 1, 2, arguments={"x-any": value})
    back = decode_method(encode_method(put), "/", 1, 2, "")
    assert back == put
    assert isinstance(back, QueuePut)
    assert type(back.arguments["x-any"]) is type(value)
