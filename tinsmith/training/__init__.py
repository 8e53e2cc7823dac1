"""Training: packed batches to log-probabilities, losses, gradients and optimizer steps."""
