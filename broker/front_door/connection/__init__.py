"""One client's connection: its bytes, its channels, its work."""
