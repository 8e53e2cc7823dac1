"""Threads of small and large passes."""

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.models.base import BaseModel
from tinsmith.models.threads import SMALL_PASS, SMALL_STEP, threads_for, threads_for_step


@pytest.mark.skipif(DEVICE != "cpu", reason="threads only matter on a CPU")
@pytest.mark.parametrize(("size", "threads"), [(0.5, 1), (2.0, 2)])
def test_a_small_pass_takes_one_thread_and_leaves_the_number_as_it_was(text_base: BaseModel, size: float, threads: int) -> None:
    weights = sum(target.in_features * target.out_features for target in text_base.layout.targets.values())
    with threads_for(text_base, int(size * SMALL_PASS / weights)):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="threads only matter on a CPU")
def test_a_small_pass_that_fails_leaves_the_number_as_it_was(text_base: BaseModel) -> None:
    with pytest.raises(RuntimeError), threads_for(text_base, 1):
        raise RuntimeError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL_STEP - 1, 1), (SMALL_STEP, 2)])
def test_small_optimizer_steps_take_one_thread(parameters: int, threads: int) -> None:
    with threads_for_step(parameters):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2
