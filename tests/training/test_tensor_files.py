"""Files of tensors are read by safetensors, to the last bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.kernels.device import STAGE_BYTES
from tinsmith.models.lora import AdapterForm
from tinsmith.training.tensor_files import AdapterTensors, write_tensors


def adapter_form() -> AdapterForm:
    """Two projections that lie stacked, as keys and values do, and one alone."""
    names = ("layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "layers.0.self_attn.v_proj")
    shapes = [(2, 3), (5, 2), (2, 7), (3, 2), (2, 3), (4, 2)]
    return AdapterForm(names, tuple(torch.Size(shape) for shape in shapes))


def neighbours() -> dict[str, Tensor]:
    """Cut from one memory, which has gaps, in another order than that of their names; more than two stages of it."""
    numbers = torch.randn(STAGE_BYTES // 4 * 2 + 1000, device=DEVICE)
    large, _, small, last = numbers.split([len(numbers) - 100, 30, 20, 50])
    return {"c": large, "b": small.view(4, 5), "a": last.view(5, 10), "d": torch.randn(3, device=DEVICE)}


def moments() -> dict[str, Tensor]:
    """One number of steps under several names."""
    step, numbers = torch.tensor(3.0, device=DEVICE), torch.randn(12, device=DEVICE)
    return {"x.step": step, "x.exp_avg": numbers[:6], "y.step": step, "y.exp_avg": numbers[6:].view(2, 3)}


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        neighbours(),
        moments(),
        {f"layers.{each}.weight{'x' * (each % 9)}": torch.randn(each, 7, device=DEVICE) for each in range(1, 40)},
        {'quoted "ä" \\ name': torch.randn(2, device=DEVICE)},
        {"turned": torch.randn(3, 5, device=DEVICE).t(), "b": torch.randn(0, 4, device=DEVICE)},
        {"half": torch.randn(3, device=DEVICE).bfloat16(), "whole": torch.randn(2, device=DEVICE, requires_grad=True)},
    ],
    ids=["none", "neighbours", "moments", "many", "odd name", "turned", "two precisions"],
)
def test_safetensors_reads_a_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    for name in ("one", "other"):
        write_tensors({key: tensor.detach().clone() for key, tensor in tensors.items()}, tmp_path / name)
    write_tensors(tensors, tmp_path / "ours")
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach().cpu())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()  # wherever they lie


@pytest.mark.parametrize("steps", [None, 3.0])
def test_the_file_of_an_adapter_is_that_of_its_tensors(tmp_path: Path, steps: float | None) -> None:
    form = adapter_form()
    assert form.order != sorted(form.order)
    size = sum(shape.numel() for shape in form.shapes)
    endings = [""] if steps is None else [".exp_avg", ".exp_avg_sq"]
    buffers = {ending: torch.randn(size, device=DEVICE) for ending in endings}
    tensors = AdapterTensors(form, buffers, None if steps is None else torch.tensor(steps, device=DEVICE))
    for _ in range(2):  # the second time its header is known
        write_tensors(tensors, tmp_path / "file")
        found = load_file(tmp_path / "file")
        assert found.keys() == tensors.keys()
        assert len(found) == len(form.shapes) * (1 if steps is None else 3)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in tensors.items())
    for ending, flat in buffers.items():
        for name, part in form.named(flat).items():
            assert torch.equal(found[name + ending], part.cpu())


def test_moments_before_the_first_step_are_an_empty_file(tmp_path: Path) -> None:
    write_tensors(AdapterTensors(adapter_form(), {}), tmp_path / "file")
    assert load_file(tmp_path / "file") == {}
