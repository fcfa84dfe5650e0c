"""The other nodes of a cluster: streams to them, and who leads."""
