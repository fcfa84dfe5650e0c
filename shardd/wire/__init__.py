"""The shard's published interface: what front doors, the controller and shards say to each other, and its bytes."""
