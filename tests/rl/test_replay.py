"""Learning from samples of a mixture of experts: the gap between sampler and trainer, with router replay."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.rl.test_learner import group, trajectory
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith_rl.config import TrainingSection
from tinsmith_rl.groups import Group
from tinsmith_rl.learner import Learner
from tinsmith_rl.sequences import text_sequence
from tinsmith_rl.trajectory import Turn


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.TrainingClient]:
    """A model of a mixture in half precision, where rounding sends some tokens to other experts."""
    directory = tmp_path_factory.mktemp("mixture")
    write_tiny_model("qwen3-moe", directory / "tiny")
    options = ["--base-model", f"tiny={directory / 'tiny'}", "--kv-cache-gib", "0.1", "--dtype", "bfloat16"]
    with serving(directory, *options) as server:
        server.wait_for_health()
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        yield service.create_lora_training_client(base_model="tiny", rank=8, seed=0).result()


def played(client: tinker.TrainingClient, reward: float | None) -> list[Group]:
    """Groups of samples with this reward, or one of their own."""
    sampler, groups = client.save_weights_and_get_sampling_client().result(), []
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(0, 1500, 30).tolist()
        asked = sampler.sample(
            types.ModelInput.from_ints(prompt), 4, types.SamplingParams(max_tokens=40, stop=[], seed=seed)
        )
        rows = [
            Turn(
                text_sequence(prompt),
                np.array(each.tokens, np.int32),
                np.array(each.logprobs, np.float32),
                number % 2 if reward is None else reward,
            )
            for number, each in enumerate(asked.result().sequences)
        ]
        groups.append(group(*(trajectory(row) for row in rows)))
    return groups


def test_the_trainer_follows_the_samplers_experts_and_measures_what_that_spares(client: tinker.TrainingClient) -> None:
    learner = Learner(client, TrainingSection(advantages="rloo", learning_rate=1e-4), None)
    first, second = (asyncio.run(learner.learn(played(client, None), step))[0] for step in (0, 1))
    for metrics in (first, second):
        assert metrics["replayed_tokens"] == 1.0
        assert metrics["kl_sampler_trainer"] < 2e-3
        assert metrics["gap_sampler_trainer"] < 0.5
    assert "kl_sampler_trainer_free" not in first
    # How many tokens rounding sends to other experts depends on the processor
    assert 0 < second["kl_sampler_trainer_free"] != second["kl_sampler_trainer"]
    assert second["gap_sampler_trainer_free"] > 0


def test_log_probabilities_that_are_only_measured_follow_them_too(client: tinker.TrainingClient) -> None:
    """Where nothing is learnt, and where corrections compare with the trainer before the loss does."""
    learner = Learner(client, TrainingSection(advantages="rloo"), None)
    metrics, _ = asyncio.run(learner.learn(played(client, 1.0), 0))
    assert metrics["optimizer_steps"] == 0.0
    assert metrics["gap_sampler_trainer"] < 0.5
    capped = Learner(client, TrainingSection(advantages="rloo", tis_cap=1e6), None)
    assert asyncio.run(capped.learn(played(client, None), 0))[0]["tis_weight"] == pytest.approx(1.0, abs=0.02)
