"""What fits into the memory of a device: asked by `tinsmith plan`, `doctor` and `serve` before weights are loaded."""
