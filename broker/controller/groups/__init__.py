"""Who consumes a stream exchange as one virtual queue, and who owns which part."""
