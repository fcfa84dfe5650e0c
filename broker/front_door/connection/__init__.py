"""The connection of a client: its bytes, its channels and its work."""
