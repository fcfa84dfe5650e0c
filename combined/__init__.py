"""A front door and a shard in one process: with `front_doors.count = 0`, each core has one."""
