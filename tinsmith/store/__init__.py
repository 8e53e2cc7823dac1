"""Storage that survives the death of a process: the command log, image blobs, sessions and models."""
