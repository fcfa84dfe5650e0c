"""The groups of consumers of virtual queues, and the shard queues that each consumer owns."""
