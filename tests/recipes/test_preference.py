"""Direct preference optimization: a loss that the client computes, with a frozen snapshot as its reference."""

import math

import pytest

from tests.recipes.workshop import Workshop


def test_dpo_prefers_what_is_chosen(taught_model: Workshop) -> None:
    outcome = taught_model.completed(
        *("preference.dpo.train", "log_path=dpo"),
        *("batch_size=32", "learning_rate=2e-3", "max_steps=12"),
    )
    loss, accuracy = outcome.curve("dpo_loss"), outcome.curve("accuracy")

    assert loss[0] == pytest.approx(math.log(2), abs=1e-3)  # training starts at the reference
    assert loss[-1] < 0.55
    assert accuracy[-1] > 0.9
    assert outcome.curve("margin")[-1] > 0.3
