"""How much of the tests runs: `make test`, which every change needs, or `make test-all` (TINSMITH_TEST_ALL).

Tests and parameters marked `slow` are left out of `make test`. What they test beyond those that stay is said where they
are marked.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

EVERYTHING = os.environ.get("TINSMITH_TEST_ALL") == "1"
"""Whether all there is was asked for."""

USUAL_FAMILIES = {"llama", "qwen3", "qwen3_vl", "qwen3_5", "qwen3_moe", "qwen3_5_moe", "gpt_oss", "gemma2", "olmo"}
"""Model families that `make test` covers: two of text, two with images (one hybrid), two that transformers computes,
and three mixtures of experts (one hybrid with images, one with sinks and windows).

The others have the same parts in other arrangements.
"""


def amount(usual: T, everything: T) -> T:
    """How much a test does: requests, examples, packings."""
    return everything if EVERYTHING else usual


def slow(*values: Any) -> list[Any]:
    """Parameters that are left out of `make test`; a tuple stands for several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def families(names: Iterable[str]) -> list[Any]:
    """These model families as parameters; those that are not `USUAL_FAMILIES` are left out of `make test`."""
    return [name if name in USUAL_FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in names]
