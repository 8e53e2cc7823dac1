"""Random numbers of sampling as a pure function of (seed, sample, position): reproducible whatever runs beside a request.

The generator is SplitMix64 (Steele, Lea and Flood, 2014) used as a hash of the three, vectorised over sequences.
"""

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], samples: NDArray[np.uint64], positions: NDArray[np.uint64], count: int = 1) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each (seed, sample, position) of the arrays [n]; returns [count, n]."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GAMMA)
        state = _mix(state ^ _mix(samples + _GAMMA * np.uint64(2)))
        state = _mix(state ^ _mix(positions + _GAMMA * np.uint64(3)))
        state = _mix(state + _GAMMA * np.arange(count, dtype=np.uint64)[:, np.newaxis])
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
