"""vLLM as the sampler: servers, their client, the weights that they serve, and a `Sampler` on top of them."""

from typing import Literal

TransferKind = Literal["file", "ipc", "broadcast"]
"""How full weights get into a server: as a file in memory, as memory of a GPU that both share, or from GPU to GPU."""


def backend_of(kind: TransferKind) -> str:
    """What vLLM calls our receiver of this kind (`receivers.py`), as its --weight-transfer-config takes it."""
    return f"tinsmith-{kind}"
