"""Random numbers of sampling as a pure function of (seed, sample, position): reproducible whatever runs beside a request.

The generator is SplitMix64 (Steele, Lea and Flood, 2014) used as a hash of the three. It computes with integers of 64 bits, so every device
gives the same numbers, bit for bit. PyTorch has signed ones only, whose bits are taken as those of unsigned ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15


def as_bits(numbers: Sequence[int] | np.ndarray) -> Tensor:
    """Numbers [n] of 0 to 2**64 - 1 as int64 with the same bits, on the CPU."""
    return torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64))


def uniforms(seeds: Tensor, samples: Tensor, positions: Tensor, count: int = 1) -> Tensor:
    """`count` numbers in [0, 1) for each (seed, sample, position), all [n] int64; returns [count, n] float64."""
    state = _mix(seeds + _signed(_GAMMA))
    state = _mix(state ^ _mix(samples + _signed(2 * _GAMMA)))
    state = _mix(state ^ _mix(positions + _signed(3 * _GAMMA)))
    steps = torch.arange(count, device=state.device).unsqueeze(1) * _signed(_GAMMA)
    state = _mix(state + steps)  # [count, n]
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Z shifted to the right, with zeros coming in: PyTorch's own shift repeats the sign."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)


def _signed(bits: int) -> int:
    """The int64 with these bits; what is beyond 64 of them is dropped."""
    return (bits + 2**63) % 2**64 - 2**63
