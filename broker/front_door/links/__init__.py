"""The front door's connections to the controller and to the shards."""
