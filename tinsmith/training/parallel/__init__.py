"""Training on several GPUs: collectives between workers, all-reduced gradients, sharded weights, and sequence parallelism."""
