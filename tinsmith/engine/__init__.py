"""The process that owns the weights: takes commands from the log in order, merges them, and samples in between."""
