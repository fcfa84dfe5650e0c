"""shardctl: which broker a command is for, and where passwords come from."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardmq.supervisor.cli.app import app
from tests.shardctl.test_cli_commands import ANSWERS, Handler, http, nothing_asked_yet
from tests.support.brokers import Api
from tests.support.real_broker import RealBroker

__all__ = ["http", "nothing_asked_yet"]  # fixtures

Ctl = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder for contexts, and a host without a broker."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config" / "shardmq" / "contexts.json"


@pytest.fixture
def ctl() -> Ctl:
    def run(*words: str, piped: str = "", status: int = 0) -> Result:
        found = CliRunner().invoke(app, words, input=piped)
        assert found.exit_code == status, found.output
        return found

    return run


@pytest.fixture
def url(http: Any) -> str:
    return f"http://127.0.0.1:{http.server_address[1]}"


def login() -> str:
    return base64.b64decode(Handler.logins[-1].partition(" ")[2]).decode()


def test_a_command_goes_to_the_context_that_n_names(ctl: Ctl, url: str) -> None:
    ctl("context", "add", "prod", "--url", url)
    assert ctl("-n", "prod", "ping").output == "Ping succeeded\n"
    assert ctl("ping", "-n", "prod").output == "Ping succeeded\n"
    assert ctl("-n", "prod", "diagnostics", "check_running").output == ""
    assert ctl("-n", "prod", "shards", "status", "still").exit_code == 0
    assert len(Handler.asked) == 4


def test_contexts_are_listed_used_and_removed_and_their_file_is_private(
    ctl: Ctl, url: str, home: Path
) -> None:
    ctl("context", "add", "prod", "--url", url, "--user", "bob", "--password-stdin", piped="pw\n")
    ctl("context", "add", "here", "--data-dir", "data")
    assert home.stat().st_mode & 0o777 == 0o600
    assert home.parent.stat().st_mode & 0o777 == 0o700
    ctl("context", "use", "prod")
    rows = json.loads(ctl("context", "list", "--formatter", "json").output)
    assert [(row["name"], row["user"], row["current"]) for row in rows] == [
        ("here", None, False),
        ("prod", "bob", True),
    ]
    assert "pw" not in ctl("context", "list").output
    ctl("ping")
    assert login() == "bob:pw"
    ctl("context", "remove", "prod")
    left = json.loads(home.read_text())
    assert ([*left["contexts"]], left["current"]) == (["here"], None)


def test_an_unknown_context_names_those_that_exist(ctl: Ctl, url: str) -> None:
    said = ctl("-n", "prod", "ping", status=64).stderr
    assert said == "shardctl: no context 'prod': shardctl context add prod --url URL\n"
    ctl("context", "add", "b", "--url", url)
    ctl("context", "add", "a", "--url", url)
    assert ctl("-n", "prod", "ping", status=64).stderr.endswith("'prod': there are a, b\n")
    assert ctl("context", "use", "prod", status=65).stderr.endswith("there are a, b\n")
    assert ctl("context", "remove", "prod", status=65).stderr.endswith("there are a, b\n")
    assert Handler.asked == []


def test_n_acts_on_no_other_host_than_it_names(ctl: Ctl, url: str) -> None:
    """A node of RabbitMQ on this host is the broker of this host; on another host it is none."""
    said = ctl("-n", "rabbit@elsewhere", "list_queues", status=64).stderr
    assert "node rabbit@elsewhere is not on this host" in said
    ctl("-n", "rabbit@elsewhere", "stop", status=64)
    for node in ("rabbit", "rabbit@localhost", f"rabbit@{socket.gethostname()}"):
        assert ctl("-n", node, "ping", status=69).stderr.startswith("shardctl: no broker")
    assert ctl("-n", "rabbit@elsewhere", "ping", "--url", url).output == "Ping succeeded\n"
    ctl("context", "add", "prod", "--url", url)
    assert "either -n" in ctl("-n", "prod", "ping", "--url", url, status=64).stderr


def test_a_command_for_this_host_does_not_act_on_it_when_the_context_is_elsewhere(
    ctl: Ctl, url: str
) -> None:
    ctl("context", "add", "prod", "--url", url)
    for command in ("stop", "shutdown", "await_startup"):
        assert "-n prod is http://" in ctl("-n", "prod", command, status=64).stderr
    ctl("context", "use", "prod")
    assert "the context in use is http://" in ctl("stop", status=64).stderr
    assert ctl("stop", "--data-dir", "data", status=69).stderr.endswith("no broker runs on data\n")


def test_flags_win_over_n_and_n_over_the_environment_and_that_over_the_context_in_use(
    ctl: Ctl, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl("context", "add", "gone", "--url", "http://127.0.0.1:9")
    ctl("context", "add", "prod", "--url", url)
    ctl("context", "use", "gone")
    assert ctl("ping", "--url", url).exit_code == 0
    assert ctl("ping", "-n", "prod").exit_code == 0
    ctl("ping", status=69)
    monkeypatch.setenv("SHARDMQ_URL", url)
    assert ctl("ping").exit_code == 0
    ctl("ping", "-n", "gone", status=69)
    ctl("context", "use")
    monkeypatch.delenv("SHARDMQ_URL")
    assert "none runs on" in ctl("ping", status=69).stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "x"], "--url or --data-dir"),
        (["add", "x", "--url", "prod:15672"], "--url: not http://"),
        (["add", "x", "--url", "http://u:p@h:1"], "without a login"),
        (["add", "rabbit@x", "--url", "http://h:1"], "not a name"),
        (["add", "x", "--url", "http://h:1", "--password-stdin"], "a password needs --user"),
        (["add", "x", "--url", "http://h:1", "--user", "u", "--password-stdin"], "no password"),
    ],
)
def test_a_context_that_makes_no_sense_is_refused(
    ctl: Ctl, home: Path, words: list[str], says: str
) -> None:
    assert says in ctl("context", *words, status=64).stderr
    assert not home.exists()


def test_a_broken_file_is_named_and_not_replaced(ctl: Ctl, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("{")
    assert str(home) in ctl("context", "add", "x", "--url", "http://h:1", status=2).stderr
    assert home.read_text() == "{"


def test_nobody_there_is_one_line_that_says_how_to_name_a_broker(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmq.supervisor.cli.api.DEFAULT_URL", "http://127.0.0.1:9")
    said = ctl("list_queues", status=69).stderr
    assert said.count("\n") == 1
    assert all(word in said for word in ("--data-dir", "--url", "context", "127.0.0.1:9"))


def test_the_version_needs_no_broker(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmq.supervisor.cli.api.DEFAULT_URL", "http://127.0.0.1:9")
    assert ctl("version").stdout == ctl("--version").stdout.removeprefix("shardctl ")


def test_a_flag_wins_over_the_other_kind_of_place_in_the_environment(
    ctl: Ctl, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDMQ_URL", url)
    assert "no broker runs on data" in ctl("ping", "--data-dir", "data", status=69).stderr
    # The same directory by flag and environment is a flag.
    monkeypatch.setenv("SHARDMQ_DATA_DIR", "data")
    assert "no broker runs on data" in ctl("ping", "--data-dir", "data", status=69).stderr
    assert Handler.asked == []
    assert ctl("ping", "--url", url).exit_code == 0


def test_a_broker_at_a_url_of_the_environment_is_not_stopped_here(
    ctl: Ctl, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDMQ_URL", url)
    for command in ("stop", "shutdown", "await_startup"):
        assert f"SHARDMQ_URL is {url}; for a broker" in ctl(command, status=64).stderr
    assert "no broker runs on data" in ctl("stop", "--data-dir", "data", status=69).stderr


def test_a_start_is_for_no_context_in_use(
    ctl: Ctl, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _path, words, _environment: started.append(words))
    ctl("context", "add", "prod", "--url", url)
    ctl("context", "add", "here", "--data-dir", "/elsewhere")
    for name in ("prod", "here"):
        ctl("context", "use", name)
        ctl("start", "--config", "c.toml")
    monkeypatch.setenv("SHARDMQ_URL", url)
    ctl("start", "--config", "c.toml")
    assert [words[-1] for words in started] == ["--config=c.toml"] * 3
    ctl("start", "-n", "here")
    assert started[-1][-1] == "--data-dir=/elsewhere"
    assert "-n prod is http://" in ctl("-n", "prod", "start", status=64).stderr


def test_a_login_of_the_environment_is_not_sent_to_the_context_that_n_names(
    ctl: Ctl, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl("context", "add", "plain", "--url", url)
    ctl("context", "add", "prod", "--url", url, "--user", "bob", "--password-stdin", piped="pw\n")
    (tmp_path / "secret").write_text("secret\n")
    monkeypatch.setenv("SHARDMQ_USER", "alice")
    for name, value in (("", "secret"), ("_FILE", str(tmp_path / "secret"))):
        monkeypatch.setenv(f"SHARDMQ_PASSWORD{name}", value)
        ctl("-n", "plain", "ping")
        assert login() == "guest:guest"
        ctl("ping", "-n", "prod")
        assert login() == "bob:pw"
        ctl("ping", "-n", "prod", "--user", "eve", "--password", "given")
        assert login() == "eve:given"
        monkeypatch.delenv(f"SHARDMQ_PASSWORD{name}")


def test_a_password_that_is_a_flag_wins_over_the_environment(
    ctl: Ctl, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("from file\n")
    to = ["ping", "--url", url, "--user", "bob"]
    monkeypatch.setenv("SHARDMQ_PASSWORD_FILE", str(tmp_path / "file"))
    ctl(*to, "--password", "flag")
    assert login() == "bob:flag"
    monkeypatch.setenv("SHARDMQ_PASSWORD", "from environment")
    ctl(*to)
    assert login() == "bob:from file"
    monkeypatch.delenv("SHARDMQ_PASSWORD_FILE")
    ctl(*to, "--password-file", str(tmp_path / "file"))
    assert login() == "bob:from file"


def test_a_user_without_a_home_has_no_contexts(
    ctl: Ctl, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    class Closed(type(Path())):  # type: ignore[misc]
        def read_text(self, *_: Any, **__: Any) -> str:
            raise PermissionError(13, "Permission denied")

    def closed() -> Path:
        return Closed("/closed/contexts.json")

    for place in (homeless, closed):
        with monkeypatch.context() as patched:
            patched.setattr("shardmq.supervisor.cli.contexts.path", place)
            assert ctl("ping", "--url", url).exit_code == 0
            ctl("stop", "--data-dir", "data", status=69)
            assert ctl("ping", "-n", "prod", "--url", url, status=2).stderr.count("\n") == 1
            assert ctl("context", "list", status=2).stderr.count("\n") == 1


# -- passwords -----------------------------------------------------------------------------------


def test_the_password_of_a_login_comes_from_a_file_or_the_environment(
    ctl: Ctl, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("from file ü\nanother line\n")
    to = ["ping", "--url", url, "--user", "bob"]
    ctl(*to, "--password-file", str(file))
    assert login() == "bob:from file ü"
    assert "not both" in ctl(*to, "--password", "x", "--password-file", str(file), status=64).stderr
    assert "No such file" in ctl(*to, "--password-file", "nowhere", status=2).stderr
    (tmp_path / "empty").write_text("\n")
    assert (
        "no password in" in ctl(*to, "--password-file", str(tmp_path / "empty"), status=64).stderr
    )
    monkeypatch.setenv("SHARDMQ_PASSWORD", "from environment")
    ctl(*to)
    assert login() == "bob:from environment"


@pytest.mark.parametrize(
    ("command", "path"),
    [(["add_user", "new"], "/api/users/new"), (["change_password", "bob"], "/api/users/bob")],
)
def test_new_passwords_are_read_from_a_pipe(
    ctl: Ctl, url: str, command: list[str], path: str
) -> None:
    assert ctl(*command, "--url", url, piped="pass wörd\n").output == ""
    method, asked, body = Handler.asked[-1]
    assert (method, asked, body["password"]) == ("PUT", path, "pass wörd")
    assert "no password in standard input" in ctl(*command, "--url", url, status=64).stderr


def test_a_password_can_be_checked_and_hashed_from_a_pipe(ctl: Ctl, url: str) -> None:
    assert ctl("authenticate_user", "bob", "--url", url, piped="right\n").output == "Success\n"
    ctl("authenticate_user", "bob", "--url", url, piped="wrong\n", status=65)
    assert len(base64.b64decode(ctl("hash_password", piped="secret\n").output)) == 36


def test_a_context_works_over_amqp_too(
    ctl: Ctl, broker: RealBroker, api: Api, name: str, tmp_path: Path
) -> None:
    (tmp_path / "guest").write_text("guest\n")
    to = ["--url", f"http://{broker.http}", "--user", "guest"]
    ctl("context", "add", "test", *to, "--password-file", str(tmp_path / "guest"))
    ctl("-n", "test", "create_queue", name)
    ctl("-n", "test", "publish", name, "by name")
    assert ctl("-n", "test", "get", name).stdout == "by name"


def test_amqp_goes_to_no_other_broker_than_http(
    ctl: Ctl, url: str, broker: RealBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tunnel to the HTTP API of another host ends here, and another broker has the AMQP port."""
    listener = {"protocol": "amqp", "ip_address": "0.0.0.0", "port": broker.port}
    far = {"cluster_name": "far", "product_version": "1", "listeners": [listener]}
    monkeypatch.setitem(ANSWERS, "/api/overview", far)
    for words in (["publish", "q", "x"], ["get", "q"], ["perf", "--time", "0.1"]):
        said = ctl(*words, "--url", url, "--user", "guest", "--password", "guest", status=69).stderr
        assert said.startswith(f"shardctl: {url} is the broker 'far', and at 127.0.0.1:")
        assert said.count("\n") == 1
