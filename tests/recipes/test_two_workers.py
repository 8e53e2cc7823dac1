"""Two recipes, unmodified, on a server with two workers: one samples and trains with what was recorded, the other trains on pictures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.conftest import CACHE
from tests.recipes.test_loops import RL_OPTIONS
from tests.recipes.workshop import BASE_MODEL, CHAT_MODEL, Workshop
from tests.running import serving


@pytest.fixture(scope="module")
def two_workers(directory: Path, taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A server with the taught base model, and a random one for pictures."""
    place = tmp_path_factory.mktemp("two-workers")
    models = ["--base-model", f"{BASE_MODEL}={taught}", "--base-model", f"{CHAT_MODEL}={directory / CHAT_MODEL}"]
    with serving(place, *models, *CACHE, "--device", "cpu", "--workers", "2") as server:
        server.wait_for_health()
        yield Workshop(directory, server.url, place / "data")
        for rank in range(2):  # both have sampled
            server.wait_for_log(f"worker {rank}: samples: ")
        assert "Traceback" not in server.log.read_text()


def test_rl_loop_comes_closer_to_the_price(two_workers: Workshop) -> None:
    """With the loss that reads what the sampler recorded, on whichever worker that was."""
    outcome = two_workers.completed("rl_loop", "log_path=rl_loop_two_workers", "max_steps=8", *RL_OPTIONS)
    reward = outcome.curve("reward/total")

    assert len(reward) == 8
    assert reward[0] < 0.5
    assert sum(reward[-3:]) / 3 > reward[0] + 0.25


@pytest.mark.slow  # tests/distributed compares training on pictures with that of one worker, value by value
def test_vlm_classifier_learns(two_workers: Workshop) -> None:
    outcome = two_workers.completed(
        *("vlm_classifier.train", "experiment_dir=vlm_classifier_two_workers", f"model_name={CHAT_MODEL}"),
        *("num_epochs=1", "batch_size=50", "learning_rate=3e-3", "max_tokens=16"),
        *("save_every=0", "eval_every=1000", "n_eval=20"),
    )
    nll = outcome.curve("train_mean_nll")

    assert nll[0] > 5
    assert nll[-1] < 1
