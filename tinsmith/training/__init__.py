"""From a packed batch to log-probabilities, losses, gradients and optimizer steps."""
