"""Definitions of a real RabbitMQ come in, and go out again as they were."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.management.resources.definitions import definitions, definitions_of
from shardmq.broker.controller.stored import imported, offline
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model import passwords
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.checks import Refusal
from tests.support.catalogs import state

EXPORT = Path(__file__).with_name("rabbitmq_definitions.json")  # written by RabbitMQ 3.10.8
LISTS = (
    "users", "permissions", "topic_permissions", "parameters", "global_parameters", "policies",
    "queues", "exchanges",
    "bindings",
)  # fmt: skip


def config(directory: Path, file: Path | str) -> ControllerConfig:
    return ControllerConfig(
        data_dir=str(directory),
        runtime_dir=str(directory),
        boot="b",
        shards=2,
        load_definitions=str(file),
    )


def loaded(directory: Path, file: Path | str = EXPORT) -> Catalog:
    kept = Definitions(directory, "b")
    catalog = load_or_begin(kept, config(directory, file))
    kept.close()
    return catalog


def rows(document: dict[str, Any], kind: str) -> set[str]:
    return {json.dumps(row, sort_keys=True) for row in document[kind]}


@pytest.mark.row("G1.28", "J14", "I2", "K10")
def test_what_rabbitmq_exported_comes_back_out_as_it_was(tmp_path: Path) -> None:
    document = json.loads(EXPORT.read_bytes())
    found = _whole(definitions(loaded(tmp_path), str(tmp_path)))
    for kind in LISTS:
        assert rows(found, kind) == rows(document, kind), kind
    assert {vhost["name"] for vhost in found["vhosts"]} == {"/", "orders"}


@pytest.mark.row("J14")
def test_what_was_taken_in_is_there_after_a_restart_without_the_file(tmp_path: Path) -> None:
    before = loaded(tmp_path)
    assert state(loaded(tmp_path, "")) == state(before)


def test_what_of_the_file_has_no_effect_is_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "d.json"
    queue = {"name": "q", "vhost": "/", "arguments": {"x-queue-type": "quorum"}}
    file.write_text(json.dumps({"queues": [queue]}))
    with caplog.at_level(logging.WARNING):
        catalog = loaded(tmp_path / "data", file)
    said = "queue type quorum of queue 'q' in vhost '/' is kept without effect"
    assert f"load_definitions: {said}" in caplog.text
    [listed] = without_effect.sentences(without_effect.things(catalog))  # as the page shows it
    assert listed.startswith(said)


@pytest.mark.row("J14")
def test_taken_in_twice_is_taken_in_once(tmp_path: Path) -> None:
    before = loaded(tmp_path)
    assert state(loaded(tmp_path)) == state(before)
    assert [q.id for q in before.index.all()] == [q.id for q in loaded(tmp_path).index.all()]


@pytest.mark.row("I2", "I3", "I11")
def test_users_of_the_file_log_in_with_their_passwords_and_replace_the_default_one(
    tmp_path: Path,
) -> None:
    catalog = loaded(tmp_path)
    for user, password in (
        ("olga", "olga secret"),
        ("sha512", "long"),
        ("md5", "old"),
        ("guest", "guest"),
    ):
        assert passwords.matches(catalog.users[user], password), user
    assert not passwords.matches(catalog.users["nopass"], "")


@pytest.mark.row("I11")
def test_a_file_without_users_leaves_the_default_one(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text('{"vhosts": [{"name": "v"}]}')
    catalog = loaded(tmp_path / "data", file)
    assert set(catalog.users) == {"guest"} and set(catalog.vhosts) == {"/", "v"}


@pytest.mark.row("J1", "J2", "C3.5")
def test_policies_of_the_file_apply(tmp_path: Path) -> None:
    catalog = loaded(tmp_path)
    queue = catalog.queue("orders", "orders.new")
    assert queue is not None
    assert catalog.queue_arguments(queue) == {
        "x-max-priority": 9,
        "x-message-ttl": 60000,
        "x-max-length": 500,
        "x-expires": 3600000,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "dead",
    }


@pytest.mark.row("G1.28")
def test_one_vhosts_definitions_go_into_another(tmp_path: Path) -> None:
    catalog = loaded(tmp_path)
    out = _whole(definitions_of(catalog.vhosts["orders"], catalog))
    for kind in ("parameters", "policies", "queues", "exchanges", "bindings"):
        assert out[kind] and all("vhost" not in row for row in out[kind])
    asks = [
        ask
        for stage in imported.stages(imported.read(json.dumps(out).encode()), "copy", _never)
        for ask in stage
    ]
    assert {ask.vhost for ask in asks} == {"copy"}  # type: ignore[union-attr]


def _never(password: str) -> tuple[str, str]:
    raise AssertionError("there is no password in it")


BAD: list[tuple[str, str]] = [
    ("{", "failed_to_parse_json"),
    ("[]", "Expected `object`, got `array`"),
    ('{"queues": [{"durable": true}]}', "Object missing required field `name` - at `$.queues[0]`"),
    ('{"queues": [{"name": "q", "durable": 1}]}', "at `$.queues[0].durable`"),
    ('{"queues": [{"name": "q"}]}', "queue 'q': no vhost is named"),
    ('{"users": [{"name": "u"}]}', "tags_not_present (user 'u')"),
    (
        '{"users": [{"name": "u", "tags": "", "password_hash": "!"}]}',
        "password_hash: not base64 (user 'u')",
    ),
    (
        '{"users": [{"name": "u", "tags": "", "hashing_algorithm": "x"}]}',
        "unknown hashing_algorithm 'x' (user 'u')",
    ),
    ('{"queues": [{"name": "q", "vhost": "nov"}]}', "vhost nov not found (nov/q)"),
    ('{"exchanges": [{"name": "e", "vhost": "/", "type": "zz"}]}', "(//e)"),
    (
        '{"policies": [{"vhost": "/", "name": "p", "pattern": "a", "definition": {"zz": 1}}]}',
        'Validation failed\n\n[{<<"zz">>,1}] are not recognised policy settings\n (//p)',
    ),
    (
        '{"parameters": [{"vhost": "/", "component": "no", "name": "p", "value": 1}]}',
        "component no not found",
    ),
]


@pytest.mark.row("J14")
@pytest.mark.parametrize(("text", "reason"), BAD)
def test_a_file_that_cannot_be_taken_in_stops_the_start_and_says_why(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "d.json"
    file.write_text(text)
    with pytest.raises(DefinitionsError) as error:
        loaded(tmp_path / "data", file)
    assert str(error.value).startswith(f"load_definitions: {file}: ")
    assert reason in str(error.value)


def put_at(directory: Path, name: str, document: dict[str, Any]) -> Path:
    file = directory / name
    file.write_text(json.dumps(document))
    return file


def named(name: str, vhost: str = "/") -> dict[str, str]:
    return {"name": name, "vhost": vhost}


HALF_GOOD = {
    "users": [{"name": "olga", "tags": "", "password": "secret"}],
    "vhosts": [{"name": "/"}, {"name": "half"}],
    "queues": [named("q1"), named("q2", "nov")],
}


def test_a_first_start_that_is_refused_midway_keeps_nothing_and_the_next_one_is_a_first_start(
    tmp_path: Path,
) -> None:
    file = put_at(tmp_path, "d.json", HALF_GOOD)
    for _ in range(2):
        with pytest.raises(
            DefinitionsError, match=r"load_definitions: .*d\.json: .*vhost nov not found \(nov/q2\)"
        ):
            loaded(tmp_path / "data", file)
    assert Definitions(tmp_path / "data", "b").is_new
    catalog = loaded(tmp_path / "data", "")
    assert (set(catalog.users), set(catalog.vhosts), list(catalog.index.all())) == (
        {"guest"},
        {"/"},
        [],
    )


def test_a_later_start_that_is_refused_midway_keeps_nothing_of_the_file(tmp_path: Path) -> None:
    before = loaded(tmp_path / "data", "")
    with pytest.raises(DefinitionsError, match="vhost nov not found"):
        loaded(tmp_path / "data", put_at(tmp_path, "d.json", HALF_GOOD))
    assert state(loaded(tmp_path / "data", "")) == state(before)


def full_after(changes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have room for `changes` more requests."""
    left = iter([""] * changes)
    monkeypatch.setattr(
        Definitions,
        "lacks_room",
        lambda *_: next(left, "no room for definitions: the disk is full"),
    )


@pytest.mark.parametrize("taken", range(7))
def test_a_first_start_whose_disk_fills_midway_ends_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    document = HALF_GOOD | {"queues": [named(f"q{i}") for i in range(4)]}
    file = put_at(tmp_path, "d.json", document)
    with monkeypatch.context() as patch:
        full_after(taken, patch)
        with pytest.raises(
            DefinitionsError, match=r"load_definitions: .*d\.json: no room .* \(.+\)"
        ):
            loaded(tmp_path / "data", file)
    assert Definitions(tmp_path / "data", "b").is_new
    catalog = loaded(tmp_path / "data", file)
    assert (set(catalog.users), set(catalog.vhosts)) == ({"olga"}, {"/", "half"})
    assert [queue.name for queue in catalog.index.all()] == ["q0", "q1", "q2", "q3"]


def test_a_later_start_without_room_for_the_file_goes_on_with_what_exists_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = loaded(tmp_path / "data", "")
    full_after(0, monkeypatch)
    file = put_at(tmp_path, "d.json", {"queues": [named("q1")]})
    assert state(loaded(tmp_path / "data", file)) == state(before)
    assert (
        "load_definitions: not taken in to its end: no room for definitions: the disk is full "
        "(//q1)" in caplog.text
    )


def test_an_import_into_a_stopped_broker_without_room_is_refused_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = loaded(tmp_path / "data", "")
    file = put_at(tmp_path, "d.json", {"queues": [named("q1"), named("q2")]})
    with monkeypatch.context() as patch:
        full_after(1, patch)
        assert offline.main(["import", str(tmp_path / "data"), str(file)]) == 2
    assert "no room for definitions: the disk is full (//q2)" in capsys.readouterr().err
    assert state(loaded(tmp_path / "data", "")) == state(before)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(DefinitionsError, match="No such file"):
        loaded(tmp_path / "data", tmp_path / "absent.json")


def test_what_is_there_stays_and_what_cannot_be_bound_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text(
        json.dumps(
            {
                "queues": [{"name": "orders.dead", "vhost": "orders", "durable": False}],
                "exchanges": [
                    {"name": "events", "vhost": "orders", "type": "fanout"},
                    {"name": "amq.topic", "vhost": "orders", "type": "topic"},
                ],
                "bindings": [
                    {
                        "source": "no",
                        "vhost": "orders",
                        "destination": "q",
                        "destination_type": "queue",
                    }
                ],
            }
        )
    )
    before = loaded(tmp_path / "data")
    assert state(loaded(tmp_path / "data", file)) == state(before)


@pytest.mark.parametrize("tags", ["a, b", ["a", " b"]])
def test_tags_come_as_text_or_list_and_passwords_in_clear_are_hashed(tags: Any) -> None:
    document = imported.read(
        json.dumps({"users": [{"name": "u", "password": "p", "tags": tags}]}).encode()
    )
    (user,) = imported.stages(document, None, lambda password: ("aGFzaA==", passwords.SCRYPT))[0]
    assert user == imported.UserPut("u", "aGFzaA==", passwords.SCRYPT, ["a", "b"])


def test_limits_come_with_users_and_vhosts() -> None:
    text = (
        b'{"users": [{"name": "u", "tags": "", "limits": {"max-channels": 3}}], "vhosts": '
        b'[{"name": "v", "limits": '
    )
    document = imported.read(text + b'[{"name": "max-queues", "value": 7}]}]}')
    asks = [ask for stage in imported.stages(document, None, _never) for ask in stage]
    assert imported.ParameterPut("", "user-limits", "u", {"max-channels": 3}) in asks
    assert imported.ParameterPut("v", "vhost-limits", "limits", {"max-queues": 7}) in asks


def test_refusals_are_of_status_400() -> None:
    with pytest.raises(Refusal) as refused:
        imported.read(b"\xff")
    assert refused.value.code == 400


def _whole(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a list in place of each iterator."""
    return {
        name: list(part) if isinstance(part, Iterator) else part for name, part in document.items()
    }
