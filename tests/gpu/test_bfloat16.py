"""bfloat16 on a GPU, on models as wide as published ones: the figures of `benchmarks/gpu/exactness.py`, held to their
limits.

Invariant: On a GPU: float32 keeps its bounds; bfloat16 is as exact as that of transformers, layer by layer and in the
first 30 steps of a training curve, and at most twice as far off after 200; sampler and trainer agree on a model that
has learned (`make test-gpu`, which runs the numerical tests of all rooms).
"""

import pytest

from benchmarks.gpu.exactness import compare_kind, curve, rule, sampler_against_trainer
from tests.bases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="these models are too large for a CPU")

AS_EXACT = 1.1
"""Errors of ours over those of transformers in bfloat16, in the median."""


@pytest.mark.parametrize("kind", ["attention", "gated_attention", "delta_net"])
def test_layers_are_as_exact_as_those_of_transformers(kind: str) -> None:
    found = compare_kind(kind)
    ratios = {what: found[f"{what}_ratio"] for what in ("hidden", "logprob", "gradient")}
    assert max(ratios.values()) <= AS_EXACT, found


def test_the_delta_rule_is_as_exact_as_that_of_transformers() -> None:
    found = rule()
    parts = ("out", "query", "key", "value", "beta")
    assert max(found[f"{part}_ours"] / found[f"{part}_transformers"] for part in parts) <= AS_EXACT, found


def test_a_training_curve_drifts_no_further_than_that_of_transformers() -> None:
    """In its first 30 steps.

    Over 200, training enlarges what any rounding has made: one seed gave 1.76, four on a CPU 0.77 to 0.98.
    """
    assert (found := curve())["early_ratio"] <= AS_EXACT, found
    assert found["drift_ratio"] <= 2, found


@pytest.mark.parametrize("hybrid", [False, True])
def test_sampler_and_trainer_agree_on_a_model_that_has_learned(hybrid: bool) -> None:
    found = sampler_against_trainer(hybrid, seconds=60)
    for model in ("", "adapter_"):
        assert found[f"{model}held_out_nats"] < 2, found
        assert found[f"{model}mean_difference"] <= 0.01, found
