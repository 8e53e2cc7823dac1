"""What is in the directories of weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bases import load, random_adapter
from tinsmith.sampling.vllm.weights import WeightFiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_written_as_passes_read_it(dtype: str, family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    base = load(family_dir("qwen3"), dtype=dtype)
    adapter = random_adapter(base)
    files = WeightFiles(base, str(tmp_path))
    written = load_file(files.write(adapter) / "adapter_model.safetensors")
    assert len(written) == len(adapter.leaves())
    for name, pair in adapter.working.items():
        for side, matrix in (("A", pair.a), ("B", pair.b)):
            found = written[f"base_model.model.{base.layout.module_name(name)}.lora_{side}.weight"]
            assert found.dtype == base.dtype
            assert torch.equal(found, matrix.detach())
    files.close()
