"""The recipe that trains an image classifier, with both evaluators, and the one that evaluates its last checkpoint."""

import re

import pytest

from tests.extent import amount
from tests.recipes.workshop import Outcome, Workshop

SCANS_TO_TEST = 297
EPOCHS = amount(4, 12)
RIGHT = amount(0.3, 0.8)
"""The least share of held-out scans that it names then; guesses name a tenth. It was 0.49 to 0.75, and 0.92."""
LEFT = amount(0.15, 0.08)
"""The most nats a token, likewise; who knows the names and does not look needs 0.18. It was 0.07 to 0.1, and 0.02."""


@pytest.fixture(scope="module")
def training(random_models: Workshop) -> Outcome:
    """A random model learns to name handwritten digits; the recipe mirrors every second scan that it trains on."""
    return random_models.completed(
        *("vlm_classifier.train", "experiment_dir=vlm_classifier"),
        *(f"num_epochs={EPOCHS}", "batch_size=50", "learning_rate=3e-3", "max_tokens=16"),
        *("save_every=0", "eval_every=70", f"n_eval={SCANS_TO_TEST}"),
    )


def test_curves(training: Outcome) -> None:
    train_nll, test_nll, accuracy = (training.curve(metric) for metric in ("train_mean_nll", "test/nll", "accuracy"))

    assert train_nll[0] > 5
    assert sum(train_nll[-5:]) / 5 < LEFT
    assert test_nll[0] > 5
    assert test_nll[-1] < LEFT
    assert accuracy[0] < 0.2
    assert accuracy[-1] >= RIGHT


def test_evaluation_by_path(random_models: Workshop, training: Outcome) -> None:
    path = f"model_path={training.sampler_path}"
    evaluation = random_models.completed("vlm_classifier.eval", path, "dataset=caltech101", "max_tokens=16")

    found = re.search(r"Metrics = \{'accuracy': ([\d.]+)\}", evaluation.output)
    assert found is not None, evaluation.output[-3000:]
    assert float(found[1]) >= RIGHT
