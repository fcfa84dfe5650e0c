"""Which version two releases use, or why they cannot work together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardmq.broker.controller.stored import definitions, records
from shardmq.broker.controller.stored.definitions import LOG_NAME, Definitions, stored_format
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model.changes import VhostPut
from shardmq.cluster.versions import (
    CATALOG,
    WIRE,
    Range,
    Versions,
    disagreement,
    highest_common,
    own_versions,
)
from shardmq.shardd.wire import session
from shardmq.shardd.wire.messages import WIRE_VERSION
from tests.support.real_broker import SOURCE


@pytest.mark.parametrize(
    ("ranges", "common"),
    [
        ([(1, 1)], 1),
        ([(1, 3), (2, 5)], 3),
        ([(2, 5), (1, 3)], 3),
        ([(1, 3), (3, 3), (2, 4)], 3),
        ([(1, 2), (3, 4)], None),
        ([(1, 5), (1, 2), (3, 4)], None),
    ],
)
def test_the_highest_version_of_all_ranges(
    ranges: list[tuple[int, int]], common: int | None
) -> None:
    assert highest_common(Range(*each) for each in ranges) == common


def test_the_first_kind_without_a_common_version_is_named() -> None:
    one = Versions(streams=Range(1, 2), wire=Range(2, 2), catalog=Range(1, 1))
    assert disagreement("a", one, "b", one) == ""
    assert disagreement("a", one, "b", replace(one, streams=Range(2, 3))) == ""
    assert disagreement("a", one, "b", replace(one, wire=Range(3, 4))) == (
        "a understands version 2 of the messages to shards and front doors, b versions 3 to 4"
    )
    assert disagreement("a", one, "b", replace(one, streams=Range(3, 4), wire=Range(3, 4))) == (
        "a understands versions 1 to 2 of the streams between nodes, b versions 3 to 4"
    )


def test_the_numbers_of_this_release_are_the_same_everywhere() -> None:
    """The compiled modules have the wire version in a file of their own."""
    text = (SOURCE / "shardd" / "wire" / "buffer.pxd").read_text()
    found = re.search(r"WIRE_VERSION = (\d+)", text)
    assert found is not None
    assert WIRE.most == WIRE_VERSION == int(found[1])
    assert own_versions() == Versions(streams=Range(1, 1), wire=Range(2, 2), catalog=Range(1, 1))


def test_a_message_of_a_session_has_its_version() -> None:
    message = bytes(range(40))
    assert session.at_version(message, 1) is message
    assert session.at_version(message, 7) == b"\0\7" + message[2:]


# -- definitions ---------------------------------------------------------------------------------


def stored(directory: Path, format: int) -> None:
    """Start and end as a controller that writes this format."""
    made = Definitions(directory, "boot", format=format)
    catalog = made.load()
    if "/" not in catalog.vhosts:
        made.add(VhostPut("/"), catalog)
        catalog.apply(VhostPut("/"))
        made.flush()
        job = made.sync_job(catalog)
        assert job is not None
        job()
        made.complete()
    assert "/" in catalog.vhosts
    made.close()


def test_definitions_are_written_in_the_version_that_all_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_format(tmp_path) is None
    with monkeypatch.context() as later:
        later.setattr(records, "CATALOG", Range(CATALOG.least, CATALOG.most + 1))
        stored(tmp_path, CATALOG.most)
        assert stored_format(tmp_path) == CATALOG.most
        stored(tmp_path, CATALOG.most + 1)
        assert stored_format(tmp_path) == CATALOG.most + 1
        stored(tmp_path, CATALOG.most)  # a node of this release came back into the set
        assert stored_format(tmp_path) == CATALOG.most
        stored(tmp_path, CATALOG.most + 1)
    with pytest.raises(DefinitionsError, match="format 2, this broker reads 1$"):
        Definitions(tmp_path, "boot").load()
    with pytest.raises(DefinitionsError, match="not a definitions log"):
        (tmp_path / LOG_NAME).write_bytes(b"short")
        stored_format(tmp_path)


def test_without_room_the_log_keeps_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CATALOG", Range(1, 2))
    stored(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(definitions.room.GrowingLog, "replace", full)
        stored(tmp_path, 2)
    assert stored_format(tmp_path) == 1
