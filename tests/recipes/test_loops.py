"""The two recipes without abstractions: a loop of supervised fine-tuning, a loop of reinforcement learning.

Invariant: The cookbook's recipes run unmodified, on one worker and on two, and what should fall or rise in their curves
does. Also: `tests/recipes/test_policies.py`, `tests/recipes/test_preference.py`,
`tests/recipes/test_vlm_classifier.py`.
"""

import pytest

from tests.extent import slow
from tests.recipes.workshop import Outcome, Workshop


def test_sl_loop_learns_the_form_of_an_answer(sl_loop: Outcome) -> None:
    nll = sl_loop.curve("train_mean_nll")

    assert len(nll) == 32
    assert nll[0] > 5
    assert nll[-1] < 0.2  # the price itself cannot be known: about 0.1 is left
    assert [checkpoint["name"] for checkpoint in sl_loop.checkpoints] == ["000010", "000020", "000030", "final"]


# The recipe is the same, and the losses have tests
@pytest.mark.parametrize("loss", ["", *slow("importance_sampling", "cispo", "gspo")])
def test_rl_loop_finds_the_price(taught_model: Workshop, loss: str) -> None:
    """Without an option it takes stable_reinforce, which reads what the sampler recorded, on whichever worker that was.

    How fast it learns depends on how well `sl_loop` has taught the form of an answer, and so on how the processor
    rounds: four of five answers were right after 8 steps with some instruction sets, after 13 with others. 18 steps
    leave a margin.
    """
    options = (f"loss_fn={loss}",) if loss else ()
    sizes = ("batch_size=16", "group_size=8", "max_tokens=16", "learning_rate=3e-4", "max_steps=18")
    outcome = taught_model.completed("rl_loop", f"log_path=rl_loop_{loss}", *options, *sizes)
    reward = outcome.curve("reward/total")

    assert len(reward) == 18
    assert reward[0] < 0.5
    assert sum(reward[-3:]) / 3 > 0.8
