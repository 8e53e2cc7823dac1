"""What runs inside vLLM's own processes.

vLLM's environment has none of our dependencies but PyTorch, NumPy and safetensors, so nothing here imports any other part of Tinsmith.
"""

from typing import Literal

TransferKind = Literal["file", "ipc", "broadcast"]
"""How full weights get into a server: as a file in memory, as memory of a GPU that both share, or from GPU to GPU."""


def backend_of(kind: TransferKind) -> str:
    """What vLLM calls our receiver of this kind (`receivers.py`), as its --weight-transfer-config takes it."""
    return f"tinsmith-{kind}"
