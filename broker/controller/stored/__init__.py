"""What exists, as files: the definitions of a data directory, out and in."""
