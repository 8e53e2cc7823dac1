"""Kernels of ours that start while the one before still runs, where the GPU can do that (Hopper and later).

Launching a kernel and filling the GPU with it takes a microsecond or two, in which nothing is computed: much, where hundreds of kernels
take a few microseconds each. A kernel that overlaps ("programmatic dependent launch", in CUDA's words) first does what depends on no kernel
ahead. Then it waits until all that was launched before it is done and can be seen. Each of its programs must wait so before it reads what
other kernels write, and before it writes: then whatever reads the results finds the order of the stream.

What may be read before the wait is only what nothing has written since the last kernel that began in the stream's order, as all but ours
do: the weights of a base model, say, but no tensor that was computed just now.
"""

from functools import cache
from typing import Any

import torch

OLDEST_CUDA = 13
"""Oldest CUDA version of PyTorch's build whose drivers can capture such kernels in graphs; before CUDA 12.3 they cannot."""
MOST_ROWS = 512
"""Rows of a decoding step, at most. Kernels of more rows take so long that an early start gains nothing: passes of training and of prompts
are computed in the plain order of the stream."""


def overlapping(device: torch.device, rows: int) -> dict[str, Any]:
    """Options of a kernel that computes so many rows. Its parameter `OVERLAPS` says that it must call `gdc_wait`."""
    overlaps = rows <= MOST_ROWS and device.type == "cuda" and _can_overlap(device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    version = torch.version.cuda  # None for AMD's GPUs, for which Triton has no such kernels
    return version is not None and int(version.split(".")[0]) >= OLDEST_CUDA and torch.cuda.get_device_capability(device) >= (9, 0)
