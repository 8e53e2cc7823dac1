"""Training on several GPUs: all-reduced gradients, sharded weights, and sequence parallelism."""
