"""Code that runs inside vLLM's own processes.

vLLM's environment has none of our dependencies but PyTorch, NumPy and safetensors, so nothing here imports any other
part of Tinsmith.
"""

from typing import Literal

TransferKind = Literal["file", "ipc", "broadcast"]
"""Ways of full weights into a server: a file in memory, memory of a GPU that both share, or from GPU to GPU."""

DELTA_NET_PARTS = {"in_proj_qkv.q": "in_proj_q", "in_proj_qkv.k": "in_proj_k", "in_proj_qkv.v": "in_proj_v"}
"""Parts of a gated delta net's fused layer with an adapter each, and their names in adapters that vLLM reads."""


def backend_of(kind: TransferKind) -> str:
    """Return the name of our receiver (`receivers.py`) in vLLM's --weight-transfer-config."""
    return f"tinsmith-{kind}"
