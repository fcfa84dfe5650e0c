"""A reload takes over what can change in a running broker, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from shardmq.supervisor.config import Listen, Settings, Shards, Tls
from shardmq.supervisor.reload import RUN_TIME, SETTABLE, flat, nested, reloaded

DOCUMENTED = Path(__file__).parents[2] / "deploy" / "broker.toml"


def test_what_can_change_does_and_the_rest_waits_for_the_next_start() -> None:
    old = Settings()
    new = Settings(
        log_level="debug",
        listen=Listen(amqp_port=7),
        shards=Shards(segment_bytes=1 << 20, disk_free_min_bytes=5),
    )
    merged, changed, later = reloaded(old, new)
    assert sorted(changed) == ["log_level", "shards.disk_free_min_bytes"]
    assert sorted(later) == ["listen.amqp_port", "shards.segment_bytes"]
    assert merged == replace(old, log_level="debug", shards=Shards(disk_free_min_bytes=5))


def test_tls_can_be_another_but_not_begin_or_end() -> None:
    one, other = Settings(tls=Tls(cert="a", key="k")), Settings(tls=Tls(cert="b"))
    assert reloaded(one, other)[0] == other
    for old, new in ((Settings(), one), (one, Settings())):
        merged, changed, later = reloaded(old, new)
        assert merged == old and not changed and "tls.cert" in later


def test_all_keys_that_are_named_exist() -> None:
    keys = flat(Settings())
    assert keys.keys() >= RUN_TIME >= SETTABLE
    assert nested(keys)["shards"]["count"] == "auto"


def test_the_documented_file_marks_those_that_can_change() -> None:
    """A key is marked by (r) in the comment over it.

    The mark also holds for the keys behind it that have no comment.
    """
    marked, table, comment, after_key = set[str](), "", "", False
    for line in DOCUMENTED.read_text().splitlines():
        if line.startswith("["):
            table, comment = line.strip("[]") + ".", ""
        elif line.startswith("#"):
            all_of_table = "(r), all of it" in comment
            comment = line if after_key and not all_of_table else comment + line
            after_key = False
        elif not line:
            comment = ""
        elif match := re.match(r"(\w+) = ", line):
            after_key = True
            if "(r)" in comment:
                marked.add(table + match[1])
    assert marked == RUN_TIME
