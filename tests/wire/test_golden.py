"""The bytes of every message are those of its WIRE_VERSION.

Processes of two releases must not misread each other.

A change that breaks this test needs a new WIRE_VERSION and new golden bytes, unless the present
version has never been released: then it needs new golden bytes only (tests/wire/samples.py writes
them).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from shardmq.broker.shared.control import AnyControl
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as wire
from tests.wire.samples import CONTROL, binary, golden

FILE = Path(__file__).parent / "golden" / f"v{wire.WIRE_VERSION}.json"
GOLDEN: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
TO_DO = (
    f"The bytes are not those of tests/wire/golden/{FILE.name}. If version {wire.WIRE_VERSION} is "
    "released (see CHANGELOG.md), raise WIRE_VERSION in shardd/wire/messages.py and "
    "shardd/wire/buffer.pxd. Then write the bytes: "
    "python -m tests.wire.samples > tests/wire/golden/vN.json, where N is the version."
)


@pytest.mark.parametrize("what", CONTROL, ids=lambda what: type(what).__name__)
def test_control_messages_keep_their_bytes(what: wire.Control) -> None:
    message = envelope.control(1, 2, 3, 4, what)
    assert message.hex() == GOLDEN.get(type(what).__name__), TO_DO
    assert envelope.read_control(message) == what


@pytest.mark.parametrize("name", list(binary()))
def test_binary_messages_keep_their_bytes(name: str) -> None:
    assert binary()[name].hex() == GOLDEN.get(name), TO_DO


def test_every_control_message_has_golden_bytes() -> None:
    assert {type(what) for what in CONTROL} == set(get_args(wire.Control)), (
        "add a sample to tests/wire/samples.py"
    )


def test_messages_between_front_doors_and_the_controller_keep_their_fields() -> None:
    names = [f"stream {kind.__name__}" for kind in get_args(AnyControl)]
    assert [name for name in GOLDEN if name.startswith("stream ")] == names, TO_DO
    assert {name: GOLDEN[name] for name in names} == {name: golden()[name] for name in names}, TO_DO
