"""Recipes that train on what the model itself has sampled, beside one that does not move: a base to stay near, a
teacher to imitate."""

import pytest

from tests.recipes.workshop import BASE_MODEL, Outcome, Workshop

COMMON_OPTIONS = (
    "max_tokens=16",
    *("kl_penalty_coef=0.05", f"kl_reference_config.base_model={BASE_MODEL}"),
    # The recipe takes options of its data only if all of them are given.
    "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    *("dataset_builder.group_size=8", "dataset_builder.convo_prefix=None"),
    *(f"dataset_builder.model_name_for_tokenizer={BASE_MODEL}", "dataset_builder.renderer_name=role_colon"),
)

RL_BASIC_OPTIONS = (*COMMON_OPTIONS, "learning_rate=5e-4", "max_steps=12", "dataset_builder.batch_size=16")

ASYNCHRONOUS = (
    *("async_config.max_steps_off_policy=1", "async_config.groups_per_batch=8"),
    *("learning_rate=7e-4", "max_steps=8", "dataset_builder.batch_size=8"),
)
"""Its loss is stable_reinforce."""


def check_that_it_learns_away_from_the_base(outcome: Outcome, steps: int = 12) -> None:
    """The reward rises, and with it the distance from the base model, which is zero at first."""
    correct, distance = outcome.curve("env/all/correct"), outcome.curve("kl_policy_base")
    assert len(correct) == steps
    assert correct[0] < 0.4
    assert sum(correct[-3:]) / 3 > correct[0] + 0.4
    assert distance[0] == pytest.approx(0, abs=1e-4)
    assert distance[-1] > 0.02


@pytest.fixture(scope="module")
def synchronous(taught_model: Workshop) -> Outcome:
    """Reinforcement learning step by step; what it ends with knows the price."""
    return taught_model.completed(
        "rl_basic", "log_path=rl_sync", "compute_post_kl=True", "eval_every=11", *RL_BASIC_OPTIONS
    )


def test_synchronous_rl_with_a_kl_penalty(synchronous: Outcome) -> None:
    check_that_it_learns_away_from_the_base(synchronous)
    # The sampler's log-probabilities are the trainer's
    assert max(map(abs, synchronous.curve("optim/kl_sample_train_v1"))) < 1e-3
    held_out = synchronous.curve("test/env/all/correct")
    assert held_out[-1] > held_out[0] + 0.3


def test_asynchronous_rl_with_a_kl_penalty(taught_model: Workshop) -> None:
    outcome = taught_model.completed("rl_basic", "log_path=rl_async", *ASYNCHRONOUS, *COMMON_OPTIONS)

    check_that_it_learns_away_from_the_base(outcome, steps=8)
    assert max(outcome.curve("async/staleness_max")) == 1


def test_a_refused_loss_ends_a_recipe_that_streams_minibatches(taught_model: Workshop) -> None:
    streaming = ("stream_minibatch_config.groups_per_batch=16", "stream_minibatch_config.num_minibatches=2")
    outcome = taught_model.run("rl_basic", "log_path=rl_refused", "loss_fn=gspo", *streaming, *RL_BASIC_OPTIONS)

    assert outcome.exit_code != 0
    assert "loss_fn_inputs has no sequence_ratio_mask; gspo needs" in outcome.output


def test_distillation_on_policy_approaches_the_teacher(taught_model: Workshop, synchronous: Outcome) -> None:
    outcome = taught_model.completed(
        *("distillation.on_policy_distillation", "log_path=distillation", f"teacher_model={BASE_MODEL}"),
        *(f"teacher_checkpoint={synchronous.sampler_path}", "dataset=deepmath", "max_tokens=16", "lora_rank=32"),
        *("groups_per_batch=16", "group_size=4", "learning_rate=7e-4", "max_steps=10"),
    )
    distance = outcome.curve("teacher_kl")

    assert len(distance) == 10
    assert distance[0] > 0.04
    assert sum(distance[-3:]) / 3 < distance[0] / 3
