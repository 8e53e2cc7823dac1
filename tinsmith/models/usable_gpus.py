"""`python -m tinsmith.models.usable_gpus` prints how many GPUs PyTorch can use here.

The engine, which has no torch, runs it as a process of its own: what CUDA starts in a process is not to be there when that starts others.
"""

from itertools import takewhile

import torch


def usable_gpus() -> int:
    """Count the GPUs that this PyTorch can use: none if it is built without CUDA, or for a newer driver.

    PyTorch counts what the driver lists. CUDA may show fewer, of cards that are divided for example.
    """
    if not torch.cuda.is_available():
        return 0
    return len(list(takewhile(_is_shown, range(torch.cuda.device_count()))))


def _is_shown(number: int) -> bool:
    try:
        torch.cuda.get_device_properties(number)
    except (RuntimeError, AssertionError):
        return False
    return True


if __name__ == "__main__":
    print(usable_gpus())
