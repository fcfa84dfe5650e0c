"""Changing the number of shards of a stream exchange."""
