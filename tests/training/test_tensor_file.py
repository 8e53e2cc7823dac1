"""Files of tensors that are written piece by piece are those of safetensors, byte for byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinsmith.training.tensor_file import TensorFile

SHAPES: list[dict[str, list[int]]] = [
    {},
    {"one": []},
    {"b.step": [], "layers.10.w": [2, 3], "layers.2.w": [3], "b.exp_avg_sq": [2], "b.exp_avg": [2], "a": [1, 1, 4], "Z": [5]},
    {f"layers.{number}.mlp.weight{'x' * (number % 9)}": [number, 7] for number in range(1, 40)},
    {'quoted "ä" \\ name': [2]},
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_header_and_positions_are_those_of_safetensors(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "file")
    found = TensorFile.of(shapes)
    content = bytearray((tmp_path / "file").stat().st_size)
    content[: len(found.header)] = found.header
    for name, tensor in tensors.items():
        content[found.starts[name] : found.starts[name] + tensor.nbytes] = tensor.numpy().tobytes()
    assert bytes(content) == (tmp_path / "file").read_bytes()
