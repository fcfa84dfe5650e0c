"""The controller's connections to front doors and shards."""
