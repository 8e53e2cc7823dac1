"""Recipes as a user starts them, with nothing but their sizes changed: default model, default renderer, default loss.

What they learn is not looked at here: a step or two of a model with random weights.
"""

import pytest

from tests.extent import slow
from tests.recipes.workshop import Workshop

TRAINING = {
    "sl_basic": ("max_steps=2",),
    "chat_sl.train": ("batch_size=32", "max_steps=2"),
    "math_rl.train": ("groups_per_batch=4", "max_steps=2"),
    "preference.shorter.train": ("batch_size=4", "group_size=4", "max_tokens=16", "max_steps=2"),
    "multiplayer_rl.guess_number.train": ("batch_size=4", "group_size=2", "max_tokens=8", "max_steps=2"),
    "multiplayer_rl.twenty_questions.train": (
        "batch_size=2",
        "group_size=2",
        "max_tokens=8",
        "eval_every=0",
        "max_steps=1",
    ),
}
"""Options by recipe."""
LONGEST = "multiplayer_rl.guess_number.train"
"""It plays as `twenty_questions` does, for ten times as long."""


@pytest.mark.parametrize("recipe", [*(recipe for recipe in TRAINING if recipe != LONGEST), *slow(LONGEST)])
def test_a_recipe_trains_its_default_model(random_models: Workshop, recipe: str) -> None:
    outcome = random_models.completed(recipe, f"log_path={recipe}", *TRAINING[recipe])

    steps = int(TRAINING[recipe][-1].removeprefix("max_steps="))
    assert len(outcome.curve("progress/batch") or outcome.curve("train_mean_nll")) == steps
    assert outcome.checkpoints


def test_reasoning_is_scored_with_the_default_model(random_models: Workshop) -> None:
    """`true_thinking_score` asks for log-probabilities of answers behind cut reasoning; it reports problems that fail
    and goes on."""
    outcome = random_models.completed(
        "true_thinking_score.analyze", "dataset=gsm8k", "n_problems=2", "max_tokens=48", "log_path=true_thinking_score"
    )
    assert "Problems: 2/2 succeeded" in outcome.output
    assert "Failed" not in outcome.output
