"""The front door's settings: wrong ones are refused by name, right ones have their defaults."""

import json
import os
from typing import Any

import pytest

from shardmq.broker.shared.config import BrokerConfig, ConfigError, read_config

LEAST: dict[str, Any] = {
    "runtime_dir": "/run/shardmq",
    "door": 0,
    "shards": [0, 1],
    "listen_fds": [3],
    "boot": "b1",
}


def read(**changes: Any) -> BrokerConfig:
    return read_config(["--config", json.dumps(LEAST | changes)])


def test_what_is_not_given_has_its_documented_default() -> None:
    config = read()
    assert (config.heartbeat_s, config.frame_bytes_max, config.channels_max) == (60, 131072, 2047)
    assert (config.message_bytes_max, config.handshake_timeout_s, config.tick_us) == (
        134217728,
        10,
        300,
    )
    assert config.loopback_users == {"guest"}


def test_a_front_door_is_alone_if_no_node_has_another() -> None:
    keys = {"public": "p" * 40, "secret": "s" * 40}
    assert read().is_alone
    assert not read(doors=2).is_alone
    assert not read(session_keys=keys).is_alone


def test_both_spellings_of_the_argument_are_read() -> None:
    assert read_config([f"--config={json.dumps(LEAST)}"]) == read()


def test_the_settings_are_read_from_a_descriptor() -> None:
    fd, to = os.pipe()
    with open(to, "w") as file:
        json.dump(LEAST, file)
    assert read_config(["--config", f"fd:{fd}"]) == read()


@pytest.mark.parametrize(
    "change",
    [
        {"door": -1},
        {"shards": 0},
        {"frame_bytes_max": 100},
        {"channels_max": 70000},
        {"handshake_timeout_s": 0},
        {"log_level": "loud"},
        {"listen_fds": "3"},
        {"heartbeats": 5},
    ],
)
def test_a_wrong_setting_is_refused_and_named(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        read(**change)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config"],
        ["--config", "{"],
        ["--config", "fd:x"],
        ["--config", "fd:987654"],
        ["--verbose", "{}"],
        ["--config", "{}"],
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_config(arguments)
