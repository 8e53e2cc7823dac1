"""The two recipes without abstractions: a loop of supervised fine-tuning, a loop of reinforcement learning."""

import pytest

from tests.recipes.workshop import RL_LOOP_OPTIONS, Outcome, Workshop


def check_that_the_reward_rises(outcome: Outcome) -> None:
    """From guessing to knowing."""
    reward = outcome.curve("reward/total")
    assert len(reward) == 12
    assert reward[0] < 0.5
    assert sum(reward[-3:]) / 3 > 0.85


def test_sl_loop_learns_the_form_of_an_answer(sl_loop: Outcome) -> None:
    nll = sl_loop.curve("train_mean_nll")

    assert len(nll) == 32
    assert nll[0] > 5
    assert nll[-1] < 0.2  # the price itself cannot be known: about 0.1 is left
    assert [checkpoint["name"] for checkpoint in sl_loop.checkpoints] == ["000010", "000020", "000030", "final"]


def test_rl_loop_finds_the_price(rl_loop: Outcome) -> None:
    check_that_the_reward_rises(rl_loop)


@pytest.mark.parametrize("loss", ["cispo", "gspo"])
def test_rl_loop_finds_the_price_with_other_losses(taught_model: Workshop, loss: str) -> None:
    outcome = taught_model.completed("rl_loop", f"log_path=rl_loop_{loss}", f"loss_fn={loss}", "max_steps=12", *RL_LOOP_OPTIONS)

    check_that_the_reward_rises(outcome)


def test_rl_loop_is_told_which_loss_to_take_instead(taught_model: Workshop) -> None:
    outcome = taught_model.run("rl_loop", "log_path=rl_loop_default", "max_steps=1", *RL_LOOP_OPTIONS)

    assert outcome.exit_code != 0
    assert "stable_reinforce" in outcome.output
    assert "importance_sampling" in outcome.output.splitlines()[-1]
