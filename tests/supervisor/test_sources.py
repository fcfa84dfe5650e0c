"""Flags win over the environment, the environment over the file; a wrong value has its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmq.supervisor.__main__ import settings_from
from shardmq.supervisor.child import _environment
from shardmq.supervisor.config import ConfigError, Settings, kinds
from shardmq.supervisor.reload import flat
from shardmq.supervisor.sources import (
    FILE,
    OTHERS,
    Effective,
    from_environment,
    is_setting,
    mistaken_login,
    read,
    variables,
)

ROOT = Path(__file__).parents[2]
DOCUMENTED = ROOT / "deploy" / "broker.toml"


def effective(environment: Mapping[str, str], text: str = "", folder: Path | None = None) -> Any:
    """Return the settings by path that this file and these variables give."""
    path = None
    if folder is not None:
        path = folder / "broker.toml"
        path.write_text(text)
    return flat(read(path, from_environment(environment)).settings)


def refusal(environment: Mapping[str, str]) -> str:
    with pytest.raises(ConfigError) as raised:
        read(None, from_environment(environment))
    return str(raised.value)


def test_each_setting_has_one_variable_and_the_names_do_not_meet() -> None:
    names = list(variables())
    assert set(variables().values()) == set(flat(Settings())) == set(kinds())
    assert {
        "SHARDMQ_LISTEN_AMQP_PORT": "listen.amqp_port",
        "SHARDMQ_FRONT_DOORS_COUNT": "front_doors.count",
        "SHARDMQ_USERS_DEFAULT_USER": "users.default_user",
        "SHARDMQ_USERS_DEFAULT_PASS": "users.default_pass",
        "SHARDMQ_DATA_DIR": "data_dir",
    }.items() <= variables().items()
    assert not OTHERS & set(names)
    assert not {name + FILE for name in names} & set(names)


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("SHARDMQ_LISTEN_AMQP_PORT", "5673", "listen.amqp_port", 5673),
        ("SHARDMQ_USERS_DEFAULT_PASS", "12345", "users.default_pass", "12345"),
        ("SHARDMQ_SHARDS_COUNT", "3", "shards.count", 3),
        ("SHARDMQ_SHARDS_COUNT", "auto", "shards.count", "auto"),
        ("SHARDMQ_SHARDS_SEGMENT_BYTES", "4_194_304", "shards.segment_bytes", 4 << 20),
        ("SHARDMQ_MEMORY_HIGH_WATERMARK", "0.5", "memory.high_watermark", 0.5),
        ("SHARDMQ_MEMORY_HIGH_WATERMARK", "1", "memory.high_watermark", 1.0),
        ("SHARDMQ_TLS_FAIL_IF_NO_PEER_CERT", "true", "tls.fail_if_no_peer_cert", True),
        ("SHARDMQ_USERS_HTTP_WITHOUT_TLS", "Yes", "users.http_without_tls", True),
        ("SHARDMQ_USERS_HTTP_WITHOUT_TLS", "0", "users.http_without_tls", False),
        ("SHARDMQ_READER_ENABLED", "false", "reader.enabled", False),
        ("SHARDMQ_READER_ENABLED", "auto", "reader.enabled", "auto"),
        ("SHARDMQ_LISTEN_BIND", "*", "listen.bind", "*"),
        ("SHARDMQ_LISTEN_BIND", "192.0.2.1, ::1", "listen.bind", ["192.0.2.1", "::1"]),
        ("SHARDMQ_LISTEN_HTTP_HOSTS", "mq.example.org", "listen.http_hosts", ["mq.example.org"]),
        ("SHARDMQ_LISTEN_HTTP_HOSTS", '["a", "b"]', "listen.http_hosts", ["a", "b"]),
        ("SHARDMQ_LISTEN_HTTP_HOSTS", "", "listen.http_hosts", []),
        ("SHARDMQ_LISTEN_TLS_BIND", "", "listen.tls_bind", ""),
        ("SHARDMQ_TLS_MIN_VERSION", "1.3", "tls.min_version", "1.3"),
    ],
)
def test_a_variable_has_the_value_that_the_file_would_have(
    variable: str, text: str, key: str, value: object
) -> None:
    assert effective({variable: text}) == flat(Settings()) | {key: value}


def test_host_names_with_certificates_of_their_own_are_a_list_of_tables() -> None:
    sni = '[{ host = "*.example.org", cert = "c" }]'
    found = effective({"SHARDMQ_TLS_CERT": "c", "SHARDMQ_TLS_SNI": sni})
    assert found["tls.sni"] == [{"host": "*.example.org", "cert": "c", "key": ""}]


@pytest.mark.row("N6")
def test_flags_win_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('log_level = "debug"\n[listen]\namqp_port = 1\nhttp_port = 1\nbind = "::1"\n')
    monkeypatch.setenv("SHARDMQ_LISTEN_AMQP_PORT", "2")
    monkeypatch.setenv("SHARDMQ_LISTEN_HTTP_PORT", "2")
    monkeypatch.setenv("SHARDMQ_SHARDS_COUNT", "2")
    flags = ["--config", str(path), "--amqp-port", "3", "--front-doors", "0", "--bind", "a,b"]
    found = settings_from(flags, {"log_level": "error"})
    expected = {
        "listen.amqp_port": (3, "--amqp-port"),
        "listen.http_port": (2, "SHARDMQ_LISTEN_HTTP_PORT"),
        "listen.metrics_port": (15692, "default"),
        "listen.bind": (["a", "b"], "--bind"),
        "front_doors.count": (0, "--front-doors"),
        "shards.count": (2, "SHARDMQ_SHARDS_COUNT"),
        "log_level": ("error", "shardctl"),
    }
    assert {key: (flat(found.settings)[key], found.sources[key]) for key in expected} == expected
    assert set(found.sources) == set(kinds())
    monkeypatch.delenv("SHARDMQ_LISTEN_HTTP_PORT")
    again = settings_from(["--config", str(path)])
    assert (again.settings.listen.http_port, again.sources["listen.http_port"]) == (1, "file")


def test_a_secret_comes_from_a_file_without_the_end_of_its_line(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret, with a comma\n")
    found = effective({"SHARDMQ_USERS_DEFAULT_PASS_FILE": str(secret)})
    assert found["users.default_pass"] == "s3cret, with a comma"
    secret.write_text("another")  # a reload reads it again
    found = effective({"SHARDMQ_USERS_DEFAULT_PASS_FILE": str(secret)})
    assert found["users.default_pass"] == "another"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"SHARDMQ_LISTEN_AMPQ_PORT": "5673"},
            "SHARDMQ_LISTEN_AMPQ_PORT: there is no such setting;"
            " did you mean SHARDMQ_LISTEN_AMQP_PORT?",
        ),
        (
            {"SHARDMQ_PASWORD": "x", "SHARDMQ_ZZZ": "x"},
            "SHARDMQ_PASWORD: there is no such setting; did you mean SHARDMQ_PASSWORD?"
            " SHARDMQ_ZZZ: there is no such setting",
        ),
        (  # only what is secret is read from a file; this one is the path of a file already
            {"SHARDMQ_TLS_CERT_FILE": "/x"},
            "SHARDMQ_TLS_CERT_FILE: there is no such setting; did you mean SHARDMQ_TLS_CERT?",
        ),
        (
            {"SHARDMQ_SHARDS_COUNT": "65"},
            "shards.count: expected auto or a whole number from 1 to 64, got 65"
            " (SHARDMQ_SHARDS_COUNT)",
        ),
        (
            {"SHARDMQ_LISTEN_AMQP_PORT": "tcp://10.0.0.1:5672"},
            "listen.amqp_port: expected a whole number from 0 to 65535, got 'tcp://10.0.0.1:5672'"
            " (SHARDMQ_LISTEN_AMQP_PORT)",
        ),
        (
            {"SHARDMQ_MEMORY_HIGH_WATERMARK": "nan"},
            "memory.high_watermark: expected a number from 0 to 1, got nan"
            " (SHARDMQ_MEMORY_HIGH_WATERMARK)",
        ),
        (
            {"SHARDMQ_USERS_HTTP_WITHOUT_TLS": "maybe"},
            "users.http_without_tls: expected true or false, got 'maybe'"
            " (SHARDMQ_USERS_HTTP_WITHOUT_TLS)",
        ),
        (
            {"SHARDMQ_LOG_LEVEL": "loud"},
            "log_level: expected debug or error or info or warning, got 'loud' (SHARDMQ_LOG_LEVEL)",
        ),
        (
            {"SHARDMQ_TLS_KEY": "k", "SHARDMQ_TLS_CA": "a"},
            "tls: there is no cert (SHARDMQ_TLS_CA, SHARDMQ_TLS_KEY)",
        ),
        (
            {"SHARDMQ_USERS_DEFAULT_PASS": ""},
            "users.default_pass: expected a text that is not empty (SHARDMQ_USERS_DEFAULT_PASS)",
        ),
        (
            {"SHARDMQ_USERS_DEFAULT_PASS": "x", "SHARDMQ_USERS_DEFAULT_PASS_FILE": "/x"},
            "SHARDMQ_USERS_DEFAULT_PASS_FILE: SHARDMQ_USERS_DEFAULT_PASS is there, too",
        ),
        (
            {"SHARDMQ_USERS_DEFAULT_PASS_FILE": "/nonexistent"},
            "SHARDMQ_USERS_DEFAULT_PASS_FILE: /nonexistent: No such file or directory",
        ),
    ],
)
def test_a_wrong_variable_is_named_in_one_line(environment: dict[str, str], says: str) -> None:
    assert refusal(environment) == says


def test_variables_of_others_are_no_settings() -> None:
    others = {
        "SHARDMQ_URL": "http://x", "SHARDMQ_USER": "a", "SHARDMQ_PASSWORD": "b",
        "SHARDMQ_PASSWORD_FILE": "/run/secrets/password",
        "SHARDMQ_FASTPATH": "0", "SHARDMQ_TEST_COMBINED": "1", "SHARDMQ_NOTIFY_FD": "3",
        "SHARDMQ_LIFELINE_FD": "4", "SHARDMQ_SERVICE_HOST": "10.0.0.1",
        "SHARDMQ_SERVICE_PORT": "5672", "SHARDMQ_SERVICE_PORT_AMQP": "5672",
        "SHARDMQ_PORT": "tcp://10.0.0.1:5672", "SHARDMQ_PORT_5672_TCP": "tcp://10.0.0.1:5672",
        "SHARDMQ_PORT_5672_TCP_ADDR": "10.0.0.1", "SHARDMQ_PORT_5672_TCP_PROTO": "tcp",
        "SHARDMQ_HEADLESS_SERVICE_HOST": "10.0.0.1",
        "SHARDMQ_HEADLESS_PORT": "tcp://10.0.0.1:5672", "PATH": "/bin", "shardmq_x": "1",
    }  # fmt: skip
    assert from_environment(others) == {}


@pytest.mark.parametrize(
    ("environment", "begin"),
    [
        ({}, ""),
        ({"SHARDMQ_URL": "http://x"}, ""),
        ({"SHARDMQ_USER": "", "SHARDMQ_PASSWORD": ""}, ""),
        ({"SHARDMQ_USER": "admin"}, "SHARDMQ_USER is for shardctl only; "),
        (
            {"SHARDMQ_USER": "admin", "SHARDMQ_PASSWORD": "x"},
            "SHARDMQ_USER and SHARDMQ_PASSWORD are for shardctl only; ",
        ),
        ({"SHARDMQ_PASSWORD_FILE": "/x"}, "SHARDMQ_PASSWORD_FILE is for shardctl only; "),
        ({"SHARDMQ_USER": "a", "SHARDMQ_USERS_DEFAULT_USER": "b"}, ""),
        ({"SHARDMQ_PASSWORD": "a", "SHARDMQ_USERS_DEFAULT_USER_FILE": __file__}, ""),
    ],
)
def test_a_login_of_shardctl_is_not_taken_for_the_first_user_in_silence(
    environment: dict[str, str], begin: str
) -> None:
    warning = mistaken_login(environment, read(None, from_environment(environment)).sources)
    assert warning.startswith(begin) and bool(warning) == bool(begin)
    assert ("SHARDMQ_USERS_DEFAULT_USER" in warning) == bool(begin)


def test_variables_of_shardctl_and_of_the_connector_do_not_stop_a_start() -> None:
    named = {
        name
        for folder in (ROOT / "supervisor" / "cli", ROOT / "pyspark_shardmq")
        for path in folder.rglob("*.py")
        for name in re.findall(r"\bSHARDMQ_[A-Z_]+\b", path.read_text())
    }
    assert {"SHARDMQ_URL", "SHARDMQ_USER", "SHARDMQ_PASSWORD", "SHARDMQ_DATA_DIR"} <= named
    assert [name for name in sorted(named) if name not in OTHERS and not is_setting(name)] == []


def test_a_child_gets_no_settings_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USERS_DEFAULT_PASS", "USERS_DEFAULT_PASS_FILE", "LISTEN_BIND", "FASTPATH"):
        monkeypatch.setenv(f"SHARDMQ_{name}", "0")
    found = _environment(3, 4)
    assert {name: found[name] for name in found if name.startswith("SHARDMQ_")} == {
        "SHARDMQ_FASTPATH": "0",
        "SHARDMQ_NOTIFY_FD": "3",
        "SHARDMQ_LIFELINE_FD": "4",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "# a comment\n[listen]\namqp_prot = 1",
            "listen.amqp_prot: there is no such key; did you mean listen.amqp_port? (FILE, line 3)",
        ),
        (
            "[listen]\n\n[listn]\nbind = '*'",
            "listn: there is no such key; did you mean listen? (FILE, line 3)",
        ),
        (
            "default_user = 'a'",
            "default_user: there is no such key; did you mean users.default_user? (FILE, line 1)",
        ),
        ("colour = 1", "colour: there is no such key (FILE, line 1)"),
        (
            "[listen]\nbind = [\n  '::1',\n]\nhttp_hosts = [\n 'a',\n 3,\n]",
            "listen.http_hosts[1]: expected a text that is not empty, got 3 (FILE, line 5)",
        ),
        (
            '[shards]\ntext = """\n[shards]\ncount = 0"""\ncount = 0',
            "shards.text: there is no such key (FILE, line 2)",
        ),
        (
            "shards = { count = 0 }",
            "shards.count: expected auto or a whole number from 1 to 64, got 0 (FILE, line 1)",
        ),
        (
            "[front_doors]\ncount = true",
            "front_doors.count: expected a whole number from 0 to 256, got true (FILE, line 2)",
        ),
        (
            "[supervision]\ndrain_timeout_s = 0",
            "supervision.drain_timeout_s: expected a number above 0 and up to 86400, got 0"
            " (FILE, line 2)",
        ),
        (
            "[users]\ndefault_pass = 12345",
            "users.default_pass: expected a text that is not empty (FILE, line 2)",
        ),
        ("[listen]\n[tls]\nkey = 'k'", "tls: there is no cert (FILE, line 2)"),
        (
            "[tls]\ncert = 'c'\nsni = [{ host = 'x', crt = 'c' }]",
            "tls.sni[0].crt: there is no such key; did you mean tls.sni[0].cert? (FILE, line 3)",
        ),
        (
            "[shards]\nsegment_bytes = 2e6",
            "shards.segment_bytes: expected a whole number from 1048576 to 268435456, got 2000000.0"
            " (FILE, line 2)",
        ),
        (
            "[listen]\nbind = '*'\nproxy_protocol_from = ['10.0.0.0/33']",
            "listen.proxy_protocol_from: '10.0.0.0/33' does not appear to be an IPv4 or IPv6"
            " network (FILE, line 3)",
        ),
        (
            "[shards]\n[listen]\namqp_port = 1\n\nhttp = 5",
            "listen.http: there is no such key; did you mean listen.http_port? (FILE, line 5)",
        ),
        ("http = 5", "http: expected a table, got 5 (FILE, line 1)"),
    ],
)
def test_a_wrong_key_or_value_has_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert str(raised.value) == says.replace("FILE", str(path))


def test_each_line_of_the_documented_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    lines = DOCUMENTED.read_text().splitlines()
    for number, line in enumerate(lines):
        if not (match := re.match(r"(\w+) = ", line)) or number % 19:
            continue
        changed = [*lines[:number], f"{match[1]}_ = 1", *lines[number + 1 :]]
        path.write_text("\n".join(changed))
        with pytest.raises(ConfigError, match=rf"{match[1]}\?.* \({path}, line {number + 1}\)"):
            read(path)


def test_a_variable_over_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shards: expected a table"):
        effective({"SHARDMQ_SHARDS_COUNT": "2"}, "shards = 3", tmp_path)


def test_the_sources_of_settings_without_a_file_are_defaults() -> None:
    assert read(None) == Effective(Settings(), dict.fromkeys(kinds(), "default"))
