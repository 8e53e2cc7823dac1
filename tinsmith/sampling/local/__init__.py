"""The local sampler: continuous batching over the training weights, with a paged cache of keys and values."""
