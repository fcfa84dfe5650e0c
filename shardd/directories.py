"""Name the directories of a shard, a vhost and a stream below a data directory."""

from __future__ import annotations

try:  # hashlib maps OpenSSL, which is 3.5 MB in each shard
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha1


def shard_directory(data_dir: str, shard: int) -> str:
    return f"{data_dir}/shard-{shard:02d}"


def held_path(directory: str) -> str:
    """Return the file beside the directory of a shard that says of which store it is a copy."""
    return f"{directory}.copy"


def vhost_directory(directory: str, vhost: str) -> str:
    """Return the directory of a vhost; `directory` is the one of the shard."""
    return f"{directory}/{sha1(vhost.encode()).hexdigest()}"


def stream_directory(vhost_directory: str, queue_id: int) -> str:
    """Return the directory of a stream, by the id of its queue, which is never used again."""
    return f"{vhost_directory}/stream.{queue_id}"
