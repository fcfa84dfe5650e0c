"""Find settings in the settings file, in the environment and in the flags of a start.

A flag wins over the environment, the environment over the file, and the file over the defaults.
Each setting has a variable: `SHARDMQ_` and the path of its key in capitals, with `_` for each dot.
`users.default_user` is `SHARDMQ_USERS_DEFAULT_USER`. A variable holds a value as the file has it,
without quotes; a list may be written with commas. A setting that is marked `from_file` in
`config.py` has one variable more, with `_FILE` behind its name, that names a file with the value.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, inspect

from shardmq.supervisor.config import ConfigError, Kind, Settings, checked, kinds
from shardmq.supervisor.nearest import did_you_mean
from shardmq.supervisor.notify import LIFELINE_FD, NOTIFY_FD

PREFIX: Final = "SHARDMQ_"
FILE: Final = "_FILE"
# Variables that are no settings: those of shardctl and of the Spark connector, a switch for tests
# (shardd/wire/short_ways.py), and those that a supervisor gives to its children.
OTHERS: Final = frozenset(
    {
        "SHARDMQ_URL",
        "SHARDMQ_USER",
        "SHARDMQ_PASSWORD",
        "SHARDMQ_PASSWORD_FILE",
        "SHARDMQ_OLD_USER",
        "SHARDMQ_OLD_PASSWORD",
        "SHARDMQ_OLD_PASSWORD_FILE",
        "SHARDMQ_FASTPATH",
        NOTIFY_FD,
        LIFELINE_FD,
    }
)
# The login of shardctl. An operator who gives it to the broker most likely means the first user.
LOGINS: Final = ("SHARDMQ_USER", "SHARDMQ_PASSWORD", "SHARDMQ_PASSWORD_FILE")
FIRST_USER: Final = "users.default_user"
TESTS: Final = "SHARDMQ_TEST_"
# Kubernetes sets such variables in each container beside a service whose name begins with
# `shardmq`: SHARDMQ_SERVICE_HOST, SHARDMQ_SERVICE_PORT_AMQP, SHARDMQ_PORT_5672_TCP_ADDR.
OF_SERVICES: Final = re.compile(
    r"SHARDMQ(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
OF_SERVICE_URLS: Final = re.compile(r"(tcp|udp|sctp)://")  # The value of SHARDMQ_PORT.
BOOLEANS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip


class Given(Struct, frozen=True):
    """A value for a setting, and the name of its source, such as `--amqp-port`."""

    value: Any
    source: str


class Effective(Struct, frozen=True):
    """The settings that hold, and the source of each by the path of its key.

    A source is `default`, `file`, the name of a variable or a flag, or `shardctl`.
    """

    settings: Settings
    sources: dict[str, str]


@functools.cache
def variables() -> dict[str, str]:
    """Return the paths of the keys by the names of their variables."""
    return {PREFIX + key.upper().replace(".", "_"): key for key in kinds()}


def is_setting(variable: str) -> bool:
    """Return whether a variable gives a setting, by its value or by the name of a file."""
    return variable in variables() or variable.removesuffix(FILE) in variables()


def read(path: Path | None, given: Mapping[str, Given] | None = None) -> Effective:
    """Read the settings file and lay given values over it.

    Args:
        path: The TOML file. None means that there is none.
        given: Values by the path of the key, which win over the file.

    Raises:
        ConfigError: The file cannot be read, or a key or value is wrong. The text names the
            source of the value: a line of the file, a variable or a flag.
    """
    given = given or {}
    text, document = "", {}
    try:
        if path is not None:
            text = path.read_text(encoding="utf-8")
            document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    sources = {key: "file" if _has(document, key) else "default" for key in kinds()}
    sources |= {key: each.source for key, each in given.items()}
    try:
        for key, each in given.items():
            _lay(document, key, each.value)
        return Effective(checked(document), sources)
    except ConfigError as error:
        key = error.key.partition("[")[0]
        places = [one.source for name, one in given.items() if f"{name}.".startswith(f"{key}.")]
        if not places or key not in given:
            places += [f"{path}, line {line}"] if (line := _line(text, key)) else []
        raise ConfigError(f"{error} ({', '.join(places)})" if places else str(error), key) from None


def from_environment(environment: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings in the variables `SHARDMQ_...` by the paths of their keys.

    Raises:
        ConfigError: A variable is no setting, names a file that cannot be read, or is there beside
            the one that names a file.
    """
    found: dict[str, Given] = {}
    unknown: list[str] = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in OTHERS or name.startswith(TESTS):
            continue
        value = environment[name]
        if key := variables().get(name):
            found[key] = Given(parsed(value, kinds()[key]), name)
        elif (
            name.endswith(FILE)
            and (key := variables().get(name.removesuffix(FILE)))
            and kinds()[key].from_file
        ):
            if name.removesuffix(FILE) in environment:
                raise ConfigError(f"{name}: {name.removesuffix(FILE)} is there, too", key)
            found[key] = Given(_content(name, Path(value)), name)
        elif not OF_SERVICES.fullmatch(name) and not OF_SERVICE_URLS.match(value):
            unknown.append(name)
    if unknown:
        known = [*variables(), *sorted(OTHERS - {NOTIFY_FD, LIFELINE_FD})]
        texts = [f"{name}: there is no such setting{did_you_mean(name, known)}" for name in unknown]
        raise ConfigError(" ".join(texts))
    return found


def mistaken_login(environment: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """Return a warning if the environment has a login of shardctl and nothing names the first user.

    Args:
        environment: The variables of the process.
        sources: The sources of the settings that hold, as in `Effective`.
    """
    found = [name for name in LOGINS if environment.get(name)]
    if not found or sources[FIRST_USER] != "default":
        return ""
    return (
        f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} for shardctl only; the first "
        "user of the broker is given by SHARDMQ_USERS_DEFAULT_USER and SHARDMQ_USERS_DEFAULT_PASS"
    )


def parsed(text: str, kind: Kind) -> Any:
    """Return the value in the text of a variable or a flag.

    A text that has no value of this kind stays as it is. The check of the settings refuses it.
    """
    if kind.has(inspect.ListType):
        if text.startswith("["):
            return _toml(text, list)
        if "," in text or not kind.has(inspect.StrType):
            return [each for part in text.split(",") if (each := part.strip())]
    if kind.has(inspect.BoolType):
        return BOOLEANS.get(text.lower(), text)
    if kind.has(inspect.IntType, inspect.FloatType):
        return _toml(text, int, float)
    return text


def _toml(text: str, *types: type) -> Any:
    """Return the text as a value of TOML if that has one of the types, else the text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if type(value) in types else text


def _content(variable: str, path: Path) -> str:
    """Return the text of a file without the end of its last line."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ConfigError(f"{variable}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{variable}: {path}: not a text in UTF-8") from None


def _lay(document: dict[str, Any], key: str, value: Any) -> None:
    table, _, name = key.rpartition(".")
    into = document.setdefault(table, {}) if table else document
    if not isinstance(into, dict):
        raise ConfigError(f"{table}: expected a table, got {into!r}", table)
    into[name] = value


def _has(document: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(document, dict) or name not in document:
            return False
        document = document[name]
    return True


def _line(text: str, key: str) -> int:
    """Return the number of the line where a key or a table begins; 0 if it is not in the text.

    The parser gives no places. So ever longer parts of the text are parsed: the line after the
    longest part without the key is that of the key.
    """
    lines = text.split("\n")
    begin = 1
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # The part ends within a value of several lines.
        if key and _has(document, key):
            return begin
        begin = end + 1
    return 0
