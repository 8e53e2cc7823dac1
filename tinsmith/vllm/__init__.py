"""vLLM as the sampler: servers, their client, the weights that they serve, and a `Sampler` and a `Renderer` on top of them."""

FILE_BACKEND = "tinsmith-file"
"""Name of our weight transfer engine inside of vLLM (`worker.py`)."""
