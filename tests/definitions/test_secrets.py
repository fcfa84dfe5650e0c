"""Secrets of parameters are encrypted in files where there is a key, and plain in memory.

Without a key the files are as ever. A secret that no key decrypts stays what it is.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmq.broker.controller.config import ControllerConfig, Secrets
from shardmq.broker.controller.loading import load_or_begin
from shardmq.broker.controller.management.resources.definitions import definitions as exported
from shardmq.broker.controller.stored import imported, key_ring
from shardmq.broker.controller.stored.definitions import Definitions, unread_secrets
from shardmq.broker.controller.stored.key_ring import KeyRing
from shardmq.broker.controller.stored.room import ReplacedFile
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import AnyChange, ParameterDelete, ParameterPut, VhostPut
from shardmq.broker.model.federation import UPSTREAM, UPSTREAM_SET, Source
from shardmq.broker.model.shovels import SHOVEL, obstacle
from shardmq.broker.shared.config import ConfigError
from tests.definitions.test_log import write
from tests.support.catalogs import state

ONE, TWO, THREE = (Fernet.generate_key().decode() for _ in range(3))
PASSWORD = "hunter2"
URI = f"amqp://u:{PASSWORD}@h"
SHOVEL_PUT = ParameterPut(
    "/", SHOVEL, "s",
    {"src-uri": URI, "src-queue": "a", "dest-uri": [URI, f"http://u:{PASSWORD}@h"],
     "dest-queue": "b"},
)  # fmt: skip
PUTS: list[AnyChange] = [
    VhostPut("/"),
    SHOVEL_PUT,
    ParameterPut("/", SHOVEL, "old", {"src-protocol": "amqp10", "src-uri": URI, "dest-uri": URI}),
    ParameterPut("/", UPSTREAM, "u", {"uri": [URI, URI], "prefetch-count": 3}),
    ParameterPut("/", UPSTREAM_SET, "set", [{"upstream": "u"}, {"upstream": "u", "uri": URI}]),
]
NOTHING = KeyRing()


def begun(directory: Path, keys: KeyRing = NOTHING) -> tuple[Definitions, Catalog]:
    """Return what a broker with these keys begins with."""
    definitions = Definitions(directory, "boot", keys=keys)
    config = ControllerConfig(
        data_dir=str(directory), runtime_dir="", boot="boot", shards=1, hashing="sha256"
    )
    return definitions, load_or_begin(definitions, config)


def restarted(directory: Path, keys: KeyRing = NOTHING) -> Catalog:
    definitions, catalog = begun(directory, keys)
    definitions.close()
    return catalog


def with_secrets(directory: Path, keys: KeyRing = NOTHING) -> Catalog:
    definitions, catalog = begun(directory, keys)
    write(definitions, catalog, PUTS)
    definitions.close()
    return catalog


def holders(directory: Path, secret: str = PASSWORD) -> set[str]:
    """Return the files below a directory that have a secret in them."""
    return {
        path.name
        for path in directory.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    }


def parameters(catalog: Catalog) -> dict[Any, ParameterPut]:
    return dict(catalog.parameters)


def tokens(directory: Path) -> list[str]:
    text = (directory / "parameters.json").read_text()
    return [part for part in text.split('"') if part.startswith("encrypted:")]


@pytest.mark.row("J5", "J9")
def test_secrets_are_plain_in_memory_and_encrypted_in_every_file(tmp_path: Path) -> None:
    catalog = with_secrets(tmp_path, KeyRing([ONE]))
    assert catalog.parameters["/", SHOVEL, "s"] == SHOVEL_PUT
    assert holders(tmp_path) == set()
    assert len(tokens(tmp_path)) == 8
    assert state(restarted(tmp_path, KeyRing([ONE]))) == state(catalog)
    rows = json.loads((tmp_path / "parameters.json").read_text())
    (shovel,) = (row for row in rows if row["name"] == "s")
    assert (shovel["value"]["src-queue"], shovel["value"]["dest-queue"]) == ("a", "b")


def test_without_a_key_files_are_as_ever(tmp_path: Path) -> None:
    catalog = with_secrets(tmp_path)
    rows = json.loads((tmp_path / "parameters.json").read_text())
    assert [ParameterPut(**row) for row in rows] == list(catalog.parameters.values())
    assert holders(tmp_path)  # so the search finds what is there


@pytest.mark.parametrize("is_encrypted_before", [False, True])
def test_a_start_with_a_new_first_key_leaves_nothing_of_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_encrypted_before: bool
) -> None:
    caplog.set_level(logging.INFO)
    before = [TWO] if is_encrypted_before else []
    catalog = with_secrets(tmp_path, KeyRing(before))
    old = tokens(tmp_path) if is_encrypted_before else [PASSWORD]
    assert all(holders(tmp_path, each) for each in old)
    assert state(restarted(tmp_path, KeyRing([ONE, *before]))) == state(catalog)
    assert not any(holders(tmp_path, each) for each in (PASSWORD, *old))
    assert "its secrets are encrypted by the first key now" in caplog.text
    caplog.clear()
    content = (tmp_path / "parameters.json").read_bytes()
    assert state(restarted(tmp_path, KeyRing([ONE]))) == state(catalog)
    assert (tmp_path / "parameters.json").read_bytes() == content
    assert not caplog.text


def test_a_crash_before_the_old_content_is_erased_is_made_good_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_secrets(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(ReplacedFile, "erase", lambda self: None)
        restarted(tmp_path, KeyRing([ONE]))
    assert holders(tmp_path) == {"parameters.json.new"}, "the broken variant is found"
    restarted(tmp_path, KeyRing([ONE]))
    assert holders(tmp_path) == set()


def test_what_was_deleted_leaves_nothing(tmp_path: Path) -> None:
    definitions, catalog = begun(tmp_path, KeyRing([ONE]))
    write(definitions, catalog, PUTS)
    old = tokens(tmp_path)
    gone = [ParameterDelete(*key) for key in catalog.parameters if key[1] == SHOVEL]
    write(definitions, catalog, list(gone))
    definitions.close()
    left = tokens(tmp_path)
    assert len(left) == 3 and set(left) < set(old)
    assert not any(holders(tmp_path, each) for each in old if each not in left)


def test_a_secret_is_encrypted_once_and_not_with_every_change(tmp_path: Path) -> None:
    definitions, catalog = begun(tmp_path, KeyRing([ONE]))
    write(definitions, catalog, PUTS)
    before = tokens(tmp_path)
    assert len(set(before)) == 5, "the same URI in two parameters has two tokens"
    write(definitions, catalog, [ParameterPut("/", SHOVEL, "more", SHOVEL_PUT.value)])
    definitions.close()
    assert tokens(tmp_path)[: len(before)] == before


@pytest.mark.parametrize("keys", [[], [TWO], [TWO, THREE]], ids=["no key", "another", "others"])
def test_without_the_key_nothing_is_lost_and_with_the_key_all_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: list[str]
) -> None:
    catalog = with_secrets(tmp_path, KeyRing([ONE]))
    before = tokens(tmp_path)
    definitions, locked = begun(tmp_path, KeyRing(keys))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "no key in secrets.key_file" in lines[0]
    assert "shovel 's' in vhost '/'" in lines[0] and "federation-upstream 'u'" in lines[0]
    value = locked.parameters["/", SHOVEL, "s"].value
    assert value["src-uri"] in before
    assert "no key for it" in obstacle("s", value)
    # What changes meanwhile is kept as the keys of the moment say.
    new = ParameterPut("/", SHOVEL, "new", SHOVEL_PUT.value | {"src-uri": "amqp://x:other@h"})
    write(definitions, locked, [new])
    definitions.close()
    assert set(before) <= set(tokens(tmp_path))
    assert bool(holders(tmp_path, "other")) == (not keys)
    back = restarted(tmp_path, KeyRing([ONE, *keys]))
    assert parameters(back) == parameters(catalog) | {("/", SHOVEL, "new"): new}
    assert holders(tmp_path) == set()


def test_a_node_says_which_secrets_of_its_copy_it_could_not_read(tmp_path: Path) -> None:
    assert unread_secrets(tmp_path, KeyRing([ONE])) == ""
    definitions, catalog = begun(tmp_path, KeyRing([ONE]))
    many = [ParameterPut("/", SHOVEL, f"s{n}", SHOVEL_PUT.value) for n in range(12)]
    write(definitions, catalog, [*PUTS[:1], *many])
    definitions.close()
    assert unread_secrets(tmp_path, KeyRing([TWO, ONE])) == ""
    named = unread_secrets(tmp_path, KeyRing([TWO]))
    assert named.startswith("shovel 's0' in vhost '/', shovel 's1'")
    assert named.endswith("shovel 's9' in vhost '/' and 2 more")
    (tmp_path / "parameters.json").write_bytes(b"[{")
    assert unread_secrets(tmp_path, NOTHING) == "", "the leader sends the rest of it"


def test_encryption_is_given_up_on_purpose(tmp_path: Path) -> None:
    catalog = with_secrets(tmp_path, KeyRing([ONE]))
    assert state(restarted(tmp_path, KeyRing([ONE], encrypts=False))) == state(catalog)
    assert tokens(tmp_path) == []
    assert state(restarted(tmp_path)) == state(catalog)


def test_a_copy_for_a_snapshot_is_encrypted(tmp_path: Path) -> None:
    definitions, catalog = begun(tmp_path / "data", KeyRing([ONE]))
    write(definitions, catalog, PUTS)
    (tmp_path / "copy").mkdir()
    definitions.copy_job(catalog, tmp_path / "copy")()
    definitions.close()
    assert holders(tmp_path) == set()
    assert parameters(restarted(tmp_path / "copy", KeyRing([ONE]))) == parameters(catalog)


@pytest.mark.row("J14")
def test_an_export_without_the_key_is_read_by_an_import_with_the_key(tmp_path: Path) -> None:
    catalog = with_secrets(tmp_path, KeyRing([ONE]))
    document = json.loads(json.dumps(exported(restarted(tmp_path), "x"), default=list))
    assert PASSWORD not in json.dumps(document)
    given = imported.read(json.dumps(document).encode())

    def asks(keys: KeyRing) -> set[Any]:
        stages = imported.stages(given, None, lambda _: ("", ""), keys.decrypted)
        return {str(ask) for stage in stages for ask in stage if isinstance(ask, ParameterPut)}

    assert asks(KeyRing([ONE])) >= {str(put) for put in catalog.parameters.values()}
    assert not any(PASSWORD in ask for ask in asks(KeyRing([TWO])))


def test_room_is_looked_for_as_the_file_takes_it(tmp_path: Path) -> None:
    definitions, catalog = begun(tmp_path, KeyRing([ONE]))
    write(definitions, catalog, PUTS[:1])
    before = (tmp_path / "parameters.json").stat().st_size
    assert definitions.lacks_room([SHOVEL_PUT]) == ""
    promised = definitions._promised["parameters"]
    write(definitions, catalog, [SHOVEL_PUT])
    definitions.close()
    assert (tmp_path / "parameters.json").stat().st_size - before <= promised


KEYS = st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=3, unique=True)


@dataclass
class Model:
    """A model of a file: the key of each secret, None for a plain one."""

    plain: dict[str, str]
    by: dict[str, str | None]

    def start(self, keys: list[str], *, encrypts: bool) -> None:
        for name, key in self.by.items():
            if keys and (key is None or key in keys):
                self.by[name] = keys[0] if encrypts else None

    def readable(self, keys: list[str]) -> dict[str, str | None]:
        return {
            name: text if self.by[name] is None or self.by[name] in keys else None
            for name, text in self.plain.items()
        }


@settings(deadline=None, max_examples=8)
@given(st.lists(st.tuples(KEYS, st.booleans(), st.sampled_from("abc")), max_size=6))
def test_random_histories_of_keys_lose_nothing(history: list[tuple[list[str], bool, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, model = Path(name), Model({}, {})
        for number, (keys, encrypts, changed) in enumerate(history):
            definitions, catalog = begun(directory, KeyRing(keys, encrypts=encrypts))
            model.start(keys, encrypts=encrypts)
            text = f"amqp://u:p{number}@h"
            put = ParameterPut("/", SHOVEL, changed, SHOVEL_PUT.value | {"src-uri": text})
            write(definitions, catalog, [put])
            model.plain[changed] = text
            model.by[changed] = keys[0] if keys and encrypts else None
            definitions.close()
            for left, text in model.plain.items():
                is_plain = bool(holders(directory, text))
                # What a broker without keys wrote, a broker without keys does not erase.
                assert is_plain or model.by[left] is not None
                assert not is_plain or model.by[left] is None
        for keys in ([ONE, TWO, THREE], [TWO], []):
            catalog = Definitions(Path(name), "boot", keys=KeyRing(keys)).read()
            found = {
                put.name: None if put.value["src-uri"].startswith("encrypted:")
                else put.value["src-uri"]
                for put in catalog.parameters.values() if put.component == SHOVEL
            }  # fmt: skip
            assert found == model.readable(keys)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "no key in it"),
        (b"\n# a comment\n", "no key in it"),
        (b"swordfish\n", "line 1: that is no key"),
        (f"{ONE}\n{ONE[:-4]}\n".encode(), "line 2: that is no key"),
        (b"\xff\xfe\n", "line 1: that is no key"),
        (f"{ONE}\n".encode() * (key_ring.KEYS_MAX + 1), "it may have 100"),
        (b"#" * (key_ring.FILE_BYTES_MAX + 1), "more than 65536 bytes"),
    ],
    ids=["none", "empty", "comment", "word", "cut", "bytes", "many", "long"],
)
def test_a_bad_file_of_keys_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        key_ring.key_ring(str(path))
    assert str(raised.value).startswith(f"secrets.key_file: {path}") and why in str(raised.value)
    assert "swordfish" not in str(raised.value)


def test_a_file_of_keys_that_everybody_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# rotated in May\n{ONE}\n\n {TWO}\n")
    path.chmod(0o640)
    assert key_ring.keys_in(path) == [ONE, TWO]
    assert key_ring.key_ring(str(path)).encrypts and not caplog.text
    path.chmod(0o644)
    assert not key_ring.key_ring(str(path), encrypts=False).encrypts
    assert "chmod 600" in caplog.text
    assert not key_ring.key_ring("")


def test_links_of_an_upstream_that_cannot_be_read_have_a_reason() -> None:
    sealed = KeyRing([ONE]).sealed(ParameterPut("/", UPSTREAM, "u", {"uri": [URI, URI]}))
    source = Source(upstream="u", policy="p", uris=sealed.value["uri"], consumer_tag="")
    assert "no key for it" in source.obstacle
    assert Source(upstream="u", policy="p", uris=[URI], consumer_tag="").obstacle == ""


def test_the_settings_of_the_controller_have_no_keys_by_default() -> None:
    config = ControllerConfig(data_dir="", runtime_dir="", boot="b", shards=1)
    assert config.secrets == Secrets(key_file="", encrypt=True)
