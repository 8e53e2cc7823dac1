"""The memory budget of a device: `tinsmith plan`, `doctor` and `serve` read it before weights are loaded."""
