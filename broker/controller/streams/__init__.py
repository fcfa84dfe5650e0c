"""What the controller knows of streams: their ranges, those that ended, their reader."""
