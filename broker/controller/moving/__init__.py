"""Moves of queues with their messages from one shard to another."""
