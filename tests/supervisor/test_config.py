"""A wrong setting is named; the documented file says what the program does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from shardmq.supervisor.config import ConfigError, Settings
from shardmq.supervisor.sources import Given, read

DOCUMENTED = Path(__file__).parents[2] / "deploy" / "broker.toml"


@pytest.mark.row("N11")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 1", "colour: there is no such key"),
        ("[shards]\nnumber = 2", "shards.number: there is no such key"),
        (
            "[shards]\ncount = 0",
            "shards.count: expected auto or a whole number from 1 to 64, got 0",
        ),
        (
            '[shards]\ncount = "many"',
            "shards.count: expected auto or a whole number from 1 to 64, got 'many'",
        ),
        (
            "[listen]\namqp_port = 70000",
            "listen.amqp_port: expected a whole number from 0 to 65535, got 70000",
        ),
        (
            '[shards]\ndurability = "maybe"',
            "shards.durability: expected fsync or page-cache, got 'maybe'",
        ),
        ("shards = 3", "shards: expected a table, got 3"),
        ("= 3", "not TOML"),
        ('[tracing]\nendpoint = "h:4318"', "tracing: endpoint must begin with http:// or https://"),
        (
            "[tracing]\nsample_ratio = 1.5",
            "tracing.sample_ratio: expected a number from 0 to 1, got 1.5",
        ),
        ('[tls]\nkey = "k"', "tls: there is no cert"),
        (
            '[tls]\ncert = "c"\nverify = "peer"',
            "tls: verify is peer, but there is no ca to verify by",
        ),
        (
            '[tls]\ncert = "c"\nmin_version = "1.1"',
            "tls.min_version: expected 1.2 or 1.3, got '1.1'",
        ),
        (
            '[tls]\ncert = "c"\nsni = [{ host = "x" }]',
            "tls.sni[0]: object missing required field `cert`",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(path)


def test_tracing_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broker.toml"
    path.write_text("[tracing]\nenabled = true\n")
    monkeypatch.setattr("shardmq.supervisor.config._has_module", lambda name: True)
    assert read(path).settings.tracing.enabled
    monkeypatch.setattr("shardmq.supervisor.config._has_module", lambda name: False)
    text = "OpenTelemetry is not installed where the broker runs: pip install 'shardmq[tracing]'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        read(path)


def test_compression_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[cluster]\nname = "c"\nsecret = "s"\ncompression = "lz4"\n')
    monkeypatch.setattr("shardmq.supervisor.config.is_there", lambda method: method == "lz4")
    assert read(path).settings.cluster.compression == "lz4"
    path.write_text(path.read_text().replace("lz4", "zstd"))
    text = "cluster.compression: zstd is not installed where the broker runs: "
    with pytest.raises(ConfigError, match=re.escape(text + "pip install 'shardmq[compression]'")):
        read(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none.toml"))):
        read(tmp_path / "none.toml")


@pytest.mark.row("N6")
def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text("[listen]\namqp_port = 1234\nhttp_port = 99\n")
    flags = {"listen.amqp_port": Given(0, "--amqp-port"), "shards.count": Given(3, "--shards")}
    settings = read(path, flags).settings
    assert (settings.listen.amqp_port, settings.listen.http_port, settings.shards.count) == (
        0,
        99,
        3,
    )


def test_the_documented_file_gives_every_key_with_its_default() -> None:
    documented = tomllib.loads(DOCUMENTED.read_text())
    assert documented == msgspec.to_builtins(Settings())
    assert read(DOCUMENTED).settings == Settings()  # each default is within its own bounds
