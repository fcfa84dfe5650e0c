"""Passwords in URIs are in no file of a broker that has a key, and without it shovels say why."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from shardmq.broker.model.changes import ParameterPut
from shardmq.broker.model.federation import UPSTREAM
from tests.bridges.moving import call, fill, set_shovel, shovel, taken, wait_for_state
from tests.definitions.test_log import write
from tests.definitions.test_secrets import begun
from tests.support.real_broker import RealBroker

PASSWORD = "hunter2-of-the-shovel"


def holders(*directories: Path) -> list[Path]:
    """Return the files that have the password in them."""
    files = (path for directory in directories for path in directory.rglob("*") if path.is_file())
    return [path for path in files if PASSWORD.encode() in path.read_bytes()]


@pytest.mark.broker
@pytest.mark.row("J5", "J9")
def test_a_password_is_in_no_file_of_a_broker_with_a_key(tmp_path: Path) -> None:
    keys, data = tmp_path / "keys", tmp_path / "data"
    keys.write_bytes(Fernet.generate_key())
    definitions, catalog = begun(data)
    upstream = {"uri": f"amqp://mover:{PASSWORD}@127.0.0.1:1"}
    write(definitions, catalog, [ParameterPut("/", UPSTREAM, "u", upstream)])
    definitions.close()
    assert holders(data), "what is searched for is found"
    broker = RealBroker(data, shards=1, environment={"SHARDMQ_SECRETS_KEY_FILE": str(keys)})
    try:
        assert call(broker, "GET", "parameters/federation-upstream")[1][0]["value"] == upstream
        assert call(broker, "PUT", "users/mover", {"password": PASSWORD, "tags": ""})[0] == 201
        rights = dict.fromkeys(("configure", "write", "read"), ".*")
        assert call(broker, "PUT", "permissions/%2F/mover", rights)[0] == 201
        fill(broker, "from", [b"1"])
        here = f"amqp://mover:{PASSWORD}@127.0.0.1:{broker.port}"
        set_shovel(broker, "s", src_uri=here, src_queue="from", dest_queue="to")
        assert [body for _, body in taken(broker, "to", 1)] == [b"1"]
        assert shovel(broker, "s")["src_uri"] == f"amqp://127.0.0.1:{broker.port}"
        assert call(broker, "POST", "snapshots", {"directory": f"{tmp_path}/copy"})[0] == 200
        assert holders(data, tmp_path / "copy") == []
        broker.stop()

        keys.write_bytes(Fernet.generate_key())
        broker.restart()
        assert "no key for it" in wait_for_state(broker, "s", "terminated")["reason"]
        fill(broker, "from", [b"2"])  # all else works
        broker.stop()
        text = broker.log_path.read_text()
        assert text.count("no key in secrets.key_file") == 1
        assert PASSWORD not in text
    finally:
        broker.clean_up()
