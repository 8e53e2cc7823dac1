"""Training on several GPUs: collectives, all-reduced gradients, sharded weights, and sequence parallelism."""
