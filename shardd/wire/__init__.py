"""Define the messages, and their bytes, between front doors, controller and shards."""
