"""vLLM as the sampler: its servers, a client for them, the weights that they serve."""
